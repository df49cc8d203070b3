"""Keeps transformers quiet about a default of Idefics3Config, a padding token of 128002 in a vocabulary of 32,000: it
warns of that default beside each folder."""

from contextlib import AbstractContextManager

from titan_rl.actors.imports import unlogged


def without_idefics3_default() -> AbstractContextManager[None]:
    return unlogged("transformers.configuration_utils", "31999), got 128002")
