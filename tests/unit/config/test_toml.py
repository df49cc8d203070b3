import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from support.shipped_configs import REPRESENTATIVES, features
from titan_rl.config import toml as config_file
from titan_rl.config.choices import FamilyChoice, NestedTables, Table, Tables
from titan_rl.config.foreign_names import KEYS, foreign_hint
from titan_rl.config.sections import Config
from titan_rl.config.toml import (
    PATHS,
    ConfigError,
    EarlierRun,
    Key,
    docs,
    find,
    load,
    load_of_run,
    policies_of,
    schema,
    shipped,
    to_toml,
    variants,
)

FAMILIES = ", ".join(f'"{family}"' for family in get_args(FamilyChoice))


def problems_of(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> list[str]:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError) as raised:
        load(file, overrides)
    assert str(raised.value) == "\n".join(raised.value.problems)
    return raised.value.problems


def loaded(tmp_path: Path, text: str, *overrides: tuple[str, str]) -> Config:
    file = tmp_path / "run.toml"
    file.write_text(text, encoding="utf-8")
    return load(file, overrides)


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


def values(key: Key) -> st.SearchStrategy[Any]:
    if key.choices:
        return st.sampled_from(key.choices)
    if get_origin(key.type) is list:
        return st.lists(texts if key.type == list[str] else st.integers(), max_size=3)
    if key.type in (Table, Tables, NestedTables):
        scalars = st.booleans() | st.integers() | texts | st.floats(-1e9, 1e9)
        table = st.dictionaries(texts, scalars, max_size=3)
        tables = st.dictionaries(texts, st.dictionaries(texts, scalars | table, max_size=3), max_size=3)
        return {Table: table, Tables: st.dictionaries(texts, table, max_size=3)}.get(key.type, tables)
    if key.type is int:
        return st.integers(int(key.ge or 0), int(key.lt - 1 if key.le is None and key.lt is not None else key.le or 0))
    if key.type is float:
        low = key.ge if key.gt is None else key.gt
        high = key.le if key.lt is None else key.lt
        above, below = key.gt is not None, key.lt is not None
        return st.floats(low, high, exclude_min=above, exclude_max=below, allow_nan=False, allow_infinity=False)
    return st.booleans() if key.type is bool else texts


def sections(section: str, kind: Any) -> st.SearchStrategy[Any]:
    def of(name: str, key: Key) -> st.SearchStrategy[Any]:
        """A config that was loaded has no ~ before a user's path."""
        return values(key).map(os.path.expanduser) if f"{section}.{name}" in PATHS else values(key)

    return st.builds(kind, **{name: of(name, key) for name, key in schema()[section].items()})


configs = st.builds(Config, **{section: sections(section, kind) for section, kind in get_type_hints(Config).items()})


@given(configs)
def test_to_toml_is_read_back_equal(tmp_path_factory: pytest.TempPathFactory, config: Config) -> None:
    file = tmp_path_factory.mktemp("config") / "run.toml"
    file.write_text(to_toml(config), encoding="utf-8", newline="")
    assert load(file) == config


def test_to_toml_carries_every_doc() -> None:
    text = to_toml(Config())
    assert all(key.doc in text for keys in schema().values() for key in keys.values())


def test_every_key_has_a_doc_and_a_valid_default() -> None:
    described = docs()
    for section, kind in get_type_hints(Config).items():
        assert set(described[section]) == set(get_type_hints(kind))
    assert all(key.accepts(key.default) for keys in schema().values() for key in keys.values())


def test_every_number_has_a_limit_on_both_sides(tmp_path: Path) -> None:
    for section, keys in schema().items():
        for name, key in keys.items():
            if key.type not in (int, float):
                continue
            assert (key.ge is None) != (key.gt is None), name
            assert (key.le is None) != (key.lt is None), name
            for text in (str(-(2**200)), str(2**200), "-1", "nan", "inf", "-inf", "1e308", "-1e-3"):
                (problem,) = problems_of(tmp_path, "", (f"{section}.{name}", text))
                assert problem.startswith(f"--{section}.{name}: expected {key.expected}, found "), problem


