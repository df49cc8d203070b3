"""Writes runs as one HTML page: curves, time, samples, prompts, evaluations, config and events."""
