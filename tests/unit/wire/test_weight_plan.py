"""The planner against plain numpy, and against what vLLM's own loader makes of the same tensors."""

import json
import os
import pickle
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import (
    ROUTING_SLACK,
    Piece,
    Run,
    Shard,
    WeightPlan,
    param_shapes,
    pieces,
    plan,
    verify_complete,
)

TINY = ModelShape(
    family="llama3",
    vocab_size=100,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=1,
    head_dim=32,
    hidden_dim=48,
    max_seq_len=64,
    rope_theta=1e4,
    norm_eps=1e-6,
    tied=False,
)
LLAMA_8B = replace(
    TINY, vocab_size=128256, dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, head_dim=128, hidden_dim=14336
)

BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed_tokens", "lm_head")  # the trainer's TP
BY_COLS = ("o_proj", "down_proj")


def hf_sizes(shape: ModelShape) -> dict[str, tuple[int, int]]:
    """Every tensor of a Hugging Face checkpoint; vectors have one column."""
    q, kv, dim = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim, shape.dim
    sizes = {"model.embed_tokens": (shape.vocab_size, dim), "model.norm": (dim, 1)}
    for i in range(shape.n_layers):
        layer = {
            "self_attn.q_proj": (q, dim),
            "self_attn.k_proj": (kv, dim),
            "self_attn.v_proj": (kv, dim),
            "self_attn.o_proj": (dim, q),
            "mlp.gate_proj": (shape.hidden_dim, dim),
            "mlp.up_proj": (shape.hidden_dim, dim),
            "mlp.down_proj": (dim, shape.hidden_dim),
            "input_layernorm": (dim, 1),
            "post_attention_layernorm": (dim, 1),
        }
        if shape.family == "qwen3":
            layer |= {"self_attn.q_norm": (shape.head_dim, 1), "self_attn.k_norm": (shape.head_dim, 1)}
        sizes |= {f"model.layers.{i}.{name}": size for name, size in layer.items()}
    if not shape.tied:
        sizes["lm_head"] = (shape.vocab_size, dim)
    return {f"{name}.weight": size for name, size in sizes.items()}


def numbered(sizes: dict[str, tuple[int, int]]) -> dict[str, np.ndarray]:
    """Tensors in which no two elements are equal."""
    tensors, start = {}, 0
    for name, (rows, cols) in sizes.items():
        tensors[name] = np.arange(start, start + rows * cols).reshape(rows, cols)
        start += rows * cols
    return tensors


def interleaved(name: str, shape: ModelShape) -> bool:
    return shape.family == "llama3" and name.endswith(("q_proj.weight", "k_proj.weight"))


def titan_order(tensors: dict[str, np.ndarray], shape: ModelShape) -> dict[str, np.ndarray]:
    """What TorchTitan's adapter makes of a Hugging Face checkpoint (Llama3StateDictAdapter._reverse_permute)."""
    half = shape.head_dim // 2
    return {
        name: w.reshape(-1, 2, half, shape.dim).swapaxes(1, 2).reshape(w.shape) if interleaved(name, shape) else w
        for name, w in tensors.items()
    }


