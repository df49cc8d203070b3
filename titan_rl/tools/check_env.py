"""`python -m titan_rl check_env NAME`: play rollouts of an environment with a random policy, without a model.

They are played as in a run: the same processes, limits, tokens and masks. The policy answers at random: with tokens,
words of its context, numbers, and calls of the offered tools. The same seed gives the same rollouts.

Exit codes: 0 played, 1 a rollout failed or had no room for a turn, 2 bad usage, 130 stopped.
"""

import argparse
import asyncio
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from titan_rl.config import toml as config_file
from titan_rl.config.sections import Config
from titan_rl.config.toml import ConfigError
from titan_rl.preflight.pretrained import FetchFailed, with_models
from titan_rl.tools.deployed import drive, in_own_network, overrides_of
from titan_rl.tools.refused_input import UsageError, named_refusals
from titan_rl.wire.program import DONE, FAILED, command_of, enter

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from titan_rl.preflight.plan import Setup
    from titan_rl.record.terminal import Terminal
    from titan_rl.wire.types import Rollout

PROG = "titan_rl check_env"
BASE = "calc_llama"
ROW = '{"question": "begin. ", "answer": ""}\n'
"""The row of a rollout if the config has none."""


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """The rollouts that were played."""

    rollouts: Sequence["Rollout"]
    seconds: float  # for all of them
    repeats: bool  # the first one, played again, is the same
    sessions: int | None  # that the environment's server takes at the same time; None: it has no server


def main(argv: Sequence[str]) -> int:
    with named_refusals(PROG):
        options, rest = parser().parse_known_args(argv)
        overrides = overrides_of(rest)
        if options.install:
            install(options.install, dict(overrides).get("environment.python", ""))
        config = config_of(options, overrides)
        return in_own_network(PROG, config, lambda scratch: check(config, options, scratch))


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=command_of("check_env"),
        description="Play rollouts of an environment with a random policy: no model, no engine. Shows tokens, which of "
        "them are trained, rewards, tools, turns, seconds, and how many sessions it takes at once.",
        epilog="Any key of the config: --section.key VALUE, such as --environment.args '{is_slippery = false}' or "
        "--task.template chat. docs/environments.md has the names of environments of other packages.",
        allow_abbrev=False,
    )
    names = 'as environment.name: "my_module:MyClass", "gymnasium:FrozenLake-v1"; default: as in the config'
    parser.add_argument("name", metavar="NAME", nargs="?", default="", help=names)
    parser.add_argument("--agent", action="store_true", help="NAME is a task.agent, as it also is in verifiers:TASKSET")
    parser.add_argument("--config", metavar="NAME|FILE", help="config with the tokenizer, rows and limits")
    parser.add_argument("--rollouts", metavar="N", type=positive, default=8, help="rollouts to play (8)")
    install = "packages that pip installs first, into the virtual environment at --environment.python"
    parser.add_argument("--install", metavar="PACKAGE", nargs="+", default=[], help=install)
    return parser


def positive(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 4096):
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to 4096, found {text!r}")
    return int(text)


def install(packages: Sequence[str], folder: str) -> None:
    """Install packages into the virtual environment at `folder`, and make it if there is none."""
    if not folder:
        raise UsageError(
            "--install: expected --environment.python with the folder of a virtual environment, found none"
        )
    python = Path(folder, "bin", "python")
    if not python.exists():
        venv.create(folder, with_pip=True)
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    if subprocess.run(command, check=False).returncode:
        raise UsageError(f"--install: expected packages that pip installs into {folder}, found {' '.join(packages)}")


def config_of(options: argparse.Namespace, overrides: Sequence[tuple[str, str]]) -> Config:
    """Return the config to play by. Raise UsageError with everything that is wrong with it."""
    from titan_rl.tasks.games import GAMES

    overridden = dict(overrides)
    if not (options.name or options.config):
        raise UsageError("NAME: expected an environment, or --config with one, found none")
    if options.name:
        agent = options.agent or options.name.startswith("verifiers:")
        keys = ("task.agent", "environment.name") if agent else ("environment.name", "task.agent")
        overridden = {**dict(zip(keys, (options.name, ""), strict=True)), **overridden}
    base = options.config or (f"{options.name}_llama" if options.name in GAMES else BASE)
    if not options.config and options.name not in GAMES:
        overridden = {"task.name": "jsonl", "environment.max_turns": "8", "environment.max_tokens": "0", **overridden}
        overridden = {
            "environment.lockstep": "false",
            "training.seq_len": "4096",
            "rollout.max_new_tokens": "32",
            **overridden,
        }
        if options.name.startswith("openenv:"):
            overridden = {"hosts.isolation": "off", **overridden}
    try:
        return with_models(config_file.load(config_file.find(base), list(overridden.items())))
    except (ConfigError, FetchFailed) as error:
        raise UsageError("; ".join(getattr(error, "problems", [str(error)]))) from error


