"""Plan a weight sync as data: which rows of which shard fill which rows of which live parameter.

    trainer ranks               plan                    readers (tensor-parallel ranks of the generators)
    shards                   -> copies per pair      -> pieces of vLLM's fused, padded, sharded parameters
                                of (rank, reader)       (vllm_params.py)

No tensor is ever whole: each (trainer rank, reader) pair owns a run of bytes, its copies laid end to end in the plan's
order, which the rank packs and the reader reads. Generator replicas read the same runs. Pure Python: a plan needs no
running mesh.
"""

import pickle
import zlib
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

LORA_A, LORA_B = ".lora_A.weight", ".lora_B.weight"
"""Ends of the names of adapters. Where a plan has adapters, all other weights are frozen."""
ROUTING_SLACK = 0.01  # a rank may send this share of an even load more than its peers if that saves a run


@dataclass(frozen=True, slots=True)
class Shard:
    """The rectangle of the Hugging Face tensor `name` that a trainer rank holds. 1-D tensors have one column."""

    name: str
    row0: int
    rows: int
    col0: int
    cols: int

    def of_halves(self) -> "Shard":
        """Return the rectangle of a tensor whose numbers are two each, of half their bits."""
        return replace(self, col0=2 * self.col0, cols=2 * self.cols)


@dataclass(frozen=True, slots=True)
class Piece:
    """A rectangle of a live parameter, and the start of the Hugging Face rectangle that fills it."""

    param: str
    dst_row0: int
    dst_col0: int
    name: str
    row0: int
    rows: int
    col0: int
    cols: int

    def of_halves(self) -> "Piece":
        """Return the rectangle of a parameter whose numbers are two each, of half their bits."""
        return replace(self, dst_col0=2 * self.dst_col0, col0=2 * self.col0, cols=2 * self.cols)


@dataclass(frozen=True, slots=True)
class Copy:
    """Copy rows x cols elements from a rank's shard of `name` into a reader's `param`."""

    name: str
    src_row0: int
    src_col0: int
    rows: int
    cols: int
    param: str
    dst_row0: int
    dst_col0: int

    @property
    def elements(self) -> int:
        return self.rows * self.cols

    @property
    def adapts(self) -> bool:
        """Whether this is a part of an adapter."""
        return is_adapter(self.name)


def is_adapter(name: str) -> bool:
    """Return whether this is the Hugging Face name of an adapter's matrix."""
    return name.endswith((LORA_A, LORA_B))


_values = attrgetter(*(field.name for field in fields(Copy)))


class RunOfCopies(tuple[Copy, ...]):
    """The copies of one pair, in the order of its bytes. Pickled by columns and compressed: a model's layers differ in
    little but their names, so that a copy of a 70B model takes 6 bytes on the wire instead of 77."""

    __slots__ = ()

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled, (zlib.compress(pickle.dumps(list(zip(*map(_values, self), strict=True))), level=1),)


def _unpickled(columns: bytes) -> RunOfCopies:
    return RunOfCopies(map(Copy, *pickle.loads(zlib.decompress(columns)) or ((),)))


@dataclass(frozen=True, slots=True)
class WeightPlan:
    """`copies[trainer rank, reader]` orders the elements in that pair's run; every pair has an entry."""

    ranks: int
    readers: int
    copies: dict[tuple[int, int], RunOfCopies]

    def outgoing(self, rank: int) -> dict[int, RunOfCopies]:
        """Return the runs that a trainer rank packs, by reader."""
        return {reader: run for reader in range(self.readers) if (run := self.copies[rank, reader])}

    def incoming(self, reader: int) -> dict[int, RunOfCopies]:
        """Return the runs that a reader reads, by trainer rank."""
        return {rank: run for rank in range(self.ranks) if (run := self.copies[rank, reader])}

    def sent(self, rank: int) -> int:
        """Count the elements that a trainer rank packs, over all readers."""
        return sum(copy.elements for copies in self.outgoing(rank).values() for copy in copies)

    def received(self, reader: int) -> int:
        """Count the elements that a reader reads, over all trainer ranks."""
        return sum(copy.elements for copies in self.incoming(reader).values() for copy in copies)

    def describe(self, itemsize: int) -> str:
        """Describe the plan in one line for the terminal."""
        runs = [copies for copies in self.copies.values() if copies]
        read = _span([itemsize * self.received(reader) for reader in range(self.readers)])
        sent = _span([itemsize * self.sent(rank) for rank in range(self.ranks)])
        return (
            f"{self.readers} reader(s) x {read} from {self.ranks} trainer rank(s) x {sent}: "
            f"{len(runs)} runs, {sum(map(len, runs))} copies"
        )


