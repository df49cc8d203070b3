"""An exported folder in the hands of programs that do not know this project, and `python -m titan_rl export`."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.running import RunFiles
from titan_rl.config.toml import load
from titan_rl.tasks.task import load_task
from titan_rl.wire.checkpoint_sums import SUMS
from titan_rl.wire.seeds import derive

DOCS = Path(__file__).parents[2] / "docs" / "operations.md"
SCORED = {  # appended to the snippet of the docs, whose names it uses
    "transformers": """
import json, sys
answers = []
for text in json.load(open(sys.argv[1])):
    prompt = tokenizer(text, return_tensors="pt")
    answer = model.generate(**prompt)[0, prompt["input_ids"].shape[1]:]
    answers.append(tokenizer.decode(answer, skip_special_tokens=True))
assert "titan_rl" not in sys.modules
print("answers:", json.dumps(answers))
""",
    "vllm": """
    import json, sys
    asked = llm.generate(json.load(open(sys.argv[1])), SamplingParams(temperature=0))
    assert "titan_rl" not in sys.modules
    print()
    print("answers:", json.dumps([each.outputs[0].text for each in asked]))
""",
}


def reported(run: RunFiles, step: int) -> float:
    return next(line["eval/score"] for line in run.lines("metrics.jsonl") if line["step"] == step)


def score(run: RunFiles, folder: Path, engine: str, scratch: Path) -> float:
    """Run the snippet that docs/operations.md shows for this engine, then let it answer the run's held-out problems.
    Return the share that it solves."""
    config = load(run.folder / "config.toml")
    task = load_task(config.task, seed=derive(config.debug.seed, "task"), eval_size=config.eval.size)
    snippets = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
    (snippet,) = (text for text in snippets if text.startswith(f"from {engine} "))
    assert "outputs/grpo_llama/hf" in snippet
    (scratch / "use.py").write_text(snippet.replace("outputs/grpo_llama/hf", str(folder)) + SCORED[engine])
    (scratch / "prompts.json").write_text(json.dumps(["12+34=", *(example.prompt for example in task.heldout)]))
    done = subprocess.run(
        [sys.executable, "use.py", "prompts.json"],
        cwd=scratch,
        # Two threads would spend most of their time in waiting for each other: the model is tiny.
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    (said,) = (line for line in lines if line.startswith("answers: "))  # vLLM prints progress, too
    first, *answers = json.loads(said.removeprefix("answers: "))
    assert first in lines, "the snippet shows the answer to its own prompt"
    right = [answer == example.answer for answer, example in zip(answers, task.heldout, strict=True)]
    return sum(right) / len(right)


def export(run: RunFiles, *argv: str, code: int = 0) -> str:
    command = [sys.executable, "-m", "titan_rl", "export", str(run.folder), *argv]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout if code == 0 else done.stderr


def test_transformers_gets_the_score_that_the_run_reported(learnt: RunFiles, tmp_path: Path) -> None:
    """Not one of 256 answers differs: greedy decoding in float32 on both sides, and rounding moves no argmax."""
    final = learnt.summary()["final_eval"]
    assert 0.3 < final < 1
    assert score(learnt, learnt.folder / "hf", "transformers", tmp_path) == final


def test_vllm_gets_the_score_that_the_run_reported(learnt: RunFiles, tmp_path: Path) -> None:
    """Within one problem: vLLM as it comes computes with other kernels than the run's generator, which reads live
    weights, and a near tie may fall the other way."""
    final = learnt.summary()["final_eval"]
    assert score(learnt, learnt.folder / "hf", "vllm", tmp_path) == pytest.approx(final, abs=1 / 256)


def test_the_newest_checkpoint_exports_to_what_the_run_itself_exported(learnt: RunFiles, tmp_path: Path) -> None:
    out = export(learnt, "--out", str(tmp_path / "out"))
    assert out.startswith("step 4 is in ")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert files == {p.name: p.read_bytes() for p in (learnt.folder / "hf").iterdir() if p.name != SUMS}


def test_an_earlier_checkpoint_has_the_score_of_its_step(learnt: RunFiles, tmp_path: Path) -> None:
    assert reported(learnt, 2) != reported(learnt, 4)
    out = export(learnt, "--step", "2")
    assert "log-probs from transformers equal the trainer's, largest difference" in out
    folder = learnt.folder / "hf-2-float32"
    assert score(learnt, folder, "transformers", tmp_path) == reported(learnt, 2)
    assert f"--out: expected a folder that does not exist yet, found {folder}" in export(learnt, "--step", "2", code=2)


def test_the_card_of_an_export_has_the_score_of_its_step_and_the_audits_verdict(
    learnt: RunFiles, tmp_path: Path
) -> None:
    push = ("--push", "own/model")  # only listed: no --yes
    out = export(learnt, "--step", "2", "--audit", "--dtype", "bfloat16", "--out", str(tmp_path / "out"), *push)
    assert re.search(r"\nnothing was uploaded: \d+ files of [\d,]+ bytes would go to \S+/own/model, ", out)
    card = (tmp_path / "out/README.md").read_text()
    assert f"| **step 2** | held-out problems | {reported(learnt, 2):.3f} |" in card
    assert "`titan_rl audit` found nothing lost, nothing twice and nothing stale in the run: " in card
    assert 'LLM(".", dtype="bfloat16")' in card


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return exit code, folder and output of each case of support/checkpoints.py."""
    folder = tmp_path_factory.mktemp("cases")
    done = subprocess.run(
        [sys.executable, "-m", "support.checkpoints", str(folder)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    *_, last = done.stdout.splitlines()
    return {"errors": done.stderr, "output": done.stdout, **json.loads(last)}


@pytest.mark.parametrize("case", ["language", "chat", "reward", "critic"])
def test_every_kind_of_model_is_proven(cases: dict[str, Any], case: str) -> None:
    code, folder = cases[case]
    assert code == 0, cases["errors"]
    config = json.loads((Path(folder) / "config.json").read_text())
    kinds = {"language": "LlamaForCausalLM", "chat": "Qwen3ForCausalLM"}
    assert config["architectures"] == [kinds.get(case, "LlamaForSequenceClassification")]
    assert config["dtype"] == ("bfloat16" if case == "chat" else "float32")
    assert config["tie_word_embeddings"] == (case == "chat")
    assert (Path(folder) / "generation_config.json").exists() == (case in kinds)
    if case == "reward":  # EOS serves as padding: transformers would score the token before it
        assert (config["eos_token_id"], config["pad_token_id"]) == (2, None)


def test_rounding_is_reported(cases: dict[str, Any]) -> None:
    chat = next(line for line in cases["output"].splitlines() if "out-chat" in line)
    assert re.search(r"; bfloat16 itself moved them by up to \d\.\de-0[123]$", chat)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        (
            "another_rope",
            r"the proof failed, nothing was written: expected -\d.*, as from the trainer's own model, found",
        ),
        (
            "no_bos",
            r"expected the tokens \[1, 7, .*\] for '0\d\+\d\d=', as in training, from transformers; found \[7, ",
        ),
        ("damaged", r"step-3 is damaged: __0_0.distcp: expected [\d,]+ bytes, found 1,000"),
        ("cut", r"step-3 cannot be read: EOFError"),
    ],
)
def test_what_is_not_the_trained_model_is_not_written(cases: dict[str, Any], case: str, message: str) -> None:
    code, folder = cases[case]
    assert code == 1
    assert re.search(message, cases["errors"]), cases["errors"]
    assert not Path(folder).exists()
    assert not list(Path(folder).parent.glob("*.partial"))
