"""What gloo_ranks.on_ranks runs to compare optimizers: updates, checkpoints and resumed updates."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.rank_programs import Case, config_of, samples

MOMENTS = ("exp_avg", "exp_avg_sq")


def updated(
    _: Path, shared: str, case: Case, kinds: Sequence[str], first: int, last: int
) -> dict[str, list[tuple[str, list[float], str]]]:
    """Update from step `first` (0, or a checkpoint's step) to `last`, and save it. Return after each step the digest of
    all parameters, some of their values, and the moments' dtype. Kinds: values of optimizer.moments, or "rounded",
    float32 moments that are rounded to bfloat16 after each step."""
    return {kind: _updated(Path(shared, kind), case, kind, first, last) for kind in kinds}


def _updated(folder: Path, case: Case, kind: str, first: int, last: int) -> list[tuple[str, list[float], str]]:
    import torch
    import torch.distributed as dist

    from titan_rl.actors.titan.model import whole
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.batch.packing import pack
    from titan_rl.preflight.shapes import shape_of

    config = config_of(case, folder)
    moments: Any = "bfloat16" if kind == "bfloat16" else "master"
    optimizer = replace(config.optimizer, lr=1e-2, weight_decay=0.1, moments=moments)
    config = replace(config, checkpoint=replace(config.checkpoint, enable=True), optimizer=optimizer)
    p = config.parallelism
    model, row, found = RoleModel("trainer", config, shape_of(config.model), p), dist.get_rank() // p.row_ranks, []
    model.begin_phase("rl", first)
    for step in range(first, last):
        batch = pack(samples(step, 4), shards=p.dp, seq_len=32, rows_per_microbatch=1, pad_id=0)[row]
        model.step([batch])
        states = [state for each in model.phase._optimizers for state in each.state.values()]
        for moment in (state[name] for state in states for name in MOMENTS if kind == "rounded"):
            moment.copy_(moment.bfloat16().float())
        values = torch.cat([whole(each).detach().flatten() for each in model.model.parameters() if each.requires_grad])
        digest = hashlib.sha256(values.numpy().tobytes()).hexdigest()
        found.append((digest, values[:: max(1, len(values) // 500)].tolist(), str(states[0]["exp_avg"].dtype)))
    model.phase.save(last, "{}", on_disk=True)
    model.close()
    return found