def plan(trainer: Sequence[Sequence[Shard]], readers: Sequence[Sequence[Piece]]) -> WeightPlan:
    """Fill every element of every piece exactly once. Ranks that hold the same rectangle share the sending."""
    holders = _holders(trainer)
    tensors: dict[str, list[Shard]] = {}
    for shard in holders:
        tensors.setdefault(shard.name, []).append(shard)
    _check_disjoint(tensors)
    _check_wanted(tensors, readers)

    grids = {name: _Grid(shards) for name, shards in tensors.items()}
    moves: list[_Move] = []
    for reader, wanted in enumerate(readers):
        for piece in wanted:
            near = grids[piece.name].near(piece) if piece.name in grids else ()
            found = [_Move(reader, holders[shard], copy) for shard in near if (copy := _intersect(shard, piece))]
            _check_filled(piece, found)
            moves += found
    sources = _routed(moves, len(trainer))
    runs: dict[tuple[int, int], list[Copy]] = {(t, r): [] for t in range(len(trainer)) for r in range(len(readers))}
    for rank, move in zip(sources, moves, strict=True):
        runs[rank, move.reader].append(move.copy)
    return WeightPlan(len(trainer), len(readers), {pair: RunOfCopies(copies) for pair, copies in runs.items()})


def _routed(moves: Sequence["_Move"], ranks: int) -> list[int]:
    """Choose the rank that each move comes from: largest move first, onto the least loaded holder.

    A holder that already has a run to the reader is preferred within ROUTING_SLACK. Otherwise the norms, which are tiny
    and held by all ranks of a tensor-parallel group, would create a run for every pair. Sorting is stable and ties go
    to the lowest rank, so equal arguments give equal plans in every process.
    """
    load, source, paired = [0] * ranks, [0] * len(moves), set[tuple[int, int]]()
    slack = ROUTING_SLACK * sum(move.elements for move in moves) / max(ranks, 1)
    for i in sorted(range(len(moves)), key=lambda i: -moves[i].elements):
        reader, holders = moves[i].reader, moves[i].holders
        rank = min(holders, key=load.__getitem__)
        if (rank, reader) not in paired and len(holders) > 1:
            bound = load[rank] + slack
            known = [other for other in holders if load[other] <= bound and (other, reader) in paired]
            rank = min(known, key=load.__getitem__, default=rank)
        source[i] = rank
        load[rank] += moves[i].elements
        paired.add((rank, reader))
    return source


class _Move:
    """The copy from one shard to one piece. A single holder of the shard sends it."""

    __slots__ = ("copy", "elements", "holders", "reader")

    def __init__(self, reader: int, holders: list[int], copy: Copy) -> None:
        self.reader = reader
        self.holders = holders
        self.copy = copy
        self.elements = copy.elements


class _Grid:
    """A tensor's disjoint shards, by columns and then by rows, so that a piece is compared with few of them."""

    def __init__(self, shards: Iterable[Shard]) -> None:
        columns: dict[tuple[int, int], list[Shard]] = defaultdict(list)
        for shard in sorted(shards, key=lambda shard: shard.row0):
            columns[shard.col0, shard.col0 + shard.cols].append(shard)
        self._columns = [(*bounds, group, [s.row0 + s.rows for s in group]) for bounds, group in columns.items()]

    def near(self, piece: Piece) -> Iterator[Shard]:
        """Yield the shards that may intersect a piece."""
        for left, right, shards, ends in self._columns:
            if left < piece.col0 + piece.cols and piece.col0 < right:
                for i in range(bisect_left(ends, piece.row0 + 1), len(shards)):
                    if shards[i].row0 >= piece.row0 + piece.rows:
                        break
                    yield shards[i]


