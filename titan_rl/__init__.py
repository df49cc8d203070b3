"""titan_rl: RL post-training with Monarch meshes, TorchTitan trainers and vLLM generators."""

import os
import sys

__version__ = "0.1.0"

if sys.argv[:1] == ["-m"] and sys.path and os.path.exists(sys.path[0]) and os.path.samefile(sys.path[0], "."):
    # `python -m` puts the current folder first, where a stray json.py would replace the library's. Last, it still has a
    # reward's module. What Python itself imports before this line (contextlib, importlib) cannot be helped.
    sys.path.append(sys.path.pop(0))
