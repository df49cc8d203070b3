"""Plain samples as rows of arrays, without vLLM's objects for each of them.

    add(entry) -> step() -> Stepped ... step() -> Stepped

A sample is plain if its tokens are drawn from the whole distribution, and nothing is asked but their log-probs. The
batch's model, KV cache and sampler are vLLM's, and so are its decisions: which samples enter when, what they read and
which blocks they find. What a sample has sampled stays in its row until it ends, or until `grown` is called.

Samples that begin with the same context in one step share its reading, and that of the tokens after it as long as they
sample the same. vLLM lets each of them read what fills no block, and the last token: at a context of 7 tokens
everything. Here the first one reads; the others follow it and are drawn from its logits. One that samples another token
copies its keys and values, and reads for itself and for those that sampled as it did. So more samples may begin in a
step of vLLM's limits. Every token and log-prob is still that of vLLM's own scheduler and runner, to the last bit where
a matrix product of READERS rows or more adds up each row alike.

The next turn of a rollout begins with what an earlier one has read and sampled. vLLM finds the full blocks of that, and
so does this; the tokens after them are copied from the block that the earlier turn has left, if it is still there.

It never preempts. If the KV cache is full, `step` does nothing, and vLLM goes on with what `leave` returns.
"""

from collections import deque
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import torch

from titan_rl.actors.vllm.plain_blocks import PlainBlocks
from titan_rl.actors.vllm.plain_followers import READS, Followers
from titan_rl.actors.vllm.plain_model import PlainModel
from titan_rl.actors.vllm.plain_samples import Entering, Entry, Left
from titan_rl.actors.vllm.step_runner import unpenalized
from titan_rl.actors.vllm.step_scheduler import Prefill, Sampled, Stepped
from titan_rl.actors.vllm.vllm_args import stream_seed
from titan_rl.wire.types import Finish, Request

DRAWN = 256  # most numbers of noise that a sample draws at once
READERS = 4  # rows that read themselves before others follow: MKL adds up products of fewer rows in another order


