"""The plan names the way of weights between hosts, and the price of TCP."""

from types import SimpleNamespace
from typing import Any

import pytest

from titan_rl.config import sections as c
from titan_rl.ext.run_plan import describe
from titan_rl.wire.gpus import Gpus

READS = "RDMABuffer, one-sided reads"
TCP = f"{READS} (TCP fallback: no RDMA device here; about {{}} s per sync and host, an estimate)"
NCCL = "broadcast by NCCL to a replica of each host"


@pytest.mark.parametrize(
    ("transport", "device", "gpus_here", "verbs", "gbps", "expected"),
    [
        ("auto", "cuda", True, True, 0, f"{READS} (ibverbs)"),
        ("auto", "cuda", True, False, 0, f"{NCCL}: no RDMA device here"),
        ("auto", "cuda", False, False, 0, f"{READS} (without RDMA devices {NCCL})"),
        ("rdma", "cuda", False, False, 0, READS),
        ("broadcast", "cuda", True, True, 0, NCCL),
        ("broadcast", "cpu", True, False, 0, "broadcast by gloo to a replica of each host"),
        ("auto", "cpu", True, False, 0, TCP.format("16.0")),
        ("rdma", "cuda", True, False, 1, TCP.format("112.0")),
    ],
)
def test_the_plan_names_the_way_and_the_price_of_tcp(
    monkeypatch: pytest.MonkeyPatch,
    transport: Any,
    device: str,
    gpus_here: bool,
    verbs: bool,
    gbps: float,
    expected: str,
) -> None:
    monkeypatch.setattr(describe.os.path, "isdir", lambda _: verbs)
    monkeypatch.setattr(describe.os, "listdir", lambda _: ["mlx5_0"])
    config = c.Config(weight_sync=c.WeightSyncSection(transport=transport), hosts=c.HostsSection(link_gbps=gbps))
    setup: Any = SimpleNamespace(config=config, device=device, gpus=Gpus(1, here=gpus_here))
    assert describe.between_hosts(setup, 14 * 10**9) == expected
