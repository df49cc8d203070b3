"""Check titan_rl's parts on one GPU against references, one after the other: `python -m bench.gpu MODE ...`.

machine        what this card can do: copies, matmuls, pinned transfers
varlen         FlashAttention over documents that share prompts, against SDPA in float32
checksums      block hash and packing kernels, on the device and in pinned memory of the host
head           the log-prob kernel against float64, at odd shapes, kept sets and temperatures
float32        a trainer rank's log-probs and gradient norm against transformers
bfloat16       the same in bfloat16
eager          a trainer rank's steps at 0.6B, by rows of a microbatch: seconds, MFU, the host's share, memory
recompute      the same by modes of activation_checkpoint: seconds, memory, pinned memory of "offload"
compiled       the same with compiled blocks, and how often they were compiled
deterministic  two runs with debug.deterministic have equal bits
weights        Staging in one process, Landing in another on the same GPU: pins, pack, write, verify, a flipped sign

Prints a JSON line for each row. With TITAN_RL_DEVICE=cpu and TRITON_INTERPRET=1 shapes are tiny, and checks that need a
GPU are left out. Exits with 1 if a row is WRONG.
"""

import argparse
import importlib
import os
import sys
import time
import traceback

from bench.gpu import measured

MODES = {
    **dict.fromkeys(("machine", "varlen", "checksums"), "card"),
    "head": "head",
    **dict.fromkeys(("float32", "bfloat16", "deterministic"), "trainer_numbers"),
    **dict.fromkeys(("eager", "recompute", "compiled"), "trainer_steps"),
    "weights": "weights",
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("modes", nargs="+", choices=list(MODES), metavar="MODE")
    for mode in parser.parse_args().modes:
        measured.begin(mode)
        began = time.monotonic()
        try:
            getattr(importlib.import_module(f"bench.gpu.{MODES[mode]}"), mode)()
        except Exception as error:  # any error is this mode's result
            traceback.print_exc()
            measured.say("failed", type(error).__name__, str(error).strip().split("\n")[0][:300], False)
        measured.say("(seconds of this part)", time.monotonic() - began)
    return int(measured.wrong())


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # a process group that is not destroyed may keep an interpreter from its end
