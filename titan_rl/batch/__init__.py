"""Turns groups of rollouts into packed training batches. Pure numpy."""
