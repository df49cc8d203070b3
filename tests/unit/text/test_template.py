"""Templates are found and rendered as transformers does it, and one that does not end is refused."""

import json
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from titan_rl.text import template as room
from titan_rl.text.template import ChatTemplate, TemplateStuck, named_tokens, own_template

ASKED = [{"role": "user", "content": "hello"}]


def render(source: str, **kwargs: object) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}, kwargs).render(ASKED, opened=True)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("{% for a in range(5000) %}{% for b in range(5000) %}{% endfor %}{% endfor %}", "in the loop of line 1"),
        ("{% macro twice() %}{{ twice() }}{{ twice() }}{% endmacro %}{{ twice() }}", "in a call|recursion"),
        ("{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "in a call|in the loop|recursion"),
        ("{% for i in range(999) %}{{ range(99999)|list|sum }}{% endfor %}", "in the filter"),
        ("{{ range(99999)|batch(1)|list|tojson }}" * 20, "in the filter"),
        ("{{ 'x' * 999999999 }}", "999999999"),
        ("{{ 9 ** 99999999 }}", "99999999"),
    ],
)
def test_a_template_that_does_not_end_is_refused(source: str, found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_STEPS", 20_000)
    with pytest.raises((TemplateStuck, RecursionError), match=found):
        render(source)


def test_a_template_that_takes_long_in_few_steps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_SECONDS", 0.2)
    source = "{% set xs = range(99999)|list %}{% for i in range(9999) %}{{ xs == xs[::-1] }}{% endfor %}"
    with pytest.raises(TemplateStuck, match=r"over 0\.2 s, in the loop"):
        render(source)


def test_each_rendering_has_all_its_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MOST_STEPS", 150)
    source = "{% for a in range(100) %}{% endfor %}{{ 2 ** 3 * 1.5 }}{{ 'ab' * 2 }}"
    assert [render(source) for _ in range(3)] == ["12.0abab"] * 3


def test_loops_know_their_length_and_place() -> None:
    source = "{% for m in 'abc' %}{{ loop.index }}{{ m }}{{ loop.length }}{{ '!' if loop.last }}{% endfor %}"
    assert render(source) == "1a32b33c3!"
    assert render("{% for m in [] %}{% else %}none{% endfor %}{% for a in 'ab' %}{% break %}{% endfor %}") == "none"


def test_the_date_can_be_pinned() -> None:
    source = "{{ strftime_now('%Y-%m-%d') }}"
    assert render(source, date_string="26 Jul 2024") == "26 Jul 2024"
    datetime.strptime(render(source), "%Y-%m-%d")


def test_arguments_are_text_where_a_template_joins_them() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    source = "{{ 'call ' + messages[0].tool_calls[0].function.arguments }}"
    assert ChatTemplate(source, {}, {}).render(messages, opened=True) == 'call {"a": 1}'
    with pytest.raises(TypeError):
        render("{{ 'a' + messages }}")


def test_a_folders_template_is_where_transformers_finds_it(tmp_path: Path) -> None:
    assert own_template(tmp_path, {}) == ("", "")
    assert own_template(tmp_path, {"chat_template": "a"}) == ("a", "")
    listed = [{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]
    assert own_template(tmp_path, {"chat_template": listed}) == ("a", "b")
    (tmp_path / "chat_template.jinja").write_text("c")
    assert own_template(tmp_path, {"chat_template": "a"}) == ("c", "")
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("d")
    assert own_template(tmp_path, {}) == ("c", "d")
    both = ChatTemplate("plain", {}, {}, "with tools")
    assert (both.render(ASKED, opened=True), both.render(ASKED, [{}], opened=True)) == ("plain", "with tools")


def test_named_tokens_are_texts() -> None:
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "pad_token": None, "model_max_length": 5}
    settings["extra_special_tokens"] = {"image_token": "<i>"}
    assert named_tokens(settings) == {"bos_token": "<s>", "eos_token": "</s>", "image_token": "<i>"}
    assert render("{{ bos_token }}{{ bos_token if false }}") == "<s>"


def test_rendering_imports_neither_torch_nor_transformers() -> None:
    program = (
        "import sys; from titan_rl.text.template import ChatTemplate; from titan_rl.text import chat; "
        f"ChatTemplate('hi', {{}}, {{}}).render({json.dumps(ASKED)}, opened=True); "
        "sys.exit(bool({'torch', 'transformers'} & sys.modules.keys()))"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
