"""Make golden vectors with TRL's own functions.

    python3.11 -m venv peers && peers/bin/pip install torch==2.13.0 trl==1.16.0
    peers/bin/python tests/golden/make_trl.py

The trainers are made without their constructors, which need a model, a tokenizer and a data set. `_generate`,
`_calculate_rewards` and the forward pass are replaced and return fixed numbers. All other arithmetic is TRL's: rewards
to advantages, importance ratios, loss, and autograd through it. Float64 throughout.
"""
# pyright: basic, reportMissingImports=false

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl
from accelerate import Accelerator
from trl.rewards import get_soft_overlong_punishment
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.reward_trainer import RewardTrainer
from trl.trainer.rloo_trainer import RLOOTrainer
from vectors import LENGTHS, answers, case, rewards, write

GROUP = 4
SCORE, LOSS = "_generate_and_score_completions", "_compute_loss"

DEFAULTS: dict[str, Any] = {
    "beta": 0.0,
    "current_gradient_accumulation_steps": 1,
    "entropy_coef": 0.0,
    "environment_factories": None,
    "environments": None,
    "epsilon_high": 0.2,
    "epsilon_low": 0.2,
    "importance_sampling_level": "token",
    "log_multimodal": False,
    "loss_type": "dapo",
    "mask_truncated_completions": False,
    "max_completion_length": max(LENGTHS),
    "multi_objective_aggregation": "sum_then_normalize",
    "normalize_advantages": False,
    "num_generations": GROUP,
    "num_iterations": 2,  # so that the old log-probs are not replaced by the current ones
    "off_policy_mask_threshold": None,
    "pad_to_multiple_of": None,
    "reward_clip_range": None,
    "reward_func_names": ["reward"],
    "scale_rewards": "group",
    "tools": [],
    "top_entropy_quantile": 1.0,
    "use_adaptive_entropy": False,
    "vllm_importance_sampling_clip_max": None,
    "vllm_importance_sampling_clip_min": None,
    "vllm_importance_sampling_correction": True,
}
"""Attributes that the trainers' constructors would set."""


class Model(torch.nn.Module):
    """Return the argument of every call."""

    is_gradient_checkpointing = False

    def __init__(self, answer: Any = None) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, **_: Any) -> Any:
        return self.answer


def bare(trainer: type, **attributes: Any) -> Any:
    """A trainer with these attributes and nothing else."""
    made = object.__new__(trainer)
    made.__dict__.update(
        accelerator=Accelerator(cpu=True), aux_loss_enabled=False, _metrics=defaultdict(lambda: defaultdict(list))
    )
    made.__dict__.update(attributes)
    return made


def policy_trainer(trainer: type, x: dict[str, torch.Tensor], **settings: Any) -> Any:
    """Return a GRPO or RLOO trainer whose policy, proximal policy, reference and sampler have the log-probs of `x`."""
    model, reference = Model(), Model()
    ids = [list(range(1, length + 1)) for length in LENGTHS]
    rows = list(zip(x["mask"].tolist(), x["behaviour"].tolist(), LENGTHS, strict=True))

    def generate(prompts: list[str]) -> tuple[Any, ...]:
        short = ([[1]] * len(prompts), ids)
        if trainer is RLOOTrainer:
            return *short, [""] * len(prompts)
        masks = [mask[:length] for mask, _, length in rows]
        return *short, masks, [""] * len(prompts), [row[:length] for _, row, length in rows], {}, None, []

    def forward(model: Model, *_: Any, compute_entropy: bool = False, **__: Any) -> tuple[Any, ...]:
        if compute_entropy:  # only the loss asks for it
            return x["logprob"], x["entropy"], None
        return (x["reference"] if model is reference else x["old"]), None, None

    given = {
        "model": model,
        "ref_model": reference,
        "_generate": generate,
        "_get_per_token_logps_and_entropies": forward,
        "_calculate_rewards": lambda *_: x["rewards"][:, None],
        "_tokenizer": SimpleNamespace(pad_token_id=0),
        "_pending_extra_logs": {},
        "_pending_metrics": {},
        "_logs": defaultdict(list, rewards=defaultdict(list), extra=defaultdict(list)),
        "reward_weights": torch.ones(1),
        "use_vllm": "vllm_importance_sampling_mode" in settings,
    }
    args = SimpleNamespace(
        delta=settings.get("delta"),
        gradient_accumulation_steps=1,
        gradient_checkpointing_kwargs=None,
        per_device_train_batch_size=len(LENGTHS),
        steps_per_generation=1,
        use_bias_correction_kl=False,
    )
    chosen = {key: value for key, value in settings.items() if key != "delta"}
    bonus = settings.get("entropy_coef", 0.0) != 0
    return bare(trainer, args=args, _entropy_bonus_enabled=bonus, **{**DEFAULTS, **given, **chosen})


