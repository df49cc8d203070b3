"""Ours against TRL 1.16.0 and verl 0.9.1: values and gradients that their own functions made (tests/golden/README.md).

Every policy case runs as a step does: answers packed into microbatches of two shards, each microbatch's loss summed.
Where a peer computes something else on purpose, a test pins the difference; docs/algorithms.md lists them all. At the
end stand the classic mistakes, planted, each of which these comparisons must catch.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from titan_rl.advantages import (
    discounted,
    gae,
    group_relative,
    kl_penalty,
    leave_one_out,
    soft_overlong_punishment,
    whiten,
)
from titan_rl.kernels.fused_policy_loss import fused_policy_loss
from titan_rl.kernels.kl import kl_estimate
from titan_rl.kernels.off_policy import OffPolicy, off_policy_weights
from titan_rl.kernels.policy_loss import Surrogate, Tokens, policy_loss
from titan_rl.kernels.preference_loss import bradley_terry_loss, dpo_loss
from titan_rl.kernels.value_loss import value_loss
from titan_rl.packing import Aggregation, pack
from titan_rl.types import Rows, Sample

GOLDEN = Path(__file__).parent / "golden"
PROMPT = 2  # tokens before each answer
TOLERANCE = 1e-6

Case = dict[str, Any]
Loss = Callable[..., tuple[torch.Tensor, Any]]
Terms = Callable[["Placed"], tuple[torch.Tensor, Any]]


def cases(file: str) -> dict[str, Case]:
    return {case["name"]: case for case in json.loads((GOLDEN / file).read_text())["cases"]}


TRL_POLICY, TRL_RLOO = cases("trl_policy.json"), cases("trl_rloo.json")
TRL_PREFERENCE, TRL_ADVANTAGES = cases("trl_preference.json"), cases("trl_advantages.json")
VERL_POLICY, VERL_LOSSES = cases("verl_policy.json"), cases("verl_losses.json")
VERL_ADVANTAGES = cases("verl_advantages.json")

EMPTIES_COUNTED = ("ppo_sequence_mean_counts_the_empty", "ppo_sequence_sum_counts_the_empty")
ENTROPY_BY_TOKEN = "entropy_sequence_mean"
WHOLE_SEQUENCE_GRADIENT = "gspo_token_tis"
REJECTED_OUT_OF_THE_MEAN = ("token_rejection", "geometric_rejection", "geometric_rejection_token_tis")
TRL_ALIKE = sorted(set(TRL_POLICY) - {*EMPTIES_COUNTED, ENTROPY_BY_TOKEN, WHOLE_SEQUENCE_GRADIENT})
VERL_ALIKE = sorted(set(VERL_POLICY) - set(REJECTED_OUT_OF_THE_MEAN))
IMPLEMENTATIONS = pytest.mark.parametrize("loss_of", [policy_loss, fused_policy_loss])


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def compare(ours: Any, theirs: Any) -> None:
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max(initial=0) <= TOLERANCE * max(1.0, np.abs(theirs).max(initial=0))


class Placed:
    """One packed microbatch, and where the answers' values go in it."""

    def __init__(self, rows: Rows) -> None:
        column = rows.positions + 1 - PROMPT
        answer = (rows.sequences >= 0) & (column >= 0)
        self.answer, self.column = torch.from_numpy(answer), torch.from_numpy(column[answer])
        self.owner = torch.from_numpy(rows.samples[rows.sequences[answer]])
        self.mask, self.weight = torch.from_numpy(rows.mask).double(), torch.from_numpy(rows.weights).double()
        self.sequence, self.sequences = torch.from_numpy(rows.sequences), len(rows.samples)

    def __call__(self, values_NL: torch.Tensor) -> torch.Tensor:
        """[B, L]: the answers' values at their places, -1 elsewhere."""
        elsewhere = torch.full(self.answer.shape, -1.0, dtype=values_NL.dtype)
        return elsewhere.masked_scatter(self.answer, values_NL[self.owner, self.column])


