"""Manifests of drawn configs against the API schemas of two Kubernetes versions. No API server is asked."""

import copy
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.kubernetes_rules import MERGED, NEWEST, VERSIONS, definitions, refusals
from titan_rl.config.toml import find
from titan_rl.tools.launch.__main__ import main
from titan_rl.tools.launch.pod_patch import MERGED_BY, SPEC

PAGE = Path(__file__).parents[4] / "docs/clusters.md"
EXAMPLES = [yaml.safe_load(text) for text in re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)]
NAMES = ("a", "2026-11-29", "12e5", "A Run", "été", "x" * 200, "...", "no", "y", "a." * 40, "0x1f", "-a-")
SETUPS = ("", "source /x/activate", "a: b\n\tc  \n", " # odd: 'x' \"y\"", "export A=é\nexport B=1e3")
PATCHES: tuple[dict[str, Any], ...] = (
    next(each for each in EXAMPLES if "kind" not in each),
    {"metadata": {"labels": {"a": "12e5", "b": "y"}, "annotations": {"c": "1_0", "d": "0o17", "e": ".5"}}},
    {"spec": {"containers": [{"name": "node", "env": [{"name": "A", "value": "1e3"}]}, {"name": "b", "image": "c"}]}},
    {"spec": {"volumes": [{"name": "nfs", "nfs": {"server": "a", "path": "/b"}}], "hostNetwork": True}},
)


class GoLoader(yaml.SafeLoader):
    """Reads plain scalars as kubectl's YAML does, where that differs: more of them are numbers or truths."""


