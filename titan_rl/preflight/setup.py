"""Resolves what a run consists of from its config, before any process is spawned."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from titan_rl.config.sections import Config, RewardModelSection, TeacherSection
from titan_rl.preflight.shapes import shape_of
from titan_rl.record.run_folder import Resume, aside
from titan_rl.tasks import tokenizer as characters
from titan_rl.tasks.problems import Problems
from titan_rl.tasks.rewards import reward_for
from titan_rl.tasks.task import Example, Task, load_task, shuffled
from titan_rl.tasks.tokenizer import TextTokenizer
from titan_rl.wire.model_shape import ModelShape, shape_of_folder
from titan_rl.wire.seeds import derive
from titan_rl.wire.types import Sampling


@dataclass(frozen=True, slots=True)
class Setup:
    name: str  # config name
    config: Config
    folder: Path  # the dump folder
    shape: ModelShape
    tokenizer: TextTokenizer
    model_folder: Path  # Hugging Face folder with config.json and tokenizer, for vLLM
    task: Task
    sampling: Sampling
    heldout: Problems
    practice: Problems  # eval.size training problems, if cold_start.stop_at is set
    device: str  # "cpu" or "cuda"
    resume: Resume
    role_shapes: dict[str, ModelShape]  # of a teacher and a reward model; other roles have the policy's shape

    @property
    def finished(self) -> bool:
        """Return True if the run is trained to the last step and exported."""
        trained = (self.resume.rl or 0) >= self.config.training.steps and self.resume.over_cold_start(self.config)
        return trained and (self.folder / "hf").exists()


def prepare(name: str, config: Config, *, device: str, scratch: Path | None = None) -> Setup:
    """Resolve a checked config. With a `scratch` folder for model files (dry run), do not touch the dump folder."""
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
    measure = reward_for("exact" if rule == "model" else rule)  # checks refuse an evaluation by a reward model
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
        practice=problems(practice_examples(task, config)),
        device=device,
        resume=Resume(None, None) if config.job.fresh else Resume.find(folder, config),
        role_shapes={
            name: shape_of_folder(role.hf_assets_path, f"{name}.hf_assets_path")
            for name, role in config.roles.items()
            if isinstance(role, TeacherSection | RewardModelSection)
        },
    )


def practice_examples(task: Task, config: Config) -> list[Example]:
    """Return eval.size random training examples, on which cold_start.stop_at is measured. A data set may be sorted, so
    its first examples may be easier than the others."""
    if not config.cold_start.stop_at:
        return []
    order = shuffled(len(task.train), derive(config.debug.seed, "practice"))
    return [task.train[i] for i in order[: config.eval.size]]


def write_model_folder(folder: Path, shape: ModelShape) -> None:
    """Write a Hugging Face model folder without weights: what vLLM needs to build the model."""
    characters.build(folder)
    tokenizer = TextTokenizer.load(folder)
    config = shape.hf_config(bos=tokenizer.bos, eos=tokenizer.eos, pad=tokenizer.pad)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