def test_values_over_defaults_and_overrides_over_values(tmp_path: Path) -> None:
    text = '[training]\nsteps = 3\nmax_norm = 2\n[job]\ndescription = "größer"\n'
    config = loaded(tmp_path, text, ("training.steps", "20"), ("job.fresh", "true"))
    assert (config.training.steps, config.training.max_norm, config.training.seq_len) == (20, 2.0, 256)
    assert isinstance(config.training.max_norm, float)
    assert (config.job.description, config.job.fresh) == ("größer", True)


@pytest.mark.parametrize(
    ("flag", "text", "value"),
    [
        ("training.steps", "1_000", 1000),
        ("optimizer.lr", "1e-3", 1e-3),
        ("optimizer.lr", "3", 3.0),
        ("job.fresh", "False", False),
        ("job.description", "true", "true"),
        ("job.description", "", ""),
        ("rollout.stop_token_ids", "1, 2", [1, 2]),
        ("rollout.stop_token_ids", "[3]", [3]),
        ("rollout.stop_token_ids", "", []),
        ("override.imports", "my.module.f, other.g", ["my.module.f", "other.g"]),
        ("override.imports", '["my.module.f"]', ["my.module.f"]),
        ("task.chat_template_kwargs", "{enable_thinking = false, n = 3}", {"enable_thinking": False, "n": 3}),
        ("task.chat_template_kwargs", "{}", {}),
        ("model.name", "qwen3", "qwen3"),
        ("compile.enable", "auto", "auto"),
        ("compile.enable", "True", True),
        ("compile.enable", "false", False),
    ],
)
def test_overrides_are_read_by_their_keys_type(tmp_path: Path, flag: str, text: str, value: Any) -> None:
    section, key = flag.split(".")
    found = getattr(getattr(loaded(tmp_path, "", (flag, text)), section), key)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("value", [True, False])
