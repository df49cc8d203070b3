"""Whether long rollouts hold short ones: rollouts of 1 to 20 turns on the real stream, over timers in place of engines
and trainers. The same number of turns in rollouts of equal lengths is the bound. The clock is simulated: it jumps to
the next timer once nothing else is to do, so the figures are exact and do not depend on the machine."""

import asyncio
import random
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

from bench.rows import Row
from titan_rl.config import sections as c
from titan_rl.record.ledger import Ledger
from titan_rl.rollout.sampling import StreamSettings
from titan_rl.rollout.session import SessionLimits
from titan_rl.rollout.stream import RolloutStream
from titan_rl.tasks.judging import by_rule
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.rewards import BUILT_IN
from titan_rl.tasks.task import load_task
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.seeds import derive
from titan_rl.wire.sessions import Outcome, Session
from titan_rl.wire.spans import Clock
from titan_rl.wire.types import Completion, Request, Sampling

GROUPS, GROUP_SIZE = 8, 4  # rollouts of a step
SHORTEST, LONGEST = 1, 20  # turns
SLOTS = {"room for all": 1 << 20, "room for a step": GROUPS * GROUP_SIZE}  # turns that the engine samples at once
TURN_SECONDS, TOOL_SECONDS = 0.04, 0.01
TRAIN_SECONDS = 0.3
FIRST = 6  # steps until the backlog of the start is used up
MODES: dict[str, dict[str, Any]] = {
    "synchronous": {"max_staleness_steps": 0},
    "lag 1": {"max_staleness_steps": 1},
    "lag 2": {"max_staleness_steps": 2},
    "lag 2, window 2": {"max_staleness_steps": 4, "overtake_steps": 2},
    "lag 4": {"max_staleness_steps": 4},
}


def _now() -> float:
    return asyncio.get_running_loop().time()


def length_of(session: Session, *, spread: bool) -> int:
    """Return a rollout's number of turns: the same in every mode. Both kinds have the same mean."""
    draw = random.Random(derive(0, "turns", session.prompt.id, session.seed))
    return draw.randint(SHORTEST, LONGEST) if spread else draw.choice((LONGEST // 2, LONGEST // 2 + SHORTEST))


class JumpingClock(asyncio.SelectorEventLoop):
    """An event loop that never sleeps. Nothing in it may wait for a thread or a file descriptor."""

    _now = 0.0
    _ready: Any  # asyncio's own: callbacks that are due, and timers
    _scheduled: Any

    def time(self) -> float:
        return self._now

    def _run_once(self) -> None:
        if not self._ready:
            due = [timer.when() for timer in self._scheduled if not timer.cancelled()]
            self._now = max(self._now, min(due, default=0.0))
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]


class Turns:
    """Drives rollouts whose tool takes a while."""

    def __init__(self, *, spread: bool) -> None:
        self._spread = spread

    async def drive(self, session: Session) -> Outcome:
        tokens = list(session.prompt.tokens)
        for _ in range(length_of(session, spread=self._spread)):
            tokens += (await session.sample(tokens)).tokens
            await asyncio.sleep(TOOL_SECONDS)
            tokens.append(7)
        return Outcome(reward=float(session.seed % 2))


class TimedEngine:
    """Samples at most `slots` turns at once, each for TURN_SECONDS; first come, first served."""

    def __init__(self, slots: int) -> None:
        self._slots = asyncio.Semaphore(slots)
        self.version, self.busy = 0, 0.0  # seconds of all turns together

    async def generate(self, request: Request) -> list[Completion]:
        async with self._slots:
            began = _now()
            await asyncio.sleep(TURN_SECONDS)
            self.busy += _now() - began
        return [Completion([8, 2], [-0.5] * 2, [self.version] * 2, "stop")]


async def steps_of(mode: Mapping[str, Any], slots: int, steps: int, *, spread: bool) -> dict[str, float]:
    """Train `steps` steps after the first ones. Return seconds of a step, and what of it is waiting."""
    engine = TimedEngine(slots)
    with tempfile.TemporaryDirectory() as folder:
        characters.build(Path(folder))
        tokenizer = TextTokenizer.load(Path(folder))
        rollout = c.RolloutSection(groups_per_step=GROUPS, group_size=GROUP_SIZE, **mode)
        settings = StreamSettings(
            algorithm=c.AlgorithmSection(),
            rollout=rollout,
            sampling=Sampling(4),
            seed=0,
            first=1,
            groups=GROUPS * (FIRST + steps),
            driver=Turns(spread=spread),
            limits=SessionLimits(context=4096),
        )
        prompts = PromptSource(load_task(c.TaskSection(), seed=0, eval_size=0), tokenizer, seed=0)
        judge = by_rule(BUILT_IN["exact"])
        stream = RolloutStream(settings, engine, prompts, judge, tokenizer.decode, Clock(), Ledger(Path(folder)))
        began = waited = busy = 0.0
        async with aclosing(stream):
            stream.admit(GROUPS * (rollout.steps_ahead + 1))
            for step in range(1, FIRST + steps + 1):
                if step == FIRST + 1:
                    began, waited, busy = _now(), 0.0, engine.busy
                asked = _now()
                groups = await stream.take(GROUPS, step)
                waited += _now() - asked
                await asyncio.sleep(TRAIN_SECONDS)
                stream.trained(step, groups)
                if step == FIRST + steps - rollout.steps_ahead:  # from here on nothing is left to admit
                    break
                engine.version = step
                stream.admit(GROUPS)
            wall, count = _now() - began, steps - rollout.steps_ahead
            return {
                "step, s": wall / count,
                "trainer waits, share": waited / wall,
                "turns sampled at once": (engine.busy - busy) / wall,
            }


def long_and_short(steps: int) -> Iterator[Row]:
    """Measure both kinds of lengths in every mode."""
    note = (
        f"{GROUPS} groups of {GROUP_SIZE}, {TURN_SECONDS:g} s a turn, {TOOL_SECONDS:g} s a tool, "
        f"{TRAIN_SECONDS:g} s a training step; simulated clock"
    )
    for room, slots in SLOTS.items():
        for name, mode in MODES.items():
            found: dict[str, dict[str, float]] = {}
            for kind, spread in ((f"{SHORTEST} to {LONGEST} turns", True), ("equal lengths", False)):
                with asyncio.Runner(loop_factory=JumpingClock) as runner:
                    found[kind] = runner.run(
                        steps_of(mode, slots, steps + c.RolloutSection(**mode).steps_ahead, spread=spread)
                    )
            own, equal = found.values()
            case = f"{room}, {name}"
            yield from (
                Row("turns", case, f"{kind}: {m}", [v], note=note) for kind, fs in found.items() for m, v in fs.items()
            )
            yield Row("turns", case, "throughput / equal lengths", [equal["step, s"] / own["step, s"]], note=note)
