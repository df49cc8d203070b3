"""The end of a run."""

import subprocess
import sys

# In a process of its own: the end of a run is the end of Monarch and of all ranks in the controller's process.
PROGRAM = """
import asyncio, os, subprocess, sys, time
from pathlib import Path
from titan_rl.meshes import deaths
from titan_rl.train.launch import shutdown

stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
names = ["role[dp=0 tp=0]", "role[dp=1 tp=0]"]
shim = [sys.executable, "-I", "-S", str(Path(deaths.__file__).with_name("zygote_shim.py"))]
ranks = [
    subprocess.Popen(
        [*shim, sys.executable, "-c", stubborn],
        env={**expected, "TITAN_RL_CONTROLLER": str(os.getpid())},
        stdout=subprocess.PIPE,
    )
    for expected in deaths.follow(names).values()
]
for rank in ranks:
    rank.stdout.readline()
while not set(names) <= deaths.alive().keys():
    time.sleep(0.01)
began = time.monotonic()
asyncio.run(shutdown())
took = time.monotonic() - began
print(took < 4, *(rank.wait(5) for rank in ranks))  # below CLOSE_SECONDS: nothing had to time out
"""


def test_ranks_that_ignore_every_request_do_not_delay_the_end() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "-9", "-9"], done.stderr
