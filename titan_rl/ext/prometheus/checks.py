"""Checks of metrics.prometheus: an address that this host can listen on, and that is free."""

import ipaddress
from collections.abc import Iterator

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.ext.prometheus.scrape import address_of, listener, reason
from titan_rl.isolation import outside

EXPECTED = 'a port, or an address and a port such as "127.0.0.1:9400"'


def problems(config: Config) -> Iterator[str]:
    given = config.metrics.prometheus
    try:
        address = address_of(given)
    except ValueError:
        yield f"metrics.prometheus: expected {EXPECTED}, found {as_toml(given)}"
        return
    try:
        outside(lambda: listener(address)).close()
    except OSError as error:
        yield f"metrics.prometheus: expected a free address of this host, found {as_toml(given)}: {reason(error)}"


def warnings(config: Config) -> Iterator[str]:
    host, _ = address_of(config.metrics.prometheus)
    if not ipaddress.ip_address(host).is_loopback:
        yield f"metrics.prometheus: everybody who reaches {host} can read this run's metrics, which are not encrypted"
