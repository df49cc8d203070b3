"""Holds tasks: their problems, order, tokenizer, rewards, and the fixed sets that a run is evaluated on."""
