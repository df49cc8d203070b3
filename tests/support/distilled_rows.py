"""Training on divergences from a teacher's top tokens, on the ranks of gloo_ranks.on_ranks."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from support.rank_programs import LENGTH, STEPS, Case, built, config_of, groups
from titan_rl.config.sections import AlgorithmSection

TOP = 6
SHARPNESS = 0.5  # the teacher's temperature: its distribution is not the policy's


def distill(folder: Path, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return, for each case: ids and log-probs of the teacher's entries; and loss, gradient norm and divergence of each
    step."""
    return [distilled(folder / str(number), case) for number, case in enumerate(cases)]


def distilled(folder: Path, case: Case) -> dict[str, Any]:
    import torch.distributed as dist

    from titan_rl.batch.packing import pack, unpack
    from titan_rl.ext.teachers.top_tokens import without_teacher

    algorithm = AlgorithmSection(
        name="opd", advantage="teacher", normalize="none", clip="none", distill_top_k=TOP, distill_beta=0.3
    )
    config = replace(config_of(case, folder), algorithm=algorithm)
    entries, steps = list[Any](), list[list[float]]()
    with built(config, case) as model:
        p = config.parallelism
        keys: dict[str, Any] = {"shards": p.dp, "seq_len": LENGTH, "rows_per_microbatch": 1, "pad_id": 0}
        for step in range(STEPS):
            samples = groups(step)
            zeros = [np.zeros(len(s.tokens)) for s in samples]
            samples = [s.with_columns(behaviour=z, advantage=z) for s, z in zip(samples, zeros, strict=True)]
            batches = pack(samples, share=bool(case.share), **keys)
            answers: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(
                answers, model.scores(batches[dist.get_rank() // p.row_ranks], SHARPNESS, "", TOP)[0]
            )
            found = unpack(batches, answers[:: p.row_ranks], samples, trained=True)
            found[1] = without_teacher(np.zeros(len(found[1])), TOP)  # it has read no context for this one
            samples = [replace(s, extras={"top": e[:, 1:]}) for s, e in zip(samples, found, strict=True)]
            batch = pack(samples, share=bool(case.share), **keys)[dist.get_rank() // p.row_ranks]
            stats = model.step([batch])
            steps.append([stats.loss, stats.grad_norm, stats.metrics["distill/divergence"]])
            entries += [[e["id"].tolist(), e["logprob"].tolist()] for e in found]
    return {"entries": entries, "steps": steps}
