"""Run a program with one rank of a model, without Monarch, in a separate process."""

from typing import Any

from support.forked_programs import results_of

BEGIN = """
import json, os, socket, sys
from dataclasses import replace
from pathlib import Path
with socket.socket() as s:
    s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
import numpy as np
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.batch.packing import pack, unpack
from titan_rl.config import sections as c
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.checkpoint_sums import SUMS, damage
from titan_rl.wire.snapshot import SnapshotPart
from titan_rl.wire.types import Sample

folder = Path(sys.argv[1])
config = c.Config(
    job=c.JobSection(dump_folder=str(folder)),
    checkpoint=c.CheckpointSection(keep_latest_k=2, async_mode=sys.argv[2] if len(sys.argv) > 2 else "disabled"),
    model=c.ModelSection(dim=64, n_layers=1, n_heads=2, n_kv_heads=2, hidden_dim=96),
    training=c.TrainingSection(steps=10, seq_len=32, local_batch_size=1),
    optimizer=c.OptimizerSection(lr=1e-2, weight_decay=0.01),
    lr_scheduler=c.LRSchedulerSection(warmup_steps=2, decay_ratio=0.5),
    critic=c.CriticSection(lr=1e-2),
    algorithm=c.AlgorithmSection(name="sft"),
)

def step(model):
    at = model.phase.state.step
    tokens = np.random.default_rng(at).integers(3, 60, 12).tolist()
    columns = {"value": np.ones(12) * (at + 1), "return": np.ones(12) * (at + 1)}  # near the return: not clipped
    batches = pack([Sample(tokens, [0] + [1] * 11, columns)], shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0)
    stats = model.step(batches)
    return stats.loss, stats.grad_norm, stats.lr

def tell(**found):
    print("FOUND", json.dumps(found), flush=True)
"""


def results_of_rank(program: str, *arguments: object) -> list[dict[str, Any]]:
    """Return the values that a program has passed to `tell`."""
    return results_of("model", BEGIN + program, *arguments)
