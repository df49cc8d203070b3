"""Make golden vectors with a training step of TRL's `OnlineDPOTrainer`.

    peers/bin/python tests/golden/make_trl_online_dpo.py

make_trl.py describes the environment and the trainer without a constructor. There are two answers to each of four
prompts: answer k and answer k + 4. TRL's IPO sums over tokens, so it is given each answer's log-probs divided by its
length; ours takes the mean itself.
"""
# pyright: basic, reportMissingImports=false

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
import trl
from make_trl import Model, bare
from trl.experimental.online_dpo.online_dpo_trainer import OnlineDPOTrainer
from vectors import LENGTHS, answers, case, write

PROMPTS = len(LENGTHS) // 2
METRICS = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/margins",
    "rewards/accuracies",
    "logps/chosen",
    "logps/rejected",
)


def online(name: str, *, seed: int, beta: float, loss_type: str = "sigmoid", spread: float = 0.3) -> dict[str, Any]:
    x = answers(seed, empty=False, spread=spread)
    drawn = torch.rand(len(LENGTHS), generator=torch.Generator().manual_seed(seed))
    length = 1 + (drawn * x["length"]).long()  # up to the length of vectors.py
    mask = (torch.arange(max(LENGTHS)) < length[:, None]).long()
    reward = x["reward"][:, 0] + torch.arange(len(LENGTHS)) / 7  # none are equal
    logprob = x["logprob"].requires_grad_()
    scale = 1 / length[:, None] if loss_type == "ipo" else torch.ones(len(LENGTHS), 1)
    policy, reference = Model(), Model()
    made = bare(
        OnlineDPOTrainer,
        args=SimpleNamespace(
            use_vllm=False,
            missing_eos_penalty=None,
            loss_type=loss_type,
            torch_empty_cache_steps=None,
            optim="adamw_torch",
            n_gpu=1,
            gradient_accumulation_steps=1,
        ),
        _beta=beta,
        eos_token_ids=[0],
        model=policy,
        ref_model=reference,
        reward_funcs=[None],
        processing_class=SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids)),
        stats=defaultdict(list),
        _generate=lambda *_: (mask[:, :1], mask[:, :1], mask, mask, None),
        _forward=lambda model, *_: scale * (logprob if model is policy else x["reference"]),
        _calculate_rewards_from_functions=lambda **_: reward,
    )
    loss = made.training_step(policy, {"prompt": [""] * PROMPTS})
    outputs = {"loss": loss, **{key: torch.tensor(made.stats[key][0]) for key in METRICS}}
    inputs = {"mask": mask, "length": length, "reward": reward, "logprob": logprob, "reference": x["reference"]}
    settings = {"beta": beta, "loss_type": loss_type}
    function = "OnlineDPOTrainer.training_step"
    return case(name, function, settings=settings, inputs=inputs, outputs=outputs, leaves={"logprob": logprob})


if __name__ == "__main__":
    torch.set_default_dtype(torch.float64)
    made_by = "tests/golden/make_trl_online_dpo.py"
    cases = [
        online("dpo", seed=91, beta=0.1),
        online("dpo_strong", seed=92, beta=2.0),
        online("dpo_far", seed=93, beta=0.5, spread=3.0),
        online("ipo", seed=94, beta=0.3, loss_type="ipo"),
        online("ipo_far", seed=95, beta=1.5, loss_type="ipo", spread=3.0),
    ]
    write("trl_online_dpo.json", peer="trl", version=trl.__version__, made_by=made_by, cases=cases)
