"""Chat templates are checked before a run, and shown by the linter."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from support.chat_folders import TEMPLATES, chat_folder
from support.checked_configs import config, edit
from support.folders import write_header
from titan_rl import run
from titan_rl.config.sections import ModelSection
from titan_rl.preflight.checks import problems, warnings
from titan_rl.preflight.plan import policy_of
from titan_rl.preflight.shapes import shape_of
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools import lint

SHAPE = replace(shape_of(ModelSection()), vocab_size=640)
Linted = Callable[..., tuple[int, str]]


def model(folder: Path, name: str, template: str = "") -> Path:
    """Write a whole Hugging Face folder with a chat template."""
    chat_folder(folder, name, template)
    (folder / "config.json").write_text(json.dumps(SHAPE.hf_config(bos=1, eos=2, pad=0)))
    write_header(folder / "model.safetensors", SHAPE.hf_tensors())
    return folder


@pytest.fixture
def linted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Linted:
    def call(folder: Path, task: str = "", *flags: str) -> tuple[int, str]:
        (tmp_path / "run.toml").write_text(f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"\n{task}\n')
        code = lint.main(["--config", str(tmp_path / "run.toml"), *flags])
        return code, capsys.readouterr().out

    return call


def test_a_sound_template_is_shown_with_its_mask(tmp_path: Path, linted: Linted) -> None:
    code, out = linted(model(tmp_path / "model", "hermes"))
    assert code == 0
    assert "✗" not in out
    assert "verdict extends its own text: one branch per rollout\ncalls hermes" in out
    said = re.findall("⟦(.*?)⟧", out, re.DOTALL)
    assert len(said) == 2
    assert said[0].endswith('{"name": "multiply", "arguments": {"b": 41, "a": 37}}\n</tool_call><|im_end|>')
    assert said[1] == "It is 1517.<|im_end|>"
    assert "⟧\n<|im_start|>tool\nexactly 1517<|im_end|>\n<|im_start|>assistant\n⟦" in out


def test_a_template_that_must_not_be_used_fails(tmp_path: Path, linted: Linted) -> None:
    source = (TEMPLATES / "hermes.jinja").read_text()
    silent = source.replace("{{- message.content + ", "{{- (message.content if not loop.first) ~ ")
    assert silent != source
    folder = model(tmp_path / "model", "hermes")
    (tmp_path / "silent.jinja").write_text(silent)
    code, out = linted(folder, f'chat_template = "{tmp_path}/silent.jinja"')
    assert code == 1
    assert re.search(r"✗ first message +expected the text of every message, found none of user 'What is", out)
    assert re.search(r"! task.chat_template +differs from the one of .*: token \d+, after ", out)
    endless = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    code, out = linted(folder, f"chat_template = '''{endless}'''")
    assert code == 1
    assert "✗ one question" in out
    assert "TemplateStuck" in out


def test_a_dropped_separator_is_shown_against_the_models_own_template(tmp_path: Path, linted: Linted) -> None:
    lost = (TEMPLATES / "qwen3.jinja").read_text().replace("{{- '<|im_end|>\\n' }}", "{{- '<|im_end|>' }}")
    (tmp_path / "lost.jinja").write_text(lost)
    folder = model(tmp_path / "model", "qwen3")
    code, out = linted(folder, f'chat_template = "{tmp_path}/lost.jinja"')
    assert code == 0
    assert re.search(r"! task.chat_template +differs .*<\|im_end\|>': expected '\\n<\|im_start\|>user", out)
    assert not re.search(r"! task.chat_template", linted(folder, f'chat_template = "{TEMPLATES}/qwen3.jinja"')[1])


def test_variables_reach_the_template(tmp_path: Path, linted: Linted) -> None:
    folder = model(tmp_path / "model", "qwen3")
    flags = ("--task.chat_template_kwargs", "{enable_thinking = false}")
    assert "<|im_start|>assistant\n<think>\n\n</think>\n\n⟦" in linted(folder, "", *flags)[1]
    assert "! date" in linted(model(tmp_path / "dated", "header"))[1]
    pinned = linted(tmp_path / "dated", 'chat_template_kwargs = {date_string = "26 Jul 2024"}')[1]
    assert "✓ date" in pinned
    assert "Today: 26 Jul 2024" in pinned


def test_a_config_that_cannot_be_used_is_refused(
    tmp_path: Path, linted: Linted, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = model(tmp_path / "model", "hermes")
    (tmp_path / "latin.jinja").write_bytes(b"\xff{{ messages }}")
    for task, message in (
        ('chat_template = "nowhere.jinja"', "task.chat_template: expected a Jinja template or the path of a file"),
        (f'chat_template = "{folder}"', "task.chat_template: expected a Jinja template or the path of a file with one"),
        (f'chat_template = "{tmp_path}/latin.jinja"', "latin.jinja\": 'utf-8' codec"),
        ("chat_template_kwargs = {tools = 1}", "task.chat_template_kwargs: expected variables of the template other"),
        ("chat_template_kwarg = 1", "has no key 'chat_template_kwarg'; did you mean 'chat_template_kwargs'?"),
    ):
        with pytest.raises(SystemExit) as stop:
            linted(folder, task)
        assert stop.value.code == 2
        assert message in capsys.readouterr().err
    (folder / "tokenizer.json").unlink()
    with pytest.raises(SystemExit) as stop:
        linted(folder)
    assert stop.value.code == 2
    assert "model.hf_assets_path: expected a tokenizer in" in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert lint.main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m titan_rl lint --config NAME|FILE")


def test_plain_prompts_use_no_template(tmp_path: Path, linted: Linted) -> None:
    folder = model(tmp_path / "model", "hermes")
    code, out = linted(folder, "", "--task.template", "plain")
    assert code == 0
    assert 'is not used: task.template = "plain"' in out
    toml = (
        f'[model]\nhf_assets_path = "{folder}"\n[task]\nchat_template = "{{{{ 1 }}}}"\nchat_template_kwargs = {{a = 1}}'
    )
    template, kwargs = problems(config(tmp_path, toml))
    assert template == 'task.chat_template: expected "" with task.template = "plain", found "{{ 1 }}"'
    assert kwargs == 'task.chat_template_kwargs: expected {} with task.template = "plain", found {"a" = 1}'


def test_a_run_is_refused_for_the_same_reasons(tmp_path: Path) -> None:
    source = (TEMPLATES / "hermes.jinja").read_text()
    silent = source.replace("{{- message.content + ", "{{- (message.content if not loop.first) ~ ")
    folder = model(tmp_path / "model", "hermes", silent)
    (problem,) = problems(config(tmp_path, f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"'))
    expected = "first message: expected the text of every message, found none of user 'What is 37*41?'"
    assert problem == f"the chat template of {folder}: {expected}"


def test_an_environment_needs_later_messages(tmp_path: Path) -> None:
    first_only = "{%- for message in messages if message.role != 'user' or message == messages[0] %}"
    source = (TEMPLATES / "hermes.jinja").read_text().replace("{%- for message in messages %}", first_only)
    toml = f'[model]\nhf_assets_path = "{model(tmp_path / "model", "hermes", source)}"\n[task]\ntemplate = "chat"\n'
    assert problems(config(tmp_path, toml)) == []
    (problem,) = problems(config(tmp_path, f'{toml}[environment]\nname = "support.odd_environments:Odd"'))
    assert "later messages: expected the text of every message, found none of user 'And 52*68?'" in problem


def test_a_file_is_read_when_the_run_begins(tmp_path: Path) -> None:
    folder, file = model(tmp_path / "model", "hermes"), tmp_path / "mine.jinja"
    file.write_text("{{ messages[0].content }}!")
    toml = f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"\nchat_template = "{file}"'
    tokenizer = policy_of(config(tmp_path, toml), tmp_path / "unused").tokenizer
    file.write_text("{{ messages[0].content }}?")
    assert tokenizer.decode(tokenizer.prompt("Hm", "chat")) == "Hm!"


def test_an_end_at_which_sampling_does_not_stop_is_a_warning(tmp_path: Path) -> None:
    """As of a base model, whose own EOS is not the one of its chat template. With it among the stop tokens, turns end
    there, too."""
    folder = model(tmp_path / "model", "hermes")
    (folder / "generation_config.json").unlink()
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    edit(folder / "config.json", eos_token_id=None)
    toml = f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"\n[rollout]\nstop_token_ids = '
    end = TextTokenizer.load(folder).encode("<|im_end|>")
    (warning,) = warnings(config(tmp_path, f"{toml}[]"))
    assert warning.startswith("rollout.stop_token_ids: expected a turn that ends with one of '<|endoftext|>', found")
    assert warning.endswith(f"'<|im_end|>', where sampling does not stop: add {end[0]} to rollout.stop_token_ids")
    stopped = config(tmp_path, f"{toml}{[*end, 5]}")  # 5 is a piece of text, and no end
    assert (warnings(stopped), problems(stopped)) == ([], [])
    text = policy_of(stopped, tmp_path / "unused").tokenizer
    assert text.chat.eos_ids == (*text.eos_ids, *end)
    question = {"role": "user", "content": "And?"}
    assert text.decode(text.chat.extend([*end], [question]) or [], skip_special=False).startswith("\n<|im_start|>user")


def test_a_dry_run_says_what_turns_cost(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model.hf_assets_path", str(model(tmp_path / "model", "qwen3")), "--task.template", "chat"]
    assert run.main(["--config", "grpo_llama", "--dry-run", *flags, "--job.dump_folder", str(tmp_path / "dump")]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "template its own, does not extend its own text; turns are kept as sampled: one branch per rollout" in out
    assert "calls as hermes; thinking: keep" in out


def test_a_template_that_does_not_write_the_tools_of_the_environment_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "shop.py").write_text(
        "class Env:\n  def reset(self): return 'buy'\n  def step(self, reply): return '', 1.0, True, {}\n"
        "  def price(self, item: str) -> str:\n    'Tell a price.'\n    return '1'\n"
        "  @property\n  def tools(self): return [self.price]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, template, warned in (
        ("hermes", "", False),
        ("own", "{% for m in messages %}{{ m.content }}{% endfor %}", True),
    ):
        folder = model(tmp_path / name, "hermes")
        more = f'chat_template = "{template}"\n' if template else ""
        toml = f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"\n{more}'
        found = config(tmp_path, f'{toml}[environment]\nname = "shop:Env"\n')
        problems(found)  # the probe finds the tools
        said = [each for each in warnings(found) if "does not write the tools" in each]
        assert bool(said) == warned, (said, problems(found))
        assert not warned or said[0].endswith("so the policy cannot know price")


def test_the_linter_fetches_the_model_that_a_run_would(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = model(tmp_path / "model", "hermes")
    monkeypatch.setattr("titan_rl.tools.fetch.models.model_folder", lambda name, key: folder)
    (tmp_path / "run.toml").write_text('[model]\nhf_assets_path = "fetch:smollm2"\n[task]\ntemplate = "chat"\n')
    assert lint.main(["--config", str(tmp_path / "run.toml")]) == 0


def test_a_template_that_writes_the_date_is_a_warning(tmp_path: Path) -> None:
    folder = model(tmp_path / "model", "header")
    toml = f'[model]\nhf_assets_path = "{folder}"\n[task]\ntemplate = "chat"\n'
    dated = config(tmp_path, toml)
    assert problems(dated) == []
    (warning,) = warnings(dated)
    assert warning.startswith("task.chat_template_kwargs: the chat template writes today's date, so runs differ")
    assert warnings(config(tmp_path, f'{toml}chat_template_kwargs = {{date_string = "26 Jul 2024"}}')) == []
