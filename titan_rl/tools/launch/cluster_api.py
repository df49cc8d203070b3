"""Kubernetes' API over HTTP: finds the cluster as kubectl does, and asks it."""

import base64
import http.client
import json
import math
import os
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from titan_rl.tools.launch.following import SubmissionFailed

IN_POD = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CALL_SECONDS = 60.0
FINAL = (403, 404)  # answers that asking again does not change
FILES = ("certificate-authority", "client-certificate", "client-key", "tokenFile")
"""Keys of a kubeconfig whose paths are relative to its folder."""


class ApiRefused(SubmissionFailed):
    """The API server's own words, and its HTTP status; 0 if it was not reached."""

    def __init__(self, message: str, status: int = 0) -> None:
        super().__init__(message)
        self.status, self.passing = status, status not in FINAL


@dataclass(frozen=True, slots=True)
class Access:
    """Proves to an API server who asks."""

    token: str = field(default="", repr=False)
    tls: ssl.SSLContext | None = None
    ends: float = math.inf  # when the token expires, in seconds since the epoch


@dataclass(slots=True)
class Cluster:
    """An API server, and how to get access to it: anew whenever that has expired."""

    server: str
    namespace: str
    access: Callable[[], Access] = Access
    proxy: str = ""
    _held: Access | None = field(default=None, init=False, repr=False)

    def ask(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        if self._held is None or time.time() >= self._held.ends:
            self._held = self.access()
        try:
            return self._ask(self._held, method, path, body)
        except ApiRefused as error:
            if error.status != 401:
                raise
        self._held = self.access()  # the old one was withdrawn, or has expired by the server's clock
        return self._ask(self._held, method, path, body)

    def _ask(self, access: Access, method: str, path: str, body: Mapping[str, Any] | None) -> bytes:
        headers = {"Accept": "application/json, */*", "Content-Type": "application/json"}
        if access.token:
            headers["Authorization"] = f"Bearer {access.token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.server}{path}", data, headers, method=method)
        handlers: list[urllib.request.BaseHandler] = [urllib.request.HTTPSHandler(context=access.tls)]
        if self.proxy:  # NO_PROXY does not count, as for kubectl
            request.set_proxy(urlsplit(self.proxy).netloc, "http")
            handlers.append(urllib.request.ProxyHandler({}))
        opener = urllib.request.build_opener(*handlers)
        try:
            with opener.open(request, timeout=CALL_SECONDS) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            asked = f"{method} {urlsplit(path).path}"
            raise ApiRefused(f"{asked}: {error.code} {_words(error)}", error.code) from None
        except (OSError, http.client.HTTPException) as error:
            raise ApiRefused(f"{self.server} does not answer: {getattr(error, 'reason', None) or error!r}") from None

    def get(self, path: str) -> Any:
        return json.loads(self.ask("GET", path))

    def create(self, path: str, body: Mapping[str, Any]) -> Any:
        """Create an object. The server refuses fields that it does not know."""
        return json.loads(self.ask("POST", f"{path}?fieldValidation=Strict", body))

    def find(self, path: str) -> Any:
        """Return an object, or None if there is none of that name."""
        try:
            return self.get(path)
        except ApiRefused as error:
            if error.status == 404:
                return None
            raise


def _words(error: urllib.error.HTTPError) -> str:
    """Return the reason in a server's refusal."""
    text = ""
    with suppress(OSError, http.client.HTTPException, ValueError, KeyError, TypeError):
        text = error.read().decode(errors="replace")
        return json.loads(text)["message"]
    return text[:200] or error.reason


def find_cluster(namespace: str = "") -> Cluster:
    """Return the cluster of kubectl's current context, or the one in which this process is a pod."""
    named = [Path(path) for path in os.environ.get("KUBECONFIG", "").split(os.pathsep) if path]
    paths = named or [Path.home() / ".kube/config"]
    found = [path for path in paths if path.is_file()]
    if not found and (IN_POD / "token").is_file():
        return _own_cluster(namespace)
    where = os.pathsep.join(map(str, found or paths))
    if not found:
        raise ApiRefused(f"expected a kubeconfig (KUBECONFIG), found no file {where}")
    try:
        config = _merged([(path, yaml.safe_load(path.read_text()) or {}) for path in found])
        context = config["contexts"][config["current-context"]]["context"]
        cluster = config["clusters"][context["cluster"]]["cluster"]
        user = config["users"][context["user"]]["user"] if context.get("user") else {}
        server, namespace = cluster["server"].rstrip("/"), namespace or context.get("namespace") or "default"
    except OSError as error:
        raise ApiRefused(f"expected a kubeconfig (KUBECONFIG), found {where}: {error.strerror}") from None
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise ApiRefused(f"expected a kubeconfig with a current context in {where}, found {error!r}") from None
    proxy = cluster.get("proxy-url", "")
    if proxy and (urlsplit(proxy).scheme != "http" or "@" in proxy):
        raise ApiRefused(f"expected a proxy-url such as http://HOST:PORT, without a password, in {where}")
    return Cluster(server, namespace, partial(_access, server, cluster, user), proxy)


