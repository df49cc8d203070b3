"""The dump folder's files and their contents: a resumed or torn run never counts a step twice."""

import json
import math
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from titan_rl.config import toml as config_file
from titan_rl.config.sections import Config, MetricsSection
from titan_rl.record.lines import superseded
from titan_rl.record.run_log import RunLog, open_after
from titan_rl.record.summary import summarize
from titan_rl.wire.types import RATIO_EDGES, Branch, Completion, Group, Prompt, Rollout, Turn

METRICS = {"reward/mean": 0.5, "loss": 0.1, "tokens/trained": 4.0, "logprob_gap/mean": 1e-7, "logprob_gap/max": 2e-7}

HISTOGRAMS = {"ratio/histogram": [0.0, 1.0, 0.0, 0.0, 2.0, 5.0, 3.0, 0.0, 0.0, 0.0, 1.0]}


def group(text: str = "640", logprob: float = -0.25) -> Group:
    prompt = Prompt(7, "12+34=", [1, 4], "640")
    completion = Completion(tokens=[9, 2], logprobs=[logprob, -0.5], versions=[0, 0], finish="stop")
    rollout = Rollout([Branch([Turn([1, 4], completion)])], text=text, reward=1.0, penalty=0.125, advantage=0.5)
    return Group(prompt, [rollout, rollout])


def read(path: Path) -> list[dict[str, Any]]:
    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def steps(path: Path) -> list[tuple[str, int]]:
    return [(line["kind"], line["step"]) for line in read(path)]


def curve(folder: Path, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(folder))
    events.Reload()
    return [(point.step, point.value) for point in events.Scalars(tag)]


def train(log: RunLog, first: int, last: int, reward: float = 0.5) -> None:
    for step in range(first, last + 1):
        log.step(step, {**METRICS, "reward/mean": reward}, HISTOGRAMS, [group()])


def test_a_run_leaves_its_config_metrics_rollouts_and_curves(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config()) as log:
        log.startup(0, 3.5)
        log.cold_start(1, {"loss": 2.0})
        log.eval(0, {"eval/score": 0.25}, seconds=1.5)
        log.step(1, METRICS, HISTOGRAMS, [group(), group()])
        log.eval(1, {"eval/score": 0.75}, seconds=1.5)
    assert config_file.load(tmp_path / "config.toml") == Config()
    assert (tmp_path / "config.toml").read_text().startswith("# tiny: ")
    assert steps(tmp_path / "metrics.jsonl") == [
        ("startup", 0), ("cold_start", 1), ("eval", 0), ("rl", 1), ("eval", 1)
    ]  # fmt: skip
    rl = read(tmp_path / "metrics.jsonl")[3]
    assert rl.items() >= {**METRICS, **HISTOGRAMS}.items()
    assert rl["time"] == pytest.approx(time.time(), abs=60)
    rollouts = read(tmp_path / "rollouts.jsonl")
    assert [(r["group"], r["sample"]) for r in rollouts] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert rollouts[0] == {
        "kind": "rl",
        "step": 1,
        "prompt_id": 7,
        "group": 0,
        "sample": 0,
        "prompt": "12+34=",
        "answer": "640",
        "text": "640",
        "finish": "stop",
        "reward": 1.0,
        "penalty": 0.125,
        "advantage": 0.5,
        "tokens": [1, 4, 9, 2],
        "mask": [0, 0, 1, 1],
        "logprobs": [0.0, 0.0, -0.25, -0.5],
        "versions": [0, 0],
    }
    assert curve(tmp_path / "tb", "reward/mean") == [(1, 0.5)]
    assert curve(tmp_path / "tb", "eval/score") == [(0, 0.25), (1, 0.75)]
    assert curve(tmp_path / "tb" / "cold_start", "cold_start/loss") == [(1, 2.0)]


def test_a_histogram_is_one_in_tensorboard_too(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config()) as log:
        train(log, 1, 2)
    events = EventAccumulator(str(tmp_path / "tb"), size_guidance={"histograms": 0})
    events.Reload()
    first, second = events.Histograms("ratio/histogram")
    assert (first.step, second.step) == (1, 2)
    shown = first.histogram_value
    assert (shown.min, shown.num, list(shown.bucket)) == (0.0, 12.0, HISTOGRAMS["ratio/histogram"])
    assert list(shown.bucket_limit) == [*RATIO_EDGES[1:-1], 4.0]  # the last has no end: shown up to twice its start
    assert "ratio/histogram" not in events.Tags()["scalars"]


