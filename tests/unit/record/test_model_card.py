"""The model card of an export: its scores, and nothing that belongs to one machine or is secret."""

import json
import random
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from titan_rl.config.sections import Config, ModelSection, OptimizerSection, TaskSection
from titan_rl.record.model_card import NOT_AUDITED, model_card
from titan_rl.record.run_names import METRICS
from titan_rl.train.hf_folder import write_card
from titan_rl.wire.checkpoint_sums import changed, sum_files

VERSIONS = {"python": "3.11.9", "torch": "2.13.0+cpu"}
LINES = [
    {"kind": "cold_start", "step": 0, "eval/score": 0.0, "eval/low": 0.0, "eval/high": 0.015},
    {"kind": "cold_start", "step": 3, "eval/score": 0.25, "eval/low": 0.2, "eval/high": 0.3},
    {"kind": "eval", "step": 0, "eval/score": 0.25, "eval/low": 0.2, "eval/high": 0.3},
    {"kind": "rl", "step": 1},
    {"kind": "rl", "step": 2, "eval/score": 0.5, "eval/low": 0.4, "eval/high": 0.6}
    | {"eval/gsm/pass@4": 0.75, "eval/gsm/pass@4/low": 0.7, "eval/gsm/pass@4/high": 0.8, "eval/gsm/failed": 1},
    {"kind": "rl", "step": 3, "eval/score": None, "eval/low": None},  # NaN
]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "my run"
    folder.mkdir()
    (folder / METRICS).write_text("".join(json.dumps({"time": 1.0, **line}) + "\n" for line in LINES))
    return folder


def front_matter(card: str) -> dict[str, Any]:
    begin, text, _ = card.split("---\n", 2)
    assert begin == ""
    return yaml.safe_load(text)


def scores(card: str) -> list[str]:
    return [line for line in card.partition("## Scores")[2].partition("## Audit")[0].splitlines() if "held" in line]


def test_a_card_has_the_scores_of_its_step_and_of_the_weights_before(run: Path) -> None:
    config = Config(model=ModelSection(hub_name="Qwen/Qwen3-0.6B"), task=TaskSection(path="hf:openai/gsm8k:main:train"))
    card = model_card(run, config, VERSIONS, step="2")
    assert front_matter(card) == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "base_model": "Qwen/Qwen3-0.6B",
        "datasets": ["openai/gsm8k"],
        "tags": ["titan_rl", "rl", "grpo"],
    }
    before = ["| before the cold start | held-out problems | 0.000 | 0.000 to 0.015 |"]
    trained = [*before, "| before training | held-out problems | 0.250 | 0.200 to 0.300 |"]
    assert scores(card) == [*trained, "| **step 2** | held-out problems | 0.500 | 0.400 to 0.600 |"]
    assert "| **step 2** | gsm/pass@4 | 0.750 | 0.700 to 0.800 |" in card
    for text in ("# my run\n", "| steps | 2 of 100, after 3 of a cold start |", "torch 2.13.0+cpu", NOT_AUDITED):
        assert text in card
    assert scores(model_card(run, config, VERSIONS, step="0")) == [
        *before,
        "| **step 0** | held-out problems | 0.250 | 0.200 to 0.300 |",
    ]
    supervised = model_card(run, config, VERSIONS, step="cold_start/3", verdict="clean")
    assert scores(supervised) == [*before, "| **step cold_start/3** | held-out problems | 0.250 | 0.200 to 0.300 |"]
    assert "## Audit\n\nclean\n" in supervised
    given = {"eval/score": 1.0, "eval/low": 0.9, "eval/high": 1.0}
    assert scores(model_card(run, config, VERSIONS, step="1", scores=given))[-1].startswith("| **step 1** | held-out")
    for step in ("", "1"):  # by default the last one
        assert f"did not evaluate the weights of step {step or 3}." in model_card(run, config, VERSIONS, step=step)


def test_a_judge_is_scored_and_a_folder_without_metrics_has_a_card(tmp_path: Path) -> None:
    card = model_card(tmp_path, Config(), {}, head="value")
    assert front_matter(card)["pipeline_tag"] == "text-classification"
    assert "AutoModelForSequenceClassification" in card
    assert "from vllm" not in card
    assert "Not recorded." in card
    assert "| algorithm | `grpo`, with a loop of its author's |" in model_card(tmp_path, Config(), {}, own_loop=True)


@pytest.mark.parametrize("seed", range(40))
def test_a_card_names_no_folder_and_no_secret_and_is_the_same_each_time(run: Path, seed: int) -> None:
    draw = random.Random(seed)

    def name() -> str:
        return "".join(draw.choices(string.ascii_letters + "_|`<>\n\"'é ", k=9))

    def path() -> str:
        return (
            draw.choice(["/hidden/HIDDEN/", "../HIDDEN/", "HIDDEN/", "hidden/HIDDEN/x/", "~/HIDDEN/"])
            + name()
            + ".jsonl"
        )

    secret = {"api_key": "HIDDEN", "base_url": "http://u:HIDDEN@host", "at": [path()]}
    sources: Any = {"one": {"path": path(), "system_prompt": "HIDDEN"}, "two": {"path": "hf:openai/gsm8k:main:train"}}
    task = TaskSection(
        path="" if seed % 2 else path(),
        sources=sources if seed % 2 else {},
        reward=draw.choice(["exact", "my_reward:brief", f"{path()}:reward"]),
        rewards={f"mine:{name()}": 1.0} if seed % 3 else {},
        reward_args=secret,
        system_prompt="HIDDEN",
        template=draw.choice(["chat", "plain"]),
        agent=draw.choice(["", "my_agent:run"]),
    )
    model = ModelSection(hf_assets_path=path(), hub_name=draw.choice(["", "Qwen/Qwen3-0.6B", path()]))
    config = Config(task=task, model=model, optimizer=OptimizerSection(lr=draw.random()))
    config = replace(config, environment=replace(config.environment, args=secret, python="/hidden/HIDDEN/python"))
    card = model_card(run, config, VERSIONS)
    assert card == model_card(run, config, VERSIONS)
    assert "hidden" not in card.lower()
    assert str(run.parent) not in card
    assert front_matter(card).get("base_model") in (None, "Qwen/Qwen3-0.6B")
    rows = card.partition("## Training")[2].partition("## Scores")[0].strip().splitlines()
    assert {row.count("|") for row in rows} == {3}, "no name ends its cell"
    for example in card.split("```python\n")[1:]:
        compile(example.partition("```")[0], "card", "exec")


def test_an_edited_card_does_not_make_an_export_count_as_damaged(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    sum_files(tmp_path)
    write_card(tmp_path, "# card\n")
    (tmp_path / "README.md").write_text("# another one\n")
    assert changed(tmp_path, read=True) == ""
    assert list(tmp_path.glob("*.md"))
