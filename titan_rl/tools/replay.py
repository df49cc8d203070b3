"""`python -m titan_rl replay RUN --step N`: make a trainer's step again from kept batches, and compare it.

    RUN/checkpoint/step-C ── begin_phase ──> trainers ── RUN/batches/step-C+1 ... step-N ──> loss, gradient norm
                                                └── before step N, on request: log-probs of its samples

The mesh may have another shape than the run's. Nothing in the run changes, but for RUN/replays with --logprobs.
Exit codes: 0 equal within the tolerance, 1 not equal or failed, 2 bad usage, 130 stopped.
"""

import argparse
import math
import os
import pdb
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from titan_rl.config.auto import device_of, on_device, threads
from titan_rl.config.sections import Config
from titan_rl.config.toml import CONFIG, ConfigError
from titan_rl.ext.replay.kept_batches import KeptBatches
from titan_rl.record.lines import encode, replacing
from titan_rl.tools.deployed import drive, in_own_network, overrides_of
from titan_rl.tools.inspect.run_files import RunFiles
from titan_rl.tools.refused_input import UsageError, named_refusals
from titan_rl.tools.saved_steps import saved_steps
from titan_rl.wire.checkpoint_sums import damage
from titan_rl.wire.cores import host_memory, usable_cores
from titan_rl.wire.gpus import PLANNED, found_gpus, visible_devices
from titan_rl.wire.program import DONE, FAILED, command_of, enter
from titan_rl.wire.types import Sample

if TYPE_CHECKING:
    from titan_rl.meshes.model_mesh import ModelMesh
    from titan_rl.record.terminal import Terminal
    from titan_rl.train.learner import Packer
    from titan_rl.wire.model_shape import ModelShape
    from titan_rl.wire.reports import StepStats

PROG = "titan_rl replay"
COMPARED = ("loss", "grad_norm")
TOLERANCE = 1e-3  # relative: what another shape of the mesh may change by rounding
ZERO = 1e-6  # absolute: what rounding leaves of a number that is zero
FREE = ("parallelism", "training", "hosts", "comm", "compile", "activation_checkpoint", "debug", "profiling")
"""Sections whose keys may differ from the run's: they change how a step is computed, not what."""


@dataclass(frozen=True, slots=True)
class ReplayPlan:
    """The steps to make again, after a checkpoint and up to the compared one."""

    run: Path
    config: Config
    start: int
    step: int
    recorded: Mapping[int, Mapping[str, float]]  # metrics by step
    batches: KeptBatches


def main(argv: Sequence[str]) -> int:
    with named_refusals(PROG):
        options, words = parser().parse_known_args(argv)
        plan = plan_of(options.run, options.step, overrides_of(words))
        if options.debug:
            return debug(plan)
        return in_own_network(
            PROG, plan.config, lambda scratch: replay(plan, options.logprobs, scratch), kinds=["model"]
        )


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("replay"),
        description="Make a trainer's step again, from the checkpoint before it and the batches that record.batches "
        "kept, and compare loss and gradient norm with the run's.",
        epilog=f"Keys of {', '.join(FREE)} may be changed: --parallelism.data_parallel_shard_degree 1 replays a step "
        "of many ranks on one. A critic is not replayed: its values are in the batch.",
        allow_abbrev=False,
    )
    parser.add_argument("run", metavar="RUN", type=Path, help="dump folder of the run")
    parser.add_argument("--step", metavar="N", type=int, help="step to make again; default: the newest that is kept")
    logprobs = "compare the trainers' log-prob of each token with the sampling one; writes RUN/replays/step-N.jsonl"
    parser.add_argument("--logprobs", action="store_true", help=logprobs)
    debugger = "make the step in this process, by one rank, under Python's debugger"
    parser.add_argument("--debug", action="store_true", help=debugger)
    return parser


def plan_of(run: Path, step: int | None, overrides: Sequence[tuple[str, str]]) -> ReplayPlan:
    """Find the batches and the checkpoint. Raise UsageError if the step cannot be made again."""
    files = RunFiles(run)
    if not (files / CONFIG).is_file():
        raise UsageError(f"RUN: expected the dump folder of a run, with its {CONFIG}, {files.absence}")
    wrong = [key for key, _ in overrides if key.split(".")[0] not in FREE]
    if wrong:
        raise UsageError(f"--{wrong[0]}: expected a key of {', '.join(FREE)}: another one would change the result")
    try:
        config = files.config(overrides)
    except ConfigError as error:
        raise UsageError("; ".join(error.problems)) from error
    batches, kept = KeptBatches(run, 0), set(KeptBatches(run, 0).steps)
    if not kept:
        raise UsageError(f"RUN: expected batches of the run's steps, found none in {run}: it had record.batches = 0")
    if step is None:
        step = max(kept)
    saved = saved_steps(run)
    begins = [int(name) for name in saved if name.isdecimal()]
    begins += [] if config.cold_start.steps else [0]  # 0: the model as it is built
    possible = {start: _last_reached(start, kept) for start in begins}
    starts = [start for start, last in possible.items() if start < step <= last]
    if not starts:
        reached = sorted({n for start, last in possible.items() for n in range(start + 1, last + 1)})
        expected = f"one of steps {_ranges(reached)}" if reached else "a checkpoint before a kept step"
        raise UsageError(
            f"--step: expected {expected}: the steps after a checkpoint in {run} with batches, found {step}"
        )
    start = max(starts)
    if start and (reason := damage(saved[str(start)], read=True)):
        raise UsageError(f"{saved[str(start)]} is damaged: {reason}")
    recorded = {line["step"]: line for line in files.metrics() if line["kind"] in ("rl", "fit")}
    config = replace(
        config,
        job=replace(config.job, dump_folder=str(run.absolute()), fresh=False),
        checkpoint=replace(config.checkpoint, enable=True),
        record=replace(config.record, batches=0),
    )
    return ReplayPlan(run, config, start, step, recorded, batches)


