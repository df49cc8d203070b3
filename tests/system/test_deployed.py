"""Trained weights without a run: `python -m titan_rl eval` and `python -m titan_rl serve`."""

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.openai_server import serving
from support.running import Run, RunFiles
from titan_rl.config.toml import load
from titan_rl.tasks.task import load_task
from titan_rl.wire.seeds import derive


@pytest.fixture(scope="module")
def run(learnt: RunFiles) -> RunFiles:
    return learnt


def reported(run: RunFiles, step: int) -> dict[str, float]:
    """Return what the run measured after a step."""
    line = next(line for line in run.lines("metrics.jsonl") if line["step"] == step)
    return {name: value for name, value in line.items() if name.startswith("eval/")}


def evaluate(run: RunFiles, *argv: str) -> str:
    command = [sys.executable, "-m", "titan_rl", "eval", *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, cwd=run.folder.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout


def test_an_evaluation_gets_what_the_run_measured(run: RunFiles) -> None:
    """Every score of every set to the last bit: greedy and sampled, with intervals."""
    measured = reported(run, 4)
    assert {"eval/score", "eval/hard/avg@4", "eval/hard/pass@2", "eval/hard/failed"} <= measured.keys()
    found = json.loads(evaluate(run, str(run.folder), "--json"))["sets"]
    assert {name: value for each in found.values() for name, value in each["metrics"].items()} == measured
    lines = {line["set"]: line for line in run.lines("evaluations.jsonl", "eval") if line["step"] == 4}
    assert {name: found[name]["rewards"] for name in lines} == {name: line["rewards"] for name, line in lines.items()}


def test_a_checkpoint_is_evaluated_as_at_its_step(run: RunFiles) -> None:
    assert reported(run, 2)["eval/score"] != reported(run, 4)["eval/score"]
    out = evaluate(run, str(run.folder / "checkpoint" / "step-2"), "--set", "heldout")
    (row,) = (line.split() for line in out.splitlines() if line.startswith("heldout "))
    assert row[:3] == ["heldout", "eval/score", f"{reported(run, 2)['eval/score']:.4f}"]


def test_the_best_weights_are_those_of_the_highest_score(run: RunFiles) -> None:
    scores = {line["step"]: line["eval/score"] for line in run.lines("metrics.jsonl") if "eval/score" in line}
    scores |= {line["step"]: line["eval/score"] for line in run.lines("metrics.jsonl", "eval")}
    best = max(scores, key=lambda step: scores[step])
    (folder,) = (run.folder / "best").iterdir()
    assert folder.name == f"step-{best}"
    measured = json.loads((folder / "evaluation.json").read_text())
    assert (measured["step"], measured["value"]) == (best, scores[best])
    if best == 4:
        weights = "model-00001-of-00001.safetensors"
        assert (folder / weights).read_bytes() == (run.folder / "hf" / weights).read_bytes()


@pytest.fixture(scope="module")
def server(run: RunFiles, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Run, str, str]]:
    """Return a served process as a Run, its URL and its key."""
    with serving(tmp_path_factory.mktemp("serve"), str(run.folder / "hf")) as served:
        yield served


def ask(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=100) as answer:
        return json.load(answer)


def test_any_client_gets_the_answers_that_the_run_measured(run: RunFiles, server: tuple[Run, str, str]) -> None:
    """One batch of prompts, as lm-eval sends them: the same problems are right. A stop text ends an answer."""
    _, url, key = server
    config = load(run.folder / "config.toml")
    rows = load_task(config.task, seed=derive(config.debug.seed, "task"), eval_size=config.eval.size).heldout
    lines = run.lines("evaluations.jsonl", "eval")
    line = next(line for line in lines if (line["step"], line["set"]) == (4, "heldout"))
    body = {"model": "policy", "prompt": [row.prompt for row in rows], "max_tokens": 8, "temperature": 0}
    answers = [choice["text"] for choice in ask(f"{url}/completions", key, body)["choices"]]
    right = [float(answer == row.answer) for answer, row in zip(answers, rows, strict=True)]
    assert {str(i): [each] for i, each in enumerate(right)} == line["rewards"]
    body = {"prompt": rows[0].prompt, "temperature": 0, "stop": [answers[0][1]]}
    (choice,) = ask(f"{url}/completions", key, body)["choices"]
    assert (choice["text"], choice["finish_reason"]) == (answers[0].split(answers[0][1])[0], "stop")
    with pytest.raises(urllib.error.HTTPError, match="401"):
        ask(f"{url}/completions", "sk-wrong", body)


def test_prompts_are_scored_as_what_was_sampled(server: tuple[Run, str, str]) -> None:
    """As lm-eval's log-likelihood tasks ask: a greedy answer, read again, has its log-probs, and is the most likely."""
    _, url, key = server
    greedy = {"prompt": "12+34=", "temperature": 0, "max_tokens": 3}
    (said,) = ask(f"{url}/completions", key, {**greedy, "logprobs": 0, "return_token_ids": True})["choices"]
    body = {"prompt": f"12+34={said['text']}", "temperature": 0, "max_tokens": 0, "logprobs": 1, "echo": True}
    (choice,) = ask(f"{url}/completions", key, body)["choices"]
    count = len(said["text"])
    own, top = (choice["logprobs"][name][-count:] for name in ("token_logprobs", "top_logprobs"))
    assert own == pytest.approx(said["logprobs"]["token_logprobs"][:count], abs=1e-4)
    assert own == [max(each.values()) for each in top]
    assert choice["logprobs"]["token_logprobs"][0] is None


def test_a_signal_ends_the_server_and_its_engines(server: tuple[Run, str, str]) -> None:
    served, _, _ = server
    assert served.workers()
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(60) == 0
    deadline = time.monotonic() + 20
    while served.processes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not served.processes()


def test_what_cannot_be_evaluated_is_one_line(run: RunFiles, tmp_path: Path) -> None:
    for argv, problem in (
        ([str(tmp_path / "none")], "found none of them at"),
        ([str(run.folder), "--step", "3"], "--step: expected one of "),
        (
            [str(run.folder), "--set", "a=/no/file"],
            "eval.sets.a.path: expected a JSONL or Parquet file, found none at '/no/file'",
        ),
    ):
        command = [sys.executable, "-m", "titan_rl", "eval", *argv]
        done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
        assert done.returncode == 2, done.stderr
        (line,) = (line for line in done.stderr.splitlines() if "is not isolated" not in line)
        assert line.startswith("titan_rl eval: ")
        assert problem in line
