"""Reads launch.pod, the user's changes of the pod template, and merges them as `kubectl patch` does: mappings by key,
lists of MERGED_BY by a key of their entries; other lists replace; null removes."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from titan_rl.config.toml import as_toml, did_you_mean

MERGED_BY = {
    "containers": "name",
    "env": "name",
    "evictionResponders": "name",
    "hostAliases": "ip",
    "imagePullSecrets": "name",
    "initContainers": "name",
    "ports": "containerPort",
    "resourceClaims": "name",
    "schedulingGates": "name",
    "topologySpreadConstraints": "topologyKey",
    "volumeDevices": "devicePath",
    "volumeMounts": "mountPath",
    "volumes": "name",
}
CONTAINER = "node"  # has the run or a worker
OUR_LABELS = ("app.kubernetes.io/name", "app.kubernetes.io/managed-by")
TEMPLATE = ("metadata", "spec")
METADATA = ("annotations", "labels")
SPEC = (
    "activeDeadlineSeconds", "affinity", "automountServiceAccountToken", "containers", "dnsConfig", "dnsPolicy",
    "enableServiceLinks", "evictionResponders", "hostAliases", "hostIPC", "hostNetwork", "hostPID", "hostUsers",
    "hostname", "hostnameOverride", "imagePullSecrets", "initContainers", "nodeName", "nodeSelector", "os",
    "overhead", "preemptionPolicy", "priority", "priorityClassName", "readinessGates", "resourceClaims",
    "resources", "restartPolicy", "runtimeClassName", "schedulerName", "schedulingGates", "schedulingGroup",
    "securityContext", "serviceAccount", "serviceAccountName", "setHostnameAsFQDN", "shareProcessNamespace",
    "subdomain", "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints", "volumes",
)  # fmt: skip
"""Keys of a pod's spec in Kubernetes 1.37. A server refuses newer ones than its own."""
OURS = {"hostname", "restartPolicy", "setHostnameAsFQDN", "subdomain", "command", "args"}
"""Keys of the spec and of the container that a job depends on."""


class PatchRefused(ValueError):
    """The text names the expected content of the file."""


def merged(base: Any, patch: Any, key: str = "") -> Any:
    """Return `base` with the changes of `patch`. `key` is the one under which both are."""
    if isinstance(patch, dict):
        base = base if isinstance(base, dict) else {}
        changed = {name: merged(base.get(name), value, name) for name, value in patch.items() if value is not None}
        return {name: value for name, value in {**base, **changed}.items() if patch.get(name, value) is not None}
    if isinstance(patch, list) and key in MERGED_BY:
        entries = {each[MERGED_BY[key]]: each for each in base or []}
        for each in patch:
            name = each[MERGED_BY[key]]
            entries[name] = merged(entries.get(name), each)
        return list(entries.values())
    return patch


def read_patch(path: str) -> dict[str, Any]:
    """Return the patch in a file, {} if no file is named."""
    if not path:
        return {}
    try:
        patch = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise PatchRefused(f"expected a YAML file, found none at {as_toml(path)}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise PatchRefused(f"expected one YAML document in {as_toml(path)}, found: {error}") from None
    problem = next(_problems(patch), "")
    if problem:
        raise PatchRefused(f"{problem}, in {as_toml(path)}")
    return patch


def _problems(patch: Any) -> Iterator[str]:
    yield from _unknown(patch, "", TEMPLATE)
    metadata, spec = patch.get("metadata") or {}, patch.get("spec") or {}
    yield from _unknown(metadata, "metadata: ", METADATA)
    for kind in METADATA:
        pairs = metadata.get(kind) or {}
        yield from _unknown(pairs, f"metadata.{kind}: ")
        for name, value in pairs.items():
            if not isinstance(value, str):
                yield f"metadata.{kind}: expected text for {name}, found {value!r}"
            if name in OUR_LABELS:
                yield f"metadata.{kind}: expected no {name}, which titan_rl launch sets, found it"
    yield from _unknown(spec, "spec: ", SPEC)
    yield from _unmergeable(spec, "spec")
    containers = spec.get("containers") or []
    for each in containers:
        if each["name"] != CONTAINER and not each.get("image"):
            yield f'spec.containers: expected "{CONTAINER}", or others with an image, found {as_toml(each["name"])}'
    for where in (spec, *(each for each in containers if each["name"] == CONTAINER)):
        for key in OURS & where.keys():
            yield f"spec: expected no {key}, which titan_rl launch sets, found it"


def _unknown(found: Any, where: str, keys: Sequence[str] = ()) -> Iterator[str]:
    """Yield a problem unless `found` is a mapping with keys of `keys`; any text is a key if there are none."""
    if not isinstance(found, dict) or not all(isinstance(key, str) for key in found):
        wanted = f" with {' or '.join(keys)}" if len(keys) == 2 else ""
        yield f"{where}expected a mapping{wanted}, found {found!r:.80}"
        return
    for key in found.keys() - set(keys) if keys else ():
        hint = "; it belongs below spec" if not where and key in SPEC else did_you_mean(key, keys)
        yield f"{where}expected keys of a pod template, found {as_toml(key)}{hint}"


def _unmergeable(found: Any, where: str) -> Iterator[str]:
    """Yield a problem of each list whose entries lack the key by which they are merged, and of each directive."""
    if isinstance(found, list):
        for each in found:
            yield from _unmergeable(each, where)
    for key, value in found.items() if isinstance(found, dict) else ():
        by = MERGED_BY.get(key)
        entries = value if isinstance(value, list) else [value]
        if str(key).startswith("$"):
            yield f"{where}: expected no directives of patches, found {key}"
        elif by and value is not None and not all(isinstance(each, dict) and each.get(by) for each in entries):
            yield f"{where}.{key}: expected a list of mappings that have {by}, found {value!r:.80}"
        elif by and isinstance(value, dict):
            yield f"{where}.{key}: expected a list, found a mapping"
        else:
            yield from _unmergeable(value, f"{where}.{key}")
