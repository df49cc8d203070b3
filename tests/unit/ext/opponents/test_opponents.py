"""Who plays against the policy: draws, kept adapters, ratings and refusals."""

import asyncio
import hashlib
import json
import os
import random
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.checked_configs import config
from support.judged_groups import algorithm
from titan_rl.batch.experience import samples_of
from titan_rl.batch.seats import seat_groups
from titan_rl.config.sections import Config, EnvironmentSection, OpponentsSection
from titan_rl.ext.adapters.layers import PEFT_CONFIG, PEFT_FOLDER, PEFT_WEIGHTS
from titan_rl.ext.opponents.opponents import FIRST_RATING, Opponents, result, steps_ago
from titan_rl.preflight.checks import problems
from titan_rl.run import main
from titan_rl.wire.types import NEWEST, Branch, Completion, Group, Prompt, Rollout, Turn

SEATS = ["black", "white"]


class Writer(SimpleNamespace):
    """Trainers whose adapters have one byte for each step."""

    step = 0

    async def export_added(self, folder: str) -> None:
        (adapter := Path(folder, PEFT_FOLDER)).mkdir()
        (adapter / PEFT_WEIGHTS).write_bytes(bytes(self.step))


def made(folder: Path, pool: list[str], **keys: Any) -> tuple[Opponents, Writer]:
    writer, section = Writer(), OpponentsSection(pool=pool, **keys)
    settings = replace(Config(), opponents=section, environment=EnvironmentSection(seats=SEATS))
    return Opponents(settings, folder, writer), writer  # type: ignore[arg-type]


def train(opponents: Opponents, writer: Writer, steps: range, state: Mapping[str, Any] | None = None) -> None:
    """Make steps as a controller does, after the one that `steps` begins with."""
    writer.step = steps.start
    asyncio.run(opponents.begin(steps.start, state or {}))
    for step in steps[1:]:
        draws = random.Random(step)
        opponents.learned_from([game(opponents, prompt(8 * step + k), draws) for k in range(8)])
        writer.step = step
        asyncio.run(opponents.keep(step))


def prompt(id: int) -> Prompt:
    return Prompt(id, "", [1], "")


def game(opponents: Opponents, of: Prompt, draws: random.Random) -> Group:
    """Return a group of episodes with drawn winners and any number of moves."""
    cast, rollouts = opponents.cast(of), list[Rollout]()
    for _ in range(4):
        reward = draws.choice([-1.0, 0.0, 1.0])
        seats = [draws.choice(SEATS) for _ in range(draws.randint(1, 5))]
        turns = [Turn([3], Completion([4 + i], [-1.0], [i], "stop"), 0.0, i, seat) for i, seat in enumerate(seats)]
        branches = [Branch(own) for seat in SEATS if (own := [turn for turn in turns if turn.seat == seat])]
        names = {seat: opponent.name for seat, opponent in cast.items()}
        rewards = {"black": -reward, "white": reward}
        rollouts.append(Rollout(branches, "", reward, seats=rewards, opponents=names))
    return Group(of, rollouts)


POOL = ["start", "best", "history", "steps-ago 7"]


@pytest.mark.parametrize("weighting", ["even", "hard"])
@pytest.mark.parametrize("seed", range(4))
def test_a_run_that_is_resumed_draws_what_a_whole_one_draws(seed: int, weighting: str, tmp_path: Path) -> None:
    draws = random.Random(seed)
    cut, interval = draws.randint(1, 30), draws.randint(1, 9)
    keys: dict[str, Any] = {"interval": interval, "history": draws.randint(1, 5), "weighting": weighting}
    whole, writer = made(tmp_path / "whole", POOL, **keys)
    train(whole, writer, range(31))
    part, writer = made(tmp_path / "part", POOL, **keys)
    train(part, writer, range(cut + 1))
    state = json.loads(json.dumps(part.state))
    train(part, writer, range(cut, min(cut + 4, 31)))  # steps that are lost
    resumed, writer = made(tmp_path / "part", POOL, **keys)
    train(resumed, writer, range(cut, 31), state)
    assert resumed.state == whole.state
    drawn = [(of.cast(prompt(id)) or {}) for of in (whole, resumed) for id in range(300, 400)]
    named = [{seat: opponent.name for seat, opponent in cast.items()} for cast in drawn]
    assert named[:100] == named[100:]


class Slow(Writer):
    """Trainers that write an adapter in parts, between each of which a run may be killed."""

    async def export_added(self, folder: str) -> None:
        (adapter := Path(folder, PEFT_FOLDER)).mkdir()
        with (adapter / PEFT_WEIGHTS).open("wb") as file:
            for _ in range(3):
                sys.audit(WRITTEN)
                file.write(b"part")
                file.flush()
        (adapter / PEFT_CONFIG).write_text("{}")


WRITTEN, KILLED = "unit.written", 9
DISK = {WRITTEN, "open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree"}