def test_a_switch_that_a_run_wrote_before_it_could_be_auto(tmp_path: Path, value: bool) -> None:
    config = loaded(tmp_path, f"[compile]\nenable = {str(value).lower()}\n")
    assert config.compile.enable is value


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[training]\nstep = 3", "run.toml: [training] has no key 'step'; did you mean 'steps'?"),
        (
            "[training]\nlr = 3",
            "run.toml: [training] has no key 'lr'; it is a key of [cold_start], [critic], [optimizer]",
        ),
        ("[training]\nqqq = 3", "run.toml: [training] has no key 'qqq'"),
        (
            "[optimizer]\nlearning_rate = 3",
            "run.toml: [optimizer] has no key 'learning_rate'; here it is --optimizer.lr (docs/environments.md)",
        ),
        ("[trainin]\nsteps = 3", "run.toml: there is no section [trainin]; did you mean [training]?"),
        ("[a.b]\nsteps = 3", "run.toml: there is no section [a]"),
        ("seq_len = 3", "run.toml: 'seq_len' is outside a section; it is a key of [training]"),
        ("training = 3", "run.toml: [training]: expected a table, found 3"),
        ("[[training]]\nsteps = 3", 'run.toml: [training]: expected a table, found [{"steps": 3}]'),
        (
            '[training]\nsteps = "3"',
            'run.toml: [training] steps: expected an integer >= 0 and <= 1000000000, found "3"',
        ),
        (
            "[training]\nsteps = true",
            "run.toml: [training] steps: expected an integer >= 0 and <= 1000000000, found true",
        ),
        (
            "[training]\nsteps = 3.0",
            "run.toml: [training] steps: expected an integer >= 0 and <= 1000000000, found 3.0",
        ),
        (
            "[training.steps]\nx = 3",
            'run.toml: [training] steps: expected an integer >= 0 and <= 1000000000, found {"x" = 3}',
        ),
        ("[training]\nsteps = -1", "run.toml: [training] steps: expected an integer >= 0 and <= 1000000000, found -1"),
        ("[training]\nsteps = 2020-01-01", 'expected an integer >= 0 and <= 1000000000, found "2020-01-01"'),
        ("[optimizer]\nlr = 0", "run.toml: [optimizer] lr: expected a number > 0 and <= 10, found 0.0"),
        ("[optimizer]\nlr = nan", "run.toml: [optimizer] lr: expected a number > 0 and <= 10, found NaN"),
        ("[optimizer]\nlr = true", "run.toml: [optimizer] lr: expected a number > 0 and <= 10, found true"),
        (f"[optimizer]\nlr = {'9' * 400}", "run.toml: [optimizer] lr: expected a number > 0 and <= 10, found Infinity"),
        ("[optimizer]\nbeta1 = 1.5", "run.toml: [optimizer] beta1: expected a number >= 0 and < 1, found 1.5"),
        ("[rollout]\nlag = -1", "run.toml: [rollout] lag: expected an integer >= 0 and <= 2000, found -1"),
        ("[job]\nfresh = 1", "run.toml: [job] fresh: expected true or false, found 1"),
        ("[compile]\nenable = 1", 'run.toml: [compile] enable: expected one of true, false, "auto", found 1'),
        (
            '[compile]\nenable = "true"',
            'run.toml: [compile] enable: expected one of true, false, "auto", found "true"; did you mean \'true\'?',
        ),
        ("[job]\ndescription = 1", "run.toml: [job] description: expected a string, found 1"),
        ("[rollout]\nstop_token_ids = [1, true]", "stop_token_ids: expected a list of integers, found [1, true]"),
        (
            "[task.chat_template_kwargs]\nx = [1]",
            'run.toml: [task] chat_template_kwargs: expected a table of texts, numbers and booleans, found {"x" = [1]}',
        ),
        (
            "[task]\nchat_template_kwargs = {x = nan}",
            'expected a table of texts, numbers and booleans, found {"x" = NaN}',
        ),
        ('[task]\nchat_template_kwargs = {x = "a\\u0000"}', "expected text that UTF-8 can encode, without NUL, found"),
        (
            "[task]\nchat_template_kwargs = 3",
            "chat_template_kwargs: expected a table of texts, numbers and booleans, found 3",
        ),
        (
            '[model]\nname = "lama3"',
            f"expected one of {FAMILIES}, found \"lama3\"; did you mean 'llama3'?",
        ),
        (
            '[hosts]\nkind = "slurm"',
            'expected one of "local", "processes", "attach", "ssh", found "slurm"; '
            "python -m titan_rl launch --on slurm runs a config on a cluster",
        ),
        (
            "[model]\nname = [1]",
            f"name: expected one of {FAMILIES}, found [1]",
        ),
        ("[job]\nfresh = true\nfresh = = 3", "run.toml:3:9: Invalid value: fresh = = 3"),
        ('[job]\ndescription = "abc', 'run.toml:2:19: Unterminated string: description = "abc'),
        ("x = " + "[" * 5000, "run.toml: expected a TOML file, found"),
    ],
)
def test_messages_of_a_file(tmp_path: Path, toml: str, message: str) -> None:
    (problem,) = problems_of(tmp_path, toml)
    assert message in problem
    assert "\n" not in problem


@pytest.mark.parametrize(
    ("flag", "text", "message"),
    [
        ("training.steps", "abc", '--training.steps: expected an integer >= 0 and <= 1000000000, found "abc"'),
        ("training.steps", "1.5", '--training.steps: expected an integer >= 0 and <= 1000000000, found "1.5"'),
        ("training.steps", "-3", "--training.steps: expected an integer >= 0 and <= 1000000000, found -3"),
        ("job.fresh", "yes", '--job.fresh: expected true or false, found "yes"'),
        ("rollout.stop_token_ids", "1,a", '--rollout.stop_token_ids: expected a list of integers, found "1,a"'),
        ("rollout.stop_token_ids", "[" * 9000, "--rollout.stop_token_ids: expected a list of integers, found"),
        ("optimizer.lr", "inf", "--optimizer.lr: expected a number > 0 and <= 10, found Infinity"),
        ("training.step", "1", "--training.step: [training] has no key 'step'; did you mean 'steps'?"),
        ("trainin.steps", "1", "--trainin.steps: there is no section [trainin]; did you mean [training]?"),
    ],
)
def test_messages_of_overrides(tmp_path: Path, flag: str, text: str, message: str) -> None:
    (problem,) = problems_of(tmp_path, "", (flag, text))
    assert problem.startswith(message)


