"""The objects of a run on Kubernetes. No operator is needed.

Job (Indexed)    one pod per node, each with `python -m titan_rl worker`; pod 0 also has `python -m titan_rl.run`
Service          gives the pods names, NAME-0.NAME, ... (headless)
ConfigMap        the TOML
Secret           certificates (never printed)
"""

import base64
import re
import shlex
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from titan_rl.tools.launch.job import JOIN_SECONDS, OWN, RETRIES, SHARED_MEMORY, WAIT, Job
from titan_rl.tools.launch.pod_patch import CONTAINER, OUR_LABELS, merged, read_patch
from titan_rl.wire.program import FAILED, FAILED_AGAIN, STOPPED, USAGE

PORT = 26600
NAME, MANAGED = OUR_LABELS
LABELS = {MANAGED: "titan-rl"}
KEPT_SECONDS = 7 * 24 * 3600  # finished jobs, for their logs
SHARED = "16Gi"  # most of /dev/shm, which NCCL uses
CPU, MEMORY = 1, 4
"""Cores and GiB that are requested for each GPU by default. Pods without a request are the first to be evicted."""
PER_POD = 5
"""Pods of one index that may fail before the Job does: a node that does not take pods fails several at once."""
AGAIN = 75  # exit code of a container after which its pod is replaced; the Job ends with 1, 2 and 130
COUNT = "batch.kubernetes.io/job-index-failure-count"  # Kubernetes' annotation of a pod

RUN = """\
code=
@RUN@ &
run=$!
trap 'interrupted=1; kill -TERM "$run"' TERM
@WAIT@[ "$code" != 1 ] || [ "${FAILURES:-0}" -ge @RETRIES@ ] || code=@AGAIN@
exit "$code"
"""

RESOLVES = "import socket, sys; socket.getaddrinfo(sys.argv[1], 1)"  # names of pods do so after a while
FILES = ("ca.pem", "cert.pem", "key.pem")
COPY = [  # a key that is this user's, with mode 0600, which Secrets cannot have
    "tls=$(mktemp -d)",
    f'install -m 600 {OWN}/tls/*.pem "$tls"',
]


def job_name(job: Job) -> str:
    """Return a name that Kubernetes takes: with a dash and a number, at most 63 characters; a Service's has a letter
    first."""
    name = re.sub(r"[^a-z0-9]+", "-", job.name.lower()).strip("-")
    return (name if name[:1].isalpha() else f"run-{name}")[:52].strip("-")


def config_key(job: Job) -> str:
    """Return the name of the TOML in the pods, which is a key of a ConfigMap."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", job.config_file).lstrip(".")[-253:]


def hosts_of(job: Job) -> list[str]:
    name = job_name(job)
    return [f"{name}-{index}.{name}" for index in range(job.nodes)]


def tls_secret(job: Job) -> str:
    """Return the name of the Secret with the job's own certificates, or "" if it needs none."""
    return f"{job_name(job)}-tls" if job.nodes > 1 and job.scheme == "tls" and not job.config.hosts.tls else ""


def manifests(job: Job) -> list[dict[str, Any]]:
    """Return the objects, the Job first, which owns the others once they are created."""
    name, several = job_name(job), job.nodes > 1
    template = pod_template(job, name)
    labels = template["metadata"]["labels"]
    spec = job_spec(job, template)
    objects = [{"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata(job, name, labels), "spec": spec}]
    if several:
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {NAME: name},
            "ports": [{"port": PORT}],
        }
        objects.append({"apiVersion": "v1", "kind": "Service", "metadata": metadata(job, name), "spec": spec})
    data = {config_key(job): job.toml()}
    config = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(job, f"{name}-config"), "data": data}
    return [*objects, config]


def metadata(job: Job, name: str, labels: Mapping[str, str] | None = None) -> dict[str, Any]:
    namespace = {"namespace": job.config.launch.namespace} if job.config.launch.namespace else {}
    return {"name": name, **namespace, "labels": {**LABELS, NAME: job_name(job), **(labels or {})}}


def job_spec(job: Job, template: dict[str, Any]) -> dict[str, Any]:
    launch = job.config.launch
    final = [FAILED, USAGE, FAILED_AGAIN, STOPPED]  # a run that may be tried again ends its pod with another code
    ends = {"containerName": CONTAINER, "operator": "In", "values": final}
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimitPerIndex": PER_POD,
        "maxFailedIndexes": 0,  # else workers would wait for a run that has ended
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": ends},
            ]
        },
        "template": template,
    }
    if job.nodes > 1:
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}  # the workers then end
    if launch.minutes:
        spec["activeDeadlineSeconds"] = 60 * launch.minutes
    return spec


def pod_template(job: Job, name: str) -> dict[str, Any]:
    """Return the pods' template, with the changes of launch.pod."""
    launch = job.config.launch
    limits = {
        "nvidia.com/gpu": str(job.gpus or ""),
        "cpu": str(launch.cpus_per_node or ""),
        "memory": f"{launch.memory_gb_per_node}Gi" if launch.memory_gb_per_node else "",
    }
    limits = {key: value for key, value in limits.items() if value}
    least = {"cpu": str(CPU * (job.gpus or 1)), "memory": f"{MEMORY * (job.gpus or 1)}Gi"}
    least = {key: value for key, value in least.items() if key not in limits}
    volumes, mounts = zip(*volumes_of(job, name), strict=True)
    failures = {"fieldRef": {"fieldPath": f"metadata.annotations['{COUNT}']"}}
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": launch.image,
        "command": ["bash", "-c", pod_script(job)],
        "env": [{"name": "FAILURES", "valueFrom": failures}],
        "resources": {kind: values for kind, values in (("requests", least), ("limits", limits)) if values},
        "volumeMounts": list(mounts),
    }
    if launch.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in launch.secrets]
    spec = {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": job.stop_seconds,
        "automountServiceAccountToken": False,  # pods execute what a model writes
        "containers": [container],
        "volumes": list(volumes),
    }
    template = {"metadata": {"labels": {**LABELS, NAME: name}}, "spec": spec}
    return merged(template, read_patch(launch.pod))