def samples(inputs: Case) -> list[Sample]:
    rows = zip(inputs["length"], inputs["mask"], strict=True)
    return [Sample(tokens=[1] * (PROMPT + n), mask=[0] * PROMPT + mask[:n]) for n, mask in rows]


def placed(packed: list[Sample], aggregation: Aggregation, length: int = 1, together: int = 1) -> list[Placed]:
    batches = pack(
        packed,
        shards=2,
        seq_len=18,
        rows_per_microbatch=1,
        pad_id=0,
        aggregation=aggregation,
        length=length,
        together=together,
    )
    return [Placed(rows) for batch in batches for rows in batch.microbatches]


def summed(microbatches: list[Placed], terms: Terms) -> torch.Tensor:
    return torch.stack([terms(at)[0] for at in microbatches]).sum()


def policy_terms(loss_of: Loss, surrogate: Surrogate, x: dict[str, torch.Tensor]) -> Terms:
    def terms(at: Placed) -> tuple[torch.Tensor, Any]:
        tokens = Tokens(
            behaviour=at(x["behaviour"]),
            proximal=at(x["old"]),
            reference=at(x["reference"]),
            advantage=at(x["advantage"]),
            mask=at.mask,
            weight=at.weight,
            sequence=at.sequence,
            sequences=at.sequences,
        )
        return loss_of(at(x["logprob"]), at(x["entropy"]), tokens, surrogate)

    return terms


def columns(inputs: Case, advantages: Any) -> dict[str, torch.Tensor]:
    """[N, L] each; the log-prob and the entropy are leaves."""
    x = {name: tensor(inputs[name]) for name in ("behaviour", "old", "reference", "logprob", "entropy")}
    x["advantage"] = tensor(advantages).reshape(len(x["old"]), -1).expand_as(x["old"])
    x["logprob"].requires_grad_()
    x["entropy"].requires_grad_()
    return x


def compare_gradients(x: dict[str, torch.Tensor], case: Case, scale: float = 1.0) -> None:
    for name, theirs in case["gradients"].items():
        gradient = x[name].grad
        assert gradient is not None
        compare(scale * gradient, theirs)


# TRL ----------------------------------------------------------------------------------------------------------------


def trl_advantages(case: Case, of: Callable[[list[float]], list[float]]) -> list[float]:
    rewards = case["inputs"]["rewards"]
    return [a for start in range(0, len(rewards), 4) for a in of(rewards[start : start + 4])]


def trl_group(case: Case) -> list[float]:
    scaled = case["settings"].get("scale_rewards", "group") == "group"
    return trl_advantages(case, lambda rewards: group_relative(rewards, normalize_std=scaled))


def trl_setup(settings: Case) -> tuple[Surrogate, Aggregation]:
    """TRL's settings in our words."""
    loss_type = settings.get("loss_type", "dapo")
    mode = settings.get("vllm_importance_sampling_mode", "none")
    surrogate = Surrogate(
        ratio=settings.get("importance_sampling_level", "token"),
        clip_low=settings.get("epsilon_low", 0.2),
        clip_high=settings.get("epsilon_high", 0.2),
        dual_clip=settings.get("delta", 0.0),
        kl_coef=settings.get("beta", 0.0),
        entropy_coef=settings.get("entropy_coef", 0.0),
        off_policy=OffPolicy(
            weight=mode.replace("truncate", "tis"),
            low=settings.get("vllm_importance_sampling_clip_min", 0.0),
            high=settings.get("vllm_importance_sampling_clip_max", float("inf")),
        ),
    )
    if loss_type == "cispo":  # its bound is of the ratio itself, and it has no lower one
        surrogate = replace(surrogate, clip="cispo", clip_low=1.0, clip_high=settings["epsilon_high"] - 1)
    aggregations: dict[str, Aggregation] = {"grpo": "sequence_mean", "dr_grpo": "sequence_sum"}
    return surrogate, aggregations.get(loss_type, "token_mean")


