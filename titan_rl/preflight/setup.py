"""What a run is made of, resolved from its config before any process is spawned."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.preflight.shapes import shape_of
from titan_rl.tasks import tokenizer as characters
from titan_rl.tasks.problems import Problems
from titan_rl.tasks.rewards import reward_for
from titan_rl.tasks.task import Example, Task, load_task
from titan_rl.tasks.tokenizer import TextTokenizer
from titan_rl.wire.model_shape import ModelShape, shape_of_folder
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import PhaseName, Sampling


@dataclass(frozen=True, slots=True)
class Setup:
    name: str  # of the config
    config: Config
    folder: Path  # the dump folder
    shape: ModelShape
    tokenizer: TextTokenizer
    model_folder: Path  # config.json and tokenizer, in Hugging Face's format, for vLLM
    task: Task
    sampling: Sampling
    heldout: Problems
    practice: Problems  # as many of the training problems, where the cold start looks at them
    device: str  # "cpu" or "cuda"
    resume: "Resume"
    teacher: ModelShape | None  # where there is one
    reward_model: ModelShape | None

    @property
    def samples_rollouts(self) -> bool:
        return self.config.samples_rollouts

    @property
    def finished(self) -> bool:
        """Trained to the last step, and exported."""
        trained = (self.resume.rl or 0) >= self.config.training.steps and self.resume.over_cold_start(self.config)
        return trained and (self.folder / "hf").exists()


@dataclass(frozen=True, slots=True)
class Resume:
    """The latest complete checkpoint of each phase in the dump folder."""

    rl: int | None
    cold_start: int | None

    @classmethod
    def find(cls, folder: Path, config: Config) -> "Resume":
        checkpoints = folder / config.checkpoint.folder
        return cls(latest_step(checkpoints), latest_step(checkpoints / "cold_start"))

    def or_later(self, phase: PhaseName, step: int) -> "Resume":
        """With what there is in memory beside."""
        later = {phase: max(step, getattr(self, phase) or 0)}
        return replace(self, **later)

    @property
    def nothing(self) -> bool:
        """The run begins at its beginning."""
        return self.rl is None and self.cold_start is None

    def over_cold_start(self, config: Config) -> bool:
        return self.rl is not None or (self.cold_start or 0) >= config.cold_start.steps

    @property
    def kept_rl(self) -> int | None:
        """The last RL step whose records stay; None begins the records anew."""
        return 0 if self.rl is None and self.cold_start is not None else self.rl

    @property
    def kept_cold_start(self) -> int | None:
        """Where the cold start goes on; None where it is over."""
        return self.cold_start if self.rl is None else None

    def __str__(self) -> str:
        if self.rl is not None:
            return f"RL step {self.rl}"
        if self.cold_start is not None:
            return f"cold start step {self.cold_start}"
        return ""


def latest_step(checkpoints: Path) -> int | None:
    """DCP writes .metadata last: a folder without it is a save that did not finish."""
    found = (re.fullmatch(r"step-(\d+)", path.parent.name) for path in checkpoints.glob("step-*/.metadata"))
    return max((int(step[1]) for step in found if step), default=None)


def prepare(name: str, config: Config, *, device: str, scratch: Path | None = None) -> Setup:
    """Resolve a checked config. A dry run gives a `scratch` folder for the model's files and leaves the dump folder."""
    folder = Path(config.job.dump_folder).absolute()
    if scratch is None and config.job.fresh and folder.exists():
        folder.rename(aside(folder))
    seed = config.debug.seed
    algorithm = config.algorithm
    shape = shape_of(config.model)
    if algorithm.kind == "reward":
        shape = shape.with_value_head()
    model_folder = Path(config.model.hf_assets_path).absolute()
    if not config.model.hf_assets_path:
        model_folder = scratch or folder / "model"
        write_model_folder(model_folder, shape)
    tokenizer = TextTokenizer.load(model_folder)
    pairs = algorithm.kind in ("preference", "reward")
    task = load_task(config.task, seed=derive(seed, "task"), eval_size=config.eval.size, pairs=pairs)
    rule = config.task.eval_reward or config.task.reward
    measure = reward_for("exact" if rule == "model" else rule)  # without a rule there is nothing to evaluate: checks.py
    sampling = Sampling(
        max_new_tokens=config.rollout.max_new_tokens,
        temperature=config.rollout.temperature,
        top_p=config.rollout.top_p,
        stop_token_ids=tuple(dict.fromkeys((*tokenizer.eos_ids, *config.rollout.stop_token_ids))),
    )

    def problems(examples: Sequence[Example]) -> Problems:
        prompts = [task.prompt(example, i, tokenizer) for i, example in enumerate(examples)]
        return Problems(prompts, measure, tokenizer.decode, sampling)

    return Setup(
        name=name,
        config=config,
        folder=folder,
        shape=shape,
        tokenizer=tokenizer,
        model_folder=model_folder,
        task=task,
        sampling=sampling,
        heldout=problems(task.heldout),
        practice=problems(task.train[: config.eval.size] if config.cold_start.stop_at else []),
        device=device,
        resume=Resume(None, None) if config.job.fresh else Resume.find(folder, config),
        teacher=shape_of_folder(config.teacher.hf_assets_path, "teacher.hf_assets_path")
        if algorithm.needs_teacher
        else None,
        reward_model=shape_of_folder(config.reward_model.hf_assets_path, "reward_model.hf_assets_path")
        if algorithm.kind == "rl" and config.task.reward == "model"
        else None,
    )


def write_model_folder(folder: Path, shape: ModelShape) -> None:
    """A model in Hugging Face's format, less its weights: what vLLM needs to build it."""
    characters.build(folder)
    tokenizer = TextTokenizer.load(folder)
    config = shape.hf_config(bos=tokenizer.bos, eos=tokenizer.eos, pad=tokenizer.pad)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def aside(folder: Path) -> Path:
    """The first free name of `run.1`, `run.2`, ...: an old run is moved, never deleted."""
    return next(p for k in range(1, 10_000) if not (p := folder.with_name(f"{folder.name}.{k}")).exists())
