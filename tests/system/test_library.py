"""titan_rl as a library, on real meshes: loops of the user, their parts of the algorithm, and failures."""

import doctest
import importlib.util
import json
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import nbclient
import nbformat
import psutil
import pytest

from support.library_programs import assert_gone, environment, finished, started, write_config
from support.outputs import losses, sampled
from support.running import RunFiles, Runs
from titan_rl import api

LOOPS = Path(__file__).parents[2] / "docs" / "loops"


def lines(folder: Path, name: str = "metrics.jsonl") -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def audited(folder: Path) -> str:
    command = [sys.executable, "-m", "titan_rl", "audit", str(folder)]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout


def test_the_grpo_loop_makes_the_steps_of_a_run(runs: Runs, tmp_path: Path) -> None:
    body = f"""
    sys.path.insert(0, {str(LOOPS)!r})
    import grpo
    await grpo.main("toy.toml", 3)
    """
    finished(tmp_path / "own", body)
    own, built_in = RunFiles(tmp_path / "own" / "run"), tmp_path / "run"
    config = str(tmp_path / "own" / "toy.toml")
    run = runs.finish(built_in, config, small=False, training__steps=3)
    assert losses(own) == losses(run)
    assert sampled(own) == sampled(run)


def test_own_advantages_and_losses_and_a_resumed_state(tmp_path: Path) -> None:
    """Two runs in one process; the second one continues the first."""
    body = """
    def quantile(rewards, lengths):
        return rewards - np.quantile(rewards, 0.75)

    def by_token(group, columns):
        return [r.reward - c["behaviour"] * 0 for r, c in zip(group.rollouts, columns, strict=True)]

    def soft_clip(logprob, proximal, advantage):
        log_ratio = logprob - proximal
        return -advantage * log_ratio.exp() + 5.0 * log_ratio.square(), {"moved": log_ratio.abs()}

    keys = {"training.steps": 4}
    async with titan_rl.start("toy.toml", keys, quiet=True) as run:
        groups = await run.sample(run.prompts(4), n=6)
        groups = [g.with_rewards([len(r.text) for r in g.rollouts]) for g in groups]
        shown(text=str(groups[0]), html=groups[0]._repr_html_())
        stats = await run.train(groups, advantage=quantile, loss=soft_clip)
        run.log(longest=max(map(max, (g.rewards for g in groups))))
        await run.sync()
        groups = await run.judge(await run.sample(run.prompts(4)))
        await run.train(groups[2:], advantage=by_token)
        await run.sync()
        run.state["seen"] = 8
        await run.save()
        shown(moved=stats.metrics["own/moved"], step=run.step)
    async with titan_rl.start("toy.toml", keys, resume=True) as run:
        prompts = run.prompts(1)
        shown(step=run.step, state=run.state, next=prompts[0].id)
        await run.train(await run.judge(await run.sample(prompts)), advantage=lambda r: r - r.mean())
        await run.sync()
        shown(scores=await run.evaluate())
    """
    printed, first, resumed, last = finished(tmp_path, body)
    assert printed["text"].startswith("prompt 0: ")
    assert printed["text"].count("\n") == 6
    assert printed["html"].count("<tr>") == 7
    assert first["step"] == 2
    assert first["moved"] >= 0
    assert resumed == {"step": 2, "state": {"seen": 8}, "next": 8}
    assert 0 <= last["scores"]["eval/score"] <= 1
    steps = [line for line in lines(tmp_path / "run") if line["kind"] == "rl"]
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert "own/longest" in steps[0]
    assert "own/moved" in steps[0]
    assert steps[1]["dropped/groups"] == 2, "two groups were sampled, and not trained on"
    assert "nothing lost" in audited(tmp_path / "run")


def test_a_lost_trainer_is_restored_and_a_lost_generator_heals(tmp_path: Path) -> None:
    body = """
    def kill(role):
        from titan_rl.meshes import deaths
        os.kill(next(pid for name, pid in deaths.alive().items() if name.startswith(role)), signal.SIGKILL)

    async with titan_rl.start("toy.toml", {"training.steps": 4, "fault.snapshot_interval": 1}) as run:
        async def step():
            groups = await run.judge(await run.sample(run.prompts(4)))
            await run.train(groups)
            await run.sync()
        for made in (1, 2):
            run.state["made"] = made
            await step()
        kill("trainer")
        run.state["made"] = 3
        try:
            await step()
        except titan_rl.RunError as error:
            await run.restore(error)
            shown(error=str(error), step=run.step, state=run.state)
        await step()
        kill("generator")
        await step()
        shown(step=run.step)
    """
    restored, last = finished(tmp_path, body)
    assert restored["error"].startswith("trainer[")
    assert "died" in restored["error"]
    assert restored["step"] in (1, 2), "the last snapshot was whole, or the one before it"
    assert restored["state"] == {"made": restored["step"]}
    assert last["step"] == restored["step"] + 2