def test_a_step_on_given_data_is_a_line_and_a_point_but_no_rollouts(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config()) as log:
        log.startup(0, 1.0)
        for step in (1, 2, 3):
            log.fit(step, {"loss": 1 / step, "rewards/margins": 0.25})
    with RunLog(tmp_path, "tiny", Config(), resume_step=2) as log:
        log.fit(3, {"loss": 9.0, "rewards/margins": 0.25})
    assert steps(tmp_path / "metrics.jsonl") == [("startup", 0), ("fit", 1), ("fit", 2), ("fit", 3)]
    assert steps(tmp_path / "metrics.superseded.jsonl") == [("fit", 3)]
    assert curve(tmp_path / "tb", "loss") == [(1, 1.0), (2, 0.5), (3, 9.0)]
    assert (tmp_path / "rollouts.jsonl").read_text() == ""


def test_every_step_is_on_disk_before_the_next_begins(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config()) as log:
        for step in (1, 2):
            train(log, step, step)
            assert steps(tmp_path / "metrics.jsonl")[-1] == ("rl", step)
            assert steps(tmp_path / "rollouts.jsonl")[-1] == ("rl", step)
            assert curve(tmp_path / "tb", "loss")[-1][0] == step


def test_a_resumed_run_moves_the_steps_that_it_makes_again(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config()) as log:
        log.startup(0, 1.0)
        log.cold_start(9, {"loss": 2.0})  # the cold start's steps are its own count, not RL's
        train(log, 1, 5, reward=0.1)
        log.eval(5, {"eval/score": 0.5}, seconds=1.0)
    with RunLog(tmp_path, "tiny", Config(), resume_step=3) as log:
        log.startup(3, 1.0)
        log.eval(3, {"eval/score": 0.5}, seconds=1.0)  # after the checkpoint: no reason to purge the step that made it
        train(log, 4, 6, reward=0.2)
    assert steps(tmp_path / "metrics.jsonl") == [
        ("startup", 0), ("cold_start", 9), ("rl", 1), ("rl", 2), ("rl", 3), ("startup", 3),
        ("eval", 3), ("rl", 4), ("rl", 5), ("rl", 6),
    ]  # fmt: skip
    assert steps(tmp_path / "metrics.superseded.jsonl") == [("rl", 4), ("rl", 5), ("eval", 5)]
    assert [step for _, step in steps(tmp_path / "rollouts.jsonl")] == [s for s in range(1, 7) for _ in range(2)]
    assert [step for _, step in steps(tmp_path / "rollouts.superseded.jsonl")] == [4, 4, 5, 5]
    assert curve(tmp_path / "tb", "reward/mean") == [
        (step, pytest.approx(0.1 if step <= 3 else 0.2)) for step in range(1, 7)
    ]
    assert curve(tmp_path / "tb" / "cold_start", "cold_start/loss") == [(9, 2.0)]


def test_a_run_resumed_inside_its_cold_start_keeps_the_supervised_steps_before(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config()) as log:
        log.startup(0, 1.0)
        for step in range(4):
            log.cold_start(step, {"loss": 2.0 - step})
    with RunLog(tmp_path, "tiny", Config(), resume_step=0, cold_start_step=1) as log:
        log.startup(0, 1.0)
        for step in (2, 3):
            log.cold_start(step, {"loss": 5.0})
    assert [line for line in steps(tmp_path / "metrics.jsonl") if line[0] == "cold_start"] == [
        ("cold_start", step) for step in range(4)
    ]
    assert steps(tmp_path / "metrics.superseded.jsonl") == [("cold_start", 2), ("cold_start", 3)]
    assert curve(tmp_path / "tb" / "cold_start", "cold_start/loss") == [(0, 2.0), (1, 1.0), (2, 5.0), (3, 5.0)]


