"""A step of online DPO against TRL 1.16.0 (tests/golden/README.md): rewards, pairs, packed rows, the trainer's own
objective; and against the formula, for any group."""

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from golden.replay import PROMPT, Placed, cases, compare, tensor
from titan_rl.actors.titan.objectives import Objectives
from titan_rl.batch.experience import samples_of, with_advantages
from titan_rl.batch.packing import pack
from titan_rl.config.choices import PairLoss
from titan_rl.config.presets import preset
from titan_rl.config.sections import AlgorithmSection, Config, RolloutSection
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Turn

CASES = cases("trl_online_dpo.json")
WARM = 0.7


def step(
    groups: list[list[int]], x: dict[str, Any], a: AlgorithmSection, shards: int = 2
) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Return loss, gradient and mean metrics of a step. `groups` has the numbers of the answers to each prompt."""
    logprob = tensor(x["logprob"]).requires_grad_()

    def rollout(i: int) -> Rollout:
        n = x["length"][i]
        return Rollout(
            [Branch([Turn([1] * PROMPT, Completion([5] * n, [-1.0] * n, [0] * n, "stop"))])], "", x["reward"][i]
        )

    made = [Group(Prompt(i, "", [1] * PROMPT, ""), [rollout(k) for k in of]) for i, of in enumerate(groups)]
    answer = [k for of in groups for k in of]  # by its sample's sequence, if all groups have one size
    judged = with_advantages(made, samples_of(made, a), a)[1]
    order = [answer[sample.sequence] for sample in judged]
    batches = pack(judged, shards=shards, seq_len=18, rows_per_microbatch=1, pad_id=0, together=2)
    losses, sums = list[torch.Tensor](), dict[str, float]()
    for batch in batches:
        for rows in batch.microbatches:
            at = Placed(rows)

            def logprobs(_: Any, *, temperature: float, at: Placed = at) -> tuple[torch.Tensor, torch.Tensor]:
                assert temperature == WARM, "the log-probs of sampling"
                return at(logprob[order]), at(torch.zeros_like(logprob))

            columns = {"reference": at(tensor(x["reference"])[order]), "behaviour": torch.full(at.mask.shape, -1.0)}
            on_device: Any = SimpleNamespace(
                mask=at.mask, sequences=at.sequence, count=at.sequences, columns=columns, weights=at.weight
            )
            config = Config(algorithm=a, rollout=RolloutSection(temperature=WARM))
            model: Any = SimpleNamespace(logprobs=logprobs)
            loss, statistics = Objectives(model, config).named("rl")(on_device, batch)
            losses.append(loss)
            for name, value in statistics.sequences.items():
                sums[name] = sums.get(name, 0.0) + float(value) / batch.sequences
            assert statistics.tokens.keys() == {"entropy", "logprob_gap/mean", "logprob_gap/mult"}
    total = torch.stack(losses).sum()
    total.backward()
    assert logprob.grad is not None
    return total.item(), logprob.grad, sums


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_trls(name: str) -> None:
    case = CASES[name]
    inputs, theirs = case["inputs"], case["outputs"]
    pairs = len(inputs["mask"]) // 2
    loss_of: PairLoss = "ipo" if name.startswith("ipo") else "dpo"
    a = preset("online_dpo", pair_loss=loss_of, beta=case["settings"]["beta"])
    loss, gradient, metrics = step([[k, k + pairs] for k in range(pairs)], inputs, a)
    compare(loss, theirs["loss"])
    compare(gradient, case["gradients"]["logprob"])
    for key in (key for key in theirs if "/" in key and not (loss_of == "ipo" and key.startswith("logps"))):
        compare(metrics[key], theirs[key])


@given(data=st.data())
def test_a_step_of_any_groups_is_the_papers(data: st.DataObject) -> None:
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    prompts, size = data.draw(st.integers(1, 4)), data.draw(st.integers(2, 5))
    pair_loss: PairLoss = data.draw(st.sampled_from(["dpo", "ipo"]))
    count, beta = prompts * size, random.uniform(0.05, 2)
    smoothing = random.uniform(0, 0.5) if pair_loss == "dpo" else 0.0
    lengths = random.integers(1, 7, count)
    policy = [(-random.exponential(1.0, n)).tolist() for n in lengths]
    reference = [(-random.exponential(1.0, n)).tolist() for n in lengths]
    rewards = random.integers(0, 3, count).astype(float).tolist()
    groups = [list(range(i * size, (i + 1) * size)) for i in range(prompts)]
    pairs = [(max(of, key=rewards.__getitem__), min(of, key=rewards.__getitem__)) for of in groups]
    pairs = [(c, r) for c, r in pairs if rewards[c] > rewards[r]]
    mean = (lambda values: sum(values) / len(values)) if pair_loss == "ipo" else sum
    terms = []
    for c, r in pairs:
        h = mean(policy[c]) - mean(reference[c]) - mean(policy[r]) + mean(reference[r])
        right, wrong = 1 / (1 + math.exp(-beta * h)), 1 / (1 + math.exp(beta * h))
        dpo = -(1 - smoothing) * math.log(right) - smoothing * math.log(wrong)
        terms.append((h - 1 / (2 * beta)) ** 2 if pair_loss == "ipo" else dpo)
    padded = [[row + [0.0] * (6 - len(row)) for row in values] for values in (policy, reference)]
    x = {"logprob": padded[0], "reference": padded[1], "length": lengths.tolist(), "reward": rewards}
    a = preset("online_dpo", pair_loss=pair_loss, beta=beta, label_smoothing=smoothing)
    loss, gradient, metrics = step(groups, x, a, shards=data.draw(st.integers(1, 3)))
    learns = gradient.abs().sum(1) > 0
    if not terms:
        assert not learns.any(), "a step of equal rewards"
        assert metrics["rewards/accuracies"] == 0
        return
    compare(loss, sum(terms) / len(terms))
    assert {i for i in range(count) if learns[i]} <= {i for pair in pairs for i in pair}