def test_each_call_may_be_in_a_task_of_its_own_as_in_a_notebook(tmp_path: Path) -> None:
    """Two runs, one after the other."""
    body = """
    async def awaited(work):
        return await work

    for number in range(2):
        run = await asyncio.create_task(awaited(titan_rl.start("toy.toml", quiet=True)))
        groups = await asyncio.create_task(run.sample(run.prompts(4)))
        groups = await asyncio.create_task(run.judge(groups))
        stats = await asyncio.create_task(run.train(groups))
        await asyncio.create_task(run.sync())
        await asyncio.create_task(run.close())
        shown(number=number, reward=stats.reward)
    """
    first, second = finished(tmp_path, body)
    assert first["reward"] == second["reward"]


def test_colocated_engines_wait_for_weights(tmp_path: Path) -> None:
    body = """
    async with titan_rl.start("toy.toml", {"placement.kind": "colocated"}, quiet=True) as run:
        for step in range(2):
            await run.train(await run.judge(await run.sample(run.prompts(4))))
            try:
                await run.sample(run.prompts(1))
            except titan_rl.RunError as error:
                shown(text=str(error))
            await run.sync()
        shown(**await run.evaluate())
    """
    first, second, scores = finished(tmp_path, body)
    assert first["text"].startswith("run.sample: expected `await run.sync()` after step 1")
    assert second["text"].startswith("run.sample: expected `await run.sync()` after step 2")
    assert "eval/score" in scores


def test_wrong_input_is_named_in_one_message(tmp_path: Path) -> None:
    body = """
    def refused(error):
        shown(kind=type(error).__name__, text=str(error))

    def nan(logprob, advantage):
        return -advantage * logprob * math.nan

    def mixing(logprob, advantage):
        return -(advantage - advantage.mean()) * logprob

    for keys in ({"rollout.groups": 3, "rollout.group_size": 0}, {"hosts.isolation": "require"}):
        try:
            await titan_rl.start("toy.toml", keys)
        except titan_rl.ConfigRefused as error:
            refused(error)
    async with titan_rl.start("toy.toml", quiet=True) as run:
        try:
            await titan_rl.start("toy.toml")
        except RuntimeError as error:
            refused(error)
        groups = await run.sample(run.prompts(4))
        judged = await run.judge(groups)
        for bad in (
            {"groups": groups},
            {"groups": judged, "loss": nan},
            {"groups": judged, "loss": mixing},
            {"groups": judged, "advantage": lambda rewards: rewards[1:]},
            {"groups": []},
        ):
            try:
                await run.train(bad.pop("groups"), **bad)
            except titan_rl.RunError as error:
                refused(error)
        await run.train(judged)
        try:
            await run.train(judged)
        except titan_rl.RunError as error:
            refused(error)
        await run.sync()
        again = await run.judge(await run.sample(run.prompts(4)))
        await run.train(again)
        try:
            await run.train(again)
        except titan_rl.RunError as error:
            refused(error)
    """
    texts = [f"{each['kind']}: {each['text']}" for each in finished(tmp_path, body)]
    expected = (
        "ConfigRefused: 2 problems in toy.toml",
        'ConfigRefused: 1 problem in toy\n  - hosts.isolation: expected "auto" or "off"',
        "RuntimeError: expected one run at a time in a process",
        "RunError: step 1: expected groups with rewards, found none in prompt 0",
        "RunError: the loss main.<locals>.nan: expected finite losses",
        "RunError: the loss main.<locals>.mixing: expected the same losses with another row behind",
        "RunError: the advantages of prompt 0: expected 4, one for each rollout with a reward, found 3",
        "RunError: step 1: expected groups to train on, found none",
        "RunError: step 2: expected samples of version 1 or newer, found version 0 in prompt 0",
        "RunError: step 3: expected at most training.steps = 2",
    )
    assert len(texts) == len(expected), texts
    for text, start in zip(texts, expected, strict=True):
        assert text.startswith(start)


@pytest.mark.parametrize("how", ["exception", "interrupt"])
def test_nothing_is_left_of_a_loop_that_ends_while_samples_are_in_flight(how: str, tmp_path: Path) -> None:
    ends = 'raise ValueError("mine")' if how == "exception" else "await asyncio.sleep(300)"
    body = f"""
    async with titan_rl.start("toy.toml", quiet=True) as run:
        sampling = asyncio.create_task(run.sample(run.prompts(4)))
        await asyncio.sleep(0.01)
        shown(up=True)
        {ends}
    """
    process = started(tmp_path, body)
    assert process.stdout is not None
    seen = [line := process.stdout.readline()]
    while line and not line.startswith("SHOWN"):
        seen.append(line := process.stdout.readline())
    children = psutil.Process(process.pid).children(recursive=True) if process.poll() is None else []
    if how == "interrupt":
        process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=240)
    assert process.returncode != 0
    assert ("ValueError: mine" if how == "exception" else "KeyboardInterrupt") in output, (seen, output)
    assert_gone(children)


