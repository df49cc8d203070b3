"""Plans a checked run: builds its task, tokenizer, shapes and resume decision before any process is spawned."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from titan_rl.config.auto import on_device
from titan_rl.config.eval_sets import EvalSet, eval_sets
from titan_rl.config.sections import Config, RewardModelSection, TeacherSection
from titan_rl.preflight.added_parameters import trained_parameters, with_adapter_sync
from titan_rl.preflight.memory import ONE_POLICY, AdapterCounts, on_cpu, on_gpus, saved_bytes
from titan_rl.preflight.refusal import refusing
from titan_rl.preflight.shapes import shape_of
from titan_rl.preflight.unfit_rows import first_unfit, fits, image_problems, unfit_rows
from titan_rl.record.lines import must_write
from titan_rl.record.missing_records import RunRecords
from titan_rl.record.run_folder import Resume, check_folder, sound_resume
from titan_rl.record.run_lock import RunLock
from titan_rl.tasks.examples import BadRows, EndlessExamples, Example, RowImage
from titan_rl.tasks.judging import REWARD_ATTEMPTS, RewardJudges, evaluation_rubric
from titan_rl.tasks.problems import Problems
from titan_rl.tasks.rubric import Rubric
from titan_rl.tasks.task import Task, chat_settings, load_task, set_rows
from titan_rl.text import tokenizer as characters
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.checkpoint_sums import export_damage, identify
from titan_rl.wire.cores import host_memory
from titan_rl.wire.gpus import NO_GPUS, Gpus
from titan_rl.wire.model_shape import ModelShape, shape_of_folder
from titan_rl.wire.parts import needed_part, part
from titan_rl.wire.seeds import derive, shuffled
from titan_rl.wire.types import IMAGES, Sampling


@dataclass(frozen=True, slots=True)
class Policy:
    """The policy without its weights."""

    shape: ModelShape
    folder: Path  # Hugging Face folder with config.json and tokenizer
    tokenizer: TextTokenizer
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Setup:
    name: str  # config name
    given: Config  # as read, with "auto"
    config: Config  # on the run's device: auto.on_device
    resolved: Config  # that the ranks work with: without "auto"
    folder: Path  # the dump folder
    shape: ModelShape
    tokenizer: TextTokenizer
    model_folder: Path  # Hugging Face folder with config.json and tokenizer, for vLLM
    task: Task
    sampling: Sampling
    heldout: Problems
    eval_sets: tuple[Problems, ...]  # [eval.sets]
    practice: Problems  # eval.size training problems, if cold_start.stop_at is set
    device: str  # "cpu" or "cuda"
    gpus: Gpus
    resume: Resume
    recorded: RunRecords  # in the folder's files, when the run was planned
    role_shapes: dict[str, ModelShape]  # a teacher's and a reward model's; other roles have the policy's shape
    judges: RewardJudges  # by reward functions, in training and in evaluations
    dropped: tuple[str, ...] = ()  # lines about rows that are left out, for the plan
    resume_notes: tuple[str, ...] = ()  # damaged checkpoints, for the plan
    images: tuple[RowImage, ...] = ()  # distinct images of all rows
    policies: "Mapping[str, Setup]" = field(default_factory=dict)
    """Of a run of several policies: each, in the order of the engines' slots. The rest is then the meshes'."""
    adapters: AdapterCounts = ONE_POLICY

    @property
    def policy(self) -> Policy:
        return Policy(self.shape, self.model_folder, self.tokenizer, self.sampling)

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of a checkpoint of all trained models: each trained parameter's value, and Adam's two moments; of the
        policy also its moving average, if there is one."""
        critic = self.shape.parameters * self.config.algorithm.needs_critic * saved_bytes(self.config, "critic")
        return critic + trained_parameters(self.config.lora, self.shape) * saved_bytes(self.config, "trainer")

    @property
    def finished(self) -> bool:
        """Return True if the run is trained to the last step and exported."""
        if self.policies:
            return all(policy.finished for policy in self.policies.values())
        trained = (self.resume.rl or 0) >= self.config.training.steps and self.resume.over_cold_start(self.config)
        return trained and (self.folder / "hf").exists() and not export_damage(self.folder / "hf")


def export_notes(folder: Path) -> list[str]:
    """Return a note if the model that an earlier process exported is not whole."""
    why = export_damage(folder / "hf") if (folder / "hf").exists() else ""
    return [f"hf/ is not whole, and is exported again at the end of the run: {why}"] if why else []


