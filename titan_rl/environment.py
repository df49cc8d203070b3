"""What must be in the controller's environment before Monarch is imported, for Monarch reads it then."""

import os

CONTROLLER_ENV = {
    "HYPERACTOR_MESH_SUPERVISION_POLL_FREQUENCY": "1s",  # default 10 s: how soon a dead process is noticed
    "MONARCH_FILE_LOG": "error",  # Monarch's own log grows by 30 MB an hour otherwise
}


def prepare_environment() -> None:
    for name, value in CONTROLLER_ENV.items():
        os.environ.setdefault(name, value)
