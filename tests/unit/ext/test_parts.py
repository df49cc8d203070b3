"""Optional parts are found by name, and a key that needs a missing one is refused by name."""

from dataclasses import replace
from typing import Any

import pytest

from titan_rl.config.sections import Config
from titan_rl.config.toml import find, load
from titan_rl.preflight.checks import checked_run, problems
from titan_rl.preflight.checks.parts import NEEDED
from titan_rl.preflight.pretrained import FetchFailed, with_models
from titan_rl.wire.parts import PARTS, PartMissing, has_part, module_named, needed_part, part


@pytest.mark.parametrize("name", PARTS)
def test_every_part_of_the_table_exists(name: str) -> None:
    assert has_part(name)
    assert part(name)


@pytest.mark.parametrize("place", ["tools.gone.models:load", "tools.fetch.gone:load", "ext.gone:load"])
def test_a_missing_part_is_named_with_the_key_that_needs_it(place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PARTS, "pretrained models", place)
    assert part("pretrained models") is None
    with pytest.raises(PartMissing, match=r"some\.key: expected an installation with titan_rl/\w+/\w+"):
        needed_part("pretrained models", "some.key")
    assert with_models(Config()) == Config()
    with pytest.raises(FetchFailed, match=r"model\.hf_assets_path: expected an installation with titan_rl/"):
        with_models(load(find("grpo_smollm2")))


SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "environment.name": {"environment": {"name": "a_module:Environment"}},
    "task.agent": {"task": {"agent": "a_module:run"}},
    "games": {"task": {"name": "calc"}},
    "broadcasts of trainers": {"weight_sync": {"transport": "broadcast"}},
    "context parallelism": {"parallelism": {"context_parallel_degree": 2}},
    "curriculum": {"curriculum": {"solved_visits": 2}},
    "drafts": {"generator": {"drafts": "ngram"}},
    "kept batches": {"record": {"batches": 3}},
    "images of trainers": {"model": {"vision": "frozen"}},
    "links of trainers": {"weight_sync": {"transport": "rdma"}},
    "losses of pairs": {"algorithm": {"name": "dpo"}},
    "column kept": {"rollout": {"top_p": 0.9}},
    "column routes": {"algorithm": {"routing_replay": True}},
    "losses of reward models": {"algorithm": {"name": "reward_model"}},
    "opponents.pool": {"opponents": {"pool": ["start"]}},
    "quantized rows": {"generator": {"quantization": "int8"}},
    "relays of hosts": {"weight_sync": {"relay": True}},
    "reward processes": {"task": {"reward": "a_module:score"}},
    "row lengths": {"task": {"bad_rows": "drop"}},
    "fault.snapshot_interval": {"fault": {"snapshot_interval": 2}},
    "fault.snapshot_gbps": {"fault": {"snapshot_gbps": 1.0}},
    "several hosts": {"hosts": {"kind": "processes", "count": 2}},
    "adapters of trainers": {"lora": {"rank": 8}},
    "teacher": {"algorithm": {"advantage": "teacher", "teacher_weights": "reference", "teacher_context": ["answer"]}},
    "trackers": {"metrics": {"trackers": ["wandb"]}},
    "prometheus": {"metrics": {"prometheus": "9400"}},
    "metrics.alert": {"metrics": {"alert": "true"}},
}
"""Keys that need each part."""


@pytest.mark.parametrize(("name", "key"), [(name, key) for name, key, _ in NEEDED])
def test_a_config_that_needs_a_missing_part_is_refused(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = load(find("grpo_llama"))
    monkeypatch.setitem(PARTS, name, "ext.gone.module:load")
    assert not any("ext/gone" in line for line in problems(config)), "grpo_llama needs none"
    changed = {
        section: replace(getattr(config, section), **keys)
        for section, keys in (SETTINGS.get(name) or SETTINGS[key]).items()
    }
    (line,) = [line for line in problems(replace(config, **changed)) if "ext/gone" in line]
    assert line.startswith(key)
    assert line.endswith(f"expected an installation with titan_rl/ext/gone ({name}), found one without")


def test_a_run_takes_no_snapshots_where_it_cannot_take_any(monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--config", "grpo_llama", "--dry-run"]
    given = checked_run(argv)
    for name in ("snapshots", "sizes of snapshots", "copies of states"):
        monkeypatch.setitem(PARTS, name, "ext.gone.module:load")
    run = checked_run(argv)
    assert (given.config.fault.snapshot_interval, run.config.fault.snapshot_interval) == (5, 0)
    (warning,) = set(run.warnings) - set(given.warnings)
    assert warning.startswith("fault.snapshot_interval: 0 in place of 5 ")
    assert replace(run.config, fault=given.config.fault) == given.config


def test_modules_are_found_by_the_names_that_earlier_configs_have() -> None:
    assert module_named("titan_rl.sandbox.code_tools").__name__ == "titan_rl.ext.sandbox.code_tools"
    assert module_named("json").__name__ == "json"
