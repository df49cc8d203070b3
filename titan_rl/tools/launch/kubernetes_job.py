"""A run on Kubernetes: created and watched through the API. The Job owns the other objects: they end with it."""

import re
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple
from urllib.parse import quote

from titan_rl.tools.launch.cluster_api import FINAL, ApiRefused, Cluster
from titan_rl.tools.launch.following import ENDED, Look
from titan_rl.tools.launch.job import Job
from titan_rl.tools.launch.manifests import AGAIN, LABELS, job_name, manifests, new_secret, tls_secret
from titan_rl.tools.launch.pod_patch import CONTAINER
from titan_rl.wire.program import DONE, FAILED

PATHS = {"Job": "/apis/batch/v1", "Service": "/api/v1", "ConfigMap": "/api/v1", "Secret": "/api/v1"}
DELETE_SECONDS = 120.0
WAITS = ("ContainerCreating", "PodInitializing")  # ordinary, without a message
MOST_CHARACTERS = 300  # a reason's length
LOG_TRIES = 10
"""How often the log of a pod that has ended, or is deleted, is asked for. A lost node never gives it."""
STAMP = re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d+))?(Z|[+-]\d\d:\d\d)", re.ASCII)

Moment = tuple[float, str]  # the second, and its fraction


class PodPlace(NamedTuple):
    """How far a pod's log has been read."""

    last: Moment = (0.0, "")  # when the last line was printed
    same: int = 0  # lines that have this time
    since: str = ""  # its second, for the next question
    misses: int = 0  # questions in a row without an answer
    over: bool = False  # the pod has ended, and all was read


@dataclass(slots=True)
class KubernetesJob:
    """A Job that was created. Its first pod has the run."""

    cluster: Cluster
    job: str
    read: dict[str, PodPlace] = field(default_factory=dict)  # by names of pods

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
        conditions = {each["type"]: each for each in job.get("status", {}).get("conditions") or [] if holds(each)}
        if conditions.keys() & {"Complete", "Failed"}:
            return ENDED
        suspended = conditions.get("Suspended")
        if suspended:
            return Look("pending", words("Suspended", suspended.get("message", "")))
        number = job["spec"]["completions"]
        pods = {index_of(pod): pod for pod in self._pods()}  # the newest of each index
        reasons = [why for pod in pods.values() if (why := waiting_for(pod))]
        missing = number - len(pods)
        if missing:
            reasons += [self._warning("Job", self.job) or "no pod yet"] * missing
        if reasons and set(reasons) <= {*WAITS}:
            name = next(pod["metadata"]["name"] for pod in pods.values() if waiting_for(pod))
            reasons[0] = self._warning("Pod", name) or reasons[0]
        if not reasons:
            return Look("running")
        if number == 1:
            return Look("pending", reasons[0])
        return Look("pending", "; ".join(f"{n} of {number} pods: {why}" for why, n in Counter(reasons).items()))

    def _warning(self, kind: str, name: str) -> str:
        """Return the newest warning about an object, "" if there is none or the user may not see events."""
        selector = quote(f"involvedObject.kind={kind},involvedObject.name={name},type=Warning")
        try:
            found = self.cluster.get(f"/api/v1/namespaces/{self.cluster.namespace}/events?fieldSelector={selector}")
        except ApiRefused as error:
            if error.status in FINAL:
                return ""
            raise
        times = ("lastTimestamp", "eventTime")
        newest = max(found["items"], key=lambda event: max(event.get(key) or "" for key in times), default={})
        return words(newest.get("reason", ""), newest.get("message", ""))

    def output(self) -> str:
        """Return what the first pods have printed since the last call: one after the other, if it was replaced. If one
        log cannot be read now, the next call returns the others' new lines too."""
        read = dict(self.read)
        text = "".join(self._new_lines(pod, read) for pod in self._pods() if index_of(pod) == 0)
        self.read = read
        return text

    def _new_lines(self, pod: Any, read: dict[str, PodPlace]) -> str:
        """Return lines that are complete: of a pod that has ended, all lines. Text without a time stamp is the
        kubelet's own."""
        name, over = pod["metadata"]["name"], pod["status"].get("phase") in ("Succeeded", "Failed")
        ending = over or "deletionTimestamp" in pod["metadata"]
        place = read.get(name, PodPlace())
        if place.over:
            return ""
        since = f"&sinceTime={quote(place.since)}" if place.since else ""
        path = (
            f"/api/v1/namespaces/{self.cluster.namespace}/pods/{name}/log?container={CONTAINER}&timestamps=true{since}"
        )
        try:
            text = self.cluster.ask("GET", path).decode(errors="replace")
        except ApiRefused as error:
            if error.status in (400, 404):  # its container has not started; it was deleted meanwhile
                return ""
            misses = place.misses + bool(ending and error.status >= 500)
            self.read[name] = place._replace(misses=misses)
            if misses < LOG_TRIES:
                raise
            read[name] = place._replace(over=True)
            return f"titan_rl launch: the rest of the log of pod {name} is not to be had ({error})\n"
        *rows, rest = text.split("\n")
        stamped = [(STAMP.match(row), row) for row in (*rows, *([rest] if rest and over else []))]
        known = [(moment_of(stamp), stamp, row[stamp.end() + 1 :]) for stamp, row in stamped if stamp]
        known = [each for each in known if each[0] >= place.last]
        new = known[min(place.same, sum(moment == place.last for moment, _, _ in known)) :]
        if new:
            last, stamp, _ = new[-1]  # the kubelet gives whole seconds: all lines of this moment are known
            place = PodPlace(last, sum(moment == last for moment, _, _ in known), f"{stamp[1]}{stamp[3]}")
        read[name] = place._replace(misses=0, over=over)
        return "".join(f"{line}\n" for _, _, line in new)

    def exit_code(self) -> tuple[int, str]:
        job = self.cluster.find(path_of(self.cluster, "Job", self.job))
        if job is None:
            return FAILED, "was deleted"
        conditions = {each["type"]: each for each in job.get("status", {}).get("conditions") or [] if holds(each)}
        if "Complete" in conditions:
            return DONE, ""
        codes = [code for pod in self._pods() if index_of(pod) == 0 and (code := code_of(pod)) is not None]
        failed = conditions.get("Failed", {})
        code = codes[-1] if codes and codes[-1] not in (0, AGAIN) else FAILED
        return code, f"failed: {failed.get('message') or failed.get('reason')}"

    def _pods(self) -> list[Any]:
        """Return the pods, oldest first."""
        selector = f"batch.kubernetes.io%2Fjob-name%3D{self.job}"
        path = f"/api/v1/namespaces/{self.cluster.namespace}/pods?labelSelector={selector}"
        return sorted(self.cluster.get(path)["items"], key=lambda pod: pod["metadata"]["creationTimestamp"])


