"""Make golden vectors of self-distillation with TRL's own trainers (see make_trl.py).

    peers/bin/python tests/golden/make_trl_distillation.py

The forward passes are replaced by logits over two tokens: log p of the sampled one, and log(1 - p). So TRL's
log-softmax returns the drawn log-probs, and its gradients reach them.
"""
# pyright: basic, reportMissingImports=false

from types import SimpleNamespace
from typing import Any

import torch
import trl
from make_trl import GROUP, Model, bare
from trl.experimental.sdft.sdft_trainer import SDFTTrainer
from trl.experimental.sdpo import sdpo_trainer
from trl.experimental.sdpo.sdpo_trainer import SDPOTrainer, SuccessfulRolloutTeacherContextBuilder
from vectors import LENGTHS, answers, case, rewards, write

COVERED = (1, 1, 0, 1, 0, 1, 1, 0)  # answers with a privileged context


def logits(logprob: torch.Tensor) -> torch.Tensor:
    return torch.stack([logprob, torch.log1p(-logprob.clamp(max=-1e-9).exp())], -1)


def loss_case(
    name: str,
    *,
    seed: int,
    trainer: type = SDPOTrainer,
    on_policy: bool = True,
    covered: tuple[int, ...] = COVERED,
    weight: float = 1.0,
    clip: float | None = 2.0,
) -> dict[str, Any]:
    """From the log-probs of the policy, of sampling and of the teacher to the loss and its gradients."""
    x = answers(seed, empty=False, spread=0.6)
    x["teacher"], x["covered"] = x.pop("reference"), torch.tensor(covered)
    if on_policy:
        x["old"] = x["behaviour"] = x["logprob"].clone()
    r = rewards(seed).reshape(-1, GROUP)
    x["advantage"] = (r - r.mean(1, keepdim=True)).flatten()
    logprob = x["logprob"].requires_grad_()
    found = sdpo_trainer.DistillationLogits(
        completion_ids=torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long),
        completion_mask=x["mask"],
        loss_mask=x["mask"] * x["covered"][:, None],
        student_logits=logits(logprob),
        teacher_logits=logits(x["teacher"]),
    )
    settings = {"distillation_weight": weight, "distillation_is_clip": clip}
    made = bare(
        trainer,
        args=SimpleNamespace(distillation_mode="sampled_token", distillation_alpha=1.0, **settings),
        model=Model(),
        teacher_model=None,
        use_teacher_server=False,
        current_gradient_accumulation_steps=1,
        importance_sampling_level="token",
        epsilon_low=0.2,
        epsilon_high=0.2,
        loss_type="grpo",
        _name=trainer.__name__,
        _compute_teacher_student_logits=lambda *_: found,
    )
    batch = {
        "completion_ids": found.completion_ids,
        "completion_mask": x["mask"],
        "old_per_token_logps": x["old"],
        "advantages": x["advantage"],
    }
    loss = made.compute_loss(made.model, batch)
    loss.backward()
    names = ("mask", "length", "logprob", "old", "behaviour", "teacher", "covered", "advantage", "entropy")
    return case(
        name,
        f"{trainer.__name__}.compute_loss",
        settings=settings,
        inputs={key: x[key] for key in names},
        outputs={"loss": loss},
        leaves={"logprob": logprob},
    )


def context_case(name: str, *, seed: int, feedback: bool = False) -> dict[str, Any]:
    """From rewards to the context that the teacher reads with each answer; answer k is the text "k"."""
    drawn, read = rewards(seed), []
    settings = {"success_reward_threshold": 1.0, "include_environment_feedback": feedback}
    made = SimpleNamespace(
        args=SimpleNamespace(
            use_successful_as_teacher=True,
            dont_reprompt_on_self_success=True,
            environment_feedback_only_without_solution=True,
            remove_thinking_from_demonstration=False,
            reprompt_template="{solution}{feedback}",
            solution_template="{successful_previous_attempt}",
            feedback_template="{feedback_raw}",
            max_reprompt_len=100,
            **settings,
        ),
        accelerator=bare(SDPOTrainer).accelerator,
        model=Model(),
        num_generations=GROUP,
        num_generations_eval=GROUP,
        _tokenizer=SimpleNamespace(pad_token_id=-1),
        processing_class=SimpleNamespace(decode=lambda ids, **_: str(int(ids[0]))),
        _tokenize_prompts_untruncated=lambda prompts: read.extend(prompts) or [[1]] * len(prompts),
    )
    completions = torch.arange(len(drawn))[:, None]
    built = SuccessfulRolloutTeacherContextBuilder(made).build(
        {"completion_ids": completions, "completion_mask": torch.ones_like(completions)},
        ["no context"] * len(drawn),
        drawn,
        [f"feedback {k}" if k % 2 else "" for k in range(len(drawn))],
    )
    mask = built["self_distillation_mask"]
    made_case = case(
        name,
        "SuccessfulRolloutTeacherContextBuilder.build",
        settings=settings,
        inputs={"rewards": drawn},
        outputs={"covered": mask},
    )
    made_case["outputs"]["contexts"] = [text if on else "" for text, on in zip(read, mask.tolist(), strict=True)]
    return made_case


def cases() -> list[dict[str, Any]]:
    every = (1,) * len(COVERED)
    return [
        loss_case("sdpo", seed=71),
        loss_case("sdpo_all_covered", seed=72, covered=every),
        loss_case("sdpo_off_policy", seed=73, on_policy=False),
        loss_case("sdpo_off_policy_unclipped", seed=74, on_policy=False, clip=1e9),
        loss_case("sdpo_with_rewards", seed=75, weight=0.25),
        loss_case("sdpo_with_more_rewards", seed=76, weight=0.75),
        loss_case("sdft", seed=77, trainer=SDFTTrainer, covered=every),
        loss_case("sdft_off_policy", seed=78, trainer=SDFTTrainer, covered=every, on_policy=False),
        context_case("sibling", seed=81),
        context_case("sibling_or_feedback", seed=82, feedback=True),
    ]


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    made_by = "tests/golden/make_trl_distillation.py"
    write("trl_distillation.json", peer="trl", version=trl.__version__, made_by=made_by, cases=cases())
