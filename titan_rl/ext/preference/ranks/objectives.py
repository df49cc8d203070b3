"""Training objectives over pairs: a forward, then a loss."""

from titan_rl.actors.titan.model import DeviceRows, TitanModel, shared_keys
from titan_rl.config.sections import Config
from titan_rl.ext.preference.ranks.preference_loss import Pairs, Preference, bradley_terry_loss, preference_loss
from titan_rl.kernels.statistics import Loss, add_gaps
from titan_rl.wire.types import Batch


def preference(model: TitanModel, config: Config, rows: DeviceRows, batch: Batch) -> Loss:
    """Return the loss of a policy that is trained on chosen and rejected answers."""
    algorithm, online = config.algorithm, config.algorithm.online_pairs
    logprob, entropy = model.logprobs(rows, temperature=config.rollout.temperature if online else 1.0)
    loss, statistics = preference_loss(
        logprob,
        entropy,
        Pairs(rows.mask, rows.sequences, rows.count, max(batch.sequences // 2, 1)),
        shared_keys(Preference, algorithm, name=algorithm.pair_loss if online else algorithm.name),
        reference_T=rows.columns["reference"] if algorithm.needs_reference else None,
        kl_T=rows.columns.get("kl"),
    )
    if online:
        add_gaps(statistics, logprob, rows.columns["behaviour"], rows.mask > 0)
    return loss, statistics


def reward(model: TitanModel, config: Config, rows: DeviceRows, batch: Batch) -> Loss:
    """Return the loss of a reward model."""
    pairs = Pairs(rows.mask, rows.sequences, rows.count, batch.sequences // 2)
    return bradley_terry_loss(model.values(rows), pairs)
