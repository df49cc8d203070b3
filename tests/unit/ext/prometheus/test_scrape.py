"""Prometheus reads a run's last metrics, and a bad or taken address is refused before the start."""

import asyncio
import math
import random
import re
import socket
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from titan_rl.config.sections import Config, MetricsSection
from titan_rl.ext.prometheus.checks import problems, warnings
from titan_rl.ext.prometheus.scrape import SERVERS, ScrapedRun, address_of, exposition, listener
from titan_rl.record.run_log import RunLog
from titan_rl.record.sinks import tracking

LINE = re.compile(r'([a-zA-Z_:][\w:]*)\{run="((?:[^"\\\n]|\\.)*)"(?:,state="(\w+)")?\} (\S+)')


def config_of(address: str) -> Config:
    return Config(metrics=MetricsSection(trackers=[], prometheus=address))


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


def parsed(text: str) -> dict[tuple[str, str, str], float]:
    """Read a page as Prometheus does: it refuses a metric whose lines are apart, and one with two types."""
    found, types, last = dict[tuple[str, str, str], float](), dict[str, str](), ""
    assert text.endswith("\n")
    for line in text.splitlines():
        if line.startswith("# TYPE "):
            _, _, last, kind = line.split(" ")
            assert last not in types
            types[last] = kind
            continue
        match = LINE.fullmatch(line)
        assert match, line
        name, run, state, value = match.groups()
        assert name == last
        assert (name, run, state or "") not in found
        found[name, run, state or ""] = float(value)
    return found


def test_a_run_is_scraped_while_it_lasts(tmp_path: Path) -> None:
    port = free_port()

    async def scraped() -> None:
        def get(path: str = "metrics") -> str:
            with urlopen(f"http://127.0.0.1:{port}/{path}", timeout=5) as answer:
                assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
                return answer.read().decode()

        names = ("one", "two")  # the policies of a run
        config = config_of(f"{port}")
        async with (
            tracking(tmp_path / "one", "x", config, resumed=False, warn=pytest.fail) as one,
            tracking(tmp_path / "two", "x", config, resumed=False, warn=pytest.fail) as two,
        ):
            for sinks, name in ((one, "one"), (two, "two")):
                with RunLog(tmp_path / name, "x", config, trackers=sinks) as log:
                    log.step(3, {"reward/mean": 0.5, "loss": math.nan}, {}, [])
            one.event("fault", "generator0 died")
            one.event("warning", "collapse")
            one.rewind()
            found = parsed(await asyncio.to_thread(get))
            for name in names:
                assert found["titan_rl_step", name, ""] == 3
                assert found["titan_rl_reward_mean", name, ""] == 0.5
                assert math.isnan(found["titan_rl_loss", name, ""])
                assert found["titan_rl_faults_total", name, ""] == (name == "one")
                assert found["titan_rl_attempts_total", name, ""] == 1 + (name == "one")
                assert found["titan_rl_state", name, "running"] == 1
            with pytest.raises(HTTPError, match="404"):
                await asyncio.to_thread(get, "config.toml")
            one.finish("finished", {})
            found = parsed(await asyncio.to_thread(get))
            assert (found["titan_rl_state", "one", "running"], found["titan_rl_state", "one", "finished"]) == (0, 1)

    asyncio.run(scraped())
    assert not SERVERS
    listener(("127.0.0.1", port)).close()  # it is free again


@pytest.mark.parametrize("seed", range(20))
def test_any_names_and_values_make_a_page_that_can_be_read(seed: int) -> None:
    draw = random.Random(seed)
    letters = 'ab/_-@.é "\\\n{}=,#'

    def text() -> str:
        return "".join(draw.choices(letters, k=draw.randint(1, 12)))

    runs = [ScrapedRun(f"{number}{text()}") for number in range(3)]
    for run in runs:
        for step in range(draw.randint(0, 3)):
            values = [draw.choice([math.nan, math.inf, -math.inf, draw.gauss(0, 1e9), 3, True]) for _ in range(9)]
            run.log("rl", step, {text(): value for value in values}, {})
    found = parsed(exposition(runs))
    assert len({run for _, run, _ in found}) == 3


@pytest.mark.parametrize("text", ["", "x", ":0", "65536", "localhost:9400", "127.0.0.1", "1.2.3.4:-1", "[::1]", "a:٣"])
def test_a_bad_address_is_refused(text: str) -> None:
    (problem,) = problems(config_of(text))
    assert problem.startswith('metrics.prometheus: expected a port, or an address and a port such as "127.0.0.1:9400"')


def test_a_taken_or_foreign_address_is_refused_and_an_open_one_is_a_warning() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        for address in (f"{port}", f"127.0.0.1:{port}"):
            (problem,) = problems(config_of(address))
            assert problem.startswith("metrics.prometheus: expected a free address of this host, found ")
            assert problem.endswith("Address already in use")
    (problem,) = problems(config_of(f"192.0.2.1:{port}"))
    assert problem.endswith("Cannot assign requested address")
    assert list(problems(config_of(f"{port}"))) == []
    assert list(warnings(config_of(f"{port}"))) == list(warnings(config_of(f"[::1]:{port}"))) == []
    (warning,) = warnings(config_of(f"0.0.0.0:{port}"))
    assert "everybody who reaches 0.0.0.0 can read" in warning
    assert address_of("[::1]:9400") == ("::1", 9400)


def test_an_address_that_is_taken_after_the_check_does_not_end_the_run(tmp_path: Path) -> None:
    said = list[str]()

    async def run(port: int) -> None:
        async with tracking(tmp_path, "x", config_of(f"{port}"), resumed=False, warn=said.append) as sinks:
            sinks.log("rl", 1, {"loss": 1.0}, {})

    with socket.create_server(("127.0.0.1", 0)) as taken:
        asyncio.run(run(port := taken.getsockname()[1]))
    assert said == [f"metrics.prometheus: {port} cannot be listened on: Address already in use"]
