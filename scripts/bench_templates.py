#!/usr/bin/env python3
"""Measure what a turn costs to become tokens, against rendering the conversation again. Appends rows to a CSV.

    .venv/bin/python scripts/bench_templates.py                     # the built-in tokenizer: a second
    .venv/bin/python scripts/bench_templates.py --folder Qwen3-8B   # a Hugging Face folder

delta    what `ChatRenderer.extend` takes for the next message; it must not grow with the turns before it
whole    what `ChatRenderer.prompt` takes for the whole conversation, as a client of an inference server pays each turn
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bench.rows import BENCHMARKS, FIGURES, RAN_ON, Row, report
from titan_rl.text.template import Message
from titan_rl.text.tokenizer import TextTokenizer, build

COLUMNS = ("way", "case", "measure", *FIGURES, *RAN_ON)
TURNS = (2, 32, 128)
ASKED: Message = {"role": "user", "content": "37*41?"}
SAID: Message = {"role": "assistant", "content": "it is 1517."}
REPEATS = 9


def cpu_ms(call: Callable[[], object]) -> float:
    begun = time.process_time()
    for _ in range(10):
        call()
    return 1e3 * (time.process_time() - begun) / 10


def measured(text: TextTokenizer, name: str, turns: int) -> list[Row]:
    chat = text.chat
    messages = [ASKED, SAID] * turns + [ASKED]
    tokens = chat.prompt(messages[:-1] or [ASKED])
    end = [*tokens, *text.encode("it is 1517."), text.eos]
    ways = {"delta": partial(chat.extend, end, [ASKED]), "whole": partial(chat.prompt, messages)}
    case = f"{name}, after {turns} turns, {len(end):,} tokens"
    return [Row("templates", case, "CPU ms", [cpu_ms(call) for _ in range(REPEATS)], way) for way, call in ways.items()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, help="a Hugging Face folder with a chat template")
    parser.add_argument("--csv", type=Path, default=BENCHMARKS / "templates.csv")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        if not options.folder:
            build(folder)
        text = TextTokenizer.load(folder)
        name = folder.name if options.folder else "built-in"
        text.chat.extend([text.eos], [ASKED])  # the first time, the template is compiled and probed
        report(options.csv, COLUMNS, [row for turns in TURNS for row in measured(text, name, turns)])


if __name__ == "__main__":
    main()