def test_a_run_without_a_checkpoint_begins_anew(tmp_path: Path) -> None:
    for reward in (0.1, 0.2):
        with RunLog(tmp_path, "tiny", Config()) as log:
            train(log, 1, 2, reward)
    assert steps(tmp_path / "metrics.jsonl") == steps(tmp_path / "metrics.superseded.jsonl") == [("rl", 1), ("rl", 2)]
    assert curve(tmp_path / "tb", "reward/mean") == [(1, pytest.approx(0.2)), (2, pytest.approx(0.2))]


@settings(deadline=None)  # it waits for the disk
@given(
    last=st.integers(0, 12),
    resume=st.integers(-1, 14),
    cut=st.integers(0, 40),
)
def test_no_byte_is_lost_and_nothing_later_stays(
    tmp_path_factory: pytest.TempPathFactory, last: int, resume: int, cut: int
) -> None:
    path = tmp_path_factory.mktemp("log") / "metrics.jsonl"
    whole = b"".join(b'{"kind": "rl", "step": %d, "loss": 0.5}\n' % step for step in range(1, last + 1))
    torn = whole[: max(0, len(whole) - cut)]
    path.write_bytes(torn)
    open_after(path, {"rl": resume}).close()
    superseded = path.with_name("metrics.superseded.jsonl")
    moved = superseded.read_bytes() if superseded.exists() else b""
    kept = path.read_bytes()
    assert (kept + moved).rstrip(b"\n") == torn.rstrip(b"\n")
    assert steps(path) == [("rl", step) for step in range(1, min(torn.count(b"\n"), resume) + 1)]


def test_lines_of_an_unknown_kind_stay_with_the_steps_around_them(tmp_path: Path) -> None:
    """A run resumes with them, and its summary leaves them out."""
    path = tmp_path / "metrics.jsonl"
    with RunLog(tmp_path, "tiny", Config()) as log:
        train(log, 1, 3)
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:1], b'{"kind": "weird", "step": 1, "x": 1}\n', *lines[1:]]))
    with RunLog(tmp_path, "tiny", Config(), resume_step=2) as log:
        train(log, 3, 3)
    assert steps(path) == [("rl", 1), ("weird", 1), ("rl", 2), ("rl", 3)]
    assert summarize(tmp_path, "tiny", Config())["steps"] == 3


@pytest.mark.parametrize("joined", [False, True])
@pytest.mark.parametrize("name", ["metrics.jsonl", "rollouts.jsonl"])
def test_a_damaged_line_moves_aside_alone(tmp_path: Path, name: str, joined: bool) -> None:
    with RunLog(tmp_path, "tiny", Config()) as log:
        train(log, 1, 4)
    path, said = tmp_path / name, list[str]()
    lines = path.read_bytes().splitlines(keepends=True)
    lines[1] = lines[1][:-1] + lines[1] if joined else b"\x02" + lines[1][1:]
    path.write_bytes(b"".join(lines))
    RunLog(tmp_path, "tiny", Config(), resume_step=4, warn=said.append).close()
    assert path.read_bytes().splitlines(keepends=True) == [lines[0], *lines[2:]]
    assert superseded(path).read_bytes() == lines[1]
    assert said == [f"{path}, line 2: damaged, and moved to {superseded(path).name}; all other lines stay"]


def test_what_json_cannot_hold_is_null_and_odd_text_survives(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config()) as log:
        log.step(1, {**METRICS, "loss": math.nan, "grad_norm": math.inf}, {}, [group("\x1b[31m\n\ud800é", -math.inf)])
    assert read(tmp_path / "metrics.jsonl")[0].items() >= {"loss": None, "grad_norm": None}.items()
    rollout = read(tmp_path / "rollouts.jsonl")[0]
    assert (rollout["text"], rollout["logprobs"][2]) == ("\x1b[31m\n\ud800é", None)


def test_no_events_where_tensorboard_is_off(tmp_path: Path) -> None:
    with RunLog(tmp_path, "tiny", Config(metrics=MetricsSection(trackers=[]))) as log:
        train(log, 1, 1)
    assert not (tmp_path / "tb").exists()


def test_the_log_needs_no_torch() -> None:
    code = (
        "import sys, titan_rl.record.run_log, titan_rl.record.metrics, titan_rl.record.terminal; "
        "sys.exit('torch' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[3])
