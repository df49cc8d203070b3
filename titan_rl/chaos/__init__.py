"""Harms a run on purpose and audits what is left of it."""
