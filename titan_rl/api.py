"""titan_rl as a library: a run whose loop is the user's own.

    import titan_rl

    async with titan_rl.start("grpo_llama", {"optimizer.lr": 2e-3}) as run:
        for step in range(run.step + 1, 31):
            prompts = run.prompts(8)
            groups = await run.sample(prompts)           # generators
            groups = await run.judge(groups)             # the task's rewards; or group.with_rewards(...)
            stats = await run.train(groups)              # reference, teacher, critic; trainers
            await run.sync()                             # trainers to generators, verified
            print(step, stats)

Without asyncio: `with titan_rl.start(...) as run`, and no `await` (BlockingRun). Each call is one collective over a
mesh, or several at the same time. The controller of `python -m titan_rl.run` makes
the same calls (train/verbs.py).
"""

import asyncio
import atexit
import json
import os
import sys
import sysconfig
import tempfile
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:  # `import titan_rl` imports none of it
    import numpy as np

    from titan_rl.config.sections import Config
    from titan_rl.meshes.starter import Servers
    from titan_rl.preflight.load import Invocation
    from titan_rl.preflight.plan import Setup
    from titan_rl.record.evaluation import Evaluation
    from titan_rl.record.run_folder import Resume
    from titan_rl.record.terminal import Terminal
    from titan_rl.rollout.sampling import GroupSampler
    from titan_rl.train.run_parts import RunParts
    from titan_rl.wire.reports import StepStats, SyncStats
    from titan_rl.wire.types import Group, Prompt, Sample

T = TypeVar("T")
Advantage = Callable[..., "Sequence[float] | Sequence[np.ndarray] | np.ndarray"]
Loss = Callable[..., Any]

NOT_ISOLATED = "titan_rl.start leaves the network of its caller as it is"
OWN = "own"
"""Key of a user's state in a checkpoint's."""

_started = False  # a run of this process is up


def start(
    config: "str | os.PathLike[str] | Config",
    overrides: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    quiet: bool = False,
) -> "Starting":
    """Start the meshes of a run, with the weights served.

    `config`: a TOML file, the name of a shipped one, or a Config. `overrides`: keys with their values, as flags on the
    command line have them. `resume`: continue the run in job.dump_folder after its last checkpoint, with its `state`;
    else an earlier run there is moved aside. `quiet`: print nothing.

    Use it as `async with titan_rl.start(...) as run`; as `with titan_rl.start(...) as run`, where each call waits; or,
    in a notebook, as `run = await titan_rl.start(...)` and `await run.close()` at the end.
    """
    return Starting(config, {"job.fresh": not resume, **(overrides or {})}, quiet)


@dataclass(frozen=True, slots=True)
class Stats:
    """What a step's update reports."""

    step: int
    reward: float  # mean of the rollouts that it trained on
    loss: float
    grad_norm: float
    metrics: Mapping[str, float] = field(repr=False)

    def __str__(self) -> str:
        return f"reward {self.reward:.3f}, loss {self.loss:.4g}, gradient {self.grad_norm:.3g}"


class Starting:
    """A run that is about to start: await it, or enter it."""

    _runner: asyncio.Runner

    def __init__(
        self,
        config: "str | os.PathLike[str] | Config",
        overrides: Mapping[str, Any],
        quiet: bool,
    ) -> None:
        self._given = config, overrides, quiet
        self._open: AsyncExitStack | None = None

    def __await__(self) -> "Generator[Any, Any, Run]":
        return self.__aenter__().__await__()

    async def __aenter__(self) -> "Run":
        global _started
        from titan_rl.preflight.refusal import ConfigRefused

        if _started:
            raise RuntimeError("expected one run at a time in a process, found one that is up: close it first")
        async with AsyncExitStack() as stack:
            _started = True
            stack.callback(_ended)
            try:
                run = await stack.enter_async_context(_opened(*self._given))
            except ConfigRefused as error:
                raise error.with_traceback(None) from None  # its message is enough
            run._open = self._open = stack.pop_all()
            return run
        raise AssertionError

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        assert self._open is not None
        return await self._open.__aexit__(kind, error, traceback)

    def __enter__(self) -> "BlockingRun":
        if _inside_a_loop():
            expected = "`async with titan_rl.start(...)`, or in a notebook `await titan_rl.start(...)`"
            raise RuntimeError(f"expected {expected}, because an event loop runs here, found `with`")
        with ExitStack() as stack:
            self._runner = stack.enter_context(asyncio.Runner())
            run = BlockingRun(self._runner.run(self.__aenter__()), self._runner)
            stack.pop_all()
            return run
        raise AssertionError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        with self._runner:
            return self._runner.run(self.__aexit__(kind, error, traceback))


