"""bench_peer.py's refusals, its table, and how it reads both loops' records."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from bench_peer import tables

from bench.peer_faults import Outcome
from bench.peer_lines import lines_of_code
from bench.peer_runs import ATTENTION, LOOP_FILE, OURS, PEER, our_keys, peer_steps
from bench.peer_shapes import SHAPES
from titan_rl.config.toml import find, load
from titan_rl.text import tokenizer

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "bench_peer.py"


def call(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, timeout=300)


def checkout(folder: Path, *files: Path | str) -> Path:
    for file in files:
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_text("")
    return folder


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        (None, "expected --torchtitan PATH, a checkout of TorchTitan, found none"),
        ([], "no checkout of TorchTitan with its RL loop"),
        ([LOOP_FILE], "rl-on-cpu is not applied"),
    ],
)
def test_a_checkout_that_cannot_run_is_refused_in_one_line(
    tmp_path: Path, files: list[Path] | None, reason: str
) -> None:
    arguments = [] if files is None else ["--torchtitan", checkout(tmp_path, *files)]
    done = call(*arguments, "--csv", tmp_path / "peer.csv")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert reason in line
    assert not (tmp_path / "peer.csv").exists()


def test_a_missing_need_is_named(tmp_path: Path) -> None:
    (checkout(tmp_path, LOOP_FILE, ATTENTION) / "renderers.py").write_text("raise ImportError('no renderers here')")
    done = call("--torchtitan", tmp_path, "--csv", tmp_path / "peer.csv")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line.endswith("cannot be imported: ImportError: no renderers here")


def row(way: str, measure: str, value: float, note: str = "", commit: str = "b") -> dict[str, str]:
    return {"shape": "toy", "way": way, "measure": measure, "value": str(value), "note": note, "commit": commit}


def test_the_table_has_medians_ranges_and_ratios_of_the_last_commit() -> None:
    rows = [row(OURS, "step, s", 9, commit="a")]
    rows += [row(OURS, "step, s", value) for value in (1.0, 2.0)] + [
        row(PEER, "step, s", value) for value in (4.0, 5.0)
    ]
    rows += [row(OURS, "lines of code", 10, "2 files"), row(PEER, "lines of code", 25, "3 files")]
    rows += [row(PEER, "killed trainer to next step, s", 30, "same command again")]
    assert tables(rows) == {
        "toy": [
            ("step, s", "1.5 (1 to 2)", "4.5 (4 to 5)", "3.00"),
            ("lines of code", "10; 2 files", "25; 3 files", "2.50"),
            ("killed trainer to next step, s", "", "30; same command again", ""),
        ]
    }


def test_the_table_of_a_csv_is_printed_without_a_checkout(tmp_path: Path) -> None:
    done = call("--table", "--csv", tmp_path / "none.csv")
    assert (done.returncode, done.stdout) == (0, "")


def test_transfers_of_weights_are_not_waits_for_rollouts(tmp_path: Path) -> None:
    spans = [
        ("trainer_push_model_state_dict", 30.0),
        ("generator_pull_model_state_dict", 70.0),
        ("wait_for_training_batch", 500.0),
        ("forward_backward", 300.0),
        ("optim_step", 100.0),
        ("train_step", 950.0),
    ]
    lines = [
        {"log_type_name": f"{span}_end", "value": value, "step": 7, "time_us": 10**15 + place}
        for place, (span, value) in enumerate(spans)
    ]
    (tmp_path / "logs").mkdir()
    text = "".join(json.dumps(line) + "\n" for line in lines) + '{"log_type_name": "half'
    (tmp_path / "logs" / "rl_controller.global_rank_0.jsonl").write_text(text)
    (step,) = peer_steps(tmp_path)
    assert (step.step, step.sync, step.rollouts, step.training) == (7, 0.1, pytest.approx(0.4), 0.4)


def test_only_code_counts_as_code() -> None:
    lines = ['"""Docs', 'of two lines."""', "", "# why", 'x = """text', 'of two lines"""', "def f() -> None:"]
    lines += ['    "Docs."', "    g(", "        x,  # why", "    )"]
    assert lines_of_code("\n".join(lines)) == 6


def test_both_loops_compute_the_same_shape() -> None:
    for name, shape in SHAPES.items():
        question = next(shape.questions(0))
        assert set(question) <= set(tokenizer.CHARACTERS)
        assert shape.prompt == 1 + len(question)
        config = load(find("grpo_llama"), [(key, str(value)) for key, value in our_keys(name, Path(), 3, 0).items()])
        assert config.rollout.groups_per_step * config.rollout.group_size == shape.samples
        assert (config.model.dim, config.model.enable_weight_tying) == (shape.model.dim, shape.tied)
        assert (config.training.steps, config.checkpoint.enable) == (3, False)


def test_an_outcome_in_words() -> None:
    own = Outcome(finished=True, commands=1, hung=False, seconds=1, again=1, repeated=0, lost=0, left=0)
    assert own.text() == "by itself: 1 step again, 0 prompts repeated, 0 lost"
    peer = Outcome(finished=True, commands=2, hung=True, seconds=1, again=2, repeated=128, lost=0, left=3)
    assert peer.text() == "hangs, same command again: 2 steps again, 128 prompts repeated, 0 lost, processes left: 3"
    ended = Outcome(finished=False, commands=2, hung=False, seconds=1, again=0, repeated=0, lost=0, left=0)
    assert ended.text() == "the run does not finish"
