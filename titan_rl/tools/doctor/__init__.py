"""Says whether this machine can run titan_rl, and what to change if it cannot. Imports no package outside Python."""
