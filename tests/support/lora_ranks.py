"""What gloo_ranks.on_ranks runs on the ranks of a mesh that trains adapters."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.rank_programs import MESHES
from support.trainer_cases import config, samples
from titan_rl.config.choices import Dtype, Family
from titan_rl.config.sections import Config, LoraSection, ModelSection
from titan_rl.wire.weight_plan import Piece

RANK, ALPHA, STEPS = 4, 8.0, 4


def lora_config(
    folder: Path, layout: str, weights: str, family: Family = "llama3", base: Dtype = "float32", **lora: Any
) -> Config:
    """`weights`: a Hugging Face folder, or "" for random weights from the seed."""
    made = config(folder, MESHES[layout], name=family)
    if weights:
        made = replace(made, model=ModelSection(hf_assets_path=weights))
    section = LoraSection(rank=RANK, alpha=ALPHA, base_dtype=base, **lora)
    return replace(made, lora=section, optimizer=replace(made.optimizer, lr=1e-2))


def trained(
    folder: Path, layout: str, weights: str, family: Family = "llama3", base: Dtype = "float32", targets: Any = ()
) -> dict[str, Any]:
    """Train a few steps. Return losses and norms; how far the published weights are from the merged ones, computed
    whole; how far the merged model is from the adapters' model; and whether the base and the reference stayed."""
    import torch
    import torch.distributed as dist

    from titan_rl.actors.sync.staging import Staging
    from titan_rl.actors.titan.model import local
    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.batch.packing import Weighting, pack
    from titan_rl.ext.adapters.ranks.lora import is_adapter
    from titan_rl.preflight.shapes import shape_of
    from titan_rl.wire.weight_plan import plan

    made = lora_config(folder, layout, weights, family, base, targets=list(targets))
    shape = shape_of(made.model)
    model = RoleModel("trainer", made, shape, made.parallelism)
    parameters = dict(model.tensors)
    before = {name: local(p).clone() for name, p in parameters.items() if not is_adapter(name)}
    first = whole(parameters)
    model.begin_phase("rl", 0)
    model.load_weights(weights, "reference")
    how = Weighting("sequence_mean")

    def batch(step: int) -> Any:
        mesh = model.dims.get_optional_mesh("batch")
        packed = pack(
            samples(step), shards=made.parallelism.dp, seq_len=64, rows_per_microbatch=2, pad_id=0, weighting=how
        )
        return packed[mesh.get_local_rank() if mesh else 0]

    probe = batch(99)
    began, _ = model.scores(probe, 1.0)
    stats = [model.step([batch(step)]) for step in range(STEPS)]
    adapted, _ = model.scores(probe, 1.0)
    reference, _ = model.scores(probe, 1.0, "reference")

    params = model.by_hf_name
    layouts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(layouts, model.held)
    sizes = shape.hf_tensors()
    pieces = [Piece(n, 0, 0, n, 0, size[0], 0, size[1] if len(size) > 1 else 1) for n, size in sizes.items()]
    made_plan = plan(layouts, [pieces])
    outgoing = made_plan.outgoing(dist.get_rank())
    staging = Staging(params, outgoing, torch.float32, block_bytes=1 << 12, view=model.packed)
    staging.pack(1, 0, 1)
    sent: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(sent, [(outgoing[0], staging.runs[0][0].clone())] if outgoing else [])
    published = {name: torch.full(size, torch.nan) for name, size in sizes.items()}
    for run, values in (pair for pairs in sent for pair in pairs):
        for copy, part in zip(run, values.split([copy.elements for copy in run]), strict=True):
            table = published[copy.param]
            rows = table[copy.dst_row0 : copy.dst_row0 + copy.rows]
            (rows[:, copy.dst_col0 : copy.dst_col0 + copy.cols] if table.dim() > 1 else rows).copy_(
                part.view(-1, copy.cols) if table.dim() > 1 else part
            )
    last = whole(parameters)
    expected = merged(last, model.names, made.lora.scale)
    apart = {name: float((published[name] - expected[name]).abs().max()) for name in sizes}
    kept = all(torch.equal(local(parameters[name]), value) for name, value in before.items())

    model.write(folder / "merged")
    model.close()
    dist.barrier()
    back = replace(made, model=ModelSection(hf_assets_path=""), lora=LoraSection())
    loaded = RoleModel("reference", back, shape, made.parallelism)
    from titan_rl.actors.titan.model import TitanModel

    TitanModel.read(loaded, folder / "merged")
    merged_scores, _ = loaded.scores(probe, 1.0)
    if weights:  # as a separate mesh has them
        loaded.load_weights(weights)
    apart_scores, _ = loaded.scores(probe, 1.0) if weights else (reference, 0)
    return {
        "losses": [s.loss for s in stats],
        "norms": [s.grad_norm for s in stats],
        "published": max(apart.values()),
        "changed": sum(not torch.equal(expected[n], first_of(first, model.names)[n]) for n in sizes),
        "base_kept": kept,
        "merged_scores": gap(adapted, merged_scores),
        "reference": gap(began, reference),
        "separate_reference": gap(apart_scores, reference),
        "moved": gap(began, adapted),
        "trained": sorted(model.names[name] for name, p in parameters.items() if p.requires_grad),
        "dtypes": sorted({str(p.dtype) for name, p in parameters.items() if not is_adapter(name)}),
    }


def whole(parameters: Mapping[str, Any]) -> dict[str, Any]:
    from titan_rl.actors.sync.held_shards import whole as gathered

    return {name: gathered(parameter).clone() for name, parameter in parameters.items()}


def first_of(tensors: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return tensors by Hugging Face's names, and each expert's own."""
    found = dict[str, Any]()
    for name, tensor in tensors.items():
        if "{}" in names[name]:
            found |= {names[name].format(i): matrix.float() for i, matrix in enumerate(tensor)}
        else:
            found[names[name]] = tensor.float()
    return found


def merged(tensors: Mapping[str, Any], names: Mapping[str, str], scale: float) -> dict[str, Any]:
    by_name = first_of(tensors, names)
    for name in [n for n in by_name if n.endswith("lora_A.weight")]:
        weight = name.replace("lora_A.weight", "weight")
        b = by_name[name.replace("lora_A", "lora_B")]
        by_name[weight] = by_name[weight] + scale * (b @ by_name[name])
    return by_name


def gap(ours: Any, theirs: Any) -> float:
    return max(float(abs(a - b).max()) for a, b in zip(ours, theirs, strict=True))
