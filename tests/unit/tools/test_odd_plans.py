"""Odd questions: a plan whose TOML passes the checks, or a refusal with its reason; more GPUs and shorter answers are
never slower."""

import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from support.slow_cases import slow_except
from titan_rl.config.toml import load
from titan_rl.tools.plan import choose
from titan_rl.tools.plan.__main__ import main, parser, read_case
from titan_rl.tools.plan.choose import Case, Plan, plans, smaller
from titan_rl.tools.plan.facts import read_facts

NOISE = 1.05  # layouts and splits are whole numbers


@pytest.fixture(autouse=True)
def closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank by the closed form: simulations take seconds."""

    def same(case: Case, plan: Plan) -> Plan:
        return plan

    monkeypatch.setattr(choose, "simulated", same)
    monkeypatch.setattr(choose, "NODES", (1, 4))  # to name, where nothing fits


def drawn(seed: int) -> list[str]:
    """Draw a question."""
    rng, facts = random.Random(seed), read_facts()
    cards = [name for name in facts.gpus if name != "CPU"]
    card = rng.choice([*cards, *cards, "H100-PCIe", "A100-40GB", "A100-64GB", "MI300X", "L4", "GH200"])
    count = rng.choice([1, 2, 3, 4, 5, 8, 12, 16])
    answer = rng.choice([1, 20, 700, 5000, 30000])
    keys = rng.choice(
        [
            [],
            ["--rollout.group_size", "5"],
            ["--turns", "3 +- 2, observation 100"],
            ["--hosts.gpu_memory_gb", "30"],
            ["--rollout.max_staleness_steps", "4"],
            ["--generator.replicas", "3"],
            ["--lora.rank", "8"],
            ["--training.seq_len", "512"],
        ]
    )
    return [
        *(
            "--model",
            rng.choice(["SmolLM2-135M", "Qwen2.5-1.5B", "Qwen3-8B", "Llama-3.1-70B", "Qwen3-30B-A3B", "DeepSeek-V3"]),
        ),
        *("--gpus", f"{count} x {card}"),
        *(
            "--tokens",
            f"prompt {rng.choice([1, 100, 4000])}, answer {answer} +- {rng.choice([0, answer // 2, 3 * answer])}",
        ),
        *("--prompts", str(rng.choice([1, 50, 1000, 30000]))),
        *("--days", str(rng.choice([0.01, 1, 30]))),
        *keys,
    ]


@pytest.mark.parametrize("seed", slow_except(range(20), *range(10)))
def test_an_odd_question(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, question = tmp_path / "plan.toml", drawn(seed)
    try:
        code = main([*question, "--out", str(out)])
    except SystemExit as refused:
        code = refused.code
    printed = capsys.readouterr()
    if code == 0:  # all TOMLs were checked before they were written
        assert load(out, gpus=True).training.steps > 0
        assert not re.search(r"\bnan\b|\binf\b", printed.out), question
    else:
        assert code == 1 or re.search("expected .*found", printed.err, re.DOTALL), question
        assert "does not fit" in " ".join(printed.err.split()) or code == 2, question
        assert not out.exists()


def seconds(gpus: str, answer: int, *, model: str = "Qwen3-8B") -> float:
    question = ["--model", model, "--gpus", gpus, "--tokens", f"prompt 300, answer {answer} +- {answer // 2}"]
    case = read_case(*parser().parse_known_args(question))
    return next(filter(None, map(plans, smaller(case))))[0].seconds


def test_more_gpus_are_not_slower() -> None:
    for model in ("Qwen3-8B", "Qwen3-30B-A3B"):
        found = [seconds(f"{count} x H100", 1000, model=model) for count in (8, 16, 32)]
        assert all(more <= NOISE * few for few, more in pairwise(found)), (model, found)


def test_longer_answers_are_not_faster() -> None:
    for gpus in ("2 x H200", "8 x A100"):
        found = [seconds(gpus, answer) for answer in (100, 1000, 4000, 12000)]
        assert all(longer >= short / NOISE for short, longer in pairwise(found)), (gpus, found)
