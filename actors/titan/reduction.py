"""Reduces the statistics of microbatches, ranks and updates to a step's metrics, with one collective per update."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from titan_rl.actors.titan.experts import Routed
from titan_rl.kernels.statistics import Statistics
from titan_rl.wire.reports import StepStats
from titan_rl.wire.types import Batch


@dataclass(frozen=True, slots=True)
class Reduction:
    """Statistics of one optimizer update over the whole mesh: means, extrema, histograms, by metric name."""

    means: dict[str, float]
    maxima: dict[str, float]
    minima: dict[str, float]
    histograms: dict[str, list[float]]
    loss: float
    tokens: int
    grad_norm: float = 0.0
    routed: Routed | None = None

    @classmethod
    def of(
        cls,
        statistics: Sequence[Statistics],
        batch: Batch,
        mesh: DeviceMesh | None,
        scale: float = 1.0,
        *,
        parts: int = 1,
    ) -> "Reduction":
        """Reduce this rank's microbatches, which all have the same metrics. `scale` is a factor on their losses. Each
        `parts` neighbours in the mesh have the same rows, and so the same statistics."""
        first = statistics[0]
        summed = {
            (kind, name): torch.stack([getattr(s, kind)[name].double() for s in statistics]).sum(0)
            for kind in ("tokens", "sequences", "sums", "counts")
            for name in getattr(first, kind)
        }
        # Minima are maxima of the negated values.
        extrema = {("maxima", n): torch.stack([s.maxima[n].double() for s in statistics]).amax(0) for n in first.maxima}
        extrema |= {
            ("minima", n): torch.stack([-s.minima[n].double() for s in statistics]).amax(0) for n in first.minima
        }
        if mesh is not None:
            gathered = {key: of_rank[::parts] for key, of_rank in _gather({**summed, **extrema}, mesh).items()}
            summed = {key: gathered[key].sum(0) for key in summed}
            extrema = {key: gathered[key].amax(0) for key in extrema}

        def of_kind(values: dict[tuple[str, str], torch.Tensor], kind: str, factor: float) -> dict[str, float]:
            return {name: factor * float(value) for (k, name), value in values.items() if k == kind}

        return cls(
            means=of_kind(summed, "tokens", 1 / batch.tokens) | of_kind(summed, "sequences", 1 / batch.sequences),
            maxima=of_kind(extrema, "maxima", 1),
            minima=of_kind(extrema, "minima", -1),
            histograms={name: value.tolist() for (kind, name), value in summed.items() if kind == "counts"},
            loss=of_kind(summed, "sums", scale)["loss"],
            tokens=batch.tokens,
        )


def finish(updates: Sequence[Reduction], *, lr: float, seconds: float, busy: float) -> StepStats:
    """Join a step's updates: means and losses are averaged by their tokens, extrema kept, histograms added. The
    log-prob gap to the generator, and what its replayed routes agree with, are the first update's: later ones train
    other weights than the generator's, which the ratio measures."""
    tokens = sum(u.tokens for u in updates)

    def mean(values: Sequence[float]) -> float:
        if not tokens:
            return sum(values) / len(values)
        return sum(u.tokens * value for u, value in zip(updates, values, strict=True)) / tokens

    first = updates[0]
    metrics = {name: mean([u.means[name] for u in updates]) for name in first.means}
    metrics |= {name: _finite(max(u.maxima[name] for u in updates)) for name in first.maxima}
    metrics |= {name: _finite(min(u.minima[name] for u in updates)) for name in first.minima}
    gap = {name: value for name, value in {**first.means, **first.maxima}.items() if name.startswith("logprob_gap/")}
    metrics |= {name: _finite(value) for name, value in gap.items()}
    routed = [u.routed for u in updates if u.routed is not None]
    if routed:
        metrics |= router_metrics(torch.stack([r.experts_NE for r in routed]).sum(0))
        metrics |= replay_metrics(routed[0].replay_3)
    return StepStats(
        loss=mean([u.loss for u in updates]),
        grad_norm=sum(u.grad_norm for u in updates) / len(updates),
        lr=lr,
        tokens=tokens,
        seconds=seconds,
        busy=busy,
        skipped=sum(not math.isfinite(u.grad_norm) for u in updates),
        metrics=derived(metrics),
        histograms={
            name: [sum(column) for column in zip(*(u.histograms[name] for u in updates), strict=True)]
            for name in first.histograms
        },
    )


def router_metrics(routed_NE: torch.Tensor) -> dict[str, float]:
    """Return how unevenly tokens are routed to the experts of each layer."""
    imbalance_N = routed_NE.amax(1) / routed_NE.mean(1).clamp(min=1e-9)  # 0 if no token was trained
    return {
        "router/imbalance": float(imbalance_N.mean()),
        "router/imbalance_max": float(imbalance_N.max()),
        "router/idle": float((routed_NE == 0).float().mean()),
    }


def replay_metrics(replay_3: torch.Tensor) -> dict[str, float]:
    """Return how many experts were replayed, and how many of those the routers would have chosen; nothing without a
    replay."""
    every, replayed, same = replay_3.tolist()
    metrics = {"routing/replayed": replayed / every} if every else {}
    return metrics | ({"routing/agreement": same / replayed} if replayed else {})


def derived(metrics: dict[str, float]) -> dict[str, float]:
    """Replace moments by their quotients, which can only be taken once the moments are complete."""
    metrics = dict(metrics)
    if share := metrics.pop("logprob_gap/image_share", 0.0):
        metrics["logprob_gap/image"] /= share
    if "off_policy/weight_square" in metrics:
        square, mean = metrics.pop("off_policy/weight_square"), metrics["off_policy/weight_mean"]
        metrics["off_policy/ess"] = mean**2 / square if square > 0 else 0.0
    if "entropy/top" in metrics:
        metrics["entropy/top"] /= metrics["entropy/top_share"] or 1.0
    if "return/square" in metrics:
        spread = metrics.pop("return/square") - metrics["return/mean"] ** 2
        unexplained = metrics.pop("residual/square") - metrics.pop("residual/mean") ** 2
        metrics["value/explained_variance"] = 1 - unexplained / spread if spread > 1e-12 else 0.0
    return metrics


def _finite(value: float) -> float:
    """Return 0 for an infinity: an extremum over no token at all."""
    return value if abs(value) != float("inf") else 0.0


def _gather(values: dict[tuple[str, str], torch.Tensor], mesh: DeviceMesh) -> dict[tuple[str, str], torch.Tensor]:
    """Return every rank's values, stacked: one collective for sums and extrema."""
    group = mesh.get_group()
    flat = torch.cat([value.reshape(-1) for value in values.values()])
    every = [torch.empty_like(flat) for _ in range(dist.get_world_size(group))]
    dist.all_gather(every, flat, group=group)
    parts = torch.stack(every).split([value.numel() for value in values.values()], dim=1)
    return {key: part.reshape(-1, *value.shape) for (key, value), part in zip(values.items(), parts, strict=True)}
