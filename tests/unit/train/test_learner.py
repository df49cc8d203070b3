"""The learner with meshes that only count and write empty checkpoints: its calls, and the checkpoints on disk."""

import asyncio
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.counting_meshes import Mesh, learner_of
from titan_rl.batch.packing import UpTo
from titan_rl.config.auto import on_device
from titan_rl.config.presets import preset
from titan_rl.config.sections import (
    AlgorithmSection,
    CheckpointSection,
    Config,
    CriticSection,
    FaultSection,
    RolloutSection,
    TrainingSection,
)
from titan_rl.record.checkpoints import Checkpoints
from titan_rl.record.run_folder import Resume
from titan_rl.wire.checkpoint_sums import sum_files
from titan_rl.wire.errors import RankDied, RankFailed, RunError
from titan_rl.wire.types import Batch, Rows, Sample

PPO = preset("ppo")
FULL = RankFailed(
    "trainer[dp=0 tp=0] failed in save: OSError", "OSError: No space left", rank="trainer", kind="OSError"
)


class Scoring(Mesh):
    """Ranks whose logits for a place depend on the token that it reads."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.logits = np.random.default_rng(3).normal(size=(9, 9)) * 2
        self.temperatures: list[float] = []

    def probabilities(self, tokens: np.ndarray, temperature: float) -> np.ndarray:
        weights = np.exp(self.logits[tokens] / temperature)
        return weights / weights.sum(-1, keepdims=True)

    async def scores(
        self, batches: list[Batch], temperature: float, frozen_role: str, top: int = 0
    ) -> tuple[list[list[np.ndarray]], list[int]]:
        self.temperatures.append(temperature)

        def scored(rows: Rows) -> np.ndarray:
            of_target = self.probabilities(rows.tokens.flatten()[rows.places], temperature)
            return np.log(np.take_along_axis(of_target, rows.targets[..., None], -1)[..., 0]).astype(np.float32)

        return [[scored(rows) for rows in batch.microbatches] for batch in batches], [0]


async def test_the_norm_of_a_tokens_score_comes_from_two_temperatures(tmp_path: Path) -> None:
    """Its gradient to the logits is onehot - p, at the sampling temperature."""
    mesh = Scoring(tmp_path)
    config = Config(
        algorithm=preset("otb", advantage="optimal_token", normalize="none"),
        rollout=RolloutSection(temperature=0.7),
        training=TrainingSection(seq_len=64),
    )
    learner, _ = learner_of(tmp_path, config, mesh)
    tokens = [[1, 4, 7, 2], [3, 3, 8], [5, 6]]
    behaviour = [Sample(t, [0] + [1] * (len(t) - 1), {"behaviour": [0.0] * len(t)}) for t in tokens]
    for sample in await learner.judge(behaviour):
        read, target = np.array(sample.tokens[:-1]), np.array(sample.tokens[1:])
        gradient = np.eye(9)[target] - mesh.probabilities(read, 0.7)
        assert sample.columns["score_norm"][1:] == pytest.approx((gradient**2).sum(1), rel=1e-5)
    assert mesh.temperatures == [0.7, 0.35]


class Lending(Scoring):
    """Ranks that also hold the reference, whose log-probs are lower by 0.25."""

    async def scores(
        self, batches: list[Batch], temperature: float, frozen_role: str, top: int = 0
    ) -> tuple[list[list[np.ndarray]], list[int]]:
        found, checksums = await super().scores(batches, temperature, frozen_role, top)
        return [[rows - 0.25 * (frozen_role != "") * self.sign for rows in batch] for batch in found], checksums

    sign = 1


@pytest.mark.parametrize(("sign", "seq_len"), [(1, 64), (1, 14), (-1, 64)])
async def test_ktos_kl_is_of_answers_to_the_previous_prompt(tmp_path: Path, sign: int, seq_len: int) -> None:
    """log pi - log ref is 0.25 per token. In half a row of 14 an answer of 7 tokens does not fit."""
    mesh = Lending(tmp_path)
    mesh.sign = sign
    config = Config(algorithm=preset("kto"), training=TrainingSection(seq_len=seq_len))
    learner, _ = learner_of(tmp_path, config, mesh)

    def answered(prompt: int, answer: int) -> Sample:
        return Sample([*range(prompt), *[5] * answer], [0] * prompt + [1] * answer, {}, prompt)

    sizes = [(4, 1), (4, 2), (1, 7), (1, 3), (2, 4), (2, 4)]
    moved = [n for prompt, n in zip((4, 4, 1, 1, 2, 2), (4, 4, 1, 2, 7, 3), strict=True)]
    fits = [min(n, seq_len // 2 + 1 - prompt) for (prompt, _), n in zip(sizes, moved, strict=True)]
    assert (fits == moved) == (seq_len == 64)
    made = await learner.judge([answered(*size) for size in sizes])
    expected = 0.25 * sum(fits) / len(sizes) if sign > 0 else 0.0
    for sample in made:
        assert sample.columns.keys() == {"reference", "kl"}
        assert sample.columns["kl"] == pytest.approx([expected] * len(sample.tokens), abs=1e-6)


def sample(trained: int) -> Sample:
    ones = [1.0] * (trained + 1)
    return Sample([1] * (trained + 1), [0] + [1] * trained, {"behaviour": ones, "advantage": ones})


@pytest.mark.parametrize("stream_groups", [0, 1])
async def test_a_step_made_again_has_the_counts_of_its_own_tokens(tmp_path: Path, stream_groups: int) -> None:
    """A trainer dies between two parts of a streamed step. What it had accumulated is gone, and so are the counts."""
    config = on_device(
        Config(training=TrainingSection(stream_groups=stream_groups, seq_len=64, local_batch_size=1)), "cpu"
    )
    trainers = Mesh(tmp_path)
    learns, _ = learner_of(tmp_path, config, trainers)
    made: list[list[Sample]] = []

    async def step(updates: list[list[Sample]], loss: None) -> str:
        made.extend(updates)
        return "stats"

    await learns.accumulate([sample(30)])
    trainers.broken = RankDied("trainer[dp=0 tp=0]", "was killed")
    if stream_groups:
        with pytest.raises(RankDied):
            await learns.accumulate([sample(10)])
    trainers.broken = None
    await learns.resume("rl", Resume(4, None))
    learns.step = step  # type: ignore[method-assign, assignment]
    await learns.accumulate([sample(20)])
    await learns.accumulate([sample(10)])
    await learns.update()
    assert trainers.updates == ([(30, 30)] if stream_groups else [])
    assert [len(samples) for samples in made] == ([] if stream_groups else [2])


@pytest.mark.parametrize(("given", "rows"), [(0, [2]), (8, [8]), (1, [1, 1])])
def test_microbatches_sized_by_tokens_have_no_more_rows_than_a_step_needs(
    tmp_path: Path, given: int, rows: list[int]
) -> None:
    learns, _ = learner_of(
        tmp_path, on_device(Config(training=TrainingSection(seq_len=64, local_batch_size=given)), "cpu"), Mesh(tmp_path)
    )
    learns.packer = replace(learns.packer, rows=given or UpTo(32))
    (batch,) = learns.batches([sample(60), sample(50)], Mesh(tmp_path))  # type: ignore[arg-type]
    assert [len(microbatch.tokens) for microbatch in batch.microbatches] == rows


def ppo(**checkpoint: Any) -> Config:
    return on_device(
        Config(
            algorithm=PPO,
            critic=CriticSection(lr=1e-3),
            checkpoint=CheckpointSection(**checkpoint),
            fault=FaultSection(max_failed_saves=6),
        ),
        "cpu",
    )


def on_disk(folder: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in folder.glob("step-*"))


async def test_the_critic_keeps_every_step_that_the_policy_has(tmp_path: Path) -> None:
    """The policy's disk is full, the critic's is not: each retry writes another step of the critic."""
    config, policy = ppo(keep_latest_k=2), Mesh(tmp_path / "checkpoint")
    learns, notes = learner_of(tmp_path, config, policy, critic=Mesh(tmp_path / "checkpoint/critic"))

    for step in range(1, 4):
        assert await learns.save(step, "{}")
    assert Checkpoints.of(tmp_path, config).whole_steps() == [2, 3]
    policy.broken = FULL
    for step in range(4, 10):
        assert not await learns.save(step, "{}")
        assert Checkpoints.of(tmp_path, config).whole_steps() == [2, 3]
        assert on_disk(tmp_path / "checkpoint/critic") == on_disk(tmp_path / "checkpoint") == [2, 3], "no half step"
    with pytest.raises(RunError, match="the checkpoint of step 10 cannot be written"):
        await learns.save(10, "{}")
    assert Resume.find(tmp_path, config).rl == 3
    policy.broken = None
    assert await learns.save(11, "{}")
    assert len(notes) == 6
    assert on_disk(tmp_path / "checkpoint") == on_disk(tmp_path / "checkpoint/critic") == [3, 11]


async def test_a_full_disk_is_named_by_the_checkpoints_folder(tmp_path: Path) -> None:
    policy = Mesh(tmp_path / "checkpoint")
    learns, notes = learner_of(tmp_path, on_device(Config(fault=FaultSection(max_failed_saves=1)), "cpu"), policy)
    why = "Traceback\nOSError: [Errno 28] No space left on device"
    policy.broken = RankFailed("trainer[dp=0 tp=0] failed in save", why, rank="trainer", kind="OSError")

    assert not await learns.save(1, "{}")
    with pytest.raises(RunError) as error:
        await learns.save(2, "{}")
    where = re.escape(str(tmp_path / "checkpoint"))
    full = r"cannot be written: No space left on device \([\d,]+ bytes free\)"
    assert re.fullmatch(f"the checkpoint of step 2: {where} {full}", str(error.value))
    assert "Traceback" not in error.value.details
    assert re.search(r"step 1 failed, and is tried again .* No space left on device \([\d,]+ bytes free\)$", notes[0])


async def test_a_checkpoint_that_the_disk_has_no_room_for_is_not_begun(tmp_path: Path) -> None:
    policy = Mesh(tmp_path / "checkpoint")
    learns, notes = learner_of(tmp_path, on_device(Config(), "cpu"), policy)
    learns._setup.checkpoint_bytes = 1 << 60  # type: ignore[misc]
    assert not await learns.save(1, "{}")
    assert on_disk(tmp_path / "checkpoint") == []
    assert re.search(
        r"bytes free: No space left on device: a checkpoint takes about 1,152,921,504,606,846,976", notes[0]
    )


def test_a_step_without_the_critics_half_is_not_resumed_from(tmp_path: Path) -> None:
    """An asynchronous save of the critic may fail after the policy's has succeeded."""
    config = ppo()
    for mesh, last in (("", 3), ("critic", 2)):
        for step in range(1, last + 1):
            asyncio.run(Mesh(tmp_path / "checkpoint" / mesh).save(step))
    assert Resume.find(tmp_path, config).rl == 2
    assert Resume.find(tmp_path, on_device(Config(), "cpu")).rl == 3
    (tmp_path / "checkpoint/step-2/.metadata").unlink()
    assert Resume.find(tmp_path, config).rl == 1