def test_every_problem_is_found_at_once(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "[training]\nsteps = -1\nstep = 3\n[foo]", ("job.fresh", "3"), ("a.b", "3"))
    assert len(found) == 5
    assert len(problems_of(tmp_path, "[training", ("job.fresh", "3"))) == 2


def test_a_files_own_keys_win_over_its_base(tmp_path: Path) -> None:
    (tmp_path / "below.toml").write_text('base = "rloo_llama"\n[training]\nsteps = 7\nseq_len = 64\nmax_norm = 8\n')
    (tmp_path / "sub").mkdir()
    config = loaded(tmp_path / "sub", 'base = "../below.toml"\n[training]\nsteps = 9\n', ("eval.size", "3"))
    assert (config.training.steps, config.training.seq_len, config.training.max_norm) == (9, 64, 8)
    assert (config.algorithm.name, config.algorithm.kl, config.eval.size) == ("rloo", "k1", 3)
    assert not any(line.startswith("base =") for line in to_toml(config).splitlines())


@pytest.mark.parametrize(
    ("base", "message"),
    [
        ('"rlo_llama"', "found \"rlo_llama\"; did you mean 'rloo_llama'?"),
        ('"."', 'expected the name of a shipped config, or a path relative to this file, found "."'),
        ("3", "expected the name of a shipped config, or a path relative to this file, found 3"),
        ('"run.toml"', "expected a file that does not start from this one, found run.toml -> run.toml"),
        ('"other.toml"', "expected a file that does not start from this one, found run.toml -> other.toml -> run.toml"),
    ],
)
def test_a_base_that_is_none(tmp_path: Path, base: str, message: str) -> None:
    (tmp_path / "other.toml").write_text('base = "run.toml"')
    (problem,) = problems_of(tmp_path, f"base = {base}\n")
    assert ".toml: base: expected " in problem
    assert message in problem


def test_a_problem_names_the_file_that_has_it(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text("[training]\nsteps = -1")
    (problem,) = problems_of(tmp_path, 'base = "other.toml"')
    assert problem == "other.toml: [training] steps: expected an integer >= 0 and <= 1000000000, found -1"


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"run\.toml: expected a TOML file, found 'utf-8' codec"):
        load(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match=r"none\.toml: expected a TOML file, found .*No such file"):
        load(tmp_path / "none.toml")


def test_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # the shipped ones are found from anywhere
    assert find("grpo_llama") == find("grpo_llama.toml") == config_file.SHIPPED / "grpo_llama.toml"
    assert find("grpo_llama3_70b") == find("grpo_llama3_70b.toml") == config_file.PLANNED / "grpo_llama3_70b.toml"
    (tmp_path / "mine.toml").write_text('base = "grpo_qwen3_32b"\n')
    assert load(tmp_path / "mine.toml").model == load(find("grpo_qwen3_32b")).model
    (tmp_path / "grpo_llama.toml").touch()
    assert find("grpo_llama.toml") == Path("grpo_llama.toml")  # an existing path wins
    assert find(str(tmp_path / "grpo_llama.toml")) == tmp_path / "grpo_llama.toml"


def test_a_variant_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    dapo, rloo = load(find("dapo_llama.toml")), load(find("rloo_llama"))
    assert (dapo.algorithm.name, dapo.job.dump_folder) == ("dapo", "./outputs/dapo_llama")
    assert (dapo.algorithm.max_refills, dapo.model, dapo.training) == (4, rloo.model, rloo.training)
    (tmp_path / "mine.toml").write_text('base = "dapo_llama"\n[training]\nsteps = 7\n')
    assert load(tmp_path / "mine.toml") == replace(
        dapo,
        job=replace(dapo.job, dump_folder="./outputs/mine"),
        training=replace(dapo.training, steps=7),
    )
    assert policies_of(find("kuhn_pair_llama")) == ["first", "second"]
    (tmp_path / "config.toml").write_text(to_toml(dapo))
    assert load_of_run(tmp_path) == dapo  # a resumed run needs no variant
    (tmp_path / "mine.toml").write_text('base = "variants"\n')
    for path in (find("variants"), tmp_path / "mine.toml"):
        with pytest.raises(ConfigError, match=r"variants\.toml: expected the name of a table in it, one of dr_grpo_"):
            load(path)
    (tmp_path / "dapo_llama.toml").touch()
    assert find("dapo_llama.toml") == Path("dapo_llama.toml")  # an existing path wins


