"""Make golden vectors with TRL's losses of pairs without a reference, and of KTO.

    peers/bin/python tests/golden/make_trl_pairs.py

make_trl.py describes the environment and the trainer without a constructor. CPO and ORPO read logits: there are two
tokens, and the logits are chosen so that the labels have the log-probs of the inputs. Their cast of log-probs to
float32 is left out.
"""
# pyright: basic, reportMissingImports=false

from types import SimpleNamespace
from typing import Any

import torch
import trl
from make_trl import LOSS, Model, bare
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from vectors import LENGTHS, answers, case, write

PAIRS = len(LENGTHS) // 2
METRICS = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies")


class Stub(Model):
    """Call the argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.answer(**{"input_ids": args[0] if args else None, **kwargs})


def with_prompt(values: torch.Tensor) -> torch.Tensor:
    """Put a prompt of one token before the answers."""
    return torch.cat([torch.zeros(len(values), 1, dtype=values.dtype), values], 1)


def forward_of(x: dict[str, torch.Tensor]) -> tuple[Model, dict[str, torch.Tensor]]:
    """Return a model and a batch. Position t has the logits of answer token t, which is token 0."""
    logprob = torch.where(x["mask"] > 0, x["logprob"], -1.0)
    logits = torch.stack([logprob, torch.log(-torch.expm1(logprob))], -1)
    logits = torch.cat([logits, torch.zeros(len(logits), 1, 2)], 1)  # the last position predicts nothing
    mask = with_prompt(x["mask"])
    labels = torch.where(mask > 0, 0, -100)
    batch = {
        "concatenated_input_ids": torch.zeros_like(mask),
        "concatenated_attention_mask": mask,
        "concatenated_labels": labels,
    }
    return Stub(lambda **_: SimpleNamespace(logits=logits)), batch


def reference_free(name: str, trainer: type, *, seed: int, equal: bool = False, **settings: Any) -> dict[str, Any]:
    """`equal`: the chosen answers have one length, so that a mean over their tokens is a mean over answers."""
    x = answers(seed, empty=False)
    if equal:
        x["mask"][:PAIRS] = (torch.arange(max(LENGTHS)) < min(LENGTHS[:PAIRS])).long()
    logprob = x["logprob"].requires_grad_()
    model, batch = forward_of(x)
    made = bare(
        trainer,
        concatenated_inputs=lambda *_, **__: batch,
        is_encoder_decoder=False,
        pad_token_id=0,
        padding_value=0,
        alpha=0.0,
        cpo_alpha=0.0,
        **settings,
    )
    loss, metrics = made.get_batch_loss_metrics(model, {"chosen_labels": torch.zeros(PAIRS)})
    loss.backward()
    outputs = {"loss": loss, **{key: torch.tensor(metrics[key]) for key in METRICS}}
    inputs = {key: x[key] for key in ("mask", "length", "logprob")}
    function = f"{trainer.__name__}.get_batch_loss_metrics"
    return case(name, function, settings=settings, inputs=inputs, outputs=outputs, leaves={"logprob": logprob})


def kto(name: str, *, seed: int, moved: float = 0.0, **settings: Any) -> dict[str, Any]:
    """The first half of the answers is desirable. The second draw holds the answers to other prompts."""
    x, unrelated = answers(seed, empty=False), answers(seed + 1000, empty=False)
    logprob = x["logprob"].requires_grad_()
    unrelated["logprob"] = unrelated["logprob"] + moved * unrelated["mask"]
    zeros = torch.zeros_like(x["logprob"])

    def model(key: str) -> Model:
        def forward(input_ids: torch.Tensor, **_: Any) -> SimpleNamespace:
            drawn = unrelated if input_ids[0, 0] else x
            return SimpleNamespace(
                log_probs=drawn[key] * drawn["mask"], entropy=zeros, mean_logits=zeros, aux_loss=None
            )

        return Stub(forward)

    made = bare(
        KTOTrainer,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        model=model("logprob"),
        ref_model=model("reference"),
        calculate_KL=True,
        precompute_ref_logps=False,
        loss_type="kto",
        _total_train_tokens=0,
        _tp_size=1,
        **settings,
    )
    mask, other = with_prompt(x["mask"]), with_prompt(unrelated["mask"])
    batch = {
        "input_ids": torch.zeros_like(mask),
        "attention_mask": torch.ones_like(mask),
        "completion_mask": mask,
        "KL_input_ids": torch.ones_like(other),
        "KL_attention_mask": torch.ones_like(other),
        "KL_completion_mask": other,
        "label": torch.arange(len(LENGTHS)) < PAIRS,
    }
    loss = made._compute_loss(made.model, batch, False)
    loss.backward()
    logged = made._metrics["train"]
    outputs = {"loss": loss, "kl": torch.tensor(logged["kl"][0])}
    outputs |= {key: torch.tensor(logged[key][0]) for key in (*METRICS[:3], "logps/chosen", "logps/rejected")}
    inputs = {key: x[key] for key in ("mask", "length", "logprob", "reference")}
    inputs |= {f"unrelated_{key}": unrelated[key] for key in ("mask", "logprob", "reference")}
    function = f"KTOTrainer.{LOSS}"
    return case(name, function, settings=settings, inputs=inputs, outputs=outputs, leaves={"logprob": logprob})


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    torch.Tensor.float = torch.Tensor.double
    simpo: dict[str, Any] = {"trainer": CPOTrainer, "loss_type": "simpo"}
    cases = [
        reference_free("simpo", **simpo, seed=71, beta=2.0, simpo_gamma=1.0, label_smoothing=0.0),
        reference_free("simpo_smoothed", **simpo, seed=72, beta=2.5, simpo_gamma=0.3, label_smoothing=0.2),
        reference_free("orpo", ORPOTrainer, seed=73, equal=True, beta=0.1),
        reference_free("orpo_strong", ORPOTrainer, seed=74, equal=True, beta=1.5),
        reference_free("orpo_ragged", ORPOTrainer, seed=75, beta=0.3),
        kto("kto", seed=76, moved=0.2, beta=0.1, desirable_weight=1.0, undesirable_weight=1.0),
        kto("kto_weighted", seed=77, moved=0.4, beta=0.6, desirable_weight=1.3, undesirable_weight=0.7),
        kto("kto_below_zero", seed=78, moved=-2.0, beta=0.4, desirable_weight=1.0, undesirable_weight=1.5),
    ]
    made_by = "tests/golden/make_trl_pairs.py"
    write("trl_pairs.json", peer="trl", version=trl.__version__, made_by=made_by, cases=cases)
