"""Make golden vectors of gates and entropy control with TRL's own functions.

    peers/bin/python tests/golden/make_trl_gates.py

In make_trl.py's environment, with its trainers.
"""
# pyright: basic, reportMissingImports=false

from typing import Any

import torch
import trl
from make_trl import LOSS, SCORE, policy_trainer
from trl.trainer.grpo_trainer import GRPOTrainer
from vectors import LENGTHS, answers, case, rewards, write

ARGS = {
    "sapo_temperature_pos": 1.0,
    "sapo_temperature_neg": 1.05,
    "vespo_k_pos": 2.0,
    "vespo_lambda_pos": 3.0,
    "vespo_k_neg": 3.0,
    "vespo_lambda_neg": 2.0,
    "entropy_target": 0.2,
    "entropy_coef_min": 0.0,
    "entropy_coef_max": 1.0,
    "entropy_coef_delta": 0.005,
}
"""Settings that TRL's losses read from the arguments, with TRL's defaults."""
NAMES = ("mask", "length", "rewards", "logprob", "old", "behaviour", "reference", "entropy")


def drawn(seed: int, spread: float, *, empty: bool) -> dict[str, torch.Tensor]:
    x = answers(seed, empty=empty, spread=spread)
    x["rewards"] = rewards(seed)
    x["logprob"].requires_grad_()
    x["entropy"].requires_grad_()
    return x


def trainer_of(x: dict[str, torch.Tensor], settings: dict[str, Any]) -> Any:
    made = policy_trainer(GRPOTrainer, x, **{key: value for key, value in settings.items() if key not in ARGS})
    vars(made.args).update(ARGS | {key: value for key, value in settings.items() if key in ARGS})
    return made


def step(made: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss and the advantages."""
    batch = made._generate_and_score_completions([{"prompt": ""}] * len(LENGTHS))
    loss = made._compute_loss(made.model, batch)
    loss.backward()
    return loss, batch["advantages"]


def gate_case(name: str, *, seed: int, empty: bool = True, spread: float = 0.3, **settings: Any) -> dict[str, Any]:
    x = drawn(seed, spread, empty=empty)
    loss, advantages = step(trainer_of(x, settings))
    leaves = {"logprob": x["logprob"]} | ({"entropy": x["entropy"]} if settings.get("entropy_coef") else {})
    function = f"GRPOTrainer.{SCORE}, GRPOTrainer.{LOSS}"
    outputs = {"loss": loss, "advantages": advantages}
    return case(
        name, function, settings=settings, inputs={key: x[key] for key in NAMES}, outputs=outputs, leaves=leaves
    )


def adaptive_case(name: str, *, seed: int, **settings: Any) -> dict[str, Any]:
    """Steps of one trainer, whose entropies cross the target. Inputs and outputs have one more axis: the step."""
    state: dict[str, Any] = {
        "_last_world_entropy": float("inf"),
        "_entropy_window_stats": None,
        "use_adaptive_entropy": True,
    }
    steps: list[dict[str, torch.Tensor]] = []
    losses, coefs = [], []
    for number, scale in enumerate((0.5, 1.6, 0.6, 0.7, 2.0, 1.8, 0.5, 0.5)):
        x = drawn(seed + number, 0.3, empty=True)
        x["entropy"] = (x["entropy"].detach() * scale).requires_grad_()
        made = trainer_of(x, settings)
        made._entropy_bonus_enabled = True
        vars(made).update(state)
        losses.append(step(made)[0])
        state = {key: getattr(made, key) for key in (*state, "entropy_coef")}
        coefs.append(state["entropy_coef"])
        steps.append(x)
    inputs = {key: torch.stack([x[key].detach() for x in steps]) for key in NAMES}
    outputs = {"loss": torch.stack(losses), "entropy_coef": torch.tensor(coefs)}
    made_case = case(name, f"GRPOTrainer.{LOSS}", settings=settings, inputs=inputs, outputs=outputs)
    zero = torch.zeros_like(steps[0]["mask"], dtype=torch.float64)
    made_case["gradients"] = {
        key: [(zero if (gradient := x[key].grad) is None else gradient).tolist() for x in steps]
        for key in ("logprob", "entropy")
    }
    return made_case


def gates() -> list[dict[str, Any]]:
    luspo: dict[str, Any] = {"loss_type": "luspo", "importance_sampling_level": "sequence"}
    return [
        gate_case("sapo", seed=201, empty=False, spread=0.6, loss_type="sapo"),
        gate_case(
            "sapo_sharp",
            seed=202,
            empty=False,
            spread=0.6,
            loss_type="sapo",
            sapo_temperature_pos=2.0,
            sapo_temperature_neg=3.5,
            beta=0.05,
        ),
        gate_case("luspo", seed=203, empty=False, **luspo),
        gate_case("luspo_clipped", seed=224, empty=False, spread=0.5, **luspo, epsilon_low=0.05, epsilon_high=0.08),
        gate_case("vespo", seed=205, loss_type="vespo"),
        gate_case(
            "vespo_other",
            seed=206,
            spread=0.6,
            loss_type="vespo",
            vespo_k_pos=1.5,
            vespo_lambda_pos=1.0,
            vespo_k_neg=0.5,
            vespo_lambda_neg=0.8,
            beta=0.1,
        ),
        gate_case("top_entropy", seed=207, top_entropy_quantile=0.3, beta=0.1),
        gate_case("top_entropy_clip_higher", seed=208, top_entropy_quantile=0.55, epsilon_high=0.28),
        gate_case("top_entropy_bonus", seed=209, top_entropy_quantile=0.45, entropy_coef=0.02),
    ]


def control() -> list[dict[str, Any]]:
    keys: dict[str, Any] = {"entropy_target": 0.4, "entropy_coef_delta": 0.01}
    return [
        adaptive_case("adaptive", seed=221, entropy_coef=0.02, **keys),
        adaptive_case("adaptive_bounded", seed=231, entropy_coef=0.02, **keys, entropy_coef_max=0.025),
        adaptive_case("adaptive_least", seed=241, entropy_coef=0.02, **keys, entropy_coef_min=0.015),
        adaptive_case("adaptive_top", seed=251, entropy_coef=0.0, **keys, top_entropy_quantile=0.45),
    ]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    made_by = "tests/golden/make_trl_gates.py"
    write("trl_gates.json", peer="trl", version=trl.__version__, made_by=made_by, cases=gates() + control())
