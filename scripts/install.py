"""Installs titan_rl and its dependencies into the Python that runs this. scripts/setup calls it with .venv's Python.

    .venv/bin/python -I scripts/install.py ENGINE DEV LOG      ENGINE is cpu or cuda, DEV is dev or empty

uv does it if it is on PATH or if pip can install it; otherwise, or if uv fails, pip. Both find packages by pip's
configuration. Default PyPI has only torch's CUDA build: if the CPU build is not found, it comes from PyTorch's index,
or from the one in TORCH_INDEX. INSTALLER=pip leaves uv out. Needs nothing but Python's standard library and pip.
"""

import ast
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import threading
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = Path(sysconfig.get_path("purelib"))
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input")
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
# The default builds of these packages are for CUDA or for another torch. If one fails to import, transformers does too.
MEDIA = ("torchvision", "torchaudio", "torchcodec")
# Packages that vLLM, xgrammar and mistral_common require, and that text models on a CPU do not import.
CPU_UNUSED = (*MEDIA, "opencv-python-headless")
TESTS_ONLY = "triton"  # a gigabyte: on a CPU, only the tests of kernels run it, in its interpreter
# pip's settings, and the environment variables that tell uv the same. Their values may hold passwords: environment
# variables are private, arguments are not.
SETTINGS = {
    "index-url": ("UV_DEFAULT_INDEX", " "),
    "extra-index-url": ("UV_INDEX", " "),
    "find-links": ("UV_FIND_LINKS", ","),
    "trusted-host": ("UV_INSECURE_HOST", " "),
    "constraint": ("UV_CONSTRAINT", " "),
    "cert": ("SSL_CERT_FILE", ""),
    "client-cert": ("SSL_CLIENT_CERT", ""),
    "proxy": ("ALL_PROXY", ""),
    "timeout": ("UV_HTTP_TIMEOUT", ""),
}
TICK, REMIND = 0.2, 20.0  # seconds between two drawings on a terminal; between two plain lines
TAIL = 20  # lines of the log that a failure shows


MISSING = ("No solution found", "No matching distribution found")  # uv's and pip's words where no index has a package


@dataclass(slots=True)
class Installer:
    """Runs uv or pip; their output goes to the log."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    said: str = ""  # the output of the last call

    def install(self, *arguments: str, **changed: str) -> bool:
        """Return True if it succeeds. `changed` are environment variables: they are private, arguments are not."""
        before = self.log.stat().st_size if self.log.exists() else 0
        code = run([*self.command, *arguments], self.name, self.log, {**self.environment, **changed})
        with self.log.open("rb") as log:
            log.seek(before)
            self.said = log.read().decode(errors="replace")
        return code == 0

    @property
    def reason(self) -> str:
        """Return the line of its last output that tells why it failed: the first error, else the last line."""
        lines = [line.strip(" \u00d7\n") for line in self.said.splitlines() if line.strip()]
        errors = [line for line in lines if line.lower().startswith("error") or line.startswith(MISSING)]
        return public((errors or lines[-1:] or ["it said nothing"])[0])


def main(engine: str, dev: str, log: Path) -> int:
    project = f".[{engine},{dev}]" if dev else f".[{engine}]"
    path = None if os.environ.get("INSTALLER") == "pip" else shutil.which("uv")
    ensure_pip(path, log)
    path = path or find_uv(log)
    settings = pip_settings()
    offline = settings.get("no-index", "0").lower() in ("1", "true", "yes", "on")
    pip = Installer("pip", (*PIP, "install"), os.environ, log)
    uv = None
    if path:
        environment = uv_environment(settings, os.environ)
        uv = Installer("uv", uv_command(path, offline), environment | writable_cache(environment, log), log)
    torch = cpu_torch() if engine == "cpu" else ""
    index = torch_index(uv or pip, torch, offline)
    if not (uv and install_with_uv(uv, project, engine, dev, torch, index)):
        indexes = f"{settings.get('extra-index-url', '')} {index}" if index else ""
        if not install_with_pip(pip, project, torch, indexes):
            extra = f"--extra-index-url {public(index)} " if index else ""
            python, root = shlex.quote(sys.executable), shlex.quote(str(ROOT))
            say(f"the same by hand: cd {root} && {python} -m pip install {extra}--editable '{project}'")
            return 1
    if not dev:  # which has it
        install_reasoning(uv or pip, log)
    return remove_broken_media(log)


def install_reasoning(installer: Installer, log: Path) -> None:
    """Install the package of task.name = "reasoning_gym". Other tasks do without it, so a failure is only reported."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needs = extras.get("reasoning", [])
    if needs and not installer.install(*needs):
        say(f"{' '.join(needs)} could not be installed, so grpo_smollm2.toml cannot run: {installer.reason}")
        say(f"if pycosat could not be compiled, install a C compiler and Python's headers; the log: {log}")


