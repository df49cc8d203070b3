"""Trained weights in generators, without trainers: what `titan_rl eval` and `titan_rl serve` have in common.

    RUN, CHECKPOINT or FOLDER ── chosen ──> config, step ── exported if it is a checkpoint ──> a Hugging Face folder
                                              └── deployment: generators that have loaded it, and environments

Nothing is written to the run's folder, and the run may be active.
"""

import asyncio
import re
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl import isolation
from titan_rl.config import toml as config_file
from titan_rl.config.sections import Config
from titan_rl.config.toml import CONFIG, ConfigError
from titan_rl.environment import prepare_environment, socket_folder
from titan_rl.meshes.starter import Kind, starter
from titan_rl.tools.refused_input import UsageError
from titan_rl.tools.saved_steps import saved_steps
from titan_rl.wire.program import FAILED, STOPPED

if TYPE_CHECKING:  # imported when this process has its own network
    from titan_rl.preflight.plan import Setup
    from titan_rl.record.terminal import Terminal

NVIDIA = Path("/proc/driver/nvidia")  # exists if NVIDIA's driver is loaded
STEP = re.compile(r"step-(\d+)(?:\.\d+)?")
TARGET = "dump folder of a run (its newest weights), a checkpoint in it, or a Hugging Face folder"


@dataclass(frozen=True, slots=True)
class Chosen:
    """The weights to deploy, and their run's config."""

    config: Config
    name: str  # for people
    folder: Path | None = None  # a Hugging Face folder; None: `step` of `run` must be exported first
    run: Path = Path()
    step: str = ""


def choose(target: Path, step: str | None, config_name: str | None, overrides: Sequence[tuple[str, str]]) -> Chosen:
    """Find the weights, and the config that evaluates or serves them."""
    run, target_step = _run_of(target)
    inside = run is not None and run != target.absolute() and not target_step
    if not target.is_dir() or (inside and hf_folder(target) is None):
        raise UsageError(f"expected the {TARGET}, found none of them at {target}")
    if target_step and step not in (None, target_step):
        raise UsageError(f"--step: expected none, or {target_step}, with the checkpoint {target}, found {step}")
    step = step or target_step or None
    if not (run or config_name):
        raise UsageError(
            f"--config: expected the config with the task and the [generator] of {target}, because it is in no run's "
            "folder, found none"
        )
    try:
        if config_name or run is None:
            config = config_file.load(config_file.find(config_name or ""), overrides)
        else:
            config = config_file.load_of_run(run, overrides)
    except ConfigError as error:
        raise UsageError("; ".join(error.problems)) from error
    if config.algorithm.kind == "reward":
        raise UsageError(f"{target}: expected a policy, found a reward model")
    folder = hf_folder(target)
    if folder is not None:
        if step is not None:
            raise UsageError(f"--step: expected none with a Hugging Face folder, found {step}")
        return Chosen(config, str(folder), folder.absolute())
    if run is None:
        raise UsageError(f"expected the {TARGET}, found none of them at {target}")
    return _of_run(run, config, step)


def hf_folder(path: Path) -> Path | None:
    """Return the folder if it has weights in Hugging Face's format. For a run's best/, that is the best one."""
    if path.name == "best" and not (path / "config.json").is_file():
        from titan_rl.train.best_weights import best_folders

        best = best_folders(path)
        return best[0].folder if best else None
    return path if (path / "config.json").is_file() and any(path.glob("*.safetensors")) else None


def _run_of(target: Path) -> tuple[Path | None, str]:
    """Return the run that the target is or is in, and the step if the target is its checkpoint."""
    near = [target.absolute(), *target.absolute().parents[:3]]
    run = next((path for path in near if (path / CONFIG).is_file()), None)
    named = STEP.fullmatch(target.name)
    if run is None or named is None or hf_folder(target) is not None:
        return run, ""
    cold = "cold_start/" if target.absolute().parent.name == "cold_start" else ""
    return run, f"{cold}{named[1]}"


def _of_run(run: Path, config: Config, step: str | None) -> Chosen:
    """Choose a run's weights: of a step, or its newest. hf/ has the last step's once the run is finished."""
    from titan_rl.wire.checkpoint_sums import FOLDER

    hf, folder, names = hf_folder(run / "hf"), run / FOLDER, list(saved_steps(run))
    if step is not None:
        if step not in names:
            raise UsageError(f"--step: expected one of {', '.join(names) or 'none'} (in {folder}), found {step}")
        return Chosen(config, f"step {step} of {run}", None, run, step)
    newest = next((name for name in reversed(names) if name.isdecimal()), None)
    if hf is not None and newest in (None, str(config.training.steps)):
        return Chosen(config, f"{hf} (step {config.training.steps})", hf.absolute())
    if newest is None:
        raise UsageError(f"{run}: expected a whole checkpoint in {folder}, or hf/, found neither")
    return Chosen(config, f"step {newest} of {run}", None, run, newest)