def _merged(configs: list[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Merge kubeconfigs as kubectl does: of two entries with one name, the first counts."""
    merged: dict[str, Any] = {"contexts": {}, "clusters": {}, "users": {}}
    for path, config in reversed(configs):
        if config.get("current-context"):
            merged["current-context"] = config["current-context"]
        for kind in ("contexts", "clusters", "users"):
            for entry in config.get(kind) or []:
                own = entry.get(kind[:-1]) or {}
                own |= {key: str(path.absolute().parent / own[key]) for key in FILES if own.get(key)}
                merged[kind][entry["name"]] = entry
    return merged


def _own_cluster(namespace: str) -> Cluster:
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], os.environ["KUBERNETES_SERVICE_PORT"]
    server = f"https://{f'[{host}]' if ':' in host else host}:{port}"
    cluster, user = {"certificate-authority": str(IN_POD / "ca.crt")}, {"tokenFile": str(IN_POD / "token")}
    return Cluster(
        server, namespace or (IN_POD / "namespace").read_text().strip(), partial(_access, server, cluster, user)
    )


def _access(server: str, cluster: Mapping[str, Any], user: Mapping[str, Any]) -> Access:
    """Return access as the user of a kubeconfig. Token files are replaced before they expire: each call reads them."""
    if "exec" in user:
        user = _from_plugin(user["exec"])
    try:
        token = user.get("token") or (Path(user["tokenFile"]).read_text().strip() if "tokenFile" in user else "")
        tls = _context_of(cluster, user) if server.startswith("https") else None
    except (OSError, ValueError) as error:
        raise ApiRefused(f"expected readable certificates and tokens in the kubeconfig, found: {error}") from None
    return Access(token, tls, user.get("ends", math.inf))


def _from_plugin(plugin: Mapping[str, Any]) -> dict[str, Any]:
    """Return the user's credentials from a cloud's own program, and when they end."""
    own = {pair["name"]: pair["value"] for pair in plugin.get("env") or []}
    version = {"apiVersion": plugin["apiVersion"], "kind": "ExecCredential", "spec": {"interactive": False}}
    own["KUBERNETES_EXEC_INFO"] = json.dumps(version)
    command = [plugin["command"], *(plugin.get("args") or [])]
    try:
        answer = subprocess.run(
            command, env={**os.environ, **own}, capture_output=True, check=True, timeout=60, stdin=subprocess.DEVNULL
        )
        status = json.loads(answer.stdout)["status"]
        ends = status.get("expirationTimestamp")
        until = datetime.fromisoformat(ends).timestamp() if ends else math.inf
    except (OSError, subprocess.SubprocessError, ValueError, KeyError) as error:
        *_, said = ["", *(getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()]
        why = said if isinstance(error, subprocess.CalledProcessError) and said else error
        raise ApiRefused(f"{plugin['command']}, which the kubeconfig names, failed: {why}") from None
    pem = {f"{name}-data": status.get(key) for name, key in PEMS.items()}
    return {"token": status.get("token", ""), "ends": until} | {
        name: base64.b64encode(text.encode()).decode() for name, text in pem.items() if text
    }


PEMS = {"client-certificate": "clientCertificateData", "client-key": "clientKeyData"}


class _NamedContext(ssl.SSLContext):
    """Expects a server's certificate to have this name instead of the address, if one is set."""

    server_name = ""

    def wrap_socket(self, sock: Any, *args: Any, server_hostname: Any = None, **keys: Any) -> ssl.SSLSocket:
        return super().wrap_socket(sock, *args, server_hostname=self.server_name or server_hostname, **keys)


def _context_of(cluster: Mapping[str, Any], user: Mapping[str, Any]) -> ssl.SSLContext:
    context = _NamedContext(ssl.PROTOCOL_TLS_CLIENT)
    context.server_name = cluster.get("tls-server-name", "")
    with tempfile.TemporaryDirectory() as scratch:  # ssl reads client keys from files only

        def file_of(section: Mapping[str, Any], name: str) -> str | None:
            data = section.get(f"{name}-data")
            if data:
                path = Path(scratch) / name
                path.write_bytes(base64.b64decode(data))
                return str(path)
            return section.get(name)

        authority = file_of(cluster, "certificate-authority")
        if authority:
            context.load_verify_locations(authority)
        else:
            context.load_default_certs()
        if cluster.get("insecure-skip-tls-verify"):
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        certificate = file_of(user, "client-certificate")
        if certificate:
            context.load_cert_chain(certificate, file_of(user, "client-key"))
        return context
