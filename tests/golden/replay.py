"""Take a golden case through our own code, for test_golden_trl.py, test_golden_verl.py and test_planted_bugs.py.

case -> samples -> packed microbatches (`Placed`) -> loss of each, summed -> compared
"""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from titan_rl.batch.advantages import group_relative, soft_overlong_punishment
from titan_rl.batch.packing import Aggregation, Weighting, pack
from titan_rl.ext.preference.ranks.preference_loss import Pairs, Preference, preference_loss
from titan_rl.kernels.off_policy import OffPolicy, off_policy_weights
from titan_rl.kernels.policy_loss import Tokens
from titan_rl.kernels.statistics import Statistics
from titan_rl.kernels.surrogate import Surrogate
from titan_rl.wire.types import Rows, Sample

PROMPT = 2  # tokens before each answer
GROUP = 4  # answers to a prompt
TOLERANCE = 1e-6
NO_DUAL_CLIP = 1e9  # verl's setting if it is meant to be off

Case = dict[str, Any]
LossResult = tuple[torch.Tensor, Statistics]
Columns = dict[str, torch.Tensor]  # [N, L] each
Loss = Callable[[torch.Tensor, torch.Tensor, Tokens, Surrogate], LossResult]
Terms = Callable[["Placed"], LossResult]


def cases(file: str) -> dict[str, Case]:
    return {case["name"]: case for case in json.loads((Path(__file__).parent / file).read_text())["cases"]}


