"""What a person sees: widths, alignment, plain output, and a status line that other processes cannot tear."""

import asyncio
import io
import os
import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console
from rich.text import Text

from titan_rl.record.plan_view import MeshRow, RunPlan
from titan_rl.record.terminal import Terminal, duration, open_console, visible

PLAN = RunPlan(
    title="titan_rl 0.1.0  addition",
    description="A 0.83M Llama learns two-digit addition: a short cold start, then GRPO",
    meshes=[
        MeshRow("trainers", 2, "FSDP2 2 x TP 1", "cpu", "float32", "0.83M parameters, AdamW"),
        MeshRow("generators", 1, "1 replica x TP 1", "cpu", "float32", "vLLM, 256 MiB KV cache, 256 sequences"),
    ],
    facts=[
        ("model", "llama3, 0.83M parameters, 4 layers of 128, 4 heads on 2 KV heads"),
        ("task", "addition: 9,744 training problems, 256 held out"),
        ("step", "16 prompts x 16 samples, at most 8 tokens each; on-policy"),
        ("weights", "RDMA reads over Monarch's TCP fallback, 3.3 MB a sync"),
        ("dump", "outputs/addition"),
        ("resume", "after step 40 of 300"),
    ],
    warnings=["generator.dtype is bfloat16 and the trainer computes in float32: expect a log-prob gap near 1e-2, " * 2],
)
METRICS = {
    "time/step": 3.21, "time/generate": 1.9, "time/train": 0.93, "time/sync": 0.21, "time/wait": 0.17,
    "reward/mean": 0.5, "entropy": 0.84, "logprob_gap/mean": 1.2e-7, "logprob_gap/max": 2.4e-6, "logprob_gap/mult": 1.0,
    "policy_age/max": 0.0, "frac_reward_zero_std": 0.25, "completions/clipped_ratio": 0.02,
    "completions/mean_length": 41.7, "grad_norm": 0.38,
}  # fmt: skip
SUMMARY = {
    "steps": 300, "wall_seconds": 312.2, "cold_start_eval": 0.0, "initial_eval": 0.414, "final_eval": 0.981,
    "seconds": {"startup": 21.0, "cold_start": 70.2, "generate": 130.5, "train": 55.1, "sync": 12.3, "wait": 0.1},
    "logprob_gap": {"mean": 1.2e-7, "max": 2.4e-6}, "effective_samples": 0.992,
    "routing_agreement": 0.985,
}  # fmt: skip
CRASH = "Traceback (most recent call last):\n  File 'policy.py', line 42, in step\nRuntimeError: out of memory\n"


def screen(output: str) -> list[str]:
    """The lines that a terminal shows after `output`; no scrolling, no wrapping, colours dropped."""
    lines, y, x = [""], 0, 0
    for token in re.findall(r"\x1b\[\d*[A-Za-z]|\x1b\[[\d;]*m|.|\n", output):
        if token == "\n":
            y, x = y + 1, 0
            lines += [""] * (y + 1 - len(lines))
        elif token == "\r":
            x = 0
        elif token == "\x1b[J":
            lines[y:] = [lines[y][:x]]
        elif token.endswith("A") and token[0] == "\x1b":
            y -= int(token[2:-1] or 1)
        elif token[0] != "\x1b":
            lines[y] = lines[y][:x].ljust(x) + token + lines[y][x + 1 :]
            x += 1
    return [line.rstrip() for line in lines]


def live(width: int = 100) -> tuple[Terminal, io.StringIO]:
    file = io.StringIO()
    console = Console(file=file, width=width, force_terminal=True, force_interactive=True, _environ={"TERM": "xterm"})
    return Terminal(console, console), file


def plain() -> tuple[Terminal, io.StringIO, io.StringIO]:
    out, errors = io.StringIO(), io.StringIO()
    return Terminal(open_console(out), open_console(errors)), out, errors