def chunk(start: int, size: int, parts: int, index: int) -> tuple[int, int]:
    """torch.chunk: all chunks but the last non-empty one are equally large."""
    each = -(-size // parts)
    skip = min(index * each, size)
    return start + skip, min(each, size - skip)


def layout(shape: ModelShape, *, replicate: int = 1, fsdp: int = 1, tp: int = 1) -> list[list[Shard]]:
    """TorchTitan's shards by rank: tensor parallelism first, then FSDP2 on the rows of what it left."""
    ranks = []
    for _ in range(replicate):
        for f in range(fsdp):
            for t in range(tp):
                shards = []
                for name, (rows, cols) in hf_sizes(shape).items():
                    row, col = (0, rows), (0, cols)
                    if any(part in name for part in BY_ROWS):
                        row = chunk(*row, tp, t)
                    if any(part in name for part in BY_COLS):
                        col = chunk(*col, tp, t)
                    row = chunk(*row, fsdp, f)
                    shards.append(Shard(name, *row, *col, shape.head_dim if interleaved(name, shape) else 0))
                ranks.append(shards)
    return ranks


def execute(plan: WeightPlan, held: list[dict[str, np.ndarray]], live: list[dict[str, np.ndarray]]) -> None:
    """Every pair's run, packed and landed element by element."""
    for (rank, reader), copies in plan.copies.items():
        run = []
        for c in copies:
            rows = [c.src_row0 + b * c.block_stride + i * c.src_step for b in range(c.blocks) for i in range(c.rows)]
            run.append(held[rank][c.name][rows, c.src_col0 : c.src_col0 + c.cols])
        for c, values in zip(copies, run, strict=True):
            rows = [c.dst_row0 + b * c.block_stride + i for b in range(c.blocks) for i in range(c.rows)]
            live[reader][c.param][rows, c.dst_col0 : c.dst_col0 + c.cols] += values


def live_parameters(tensors: dict[str, np.ndarray], shape: ModelShape, tp: int, rank: int) -> dict[str, np.ndarray]:
    """vLLM's parameters, by fusing and slicing whole tensors. Padding is 0."""

    def padded(w: np.ndarray) -> np.ndarray:
        return np.concatenate([w, np.zeros((-len(w) % 64, w.shape[1]), w.dtype)])

    def kv(w: np.ndarray) -> np.ndarray:
        heads = w.reshape(shape.n_kv_heads, shape.head_dim, shape.dim)
        return np.repeat(heads, max(1, tp // shape.n_kv_heads), axis=0).reshape(-1, shape.dim)

    def mine(w: np.ndarray, axis: int = 0) -> np.ndarray:
        return np.split(w, tp, axis)[rank]

    t = {name.removesuffix(".weight"): w for name, w in tensors.items()}
    live = {"model.embed_tokens": mine(padded(t["model.embed_tokens"])), "model.norm": t["model.norm"]}
    for i in range(shape.n_layers):
        attn, mlp = f"model.layers.{i}.self_attn", f"model.layers.{i}.mlp"
        q, k, v = mine(t[f"{attn}.q_proj"]), mine(kv(t[f"{attn}.k_proj"])), mine(kv(t[f"{attn}.v_proj"]))
        live[f"{attn}.qkv_proj"] = np.concatenate([q, k, v])
        live[f"{attn}.o_proj"] = mine(t[f"{attn}.o_proj"], axis=1)
        live[f"{mlp}.gate_up_proj"] = np.concatenate([mine(t[f"{mlp}.gate_proj"]), mine(t[f"{mlp}.up_proj"])])
        live[f"{mlp}.down_proj"] = mine(t[f"{mlp}.down_proj"], axis=1)
        live |= {name: w for name, w in t.items() if name.startswith(f"model.layers.{i}.") and "norm" in name}
    if not shape.tied:
        live["lm_head"] = mine(padded(t["lm_head"]))
    return {f"{name}.weight": w for name, w in live.items()}


@st.composite
def shapes(draw: st.DrawFn, tp: int) -> ModelShape:
    kv_heads = draw(st.sampled_from([1, 2, 4, 8]))
    heads = max(kv_heads, tp) * draw(st.integers(1, 2))
    return replace(
        TINY,
        family=draw(st.sampled_from(["llama3", "qwen3"])),
        vocab_size=draw(st.integers(1, 150)),
        dim=draw(st.integers(2, 9)),
        n_layers=draw(st.integers(1, 2)),
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([2, 4, 6, 10])),
        hidden_dim=tp * draw(st.integers(1, 5)),
        tied=draw(st.booleans()),
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_trainer_fills_any_generator_exactly_once(data: st.DataObject) -> None:
    readers = data.draw(st.sampled_from([1, 2, 4, 8]), "generator tp")
    shape = data.draw(shapes(readers), "shape")
    mesh = data.draw(
        st.fixed_dictionaries({"replicate": st.integers(1, 3), "fsdp": st.integers(1, 5), "tp": st.integers(1, 3)})
    )
    trainer = layout(shape, **mesh)
    made = plan(trainer, [pieces(shape, tp=readers, rank=rank) for rank in range(readers)])
    assert list(made.copies) == [(t, r) for t in range(len(trainer)) for r in range(readers)], "one run for every pair"

    tensors = {name: w + 1 for name, w in numbered(hf_sizes(shape)).items()}  # 0 is padding
    titan = titan_order(tensors, shape)
    held = [
        {s.name: titan[s.name][s.row0 : s.row0 + s.rows, s.col0 : s.col0 + s.cols] for s in shards}
        for shards in trainer
    ]
    sizes = {name: size if len(size) == 2 else (*size, 1) for name, size in param_shapes(shape, readers).items()}
    live = [{name: np.zeros(size, np.int64) for name, size in sizes.items()} for _ in range(readers)]
    written = [{name: np.zeros(size, np.int64) for name, size in sizes.items()} for _ in range(readers)]
    execute(made, held, live)
    execute(made, [{name: np.ones_like(w) for name, w in shards.items()} for shards in held], written)

    for rank in range(readers):
        expected = live_parameters(tensors, shape, readers, rank)
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


@st.composite
def cuts(draw: st.DrawFn, size: int) -> list[tuple[int, int]]:
    """(first, size) of parts of any sizes, in any order."""
    bounds = sorted({0, size, *draw(st.lists(st.integers(0, size), max_size=5))})
    return draw(st.permutations([(low, high - low) for low, high in pairwise(bounds)]))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_any_cut_of_a_tensor_fills_any_rectangle_of_it(data: st.DataObject) -> None:
    head_dim = data.draw(st.sampled_from([0, 2, 4, 6]), "head_dim")
    rows, cols = (head_dim or 3) * data.draw(st.integers(1, 6), "rows"), data.draw(st.integers(1, 8), "cols")
    columns = data.draw(cuts(cols), "columns")
    shards = [Shard("w", *row, *col, head_dim) for col in columns for row in data.draw(cuts(rows), "rows by column")]
    (row0, height), (col0, width) = data.draw(cuts(rows), "piece")[0], data.draw(cuts(cols), "piece")[0]
    made = plan([[shard] for shard in shards], [[Piece("p", 2, 1, "w", row0, height, col0, width)]])

    stored = np.arange(rows * cols).reshape(rows, cols)
    heads = stored.reshape(-1, 2, head_dim // 2, cols).swapaxes(1, 2) if head_dim else stored
    titan = heads.reshape(rows, cols)
    held = [{"w": titan[s.row0 : s.row0 + s.rows, s.col0 : s.col0 + s.cols]} for s in shards]
    live = [{"p": np.zeros((height + 3, width + 2), np.int64)}]
    execute(made, held, live)
    expected = np.pad(stored[row0 : row0 + height, col0 : col0 + width], ((2, 1), (1, 1)))
    np.testing.assert_array_equal(live[0]["p"], expected)
    assert made.received(0) == height * width


def test_the_rotary_order_is_torchtitans() -> None:
    import torch
    from torchtitan.models.llama3 import Llama3StateDictAdapter as Adapter

    shape = replace(TINY, n_kv_heads=2)
    stored = numbered(hf_sizes(shape))
    for name, values in titan_order(stored, shape).items():
        if interleaved(name, shape):
            heads = len(values) // shape.head_dim
            back = Adapter._permute(None, torch.from_numpy(values.copy()), heads)  # pyright: ignore[reportArgumentType]
            np.testing.assert_array_equal(back.numpy(), stored[name], err_msg=name)


def test_rotary_heads_move_together_even_where_fsdp_cuts_them() -> None:
    readers = [pieces(LLAMA_8B, tp=1, rank=0)]
    per_layer = {fsdp: len(rotary(plan(layout(LLAMA_8B, fsdp=fsdp), readers))) / 32 for fsdp in (1, 3, 8)}
    assert per_layer[1] == 4  # q and k, two halves each, for 40 heads
    assert per_layer[3] <= 3 * 2 * 6  # a cut head at either end of a shard has its own copies
    assert per_layer[8] == 32


def rotary(made: WeightPlan) -> list[str]:
    return [c.name for copies in made.copies.values() for c in copies if c.src_step == 2]


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


LLAMA_70B = replace(LLAMA_8B, dim=8192, n_heads=64, hidden_dim=28672)


@pytest.mark.parametrize("replicate", [1, 8])
def test_what_all_of_a_group_hold_comes_from_a_rank_that_sends_to_the_reader_anyway(replicate: int) -> None:
    shape = replace(LLAMA_70B, n_layers=16)  # with fewer, two embeddings cannot be spread evenly over eight replicas
    trainer = layout(shape, replicate=replicate, fsdp=64 // replicate, tp=8)
    made = plan(trainer, [pieces(shape, tp=8, rank=rank) for rank in range(8)])
    assert sum(map(bool, made.copies.values())) == len(trainer) == 512, "one run a rank, norms included"
    sent = [made.sent(rank) for rank in range(512)]
    assert max(sent) < 1.1 * min(sent)


def test_planning_does_not_ask_every_shard_for_every_piece() -> None:
    shape = replace(LLAMA_70B, n_layers=2)
    trainer, readers = layout(shape, fsdp=64, tp=8), [pieces(shape, tp=64, rank=rank) for rank in range(64)]
    began = time.process_time()
    plan(trainer, readers)
    assert time.process_time() - began < 10, "0.6 s alone; all pairs of 10752 shards and 1344 pieces took 2.1"


def test_a_run_is_small_on_the_wire() -> None:
    shape = replace(LLAMA_70B, n_layers=80)
    made = plan(layout(shape, tp=8), [pieces(shape, tp=8, rank=rank) for rank in range(8)])
    runs = [run for run in made.copies.values() if run]
    packed = [pickle.dumps(run) for run in runs]
    assert sum(map(len, packed)) < 10 * sum(map(len, runs)), "bytes per copy"
    assert [pickle.loads(p) for p in packed] == runs
    for run in (made.copies[0, 0], made.copies[0, 0][:1], ()):
        assert type(pickle.loads(pickle.dumps(Run(run)))) is Run
        assert pickle.loads(pickle.dumps(Run(run))) == run


def test_a_plan_is_read_by_rank_and_by_reader() -> None:
    made = plan(layout(LLAMA_8B, fsdp=8), [pieces(LLAMA_8B, tp=2, rank=rank) for rank in range(2)])
    assert made.outgoing(3) == {reader: made.copies[3, reader] for reader in range(2) if made.copies[3, reader]}
    assert made.incoming(1) == {rank: made.copies[rank, 1] for rank in range(8) if made.copies[rank, 1]}
    assert made.describe(itemsize=2).startswith("2 reader(s) x 8.03 GB from 8 trainer rank(s) x 2.01 GB: ")
    assert "\n" not in made.describe(itemsize=2)


def test_one_reader_reads_every_parameter_of_the_model() -> None:
    for family in ("llama3", "qwen3"):
        for tied in (False, True):
            shape = replace(TINY, family=family, tied=tied)
            made = plan(layout(shape, fsdp=3), [pieces(shape, tp=1, rank=0)])
            assert made.received(0) == shape.parameters
            assert made.received(0) == sum(made.elements(rank, 0) for rank in range(3))


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


def test_rotary_rows_that_nobody_holds_are_named_in_the_parameters_order() -> None:
    tensor = Piece("qkv", 10, 0, "q", 0, 16, 0, 3)
    with pytest.raises(ValueError, match=r"rows 10\.\.25 from q, .* rows 11\.\.15 \(2 rows\)"):
        plan([[Shard("q", 0, 2, 0, 3, head_dim=8)], [Shard("q", 4, 12, 0, 3, head_dim=8)]], [[tensor]])


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


@pytest.mark.parametrize("tp", [1, 2])
def test_the_plan_equals_what_vllm_loads(tp: int, tmp_path: Path) -> None:
    """One key/value head over two ranks, a vocabulary of 100: replication and padding are in it."""
    from safetensors.numpy import save_file

    rng = np.random.default_rng(0)
    for family in ("llama3", "qwen3"):
        for tied in (False, True):
            shape = replace(TINY, family=family, tied=tied)
            folder = tmp_path / "models" / f"{family}-{'tied' if tied else 'untied'}"
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
            tensors = {name: rng.random(size, np.float32) for name, size in hf_sizes(shape).items()}
            vectors = {name: w[:, 0] if w.shape[1] == 1 else w for name, w in tensors.items()}
            save_file(vectors, folder / "model.safetensors", metadata={"format": "pt"})
    env = os.environ | {
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_DIST_IDENT": f"weight_plan_{os.getpid()}",  # names shared memory; vLLM's CPU worker would set it
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(Path(__file__).parents[3]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(tmp_path), str(tp), str(rank)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(tp)
    ]
    for process in ranks:
        output, _ = process.communicate(timeout=180)
        assert process.returncode == 0, output
        assert "4 models equal" in output


def compare_with_vllm(folder: Path, tp: int, rank: int) -> None:
    """In a process of its own: vLLM's loader and the plan, from the same files, bit for bit."""
    import torch
    import torch.nn.functional as F
    import vllm.model_executor.layers.utils as layers
    from safetensors.numpy import load_file
    from vllm import EngineArgs
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader import get_model

    if not torch.accelerator.is_available():
        torch.accelerator.empty_cache = lambda: None  # as vLLM's CPU worker does
    # Else vLLM repacks linear weights on a CPU and leaves empty parameters behind.
    layers.dispatch_cpu_unquantized_gemm = lambda layer, remove_weight: setattr(layer, "cpu_linear", F.linear)

    models = sorted((folder / "models").iterdir())
    for model_dir in models:
        config = EngineArgs(
            model=str(model_dir),
            dtype="float32",
            max_model_len=64,
            skip_tokenizer_init=True,
            enforce_eager=True,
            tensor_parallel_size=tp,
            distributed_executor_backend="external_launcher" if tp > 1 else None,
        ).create_engine_config()
        with set_current_vllm_config(config):
            if model_dir is models[0]:
                init_distributed_environment(tp, rank, f"file://{folder}/rendezvous", rank, "gloo")
                initialize_model_parallel(tp)
            model = get_model(vllm_config=config)
        shape = ModelShape.from_hf(json.loads((model_dir / "config.json").read_text()))
        loaded = {name: param.detach().cpu().numpy() for name, param in model.named_parameters()}
        assert {name: w.shape for name, w in loaded.items()} == param_shapes(shape, tp)

        stored = load_file(model_dir / "model.safetensors")
        tensors = {name: w.reshape(len(w), -1) for name, w in stored.items()}
        trainer = [[Shard(name, 0, w.shape[0], 0, w.shape[1]) for name, w in tensors.items()]]
        live = {name: np.zeros((len(w), w[0].size), w.dtype) for name, w in loaded.items()}
        execute(plan(trainer, [pieces(shape, tp=tp, rank=rank)]), [tensors], [live])
        for name, values in loaded.items():
            np.testing.assert_array_equal(live[name].reshape(values.shape), values, err_msg=name)
    print(f"{len(models)} models equal")


if __name__ == "__main__":
    compare_with_vllm(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))


def test_the_live_model_must_be_the_planned_one() -> None:
    live = param_shapes(TINY, 1)
    verify_complete(live, TINY, 1)
    with pytest.raises(ValueError, match=r"lm_head\.weight \(not in the plan\)"):
        verify_complete(live, replace(TINY, tied=True), 1)
    with pytest.raises(ValueError, match=r"layers\.0\.self_attn\.q_norm\.weight \(not in the model\)"):
        verify_complete(live, replace(TINY, family="qwen3"), 1)
    with pytest.raises(ValueError, match=r"norm\.weight \(expected shape \(64,\), found \(0,\)\)"):
        verify_complete(live | {"model.norm.weight": (0,)}, TINY, 1)