def check(config: Config, options: argparse.Namespace, scratch: Path) -> int:
    from titan_rl.ext.agents.checks import problems as check_environment
    from titan_rl.record.terminal import Terminal, open_console

    if not config.rollout_code:
        raise UsageError(f"NAME: expected an environment, because {options.config} has none, found none")
    if config.task.name == "jsonl" and not config.task.path:
        row = scratch / "rows.jsonl"
        row.write_text(ROW, encoding="utf-8")
        config = replace(config, task=replace(config.task, path=str(row)))
    problems = list(check_environment(config))
    if problems:
        raise UsageError("; ".join(problems))
    terminal, setup = Terminal(), setup_of(config, scratch)
    rehearsals: list[Rehearsal] = []

    async def work() -> int:
        rehearsals.append(await rehearse(setup, terminal, options.rollouts, scratch))
        return FAILED if any(rollout.error or not rollout.turns for rollout in rehearsals[0].rollouts) else DONE

    code = drive(work, terminal)
    if rehearsals:
        show(open_console(sys.stdout), setup, rehearsals[0])
    return code


def setup_of(config: Config, scratch: Path) -> "Setup":
    from titan_rl.config.model_sections import ColdStartSection
    from titan_rl.preflight.plan import prepare

    config = replace(
        config,
        job=replace(config.job, dump_folder=str(scratch / "run"), fresh=False),
        cold_start=ColdStartSection(steps=0, stop_at=0.0),
        eval=replace(config.eval, size=0, sets={}, keep_best=""),
    )
    try:
        setup = prepare("check_env", config, device="cpu", scratch=scratch / "model")
    except (OSError, ValueError) as error:
        raise UsageError("; ".join(str(error).splitlines())) from error
    if config.model.hf_assets_path:
        return setup
    return replace(setup, folder=scratch)


