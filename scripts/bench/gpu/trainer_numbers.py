"""A trainer rank's log-probs and gradients against transformers, and its bits."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from bench.gpu.measured import DEVICE, ON_CPU, say_equal, say_within
from bench.gpu.trainer_rank import config_of, model_of, samples
from titan_rl.actors.titan.model import local
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.actors.titan.spec import adapter
from titan_rl.batch.packing import pack, unpack
from titan_rl.wire.types import Sample

LAYERS = 2  # the widths decide what runs
Truth = tuple[list[torch.Tensor], float]  # masked log-probs of each sample, and the gradient's norm


def float32() -> None:
    numbers("float32")


def bfloat16() -> None:
    numbers("bfloat16")


def numbers(dtype: str) -> None:
    config = config_of(LAYERS, 1024, dtype, algorithm="sft")
    model, shape = model_of(config)
    prompt, answer = (12, (10, 20)) if ON_CPU else (150, (150, 300))
    made = samples(0, 3, 4, prompt, answer, shape.vocab_size)
    facts = shape.hf_config(bos=1, eos=2, pad=0)
    state = {n: whole(p) for n, p in adapter(model.spec, None).to_hf(model.model.state_dict()).items()}
    values, norm = truth(facts, state, made, torch.float32)
    bound, why, within = 1e-4, "transformers in float32: sums in another order", 1e-3
    if dtype == "bfloat16":
        rounded, _ = truth(facts, state, made, torch.bfloat16)
        bound, within = 2 * float(gaps(rounded, values, made).mean()), 5e-2
        why = "transformers in float32: twice as far as its own bfloat16"
    start = [local(p).detach().clone() for p in model.model.parameters()]
    for share in (False, True):
        batches = pack(made, shards=1, seq_len=config.training.seq_len, rows_per_microbatch=1, pad_id=0, share=share)
        found = unpack(batches, [model.scores(batch, 1.0)[0] for batch in batches], made)
        gap = gaps([torch.from_numpy(each[1:]) for each in found], values, made)
        how = f"{'shared' if share else 'whole'} prompts"
        say_within(f"{how}: log-prob gap, mean (max {float(gap.max()):.2g})", float(gap.mean()), bound, why)
        found = model.step(batches).grad_norm
        say_within(
            f"{how}: gradient norm {found:.6g}, relative", abs(found / norm - 1), within, f"transformers {norm:.6g}"
        )
        restore(model, start)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def restore(model: RoleModel, start: list[torch.Tensor]) -> None:
    model.reshard()
    with torch.no_grad():
        for parameter, old in zip(model.model.parameters(), start, strict=True):
            local(parameter).copy_(old)


def gaps(found: list[torch.Tensor], true: list[torch.Tensor], made: list[Sample]) -> torch.Tensor:
    """Return how far the log-probs of trained tokens are apart, of all samples together."""
    on = (torch.tensor(sample.mask[1:]) > 0 for sample in made)
    return torch.cat([(a - b).abs()[mask] for a, b, mask in zip(found, true, on, strict=True)])


def truth(facts: dict[str, Any], state: dict[str, torch.Tensor], made: list[Sample], dtype: torch.dtype) -> Truth:
    """Return what transformers' Qwen3 computes in this dtype for the mean loss over all trained tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    named = {key: value for key, value in facts.items() if key not in ("architectures", "model_type")}
    named["attn_implementation"] = "sdpa"
    with torch.device(DEVICE):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**named))
    lost = model.load_state_dict({name: value.clone() for name, value in state.items()}, strict=False)
    if set(lost.missing_keys) - {"lm_head.weight"} or lost.unexpected_keys:
        raise RuntimeError(f"expected the trainer's weights to fill transformers' model, found {lost}")
    model.tie_weights()
    model, total, values = model.to(DEVICE, dtype), sum(sum(sample.mask) for sample in made), list[torch.Tensor]()
    for sample in made:
        ids = torch.tensor([sample.tokens], device=DEVICE)
        logprobs = model(ids).logits[0, :-1].float().log_softmax(-1)
        own = logprobs.gather(1, ids[0, 1:, None])[:, 0]
        (-(own * torch.tensor(sample.mask[1:], device=DEVICE)).sum() / total).backward()
        values.append(own.detach().cpu())
    norms = [p.grad.float().norm() for p in model.parameters() if p.grad is not None]
    return values, float(torch.stack(norms).norm())


def deterministic() -> None:
    config = config_of(LAYERS, 1024, deterministic=True)
    model, shape = model_of(config)
    start, found = [local(p).detach().clone() for p in model.model.parameters()], list[int]()
    for _ in range(2):
        restore(model, start)
        model.begin_phase("rl", 0)
        for seed in range(2):
            drawn = samples(seed, 2, 4, *((8, (8, 16)) if ON_CPU else (40, (100, 200))), shape.vocab_size)
            seq_len = config.training.seq_len
            model.step(pack(drawn, shards=1, seq_len=seq_len, rows_per_microbatch=1, pad_id=0, share=True))
        found.append(model.checksum())
    say_equal("bits of two runs of two steps", found[0], found[1], "debug.deterministic")
