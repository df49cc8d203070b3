"""Refusals of [environment] before a run starts."""

import importlib
import sys
from pathlib import Path

import pytest
from aiohttp import web

from support.chat_endpoint import answering
from support.checked_configs import KUHN, SEATS, config
from titan_rl.config.sections import Config
from titan_rl.config.toml import to_toml
from titan_rl.ext.agents.endpoint_seats import endpoint_problems, endpoints_of
from titan_rl.ext.agents.openings import first_prompt
from titan_rl.ext.run_plan.describe import environments
from titan_rl.preflight import probe
from titan_rl.preflight.checks import problems
from titan_rl.wire.errors import RunError

STEPS = "class Env:\n    def step(self, reply): return '', 1.0, True, {}\n"
CALC = '[task]\nname = "calc"\n[environment]\nname = "calc"\n[eval]\nsize = 16\n'

DEAD = '{url = "http://127.0.0.1:9/v1", model = "m"}'
"""An endpoint without a server."""


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('[task]\nname = "calc"', 'environment.name: expected "calc" for task.name = "calc", found ""'),
        ('[environment]\nname = "hunt"', 'task.name: expected "hunt" for environment.name = "hunt", found "addition"'),
        (
            CALC + "[algorithm]\nname = 'sft'\n[cold_start]\nsteps = 0",
            "",
        ),
        (
            '[environment]\nname = "no_such:Thing"',
            "environment.name = 'no_such:Thing': ModuleNotFoundError: No module named 'no_such'",
        ),
        (
            CALC.replace("[eval]", "turn_seconds = 9\nrollout_seconds = 8\n[eval]"),
            "environment.turn_seconds: expected at most environment.rollout_seconds = 8, found 9",
        ),
        (
            CALC.replace("[eval]", "lockstep = true\n[rollout]\nmax_staleness_steps = 1\n[eval]"),
            "environment.lockstep: expected false, because the rollouts of several steps are in flight",
        ),
        (
            CALC.replace("[eval]", "max_tokens = 300\n[eval]"),
            "environment.max_tokens: expected at most training.seq_len = 256, found 300",
        ),
        (
            CALC + "[cold_start]\nsteps = 3\n[rollout]\nmax_new_tokens = 8\n[training]\nseq_len = 32",
            "training.seq_len: expected at least 40, the longest demonstration of calc with its prompt, found 32",
        ),
        (
            CALC.replace("[task]", '[task]\nagent = "os:getcwd"'),
            'task.agent: expected "", because environment.name = "calc" drives the rollouts, found "os:getcwd"',
        ),
        ('[task]\nname = "calc"\nagent = "os:getcwd"\n[eval]\nsize = 16', ""),
        (
            '[environment]\nseats = ["a", "b"]',
            'environment.seats: expected [], because environment.name and task.agent are empty, found ["a", "b"]',
        ),
        (
            CALC.replace("[eval]", 'seats = ["a", "b"]\n[eval]'),
            'environment.seats: expected [], because calc has one player, found ["a", "b"]',
        ),
        (
            KUHN + 'seats = ["first", "first"]',
            'environment.seats: expected at most 64 names, each once, found ["first", "first"]',
        ),
        (KUHN + 'seats = ["a b"]', "environment.seats: expected names of letters, digits, - and _, found 'a b'"),
        (
            KUHN + SEATS + 'frozen_seats = ["third"]',
            'environment.frozen_seats: expected some of environment.seats = ["first", "second"], found ["third"]',
        ),
        (
            KUHN + SEATS + 'frozen_seats = ["first", "second"]',
            "environment.frozen_seats: expected not all of environment.seats, because one has to learn",
        ),
        (
            KUHN + SEATS + '[algorithm]\nadvantage = "greedy"\nnormalize = "none"',
            'algorithm.advantage: expected another than "greedy", because environment.seats has several players',
        ),
        (
            KUHN + SEATS + "[algorithm]\noverlong_buffer = 2",
            "algorithm.overlong_buffer: expected 0, because environment.seats has several players, found 2",
        ),
        (
            KUHN + SEATS + '[algorithm]\nadvantage = "role_mean"\nnormalize = "none"\ncredit = "turn"',
            'algorithm.credit: expected "outcome", because algorithm.advantage = "role_mean" is a mean over whole',
        ),
        (KUHN + SEATS + '[algorithm]\nadvantage = "role_mean"\nnormalize = "none"', ""),
        (
            f"[environment]\nendpoints = {{user = {DEAD}}}",
            'endpoints: expected none, because environment.name and task.agent are empty, found ["user"]',
        ),
        (
            f'[task]\nagent = "os:getcwd"\n[environment]\nseats = ["a", "b"]\nendpoints = {{b = {DEAD}}}',
            'endpoints: expected none with task.agent, because an agent asks any server itself, found ["b"]',
        ),
        (
            KUHN + SEATS + f"endpoints = {{third = {DEAD}}}",
            'environment.endpoints: expected some of environment.seats = ["first", "second"], found ["third"]',
        ),
        (
            KUHN + SEATS + f"endpoints = {{second = {DEAD}}}",
            'hosts.isolation: expected "off", because the run\'s own network does not reach environment.endpoints',
        ),
        (
            KUHN + SEATS + f"endpoints = {{second = {DEAD}}}\n[hosts]\nisolation = 'off'",
            "environment.endpoints.second: expected a model that answers, found the second at http://127.0.0.1:9/v1 "
            "did not answer: ClientConnectorError",
        ),
        (
            '[environment]\nname = "openenv:http://127.0.0.1:9"\n[hosts]\nisolation = "off"',
            "ConnectionError: expected an OpenEnv server at http://127.0.0.1:9, found URLError",
        ),
        (
            '[environment]\nname = "gymnasium:Walk-v0"',
            "environment.name = 'gymnasium:Walk-v0': ModuleNotFoundError: No module named 'gymnasium'",
        ),
        (
            '[environment]\nname = "my:Thing"\npython = "no/such/folder"',
            "environment.python: expected a Python or the folder of a virtual environment, found 'no/such/folder'",
        ),
        (
            f'[environment]\nname = "no_such:Thing"\npython = "{sys.executable}"',
            "environment.name = 'no_such:Thing': ModuleNotFoundError: No module named 'no_such'",
        ),
        (
            '[task]\nagent = "json:dumps"',
            "task.agent: expected to require no arguments but row, prompt, answer, seed, base_url, api_key, model, tok"
            "enizer",
        ),
        (
            '[task]\nagent = "no_such:run"',
            "task.agent = 'no_such:run': ModuleNotFoundError: No module named 'no_such'",
        ),
        (
            '[task]\nagent = "os:getcwd"\n[environment]\nlockstep = true',
            "environment.lockstep: expected false with task.agent, because an agent may ask for several turns at the",
        ),
        (CALC.replace("size = 16", "size = 200000"), "eval.size: expected at most 162000 of calc's 810,000 problems"),
        (
            CALC.replace("[eval]", "processes = 15\n[eval]"),
            "hosts.slots: expected room for 17 processes (1 of the trainer, 1 of the generators, 15 of the",
        ),
    ],
)
def test_one_problem(tmp_path: Path, toml: str, message: str) -> None:
    found = problems(config(tmp_path, toml))
    if not message:
        assert found == []
        return
    (problem,) = found
    assert message in problem


