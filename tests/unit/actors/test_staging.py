"""What a trainer stages: real FSDP2 and tensor-parallel shards, real packing."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial
from torch.distributed.tensor import Shard as ShardPlacement
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

from support.cudart import as_on_a_gpu
from support.staged_weights import READERS, SHAPE, Weights, generator_parameters, hf_tensors
from titan_rl.actors.sync import staging as staging_module
from titan_rl.actors.sync.checksums import checksums_of, gpu_of, parts_of
from titan_rl.actors.sync.held_shards import coordinates_of, local_tensors, shards_of
from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.sync.transport import octets
from titan_rl.actors.titan.private import StridedShard
from titan_rl.actors.vllm.vllm_params import param_shapes
from titan_rl.config.sections import WeightSyncSection
from titan_rl.kernels.pack_weights import pack, reference_pack, window
from titan_rl.wire.cores import here
from titan_rl.wire.manifest import blocks, checksum, layout
from titan_rl.wire.weight_plan import Copy, Shard, plan
from titan_rl.wire.weight_source import Offer, Source


def as_each_rank(replicate: int, fsdp: int, tp: int) -> Iterator[Weights]:
    """Build the model as each rank of a mesh in turn would, without the other ranks: sharding moves no data."""
    for rank in range(replicate * fsdp * tp):
        dist.init_process_group("fake", rank=rank, world_size=replicate * fsdp * tp, store=FakeStore())
        try:
            yield Weights(replicate, fsdp, tp)
        finally:
            dist.destroy_process_group()
            _clear_sharding_prop_cache()  # it remembers the last rank's mesh


@pytest.mark.parametrize(
    "mesh", [(1, 1, 1), (1, 2, 1), (1, 5, 1), (1, 1, 2), (1, 2, 2), (1, 3, 2), (2, 2, 1), (2, 1, 2), (2, 3, 2)]
)
def test_every_layout_is_described_exactly_and_packs_into_the_generators_parameters(
    mesh: tuple[int, int, int],
) -> None:
    whole, layouts, held = hf_tensors(), [], []
    for weights in as_each_rank(*mesh):
        layouts.append(weights.shards())
        held.append({})
        for shard, param in zip(layouts[-1], weights.parameters(), strict=True):
            local = param.to_local().detach().clone() if isinstance(param, DTensor) else param.detach()
            table = whole[shard.name].view(len(whole[shard.name]), -1)
            claimed = table[shard.row0 : shard.row0 + shard.rows, shard.col0 : shard.col0 + shard.cols]
            assert torch.equal(local.view(len(local), shard.cols), claimed), shard
            held[-1][shard.name] = local
    made = plan(layouts, READERS)

    live = [{name: torch.zeros(size) for name, size in param_shapes(SHAPE, 2).items()} for _ in READERS]
    for rank, shards in enumerate(held):
        runs = {reader: made.copies[rank, reader] for reader in range(2)}  # some are empty
        staging = Staging(shards, runs, torch.float32, slice_bytes=64, block_bytes=48)
        manifests = staging.pack(version=5, slot=1, serial=1)
        assert sum(run.nbytes for run in staging.runs[1].values()) == 4 * made.sent(rank)
        for reader, copies in runs.items():
            assert manifests[reader].checksums == tuple(
                checksum(octets(staging.runs[1][reader], block)) for block in blocks(copies, 12)
            )
            for part, c in zip(staging.runs[1][reader].split([c.elements for c in copies]), copies, strict=True):
                window(live[reader][c.param], c, c.dst_row0, c.dst_col0).copy_(part.view(c.rows, c.cols))
    for reader in range(2):
        torch.testing.assert_close(live[reader], generator_parameters(reader, torch.float32), rtol=0, atol=0)


def test_readers_that_want_parameters_in_different_orders_get_their_own() -> None:
    params = {name: torch.randn(16, 8) for name in "abc"}
    halves = {name: [Copy(name, 0, col, 16, 4, "p", 0, 0) for col in (0, 4)] for name in params}
    runs = {reader: tuple(halves[name][reader] for name in names) for reader, names in enumerate(("abc", "cab"))}
    staging = Staging(params, runs, torch.bfloat16, slice_bytes=64, block_bytes=96)
    for serial, scale in enumerate((1.0, -0.375), start=1):
        for param in params.values():
            param.mul_(scale)
        manifests = staging.pack(version=serial, slot=serial % 2, serial=serial)
        for reader, copies in runs.items():
            run, expected = staging.runs[serial % 2][reader], torch.empty(3 * 64, dtype=torch.bfloat16)
            reference_pack(params, copies, expected)
            assert torch.equal(run, expected)
            assert manifests[reader].checksums == tuple(checksum(octets(run, block)) for block in blocks(copies, 48))


def test_what_does_not_fit_is_refused_by_name() -> None:
    copy = Copy("a", 0, 0, 4, 2, "p", 1, 0)
    elsewhere = Offer("another host", 1, 1, 1 << 20, (4096, 8192), 32, layout((copy,), "float32", 8), None)
    source = Source(3, elsewhere, (copy,), "float32", 8)
    for params, message in [
        ({}, "p: expected in the live model"),
        ({"p": torch.zeros(4, 2)}, r"p: expected at least 5 x 2, found shape \(4, 2\)"),
        ({"p": torch.zeros(5, 1)}, r"p: expected at least 5 x 2, found shape \(5, 1\)"),
        ({"p": torch.zeros(5, 2).bfloat16()}, "p: expected float32 as staged by the trainer, found torch.bfloat16"),
    ]:
        with pytest.raises(ValueError, match=message):
            Landing(params, [source])
    fits = {"p": torch.zeros(5, 2)}
    with pytest.raises(ValueError, match=r"trainer rank 3: expected 64 bytes .* found 32"):
        Landing({}, [replace(source, copies=(copy, copy))])
    with pytest.raises(ValueError, match=r"trainer rank 3: expected layout .*, as planned"):
        Landing(fits, [replace(source, copies=(replace(copy, src_row0=1),))])
    with pytest.raises(ValueError, match=r'weight_sync\.transport: expected "auto" or "rdma"'):
        Landing(fits, [source], WeightSyncSection(transport="shm"))
    with pytest.raises(RuntimeError, match=r"at /proc/\d+/fd/9999, found No such file"):
        Landing(fits, [replace(source, offer=replace(elsewhere, place=here(), pid=os.getpid(), fd=9999))])
    with pytest.raises(ValueError, match="found none for a"):
        Staging({}, {0: (copy,)}, torch.float32, slice_bytes=64, block_bytes=64)
    with pytest.raises(ValueError, match="slice_bytes: expected at least one element"):
        Staging({}, {}, torch.float32, slice_bytes=3, block_bytes=64)


def test_parameters_that_cannot_be_described_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^w: expected a Hugging Face name"):
        shards_of([("w", torch.zeros(2))], {})
    with pytest.raises(ValueError, match=r"^w: expected a vector or a matrix, found shape \(1, 2, 3\)"):
        shards_of([("w", torch.zeros(1, 2, 3))], {"w": "w"})
    with pytest.raises(ValueError, match=r"^w: expected a stack of matrices, found shape \(2, 3\)"):
        shards_of([("w", torch.zeros(2, 3))], {"w": "w.{}"})
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        partial = DTensor.from_local(torch.zeros(2), mesh, [Partial()], run_check=False)
        with pytest.raises(ValueError, match=r"^w: expected sharded or replicated values"):
            shards_of([("w", partial)], {"w": "w"})
    finally:
        dist.destroy_process_group()


def test_a_stack_is_a_tensor_of_each_of_its_experts() -> None:
    """Expert parallelism deals out experts first; FSDP2 then cuts the experts of a rank."""
    whole = torch.randn(8, 4, 2)
    dist.init_process_group("fake", rank=3, world_size=4, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2, 2))
        places = [StridedShard(0, split_factor=2), ShardPlacement(0)]
        stack = DTensor.from_local(whole[6:], mesh, places, run_check=False, shape=whole.shape, stride=whole.stride())
        assert shards_of([("w", stack)], {"w": "e.{}"}) == [Shard("e.6", 0, 4, 0, 2), Shard("e.7", 0, 4, 0, 2)]
        (first, second) = shards_of([("w", stack)], {"w": "e.{}"}, coordinates_of(1))
        assert (first.name, second.name) == ("e.4", "e.5")
        local = local_tensors({"e.{}": stack})
    finally:
        dist.destroy_process_group()
    assert all(torch.equal(local[f"e.{i}"], whole[i]) for i in (6, 7))

    live = torch.zeros(2, 6, 2)  # each expert under two rows of something else
    copies = [Copy(f"e.{6 + i}", 0, 0, 4, 2, "p", 6 * i + 2, 0) for i in range(2)]
    run = torch.empty(16)
    pack(local, copies, run)
    for copy, part in zip(copies, run.split(8), strict=True):
        window(live, copy, copy.dst_row0, copy.dst_col0).copy_(part.view(4, 2))
    assert torch.equal(live[:, 2:], whole[6:])
    assert not live[:, :2].any()


def test_parameters_that_a_gpu_keeps_on_the_host_are_verified_as_a_gpu_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """training.enable_cpu_offload: the generators are on GPUs all the same."""
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        mesh = init_device_mesh("cpu", (2,))
        offloaded = DTensor.from_local(torch.zeros(2), mesh, [ShardPlacement(0)], run_check=False)
        assert gpu_of([torch.zeros(2), offloaded]) is None
        monkeypatch.setattr(type(mesh), "device_type", "cuda")
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
        assert gpu_of([torch.zeros(2), offloaded]) == torch.device("cuda:3")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("mesh", [(1, 3, 2), (2, 2, 1), (2, 3, 2)])
def test_one_rank_can_say_what_every_other_holds(mesh: tuple[int, int, int]) -> None:
    layouts = [weights.shards() for weights in as_each_rank(*mesh)]
    for weights in as_each_rank(*mesh):
        own = [
            shards_of(weights.named_parameters(), weights.hf_names, coordinates_of(rank))
            for rank in range(len(layouts))
        ]
        assert own == layouts


LORA = "w.lora_B.weight"
ADAPTED = (
    Copy("w.weight", 0, 0, 24, 8, "p.weight", 0, 0),
    Copy("w.lora_A.weight", 0, 0, 4, 8, "p.lora_a.0", 0, 0),
    Copy("w.lora_B.weight", 0, 0, 24, 4, "p.lora_b.0", 0, 0),
)


def adapted() -> tuple[dict[str, torch.Tensor], Staging]:
    """Return frozen weights with an adapter, and their staging."""
    sizes = {"w.weight": (24, 8), "w.lora_A.weight": (4, 8), "w.lora_B.weight": (24, 4)}
    params = {name: torch.randn(size) for name, size in sizes.items()}

    def view(params: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return local_tensors(params) | {LORA: 1.5 * params[LORA]}

    return params, Staging(params, {0: ADAPTED}, torch.float32, slice_bytes=500, block_bytes=96, view=view)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_frozen_weights_are_packed_once_per_slot_and_adapters_scaled(
    on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if on_gpu:  # packs through a buffer, here of three blocks
        as_on_a_gpu(monkeypatch)
        monkeypatch.setattr(staging_module, "BUFFER_BYTES", 3 * 96)
    params, staging = adapted()
    first = params["w.weight"].clone()
    for serial in range(1, 5):
        params["w.lora_B.weight"].add_(1)
        if serial == 3:
            params["w.weight"].add_(1)  # no trainer does: that it is not packed again shows
        if serial == 4:
            staging.forget_frozen()
        slot = serial % 2
        (manifest,) = staging.pack(serial, slot, serial).values()
        run = staging.runs[slot][0]
        assert torch.equal(run[:192].view(24, 8), params["w.weight"] if serial == 4 else first)
        assert torch.equal(run[192:224].view(4, 8), params["w.lora_A.weight"])
        assert torch.equal(run[224:].view(24, 4), 1.5 * params["w.lora_B.weight"])
        cut = blocks(ADAPTED, 24)
        read = checksums_of([parts_of(run, block) for block in cut], torch.device("cpu") if on_gpu else None)
        assert manifest.checksums == tuple(read(range(len(cut)))), "as readers compute them over the run"
        run.view(torch.uint8)[40] ^= 1
        assert [i for i, found in enumerate(read(range(len(cut)))) if found != manifest.checksums[i]] == [0]
        run.view(torch.uint8)[40] ^= 1


def test_no_slice_for_another_host_has_adapters_and_frozen_weights() -> None:
    _, staging = adapted()
    assert [len(part) for part in staging._slices(0, staging.runs[0][0])] == [500, 4 * 192 - 500, 500, 12]
