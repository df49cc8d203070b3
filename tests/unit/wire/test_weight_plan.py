"""The planner, compared with plain numpy."""

import math
import pickle
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.shapes import LLAMA_8B, LLAMA_70B
from support.weight_layouts import NO_LORA, TINY, execute, hf_sizes, layout, numbered
from titan_rl.actors.vllm.vllm_params import param_shapes, pieces, verify_complete
from titan_rl.config.sections import LoraSection
from titan_rl.ext.adapters.layers import LAYERS, adapter_parameters, adapter_sizes, targets
from titan_rl.wire.manifest import blocks
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import ROUTING_SLACK, Piece, RunOfCopies, Shard, plan

FUSED = {"self_attn.qkv_proj": "qkv", "mlp.gate_up_proj": ("gate", "up")}
FUSED |= {"self_attn.o_proj": "o", "mlp.down_proj": ("down",)}


def live_parameters(
    tensors: dict[str, np.ndarray], shape: ModelShape, tp: int, rank: int, lora: LoraSection = NO_LORA
) -> dict[str, np.ndarray]:
    """Return vLLM's parameters, made by fusing and slicing whole tensors. Padding is 0, and so are the adapters of
    layers that have none but are fused with one that does."""

    def padded(w: np.ndarray) -> np.ndarray:
        return np.concatenate([w, np.zeros((-len(w) % 64, w.shape[1]), w.dtype)])

    def kv(w: np.ndarray) -> np.ndarray:
        heads = w.reshape(shape.n_kv_heads, shape.head_dim, w.shape[1])
        return np.repeat(heads, max(1, tp // shape.n_kv_heads), axis=0).reshape(-1, w.shape[1])

    def mine(w: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(w, tp, axis)[rank]

    t, biases = {name.removesuffix(".weight"): w for name, w in tensors.items()}, dict[str, np.ndarray]()
    stacks = dict[str, np.ndarray]()
    live = {"model.embed_tokens": mine(padded(t["model.embed_tokens"])), "model.norm": t["model.norm"]}
    for i in range(shape.n_layers):
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        q, k, v = mine(t[f"{attn}.q_proj"]), mine(kv(t[f"{attn}.k_proj"])), mine(kv(t[f"{attn}.v_proj"]))
        live[f"{attn}.qkv_proj"] = np.concatenate([q, k, v])
        if shape.family == "qwen2":
            q, k, v = (tensors[f"{attn}.{x}_proj.bias"] for x in "qkv")
            biases[f"{attn}.qkv_proj.bias"] = np.concatenate([mine(q), mine(kv(k)), mine(kv(v))])
        live[f"{attn}.o_proj"] = mine(t[f"{attn}.o_proj"], axis=1)
        if shape.experts:
            each, live[f"{mlp}.gate"] = [f"{mlp}.experts.{e}" for e in range(shape.experts)], t[f"{mlp}.gate"]
            stack = f"{mlp}.experts.routed_experts"
            halves = [mine(t[f"{expert}.{half}_proj"]) for expert in each for half in ("gate", "up")]
            stacks[f"{stack}.w13_weight"] = np.concatenate(halves)
            stacks[f"{stack}.w2_weight"] = np.concatenate([mine(t[f"{e}.down_proj"], axis=1) for e in each])
        else:
            live[f"{mlp}.gate_up_proj"] = np.concatenate([mine(t[f"{mlp}.gate_proj"]), mine(t[f"{mlp}.up_proj"])])
            live[f"{mlp}.down_proj"] = mine(t[f"{mlp}.down_proj"], axis=1)
        live |= {name: w for name, w in t.items() if name.startswith(f"model.layers.{i}.") and "norm" in name}
    if not shape.tied:
        live["lm_head"] = mine(padded(t["lm_head"]))
    stacked, adapted = dict[str, np.ndarray](), targets(lora, shape) if lora.on else []
    zeros = adapter_sizes(LoraSection(rank=lora.rank), shape)
    for layer, parts in FUSED.items() if adapted else ():
        if not set(parts) & set(adapted):
            continue
        for at, i, part in ((f"model.layers.{n}", i, p) for n in range(shape.n_layers) for i, p in enumerate(parts)):
            names = [f"{at}.{LAYERS[part]}.lora_{matrix}.weight" for matrix in "AB"]
            a, b = (tensors.get(name, np.zeros(zeros[name], np.int64)) for name in names)
            by_columns = part in ("o", "down")
            stacked[f"{at}.{layer}.lora_a.{i}"] = mine(a, axis=1) if by_columns else a
            stacked[f"{at}.{layer}.lora_b.{i}"] = b if by_columns else mine(kv(b) if part in ("k", "v") else b)
    return {f"{name}.weight": w for name, w in live.items()} | biases | stacks | stacked


@st.composite
def shapes(draw: st.DrawFn, tp: int) -> ModelShape:
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(kv_heads, tp) * draw(st.integers(1, 2))
    family = draw(st.sampled_from(["llama3", "qwen2", "qwen3", "qwen3_moe", "mistral"]))
    return replace(
        TINY,
        family=family,
        experts=draw(st.integers(1, 6)) if family == "qwen3_moe" else 0,
        vocab_size=draw(st.integers(1, 150)),
        dim=draw(st.integers(2, 9)),
        n_layers=draw(st.integers(1, 2)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6, 10])),
        hidden_dim=tp * draw(st.integers(1, 5)),
        tied=draw(st.booleans()),
    )


@settings(max_examples=3 * settings().max_examples // 2)
@given(st.data())
def test_any_trainer_fills_any_generator_exactly_once(data: st.DataObject) -> None:
    readers = data.draw(st.sampled_from([1, 2, 4, 8]), "generator tp")
    shape = data.draw(shapes(readers), "shape")
    some = data.draw(st.lists(st.sampled_from(["q", "v", "o"] if shape.experts else [*LAYERS]), unique=True), "targets")
    lora = data.draw(st.sampled_from([NO_LORA, LoraSection(rank=1), LoraSection(rank=3, targets=some)]), "adapters")
    mesh = data.draw(
        st.fixed_dictionaries({"replicate": st.integers(1, 3), "fsdp": st.integers(1, 5), "tp": st.integers(1, 3)})
    )
    ranks = mesh["fsdp"] * mesh["tp"]
    ep = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]), "experts over")
    trainer = layout(shape, **mesh, ep=ep, lora=lora)
    applied = lora if lora.on else None
    made = plan(trainer, [pieces(shape, tp=readers, rank=rank, lora=applied) for rank in range(readers)])
    assert list(made.copies) == [(t, r) for t in range(len(trainer)) for r in range(readers)], "one run for every pair"

    tensors = {name: w + 1 for name, w in numbered(hf_sizes(shape, lora)).items()}  # 0 is padding
    held = [
        {s.name: tensors[s.name][s.row0 : s.row0 + s.rows, s.col0 : s.col0 + s.cols] for s in shards}
        for shards in trainer
    ]
    shapes_of_rank = param_shapes(shape, readers, applied)
    planned = {name: size if len(size) > 1 else (*size, 1) for name, size in shapes_of_rank.items()}
    sizes = {name: (math.prod(size[:-1]), size[-1]) for name, size in planned.items()}
    live = [{name: np.zeros(size, np.int64) for name, size in sizes.items()} for _ in range(readers)]
    written = [{name: np.zeros(size, np.int64) for name, size in sizes.items()} for _ in range(readers)]
    execute(made, held, live)
    execute(made, [{name: np.ones_like(w) for name, w in shards.items()} for shards in held], written)

    for rank in range(readers):
        expected = live_parameters(tensors, shape, readers, rank, lora)
        assert expected.keys() == live[rank].keys()
        for name, values in expected.items():
            np.testing.assert_array_equal(live[rank][name], values, err_msg=name)
            np.testing.assert_array_equal(written[rank][name], values > 0, err_msg=f"{name}: written once, never pads")
        assert made.received(rank) == sum((values > 0).sum() for values in expected.values())
    sent = [made.sent(rank) for rank in range(len(trainer))]
    assert sum(sent) == sum(map(made.received, range(readers)))
    largest = max(shard.rows * shard.cols for shards in trainer for shard in shards)
    for first in range(len(trainer) // mesh["replicate"]):
        replicas = sent[first :: len(trainer) // mesh["replicate"]]
        assert max(replicas) - min(replicas) <= largest + ROUTING_SLACK * sum(sent) / len(sent)


def test_adapters_end_each_run_in_blocks_of_their_own() -> None:
    lora = LoraSection(rank=8)
    run = plan(layout(TINY, lora=lora), [pieces(TINY, tp=1, rank=0, lora=lora)]).outgoing(0)[0]
    cut = blocks(run, 1 << 10)
    assert [copy.adapts for copy in run] == sorted(copy.adapts for copy in run)
    assert all(len({copy.adapts for copy in block.copies}) == 1 for block in cut)
    assert sum(block.elements for block in cut if block.copies[0].adapts) == adapter_parameters(lora, TINY)


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """Draw (first, size) of parts of any sizes, in any order."""
    bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=5))})
    return draw(st.permutations([(low, high - low) for low, high in pairwise(bounds)]))


