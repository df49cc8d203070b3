"""A run whose rows have no image, one or two trains on its own samples, whole or by adapters, and its records name the
images."""

import base64
import json
import math
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from support.running import Run, RunFiles, Runs
from support.slow_cases import slow_except
from titan_rl.ext.vision import find_square, tiny_folder
from titan_rl.ext.vision.pixels import placeholders_of
from titan_rl.ext.vision.squares import drawn
from titan_rl.tools.inspect.audit_rules import audit
from titan_rl.tools.view.run_data import run_data
from titan_rl.wire.types import IMAGES

TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
STEPS = 3
LOW: dict[str, Any] = {"training__mixed_precision_param": "bfloat16", "generator__dtype": "bfloat16"}
ADAPTERS: dict[str, Any] = {
    **{"lora__rank": 8, "lora__sync": "adapter", "algorithm__kl_coef": 0.01, "optimizer__lr": 1e-4},
    **LOW,
    **{"rollout__max_staleness_steps": 1, "cold_start__lr": 1e-2, "training__steps": 2},
}


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the keys of a run whose rows have no image, one or two."""
    folder = tmp_path_factory.mktemp("seeing")
    chance, lines = random.Random(0), list[str]()
    for count in range(8):
        images = [base64.b64encode(drawn(1 + count, chance)).decode() for _ in range(count % 3)]
        parts = [{"type": "image", "image": f"data:image/png;base64,{image}"} for image in images]
        asked = {"role": "user", "content": [*parts, {"type": "text", "text": "squares?"}]}
        lines.append(json.dumps({"question": [asked], "answer": str(1 + count)}))
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(lines))
    return {
        "task__name": "jsonl",
        "task__path": rows,
        "task__eval_path": rows,
        "task__images_key": "",
        "task__template": "chat",
        "model__hf_assets_path": tiny_folder.write_folder(folder / "model", text=tiny_folder.TEXT | TEXT),
        "cold_start__steps": 2,
        "rollout__groups_per_step": 4,
        "training__steps": STEPS,
        "eval__size": 4,
    }


@pytest.fixture(scope="module")
def whole(runs: Runs, keys: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runs.finish(tmp_path_factory.mktemp("whole") / "run", "count_squares", small=False, **keys)


def test_a_run_reads_the_images_of_its_rows(whole: Run) -> None:
    steps = whole.lines("metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2, STEPS]
    assert all(0 < line["logprob_gap/image"] < 1e-5 for line in steps)
    assert all(line["logprob_gap/mean"] < 1e-5 for line in steps)
    rollouts = whole.lines("rollouts.jsonl")
    seen = {len(line.get("images", [])) for line in rollouts}
    assert seen == {0, 1, 2}
    kept = {path.name for path in (whole.folder / IMAGES).iterdir()}
    assert {name for line in rollouts for name in line.get("images", [])} <= kept
    admitted = [line for line in map(json.loads, ledger_lines(whole.folder)) if "images" in line]
    assert {tuple(line["images"]) for line in admitted} >= {tuple(r["images"]) for r in rollouts if "images" in r}
    assert "vision_config" in json.loads((whole.folder / "hf" / "config.json").read_text())


def test_an_evaluation_sees_what_the_run_saw(whole: Run) -> None:
    found = json.loads(output_of("eval", whole.folder, "--json", "--show", "4"))["sets"]["heldout"]["answers"]
    said = {answer["prompt_id"]: answer["messages"][-1]["content"] for answer in found}
    problems = whole.written("evaluation_answers.jsonl")[-1]["problems"]
    assert said == {each["problem"]: each["answers"][0]["text"] for each in problems}


def test_adapters_beside_a_tower_in_16_bits_with_a_lag(runs: Runs, keys: dict[str, Any], tmp_path: Path) -> None:
    run = runs.finish(tmp_path / "run", "count_squares", small=False, **(keys | ADAPTERS))
    steps = run.lines("metrics.jsonl")
    assert [line["policy_age/max"] for line in steps] == [0, 1]
    assert all(0 < line["logprob_gap/image"] < 5e-2 for line in steps)
    assert steps[0]["kl/k3"] == 0
    assert "nothing lost, nothing twice" in output_of("audit", run.folder)
    with safe_open(run.folder / "hf" / "adapter" / "adapter_model.safetensors", "pt") as file:
        names = set(file.keys())
    layers = {name.partition(".layers.")[0] for name in names}
    assert layers == {"base_model.model.model.text_model"}


@pytest.mark.parametrize(
    ("more", "gap"),
    slow_except(
        [
            ({"algorithm__kl_coef": 0.01}, 1e-5),
            ({**LOW, "rollout__max_staleness_steps": 1, "weight_sync__in_flight": "keep", "optimizer__lr": 1e-5}, 5e-2),
        ],
        0,
    ),
)
def test_a_run_trains_the_tower(
    runs: Runs, keys: dict[str, Any], more: dict[str, Any], gap: float, tmp_path: Path
) -> None:
    """Beside a reference with another tower; and in 16 bits with a lag, where engines keep old keys and values."""
    run = runs.finish(tmp_path / "run", "count_squares", small=False, **(keys | {"model__vision": "all"} | more))
    steps = run.lines("metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2, STEPS]
    assert all(0 < line["logprob_gap/image"] < gap for line in steps)
    assert "nothing lost, nothing twice" in output_of("audit", run.folder)
    before = load_file(keys["model__hf_assets_path"] / "model.safetensors")
    after = {name: w for file in (run.folder / "hf").glob("*.safetensors") for name, w in load_file(file).items()}
    assert after.keys() == before.keys()
    same = {name for name, w in before.items() if np.array_equal(w, after[name])}
    assert same == {name for name in before if "vision_model.embeddings" in name}


def test_pairs_of_answers_after_images(runs: Runs, keys: dict[str, Any], tmp_path: Path) -> None:
    """A loss that reads the reference begins at log 2, as both see the same."""
    rows = [json.loads(line) for line in keys["task__path"].read_text().splitlines()]
    path = tmp_path / "pairs.jsonl"
    pairs = [{"prompt": row["question"], "chosen": row["answer"], "rejected": "99"} for row in rows]
    path.write_text("\n".join(map(json.dumps, pairs)))
    files = {"task__path": path, "task__eval_path": path, "training__global_batch_size": 8}
    pair_keys = (
        keys | files | {"model__name": "auto", "model__vision": "all", "cold_start__steps": 0, "training__steps": 2}
    )
    run = runs.finish(tmp_path / "run", "dpo_llama", small=False, **pair_keys)
    first, second = run.lines("metrics.jsonl", "fit")
    assert first["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert second["loss"] < first["loss"]


def output_of(tool: str, *arguments: object) -> str:
    command = [sys.executable, "-m", "titan_rl", tool, *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_run_reads_the_images_of_its_turns(runs: Runs, tmp_path: Path) -> None:
    """The rows' own images, images from the environment, and turns and rollouts without any."""
    folder = tiny_folder.write_folder(tmp_path / "model", text=tiny_folder.TEXT | TEXT)
    write_rows(tmp_path / "rows.jsonl")
    keys = {**PICTURES, "task__path": tmp_path / "rows.jsonl", "model__hf_assets_path": folder}
    run = runs.finish(tmp_path / "run", "count_squares", small=False, **keys)
    check_turns(run, gap=1e-5)
    rollouts = run.lines("rollouts.jsonl")
    counts = {tuple(len(turn.get("images", [])) for turn in line["turns"]) for line in rollouts}
    assert {sum(each) for each in counts} >= {0, 1, 2, 3}
    assert any(each[1] for each in counts)
    shown = run_data(run.folder, sample_bytes=10**7)
    named = [m for g in shown["groups"] for s in g["samples"] for m in s.get("messages", ()) if m.get("images")]
    assert named
    assert all(set(message["images"]) <= shown["images"].keys() for message in named)


