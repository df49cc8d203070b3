"""What gloo_ranks.on_ranks runs on the ranks of a mesh: a role's steps under every kind of objective."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from support.rank_programs import MESHES
from support.trainer_cases import columns_of, config
from titan_rl.batch.experience import minibatches
from titan_rl.batch.packing import UpTo, unpack
from titan_rl.config.choices import Family
from titan_rl.config.presets import preset
from titan_rl.config.sections import AlgorithmSection, Config, CriticSection, OptimizerSection, TrainingSection
from titan_rl.ext.kept_sets.kept_sets import KeptSets, packed
from titan_rl.train.learner import Packer
from titan_rl.wire.types import Sample

STEPS = 6
GROUP = 4
SEQ_LEN = 90  # no multiple of the parts
ALGORITHMS = {
    "grpo": AlgorithmSection(kl_coef=0.05, entropy_coef=0.01, rejection="geometric", rejection_low=0.2),
    "gspo": preset("gspo", kl_coef=0.05, minibatches=2),
    "dr_grpo": preset("dr_grpo", correction="sequence_tis"),
    "ppo": preset("ppo", minibatches=2, epochs=2),
    "kept": AlgorithmSection(kl_coef=0.05),
    "dpo": preset("dpo"),
    "orpo": preset("orpo"),
    "critic": preset("ppo"),
    "reward_model": preset("reward_model"),
}


def config_of(name: str, layout: str, folder: Path, family: Family) -> Config:
    base = config(folder, MESHES[layout], name=family)
    return replace(
        base,
        training=TrainingSection(steps=STEPS, seq_len=SEQ_LEN, local_batch_size=2),
        optimizer=OptimizerSection(lr=1e-3),
        critic=CriticSection(lr=1e-3),
        checkpoint=replace(base.checkpoint, enable=False),
        algorithm=ALGORITHMS[name],
    )


def samples(step: int, name: str) -> list[Sample]:
    """Return groups that share prompts, and a document longer than a part of a row."""
    random, made = np.random.default_rng(step), list[Sample]()
    for owner in range(6):
        prompt = int(random.integers(2, 25))
        asked = random.integers(3, 60, prompt).tolist()
        for _ in range(GROUP):
            n = prompt + int(random.integers(2, 60 if owner == 0 else 16))
            columns = columns_of(random, n)
            tokens = asked + random.integers(3, 60, n - prompt).tolist()
            extras = {}
            if name == "kept":
                masks = random.random((n, 64)) < 0.5
                masks[np.arange(n), tokens] = True
                sets = KeptSets.of([packed(mask) if i >= prompt else b"" for i, mask in enumerate(masks)])
                extras = {"kept": sets}
            mask = [0] * prompt + [1] * (n - prompt)
            sequence = -1 if ALGORITHMS[name].kind in ("preference", "reward") else len(made)
            made.append(Sample(tokens, mask, {}, prompt, sequence, extras).with_columns(**columns))
    if ALGORITHMS[name].kind in ("preference", "reward"):
        made = [s for s in made if len(s.tokens) <= SEQ_LEN // 2]
        made = made[: len(made) // 2 * 2]
    if name == "reward_model":
        from titan_rl.tasks.prompts import to_judge

        made = [to_judge(s.tokens, 0) for s in made]
    return made


def learn(folder: Path, layout: str, names: Sequence[str], family: Family = "llama3") -> dict[str, Any]:
    """Return, by name, the statistics of each step, and the scores of the last step's trained tokens."""
    import torch.distributed as dist

    from titan_rl.actors.titan.role_model import RoleModel
    from titan_rl.preflight.shapes import shape_of

    learnt = dict[str, Any]()
    for name in names:
        given = config_of(name, layout, folder / name, family)
        shape, p = shape_of(given.model), given.parallelism
        judges = name in ("critic", "reward_model")
        model = RoleModel(
            "critic" if name == "critic" else "trainer", given, shape.with_value_head() if judges else shape, p
        )
        if name == "critic":
            model.initialize()
        model.begin_phase("rl", 0)
        packer = Packer(given, UpTo(2), 0, True)
        row = dist.get_rank() // p.row_ranks

        def scored(asked: list[Sample], model: Any = model, packer: Packer = packer, p: Any = p) -> list[np.ndarray]:
            batches = packer.update(asked, p.dp)
            answers, _ = model.scores(batches[dist.get_rank() // p.row_ranks], 1.0)
            every: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(every, answers)
            return unpack(batches, every[:: p.row_ranks], asked)

        steps, scores, asked = [], list[np.ndarray](), list[Sample]()
        for step in range(STEPS):
            asked = samples(step, name)
            scores = scored(asked)
            if ALGORITHMS[name].updates > 1:
                asked = [s.with_columns(proximal=own) for s, own in zip(asked, scores, strict=True)]
            updates = minibatches(asked, given.algorithm, GROUP) if ALGORITHMS[name].updates > 1 else [asked]
            stats = model.step([packer.update(update, p.dp)[row] for update in updates])
            steps.append({"loss": stats.loss, "grad_norm": stats.grad_norm, **stats.metrics})
        model.close()
        trained = [
            own[np.array(s.mask) > 0] for s, own in zip(asked, scores, strict=True)
        ]  # others share their prompts
        learnt[name] = {"steps": steps, "scores": np.concatenate(trained).tolist()}
    return learnt
