"""Kubernetes' API over HTTP: finds the cluster as kubectl does, and asks it."""

import base64
import json
import os
import ssl
import subprocess
import tempfile
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from titan_rl.launch.following import SubmissionFailed

IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_SECONDS = 60.0


class ApiRefused(SubmissionFailed):
    """The API server's own words, and its HTTP status; 0 if it was not reached."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status = status


@dataclass(slots=True)
class Cluster:
    """An API server, and how to prove to it who asks."""

    server: str
    namespace: str
    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        headers = {"Accept": "application/json, */*", "Content-Type": "application/json"}
        if self.token:
            headers["Authorization"] = f"Bearer {self.token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=CALL_SECONDS, context=self.tls) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")
            try:
                text = json.loads(text)["message"]
            except (ValueError, KeyError, TypeError):
                text = text[:200] or error.reason
            raise ApiRefused(f"{method} {path}: {text}", error.code) from None
        except OSError as error:
            raise ApiRefused(f"{self.server} does not answer: {getattr(error, 'reason', error)}") from None

    def get(self, path: str) -> Any:
        return json.loads(self.ask("GET", path))

    def create(self, path: str, body: Mapping[str, Any]) -> Any:
        return json.loads(self.ask("POST", path, body))

    def find(self, path: str) -> Any:
        """Return an object, or None if there is none of that name."""
        try:
            return self.get(path)
        except ApiRefused as error:
            if error.status == 404:
                return None
            raise


def find_cluster(namespace: str = "") -> Cluster:
    """Return the cluster of kubectl's current context, or the one in which this process is a pod."""
    named = os.environ.get("KUBECONFIG", "").split(os.pathsep)[0]
    path = Path(named) if named else Path.home() / ".kube/config"
    if not path.is_file() and (IN_POD / "token").is_file():
        return _own_cluster(namespace)
    try:
        config = yaml.safe_load(path.read_text())
        context = _named(config["contexts"], config["current-context"])["context"]
        cluster = _named(config["clusters"], context["cluster"])["cluster"]
        user = _named(config.get("users") or [], context.get("user"))["user"]
        api = Cluster(cluster["server"].rstrip("/"), namespace or context.get("namespace") or "default")
        user = _from_plugin(user["exec"]) if "exec" in user else user
    except OSError as error:
        raise ApiRefused(f"expected a kubeconfig (KUBECONFIG), found {path}: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, TypeError, StopIteration, AttributeError) as error:
        raise ApiRefused(f"expected a kubeconfig with a current context in {path}, found {error!r}") from None
    api.token = user.get("token") or (Path(user["tokenFile"]).read_text() if "tokenFile" in user else "")
    if api.server.startswith("https"):
        api.tls = _context_of(cluster, user, path.parent)
    return api


def _own_cluster(namespace: str) -> Cluster:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    return Cluster(
        f"https://{f'[{host}]' if ':' in host else host}:{port}",
        namespace or (IN_POD / "namespace").read_text().strip(),
        (IN_POD / "token").read_text().strip(),
        ssl.create_default_context(cafile=str(IN_POD / "ca.crt")),
    )


def _named(entries: Any, name: Any) -> Any:
    return next(entry for entry in entries if entry["name"] == name)


def _from_plugin(plugin: Mapping[str, Any]) -> dict[str, str]:
    """Return the user's credentials from a cloud's own program."""
    own = {pair["name"]: pair["value"] for pair in plugin.get("env") or []}
    version = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
    own["KUBERNETES_EXEC_INFO"] = json.dumps(version)
    command = [plugin["command"], *(plugin.get("args") or [])]
    try:
        answer = subprocess.run(command, env={**os.environ, **own}, capture_output=True, check=True, timeout=60)
        status = json.loads(answer.stdout)["status"]
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        raise ApiRefused(f"{plugin['command']}, which the kubeconfig names, failed: {error}") from None
    pem = {f"{name}-data": status.get(key) for name, key in PEMS.items()}
    return {"token": status.get("token", "")} | {
        name: base64.b64encode(text.encode()).decode() for name, text in pem.items() if text
    }


PEMS = {"client-certificate": "clientCertificateData", "client-key": "clientKeyData"}


def _context_of(cluster: Mapping[str, Any], user: Mapping[str, Any], folder: Path) -> ssl.SSLContext:
    with tempfile.TemporaryDirectory() as scratch:  # ssl reads client keys from files only

        def file_of(section: Mapping[str, Any], name: str) -> str | None:
            if data := section.get(f"{name}-data"):
                path = Path(scratch) / name
                path.write_bytes(base64.b64decode(data))
                return str(path)
            return str(folder / section[name]) if section.get(name) else None

        context = ssl.create_default_context(cafile=file_of(cluster, "certificate-authority"))
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        if certificate := file_of(user, "client-certificate"):
            context.load_cert_chain(certificate, file_of(user, "client-key"))
        return context
