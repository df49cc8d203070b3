"""A name stands for keys; a file's own go over them, a flag over both."""

import ast
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.folders import write_hf, write_models
from support.shipped_configs import REPRESENTATIVES, slow_except
from titan_rl.config.algorithms import KINDS, PRESETS, kind_of
from titan_rl.config.presets import resolve
from titan_rl.config.sections import AlgorithmSection, Config, ModelSection
from titan_rl.config.toml import find, load, schema, shipped, to_toml
from titan_rl.kernels.surrogate import Surrogate
from titan_rl.preflight.checks import problems, warnings
from titan_rl.preflight.shapes import shape_of

names = pytest.mark.parametrize("name", PRESETS)
NEEDED = {
    "ppo": "[critic]\nlr = 1e-3",
    "gdpo": "[task]\nrewards = {exact = 1, last_number = 1}",
    "opd": '[teacher]\nhf_assets_path = "teacher"',
}


def loaded(folder: Path, text: str, *overrides: tuple[str, str]) -> Config:
    file = folder / "run.toml"
    file.write_text(text)
    return load(file, overrides)


def test_every_algorithm_has_a_preset_and_every_preset_is_one() -> None:
    assert tuple(PRESETS) == schema()["algorithm"]["name"].choices
    assert set(KINDS) < set(PRESETS)


@names
def test_a_presets_values_are_such_as_a_file_may_have(name: str) -> None:
    keys = schema()["algorithm"]
    assert all(keys[key].accepts(value) for key, value in PRESETS[name].items())


@names
def test_a_preset_says_only_what_differs_from_the_defaults(name: str) -> None:
    defaults = AlgorithmSection()
    assert {key: value for key, value in PRESETS[name].items() if getattr(defaults, key) == value} == (
        {"advantage": "group"} if name == "reinforce_pp_baseline" else {}  # said aloud, beside its sibling
    )
    assert "name" not in PRESETS[name]


def test_grpo_is_the_defaults() -> None:
    assert PRESETS["grpo"] == {}
    assert AlgorithmSection().name == "grpo"


@names
def test_a_lag_changes_only_the_preset_without_a_clip(name: str) -> None:
    corrected = {"proximal": "trainer", "correction": "token_tis"} if name == "opd" else {}
    unmoved = {"proximal": "trainer"} if name == "kl_cov" else {}  # its penalty has no sign yet
    assert resolve({"name": name}, lag=0) == {"name": name, **PRESETS[name], **unmoved}
    assert resolve({"name": name}, lag=4) == {"name": name, **PRESETS[name], **corrected}


@names
def test_quantized_engines_are_corrected_for_unless_a_file_decides(name: str) -> None:
    corrected = {"proximal": "trainer", "correction": "token_tis"}
    samples = kind_of(name) == "rl" and name != "online_dpo"  # without a ratio
    for lag in (0, 2):
        expected = {"name": name, **PRESETS[name], **(corrected if samples else {})}
        assert resolve({"name": name}, lag=lag, dtypes=("bfloat16",), quantized=True) == expected
    own = {"name": name, "proximal": "generator"}
    assert resolve(own, lag=0, quantized=True) == PRESETS[name] | own
    assert resolve({"name": name, "correction": "none"}, lag=0, quantized=True) == resolve(
        {"name": name, "correction": "none"}, lag=0
    )


def test_a_files_keys_win_at_every_lag() -> None:
    decoupled = {"name": "dapo", "proximal": "trainer", "correction": "token_tis"}
    assert resolve(decoupled, lag=2) == PRESETS["dapo"] | decoupled
    assert resolve({"name": "opd", "correction": "none"}, lag=2)["proximal"] == "trainer"
    assert resolve({"name": "opd", "correction": "none"}, lag=2)["correction"] == "none"
    assert "correction" not in resolve({"name": "opd", "proximal": "generator"}, lag=2)


