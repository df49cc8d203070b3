"""Jobs on Kubernetes are followed while the API server of the test fails, and by credentials that end."""

import json
import random
import ssl
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from support.fake_kubernetes import TOKEN, FakeKubernetes
from support.fake_slurm import wait_until
from titan_rl.ext.hosts.certificates import make_certificates
from titan_rl.record.terminal import Terminal
from titan_rl.tools.launch.cluster_api import ApiRefused, find_cluster
from titan_rl.tools.launch.following import SubmissionFailed, follow
from titan_rl.tools.launch.kubernetes_job import LOG_TRIES, KubernetesJob

LINES = """
for i in {1..120}; do
    echo "line $FAILURES $i"
    [ $((i % 10)) != 0 ] || sleep 0.02
done
[ "$FAILURES" = 1 ] || exit 75
echo -n "line without an end"
"""
WAITS = 'echo "line"; sleep 60'


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeKubernetes]:
    cluster = FakeKubernetes(tmp_path, monkeypatch)
    yield cluster
    cluster.close()


def started(cluster: FakeKubernetes, script: str) -> KubernetesJob:
    """Return a Job of one pod, which runs a script again if it fails."""
    failures = "metadata.annotations['batch.kubernetes.io/job-index-failure-count']"
    env = [{"name": "FAILURES", "valueFrom": {"fieldRef": {"fieldPath": failures}}}]
    pod = {"volumes": [], "containers": [{"command": ["bash", "-c", script], "env": env, "volumeMounts": []}]}
    spec = {"completions": 1, "backoffLimitPerIndex": 1, "maxFailedIndexes": 0, "template": {"spec": pod}}
    spec["podFailurePolicy"] = {"rules": [{}, {"onExitCodes": {"values": [2]}}]}
    cluster.create("jobs", {"metadata": {"name": "lines"}, "spec": spec})
    wait_until(lambda: any(pod.lines for pod in cluster.pods))
    return KubernetesJob(find_cluster(), "lines")


@pytest.mark.parametrize("seed", range(4))
def test_each_line_is_printed_once_however_often_the_server_fails(
    cluster: FakeKubernetes, capsys: pytest.CaptureFixture[str], seed: int
) -> None:
    draw = random.Random(seed)
    job = started(cluster, LINES)
    cluster.trouble = lambda path: draw.choice([401, 429, 500, 503, -1, -2] + [0] * 40)
    assert follow(lambda: job, Terminal(), 0.01) == 0
    out = capsys.readouterr().out
    written = [f"line {tried} {number}" for tried in (0, 1) for number in range(1, 121)]
    assert [line for line in out.splitlines() if line.startswith("line")] == [*written, "line without an end"]
    assert "Kubernetes job lines: unknown (" in out


def test_a_server_that_stays_silent_ends_the_following_and_not_the_job(
    cluster: FakeKubernetes, capsys: pytest.CaptureFixture[str]
) -> None:
    job = started(cluster, WAITS)
    cluster.trouble = lambda path: 503
    assert follow(lambda: job, Terminal(), 0.01, silent_seconds=0.3) == 1
    shown = " ".join("".join(capsys.readouterr()).split())
    reason = "GET /apis/batch/v1/namespaces/rl/jobs/lines: 503 trouble of the test"
    assert f"the cluster has not answered for 0.3 s ({reason}). Kubernetes job lines continues" in shown
    assert "the same command follows it again" in shown