class PlainBatch:
    def __init__(self, runner: Any, blocks: PlainBlocks, max_rows: int, max_tokens: int) -> None:
        self._runner, self._blocks = runner, blocks
        self._max_rows, self._max_tokens = min(max_rows, max_tokens), max_tokens
        self._waiting: deque[Entry] = deque()
        self._rows = 0  # in use: 0 .. rows - 1, but for those that are free
        self._free: list[int] = []  # ascending; left since the last step
        self._births = 0
        self._stops: dict[tuple[int, ...], int] = {}  # row of each set of stop tokens in the table
        batch, table = runner.input_batch, runner.input_batch.block_table[0]
        size, self._vocabulary = len(batch.token_ids_cpu), batch.vocab_size
        self._stop_table = np.zeros((0, self._vocabulary), bool)
        self._tokens, self._lengths = batch.token_ids_cpu, batch.num_tokens_no_spec
        self._computed, self._starts = batch.num_computed_tokens_cpu, batch.num_prompt_tokens  # starts: of the answers
        self._table, self._held = table.block_table.np, table.num_blocks_per_row
        self._temperatures = np.zeros(size, np.float32)
        self._logprobs = np.zeros(self._tokens.shape, np.float32)
        self._numbers = np.zeros((size, DRAWN), np.int64)  # of a greedy sample: 0
        self._seeds, self._births_of = np.zeros(size, np.int64), np.zeros(size, np.int64)
        self._ends, self._reported = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._stop_rows, self._cached, self._nths = (np.zeros(size, np.int32) for _ in range(3))
        self._kept = np.zeros(size, np.int32)  # blocks that others can find
        objects: Any = [np.full(size, None, object) for _ in range(3)]
        self._ids, self._entries, self._hashes = objects
        self._model = PlainModel(runner, blocks.size)
        self._followers = Followers(self._births_of, self._hashes, self._vocabulary, self._model)
        self._follows = self._followers.follows
        self._columns: tuple[np.ndarray, ...] = (
            *(self._tokens, self._lengths, self._computed, self._starts, self._table, self._held, self._temperatures),
            *(self._logprobs, self._numbers, self._seeds, self._births_of, self._ends, self._reported),
            *(self._stop_rows, self._cached, self._nths, self._follows, self._kept),
            *(self._ids, self._entries, self._hashes),
        )
        self._generator, self._settings = torch.Generator(), unpenalized()

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._rows > len(self._free))

    def takes(self, request: Request) -> bool:
        """Return True if the samples of a request are plain."""
        sampling = request.sampling
        whole = sampling.top_p == 1 and sampling.top_k <= 0 and sampling.min_p == 0
        return whole and not sampling.scores_context and max(request.seeds) < 2**63

    def add(self, entry: Entry) -> None:
        self._hash(entry)
        self._waiting.append(entry)

    def step(self) -> Stepped | None:
        """Sample one token for every row. Return nothing, and change nothing, if there is no room for that."""
        rows = self._alive()
        if len(rows) > self._max_tokens or not self._grow(rows):
            return None
        self._enter(len(rows))
        self._close_up()
        n = self._rows
        if not n:  # what waits does not fit an empty batch, if anything does
            return None if self._waiting else Stepped(0, 0, [])
        with torch.inference_mode():
            self._followers.let_read(READERS, self._runner.arange_np[:n])
            reads = np.where(self._follows[:n] == READS, self._lengths[:n] - self._computed[:n], 0)
            counted = np.where(self._lengths[:n] > self._starts[:n], 1, reads).sum()  # not what is read again
            tokens, logprobs = self._sample(self._logits(reads))
        at, lengths = self._runner.arange_np[:n], self._lengths[:n]
        self._tokens[at, lengths], self._logprobs[at, lengths] = tokens, logprobs
        self._computed[:n] = lengths
        lengths += 1
        stopped = self._stop_table[self._stop_rows[:n], tokens]
        ended = self._in_order(np.flatnonzero(stopped | (lengths >= self._ends[:n])))
        outputs = self._sampled(ended, ["stop" if stop else "length" for stop in stopped[ended]])
        self._followers.part(tokens, ended, at)
        self._keep_parts(ended)
        self._remove(ended)
        return Stepped(n, int(counted), outputs)

    def grown(self) -> list[Sampled]:
        """Return what unfinished samples have got since they were last reported."""
        rows = self._in_order(self._alive())
        rows = rows[self._reported[rows] < self._lengths[rows]]
        return self._sampled(rows, [None] * len(rows))

    def lengths(self) -> dict[str, int]:
        """Return how many tokens of unfinished samples are not reported yet."""
        rows = self._alive()
        return dict(zip(self._ids[rows], (self._lengths - self._reported)[rows].tolist(), strict=True))

    def withdraw(self, ids: Collection[str]) -> None:
        rows = np.array([row for row in self._in_order(self._alive()) if self._ids[row] in ids], int)
        self._followers.part(np.zeros(self._rows, int), rows, self._alive())
        self._remove(rows)
        for entry in self._waiting:
            entry.samples = deque(sample for sample in entry.samples if sample[0] not in ids)
        self._waiting = deque(entry for entry in self._waiting if entry.samples)

    def restart(self) -> None:
        """Let samples begin again with the tokens that they have, because their keys and values are to be dropped."""
        rows = self._in_order(self._alive())
        for row in reversed(rows):
            entry: Entry = self._entries[row]
            tokens = self._tokens[row, self._starts[row] : self._lengths[row]].tolist()
            samples = deque([(self._ids[row], int(self._nths[row]))])
            entry = Entry(entry.request, entry.salt, entry.begun, samples, tokens)
            self._waiting.appendleft(entry)
        self._remove(rows)
        self._rows, self._free = 0, []
        for entry in self._waiting:
            self._hash(entry)

    def leave(self) -> tuple[list[Left], list[Entry]]:
        """Return the samples that have tokens, in the order in which they began, and those that have none; and forget
        them."""
        self._followers.let_read(self._rows, self._alive())
        left = list[Left]()
        for row in self._in_order(self._alive()):
            self._keep(row)
            tokens = self._tokens[row, self._starts[row] : self._lengths[row]].tolist()
            blocks = self._blocks.of(self._table[row, : self._held[row]])
            left.append(Left(self._entries[row], self._ids[row], int(self._nths[row]), tokens, blocks))
        left += [Left(entry, *entry.samples[0], entry.again, []) for entry in self._waiting if entry.again]
        waiting = [entry for entry in self._waiting if not entry.again]
        self._waiting, self._rows, self._free = deque(), 0, []
        return left, waiting

    def _hash(self, entry: Entry) -> None:
        context, size = entry.context, self._blocks.size
        entry.hashes = self._blocks.hashes(context, entry.salt)
        last = entry.hashes[-1] if entry.hashes else entry.salt
        entry.key = last, tuple(context[len(entry.hashes) * size :])

    def _alive(self) -> np.ndarray:
        rows = self._runner.arange_np[: self._rows]
        return np.delete(rows, self._free) if self._free else rows

    def _in_order(self, rows: np.ndarray) -> np.ndarray:
        """Return rows in the order in which their samples began, which is vLLM's."""
        return rows[np.argsort(self._births_of[rows])]

    def _grow(self, rows: np.ndarray) -> bool:
        """Give a block to each row that begins one with this step, and let others find those that this step fills.
        Return False, and change nothing, if there are too few."""
        size, computed = self._blocks.size, self._computed[rows]
        begin = self._in_order(rows[computed % size == 0])
        if len(begin) > self._blocks.fit((), 1):
            return False
        if len(begin):
            self._table[begin, self._held[begin]] = self._blocks.take((), 1, len(begin))[:, 0]
            self._held[begin] += 1
        for row in self._in_order(rows[((computed + 1) % size == 0) & (self._follows[rows] == READS)]):
            before, salt = self._hashes[row], self._entries[row].salt
            full = self._tokens[row, len(before) * size : self._lengths[row]].tolist()
            self._hashes[row] = self._blocks.hashes(full, salt, before)
            self._keep(row)
        return True

    def _keep(self, row: int) -> None:
        """Let others find the full blocks of a row that reads."""
        hashes = self._hashes[row]
        self._blocks.keep(hashes, self._table[row, : self._held[row]], int(self._kept[row]))
        self._kept[row] = max(self._kept[row], len(hashes))

    def _keep_parts(self, rows: np.ndarray) -> None:
        """Let later turns find what these ended samples have read or sampled since their last full block."""
        size = self._blocks.size
        for row in rows[self._follows[rows] == READS]:
            entry, hashes = self._entries[row], self._hashes[row]
            if entry.request.affinity:  # its rollout may go on
                tokens = self._tokens[row, len(hashes) * size : self._computed[row]].tolist()
                self._blocks.keep_part(hashes, tokens, entry.salt, self._table[row, : len(hashes) + 1])

    def _enter(self, rows: int) -> None:
        """Let waiting samples have rows, in order, until one does not fit."""
        room, size, readers = self._max_tokens - rows, self._blocks.size, rows
        entering, read_by = list[Entering](), dict[Any, int]()  # births, by the context that they read in this step
        while self._waiting and rows < self._max_rows:
            entry = self._waiting[0]
            length, known = entry.start + len(entry.again), entry.hashes
            findable = known[: (length - 1) // size]  # the last token is always read
            cached = self._blocks.cached(findable)
            new, found, part, reads = -(-length // size) - len(cached), len(cached) * size, 0, 0
            follows = read_by.get(entry.key, READS) if readers >= READERS else READS
            wanted = len(entry.samples)
            if follows == READS:
                if entry.request.affinity and len(cached) == len(findable):
                    begun, part = self._blocks.part(findable, entry.context[found : length - 1], entry.salt)
                    found += begun
                reads = length - found  # if any of it is to be found by others, by one sample
                wanted = max(1, READERS - readers) if len(cached) == len(findable) else 1
            count = min(wanted, len(entry.samples), self._max_rows - rows, self._blocks.fit(cached, new))
            count = min(count, room // reads) if reads else count
            if count == 0:
                break
            numbers = self._blocks.take(cached, new, count)
            if follows == READS:
                for own in numbers if len(known) > len(cached) else ():
                    self._blocks.keep(known, own, len(cached))
                read_by[entry.key] = self._births
                readers += count
            samples = [entry.samples.popleft() for _ in range(count)]
            entering.append(Entering(entry, samples, numbers, found, part, follows))
            self._births += count
            rows, room = rows + count, room - count * reads
            if not entry.samples:
                self._waiting.popleft()
        if entering:
            self._write(entering)

    def _write(self, entering: Sequence[Entering]) -> None:
        """Write samples into rows, those of all entries at once."""
        counts = [len(each.samples) for each in entering]
        count, most, width = sum(counts), self._tokens.shape[1], self._numbers.shape[1]
        reused = self._free[:count]
        rows = np.array([*reused, *range(self._rows, self._rows + count - len(reused))])
        del self._free[:count]
        self._rows += count - len(reused)
        self._births_of[rows] = range(self._births - count, self._births)
        facts, own = list[tuple[float, ...]](), np.split(rows, np.cumsum(counts)[:-1])
        together = dict[tuple[int, ...], list[np.ndarray]]()  # rows that draw as many numbers after as many
        parts, copies = list[int](), list[int]()
        for (entry, samples, numbers, cached, part, follows), at in zip(entering, own, strict=True):
            request, sampling = entry.request, entry.request.sampling
            context, begun, held = entry.context, len(entry.begun), numbers.shape[1]
            self._tokens[at, : len(context)], self._table[at, :held] = context, numbers
            end = min(entry.start + sampling.max_new_tokens - begun, most)
            found = cached if follows == READS else len(context)
            kept = len(entry.hashes) if follows == READS else cached // self._blocks.size
            stops = self._stop_row(sampling.stop_token_ids)
            facts.append(
                (len(context), entry.start, cached, found, follows, kept, held, end, stops, sampling.temperature)
            )
            for row, (id, nth) in zip(at.tolist(), samples, strict=True):
                self._ids[row], self._nths[row], self._seeds[row] = id, nth, stream_seed(request.seeds[nth], begun)
                self._entries[row], self._hashes[row] = entry, entry.hashes
            if part:
                parts += [part] * len(samples)
                copies += numbers[:, cached // self._blocks.size].tolist()
            drawn = len(entry.again) // width * width
            together.setdefault((drawn, end - entry.start, sampling.temperature == 0), []).append(at)
        columns = (
            *(self._lengths, self._starts, self._computed, self._cached, self._follows, self._kept),
            *(self._held, self._ends, self._stop_rows, self._temperatures),
        )
        for column, values in zip(columns, zip(*facts, strict=True), strict=True):
            column[rows] = np.repeat(values, counts)
        self._reported[rows] = self._lengths[rows]
        if parts:
            self._model.copy_blocks(np.array(parts), np.array(copies))
        for (drawn, *_), each in together.items():
            self._draw(np.concatenate(each), drawn)

    def _stop_row(self, stops: tuple[int, ...]) -> int:
        if (row := self._stops.get(stops)) is None:
            row = self._stops[stops] = len(self._stop_table)
            self._stop_table = np.concatenate([self._stop_table, np.zeros((1, self._vocabulary), bool)])
            self._stop_table[row, [stop for stop in stops if stop < self._vocabulary]] = True
        return row

    def _draw(self, rows: np.ndarray, drawn: int) -> None:
        """Draw what vLLM draws from the generators of these rows, one for each token, after `drawn` numbers."""
        if self._temperatures[rows[0]] == 0:
            self._numbers[rows] = 0
            return
        count = min(self._numbers.shape[1], int(self._ends[rows[0]] - self._starts[rows[0]]) - drawn)
        numbers = torch.empty(len(rows), drawn + count, dtype=torch.int64)
        for seed, own in zip(self._seeds[rows].tolist(), numbers.unbind(), strict=True):
            own.random_(0, 2**31, generator=self._generator.manual_seed(seed))
        self._numbers[rows, :count] = numbers[:, drawn:]

    def _close_up(self) -> None:
        """Move the last rows into free ones, as vLLM does."""
        alive = self._rows - len(self._free)
        to = [row for row in self._free if row < alive]
        since = [row for row in reversed(range(alive, self._rows)) if row not in self._free]
        if to:
            longest = int(self._lengths[since].max())
            for column in self._columns:
                if column.ndim == 1 or column is self._table or column is self._numbers:
                    column[to] = column[since]
                else:
                    column[to, :longest] = column[since, :longest]
        self._rows, self._free = alive, []

    def _remove(self, rows: np.ndarray) -> None:
        """Free rows and their blocks. Of the blocks of each, the last shall be taken for another sample first."""
        if len(rows):
            self._blocks.free(number for row in rows for number in self._table[row, : self._held[row]][::-1])
            self._free = sorted([*self._free, *rows.tolist()])
            self._ids[rows] = self._entries[rows] = self._hashes[rows] = None

    def _sampled(self, rows: np.ndarray, finishes: Sequence[Finish | None]) -> list[Sampled]:
        """Return what rows have got since they were last reported."""
        columns = self._reported, self._lengths, self._starts, self._cached
        begins, ends, starts, cached = (column[rows].tolist() for column in columns)
        self._reported[rows] = self._lengths[rows]
        return [
            Sampled(
                id,
                self._tokens[row, begin:end].tolist(),
                self._logprobs[row, begin:end].tolist(),
                finish,
                Prefill(start, found) if begin == start else None,
            )
            for row, id, begin, end, start, found, finish in zip(
                rows, self._ids[rows], begins, ends, starts, cached, finishes, strict=True
            )
        ]

    def _logits(self, reads: np.ndarray) -> torch.Tensor:
        """Return the logits after the last token of each row. Those that read nothing follow another.  # [rows, V]"""
        readers = np.flatnonzero(reads)
        nths = np.zeros(len(reads), np.int64)  # of the readers
        nths[readers] = self._runner.arange_np[: len(readers)]
        if len(readers) == len(reads):
            return self._model.logits(readers, reads, nths)
        rows = self._runner.arange_np[: self._rows]
        following = self._followers.among(rows)
        nths[following] = nths[self._followers.followed(following, rows)]
        return self._model.logits(readers, reads[readers], nths)

    def _sample(self, logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Return a token for each row, and its log-prob."""
        n = self._rows
        drawn = self._lengths[:n] - self._starts[:n]
        column = drawn % self._numbers.shape[1]
        for row in np.flatnonzero((drawn > 0) & (column == 0)):
            self._draw(np.array([row]), int(drawn[row]))
        greedy, settings = int(n - np.count_nonzero(self._temperatures[:n])), self._settings
        settings.all_greedy, settings.all_random = greedy == n, greedy == 0
        settings.temperature = torch.from_numpy(self._temperatures[:n])
        # What a CPU's sampler takes in place of generators: see sample_by_seeds.
        numbers: Any = torch.from_numpy(self._numbers[self._runner.arange_np[:n], column])
        settings.generators = numbers
        sampled = self._runner.sampler(logits, settings)
        return sampled.sampled_token_ids[:, 0].numpy(), sampled.logprobs_tensors.logprobs[:, 0].numpy()