@pytest.mark.parametrize("dtypes", [("bfloat16", "float32"), ("float32", "bfloat16"), ("auto", "auto")])
@pytest.mark.parametrize("name", ["gspo", "luspo"])
def test_gspo_is_right_for_16_bits_if_a_dtype_may_have_them(name: str, dtypes: tuple[str, str]) -> None:
    usual, wide = PRESETS[name], {"proximal": "generator", "clip_low": 0.015, "clip_high": 0.02}
    assert resolve({"name": name}, lag=0, dtypes=dtypes) == {"name": name, **usual, "proximal": "trainer"}
    assert resolve({"name": name}, lag=1, dtypes=dtypes) == {"name": name, **usual, **wide}
    own = {"name": name, "proximal": "generator"}
    assert resolve(own, lag=0, dtypes=dtypes) == own | usual | wide, "its clip allows for rounding"
    own = {"name": name, "proximal": "trainer", "clip_low": 0.5}
    assert resolve(own, lag=1, dtypes=dtypes) == usual | own
    assert resolve({"name": "dapo"}, lag=1, dtypes=dtypes) == {"name": "dapo", **PRESETS["dapo"]}


@pytest.mark.parametrize(("name", "dtypes"), [("vespo", ("bfloat16", "float32")), ("kl_cov", ("float32", "float32"))])
def test_without_a_lag_the_rounding_of_an_unchanged_policy_moves_nothing(name: str, dtypes: tuple[str, str]) -> None:
    usual = {"name": name, **PRESETS[name]}
    assert resolve({"name": name}, lag=0, dtypes=dtypes) == usual | {"proximal": "trainer"}
    assert resolve({"name": name}, lag=1, dtypes=dtypes) == usual
    assert resolve({"name": name, "proximal": "generator"}, lag=0, dtypes=dtypes)["proximal"] == "generator"


def test_no_code_names_an_algorithm_without_its_preset() -> None:
    """AlgorithmSection(name="gspo") is GRPO: it takes none of the preset's keys. `preset("gspo")` does."""
    root = Path(__file__).parents[3]
    found = []
    for path in (
        each for top in ("titan_rl", "actors", "meshes", "scripts", "tests") for each in root.glob(f"{top}/**/*.py")
    ):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("AlgorithmSection"):
                keys = {keyword.arg: keyword.value for keyword in node.keywords}
                name = keys.get("name")
                if isinstance(name, ast.Constant) and not PRESETS[str(name.value)].keys() <= keys.keys():
                    found.append(f"{path.relative_to(root)}:{node.lineno} {name.value}")
    assert found == []


@pytest.mark.parametrize("where", ["[generator]\ndtype", "[training]\nmixed_precision_param"])
def test_a_preset_knows_the_files_dtypes_and_lag(where: str, tmp_path: Path) -> None:
    text = f'[algorithm]\nname = "gspo"\n{where} = "bfloat16"\n'
    assert loaded(tmp_path, text).algorithm.proximal == "trainer"
    assert loaded(tmp_path, text, ("rollout.max_staleness_steps", "1")).algorithm.clip_high == 0.02


@names
def test_a_name_alone_resolves_to_its_preset(name: str, tmp_path: Path) -> None:
    got = loaded(tmp_path, f'[algorithm]\nname = "{name}"').algorithm
    values: dict[str, Any] = {"name": name, **PRESETS[name], **({"proximal": "trainer"} if name == "kl_cov" else {})}
    assert got == AlgorithmSection(**values)
    assert loaded(tmp_path, "", ("algorithm.name", name)).algorithm == got


def test_a_files_key_wins_over_the_presets_and_a_flag_over_both(tmp_path: Path) -> None:
    text = '[algorithm]\nname = "dapo"\n'
    assert loaded(tmp_path, text).algorithm.clip_high == 0.28
    assert loaded(tmp_path, text + "clip_high = 0.5").algorithm.clip_high == 0.5
    flagged = loaded(tmp_path, text + "clip_high = 0.5", ("algorithm.clip_high", "0.75")).algorithm
    assert (flagged.clip_high, flagged.dynamic_sampling) == (0.75, True)


def test_a_files_key_may_take_back_what_the_preset_sets(tmp_path: Path) -> None:
    """Even where it is the default's value again."""
    text = '[algorithm]\nname = "dapo"\ndynamic_sampling = false\nclip_high = 0.2'
    got = loaded(tmp_path, text).algorithm
    assert (got.dynamic_sampling, got.clip_high, got.overlong_filter) == (False, 0.2, True)


def test_a_flags_name_takes_its_own_preset_under_the_files_keys(tmp_path: Path) -> None:
    text = '[algorithm]\nname = "ppo"\nkl = "k2"'
    got = loaded(tmp_path, text, ("algorithm.name", "rloo")).algorithm
    assert (got.name, got.advantage, got.normalize, got.kl) == ("rloo", "leave_one_out", "none", "k2")


