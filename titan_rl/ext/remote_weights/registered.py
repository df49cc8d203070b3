"""What a trainer rank offers to a reader of another host. The controller passes it on, so it imports no torch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from monarch.rdma import RDMABuffer


@dataclass(frozen=True, slots=True)
class Registered:
    """A reader's run, registered for one-sided reads."""

    stamps: "RDMABuffer"
    slices: "tuple[list[RDMABuffer], ...]"  # by slot: consecutive parts of the run
    meets: str = ""  # address of the store at which readers of its broadcasts meet; empty: it sends none
