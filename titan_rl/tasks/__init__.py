"""Holds tasks: examples, their order, rewards, and the fixed sets used for evaluation."""
