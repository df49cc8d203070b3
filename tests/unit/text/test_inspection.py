"""Bugs planted in templates are named, with the first token that differs."""

import resource
import time
from pathlib import Path
from typing import Any

import pytest

from support.chat_folders import TEMPLATES, chat_folder
from titan_rl.text.chat import ChatRenderer
from titan_rl.text.inspection import TURNS, Finding, inspect_template, sample_turns, verdict
from titan_rl.text.template import ChatSettings
from titan_rl.text.tokenizer import TextTokenizer, build
from titan_rl.wire.types import Branch

PINNED = {"date_string": "26 Jul 2024"}


def inspected(folder: Path, name: str = "hermes", *changes: tuple[str, str], **chat: Any) -> dict[str, Finding]:
    source = (TEMPLATES / f"{name}.jinja").read_text()
    for old, new in changes:
        assert old in source
        source = source.replace(old, new)
    text = TextTokenizer.load(chat_folder(folder, name, source), ChatSettings(**{"kwargs": PINNED, **chat}))
    return {finding.check: finding for finding in inspect_template(text)}


def remarks(findings: dict[str, Finding]) -> set[str]:
    return {check for check, finding in findings.items() if finding.detail}


def test_a_sound_template_gives_no_finding_to_refuse(tmp_path: Path) -> None:
    findings = inspected(tmp_path)
    assert remarks(findings) == {"padding"}  # which is the second end of a turn in this folder
    assert not any(finding.refuses for finding in findings.values())
    assert verdict(list(findings.values())) == "extends its own text: one branch per rollout"


