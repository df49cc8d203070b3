"""Which rows of the plain batch read for others: those whose tokens are the same so far.

    a follows nobody, and reads        7 8 | 4 1
    b follows a, and reads nothing     7 8 | 4 1     it is drawn from a's logits
    c followed a until it sampled 5    7 8 | 4 5     it has copied a's keys and values, and reads

A row is named by the birth of its sample, because rows move when others end.
"""

import numpy as np

from titan_rl.actors.vllm.plain_model import PlainModel

READS = -1  # birth that a row follows which reads itself


class Followers:
    def __init__(self, births: np.ndarray, hashes: np.ndarray, vocabulary: int, model: PlainModel) -> None:
        self.follows = np.full(len(births), READS, np.int64)  # the birth of the row that reads for this one
        self._births, self._hashes, self._vocabulary, self._model = births, hashes, vocabulary, model

    def among(self, rows: np.ndarray) -> np.ndarray:
        """Return those of these rows that follow others, in the order in which their samples began."""
        rows = rows[self.follows[rows] != READS]
        return rows[np.argsort(self._births[rows])]

    def followed(self, rows: np.ndarray, alive: np.ndarray) -> np.ndarray:
        """Return the row that each of these follows, of those that are alive."""
        births = self._births[alive]
        order = np.argsort(births)
        return alive[order[np.searchsorted(births, self.follows[rows], sorter=order)]]

    def let_read(self, least: int, alive: np.ndarray) -> None:
        """Let followers read themselves until so many rows do, or all."""
        if len(following := self.among(alive)):
            self._lead(following[: max(0, least - (len(alive) - len(following)))], alive)

    def part(self, tokens: np.ndarray, going: np.ndarray, alive: np.ndarray) -> None:
        """Let those rows follow another one that go on, and followed one that goes or has sampled another of these
        `tokens`: the first of those that sampled the same."""
        if not len(following := self.among(alive)):
            return
        goes = np.zeros(len(tokens), bool)
        goes[going] = True
        following = following[~goes[following]]
        leaders = self.followed(following, alive)
        parted = goes[leaders] | (tokens[following] != tokens[leaders])
        if not parted.any():
            return
        following, leaders = following[parted], leaders[parted]
        alike = leaders * self._vocabulary + tokens[following]
        _, first, nth = np.unique(alike, return_index=True, return_inverse=True)
        leading = following[first]
        self._lead(leading, alive)
        others = np.delete(np.arange(len(following)), first)
        self.follows[following[others]] = self._births[leading[nth[others]]]

    def _lead(self, rows: np.ndarray, alive: np.ndarray) -> None:
        """Give rows what those have read that they follow, to read on by themselves."""
        if len(rows):
            followed = self.followed(rows, alive)
            self._model.copy_contexts(followed, rows)
            self._hashes[rows] = self._hashes[followed]
            self.follows[rows] = READS
