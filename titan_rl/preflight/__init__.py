"""Reads, resolves and checks a run before any process is spawned, and describes it."""