SECRET = "sk-secret-9"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (
            'url = "127.0.0.1:8000/v1", model = "m"',
            "url: expected a URL such as http://HOST/v1, without a user or a query",
        ),
        ('url = "http://me:SECRET@host/v1", model = "m"', "url: expected a URL such as http://HOST/v1, without a user"),
        (
            'url = "http://host/v1?key=SECRET", model = "m"',
            "url: expected a URL such as http://HOST/v1, without a user",
        ),
        ('url = 5, model = "m"', "url: expected a string, found 5"),
        ('url = "http://host/v1"', "model: expected the name of a model at the URL, found none"),
        (
            'url = "http://host/v1", model = "m", api_key = "SECRET"',
            "there is no key \"api_key\"; did you mean 'api_key_env'?",
        ),
        (
            'url = "http://host/v1", model = "m", api_key_env = "SECRET"',
            "api_key_env: expected the name of a variable in the environment, found another text",
        ),
        (
            'url = "http://host/v1", model = "m", api_key_env = "NO_SUCH_KEY"',
            "api_key_env: expected the name of a variable in the environment, found NO_SUCH_KEY",
        ),
        (
            'url = "http://host/v1", model = "m", temperature = 3',
            "temperature: expected a number >= 0 and <= 2, found 3",
        ),
        ('url = "http://host/v1", model = "m", max_tokens = 0', "max_tokens: expected an integer >= 1 and"),
    ],
)
def test_an_endpoint_that_no_run_can_ask(tmp_path: Path, table: str, message: str) -> None:
    toml = KUHN + SEATS + f"endpoints = {{second = {{{table.replace('SECRET', SECRET)}}}}}"
    problem, *_ = endpoint_problems(config(tmp_path, toml).environment)
    assert problem.startswith("environment.endpoints.second")
    assert message in problem
    assert SECRET not in problem


