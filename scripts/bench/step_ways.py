"""The ways to take a step that bench_step.py compares: each is a separate program, run to its end."""

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from bench.peak_memory import run_and_measure
from bench.rows import metric_lines, run_command
from bench.step_shapes import SHAPES, Shape, chats
from titan_rl.actors.vllm import launch_env, vllm_cpu
from titan_rl.environment import CONTROLLER_ENV
from titan_rl.text import tokenizer
from titan_rl.tools.fetch.models import model_folder

SCRIPTS = Path(__file__).resolve().parents[1]
TORCH, VLLM, OURS, LAG, TRL = "torch", "vLLM", "titan_rl", "titan_rl, lag 1", "TRL"
WAYS = (TORCH, VLLM, OURS, LAG, TRL)
PARTS = ("generation", "training", "sync", "rest")
PEAK = "peak_gib"  # memory of all processes; a row of step.csv of an older commit has none
PROMPTS_FILE = "prompts.jsonl"  # in the folder of a pretrained model
AFTER = 1  # step at the end of a run that is not measured: at lag 1, nothing is left to generate
THREADS = str(len(os.sched_getaffinity(0)))
# Threads of others than our ranks wait as OpenMP has them wait: with OMP_WAIT_POLICY=PASSIVE a step of TRL takes 1.25
# times as long, if nothing else uses the cores.
ENV = {
    **launch_env.ENV,
    **vllm_cpu.ENV,
    "PYTHONPATH": f"{SCRIPTS.parent}:{SCRIPTS}",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": THREADS,
}
LAG_KEYS = {"rollout.max_staleness_steps": 1, "parallelism.data_parallel_shard_degree": 1}  # as in grpo_llama_async


def measured(way: str, name: str, folder: Path, trl: Path | None) -> dict[str, float]:
    """Return the median seconds of a step and of its parts, and the peak memory of all processes."""
    if way in (OURS, LAG):
        return run(name, folder, LAG_KEYS if way == LAG else {})
    python, program = (trl, "step_trl") if way == TRL else (sys.executable, f"step_{way.lower()}")
    command = [str(python), str(SCRIPTS / "bench" / f"{program}.py"), name, str(folder)]
    env = {**os.environ, **ENV} | ({"PYTHONPATH": str(SCRIPTS)} if way == TRL else {})
    with tempfile.TemporaryDirectory() as dump:
        log = Path(dump) / "log"
        peak = run_and_measure(command, env, log)
        steps = [json.loads(line) for line in log.read_text().splitlines() if line.startswith('{"step"')]
    if len(steps) != SHAPES[name].steps:
        raise ValueError(f"expected {SHAPES[name].steps} measured steps from {program}, found {len(steps)}")
    return medians(steps) | {PEAK: peak / 2**30}


def run(name: str, folder: Path, keys: Mapping[str, Any]) -> dict[str, float]:
    shape = SHAPES[name]
    with tempfile.TemporaryDirectory() as dump:
        program = [str(SCRIPTS / "bench" / "step_ours.py"), name]
        command = run_command({**run_keys(shape, folder), **keys, "job.dump_folder": dump}, program)
        peak = run_and_measure(command, {**CONTROLLER_ENV, **os.environ}, Path(dump) / "log")
        lines = metric_lines(Path(dump), "rl")[shape.warm_up - 1 : -AFTER]
    tokens = {line["tokens/trained"] for line in lines}
    if tokens != {shape.sampled}:
        raise ValueError(f"expected {shape.sampled} trained tokens in each step, found {sorted(tokens)}")
    steps = (
        {
            "step": line["time/step"],
            "generation": line["engine/sampling_seconds"],
            "training": line["engine/training_seconds"],
            "sync": line["sync/seconds"],
            "cpu": line["bench/cpu_seconds"] - before["bench/cpu_seconds"],
        }
        for before, line in pairwise(lines)
    )
    return medians(steps) | {PEAK: peak / 2**30}


def run_keys(shape: Shape, folder: Path) -> dict[str, Any]:
    """Return what differs from grpo_llama: the shape, equal weights, no schedule, and nothing besides steps. A
    pretrained model has the ranks of grpo_smollm2."""
    tool = {"environment.name": "bench.step_shapes:Tool", "environment.concurrency": 128}
    chat = {"task.name": "jsonl", "task.path": folder / PROMPTS_FILE, "task.template": "chat"}
    pretrained = {**chat, "parallelism.data_parallel_shard_degree": 1, "generator.max_num_seqs": shape.samples}
    return {
        "model.hf_assets_path": folder,
        "task.reward": "bench.step_shapes:share_of_digits",
        "cold_start.steps": 0,
        "cold_start.stop_at": 0,
        "rollout.groups_per_step": shape.groups,
        "rollout.group_size": shape.group_size,
        "rollout.max_new_tokens": shape.longest,
        "algorithm.entropy_coef": 0,
        "algorithm.max_dead_steps": 0,
        "training.steps": shape.warm_up + shape.steps + AFTER,
        "training.seq_len": shape.seq_len,
        "optimizer.lr": shape.lr,
        "lr_scheduler.warmup_steps": 0,
        "lr_scheduler.decay_ratio": 0,
        "eval.size": 0,
        "checkpoint.enable": "false",
        **(tool if shape.read else {}),
        **(pretrained if shape.pretrained else {}),
    }


def medians(steps: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return the median of each part over the steps; "rest" is what the other parts leave of the step. Where parts
    overlap it is negative."""
    every = list(steps)
    found = {part: statistics.median(step.get(part, 0.0) for step in every) for part in (*PARTS[:3], "step", "cpu")}
    return found | {"rest": found["step"] - sum(found[part] for part in PARTS[:3])}


def engines_of(python: Path) -> str:
    """Return the versions that TRL's interpreter has, as rows.ran_on() writes them."""
    names = ("torch", "transformers", "trl")
    script = f"from importlib.metadata import version as v; print(', '.join(f'{{n}} {{v(n)}}' for n in {names}))"
    return subprocess.check_output([python, "-c", script], text=True).strip()


def write_model(shape: Shape, folder: Path) -> None:
    """Write the weights and the tokenizer from which every way starts: random ones and the built-in one, or links to
    the files of a pretrained model, and its prompts."""
    if shape.pretrained:
        for file in model_folder(shape.pretrained, "bench").iterdir():
            (folder / file.name).symlink_to(file.resolve())
        rows = [json.dumps({"question": chat, "answer": ""}) for chat in chats()]
        (folder / PROMPTS_FILE).write_text("\n".join(rows))
        return
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    tokenizer.build(folder)
    ids = tokenizer.VOCABULARY
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.dim,
        intermediate_size=shape.hidden_dim,
        num_hidden_layers=shape.n_layers,
        num_attention_heads=shape.n_heads,
        num_key_value_heads=shape.n_kv_heads,
        max_position_embeddings=2048,
        bos_token_id=ids["<s>"],
        eos_token_id=ids["</s>"],
        pad_token_id=ids["<pad>"],
        dtype="float32",
    )
    LlamaForCausalLM(config).save_pretrained(folder)