def test_every_variant_differs_from_its_base() -> None:
    for name, table in variants().items():
        base = load(find(table["base"]))
        own = replace(load(find(name)), job=base.job)
        assert own != base or policies_of(find(name)), name


@pytest.mark.parametrize(
    ("name", "near"),
    [("grpo_lama", "grpo_llama"), ("no/grpo_lama.toml", "grpo_llama"), ("dapo_lama", "dapo_llama")],
)
def test_find_names_the_nearest(name: str, near: str) -> None:
    message = rf"a shipped config, found \"{name}\"; did you mean '{near}'\?$"
    with pytest.raises(ConfigError, match=message):
        find(name)


def test_find_names_the_config_in_a_runs_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=rf'found the folder "{tmp_path}"$'):
        find(str(tmp_path))
    (tmp_path / "config.toml").touch()
    with pytest.raises(ConfigError, match=rf"found the folder \"{tmp_path}\"; did you mean '{tmp_path}/config.toml'\?"):
        find(str(tmp_path))


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a" * 5000, "\0", "../pyproject.toml"])
def test_find_refuses_what_is_no_name(name: str) -> None:
    with pytest.raises(ConfigError, match="--config: expected a TOML file"):
        find(name)


@pytest.mark.parametrize("name", shipped())
def test_shipped_configs_load(name: str) -> None:
    load(find(name))


def test_representatives_have_every_feature_of_the_shipped_configs() -> None:
    of_all = set().union(*map(features, shipped()))
    assert of_all == set().union(*map(features, REPRESENTATIVES))
    assert of_all > {"rl", "agent", "policies", "experts", "hosts", "critic", "teacher"}


def test_reading_a_config_imports_no_torch() -> None:
    code = "import sys, titan_rl.preflight.load; titan_rl.preflight.load.schema(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_removed_key_is_answered_with_advice_unless_it_has_its_default(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[debug]\nexact = false\n")
    assert load(path, [("debug.exact", "false")]).debug == Config().debug
    path.write_text("[debug]\nexact = true\n")
    with pytest.raises(ConfigError) as refused:
        load(path, [("debug.exact", "true")])
    in_file, flag = refused.value.problems
    assert "[debug] has no key 'exact' any more; it was retired: " in in_file
    assert flag.startswith("--debug.exact: [debug] has no key 'exact' any more; ")


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ("lag = 2", (), (2, 0)),
        ("lag = 2\nwindow = 3", (), (5, 3)),
        ("window = 3\nlag = 2", (), (5, 3)),
        ("max_staleness_steps = 1", [("rollout.window", "2")], (3, 2)),
        ("window = 2\nlag = 2", [("rollout.lag", "1")], (3, 2)),
        ("lag = 2", [("rollout.max_staleness_steps", "4"), ("rollout.overtake_steps", "1")], (4, 1)),
    ],
)
def test_names_of_earlier_versions_are_read(
    tmp_path: Path, text: str, flags: Sequence[tuple[str, str]], expected: tuple[int, int]
) -> None:
    rollout = loaded(tmp_path, f"[rollout]\n{text}\n", *flags).rollout
    assert (rollout.max_staleness_steps, rollout.overtake_steps) == expected


def test_a_name_of_an_earlier_version_is_answered_with_a_note(tmp_path: Path) -> None:
    path, notes = tmp_path / "run.toml", list[str]()
    path.write_text("[rollout]\nlag = 2\n")
    load(path, [("rollout.window", "1")], notes=notes)
    assert notes == [
        "run.toml: [rollout] lag: its name is now rollout.max_staleness_steps = 3",
        "--rollout.window: its name is now rollout.max_staleness_steps = 3 and rollout.overtake_steps = 1",
    ]
    (problem,) = problems_of(tmp_path, "[rollout]\nlag = 2.5")
    assert problem == "run.toml: [rollout] lag: expected an integer >= 0 and <= 2000, found 2.5"


