"""Data that crosses processes, and basics of all rooms: carriers, errors, shapes, the weight plan, spans, seeds."""
