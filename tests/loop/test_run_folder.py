"""What one small uninterrupted run leaves in its folder."""

import json
import re
import subprocess
import sys
from typing import Any

import pytest

from support.running import WHOLE, RunFiles, Runs
from titan_rl.record.run_names import FILES, FOLDERS
from titan_rl.tools.audit import main
from titan_rl.tools.look import main as look

TIGHT = 1e-5  # mean log-prob gap between trainer and generator


def test_every_file_is_there(whole: RunFiles) -> None:
    names = {path.name for path in whole.folder.iterdir()}
    assert names >= {
        "config.toml",
        "metrics.jsonl",
        "rollouts.jsonl",
        "summary.json",
        "tb",
        "checkpoint",
        "hf",
        "model",
    }
    numbered = re.compile(r"^(hf|timeline|config)\.\d+(\.\w+)?$")  # written by an earlier process
    known = {*FILES, *FOLDERS, *(name.replace(".jsonl", ".superseded.jsonl") for name in FILES)}
    assert {name for name in names if not numbered.match(name)} <= known, "checks know every name (run_names.py)"
    assert {p.name for p in (whole.folder / "checkpoint").iterdir()} >= {"step-6", "step-8"}
    summary = whole.summary()
    assert summary["config_name"] == "grpo_llama"
    assert summary["steps"] == 8
    assert summary["seed"] == 0
    assert summary["versions"]["torchtitan"] == "0.3.0"
    assert 0 <= summary["final_eval"] <= 1
    parts = sum(summary["seconds"].values())
    assert parts == pytest.approx(summary["wall_seconds"], rel=0.05)


def test_versions_advance_with_the_steps(whole: RunFiles) -> None:
    for rollout in whole.lines("rollouts.jsonl"):
        assert set(rollout["versions"]) == {rollout["step"] - 1}
    assert {line["policy_age/max"] for line in whole.lines("metrics.jsonl")} == {0}


def test_tokens_masks_and_log_probs_line_up(whole: RunFiles) -> None:
    eos = 2
    for r in whole.lines("rollouts.jsonl"):
        prompt = len(r["tokens"]) - len(r["versions"])
        assert r["mask"] == [0] * prompt + [1] * len(r["versions"])
        assert all(p == 0 for p in r["logprobs"][:prompt])
        assert all(p < 0 for p in r["logprobs"][prompt:])
        assert r["tokens"][prompt:].count(eos) == (r["finish"] == "stop")
        assert eos not in r["tokens"][prompt:-1]


def test_trainer_and_generator_agree_on_every_step(whole: RunFiles) -> None:
    for line in whole.lines("metrics.jsonl"):
        assert line["logprob_gap/mean"] <= TIGHT
        assert line["logprob_gap/mult"] == pytest.approx(1, abs=1e-4)
        assert line["ratio/mean"] == pytest.approx(1, abs=1e-4)


def test_the_export_loads_in_transformers(whole: RunFiles) -> None:
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(whole.folder / "hf")
    model: Any = LlamaForCausalLM.from_pretrained(whole.folder / "hf")
    prompt = tokenizer("12+34=", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=4, do_sample=False).shape[1] >= prompt["input_ids"].shape[1] + 1


def test_the_model_card_agrees_with_the_summary(whole: RunFiles) -> None:
    """And its program for transformers runs in the folder."""
    card, summary = (whole.folder / "hf/README.md").read_text(), whole.summary()
    assert f"| **step 8** | held-out problems | {summary['final_eval']:.3f} |" in card
    assert f"torchtitan {summary['versions']['torchtitan']}" in card
    assert str(whole.folder.parent) not in card
    program = card.split("```python\n")[1].partition("```")[0].replace("PROMPT", "12+34=")
    run = [sys.executable, "-c", program]
    done = subprocess.run(run, cwd=whole.folder / "hf", capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1


def test_a_finished_run_says_so_and_starts_nothing(runs: Runs, whole: RunFiles) -> None:
    again = runs.start(whole.folder, **WHOLE)
    out = again.finish(timeout=120)
    assert again.code == 0
    assert "nothing is left to train" in out
    assert "vLLM engine" not in out


def test_the_audit_finds_nothing_wrong(whole: RunFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(whole.folder)]) == 0
    assert capsys.readouterr().out.startswith("nothing lost, nothing twice, nothing stale: 32 prompts")


def test_a_finished_run_can_be_read(whole: RunFiles, capsys: pytest.CaptureFixture[str]) -> None:
    assert look([str(whole.folder)]) == 0
    assert "step 8, the last: reward " in capsys.readouterr().out
    assert look([str(whole.folder), "--evaluation", "--step", "8", "--limit", "99", "--json"]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    rewards = next(line for line in whole.lines("evaluations.jsonl", "eval") if line["step"] == 8)["rewards"]
    assert {str(each["prompt_id"]): [each["reward"]] for each in answers} == rewards
    assert all(each["messages"][-1]["role"] == "assistant" for each in answers)
