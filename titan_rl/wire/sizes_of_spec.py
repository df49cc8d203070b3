"""Asks for the dimensions of a model whose TorchTitan spec a function builds from config.json.

The function is called in another process, because this one imports no torch. That builds the model on the meta device,
and names the tensors by the model's own adapter (titan_rl/actors/titan/spec_sizes.py).
"""

import json
import os
import subprocess
import sys
from functools import lru_cache
from typing import Any

PROGRAM = "titan_rl.actors.titan.spec_sizes"
SECONDS = 120.0
"""Limit for building a model on the meta device. Measured: 4, of which imports are 3."""


@lru_cache(maxsize=8)
def sizes_of_spec(spec: str, config_json: str) -> dict[str, Any]:
    """Return fields of SpecShape for the text of a config.json. A ValueError tells what the function refuses."""
    command = [sys.executable, "-m", PROGRAM, spec]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        done = subprocess.run(
            command, input=config_json, capture_output=True, text=True, env=environment, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        raise ValueError(f"{spec}: expected a spec within {SECONDS:g} s, found the function still busy") from None
    if done.returncode:
        errors = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ValueError(f"{spec}: {errors[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
