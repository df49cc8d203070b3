"""Data sets, reward modules and model folders that no run can use, each with a part of the message that must refuse it;
and odd ones that a run can use."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.checked_configs import edit
from support.folders import write_header, write_hf
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.shapes import shape_of

GOOD = {"question": "1+1=", "answer": "2"}


def lines(*rows: Any) -> bytes:
    texts = (row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows)
    return b"".join(text + b"\n" for text in texts)


def chat(*messages: Any) -> dict[str, Any]:
    return GOOD | {"question": list(messages)}


def nested(levels: int) -> Any:
    """Return an empty list in lists: a row that holds it has one level more."""
    return [nested(levels - 1)] if levels > 1 else []


ROWS: list[tuple[bytes, str, str]] = [  # file, further flags, message
    (b"", "", "task.path: expected at least one row"),
    (b"\n \n\t\n", "", "task.path: expected at least one row"),
    (lines(GOOD, b"{"), "", "train.jsonl:2: expected a JSON object"),
    (lines(*[GOOD] * 150, b"{"), "", "train.jsonl:151: expected a JSON object"),
    (lines(*[GOOD] * 150, {"question": "1"}), "", "train.jsonl:151: expected task.answer_key"),
    (lines(GOOD, b"[]"), "", "train.jsonl:2: expected a JSON object, found list"),
    (lines(GOOD, b"null"), "", "train.jsonl:2: expected a JSON object, found NoneType"),
    (lines(GOOD, b"3"), "", "train.jsonl:2: expected a JSON object, found int"),
    (lines(GOOD, b"{'question': 1}"), "", "train.jsonl:2: expected a JSON object"),
    (lines(GOOD, lines(GOOD).strip() + lines(GOOD).strip()), "", "train.jsonl:2: expected a JSON object"),
    (lines(GOOD, b'{"question": "\xff", "answer": "2"}'), "", "train.jsonl:2: expected UTF-8, found byte 0xff"),
    (lines(GOOD, b'{"question": "\xed\xa0\x80", "answer": "2"}'), "", "train.jsonl:2: expected UTF-8"),
    (b"\xef\xbb\xbf" + lines(GOOD), "", "train.jsonl:1: expected UTF-8 without a byte order mark"),
    (lines(GOOD).decode().encode("utf-16"), "", "train.jsonl:1: expected UTF-8"),
    (b"\x1f\x8b\x08\x00" + bytes(range(256)), "", "train.jsonl:1: expected UTF-8"),
    (lines(GOOD, b'{"question": "\\ud800", "answer": "2"}'), "", "train.jsonl:2: expected text that UTF-8 can encode"),
    (lines(GOOD | {"other": ["\udfff"]}), "", "train.jsonl:1: expected text that UTF-8 can encode"),
    (lines(GOOD, b"[" * 100_000), "", "train.jsonl:2: expected a JSON object, found one that is nested too deeply"),
    (lines(GOOD, b'{"x":' * 100_000), "", "train.jsonl:2: expected a JSON object"),
    (lines(GOOD, GOOD | {"x": nested(101)}), "", "train.jsonl:2: expected a JSON object, found one that is nested too"),
    (
        lines(GOOD, GOOD),
        "--task.demonstration_key shown --cold_start.steps 1",
        "task.demonstration_key: expected a column with a conversation in some row of train.jsonl, found none in",
    ),
    (lines(GOOD, b'{"question": "1", "answer": ' + b"9" * 5000 + b"}"), "", "train.jsonl:2: expected a JSON object"),
    (
        lines(GOOD, b'{"question": "1", "answer": "1", "answer": "2"}'),
        "",
        "train.jsonl:2: expected a JSON object, found",
    ),
    (lines(GOOD | {"answer": None}), "", "train.jsonl:1: expected a string, a number, a list or a table in 'answer'"),
    (lines(GOOD | {"answer": True}), "", "train.jsonl:1: expected a string, a number, a list or a table in 'answer'"),
    (
        lines(*(GOOD | {"question": n} for n in range(160))),
        "",
        "in 'question', found 0, in all 160 rows alike",
    ),
    (lines(b'{"question": "1", "answer": NaN}'), "", "train.jsonl:1: expected a finite number in 'answer'"),
    (lines(b'{"question": "1", "answer": 1e999}'), "", "train.jsonl:1: expected a finite number in 'answer'"),
    (lines(GOOD | {"question": None}), "", "train.jsonl:1: expected a string or a list of chat messages"),
    (lines(GOOD | {"question": 3}), "", "train.jsonl:1: expected a string or a list of chat messages"),
    (lines(GOOD | {"question": []}), "", "train.jsonl:1: expected a string or a list of chat messages"),
    (lines(GOOD | {"question": {"role": "user"}}), "", "train.jsonl:1: expected a string or a list of chat messages"),
    (lines(chat({"role": "user", "content": None})), "--task.template chat", "train.jsonl:1: message 1 of 'question'"),
    (lines(chat({"role": "user", "content": 3})), "--task.template chat", "train.jsonl:1: message 1 of 'question'"),
    (lines(chat({"role": None, "content": "x"})), "--task.template chat", "train.jsonl:1: message 1 of 'question'"),
    (lines(chat({"role": "user", "content": ["x"]})), "--task.template chat", "train.jsonl:1: expected a prompt that"),
    (lines(chat({"role": "user"})), "--task.template chat", "train.jsonl:1: expected a string or a list of chat"),
    (lines(chat({"role": "user", "content": "x"})), "", 'task.template: expected "chat" for the messages in'),
    (lines(*[GOOD] * 150, GOOD | {"question": "1" * 500}), "", "train.jsonl:151: expected a prompt of at most"),
    (lines(GOOD | {"question": "1" * 5_000_000}), "", "train.jsonl:1: expected a prompt of at most"),
    (lines(GOOD, GOOD | {"answer": "1" * 500}), "--cold_start.steps 1", "train.jsonl:2: expected at most"),
    (lines(GOOD, GOOD | {"answer": " "}), "--cold_start.steps 1", "cold_start.steps: expected 0, because"),
    (lines(GOOD | {"answer": "two"}), "--task.reward last_number", "task.reward: expected a number in the answer of"),
    (lines(GOOD | {"answer": "1" * 9999}), "--task.reward last_number", "found one of 1000 digits or more"),
    (lines(GOOD), "--eval.size 8", "task.eval_path: expected a JSONL or Parquet file for eval.size = 8"),
    (lines(GOOD), "--task.answer_key solution", "train.jsonl:1: expected task.answer_key = 'solution'"),
    (lines(GOOD), "--algorithm.name dpo", "train.jsonl:1: expected task.chosen_key = 'chosen'"),
]

REWARDS: list[tuple[str, str]] = [  # the module `judge`, whose function `f` is named
    ("f = lambda completion: -1e308", "a number of float32's range, found -1e+308"),
    ("import sys; sys.exit(0)", "found SystemExit(0)"),
    ("raise SystemExit(5)", "found SystemExit(5)"),
    ("raise KeyboardInterrupt", "found KeyboardInterrupt"),
    ("class B(BaseException): pass\nraise B('x')", "found B: x"),
    ("1 / 0", "found ZeroDivisionError: division by zero"),
    ("def f(: pass", "found SyntaxError"),
    ("import no_such_module_of_mine", "No module named 'no_such_module_of_mine'"),
    ("f = 3", "to be a function, found 3"),
    ("f = None", "to be a function, found None"),
    ("g = 3", "has no attribute 'f'"),
    ("f = max", "to be a function with a signature, found <built-in function max>"),
    ("def f(x): return 1.0", "to require no keywords but prompt, completion, answer, row, messages, found x"),
    ("def f(completion, /): return 1.0", "to require no keywords but"),
    ("def f(prompts, completions): return [1.0]", "to return 2 rewards for 2 answers, found 1"),
    ("def f(prompts, completions, solution): return [1.0]", "to require no keywords but"),
    ("def f(completions, **columns): return 1.0", "to return a list of rewards, found 1.0"),
    ("def f(completions, **columns): return [1.0, float('nan')]", "to return finite numbers, found one that is not"),
    ("def f(solution_str): return {'acc': 1.0}", "or a dict with a 'score', found {'acc': 1.0}"),
    ("def f(): pass\nf.__signature__ = 5", "to be a function with a signature, found"),
    ("async def f(completion): return '1'", "to return a float, int or bool, found '1'"),
    ("async def g(): return 1.0\ndef f(completion): return g()", "to return a float, int or bool, found <coroutine"),
    ("def f(completion): yield 1.0", "to return a float, int or bool, found <generator"),
    ("class f:\n  def __init__(self, completion): pass", "to return a float, int or bool, found <judge.f object"),
    ("def f(completion): return None", "to return a float, int or bool, found None"),
    ("def f(completion): return '1'", "to return a float, int or bool, found '1'"),
    ("def f(completion): return [1.0]", "to return a float, int or bool, found [1.0]"),
    ("import numpy\ndef f(completion): return numpy.ones(1)", "to return a float, int or bool, found array"),
    ("def f(completion): return 1j", "to return a float, int or bool, found 1j"),
    ("def f(completion): return float('nan')", "to return a finite number, found nan"),
    ("def f(completion): return 10 ** 400", "to return a number, found 1000"),
    ("def f(completion): raise ValueError('x' * 9)", "to score the first row, found ValueError: xxxxxxxxx"),
    ("def f(completion): raise KeyboardInterrupt", "to score the first row, found KeyboardInterrupt"),
    ("class E(Exception):\n  def __str__(self): return 5\ndef f(completion): raise E", "found E"),
    ("class E(Exception):\n  def __str__(self): raise self\ndef f(completion): raise E", "found E"),
    ("def f(row):\n  return row['no_such']", "to score the first row, found KeyError: 'no_such' at {file}:2"),
]
FATAL_REWARDS: list[tuple[str, str]] = [  # they end or block their process, or read its stdin
    ("import os; os._exit(0)", "found that its process ended with exit code 0"),
    ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "found that its process was killed by signal 11"),
    ("import os; os.kill(os.getppid(), 9)", "to be imported, found that its process was killed by signal 9"),
    ("while True: pass", "to be imported within 2 s, found it still running at"),
    ("import time; time.sleep(100)", "to be imported within 2 s, found it still running at"),
    ("import asyncio\nasync def f(completion): await asyncio.sleep(60)", "within 2 s, found it still running"),
    ("def f(completion): exit(0)", "to score the first row, found SystemExit: 0"),
    ("import os\ndef f(completion): os._exit(0)", "found that its process ended with exit code 0"),
    ("def f(completion):\n  while True: pass", "for the first row within 2 s, found it still running at"),
    ("import re\ndef f(completion): re.match('(a+)+b', 'a' * 60)", "within 2 s, found it still running at"),
    ("def f(completion): return float(input())", "to score the first row, found EOFError"),
]
NAMES = ["x", "json:", ":f", ".judge:f", "judge.py:f", "judge:f.x", "judge f:f", "json:dumps:x", "\u00e9:f"]
"""Of rewards, none of which can be called."""

SHAPE = shape_of(ModelSection())
INDEX = "model.safetensors.index.json"


def _short(folder: Path) -> None:
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(100_000)


def _listed(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))


def _with(**changes: Any) -> Callable[[Path], None]:
    return lambda folder: edit(folder / "config.json", **changes)


def _text(name: str, text: str | bytes) -> Callable[[Path], Any]:
    return lambda folder: (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())


def _fifo(name: str) -> Callable[[Path], Any]:
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


def _weights(
    *names: str, dtype: str = "F32", sizes: dict[str, tuple[int, ...]] | None = None
) -> Callable[[Path], None]:
    kept = {name: size for name, size in SHAPE.hf_tensors().items() if name not in names} | (sizes or {})
    return lambda folder: write_header(folder / "model.safetensors", kept, dtype)


MODELS: list[tuple[Callable[[Path], Any], str]] = [  # what happens to a good folder
    (_text("model.safetensors", b""), "model.safetensors, found"),
    (_text("model.safetensors", b"garbage" * 1000), "model.safetensors, found"),
    (_text("model.safetensors", (2).to_bytes(8, "little") + b"{}"), "found no model.embed_tokens.weight"),
    (_text("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"), "model.safetensors, found"),
    (_text("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"), "model.safetensors, found"),
    (_short, "model.safetensors, found"),
    (_text("more.safetensors", b"\0"), "more.safetensors, found"),
    (lambda f: write_header(f / "more.safetensors", SHAPE.hf_tensors()), "expected each tensor in one file"),
    (lambda f: (f / "folder.safetensors").mkdir(), "folder.safetensors, found"),
    (lambda f: (f / "gone.safetensors").symlink_to("/no/such"), "gone.safetensors, found"),
    (lambda f: (f / "model.safetensors").unlink(), "expected *.safetensors in"),
    (_weights("model.norm.weight"), "found no model.norm.weight"),
    (_weights("lm_head.weight"), "expected lm_head.weight in the weights of"),
    (_weights(sizes={"model.norm.weight": (7,)}), "found [7] of model.norm.weight (not [128])"),
    (_weights(sizes={"lm_head.weight": (128, 64)}), "found [128, 64] of lm_head.weight (not [64, 128])"),
    (_weights(dtype="I16"), "found I16 of model.embed_tokens.weight"),
    (
        lambda f: write_hf(f, replace(SHAPE, n_layers=2)) and edit(f / "config.json", num_hidden_layers=4),
        "found no model",
    ),
    (lambda f: _listed(f, 3), "expected a weight_map in"),
    (lambda f: _listed(f, {}), "expected a weight_map in"),
    (lambda f: _listed(f, []), "expected a weight_map in"),
    (lambda f: _listed(f, {"a": 3}), "expected a weight_map in"),
    (lambda f: _listed(f, {"a": "../x-1.safetensors"}), "expected a weight_map in"),
    (lambda f: _listed(f, {"a": "gone-1.safetensors"}), "found no gone-1.safetensors"),
    (lambda f: _listed(f, {"a": "model-1.safetensors"}), "found no a in model-1.safetensors"),
    (_text(INDEX, "{"), "expected a weight_map in"),
    (_text(INDEX, "[" * 100_000), "expected a weight_map in"),
    (_text(INDEX, b"\xff"), "expected a weight_map in"),
    (_text("config.json", ""), "expected a usable"),
    (_text("config.json", "[]"), "expected a usable"),
    (_text("config.json", "3"), "expected a usable"),
    (_text("config.json", "[" * 100_000), "expected a usable"),
    (_text("config.json", '{"a":' * 100_000), "expected a usable"),
    (_text("config.json", b"\xff\xfe"), "expected a usable"),
    (lambda f: (f / "config.json").unlink(), "expected a config.json in"),
    (lambda f: ((f / "config.json").unlink(), (f / "config.json").mkdir()), "expected a usable"),
    (_with(model_type="gpt2"), 'qwen3_5 or deepseek_v3, found "gpt2"'),
    (_with(hidden_size="128"), "hidden_size: expected a positive integer"),
    (_with(hidden_size=-1), "hidden_size: expected a positive integer"),
    (_with(hidden_size=10**30), "hidden_size: expected at most"),
    (_with(num_hidden_layers=10**8), "num_hidden_layers: expected at most 1000, found 100000000"),
    (_with(rms_norm_eps=1), "rms_norm_eps: expected a number above 0 and below 1, found 1"),
    (_with(rms_norm_eps=float("nan")), "rms_norm_eps: expected"),
    (_with(rope_parameters={"rope_type": "default", "rope_theta": "x"}), "rope_theta: expected a number"),
    (_with(rope_parameters=[1]), "rope_parameters: expected an object"),
    (_with(rope_parameters={"rope_type": "dynamic"}), "rope_parameters: expected rope_type"),
    (_with(rope_parameters={"rope_type": "yarn"}), "rope_parameters: expected numbers"),
    (_with(architectures="LlamaForCausalLM"), "architectures: expected"),
    (_with(architectures=[]), "architectures: expected"),
    (_with(dtype="int8"), "dtype: expected float32"),
    (_with(vocab_size=63), "expected the sizes of"),
    (lambda f: write_hf(f, replace(SHAPE, vocab_size=40)), "a vocab_size of at least the tokenizer's 52"),
    (_with(eos_token_id=99), "expected an eos_token_id of the model's vocabulary"),
    (_with(eos_token_id="</s>"), "eos_token_id: expected an integer or a list of them"),
    (_with(tie_word_embeddings="yes"), 'tie_word_embeddings: expected true or false, found "yes"'),
    (_with(bos_token_id="<s>"), "bos_token_id: expected an integer"),
    (_with(attention_dropout="x"), "attention_dropout: expected a number"),
    (_with(layer_types=3), "layer_types: expected"),
    (_text("generation_config.json", '{"eos_token_id": [999]}'), "expected an eos_token_id of the model's vocabulary"),
    (_text("generation_config.json", "["), "generation_config.json"),
    (_text("generation_config.json", "[]"), "generation_config.json"),
    (_text("tokenizer.json", ""), "expected a tokenizer, found"),
    (_text("tokenizer.json", "{}"), "expected a tokenizer, found"),
    (_text("tokenizer.json", '{"model": {"type": "BPE", "vocab": {}, "merges": []}}'), "expected a vocabulary"),
    *(
        (_fifo(name), "expected a file, found a FIFO")
        for name in (
            *("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"),
            *("special_tokens_map.json", "chat_template.jinja", INDEX, "model.safetensors"),
        )
    ),
    (_text("tokenizer.json", "[" * 100_000), "expected a tokenizer, found"),
    (lambda f: (f / "tokenizer.json").unlink(), "expected a tokenizer, found"),
    (
        _text("tokenizer.json", '{"model": {"type": "BPE", "vocab": {"a": 4000000000, "</s>": 1}, "merges": []}}'),
        "a vocab_size of at least the tokenizer's 4000000001",
    ),
    (_text("chat_template.jinja", b"\xff{{ 1 }}"), "chat_template.jinja, where a template in UTF-8 was expected"),
    (lambda f: edit(f / "tokenizer_config.json", chat_template=["x"]), "texts as name and template of every"),
    (lambda f: edit(f / "tokenizer_config.json", chat_template=[{"name": "x"}]), "texts as name and template of every"),
    (_text("tokenizer_config.json", "[]"), "tokenizer_config.json"),
    (_text("tokenizer_config.json", b"\xff"), "tokenizer_config.json"),
    (_text("tokenizer_config.json", "[" * 100_000), "tokenizer_config.json"),
    (lambda f: edit(f / "tokenizer_config.json", eos_token=3), "expected a tokenizer, found"),
    (lambda f: edit(f / "tokenizer_config.json", pad_token={"content": 3}), "expected a tokenizer, found"),
]

ODD_ROWS: list[tuple[bytes, str]] = [
    (lines(GOOD), ""),
    (lines(GOOD).rstrip(), ""),
    (lines(GOOD).replace(b"\n", b"\r\n"), ""),
    (b"\n\n" + lines(GOOD) + b"\n  \n", ""),
    (lines(GOOD | {"answer": 2}), ""),
    (lines(GOOD | {"answer": -2.5}), "--task.reward last_number"),
    (lines(GOOD | {"answer": ""}), ""),
    (lines(GOOD | {"answer": ["2"]}, GOOD | {"answer": {"a": [1]}}), ""),
    (lines(GOOD | {"question": ""}), ""),  # BOS
    (lines(GOOD | {"question": "数\U0001f600\u0000\u202e"}), ""),
    (lines(b'{"question": "\\ud83d\\ude00", "answer": "2"}'), ""),  # both halves
    (lines(GOOD | {"score": float("nan"), "": None, "deep": [[[]]]}), ""),
    (lines({"q x": "1", "'\"": "2"}), "--task.prompt_key 'q x' --task.answer_key \\'\\\""),
    (lines(chat({"role": "user", "content": "1+1="})), "--task.template chat"),
    (lines(chat({"role": "nobody", "content": ""})), "--task.template chat --task.system_prompt 'add ü'"),
    (lines(GOOD, GOOD | {"question": "1" * 500}), "--task.bad_rows drop"),
    (lines(GOOD, GOOD | {"question": "1" * 5_000_000}), "--task.bad_rows drop"),
    (lines(*[GOOD] * 5000), ""),
    (lines(GOOD | {"x": nested(99), "y": [[]] * 200}), ""),
]
NO_REWARDS = "def f(completions, **columns): return [None] * len(completions)"
ODD_REWARDS = [
    "def f(): return 1",
    "async def f(completion): return 1.0",
    NO_REWARDS,
    "def f(completions, **columns): return [None if text.endswith('7') else 1.0 for text in completions]",
    "def f(solution_str, ground_truth): return {'score': True, 'note': 'x'}",
    "def f(**row): return True",
    "def f(completion, strict=True): return len(completion)",
    "import numpy\ndef f(completion): return numpy.float32(0.5)",
    "import numpy\ndef f(completion): return numpy.bool_(True)",
    "import numpy\ndef f(completion): return numpy.array(1)",
    "import torch\ndef f(completion): return torch.tensor(0.5, requires_grad=True)",
    "from decimal import Decimal\ndef f(completion): return Decimal('0.5')",
    "from fractions import Fraction\ndef f(completion): return Fraction(1, 2)",
    "class F:\n  def __call__(self, completion): return 1.0\nf = F()",
    "from functools import partial\nf = partial(lambda completion, k: k, k=1.0)",
    "f = lambda completion: -1e38",
]
ODD_PROCESSES = [  # they print, or leave something behind in their process
    "print('hello')\ndef f(completion):\n  print(completion)\n  return 0",
    "import sys\nsys.stdout.close()\nsys.stderr.close()\ndef f(completion): return 0",
    "import threading, time\nthreading.Thread(target=time.sleep, args=[50]).start()\ndef f(completion): return 0",
]