def trl_length(case: Case) -> int:
    return max(case["inputs"]["length"])  # what make_trl.py sets max_completion_length to


def trl_loss(case: Case, loss_of: Loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    surrogate, aggregation = trl_setup(case["settings"])
    x = columns(case["inputs"], trl_group(case))
    microbatches = placed(samples(case["inputs"]), aggregation, trl_length(case))
    return summed(microbatches, policy_terms(loss_of, surrogate, x)), x


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", TRL_ALIKE)
def test_rewards_become_the_loss_and_gradients_that_trl_computes(name: str, loss_of: Loss) -> None:
    case = TRL_POLICY[name]
    loss, x = trl_loss(case, loss_of)
    loss.backward()
    compare(trl_group(case), case["outputs"]["advantages"])
    compare(loss.detach(), case["outputs"]["loss"])
    compare_gradients(x, case)


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", EMPTIES_COUNTED)
def test_trl_counts_a_sequence_without_trained_tokens_in_a_mean_over_sequences(name: str, loss_of: Loss) -> None:
    case = TRL_POLICY[name]
    loss, x = trl_loss(case, loss_of)
    loss.backward()
    trained = np.mean(np.any(case["inputs"]["mask"], axis=1))
    assert trained == 7 / 8
    compare(trained * loss.detach(), case["outputs"]["loss"])
    compare_gradients(x, case, trained)


@IMPLEMENTATIONS
def test_trl_averages_the_entropy_over_tokens_whatever_the_losss_aggregation(loss_of: Loss) -> None:
    case = TRL_POLICY[ENTROPY_BY_TOKEN]
    surrogate, aggregation = trl_setup(case["settings"])
    x = columns(case["inputs"], trl_group(case))
    packed = samples(case["inputs"])
    policy = policy_terms(loss_of, replace(surrogate, entropy_coef=0.0), x)
    entropy = policy_terms(loss_of, surrogate, {**x, "advantage": torch.zeros_like(x["advantage"])})
    loss = summed(placed(packed, aggregation), policy) + summed(placed(packed, "token_mean"), entropy)
    loss.backward()
    compare(loss.detach(), case["outputs"]["loss"])
    compare_gradients(x, case)


@IMPLEMENTATIONS
def test_trl_spreads_a_sequence_ratios_gradient_evenly_where_token_weights_differ(loss_of: Loss) -> None:
    """GSPO against GSPO-token: one value; the same gradient's sum over each sequence, shared out differently."""
    case = TRL_POLICY[WHOLE_SEQUENCE_GRADIENT]
    loss, x = trl_loss(case, loss_of)
    loss.backward()
    gradient = x["logprob"].grad
    assert gradient is not None
    compare(loss.detach(), case["outputs"]["loss"])
    compare(gradient.sum(1), np.sum(case["gradients"]["logprob"], axis=1))
    with pytest.raises(AssertionError):
        compare_gradients(x, case)


@pytest.mark.parametrize("name", sorted(TRL_ADVANTAGES.keys() - {"overlong", "leave_one_out"}))
def test_group_advantages_are_trls(name: str) -> None:
    compare(trl_group(TRL_ADVANTAGES[name]), TRL_ADVANTAGES[name]["outputs"]["advantages"])


def test_leave_one_out_advantages_are_trls() -> None:
    case = TRL_ADVANTAGES["leave_one_out"]
    compare(trl_advantages(case, leave_one_out), case["outputs"]["advantages"])


@pytest.mark.parametrize("clip", ["ppo", "none"])
@pytest.mark.parametrize("name", sorted(TRL_RLOO))
def test_on_policy_rloo_has_trls_gradients(name: str, clip: Any) -> None:
    """TRL's ratio is of the whole answer, a product over its tokens; where it is 1, that is a sum over tokens."""
    case = TRL_RLOO[name]
    inputs = case["inputs"]
    k1 = kl_penalty(np.array(inputs["old"]), np.array(inputs["reference"]), "k1")
    penalty = case["settings"].get("beta", 0.0) * (k1 * np.array(inputs["mask"])).sum(1)
    rewards = (np.array(inputs["rewards"]) - penalty).tolist()
    advantages = leave_one_out(rewards[:4]) + leave_one_out(rewards[4:])
    compare(advantages, case["outputs"]["advantages"])
    x = columns(inputs, advantages)
    terms = policy_terms(policy_loss, Surrogate(clip=clip), x)
    summed(placed(samples(inputs), "sequence_sum", length=1), terms).backward()
    compare_gradients(x, case)


@pytest.mark.parametrize("name", sorted(TRL_PREFERENCE.keys() - {"bradley_terry"}))
def test_preference_losses_and_their_metrics_are_trls(name: str) -> None:
    case = TRL_PREFERENCE[name]
    inputs, settings, theirs = case["inputs"], case["settings"], case["outputs"]
    pairs = len(inputs["mask"]) // 2
    order = [half * pairs + pair for pair in range(pairs) for half in (0, 1)]  # theirs: all chosen, then all rejected
    logprob, reference = tensor(inputs["logprob"]).requires_grad_(), tensor(inputs["reference"])
    packed = samples({key: [inputs[key][i] for i in order] for key in ("length", "mask")})
    metrics = dict.fromkeys((key for key in theirs if "/" in key), 0.0)

    def terms(at: Placed) -> tuple[torch.Tensor, Any]:
        loss, statistics = dpo_loss(
            at(logprob[order]),
            at(torch.zeros_like(reference)),
            reference_T=at(reference[order]),
            mask_T=at.mask,
            sequence_T=at.sequence,
            sequences=at.sequences,
            pairs=pairs,
            beta=settings["beta"],
            label_smoothing=settings["label_smoothing"],
            kind="ipo" if name == "ipo" else "dpo",
        )
        for key in metrics:
            metrics[key] += float(statistics.sequences[key]) / (2 * pairs)
        return loss, statistics

    loss = summed(placed(packed, "token_mean", together=2), terms)
    loss.backward()
    compare(loss.detach(), theirs["loss"])
    compare(logprob.grad, case["gradients"]["logprob"])
    for key, value in metrics.items():
        if name != "ipo" or not key.startswith("rewards/"):  # of IPO, TRL reports sums over tokens beside a mean's loss
            compare(value, theirs[key])


def test_the_reward_models_loss_and_metrics_are_trls() -> None:
    case = TRL_PREFERENCE["bradley_terry"]
    score = tensor(case["inputs"]["score"]).requires_grad_()
    count = len(score)
    ordered = score.reshape(2, -1).T.reshape(-1)  # theirs: all chosen, then all rejected
    places = torch.arange(count)
    loss, statistics = bradley_terry_loss(
        ordered, mask_T=torch.ones(count), sequence_T=places, sequences=count, pairs=count // 2
    )
    loss.backward()
    theirs = case["outputs"]
    compare(loss.detach(), theirs["loss"])
    compare(score.grad, case["gradients"]["score"])
    compare(statistics.sequences["accuracy"] / count, theirs["accuracy"])
    compare(statistics.sequences["margin"] / count, theirs["margin"])
    compare(statistics.sequences["score/mean"] / count, theirs["mean_reward"])
    compare(statistics.maxima["score/max"], theirs["max_reward"])
    compare(statistics.minima["score/min"], theirs["min_reward"])


# verl ---------------------------------------------------------------------------------------------------------------


def bounds(spec: float | str) -> tuple[float, float]:
    low, _, high = str(spec).rpartition("_")
    return float(low or 0.0), float(high)


def verl_off_policy(settings: Case) -> OffPolicy:
    made = OffPolicy()
    if level := settings.get("rollout_is"):
        low, high = bounds(settings["rollout_is_threshold"])
        masked = "_" in str(settings["rollout_is_threshold"])
        made = replace(made, weight=f"{level}_mask" if masked else f"{level}_tis", low=low, high=high)
    if kind := settings.get("rollout_rs"):
        low, high = bounds(settings["rollout_rs_threshold"])
        rejection = "token" if kind == "token_k1" else "geometric"
        # Their bounds are on the sampler's probability over the trainer's.
        made = replace(made, rejection=rejection, rejection_low=1 / high, rejection_high=1 / low)
    return made


def verl_setup(settings: Case) -> tuple[Surrogate, Aggregation]:
    """verl's settings in our words."""
    mode = settings.get("loss_mode", "vanilla")
    surrogate = Surrogate(
        ratio="sequence" if mode == "gspo" else "token",
        clip="cispo" if mode == "cispo" else "ppo",
        clip_low=settings.get("clip_ratio_low", 0.2),
        clip_high=settings.get("clip_ratio_high", 0.2),
        dual_clip=0.0 if settings["clip_ratio_c"] == 1e9 else settings["clip_ratio_c"],
        kl=settings.get("kl_loss_type", "k3"),
        kl_coef=settings.get("kl_loss_coef", 0.0),
        entropy_coef=settings.get("entropy_coeff", 0.0),
        off_policy=verl_off_policy(settings),
    )
    aggregations: dict[str, Aggregation] = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum-norm": "sequence_sum",
    }
    return surrogate, aggregations[settings.get("loss_agg_mode", "token-mean")]


