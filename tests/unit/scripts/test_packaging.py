"""The distributions of a release, the wheel that pip builds, an install of it, and an editable install. No network."""

import ast
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import release
import yaml
from packaging.metadata import Metadata

import titan_rl
from titan_rl.config.toml import shipped

ROOT = Path(__file__).parents[3]
CODE = ("titan_rl", "actors", "meshes", "kernels")
LINKED = ("actors", "meshes", "kernels", "train_configs")
DRY_RUN = ("-m", "titan_rl.run", "--config", "grpo_llama.toml", "--dry-run")


def python(executable: Path | str, *args: str, cwd: Path | None = None) -> str:
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([executable, *args], cwd=cwd, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{args}: {done.stdout[-2000:]}{done.stderr[-4000:]}"
    return done.stdout


def bare_environment(folder: Path) -> Path:
    """Return the Python of a new venv that sees this environment's packages, but not its titan_rl."""
    venv.create(folder, symlinks=True)
    own = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (own / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    return folder / "bin/python"


def install(executable: Path, *what: str) -> None:
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--ignore-installed", "--disable-pip-version-check")
    python(sys.executable, "-m", "pip", "--python", str(executable), "install", *options, *what)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository: a build writes into its source."""
    left_out = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "outputs")
    return shutil.copytree(ROOT, tmp_path_factory.mktemp("source") / "titan_rl", symlinks=True, ignore=left_out)


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check")
    python(sys.executable, "-m", "pip", "wheel", *options, "--wheel-dir", str(folder), str(source))
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_linked_folders_inside_titan_rl(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"titan_rl"}
    files = [path for folder in LINKED for kind in ("*.py", "*.toml") for path in (ROOT / folder).rglob(kind)]
    assert {f"titan_rl/{path.relative_to(ROOT)}" for path in files} <= names
    assert not [name for name in names if "__pycache__" in name]


def test_an_installed_wheel_runs_from_anywhere(wheel: Path, tmp_path: Path) -> None:
    executable = bare_environment(tmp_path / "venv")
    install(executable, str(wheel))
    where = python(executable, "-c", "import titan_rl; print(titan_rl.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(tmp_path / "venv")
    python(executable, *DRY_RUN, cwd=tmp_path)
    program = tmp_path / "venv/bin/titan_rl"
    assert "--config" in python(program, "--help", cwd=tmp_path)
    listed = set(python(program, "run", "--help", cwd=tmp_path).split())
    assert set(shipped()) <= listed


def test_an_editable_install_runs_from_anywhere(source: Path, tmp_path: Path) -> None:
    executable = bare_environment(tmp_path / "venv")
    install(executable, "--editable", str(source))
    where = python(executable, "-c", "import titan_rl; print(titan_rl.__file__)", cwd=tmp_path)
    assert Path(where.strip()).is_relative_to(source)
    python(executable, *DRY_RUN, cwd=tmp_path)


def test_a_root_folder_is_no_package() -> None:
    """`kernels/__init__.py` would shadow the package of that name that transformers imports."""
    assert [folder for folder in LINKED if (ROOT / folder / "__init__.py").exists()] == []
    for folder in LINKED:
        assert (ROOT / "titan_rl" / folder).readlink() == Path("..") / folder


REPOSITORY = "https://example.org/owner/name"


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("released") / "dist"
    python(sys.executable, str(ROOT / "scripts/release.py"), str(folder), "--repository", REPOSITORY)
    return folder


def test_a_release_has_what_the_wheel_has(distributions: Path, wheel: Path) -> None:
    names = {path.suffix: path for path in distributions.iterdir()}
    assert sorted(names) == [".gz", ".whl"]
    built = set(zipfile.ZipFile(names[".whl"]).namelist())
    assert built == set(zipfile.ZipFile(wheel).namelist())
    tracked = [path for folder in CODE for path in (ROOT / folder).rglob("*") if path.is_file()]
    data = {path for path in tracked if path.suffix not in (".py", ".pyc")}
    assert {str(path.relative_to(ROOT)) for path in data if path.is_relative_to(ROOT / "titan_rl")} <= built
    with tarfile.open(names[".gz"]) as source:
        assert not [member for member in source if member.issym() or member.islnk()]
        held = {member.name.partition("/")[2] for member in source if member.isfile()}
    assert {name for name in built if name.startswith("titan_rl/")} | {"LICENSE", "README.md", "pyproject.toml"} <= held


def test_the_metadata_of_a_release_is_valid_and_leads_somewhere(distributions: Path) -> None:
    assert [problem for path in distributions.iterdir() for problem in release.problems_of(path)] == []
    wheel, source = (release.metadata_of(next(distributions.glob(f"*{kind}"))) for kind in (".whl", ".gz"))
    assert wheel == source
    found = Metadata.from_email(wheel)
    assert (found.name, str(found.version), found.license_expression) == (
        "titan-rl",
        titan_rl.__version__,
        "BSD-3-Clause",
    )
    assert found.project_urls
    assert set(found.project_urls) == {"Repository", "Documentation", "Changelog", "Issues"}
    assert {url for url in found.project_urls.values() if not url.startswith(REPOSITORY)} == set()
    assert found.keywords
    assert {"cpu", "cuda"} <= set(found.provides_extra or ())
    links = re.findall(r"\]\(([^)]+)\)", found.description or "")
    assert [link for link in links if not link.startswith("https://")] == []
    assert f"{REPOSITORY}/blob/main/docs/design.md#the-floor-plan" in links
    assert f"{REPOSITORY}/raw/main/docs/images/grpo_smollm2.svg" in links


@pytest.mark.parametrize(
    ("pattern", "instead", "problem"),
    [
        (r"^Description-Content-Type: .*$", "", "description_content_type: expected text/markdown, found none"),
        (
            r"^(Description-Content-Type): .*$",
            r"\1: text/html",
            "'description-content-type' must be one of",
        ),
        (r"(?s)\n\n.*", "\n\n", "expected a description, found none"),
        (r"^(License-Expression): .*$", r"\1: MIT-like", "'MIT-like'"),
        (r"^(Version): .*$", r"\1: new", "'new' is invalid for 'version'"),
        (r"^(Version): .*$", r"\1: 99.0", "as the file is named, found titan-rl 99.0"),
        (r"^(Requires-Dist): torch.*$", r"\1: torch ==", "'torch ==' is invalid for 'requires-dist'"),
        (r"^(Name: .*)$", r"\1\nFlavour: x", "flavour"),
        (r"^(Metadata-Version): .*$", r"\1: 1.2", "license-expression introduced in metadata version 2.4, not 1.2"),
    ],
)
def test_metadata_that_an_index_refuses_are_found(
    pattern: str, instead: str, problem: str, distributions: Path, tmp_path: Path
) -> None:
    (built,) = distributions.glob("*.whl")
    text, number = re.subn(pattern, instead, release.metadata_of(built).decode(), count=1, flags=re.MULTILINE)
    assert number == 1
    faulty = tmp_path / built.name
    with zipfile.ZipFile(faulty, "w") as wheel:
        wheel.writestr(f"titan_rl-{titan_rl.__version__}.dist-info/METADATA", text)
    assert problem in "; ".join(release.problems_of(faulty))


def test_a_tag_of_another_version_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    version = titan_rl.__version__
    found = list(release.disagreements("v99"))
    assert found[0] == f"--tag: expected v{version}, the version of titan_rl/__init__.py, found v99"
    assert not [each for each in found if each.startswith("CITATION.cff")]


def test_a_workflow_calls_what_exists() -> None:
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            if "uses" in job:
                assert (ROOT / job["uses"]).is_file()
                continue
            commands = [step["run"].split() for step in job["steps"] if "run" in step]
            called = [word for words in commands for word in words if word.startswith(("scripts/", ".ci/"))]
            assert [word for word in called if not (ROOT / word).is_file()] == []


def imports() -> Iterator[tuple[str, Path]]:
    for path in (path for folder in CODE for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((name.name.split(".")[0], path) for name in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.split(".")[0], path


def test_every_import_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needs = (*project["dependencies"], *extras["cpu"], *extras["cuda"], *extras["math"], *extras["reasoning"])
    needs += (*extras["wandb"], *extras["trackio"], *extras["mlflow"])
    declared = {re.split(r"[=<>!\[ ]", need)[0] for need in needs}
    optional = {"math_verify": ["math-verify"], "reasoning_gym": ["reasoning-gym"]}  # they need not be here
    optional |= {"wandb": ["wandb"], "trackio": ["trackio"], "mlflow": ["mlflow-skinny"]}
    providers = {**importlib.metadata.packages_distributions(), **optional}
    undeclared = {
        f"{path.relative_to(ROOT)}: {module}"
        for module, path in imports()
        if module not in sys.stdlib_module_names | {"titan_rl"} and declared.isdisjoint(providers.get(module, ()))
    }
    assert undeclared == {
        "titan_rl/ext/agents/verifiers_agent.py: verifiers",  # it runs in an environment.python that has it
        "titan_rl/tools/fetch/convert_gguf.py: gguf",  # it runs in a process that has a fetched wheel on its path
    }
