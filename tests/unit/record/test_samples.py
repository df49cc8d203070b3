"""Samples are read back as the run wrote them, step by step."""

import json
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.record.run_log import RunLog
from titan_rl.tools.inspect.samples import Samples
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Turn


def write(folder: Path, steps: int, *, groups: int = 2) -> None:
    with RunLog(folder, "tiny", Config()) as log:
        for step in range(1, steps + 1):
            log.step(step, {}, {}, [group(step * 10 + index) for index in range(groups)])


def group(prompt_id: int) -> Group:
    completion = Completion(tokens=[9, 2], logprobs=[-0.25, -0.5], versions=[1, 0], finish="stop")
    rollout = Rollout([Branch([Turn([1, 4], completion)])], text=f"of {prompt_id}", reward=1.0, advantage=0.5)
    unrewarded = Rollout([Branch([Turn([1, 4], completion)])], text="", reward=float("nan"), unrewarded="it hung")
    return Group(Prompt(prompt_id, "12+34=", [1, 4], "640"), [rollout, unrewarded])


def test_reads_one_step_group_by_group(tmp_path: Path) -> None:
    write(tmp_path, 3)
    samples = Samples(tmp_path)
    assert samples.steps == [1, 2, 3]
    (first, failed), (other, _) = samples.groups(3)
    assert (first.prompt_id, other.prompt_id, first.text) == (30, 31, "of 30")
    assert (first.reward, failed.reward, failed.error) == (1.0, None, "it hung")
    assert (first.sampled, first.age, first.truncated) == (2, 2, False)
    assert samples.of_step(4) == []
    assert [sample.prompt_id for sample in samples] == [10, 10, 11, 11, 20, 20, 21, 21, 30, 30, 31, 31]


def test_leaves_out_damaged_lines_and_counts_them(tmp_path: Path) -> None:
    write(tmp_path, 2)
    path = tmp_path / "rollouts.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    old = json.loads(lines[0])
    del old["penalty"]  # an older version's line
    path.write_bytes(json.dumps(old).encode() + b"\n" + b"garbage\n" + b"".join(lines[1:]) + b'{"kind":"rl","st')
    samples = Samples(tmp_path)
    assert [len(samples.of_step(step)) for step in samples.steps] == [4, 4]
    assert (samples.of_step(1)[0].penalty, samples.damaged) == (0.0, 1)
