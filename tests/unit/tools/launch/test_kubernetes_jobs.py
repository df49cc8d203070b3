"""Jobs on Kubernetes against an API server of the test, whose pods really run."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from support.fake_kubernetes import FakeKubernetes
from support.fake_slurm import wait_until
from support.launched import Launched
from titan_rl.tools.launch.__main__ import main
from titan_rl.tools.launch.cluster_api import ApiRefused, find_cluster

# What runs instead of titan_rl.run and titan_rl.worker: exits with the next code of `codes`; "wait" waits for SIGTERM.
STAND_IN = """#!/bin/bash
here=$(dirname "$0")
[ "$1" = -m ] || exit 0
echo "$JOB_COMPLETION_INDEX $*" >> "$here/calls"
if [ "$2" = titan_rl.worker ]; then
    touch "$here/up-$JOB_COMPLETION_INDEX"
    while :; do sleep 0.05; done
fi
until [[ "$*" != *=attach* || -e "$here/up-0" && -e "$here/up-1" ]]; do sleep 0.05; done
code=$(head -1 "$here/codes"); sed -i 1d "$here/codes"
[ "$code" != wait ] || trap 'echo stopped; exit 130' TERM
echo "the run is up"
if [ "$code" = wait ]; then
    while :; do sleep 0.05; done