def _inside_a_loop() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _ended() -> None:
    global _started
    _started = False


class Run:
    """A run that is up. `step` counts the updates, `state` is yours: it is saved and restored with the weights."""

    _open: AsyncExitStack

    def __init__(self, parts: "RunParts") -> None:
        """Made by `start`."""
        from titan_rl.train.learner import Learner
        from titan_rl.train.recovery import Recovery
        from titan_rl.train.verbs import Verbs

        self._parts, self._learner, self._recovery = parts, Learner(parts), Recovery(parts)
        self._verbs = Verbs(parts, self._learner)
        self.config, self.folder = parts.config, parts.setup.folder
        self.step = self.version = 0
        self.state: dict[str, Any] = {}
        self._checked: set[Loss] = set()

    # -- the verbs ------------------------------------------------------------------------------------------------

    def prompts(self, n: int) -> "list[Prompt]":
        """Return the task's next prompts.

        >>> prompts = run.prompts(4)
        """
        return [self._cursor.next(self.step + 1) for _ in range(n)]

    def prompt(self, text: str | list[dict[str, Any]], answer: str = "", **row: Any) -> "Prompt":
        """Return a prompt of your own, in the place of the task's next one: text, or the messages of a chat where
        task.template is "chat". Rewards get the `answer` and the columns `row`.

        >>> prompts += [run.prompt("21+34=", "550", source="mine")]
        """
        from titan_rl.tasks.examples import Example

        setup = self._parts.setup
        if not isinstance(text, str) and setup.task.template != "chat":
            raise ValueError('expected text, because task.template = "plain", found messages')
        prompt = self._cursor.next(self.step + 1)
        return setup.task.prompt(Example(text, answer, row), prompt.id, setup.tokenizer)

    async def sample(self, prompts: "Sequence[Prompt]", n: int | None = None) -> "list[Group]":
        """Sample n rollouts of each prompt (rollout.group_size), over all generators. A group that could not be sampled
        has a `failure`. Rollouts have the reward of their environment, or none yet.

        >>> groups = await run.sample(prompts, n=4)
        """
        self._refuse_sleeping("sample")
        if self._record is not None and self._record.sync is not None:
            await self._write()
        sampler = self._sampler(n or self.config.rollout.group_size)
        with self._parts.clock("generate"):
            groups = await self._driven(_all(sampler.play(prompt) for prompt in prompts))
        for group in groups:
            self._cursor.sampled(group)
        return groups

    async def judge(self, groups: "Sequence[Group]") -> "list[Group]":
        """Reward the rollouts that have no reward, as the task does: functions, a judge, or a reward model.

        >>> groups = await run.judge(groups)
        >>> print(groups[0])
        prompt 0: ...
        """
        greedy = self.config.algorithm.advantage == "greedy"
        scoring = [self._sampler(len(group.rollouts) - greedy).score(group) for group in groups]
        with self._parts.clock("generate"):
            judged = await self._driven(_all(scoring))
        for group in judged:
            self._cursor.sampled(group)
        return judged

    async def train(
        self, groups: "Sequence[Group]", *, advantage: Advantage | None = None, loss: Loss | None = None
    ) -> Stats:
        """Make a step on groups with rewards: the columns of reference, teacher and critic as the config has them,
        advantages, and the algorithm's updates.

        `advantage`: a function of a group in the place of algorithm.advantage. It returns a number for each rollout, or
        an array with one for each of its sampled tokens, and may name any of these arguments: `rewards`
        [n], `lengths` [n] in sampled tokens, `group`, and `columns`, each rollout's log-probs and values by name. A
        function of one argument gets the rewards.

        `loss`: a function of tokens in the place of algorithm.clip (kernels/own_loss.py). It runs on the trainers.

        >>> stats = await run.train(groups, advantage=lambda rewards: rewards - rewards.mean())
        >>> stats.step
        1
        """
        good = self._trainable(groups)
        await self._write()
        if loss is not None:
            self._check_loss(loss)
        self._parts.stop.step = self.step + 1
        trained, samples, stats = await self._driven(self._update(good, advantage, loss))
        stats = self._verbs.with_opponents(stats)
        self.step += 1
        self._cursor.trained(self.step, trained)
        self._record = StepRecord(self.step, trained, stats, self._cursor.take_dropped())
        hopeless = self._health.after(self.step, stats, trained, samples)
        if hopeless is not None:
            raise hopeless
        await self._driven(self._learner.snapshot(self.step, self._saved_state))
        rewards = [rollout.reward for group in trained for rollout in group.rollouts if rollout.valid]
        mean = sum(rewards) / max(len(rewards), 1)
        return Stats(self.step, mean, stats.loss, stats.grad_norm, stats.metrics)

    async def sync(self) -> None:
        """Have the generators serve the trainers' weights: one-sided reads, verified in place.

        >>> await run.sync()
        """
        assert self._parts.weights is not None
        await self._driven(self._verbs.keep(self.step))
        cost = await self._driven(self._parts.weights.sync(self.step))
        self.version = self.step
        if self._record is not None:
            self._record.sync = cost

    async def evaluate(self) -> dict[str, float]:
        """Measure the held-out problems and the sets of [eval.sets] with the weights that the generators serve.

        >>> scores = await run.evaluate()
        >>> 0 <= scores["eval/score"] <= 1
        True
        """
        from titan_rl.record.evaluation import metrics_of

        self._refuse_sleeping("evaluate")
        found = await self._driven(self._verbs.evaluate(self.version or None))
        if self._record is not None and self._record.step == self.version:
            self._record.evaluations += found
        elif found:
            self._parts.report.eval(self.version, found)
        return metrics_of(found)

    def log(self, **metrics: float) -> None:
        """Add numbers to the line of the last step, as own/NAME: in metrics.jsonl, the curves and the trackers.

        >>> run.log(longest=max(len(rollout.text) for group in groups for rollout in group.rollouts))
        """
        if self._record is None:
            raise RuntimeError("expected a step to log to, found none: call run.log after run.train")
        self._record.stats.metrics.update({f"own/{name}": float(value) for name, value in metrics.items()})

    async def save(self) -> None:
        """Write a checkpoint of weights, optimizer, prompts and `state`: start(..., resume=True) continues from it.

        >>> run.state["seen"] = 4
        >>> await run.save()
        """
        await self._write()
        self._parts.report.to_disk()
        self._cursor.saved(self.step)
        await self._driven(self._learner.save(self.step, self._saved_state(), last=True))

    async def export(self) -> Path:
        """Write the policy's weights as safetensors, with a model card, to the Hugging Face folder hf/ of the run.
        Return that folder.

        >>> (await run.export()).name
        'hf'
        """
        from titan_rl.record.evaluation import metrics_of
        from titan_rl.train.hf_folder import card_of, export_policy

        setup, evaluations = self._parts.setup, self._record.evaluations if self._record else []
        card = card_of(setup, step=str(self.step), scores=metrics_of(evaluations) or None, own_loop=True)
        return await self._driven(export_policy(setup, self._parts.meshes.trainers, self.folder / "hf", card=card))

    async def restore(self, error: Exception) -> None:
        """Replace the mesh whose loss `error` reports, and go back to the last snapshot or checkpoint: `step` and
        `state` are as they were then. Raise the error again if nothing can be replaced.

        >>> try:
        ...     stats = await run.train(await run.judge(await run.sample(run.prompts(4))))
        ... except titan_rl.RunError as error:
        ...     await run.restore(error)
        """
        from titan_rl.wire.errors import RunError

        if not isinstance(error, RunError):
            raise error
        resume = await self._recovery.restored(error)
        self._parts.report.rewind(resume.kept_rl, resume.kept_cold_start)
        self._cursor.close()
        await self._begin(resume)

    async def close(self) -> None:
        """End the run and all of its processes. `async with` does it by itself.

        >>> await run.close()
        """
        await self._open.aclose()

    # -- behind them ----------------------------------------------------------------------------------------------

    async def _begin(self, resume: "Resume") -> None:
        """Bring every mesh to where the run resumes, and make the cold start that the config has."""
        from titan_rl.controller import Controller
        from titan_rl.train.health import Health
        from titan_rl.train.prompt_cursor import PromptCursor

        parts, verbs = self._parts, self._verbs
        parts.report.ready(resume.rl or 0, parts.setup.task.bad_rows)
        if not resume.over_cold_start(self.config):
            await Controller(parts, verbs, resume, attempt=self._recovery.attempt).cold_start()
        start, state = await self._learner.resume("rl", resume)
        prompts = await verbs.begin("rl", start, state)
        self._cursor = PromptCursor(prompts, verbs.ledger(start, state, self._recovery.attempt, own_loop=True))
        self._health = Health(self.config, parts.terminal.warn, parts.report.cause)
        self._samplers: dict[int, GroupSampler] = {}  # by the number of rollouts
        self._record: StepRecord | None = None  # the last step, until it is written
        self.step = self.version = start
        self.state = state.get(OWN, {})
        self._recovery.began(start)

    def _sampler(self, n: int) -> "GroupSampler":
        """Return what samples and scores groups of n rollouts."""
        from titan_rl.rollout.sampling import GroupSampler

        if n not in self._samplers:
            parts, verbs = self._parts, self._verbs
            assert parts.meshes.generators is not None
            settings = verbs.sampling(self.step, attempt=self._recovery.attempt)
            settings = replace(settings, rollout=replace(settings.rollout, group_size=n))
            decode = parts.setup.tokenizer.decode
            self._samplers[n] = GroupSampler(
                settings, parts.meshes.generators, verbs.judge(), decode, self._cursor.ledger
            )
        return self._samplers[n]

    def _refuse_sleeping(self, verb: str) -> None:
        """Refuse a call to engines that gave their GPUs to the trainers: the next weights wake them."""
        from titan_rl.wire.errors import RunError

        if self._parts.meshes.colocated and self.version < self.step:
            asleep = f"after step {self.step}, found the weights of step {self.version} and engines asleep"
            raise RunError(f'run.{verb}: expected `await run.sync()` {asleep}, because placement.kind is "colocated"')

    def _trainable(self, groups: "Sequence[Group]") -> "list[Group]":
        """Return the groups that did not fail. Refuse them if no step can be made of them."""
        from titan_rl.rollout.sampling import Unjudged
        from titan_rl.wire.errors import RunError

        good, step = [group for group in groups if not isinstance(group, Unjudged)], self.step + 1
        if step > (last := self.config.training.steps):
            raise RunError(
                f"step {step}: expected at most training.steps = {last}, which the learning rate is planned by"
            )
        if not good:
            why = f": {groups[0].failure}" if groups and isinstance(groups[0], Unjudged) else ""
            raise RunError(f"step {step}: expected groups to train on, found none{why}")
        sizes = {len(group.rollouts) for group in good}
        if len(sizes) > 1:
            raise RunError(f"step {step}: expected groups of one size, found {sorted(sizes)}")
        oldest = self.step - self.config.rollout.max_staleness_steps
        for group in good:
            if not any(rollout.valid for rollout in group.rollouts):
                asked = "await run.judge(groups), or group.with_rewards(...)"
                raise RunError(
                    f"step {step}: expected groups with rewards, found none in prompt {group.prompt.id}: {asked}"
                )
            if group.version < oldest:
                age = f"version {group.version} in prompt {group.prompt.id}, and generators serve {self.version}"
                raise RunError(
                    f"step {step}: expected samples of version {oldest} or newer, found {age}",
                    "Call `await run.sync()` after each step, or raise rollout.max_staleness_steps.",
                )
        return good

    async def _update(
        self, groups: "list[Group]", advantage: Advantage | None, loss: Loss | None
    ) -> "tuple[list[Group], list[Sample], StepStats]":
        from titan_rl.batch.own_advantages import estimate_of

        await self._parts.meshes.turn_of_trainers()
        estimate = advantage and estimate_of(advantage, "the advantage")
        trained, samples = await self._verbs.learn_from(groups, estimate)
        await self._learner.accumulate(samples)
        return trained, samples, await self._learner.update(len(groups[0].rollouts), loss)

    def _check_loss(self, loss: Loss) -> None:
        from titan_rl.kernels.own_loss import check
        from titan_rl.wire.errors import RunError

        if loss not in self._checked:
            wrong = check(loss, f"the loss {getattr(loss, '__qualname__', loss)}")
            if wrong:
                raise RunError(wrong)
            _send_by_value(loss)
            self._checked.add(loss)

    async def _write(self) -> None:
        """Write the lines of the last step."""
        from titan_rl.wire.reports import SyncStats

        record, self._record = self._record, None
        if record is not None:
            sync = record.sync or SyncStats(record.step)
            found, dropped = record.evaluations, record.dropped
            backlog = self._cursor.backlog
            self._parts.report.step(
                record.step, record.groups, record.stats, sync, found, dropped=dropped, backlog=backlog
            )
            written = self._parts.report.written()
            if written is not None:
                self._cursor.ledger.logged(written[0], *written[1:])

    def _saved_state(self) -> str:
        return json.dumps({**self._cursor.state(), **self._verbs.state, OWN: self.state})

    async def _driven(self, work: "Coroutine[Any, Any, T]") -> T:
        """Await calls to the meshes, or raise the loss of a rank. The error's notes have its details."""
        from titan_rl.wire.errors import RunError

        try:
            return await self._parts.watch.drive(work)
        except RunError as error:
            if error.details:
                error.add_note(error.details)
            raise


