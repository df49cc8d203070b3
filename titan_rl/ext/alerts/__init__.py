"""Calls a command or a webhook when a run meets a fault, stops learning, or ends."""
