"""Keeps transformers quiet about a default of Idefics3Config, which it warns about whatever a folder has: a padding
token of 128002 in a vocabulary of 32,000."""

from contextlib import AbstractContextManager

from titan_rl.actors.imports import unlogged


def without_idefics3_default() -> AbstractContextManager[None]:
    return unlogged("transformers.configuration_utils", "31999), got 128002")
