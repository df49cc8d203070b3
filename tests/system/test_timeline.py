"""The timeline that a real run leaves."""

import json
import signal
import time
from collections import defaultdict
from itertools import pairwise

import pytest

from support.running import Run, Runs
from support.traces import Event, lanes, overlaps, read

TITAN = {"gc_collect", "checkpoint_save", "OptimizersContainer.Config.build", "CheckpointManager.Config.build"}
OURS = {"step", "forward", "backward", "reduce", "optimizer", "scores", "publish", "save"}
EXPECTED = {
    ("controller", "main"): {"step", "generate", "judge", "train", "sync", "eval", "save"},
    ("controller", "publish"): {"publish"},
    ("controller", "pull"): {"pull"},
    ("trainer[dp=0 tp=0]", "main"): OURS | TITAN,
    ("generator0[tp=0]", "main"): {"sampling", "switch", "write", "verify"},
    ("generator0[tp=0]", "weights"): {"read"},
}


@pytest.fixture(scope="module")
def run(runs: Runs, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runs.finish(tmp_path_factory.mktemp("timeline") / "run")


def test_a_run_shows_who_did_what(run: Run) -> None:
    found = lanes(json.loads((run.folder / "timeline.json").read_text()))
    for lane, names in EXPECTED.items():
        assert {e["name"] for e in found[lane]} == names
    assert {e["name"] for e in found["trainer[dp=1 tp=0]", "main"]} == EXPECTED["trainer[dp=0 tp=0]", "main"]
    assert all(not overlaps(spans) for spans in found.values())


def test_a_run_s_spans_add_up_to_its_metrics(run: Run) -> None:
    found = lanes(read(run.folder / "timeline.json"))
    metrics = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    for before, line in pairwise(metrics):
        for part in ("generate", "judge", "train", "sync", "eval", "save") if line["kind"] == "rl" else ():
            ends = [(e["ts"] + e["dur"], e) for e in found["controller", "main"] if e["name"] == part]
            seconds = sum(e["dur"] for end, e in ends if before["time"] < end / 1e6 <= line["time"]) / 1e6
            assert seconds == pytest.approx(line.get(f"time/{part}", 0.0), abs=0.05)


def test_a_group_is_followed_from_its_admission_to_the_step_that_takes_it(run: Run) -> None:
    events = [e for e in read(run.folder / "timeline.json") if e.get("cat") == "groups"]
    groups: defaultdict[int, dict[tuple[str, str], Event]] = defaultdict(dict)
    for event in events:
        groups[event["id"]][event["name"], event["ph"]] = event
    took = {r["prompt_id"]: r["step"] for r in run.lines("rollouts.jsonl")}
    assert {id: group["group", "b"]["args"]["step"] for id, group in groups.items()} == took
    life = [("group", "b"), ("sample", "b"), ("sample", "e"), ("judge", "b"), ("judge", "e"), ("group", "e")]
    for group in groups.values():
        times = [group[point]["ts"] for point in life]
        assert times == sorted(times)


def test_sampling_has_all_tokens_and_a_trainer_s_step_all_its_parts(run: Run) -> None:
    found = lanes(read(run.folder / "timeline.json"))
    sampled = sum(len(rollout["versions"]) for rollout in run.lines("rollouts.jsonl"))
    sampling = [e for e in found["generator0[tp=0]", "main"] if e["name"] == "sampling"]
    assert sum(e["args"]["tokens"] for e in sampling) > sampled  # evaluations too
    steps = [e for e in found["trainer[dp=0 tp=0]", "main"] if e["name"] == "step"]
    assert [e["args"]["step"] for e in steps] == [*range(1, 9), *range(1, 5)]  # the cold start's, then RL's
    for step in steps:
        inside = [
            e
            for e in found["trainer[dp=0 tp=0]", "main"]
            if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] and e is not step
        ]
        assert [e["name"] for e in inside if e["name"] not in ("forward", "backward")] == ["reduce", "optimizer"]
        assert sum(e["dur"] for e in inside) > 0.5 * step["dur"]


def test_a_killed_run_leaves_a_file_that_opens_beside_the_one_before(run: Run, runs: Runs) -> None:
    before, path = (run.folder / "timeline.json").read_bytes(), run.folder / "timeline.json"
    again = runs.start(run.folder, training__steps=100_000, algorithm__max_dead_steps=0)
    again.wait_for_step(6)
    deadline = time.monotonic() + 60
    while ("generator0[tp=0]", "main") not in lanes(read(path)):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    again.process.send_signal(signal.SIGKILL)
    again.finish()
    assert (run.folder / "timeline.1.json").read_bytes() == before
    assert not path.read_text().rstrip().endswith("]")
    assert {e["name"] for e in lanes(read(path))["generator0[tp=0]", "main"]} >= {"sampling", "switch"}