def policy_case(
    name: str,
    *,
    seed: int,
    empty: bool = True,
    spread: float = 0.3,
    trainer: type = GRPOTrainer,
    on_policy: bool = False,
    **settings: Any,
) -> dict[str, Any]:
    """Rewards to gradients: the step that prepares a batch, then the loss."""
    x = answers(seed, empty=empty, spread=spread)
    if trainer is RLOOTrainer:  # it knows no tool tokens
        x["mask"] = (x["old"] != 0).long()
    if on_policy:
        x["old"] = x["behaviour"] = x["logprob"].clone()
    x["rewards"] = rewards(seed)
    x["logprob"].requires_grad_()
    x["entropy"].requires_grad_()
    made = policy_trainer(trainer, x, **settings)
    batch = made._generate_and_score_completions([{"prompt": ""}] * len(LENGTHS))
    loss = made._compute_loss(made.model, batch)
    loss.backward()
    outputs = {"loss": loss, "advantages": batch["advantages"]}
    if "importance_sampling_ratio" in batch:
        outputs["importance_ratio"] = batch["importance_sampling_ratio"].expand_as(x["mask"])
    if trainer is GRPOTrainer:  # TRL counts clips of a whole sequence's ratio by sequence
        logged = ["entropy", "kl"]
        if settings.get("importance_sampling_level") != "sequence":
            logged += ["clip_ratio/low_mean", "clip_ratio/high_mean"]
        metrics = made._metrics["train"]
        outputs |= {name: torch.tensor(metrics[name][0]) for name in logged if name in metrics}
    leaves = {"logprob": x["logprob"]}
    if settings.get("entropy_coef"):
        leaves["entropy"] = x["entropy"]
    names = ("mask", "length", "rewards", "logprob", "old", "behaviour", "reference", "entropy")
    inputs = {key: x[key] for key in names}
    function = f"{trainer.__name__}.{SCORE}, {trainer.__name__}.{LOSS}"
    return case(name, function, settings=settings, inputs=inputs, outputs=outputs, leaves=leaves)


def policy() -> list[dict[str, Any]]:
    ratio = "vllm_importance_sampling_mode"
    high, low = "vllm_importance_sampling_clip_max", "vllm_importance_sampling_clip_min"
    return [
        policy_case("ppo_token_mean", seed=1),
        policy_case("ppo_local_token_mean", seed=2, loss_type="bnpo"),
        policy_case("ppo_clip_higher", seed=3, epsilon_high=0.28),
        policy_case("ppo_sequence_mean", seed=4, empty=False, loss_type="grpo"),
        policy_case("ppo_sequence_mean_counts_the_empty", seed=5, loss_type="grpo"),
        policy_case("ppo_sequence_sum", seed=6, empty=False, loss_type="dr_grpo", scale_rewards="none"),
        policy_case("ppo_sequence_sum_counts_the_empty", seed=7, loss_type="dr_grpo", scale_rewards="none"),
        policy_case("ppo_dual_clip", seed=8, spread=0.8, delta=1.5),
        policy_case("gspo", seed=9, empty=False, loss_type="grpo", importance_sampling_level="sequence"),
        policy_case(
            "gspo_clipped",
            seed=24,
            empty=False,
            spread=0.5,
            loss_type="grpo",
            importance_sampling_level="sequence",
            epsilon_low=0.05,
            epsilon_high=0.08,
        ),
        policy_case("cispo", seed=11, spread=0.5, loss_type="cispo", epsilon_high=1.4),
        policy_case("kl_k3", seed=12, beta=0.05),
        policy_case("kl_k3_sequence_mean", seed=13, empty=False, loss_type="grpo", beta=0.2),
        policy_case("entropy_token_mean", seed=14, beta=0.05, entropy_coef=0.01),
        policy_case("entropy_sequence_mean", seed=15, empty=False, loss_type="grpo", entropy_coef=0.01),
        policy_case("token_tis", seed=16, **{ratio: "token_truncate", high: 1.2}),
        policy_case("sequence_tis", seed=30, **{ratio: "sequence_truncate", high: 1.3}, beta=0.05),
        policy_case("token_mask", seed=18, **{ratio: "token_mask", low: 0.75, high: 1.3}),
        policy_case("sequence_mask", seed=29, **{ratio: "sequence_mask", low: 0.6, high: 1.5}, beta=0.05),
        policy_case(
            "gspo_token_tis",
            seed=20,
            empty=False,
            loss_type="grpo",
            importance_sampling_level="sequence",
            **{ratio: "token_truncate", high: 1.2},
        ),
    ]


def rloo() -> list[dict[str, Any]]:
    return [
        policy_case("on_policy", seed=31, trainer=RLOOTrainer, on_policy=True),
        policy_case("kl_in_the_reward", seed=32, trainer=RLOOTrainer, on_policy=True, beta=0.1),
    ]