def test_a_run_reads_the_images_that_an_agent_sends(runs: Runs, tmp_path: Path) -> None:
    """In 16 bits, with adapters: the row's image by its name, others as data URLs, and turns without any."""
    folder = tiny_folder.write_folder(tmp_path / "model", text=tiny_folder.TEXT | TEXT)
    write_rows(tmp_path / "rows.jsonl")
    keys = {
        **PICTURES,
        "environment__name": "",
        "task__agent": "picture_agent:run",
        "task__path": tmp_path / "rows.jsonl",
        "task__template": "chat",
        "model__hf_assets_path": folder,
        **{"lora__rank": 8, "lora__sync": "adapter"},
        **{"training__mixed_precision_param": "bfloat16", "generator__dtype": "bfloat16"},
    }
    run = runs.finish(tmp_path / "run", "count_squares", small=False, **keys)
    check_turns(run, gap=0.03)
    rollouts = run.lines("rollouts.jsonl")
    assert {line["status"] for line in rollouts} == {"completed"}
    counts = {tuple(len(turn.get("images", [])) for turn in line["turns"]) for line in rollouts}
    assert {images for each in counts for images in each} == {0, 1}
    assert any(each[0] for each in counts)
    assert any(each[1] for each in counts)


@pytest.mark.slow
def test_a_run_in_16_bits_that_lags_reads_the_images_of_chats(runs: Runs, tmp_path: Path) -> None:
    """No row has an image. Half of a picture ends its rollout by name. A resumed run continues."""
    folder = tiny_folder.write_folder(tmp_path / "model", text=tiny_folder.TEXT | TEXT)
    rows, _ = find_square.rows(0, 0)
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps(row | {"image": None}) for row in rows[:12]))
    keys = {
        **PICTURES,
        "environment__name": "picture_turns:Torn",
        "environment__processes": 2,
        "task__path": tmp_path / "rows.jsonl",
        "task__template": "chat",
        "model__hf_assets_path": folder,
        "rollout__max_staleness_steps": 1,
        "optimizer__lr": 1e-6,  # what differs is rounding, not a version
        "training__mixed_precision_param": "bfloat16",
        "generator__dtype": "bfloat16",
    }
    begun = runs.start(tmp_path / "run", "count_squares", small=False, **keys)
    assert "the model sees: another image changes a log-prob" in begun.finish()
    run = runs.finish(tmp_path / "run", "count_squares", small=False, **{**keys, "training__steps": 4})
    assert [line["step"] for line in run.lines("metrics.jsonl")] == [1, 2, 3, 4]
    check_turns(run, gap=0.03)
    rollouts = run.lines("rollouts.jsonl")
    failed = [line for line in rollouts if line["status"] == "error"]
    assert failed
    assert all("ValueError: part 1 of message 1: expected a whole PNG" in line["error"] for line in failed)
    assert all(line["reward"] is None for line in failed)
    assert max(len(turn.get("images", [])) for line in rollouts for turn in line["turns"][1:]) == 1