class BlockingRun:
    """The verbs of a run for a program without asyncio: each call waits for its meshes. Run describes them.

    >>> with titan_rl.start("grpo_llama", {"optimizer.lr": 2e-3}) as run:
    ...     for step in range(run.step + 1, 31):
    ...         groups = run.judge(run.sample(run.prompts(8)))
    ...         stats = run.train(groups)
    ...         run.sync()
    """

    def __init__(self, run: Run, runner: asyncio.Runner) -> None:
        """Made by `start`."""
        self._run, self._wait = run, runner.run
        self.config, self.folder, self.log = run.config, run.folder, run.log
        self.prompts, self.prompt = run.prompts, run.prompt

    @property
    def step(self) -> int:
        return self._run.step

    @property
    def state(self) -> dict[str, Any]:
        return self._run.state

    def sample(self, prompts: "Sequence[Prompt]", n: int | None = None) -> "list[Group]":
        return self._wait(self._run.sample(prompts, n))

    def judge(self, groups: "Sequence[Group]") -> "list[Group]":
        return self._wait(self._run.judge(groups))

    def train(
        self, groups: "Sequence[Group]", *, advantage: Advantage | None = None, loss: Loss | None = None
    ) -> Stats:
        return self._wait(self._run.train(groups, advantage=advantage, loss=loss))

    def sync(self) -> None:
        self._wait(self._run.sync())

    def evaluate(self) -> dict[str, float]:
        return self._wait(self._run.evaluate())

    def save(self) -> None:
        self._wait(self._run.save())

    def export(self) -> Path:
        return self._wait(self._run.export())

    def restore(self, error: Exception) -> None:
        self._wait(self._run.restore(error))


