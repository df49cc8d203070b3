"""How a program that has worker processes begins and ends: nothing waits for its threads."""

import os
import signal
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress

from titan_rl.wire.streams import outlive_readers

DONE, FAILED, USAGE, STOPPED = 0, 1, 2, 130  # exit codes


def enter(main: Callable[[], int], stopped: str = "") -> None:
    """Call `main`, and exit without waiting for threads or workers: workers die with this process. `stopped` is printed
    if a signal ends it."""
    outlive_readers()
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_DFL:  # nohup has SIGHUP ignored
            signal.signal(number, signal.default_int_handler)
    with suppress(FileNotFoundError):  # the current folder was removed
        if os.getcwd() not in sys.path:
            sys.path.append(os.getcwd())  # where a reward's module is, which `python -m` finds too
    try:
        code = main()
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else USAGE
    except KeyboardInterrupt:
        if stopped:
            print(stopped)
        code = STOPPED
    except BaseException:  # a bug; Monarch's threads would abort an interpreter that ends by an exception
        traceback.print_exc()
        code = FAILED
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
