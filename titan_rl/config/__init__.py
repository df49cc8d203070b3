"""Holds every key of a run, the presets of [algorithm], and the reader and writer of TOML files."""