def test_the_step_being_written_counts_for_none_of_those_kept(tmp_path: Path) -> None:
    """An asynchronous save is whole only later: until then the newest whole steps stay."""
    policy = Mesh(tmp_path / "checkpoint")
    for step in (1, 2, 3, 4):
        asyncio.run(policy.save(step))
    (tmp_path / "checkpoint/step-4/.metadata").unlink()  # torn, by an earlier process
    (tmp_path / "checkpoint/step-5").mkdir()  # being written
    (tmp_path / "checkpoint/step-by-step").mkdir()  # somebody's own
    checkpoints = Checkpoints.of(tmp_path, on_device(Config(), "cpu"))
    checkpoints.purge(2, writing=5)
    assert checkpoints.whole_steps() == [2, 3]
    names = sorted(path.name for path in (tmp_path / "checkpoint").iterdir())
    assert names == ["step-2", "step-3", "step-5", "step-by-step"]


async def test_a_checkpoint_that_is_asked_for_is_waited_for_and_so_is_the_last(tmp_path: Path) -> None:
    policy, critic = Mesh(tmp_path / "checkpoint"), Mesh(tmp_path / "checkpoint/critic")
    learns, _ = learner_of(tmp_path, ppo(), policy, critic=critic)

    await learns.save(1, "{}")
    await learns.save(2, "{}", on_disk=True)
    await learns.save(3, "{}", last=True)
    assert policy.waited == critic.waited == [False, True, True]