@dataclass(slots=True)
class StepRecord:
    """A step that is made, and not yet written."""

    step: int
    groups: "Sequence[Group]"
    stats: "StepStats"
    dropped: "Sequence[Group]"
    sync: "SyncStats | None" = None
    evaluations: "list[Evaluation]" = field(default_factory=list)


async def _all(calls: "Iterable[Coroutine[Any, Any, T]]") -> list[T]:
    return await asyncio.gather(*calls)


def _send_by_value(loss: Loss) -> None:
    """Have a function's module sent to the trainers with it, unless it is installed, where they find it too."""
    import cloudpickle  # Monarch's

    module = sys.modules.get(loss.__module__)
    file = getattr(module, "__file__", None)
    if module is not None and file and not Path(file).is_relative_to(sysconfig.get_paths()["purelib"]):
        cloudpickle.register_pickle_by_value(module)


def invocation_of(config: "str | os.PathLike[str] | Config", overrides: Mapping[str, Any]) -> "Invocation":
    """Return the checked run of a config. Raise ConfigRefused with every problem."""
    from titan_rl.config.sections import Config
    from titan_rl.config.toml import as_toml
    from titan_rl.preflight.checks import checked_run
    from titan_rl.preflight.refusal import raising

    with raising():
        if isinstance(config, Config):
            config, overrides = _written(config), {"job.dump_folder": config.job.dump_folder, **overrides}
        flags = [f"--{key}={value if isinstance(value, str) else as_toml(value)}" for key, value in overrides.items()]
        return checked_run(["--config", os.fspath(config), *flags])


