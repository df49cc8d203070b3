"""`python -m titan_rl why RUN` on folders of runs: finished, cut short, of other versions, without rollouts."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest

from support.metric_histories import Line, config, metrics, ramp
from titan_rl.config.toml import to_toml
from titan_rl.tools.why import main


def rollout(step: int, prompt: int, sample: int, **fields: Any) -> Line:
    line: Line = {"kind": "rl", "step": step, "prompt_id": 8 * step + prompt, "group": prompt, "sample": sample}
    line |= {"prompt": f"{prompt} + 7 = ?", "answer": "4711", "text": f"it is {sample}", "finish": "length"}
    line |= {"reward": 0.0, "penalty": 0.0, "advantage": 0.0, "tokens": [1, 2, 3], "mask": [0, 1, 1]}
    return line | {"logprobs": [None, -0.1, -6.0], "versions": [step - 1] * 2} | fields


def folder_of(path: Path, lines: list[Line], rollouts: list[Line] | None, toml: str) -> Path:
    (path / "config.toml").write_text(toml)
    (path / "metrics.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in lines))
    if rollouts is not None:
        (path / "rollouts.jsonl").write_bytes(b"".join(orjson.dumps(line) + b"\n" for line in rollouts))
    return path


@pytest.fixture
def dead(tmp_path: Path) -> Path:
    """A run that cuts every answer off."""
    cut = {"completions/clipped_ratio": 1.0, "reward/mean": 0.0, "reward/std": 0.0, "frac_reward_zero_std": 1.0}
    lines = metrics(6, config(), change=lambda step, line: cut)
    rollouts = [rollout(step, p, j) for step in range(1, 7) for p in range(4) for j in range(4)]
    return folder_of(tmp_path, lines, rollouts, to_toml(config()))


def test_the_report_names_cause_key_samples_and_effects(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(dead)]) == 0
    out = capsys.readouterr().out
    assert "1. 100% of the answers are cut off at rollout.max_new_tokens = 8, from step 1 on" in out
    assert "change  rollout.max_new_tokens = 32 (now 8)" in out
    assert "step 6, prompt 51, sample 3" in out
    assert f"python -m titan_rl look {dead} --prompt 51" in out
    assert "effect  no answer is right since step 1" in out
    assert "\n2. " not in out
    assert "docs/it_does_not_learn.md" in out
    assert max(map(len, out.splitlines())) <= max(80, len(str(dead)) + 60)


def test_json_has_the_same(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(dead), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cause"] == "truncation"
    assert found["findings"][0]["change"][0] == {"key": "rollout.max_new_tokens", "now": 8, "proposed": 32}
    assert {effect["rule"] for effect in found["findings"][0]["effects"]} >= {"too_hard"}


def test_a_healthy_run_says_what_was_checked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    smol = config("grpo_smollm2")
    lines = metrics(12, smol, reward=ramp(0.27, 0.56), score=ramp(0.27, 0.56))
    assert main([str(folder_of(tmp_path, lines, None, to_toml(smol)))]) == 0
    out = capsys.readouterr().out
    assert "no problem found" in out
    assert "truncation" in out
    assert "groups with signal" in out


def test_a_run_with_an_exploited_reward_has_no_clean_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rewards that grow with the answers' lengths are no rule's finding, and no sound run."""
    smol = config("grpo_smollm2")
    lines = metrics(12, smol, reward=ramp(0.1, 0.8))

    def longer(step: int, prompt: int, sample: int) -> Line:
        text = " ".join(f"{(step * prompt + k) % 97}" for k in range(step * (sample + 1)))
        tokens = [1] * (1 + step * (sample + 1))
        fields = {"text": text, "finish": "stop", "reward": step * (sample + 1) / 48, "tokens": tokens, "mask": tokens}
        return rollout(step, prompt, sample, **fields, logprobs=[-0.1] * len(tokens), versions=[step - 1] * len(tokens))

    rollouts = [longer(step, p, j) for step in range(1, 13) for p in range(4) for j in range(4)]
    assert main([str(folder_of(tmp_path, lines, rollouts, to_toml(smol)))]) == 0
    out = capsys.readouterr().out
    assert "no problem found" not in out
    assert "suspect length alone explains the gain" in " ".join(out.split())
    assert out.splitlines()[-2:] == [
        "audit --rewards has 1 suspicion:",
        f"  python -m titan_rl audit --rewards {tmp_path}",
    ]


def test_a_run_that_is_torn_or_of_another_version_is_read(dead: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (dead / "config.toml").write_text("[training]\nold_key_of_2025 = 1\n")
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        with (dead / name).open("ab") as file:
            file.write(b'{"kind": "rl", "ste')
    assert main([str(dead)]) == 0
    out = capsys.readouterr().out
    assert "config.toml cannot be read" in out
    assert "1. 100% of the answers are cut off" in out


def test_a_run_without_a_step_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(folder_of(tmp_path, [], [], ""))]) == 0
    assert "no step was made yet" in capsys.readouterr().out


def test_a_folder_that_is_no_run_is_bad_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == main([str(tmp_path / "none")]) == 2
    assert "expected the dump folder of a run" in capsys.readouterr().err


def test_sampled_text_and_control_codes_stay_out_of_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = config("calc_llama")
    lines = metrics(12, cfg, change=lambda step, line: {"stop/error": 0.4})
    bad = {"status": "error", "reward": None, "error": "\x1b[2Jgone"}
    assert main([str(folder_of(tmp_path, lines, [rollout(1, 0, 0, **bad)], to_toml(cfg)))]) == 0
    out = capsys.readouterr().out
    assert "ended as 'error'" in out
    assert "\x1b" not in out
