"""Ranks that start in a fraction of a second: forks of processes that have imported their engine."""
