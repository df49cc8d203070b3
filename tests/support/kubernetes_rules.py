"""Why a Kubernetes API server would refuse an object: its schemas, strictly, and its rules for names and keys."""

import base64
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from jsonschema import Draft202012Validator, FormatChecker

SCHEMAS = json.loads(Path(__file__).with_name("kubernetes").joinpath("schemas.json").read_text())
NEWEST, *OLDER = VERSIONS = tuple(SCHEMAS)
KINDS = {"v1": "core.v1", "batch/v1": "batch.v1", "rbac.authorization.k8s.io/v1": "rbac.v1"}
MERGED = "x-kubernetes-patch-merge-key"  # a list has one entry of each

LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
LETTER_FIRST = r"[a-z]([a-z0-9-]{0,61}[a-z0-9])?"
DOTTED = rf"{LABEL}(\.{LABEL})*"
SUBDOMAIN = rf"(?=.{{1,253}}$){DOTTED}"
VALUE = r"(|[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)"
QUALIFIED = rf"({DOTTED}/)?[A-Za-z0-9]([A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
FILE = r"(?!\.\.)[A-Za-z0-9_.-]{1,253}"
QUANTITY = r"[+-]?(\d+(\.\d*)?|\.\d+)(m|k|[KMGTPE]i?|[eE][+-]?\d+)?"

FORMATS = FormatChecker(())


@FORMATS.checks("int32")
def _fits_32(value: object) -> bool:
    return not isinstance(value, int) or -(2**31) <= value < 2**31


@FORMATS.checks("int64")
def _fits_64(value: object) -> bool:
    return not isinstance(value, int) or -(2**63) <= value < 2**63


@FORMATS.checks("byte", raises=ValueError)
def _is_base64(value: object) -> bool:
    return not isinstance(value, str) or base64.b64decode(value, validate=True) is not None


@cache
def definitions(version: str) -> dict[str, Any]:
    """Return the schemas of a version, which refuse unknown fields."""
    found = SCHEMAS[NEWEST] | SCHEMAS[version]
    return {
        name: {**body, **({"additionalProperties": False} if "properties" in body else {})}
        for name, body in found.items()
    }


@cache
def validator(version: str, name: str) -> Draft202012Validator:
    schema = {"$ref": f"#/$defs/{name}", "$defs": definitions(version)}
    return Draft202012Validator(schema, format_checker=FORMATS)


def refusals(found: Any, version: str) -> Iterator[str]:
    """Yield why a server of this version refuses an object."""
    group, kind = found.get("apiVersion"), found.get("kind")
    name = f"{KINDS.get(str(group))}.{kind}"
    if name not in definitions(version):
        yield f"expected a known kind, found {kind} of {group}"
        return
    errors = [f"{error.json_path}: {error.message:.200}" for error in validator(version, name).iter_errors(found)]
    yield from errors
    if errors:  # the rules read what the schemas hold for sure
        return
    for where, rule, text in [*_named(found), *_repeated(found, definitions(version)[name], version, "")]:
        if not re.fullmatch(rule, text):
            yield f"{where}: {text!r} does not match {rule}"


def _named(found: dict[str, Any]) -> Iterator[tuple[str, str, str]]:
    """Yield each text that has a rule, after its place and the rule."""
    metadata, spec = found["metadata"], found.get("spec", {})
    yield "metadata.name", {"Service": LETTER_FIRST, "Job": LABEL}.get(found["kind"], SUBDOMAIN), metadata["name"]
    if "namespace" in metadata:
        yield "metadata.namespace", LABEL, metadata["namespace"]
    template = spec.get("template", {})
    pod = template.get("spec", {})
    for place in (metadata, template.get("metadata", {}), {"labels": spec.get("selector", {})}):
        for key, value in place.get("labels", {}).items():
            yield "labels", QUALIFIED, key
            yield f"labels.{key}", VALUE, value
        for key in place.get("annotations", {}):
            yield "annotations", QUALIFIED, key
    for key in found.get("data", {}):
        yield "data", FILE, key
    if "subdomain" in pod:
        yield "subdomain", LABEL, pod["subdomain"]
        yield "hostname", LABEL, f"{metadata['name']}-{spec['completions'] - 1}"
    for volume in pod.get("volumes", []):
        yield "volumes", LABEL, volume["name"]
        secret = volume.get("secret", {})
        for rule, text in ((SUBDOMAIN, secret.get("secretName")), (SUBDOMAIN, volume.get("configMap", {}).get("name"))):
            if text is not None:
                yield f"volumes.{volume['name']}", rule, text
        for item in secret.get("items", []):
            yield f"volumes.{volume['name']}", FILE, item["key"]
        if "hostPath" in volume:
            yield f"volumes.{volume['name']}", r"(?!(.*/)?\.\.(/|$))/.*", volume["hostPath"]["path"]
    known = {volume["name"] for volume in pod.get("volumes", [])}
    for container in pod.get("containers", []):
        yield "containers", LABEL, container["name"]
        yield "image", r"\S(.*\S)?", container["image"]
        for each in container.get("envFrom", []):
            yield "envFrom", SUBDOMAIN, each["secretRef"]["name"]
        for mount in container.get("volumeMounts", []):
            yield "volumeMounts", "|".join(map(re.escape, sorted(known))), mount["name"]
            yield "volumeMounts", r"[^:]+", mount["mountPath"]
        for amounts in container.get("resources", {}).values():
            for key, amount in amounts.items():
                yield f"resources.{key}", QUANTITY, str(amount)


def _repeated(found: Any, schema: Any, version: str, where: str) -> Iterator[tuple[str, str, str]]:
    """Yield, of each list that is merged by a key, a text that matches unless one comes twice."""
    while "$ref" in schema:
        schema = definitions(version)[schema["$ref"].removeprefix("#/$defs/")]
    if isinstance(found, list):
        if key := schema.get(MERGED):
            keys = [str(each.get(key)) for each in found]
            yield where, "", " ".join(sorted({name for name in keys if keys.count(name) > 1}))
        for each in found:
            yield from _repeated(each, schema.get("items", {}), version, where)
    for name, value in found.items() if isinstance(found, dict) else ():
        yield from _repeated(value, schema.get("properties", {}).get(name, {}), version, f"{where}.{name}")