def whole_run(terminal: Terminal, folder: Path) -> None:
    terminal.plan(PLAN)
    with terminal.phase("start trainers"):
        pass
    with terminal.progress("cold start", 200) as progress:
        for step in range(200):
            progress.advance(note=f"loss {1 / (step + 1):.3f}")
    terminal.eval("held-out score before RL", 0.414, 256)
    for step in range(1, 26):
        terminal.step(step, 300, METRICS | ({"eval/score": 0.5} if step % 10 == 0 else {}))
    terminal.warn("this is [not markup] :smile:")
    (folder / "tb").mkdir()
    (folder / "metrics.jsonl").touch()
    (folder / "control.json").touch()  # until the run has ended
    samples = [Text("reward 0.00"), Text("  99+99=" + "x" * 200)]
    terminal.summary(SUMMARY, samples, folder, [f"tensorboard --logdir {folder}/tb"])


def test_the_plan_fits_a_small_screen() -> None:
    wide = MeshRow(
        "trainers",
        8,
        "HSDP 2 x 2 x TP 2",
        "cuda, this host",
        "float32, bfloat16 compute",
        "weights, gradients, AdamW: 29.9 GiB a rank, reference 7.5 GiB",
    )
    for meshes in (PLAN.meshes, [wide, wide]):
        terminal, out = live(width=100)
        terminal.plan(replace(PLAN, meshes=meshes))
        lines = screen(out.getvalue())
        assert len(lines) <= 22
        assert max(map(len, lines)) <= 100
        for row in meshes:
            assert any(line.split()[:2] == [row.name, str(row.procs)] and row.dtype in line for line in lines)
            assert any(f"{row.name}: {row.holds}" in line for line in lines)


@pytest.mark.parametrize("width", [100, 120])
def test_a_whole_run_keeps_to_the_terminal_and_its_columns(width: int, tmp_path: Path) -> None:
    terminal, out = live(width)
    whole_run(terminal, tmp_path)
    lines = screen(out.getvalue())
    assert max(map(len, lines)) <= width
    table = [line for line in lines if re.match(r" +(\d+/300|step) ", line)]
    assert len(table) == 25 + 2  # a header every 20 steps
    ends = {len(re.sub(r"\d+ (s|min)$", "", line).rstrip()) for line in table if "/" in line}
    assert len(ends) == 1
    assert [line.split()[:2] for line in table[:2]] == [["step", "seconds"], ["1/300", "3.21"]]
    assert sum("0.500    0.500" in line for line in table) == 2  # reward, held-out
    assert "effective samples 99.2%; routes replayed, 98.5% agree" in " ".join(" ".join(lines).split())
    assert any("0.000 before the cold start  →  0.414 before RL  →  0.981 at the end" in line for line in lines)
    assert any(line.split() == ["metrics.jsonl", "tb/"] for line in lines)
    assert any("99+99=xxx" in line for line in lines)
    assert any("[not markup] :smile:" in line for line in lines)


def test_plain_output_has_no_control_codes_and_no_flood(tmp_path: Path) -> None:
    terminal, out, errors = plain()
    whole_run(terminal, tmp_path)
    terminal.error("trainer[1] failed", CRASH)
    assert "\x1b" not in out.getvalue() + errors.getvalue()
    assert "\r" not in out.getvalue()
    assert len(re.findall("cold start .*loss", out.getvalue())) == 10
    assert errors.getvalue() == f"error: trainer[1] failed\n{CRASH}"


def test_an_open_console_is_live_only_on_a_capable_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    reader, writer = os.openpty()
    with open(writer, "w") as tty, io.StringIO() as pipe:
        assert open_console(tty).is_interactive
        monkeypatch.setenv("NO_COLOR", "1")
        assert open_console(tty).no_color
        assert not open_console(pipe).is_interactive
        monkeypatch.setenv("TERM", "dumb")
        assert not open_console(tty).is_interactive
        monkeypatch.setenv("TERM", "xterm-256color")
        monkeypatch.setenv("CI", "true")
        assert not open_console(tty).is_interactive
    os.close(reader)