def killed_before(event: int, opponents: Opponents) -> bool:
    """Begin a run in a process that is killed before it touches the disk for this time; return False if it is not."""
    left = event

    def kill(name: str, args: object) -> None:
        nonlocal left
        if name in DISK:
            if not left:
                os._exit(KILLED)
            left -= 1

    if not (pid := os.fork()):
        code = 1
        try:
            sys.addaudithook(kill)
            asyncio.run(opponents.begin(0, {}))
            code = 0
        finally:
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    assert code in (0, KILLED)
    return code == KILLED


def test_a_kill_leaves_no_half_adapter_that_a_resumed_run_takes(tmp_path: Path) -> None:
    (other := tmp_path / "other.1").mkdir()
    for name in (PEFT_WEIGHTS, PEFT_CONFIG):
        (other / name).write_bytes(b"{}")

    def run(folder: Path) -> Opponents:
        section = OpponentsSection(pool=["start", str(other)])
        settings = replace(Config(), opponents=section, environment=EnvironmentSection(seats=SEATS))
        return Opponents(settings, folder, Slow())  # type: ignore[arg-type]

    def kept(folder: Path) -> list[str]:
        """Return the kept folders, each of which is whole."""
        found = [path for path in folder.glob("opponents/*") if not path.name.startswith(".")]
        for path in found:
            digest = hashlib.sha256((path / PEFT_WEIGHTS).read_bytes()).hexdigest()
            assert digest.startswith(path.name.partition(".")[2])
            assert sorted(file.name for file in path.iterdir()) == sorted((PEFT_WEIGHTS, PEFT_CONFIG))
        return sorted(path.name for path in found)

    asyncio.run((whole := run(tmp_path / "whole")).begin(0, {}))
    event = 0
    while killed_before(event, run(folder := tmp_path / str(event))):
        assert set(kept(folder)) <= set(kept(tmp_path / "whole"))
        asyncio.run((resumed := run(folder)).begin(0, {}))
        assert (resumed.state, kept(folder)) == (whole.state, kept(tmp_path / "whole"))
        assert [path.name for path in folder.glob("opponents/.*")] == []
        event += 1
    assert event > 15, "a run touches the disk more often"


