"""Asks TorchTitan how it cuts the models of a run over their meshes, in another process: this one imports no torch."""

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from titan_rl.actors.vllm.vllm_params import pieces
from titan_rl.config.sections import Config, LoraSection
from titan_rl.preflight.checks.machine import check_gpu_memory, check_host_memory
from titan_rl.preflight.placement import gpus_of_hosts
from titan_rl.preflight.plan import Setup
from titan_rl.preflight.refusal import refuse
from titan_rl.preflight.shapes import role_shapes
from titan_rl.wire.model_shape import MeshQuestion, ModelShape, ShardedModel

SECONDS = 300.0  # measured: 10 for 8B over 8 ranks, 30 for 70B over 64


class CannotShard(Exception):
    """TorchTitan refuses a mesh, or did not answer. The text is a problem with the key to change."""


def checked_sharding(setup: Setup) -> dict[str, ShardedModel]:
    """Return how TorchTitan cuts the models of a run on GPUs, or refuse the run. On a CPU, where ranks themselves are
    cheap to start, nothing is asked."""
    config, shape, gpus = setup.resolved, setup.shape, setup.gpus
    if setup.device != "cuda" or not gpus.nbytes:
        return {}
    try:
        sharded = ask_titan(questions(config, shape))
    except CannotShard as error:
        refuse(setup.name, [str(error)])
    most = gpus_of_hosts(config, gpus.count)
    adapters = setup.adapters
    problems = [*check_gpu_memory(setup.config, shape, gpus.nbytes, most=most, sharded=sharded, adapters=adapters)]
    if problems := [*problems, *check_host_memory(config, shape, sharded, gpus.count, adapters)]:
        refuse(setup.name, problems)
    return sharded


def questions(config: Config, shape: ModelShape) -> dict[str, MeshQuestion]:
    """Return what to ask about each mesh that holds a TorchTitan model."""
    config = replace(config, compile=replace(config.compile, enable=False))  # it cuts nothing, and imports much
    tp, shapes = config.generator.tensor_parallel_degree, role_shapes(config, shape)
    readers = (
        [pieces(shape, tp=tp, rank=rank, lora=config.lora.in_vllm, dtype=config.generator.dtype) for rank in range(tp)]
        if config.samples_rollouts
        else []
    )
    trainer = MeshQuestion(config, shape, config.parallelism, readers)
    whole = replace(config, lora=LoraSection())  # other models are no adapters
    roles = {name: MeshQuestion(whole, shapes[name], role.parallelism) for name, role in config.roles.items()}
    return {"trainer": trainer, **roles}


def ask_titan(questions_by_mesh: Mapping[str, MeshQuestion], seconds: float = SECONDS) -> dict[str, ShardedModel]:
    command = [sys.executable, "-m", "titan_rl.ext.run_plan.ranks.meta_model"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder, "answer")
        try:
            process = subprocess.run(
                [*command, str(answer)],
                input=pickle.dumps(dict(questions_by_mesh)),
                capture_output=True,
                env=environment,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise CannotShard(
                f"expected TorchTitan to cut the models within {seconds:g} s, found it still busy"
            ) from None
        if process.returncode:
            errors = process.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
            raise CannotShard(
                f"expected a process that imports TorchTitan, found exit code {process.returncode}: {errors[-1]}"
            )
        answers: dict[str, ShardedModel | str] = pickle.loads(answer.read_bytes())
    return {name: _cut(name, one) for name, one in answers.items()}


def _cut(name: str, answer: ShardedModel | str) -> ShardedModel:
    if isinstance(answer, str):
        section = "parallelism" if name == "trainer" else name
        raise CannotShard(f"[{section}]: expected a mesh over which TorchTitan cuts the model, found {answer}")
    return answer
