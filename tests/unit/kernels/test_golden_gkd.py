"""Divergences over the teacher's top tokens against TRL 1.16.0: values and gradients."""

import pytest
import torch

from golden.replay import Case, cases, compare, compare_gradients, tensor
from titan_rl.kernels.divergence import divergence
from titan_rl.kernels.policy_loss import Surrogate, Tokens, policy_loss
from titan_rl.kernels.token_logprob import most_likely, token_logprob

CASES = cases("trl_gkd.json")
APART = 1e-3  # least difference of two settings' losses on one input


def loss_of(case: Case, student: torch.Tensor, **changed: float) -> torch.Tensor:
    inputs, settings = case["inputs"], case["settings"] | changed
    teacher, mask = tensor(inputs["teacher"]).flatten(0, 1), tensor(inputs["mask"]).flatten()
    one = torch.eye(teacher.shape[1], dtype=torch.float64)
    ids = most_likely(teacher, one, settings["k"])
    targets = torch.zeros(len(teacher), dtype=torch.long)
    *_, student_top = token_logprob(student.flatten(0, 1), one, targets, others=ids)
    found = divergence(student_top, teacher.log_softmax(-1).gather(1, ids), settings["beta"])
    tokens = Tokens(
        behaviour=tensor(inputs["old"]).flatten(),
        advantage=torch.zeros_like(mask),
        mask=mask,
        weight=mask / mask.sum(),
        sequence=torch.zeros_like(mask, dtype=torch.long),
        sequences=1,
        divergence=found,
    )
    clip = {"clip": "cispo", "clip_low": 1.0, "clip_high": settings["clip"] - 1} if "clip" in settings else {}
    surrogate = Surrogate(**{"clip": "none"} | clip)  # type: ignore[arg-type]
    loss, statistics = policy_loss(tensor(inputs["logprob"]).flatten(), torch.zeros_like(mask), tokens, surrogate)
    torch.testing.assert_close(statistics.tokens["distill/divergence"], (found.detach() * mask).sum())
    return loss


@pytest.mark.parametrize("name", CASES)
def test_the_loss_and_its_gradients_are_trls(name: str) -> None:
    case = CASES[name]
    student = tensor(case["inputs"]["student"]).requires_grad_()
    loss = loss_of(case, student)
    loss.backward()
    compare(loss, case["outputs"]["loss"])
    compare_gradients({"student": student}, case)


def test_the_comparison_notices_another_beta_k_or_clip() -> None:
    case = CASES["top_3_0.5_clipped"]
    student, theirs = tensor(case["inputs"]["student"]), case["outputs"]["loss"]
    for changed in ({"beta": 0.4}, {"beta": 0.0}, {"beta": 1.0}, {"k": 2}, {"clip": 1.5}):
        assert abs(float(loss_of(case, student, **changed)) - theirs) > APART