def _written(config: "Config") -> str:
    """Write a Config to a file in the folder for temporary files, which ends with the run."""
    from titan_rl.config.toml import to_toml

    path = Path(tempfile.gettempdir(), "config.toml")
    path.write_text(to_toml(config))
    return str(path)


@cache
def _servers() -> "Servers":
    """Return what ranks of this process are started from. Its sockets' folder stays until the process exits, because
    Monarch keeps some open between two runs."""
    from titan_rl.environment import socket_folder
    from titan_rl.meshes.starter import starter

    stack = ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(starter().serving(stack.enter_context(socket_folder())))


@asynccontextmanager
async def _opened(config: Any, overrides: Mapping[str, Any], quiet: bool) -> "AsyncIterator[Run]":
    from titan_rl.environment import prepare_environment
    from titan_rl.meshes.starter import KINDS, NVIDIA

    servers = _servers()
    if not NVIDIA.exists():
        servers.keep(KINDS)  # before anything else: their imports take longer than all the rest
    with ExitStack() as stack:
        invocation = invocation_of(config, overrides)
        servers.keep(() if invocation.device == "cuda" else KINDS)
        setup, terminal = _planned(invocation, quiet, stack)
        config = setup.config
        prepare_environment(config.fault.detect_seconds, config.hosts.tls, config.polled_meshes)
        async with _up(setup, terminal) as run:
            yield run