@refusing
def prepare(
    name: str,
    given: Config,
    *,
    device: str,
    scratch: Path,
    gpus: Gpus = NO_GPUS,
    adapters: AdapterCounts = ONE_POLICY,
) -> Setup:
    """Plan a checked config. Model files go to a `scratch` folder: the dump folder is not touched."""
    config = on_device(given, device)
    check_folder(config.job)
    folder = Path(config.job.dump_folder).absolute()
    policy = policy_of(config, scratch)
    shape, tokenizer = policy.shape, policy.tokenizer
    config = with_adapter_sync(config, shape, device)
    task, dropped = task_of(config, tokenizer)
    judges, rubric = RewardJudges(config), evaluation_rubric(config.task)
    if rubric.names == ["model"]:
        rubric = Rubric((("exact", 1.0),))  # checks refuse an evaluation by a reward model
    judge = judges.judge(rubric)

    def problems(examples: Sequence[Example]) -> Problems:
        if refused := image_problems(config, examples, tokenizer):
            raise BadRows(refused, config.task.eval_path)
        prompts = [task.prompt(example, i, tokenizer) for i, example in enumerate(examples)]
        return Problems(prompts, judge, policy.sampling, attempts=REWARD_ATTEMPTS, parallel=judges.parallel)

    heldout, of_sets = problems(task.heldout), list[Example]()

    def problems_of(chosen: EvalSet) -> Problems:
        own = fitting(config, chosen, task, tokenizer, dropped) if chosen.path else []
        base = problems(own) if chosen.path else heldout
        of_sets.extend(own)
        by_set = Rubric(((chosen.reward, 1.0),), "", tuple(config.task.reward_args.items()))
        return replace(
            base,
            prompts=base.prompts[: chosen.size or None],
            judge=judges.judge(by_set) if chosen.reward else base.judge,
            name=chosen.name,
            samples=chosen.samples,
            temperature=chosen.temperature,
            correct_at=chosen.correct_at,
            seed=derive(config.debug.seed, "eval", chosen.name),
        )

    sets = tuple(map(problems_of, eval_sets(config.eval.sets)))
    resume, notes, recorded = Resume(None, None), list[str](), RunRecords(folder)
    if not config.job.fresh:
        resume, notes = sound_resume(folder, config, dry=True)
        recorded = RunRecords.of(folder)
        notes += [*recorded.missing(config, resume), *export_notes(folder)]
    on_gpu = device == "cuda"
    return Setup(
        name=name,
        given=given,
        config=config,
        resolved=on_gpus(config, shape, gpus.nbytes, adapters) if on_gpu else on_cpu(config, shape, host_memory()),
        adapters=adapters,
        folder=folder,
        shape=shape,
        tokenizer=tokenizer,
        model_folder=policy.folder,
        task=task,
        sampling=policy.sampling,
        heldout=heldout,
        eval_sets=sets,
        practice=problems(practice_examples(task, config)),
        device=device,
        gpus=gpus,
        resume=resume,
        recorded=recorded,
        role_shapes={
            name: shape_of_folder(role.hf_assets_path, f"{name}.hf_assets_path")
            for name, role in config.roles.items()
            if isinstance(role, TeacherSection | RewardModelSection)
        },
        judges=judges,
        dropped=tuple(dropped),
        resume_notes=tuple(notes),
        images=_distinct([*([] if task.endless else task.train), *task.heldout, *of_sets]),
    )


def keep_images(setup: Setup) -> None:
    """Write the images of all rows where engines and trainers read them."""
    if setup.images:
        needed_part("images kept", "task.images_key")(setup.images, setup.folder / IMAGES)


def _distinct(examples: Iterable[Example]) -> tuple[RowImage, ...]:
    found = dict[str, RowImage]()
    for example in examples:
        for image in example.images:
            found.setdefault(image.hash, image)
    return tuple(found.values())


def settle(setup: Setup, lock: RunLock) -> Setup:
    """Begin to use the folder of a checked run, whose lock this process holds: move an old run aside if job.fresh asks
    for it, or decide by the bytes of the checkpoints where to resume. Write the model folder."""
    config, folder = setup.config, setup.folder
    if config.job.fresh:
        lock.move_old_run()
    else:
        resume, notes = sound_resume(folder, config)
        notes += [*setup.recorded.missing(config, resume), *export_notes(folder)]
        setup = replace(setup, resume=resume, resume_notes=tuple(notes))
    with must_write(folder):
        identify(folder)
        keep_images(setup)
    if config.model.hf_assets_path:
        return setup
    write_model_folder(folder / "model", setup.shape)
    tokenizer = TextTokenizer.load(folder / "model", chat_settings(config))
    return replace(setup, model_folder=folder / "model", tokenizer=tokenizer)


