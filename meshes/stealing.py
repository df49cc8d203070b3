"""What is known of each replica's work and pace, and how many samples are worth moving between two of them.

Pure, like routing.py, which keeps one ReplicaLoad for each replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from titan_rl.actors.vllm.engine import EngineReport, SampleId
from titan_rl.wire.types import Request

FADE = 0.9
"""Weight that a measurement of an engine's pace keeps after the next measurement."""
SILENT_SECONDS = 2.0
"""An engine that has not reported for this long is assumed to stand still."""


class Pace:
    """Seconds of an engine's step that computes n tokens, as a line a + b n through the measurements. While n never
    changes, all of it is a: a smaller batch is not expected to run faster before one has."""

    def __init__(self) -> None:
        self._sums = (0.0,) * 5  # over steps: 1, n, seconds, n n, n seconds
        self._last = EngineReport()

    def measure(self, report: EngineReport) -> None:
        steps, read = report.steps - self._last.steps, report.read - self._last.read
        seconds, self._last = report.seconds - self._last.seconds, report
        if steps > 0:
            n = read / steps
            added = (steps, read, seconds, n * read, n * seconds)
            self._sums = tuple(FADE * old + new for old, new in zip(self._sums, added, strict=True))

    @property
    def line(self) -> tuple[float, float] | None:
        """(a, b), neither below 0; None before any step."""
        steps, *sums = self._sums
        if steps == 0:
            return None
        n, s, nn, ns = (total / steps for total in sums)
        variance = nn - n * n
        slope = (ns - n * s) / variance if variance > 1e-6 * nn else 0.0
        b = min(max(slope, 0.0), s / n if n else 0.0)
        return s - b * n, b


@dataclass(slots=True, eq=False)
class PartialRequest:
    """Samples of one request that one replica holds, under an id of their own."""

    request: Request  # as the engine knows it
    whole: str  # the id of the request that this is part of
    places: Sequence[int]  # the index of each sample in the whole request
    unanswered: set[int]
    lengths: dict[int, int]  # tokens of each unfinished sample at the last report

    def left(self, index: int) -> int:
        """Return how many tokens a sample is expected to lack. A hint that proved too short is ignored."""
        most, length = self.request.sampling.max_new_tokens, self.lengths[index]
        expected = min(self.request.expected or most, most)
        return max((expected if expected > length else most) - length, 1)

    @property
    def outstanding(self) -> int:
        return sum(map(self.left, self.lengths))

    @property
    def unfinished(self) -> list[SampleId]:
        return [SampleId(self.request.id, index) for index in self.lengths]


@dataclass(slots=True)
class ReplicaLoad:
    parts: dict[str, PartialRequest] = field(default_factory=dict)
    pace: Pace = field(default_factory=Pace)
    heard: float = 0.0  # when it last reported
    sampled: int = 0  # tokens
    stolen: int = 0  # samples
    retired: bool = False  # it takes no new work, but may still answer what it has
    outstanding: int = 0  # tokens that it lacks, when last counted
    samples: int = 0  # unfinished ones, when last counted

    @property
    def unfinished(self) -> list[tuple[PartialRequest, int]]:
        return [(part, index) for part in self.parts.values() for index in part.lengths]

    def count(self) -> int:
        """Count its work anew. Return the outstanding tokens."""
        self.outstanding = sum([part.outstanding for part in self.parts.values()])
        self.samples = sum([len(part.lengths) for part in self.parts.values()])
        return self.outstanding

    def line(self, now: float) -> tuple[float, float]:
        """Return the pace as far as it is known. A step of a silent replica takes as long as it has been silent."""
        a, b = self.pace.line or (0.0, 0.0)
        silent = now - self.heard
        return (a + silent if silent >= SILENT_SECONDS else a), b

    def seconds_left(self, now: float) -> float:
        """Return the seconds until this replica has nothing to do: as many steps as its longest sample takes, each
        computing the samples that still run then. sum over steps (a + b n) = a longest + b tokens."""
        (a, b), left = self.line(now), [part.left(i) for part, i in self.unfinished]
        return a * max(left, default=0) + b * sum(left)

    def by_worth(self) -> list[tuple[PartialRequest, int]]:
        """Order the unfinished samples: groups that have not started first, because moving them costs no second
        prefill; then the longest left."""
        started = {part: any(part.lengths.values()) for part in self.parts.values()}
        return sorted(self.unfinished, key=lambda sample: (started[sample[0]], -sample[0].left(sample[1])))


def samples_worth_moving(thief: ReplicaLoad, victim: ReplicaLoad, now: float, most: int | None) -> int:
    """Return how many samples (up to `most`) to move so that both replicas finish soonest; 0 if no move pays.

    A move costs a step of the victim, which comes first, and one of the thief to read the tokens that exist already.
    """
    a, b = victim.line(now)
    c, d = thief.pace.line or victim.pace.line or (0.0, 0.0)  # assumed equal until measured
    samples = victim.by_worth()
    left = [part.left(i) for part, i in samples]
    longest_left_behind = list(accumulate(reversed([*left, 0]), max))[::-1]
    stays, best, moves = victim.seconds_left(now), float("inf"), 0
    behind, longest, tokens, prefill, contexts = sum(left), 0, 0, 0, set[PartialRequest]()
    for k, (part, i) in enumerate(samples[:most], start=1):
        longest, tokens, behind = max(longest, left[k - 1]), tokens + left[k - 1], behind - left[k - 1]
        prefill += part.lengths[i] + (len(part.request.tokens) if part not in contexts else 0)
        contexts.add(part)
        cost = a + b * len(samples) + c + d * prefill
        after = max(a * longest_left_behind[k] + b * behind, cost + c * longest + d * tokens)
        if after + cost < stays and after < best:
            best, moves = after, k
    return moves