def _planned(invocation: "Invocation", quiet: bool, stack: ExitStack) -> "tuple[Setup, Terminal]":
    """Lock the folder of a checked run, and plan it."""
    from rich.console import Console

    from titan_rl import isolation
    from titan_rl.preflight.plan import prepare, settle
    from titan_rl.preflight.refusal import raising, refuse
    from titan_rl.record.run_folder import check_folder
    from titan_rl.record.run_lock import RunLock
    from titan_rl.record.terminal import Terminal

    config, terminal = invocation.config, Terminal(Console(quiet=True) if quiet else None)
    scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
    with raising():
        if invocation.policies or config.algorithm.kind != "rl":
            found = "several policies" if invocation.policies else f'algorithm.name = "{config.algorithm.name}"'
            refuse(
                invocation.config_name,
                [f"titan_rl.start: expected an algorithm with rollouts, of one policy, found {found}"],
            )
        if config.task.filter:
            why = 'expected "", because your own loop leaves groups out itself'
            refuse(invocation.config_name, [f'task.filter: {why}, found "{config.task.filter}"'])
        if config.hosts.isolation == "require":
            expected = 'hosts.isolation: expected "auto" or "off"'
            refuse(invocation.config_name, [f'{expected}, because {NOT_ISOLATED}, found "require"'])
        check_folder(config.job)
        lock = stack.enter_context(RunLock(Path(config.job.dump_folder)))
        device, gpus = invocation.device, invocation.gpus
        setup = prepare(invocation.config_name, config, device=device, gpus=gpus, scratch=scratch)
        setup = settle(setup, lock)
    exposed = isolation.warning(NOT_ISOLATED, "Use a machine or a container without other users")
    for warning in (*invocation.warnings, exposed):
        terminal.warn(warning)
    return setup, terminal


@asynccontextmanager
async def _up(setup: "Setup", terminal: "Terminal") -> "AsyncIterator[Run]":
    from titan_rl.session import opened
    from titan_rl.train.stop import Stop
    from titan_rl.wire.spans import Clock

    task, clock = asyncio.current_task(), Clock()
    assert task is not None
    stop = Stop(task, clock, terminal, listens=False)
    async with opened(setup, terminal, stop, clock, last=False) as parts:
        run = Run(parts)
        run._recovery.attempt = 1
        await run._driven(run._begin(setup.resume))
        try:
            yield run
        finally:
            try:
                await run._write()
            finally:
                run._cursor.close()
        parts.report.done(finished=True)