def _holders(trainer: Sequence[Sequence[Shard]]) -> dict[Shard, list[int]]:
    """Return the ranks that hold each non-empty rectangle."""
    holders: dict[Shard, list[int]] = {}
    for rank, shards in enumerate(trainer):
        for name, count in Counter(shard.name for shard in shards).items():
            if count > 1:
                raise ValueError(f"trainer rank {rank}: expected one shard of {name}, found {count}")
        for shard in shards:
            if shard.rows and shard.cols:
                holders.setdefault(shard, []).append(rank)
    return holders


def _intersect(shard: Shard, piece: Piece) -> Copy | None:
    """Return the copy from a shard to a piece; None if they do not intersect."""
    row0, col0 = max(shard.row0, piece.row0), max(shard.col0, piece.col0)
    rows = min(shard.row0 + shard.rows, piece.row0 + piece.rows) - row0
    cols = min(shard.col0 + shard.cols, piece.col0 + piece.cols) - col0
    if rows <= 0 or cols <= 0:
        return None
    return Copy(
        name=piece.name,
        src_row0=row0 - shard.row0,
        src_col0=col0 - shard.col0,
        rows=rows,
        cols=cols,
        param=piece.param,
        dst_row0=piece.dst_row0 + row0 - piece.row0,
        dst_col0=piece.dst_col0 + col0 - piece.col0,
    )


def _check_disjoint(tensors: dict[str, list[Shard]]) -> None:
    """Raise unless a tensor's shards are equal (replicas, already merged) or disjoint: no element may arrive twice."""
    for name, shards in tensors.items():
        open_: list[Shard] = []  # shards that reach the current row
        for shard in sorted(shards, key=lambda s: s.row0):
            open_ = [other for other in open_ if other.row0 + other.rows > shard.row0]
            for other in open_:
                if other.col0 < shard.col0 + shard.cols and shard.col0 < other.col0 + other.cols:
                    raise ValueError(f"{name}: expected equal or disjoint shards, found {other} and {shard}")
            open_.append(shard)


def _check_wanted(tensors: Iterable[str], readers: Sequence[Sequence[Piece]]) -> None:
    wanted = {piece.name for reader in readers for piece in reader}
    if unread := sorted(set(tensors) - wanted):
        raise ValueError(
            f"the trainer holds {', '.join(unread)}, which no generator parameter takes: "
            "expected the same layers and the same weight tying on both sides"
        )


def _check_filled(piece: Piece, moves: list[_Move]) -> None:
    """Raise unless a piece is filled. Shards are disjoint, hence its copies too, so counting elements is enough."""
    if sum(move.elements for move in moves) == piece.rows * piece.cols:
        return
    filled = Counter[int]()
    for copy in (move.copy for move in moves):
        filled.update(dict.fromkeys(range(copy.dst_row0, copy.dst_row0 + copy.rows), copy.cols))
    missing = [row for row in range(piece.dst_row0, piece.dst_row0 + piece.rows) if filled[row] < piece.cols]
    raise ValueError(
        f"{piece.param}: expected rows {piece.dst_row0}..{piece.dst_row0 + piece.rows - 1} from {piece.name}, "
        f"but no trainer rank holds all of rows {missing[0]}..{missing[-1]} ({len(missing)} rows)"
    )


def _span(sizes: list[int]) -> str:
    unit, name = (1e9, "GB") if max(sizes) >= 1e9 else (1e6, "MB")
    low, high = f"{min(sizes) / unit:.2f}", f"{max(sizes) / unit:.2f}"
    return f"{high} {name}" if low == high else f"{low}-{high} {name}"