fi
exit "$code"
"""


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    cluster = FakeKubernetes(tmp_path, monkeypatch)
    yield cluster
    cluster.close()


@pytest.fixture
def launched(tmp_path: Path) -> Iterator[Launched]:
    mounts = f"--launch.mounts={tmp_path}:{tmp_path}"
    launched = Launched(tmp_path, "a_Run", STAND_IN, "--on=kubernetes", mounts, "--launch.image=rl:1")
    yield launched
    launched.end()


def test_a_job_is_followed_from_pending_to_the_runs_exit_code(cluster: FakeKubernetes, launched: Launched) -> None:
    cluster.free.clear()
    process = launched.start([0])
    assert process.stdout is not None
    seen = process.stdout.readline()
    if "no pod yet" in seen or "ContainerCreating" in seen:
        seen = process.stdout.readline()
    assert (
        "Kubernetes job a-run: pending (Unschedulable: 0/4 nodes are available: 4 Insufficient nvidia.com/gpu.)" in seen
    )
    cluster.free.set()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert out.count("the run is up") == 1
    assert launched.calls() == [f"0 -m titan_rl.run --config {cluster.pods_folder}/config/grpo_llama.toml"]


def test_an_evicted_pod_saves_and_the_next_one_continues(cluster: FakeKubernetes, launched: Launched) -> None:
    process = launched.start(["wait", 0])
    wait_until(lambda: any("the run is up" in line for pod in cluster.pods for _, line in pod.lines))
    cluster.disrupt(0)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert out.index("stopped") < out.rindex("the run is up")
    assert len(launched.calls()) == 2


def test_a_failed_run_is_retried_and_bad_input_is_not(cluster: FakeKubernetes, launched: Launched) -> None:
    code, out = launched.finish([1, 1, 1])
    assert code == 1
    assert "Container node failed with exit code 1 matching FailJob rule" in out
    assert len(launched.calls()) == 2
    code, out = launched.finish([2])  # the ended Job makes room
    assert code == 2
    assert len(launched.calls()) == 3


def test_each_pod_has_a_worker_and_its_own_certificate(cluster: FakeKubernetes, launched: Launched) -> None:
    code, out = launched.finish([0], "--hosts.count=2", "--hosts.device=cpu")
    assert code == 0, out
    calls = sorted(launched.calls())
    (run,) = [call for call in calls if "titan_rl.run" in call]
    assert "--hosts.addresses=tls://a-run-0.a-run:26600,tls://a-run-1.a-run:26600" in run
    assert "--hosts.own_address=a-run-0.a-run" in run
    for index in (0, 1):
        assert any(
            call.startswith(f"{index} -m titan_rl.worker --address tls://a-run-{index}.a-run:26600") for call in calls
        )
    secret = cluster.objects["secrets", "a-run-tls"]
    assert secret["metadata"]["ownerReferences"][0]["uid"] == "uid-of-a-run"
    assert len(secret["data"]) == 6
    assert not any("ca.key" in key for key in secret["data"])
    assert "PRIVATE KEY" not in str(cluster.objects["jobs", "a-run"]) + out
    assert cluster.objects["services", "a-run"]["spec"]["clusterIP"] == "None"


def test_a_running_job_is_followed_and_a_strangers_is_left_alone(cluster: FakeKubernetes, launched: Launched) -> None:
    process = launched.start(["wait"])
    wait_until(lambda: any("the run is up" in line for pod in cluster.pods for _, line in pod.lines))
    process.send_signal(2)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "kubectl delete job a-run --namespace rl ends it" in out
    again = launched.start([])
    assert again.stdout is not None
    assert "Kubernetes job a-run runs this already" in again.stdout.readline()
    del cluster.objects["jobs", "a-run"]
    cluster.end()
    out, _ = again.communicate(timeout=60)
    assert again.returncode == 1
    assert "was deleted" in out
    cluster.objects["jobs", "a-run"] = {"metadata": {"name": "a-run", "labels": {}}, "status": {}}
    code, out = launched.finish([0])
    assert code == 1
    assert "job.dump_folder: expected a name that no other Job has in rl, found a-run" in " ".join(out.split())


def test_the_reason_why_pods_wait_is_shown(cluster: FakeKubernetes, launched: Launched) -> None:
    def shown(reason: str) -> None:
        assert process.stdout is not None
        assert any(reason in line for line in process.stdout), reason

    cluster.free.clear()
    cluster.waiting = {"reason": "ContainerCreating"}
    event = {"involvedObject": {"name": "a-run-0-"}, "reason": "FailedMount", "lastTimestamp": "2026-01-01T00:00:00Z"}
    cluster.warnings = [{**event, "message": 'MountVolume.SetUp failed:\n  secret "x" not found'}]
    process = launched.start([0])
    shown('pending (FailedMount: MountVolume.SetUp failed: secret "x" not found)')
    cluster.waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "rl:1"'}
    shown('pending (ImagePullBackOff: Back-off pulling image "rl:1")')
    condition = {"type": "Suspended", "status": "True", "message": "Job suspended"}  # by Kueue
    cluster.objects["jobs", "a-run"]["status"]["conditions"] = [condition]
    shown("pending (Suspended: Job suspended)")
    cluster.objects["jobs", "a-run"]["status"]["conditions"] = []
    pods, cluster.pods = cluster.pods, []
    quota = {"involvedObject": {"name": "a-run"}, "reason": "FailedCreate", "message": "exceeded quota: gpus"}
    cluster.warnings = [quota]
    shown("pending (FailedCreate: exceeded quota: gpus)")
    cluster.pods = pods
    cluster.free.set()
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out


def test_a_pod_that_dies_is_replaced_five_times_at_most(cluster: FakeKubernetes, launched: Launched) -> None:
    code, out = launched.finish([137, 1, 0])
    assert (code, len(launched.calls())) == (1, 2), out  # the death was the retry
    code, out = launched.finish([137] * 9)
    assert (code, len(launched.calls())) == (137, 2 + 6), out
    assert "Job has exceeded the specified maximal number of failed indexes" in out


def test_a_submission_that_was_cut_short_is_completed(cluster: FakeKubernetes, launched: Launched) -> None:
    cluster.trouble = lambda path: 503 if "/configmaps" in path or "propagationPolicy" in path else 0
    code, out = launched.finish([0])
    assert code == 1
    assert "GET /api/v1/namespaces/rl/configmaps/a-run-config: 503 trouble of the test" in " ".join(out.split())
    cluster.trouble = lambda path: 0
    code, out = launched.finish([0])
    assert code == 0, out
    assert "Kubernetes job a-run runs this already" in out


def test_the_words_of_a_server_that_refuses_are_shown(cluster: FakeKubernetes, launched: Launched) -> None:
    code, out = launched.finish([0], "--launch.namespace=other")
    assert code == 1
    assert 'namespaces "other" is forbidden' in " ".join(out.split())


def test_manifests_are_printed_and_nothing_is_asked(
    cluster: FakeKubernetes, launched: Launched, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--hosts.count=2", "--hosts.slots=8", "--launch.secrets=keys", "--launch.minutes=60"]
    mounts = f"--launch.mounts={launched.folder}:{launched.folder},pvc/data:/data:ro,secret/x:/x"
    assert main(launched.flags("--print", *flags, mounts, "--fault.stop_grace_seconds=100")) == 0
    job, service, config = yaml.safe_load_all(capsys.readouterr().out)
    assert not cluster.asked
    spec, pod = job["spec"], job["spec"]["template"]["spec"]
    assert (spec["completions"], spec["parallelism"], spec["completionMode"]) == (2, 2, "Indexed")
    assert spec["activeDeadlineSeconds"] == 3600
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}
    assert pod["terminationGracePeriodSeconds"] == 130
    assert pod["subdomain"] == service["metadata"]["name"] == "a-run"
    (container,) = pod["containers"]
    assert container["resources"] == {
        "requests": {"cpu": "8", "memory": "32Gi"},  # else the pod were BestEffort
        "limits": {"nvidia.com/gpu": "8"},
    }
    assert container["envFrom"] == [{"secretRef": {"name": "keys"}}]
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    assert volumes["mount1"]["persistentVolumeClaim"] == {"claimName": "data"}
    assert volumes["mount2"]["secret"] == {"secretName": "x"}
    assert {"name": "mount1", "mountPath": "/data", "readOnly": True} in container["volumeMounts"]
    assert list(config["data"]) == ["grpo_llama.toml"]
    parsed = subprocess.run(["bash", "-n"], input=container["command"][2], capture_output=True, text=True)
    assert (parsed.returncode, parsed.stderr) == (0, "")


def test_what_kubernetes_needs_is_refused_by_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--on", "kubernetes", f"--job.dump_folder={tmp_path}/run", "--job.fresh"]
    with pytest.raises(SystemExit) as stop:
        main(["--config", "grpo_llama", *flags])
    assert stop.value.code == 2
    found = capsys.readouterr().err
    for expected in (
        "launch.image: expected a container image with --on kubernetes, found none (docs/clusters.md makes one)",
        "job.dump_folder: expected a folder below one of launch.mounts (none), which outlives the pods, found",
        "job.fresh: expected false with --on kubernetes",
    ):
        assert expected in found


def test_folders_that_only_the_pods_have_are_not_looked_for_here(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--job.dump_folder=/proc/runs/a", "--launch.mounts=pvc/runs:/proc/runs", "--launch.image=rl:1"]
    assert main(["--config", "grpo_llama", "--on", "kubernetes", "--print", "--eval.size=16", *flags]) == 0
    assert "/proc" in capsys.readouterr().err  # a warning


def test_a_missing_kubeconfig_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    with pytest.raises(ApiRefused, match="expected a kubeconfig"):
        find_cluster()
    (tmp_path / "none").write_text("{}")
    with pytest.raises(ApiRefused, match="current context"):
        find_cluster()
