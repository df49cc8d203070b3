"""The built-in advantages and clips, as they are declared."""

from dataclasses import fields
from pathlib import Path

import pytest

from support.checked_configs import config
from titan_rl.batch.advantages import over_median
from titan_rl.config.methods import ADVANTAGES, CLIPS, RULES, advantage_of, function_of
from titan_rl.config.presets import preset
from titan_rl.config.sections import AlgorithmSection
from titan_rl.config.toml import schema
from titan_rl.preflight.checks import problems

PAGE = (Path(__file__).parents[3] / "docs/algorithms.md").read_text(encoding="utf-8")


def test_every_method_has_its_function_and_its_place_in_the_docs() -> None:
    rows = [f"| `{name}` | {each.formula} | {each.used_by} |" for name, each in ADVANTAGES.items()]
    assert "\n".join(["| `advantage` | per token | |", "| --- | --- | --- |", *rows]) in PAGE
    for name, each in (*ADVANTAGES.items(), *CLIPS.items()):
        assert callable(function_of(each))
        assert f"`{name}`" in PAGE or f'"{name}"' in PAGE


def test_values_and_help_of_the_config_are_the_declared_methods() -> None:
    keys = schema()["algorithm"]
    assert keys["advantage"].choices == tuple(ADVANTAGES)
    assert keys["clip"].choices == tuple(CLIPS)
    assert all(f'"{name}": {each.summary}' in keys["advantage"].doc for name, each in ADVANTAGES.items())


def test_rules_name_keys_and_values_of_the_config() -> None:
    keys, names = schema()["algorithm"], {each.name for each in fields(AlgorithmSection)}
    rules = [rule for each in (*ADVANTAGES.values(), *CLIPS.values()) for rule in each.rules]
    rules += [rule for each in RULES.values() for rule in each]
    for rule in rules:
        assert rule.key in names
        assert {rule.beside, ""} <= {*names, ""}
        assert all(keys[rule.key].accepts(value) for value in rule.allowed)
    assert all(keys[key].accepts(value) for key, value in RULES)
    assert all(keys["normalize"].accepts(scale) for each in ADVANTAGES.values() for scale in each.scales)


@pytest.mark.parametrize("name", ADVANTAGES)
@pytest.mark.parametrize("scale", ["none", "group", "mean", "batch"])
def test_a_scale_is_refused_by_name_unless_the_method_has_it(tmp_path: Path, name: str, scale: str) -> None:
    text = f'[algorithm]\nadvantage = "{name}"\nnormalize = "{scale}"\n'
    found = [each for each in problems(config(tmp_path, text)) if each.startswith("algorithm.normalize: ")]
    assert bool(found) == (scale not in advantage_of(name).scales)
    assert all(f'because algorithm.advantage = "{name}"' in each for each in found)


@pytest.mark.parametrize(
    ("rewards", "normalize", "expected"),
    [
        # The median of 0, 0, 1 is 0: the one right answer learns, the wrong ones do not.
        ([0.0, 0.0, 1.0], "none", [0.0, 0.0, 1.0]),
        ([1.0, 1.0, 0.0], "none", [0.0, 0.0, -1.0]),
        ([0.0, 1.0], "none", [-0.5, 0.5]),
        # Deviation of 1, 2, 6 with n - 1: sqrt(7).
        ([1.0, 2.0, 6.0], "group", [-1 / (7**0.5 + 1e-4), 0.0, 4 / (7**0.5 + 1e-4)]),
        ([3.0, 3.0, 3.0], "group", [0.0, 0.0, 0.0]),
        ([3.0], "group", [0.0]),
    ],
)
def test_the_median_as_a_baseline(rewards: list[float], normalize: str, expected: list[float]) -> None:
    a = preset("grpo", advantage="median", normalize=normalize)
    assert over_median(rewards, [1] * len(rewards), a) == pytest.approx(expected, abs=1e-12)
