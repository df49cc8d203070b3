"""Records what a run does, for people and for other programs, and reads the records back."""
