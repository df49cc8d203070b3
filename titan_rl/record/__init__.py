"""Writes down what a run does, for people and for other programs, and reads it back."""
