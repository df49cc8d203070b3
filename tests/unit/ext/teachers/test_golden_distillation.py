"""Self-distillation against TRL 1.16.0's SDPOTrainer and SDFTTrainer, with sampled tokens: values and gradients."""

from dataclasses import replace

import pytest
import torch

from golden.replay import (
    GROUP,
    Case,
    Columns,
    cases,
    columns,
    compare,
    compare_gradients,
    placed,
    policy_terms,
    samples,
    summed,
    tensor,
)
from support.judged_groups import group, rollout
from titan_rl.config.algorithms import PRESETS
from titan_rl.config.presets import preset
from titan_rl.config.sections import Config, CurriculumSection
from titan_rl.ext.teachers.privileged import PrivilegedPrompts
from titan_rl.kernels.policy_loss import Surrogate, policy_loss
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.types import Branch, Completion, Turn

CASES = cases("trl_distillation.json")
ON_POLICY = ("sdpo", "sdpo_all_covered", "sdft")
OFF_POLICY = ("sdpo_off_policy", "sdpo_off_policy_unclipped", "sdft_off_policy")
WITH_REWARDS = ("sdpo_with_rewards", "sdpo_with_more_rewards")
CONTEXTS: dict[str, list[str]] = {"sibling": ["sibling"], "sibling_or_feedback": ["sibling", "feedback"]}


def test_every_case_is_compared() -> None:
    assert CASES.keys() == {*ON_POLICY, *OFF_POLICY, *WITH_REWARDS, *CONTEXTS}


def inputs_of(case: Case, gain_over: str) -> Columns:
    """Columns whose advantage is teacher - `gain_over`, and 0 without a privileged context."""
    inputs = case["inputs"]
    gain = (tensor(inputs["teacher"]) - tensor(inputs[gain_over])) * tensor(inputs["covered"])[:, None]
    return columns({**inputs, "reference": inputs["teacher"]}, gain.tolist())


def loss_of(case: Case, x: Columns, clip: float = PRESETS["sdpo"]["clip_high"]) -> torch.Tensor:
    preset = PRESETS["sdft" if case["name"].startswith("sdft") else "sdpo"]
    surrogate = Surrogate(clip=preset["clip"], clip_low=preset["clip_low"], clip_high=clip)
    loss, _ = summed(
        placed(samples(case["inputs"]), preset["aggregation"]),
        policy_terms(policy_loss, surrogate, {**x, "behaviour": x["old"]}),
    )
    loss.backward()
    return loss


@pytest.mark.parametrize("name", ON_POLICY)
def test_the_loss_and_its_gradients_are_trls(name: str) -> None:
    case = CASES[name]
    x = inputs_of(case, "behaviour")
    compare(loss_of(case, x), case["outputs"]["loss"])
    compare_gradients(x, case)


@pytest.mark.parametrize("name", OFF_POLICY)
def test_off_policy_only_what_the_teacher_is_compared_with_differs(name: str) -> None:
    """TRL subtracts the current log-prob, and we the sampling one: with the same difference all is equal, so the
    clipped weight is."""
    case = CASES[name]
    clip = case["settings"]["distillation_is_clip"] - 1
    x = inputs_of(case, "logprob")
    compare(loss_of(case, x, clip), case["outputs"]["loss"])
    compare_gradients(x, case)
    with pytest.raises(AssertionError):
        compare(loss_of(case, inputs_of(case, "behaviour"), clip), case["outputs"]["loss"])


@pytest.mark.parametrize("name", WITH_REWARDS)
def test_with_rewards_the_gradients_are_trls(name: str) -> None:
    """TRL weighs two losses by 1 - w and w; ours is the first with teacher_coef = w / (1 - w), times 1 - w."""
    case = CASES[name]
    w = case["settings"]["distillation_weight"]
    x = inputs_of(case, "behaviour")
    x["advantage"] = tensor(case["inputs"]["advantage"])[:, None] + w / (1 - w) * x["advantage"]
    loss_of(case, x)
    compare_gradients(x, case, 1 - w)


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_privileged_contexts_are_trls(name: str, text: TextTokenizer) -> None:
    case = CASES[name]
    algorithm = preset("sdpo", advantage="teacher", teacher_context=CONTEXTS[name])
    correct_at = case["settings"]["success_reward_threshold"]
    config = Config(algorithm=algorithm, curriculum=CurriculumSection(correct_at=correct_at))
    prompts = PrivilegedPrompts(config, text)
    rewards, theirs = case["inputs"]["rewards"], case["outputs"]["contexts"]
    for start in range(0, len(rewards), GROUP):
        numbered = [
            replace(
                rollout(rewards[k]),
                branches=[Branch([Turn([1], Completion(text.encode(f"{k}"), [0.0], [0], "stop"))])],
                feedback=f"feedback {k}" if k % 2 else "",
            )
            for k in range(start, start + GROUP)
        ]
        ours = [prompts.context(group(*numbered), k) for k in range(GROUP)]
        assert ours == theirs[start : start + GROUP]
        assert [float(bool(context)) for context in ours] == case["outputs"]["covered"][start : start + GROUP]
