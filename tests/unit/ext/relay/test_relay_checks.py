"""Checks of weight_sync.relay = true."""

from typing import Any

import pytest

from titan_rl.config.sections import Config, HostsSection, WeightSyncSection
from titan_rl.ext.relay.checks import problems, warnings


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, []),
        ({"transport": "rdma"}, []),
        ({"verify": "off"}, ["weight_sync.verify"]),
        ({"verify": "transfer", "transport": "shm"}, ["weight_sync.verify", "weight_sync.transport"]),
        ({"transport": "broadcast"}, ["weight_sync.transport"]),
    ],
)
def test_a_relay_needs_verified_one_sided_reads(keys: dict[str, Any], expected: list[str]) -> None:
    config = Config(weight_sync=WeightSyncSection(relay=True, **keys))
    found = [line.partition(":")[0] for line in problems(config)]
    assert found == expected
    assert all("with weight_sync.relay = true" in line for line in problems(config))


def test_a_relay_on_one_host_has_no_effect() -> None:
    hosts = HostsSection(kind="attach", addresses=["tls://a:1", "tls://b:1"])
    assert [*warnings(Config(weight_sync=WeightSyncSection(relay=True)))]
    assert not [*warnings(Config(weight_sync=WeightSyncSection(relay=True), hosts=hosts))]
    assert not [*warnings(Config(weight_sync=WeightSyncSection(relay=True, transport="rdma")))]
