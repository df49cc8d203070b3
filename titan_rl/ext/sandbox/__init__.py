"""Runs code that a model wrote, in processes that can harm nothing. docs/security.md."""
