"""A model hub on loopback, which speaks the part of the Hub's protocol that huggingface_hub calls for models."""

import base64
import hashlib
import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_token_of_the_test"
ROOT = Path(__file__).parents[2]
CALLS = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from titan_rl.tools import export
from titan_rl.tools.fetch.__main__ import main
for line in sys.stdin:
    name, *argv = sys.argv[:] = json.loads(line)
    with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
        code = main() if name == "fetch" else export.main(argv)
    print(json.dumps([code, out.getvalue(), errors.getvalue()]), flush=True)
"""
"""Calls `fetch` and `export` in one process, which imports their client once, under this environment."""
LARGE = ".safetensors"  # ends the names of files that go through large file storage, as on the Hub


@dataclass
class HubRepository:
    private: bool = False
    gated: bool = False
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)

    def commit(self, files: Mapping[str, bytes]) -> str:
        """Add or replace files. Return the hash of the commit."""
        there = {**(self.commits[self.head] if self.commits else {}), **files}
        hashed = hashlib.sha1(str(len(self.commits)).encode())
        for name, content in sorted(there.items()):
            hashed.update(name.encode() + content)
        self.commits[hashed.hexdigest()] = there
        return hashed.hexdigest()

    @property
    def head(self) -> str:
        return list(self.commits)[-1]


class LoopbackHub:
    """Repositories by name, and the `objects` of large file storage.

    `refused`: a status for every request; `cut`: files whose next download ends half-way; `lost`: files that commits
    list and that are not there; `requests`: all that came, as "METHOD path".
    """

    def __init__(self) -> None:
        self.repositories = dict[str, HubRepository]()
        self.objects = dict[str, bytes]()
        self.refused = 0
        self.cut = set[str]()
        self.lost = set[str]()
        self.requests = list[str]()
        self.url = ""

    def environment(self, home: Path, token: str = TOKEN) -> dict[str, str]:
        """Return the environment of a client that knows this hub only, with a folder for its own files."""
        own = {"HF_ENDPOINT": self.url, "HF_HOME": str(home), "HF_TOKEN": token, "HF_HUB_OFFLINE": "0"}
        plain = {"HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        return own | plain | {"NO_PROXY": "*", "TITAN_RL_CACHE": str(home / "titan_rl")}

    @contextmanager
    def client(self, home: Path, **changed: str) -> Iterator["HubClient"]:
        """Start a process that calls commands against this hub."""
        env = {**os.environ, **self.environment(home), "PYTHONPATH": str(ROOT), **changed}
        process = subprocess.Popen(
            [sys.executable, "-c", CALLS], env=env, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            yield HubClient(process)
        finally:
            process.kill()
            process.communicate()

    @contextmanager
    def serving(self) -> Iterator["LoopbackHub"]:
        server = ThreadingHTTPServer(("127.0.0.1", 0), type("HubRequests", (HubRequest,), {"hub": self}))
        self.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
        thread.start()
        try:
            yield self
        finally:
            server.shutdown()
            server.server_close()
            thread.join()


@dataclass
class HubClient:
    process: subprocess.Popen[str]

    def __call__(self, *argv: object) -> tuple[int, str, str]:
        """Call a command. Return its exit code, output and messages, which never have the token."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps([str(each) for each in argv]) + "\n")
        self.process.stdin.flush()
        code, out, errors = json.loads(self.process.stdout.readline())
        assert TOKEN not in out + errors
        return code, out, errors


