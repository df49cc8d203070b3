"""Offers the calls of Tinker's SDK over this machine's trainers and generators (docs/tinker.md)."""