@settings(max_examples=2 * settings().max_examples)
@given(st.data())
def test_any_cut_of_a_tensor_fills_any_rectangle_of_it(data: st.DataObject) -> None:
    rows, cols = data.draw(st.integers(1, 24), "rows"), data.draw(st.integers(1, 8), "cols")
    columns = data.draw(cuts(cols), "columns")
    shards = [Shard("w", *row, *col) for col in columns for row in data.draw(cuts(rows), "rows by column")]
    (row0, height), (col0, width) = data.draw(cuts(rows), "piece")[0], data.draw(cuts(cols), "piece")[0]
    made = plan([[shard] for shard in shards], [[Piece("p", 2, 1, "w", row0, height, col0, width)]])

    stored = np.arange(rows * cols).reshape(rows, cols)
    held = [{"w": stored[s.row0 : s.row0 + s.rows, s.col0 : s.col0 + s.cols]} for s in shards]
    live = [{"p": np.zeros((height + 3, width + 2), np.int64)}]
    execute(made, held, live)
    expected = np.pad(stored[row0 : row0 + height, col0 : col0 + width], ((2, 1), (1, 1)))
    np.testing.assert_array_equal(live[0]["p"], expected)
    assert made.received(0) == height * width


def test_a_tensor_is_one_copy_from_each_shard() -> None:
    readers = [pieces(LLAMA_8B, tp=1, rank=0)]
    for fsdp in (1, 3, 8):
        made = plan(layout(LLAMA_8B, fsdp=fsdp), readers)
        assert sum(map(len, made.copies.values())) == len(hf_sizes(LLAMA_8B)) * fsdp