class HubRequest(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: `requests` has them."""

    def do_GET(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if not self._admitted(path):
            return
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+))?", path):
            self._facts(*found.groups())
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            self._file(*found.groups())
        else:
            self._answer(404, {})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        path, body = unquote(urlsplit(self.path).path), self.rfile.read(int(self.headers["Content-Length"]))
        if not self._admitted(path):
            return
        if path == "/api/validate-yaml":
            self._answer(200, {"errors": [], "warnings": []})
        elif not self._known():
            self._answer(401, {"error": "Invalid username or password."})
        elif path == "/api/repos/create":
            self._create(json.loads(body))
        elif found := re.fullmatch(r"/api/models/(.+)/preupload/main", path):
            files = [self._mode(each["path"]) for each in json.loads(body)["files"]]
            self._answer(200, {"files": files})
        elif path.endswith(".git/info/lfs/objects/batch"):
            objects = [self._transfer(each) for each in json.loads(body)["objects"]]
            self._answer(200, {"transfer": "basic", "objects": objects})
        elif found := re.fullmatch(r"/api/models/(.+)/commit/main", path):
            self._commit(found[1], [json.loads(line) for line in body.splitlines()])
        else:
            self._answer(404, {})

    def do_PUT(self) -> None:
        name = self.path.rpartition("/")[2]
        content = self.rfile.read(int(self.headers["Content-Length"]))
        if not self._admitted(self.path):
            return
        sound = hashlib.sha256(content).hexdigest() == name
        self.hub.objects |= {name: content} if sound else {}
        self._answer(200 if sound else 400, {})

    def _admitted(self, path: str) -> bool:
        self.hub.requests.append(f"{self.command} {path}")
        if self.hub.refused:
            self._answer(self.hub.refused, {"error": "refused"})
        return not self.hub.refused

    def _known(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self, name: str, revision: str) -> tuple[HubRepository, str] | None:
        """Return a repository and the commit of a revision; answer if there is none."""
        there = self.hub.repositories.get(name)
        if there is None or (there.private and not self._known()):
            self._answer(404 if self._known() else 401, {"error": "not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        commits = [each for each in there.commits if each == revision] or [there.head] * (revision == "main")
        if not commits:
            self._answer(404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
            return None
        return there, commits[0]

    def _facts(self, name: str, kind: str | None, revision: str | None) -> None:
        found = self._repository(name, revision or "main")
        if found is None:
            return
        there, commit = found
        files = there.commits[commit]
        if kind == "tree":
            rows = [
                {"type": "file", "path": path, "size": len(content), "oid": _oid(content)}
                for path, content in files.items()
            ]
            self._answer(200, rows)
        else:
            siblings = [{"rfilename": path, "size": len(content)} for path, content in files.items()]
            self._answer(200, {"id": name, "sha": commit, "private": there.private, "siblings": siblings})

    def _file(self, name: str, revision: str, path: str) -> None:
        found = self._repository(name, revision)
        if found is None:
            return
        there, commit = found
        content = there.commits[commit].get(path)
        if there.gated and not self._known():
            self._answer(401, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
        elif content is None or path in self.hub.lost:
            self._answer(404, {"error": "no entry"}, {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": commit})
        else:
            self._send(path, content, {"ETag": f'"{_oid(content)}"', "X-Repo-Commit": commit})

    def _send(self, path: str, content: bytes, headers: dict[str, str]) -> None:
        """Send a file, or the rest of it from an offset."""
        begin = int((re.match(r"bytes=(\d+)-", self.headers.get("Range") or "") or [0, 0])[1])
        if begin:
            headers["Content-Range"] = f"bytes {begin}-{len(content) - 1}/{len(content)}"
        self._begin(206 if begin else 200, len(content) - begin, headers)
        if self.command == "GET" and path in self.hub.cut:
            self.hub.cut.remove(path)
            self.wfile.write(content[begin : (begin + len(content)) // 2])
            self.close_connection = True
        elif self.command == "GET":
            self.wfile.write(content[begin:])

    def _create(self, wanted: Mapping[str, Any]) -> None:
        name = f"{wanted['organization']}/{wanted['name']}"
        if name in self.hub.repositories:
            self._answer(409, {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"})
            return
        made = self.hub.repositories[name] = HubRepository(private=wanted.get("visibility") == "private")
        made.commit({".gitattributes": b"*.safetensors filter=lfs\n"})
        self._answer(200, {"url": f"{self.hub.url}/{name}"})

    def _mode(self, path: str) -> dict[str, Any]:
        mode = "lfs" if path.endswith(LARGE) else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False}

    def _transfer(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Return where an object is to be put, unless it is there already."""
        upload = {"upload": {"href": f"{self.hub.url}/objects/{wanted['oid']}"}}
        there = wanted["oid"] in self.hub.objects
        return {"oid": wanted["oid"], "size": wanted["size"], **({} if there else {"actions": upload})}

    def _commit(self, name: str, lines: list[dict[str, Any]]) -> None:
        files = dict[str, bytes]()
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.hub.objects[value["oid"]]
        commit = self.hub.repositories[name].commit(files)
        self._answer(200, {"success": True, "commitOid": commit, "commitUrl": f"{self.hub.url}/{name}/commit/{commit}"})

    def _answer(self, status: int, body: Any, headers: Mapping[str, str] | None = None) -> None:
        content = json.dumps(body).encode()
        self._begin(status, len(content), {"Content-Type": "application/json", **(headers or {})})
        if self.command != "HEAD":
            self.wfile.write(content)

    def _begin(self, status: int, nbytes: int, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for key, value in {**headers, "Content-Length": str(nbytes)}.items():
            self.send_header(key, value)
        self.end_headers()


def _oid(content: bytes) -> str:
    """Return git's name of a file's content."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
