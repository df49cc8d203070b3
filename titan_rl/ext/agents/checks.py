"""Checks of [environment] and agents."""

import asyncio
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import partial

from titan_rl.batch.seats import MOST_SEATS
from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.ext.agents.adapters import MAKERS
from titan_rl.ext.agents.endpoint_seats import endpoint_problems, endpoints_of, unreached
from titan_rl.ext.agents.games import GAMES
from titan_rl.ext.agents.openenv import sessions_open
from titan_rl.ext.agents.openings import first_prompt, openings
from titan_rl.ext.agents.seat_folders import folder_problems
from titan_rl.preflight.checks.model import policy_tokenizer
from titan_rl.preflight.memory import in_flight
from titan_rl.preflight.probe import probe
from titan_rl.preflight.refusal import problem
from titan_rl.tasks.examples import BadRows
from titan_rl.tasks.task import load_task
from titan_rl.wire.seeds import derive

NAME = re.compile(r"[A-Za-z0-9_-]{1,40}")
ONE_PLAYER = ("gymnasium", "openenv", "skyrl")
"""Packages whose environments have one player."""


def problems(config: Config) -> Iterator[str]:
    """Check that what drives rollouts can be imported, and fits the task and the run."""
    wrong, e, task = partial(problem, config), config.environment, config.task
    if task.agent:
        yield from _check_agent(config)
    if not config.rollout_code:
        empty = "because environment.name and task.agent are empty"
        if e.seats:
            yield wrong("environment.seats", f"[], {empty}")
        if e.endpoints:
            yield _endpoints(config, f"none, {empty}")
        if task.name in GAMES:
            yield wrong("environment.name", f'"{task.name}" for task.name = "{task.name}"')
        return
    if not config.samples_rollouts:
        yield wrong("environment.name" if e.name else "task.agent", '"", because nothing is sampled')
    if e.name in GAMES:
        if task.name != e.name:
            yield wrong("task.name", f'"{e.name}" for environment.name = "{e.name}"')
    elif e.name:
        unusable = list(probe(e.name, first_prompt(config), key="environment.name", environment=e))
        yield from unusable or _check_openings(config)
        yield from _check_server(config, usable=not unusable)
    yield from _check_seats(config)
    if config.model.vision != "none":
        yield from _check_sight(config)
    if e.turn_seconds > e.rollout_seconds:
        yield wrong("environment.turn_seconds", f"at most environment.rollout_seconds = {e.rollout_seconds:g}")
    if e.lockstep and config.rollout.steps_ahead:
        why = "because the rollouts of several steps are in flight with rollout.max_staleness_steps > 0"
        yield wrong("environment.lockstep", f"false, {why}")
    if e.max_tokens > config.training.seq_len:
        yield wrong("environment.max_tokens", f"at most training.seq_len = {config.training.seq_len}")
    if task.name in GAMES and config.cold_start.steps:
        least = GAMES[task.name].longest + 16
        if config.training.seq_len < least:
            longest = f"the longest demonstration of {task.name} with its prompt"
            yield wrong("training.seq_len", f"at least {least}, {longest}")


def _check_sight(config: Config) -> Iterator[str]:
    """Check that all that drives rollouts can read and show images."""
    e, reads = config.environment, f'with model.vision = "{config.model.vision}"'
    prefix = e.name.partition(":")[0]
    if prefix in MAKERS:
        yield problem(config, "environment.name", f"a class or a function of yours {reads}, because {prefix} is text")
    if e.endpoints:
        yield _endpoints(config, f"none {reads}, because seats of other models read text")