async def rehearse(setup: "Setup", terminal: "Terminal", count: int, scratch: Path) -> Rehearsal:
    """Play rollouts as one step of a run does."""
    from titan_rl.ext.agents.bring_up import launch_environments
    from titan_rl.ext.agents.random_policy import RandomPolicy
    from titan_rl.ext.sandbox.local import configure
    from titan_rl.record.incidents import Incidents
    from titan_rl.rollout.player import DRIVER_ATTEMPTS, Player
    from titan_rl.rollout.session import SessionLimits
    from titan_rl.tasks.prompts import PromptSource

    config = setup.config
    configure(config.sandbox)
    source = PromptSource(setup.task, setup.tokenizer, seed=config.debug.seed)
    prompts = [source.next() for _ in range(-(-count // config.rollout.group_size))]
    incidents = Incidents(scratch, config.fault, terminal.warn)
    async with launch_environments(setup, terminal, incidents) as (environments, watch):
        policy = RandomPolicy(setup.tokenizer, chat=config.task.template == "chat")
        limits = SessionLimits.of(config, played=True)
        player = Player(environments, policy, setup.tokenizer.decode, limits=limits, attempts=DRIVER_ATTEMPTS)

        async def play(number: int) -> "Rollout":
            prompt, sample = prompts[number // config.rollout.group_size], number % config.rollout.group_size
            return await player.play_for_evaluation(
                prompt, setup.sampling, sample=sample, seed=config.debug.seed, set_name="check"
            )

        async def played() -> Sequence["Rollout"]:
            return await asyncio.gather(*map(play, range(count)))

        began = asyncio.get_running_loop().time()
        with terminal.phase(f"{count} rollouts with a random policy"):
            rollouts = await watch.drive(played())
            seconds = asyncio.get_running_loop().time() - began
        again = await watch.drive(play(0))
    same = [branch.tokens for branch in again.branches] == [branch.tokens for branch in rollouts[0].branches]
    return Rehearsal(rollouts, seconds, same, await sessions(config))


async def sessions(config: Config) -> int | None:
    """Return how many sessions a server opens at the same time, up to the number that the config needs."""
    from titan_rl.preflight.memory import in_flight

    prefix, _, url = config.environment.name.partition(":")
    if prefix != "openenv":
        return None
    from titan_rl.ext.agents.openenv import sessions_open

    return await sessions_open(url, in_flight(config))


def show(console: "Console", setup: "Setup", rehearsal: Rehearsal) -> None:
    from titan_rl.tools.inspect.token_view import shown

    first = rehearsal.rollouts[0]
    for number, branch in enumerate(first.branches):
        turns = [(turn.context, turn.completion.tokens) for turn in branch.turns]
        title = "Rollout 0" + (f", branch {number}" if number else "")
        console.print(shown(title, setup.tokenizer, turns), soft_wrap=True)
    console.print("")
    console.print(table(rehearsal.rollouts))
    for line in facts(setup, rehearsal):
        console.print(line, soft_wrap=True)


def table(rollouts: Sequence["Rollout"]) -> "Table":
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("rollout", "status", "reward", "turns", "branches", "read", "trained", "s/step"):
        table.add_column(name, justify="left" if name == "status" else "right")
    for number, rollout in enumerate(rollouts):
        turns, mask = rollout.turns, [bit for branch in rollout.branches for bit in branch.mask]
        reward = f"{rollout.reward:g}" if rollout.valid else "-"
        steps = f"{rollout.metrics.get('seconds', 0.0) / max(1, len(turns)):.3f}"
        counts = (len(turns), len(rollout.branches), len(mask) - sum(mask), sum(mask))
        table.add_row(str(number), rollout.status, reward, *map(str, counts), steps)
    return table


def facts(setup: "Setup", rehearsal: Rehearsal) -> Iterator[str]:
    """Yield further facts and problems, one line each."""
    from titan_rl.preflight.checks.task import chat_warnings
    from titan_rl.preflight.memory import in_flight

    config, rollouts = setup.config, rehearsal.rollouts
    e, wanted = config.environment, in_flight(config)
    tools: Counter[str] = Counter()
    for rollout in rollouts:
        tools.update({k.removeprefix("tools/"): int(v) for k, v in rollout.metrics.items() if k.startswith("tools/")})
    names = sorted({name.partition("/")[0] for name in tools})
    for warning in chat_warnings(config):
        yield f"warning    {warning}"
    if names:
        used = [f"{name} {tools[f'{name}/calls']} calls, {tools[f'{name}/failures']} failed" for name in names]
        yield f"tools      {'; '.join(used)}"
    turns = sum(len(rollout.turns) for rollout in rollouts)
    yield f"speed      {len(rollouts)} rollouts, {turns} turns in {rehearsal.seconds:.2f} s, in {e.processes} processes"
    own = f"{e.processes} processes x {e.concurrency} rollouts; a run has up to {wanted} in flight"
    yield f"capacity   {own}" + (
        f"; its server takes {rehearsal.sessions} of them" if rehearsal.sessions is not None else ""
    )
    yield f"repeats    {'yes' if rehearsal.repeats else 'no'}: the first rollout, played again, " + (
        "was the same" if rehearsal.repeats else "was another: after a lost process its turns are sampled again"
    )
    if not any(rollout.valid or rollout.error for rollout in rollouts):
        judge = ", ".join(config.task.rewards) or config.task.reward
        yield f"reward     none from the environment: in a run, the task's reward ({judge}) judges the last turn"
    lost, read = unknown(setup, rehearsal)
    if lost and not config.model.hf_assets_path:
        yield (
            f"tokens     {lost} of {read} that are read stand for characters that the tokenizer of the examples lacks; "
            "--model.hf_assets_path FOLDER takes your model's"
        )
    yield from (f"wrong: {line}" for line in wrong(setup, rehearsal))


def unknown(setup: "Setup", rehearsal: Rehearsal) -> tuple[int, int]:
    """Return how many tokens that are read stand for characters without a token, and how many are read."""
    unknown = setup.tokenizer.tokenizer.token_to_id("<unk>")
    read = [token for rollout in rehearsal.rollouts for turn in rollout.turns for token in turn.context]
    return (0 if unknown is None else read.count(unknown)), len(read)


def wrong(setup: "Setup", rehearsal: Rehearsal) -> Iterator[str]:
    rollouts = rehearsal.rollouts
    for error, count in Counter(rollout.error for rollout in rollouts if rollout.error).items():
        yield f"{count} of {len(rollouts)} rollouts failed: {error}"
    for status, count in Counter(
        rollout.status for rollout in rollouts if not (rollout.error or rollout.turns)
    ).items():
        room = f"training.seq_len = {setup.config.training.seq_len}"
        if setup.config.generator.max_model_len:
            room += f" and generator.max_model_len = {setup.config.generator.max_model_len}"
        yield (
            f"{count} of {len(rollouts)} rollouts ended as {status} before the policy was asked: the prompt, with its "
            f"tools and first observation, leaves no room in {room}"
        )
    if rehearsal.sessions is not None and rehearsal.sessions < (wanted := min(len(rollouts), 1 << 16)):
        yield f"environment.concurrency: its server takes {rehearsal.sessions} sessions, {wanted} rollouts were played"
    lost, read = unknown(setup, rehearsal)
    if lost and setup.config.model.hf_assets_path:
        yield f"model.hf_assets_path: {lost} of {read} tokens that are read stand for characters without a token"
    more = sum(len(rollout.branches) > 1 for rollout in rollouts)
    if more:
        yield f"{more} of {len(rollouts)} rollouts began branches: earlier text was changed, and is read again"


if __name__ == "__main__":
    enter(lambda: main(sys.argv[1:]))