@pytest.mark.parametrize("seed", range(6))
def test_an_entry_stands_for_what_its_name_means(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    interval, steps = draws.randint(1, 7), draws.randint(1, 40)
    ago, most = draws.randint(1, 20), draws.randint(1, 6)
    opponents, writer = made(tmp_path, ["start", f"steps-ago {ago}", "history"], interval=interval, history=most)
    train(opponents, writer, range(steps + 1))
    kept = [step for step in range(steps + 1) if step % interval == 0]
    assert sorted(opponents.state["kept"], key=int) == [str(step) for step in kept]
    early = [step for step in kept if step <= steps - ago]
    assert [o.version for o in opponents._entry("start")] == [0]
    assert [o.version for o in opponents._entry(f"steps-ago {ago}")] == [early[-1] if early else 0]
    assert [o.version for o in opponents._entry("history")] == kept[-most:]
    now = {o.name for entry in opponents._config.pool for o in opponents._entry(entry)}
    assert len(now) <= opponents._config.most_at_once(1)
    for name in opponents.state["kept"].values():
        weights = tmp_path / "opponents" / name / PEFT_WEIGHTS
        assert len(weights.read_bytes()) == int(name.partition(".")[0].removeprefix("step-"))


def test_hard_opponents_are_met_more_often_and_ratings_follow_results(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / PEFT_WEIGHTS).write_bytes(b"weights")
    opponents, _ = made(tmp_path, ["start", str(other)], weighting="hard", share=0.8)
    asyncio.run(opponents.begin(0, {}))
    for id in range(400):  # the policy beats the start, and loses to the other
        (opponent,) = [o.name for o in opponents.cast(prompt(id)).values()] or [""]
        reward = 1.0 if opponent == "step-0" else -1.0
        played = Rollout([], "", reward, seats={"white": reward, "black": -reward}, opponents={"black": opponent})
        opponents.learned_from([Group(prompt(id), [replace(played, opponents={}) if not opponent else played])])
    met = Counter(o.name for id in range(400, 800) for o in opponents.cast(prompt(id)).values())
    assert met["other"] > 5 * met["step-0"] > 0
    assert 280 < met.total() < 360
    found = opponents.metrics
    assert found["elo/start"] == FIRST_RATING
    assert found["elo/policy"] < found["elo/other"]
    assert found["won_against/start"] > 0.9
    assert found["won_against/other"] < 0.1


@pytest.mark.parametrize(
    ("own", "other", "expected"), [(1, -1, 1), (-1, 1, 0), (2, 2, 0.5), (1, None, 1), (0, None, 0.5)]
)
def test_results_compare_rewards(own: float, other: float | None, expected: float) -> None:
    assert result(Rollout([], "", 0.0, seats={"a": own, "b": other}, opponents={"b": "x"})) == expected


@pytest.mark.parametrize("seed", range(8))
def test_no_token_of_an_opponent_is_packed_or_counts_as_stale(seed: int, tmp_path: Path) -> None:
    opponents, writer = made(tmp_path, POOL, share=0.7)
    train(opponents, writer, range(2))
    draws = random.Random(seed)
    groups = [game(opponents, prompt(id), draws) for id in range(8)]
    packed = [tuple(sample.tokens) for sample in samples_of(seat_groups(groups), algorithm())]
    own = list[Branch]()
    for group in groups:
        mine = [b for r in group.rollouts for b in r.branches if b.seat not in r.opponents]
        assert group.version == min((v for b in mine for t in b.turns for v in t.completion.versions), default=NEWEST)
        own += mine
    assert sorted(packed) == sorted(tuple(branch.tokens) for branch in own)


def test_entries_are_read() -> None:
    assert steps_ago("steps-ago 20") == 20
    assert not any(map(steps_ago, ["steps-ago", "steps-ago 0", "steps-ago x", "start", "steps-ago -1"]))


PLAYED = '[task]\nname = "titan_rl.ext.agents.kuhn:deals"\n[environment]\nname = "titan_rl.ext.agents.kuhn:play"\n'
SEATED = f'{PLAYED}seats = ["first", "second"]\n'
ADAPTED = f'[lora]\nrank = 8\nsync = "adapter"\n{SEATED}'


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (f"{ADAPTED}[opponents]\nshare = 0.5", "opponents.pool: expected someone to play against, because other keys"),
        (f'{PLAYED}[lora]\nrank = 8\n[opponents]\npool = ["start"]', "environment.seats: expected several players"),
        (f'{SEATED}[opponents]\npool = ["start"]', "lora.rank: expected at least 1, with lora.sync"),
        (f'{ADAPTED}[opponents]\npool = ["start"]\nseats = ["third"]', "opponents.seats: expected some of"),
        (f'{ADAPTED}frozen_seats = ["first"]\n[opponents]\npool = ["start"]', "opponents.seats: expected another seat"),
        (f'{ADAPTED}[opponents]\npool = ["start", "start"]', "opponents.pool: expected each opponent once"),
        (f'{ADAPTED}[opponents]\npool = ["sart"]', "opponents.pool: expected"),
        (f'{ADAPTED}[opponents]\npool = ["start"]\nheld_out = "best"', "opponents.held_out: expected one of"),
    ],
)
def test_what_cannot_be_played_is_refused(toml: str, message: str, tmp_path: Path) -> None:
    assert [line for line in problems(config(tmp_path, toml)) if line.startswith(message)]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("{", "expected a valid"),
        ('{"r": 64, "target_modules": ["q_proj"]}', "expected adapters of at most lora.rank = 8, found 64"),
        ('{"r": 8, "target_modules": ["lm_head"]}', "expected adapters of the layers of lora.targets, found lm_head"),
        ('{"r": 8, "target_modules": ["q_proj"]}', ""),
    ],
)
def test_folders_are_read_before_the_run(settings: str, message: str, tmp_path: Path) -> None:
    (folder := tmp_path / "other").mkdir()
    (folder / PEFT_WEIGHTS).write_bytes(b"")
    (folder / PEFT_CONFIG).write_text(settings)
    found = problems(config(tmp_path, f'{ADAPTED}[opponents]\npool = ["{folder}"]'))
    lines = [line for line in found if line.startswith("opponents.pool")]
    assert [message in line for line in lines] == [True] * bool(message)


@pytest.mark.parametrize("seed", range(12))
def test_groups_in_flight_have_no_more_opponents_than_engines_have_slots(seed: int, tmp_path: Path) -> None:
    draws = random.Random(seed)
    pool = draws.sample([*POOL, "steps-ago 1", "steps-ago 13"], draws.randint(1, 6))
    keys = {"interval": draws.randint(1, 6), "history": draws.randint(1, 4)}
    opponents, writer = made(tmp_path, pool, **keys)
    asyncio.run(opponents.begin(0, {}))
    names, lag = [set[str]()], draws.randint(0, 5)
    for step in range(1, 50):
        writer.step = step
        opponents._rating = draws.uniform(500, 1500)
        asyncio.run(opponents.keep(step))
        names.append({o.name for entry in pool for o in opponents._entry(entry)})
        assert len(set[str]().union(*names[-1 - lag :])) <= opponents._config.most_at_once(lag + 1)


def test_the_plan_shows_the_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--hosts.isolation",
        "off",
        "--lora.rank",
        "8",
        "--opponents.pool",
        '["start", "history"]',
        "--opponents.share",
        "0.5",
    ]
    main(["--config", "kuhn_llama", "--dry-run", "--job.dump_folder", str(tmp_path / "run"), *flags])
    shown = " ".join(capsys.readouterr().out.split())
    assert "opponents start, history; drawn evenly, in 50% of the groups; adapters kept every 10 steps, 9 more" in shown
