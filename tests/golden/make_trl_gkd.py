"""Make golden vectors of divergences from a teacher with TRL's own functions (see make_trl.py).

    peers/bin/python tests/golden/make_trl_gkd.py

SDPO's loss takes the student's top k. Called with the roles exchanged and alpha = 1 - beta it is the same divergence
over the teacher's.
"""
# pyright: basic, reportMissingImports=false

from collections.abc import Iterator
from typing import Any

import torch
import trl
from make_trl import bare
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.sdpo import loss_utils
from trl.experimental.server_distillation.server_distillation_trainer import ServerDistillationTrainer
from vectors import answers, case, write

VOCABULARY = 11
BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)


def drawn(seed: int) -> dict[str, torch.Tensor]:
    """Draw masks, logits of student and teacher, and the log-probs of sampling."""
    generator = torch.Generator().manual_seed(seed)
    x = answers(seed, empty=True)
    inputs = {name: x[name] for name in ("mask", "length", "logprob", "old")}
    for name in ("student", "teacher"):
        logits = 2 * torch.randn(*x["mask"].shape, VOCABULARY, generator=generator, dtype=torch.float64)
        inputs[name] = (logits * 1e3).round() / 1e3
    return inputs


def of_whole_vocabulary(seed: int, beta: float) -> dict[str, Any]:
    x = drawn(seed)
    student = x["student"].requires_grad_()
    labels = torch.where(x["mask"] > 0, 0, -100)
    loss = GKDTrainer.generalized_jsd_loss(student, x["teacher"], labels, beta)
    loss.backward()
    settings = {"beta": beta, "k": VOCABULARY}
    found = {"loss": loss}
    return case(
        f"whole_{beta:g}",
        "GKDTrainer.generalized_jsd_loss",
        settings=settings,
        inputs=x,
        outputs=found,
        leaves={"student": student},
    )


def of_server(seed: int, k: int) -> dict[str, Any]:
    x = drawn(seed)
    student = x["student"].requires_grad_()
    top = x["teacher"].log_softmax(-1).topk(k)
    loss = bare(ServerDistillationTrainer, beta=0.0, loss_add_tail=True)._compute_server_forward_kl_loss(
        {"topk_logprobs": top.values, "topk_token_ids": top.indices},
        student.log_softmax(-1),
        torch.where(x["mask"] > 0, 0, -100),
    )
    loss.backward()
    name, settings = "ServerDistillationTrainer._compute_server_forward_kl_loss", {"beta": 0.0, "k": k}
    return case(f"server_{k}", name, settings=settings, inputs=x, outputs={"loss": loss}, leaves={"student": student})


def of_top(seed: int, k: int, beta: float, clip: float | None = None) -> dict[str, Any]:
    x = drawn(seed)
    student = x["student"].requires_grad_()
    values = loss_utils.compute_topk_self_distillation_loss(
        x["teacher"], student, distillation_topk=k, distillation_alpha=1 - beta, distillation_add_tail=True
    )
    settings: dict[str, Any] = {"beta": beta, "k": k}
    if clip is not None:
        settings["clip"] = clip
        values = loss_utils.apply_importance_sampling_clipping(values, x["logprob"], x["old"], clip)
    loss = (values * x["mask"]).sum() / x["mask"].sum()
    loss.backward()
    name = f"top_{k}_{beta:g}" + ("_clipped" if clip else "")
    function = "compute_topk_self_distillation_loss"
    return case(name, function, settings=settings, inputs=x, outputs={"loss": loss}, leaves={"student": student})


def cases() -> Iterator[dict[str, Any]]:
    for seed, beta in enumerate(BETAS):
        yield of_whole_vocabulary(400 + seed, beta)
        yield of_top(410 + seed, 3, beta)
    yield of_top(420, 1, 0.5)
    yield of_top(421, 3, 0.5, clip=2.0)
    yield of_server(430, 1)
    yield of_server(431, 4)


if __name__ == "__main__":
    made_by = "tests/golden/make_trl_gkd.py"
    write("trl_gkd.json", peer="trl", version=trl.__version__, made_by=made_by, cases=cases())
