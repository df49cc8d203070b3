"""Activations are estimated to the byte: what TorchTitan's blocks keep is counted on tensors without storage, with the
operations that save tensors on a GPU (FlashAttention, fused RMSNorm)."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torchtitan.config import OverrideConfig, apply_overrides
from torchtitan.distributed.activation_checkpoint import FullAC, SelectiveAC
from torchtitan.models.common.attention import VarlenMetadata
from torchtitan.tools.utils import set_default_dtype

from support.shapes import GLM_AIR, LLAMA_8B, QWEN_30B_A3B, QWEN_600M
from titan_rl.actors.titan import document_attention, experts
from titan_rl.actors.titan.activation_offload import OffloadAC
from titan_rl.actors.titan.adaptation import adaptation_of
from titan_rl.actors.titan.spec import build_spec
from titan_rl.config.sections import Config, LoraSection, ParallelismSection
from titan_rl.ext.context_parallel.ranks.context_parallel import ContextParallel, Part, cut
from titan_rl.ext.run_plan.ranks.meta_model import fake_ranks
from titan_rl.preflight.memory import block_parameters, gradients_per_token, head_parameters, kept_per_token
from titan_rl.wire.model_shape import ROUTE_BIAS, ModelShape
from titan_rl.wire.types import Rows

TOKENS = 4096
BLOCKS = {
    **{"llama": LLAMA_8B, "qwen": QWEN_600M, "experts": QWEN_30B_A3B},
    "biases": replace(LLAMA_8B, family="qwen2"),
    "shared expert": replace(GLM_AIR, dense_layers=0),
    "dense beside experts": replace(GLM_AIR, dense_layers=2),
}
CHECKPOINTING: dict[str, Any] = {"none": None, "selective": SelectiveAC, "full": FullAC, "offload": OffloadAC}


@torch.library.custom_op("titan_rl_tests::rms_norm", mutates_args={})
def rms_norm(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """CUDA's fused RMSNorm: it saves its input and a float32 per row. The CPU's parts save more."""
    return torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)


@torch.library.custom_op("titan_rl_tests::rms_norm_backward", mutates_args={})
def rms_norm_backward(
    grad: torch.Tensor, x: torch.Tensor, rstd: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


rms_norm.register_fake(lambda x, weight: (torch.empty_like(x), x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)))
rms_norm_backward.register_fake(lambda grad, x, rstd, weight: (torch.empty_like(x), torch.empty_like(weight)))
rms_norm.register_autograd(
    lambda ctx, grad, _: rms_norm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(inputs[0], output[1], inputs[1]),
)


@pytest.fixture(autouse=True)
def _fused_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.nn.functional, "rms_norm", lambda x, shape, weight, eps: rms_norm(x, weight)[0])


def counted(
    shape: ModelShape,
    layers: int,
    mode: str,
    row_parts: ContextParallel | None = None,
    adapters: LoraSection | None = None,
) -> tuple[int, int]:
    """Return the bytes of activations after a forward, and of temporary tensors at the peak of the backward. With
    `row_parts` the rank has the last part of a document."""
    spec = build_spec(replace(shape, n_layers=layers, vocab_size=64), seq_len=TOKENS)
    attention = document_attention.overrides("cuda", "bfloat16") if row_parts else []
    apply_overrides(OverrideConfig(imports=[*attention, *(experts.OVERRIDES if shape.experts else ())]), spec.model)
    adaptation = adaptation_of(Config(lora=adapters or LoraSection()))
    adaptation.convert(spec, shape)
    with torch.device("meta"), set_default_dtype(torch.bfloat16):
        whole: Any = spec.model.build()
    adaptation.freeze(whole)
    with FakeTensorMode(allow_non_fake_inputs=True):
        model = whole.to_empty(device="cpu")
        if CHECKPOINTING[mode]:
            CHECKPOINTING[mode].Config().build(dump_folder="").apply(model)
        model.lm_head = torch.nn.Identity()
        ends = torch.zeros(9, dtype=torch.int32)
        tracker = MemTracker()
        tracker.track_external(model)
        with tracker:
            masks: Any = VarlenMetadata(cu_seq_q=ends, cu_seq_k=ends, max_q=TOKENS, max_k=TOKENS)
            if row_parts:
                document_attention.cut_rows(model, row_parts)
                masks = masks_of_last_part(model, row_parts.count)
            tokens, positions = torch.zeros(1, TOKENS, dtype=torch.long), torch.arange(TOKENS)[None]
            hidden = model(tokens, attention_masks=masks, positions=positions)
            kept = of_kind(tracker, "current", "ACT")
            hidden.float().sum().backward()
            return kept, of_kind(tracker, "peak", "TEMP")


def masks_of_last_part(model: Any, parts: int) -> Any:
    places = np.arange(parts * TOKENS)[None]
    target = np.zeros(places.shape, np.float32)
    segments = np.array([[0, places.size, 0, 0]])
    rows = Rows(places, places, places, places, target, target, places, places[0], {}, segments)
    return document_attention.masks_of(model, cut(rows, Part(parts - 1, parts)).attended, torch.device("cpu"))


def of_kind(tracker: MemTracker, when: Any, kind: str) -> int:
    (found,) = tracker.get_tracker_snapshot(when).values()
    return next(nbytes for name, nbytes in found.items() if str(name).endswith(kind))


def uncounted(shape: ModelShape, mode: str) -> int:
    """Return the bytes of a block that no estimate of a GPU has: the attention's random state, or the host's copy of
    the input, because host and device are one here."""
    return {"none": 16, "selective": 16, "full": 0, "offload": 2 * shape.dim * TOKENS}[mode]


@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("shape", BLOCKS.values(), ids=BLOCKS)
def test_a_block_keeps_the_estimated_activations(shape: ModelShape, mode: str) -> None:
    config = Config()
    config = replace(config, training=replace(config.training, mixed_precision_param="bfloat16"))
    (one, _), (two, temporary) = counted(shape, 1, mode), counted(shape, 2, mode)
    state = uncounted(shape, mode)
    state += 4 * shape.experts * shape.routes(0) if mode == "none" else 0  # where each expert's tokens end
    if mode == "none" and shape.routes(0) and shape.parts.biased_routes:
        state += 4 * shape.experts * shape.dim  # the router's weights in float32
    assert two - one == TOKENS * kept_per_token(config, shape, config.parallelism, mode, 0) + state
    bound, stack = TOKENS * gradients_per_token(config, shape, config.parallelism), 0
    if shape.routes(0):  # a gradient of experts' weights, which another part of the estimate has
        stack = 2 * shape.experts * shape.hidden_dim * shape.dim
    assert temporary <= bound + stack
    of_other_layers = shape.experts and not shape.routes(0)
    assert mode != "none" or of_other_layers or temporary > 0.8 * bound


@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("shape", [LLAMA_8B, QWEN_600M], ids=["llama", "qwen"])
def test_a_part_of_a_row_keeps_the_keys_of_all_of_it(shape: ModelShape, mode: str) -> None:
    config, p = Config(), ParallelismSection(context_parallel_degree=2)
    config = replace(config, training=replace(config.training, mixed_precision_param="bfloat16"))
    with fake_ranks(2):
        parts = ContextParallel.of(p, "cpu")
        (one, _), (two, temporary) = counted(shape, 1, mode, parts), counted(shape, 2, mode, parts)
    assert two - one == TOKENS * kept_per_token(config, shape, p, mode, 0) + uncounted(shape, mode)
    assert temporary <= TOKENS * gradients_per_token(config, shape, p)


@pytest.mark.parametrize("mode", CHECKPOINTING)
@pytest.mark.parametrize("targets", [[], ["q", "k", "v"], ["up", "down"]], ids=str)
def test_a_block_with_adapters_keeps_the_estimated_activations(
    targets: list[str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("register_hook", "register_post_accumulate_grad_hook"):  # the tracker hooks frozen parameters too
        real = getattr(torch.Tensor, name)
        none = SimpleNamespace(remove=lambda: None)
        hooked = lambda self, hook, real=real, none=none: real(self, hook) if self.requires_grad else none  # noqa: E731
        monkeypatch.setattr(torch.Tensor, name, hooked)
    adapters, shape = LoraSection(rank=16, targets=targets, base_dtype="bfloat16"), LLAMA_8B
    config = Config(lora=adapters)
    config = replace(config, training=replace(config.training, mixed_precision_param="bfloat16"))
    (two, _), (three, temporary) = (counted(shape, n, mode, adapters=adapters) for n in (2, 3))
    most = two + TOKENS * kept_per_token(config, shape, config.parallelism, mode, 0) + uncounted(shape, mode)
    assert two < three <= most
    assert targets or three == most
    assert temporary <= TOKENS * gradients_per_token(config, shape, config.parallelism)


@pytest.mark.parametrize("shape", [*BLOCKS.values(), LLAMA_8B.with_value_head()])
def test_groups_of_parameters_make_up_the_model(shape: ModelShape) -> None:
    sizes = {n: torch.Size(size).numel() for n, size in shape.hf_tensors().items() if not n.endswith(ROUTE_BIAS)}
    block = sum(size for name, size in sizes.items() if name.startswith("model.layers.0."))
    assert abs(block_parameters(shape, 0) - block) <= shape.dim  # the last norm is dealt to the blocks
    own = sizes.get(shape.hf_head_weight, sizes["model.embed_tokens.weight"])
    assert head_parameters(shape) == own