def task_of(config: Config, tokenizer: TextTokenizer) -> tuple[Task, list[str]]:
    """Return the task with the rows that fit, and notes about the others. Training rows keep their places in the order
    of prompts, so that a run may resume with or without the others."""
    pairs = config.algorithm.kind in ("preference", "reward")
    task = load_task(config.task, seed=derive(config.debug.seed, "task"), eval_size=config.eval.size, pairs=pairs)
    if config.environment.name and (openings := part("openings of environments")):
        begun = openings(config, task, tokenizer)
        if begun.problem:
            raise ValueError(begun.problem)
        task = replace(task, openings=begun.by_row)
    task, notes = replace(task, curriculum=config.curriculum), [*task.notes]
    if config.task.bad_rows == "drop":
        train, heldout = unfit_rows(config, task, tokenizer)
        notes += _dropped("training rows", task.known, train) + _dropped("held-out rows", task.heldout, heldout)
        fit = [example for i, example in enumerate(task.heldout) if i not in heldout]
        task = replace(task, heldout=fit, unfit=frozenset(train))
    if isinstance(task.train, EndlessExamples):
        task = replace(task, unfit=task.train.unfit(task.heldout, fits(config, task, tokenizer)))
    return task, notes


def fitting(
    config: Config, chosen: EvalSet, task: Task, tokenizer: TextTokenizer, dropped: list[str]
) -> Sequence[Example]:
    """Return the rows of an evaluation set that fit, and append to `dropped` how many are left out, and why."""
    rows = set_rows(config, chosen)
    dropped += rows.notes(f"eval.sets.{chosen.name}.path")
    examples = rows.examples
    if config.task.bad_rows == "refuse":  # the checks have measured them
        return examples
    files = replace(config, task=replace(config.task, name="jsonl"))
    _, unfit = unfit_rows(files, replace(task, train=(), heldout=examples), tokenizer)
    dropped += _dropped(f"rows of eval.sets.{chosen.name}", examples, unfit)
    return [example for i, example in enumerate(examples) if i not in unfit]


def _dropped(rows: str, examples: Sequence[Example], unfit: Mapping[int, str]) -> list[str]:
    if not unfit:
        return []
    first = first_unfit(examples, unfit)
    return [f"task.bad_rows: {len(unfit)} of {len(examples)} {rows} are dropped; {first}"]


def policy_of(config: Config, own_folder: Path) -> Policy:
    """Return the policy of a checked config. If the config names no Hugging Face folder, write one to `own_folder`."""
    shape = shape_of(config.model)
    if config.algorithm.kind == "reward":
        shape = shape.with_value_head()
    folder = Path(config.model.hf_assets_path).absolute()
    if not config.model.hf_assets_path:
        folder = own_folder
        write_model_folder(folder, shape)
    tokenizer = TextTokenizer.load(folder, chat_settings(config))
    rollout = config.rollout
    stops = tuple(dict.fromkeys((*tokenizer.eos_ids, *rollout.stop_token_ids)))
    truncation = {name: getattr(rollout, name) for name in ("top_p", "top_k", "min_p")}
    sampling = Sampling(rollout.max_new_tokens, rollout.temperature, stop_token_ids=stops, **truncation)
    return Policy(shape, folder, tokenizer, sampling)


def practice_examples(task: Task, config: Config) -> list[Example]:
    """Return eval.size random training examples, on which cold_start.stop_at is measured. A data set may be sorted, so
    its first examples may be easier than the others."""
    if not config.cold_start.stop_at:
        return []
    fit = [example for i, example in enumerate(task.known) if i not in task.unfit]
    order = shuffled(len(fit), derive(config.debug.seed, "practice"))
    return [fit[i] for i in order[: config.eval.size]]


def write_model_folder(folder: Path, shape: ModelShape) -> None:
    """Write a Hugging Face model folder without weights: what vLLM needs to build the model."""
    (folder / "config.json").unlink(missing_ok=True)  # a killed process may have left half of one
    characters.build(folder)
    tokenizer = TextTokenizer.load(folder)
    config = shape.hf_config(bos=tokenizer.bos, eos=tokenizer.eos, pad=tokenizer.pad)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
