"""Reward processes: parallel, killed at their deadline, and what user code does to them."""

import asyncio
import math
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from support.hostile_rewards import FORGED
from titan_rl.ext.reward_processes.reward_pool import PoolLimits, RewardPool
from titan_rl.ext.reward_processes.reward_process import RewardProcess
from titan_rl.tasks.rubric import GRADER, JudgeRequest, RewardUnusable, Rubric
from titan_rl.wire.types import Judgement, Prompt, Rollout

T = TypeVar("T")
PROMPT = Prompt(0, "q", [], "a", {"level": 3})
OBEY = Rubric((("support.hostile_rewards:obey", 1.0),))
PATIENT = Rubric((("support.hostile_rewards:patient", 1.0),))


def pooled(limits: PoolLimits, body: Callable[[RewardPool], Awaitable[T]]) -> T:
    """Run the body with a pool; no process of it is left."""

    async def run() -> T:
        pool = RewardPool(limits)
        try:
            return await body(pool)
        finally:
            await pool.close()

    before = {process.pid for process in psutil.Process().children(recursive=True)}
    try:
        return asyncio.run(run())
    finally:
        left = [process for process in psutil.Process().children(recursive=True) if process.pid not in before]
        assert not left, left


def judge(
    pool: RewardPool, texts: Sequence[str], rubric: Rubric = OBEY, attempts: int = 1
) -> Awaitable[list[Judgement]]:
    return pool.verdicts(rubric, PROMPT, [Rollout([], text, math.nan) for text in texts], attempts)


def test_slow_rewards_are_called_by_all_workers_at_the_same_time() -> None:
    """16 rewards of 0.4 s, which take 6.4 s one after the other."""

    async def body(pool: RewardPool) -> tuple[float, int]:
        await judge(pool, ["sleep 0.4"] * 8)  # starts the processes
        began = time.monotonic()
        verdicts = await judge(pool, ["sleep 0.4"] * 16)
        assert all(verdict == Judgement(4.0) for verdict in verdicts)
        return time.monotonic() - began, len(pool._runners)

    seconds, processes = pooled(PoolLimits(4, 60), body)
    assert processes == 4
    assert 1.6 <= seconds < 4.8


def test_a_fast_reward_has_one_process_and_keeps_its_rows_in_order() -> None:
    async def body(pool: RewardPool) -> None:
        for _ in range(20):
            assert [v.reward for v in await judge(pool, [f"ok {k}" for k in range(10)])] == [*map(float, range(10))]
        assert len({v.reward for v in await judge(pool, ["pid"] * 20)}) == 1

    pooled(PoolLimits(8, 60), body)


@pytest.mark.parametrize("bad", ["ok 99", "exit"])
def test_fast_answers_of_many_groups_are_asked_for_together_and_a_bad_one_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, bad: str
) -> None:
    messages, ask = list[int](), RewardProcess._send
    groups = [[f"ok {10 * group + row}" for row in range(4)] for group in range(16)]
    groups[7][2] = bad

    def counted(self: RewardProcess, requests: Sequence[JudgeRequest]) -> None:
        messages.append(len(requests))
        ask(self, requests)

    async def body(pool: RewardPool) -> list[list[Judgement]]:
        await judge(pool, ["ok 1"] * 64)  # now they are known to be fast
        monkeypatch.setattr(RewardProcess, "_send", counted)
        return await asyncio.gather(*(judge(pool, texts) for texts in groups))

    found = pooled(PoolLimits(1, 2.0), body)
    failed = {(i, k): v.error for i, group in enumerate(found) for k, v in enumerate(group) if math.isnan(v.reward)}
    assert failed.keys() == (set() if bad == "ok 99" else {(7, 2)}), failed
    rewards = [v.reward for i, group in enumerate(found) for k, v in enumerate(group) if (i, k) not in failed]
    assert rewards == [float(text[-1]) for texts in groups for text in texts if text == "ok 99" or text != bad]
    if bad == "ok 99":
        assert len(messages) <= 4


def test_whatever_user_code_does_it_alone_is_named_and_the_others_have_their_rewards() -> None:
    texts = ["ok 1", "raise", "nan", "exit", "sys.exit", "fork 2", "leak", "ok 3", "orphan 4", "sleep 60"]

    async def body(pool: RewardPool) -> list[Judgement]:
        return await judge(pool, texts)

    found = dict(zip(texts, pooled(PoolLimits(3, 2.0, memory_mb=400), body), strict=True))
    rewarded = {text: verdict.reward for text, verdict in found.items() if not math.isnan(verdict.reward)}
    assert rewarded == {"ok 1": 1.0, "fork 2": 2.0, "ok 3": 3.0, "orphan 4": 4.0}
    for text, said in {
        "sleep 60": r"rewards:obey did not return within 2 s at .*hostile_rewards.py:18 .*; its process is killed",
        "raise": r"ZeroDivisionError: mine at .*hostile_rewards.py:22",
        "nan": r"to return a finite number, found nan",
        "exit": r"process ended with exit code 3",
        "sys.exit": r"SystemExit\(0\)",
        "leak": r"had \d+ MiB of memory, more than task.reward_memory_mb = 400, and is killed",
    }.items():
        assert re.search(said, found[text].error), found[text]
    assert {text for text, verdict in found.items() if verdict.hung} == {"sleep 60"}


