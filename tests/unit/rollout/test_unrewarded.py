"""Answers that a judge has no reward for: named, not trained on, and never counted as 0."""

import asyncio
import json
import math
import zlib
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest

from support.rollout_streams import Echo, begin, ids, ledger_lines, replayed, source, stream
from titan_rl.record.ledger import decode
from titan_rl.record.metrics import _part_metrics
from titan_rl.record.run_log import rollout_lines
from titan_rl.record.run_names import LEDGER
from titan_rl.rollout.sampling import RewardFailed
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.inspect.run_history import LedgerHistory
from titan_rl.wire.types import Group, Judgement, Prompt, Rollout

LOST = Judgement(math.nan, error="my:f did not return within 5 s")


async def lossy(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
    """The second answer of every other prompt fails; of prompt 3, two of three."""
    found = [Judgement(float(rollout.text == "1"), {"right": float(rollout.text == "1")}) for rollout in rollouts]
    if prompt.id % 2:
        found[1] = LOST
    if prompt.id == 3:
        found[2] = LOST
    return found


def played(tokenizer: TextTokenizer, folder: Path, warned: list[str]) -> tuple[list[Group], list[Group]]:
    async def body() -> tuple[list[Group], list[Group]]:
        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, 4, judge=lossy, folder=folder)
        rollouts._sampler._settings = replace(rollouts._settings, warn=warned.append)
        begin(rollouts, 0, {})
        async with aclosing(rollouts):
            rollouts.admit(4)
            groups = await rollouts.take(4, 1)
            rollouts.trained(1, groups)
        return groups, rollouts.dropped

    return asyncio.run(body())


def test_an_answer_without_a_reward_is_named_and_its_group_goes_on(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    warned: list[str] = []
    groups, dropped = played(tokenizer, tmp_path, warned)
    assert (ids(groups), ids(dropped)) == ([0, 1, 2, 4], [3])
    one = groups[1].rollouts
    assert [rollout.valid for rollout in one] == [True, False, True]
    assert one[1].unrewarded == LOST.error
    assert [dict(rollout.parts) for rollout in one] == [{"right": 1.0}, {}, {"right": 1.0}]
    assert warned[0] == "the reward failed on prompt 1, sample 1: my:f did not return within 5 s"
    (scored,) = [e for e in RunFiles(tmp_path).ledger() if e["event"] == "scored" and e["prompt"] == 1]
    assert scored["rewards"][1] is None
    assert scored["errors"] == {"1": LOST.error}
    ((id, attempt, error),) = ledger_lines(tmp_path, "failed")
    assert (id, attempt) == (3, 1)
    assert error == f"2 of 3 answers have no reward; the first: {LOST.error}"
    replayed(tmp_path)


def test_rewards_of_an_environment_count_where_a_judge_has_none(tokenizer: TextTokenizer) -> None:
    """Three samples have their environment's reward; the judge has none for the last, named by its number."""

    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        return [LOST] * len(rollouts)

    async def body() -> tuple[object, list[str]]:
        warned: list[str] = []
        rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=judge)
        sampler = rollouts._sampler
        sampler._settings = replace(rollouts._settings, warn=warned.append)
        async with aclosing(rollouts):
            answered = (await sampler._answers(source(tokenizer).next()))[0]
            group = {3: answered}
            return await sampler._judged(source(tokenizer).next(), group, rewarded=3), warned

    verdicts, warned = asyncio.run(body())
    assert verdicts == [LOST]
    assert warned == ["the reward failed on prompt 0, sample 3: my:f did not return within 5 s"]


def test_lines_and_metrics_have_the_components_and_count_the_failures(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    groups, _ = played(tokenizer, tmp_path, [])
    lines = list(rollout_lines(1, groups))
    assert lines[4]["error"] == LOST.error
    assert "rewards" not in lines[4]
    assert math.isnan(lines[4]["reward"])
    assert lines[0]["rewards"] == {"right": lines[0]["reward"]}
    assert "turns" not in lines[0]
    metrics = _part_metrics([rollout for group in groups for rollout in group.rollouts])
    assert metrics["rollouts/failed"] == 1
    rewards = [r.reward for group in groups for r in group.rollouts if r.valid]
    assert metrics["reward_part/right"] == sum(rewards) / len(rewards)


def test_the_audit_names_a_missing_reward_that_no_judge_failed_on(tokenizer: TextTokenizer, tmp_path: Path) -> None:
    played(tokenizer, tmp_path, [])
    lines = []
    for line in (tmp_path / LEDGER).read_bytes().splitlines(keepends=True):
        event = decode(line)
        assert event is not None
        event.pop("errors", None)
        text = json.dumps(event, separators=(",", ":")).encode()
        lines.append(b"%08x %s\n" % (zlib.crc32(text), text))
    (tmp_path / LEDGER).write_bytes(b"".join(lines))
    problems = LedgerHistory.of(tmp_path).problems
    assert len(problems) == 1
    assert "prompt 1, sample 1 has the reward None, though it ended as completed" in problems[0]


async def test_a_reward_that_fails_on_every_answer_ends_the_run(tokenizer: TextTokenizer) -> None:
    async def judge(prompt: Prompt, rollouts: Sequence[Rollout]) -> list[Judgement]:
        return [LOST] * len(rollouts)

    rollouts = stream(Echo([0]), source(tokenizer), tokenizer, judge=judge)
    async with aclosing(rollouts):
        rollouts.admit(4)
        with pytest.raises(RewardFailed, match="3 of 3 answers have no reward; the first: my:f did not return"):
            await rollouts.take(4, 1)
