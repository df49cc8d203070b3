"""The timeline that one small uninterrupted run leaves."""

import json
from collections import defaultdict
from itertools import pairwise

import pytest

from support.running import WHOLE, RunFiles
from support.traces import Event, lanes, overlaps, read

TITAN = {"gc_collect", "checkpoint_save", "OptimizersContainer.Config.build", "SummedCheckpoints.Config.build"}
OURS = {"step", "forward", "backward", "reduce", "optimizer", "scores", "publish", "save"}
EXPECTED = {
    ("controller", "main"): {"step", "generate", "judge", "train", "sync", "eval", "save"},
    ("controller", "publish"): {"publish"},
    ("controller", "pull"): {"pull"},
    ("trainer[dp=0 tp=0]", "main"): OURS | TITAN,
    ("generator0[tp=0]", "main"): {"sampling", "switch", "write", "verify"},
    ("generator0[tp=0]", "weights"): {"read"},
}


def test_a_run_shows_who_did_what(whole: RunFiles) -> None:
    found = lanes(json.loads((whole.folder / "timeline.json").read_text()))
    for lane, names in EXPECTED.items():
        assert {e["name"] for e in found[lane]} == names
    assert {e["name"] for e in found["trainer[dp=1 tp=0]", "main"]} == EXPECTED["trainer[dp=0 tp=0]", "main"]
    assert all(not overlaps(spans) for spans in found.values())


def test_a_run_s_spans_add_up_to_its_metrics(whole: RunFiles) -> None:
    found = lanes(read(whole.folder / "timeline.json"))
    metrics = [json.loads(line) for line in (whole.folder / "metrics.jsonl").read_text().splitlines()]
    for before, line in pairwise(metrics):
        for part in ("generate", "judge", "train", "sync", "eval", "save") if line["kind"] == "rl" else ():
            ends = [(e["ts"] + e["dur"], e) for e in found["controller", "main"] if e["name"] == part]
            seconds = sum(e["dur"] for end, e in ends if before["time"] < end / 1e6 <= line["time"]) / 1e6
            assert seconds == pytest.approx(line.get(f"time/{part}", 0.0), abs=0.05)


def test_a_group_is_followed_from_its_admission_to_the_step_that_takes_it(whole: RunFiles) -> None:
    events = [e for e in read(whole.folder / "timeline.json") if e.get("cat") == "groups"]
    groups: defaultdict[int, dict[tuple[str, str], Event]] = defaultdict(dict)
    for event in events:
        groups[event["id"]][event["name"], event["ph"]] = event
    took = {r["prompt_id"]: r["step"] for r in whole.lines("rollouts.jsonl")}
    assert {id: group["group", "b"]["args"]["step"] for id, group in groups.items()} == took
    life = [("group", "b"), ("sample", "b"), ("sample", "e"), ("judge", "b"), ("judge", "e"), ("group", "e")]
    for group in groups.values():
        times = [group[point]["ts"] for point in life]
        assert times == sorted(times)


def test_sampling_has_all_tokens_and_a_trainer_s_step_all_its_parts(whole: RunFiles) -> None:
    found = lanes(read(whole.folder / "timeline.json"))
    sampled = sum(len(rollout["versions"]) for rollout in whole.lines("rollouts.jsonl"))
    sampling = [e for e in found["generator0[tp=0]", "main"] if e["name"] == "sampling"]
    assert sum(e["args"]["tokens"] for e in sampling) > sampled  # evaluations too
    assert sum(e["args"]["read"] for e in sampling) > 0
    steps = [e for e in found["trainer[dp=0 tp=0]", "main"] if e["name"] == "step"]
    phases = WHOLE["cold_start__steps"], WHOLE["training__steps"]
    assert [e["args"]["step"] for e in steps] == [step for last in phases for step in range(1, last + 1)]
    for step in steps:
        inside = [
            e
            for e in found["trainer[dp=0 tp=0]", "main"]
            if step["ts"] <= e["ts"] and e["ts"] + e["dur"] <= step["ts"] + step["dur"] and e is not step
        ]
        assert [e["name"] for e in inside if e["name"] not in ("forward", "backward")] == ["reduce", "optimizer"]
        assert sum(e["dur"] for e in inside) > 0.5 * step["dur"]