def holds(condition: Any) -> bool:
    return condition["status"] == "True"


def moment_of(stamp: re.Match[str]) -> Moment:
    return datetime.fromisoformat(f"{stamp[1]}{stamp[3]}").timestamp(), (stamp[2] or "").ljust(9, "0")


def words(reason: str, message: str) -> str:
    """Return a reason and its message in one line."""
    return " ".join(f"{reason}: {message}".strip(": ").split())[:MOST_CHARACTERS]


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
    for each in (*status.get("initContainerStatuses", []), *status.get("containerStatuses", [])):
        waiting = each.get("state", {}).get("waiting") or {}
        if waiting.get("reason", WAITS[0]) not in WAITS:
            return words(waiting["reason"], waiting.get("message", ""))
    for condition in status.get("conditions", []):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return words(condition.get("reason", ""), condition.get("message", ""))
    return WAITS[0]


def code_of(pod: Any) -> int | None:
    for each in pod.get("status", {}).get("containerStatuses", []):
        if each["name"] == CONTAINER and (terminated := each.get("state", {}).get("terminated")):
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
        add_objects(job, cluster, existing["metadata"]["uid"])
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
    first, *_ = manifests(job)
    created = cluster.create(path_of(cluster, "Job"), first)
    try:
        add_objects(job, cluster, created["metadata"]["uid"])
    except ApiRefused:
        with suppress(ApiRefused):  # if it stays, the next launch adds the missing objects
            cluster.ask("DELETE", f"{path_of(cluster, 'Job', job_name(job))}?propagationPolicy=Foreground")
        raise
    return KubernetesJob(cluster, job_name(job))


def add_objects(job: Job, cluster: Cluster, uid: str) -> None:
    """Create what the pods of a Job wait for, in the place of what an earlier Job has left. Nothing is made twice."""
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": job_name(job), "uid": uid}
    _, *others = manifests(job)
    made = {(each["kind"], each["metadata"]["name"]): partial(dict, each) for each in others}
    secret = tls_secret(job)
    if secret:
        made["Secret", secret] = partial(new_secret, job)
    for (kind, name), body_of in made.items():
        found = cluster.find(path_of(cluster, kind, name))
        if found and any(each["uid"] == uid for each in found["metadata"].get("ownerReferences", [])):
            continue
        if found:
            cluster.ask("DELETE", path_of(cluster, kind, name))
        body = body_of()
        body["metadata"]["ownerReferences"] = [owner]
        cluster.create(path_of(cluster, kind), body)
