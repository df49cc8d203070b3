"""A Kubernetes API server on this machine, whose pods are local processes. Folders are mounted under their own names;
what the pods find in /titan_rl is in `pods`."""

import base64
import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

from support.kubernetes_rules import VERSIONS, refusals

TOKEN = "token-of-the-test"


def now() -> str:
    """Return a time stamp. Lines that follow each other may have the same."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:23] + "000000Z"


class FakePod:
    """One try of one index of a Job."""

    def __init__(self, cluster: "FakeKubernetes", job: str, index: int) -> None:
        self.cluster, self.job, self.index = cluster, job, index
        self.name = f"{job}-{index}-{len(cluster.pods)}"
        self.created, self.lines, self.code = now(), list[tuple[str, str]](), None
        self.process: subprocess.Popen[str] | None = None
        self.disrupted = False

    def run(self, failures: int = 0) -> int:
        """Run the pod. `failures`: earlier ones of its index."""
        spec = self.cluster.objects["jobs", self.job]["spec"]["template"]["spec"]
        names = [("configmaps", v["configMap"]["name"]) for v in spec["volumes"] if "configMap" in v]
        names += [("secrets", v["secret"]["secretName"]) for v in spec["volumes"] if "secret" in v]
        while not (self.cluster.free.is_set() and all(name in self.cluster.objects for name in names)):
            time.sleep(0.02)
        for volume in spec["volumes"]:
            self._mount(volume)
        (container,) = spec["containers"]
        script = container["command"][2]
        for mount in container["volumeMounts"]:
            if part := mount.get("subPathExpr", "").replace("$(JOB_COMPLETION_INDEX)", str(self.index)):
                script = script.replace(mount["mountPath"], f"{self.cluster.pods_folder}/{mount['name']}/{part}")
        script = script.replace("/titan_rl/", f"{self.cluster.pods_folder}/")
        marks = {"metadata.annotations['batch.kubernetes.io/job-index-failure-count']": str(failures)}
        own = {each["name"]: marks[each["valueFrom"]["fieldRef"]["fieldPath"]] for each in container["env"]}
        own |= {"JOB_COMPLETION_INDEX": str(self.index), "HOSTNAME": self.name}
        self.process = subprocess.Popen(
            [*self.cluster.with_names(self.job, spec), "bash", "-c", script],
            env={**os.environ, **own},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.cluster.cwd,
            start_new_session=True,
        )
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((now(), line))
        code = self.process.wait()
        self.end(signal.SIGKILL)  # what its first process has started ends with the container
        self.code = code
        return code

    def _mount(self, volume: Mapping[str, Any]) -> None:
        if "configMap" in volume:
            folder = self.cluster.pods_folder / "config"
            folder.mkdir(parents=True, exist_ok=True)
            for name, text in self.cluster.objects["configmaps", volume["configMap"]["name"]]["data"].items():
                (folder / name).write_text(text)
        if "secret" in volume:
            data = self.cluster.objects["secrets", volume["secret"]["secretName"]]["data"]
            for item in volume["secret"]["items"]:
                path = self.cluster.pods_folder / volume["name"] / item["path"]
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(base64.b64decode(data[item["key"]]))

    def end(self, number: int) -> None:
        """Signal the first process of the pod, as a kubelet does; SIGKILL ends all of them."""
        if self.process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, number) if number == signal.SIGKILL else self.process.send_signal(number)

    def shown(self) -> dict[str, Any]:
        status: dict[str, Any] = {"phase": "Pending", "conditions": []}
        if self.code is not None:
            ended = {"terminated": {"exitCode": self.code}}
            phase = "Failed" if self.code else "Succeeded"
            status = {"phase": phase, "containerStatuses": [{"name": "node", "state": ended}]}
        elif self.process is not None:
            status = {"phase": "Running"}
        elif not self.cluster.free.is_set() and self.cluster.waiting:
            status["containerStatuses"] = [{"name": "node", "state": {"waiting": self.cluster.waiting}}]
        elif not self.cluster.free.is_set():
            why = {"reason": "Unschedulable", "message": "0/4 nodes are available: 4 Insufficient nvidia.com/gpu."}
            status["conditions"] = [{"type": "PodScheduled", "status": "False", **why}]
        labels = {"batch.kubernetes.io/job-completion-index": str(self.index)}
        return {
            "metadata": {"name": self.name, "creationTimestamp": self.created, "labels": labels},
            "status": status,
        }


class FakeKubernetes:
    """The server, and the controller of Jobs. Pods start at once, unless `free` is cleared."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cwd, self.pods_folder = folder, folder / "pods"
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.pods: list[FakePod] = []
        self.asked: list[str] = []
        self.waiting: dict[str, str] = {}  # why the containers of pods wait until `free`
        self.warnings: list[dict[str, Any]] = []  # events
        self.trouble: Callable[[str], int] = lambda path: (
            0
        )  # the status of a request that fails; -1: a reset; -2: half an answer
        self.token = TOKEN
        self.free = threading.Event()
        self.free.set()
        self.named = False  # each pod has an address, by names that resolve for pods only
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self.config: dict[str, Any] = {
            "current-context": "here",
            "contexts": [{"name": "here", "context": {"cluster": "c", "user": "u", "namespace": "rl"}}],
            "clusters": [{"name": "c", "cluster": {"server": self.url}}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
        }
        (folder / "kubeconfig").write_text(json.dumps(self.config))
        monkeypatch.setenv("KUBECONFIG", str(folder / "kubeconfig"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")

    def create(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        name = body["metadata"]["name"]
        body["metadata"]["uid"] = f"uid-of-{name}"
        self.objects[kind, name] = body
        if kind == "jobs":
            body["status"] = {"conditions": []}
            for index in range(body["spec"]["completions"]):
                threading.Thread(target=self._keep, args=(name, index), daemon=True).start()
        return body

    def _keep(self, job: str, index: int) -> None:
        """Run a pod of this index again and again, as podFailurePolicy and backoffLimitPerIndex say."""
        own = self.objects["jobs", job]
        spec, failures = own["spec"], 0
        while self.objects.get(("jobs", job)) is own and not own["status"]["conditions"]:
            self.pods.append(pod := FakePod(self, job, index))
            code = pod.run(failures)
            if code == 0:
                return self._conclude(job, "Complete", "")
            if pod.disrupted:
                continue
            failures += 1
            if code in spec["podFailurePolicy"]["rules"][1]["onExitCodes"]["values"]:
                return self._conclude(
                    job, "Failed", f"Container node failed with exit code {code} matching FailJob rule"
                )
            if failures > spec["backoffLimitPerIndex"]:
                assert spec["maxFailedIndexes"] == 0
                return self._conclude(job, "Failed", "Job has exceeded the specified maximal number of failed indexes")

    def _conclude(self, job: str, how: str, message: str) -> None:
        if ("jobs", job) in self.objects:
            condition = {"type": how, "status": "True", "message": message}
            self.objects["jobs", job]["status"]["conditions"].append(condition)
        self.end(job)

    def with_names(self, job: str, spec: Mapping[str, Any]) -> list[str]:
        """Return a command that executes what follows it where the names of the job's pods resolve."""
        if not self.named:
            return []
        completions = self.objects["jobs", job]["spec"]["completions"]
        names = [f"127.{os.getpid() % 200 + 20}.0.{i + 2} {job}-{i}.{spec['subdomain']}" for i in range(completions)]
        hosts = self.pods_folder / "hosts"
        hosts.write_text("\n".join(["127.0.0.1 localhost", *names, ""]))
        own = [] if os.getuid() == 0 else ["-Ur"]
        return ["unshare", *own, "-m", "sh", "-c", f'mount --bind {hosts} /etc/hosts && exec "$@"', "sh"]

    def disrupt(self, index: int) -> None:
        """Evict the pod of an index: another pod needs its place."""
        pod = next(pod for pod in reversed(self.pods) if pod.index == index)
        pod.disrupted = True
        pod.end(signal.SIGTERM)

    def end(self, job: str = "") -> None:
        for pod in self.pods:
            if not job or pod.job == job:
                pod.end(signal.SIGKILL)

    def close(self) -> None:
        self.objects.clear()
        self.end()
        self._server.shutdown()


def _handler(cluster: FakeKubernetes) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        status = 0

        def _answer(self, code: int, body: Any) -> None:
            data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data[: len(data) // 2] if self.status == -2 else data)

        def _serve(self) -> None:
            self.status = cluster.trouble(self.path)
            if self.status > 0:
                return self._answer(self.status, {"message": "trouble of the test"})
            if self.status == -1:
                return self.connection.shutdown(socket.SHUT_RDWR)
            cluster.asked.append(f"{self.command} {self.path}")
            data = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if self.headers["Authorization"] != f"Bearer {cluster.token}":
                return self._answer(401, {"message": "Unauthorized"})
            parts = urlsplit(self.path).path.split("/")
            at = parts.index("namespaces")
            kind, rest = parts[at + 2], parts[at + 3 :]
            if parts[at + 1] != "rl":
                return self._answer(403, {"message": f'namespaces "{parts[at + 1]}" is forbidden'})
            if self.command == "POST":
                body = json.loads(data)
                why = [text for version in VERSIONS for text in refusals(body, version)]
                return self._answer(422, {"message": why[0]}) if why else self._answer(201, cluster.create(kind, body))
            if kind == "events":
                named = parse_qs(urlsplit(self.path).query)["fieldSelector"][0].split(",")[1].partition("=")[2]
                of = [each for each in cluster.warnings if named.startswith(each["involvedObject"]["name"])]
                return self._answer(200, {"items": of})
            if kind == "pods" and not rest:
                return self._answer(200, {"items": [pod.shown() for pod in cluster.pods]})
            if kind == "pods":
                pod = next(pod for pod in cluster.pods if pod.name == rest[0])
                since = parse_qs(urlsplit(self.path).query).get("sinceTime", [""])[0].rstrip("Z")
                return self._answer(200, "".join(f"{stamp} {line}" for stamp, line in pod.lines if stamp >= since))
            if (kind, rest[0]) not in cluster.objects:
                return self._answer(404, {"message": f'{kind} "{rest[0]}" not found'})
            found = cluster.objects[kind, rest[0]]
            if self.command == "DELETE":
                del cluster.objects[kind, rest[0]]
                cluster.end(rest[0])
            return self._answer(200, found)

        do_GET = do_POST = do_DELETE = _serve

    return Handler
