"""A finished run of rollouts with several turns, branches and failures is sound, and the audit names a change in it."""

import json
from pathlib import Path

import pytest

from support.forging import Change, Line, every, found_in, ledger, of, rollouts
from support.turn_drivers import TOOL, Forking
from support.written_runs import WrittenRun, config
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.wire.sessions import DriverLost, Outcome, Session


class Mixed(Forking):
    """Two turns and a branch. The first sample of every third prompt fails; the process of the second sample of every
    fifth is lost once; every seventh prompt fails as a whole."""

    def __init__(self) -> None:
        super().__init__(lambda seed: 2)
        self.lost: set[int] = set()

    async def drive(self, session: Session) -> Outcome:
        outcome, id, sample = await super().drive(session), session.prompt.id, int(session.id.split(".")[1])
        if (id % 3 == 0 and sample == 0) or id % 7 == 6:
            return Outcome("error", error="ValueError: no such tool")
        if id % 5 == 0 and sample == 1 and id not in self.lost:
            self.lost.add(id)
            raise DriverLost("environment0[e=0] died: exit code 7")
        return outcome


@pytest.fixture(scope="module")
def finished(fast_disk: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = WrittenRun(tmp_path_factory.mktemp("turns"), Mixed())
    run.life(config(group_size=3, max_staleness_steps=1))
    return run.folder


def lines(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / "rollouts.jsonl").read_bytes().splitlines()]


def test_a_run_of_turns_is_sound_and_its_lines_have_every_turn(finished: Path) -> None:
    problems, checked = audit(finished)
    assert problems == []
    assert checked.startswith("18 prompts: 16 trained on in 8 steps, 2 dropped, 0 unfinished")
    failed = of(lines(finished), prompt_id=3, sample=0)
    assert (failed["reward"], failed["status"], failed["error"]) == (None, "error", "ValueError: no such tool")
    again = of(lines(finished), prompt_id=5, sample=1)
    assert (again["attempts"], again["status"]) == (2, "completed")
    assert [(turn["turn"], turn["branch"], turn["reward"]) for turn in again["turns"]] == [
        (0, 0, 1),
        (1, 0, 1),
        (2, 1, 0),
    ]
    assert again["messages"] == [{"role": "user", "content": "hm"}]
    places = [token for token, sampled in zip(again["tokens"], again["mask"], strict=True) if sampled]
    assert len(places) == sum(turn["sampled"] for turn in again["turns"])
    assert TOOL in again["tokens"]
    assert TOOL not in places
    assert len(every(list(RunFiles(finished).ledger()), event="turn", prompt=5, sample=1)) == 6, "three in each attempt"
    dropped = [event for event in RunFiles(finished).ledger() if event["event"] == "dropped"]
    assert [(event["prompt"], event["reason"]) for event in dropped] == [
        (id, "failed: 3 of 3 rollouts failed; the first: error: ValueError: no such tool") for id in (6, 13)
    ]


def test_the_metrics_have_turns_endings_and_branches(finished: Path) -> None:
    steps = [json.loads(line) for line in (finished / "metrics.jsonl").read_bytes().splitlines()]
    second = of(steps, step=2, kind="rl")  # prompts 2 and 3
    assert (second["turns/mean"], second["turns/max"], second["branches/mean"]) == (3.0, 3, 2.0)
    assert (second["stop/completed"], second["stop/error"]) == (pytest.approx(5 / 6), pytest.approx(1 / 6))
    assert second["rollouts/failed"] == 1


def first(lines: list[Line]) -> Line:
    """Return a rollout of two turns and a branch of one."""
    return of(lines, prompt_id=4, sample=1)


def put(key: str, value: int, *, tool: bool) -> Change:
    """Change one entry of that rollout: of its first tool token, or of its first sampled token."""

    def forge(lines: list[Line]) -> None:
        line = first(lines)
        line[key][line["tokens"].index(TOOL) if tool else line["mask"].index(1)] = value

    return rollouts(forge)


def lose_tool(lines: list[Line]) -> None:
    line = first(lines)
    at = line["tokens"].index(TOOL)
    for key in ("tokens", "mask", "logprobs"):
        del line[key][at]


CHANGES: dict[str, tuple[Change, str]] = {
    "a tool's token under the mask": (
        put("mask", 1, tool=True),
        "the mask of turn 1 is not on exactly the sampled tokens",
    ),
    "a sampled token that is not under the mask": (
        put("mask", 0, tool=False),
        "the mask of turn 0 is not on exactly the sampled tokens",
    ),
    "a separator lost": (rollouts(lose_tool), "the engine read other tokens before turn 1"),
    "an observation changed": (
        put("tokens", TOOL + 1, tool=True),
        "the engine read other tokens before turn 1",
    ),
    "a turn's answer tokenized again": (
        put("tokens", 33, tool=False),
        "the engine sampled other tokens or versions in turn 0",
    ),
    "a turn's image changed": (
        rollouts(lambda r: first(r)["turns"][1].update(images=["a" * 64])),
        "turn 1 came with other images than in the ledger",
    ),
    "a turn missing": (
        rollouts(lambda r: first(r)["turns"].pop()),
        "it has the turns [0, 1], the ledger [0, 1, 2]",
    ),
    "a crashed environment's reward counted as 0": (
        rollouts(lambda r: of(r, prompt_id=3, sample=0).update(reward=0.0)),
        "reward 0.0, None in the ledger",
    ),
    "turns of another kind": (
        rollouts(lambda r: first(r).update(turns=[{"turn": "a"}])),
        "expected valid turns, found [{'turn': 'a'}]",
    ),
    "an event of a turn missing": (
        ledger(lambda e: e.remove(of(e, event="turn", prompt=4, sample=1, turn=1))),
        "it has the turns [0, 1, 2], the ledger [0, 2]",
    ),
    "a crashed environment's reward scored as 0": (
        ledger(lambda e: of(e, event="scored", prompt=3)["rewards"].__setitem__(0, 0.0)),
        "prompt 3, sample 0 has the reward 0.0, though it ended as error",
    ),
    "the attempt that was lost passed off as the one that counts": (
        ledger(lambda e: of(e, event="sampled", prompt=5).update(attempts=[1, 3, 1])),
        "it has the turns [0, 1, 2], the ledger []",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_named(finished: Path, tmp_path: Path, name: str) -> None:
    change, expected = CHANGES[name]
    problems = found_in(finished, tmp_path, change)
    assert any(expected in problem for problem in problems), problems
