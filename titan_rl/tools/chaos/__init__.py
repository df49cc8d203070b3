"""Injects faults into a run and audits the result."""
