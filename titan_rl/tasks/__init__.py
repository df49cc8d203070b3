"""Holds tasks: examples, their order, tokenizer, rewards, and the fixed sets used for evaluation."""