def volumes_of(job: Job, name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each volume, and where it is mounted."""
    yield {"name": "config", "configMap": {"name": f"{name}-config"}}, {"name": "config", "mountPath": f"{OWN}/config"}
    yield (
        {"name": "memory", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED}},
        {"name": "memory", "mountPath": SHARED_MEMORY},
    )
    secret = tls_secret(job)
    if secret:
        paths = [f"{index}/{file}" for index in range(job.nodes) for file in FILES]
        items = [{"key": key, "path": path} for key, path in zip(secret_files(job), paths, strict=True)]
        volume = {"name": "tls", "secret": {"secretName": secret, "items": items, "defaultMode": 0o444}}
        own = {"subPathExpr": "$(JOB_COMPLETION_INDEX)"}  # no container sees another host's key
        yield volume, {"name": "tls", "mountPath": f"{OWN}/tls", "readOnly": True, **own}
    for number, mount in enumerate(job.config.launch.mounts):
        source, path, *flags = mount.split(":")
        kind, _, named = source.partition("/")
        volume: dict[str, Any] = {"name": f"mount{number}"}
        if kind == "pvc":
            volume["persistentVolumeClaim"] = {"claimName": named}
        elif kind == "secret":
            volume["secret"] = {"secretName": named}
        else:
            volume["hostPath"] = {"path": source}
        yield volume, {"name": f"mount{number}", "mountPath": path, **({"readOnly": True} if flags else {})}


def secret_files(job: Job) -> dict[str, str]:
    """Return the paths of the certificates below a folder, by keys of the Secret, which have no slash."""
    return {f"{host}.{file}": f"{host}/{file}" for host in hosts_of(job) for file in FILES}


def new_secret(job: Job) -> dict[str, Any]:
    """Return the Secret with new certificates. The CA's key is in no Secret: it is deleted here."""
    from titan_rl.ext.hosts.certificates import make_certificates

    with tempfile.TemporaryDirectory() as folder:
        make_certificates(Path(folder), hosts_of(job))
        return _secret(job, Path(folder))


def _secret(job: Job, folder: Path) -> dict[str, Any]:
    data = {key: base64.b64encode((folder / path).read_bytes()).decode() for key, path in secret_files(job).items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": metadata(job, tls_secret(job)), "data": data}


def pod_script(job: Job) -> str:
    launch, hosts, python = job.config.launch, job.config.hosts, shlex.quote(job.python)
    own, folder = hosts_of(job), shlex.quote(str(job.own))
    run = f"{python} -m titan_rl.run --config {shlex.quote(f'{OWN}/config/{config_key(job)}')}"
    lines = [*([launch.setup] if launch.setup else [])]
    if job.nodes > 1:
        addresses = ",".join(f"{job.scheme}://{host}:{PORT}" for host in own)
        tls = (shlex.quote(hosts.tls) if hosts.tls else '"$tls"') if job.scheme == "tls" else ""
        run += f' --hosts.kind=attach --hosts.addresses={addresses} --hosts.own_address="$host"'
        run += f" --hosts.tls={tls}" if tls else ""
        run += job.joining
        worker = f'{python} -m titan_rl.worker --address "{job.scheme}://$host:{PORT}"'
        worker += f" --tls {tls}" if tls else " --insecure"
        lines += [
            f'host="{job_name(job)}-$JOB_COMPLETION_INDEX.{job_name(job)}"',
            f"mkdir -p {folder}",
            *(COPY if tls_secret(job) else []),
            f"""until {python} -c '{RESOLVES}' "$host" 2> /dev/null; do""",
            f'    if [ "$SECONDS" -ge {JOIN_SECONDS} ]; then',
            f'        echo "titan_rl launch: {JOIN_SECONDS} s without an address of $host"; exit {AGAIN}',
            "    fi",
            "    sleep 1",
            "done",
            "work() {",
            "    trap '' TERM HUP INT  # ranks stay until the run has saved",
            f"    {worker}; code=$?",
            f'    [ "$code" != 1 ] || code={AGAIN}',
            '    exit "$code"',
            "}",
            f'log={folder}/"$HOSTNAME.log"',
            '[ "$JOB_COMPLETION_INDEX" = 0 ] || work >> "$log" 2>&1',
            'work >> "$log" 2>&1 &',
        ]
    parts = {"RUN": run, "WAIT": WAIT, "RETRIES": str(RETRIES), "AGAIN": str(AGAIN)}
    return "\n".join([*lines, re.sub("@([A-Z]+)@", lambda match: parts[match[1]], RUN)])


READ_OTHERWISE = re.compile(r"[yYnN]|[-+.]?\d.*")  # by kubectl, for which 12e5 is a number and y is true


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = "|" if "\n" in text else "'" if READ_OTHERWISE.fullmatch(text) else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _text)


def as_yaml(objects: list[dict[str, Any]]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