def _last_reached(start: int, kept: set[int]) -> int:
    """Return the last step that can be made from the checkpoint of `start`."""
    while start + 1 in kept:
        start += 1
    return start


def _ranges(steps: Sequence[int]) -> str:
    """Return 3 to 5, 9."""
    parts: list[list[int]] = []
    for step in steps:
        if parts and parts[-1][-1] == step - 1:
            parts[-1].append(step)
        else:
            parts.append([step])
    return ", ".join(f"{part[0]} to {part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def model_of(plan: ReplayPlan, scratch: Path) -> "tuple[Config, ModelShape, Packer, str]":
    """Return the config that ranks work with, the model's shape, the packer and the device."""
    from titan_rl.preflight.memory import on_cpu, on_gpus
    from titan_rl.preflight.plan import policy_of
    from titan_rl.train.learner import Packer

    gpus = found_gpus()
    device = device_of(plan.config, gpus.count)
    config = on_device(plan.config, device)
    try:
        policy = policy_of(config, scratch / "policy")
    except (OSError, ValueError) as error:
        raise UsageError("; ".join(str(error).splitlines())) from error
    shape = policy.shape
    resolved = on_gpus(config, shape, gpus.nbytes) if device == "cuda" else on_cpu(config, shape, host_memory())
    return resolved, shape, Packer.of(config, resolved, policy.tokenizer.pad), device


# -- on a mesh ---------------------------------------------------------------------------------------------------------


def replay(plan: ReplayPlan, logprobs: bool, scratch: Path) -> int:
    from titan_rl.record.terminal import Terminal

    terminal = Terminal()
    config, shape, packer, device = model_of(plan, scratch)
    results: list[tuple[int, StepStats]] = []

    async def work() -> int:
        from titan_rl.meshes.faults import Watch

        mesh, watch = mesh_of(config, shape, device), Watch()
        try:
            with terminal.phase(f"trainers, checkpoint of step {plan.start}"):
                await mesh.start()
                await mesh.begin_phase("rl", plan.start)
            for step in range(plan.start + 1, plan.step + 1):
                updates = read_batches(plan, step)
                if logprobs and step == plan.step:
                    await compare_logprobs(plan, mesh, packer, updates, terminal)
                with terminal.phase(f"step {step}"):
                    stats = await mesh.step([packer.update(samples, mesh.dp) for samples in updates])
                results.append((step, stats))
        finally:
            watch.close()  # else Monarch may interrupt this process when it finds the ranks killed
            await mesh.kill()
        return DONE

    code = drive(work, terminal)
    return code or compared(plan, results, terminal)


def mesh_of(config: Config, shape: "ModelShape", device: str) -> "ModelMesh":
    """Return the trainers' mesh on this host, which is not started yet."""
    from monarch.actor import this_host

    from titan_rl.actors.endpoint import without_lines
    from titan_rl.meshes.hosts import Host, RankPlace
    from titan_rl.meshes.model_mesh import ModelMesh
    from titan_rl.train.rank_places import cuda_environment

    ranks = config.parallelism.world_size
    devices = visible_devices()[:ranks] if device == "cuda" else []
    if device == "cuda" and len(devices) < ranks:
        raise UsageError(f"parallelism: expected at most {len(devices)} ranks, one per GPU of this host, found {ranks}")
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "OMP_NUM_THREADS": str(threads(config, "model", device, usable_cores())),
        PLANNED: device,
        **(cuda_environment(config) if device == "cuda" else {}),
    }
    with without_lines(b"Monarch internal logs are being written"):
        place = RankPlace(Host(this_host()), ranks, env)
    return ModelMesh(lambda: [place], "trainer", config, shape, {PLANNED: device})


def read_batches(plan: ReplayPlan, step: int) -> list[list[Sample]]:
    from titan_rl.wire.errors import RunError

    try:
        return plan.batches.read(step)
    except ValueError as error:
        raise RunError(str(error)) from error


