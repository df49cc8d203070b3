"""A dry run asks TorchTitan how it cuts a model, in a process with a deadline."""

from dataclasses import replace
from itertools import product

import pytest

from support.shapes import LLAMA_8B, QWEN_600M
from titan_rl.config.auto import on_device
from titan_rl.config.sections import Config, LoraSection, ModelSection, ParallelismSection
from titan_rl.config.toml import find, load
from titan_rl.ext.run_plan.sharding import CannotShard, ask_titan, questions
from titan_rl.ext.run_plan.tables import sync_table
from titan_rl.preflight.memory import GIB, HostLoad, by_formula, host_loads, needs, on_gpus
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.model_shape import MeshQuestion, ShardedModel

TINY = shape_of(ModelSection())
USUAL = on_device(Config(), "cpu")


def mesh(shard: int = 1, tp: int = 1, replicate: int = 1, cp: int = 1) -> ParallelismSection:
    return ParallelismSection(
        data_parallel_shard_degree=shard,
        tensor_parallel_degree=tp,
        data_parallel_replicate_degree=replicate,
        context_parallel_degree=cp,
    )


PPO = replace(on_device(load(find("ppo_reward_model_llama")), "cpu"), parallelism=mesh(shard=2, tp=2))
SHAPES = {
    name: replace(shape, n_layers=2)
    for name, shape in {"llama": LLAMA_8B, "qwen": QWEN_600M, "value": QWEN_600M.with_value_head()}.items()
}
MESHES = [
    mesh(),
    mesh(shard=8),
    mesh(shard=4, tp=2),
    mesh(shard=2, tp=4, replicate=2),
    mesh(shard=128, tp=8),
    mesh(shard=2, tp=2, cp=2),
]
CUT = {
    f"{name} {i}": MeshQuestion(USUAL, shape, p)
    for (name, shape), (i, p) in product(SHAPES.items(), enumerate(MESHES))
    if shape.n_kv_heads % p.tensor_parallel_degree == 0
}
LORA = replace(USUAL, lora=LoraSection(rank=16, base_dtype="bfloat16"))
CUT |= {f"adapters {i}": MeshQuestion(LORA, SHAPES["llama"], p) for i, p in enumerate(MESHES[:4])}


@pytest.fixture(scope="module")
def cuts() -> dict[str, ShardedModel]:
    """TorchTitan's answers to all questions of this file: one process imports it once."""
    return ask_titan(questions(PPO, TINY) | CUT)


def test_the_formula_agrees_with_torchtitan(cuts: dict[str, ShardedModel]) -> None:
    """To 1%: norms are not cut by tensor parallelism, and each parameter is cut by itself."""
    for name, question in CUT.items():
        expected = by_formula(question.shape, question.parallelism, question.config.lora)
        for part in ("held", "whole", "block", "last", "adapters", "adapters_whole"):
            got, want = getattr(cuts[name], part), getattr(expected, part)
            spare = question.shape.dim + question.shape.vocab_size  # a value head is not cut; the last norm is dealt
            assert want * 0.99 - spare <= got <= want * 1.01 + spare, (name, part)


def test_all_meshes_of_a_run_are_asked_about(cuts: dict[str, ShardedModel]) -> None:
    assert list(questions(PPO, TINY)) == ["trainer", "reference", "reward_model", "critic"]
    sent = cuts["trainer"].sent
    assert [len(runs) for runs in sent] == [1] * 4
    assert sum(map(sum, sent)) == TINY.parameters
    assert cuts["critic"].last < cuts["reference"].last
    assert not cuts["critic"].sent


def test_a_mesh_that_torchtitan_refuses_is_named() -> None:
    asked = {"critic": MeshQuestion(USUAL, TINY, mesh(tp=3))}
    with pytest.raises(CannotShard, match=r"^\[critic\]: expected a mesh over which TorchTitan cuts the model, found "):
        ask_titan(asked)


def test_torchtitan_has_a_deadline() -> None:
    with pytest.raises(
        CannotShard, match=r"^expected TorchTitan to cut the models within 0\.01 s, found it still busy"
    ):
        ask_titan({"trainer": MeshQuestion(USUAL, TINY, mesh())}, seconds=0.01)


