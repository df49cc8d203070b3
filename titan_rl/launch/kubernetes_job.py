"""A run on Kubernetes: created and watched through the API. The Job owns the other objects: they end with it."""

import tempfile
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from titan_rl.launch.cluster_api import ApiRefused, Cluster
from titan_rl.launch.following import ENDED, Look
from titan_rl.launch.job import Job
from titan_rl.launch.manifests import LABELS, NAME, hosts_of, job_name, manifests, secret_of, tls_secret
from titan_rl.wire.program import DONE, FAILED

PATHS = {"Job": "/apis/batch/v1", "Service": "/api/v1", "ConfigMap": "/api/v1", "Secret": "/api/v1"}
DELETE_SECONDS = 120.0
WAITS = ("ContainerCreating", "PodInitializing")  # ordinary, without a message


@dataclass(slots=True)
class KubernetesJob:
    """A Job that was created. Its first pod has the run."""

    cluster: Cluster
    job: str
    seen: str = ""  # time stamp of the last line that was read
    pod: str = ""  # that it is of

    @property
    def name(self) -> str:
        return f"Kubernetes job {self.job}"

    @property
    def ends_it(self) -> str:
        return f"kubectl delete job {self.job} --namespace {self.cluster.namespace}"

    def look(self) -> Look:
        job = self.cluster.find(path_of(self.cluster, "Job", self.job))
        if job is None:
            return ENDED
        conditions = {each["type"]: each for each in job.get("status", {}).get("conditions", [])}
        if any(conditions.get(name, {}).get("status") == "True" for name in ("Complete", "Failed")):
            return ENDED
        pods = self._pods()
        if not pods:
            return Look("pending", "no pod yet")
        reasons = [why for pod in pods if (why := waiting_for(pod))]
        return Look("pending", "; ".join(dict.fromkeys(reasons))) if reasons else Look("running")

    def output(self) -> str:
        """Return what the first pods have printed since the last call: one after the other, if it was replaced."""
        names = [pod["metadata"]["name"] for pod in self._pods() if index_of(pod) == 0]
        known = names.index(self.pod) if self.pod in names else 0
        return "".join(map(self._new_lines, names[known:]))

    def _new_lines(self, pod: str) -> str:
        if pod != self.pod:
            self.pod, self.seen = pod, ""
        since = f"&sinceTime={self.seen[:19]}Z" if self.seen else ""
        path = f"/api/v1/namespaces/{self.cluster.namespace}/pods/{pod}/log?container=node&timestamps=true{since}"
        try:
            text = self.cluster.ask("GET", path).decode(errors="replace")
        except ApiRefused:  # its container has not started
            return ""
        lines = [line.partition(" ") for line in text.splitlines()]
        new = [(stamp, line) for stamp, _, line in lines if stamp > self.seen]
        if new:
            self.seen = new[-1][0]
        return "".join(f"{line}\n" for _, line in new)

    def exit_code(self) -> tuple[int, str]:
        job = self.cluster.find(path_of(self.cluster, "Job", self.job))
        if job is None:
            return FAILED, "was deleted"
        conditions = job.get("status", {}).get("conditions", [])
        if any(each["type"] == "Complete" and each["status"] == "True" for each in conditions):
            return DONE, ""
        codes = [code for pod in self._pods() if index_of(pod) == 0 and (code := code_of(pod)) is not None]
        why = next((each.get("message") or each.get("reason") for each in conditions if each["type"] == "Failed"), "")
        return (codes[-1] if codes and codes[-1] else FAILED), f"failed: {why}"

    def _pods(self) -> list[Any]:
        """Return the pods, oldest first."""
        selector = f"batch.kubernetes.io%2Fjob-name%3D{self.job}"
        path = f"/api/v1/namespaces/{self.cluster.namespace}/pods?labelSelector={selector}"
        return sorted(self.cluster.get(path)["items"], key=lambda pod: pod["metadata"]["creationTimestamp"])


def path_of(cluster: Cluster, kind: str, name: str = "") -> str:
    return f"{PATHS[kind]}/namespaces/{cluster.namespace}/{kind.lower()}s{f'/{name}' if name else ''}"


def index_of(pod: Any) -> int:
    marks = pod["metadata"].get("annotations", {}) | pod["metadata"].get("labels", {})
    return int(marks.get("batch.kubernetes.io/job-completion-index", 0))


def waiting_for(pod: Any) -> str:
    """Return why a pod does not run yet, in Kubernetes' words; "" if it runs or has ended."""
    status = pod.get("status", {})
    if status.get("phase", "Pending") != "Pending":
        return ""
    for each in status.get("containerStatuses", []):
        waiting = each.get("state", {}).get("waiting") or {}
        if waiting.get("reason", WAITS[0]) not in WAITS:
            return f"{waiting['reason']}: {waiting.get('message', '')}".rstrip(": ")
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}".strip(": ")
    return WAITS[0]


def code_of(pod: Any) -> int | None:
    for each in pod.get("status", {}).get("containerStatuses", []):
        if terminated := each.get("state", {}).get("terminated"):
            return terminated["exitCode"]
    return None


def live_kubernetes_job(job: Job, cluster: Cluster) -> KubernetesJob | None:
    """Return the Job of this name that has not ended. One that has ended makes room."""
    existing, name = cluster.find(path_of(cluster, "Job", job_name(job))), job_name(job)
    if existing is None:
        return None
    if LABELS.items() - existing["metadata"].get("labels", {}).items():
        raise ApiRefused(f"job.dump_folder: expected a name that no other Job has in {cluster.namespace}, found {name}")
    live = KubernetesJob(cluster, name)
    if live.look() != ENDED:
        return live
    cluster.ask("DELETE", f"{path_of(cluster, 'Job', name)}?propagationPolicy=Foreground")
    deadline = time.monotonic() + DELETE_SECONDS
    while cluster.find(path_of(cluster, "Job", name)) is not None:
        if time.monotonic() > deadline:
            raise ApiRefused(f"the ended Job {name} was not deleted within {DELETE_SECONDS:g} s")
        time.sleep(0.5)
    return None


def submit_manifests(job: Job, cluster: Cluster) -> KubernetesJob:
    """Create the Job, and then what its pods wait for."""
    first, *others = manifests(job)
    if tls_secret(job):
        from titan_rl.wire.certificates import make_certificates

        with tempfile.TemporaryDirectory() as folder:
            make_certificates(Path(folder), hosts_of(job))
            others.append(secret_of(job, Path(folder)))
    created = cluster.create(path_of(cluster, "Job"), first)
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job_name(job), "uid": created["metadata"]["uid"]}
    try:
        for each in others:
            each["metadata"] |= {"ownerReferences": [owner], "labels": {**LABELS, NAME: job_name(job)}}
            _replace(cluster, each)
    except ApiRefused:
        with suppress(ApiRefused):
            cluster.ask("DELETE", f"{path_of(cluster, 'Job', job_name(job))}?propagationPolicy=Foreground")
        raise
    return KubernetesJob(cluster, job_name(job))


def _replace(cluster: Cluster, body: dict[str, Any]) -> None:
    """Create an object in the place of one that an earlier Job has left."""
    name = body["metadata"]["name"]
    if cluster.find(path_of(cluster, body["kind"], name)) is not None:
        cluster.ask("DELETE", path_of(cluster, body["kind"], name))
    cluster.create(path_of(cluster, body["kind"]), body)