PICTURES: dict[str, Any] = {
    "task__name": "jsonl",
    "task__images_key": "image",
    "environment__name": "picture_turns:Pictures",
    "environment__processes": 1,
    "cold_start__steps": 0,
    "cold_start__stop_at": 0,
    "rollout__groups_per_step": 6,
    "training__steps": 2,
    "eval__size": 0,
}


def write_rows(path: Path) -> None:
    """Write rows of find_square, half of them without their image."""
    rows, _ = find_square.rows(0, 0)
    lines = [encoded(row) for row in rows[:12]]
    for line in lines[::2]:
        line["image"] = None
    path.write_text("\n".join(map(json.dumps, lines)))


def encoded(row: dict[str, Any]) -> dict[str, Any]:
    return row | {"image": f"data:image/png;base64,{base64.b64encode(row['image']).decode()}"}


def check_turns(run: RunFiles, *, gap: float) -> None:
    """Check that both sides computed the same after the images, and that the records agree on them."""
    steps = run.lines("metrics.jsonl")
    assert all(line["logprob_gap/mean"] < gap for line in steps)
    assert all(0 < line["logprob_gap/image"] < gap for line in steps)
    assert audit(run.folder)[0] == []
    placeholders = placeholders_of(str(run.folder / "hf"))
    kept = {path.name for path in (run.folder / IMAGES).iterdir()}
    turns = [event for event in map(json.loads, ledger_lines(run.folder)) if event["event"] == "turn"]
    recorded = {(e["prompt"], e["sample"], e["turn"]): e.get("images", []) for e in turns}
    for line in run.lines("rollouts.jsonl"):
        at = 0
        for turn in line["turns"]:
            images = turn.get("images", [])
            assert images == recorded[line["prompt_id"], line["sample"], turn["turn"]]
            assert set(images) <= kept
            read, end = line["tokens"][at : at + turn["read"]], at + turn["read"] + turn["sampled"]
            assert read.count(placeholders.token) == placeholders.run * len(images)
            assert line["mask"][at:end] == [0] * turn["read"] + [1] * turn["sampled"]
            at = end


def ledger_lines(folder: Path) -> list[str]:
    return [line.partition(" ")[2] for line in (folder / "ledger.jsonl").read_text().splitlines() if " " in line]
