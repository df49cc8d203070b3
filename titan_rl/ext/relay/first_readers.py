"""How many hosts read a version from the trainers' hosts, where the others read it from each other."""

from titan_rl.config.system_sections import WeightSyncSection

READERS_PER_SENDER = 3  # least hosts that read per host of the trainers for "auto"; fewer save at most half of the time


def relayed(keys: WeightSyncSection, senders: int, readers: int) -> bool:
    """Return whether `readers` hosts without trainers pass on what `senders` hosts of trainers send them one-sided."""
    if keys.transport not in ("auto", "rdma") or keys.verify != "live":
        return False
    return readers >= READERS_PER_SENDER * senders if keys.relay == "auto" else keys.relay


def firsts(senders: int, readers: int) -> int:
    """Return how many of the readers begin a chain."""
    return min(max(1, senders), readers)


def first_readers(keys: WeightSyncSection, senders: int, readers: int) -> int:
    """Return how many of the readers read from the trainers: all of them, if none passes a version on."""
    return firsts(senders, readers) if relayed(keys, senders, readers) else readers