def test_the_loops_to_copy(tmp_path: Path) -> None:
    """The others of docs/loops, two steps each, in one process."""
    body = f"""
    sys.path.insert(0, {str(LOOPS)!r})
    import evaluate, expert_iteration, replay_buffer, two_updates
    for loop in (expert_iteration, two_updates, replay_buffer):
        await loop.main("toy.toml", 2)
        shown(loop=loop.__name__)
    await evaluate.main("toy.toml")
    """
    assert len(finished(tmp_path, body)) == 3
    folders = sorted(tmp_path.glob("run*"))
    assert len(folders) == 4
    assert [folder.name for folder in folders if "nothing lost" not in audited(folder)] == []


def test_the_loop_of_distillation(tmp_path: Path) -> None:
    """Rollouts of several turns, and a teacher with a hint."""
    toml = 'base = "opsd_calc_llama"\n[cold_start]\nsteps = 1\n[eval]\nsize = 4\n[rollout]\ngroups_per_step = 8\n'
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "hinted.toml").write_text(f'{toml}[job]\ndump_folder = "{tmp_path / "hinted"}"\n')
    body = f"""
    sys.path.insert(0, {str(LOOPS)!r})
    import distillation
    await distillation.main("hinted.toml", 2)
    """
    finished(tmp_path, body)
    assert len([line for line in lines(tmp_path / "hinted") if line["kind"] == "rl"]) == 2


def test_every_loop_is_short() -> None:
    for path in LOOPS.glob("*.py"):
        assert len(path.read_text().splitlines()) < 60
        assert importlib.util.spec_from_file_location(path.stem, path) is not None


def test_a_run_with_a_users_task_and_a_median_is_resumed_to_the_last_bit(runs: Runs, tmp_path: Path) -> None:
    """Two steps and two more are the four of one run, in 16 bits and with adapters."""
    keys = {
        "task__name": "own_squares:squares",
        "algorithm__advantage": "median",
        "eval__size": 16,
        "training__mixed_precision_param": "bfloat16",
        "generator__dtype": "bfloat16",
        "lora__rank": 8,
        "lr_scheduler__warmup_steps": 0,  # the rate does not depend on the number of steps
        "lr_scheduler__decay_ratio": 0.0,
    }
    whole = runs.finish(tmp_path / "whole", training__steps=4, checkpoint__interval=2, **keys)
    runs.finish(tmp_path / "parts", training__steps=2, checkpoint__interval=2, **keys)
    parts = runs.finish(tmp_path / "parts", training__steps=4, checkpoint__interval=2, **keys)
    assert losses(parts) == losses(whole)
    assert sampled(parts) == sampled(whole)
    assert all("*" in str(line["prompt"]) for line in lines(parts.folder, "rollouts.jsonl"))


def test_a_filter_of_games_in_16_bits_with_a_lag(runs: Runs, tmp_path: Path) -> None:
    """Rollouts of several turns: two of five groups are refused, and the run that is resumed loses none."""
    keys = {
        "task__filter": "own_squares:kept",
        "training__mixed_precision_param": "bfloat16",
        "generator__dtype": "bfloat16",
        "rollout__max_staleness_steps": 2,
        "environment__lockstep": False,
        "checkpoint__interval": 1,
        "cold_start__steps": 2,
        "eval__size": 4,
    }
    runs.finish(tmp_path / "run", "calc_llama", training__steps=2, **keys)
    run = runs.finish(tmp_path / "run", "calc_llama", training__steps=4, **keys)
    ledger = (run.folder / "ledger.jsonl").read_text().splitlines()
    refused = [json.loads(line.partition(" ")[2])["prompt"] for line in ledger if '"refused"' in line]
    assert refused
    assert all(id % 5 < 2 for id in refused)
    assert any(line["dropped/groups"] for line in lines(run.folder) if line["kind"] == "rl")
    assert "nothing lost" in audited(run.folder)


