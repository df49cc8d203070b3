"""Turns messages into tokens and back: tokenizers and chat templates. Imports neither torch nor transformers."""