def cpu_torch() -> str:
    """Return the requirement of torch's CPU build, of the version in pyproject.toml."""
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    return next(f"{need}+cpu" for need in needs if re.fullmatch(r"torch==[0-9.]+", need))


def torch_index(installer: Installer, torch: str, offline: bool) -> str:
    """Return the index that has `torch`, or "" if it is installed, or found where the installer looks anyway."""
    if f"torch=={version('torch')}" == torch or not torch:
        return ""
    if installer.install("--dry-run", "--no-deps", torch):  # reads an index page, and metadata
        return ""
    if not any(words in installer.said for words in MISSING):  # the installation will fail alike, and name the reason
        return ""
    index = os.environ.get("TORCH_INDEX") or TORCH_INDEX
    if offline:
        say(f"found no {torch}, and pip may use no index: get its wheel from {public(index)} into a find-links folder")
        return ""
    say(f"found no {torch} where pip looks (default PyPI has only the CUDA build): taking torch from {public(index)}")
    return index


def ensure_pip(uv: str | None, log: Path) -> None:
    """Install the pip that comes with Python, unless there is one."""
    bundled = [str(wheel) for wheel in Path(sysconfig.get_path("stdlib")).glob("ensurepip/_bundled/pip-*.whl")]
    offline = ("--python", sys.executable, "--no-index", "--no-deps")
    if version("pip") or (uv and bundled and run([uv, "pip", "install", *offline, *bundled], "uv", log) == 0):
        return
    run([sys.executable, "-m", "ensurepip"], "pip", log)


def find_uv(log: Path) -> str | None:
    """Return the uv of this environment, which pip installs unless there is one."""
    if os.environ.get("INSTALLER") == "pip":
        return None
    own = Path(sys.executable).with_name("uv")
    if own.exists():
        return str(own)
    once = ("--retries", "1", "--timeout", "15")
    if run([*PIP, "install", "--quiet", *once, "uv"], "pip", log) == 0 and own.exists():
        return str(own)
    say("installing with pip, which takes longer: uv is not on PATH, and pip cannot install it")
    return None


def install_with_uv(uv: Installer, project: str, engine: str, dev: str, torch: str, index: str) -> bool:
    log = uv.log
    left_out = [] if engine == "cuda" else [*CPU_UNUSED, *([] if dev else [TESTS_ONLY])]
    overrides = log.with_name("titan_rl.overrides")
    overrides.write_text("".join(f"{name}; sys_platform == 'never'\n" for name in left_out))
    options = ["--override", str(overrides)]
    if os.environ.get("PYTHONDONTWRITEBYTECODE"):
        options.append("--compile-bytecode")  # otherwise each rank compiles again at every start
    # Only torch comes from its index: the second call finds it installed, and asks the usual ones for the rest.
    found = not index or uv.install("--no-deps", torch, UV_DEFAULT_INDEX=index)
    if found and uv.install(*options, "--editable", project):
        return True
    say(f"uv failed, trying pip ({uv.reason}; all of it: {log})")
    return False


def uv_command(path: str, offline: bool) -> list[str]:
    return [path, "pip", "install", "--python", sys.executable, *(["--no-index"] if offline else [])]


def install_with_pip(pip: Installer, project: str, torch: str, indexes: str) -> bool:
    """`indexes` replace the extra ones of pip's configuration, unless they are ""."""
    changed = {"PIP_EXTRA_INDEX_URL": indexes} if indexes else {}
    # torch first: where it cannot be found, this fails at once and names it.
    if (not torch or pip.install(torch, **changed)) and pip.install("--editable", project, **changed):
        return True
    show_failure("install", pip.log)
    return False


def show_failure(verb: str, log: Path) -> None:
    print(*log.read_text(errors="replace").splitlines()[-TAIL:], sep="\n", file=sys.stderr)
    say(f"pip {verb} failed (docs/quickstart.md has the usual causes). The whole log: {log}")


def remove_broken_media(log: Path) -> int:
    broken = [name for name in MEDIA if version(name) and not imports(name)]
    if broken:
        if run([*PIP, "uninstall", "--yes", *broken], "pip", log) != 0:
            show_failure("uninstall", log)
            return 1
        say(f"removed {', '.join(broken)}: built for another torch; text models do not need them")
    return 0


def version(name: str) -> str:
    """Return the version of an installed package, or ""."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def imports(name: str) -> bool:
    return subprocess.run([sys.executable, "-Ic", f"import {name}"], capture_output=True, check=False).returncode == 0


def pip_settings() -> dict[str, str]:
    """Return pip's settings for `pip install`: from its files and its environment variables, which win."""
    listed = subprocess.run([*PIP, "config", "list"], capture_output=True, text=True, check=False).stdout
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in listed.splitlines():
        key, equals, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if equals and section in found:
            found[section][name] = str(ast.literal_eval(value))
    return found["global"] | found["install"] | found[":env:"]