def dpo_case(name: str, *, seed: int, pairs: int = 4, **settings: Any) -> dict[str, Any]:
    """The first half of the sequences was chosen. TRL's fused head gives 0 where it has no label."""
    x = {key: torch.cat([v[:pairs], v[4 : 4 + pairs]]) for key, v in answers(seed, empty=False).items()}
    logprob = x["logprob"].requires_grad_()
    mask = torch.cat([torch.zeros(2 * pairs, 1, dtype=torch.long), x["mask"]], 1)  # one prompt token

    def outputs(values: torch.Tensor) -> SimpleNamespace:
        zeros = torch.zeros_like(values)
        return SimpleNamespace(
            log_probs=values * x["mask"], entropy=zeros, mean_logits=zeros, is_top1=zeros.bool(), aux_loss=None
        )

    made = bare(
        DPOTrainer,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        model=Model(outputs(logprob)),
        ref_model=Model(outputs(x["reference"])),
        ld_alpha=None,
        precompute_ref_logps=False,
        f_divergence_type="reverse_kl",
        loss_weights=[1.0],
        use_weighting=False,
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
    ids = torch.ones_like(mask)
    loss = made._compute_loss(made.model, {"input_ids": ids, "attention_mask": ids, "completion_mask": mask}, False)
    loss.backward()
    metrics = {key: torch.tensor(made._metrics["train"][key][0]) for key in made._metrics["train"] if "/" in key}
    inputs = {key: x[key] for key in ("mask", "length", "logprob", "reference")}
    outputs_ = {"loss": loss, **{key: v for key, v in metrics.items() if not key.startswith("logits")}}
    return case(
        name,
        f"DPOTrainer.{LOSS}",
        settings=settings,
        inputs=inputs,
        outputs=outputs_,
        leaves={"logprob": logprob},
    )


def reward_case(name: str, *, seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    score = torch.randn(8, generator=generator, requires_grad=True)
    made = bare(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=None), _total_train_tokens=0, _tp_size=1)
    made.model = Model(SimpleNamespace(logits=score[:, None]))
    loss = made.compute_loss(made.model, {"attention_mask": torch.ones(8, 1, dtype=torch.long)})
    loss.backward()
    names = ("accuracy", "margin", "mean_reward", "max_reward", "min_reward")
    metrics = {key: torch.tensor(made._metrics["train"][key][0]) for key in names}
    return case(
        name,
        "RewardTrainer.compute_loss",
        settings={},
        inputs={"score": score},
        outputs={"loss": loss, **metrics},
        leaves={"score": score},
    )


def preference() -> list[dict[str, Any]]:
    return [
        dpo_case("sigmoid", seed=41, loss_types=["sigmoid"], beta=0.1, label_smoothing=0.0),
        dpo_case("sigmoid_sharp", seed=42, loss_types=["sigmoid"], beta=0.7, label_smoothing=0.0),
        dpo_case("ipo", seed=43, loss_types=["ipo"], beta=0.2, label_smoothing=0.0),
        # The smoothed sigmoid, which TRL has under this name only. Sorting one pair does not change it.
        dpo_case("smoothed", seed=44, pairs=1, loss_types=["aot_unpaired"], beta=0.3, label_smoothing=0.1),
        dpo_case("smoothed_more", seed=45, pairs=1, loss_types=["aot_unpaired"], beta=0.3, label_smoothing=0.3),
        reward_case("bradley_terry", seed=46),
    ]


def advantage_case(name: str, *, seed: int, trainer: type = GRPOTrainer, flat: bool = False, **settings: Any) -> Any:
    x = {**answers(seed, empty=False), "rewards": rewards(seed)}
    if flat:
        x["rewards"][GROUP:] = 0.1
    batch = policy_trainer(trainer, x, **settings)._generate_and_score_completions([{"prompt": ""}] * len(LENGTHS))
    inputs = {"rewards": x["rewards"]}
    function = f"{trainer.__name__}.{SCORE}"
    return case(name, function, settings=settings, inputs=inputs, outputs={"advantages": batch["advantages"]})


def overlong_case() -> dict[str, Any]:
    length = torch.arange(0, 30)
    punish = get_soft_overlong_punishment(20, 6)
    outputs = {"reward": torch.tensor(punish(completion_ids=[[1] * n for n in length.tolist()]))}
    settings = {"max_completion_len": 20, "soft_punish_cache": 6}
    function = "get_soft_overlong_punishment"
    return case("overlong", function, settings=settings, inputs={"length": length}, outputs=outputs)


def advantages() -> list[dict[str, Any]]:
    return [
        advantage_case("group", seed=51, scale_rewards="group"),
        advantage_case("group_unscaled", seed=52, scale_rewards="none"),
        advantage_case("group_flat", seed=53, scale_rewards="group", flat=True),
        advantage_case("leave_one_out", seed=54, trainer=RLOOTrainer),
        overlong_case(),
    ]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    families = {"policy": policy, "rloo": rloo, "preference": preference, "advantages": advantages}
    for family, cases in families.items():
        file = f"trl_{family}.json"
        write(file, peer="trl", version=trl.__version__, made_by="tests/golden/make_trl.py", cases=cases())
