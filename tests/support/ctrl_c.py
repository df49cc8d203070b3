"""Ctrl-C for processes that a test starts."""

import signal


def hears_ctrl_c() -> None:
    """In a new process: undo that a shell ignores SIGINT for what runs in its background, such as these tests."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
