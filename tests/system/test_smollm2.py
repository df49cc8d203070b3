"""A real pretrained model: SmolLM2-135M, fetched from the package index, learns sums that were held out."""

from pathlib import Path

import pytest

from support.running import Runs


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_smollm2_learns_sums(runs: Runs, tmp_path: Path) -> None:
    run = runs.start(tmp_path / "run", "grpo_smollm2", small=False, training__steps=8)
    out = run.finish(timeout=3500)
    assert run.code == 0, out
    scores = {line["step"]: line["eval/score"] for line in run.lines("metrics.jsonl", "eval")}
    assert 0.05 <= scores[0] <= 0.6
    assert scores[8] - scores[0] >= 0.2  # the shipped run takes twice the steps
    gaps = [line["logprob_gap/mean"] for line in run.lines("metrics.jsonl")]
    assert max(gaps) < 1e-4
    assert (run.folder / "hf" / "model.safetensors").exists()
