"""Hosts that have a version of the weights pass it on to other hosts."""