def verl_loss(case: Case, loss_of: Loss) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    surrogate, aggregation = verl_setup(case["settings"])
    x = columns(case["inputs"], case["inputs"]["advantage"])
    microbatches = placed(samples(case["inputs"]), aggregation, case["settings"].get("loss_scale_factor", 1))
    return summed(microbatches, policy_terms(loss_of, surrogate, x)), x


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", VERL_ALIKE)
def test_policy_losses_and_gradients_are_verls(name: str, loss_of: Loss) -> None:
    case = VERL_POLICY[name]
    loss, x = verl_loss(case, loss_of)
    loss.backward()
    compare(loss.detach(), case["outputs"]["loss"])
    compare_gradients(x, case)


@IMPLEMENTATIONS
@pytest.mark.parametrize("name", REJECTED_OUT_OF_THE_MEAN)
def test_verl_takes_rejected_tokens_out_of_the_mean(name: str, loss_of: Loss) -> None:
    case = VERL_POLICY[name]
    loss, x = verl_loss(case, loss_of)
    loss.backward()
    kept, trained = np.sum(case["outputs"]["kept"]), np.sum(case["inputs"]["mask"])
    assert 0 < kept < trained
    compare(trained / kept * loss.detach(), case["outputs"]["loss"])
    compare_gradients(x, case, trained / kept)


