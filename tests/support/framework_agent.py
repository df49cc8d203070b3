"""Runs an agent of a framework that this project does not have, in a separate process."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).with_name("smol_program.py")


async def run(row: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Run the program. The reward is the share of digits in its answer, which an untrained policy gets too."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    process = await asyncio.create_subprocess_exec(
        *(os.environ["FRAMEWORK_PYTHON"], str(PROGRAM), base_url, api_key, row["question"]),
        stdout=asyncio.subprocess.PIPE,
        env=environment,
    )
    out, _ = await process.communicate()
    said = json.loads(out.splitlines()[-1])
    digits = sum(letter.isdigit() for letter in said["answer"])
    return {"reward": digits / max(1, len(said["answer"])), "steps": said["steps"]}
