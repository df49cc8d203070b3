"""Collectives through shared memory. Here ranks are threads; in tests/system/test_rank_models.py processes."""

import os
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from threading import Timer
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.actors.titan.host_collectives import HostGroup, Offer, memory_bytes

SLOT = 4096
HERE = "here"


def memory(stack: ExitStack) -> int:
    fd = os.memfd_create("test")
    stack.callback(os.close, fd)
    os.ftruncate(fd, memory_bytes(SLOT))
    return fd


def on_threads(ranks: int, program: Callable[[HostGroup, int], Any]) -> list[Any]:
    """Return what the program returns on each rank."""
    with ExitStack() as stack, ThreadPoolExecutor(ranks) as pool:
        offers = [Offer(HERE, os.getpid(), memory(stack)) for _ in range(ranks)]
        return list(pool.map(lambda rank: program(HostGroup(rank, offers, SLOT, 30.0), rank), range(ranks)))


def drawn(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank)).to(dtype)


@given(
    ranks=st.integers(2, 4),
    sizes=st.lists(st.integers(1, 3 * SLOT), min_size=1, max_size=5),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_collectives_of_any_size_in_any_order_give_what_all_ranks_have(
    ranks: int, sizes: list[int], dtype: torch.dtype
) -> None:
    def program(group: HostGroup, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        found = []
        for numel in sizes:  # most are larger than a slot, so that slots are filled several times
            gathered, reduced = torch.empty(ranks * numel, dtype=dtype), torch.empty(numel, dtype=dtype)
            own = gathered[rank * numel :][:numel]  # FSDP2 lays a rank's part where it belongs
            own.copy_(drawn(rank, numel, dtype))
            group.all_gather(gathered, own)
            group.reduce_scatter(reduced, drawn(rank, ranks * numel, dtype))
            found.append((gathered, reduced))
        return found

    for rank, found in enumerate(on_threads(ranks, program)):
        for numel, (gathered, reduced) in zip(sizes, found, strict=True):
            assert torch.equal(gathered, torch.cat([drawn(other, numel, dtype) for other in range(ranks)]))
            first, *others = (drawn(other, ranks * numel, dtype).view(ranks, -1)[rank] for other in range(ranks))
            for other in others:
                first = first + other
            assert torch.equal(reduced, first)


def test_a_rank_that_ends_is_named_long_before_the_deadline() -> None:
    with ExitStack() as stack:
        own, others = memory(stack), memory(stack)
        other = stack.enter_context(subprocess.Popen(["sleep", "60"], pass_fds=[others]))
        group = HostGroup(0, [Offer(HERE, os.getpid(), own), Offer(HERE, other.pid, others)], SLOT, 30.0)
        Timer(0.2, other.kill).start()
        with pytest.raises(RuntimeError, match=f"rank 1 of this mesh, process {other.pid}, has ended"):
            group.all_gather(torch.empty(2), torch.ones(1))
        group.close()


def test_a_rank_that_does_not_come_is_named_at_the_deadline() -> None:
    with ExitStack() as stack:
        offers = [Offer(HERE, os.getpid(), memory(stack)) for _ in range(2)]
        with pytest.raises(TimeoutError, match=r"expected rank 1 of this mesh within 0.1 s"):
            HostGroup(0, offers, SLOT, 0.1).reduce_scatter(torch.empty(1), torch.ones(2))


def test_memory_of_a_process_that_has_ended_cannot_be_mapped() -> None:
    with ExitStack() as stack:
        with subprocess.Popen(["true"]) as ended:
            pass
        with pytest.raises(OSError, match=str(ended.pid)):
            HostGroup(0, [Offer(HERE, os.getpid(), memory(stack)), Offer(HERE, ended.pid, 3)], SLOT, 1.0)
