"""Environments of other packages, recognized by their shape: in this Python, and in another one."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from support.chat_folders import chat_folder
from support.lookalikes import Discrete
from support.played import Played, playing, prompt_of
from titan_rl.ext.agents.adapters import action_of, numbers, textarena
from titan_rl.text.tokenizer import OWN_CHAT
from titan_rl.wire.types import Prompt

PYTHONS = pytest.mark.parametrize("python", ["", sys.executable], ids=["here", "another"])
HERE = "support.lookalikes:"


def read(played: Played, id: int = 0) -> list[str]:
    return [played.tokenizer.decode(context, skip_special=False) for context in played.contexts[id]]


def chatted(played: Played, row: dict[str, Any], answer: str, *said: str) -> tuple[Any, list[str]]:
    tokenizer = played.tokenizer
    messages = [{"role": "user", "content": "Hello"}]
    prompt = Prompt(3, "", tokenizer.chat.prompt(messages), answer, row, messages=messages)
    turns = [[*tokenizer.encode(each), tokenizer.eos] for each in said]
    (outcome,) = played.play([prompt], lambda id, turn: turns[turn], end=tokenizer.eos)
    return outcome, read(played)


@PYTHONS
def test_gymnasium_text_is_an_action_and_what_is_drawn_is_read(tmp_path: Path, python: str) -> None:
    with playing(f"{HERE}Walk", tmp_path, python=python, render_mode="ansi") as played:
        outcome, other = played.play(
            [prompt_of("7=", id=0), prompt_of("7=", {"seed": 2}, id=1)], lambda id, turn: ["no", "go 1", "1", "1"][turn]
        )
    assert outcome.reward == 1.0
    assert other.metrics == {"unreadable": 1, "at": 6}, "1 + 2 + 3, and only numbers"
    first, second, *_ = read(played)
    assert first == "<s>7=<unk>o<unk>..."
    assert second == "<s>7=<unk>o<unk>...no</s>error<unk> expected an action from 0 to 1"
    assert read(played)[2].endswith("go 1</s>.<unk>o<unk>..")


@PYTHONS
def test_all_rollouts_of_a_prompt_begin_with_one_seed(tmp_path: Path, python: str) -> None:
    with playing(f"{HERE}Walk", tmp_path, python=python) as played:
        played.play([prompt_of("7=", id=5), prompt_of("7=", id=5), prompt_of("7=", id=4)], lambda id, turn: "1")
    assert [read(played, id)[0] for id in range(3)] == ["<s>7=1", "<s>7=1", "<s>7=0"]


@PYTHONS
def test_skyrl_reads_the_row_and_its_rewards_and_metrics_count(tmp_path: Path, python: str) -> None:
    chat_folder(tmp_path, "hermes")
    with playing(f"{HERE}Riddle", tmp_path, chat=OWN_CHAT, python=python, turns=3) as played:
        outcome, contexts = chatted(played, {}, "42", "41", "42")
    assert contexts[0].endswith("user\nHello<|im_end|>\n<|im_start|>user\n+<|im_end|>\n<|im_start|>assistant\n")
    assert contexts[1].startswith(contexts[0] + "41<|im_end|>")
    assert (outcome.reward, outcome.turn_rewards) == (1.0, [0.0, 1.0])
    assert outcome.metrics == {"tries": 2, "steps": 2}


@PYTHONS
def test_tinkers_messages_replace_the_prompt_and_only_an_edit_begins_a_branch(tmp_path: Path, python: str) -> None:
    chat_folder(tmp_path, "hermes")
    with playing(f"{HERE}Echo", tmp_path, chat=OWN_CHAT, python=python) as played:
        outcome, contexts = chatted(played, {"question": "Which?", "other": "column"}, "", "a", "b", "c")
    assert contexts[0] == "<|im_start|>user\nWhich?<|im_end|>\n<|im_start|>assistant\n"
    assert contexts[1].startswith(contexts[0] + "a<|im_end|>")
    assert contexts[2] == "<|im_start|>user\nagain<|im_end|>\n<|im_start|>assistant\n"
    assert (outcome.status, outcome.reward, outcome.metrics) == ("completed", 1.5, {"letters": 3})


@PYTHONS
def test_a_conversation_without_a_chat_template_is_its_texts(tmp_path: Path, python: str) -> None:
    with playing(f"{HERE}Echo", tmp_path, python=python) as played:
        (outcome,) = played.play([prompt_of("7=", {"question": "1+1="})], lambda id, turn: "abc"[turn])
    assert read(played) == ["<s>1+1=", "<s>1+1=a</s>=a", "<s>again"]
    assert outcome.reward == 1.5


@PYTHONS
def test_a_textarena_game_rewards_its_end(tmp_path: Path, python: str) -> None:
    with playing(f"{HERE}Number", tmp_path, python=python) as played:
        (outcome,) = played.play([prompt_of("", {"seed": 6})], lambda id, turn: str(5 + turn))
    assert (outcome.reward, outcome.turn_rewards, outcome.metrics) == (1.0, [0.0, 1.0], {"turns": 1})
    assert read(played) == ["<s>guess\nagain", "<s>guess\nagain5</s>guess\nagain"], "its own words are not read twice"


def test_a_game_for_two_players_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = (
        "class Duel:\n  def reset(self, num_players, seed=None):\n    assert num_players == 2, 'has to be 2'\n"
        "def make(id):\n  if id.endswith('-raw'): raise ValueError\n  return Duel()\n"
    )
    (tmp_path / "textarena.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "textarena", raising=False)
    with pytest.raises(ValueError, match="expected a game for one player, found TicTacToe-v0: has to be 2"):
        textarena("TicTacToe-v0", {})
    monkeypatch.delitem(sys.modules, "textarena", raising=False)


@PYTHONS
def test_trls_environment_factory_gets_columns_appends_to_the_prompt_and_owns_its_reward(
    tmp_path: Path, python: str
) -> None:
    def call(name: str, **arguments: Any) -> str:
        return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"

    chat_folder(tmp_path, "hermes")
    said = [call("increment", step=2), call("increment", step=-1), call("increment", step="x"), "done"]
    with playing(f"{HERE}Increment", tmp_path, chat=OWN_CHAT, python=python) as played:
        outcome, contexts = chatted(played, {"start": 5, "other": "column"}, "", *said)
    assert '"name": "increment", "description": "Add to the counter."' in contexts[0]
    assert contexts[0].endswith("<|im_start|>user\nHello from 5<|im_end|>\n<|im_start|>assistant\n")
    assert contexts[1].endswith("<|im_start|>tool\n7<|im_end|>\n<|im_start|>assistant\n")
    assert "error: increment: ValueError: only upwards" in contexts[2]
    assert "error: increment: step: expected integer, found 'x'" in contexts[3]
    assert outcome.reward == 7.0
    assert outcome.metrics["tools/increment/calls"] == 3
    assert outcome.metrics["tools/increment/failures"] == 2


@pytest.mark.parametrize(
    ("text", "space", "action"),
    [
        ("left", None, "left"),
        ("I go 2", Discrete(4), 2),
        ("-1", Discrete(3, start=-1), -1),
    ],
)
def test_a_text_is_an_action_of_its_space(text: str, space: Any, action: Any) -> None:
    assert action_of(text, space) == action


@pytest.mark.parametrize("text", ["4", "none", "9" * 400, "²"])
def test_a_text_that_is_no_action_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="expected an action from 0 to 3"):
        action_of(text, Discrete(4))


def test_only_finite_numbers_are_logged() -> None:
    assert numbers({"a": 1, "b": float("nan"), "c": "2", "d": True, "e": [1], "f": None}) == {"a": 1, "d": True}


def test_a_package_that_is_not_installed_is_named(tmp_path: Path) -> None:
    why = "environment.name = 'skyrl:gsm8k': ModuleNotFoundError: No module named 'skyrl_gym'"
    with pytest.raises(ValueError, match=why), playing("skyrl:gsm8k", tmp_path):
        pass
