"""Rates of a finished run: what its files were written with is found again."""

import json
from pathlib import Path
from typing import Any

import pytest

from titan_rl.config.toml import find, load, to_toml
from titan_rl.tools.plan.__main__ import main
from titan_rl.tools.plan.measured import Stretched, engine_rates, rates_of

STEP, TOKEN, READ, PLACE, UPDATE, TOOL = 2e-3, 1e-5, 4e-6, 3e-5, 0.02, 0.3  # seconds
STEPS, SAMPLES, PROMPT, ANSWER = 6, 4, 7, 5
PLACES = 32  # 7 of the shared prompt, and 4 of each answer, whose last token predicts nothing: a multiple of 16
SECOND = 10**6  # microseconds of the timeline


def event(name: str, at: float, seconds: float, pid: int, **args: int) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": 1,
        "ts": int(at * SECOND),
        "dur": seconds * SECOND,
        "args": args,
    }


@pytest.fixture
def run(tmp_path: Path) -> Path:
    config = load(find("grpo_llama"), [("parallelism.data_parallel_shard_degree", "1"), ("rollout.group_size", "4")])
    (tmp_path / "config.toml").write_text(to_toml(config))
    names = {1: "generator0[tp=0]", 2: "trainer[dp=0 tp=0]"}
    events: list[dict[str, Any]] = [
        {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}} for pid, name in names.items()
    ]
    metrics, rollouts = list[dict[str, Any]](), list[dict[str, Any]]()
    for step in range(1, STEPS + 1):
        at, places = float(step), PLACES * PLACE
        for count in (1, 2):
            tokens = 3 * count + step
            read = 20 * (step % 3)
            seconds = STEP * count + TOKEN * tokens + READ * read
            events.append(event("sampling", at, seconds, 1, steps=count, tokens=tokens, read=read))
        events += [event("step", at, places + UPDATE, 2), event("forward", at, places / 3, 2)]
        events.append(event("backward", at, 2 * places / 3, 2))
        for turn in range(3):
            began = at + turn * (0.1 + TOOL)
            points = (("b", began), ("e", began + 0.1))
            head = {"name": "turn", "pid": 3, "id": step}
            events += [head | {"ph": point, "ts": seconds * SECOND} for point, seconds in points]
        times = {"time": at + 1, "time/step": 1.0, "time/wait": 0.1, "overlap": 0.0, "tokens/shared": 0.0}
        sync = {"sync/publish_seconds": 0.01, "sync/read_seconds": 0.02, "sync/pause_seconds": 0.03}
        metrics.append({"kind": "rl", "step": step, **times, **sync, "engine/prefix_hit_rate": 1.0})
        sample = {"prompt": "", "answer": "", "text": "", "finish": "stop", "reward": 1.0, "advantage": 0.0}
        sample |= {"tokens": [1] * (PROMPT + ANSWER), "mask": [0] * PROMPT + [1] * ANSWER, "versions": [0] * ANSWER}
        for number in range(SAMPLES):
            head = {"kind": "rl", "step": step, "prompt_id": 0, "group": 0, "sample": number}
            rollouts.append({**head, **sample, "logprobs": [0.0] * (PROMPT + ANSWER)})
    (tmp_path / "timeline.json").write_text("[\n" + ",\n".join(map(json.dumps, events)) + "\n]\n")
    for name, lines in (("metrics.jsonl", metrics), ("rollouts.jsonl", rollouts)):
        text = "".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines)
        (tmp_path / name).write_text(text)
    return tmp_path


def test_rates_of_a_run_are_found(run: Path) -> None:
    _, rates, work = rates_of(run)
    assert rates.engine.step_s == pytest.approx(STEP, rel=1e-3)
    assert rates.engine.sequence_s == pytest.approx(TOKEN, rel=1e-3)
    assert rates.engine.prefill_s == pytest.approx(READ, rel=1e-3)
    assert rates.trainer.place_s == pytest.approx(PLACE, rel=1e-3)
    assert rates.trainer.update_s == pytest.approx(UPDATE, rel=1e-3)
    assert rates.environment.mean == pytest.approx(TOOL)
    assert (rates.sync.publish_s, rates.sync.fetch_s, rates.sync.switch_s) == pytest.approx((0.01, 0.02, 0.03))
    assert (work.prompt.mean, work.answer.mean, work.turns.mean) == (PROMPT, ANSWER, 1)


def test_few_read_tokens_take_a_trainers_forward_pass() -> None:
    counts = [(1, 40, 8), (2, 90, 0), (3, 70, 8)]
    spans = [
        Stretched("generator0", "sampling", 0.0, 1.5 * (STEP * steps + TOKEN * tokens + PLACE * read), args)
        for steps, tokens, read in counts
        for args in [{"steps": steps, "tokens": tokens, "read": read}]
    ]
    rates = engine_rates(spans, slow=1.5, cores=1.0, forward_s=PLACE, block=32)
    found = (rates.step_s, rates.sequence_s, rates.prefill_s, rates.block)
    assert found == pytest.approx((STEP, TOKEN, PLACE, 32))


def test_a_folder_without_a_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--from", str(tmp_path)]) == 2
    assert "--from: expected a run's folder" in capsys.readouterr().err