def _check_seats(config: Config) -> Iterator[str]:
    """Check the players of an episode, and the keys that know one only."""
    wrong, e, a = partial(problem, config), config.environment, config.algorithm
    if strange := [seat for seat in e.seats if not NAME.fullmatch(seat)]:
        yield f"environment.seats: expected names of letters, digits, - and _, found {strange[0]!r}"
    if len(set(e.seats)) != len(e.seats) or len(e.seats) > MOST_SEATS:
        yield wrong("environment.seats", f"at most {MOST_SEATS} names, each once")
    if not set(e.frozen_seats) <= set(e.seats):
        yield wrong("environment.frozen_seats", f"some of environment.seats = {as_toml(e.seats)}")
    if e.endpoints:
        yield from _check_endpoints(config)
    if not e.seats:
        return
    if not set(e.seats) - set(e.frozen_seats) - set(e.endpoints):
        expected = "not all of environment.seats, because one has to learn"
        yield _endpoints(config, expected) if e.endpoints else wrong("environment.frozen_seats", expected)
    if e.name in GAMES or e.name.partition(":")[0] in ONE_PLAYER:
        yield wrong("environment.seats", f"[], because {e.name} has one player")
    one = "because environment.seats has several players"
    fixed = {"overlong_buffer": 0, "length_reward": "none", "teacher_coef": 0.0}
    for key in (key for key, value in fixed.items() if getattr(a, key) != value):
        yield wrong(f"algorithm.{key}", f"{as_toml(fixed[key])}, {one}")
    if a.advantage in ("greedy", "per_reward", "teacher"):
        yield wrong("algorithm.advantage", f"another than {as_toml(a.advantage)}, {one}, each with one reward")


def _check_endpoints(config: Config) -> Iterator[str]:
    """Check the seats that endpoints play, and ask each of these."""
    e = config.environment
    if config.task.agent:
        yield _endpoints(config, "none with task.agent, because an agent asks any server itself")
    elif not set(e.endpoints) <= set(e.seats):
        yield _endpoints(config, f"some of environment.seats = {as_toml(e.seats)}")
    elif found := list(endpoint_problems(e)):
        yield from found
    elif e.folders and config.hosts.kind != "local":
        yield problem(config, "hosts.kind", '"local", because models of environment.endpoints are on this machine')
    else:
        yield from folder_problems(config)
        if (asked := endpoints_of(e)) and config.hosts.isolation != "off":
            why = "because the run's own network does not reach environment.endpoints"
            yield problem(config, "hosts.isolation", f'"off", {why}')
        else:
            yield from asyncio.run(unreached(asked, e.turn_seconds))


def _endpoints(config: Config, expected: str) -> str:
    """Return the line that refuses the seats of the endpoints, whose tables may hold a secret."""
    return f"environment.endpoints: expected {expected}, found {as_toml([*config.environment.endpoints])}"


def _check_openings(config: Config) -> Iterator[str]:
    """Check that demonstrations can be read as rollouts are, of rows that can be read with a tokenizer that can be."""
    with suppress(BadRows, OSError, ValueError):
        task = load_task(config.task, seed=derive(config.debug.seed, "task"), eval_size=config.eval.size)
        if (tokenizer := policy_tokenizer(config)) and (found := openings(config, task, tokenizer).problem):
            yield found


def _check_server(config: Config, *, usable: bool) -> Iterator[str]:
    """Check that the server of an OpenEnv environment is reached and takes enough sessions."""
    prefix, _, url = config.environment.name.partition(":")
    if prefix != "openenv":
        return
    if config.hosts.isolation != "off":
        why = "because the run's own network does not reach the server of environment.name"
        yield problem(config, "hosts.isolation", f'"off", {why}')
    elif usable and (takes := asyncio.run(sessions_open(url, wanted := in_flight(config)))) < wanted:
        most = f"environment.processes x environment.concurrency: expected at most {takes}"
        yield f"{most}, the sessions that {url} takes (its max_concurrent_envs), found {wanted} rollouts in flight"


def _check_agent(config: Config) -> Iterator[str]:
    e, agent = config.environment, config.task.agent
    if e.name:
        yield problem(config, "task.agent", f'"", because environment.name = {as_toml(e.name)} drives the rollouts')
        return
    if e.lockstep:
        why = "because an agent may ask for several turns at the same time"
        yield problem(config, "environment.lockstep", f"false with task.agent, {why}")
    yield from probe(agent, None, key="task.agent", environment=e)


def warnings(config: Config) -> Sequence[str]:
    return ()
