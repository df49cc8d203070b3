"""Holds every key of a run's TOML, what a preset's name means, and the reader of TOML files."""