def uv_environment(settings: Mapping[str, str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` with pip's settings in uv's terms. Variables of uv that are set already stay."""
    own = {"UV_INDEX_STRATEGY": "unsafe-best-match", "UV_PYTHON_DOWNLOADS": "never"}  # best match: as pip chooses
    for name, (variable, separator) in SETTINGS.items():
        if value := settings.get(name, "").strip():
            own[variable] = separator.join(value.split()) if separator else value
    return own | dict(environment)


def writable_cache(environment: Mapping[str, str], log: Path) -> dict[str, str]:
    """Return a folder beside the log as uv's cache where the usual one cannot be written: uv does nothing without."""
    home = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    folder = Path(environment.get("UV_CACHE_DIR") or Path(home, "uv"))
    if not (why := unwritable(folder)):
        return {}
    own = log.with_name("uv-cache")
    say(f"uv's cache {folder} cannot be written ({why}): taking {own}")
    return {"UV_CACHE_DIR": str(own)}


def unwritable(folder: Path) -> str:
    """Return why no file can be written in a folder, which is made if it does not exist, or ""."""
    if folder.parts[0] == "~":
        return "this user has no home folder"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**16))
    except OSError as error:
        return error.strerror or str(error)
    return ""


@dataclass(slots=True)
class InstallProgress:
    """Progress of an installer, read from its output."""

    installer: str
    total: int = 0  # packages to install, once that is known
    before: int = 0  # packages that were installed when it began
    found: int = 0  # by pip so far
    pending: list[str] = field(default_factory=list)  # downloads and builds
    finished: int = 0
    installing: bool = False

    def read_line(self, line: str) -> None:
        match line.split():
            case ["Resolved", count, *_] if count.isdecimal():
                self.total = int(count)
            case ["Downloading" | "Building", name, *_] if self.installer == "uv":
                self.pending.append(name)
            case ["Downloaded" | "Built", name, *_] if name in self.pending:
                self.pending.remove(name)
                self.finished += 1
            case ["Prepared", *_]:
                self.installing = True
            case ["Collecting", name, *_]:
                self.found += 1
                self.pending = [re.split(r"[^\w.-]", name)[0]]
            case ["Installing", "collected", "packages:", *names]:
                self.installing, self.total = True, len(names)

    def describe(self, installed: int) -> str:
        if self.installing:
            done = min(self.total, max(0, installed - self.before))
            return f"{self.installer}: {done} of {self.total} packages installed"
        now = ", ".join(self.pending[:3]) + ", ..." * (len(self.pending) > 3)
        if self.found:
            return f"{self.installer}: {self.found} packages found, now {now}"
        if self.pending or self.finished:
            fetched = f"{self.finished} of {self.finished + len(self.pending)} fetched"
            return f"{self.installer}: {self.total} packages, {fetched}" + (f", now {now}" if now else "")
        return f"{self.installer}: {self.total} packages" if self.total else f"{self.installer}: choosing versions"


def run(command: Sequence[str], title: str, log: Path, environment: Mapping[str, str] | None = None) -> int:
    """Run a command in the checkout; write its output to the log, and show its progress meanwhile."""
    progress = InstallProgress(title, before=count_packages())
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
    except OSError as error:
        with log.open("a") as file:
            print(error, file=file)
        return 1

    def read_output() -> None:
        assert process.stdout
        with log.open("a") as file:
            for line in process.stdout:
                file.write(line)
                file.flush()
                progress.read_line(line)

    reader = threading.Thread(target=read_output)
    reader.start()
    show_progress(progress, reader)
    return process.wait()


def show_progress(progress: InstallProgress, reader: threading.Thread) -> None:
    """Until the reader ends, redraw one line on a terminal; elsewhere print one every REMIND seconds."""
    live = sys.stderr.isatty() and os.environ.get("TERM") not in (None, "dumb") and not os.environ.get("CI")
    began = reminded = time.monotonic()
    while True:
        reader.join(TICK)
        if not reader.is_alive():
            break
        now = time.monotonic()
        if not live and now - reminded < REMIND:
            continue
        text = f"titan_rl: {progress.describe(count_packages())}, {now - began:.0f} s"
        if live:
            sys.stderr.write(f"\r\x1b[K{text[: shutil.get_terminal_size().columns - 1]}")
            sys.stderr.flush()
        else:
            print(text, file=sys.stderr, flush=True)
            reminded = now
    if live:
        sys.stderr.write("\r\x1b[K")
        sys.stderr.flush()


def count_packages() -> int:
    return sum(1 for _ in PACKAGES.glob("*.dist-info"))


def public(url: str) -> str:
    """Return the address without its password."""
    return re.sub(r"//[^/]*@", "//***@", url)


def say(text: str) -> None:
    print(f"titan_rl: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
    except KeyboardInterrupt:
        sys.exit(130)