@given(st.sampled_from(list(PRESETS)), st.sampled_from(list(PRESETS)))
def test_no_preset_leaks_into_another(tmp_path_factory: pytest.TempPathFactory, one: str, other: str) -> None:
    folder = tmp_path_factory.mktemp("preset")
    alone = loaded(folder, f'[algorithm]\nname = "{other}"')
    loaded(folder, f'[algorithm]\nname = "{one}"\nkl_coef = 0.5')
    assert loaded(folder, f'[algorithm]\nname = "{other}"') == alone


@names
def test_a_resolved_preset_is_read_back_equal(name: str, tmp_path: Path) -> None:
    config = loaded(tmp_path, f'[algorithm]\nname = "{name}"\nkl_coef = 0.125')
    assert loaded(tmp_path, to_toml(config)) == config


@names
def test_a_preset_runs_once_it_has_the_role_that_it_needs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / "teacher", shape_of(ModelSection()))
    config = loaded(tmp_path, f'[algorithm]\nname = "{name}"\n{NEEDED.get(name, "")}')
    assert (problems(config), warnings(config)) == ([], [])
    bare = problems(loaded(tmp_path, f'[algorithm]\nname = "{name}"'))
    assert [problem.split(":")[0] for problem in bare] == {
        "ppo": ["critic.lr"],
        "gdpo": ["task.rewards"],
        "opd": ["teacher.hf_assets_path"],
    }.get(name, [])


@names
def test_a_kl_can_be_added_to_any_preset(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_hf(tmp_path / "teacher", shape_of(ModelSection()))
    config = loaded(tmp_path, f'[algorithm]\nname = "{name}"\nkl_coef = 0.01\n{NEEDED.get(name, "")}')
    refused = name == "online_dpo"  # beta is its bound
    ignored = [f'algorithm.kl_coef = 0.01: no effect, because algorithm.name is "{name}"']
    assert ([problem.split(":")[0] for problem in problems(config)], warnings(config)) == (
        ["algorithm.kl_coef"] * refused,
        [] if config.algorithm.kind == "rl" else ignored,
    )
    assert config.algorithm.needs_reference == (config.algorithm.kind == "rl" or name in ("dpo", "ipo", "kto"))


def test_every_preset_has_a_shipped_config_or_differs_from_grpo_in_the_loss_alone() -> None:
    of_the_loss = {f.name for f in fields(Surrogate)} | {"aggregation", "length_constant", "rejection"}
    unshipped = PRESETS.keys() - {load(find(name)).algorithm.name for name in shipped()}
    assert unshipped == {"dppo", "prob_diff", "gmpo", "luspo", "vespo", "clip_cov", "kl_cov"}
    assert all(PRESETS[name].keys() <= of_the_loss for name in unshipped)


NOT_PLANNED = [name for name in shipped() if not load(find(name)).hosts.gpu_memory_gb]
QUICK = [*REPRESENTATIVES, *(name for name in NOT_PLANNED if "smollm2" not in name)]  # its data set takes a second


@pytest.mark.parametrize("name", slow_except(QUICK, NOT_PLANNED))
def test_a_shipped_config_runs_where_its_roles_are(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # theirs are relative to where a run is started
    config = load(find(name))
    write_models(config)
    assert (problems(config), warnings(config)) == ([], [])


@pytest.mark.parametrize(
    ("name", "roles"),
    [
        ("grpo", []),
        ("ppo", ["critic"]),
        ("opd", ["teacher"]),
        ("sft", []),
        ("dpo", []),
        ("reward_model", []),
    ],
)
def test_meshes_of_their_own(name: str, roles: list[str], tmp_path: Path) -> None:
    assert list(loaded(tmp_path, f'[algorithm]\nname = "{name}"').roles) == roles
    text = f'[algorithm]\nname = "{name}"\nkl_coef = 0.1\n[reference]\nmesh = "own"\n[task]\nreward = "model"'
    config = loaded(tmp_path, text)
    expected = {*roles, *(["reference"] if config.algorithm.needs_reference else [])}
    assert set(config.roles) == expected | ({"reward_model"} if config.algorithm.kind == "rl" else set())