def test_a_rank_that_holds_more_than_its_share_counts() -> None:
    """TorchTitan's numbers replace the formula's."""
    config = on_device(load(find("grpo_llama3_8b")), "cuda")
    resolved = on_gpus(config, LLAMA_8B, 79 * GIB)
    twice = by_formula(LLAMA_8B, config.parallelism)
    uneven = replace(twice, held=2 * twice.held)
    before, after = (needs(resolved, LLAMA_8B, 79 * GIB, cut)["trainer"] for cut in ({}, {"trainer": uneven}))
    assert after.nbytes - before.nbytes == pytest.approx((1 + Config().memory.fragmentation) * 16 * twice.held)
    assert not after.fits


def loads(config: Config, sent: list[list[int]]) -> list[HostLoad]:
    return host_loads(config, LLAMA_8B, {"trainer": ShardedModel(1, 1, 1, 1, sent)}, 4)


def test_a_byte_crosses_a_link_once_per_receiving_host() -> None:
    """Hosts 0 and 1 train, 2 and 3 have two replicas each."""
    config = on_device(load(find("grpo_llama3_8b")), "cuda")
    config = replace(
        config,
        parallelism=mesh(shard=4, tp=2),
        generator=replace(config.generator, replicas=4, tensor_parallel_degree=2),
        hosts=replace(config.hosts, count=4, slots=4),
        fault=replace(config.fault, snapshot_interval=0),
    )
    found = loads(config, [[100, 100]] * 8)
    assert [(load.received, load.sent) for load in found] == [(0, 3200), (0, 3200), (3200, 0), (3200, 0)]
    assert [dict(load.held) for load in found] == [{"staged weights": 3200}] * 2 + [{"received weights": 3200}] * 2


def test_hosts_that_pass_weights_on_relieve_the_trainers_ports() -> None:
    """Host 0 trains, 1 to 3 sample."""
    config = on_device(load(find("grpo_llama3_8b")), "cuda")
    config = replace(
        config,
        parallelism=mesh(shard=2, tp=2),
        generator=replace(config.generator, replicas=3, tensor_parallel_degree=4),
        hosts=replace(config.hosts, count=4, slots=4, link_gbps=0.0000064),
        fault=replace(config.fault, snapshot_interval=0),
    )
    found = {}
    for relay in (False, "auto"):
        keys = replace(config.weight_sync, relay=relay)
        each = loads(replace(config, weight_sync=keys), [[100] * 4] * 4)
        found[relay] = [load.sent for load in each]
        assert [load.received for load in each] == [0, 3200, 3200, 3200]
        table = sync_table(replace(config, weight_sync=keys), LLAMA_8B, each)
        rows = [what for name, _, what in table.rows if name == "out of a host"]
        assert rows == [
            "at most, as hosts pass it on (weight_sync.relay)" if relay else "at most, to all hosts with generators"
        ]
        assert table.total.startswith(f"at least {4 if relay else 12} s")
    assert found == {False: [9600, 0, 0, 0], "auto": [3200, 0, 3200, 3200]}


def test_nothing_crosses_a_link_within_a_host() -> None:
    config = on_device(load(find("grpo_llama3_8b_colocated")), "cuda")
    (found,) = host_loads(config, LLAMA_8B, {"trainer": ShardedModel(1, 1, 1, 1, [[100]] * 8)}, 8)
    assert (found.received, found.sent) == (0, 0)
    assert found.held["staged weights"] == 2 * 8 * 100 * 2
    assert found.held["snapshots"] == 24 * LLAMA_8B.parameters


def test_block_inputs_that_are_offloaded_are_on_the_trainers_host() -> None:
    """torch pins a power of two for each, and again while the GPU reads the last microbatch's."""
    config = on_device(load(find("grpo_llama3_8b"), [("activation_checkpoint.mode", "offload")]), "cuda")
    training = replace(config.training, seq_len=3000, local_batch_size=1)
    (found,) = host_loads(
        replace(config, training=training), LLAMA_8B, {"trainer": ShardedModel(1, 1, 1, 1, [[100]] * 4)}, 8
    )
    assert found.held["block inputs"] == 4 * 2 * LLAMA_8B.n_layers * 4096 * LLAMA_8B.dim * 2