def compared(plan: ReplayPlan, results: "Sequence[tuple[int, StepStats]]", terminal: "Terminal") -> int:
    """Print the recorded numbers and the new ones. Return 1 if the last step's differ."""
    terminal.note(f"{'step':>6}  {'':<10}{'recorded':>16}{'now':>16}{'relative':>12}")
    apart = 0.0
    for step, stats in results:
        recorded = plan.recorded.get(step, {})
        for name in COMPARED:
            now, before = float(getattr(stats, name)), recorded.get(name)
            if before is None:  # the run ended in this step, or its number was not finite
                terminal.note(f"{step:>6}  {name:<10}{'none':>16}{now:>16.8g}")
                continue
            difference = 0.0 if now == before else abs(now - before) / max(abs(before), abs(now))
            shown = "equal" if now == before else f"{difference:.1e}"
            terminal.note(f"{step:>6}  {name:<10}{before:>16.8g}{now:>16.8g}{shown:>12}")
            # On-policy the loss is zero by construction, and only rounding remains of it.
            if step == plan.step and not abs(now - before) < ZERO:
                apart = max(apart, difference if math.isfinite(difference) else math.inf)
    if apart > TOLERANCE:
        terminal.note(f"step {plan.step} differs by more than {TOLERANCE:g}")
        return FAILED
    return DONE


async def compare_logprobs(
    plan: ReplayPlan, mesh: "ModelMesh", packer: "Packer", updates: Sequence[Sequence[Sample]], terminal: "Terminal"
) -> None:
    """Compute the trainers' log-probs before the step. Show the largest gaps to the sampling ones, and write all."""
    from titan_rl.batch.packing import unpack

    samples = [sample for update in updates for sample in update if "behaviour" in sample.columns]
    if not samples:
        raise UsageError("--logprobs: expected an algorithm of RL: the batch has no log-probs of sampling")
    with terminal.phase(f"log-probs before step {plan.step}"):
        batches = packer.update(samples, mesh.dp)
        answers, _ = await mesh.scores(batches, plan.config.rollout.temperature)
    gaps = [
        np.where(np.asarray(sample.mask) > 0, found - np.asarray(sample.columns["behaviour"]), 0.0)
        for sample, found in zip(samples, unpack(batches, answers, samples), strict=True)
    ]
    path = plan.run / "replays" / f"step-{plan.step}.jsonl"
    path.parent.mkdir(exist_ok=True)
    with replacing(path) as file:
        for sample, gap in zip(samples, gaps, strict=True):
            line = {"tokens": np.asarray(sample.tokens), "gaps": np.round(gap, 6)}
            file.write(encode(line) + b"\n")
    trained = np.concatenate([gap[np.asarray(sample.mask) > 0] for sample, gap in zip(samples, gaps, strict=True)])
    places = np.concatenate([np.linspace(0, 1, int(np.sum(sample.mask))) for sample in samples])
    sizes = np.abs(trained)
    terminal.note(f"log-prob gap of {len(trained):,} tokens: mean {sizes.mean():.2e}, largest {sizes.max():.2e}")
    for name, low, high in (("first", 0, 0.25), ("second", 0.25, 0.5), ("third", 0.5, 0.75), ("last", 0.75, 1.01)):
        part = sizes[(places >= low) & (places < high)]
        terminal.note(f"  {name} quarter of the answers: mean {part.mean() if len(part) else 0:.2e}")
    view = f"{command_of('view')} {shlex.quote(str(plan.run))}"
    terminal.note(f"all gaps are in {path}; `{view}` colours tokens by them")


# -- in a debugger -----------------------------------------------------------------------------------------------------


def debug(plan: ReplayPlan) -> int:
    """Make the step in this process, and stop in the debugger at its beginning and where it fails."""
    import tempfile

    if plan.config.parallelism.world_size > 1:
        raise UsageError(
            "--debug: expected one rank, because the step is made in this process; found "
            f"{plan.config.parallelism.world_size}: add --parallelism.data_parallel_shard_degree 1 and the like"
        )
    if not sys.stdin.isatty():
        raise UsageError("--debug: expected a terminal, for the debugger, found none")
    with tempfile.TemporaryDirectory() as scratch:
        step, batches = in_process(plan, Path(scratch))
        print(f"{PROG}: step {plan.step} is about to be made: `n` and `s` make a step, `u` shows the caller, `q` ends")
        debugger = pdb.Pdb()
        try:
            print(debugger.runcall(step, batches))
        except Exception:
            pdb.post_mortem(sys.exc_info()[2])
            return FAILED
    return DONE


def in_process(plan: ReplayPlan, scratch: Path) -> tuple[Any, list[Any]]:
    """Return a model's `step` in the state before the step, and its batches."""
    config, shape, packer, device = model_of(plan, scratch)
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
    os.environ[PLANNED] = device
    import torch.distributed as dist

    from titan_rl.actors.endpoint import quiet
    from titan_rl.actors.titan.role_model import RoleModel

    quiet()
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{scratch}/ranks", rank=0, world_size=1)
    model = RoleModel("trainer", config, shape, config.parallelism)
    model.begin_phase("rl", plan.start)
    for step in range(plan.start + 1, plan.step):
        model.step([batch for update in plan.batches.read(step) for batch in packer.update(update, 1)])
    return model.step, [batch for update in plan.batches.read(plan.step) for batch in packer.update(update, 1)]


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