def exported(chosen: Chosen, scratch: Path) -> Path:
    """Return the Hugging Face folder of the chosen weights. A checkpoint is exported, and proven, by another process:
    torch and TorchTitan stay out of this one."""
    if chosen.folder is not None:
        return chosen.folder
    out = scratch / "weights"
    command = [sys.executable, "-m", "titan_rl", "export", str(chosen.run), "--step", chosen.step, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        why = done.stderr.strip().rpartition("\n")[2].removeprefix("titan_rl export: ")
        raise UsageError(f"{chosen.name}: {why}")
    return out


def setup_of(config: Config, folder: Path, scratch: Path) -> "Setup":
    """Plan a deployment. Only the parts that it needs are checked: sets, their rewards, GPUs."""
    from titan_rl.preflight.plan import keep_images, prepare
    from titan_rl.wire.gpus import NO_GPUS, found_gpus

    try:
        config = alone(config, folder, scratch)
    except FileNotFoundError as error:
        raise UsageError(f"{error}; a run's paths are relative to the folder in which it was started") from error
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error
    gpus = NO_GPUS if config.hosts.device == "cpu" else found_gpus()
    refuse_sets(config)
    needed = config.generator.replicas * config.generator.tensor_parallel_degree + len(config.environment.folders)
    if gpus.count and needed > gpus.count:
        raise UsageError(f"generator.replicas: expected at most {gpus.count} GPUs for the generators, found {needed}")
    try:
        device = "cuda" if gpus.count else "cpu"
        setup = prepare(str(folder), config, device=device, scratch=scratch / "model", gpus=gpus)
        keep_images(setup)
        return setup
    except (OSError, ValueError) as error:
        raise UsageError("; ".join(str(error).splitlines())) from error


def refuse_sets(config: Config) -> None:
    from titan_rl.preflight.checks.rollouts import check_evaluation

    problems = list(check_evaluation(config))
    if problems:
        raise UsageError("; ".join(problems))


def alone(config: Config, folder: Path, scratch: Path) -> Config:
    """Return the config of generators alone: the model is the folder's, nothing is trained, and only held-out data is
    read. Seeds, and with them the held-out problems, are the run's."""
    from titan_rl.config.algorithm_sections import AlgorithmSection, CurriculumSection
    from titan_rl.config.model_sections import ColdStartSection, ModelSection
    from titan_rl.tasks.row_files import row_files
    from titan_rl.wire.model_shape import shape_of_folder

    shape = shape_of_folder(str(folder), "FOLDER")
    task = config.task
    if task.name == "jsonl" and task.eval_path and config.eval.size:
        row_files(task.eval_path, "task.eval_path")
    files = [task.eval_path, *(str(table.get("path", "")) for table in config.eval.sets.values())]
    return replace(
        config,
        job=replace(config.job, dump_folder=str(scratch / "run"), fresh=False),
        model=ModelSection(
            name=shape.family,
            hf_assets_path=str(folder),
            head_dtype=config.model.head_dtype,
            vision=config.model.vision,
        ),
        algorithm=AlgorithmSection(name="sft"),  # has no other models
        cold_start=ColdStartSection(steps=0, stop_at=0.0),
        curriculum=CurriculumSection(),
        placement=replace(config.placement, kind="disaggregated"),
        task=replace(
            task,
            path=next(filter(None, files), task.path),
            sources={} if any(files) else task.sources,
            grader="",
        ),
        eval=replace(config.eval, size=config.eval.size if task.name != "jsonl" or task.eval_path else 0, keep_best=""),
    )


def in_own_network(
    prog: str, config: Config, work: Callable[[Path], int], *, kinds: Sequence[Kind] = ("generator",)
) -> int:
    """Call `work` with a folder for its files. Monarch's sockets are then reachable by this process's user alone.
    `kinds`: of the ranks that it starts."""
    with socket_folder() as folder, starter().serving(folder) as servers:
        if not NVIDIA.exists():
            servers.keep(kinds)
        exposed = "" if config.hosts.isolation == "off" else isolation.isolate()
        if exposed and config.hosts.isolation == "require":
            raise UsageError(f"hosts.isolation: expected a kernel that can isolate the processes, found: {exposed}")
        if exposed:
            print(f"{prog}: {isolation.warning(exposed)}", file=sys.stderr)
        prepare_environment(config.fault.detect_seconds, meshes=config.generator.replicas)
        return work(folder)


def drive(work: Callable[[], Awaitable[int]], terminal: "Terminal") -> int:
    """Run a deployment to its end, or until a signal, and end its processes."""
    from titan_rl.train.bring_up import shutdown
    from titan_rl.wire.errors import RunError

    async def driven() -> int:
        task, loop = asyncio.current_task(), asyncio.get_running_loop()
        assert task is not None
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, task.cancel)
        try:
            return await work()
        finally:
            await shutdown()

    try:
        return asyncio.run(driven())
    except RunError as error:
        terminal.error(str(error), error.details)
        return FAILED
    except asyncio.CancelledError:
        return STOPPED


def overrides_of(words: Sequence[str]) -> list[tuple[str, str]]:
    """Return (section.key, text) of the flags --section.key=VALUE or --section.key VALUE."""
    overrides, rest = [], list(words)
    while rest:
        flag, equals, value = rest.pop(0).partition("=")
        if not flag.startswith("--") or "." not in flag:
            raise UsageError(f"unknown argument {flag}: --help lists the known ones; a config's key is --section.key")
        if not equals:
            if not rest:
                raise UsageError(f"{flag}: expected a value, found none")
            value = rest.pop(0)
        overrides.append((flag.removeprefix("--"), value))
    return overrides
