"""Writes the file of every module that this process executes to $RECORD_IMPORTS/PID. Python imports this at start."""

import os
import sys

FOLDER = os.environ.get("RECORD_IMPORTS")


def record(event: str, arguments: tuple[object, ...]) -> None:
    if event == "exec":  # importlib executes a module's code; so does exec(), whose code has no file
        file = getattr(arguments[0], "co_filename", "")
        if file.endswith(".py"):
            with open(f"{FOLDER}/{os.getpid()}", "a") as out:
                out.write(file + "\n")


if FOLDER:
    sys.addaudithook(record)