CORRECTED = [
    *(pytest.param(TRL_POLICY[name], id=f"trl-{name}") for name in TRL_POLICY if "tis" in name or "_mask" in name),
    *(pytest.param(case, id=f"verl-{name}") for name, case in VERL_POLICY.items() if len(case["outputs"]) > 1),
]


@pytest.mark.parametrize("case", CORRECTED)
def test_off_policy_weights_are_the_peers(case: Case) -> None:
    settings, inputs, theirs = case["settings"], case["inputs"], case["outputs"]
    made = verl_off_policy(settings) if "kept" in theirs else trl_setup(settings)[0].off_policy
    on = tensor(inputs["mask"]) > 0
    owner = torch.arange(len(on))[:, None].expand_as(on)
    weights, _ = off_policy_weights(tensor(inputs["old"]) - tensor(inputs["behaviour"]), on, owner, len(on), made)
    kept = tensor(theirs.get("kept", inputs["mask"]))
    expected = tensor(theirs["importance_ratio"]) * kept if "importance_ratio" in theirs else kept
    compare(weights * on, expected * on)
    if made.weight.endswith("tis"):
        assert 0 < int((weights[on] == made.high).sum()) < int(on.sum())
    else:  # a mask or a rejection
        assert 0 < int((weights[on] == 0).sum()) < int(on.sum())


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_estimates_and_their_gradients_are_verls(estimator: Any) -> None:
    case = VERL_LOSSES[estimator]
    logprob, reference = tensor(case["inputs"]["logprob"]).requires_grad_(), tensor(case["inputs"]["reference"])
    kl = kl_estimate(logprob, reference, estimator)
    kl.sum().backward()
    compare(kl.detach(), case["outputs"]["kl"])
    compare(logprob.grad, case["gradients"]["logprob"])
    compare(kl_penalty(logprob.detach().numpy(), reference.numpy(), estimator), case["outputs"]["kl"])


