"""Checks of weight_sync.relay = true."""

from collections.abc import Iterator

from titan_rl.config.sections import Config
from titan_rl.preflight.refusal import problem

HOW = "with weight_sync.relay = true"


def problems(config: Config) -> Iterator[str]:
    keys = config.weight_sync
    if keys.verify != "live":
        yield problem(config, "weight_sync.verify", f'"live" {HOW}: readers must find wrong bytes of another host')
    if keys.transport not in ("auto", "rdma"):
        yield problem(config, "weight_sync.transport", f'"auto" or "rdma" {HOW}, which passes on one-sided reads')


def warnings(config: Config) -> Iterator[str]:
    if config.weight_sync.transport == "auto" and not (config.hosts.at_addresses and config.hosts.number > 1):
        yield "weight_sync.relay: true has no effect, because no weights go to another host"