async def test_all_checkpoints_are_kept_if_none_may_go(tmp_path: Path) -> None:
    learns, _ = learner_of(
        tmp_path, on_device(Config(checkpoint=CheckpointSection(keep_latest_k=0)), "cpu"), Mesh(tmp_path / "checkpoint")
    )

    for step in range(1, 6):
        assert await learns.save(step, "{}")
    assert on_disk(tmp_path / "checkpoint") == [1, 2, 3, 4, 5]


async def test_the_cold_starts_checkpoints_are_its_own(tmp_path: Path) -> None:
    config = ppo(keep_latest_k=2)
    learns, _ = learner_of(
        tmp_path,
        config,
        trainers=Mesh(tmp_path / "checkpoint/cold_start"),
        critic=Mesh(tmp_path / "checkpoint/critic"),
    )

    await learns.resume("cold_start", Resume(None, None))
    for step in range(1, 5):
        assert await learns.save(step, "{}")
    assert on_disk(tmp_path / "checkpoint/cold_start") == [3, 4]
    assert Resume.find(tmp_path, config) == Resume(None, 4)


@pytest.mark.parametrize(
    ("harm", "why"),
    [
        (shutil.rmtree, "it is missing"),
        (
            lambda start: (start / "model.safetensors").write_bytes(b"Weights"),
            "model.safetensors: expected the checksum",
        ),
        (lambda start: (start / "model.safetensors").unlink(), "model.safetensors is missing"),
    ],
)
async def test_a_changed_reference_is_not_trained_against(
    tmp_path: Path, harm: Callable[[Path], object], why: str
) -> None:
    config = on_device(Config(algorithm=AlgorithmSection(kl_coef=0.01)), "cpu")
    learns, _ = learner_of(tmp_path, config, Mesh(tmp_path / "checkpoint"))
    start = tmp_path / "start"
    start.mkdir()
    (start / "model.safetensors").write_bytes(b"weights")
    sum_files(start)
    harm(start)
    with pytest.raises(RunError, match=f"{start} cannot be used: {why}"):
        await learns.begin(3)