@pytest.mark.parametrize("name", [name for name in VERL_LOSSES if name.startswith("value")])
def test_the_value_loss_is_verls(name: str) -> None:
    case = VERL_LOSSES[name]
    inputs, settings = case["inputs"], case["settings"]
    value = tensor(inputs["value"]).requires_grad_()
    old, returns = tensor(inputs["old_value"]), tensor(inputs["return"])
    clipped: list[float] = []

    def terms(at: Placed) -> tuple[torch.Tensor, Any]:
        loss, statistics = value_loss(
            at(value),
            old_T=at(old),
            return_T=at(returns),
            mask_T=at.mask,
            weight_T=at.weight,
            clip=settings["cliprange_value"],
        )
        clipped.append(float(statistics.tokens["value/clipped"]))
        return loss, statistics

    aggregation = verl_setup({"clip_ratio_c": 1e9, **settings})[1]
    loss = summed(placed(samples(inputs), aggregation), terms)
    loss.backward()
    compare(loss.detach(), case["outputs"]["loss"])
    compare(value.grad, case["gradients"]["value"])
    compare(sum(clipped) / np.sum(inputs["mask"]), case["outputs"]["clipped"])


@pytest.mark.parametrize("clip", ["ppo", "none"])
def test_on_policy_distillation_is_verls(clip: Any) -> None:
    case = VERL_LOSSES["distillation"]
    inputs = case["inputs"]
    sampled = inputs["logprob"]
    advantages = -kl_penalty(np.array(sampled), np.array(inputs["reference"]), "k1")
    x = columns({**inputs, "old": sampled, "behaviour": sampled, "entropy": sampled}, advantages)
    terms = policy_terms(policy_loss, Surrogate(clip=clip), x)
    loss = summed(placed(samples(inputs), "token_mean"), terms)
    loss.backward()
    compare(loss.detach(), case["outputs"]["loss"])
    compare_gradients(x, case)


def answer_rewards(inputs: Case) -> np.ndarray:
    """[N, L]: each answer's reward at its last token."""
    rewards = np.zeros(np.shape(inputs["mask"]))
    rewards[np.arange(len(rewards)), np.array(inputs["length"]) - 1] = inputs["rewards"]
    return rewards


def verl_groups(inputs: Case, of: Callable[[list[float]], list[float]]) -> np.ndarray:
    advantages = np.array(of(inputs["rewards"][:4]) + of(inputs["rewards"][4:]))
    return advantages[:, None] * np.array(inputs["mask"])


@pytest.mark.parametrize("name", ["group", "group_unscaled"])
def test_group_advantages_are_verls_with_its_epsilon(name: str) -> None:
    case = VERL_ADVANTAGES[name]
    scaled = case["settings"]["norm_adv_by_std_in_grpo"]
    ours = verl_groups(case["inputs"], lambda r: group_relative(r, normalize_std=scaled, eps=1e-6))
    compare(ours, case["outputs"]["advantages"])


