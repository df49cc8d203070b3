"""Checks of [environment]: that it can be imported, and fits the task and the run."""

import asyncio
from collections.abc import Iterator

from titan_rl.agents.games import GAMES
from titan_rl.agents.openenv import sessions_open
from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.preflight.reward_probe import probe


def check_environment(config: Config) -> Iterator[str]:
    e, task = config.environment, config.task
    if task.agent:
        yield from _of_agent(config)
    if not config.rollout_code:
        if task.name in GAMES:
            yield f'environment.name: expected "{task.name}" for task.name = "{task.name}", found ""'
        return
    if not config.samples_rollouts:
        key = "environment.name" if e.name else "task.agent"
        yield f'{key}: expected "", because nothing is sampled, found {as_toml(config.rollout_code)}'
    if e.name in GAMES:
        if task.name != e.name:
            yield f'task.name: expected "{e.name}" for environment.name = "{e.name}", found "{task.name}"'
    elif e.name:
        unusable = list(probe(e.name, None, key="environment.name", environment=e))
        yield from unusable
        yield from _of_server(config, usable=not unusable)
    if e.turn_seconds > e.rollout_seconds:
        most = f"expected at most environment.rollout_seconds = {e.rollout_seconds:g}"
        yield f"environment.turn_seconds: {most}, found {e.turn_seconds:g}"
    if e.lockstep and config.rollout.lag:
        why = "because the rollouts of several steps are in flight with rollout.lag > 0"
        yield f"environment.lockstep: expected false, {why}, found true"
    if e.max_tokens > config.training.seq_len:
        most = f"expected at most training.seq_len = {config.training.seq_len}"
        yield f"environment.max_tokens: {most}, found {e.max_tokens}"
    if task.name in GAMES and config.cold_start.steps and config.training.seq_len < GAMES[task.name].longest + 16:
        least = GAMES[task.name].longest + 16
        why = f"expected at least {least}, the longest demonstration of {task.name} with its prompt"
        yield f"training.seq_len: {why}, found {config.training.seq_len}"


def in_flight(config: Config) -> int:
    """Return how many rollouts are driven at the same time."""
    r, e = config.rollout, config.environment
    return min(r.groups_per_step * r.group_size * (1 + r.lag), e.processes * e.concurrency)


def _of_server(config: Config, *, usable: bool) -> Iterator[str]:
    """Yield what is wrong with the server of an OpenEnv environment: it is not reached, or takes too few sessions."""
    prefix, _, url = config.environment.name.partition(":")
    if prefix != "openenv":
        return
    if config.hosts.isolation != "off":
        why = "because the run's own network does not reach the server of environment.name"
        yield f'hosts.isolation: expected "off", {why}, found "{config.hosts.isolation}"'
    elif usable and (takes := asyncio.run(sessions_open(url, wanted := in_flight(config)))) < wanted:
        most = f"environment.processes x environment.concurrency: expected at most {takes}"
        yield f"{most}, the sessions that {url} takes (its max_concurrent_envs), found {wanted} rollouts in flight"


def _of_agent(config: Config) -> Iterator[str]:
    e, agent = config.environment, config.task.agent
    if e.name:
        why = f"because environment.name = {as_toml(e.name)} drives the rollouts"
        yield f'task.agent: expected "", {why}, found {as_toml(agent)}'
        return
    if e.lockstep:
        why = "because an agent may ask for several turns at the same time"
        yield f"environment.lockstep: expected false with task.agent, {why}, found true"
    yield from probe(agent, None, key="task.agent", environment=e)
