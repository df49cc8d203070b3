"""Make golden vectors of prime-rl's role-conditioned advantages with its own class.

    peers/bin/python tests/golden/make_prime_rae.py prime-rl/src/prime_rl/orchestrator/algo/rae.py

In make_trl.py's environment. prime-rl has no release on PyPI: the file is of commit 1ada107. Its imports from prime-rl
are replaced by stand-ins.
"""
# pyright: basic, reportMissingImports=false

import asyncio
import importlib.util
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from vectors import case, write

AGENTS = ("black", "white", "judge")


class Base:
    def __init__(self, config: Any, policy_pool: Any) -> None:
        pass


def peer(path: str) -> Any:
    stand_ins = {
        "prime_rl.configs.algorithm": {"RAEAlgoConfig": SimpleNamespace},
        "prime_rl.orchestrator.algo.base": {"Algorithm": Base},
        "prime_rl.orchestrator.types": {"group_rollouts": list},
    }
    for name, members in stand_ins.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(members)
    spec = importlib.util.spec_from_file_location("prime_rae", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def role_case(module: Any, name: str, *, seed: int, decay: float, groups: int, size: int) -> Any:
    """Score groups one after the other, in each of which every agent has `size` rewards."""
    generator = torch.Generator().manual_seed(seed)
    reward = torch.randint(-8, 9, (groups, len(AGENTS), size), generator=generator) / 4
    advantage = torch.zeros_like(reward)
    algorithm = module.RAEAlgorithm(SimpleNamespace(decay=decay), None)
    for g in range(groups):
        rollouts = [
            SimpleNamespace(
                agent=SimpleNamespace(name=agent),
                reward=reward[g, a, k].item(),
                assign_advantages=lambda value, at=(g, a, k): advantage.__setitem__(at, value),
            )
            for a, agent in enumerate(AGENTS)
            for k in range(size)
        ]
        asyncio.run(algorithm.score_group(rollouts))
    settings = {"decay": decay, "agents": list(AGENTS)}
    return case(name, "RAEAlgorithm", settings=settings, inputs={"reward": reward}, outputs={"advantage": advantage})


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    module = peer(sys.argv[1])
    cases = [
        role_case(module, "groups_of_one", seed=501, decay=0.95, groups=12, size=1),
        role_case(module, "groups_of_four", seed=502, decay=0.95, groups=6, size=4),
        role_case(module, "fast", seed=503, decay=0.5, groups=5, size=3),
    ]
    write("prime_rae.json", peer="prime-rl", version="1ada107", made_by="tests/golden/make_prime_rae.py", cases=cases)
