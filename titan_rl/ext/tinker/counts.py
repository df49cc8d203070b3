"""How many models a server plans memory for."""

from titan_rl.ext.tinker.served import MAX_TOGETHER
from titan_rl.preflight.memory import AdapterCounts

SERVED = AdapterCounts(MAX_TOGETHER, MAX_TOGETHER, MAX_TOGETHER)
"""A batch of the server's engines uses at most MAX_TOGETHER adapters. It accepts more."""