def test_replicas_share_the_load() -> None:
    readers = [pieces(LLAMA_8B, tp=2, rank=rank) for rank in range(2)]
    trainer = layout(LLAMA_8B, replicate=2, fsdp=2, tp=2)
    made = plan(trainer, readers)
    sent = [made.sent(rank) for rank in range(len(trainer))]
    assert sum(sent) == made.received(0) + made.received(1) > LLAMA_8B.parameters
    assert max(sent) < 1.01 * min(sent)
    assert made == plan(trainer, readers), "two planners must agree"

    both = [Shard(name, 0, rows, 0, 1) for name, rows in (("a", 1), ("b", 1), ("c", 2))]
    small = plan([both, both], [[Piece(s.name, 0, 0, s.name, 0, s.rows, 0, 1) for s in both]])
    assert [small.sent(rank) for rank in range(2)] == [2, 2], "the largest is placed first"


@pytest.mark.parametrize("replicate", [1, 8])
def test_what_all_of_a_group_hold_comes_from_a_rank_that_sends_to_the_reader_anyway(replicate: int) -> None:
    shape = replace(LLAMA_70B, n_layers=16)  # with fewer, two embeddings cannot be spread evenly over eight replicas
    trainer = layout(shape, replicate=replicate, fsdp=64 // replicate, tp=8)
    made = plan(trainer, [pieces(shape, tp=8, rank=rank) for rank in range(8)])
    assert sum(map(bool, made.copies.values())) == len(trainer) == 512, "one run a rank, norms included"
    sent = [made.sent(rank) for rank in range(512)]
    assert max(sent) < 1.1 * min(sent)


def test_a_run_is_small_on_the_wire() -> None:
    shape = replace(LLAMA_70B, n_layers=80)
    made = plan(layout(shape, tp=8), [pieces(shape, tp=8, rank=rank) for rank in range(8)])
    runs = [run for run in made.copies.values() if run]
    packed = [pickle.dumps(run) for run in runs]
    assert sum(map(len, packed)) < 10 * sum(map(len, runs)), "bytes per copy"
    assert [pickle.loads(p) for p in packed] == runs
    for run in (made.copies[0, 0], made.copies[0, 0][:1], ()):
        assert type(pickle.loads(pickle.dumps(RunOfCopies(run)))) is RunOfCopies
        assert pickle.loads(pickle.dumps(RunOfCopies(run))) == run


def test_a_plan_is_read_by_rank_and_by_reader() -> None:
    made = plan(layout(LLAMA_8B, fsdp=8), [pieces(LLAMA_8B, tp=2, rank=rank) for rank in range(2)])
    assert made.outgoing(3) == {reader: made.copies[3, reader] for reader in range(2) if made.copies[3, reader]}
    assert made.incoming(1) == {rank: made.copies[rank, 1] for rank in range(8) if made.copies[rank, 1]}
    assert made.describe(itemsize=2).startswith("2 reader(s) x 8.03 GB from 8 trainer rank(s) x 2.01 GB: ")
    assert "\n" not in made.describe(itemsize=2)


def test_a_missing_shard_is_named() -> None:
    readers = [pieces(TINY, tp=1, rank=0)]
    trainer = layout(TINY, fsdp=3)
    trainer[1] = [shard for shard in trainer[1] if shard.name != "model.layers.1.mlp.up_proj.weight"]
    with pytest.raises(
        ValueError, match=r"1\.mlp\.gate_up_proj\.weight: expected rows 48\.\.95 .* 64\.\.79 \(16 rows\)"
    ):
        plan(trainer, readers)
    with pytest.raises(ValueError, match=r"^lm_head\.weight: expected rows 0\.\.99 from lm_head\.weight"):
        plan(layout(replace(TINY, tied=True)), readers)


def test_rows_that_nobody_holds_are_named_as_the_parameters() -> None:
    tensor = Piece("qkv", 10, 0, "q", 0, 16, 0, 3)
    with pytest.raises(ValueError, match=r"rows 10\.\.25 from q, .* rows 12\.\.13 \(2 rows\)"):
        plan([[Shard("q", 0, 2, 0, 3)], [Shard("q", 4, 12, 0, 3)]], [[tensor]])


def test_contradicting_shards_are_refused() -> None:
    piece = Piece("p", 0, 0, "a", 0, 4, 0, 4)
    with pytest.raises(ValueError, match="a: expected equal or disjoint shards"):
        plan([[Shard("a", 0, 3, 0, 4)], [Shard("a", 2, 2, 0, 4)]], [[piece]])
    with pytest.raises(ValueError, match="trainer rank 0: expected one shard of a, found 2"):
        plan([[Shard("a", 0, 2, 0, 4), Shard("a", 2, 2, 0, 4)]], [[piece]])
    with pytest.raises(ValueError, match="the trainer holds b, which no generator parameter takes"):
        plan([[Shard("a", 0, 4, 0, 4), Shard("b", 0, 4, 0, 4)]], [[piece]])


@pytest.mark.parametrize(
    ("change", "tp", "message"),
    [
        ({"n_heads": 3}, 2, "a divisor of 3 attention heads, found 2"),
        ({"hidden_dim": 47}, 2, "a divisor of 47 feed-forward rows, found 2"),
        ({"n_heads": 12, "n_kv_heads": 3}, 2, "a divisor or a multiple of 3 key/value heads, found 2"),
        ({"n_heads": 12, "n_kv_heads": 3}, 4, "a divisor or a multiple of 3 key/value heads, found 4"),
        ({"n_heads": 6}, 3, "a divisor of 128 padded vocabulary rows, found 3"),
    ],
)
def test_impossible_tensor_parallelism_names_the_key(change: dict[str, int], tp: int, message: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[generator\] tensor_parallel_degree: expected {message}$"):
        pieces(replace(TINY, **change), tp=tp, rank=0)


def test_the_live_model_must_be_the_planned_one() -> None:
    live = param_shapes(TINY, 1)
    verify_complete(live, live)
    with pytest.raises(ValueError, match=r"lm_head\.weight \(not in the plan\)"):
        verify_complete(live, param_shapes(replace(TINY, tied=True), 1))
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_norm\.weight \(not in the model\)"):
        verify_complete(live, param_shapes(replace(TINY, family="qwen3"), 1))
    with pytest.raises(ValueError, match=r"norm\.weight \(expected shape \(64,\), found \(0,\)\)"):
        verify_complete(live | {"model.norm.weight": (0,)}, live)
