"""What is built from TorchTitan's parts, and that none of its private names is used outside private.py."""

import ast
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import VarlenAttention
from torchtitan.observability.structured_logger import log_trace_span

from titan_rl.actors.titan import document_attention, heads, titan_cpu
from titan_rl.actors.titan.activation_offload import OffloadAC
from titan_rl.actors.titan.instruments import record_titan_spans
from titan_rl.actors.titan.model import file_numbers, titan_config
from titan_rl.actors.titan.spec import build_spec, hf_names, plain
from titan_rl.config.auto import on_device
from titan_rl.config.sections import Config, DebugSection, Dtype, ParallelismSection, TrainingSection
from titan_rl.kernels.peak_flops import known_peak_flops, peak_flops
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.spans import span

ROOT = Path(__file__).parents[3]
LLAMA = ModelShape(
    family="llama3",
    vocab_size=97,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=16,
    hidden_dim=96,
    max_seq_len=256,
    rope_theta=500000.0,
    norm_eps=1e-5,
    tied=False,
)
QWEN = replace(LLAMA, family="qwen3", head_dim=24)
SHAPES = {
    "llama": LLAMA,
    "llama tied": replace(LLAMA, tied=True),
    "qwen": QWEN,
    "qwen tied": replace(QWEN, tied=True),
    "experts": replace(QWEN, family="qwen3_moe", experts=4, experts_per_token=2),
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def built(shape: ModelShape, device: str = "cpu", compute: Dtype = "float32") -> Any:
    spec = build_spec(shape, seq_len=32)
    attention = document_attention.overrides(device, compute)
    apply_overrides(OverrideConfig(imports=[heads.OVERRIDES[shape.head], *attention]), spec.model)
    with torch.device("meta"):
        return spec.model.build()


@shapes
def test_the_model_has_the_shapes_parameters_and_norms(shape: ModelShape) -> None:
    model = built(shape)
    assert sum(p.numel() for p in model.parameters()) == shape.parameters
    norms = {name: m.eps for name, m in model.named_modules() if name.endswith("norm") and hasattr(m, "eps")}
    assert len(norms) == 1 + shape.n_layers * (4 if shape.parts.head_norms else 2)
    assert set(norms.values()) == {shape.norm_eps}


@shapes
def test_every_parameter_has_its_own_hugging_face_name(shape: ModelShape) -> None:
    names = [name for name, _ in built(shape).named_parameters()]
    hf = hf_names(build_spec(shape, seq_len=32), names)
    assert len(set(hf.values())) == len(names)
    down = "model.layers.1.mlp.experts.{}.down_proj.weight" if shape.experts else "model.layers.1.mlp.down_proj.weight"
    assert {"model.norm.weight", down} <= set(hf.values())


@pytest.mark.parametrize("policy", [FullAC, OffloadAC])
def test_activation_checkpointing_does_not_hide_the_names(policy: type[FullAC]) -> None:
    model, spec = built(LLAMA), build_spec(LLAMA, seq_len=32)
    before = hf_names(spec, [name for name, _ in model.named_parameters()])
    policy.Config().build(dump_folder="").apply(model)
    after = hf_names(spec, [name for name, _ in model.named_parameters()])
    assert after.keys() != before.keys()
    assert list(after.values()) == list(before.values())
    assert {plain(name) for name in after} == set(before) == set(model.state_dict())


def test_an_override_that_renames_parameters_is_refused() -> None:
    with pytest.raises(ValueError, match=r"keep the parameters' names, found layers.0.feed_forward.w13"):
        hf_names(build_spec(LLAMA, seq_len=32), ["layers.0.feed_forward.w13"])


def test_heads_and_attention_are_overridden() -> None:
    model = built(LLAMA)
    assert isinstance(model.lm_head, heads.TokenHead)
    assert isinstance(built(LLAMA.with_value_head()).lm_head, heads.ValueHead)


@pytest.mark.parametrize(
    ("device", "compute", "attention"),
    [
        ("cpu", "float32", document_attention.DocumentSDPA),
        ("cpu", "bfloat16", document_attention.DocumentSDPA),
        ("cuda", "float32", document_attention.DocumentSDPA),
        ("cuda", "bfloat16", document_attention.SharedVarlen),
    ],
)
def test_attention_runs_on_the_device_and_in_the_dtype(
    device: str, compute: Dtype, attention: type, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        model = built(LLAMA, device, compute)
    assert {type(layer.attention.inner_attention) for layer in model.layers.values()} == {attention}
    slower = [record for record in caplog.records if "attention runs in float32 too" in record.message]
    assert len(slower) == (device == "cuda" and compute == "float32"), "once per model, not per layer"


def test_sdpa_computes_sinks_on_every_device() -> None:
    on_cpu = document_attention.overrides("cpu", "bfloat16", sinks=True)
    assert document_attention.overrides("cuda", "bfloat16", sinks=True) == on_cpu


def test_torchtitans_sections_are_filled_from_ours() -> None:
    config = on_device(Config(), "cpu")
    titan = titan_config(config, ParallelismSection(tensor_parallel_degree=2))
    parallel = titan.parallelism
    assert (parallel.tensor_parallel_degree, parallel.fsdp_reshard_after_forward) == (2, "default")
    assert (parallel.data_parallel_shard_degree, parallel.spmd_backend) == (1, "partial_dtensor")
    assert (titan.training.seq_len, titan.training.mixed_precision_param) == (config.training.seq_len, "float32")
    assert (titan.comm.train_timeout_seconds, titan.comm.trace_buf_size) == (config.comm.train_timeout_seconds, 0)
    assert (titan.debug.seed, titan.compile.components) == (config.debug.seed, ["model"])
    changed = replace(
        config, training=TrainingSection(enable_cpu_offload=True), debug=DebugSection(seed=3, deterministic=True)
    )
    titan = titan_config(changed, ParallelismSection())
    assert (titan.training.enable_cpu_offload, titan.debug.seed, titan.debug.deterministic) == (True, 3, True)


@pytest.mark.skipif(not titan_cpu.ON_CPU, reason="use_cpu changes nothing where there is CUDA")
def test_the_device_is_the_cpu_whatever_was_imported_before() -> None:
    code = (
        "import torchtitan.distributed.utils as copied, torchtitan.tools.profiler as other\n"
        "from titan_rl.actors.titan.titan_cpu import use_cpu\n"
        "assert copied.device_type == 'cuda'; use_cpu()\n"
        "from torchtitan.tools.utils import device_type\n"
        "print(copied.device_type, copied.device_module.__name__, other.device_module.__name__, device_type)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    assert done.stdout.split() == ["cpu", "torch.cpu", "torch.cpu", "cpu"]


def test_peak_flops_are_known_or_absent() -> None:
    assert known_peak_flops("NVIDIA H200") == 989e12
    assert known_peak_flops("NVIDIA A100-SXM4-80GB") == 312e12
    assert known_peak_flops("an unheard-of GPU") is None
    assert peak_flops(torch.device("cpu")) == 312e12


def test_torchtitans_spans_join_the_timeline_of_the_recorders_thread() -> None:
    record_titan_spans()
    span.take()
    with log_trace_span("outer"), log_trace_span("inner"):
        pass
    thread = threading.Thread(target=log_trace_span("elsewhere")(lambda: None))
    thread.start()
    thread.join()
    inner, outer = span.take().spans
    assert (inner.name, outer.name) == ("inner", "outer")
    assert 0 <= inner.nanoseconds <= outer.nanoseconds < 1e9


def private_imports(path: Path) -> list[str]:
    """Private names of torch and TorchTitan that the file imports, or reads from a module of theirs."""
    found, modules = [], set()
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in ("torch", "torchtitan"):
            found += [alias.name for alias in node.names if alias.name.startswith("_")]
            modules |= {alias.asname or alias.name for alias in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            found += [node.attr] if node.attr.startswith("_") else []
    return found


def test_private_names_are_in_one_file() -> None:
    files = [path for folder in ("titan", "sync") for path in (ROOT / "actors" / folder).glob("*.py")]
    using = {path.name: names for path in files if (names := private_imports(path))}
    assert list(using) == ["private.py"]


def test_weights_fill_one_file_after_the_other() -> None:
    sizes = {"a": 60, "b": 40, "c": 1, "d": 250, "e": 10, "f": 90}
    assert file_numbers(sizes, 100) == {"a": 1, "b": 1, "c": 2, "d": 3, "e": 4, "f": 4}
    assert set(file_numbers(sizes, 1000).values()) == {1}


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_attention_can_be_built_on_any_gpu_with_what_is_installed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capability: tuple[int, int]
) -> None:
    """Faked: the GPU. FlashAttention 3 and 4 are in no extra of ours."""
    from titan_rl.actors.titan import flash_attention

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    flash_attention.use_installed()
    with caplog.at_level("WARNING"):
        VarlenAttention(VarlenAttention.Config())
    assert ("is not installed: using torch's FlashAttention 2" in caplog.text) == (capability >= (9, 0))
    monkeypatch.setattr(flash_attention, "_found", lambda module: True)
    assert flash_attention.installed() == {8: None, 9: "FA3", 10: "FA4"}[capability[0]]