@pytest.mark.parametrize("status", [403, 404])
def test_a_right_that_is_missing_is_final(
    cluster: FakeKubernetes, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    job = started(cluster, WAITS)
    cluster.trouble = lambda path: status if path.startswith("/api/v1/namespaces/rl/pods?") else 0
    with pytest.raises(SubmissionFailed, match=f"{status} trouble of the test"):
        follow(lambda: job, Terminal(), 0.01)
    assert "Kubernetes job lines continues; the same command follows it again" in capsys.readouterr().out


def test_the_log_of_a_pod_that_ended_with_its_node_is_given_up(cluster: FakeKubernetes) -> None:
    job = started(cluster, LINES)
    wait_until(lambda: cluster.objects["jobs", "lines"]["status"]["conditions"])
    first = cluster.pods[0].name
    cluster.trouble = lambda path: 500 if f"{first}/log" in path else 0
    for _ in range(LOG_TRIES - 1):
        with pytest.raises(ApiRefused, match="500 trouble"):
            job.output()
    out = job.output()
    assert out.count(f"the rest of the log of pod {first} is not to be had") == 1
    assert out.count("line 1 ") == 120
    assert (job.output(), job.exit_code()) == ("", (0, ""))


def test_stamps_of_another_time_zone_and_the_kubelets_own_words(cluster: FakeKubernetes) -> None:
    job = started(cluster, WAITS)
    (pod,) = cluster.pods
    pod.lines = [(f"2026-03-29T01:59:59.{second}+01:00", f"winter {second}\n") for second in (1, 100000001, 12)]
    assert job.output() == "winter 1\nwinter 100000001\nwinter 12\n"
    pod.lines = [*pod.lines[2:], ("2026-03-29T03:00:00.5+02:00", "summer\n"), ("unable to", "retrieve logs\n")]
    assert job.output() == "summer\n"
    assert job.output() == ""


def plugin(cluster: FakeKubernetes, folder: Path, ends: timedelta) -> Path:
    """Let a program give the token in `folder`/token. Return where it counts its calls."""
    until = (datetime.now(UTC) + ends).strftime("%Y-%m-%dT%H:%M:%SZ")
    program = f"""import json
open({str(folder / "calls")!r}, "a").write("call\\n")
status = {{"token": open({str(folder / "token")!r}).read(), "expirationTimestamp": {until!r}}}
print(json.dumps({{"status": status}}))
"""
    (folder / "token").write_text(TOKEN)
    version = "client.authentication.k8s.io/v1"
    own = {"apiVersion": version, "command": sys.executable, "args": ["-c", program]}
    cluster.config["users"] = [{"name": "u", "user": {"exec": own}}]
    (folder / "kubeconfig").write_text(json.dumps(cluster.config))
    return folder / "calls"


def test_a_plugin_is_asked_again_when_its_token_is_refused(cluster: FakeKubernetes, tmp_path: Path) -> None:
    calls, api = plugin(cluster, tmp_path, timedelta(hours=1)), find_cluster()
    path = "/api/v1/namespaces/rl/pods"
    assert api.get(path) == api.get(path)
    assert calls.read_text() == "call\n"
    cluster.token = "another"
    (tmp_path / "token").write_text("another")
    assert api.get(path) == {"items": []}
    assert calls.read_text() == "call\n" * 2
    (tmp_path / "token").write_text("wrong")
    cluster.token = "third"
    with pytest.raises(ApiRefused, match="401 Unauthorized") as refused:
        api.get(path)
    assert refused.value.passing


def test_a_token_that_expired_is_not_used(cluster: FakeKubernetes, tmp_path: Path) -> None:
    calls, api = plugin(cluster, tmp_path, timedelta(seconds=-1)), find_cluster()
    for _ in range(3):
        api.get("/api/v1/namespaces/rl/pods")
    assert calls.read_text() == "call\n" * 3
    (tmp_path / "token").unlink()
    with pytest.raises(ApiRefused, match=r"which the kubeconfig names, failed: FileNotFoundError"):
        api.get("/api/v1/namespaces/rl/pods")


def test_kubeconfigs_are_merged_and_the_first_one_counts(
    cluster: FakeKubernetes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "b").mkdir()
    own = dict(cluster.config)
    users = [{"name": "u", "user": {"tokenFile": "token"}}]
    (tmp_path / "b/token").write_text(f"{TOKEN}\n")
    (tmp_path / "a.yaml").write_text(json.dumps({"current-context": "here", "contexts": own.pop("contexts")}))
    (tmp_path / "b/b.yaml").write_text(json.dumps({**own, "current-context": "other", "users": users}))
    (tmp_path / "c.yaml").write_text(json.dumps({**own, "users": [{"name": "u", "user": {"token": "not read"}}]}))
    paths = [tmp_path / "none", tmp_path / "a.yaml", tmp_path / "b/b.yaml", tmp_path / "c.yaml"]
    monkeypatch.setenv("KUBECONFIG", ":".join(map(str, paths)))
    api = find_cluster()
    assert (api.namespace, api.get("/api/v1/namespaces/rl/pods")) == ("rl", {"items": []})


def test_a_proxy_is_used(cluster: FakeKubernetes, tmp_path: Path) -> None:
    cluster.config["clusters"] = [{"name": "c", "cluster": {"server": "http://api.invalid", "proxy-url": cluster.url}}]
    (tmp_path / "kubeconfig").write_text(json.dumps(cluster.config))
    find_cluster().get("/api/v1/namespaces/rl/pods")
    assert cluster.asked == ["GET http://api.invalid/api/v1/namespaces/rl/pods"]
    cluster.config["clusters"][0]["cluster"]["proxy-url"] = "socks5://127.0.0.1:1"
    (tmp_path / "kubeconfig").write_text(json.dumps(cluster.config))
    with pytest.raises(ApiRefused, match="expected a proxy-url such as http://HOST:PORT"):
        find_cluster()


def test_a_server_is_verified_by_tls_server_name(cluster: FakeKubernetes, tmp_path: Path) -> None:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"[]")

    make_certificates(tmp_path, ["api.internal"])
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tmp_path / "api.internal/cert.pem", tmp_path / "api.internal/key.pem")
    server = HTTPServer(("127.0.0.1", 0), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    own = {"server": f"https://127.0.0.1:{server.server_port}", "certificate-authority": "api.internal/ca.pem"}
    for name, works in (("api.internal", True), ("", False)):
        cluster.config["clusters"] = [{"name": "c", "cluster": {**own, "tls-server-name": name}}]
        (tmp_path / "kubeconfig").write_text(json.dumps(cluster.config))
        if works:
            assert find_cluster().get("/") == []
        else:
            with pytest.raises(ApiRefused, match="certificate"):
                find_cluster().get("/")
    server.shutdown()
    server.server_close()