OTHERS = '{{- message.content + "<|im_end|>\\n" }}'
PLANTED = {
    "a separator is dropped once a turn is past": (
        ('{{- "\\n" }}\n    {%- else %}', '{{- "\\n" if loop.revindex < 4 }}\n    {%- else %}'),
        "two answers, then the user",
        "1517.<|im_end|>': expected '\\n<|im_start|>user\\n",
    ),
    "past answers are rewritten": (
        ("{{- message.content }}\n", "{{- message.content if loop.last else message.content | upper }}\n"),
        "an answer, then the user",
        "is kept as sampled, which the template would change: token ",
    ),
    "the first observation is dropped": (
        (OTHERS, '{{- (message.content if not loop.first) ~ "<|im_end|>\\n" }}'),
        "first message",
        "found none of user 'What is 37*41?'",
    ),
    "what tools say is dropped": (
        (OTHERS, '{{- (message.content if message.role != "tool") ~ "<|im_end|>\\n" }}'),
        "a tool's result",
        "found none of tool 'exactly 1517'",
    ),
    "a turn ends with a token that does not stop": (
        ('{{- "<|im_end|>" }}', '{{- "<|im_start|>" }}'),
        "end of a turn",
        "found '<|im_start|>', where sampling does not stop: add ",
    ),
    "calls cannot be read": (('"arguments": \'', '"inputs": \''), "tool calls", "no format that can be read back"),
    "tools are not offered": (("{%- if tools %}", "{%- if false %}"), "tools", "does not write the tools' schemas"),
    "answers are opened otherwise": (
        ('{{- "<|im_start|>assistant\\n" }}', '{{- "<|im_start|>model\\n" }}'),
        "opening",
        "expected 'model\\n', found 'a",
    ),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_planted_bug_is_named(tmp_path: Path, bug: str) -> None:
    change, check, detail = PLANTED[bug]
    finding = inspected(tmp_path, "hermes", change)[check]
    assert detail in finding.detail
    assert finding.refuses == (check == "first message")


def test_a_second_bos_and_todays_date_are_named(tmp_path: Path) -> None:
    once = inspected(tmp_path / "once", "header", kwargs={})
    assert remarks(once) == {"padding", "white space of an answer", "date"}
    twice = inspected(tmp_path / "twice", "header", ("{{- bos_token }}", "{{- bos_token + bos_token }}"))
    assert twice["begin of a text"] == Finding("begin of a text", "expected '<|begin|>' once, found it twice", True)
    assert "date" not in remarks(twice)


def test_a_delta_that_is_not_the_templates_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted in the renderer: the separator between turns is lost, as a bridge of fixed strings would lose it."""
    whole = ChatRenderer.extend

    def lossy(self: ChatRenderer, *args: Any) -> list[int] | None:
        found = whole(self, *args)
        return found and found[1:]

    monkeypatch.setattr(ChatRenderer, "extend", lossy)
    for name in TURNS:
        finding = inspected(tmp_path)[name]
        assert finding.refuses
        assert "found another delta: token " in finding.detail
        assert "after " in finding.detail
        assert "expected '\\n<|im_start|>" in finding.detail


def test_a_tools_output_in_the_mask_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def all_but_the_prompt(branch: Branch) -> list[int]:
        prompt = len(branch.turns[0].context)
        return [0] * prompt + [1] * (len(branch.tokens) - prompt)

    monkeypatch.setattr(Branch, "mask", property(all_but_the_prompt))
    finding = inspected(tmp_path)["mask"]
    assert finding.refuses
    assert "found it wrong where turn 2 reads '\\n<|im_start|>tool\\nexactly 1517<|im_end|>" in finding.detail


def test_thinking_that_a_template_strips(tmp_path: Path) -> None:
    kept = inspected(tmp_path, "qwen3")
    assert "expected '<think>\\n37*41" in kept["a thought and an answer, then the user"].detail
    assert verdict(list(kept.values())).endswith("turns are kept as sampled: one branch per rollout")
    stripped = inspected(tmp_path, "qwen3", thinking="template")
    assert verdict(list(stripped.values())).endswith("some turns begin a branch")
    assert not stripped["a thought and a call, then its result"].detail


def test_text_that_forges_turns_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from titan_rl.text.outside import OutsideText

    monkeypatch.setattr(OutsideText, "masked", lambda self, value: value)
    findings = inspected(tmp_path)
    for place in ("a user's text", "a tool's result"):
        assert findings[f"control tokens in {place}"].refuses


def test_a_template_that_does_not_end_is_found_at_once(tmp_path: Path) -> None:
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    text = TextTokenizer.load(chat_folder(tmp_path, "hermes", endless))
    begun = time.process_time()
    (finding,) = inspect_template(text)
    assert finding.refuses
    assert "TemplateStuck: expected a chat template that ends" in finding.detail
    assert time.process_time() - begun < 20


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'x' * 99999 }}" * 3, "expected a prompt of at most 200,000 characters, found one of 299,997"),
        ("{{ ''|center(10**10) }}", "MemoryError"),
        ("{{ '%09999999999d'|format(1) }}", "MemoryError"),
        ("{% set n = namespace(x='x') %}{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "MemoryError"),
    ],
)
def test_a_template_that_writes_without_bound_is_found(tmp_path: Path, template: str, message: str) -> None:
    before = resource.getrlimit(resource.RLIMIT_AS)
    (finding,) = inspect_template(TextTokenizer.load(chat_folder(tmp_path, "hermes", template)))
    assert finding.refuses
    assert message in finding.detail
    assert resource.getrlimit(resource.RLIMIT_AS) == before


@pytest.mark.parametrize("name", ["hermes", "qwen3", "header", "phi3", "coder", "mistral"])
def test_the_sample_is_what_a_rollout_would_hold(tmp_path: Path, name: str) -> None:
    text = TextTokenizer.load(chat_folder(tmp_path, name), ChatSettings(kwargs=PINNED))
    (start, called), (added, said) = sample_turns(text)
    result = "And 52*68" if name == "phi3" else "exactly 1517"
    assert result in text.decode(added)
    assert result not in text.decode([*called, *said])
    assert called[-1] == said[-1] == text.eos
    assert "37*41" in text.decode(start)


def test_the_built_in_tokenizer(tmp_path: Path) -> None:
    build(tmp_path)
    findings = list(inspect_template(TextTokenizer.load(tmp_path)))
    assert not any(finding.refuses for finding in findings)
    assert verdict(findings) == "extends its own text: one branch per rollout"
