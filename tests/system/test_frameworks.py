"""A framework's agent, trained as it is, over the endpoint. `pip` installs the framework into a virtual environment of
the test's own, so the test needs a package index."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from support.chat_folders import chat_folder
from support.running import Runs
from support.tiny import tiny_llama
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.audit_rules import audit

FRAMEWORK = ("smolagents==1.26.0", "openai")


@pytest.mark.slow
def test_an_agent_of_smolagents_is_trained_unchanged(
    runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The policy is untrained, so it makes no call that can be read. Every token that it sampled is trained on."""
    python = tmp_path / "framework" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "framework")], check=True)
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", *FRAMEWORK], check=True)
    monkeypatch.setenv("FRAMEWORK_PYTHON", str(python))
    model = chat_folder(tmp_path / "model", "hermes")
    text = TextTokenizer.load(model)
    tiny_llama(vocab_size=-(-text.size // 64) * 64, max_position_embeddings=8192).save_pretrained(model)
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(f'{{"question": "What is {a}*7?", "answer": "{7 * a}"}}\n' for a in range(8)))
    run = runs.finish(
        tmp_path / "run",
        "calc_agent_llama",
        model__hf_assets_path=model,
        task__name="jsonl",
        task__path=rows,
        task__agent="framework_agent:run",
        environment__max_turns=8,
        environment__max_tokens=0,
        environment__concurrency=2,
        environment__turn_seconds=300,
        cold_start__steps=0,
        rollout__groups_per_step=2,
        rollout__group_size=2,
        rollout__max_new_tokens=24,
        training__seq_len=8192,
        training__steps=1,
        eval__size=0,
    )
    assert audit(run.folder)[0] == []
    rollouts = run.lines("rollouts.jsonl")
    assert [line["status"] for line in rollouts] == ["completed"] * 4, rollouts
    for line in rollouts:
        assert len(line["turns"]) >= 2, "it asked again after an answer without a call"
        assert sum(line["mask"]) == sum(turn["sampled"] for turn in line["turns"])
        assert "multiply" in text.decode(line["tokens"]), "smolagents tells the policy of its tool"
        assert "*7?" in json.dumps(line["messages"])
    (step,) = run.lines("metrics.jsonl")
    assert step["tokens/trained"] == sum(sum(line["mask"]) for line in rollouts) > 0
    assert step["environment/requests"] >= 2
    assert step["loss"] is not None
