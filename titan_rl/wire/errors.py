"""Errors that end or interrupt a run. Each names the rank that failed, if there is one."""


class RunError(Exception):
    """A run cannot continue. str() is a headline; `details` is the remote traceback or signal, shown once."""

    def __init__(
        self, headline: str, details: str = "", *, rank: str = "", kind: str = "", again: bool = False
    ) -> None:
        super().__init__(headline)
        self.details = details
        self.rank = rank  # the failed one, "trainer[dp=1 tp=0]"; empty: respawning a mesh would not help
        self.kind = kind  # type of the remote exception
        self.again = again  # a run that is started again would fail in the same way

    @property
    def mesh(self) -> str:
        return self.rank.partition("[")[0]


class RankFailed(RunError):
    """An actor raised, or its process died."""


class RankDied(RankFailed):
    """A rank's process ended."""

    def __init__(self, rank: str, how: str, report: str = "") -> None:
        super().__init__(f"{rank} died: its process {how}", report, rank=rank)
        self.how = how


class DeadlinePassed(RunError):
    """A call or a process took longer than allowed."""


class RequestRefused(RunError):
    """An engine cannot sample this request: its prompt is too long, for example. Other requests are not affected."""


class CommandRefused(Exception):
    """A command of the run's user that cannot be carried out; str() is the answer."""


class SandboxRefused(RuntimeError):
    """A layer that [sandbox] require names is missing on this machine, so nothing was run."""


class WeightsRefused(RuntimeError):
    """These weights are not the announced ones, and must not be served."""
