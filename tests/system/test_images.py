"""A run whose rows have no image, one or two trains on its own samples, and its records name the images."""

import base64
import json
import random
from pathlib import Path

from support.running import Runs
from titan_rl.ext.vision import tiny_folder
from titan_rl.ext.vision.squares import drawn
from titan_rl.wire.types import IMAGES

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% for p in m.content %}{% if p.type == 'image' %}<image>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
TEXT = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}


def test_a_run_reads_the_images_of_its_rows(runs: Runs, tmp_path: Path) -> None:
    folder = tiny_folder.write_folder(tmp_path / "model", text=tiny_folder.TEXT | TEXT)
    chance, lines = random.Random(0), list[str]()
    for count in range(8):
        images = [base64.b64encode(drawn(1 + count, chance)).decode() for _ in range(count % 3)]
        parts = [{"type": "image", "image": f"data:image/png;base64,{image}"} for image in images]
        asked = {"role": "user", "content": [*parts, {"type": "text", "text": "squares?"}]}
        lines.append(json.dumps({"question": [asked], "answer": str(1 + count)}))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    keys = {
        "task__name": "jsonl",
        "task__path": tmp_path / "rows.jsonl",
        "task__eval_path": tmp_path / "rows.jsonl",
        "task__images_key": "",
        "task__template": "chat",
        "task__chat_template": TEMPLATE,
        "model__hf_assets_path": folder,
    }
    run = runs.finish(
        tmp_path / "run",
        "count_squares",
        small=False,
        cold_start__steps=2,
        rollout__groups_per_step=4,
        training__steps=3,
        eval__size=4,
        **keys,
    )
    steps = run.lines("metrics.jsonl")
    assert [line["step"] for line in steps] == [1, 2, 3]
    assert all(0 < line["logprob_gap/image"] < 1e-5 for line in steps)
    assert all(line["logprob_gap/mean"] < 1e-5 for line in steps)
    rollouts = run.lines("rollouts.jsonl")
    seen = {len(line.get("images", [])) for line in rollouts}
    assert seen == {0, 1, 2}
    kept = {path.name for path in (run.folder / IMAGES).iterdir()}
    assert {name for line in rollouts for name in line.get("images", [])} <= kept
    admitted = [line for line in map(json.loads, ledger_lines(run.folder)) if "images" in line]
    assert {tuple(line["images"]) for line in admitted} >= {tuple(r["images"]) for r in rollouts if "images" in r}
    assert "vision_config" in json.loads((run.folder / "hf" / "config.json").read_text())


def ledger_lines(folder: Path) -> list[str]:
    return [line.partition(" ")[2] for line in (folder / "ledger.jsonl").read_text().splitlines() if " " in line]