def test_own_parts_of_the_algorithm_on_two_meshes(runs: Runs, tmp_path: Path) -> None:
    """Games of several turns: FSDP with tensor parallelism makes the losses of one rank."""
    keys: dict[str, Any] = {
        "algorithm__advantage": "own_squares:over_mean",
        "algorithm__loss": "own_squares:soft_clip",
        "algorithm__normalize": "none",
        "cold_start__steps": 2,
        "eval__size": 4,
        "training__steps": 2,
    }
    one = runs.finish(tmp_path / "one", "calc_llama", parallelism__data_parallel_shard_degree=1, **keys)
    degrees: dict[str, Any] = {"parallelism__data_parallel_shard_degree": 2, "parallelism__tensor_parallel_degree": 2}
    two = runs.finish(tmp_path / "two", "calc_llama", **degrees, **keys)
    first, other = (next(line for line in lines(run.folder) if line["kind"] == "rl") for run in (one, two))
    for key in ("loss", "grad_norm", "own/moved"):
        assert other[key] == pytest.approx(first[key], rel=1e-3, abs=1e-6), key


def test_each_call_may_wait(tmp_path: Path) -> None:
    """Without asyncio; a prompt of the user's; and a filter, which the loop must apply itself."""
    body = """
    def refused(call):
        try:
            with call:
                pass
        except Exception as error:
            shown(text=f"{type(error).__name__}: {error}")

    refused(titan_rl.start("toy.toml", {"task.filter": "operator:not_"}))
    with titan_rl.start("toy.toml", quiet=True) as run:
        for _ in range(2):
            prompts = [*run.prompts(3), run.prompt("11+22=", "330", source="mine")]
            groups = run.judge(run.sample(prompts))
            stats = run.train(groups)
            run.sync()
            run.log(groups=len(groups))
        shown(step=run.step, ids=[p.id for p in prompts], own=prompts[-1].text, row=prompts[-1].row)
        shown(exported=len([*run.export().glob("*.safetensors")]), **run.evaluate())

    async def inside():
        refused(titan_rl.start("toy.toml"))

    asyncio.run(inside())
    """
    filtered, last, exported, inside = finished(tmp_path, body, blocking=True)
    assert "task.filter: expected" in filtered["text"]
    assert last == {"step": 2, "ids": [4, 5, 6, 7], "own": "11+22=", "row": {"source": "mine"}}
    assert exported["exported"] > 0
    assert inside["text"].startswith("RuntimeError: expected `async with titan_rl.start(...)`")
    assert [line["own/groups"] for line in lines(tmp_path / "run") if line["kind"] == "rl"] == [4, 4]


@pytest.mark.parametrize("blocking", [False, True])
def test_the_example_of_a_loop_runs(blocking: bool, tmp_path: Path) -> None:
    if blocking:
        (example,) = doctest.DocTestParser().get_examples(str(api.BlockingRun.__doc__))
        code = example.source
    else:
        _, _, text = str(api.__doc__).partition("import titan_rl\n\n")
        code = textwrap.dedent("\n".join(line for line in text.splitlines() if not line or line.startswith("    ")))
    toy = code.replace('"grpo_llama"', '"toy.toml"').replace("31", "3").replace("prompts(8)", "prompts(4)")
    finished(tmp_path, toy, blocking=blocking)
    assert [line["step"] for line in lines(tmp_path / "run") if line["kind"] == "rl"] == [1, 2]


def test_the_examples_of_the_verbs_run_in_a_notebook(tmp_path: Path) -> None:
    """A cell that is interrupted leaves a run that can be closed."""
    write_config(tmp_path)
    methods = {name: str(f.__doc__) for name, f in vars(api.Run).items() if callable(f) and not name.startswith("_")}
    examples = {name: doctest.DocTestParser().get_examples(doc) for name, doc in methods.items()}
    assert all(examples.values()), "each verb has an example"
    begin = 'import psutil, titan_rl\nrun = await titan_rl.start("toy.toml", quiet=True)'
    forever = "while True:\n    await run.sample(run.prompts(4))"
    children = "[child.pid for child in psutil.Process().children(recursive=True)]"
    wants = {begin: "", **{e.source: e.want for name in examples for e in examples[name] if name != "close"}}
    wants |= {children: "[...]\n", forever: "", examples["close"][0].source: ""}
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in wants])
    client = nbclient.NotebookClient(
        book,
        timeout_func=lambda cell: 5 if cell.source == forever else 120,
        interrupt_on_timeout=True,
        allow_errors=True,
        resources={"metadata": {"path": str(tmp_path)}},
    )
    client.execute(env=environment())
    pids: list[int] = []
    for cell, want in zip(book.cells, wants.values(), strict=True):
        shown = "".join(out.get("text", "") or out.get("data", {}).get("text/plain", "") + "\n" for out in cell.outputs)
        failed = [out.ename for out in cell.outputs if out.output_type == "error"]
        assert failed == (["CancelledError"] if cell.source == forever else []), cell  # as IPython ends an async cell
        if want:
            assert doctest.OutputChecker().check_output(want, shown, doctest.ELLIPSIS), (cell.source, shown)
        pids = json.loads(shown) if cell.source == children else pids
    assert pids
    assert_gone([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)])
    assert "nothing lost" in audited(tmp_path / "run")