@pytest.mark.parametrize(
    ("text", "flags", "expected"),
    [
        ('on_unfit_rows = "refuse"\nskip_bad_rows = true', (), "drop"),
        ('on_unfit_rows = "drop"\nskip_bad_rows = false', (), "drop"),
        ('on_unfit_rows = "drop"', [("task.on_unfit_rows", "refuse")], "refuse"),
    ],
)
def test_both_keys_of_bad_rows_are_read(
    tmp_path: Path, text: str, flags: Sequence[tuple[str, str]], expected: str
) -> None:
    assert loaded(tmp_path, f"[task]\n{text}\n", *flags).task.bad_rows == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("enable_tensorboard = true", ["tensorboard"]),
        ("enable_tensorboard = false", []),
        ('trackers = ["wandb", "tensorboard"]\nenable_tensorboard = false', ["wandb"]),
        ('enable_tensorboard = false\ntrackers = ["wandb"]', ["wandb"]),
    ],
)
def test_the_switch_of_tensorboard_is_read(tmp_path: Path, text: str, expected: list[str]) -> None:
    assert loaded(tmp_path, f"[metrics]\n{text}\n").metrics.trackers == expected


def test_a_section_of_another_project_is_answered_with_ours(tmp_path: Path) -> None:
    (problem,) = problems_of(tmp_path, '[wandb]\nproject = "mine"')
    assert "here it is --metrics.trackers" in problem


def test_what_decided_a_runs_files_is_refused_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[model]\nrope_theta = 10000\nmax_seq_len = 4096\n")
    load_of_run(tmp_path)
    (tmp_path / "config.toml").write_text("[model]\nrope_theta = 5e5\n")
    with pytest.raises(EarlierRun, match="rope_theta"):
        load_of_run(tmp_path)


def test_a_removed_key_in_a_runs_folder_has_no_effect(tmp_path: Path) -> None:
    path, notes = tmp_path / "config.toml", list[str]()
    path.write_text("[rollout]\nlag = 2\npace = false\n[debug]\nexact = false\n")
    assert load_of_run(tmp_path, notes=notes).rollout.max_staleness_steps == 2
    assert notes == ["rollout.pace = false, of an earlier version, has no effect"]
    path.write_text("[rollout]\nnope = false\n")
    with pytest.raises(ConfigError, match="has no key 'nope'"):
        load_of_run(tmp_path)


PAGE = Path(__file__).parents[3] / "docs/environments.md"


def names(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def test_every_name_leads_to_a_key_and_none_hides_one() -> None:
    ours = {f"{section}.{key}" for section, keys in schema().items() for key in keys}
    assert set(KEYS.values()) <= ours
    assert not ours & set(KEYS)
    assert foreign_hint("--num-generations") == "; here it is --rollout.group_size (docs/environments.md)"
    assert foreign_hint("--logging_steps").startswith("; every step is logged")
    assert foreign_hint("oops") == ""


def test_the_page_and_the_hints_agree() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## Coming from TRL or verl")[2]
    rows = [line.split("|")[1:4] for line in section.splitlines() if line.startswith("| `")]
    assert len(rows) > 20
    for key, *others in rows:
        for theirs in others:
            found = [KEYS.get(name, "algorithm.kl_coef" if name == "beta" else "") for name in names(theirs)]
            assert found in ([], names(key)), theirs


def test_a_file_without_a_folder_writes_to_its_own(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "grpo_llama"\n[training]\nsteps = 3\n')
    assert load(tmp_path / "mine.toml").job.dump_folder == "./outputs/mine"
    assert load(tmp_path / "mine.toml", [("job.dump_folder", "x")]).job.dump_folder == "x"
    (tmp_path / "mine.toml").write_text('base = "grpo_llama"\n[job]\ndump_folder = "~/y"\n')
    assert load(tmp_path / "mine.toml").job.dump_folder == str(Path.home() / "y")


def test_adapters_name_their_base_by_its_hub_or_its_folder() -> None:
    section = Config().model
    assert (section.base, replace(section, hf_assets_path="/models/a/../b").base) == ("", "/models/b")
    assert replace(section, hf_assets_path="/models/b", hub_name="org/b").base == "org/b"
