"""Run requests on an engine of this process, and compare them with Hugging Face's forward."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from support.forked_programs import output_of
from titan_rl.actors.vllm.engine import Engine
from titan_rl.wire.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

CONTEXT = [1, 5, 6, 7, 8, 9]
LONG = 670  # 21 blocks of 32 tokens: three contexts fill a cache of 63

SCHEDULING = "SCHEDULING"
"""Environment variable of run_checks: the scheduling of its engines."""
SCHEDULINGS = ("synchronous", "asynchronous")

CHECKS = """
import json, os, pytest
os.environ.update(json.loads(sys.argv[2]))
code = pytest.main(["-q", "--import-mode=importlib", "-o", "python_functions=check_*", sys.argv[1]])
if code:
    sys.exit(sys.stdout.flush() or f"pytest ended with {code!r}")
"""


def run_checks(file: str, **environment: str) -> None:
    """Run the check_* functions of a file in a process that may hold an engine."""
    output_of("generator", CHECKS, file, json.dumps(environment))


def asynchronous() -> bool:
    return os.environ[SCHEDULING] == "asynchronous"


def withdraw_all(engine: Engine) -> list[str]:
    """Return the ids of the requests that were unfinished."""
    return [done.id for done in engine.withdraw(list(engine._open))]


def run(engine: Engine, *requests: Request) -> dict[str, list[Completion]]:
    engine.add(requests)
    return finish(engine)


def finish(engine: Engine) -> dict[str, list[Completion]]:
    done = {}
    while engine.busy:
        done |= {d.id: d.completions for d in engine.step()}
    return done


def preempted(engine: Engine) -> Iterator[tuple[list[int], Completion]]:
    """Fill a cache of 63 blocks, so that vLLM takes the blocks of a sample and computes its tokens again later. Yield
    every context with its completion."""
    scheduler = engine._llm.engine_core.engine_core.scheduler
    preempt, count = scheduler._preempt_request, Counter[str]()

    def counted(request: Any, *arguments: Any, **named: Any) -> Any:
        count[request.request_id] += 1
        return preempt(request, *arguments, **named)

    scheduler._preempt_request = counted
    contexts = [[1, 4 + i, *(j % 60 for j in range(LONG - 2))] for i in range(3)]
    done = run(engine, *(Request(f"{i}", context, [i], Sampling(6)) for i, context in enumerate(contexts)))
    scheduler._preempt_request = preempt
    assert count, "the cache should be too small"
    for i, context in enumerate(contexts):
        yield context, done[f"{i}"][0]


def reference(model: Any, context: list[int], tokens: list[int], temperature: float) -> "Tensor":
    """Return log-probs over the vocabulary at each sampled position.  # [T, V]"""
    import torch

    with torch.no_grad():
        logits = model(torch.tensor([context + tokens])).logits[0, len(context) - 1 : -1]
    return (logits / temperature).log_softmax(-1)


def gap(model: Any, completion: Completion, temperature: float = 1.0, context: list[int] = CONTEXT) -> list[float]:
    """Return |log-prob reported - log-prob of the reference| per token."""
    expected = reference(model, context, completion.tokens, temperature)
    pairs = zip(completion.tokens, completion.logprobs, strict=True)
    return [abs(expected[i, token].item() - logprob) for i, (token, logprob) in enumerate(pairs)]


def overwrite(engine: Engine, model: Any) -> None:
    """Write the weights in place, fused as vLLM has them."""
    import torch

    state = model.state_dict()
    for name in [name for name in state if ".mlp.experts." in name]:
        vllms = {"gate_up_proj": "routed_experts.w13_weight", "down_proj": "routed_experts.w2_weight"}
        prefix, _, last = name.rpartition(".")
        state[f"{prefix}.{vllms[last]}"] = state[name]
    for name, parameter in engine.params().items():
        prefix = name.removesuffix("qkv_proj.weight").removesuffix("gate_up_proj.weight")
        parts = {"qkv_proj": "qkv", "gate_up_proj": ("gate_", "up_")}.get(name.split(".")[-2])
        if parts is None:
            parameter.copy_(state[name])
        else:
            parameter.copy_(torch.cat([state[f"{prefix}{p.rstrip('_')}_proj.weight"] for p in parts]))
