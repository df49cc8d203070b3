"""Lets the processes of a group find each other without a port that every interface offers.

    on one host       a file of the run
    on several        a TCP port of rank 0's host, bound to the one address by which the hosts reach each other, and
                      one of its worker's --ports, if it has them

torch.distributed's default, env://, makes the first process listen on every interface, and any client may read and
write the keys from which the group is built. Engines ask for env:// by name, so these replace it.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from titan_rl.wire.gpus import PLANNED
from titan_rl.wire.ports import listener, port_range

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

MEETING = "TITAN_RL_MEETING"  # the file's path
HOST = "TITAN_RL_HOST"  # name or address by which other hosts reach this one; its worker sets it
PORTS = "TITAN_RL_PORTS"  # at which a host listens, "26700-26799"; its worker sets it. Empty: any free ones

_listener: socket.socket | None = None  # rank 0's


def meet_in_file() -> None:
    """Make env:// use the file that this process was launched with, if any. Call it before an engine is built."""
    if not (path := os.environ.get(MEETING)):
        return
    from torch._C._distributed_c10d import FileStore

    _meet(lambda rank, size: FileStore(path, size))


def listen() -> str:
    """Listen at a free port of this host's address, one of its worker's --ports, for the ranks that `meet_at` it."""
    global _listener
    _listener = _listening()
    return _address_of(_listener)


def meet_at(address: str) -> None:
    """Make env:// use rank 0's port, and gloo and NCCL the interface by which this host is reached."""
    from torch._C._distributed_c10d import TCPStore

    use_interface()
    host, _, port = address.rpartition(":")

    def store(rank: int, size: int) -> Any:
        if rank:
            return TCPStore(host, int(port), size, is_master=False)
        assert _listener is not None
        return TCPStore(host, int(port), size, is_master=True, master_listen_fd=_listener.detach())

    _meet(store)


def be_reachable() -> None:
    """Before NCCL starts under a worker: let it use the interface of `use_interface` for later groups too, which may
    span hosts. Where there is none, those groups name the reason when they are made."""
    if os.environ.get(PLANNED) == "cuda" and os.environ.get(HOST):
        with suppress(RuntimeError):
            use_interface()


def use_interface() -> None:
    """Let gloo and NCCL use the interface by which this host is reached. NCCL reads the variable once."""
    interface = interface_of(_own_address())
    os.environ |= {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": interface}


def open_store() -> "tuple[Store, str]":
    """Open a store for processes of other meshes, at a port as `listen` takes it. Return it and its address."""
    from torch._C._distributed_c10d import TCPStore

    opened = _listening()
    address, (host, port) = _address_of(opened), opened.getsockname()
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=opened.detach())
    return store, address


def store_at(address: str, seconds: float) -> "Store":
    """Connect to a store that another process opened."""
    from torch._C._distributed_c10d import TCPStore

    host, _, port = address.rpartition(":")
    return TCPStore(host, int(port), is_master=False, wait_for_workers=False, timeout=timedelta(seconds=seconds))


def _own_address() -> str:
    return socket.gethostbyname(os.environ.get(HOST) or "127.0.0.1")  # no worker: all ranks are on this host


def _listening() -> socket.socket:
    return listener(_own_address(), port_range(os.environ.get(PORTS, "")))


def _address_of(opened: socket.socket) -> str:
    address, port = opened.getsockname()
    return f"{address}:{port}"


def interface_of(address: str) -> str:
    """Return the network interface that has this IP address."""
    import psutil

    if address.startswith("127."):
        return "lo"
    interfaces = psutil.net_if_addrs()
    for name, addresses in interfaces.items():
        if any(entry.address == address for entry in addresses):
            return name
    raise RuntimeError(
        f"expected {HOST}={os.environ[HOST]} to be an address of this host, found {', '.join(interfaces)} without it; "
        "start the worker with an --address that this host has"
    )


def _meet(store_of: Any) -> None:
    from torch.distributed.rendezvous import _rendezvous_handlers

    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

    def rendezvous(url: str, **options: Any) -> Iterator[tuple[Any, int, int]]:
        yield store_of(rank, size), rank, size

    _rendezvous_handlers["env"] = rendezvous
