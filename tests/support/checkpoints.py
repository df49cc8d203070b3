"""Makes run folders with a checkpoint in this process, without a run, and exports them. It changes the process's
environment, so it needs a separate process: `python -m support.checkpoints FOLDER` ends its output with a JSON
object, case -> [exit code, folder to be written].
"""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")

import torch
import torch.distributed as dist

from titan_rl.actors.titan.model import local
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.config import sections as c
from titan_rl.config.toml import to_toml
from titan_rl.preflight.plan import policy_of
from titan_rl.tools import export
from titan_rl.wire.checkpoint_sums import SUMS
from titan_rl.wire.types import RoleName

STEP = 3
SIZES: dict[str, Any] = {"dim": 64, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "hidden_dim": 128}


def save_checkpoint(run: Path, config: c.Config, role: RoleName = "trainer") -> Path:
    """Write the run folder of a config with random weights in the checkpoint of one step."""
    run.mkdir(parents=True, exist_ok=True)
    config = replace(config, job=c.JobSection(dump_folder=str(run)), training=c.TrainingSection(seq_len=64))
    (run / "config.toml").write_text(to_toml(config))
    shape = policy_of(config, run / "model").shape
    model = RoleModel(role, config, shape if role == "trainer" else shape.with_value_head(), config.parallelism)
    for parameter in model.model.parameters():
        local(parameter.data).normal_(std=0.3)
    model.begin_phase("rl", 0)
    model.phase.state.step = STEP
    model.phase.save(STEP, "{}")
    model.close()
    return run


def without_padding(folder: Path) -> Path:
    """Take the padding token from a Hugging Face folder: EOS serves as one, as with many models."""
    for name in ("tokenizer_config.json", "config.json"):
        values = json.loads((folder / name).read_text())
        values = {key: value for key, value in values.items() if key not in ("pad_token", "pad_token_id")}
        (folder / name).write_text(json.dumps(values))
    return folder


def write_chat(path: Path) -> Path:
    rows = [{"question": [{"role": "user", "content": f"{i}+1="}], "answer": str(i + 1)} for i in range(4)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def main(folder: Path) -> None:
    """Export each case in turn; a later one may start from an earlier one's folder."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=0, world_size=1)
    done: dict[str, tuple[int, str]] = {}

    def exported(case: str, run: Path, *argv: str) -> Path:
        out = folder / f"out-{case}"
        done[case] = export.main([str(run), "--out", str(out), *argv]), str(out)
        return out

    language = save_checkpoint(folder / "language", c.Config(model=c.ModelSection(**SIZES)))
    plain = exported("language", language)
    chat = c.TaskSection(
        name="jsonl", path=str(write_chat(folder / "chat.jsonl")), template="chat", system_prompt="add"
    )
    tied = c.ModelSection(name="qwen3", enable_weight_tying=True, **SIZES)
    exported(
        "chat",
        save_checkpoint(folder / "chat", c.Config(model=tied, task=chat, eval=c.EvalSection(size=0))),
        *("--dtype", "bfloat16", "--step", str(STEP)),
    )
    start = c.ModelSection(hf_assets_path=str(without_padding(plain)))
    judge = c.Config(model=start, algorithm=c.AlgorithmSection(name="reward_model"))
    exported("reward", save_checkpoint(folder / "reward", judge))
    exported(
        "critic", save_checkpoint(folder / "language", c.Config(model=c.ModelSection(**SIZES)), "critic"), "--critic"
    )

    assets = export.write_assets

    def another_rope(policy: Any, partial: Path, dtype: str) -> None:
        assets(policy, partial, dtype)
        config = json.loads((partial / "config.json").read_text())
        config["rope_parameters"]["rope_theta"] *= 1.01
        (partial / "config.json").write_text(json.dumps(config))

    def no_bos(policy: Any, partial: Path, dtype: str) -> None:
        assets(policy, partial, dtype)
        saved = json.loads((partial / "tokenizer.json").read_text())
        (partial / "tokenizer.json").write_text(json.dumps(saved | {"post_processor": None}))

    for planted in (another_rope, no_bos):
        export.write_assets = planted
        exported(planted.__name__, language)
    export.write_assets = assets
    data = next((language / "checkpoint" / f"step-{STEP}").glob("*.distcp"))
    data.write_bytes(data.read_bytes()[:1000])
    exported("damaged", language)
    (data.parent / SUMS).unlink()
    exported("cut", language)
    print(json.dumps(done))


if __name__ == "__main__":
    torch.manual_seed(0)
    main(Path(sys.argv[1]))