for first, kind, pattern in (
    ("yYnN", "bool", r"[yYnN]"),
    ("+-.0123456789", "float", r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?"),
    ("+-0123456789", "int", r"[-+]?(0o?[0-7_]+|0x[0-9a-fA-F_]+|0b[01_]+|[0-9_]+)"),
):
    GoLoader.add_implicit_resolver(f"tag:yaml.org,2002:{kind}", re.compile(f"^(?:{pattern})$"), list(first))


def drawn(draw: random.Random, folder: Path) -> Iterator[str]:
    """Yield a command line."""
    config = folder / f"my {draw.choice(NAMES)[:40]}.toml"
    config.write_text(find("grpo_llama").read_text())
    hosts, mounts = draw.choice((1, 2, 13)), ["pvc/runs:/runs"]
    mounts += draw.sample(["/data:/data:ro", "secret/x.y:/s", "pvc/b:/with space", "/a b:/c:ro"], draw.randrange(4))
    yield from ("--config", str(config), "--on", "kubernetes", "--print", "--eval.size=16")
    yield from (f"--job.dump_folder=/runs/{draw.choice(NAMES)}", f"--launch.mounts={','.join(mounts)}")
    yield from (f"--hosts.count={hosts}", f"--hosts.slots={draw.choice((4, 8))}", "--launch.image=rl:1")
    yield from draw.sample(
        [
            *(
                "--hosts.insecure=true",
                "--hosts.device=cuda",
                "--launch.minutes=1000000",
                "--launch.cpus_per_node=16384",
            ),
            *("--launch.memory_gb_per_node=1048576", "--launch.namespace=rl-1", "--launch.secrets=a.b,c"),
            *("--fault.stop_grace_seconds=100.5", "--hosts.join_seconds=90", "--launch.python=/a b/python"),
            f"--launch.setup={draw.choice(SETUPS)}",
        ],
        draw.randrange(11),
    )
    if draw.random() < 0.6:
        (folder / "pod.yaml").write_text(yaml.safe_dump(draw.choice(PATCHES)))
        yield f"--launch.pod={folder}/pod.yaml"
    yield from ["--with-secret"] * (hosts < 5)  # certificates of thirteen hosts take a while


@pytest.mark.parametrize("seed", range(14))
def test_manifests_are_what_two_versions_take(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = list(drawn(random.Random(seed), tmp_path))
    assert main(flags) == 0, flags
    text = capsys.readouterr().out
    objects = list(yaml.load_all(text, GoLoader))
    assert {each["kind"] for each in objects} >= {"Job", "ConfigMap"}
    assert objects == list(yaml.safe_load_all(text))
    for version in VERSIONS:
        for each in objects:
            assert "; ".join(refusals(each, version)) == "", (version, flags)


@pytest.mark.parametrize(
    ("flag", "found"),
    [
        (
            "--launch.namespace=My_NS",
            'launch.namespace: expected lower-case letters, digits and dashes, at most 63, found "',
        ),
        (
            "--launch.secrets=a,B",
            'launch.secrets: expected lower-case letters, digits and dashes, also with dots, found "B"',
        ),
        ("--launch.mounts=pvc/runs:/runs,/a/../b:/b", 'launch.mounts: expected a folder without "..", found "/a/../b"'),
        (
            "--launch.mounts=pvc/runs:/runs,/a:/runs",
            "launch.mounts: expected other paths than /dev/shm, /runs, /titan_rl",
        ),
        ("--launch.mounts=pvc/runs:/runs,/a:/dev/shm", "launch.mounts: expected other paths than /dev/shm, /runs"),
        ("--launch.mounts=pvc/-a:/runs", 'launch.mounts: expected "/folder:/path"'),
    ],
)
def test_names_that_a_server_refuses_are_refused_here(
    flag: str, found: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [
        "--job.dump_folder=/runs/a",
        "--launch.mounts=pvc/runs:/runs",
        "--launch.image=rl:1",
        "--eval.size=16",
        flag,
    ]
    with pytest.raises(SystemExit) as stop:
        main(["--config", "grpo_llama", "--on", "kubernetes", "--print", *flags])
    assert stop.value.code == 2
    assert found in " ".join(capsys.readouterr().err.split())


def test_the_role_of_the_page_is_one() -> None:
    (role,) = (each for each in EXAMPLES if "kind" in each)
    assert [refused for version in VERSIONS for refused in refusals(role, version)] == []


def places(found: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield where a manifest has values, but for those in mappings whose keys are free."""
    free = {"labels", "annotations", "data", "limits", "requests", "selector"}
    for key, value in found.items() if isinstance(found, dict) else enumerate(found) if isinstance(found, list) else ():
        if not free & {key, *where}:
            yield (*where, key)
            yield from places(value, (*where, key))


def test_a_planted_fault_is_found_wherever_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--job.dump_folder=/runs/a", "--launch.mounts=pvc/runs:/runs", "--launch.image=rl:1", "--hosts.count=2"]
    assert (
        main(["--config", "grpo_llama", "--on", "kubernetes", "--print", "--hosts.slots=4", "--eval.size=16", *flags])
        == 0
    )
    for each in yaml.safe_load_all(capsys.readouterr().out):
        for *path, last in places(each):
            for fault in ("misspelt", "of another type"):
                faulty = copy.deepcopy(each)
                holder = faulty
                for key in path:
                    holder = holder[key]
                if fault == "misspelt" and isinstance(last, str) and not path:
                    holder[f"{last}s"] = holder[last]
                elif fault == "misspelt" and isinstance(last, str):
                    holder[f"{last}s"] = holder.pop(last)
                else:
                    holder[last] = [[1]] if isinstance(holder[last], list) else [holder[last]]
                assert [*refusals(faulty, NEWEST)], (path, last, fault)


def test_the_keys_of_a_pod_and_how_lists_merge_are_kubernetes_own() -> None:
    found = definitions(NEWEST)
    assert set(SPEC) == set(found["core.v1.PodSpec"]["properties"])
    reached, waiting = set[str](), ["core.v1.PodSpec"]
    merged = dict[str, str]()
    while waiting:
        if (name := waiting.pop()) in reached:
            continue
        reached.add(name)
        for key, schema in found[name].get("properties", {}).items():
            if MERGED in schema:
                merged[key] = schema[MERGED]
            waiting += re.findall(r"#/\$defs/([\w.]+)", str(schema))
    del merged["ownerReferences"]  # in templates of claims, which no pod has itself
    assert merged == MERGED_BY
