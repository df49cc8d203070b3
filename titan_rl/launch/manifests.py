"""The objects of a run on Kubernetes. No operator is needed.

Job (Indexed)    one pod per node, each with `python -m titan_rl.worker`; pod 0 also has `python -m titan_rl.run`
Service          gives the pods names, NAME-0.NAME, ... (headless)
ConfigMap        the TOML
Secret           certificates (never printed)
"""

import base64
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from titan_rl.launch.job import RETRIES, WAIT, Job

PORT = 26600
OWN = "/titan_rl"  # in the pods: TOML and certificates
NAME = "app.kubernetes.io/name"
LABELS = {"app.kubernetes.io/managed-by": "titan-rl"}
KEPT_SECONDS = 7 * 24 * 3600  # finished jobs, for their logs

RUN = """\
code=
@RUN@ &
run=$!
trap 'interrupted=1; kill -TERM "$run"' TERM
@WAIT@exit "$code"
"""

RESOLVES = "import socket, sys; socket.getaddrinfo(sys.argv[1], 1)"  # names of pods do so after a while
COPY = [  # a key that is this user's, with mode 0600, which Secrets cannot have
    "tls=$(mktemp -d)",
    f'install -m 600 "{OWN}/tls/$host"/*.pem "$tls"',
]


def job_name(job: Job) -> str:
    """Return a name that Kubernetes takes: with a dash and a number, at most 63 characters."""
    return re.sub(r"[^a-z0-9]+", "-", job.name.lower())[:52].strip("-") or "run"


def hosts_of(job: Job) -> list[str]:
    name = job_name(job)
    return [f"{name}-{index}.{name}" for index in range(job.nodes)]


def tls_secret(job: Job) -> str:
    """Return the name of the Secret with the job's own certificates, or "" if it needs none."""
    return f"{job_name(job)}-tls" if job.nodes > 1 and job.scheme == "tls" and not job.config.hosts.tls else ""


def manifests(job: Job) -> list[dict[str, Any]]:
    """Return the objects, the Job first, which owns the others once they are created."""
    name, several = job_name(job), job.nodes > 1
    objects: list[dict[str, Any]] = [
        {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": name, "labels": {**LABELS, NAME: name}},
            "spec": job_spec(job, name),
        }
    ]
    if several:
        spec = {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {NAME: name},
            "ports": [{"port": PORT}],
        }
        objects.append({"apiVersion": "v1", "kind": "Service", "metadata": {"name": name}, "spec": spec})
    data = {job.config_file: job.toml()}
    objects.append({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": f"{name}-config"}, "data": data})
    return objects


def job_spec(job: Job, name: str) -> dict[str, Any]:
    launch = job.config.launch
    ends = {"containerName": "node", "operator": "In", "values": [2, 130]}  # bad input; stopped by a user
    spec: dict[str, Any] = {
        "completionMode": "Indexed",
        "completions": job.nodes,
        "parallelism": job.nodes,
        "backoffLimit": RETRIES,
        "ttlSecondsAfterFinished": KEPT_SECONDS,
        "podFailurePolicy": {
            "rules": [
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
                {"action": "FailJob", "onExitCodes": ends},
            ]
        },
        "template": {"metadata": {"labels": {**LABELS, NAME: name}}, "spec": pod_spec(job, name)},
    }
    if job.nodes > 1:
        spec["successPolicy"] = {"rules": [{"succeededIndexes": "0"}]}  # the workers then end
    if launch.minutes:
        spec["activeDeadlineSeconds"] = 60 * launch.minutes
    return spec


def pod_spec(job: Job, name: str) -> dict[str, Any]:
    launch = job.config.launch
    limits = {
        "nvidia.com/gpu": job.gpus,
        "cpu": launch.cpus_per_node,
        "memory": f"{launch.memory_gb_per_node}Gi" if launch.memory_gb_per_node else 0,
    }
    volumes, mounts = zip(*volumes_of(job, name), strict=True)
    container: dict[str, Any] = {
        "name": "node",
        "image": launch.image,
        "command": ["bash", "-c", pod_script(job)],
        "resources": {"limits": {key: value for key, value in limits.items() if value}},
        "volumeMounts": list(mounts),
    }
    if launch.secrets:
        container["envFrom"] = [{"secretRef": {"name": secret}} for secret in launch.secrets]
    return {
        "restartPolicy": "Never",
        "subdomain": name,
        "terminationGracePeriodSeconds": job.stop_seconds,
        "containers": [container],
        "volumes": list(volumes),
    }


def volumes_of(job: Job, name: str) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each volume, and where it is mounted."""
    yield {"name": "config", "configMap": {"name": f"{name}-config"}}, {"name": "config", "mountPath": f"{OWN}/config"}
    yield {"name": "memory", "emptyDir": {"medium": "Memory"}}, {"name": "memory", "mountPath": "/dev/shm"}
    if secret := tls_secret(job):
        items = [{"key": key, "path": path} for key, path in secret_files(job).items()]
        volume = {"name": "tls", "secret": {"secretName": secret, "items": items, "defaultMode": 0o444}}
        yield volume, {"name": "tls", "mountPath": f"{OWN}/tls", "readOnly": True}
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
    files = ("ca.pem", "cert.pem", "key.pem")
    return {f"{host}.{file}": f"{host}/{file}" for host in hosts_of(job) for file in files}


def secret_of(job: Job, folder: Path) -> dict[str, Any]:
    """Return the Secret of the certificates in a folder."""
    data = {key: base64.b64encode((folder / path).read_bytes()).decode() for key, path in secret_files(job).items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": tls_secret(job)}, "data": data}


def pod_script(job: Job) -> str:
    launch, hosts, python = job.config.launch, job.config.hosts, shlex.quote(job.python)
    own, folder = hosts_of(job), shlex.quote(str(job.own))
    run = f"{python} -m titan_rl.run --config {shlex.quote(f'{OWN}/config/{job.config_file}')}"
    lines = [*([launch.setup] if launch.setup else [])]
    if job.nodes > 1:
        addresses = ",".join(f"{job.scheme}://{host}:{PORT}" for host in own)
        tls = (shlex.quote(hosts.tls) if hosts.tls else '"$tls"') if job.scheme == "tls" else ""
        run += f' --hosts.kind=attach --hosts.addresses={addresses} --hosts.own_address="$host"'
        run += f" --hosts.tls={tls}" if tls else ""
        worker = f'{python} -m titan_rl.worker --address "{job.scheme}://$host:{PORT}"'
        worker += f" --tls {tls}" if tls else " --insecure"
        lines += [
            f'host="{job_name(job)}-$JOB_COMPLETION_INDEX.{job_name(job)}"',
            f"mkdir -p {folder}",
            *(COPY if tls_secret(job) else []),
            f"""until {python} -c '{RESOLVES}' "$host" 2> /dev/null; do sleep 1; done""",
            "work() {",
            "    trap '' TERM HUP INT  # ranks stay until the run has saved",
            f'    exec {worker} >> {folder}/"$HOSTNAME.log" 2>&1',
            "}",
            '[ "$JOB_COMPLETION_INDEX" = 0 ] || work',
            "work &",
        ]
    return "\n".join([*lines, RUN.replace("@RUN@", run).replace("@WAIT@", WAIT)])


class _Dumper(yaml.SafeDumper):
    """Writes texts of several lines as blocks."""


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def as_yaml(objects: list[dict[str, Any]]) -> str:
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=10**6, allow_unicode=True)