def test_a_terminal_of_no_columns_is_printed_to(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("COLUMNS", "0"), ("TERM", "xterm-256color"), ("CI", "")):
        monkeypatch.setenv(name, value)
    reader, writer = os.openpty()  # 0 columns, too
    with open(writer, "w") as tty:
        terminal = Terminal(open_console(tty))
        terminal.note("a note that is 40 characters long, or so")
        read = b""
        while b"or so" not in read:  # what a terminal is sent may come in parts
            read += os.read(reader, 1000)
        assert b"a note that is 40 characters long, or so" in read
    os.close(reader)


def test_a_locale_without_the_characters_costs_characters_only() -> None:
    raw = io.BytesIO()
    terminal = Terminal(open_console(io.TextIOWrapper(raw, encoding="ascii")))
    with terminal.phase("start"):
        pass
    assert b"? start" in raw.getvalue()


def wait_for_drawing(out: io.StringIO) -> None:
    before = len(out.getvalue())
    while len(out.getvalue()) == before:
        time.sleep(0.01)


def test_foreign_writes_and_the_status_line_leave_each_other_whole() -> None:
    terminal, out = live()
    with terminal.phase("start"), terminal.progress("cold start", 10) as progress:
        for i in range(4):
            progress.advance(note="a long note, longer than the others")
            wait_for_drawing(out)
            assert "cold start" in screen(out.getvalue())[-1]
            out.write(f"WARNING {i}\n  its second line\n" if i % 2 else f"WARNING {i}\n")
    lines = screen(out.getvalue())
    foreign = ["WARNING 0", "WARNING 1", "  its second line", "WARNING 2", "WARNING 3", "  its second line"]
    assert lines[: len(foreign)] == foreign
    assert [line.split()[:2] for line in lines[len(foreign) :]] == [["✓", "cold"], ["✓", "start"], []]


async def test_phases_run_side_by_side_and_nest() -> None:
    terminal, out, _ = plain()

    async def trainers(loaded: asyncio.Event) -> None:
        with terminal.phase("trainers"):
            with terminal.phase("load"):
                await asyncio.sleep(0)
            loaded.set()

    async def generators(loaded: asyncio.Event) -> None:
        with terminal.phase("generators"):
            await loaded.wait()
            await asyncio.sleep(0)

    loaded = asyncio.Event()
    await asyncio.gather(trainers(loaded), generators(loaded))
    lines = out.getvalue().splitlines()
    assert [line[: line.index("   ", 6)] for line in lines] == ["    ✓ load", "  ✓ trainers", "  ✓ generators"]
    assert len({len(line) for line in lines}) == 1


def test_a_failed_phase_says_so_and_lets_the_error_pass() -> None:
    terminal, out = live()
    with pytest.raises(ValueError, match="no"), terminal.phase("start"):
        raise ValueError("no")
    assert re.fullmatch(r"  ✗ start +\d+\.\d s  failed", screen(out.getvalue())[0])


def test_a_phase_that_a_signal_ends_has_not_failed() -> None:
    for end in (asyncio.CancelledError, KeyboardInterrupt):
        terminal, out = live()
        with pytest.raises(end), terminal.phase("start"):
            raise end
        assert re.fullmatch(r"  - start +\d+\.\d s  stopped", screen(out.getvalue())[0])


def test_a_terminal_wraps_between_words_and_a_log_keeps_lines_whole() -> None:
    words = "a second signal stops at once and the same command resumes the run " * 3
    terminal, out, _ = plain()
    terminal.note(words)
    assert out.getvalue() == f"  {words}\n"
    terminal, out = live()
    terminal.warn(words)
    lines = screen(out.getvalue())
    assert len(lines) > 1
    assert all(line.startswith("  ") for line in lines if line)
    assert " ".join(" ".join(lines).split()) == f"warning {words.strip()}"


