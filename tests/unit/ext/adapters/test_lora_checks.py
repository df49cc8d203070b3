"""[lora] in the plan: refusals, warnings, and the memory of adapters on a GPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from support.checked_configs import config
from support.shapes import LLAMA_8B, QWEN_30B_A3B
from titan_rl.config.auto import on_device
from titan_rl.config.sections import LoraSection, ReferenceSection
from titan_rl.config.toml import find, load
from titan_rl.ext.adapters.layers import adapter_parameters, adapter_sizes, targets
from titan_rl.ext.tinker.counts import SERVED
from titan_rl.preflight.checks import problems, warnings
from titan_rl.preflight.checks.machine import check_gpu_memory
from titan_rl.preflight.memory import GIB, AdapterCounts, adapter_slots, needs, offloaded, on_gpus, trained
from titan_rl.wire.model_shape import ShardedModel

MOE = '[model]\nname = "qwen3_moe"\n'


@pytest.mark.parametrize(
    ("toml", "messages"),
    [
        ('[lora]\ntargets = ["q"]', ["lora.rank: expected at least 1, because lora.targets is set, found 0"]),
        ('[lora]\nsync = "adapter"', ["lora.rank: expected at least 1, because lora.sync is set, found 0"]),
        (
            '[lora]\nrank = 200\ntargets = ["k", "x", "q", "q", "lm_head"]',
            [
                "lora.rank: expected at most the model's dim = 128, found 200",
                "lora.targets: expected names of q, k, v, o, gate, up, down, found x, lm_head",
                "lora.targets: expected v besides k: TorchTitan gives both an adapter or none",
                "lora.targets: expected each layer once, found k, x, q, q, lm_head",
            ],
        ),
        (
            f'{MOE}[lora]\nrank = 4\ntargets = ["q", "up"]',
            ["lora.targets: expected names of q, k, v, o, because TorchTitan stacks the matrices of experts"],
        ),
        (
            '[algorithm]\nname = "reward_model"\n[lora]\nrank = 4',
            ["lora.rank: expected 0, because a reward model trains its head, which has no adapter, found 4"],
        ),
    ],
)
def test_all_problems_are_named(toml: str, messages: list[str], tmp_path: Path) -> None:
    found = [line for line in problems(config(tmp_path, toml)) if line.startswith("lora.")]
    assert len(found) == len(messages)
    for line, message in zip(found, messages, strict=True):
        assert line.startswith(message)


@pytest.mark.parametrize(
    "toml", ["[lora]\nrank = 8", '[lora]\nrank = 8\ntargets = ["v", "k"]', f"{MOE}[lora]\nrank = 8"], ids=str
)
def test_no_problem(toml: str, tmp_path: Path) -> None:
    assert not [line for line in problems(config(tmp_path, toml)) if "lora" in line]


@pytest.mark.parametrize(("lr", "warned"), [(1e-5, True), (1e-4, False)])
def test_a_whole_models_rate_is_warned_of(lr: float, warned: bool, tmp_path: Path) -> None:
    found = warnings(config(tmp_path, f"[lora]\nrank = 8\n[optimizer]\nlr = {lr}"))
    assert any("looks like a whole model's rate" in line for line in found) == warned


def test_adapters_are_counted() -> None:
    lora = LoraSection(rank=16)
    assert adapter_parameters(lora, LLAMA_8B) == 41_943_040  # as PEFT counts r = 16 on all linear layers
    assert targets(lora, QWEN_30B_A3B) == ["q", "k", "v", "o"]
    sizes = adapter_sizes(replace(lora, targets=["v", "k"]), LLAMA_8B)
    assert sizes["model.layers.31.self_attn.v_proj.lora_B.weight"] == (1024, 16)
    assert len(sizes) == 4 * 32


def test_only_adapters_have_gradients_and_an_optimizer() -> None:
    given = on_device(load(find("grpo_llama3_8b"), [("lora.rank", "16")]), "cuda")
    settled = on_gpus(given, LLAMA_8B, 79 * GIB)
    parts = trained(settled, LLAMA_8B, settled.parallelism).parts
    shards, added = settled.parallelism.data_parallel_shard_degree, 41_943_040
    assert parts["frozen weights"].nbytes == 2 * (LLAMA_8B.parameters // shards)
    assert parts["optimizer"].nbytes == 2 * 4 * added // shards
    assert parts["gradients"].nbytes == 4 * added // shards


INTO_OUT = {  # inputs and outputs of LLAMA_8B
    "q": (4096, 4096),
    "k": (4096, 1024),
    "v": (4096, 1024),
    "o": (4096, 4096),
    "gate": (4096, 14336),
    "up": (4096, 14336),
    "down": (14336, 4096),
}


@pytest.mark.parametrize("shards", [1, 8])
@pytest.mark.parametrize("names", [["q", "k", "v", "up"], []], ids=str)
def test_every_policy_has_its_adapters_and_their_optimizer(names: list[str], shards: int) -> None:
    flags = [("lora.rank", "16"), ("lora.targets", ",".join(names)), ("lora.sync", "adapter")]
    flags.append(("parallelism.data_parallel_shard_degree", str(shards)))
    config = on_gpus(load(find("grpo_llama3_8b"), flags), LLAMA_8B, 0)
    numbers = 32 * sum(16 * into + out * 16 for into, out in (INTO_OUT[name] for name in names or INTO_OUT))
    three = AdapterCounts.of_policies(3)
    one, several = (
        {name: part.nbytes for name, part in need["trainer"].own.parts.items()}
        for need in (needs(config, LLAMA_8B, 0), needs(config, LLAMA_8B, 0, adapters=three))
    )
    own = numbers // shards * 4  # bytes of A and B in float32
    assert several == one | {"adapter bank": 2 * (own + own), "optimizer": 3 * 2 * own}
    assert one["optimizer"] == 2 * own
    assert "adapter bank" not in one
    served = needs(config, LLAMA_8B, 0, adapters=SERVED)["trainer"].own.parts
    assert served["adapter bank"].nbytes == 4 * 2 * own  # the model has the base's, which are zeros
    assert served["optimizer"].nbytes == 4 * 2 * own


def test_adapters_of_other_policies_are_offloaded_too() -> None:
    flags = [("lora.rank", "16"), ("training.enable_cpu_offload", "true")]
    config = on_gpus(load(find("grpo_llama3_8b"), flags), LLAMA_8B, 0)
    cut = ShardedModel(held=1000, whole=8000, block=1, last=1, adapters=10, adapters_whole=80)
    one, three = (offloaded(config, cut, adapters=AdapterCounts.of_policies(n)) for n in (1, 3))
    assert one == 4 * 10 * 4 + 990 * 2  # value, gradient and two moments in float32 beside frozen ones in bfloat16
    assert three == 3 * 4 * 10 * 4 + 990 * 2


@pytest.mark.parametrize(("rank", "slot"), [(16, 16), (20, 32)])
@pytest.mark.parametrize("tp", [1, 2])
def test_engines_have_slots_of_the_largest_rank(rank: int, slot: int, tp: int) -> None:
    """Tensor parallelism cuts A of o and down, and B of the others."""
    flags = [("lora.rank", str(rank)), ("lora.sync", "adapter"), ("generator.tensor_parallel_degree", str(tp))]
    config = on_gpus(load(find("grpo_llama3_8b"), flags), LLAMA_8B, 0)
    numbers = sum(
        slot * into // tp + out * slot if name in ("o", "down") else slot * into + out * slot // tp
        for name, (into, out) in INTO_OUT.items()
    )
    one, three = (needs(config, LLAMA_8B, 0, adapters=AdapterCounts.of_policies(n))["generator"] for n in (1, 3))
    assert one.own.kept["adapter slots"].nbytes == 32 * numbers * 2
    assert three.own.kept["adapter slots"].nbytes == 3 * 32 * numbers * 2
    assert three.own.kept["adapter slots"] == adapter_slots(config, LLAMA_8B, 3)
    merged = replace(config, lora=replace(config.lora, sync="merge"))
    assert "adapter slots" not in needs(merged, LLAMA_8B, 0)["generator"].own.parts


def test_a_reference_takes_nothing() -> None:
    given = on_device(load(find("grpo_llama3_8b"), [("lora.rank", "16"), ("algorithm.kl_coef", "0.1")]), "cuda")
    assert given.algorithm.needs_reference
    with_kl, without = (
        needs(on_gpus(each, LLAMA_8B, 79 * GIB), LLAMA_8B, 79 * GIB)["trainer"].own.idle
        for each in (given, replace(given, algorithm=replace(given.algorithm, kl_coef=0.0)))
    )
    assert with_kl == without
    assert given.reference == ReferenceSection()


def test_an_8b_model_fits_a_24_gb_gpu_only_with_its_frozen_weights_on_the_host() -> None:
    given = load(find("grpo_llama3_8b_lora_24gb"))
    gpu = int(given.hosts.gpu_memory_gb * GIB)
    assert not [*check_gpu_memory(given, LLAMA_8B, gpu, most=1)]
    beside = replace(given, training=replace(given.training, enable_cpu_offload=False))
    (problem,) = check_gpu_memory(beside, LLAMA_8B, gpu, most=1)
    assert problem.startswith("[generator]: expected an engine that fits 23.9 GiB")
    assert "waiting trainer 17.9" in problem
    whole = replace(given, lora=LoraSection())
    assert [*check_gpu_memory(replace(whole, training=beside.training), LLAMA_8B, gpu, most=1)]
