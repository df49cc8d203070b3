"""docs/upstream/vllm-cpu-seeds: samples do not depend on how their contexts are prefilled, with and without it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.overlays import overlay
from support.slow_cases import slow_except
from support.tiny import tiny_llama
from titan_rl.actors.vllm import launch_env, vllm_cpu

PROGRAM = """
import json, sys
from support.engine_runs import run
from titan_rl.actors.vllm.engine import Engine, EngineSettings
from titan_rl.wire.types import Request, Sampling

settings = EngineSettings(
    model_dir=sys.argv[1], max_model_len=128, max_num_seqs=8, max_num_batched_tokens=128, kv_cache_memory_mb=32,
    load_format="auto",
)
engine = Engine(settings)
requests = [Request(str(i), [1, 4 + i, *range(4, 60), *range(8, 50 + i)], [i], Sampling(16)) for i in range(5)]
engine.set_version(0)
alone = [run(engine, request)[request.id][0].tokens for request in requests]
engine.set_version(1)  # with an empty prefix cache
together = run(engine, *requests)
chunks = engine._llm.vllm_config.scheduler_config.enable_chunked_prefill
print(json.dumps([chunks, alone, [together[request.id][0].tokens for request in requests]]))
"""


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama(max_position_embeddings=128).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("merged", slow_except([False, True], 1))
def test_samples_do_not_depend_on_chunks(model_dir: Path, tmp_path: Path, merged: bool) -> None:
    env = {**os.environ, **launch_env.ENV, **vllm_cpu.ENV, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    paths = ["tests", os.environ.get("PYTHONPATH", "")]
    if merged:
        paths.insert(0, overlay("vllm-cpu-seeds", tmp_path)["PYTHONPATH"])
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    done = subprocess.run([sys.executable, "-c", PROGRAM, str(model_dir)], env=env, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-3000:]
    chunks, alone, together = json.loads(done.stdout.splitlines()[-1])
    assert chunks is merged, "the work-around is used without the change only"
    assert together == alone