def test_a_regex_that_holds_the_interpreter_stalls_its_worker_only_and_is_killed_at_its_deadline() -> None:
    async def body(pool: RewardPool) -> float:
        await judge(pool, ["sleep 0.3"] * 4)
        began = time.monotonic()
        stalled = asyncio.ensure_future(judge(pool, ["regex"]))
        for _ in range(10):
            assert (await judge(pool, ["ok 1"]))[0].reward == 1.0
        assert not stalled.done()
        (verdict,) = await stalled
        assert verdict.hung
        assert re.search(r"obey did not return within 2 s at .*hostile_rewards.py:20 .*; its process is", verdict.error)
        return time.monotonic() - began

    assert 2.0 <= pooled(PoolLimits(2, 2.0), body) < 4.0


def test_a_failed_row_has_as_many_attempts_as_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flaky_reward.py").write_text(
        textwrap.dedent(f"""
        from pathlib import Path

        def f(completion):
            path = Path({str(tmp_path)!r}, completion)
            path.write_text(path.read_text() + "x" if path.exists() else "x")
            if len(path.read_text()) < 2 or completion == "never":
                raise ValueError("not yet")
            return 1.0
        """)
    )
    monkeypatch.syspath_prepend(tmp_path)

    async def body(pool: RewardPool) -> list[Judgement]:
        return await judge(pool, ["a", "never", "b"], Rubric((("flaky_reward:f", 1.0),)), attempts=3)

    a, never, b = pooled(PoolLimits(1, 60), body)
    assert (a, b) == (Judgement(1.0), Judgement(1.0))
    assert "ValueError: not yet" in never.error
    assert [(tmp_path / name).read_text() for name in ("a", "never", "b")] == ["xx", "xxx", "xx"]


def test_async_functions_wait_together_and_one_that_is_late_is_alone() -> None:
    async def body(pool: RewardPool) -> tuple[list[Judgement], float]:
        await judge(pool, ["wait 0"], PATIENT)
        began = time.monotonic()
        found = await judge(pool, [*["wait 0.5"] * 30, "wait 60"], PATIENT)
        return found, time.monotonic() - began

    (*good, late), seconds = pooled(PoolLimits(1, 2.0), body)
    assert all(verdict == Judgement(1.0) for verdict in good)
    assert late.hung
    assert "hostile_rewards:patient did not return within 2 s" in late.error
    assert seconds < 10, "one after the other they take 15 s"


def test_a_late_function_of_all_answers_is_killed_at_its_deadline_and_fails_them_all() -> None:
    rubric = Rubric((("support.hostile_rewards:together", 1.0),))

    async def body(pool: RewardPool) -> tuple[list[Judgement], float]:
        assert await judge(pool, ["ok 1", "ok 2"], rubric) == [Judgement(1.0), Judgement(2.0)]
        began = time.monotonic()
        return await judge(pool, ["ok 1", "sleep 60"], rubric), time.monotonic() - began

    late, seconds = pooled(PoolLimits(1, 1.0), body)
    assert all(
        verdict.hung and "hostile_rewards:together did not return within 1 s" in verdict.error for verdict in late
    )
    assert 1.0 <= seconds < 5.0


def test_a_grader_that_fails_costs_no_reward() -> None:
    rubric = Rubric((("exact", 1.0),), grader="support.hostile_rewards:obey")

    async def body(pool: RewardPool) -> list[Judgement]:
        return await judge(pool, ["a", "raise", "exit", "sleep 60", "ok 7"], rubric)

    right, raised, died, hung, graded = pooled(PoolLimits(2, 1.0), body)
    assert right == Judgement(1.0, {GRADER: 0.0})
    assert graded == Judgement(0.0, {GRADER: 7.0})
    for verdict in (raised, died, hung):
        assert verdict.reward == 0.0
        assert verdict.parts == {}
        assert verdict.error.startswith("the grader: ")


def test_a_process_that_swells_is_replaced_between_two_calls() -> None:
    async def body(pool: RewardPool) -> int:
        pids = set()
        for _ in range(3):
            pids |= {v.reward for v in await judge(pool, ["grow", "pid"]) if v.reward > 1}
        return len(pids)

    assert pooled(PoolLimits(1, 60, memory_mb=300), body) == 3


def test_a_worker_that_forges_a_message_fails_its_own_answer_only() -> None:
    """The controller unpickles nothing that a worker wrote."""
    texts = [*(f"forge {kind}" for kind in FORGED), "ok 1"]

    async def body(pool: RewardPool) -> list[Judgement]:
        return await judge(pool, texts)

    *forged, good = pooled(PoolLimits(1, 60), body)
    assert good == Judgement(1.0)
    for verdict in forged:
        assert math.isnan(verdict.reward)
        assert verdict.error == "the reward process sent an invalid message"