@pytest.mark.parametrize("code", [200, 404])
def test_an_endpoint_is_asked_before_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    monkeypatch.setenv("KUHN_KEY", SECRET)
    with answering(lambda body: "hello" if code == 200 else web.Response(status=code, text=SECRET)) as (url, seen):
        table = f'{{url = "{url}/", model = "m", api_key_env = "KUHN_KEY", temperature = 1, seed = false}}'
        asked = config(tmp_path, KUHN + SEATS + f"endpoints = {{second = {table}}}\n[hosts]\nisolation = 'off'")
        found = problems(asked)
        assert environments(asked).holds.endswith(f"; second by {url}/")
    assert seen[0]["key"] == f"Bearer {SECRET}"
    assert {name: value for name, value in seen[0]["body"].items() if name != "messages"} == {
        "model": "m",
        "temperature": 1,
    }
    expected = (
        f"environment.endpoints.second: expected a model that answers, found the second at {url} answered 404: ***"
    )
    assert found == ([] if code == 200 else [expected])
    assert SECRET not in to_toml(asked) + repr(endpoints_of(asked.environment))
    monkeypatch.delenv("KUHN_KEY")
    with pytest.raises(RunError, match="expected the name of a variable in the environment, found KUHN_KEY"):
        endpoints_of(asked.environment)


def test_all_seats_by_endpoints_leave_nothing_to_train(tmp_path: Path) -> None:
    toml = KUHN + SEATS + f"frozen_seats = ['first']\nendpoints = {{second = {DEAD}}}"
    _, problem = problems(config(tmp_path, toml))
    expected = "expected not all of environment.seats, because one has to learn"
    assert problem == f'environment.endpoints: {expected}, found ["second"]'


def test_a_server_is_not_in_the_runs_own_network(tmp_path: Path) -> None:
    _, problem = problems(config(tmp_path, '[environment]\nname = "openenv:http://127.0.0.1:9"'))
    why = "because the run's own network does not reach the server of environment.name"
    assert problem == f'hosts.isolation: expected "off", {why}, found "auto"'


def test_environments_take_no_processes_without_one(tmp_path: Path) -> None:
    assert problems(config(tmp_path, "[environment]\nprocesses = 64")) == []


def test_an_environment_that_hangs_when_it_is_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hanging_environment.py").write_text("import time\ntime.sleep(600)\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("titan_rl.preflight.probe.PROBE_SECONDS", 1)
    (problem,) = problems(config(tmp_path, '[environment]\nname = "hanging_environment:Thing"'))
    assert "environment.name: expected 'hanging_environment:Thing' to be imported within 1 s" in problem
    assert "hanging_environment.py:2" in problem


def test_the_plan_says_what_an_agent_can_ask_for(tmp_path: Path) -> None:
    agent = '[task]\nname = "calc"\nagent = "os:getcwd"\n[environment]\nmax_tokens = 32\n'
    plain = environments(config(tmp_path, agent))
    chat = environments(config(tmp_path, agent.replace("agent =", 'template = "chat"\nagent =')))
    assert plain.holds.startswith("os:getcwd: up to 64 rollouts per process, 8 turns or 32 tokens each")
    assert plain.holds.endswith("; endpoint on loopback, completions only")
    assert chat.holds.endswith("; endpoint on loopback, chat")
    elsewhere = environments(config(tmp_path, agent + 'python = "./envs/one"\n'))
    assert "tokens each, in ./envs/one; endpoint" in elsewhere.holds


