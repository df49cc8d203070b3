"""Puts the folder of a pretrained model in place of its name, "fetch:NAME"."""

from dataclasses import fields, replace
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.wire.parts import PartMissing, needed_part

PREFIX = "fetch:"
KEY = "hf_assets_path"


class FetchFailed(Exception):
    """A model that could not be fetched or converted, and what to do about it."""


def with_models(config: Config) -> Config:
    """Return the config with a folder in place of every "fetch:NAME". Fetch the models that are not there yet."""
    changed = dict[str, Any]()
    for each in fields(Config):
        section: Any = getattr(config, each.name)
        path, key = getattr(section, KEY, ""), f"{each.name}.{KEY}"
        if path.startswith(PREFIX):
            try:
                folder = needed_part("pretrained models", key)(path.removeprefix(PREFIX), key)
            except PartMissing as error:
                raise FetchFailed(str(error)) from error
            changed[each.name] = replace(section, **{KEY: str(folder)})
    return replace(config, **changed)
