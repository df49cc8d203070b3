"""titan_rl: RL post-training with Monarch meshes, TorchTitan trainers and vLLM generators."""

import os
import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"] and os.path.isdir(".") and sys.path[:1] == [os.getcwd()]:
    # `python -m` puts the current folder first, where a stray json.py would replace the library's. Last, it still has a
    # reward's module. What Python itself imports before this line (contextlib, importlib) cannot be helped.
    sys.path.append(sys.path.pop(0))