def tensor(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def compare(ours: Any, theirs: Any) -> None:
    if isinstance(ours, torch.Tensor):
        ours = ours.detach()
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    assert np.abs(ours - theirs).max(initial=0) <= TOLERANCE * max(1.0, np.abs(theirs).max(initial=0))


def compare_gradients(x: Columns, case: Case, scale: float = 1.0) -> None:
    for name, theirs in case["gradients"].items():
        gradient = x[name].grad
        assert gradient is not None
        compare(scale * gradient, theirs)


def compare_off_policy(case: Case, made: OffPolicy) -> None:
    inputs, theirs = case["inputs"], case["outputs"]
    on = tensor(inputs["mask"]) > 0
    owner = torch.arange(len(on))[:, None].expand_as(on)
    weights, _ = off_policy_weights(tensor(inputs["old"]) - tensor(inputs["behaviour"]), on, owner, len(on), made)
    kept = tensor(theirs.get("kept", inputs["mask"]))
    compare(weights * on, tensor(theirs["importance_ratio"]) * kept if "importance_ratio" in theirs else kept)
    bound = made.high if made.weight.endswith("tis") else 0.0  # 0 of a mask or a rejection
    assert 0 < int((weights[on] == bound).sum()) < int(on.sum())


def compare_overlong(case: Case) -> float:
    """Compare up to the longest answer that a generator makes. Return the peer's reward of the longest case."""
    lengths, theirs = case["inputs"]["length"], case["outputs"]["reward"]
    ours = [soft_overlong_punishment(n, longest=20, buffer=6) for n in lengths]
    longest = lengths.index(20)
    compare(ours[: longest + 1], theirs[: longest + 1])
    assert ours[longest] == ours[-1] == -1
    return theirs[-1]


def trained(inputs: Case) -> int:
    """Count the tokens that are trained on."""
    return int(np.sum(inputs["mask"]))


class Placed:
    """One packed microbatch, and the places of the answers' values in it."""

    def __init__(self, rows: Rows) -> None:
        column = rows.positions + 1 - PROMPT
        answer = (rows.sequences >= 0) & (column >= 0)
        self.answer, self.column = torch.from_numpy(answer), torch.from_numpy(column[answer])
        self.owner = torch.from_numpy(rows.samples[rows.sequences[answer]])
        self.mask, self.weight = torch.from_numpy(rows.mask).double(), torch.from_numpy(rows.weights).double()
        self.sequence, self.sequences = torch.from_numpy(rows.sequences), len(rows.samples)

    def __call__(self, values_NL: torch.Tensor) -> torch.Tensor:
        """Return [B, L]: the answers' values at their places, -1 elsewhere."""
        elsewhere = torch.full(self.answer.shape, -1.0, dtype=values_NL.dtype)
        return elsewhere.masked_scatter(self.answer, values_NL[self.owner, self.column])


def samples(inputs: Case) -> list[Sample]:
    rows = zip(inputs["length"], inputs["mask"], strict=True)
    return [Sample(tokens=[1] * (PROMPT + n), mask=[0] * PROMPT + mask[:n]) for n, mask in rows]


def placed(
    packed: list[Sample], aggregation: Aggregation, length: int = 1, together: int = 1, *, whole: bool = False
) -> list[Placed]:
    """Pack into two shards of several microbatches each, or the `whole` into one microbatch."""
    batches = pack(
        packed,
        shards=1 if whole else 2,
        seq_len=18,
        rows_per_microbatch=len(packed) if whole else 1,
        pad_id=0,
        together=together,
        weighting=Weighting(aggregation, length),
    )
    return [Placed(rows) for batch in batches for rows in batch.microbatches]


def summed(microbatches: list[Placed], terms: Terms) -> tuple[torch.Tensor, Counter[str]]:
    """Return the step's loss, and its statistics that are sums over tokens or sequences."""
    losses: list[torch.Tensor] = []
    sums: Counter[str] = Counter()
    for at in microbatches:
        loss, statistics = terms(at)
        losses.append(loss)
        sums.update({name: float(value) for name, value in (statistics.tokens | statistics.sequences).items()})
    return torch.stack(losses).sum(), sums


def policy_terms(loss_of: Loss, surrogate: Surrogate, x: Columns) -> Terms:
    def terms(at: Placed) -> LossResult:
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


def pairs_loss(
    case: Case, settings: Preference, kl: float | None = None
) -> tuple[torch.Tensor, Counter[str], torch.Tensor]:
    """Return loss, metrics' sums, and the leaf. TRL has all chosen answers first, then all rejected ones."""
    inputs = case["inputs"]
    pairs = len(inputs["mask"]) // 2
    order = [half * pairs + pair for pair in range(pairs) for half in (0, 1)]
    logprob = tensor(inputs["logprob"]).requires_grad_()
    reference = tensor(inputs["reference"]) if "reference" in inputs else None
    packed = samples({key: [inputs[key][i] for i in order] for key in ("length", "mask")})

    def terms(at: Placed) -> LossResult:
        return preference_loss(
            at(logprob[order]),
            at(torch.zeros_like(logprob)),
            Pairs(at.mask, at.sequence, at.sequences, pairs),
            settings,
            reference_T=None if reference is None else at(reference[order]),
            kl_T=None if kl is None else at(torch.full_like(logprob, kl)),
        )

    return *summed(placed(packed, "token_mean", together=2), terms), logprob


def columns(inputs: Case, advantages: Any) -> Columns:
    """Return the inputs of the loss. Log-prob and entropy are leaves."""
    x = {name: tensor(inputs[name]) for name in ("behaviour", "old", "reference", "logprob", "entropy")}
    x["advantage"] = tensor(advantages).reshape(len(x["old"]), -1).expand_as(x["old"])
    x["logprob"].requires_grad_()
    x["entropy"].requires_grad_()
    return x


def by_group(inputs: Case, of: Callable[[list[float]], list[float]]) -> list[float]:
    rewards = inputs["rewards"]
    return [a for start in range(0, len(rewards), GROUP) for a in of(rewards[start : start + GROUP])]


# TRL's settings as ours ---------------------------------------------------------------------------------------------


def trl_advantages(case: Case) -> list[float]:
    scaled = case["settings"].get("scale_rewards", "group") == "group"
    return by_group(case["inputs"], lambda rewards: group_relative(rewards, normalize_std=scaled))


def trl_setup(settings: Case) -> tuple[Surrogate, Aggregation]:
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
    if loss_type == "cispo":  # its bound is on the ratio itself, and there is no lower one
        surrogate = replace(surrogate, clip="cispo", clip_low=1.0, clip_high=settings["epsilon_high"] - 1)
    aggregations: dict[str, Aggregation] = {"grpo": "sequence_mean", "dr_grpo": "sequence_sum"}
    return surrogate, aggregations.get(loss_type, "token_mean")


def trl_loss(case: Case, loss_of: Loss) -> tuple[torch.Tensor, Counter[str], Columns]:
    """Compute the loss from rewards on. The length is max_completion_length as make_trl.py sets it."""
    surrogate, aggregation = trl_setup(case["settings"])
    x = columns(case["inputs"], trl_advantages(case))
    microbatches = placed(samples(case["inputs"]), aggregation, max(case["inputs"]["length"]))
    return *summed(microbatches, policy_terms(loss_of, surrogate, x)), x


# verl's settings as ours --------------------------------------------------------------------------------------------


def verl_setup(settings: Case) -> tuple[Surrogate, Aggregation]:
    mode, dual_clip = settings.get("loss_mode", "vanilla"), settings.get("clip_ratio_c", NO_DUAL_CLIP)
    surrogate = Surrogate(
        ratio="sequence" if mode == "gspo" else "token",
        clip="cispo" if mode == "cispo" else "ppo",
        clip_low=settings.get("clip_ratio_low", 0.2),
        clip_high=settings.get("clip_ratio_high", 0.2),
        dual_clip=0.0 if dual_clip == NO_DUAL_CLIP else dual_clip,
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


def verl_off_policy(settings: Case) -> OffPolicy:
    made = OffPolicy()
    if level := settings.get("rollout_is"):
        low, high = _bounds(settings["rollout_is_threshold"])
        kind = "mask" if "_" in str(settings["rollout_is_threshold"]) else "tis"
        made = replace(made, weight=f"{level}_{kind}", low=low, high=high)
    if kind := settings.get("rollout_rs"):
        low, high = _bounds(settings["rollout_rs_threshold"])
        rejection = "token" if kind == "token_k1" else "geometric"
        # Their bounds are on the sampler's probability over the trainer's.
        made = replace(made, rejection=rejection, rejection_low=1 / high, rejection_high=1 / low)
    return made


def verl_loss(case: Case, loss_of: Loss) -> tuple[torch.Tensor, Counter[str], Columns]:
    surrogate, aggregation = verl_setup(case["settings"])
    x = columns(case["inputs"], case["inputs"]["advantage"])
    microbatches = placed(samples(case["inputs"]), aggregation, case["settings"].get("loss_scale_factor", 1))
    return *summed(microbatches, policy_terms(loss_of, surrogate, x)), x


def verl_gae_inputs(inputs: Case) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Return rewards, values and mask of each answer."""
    arrays = (np.array(inputs[name]) for name in ("reward", "old_value", "mask"))
    return list(zip(*arrays, strict=True))


def _bounds(spec: float | str) -> tuple[float, float]:
    low, _, high = str(spec).rpartition("_")
    return float(low or 0.0), float(high)