@pytest.mark.parametrize(
    ("module", "found"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("import os; os._exit(3)", "the reward function's process ended with exit code 3"),
    ],
)
def test_a_reward_that_cannot_be_imported_fails_once_and_for_all_groups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, found: str
) -> None:
    """No process is started again for the next group."""
    (tmp_path / "changed_reward.py").write_text(f"open({str(tmp_path / 'imports')!r}, 'a').write('x')\n{module}\n")
    monkeypatch.syspath_prepend(tmp_path)
    rubric = Rubric((("changed_reward:f", 1.0),))

    async def body(pool: RewardPool) -> None:
        asked = [asyncio.ensure_future(judge(pool, ["a", "b"], rubric, 2)) for _ in range(3)]
        raised = await asyncio.gather(*asked, return_exceptions=True)
        with pytest.raises(RewardUnusable):
            await judge(pool, ["a"], rubric)
        for error in raised:
            assert isinstance(error, RewardUnusable)
            assert str(error).startswith('task.reward: expected "changed_reward:f" to be imported, found ')
            assert found in str(error)

    pooled(PoolLimits(4, 60), body)
    assert (tmp_path / "imports").read_text() == "x"


def test_a_reward_that_was_imported_may_fail_to_be_a_few_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package that is being replaced, or a download: other processes judge on, and the next one may import it."""
    (tmp_path / "gone_reward.py").write_text(
        "from pathlib import Path\n"
        f"tries = Path({str(tmp_path / 'tries')!r})\n"
        "tries.write_text(tries.read_text() + 'x' if tries.exists() else 'x')\n"
        "if 1 < len(tries.read_text()) < 4:\n"
        "    raise OSError('not now')\n"
        "import os\n"
        "def f(completion):\n"
        "    if completion == 'die':\n"
        "        os._exit(3)\n"
        "    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    rubric = Rubric((("gone_reward:f", 1.0),))

    async def body(pool: RewardPool) -> list[Judgement]:
        return [(await judge(pool, [text], rubric))[0] for text in ("a", "die", "b")]

    a, died, b = pooled(PoolLimits(1, 60), body)
    assert (a, b) == (Judgement(1.0), Judgement(1.0))
    assert "exit code 3" in died.error
    assert (tmp_path / "tries").read_text() == "xxxx"


@pytest.mark.parametrize("then", ["sleep 60", "exit", "ok 1"])
def test_what_left_the_session_ends_with_its_process(then: str) -> None:
    """Killed at its deadline, ended by itself, or closed at the end."""

    async def body(pool: RewardPool) -> int:
        escaped, _ = await judge(pool, ["escape", then])
        return int(escaped.reward)

    pid = pooled(PoolLimits(1, 2.0), body)
    with suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).name() != "sleep"


@pytest.mark.parametrize("ticks", [0, 1, 5, 20])
def test_a_process_that_is_being_started_when_the_pool_closes_does_not_outlive_it(ticks: int) -> None:
    async def body(pool: RewardPool) -> None:
        asked = asyncio.ensure_future(judge(pool, ["ok 1"]))
        for _ in range(ticks):
            await asyncio.sleep(0.001)
        asked.cancel()

    for _ in range(3):
        pooled(PoolLimits(8, 60), body)


def test_reward_processes_die_with_a_killed_controller() -> None:
    """Also one whose interpreter is held, which reads no end of file, and what left its session."""
    program = """
        import asyncio, math, os
        from titan_rl.ext.reward_processes.reward_pool import PoolLimits, RewardPool
        from titan_rl.tasks.rubric import Rubric
        from titan_rl.wire.types import Prompt, Rollout

        async def main():
            pool = RewardPool(PoolLimits(2, None))
            texts = ["escape", "regex"]
            asked = [asyncio.ensure_future(pool.verdicts(
                Rubric((("support.hostile_rewards:obey", 1.0),)), Prompt(0, "", [], ""), [Rollout([], t, math.nan)]
            )) for t in texts]
            print(int((await asked[0])[0].reward), flush=True)
            await asked[1]

        asyncio.run(main())
    """
    support = str(Path(__file__).parents[3])
    env = {**os.environ, "PYTHONPATH": f"{Path(support).parent}:{support}"}
    command = [sys.executable, "-c", textwrap.dedent(program)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=env) as controller:
        assert controller.stdout is not None
        try:
            escaped = psutil.Process(int(controller.stdout.readline()))
            workers = [escaped, *psutil.Process(controller.pid).children(recursive=True)]
        finally:
            controller.send_signal(signal.SIGKILL)
        _, alive = psutil.wait_procs(workers, timeout=30)
    assert not alive


def test_feedback_comes_from_a_reward_process() -> None:
    rubric = Rubric(tuple((f"support.feedback_rewards:{name}", 0.5) for name in ("of_dict", "of_verl")))
    (verdict,) = pooled(PoolLimits(1, 60), lambda pool: judge(pool, ["4"], rubric))
    assert (verdict.reward, verdict.feedback) == (0.5, "not 4\nnot 4")
