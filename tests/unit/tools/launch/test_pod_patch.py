"""launch.pod: merged as kubectl does, refused by name; the page's examples."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from titan_rl.tools.launch.__main__ import main
from titan_rl.tools.launch.kubernetes_job import PATHS
from titan_rl.tools.launch.pod_patch import PatchRefused, merged, read_patch

PAGE = Path(__file__).parents[4] / "docs/clusters.md"
EXAMPLES = {
    document.get("kind", "pod"): document
    for document in map(yaml.safe_load, re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL))
}
FLAGS = ["--config", "grpo_llama", "--on", "kubernetes", "--print", "--eval.size=16", "--launch.image=rl:1"]
FLAGS += ["--launch.mounts=pvc/runs:/runs", "--job.dump_folder=/runs/a", "--hosts.count=2", "--hosts.slots=8"]


def printed(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*FLAGS, *flags]) == 0
    return {each["kind"]: each for each in yaml.safe_load_all(capsys.readouterr().out)}


def test_the_example_of_the_page_reaches_the_pods(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "pod.yaml").write_text(yaml.safe_dump(EXAMPLES["pod"]))
    plain = printed(capsys)["Job"]["spec"]["template"]["spec"]
    job = printed(capsys, f"--launch.pod={tmp_path}/pod.yaml", "--hosts.device=cuda")["Job"]
    template = job["spec"]["template"]
    for labels in (job["metadata"]["labels"], template["metadata"]["labels"]):
        assert labels["kueue.x-k8s.io/queue-name"] == "gpus"
        assert labels["app.kubernetes.io/name"] == "a"
    spec, wanted = template["spec"], EXAMPLES["pod"]["spec"]
    for key in wanted.keys() - {"containers", "volumes"}:
        assert spec[key] == wanted[key]
    (container,) = spec["containers"]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": "8", "rdma/ib": "8"}
    assert container["securityContext"] == {"capabilities": {"add": ["IPC_LOCK"]}}
    assert container["command"] == plain["containers"][0]["command"]
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    assert volumes["memory"]["emptyDir"] == {"medium": "Memory", "sizeLimit": "64Gi"}
    assert len(volumes) == len(plain["volumes"])
    assert (plain["automountServiceAccountToken"], spec["automountServiceAccountToken"]) == (False, True)


def test_the_role_of_the_page_allows_what_is_asked() -> None:
    rules = {each: rule["verbs"] for rule in EXAMPLES["Role"]["rules"] for each in rule["resources"]}
    made = {f"{kind.lower()}s" for kind in PATHS}
    assert rules == {
        **{kind: ["create", "get", "delete"] for kind in made},
        "pods": ["list"],
        "pods/log": ["get"],
        "events": ["list"],
    }


def test_the_secret_is_printed_if_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert "Secret" not in printed(capsys)
    objects = printed(capsys, "--with-secret")
    data = objects["Secret"]["data"]
    assert {key.split(".", 2)[2] for key in data} == {"ca.pem", "cert.pem", "key.pem"}
    (container,) = objects["Job"]["spec"]["template"]["spec"]["containers"]
    (mount,) = (each for each in container["volumeMounts"] if each["name"] == "tls")
    assert mount["subPathExpr"] == "$(JOB_COMPLETION_INDEX)"
    (volume,) = (each for each in objects["Job"]["spec"]["template"]["spec"]["volumes"] if each["name"] == "tls")
    assert {item["path"]: item["key"] for item in volume["secret"]["items"]}["1/key.pem"] == "a-1.a.key.pem"
    with pytest.raises(SystemExit) as stop:
        main([*(flag for flag in FLAGS if flag != "--print"), "--with-secret"])
    assert stop.value.code == 2
    assert "--with-secret: expected --print" in capsys.readouterr().err


def test_late_pods_are_waited_for_unless_the_user_sets_how_long(capsys: pytest.CaptureFixture[str]) -> None:
    def script(*flags: str) -> str:
        return printed(capsys, *flags)["Job"]["spec"]["template"]["spec"]["containers"][0]["command"][2]

    assert "--hosts.join_seconds=1800" in script()
    assert "--hosts.join_seconds" not in script("--hosts.join_seconds=90")
    subprocess.run(["bash", "-n"], input=script(), text=True, check=True)


def test_merging_follows_kubectl() -> None:
    base = {"containers": [{"name": "node", "env": [{"name": "A", "value": "1"}], "command": ["x"]}], "gone": 1}
    patch = {
        "containers": [
            {"name": "side", "image": "i", "args": None},
            {"name": "node", "env": [{"name": "B", "value": "2"}, {"name": "A", "value": "3"}]},
        ],
        "gone": None,
        "tolerations": [{"key": "a"}],
    }
    assert merged(base, patch) == {
        "containers": [
            {"name": "node", "env": [{"name": "A", "value": "3"}, {"name": "B", "value": "2"}], "command": ["x"]},
            {"name": "side", "image": "i"},
        ],
        "tolerations": [{"key": "a"}],
    }
    assert base["gone"] == 1


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "expected one YAML document in"),
        ("a: 1\n---\nb: 1", "expected one YAML document in"),
        ("- a", "expected a mapping with metadata or spec, found ['a']"),
        ("", "expected a mapping with metadata or spec, found None"),
        ("tolerations: []", 'expected keys of a pod template, found "tolerations"; it belongs below spec'),
        ("spec: {toleration: []}", 'spec: expected keys of a pod template, found "toleration"; did you mean \'toler'),
        ("metadata: {name: a}", 'metadata: expected keys of a pod template, found "name"'),
        ("metadata: {labels: {a: true}}", "metadata.labels: expected text for a, found True"),
        ("metadata: {labels: {app.kubernetes.io/name: x}}", "expected no app.kubernetes.io/name, which titan_rl"),
        ("spec: {containers: [{image: a}]}", "spec.containers: expected a list of mappings that have name"),
        ("spec: {containers: {name: node}}", "spec.containers: expected a list, found a mapping"),
        ("spec: {containers: [{name: main}]}", 'expected "node", or others with an image, found "main"'),
        ("spec: {containers: [{name: node, command: [a]}]}", "spec: expected no command, which titan_rl launch sets"),
        ("spec: {restartPolicy: Always}", "spec: expected no restartPolicy"),
        ("spec: {volumes: [{$patch: delete, name: a}]}", "expected no directives of patches, found $patch"),
        ("spec: [1]", "spec: expected a mapping, found [1]"),
    ],
)
def test_a_file_that_cannot_be_merged_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "pod.yaml"
    path.write_text(text)
    with pytest.raises(PatchRefused) as refused:
        read_patch(str(path))
    assert problem in str(refused.value)
    assert str(path) in str(refused.value)


def test_a_missing_file_is_refused_before_anything_is_asked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main([*FLAGS, "--launch.pod=none.yaml"])
    assert stop.value.code == 2
    assert 'launch.pod: expected a YAML file, found none at "none.yaml"' in capsys.readouterr().err