GOOD = "class Env:\n    def reset(self): return 'go'\n    def step(self, reply): return '', 1.0, True, {}"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Env:\n    def __init__(self, level): pass", "to construct, found "),
        ("Env = print", "to construct, found TypeError: an object without reset(): NoneType"),
        (STEPS + "    def reset(self): raise OSError('gone')", "to reset for the first row, found OSError: gone"),
        (STEPS + "    def reset(self): return 5", 'expected text or messages with a "role", found 5'),
        (STEPS + "    def reset(self, level): return ''", "Env.reset: expected to require no arguments but"),
        (STEPS.replace(", reply", "") + "    def reset(self): return ''", "a step() that does not take one reply"),
        (STEPS + "    def reset(self, row): return str(row['a'])", ""),  # the first problem of addition
        (GOOD, ""),
    ],
)
def test_an_environment_that_cannot_be_played(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str
) -> None:
    (tmp_path / "my_environment.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = problem_of(config(tmp_path, '[environment]\nname = "my_environment:Env"'))
    assert bool(found) == bool(message)
    assert message in found


@pytest.mark.parametrize("python", ["", sys.executable])
@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "class Env:\n    def __init__(self): raise RuntimeError('no display')",
            "to construct, found RuntimeError: no",
        ),
        (
            "class Env:\n    def __init__(self): import time; time.sleep(60)",
            "to be constructed for the first row within ",
        ),
        (STEPS + "    def reset(self): import time; time.sleep(60)", "to be reset for the first row within 1 s"),
        ("import os\nclass Env:\n    def __init__(self): os._exit(7)", "ended with exit code 7"),
        (GOOD, ""),
    ],
)
def test_an_environment_is_tried_by_another_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, message: str, python: str
) -> None:
    (tmp_path / "my_environment.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(probe, "PROBE_SECONDS", 1 if "init__(self): import time" in source else probe.PROBE_SECONDS)
    toml = f'[environment]\nname = "my_environment:Env"\npython = "{python}"\nturn_seconds = 1'
    found = problems(config(tmp_path, toml))
    assert bool(found) == bool(message), found
    assert message in "".join(found)


def problem_of(config: Config) -> str:
    """Probe an environment in this process, as the child does: a process each takes 0.7 s."""
    name = config.environment.name
    sys.modules.pop(name.partition(":")[0], None)
    importlib.invalidate_caches()
    question = probe.Question("environment.name", name, first_prompt(config), None, config.environment)
    return probe.problem_of(question, lambda stage, within: None)


@pytest.mark.parametrize(
    ("args", "message"),
    [("{levle = 1}", "no parameter for environment.args = 'levle'; it has level"), ("{level = 1}", "")],
)
def test_arguments_that_an_environment_does_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: str, message: str
) -> None:
    source = STEPS + "    def __init__(self, level=0): pass\n    def reset(self): return ''"
    (tmp_path / "my_environment.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    found = problem_of(config(tmp_path, f'[environment]\nname = "my_environment:Env"\nargs = {args}'))
    assert bool(found) == bool(message)
    assert message in found


DAEMON = """import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        open({file!r}, "w").write(str(os.getpid()))
        import time
        time.sleep(600)
    os._exit(0)
os.wait()
while not os.path.exists({file!r}): pass
def score(completion): return 1.0
class Env:
    def reset(self): pass
"""


@pytest.mark.parametrize(
    "toml",
    [
        '[task]\nreward = "daemon:score"',
        '[environment]\nname = "daemon:Env"',
        f'[environment]\nname = "daemon:Env"\npython = "{sys.executable}"',
    ],
)
def test_what_the_users_code_starts_ends_with_the_check(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, toml: str
) -> None:
    pid = tmp_path / "pid"
    (tmp_path / "daemon.py").write_text(DAEMON.format(file=str(pid)))
    monkeypatch.syspath_prepend(tmp_path)
    assert problems(config(tmp_path, toml)) == []
    assert not Path("/proc", pid.read_text()).exists()