def test_a_quiet_phase_is_named_again_in_plain_output(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("titan_rl.record.terminal.REMIND", 0.05)
    terminal, out, _ = plain()
    with terminal.phase("start trainers"):
        wait_for_drawing(out)
    assert re.match(r"  … \d\d:\d\d:\d\d  start trainers  \d+\.\d s\n", out.getvalue())


def test_a_resumed_bar_knows_its_own_speed() -> None:
    terminal, out, _ = plain()
    with terminal.progress("cold start", 100, done=80) as progress:
        time.sleep(0.02)
        progress.advance(10)  # as much is left as this process took so far
    assert re.search(r"cold start  90/100  (\S+ s), \1 left\n", out.getvalue())


def test_a_crash_is_shown_once() -> None:
    terminal, out = live()
    terminal.error("trainer[1] on host-3 failed", "\x1b[31m" + CRASH + "\x1b[0m")
    first = out.getvalue()
    terminal.error("the run failed", "\x1b[31m" + CRASH + "\x1b[0m")
    lines = screen(out.getvalue())
    assert out.getvalue().count("Traceback") == first.count("Traceback") == 1
    assert lines[0].startswith("╭─ error")
    assert [line.strip("│ ") for line in lines[1:4]] == ["trainer[1] on host-3 failed", "", CRASH.splitlines()[0]]


@pytest.mark.parametrize(
    ("change", "yellow"),
    [
        ({}, False),
        ({"logprob_gap/mean": 0.02}, True),
        ({"logprob_gap/mult": 1.06}, True),
        ({"logprob_gap/mean": float("nan")}, True),
    ],
)
def test_a_wide_gap_is_yellow(change: dict[str, float], yellow: bool) -> None:
    terminal, out = live()
    terminal.step(1, 300, METRICS | change)
    assert ("\x1b[33m" in out.getvalue()) == yellow


@pytest.mark.parametrize(
    ("width", "heads"),
    [
        (120, "step seconds gen train reward held-out signal length cut entropy grad gap age left"),
        (80, "step seconds reward held-out signal cut entropy grad gap left"),
        (60, "step seconds reward held-out signal cut entropy left"),
        (30, "step seconds reward"),
    ],
)
def test_a_narrow_terminal_leaves_out_whole_columns(width: int, heads: str) -> None:
    terminal, out = live(width)
    terminal.step(1, 300, METRICS)
    shown, values, end = screen(out.getvalue())
    if width >= 60:
        assert shown.split() == heads.split()
    assert len(values) <= min(width, 100)
    assert len(shown) <= min(width, 100)
    assert end == ""


def test_a_step_shows_signal_cut_length_gradient_and_the_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter((100.0, 130.0))
    terminal, out = live(100)
    monkeypatch.setattr("titan_rl.record.terminal.time.monotonic", lambda: next(clock))
    terminal.step(1, 300, METRICS)
    terminal.step(2, 300, METRICS | {"frac_reward_zero_std": 1.0})
    _, first, second, _ = screen(out.getvalue())
    assert first.split()[-9:] == ["75%", "42", "2%", "0.840", "0.38", "1.2e-07", "0", "16", "min"]
    assert second.split()[-9:] == ["0%", "42", "2%", "0.840", "0.38", "1.2e-07", "0", "2", "h"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.04, "0.0 s"), (59.9, "59.9 s"), (59.99, "1 min 00 s"), (3599.9, "1 h 00 min"), (7380, "2 h 03 min")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [("640", "640"), ("a\nb", r"a\nb"), ("\x1b[2J", r"\x1b[2J"), ("\ud800", r"\ud800"), ("abcdefghij", "abcdefg…")],
)
def test_sampled_text_cannot_touch_the_terminal(text: str, shown: str) -> None:
    assert visible(text, 8) == shown


def test_lines_of_several_policies_begin_with_their_names() -> None:
    output = io.StringIO()
    terminal = Terminal(Console(file=output, width=140), Console(file=io.StringIO()))
    sums, b = terminal.of("sums"), terminal.of("b")
    for step in (1, 2):
        sums.step(step, 2, METRICS)
        b.step(step, 2, METRICS)
    sums.note("saved")
    b.warn("slow")
    with sums.phase("export"):
        pass
    lines = output.getvalue().splitlines()
    assert [line.split()[0] for line in lines if "/2" in line] == ["sums:", "b:", "sums:", "b:"]
    assert sum("reward" in line for line in lines) == 2
    assert [line.strip() for line in lines if "saved" in line or "slow" in line] == ["sums: saved", "warning  b: slow"]
    assert any("✓ sums: export" in line for line in lines)