def test_leave_one_out_advantages_are_verls() -> None:
    case = VERL_ADVANTAGES["leave_one_out"]
    compare(verl_groups(case["inputs"], leave_one_out), case["outputs"]["advantages"])


@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_discounted", "reinforce_pp_token_rewards"])
def test_reinforce_pp_is_verls(name: str) -> None:
    case = VERL_ADVANTAGES[name]
    inputs = case["inputs"]
    masks = np.array(inputs["mask"])
    rewards = np.array(inputs["reward"]) if "reward" in inputs else answer_rewards(inputs)
    returns = [discounted(r, m, case["settings"]["gamma"]) for r, m in zip(rewards, masks, strict=True)]
    compare(returns, case["outputs"]["returns"])
    compare(whiten(returns, list(masks)), case["outputs"]["advantages"])


def test_reinforce_pp_baseline_is_verls() -> None:
    case = VERL_ADVANTAGES["reinforce_pp_baseline"]
    centred = verl_groups(case["inputs"], lambda r: group_relative(r, normalize_std=False))
    compare(whiten(list(centred), case["inputs"]["mask"]), case["outputs"]["advantages"])


def verl_gae(case: Case, shift: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    inputs = case["inputs"]
    masks = [np.array(mask) for mask in inputs["mask"]]
    values = np.roll(np.array(inputs["old_value"]), shift, axis=1)
    rows = zip(np.array(inputs["reward"]), values, masks, strict=True)
    both = [gae(r, v, m, gamma=case["settings"]["gamma"], lam=case["settings"]["lam"]) for r, v, m in rows]
    return whiten([advantages for advantages, _ in both], masks), [returns for _, returns in both]


@pytest.mark.parametrize("name", ["gae", "gae_discounted", "gae_monte_carlo"])
def test_gae_passes_over_tool_tokens_as_verls_does(name: str) -> None:
    case = VERL_ADVANTAGES[name]
    advantages, returns = verl_gae(case)
    compare(advantages, case["outputs"]["advantages"])
    compare(returns, case["outputs"]["returns"])


def test_the_overlong_punishment_is_the_peers_up_to_the_longest_answer() -> None:
    """Beyond it TRL stops at -1, as we do, and verl falls on; but a generator ends there."""
    for case in (TRL_ADVANTAGES["overlong"], VERL_ADVANTAGES["overlong"]):
        lengths = case["inputs"]["length"]
        ours = [soft_overlong_punishment(n, longest=20, buffer=6) for n in lengths]
        upto = lengths.index(20) + 1
        compare(ours[:upto], case["outputs"]["reward"][:upto])
    assert ours[-1] == -1 > VERL_ADVANTAGES["overlong"]["outputs"]["reward"][-1]
    assert TRL_ADVANTAGES["overlong"]["outputs"]["reward"][-1] == -1


# Planted bugs -------------------------------------------------------------------------------------------------------

PLAIN = VERL_POLICY["entropy"]  # every token has an advantage of its own


def compare_plain(microbatches: list[Placed] | None = None, **changed: torch.Tensor) -> None:
    """PLAIN, with other microbatches or other columns, against verl's loss and gradients."""
    surrogate, aggregation = verl_setup(PLAIN["settings"])
    x = columns(PLAIN["inputs"], PLAIN["inputs"]["advantage"])
    microbatches = microbatches or placed(samples(PLAIN["inputs"]), aggregation)
    loss = summed(microbatches, policy_terms(policy_loss, surrogate, {**x, **changed}))
    loss.backward()
    compare(loss.detach(), PLAIN["outputs"]["loss"])
    compare_gradients(x, PLAIN)


def masked(change: Callable[[int, list[int]], list[int]], prompt: int = 0) -> list[Placed]:
    """PLAIN's answers under another mask: `change` gets an answer's number and mask."""
    changed = []
    for i, sample in enumerate(samples(PLAIN["inputs"])):
        changed.append(replace(sample, mask=[prompt] * PROMPT + change(i, sample.mask[PROMPT:])))
    return placed(changed, "token_mean")


def test_the_planted_bugs_start_from_what_passes() -> None:
    compare_plain()
    compare_plain(masked(lambda _, mask: mask))


@pytest.mark.parametrize("shift", [-1, 1])
def test_an_advantage_one_place_off_is_caught(shift: int) -> None:
    with pytest.raises(AssertionError):
        compare_plain(advantage=tensor(PLAIN["inputs"]["advantage"]).roll(shift, dims=1))


@pytest.mark.parametrize("shift", [-1, 1])
def test_a_value_one_place_off_is_caught(shift: int) -> None:
    case = VERL_ADVANTAGES["gae"]
    with pytest.raises(AssertionError):
        compare(verl_gae(case, shift)[0], case["outputs"]["advantages"])


def test_training_on_tool_tokens_is_caught() -> None:
    with pytest.raises(AssertionError):
        compare_plain(masked(lambda i, mask: [1] * len(mask) if any(mask) else mask))


def test_training_on_a_prompt_token_is_caught() -> None:
    with pytest.raises(AssertionError):
        compare_plain(masked(lambda _, mask: mask, prompt=1))


def test_an_end_of_sequence_that_is_not_trained_is_caught() -> None:
    with pytest.raises(AssertionError):
        compare_plain(masked(lambda _, mask: [*mask[:-1], 0]))


def test_an_end_of_sequence_counted_twice_is_caught() -> None:
    """A template that closes an answer which the policy has closed already."""
    names = ("behaviour", "old", "reference", "logprob", "entropy", "advantage")
    lengths = torch.tensor(PLAIN["inputs"]["length"])[:, None]
    again = torch.minimum(torch.arange(int(lengths.max()) + 1), lengths - 1)  # [N, L + 1]: the last place once more
    leaves = columns(PLAIN["inputs"], PLAIN["inputs"]["advantage"])
    longer = {name: leaves[name].gather(1, again) for name in names}
    closed = [
        Sample(tokens=[*sample.tokens, sample.tokens[-1]], mask=[*sample.mask, sample.mask[-1]])
        for sample in samples(PLAIN["inputs"])
    ]
    with pytest.raises(AssertionError):
        compare_plain(placed(closed, "token_mean"), **longer)


@pytest.mark.parametrize("temperature", [0.7, 1.5])
def test_log_probs_at_another_temperature_are_caught(temperature: float) -> None:
    """Of a vocabulary of two, whose logits give the golden log-probs at temperature 1."""
    logprob = tensor(PLAIN["inputs"]["logprob"]).clamp(max=-1e-3)
    logits = torch.stack([logprob, torch.log1p(-logprob.exp())], -1)
    compare(logits.log_softmax(-1)[..., 0], logprob)
    with pytest.raises(AssertionError):
        compare_plain(logprob=(logits / temperature).log_softmax(-1)[..., 0])


def test_a_loss_divided_on_each_rank_is_caught() -> None:
    """Means of shards with different numbers of tokens are not the mean over all of them."""
    packed = samples(PLAIN["inputs"])
    surrogate, _ = verl_setup(PLAIN["settings"])
    x = columns(PLAIN["inputs"], PLAIN["inputs"]["advantage"])
    terms = policy_terms(policy_loss, surrogate, x)
    whole = summed(placed(packed, "token_mean"), terms)
    compare(whole.detach(), PLAIN["outputs"]["loss"])
    shards = [packed[:3], packed[3:]]
    means = []
    for start, shard in zip((0, 3), shards, strict=True):
        own = {name: values[start : start + len(shard)] for name, values in x.items()}
        means.append(summed(placed(shard, "token_mean"), policy_terms(policy_loss, surrogate, own)))
    with pytest.raises(AssertionError):
        compare(torch.stack(means).mean().detach(), PLAIN["outputs"]["loss"])
