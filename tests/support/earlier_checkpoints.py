"""What gloo_ranks.on_ranks runs: a checkpoint as earlier versions wrote it, with q's and k's rows in pairs, resumed."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from support.rank_programs import LENGTH, Case, config_of, samples

STEPS = 2


def resumed(folder: Path, layout: str) -> dict[str, Any]:
    """Return losses and norms after a checkpoint: of a run that never stopped, of one resumed from a checkpoint of an
    earlier version, and of one that takes its rows for today's. Alone, return also whether exports read both alike."""
    import torch
    import torch.distributed as dist

    from titan_rl.actors.titan import phase, rotary_order
    from titan_rl.actors.titan.checkpoint_model import CheckpointModel
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.batch.packing import pack
    from titan_rl.config.sections import CheckpointSection, Config
    from titan_rl.preflight.shapes import shape_of

    def given(name: str) -> Config:
        base = config_of(Case(layout=layout), folder / name)
        return replace(base, checkpoint=CheckpointSection())

    shape, shards = shape_of(given("").model), given("").parallelism.dp

    def train(model: RoleModel, first: int) -> list[list[float]]:
        found, row = [], dist.get_rank() // model.config.parallelism.tensor_parallel_degree
        for step in range(first, first + STEPS):
            made = samples(step, shards)
            batch = pack(made, shards=shards, seq_len=LENGTH, rows_per_microbatch=1, pad_id=0)[row]
            stats = model.step([batch])
            found.append([stats.loss, stats.grad_norm])
        return found

    def at(name: str, step: int) -> RoleModel:
        config = given(name)
        model = RoleModel("trainer", config, shape, config.parallelism)
        model.begin_phase("rl", step)
        return model

    def save(name: str, *, pairs: bool) -> RoleModel:
        model = at(name, 0)
        train(model, 0)
        if pairs:
            rotary_order.halves_of = in_pairs
            states = [optimizer.state for optimizer in model.phase._optimizers]
            rotary_order.reorder(shape, model.model.named_parameters(), states)
            rotary_order.halves_of = real
            model.phase.state.rotary = ""
        model.phase.save(STEPS, "{}", on_disk=True)
        return model

    def in_pairs(halves: torch.Tensor, head_dim: int) -> torch.Tensor:
        return halves.unflatten(0, (-1, 2, head_dim // 2)).transpose(1, 2).reshape(halves.shape)

    real = rotary_order.halves_of
    whole = save("whole", pairs=False)
    save("earlier", pairs=True).close()
    answer: dict[str, Any] = {
        "uninterrupted": train(whole, STEPS),
        "resumed": train(at("earlier", STEPS), STEPS),
    }
    phase.reorder = lambda *_: None
    answer["misread"] = train(at("earlier", STEPS), STEPS)
    if layout == "one":
        folders = [folder / name / "checkpoint" / f"step-{STEPS}" for name in ("whole", "earlier")]
        today, earlier = (CheckpointModel(given(""), shape, step, folder).model.state_dict() for step in folders)
        answer["exports are equal"] = all(torch.equal(today[name], earlier[name]) for name in today)
    return answer
