"""Records routes on vLLM's CUDA build with CPU tensors, and compares them with the choice of transformers' model.

Runs by cuda_on_cpu.py, and also replaces the experts and their top-k by their definition.
"""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from support.engine_runs import finish, overwrite, preempted, run
from support.tiny import perturbed, tiny_model
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Completion, Request, Sampling

K, CONTEXT = 2, list(range(40))
GROUP = Request("group", CONTEXT, list(range(4)), Sampling(8))


def replace_experts() -> None:
    import torch
    from torch.nn.functional import linear, silu
    from vllm.model_executor.layers.fused_moe import routed_experts_capturer
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.router import fused_topk_router

    def top_k(weights: Any, ids: Any, _: Any, logits: Any, renormalize: bool = False) -> Any:
        values, chosen = logits.float().softmax(-1).topk(ids.shape[1])
        weights.copy_(values / values.sum(-1, keepdim=True) if renormalize else values)
        return weights, ids.copy_(chosen)

    def forward(self: Any, x: Any, topk_weights: Any, topk_ids: Any, **_: Any) -> Any:
        summed = torch.zeros_like(x, dtype=torch.float32)
        for expert in topk_ids.unique().tolist():
            token, nth = (topk_ids == expert).nonzero(as_tuple=True)
            gate, up = linear(x[token], self.w13_weight[expert]).chunk(2, dim=-1)
            out = linear(silu(gate) * up, self.w2_weight[expert])
            summed.index_add_(0, token, out.float() * topk_weights[token, nth, None])
        return summed.to(x.dtype)

    router, experts, capturer = fused_topk_router, RoutedExperts, routed_experts_capturer
    router.vllm_topk_softmax, experts.forward_modular = top_k, forward  # pyright: ignore
    capturer.current_platform = SimpleNamespace(device_type="cpu")  # pyright: ignore


def chosen(model: Any, tokens: list[int]) -> np.ndarray:
    """Return the experts that transformers' model chooses, ascending.  # [N, layers, K]"""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    return np.stack([layer.topk(K).indices.sort(-1).values.numpy() for layer in logits], 1)


def check(model: Any, context: list[int], completion: Completion) -> None:
    tokens, routes = [*context, *completion.tokens], completion.extras["routes"]
    assert routes is not None
    assert len(routes) == len(tokens) - 1, "the last token was not read"
    assert routes.cached == 0, "vLLM has kept the rows of cached tokens"
    assert np.array_equal(np.sort(routes.ids, -1), chosen(model, tokens[:-1]))


def check_update(engine: Engine, model: Any) -> None:
    """Tokens that were read before the update keep the old weights' experts, though their keys are computed again."""
    changed = perturbed(model)
    engine.add([GROUP])
    for _ in range(4):
        engine.step()
    overwrite(engine, changed)
    engine.set_version(1)
    done = finish(engine)["group"]
    overwrite(engine, model)
    engine.set_version(0)
    for completion in done:
        routes, tokens, read = completion.extras["routes"], [*CONTEXT, *completion.tokens[:-1]], len(CONTEXT) + 3
        assert routes is not None
        assert len(routes) == len(tokens)
        found = np.sort(routes.ids, -1)
        assert np.array_equal(found[:read], chosen(model, tokens)[:read])
        assert np.array_equal(found[read:], chosen(changed, tokens)[read:])


def main(folder: str) -> None:
    replace_experts()
    experts: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": K, "moe_intermediate_size": 32}
    model = tiny_model("qwen3_moe", max_position_embeddings=1024, norm_topk_prob=True, **experts)
    model.save_pretrained(folder)
    settings = EngineSettings(
        model_dir=folder, max_model_len=1024, kv_cache_memory_mb=1, load_format="auto", records=("routes",),
        max_num_batched_tokens=1024,
    )  # fmt: skip
    engine = Engine(settings)
    engine.set_version(0)
    assert engine.info.runner == "V2"
    for completion in run(engine, GROUP)["group"]:
        check(model, CONTEXT, completion)
    print("a group whose prompt is cached")
    engine.add([GROUP])
    for _ in range(4):
        engine.step()
    (withdrawn,) = engine.withdraw(["group"])
    for completion in run(engine, replace(GROUP, begun=withdrawn.completions))["group"]:
        check(model, CONTEXT, completion)
    print("withdrawn and resumed samples")
    check_update(engine, model)
    print("samples over a weight update")
    for context, completion in preempted(engine):
        check(model, context, completion)
    print("preempted samples")
