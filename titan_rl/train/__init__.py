"""Drives the meshes of a run: launch, learning, weight sync, resuming, recovery."""
