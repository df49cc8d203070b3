"""Make golden vectors with TRL's `multi_objective_aggregation = "normalize_then_sum"`.

    peers/bin/python tests/golden/make_trl_gdpo.py

make_trl.py describes the environment and the trainer without a constructor.
"""
# pyright: basic, reportMissingImports=false

from typing import Any

import torch
import trl
from make_trl import SCORE, policy_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from vectors import LENGTHS, answers, case, rewards, write


def gdpo_case(name: str, *, seed: int, weights: list[float], missing: bool = False) -> dict[str, Any]:
    x = {**answers(seed, empty=False), "rewards": rewards(seed)}
    parts = torch.stack([rewards(seed + 1000 * k) for k in range(len(weights))], 1)
    if missing:  # the last reward does not apply to two answers
        parts[[1, 6], -1] = torch.nan
    trainer = policy_trainer(
        GRPOTrainer,
        x,
        multi_objective_aggregation="normalize_then_sum",
        reward_weights=torch.tensor(weights),
        reward_funcs=[None] * len(weights),
        reward_func_names=[f"reward_{k}" for k in range(len(weights))],
        _calculate_rewards=lambda *_: parts,
    )
    batch = trainer._generate_and_score_completions([{"prompt": ""}] * len(LENGTHS))
    inputs = {"applies": (~parts.isnan()).long(), "rewards": parts.nan_to_num()}
    settings = {"reward_weights": weights}
    outputs = {"advantages": batch["advantages"]}
    return case(name, f"GRPOTrainer.{SCORE}", settings=settings, inputs=inputs, outputs=outputs)


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    made_by = "tests/golden/make_trl_gdpo.py"
    cases = [
        gdpo_case("gdpo", seed=61, weights=[1.0, 1.0]),
        gdpo_case("gdpo_weighted", seed=62, weights=[1.0, -0.3, 2.5]),
        gdpo_case("gdpo_missing", seed=63, weights=[1.0, 0.5], missing=True),
    ]
    write("trl_gdpo.json", peer="trl", version=trl.__version__, made_by=made_by, cases=cases)
