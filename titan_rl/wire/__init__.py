"""Holds what crosses processes or lies under everything: carriers, errors, shapes, the weight plan, spans, seeds."""
