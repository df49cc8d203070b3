"""Checks of [opponents]."""

import json
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from titan_rl.config.sections import Config
from titan_rl.config.toml import as_toml
from titan_rl.ext.adapters.layers import PEFT_CONFIG, PEFT_WEIGHTS, adapted
from titan_rl.ext.opponents.opponents import AGO, OWN, steps_ago
from titan_rl.preflight.refusal import problem
from titan_rl.wire.model_shape import ModelShape


def problems(config: Config, shape: ModelShape, device: str) -> Iterator[str]:
    wrong, o, seats = partial(problem, config), config.opponents, config.environment.seats
    if not o.pool:
        yield wrong("opponents.pool", "someone to play against, because other keys of [opponents] are set")
        return
    if not seats:
        yield wrong("environment.seats", "several players, because opponents.pool plays one of them")
        return
    if config.lora.in_vllm is None:
        what = 'lora.sync = "adapter", because opponents are adapters over the same weights'
        yield wrong("lora.rank" if not config.lora.on else "lora.sync", f"at least 1, with {what}")
        return
    if not set(o.seats) <= set(seats):
        yield wrong("opponents.seats", f"some of environment.seats = {as_toml(seats)}")
    untrained = {*config.environment.frozen_seats, *config.environment.endpoints}
    if asked := [seat for seat in o.seats if seat in config.environment.endpoints]:
        yield wrong("opponents.seats", f"seats without {asked[0]}, which an endpoint plays")
    for seat in o.seats or sorted({*seats} - untrained):
        if not set(seats) - untrained - {seat}:
            taken = f"another seat than {seat}, because no other one is trained"
            yield wrong("opponents.seats", taken)
    if len(set(o.pool)) < len(o.pool):
        yield wrong("opponents.pool", "each opponent once")
    for entry in o.pool:
        if entry not in OWN and steps_ago(entry) is None and (found := _folder_problem(entry, config, shape)):
            yield f"opponents.pool: {found}"
    labels = [Path(entry).name for entry in o.pool]
    if len(set(labels)) < len(labels):
        yield wrong("opponents.pool", "folders of different names")
    if o.held_out and o.held_out not in o.pool:
        yield wrong("opponents.held_out", f"one of opponents.pool = {as_toml(o.pool)}")
    if o.held_out and not config.eval.size:
        yield wrong("opponents.held_out", '"", because eval.size = 0 leaves no held-out episodes')


def _folder_problem(entry: str, config: Config, shape: ModelShape) -> str:
    """Return why engines cannot play by the adapter in a folder, or ""."""
    folder = Path(entry)
    if not (folder / PEFT_WEIGHTS).is_file() or not (folder / PEFT_CONFIG).is_file():
        known = f'{", ".join(map(as_toml, OWN))}, "{AGO} N" or a folder with {PEFT_WEIGHTS} and {PEFT_CONFIG}'
        return f"expected {known}, found {as_toml(entry)}"
    try:
        settings = json.loads((folder / PEFT_CONFIG).read_text(encoding="utf-8"))
        rank, layers = int(settings["r"]), set(settings["target_modules"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"expected a valid {PEFT_CONFIG}, found in {entry}: {type(error).__name__}: {error}"
    if rank > config.lora.rank:
        return f"expected adapters of at most lora.rank = {config.lora.rank}, found {rank} in {entry}"
    if more := sorted({layer.rpartition(".")[2] for layer in layers} - set(adapted(shape, config.lora))):
        return f"expected adapters of the layers of lora.targets, found {', '.join(more)} in {entry}"
    return ""


def warnings(config: Config, shape: ModelShape, device: str) -> Sequence[str]:
    return ()
