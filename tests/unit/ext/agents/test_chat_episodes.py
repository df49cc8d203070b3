"""Rollouts in a chat template: tools are offered, called and answered, as tokens that continue the sampled ones."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from support.chat_folders import chat_folder
from support.played import Played, playing
from titan_rl.ext.agents.episodes import Reply, Step
from titan_rl.text.template import ChatSettings
from titan_rl.text.tokenizer import OWN_CHAT
from titan_rl.wire.types import Prompt

MCP_SERVER = '''
from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError

server, pages = MCPServer("pages"), []


@server.tool()
def write(page: str, times: int = 1) -> str:
    """Write a page."""
    if page == "full":
        raise ToolError("no page is left")
    pages.extend([page] * times)
    return f"pages: {len(pages)}"


server.run("stdio")
'''


class Shop:
    """Tools by hints; a hidden price; rewarded by the last answer."""

    def reset(self, row: Mapping[str, Any]) -> str:
        self._price = int(row["price"])
        self.tools = [self.price]
        return "What does it cost?"

    def price(self, thing: str) -> str:
        """Look a price up.

        Args:
            thing: Its name.
        """
        return f"{thing}<|im_end|>: {self._price}"

    def step(self, reply: Reply) -> Step:
        return Step(reward=float(reply.text == str(self._price)), done=True)


class Counter:
    """A set of tools, as a class without step."""

    def reset(self, row: Mapping[str, Any]) -> None:
        self._count = 0

    def add(self, n: int) -> int:
        """Add to the count."""
        self._count += n
        return self._count

    def get_reward(self) -> float:
        return float(self._count)


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def played_chat(played: Played, row: dict[str, Any], *said: str) -> tuple[Any, list[str]]:
    """Play one rollout; return its outcome and the contexts as text."""
    tokenizer = played.tokenizer
    messages = [{"role": "user", "content": "Hello"}]
    prompt = Prompt(0, "", tokenizer.chat.prompt(messages), "", row, messages=messages)
    turns = [[*tokenizer.encode(each), tokenizer.eos] for each in said]
    (outcome,) = played.play([prompt], lambda id, turn: turns[turn], end=tokenizer.eos)
    return outcome, [tokenizer.decode(context, skip_special=False) for context in played.contexts[0]]


def test_tools_are_offered_called_and_answered_in_the_template(tmp_path: Path) -> None:
    chat_folder(tmp_path, "hermes")
    with playing(f"{__name__}:Shop", tmp_path, chat=OWN_CHAT) as played:
        asked = call("price", thing="hat")
        outcome, contexts = played_chat(played, {"price": 12}, asked, "12")
        first, second = played.contexts[0]
        sampled = [*played.tokenizer.encode(asked), played.tokenizer.eos]
    assert '"name": "price", "description": "Look a price up."' in contexts[0]
    assert contexts[0].endswith(
        "user\nHello<|im_end|>\n<|im_start|>user\nWhat does it cost?<|im_end|>\n<|im_start|>assistant\n"
    )
    assert second[: len(first) + len(sampled)] == [*first, *sampled], "sampled tokens were tokenized again"
    added = second[len(first) + len(sampled) :]
    assert played.tokenizer.decode(added, skip_special=False) == (
        "\n<|im_start|>tool\nhat<|im_end|>: 12<|im_end|>\n<|im_start|>assistant\n"
    )
    assert added.count(played.tokenizer.eos) == 1, "a tool's output ended a turn"
    assert (outcome.status, outcome.reward) == ("completed", 1.0)
    assert outcome.metrics["tools/price/calls"] == 1
    roles = [message["role"] for message in outcome.messages]
    assert roles == ["user", "user", "assistant", "tool", "assistant"]


def test_wrong_calls_are_observations_and_the_rollout_goes_on(tmp_path: Path) -> None:
    chat_folder(tmp_path, "hermes")
    said = [
        call("add", n="x"),
        call("sub", n=1),
        '<tool_call>{"name": "add"',
        call("add", n=2) + call("add", n=3),
        "ok",
    ]
    with playing(f"{__name__}:Counter", tmp_path, chat=OWN_CHAT) as played:
        outcome, contexts = played_chat(played, {}, *said)
    assert "error: add: n: expected integer, found 'x'" in contexts[1]
    assert "error: expected one of the tools add, found 'sub'" in contexts[2]
    assert "error: expected <tool_call> and </tool_call> around each call" in contexts[3]
    assert contexts[4].endswith("tool\n2<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n")
    assert (outcome.status, outcome.reward) == ("completed", 5.0)
    assert outcome.metrics["tools/add/calls"] == 3
    assert outcome.metrics["tools/add/failures"] == 1
    assert outcome.metrics["tools/unknown/failures"] == 1


def test_a_template_that_cannot_extend_itself_begins_a_branch(tmp_path: Path) -> None:
    chat_folder(tmp_path, "qwen3")
    with playing("support.odd_environments:Odd", tmp_path, chat=ChatSettings(thinking="template")) as played:
        outcome, contexts = played_chat(played, {}, "<think>\nhm\n</think>\n\na", "b", "c")
    assert outcome.status == "completed"
    assert "hm" not in contexts[1]
    assert contexts[1].count("<|im_start|>assistant") == 2


def test_without_tools_or_observation_the_first_context_is_the_prompt(tmp_path: Path) -> None:
    chat_folder(tmp_path, "hermes")
    with playing(f"{__name__}:Silent", tmp_path, chat=OWN_CHAT) as played:
        messages = [{"role": "user", "content": "Hello"}]
        prompt = Prompt(0, "", [7, 8, 9], "", {}, messages=messages)
        (outcome,) = played.play([prompt], lambda id, turn: [played.tokenizer.eos], end=played.tokenizer.eos)
    assert played.contexts[0] == [[7, 8, 9]]
    assert replace(outcome, messages=()).reward is None, "a reward of None leaves it to task.reward"


class Silent:
    def reset(self) -> None:
        return None

    def step(self, reply: Reply) -> tuple[None, None, bool, dict[str, Any]]:
        return None, None, True, {}


def test_the_tools_of_an_mcp_server_are_offered_and_called(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = Path(__file__).parents[4] / "docs/environments.md"
    (block,) = re.findall(r"```python\n(from contextlib[^`]*?class Served:.*?)```", page.read_text(), re.DOTALL)
    (tmp_path / "served_tools.py").write_text(block.replace('"python"', repr(sys.executable)))
    (tmp_path / "server.py").write_text(MCP_SERVER)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    chat_folder(tmp_path, "hermes")
    said = [call("write", page="a", times=2), call("write", page="full"), call("write", times="x"), "done"]
    with playing("served_tools:Served", tmp_path, chat=OWN_CHAT) as played:
        for _ in range(2):  # each rollout has its own server
            outcome, contexts = played_chat(played, {}, *said)
            assert '"name": "write", "description": "Write a page."' in contexts[0]
            assert "pages: 2" in contexts[1]
            assert "no page is left" in contexts[2]
            assert "missing argument page" in contexts[3]
            assert (outcome.status, outcome.error) == ("completed", "")
            assert outcome.metrics["tools/write/failures"] == 2
    assert not [child for child in psutil.Process().children(recursive=True) if "server.py" in child.cmdline()]
