"""Schemas of tools, and what becomes of calls."""

import asyncio
from typing import Literal

import pytest

from titan_rl.ext.agents.tools import Toolbox, ToolCall, ToolFailed, schema


def search(
    query: str, pages: int = 3, kind: Literal["web", "book"] = "web", near: list[float] | None = None
) -> list[str]:
    """Search for a text.

    More about it.

    Args:
        query: What to search for,
            in words.
        pages (int): How many pages.

    Returns:
        The pages.
    """
    return [f"{query} {page} {kind}" for page in range(pages)]


async def slow(seconds: float) -> dict[str, float]:
    """Wait."""
    await asyncio.sleep(seconds)
    return {"waited": seconds}


def broken() -> str:
    raise KeyError("no such thing")


def answer(name: str, arguments: object, toolbox: Toolbox | None = None) -> str:
    box = toolbox or Toolbox([search, slow, broken])
    return asyncio.run(box.call(ToolCall(name, arguments)))  # type: ignore[arg-type]


def test_the_schema_is_the_signature_and_the_docstring() -> None:
    assert schema(search) == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search for a text. More about it.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "What to search for, in words."},
                    "pages": {"type": "integer", "description": "How many pages."},
                    "kind": {"enum": ["web", "book"]},
                    "near": {"anyOf": [{"type": "array", "items": {"type": "number"}}, {"type": "null"}]},
                },
                "required": ["query"],
            },
        },
    }


def test_a_call_is_answered_as_text_or_json() -> None:
    assert answer("search", {"query": "cat", "pages": 2}) == '["cat 0 web", "cat 1 web"]'
    assert answer("slow", {"seconds": 0}) == '{"waited": 0}'


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("serach", {}, "error: expected one of the tools search, slow, broken, found 'serach'"),
        ("search", {}, "error: search: missing argument query"),
        ("search", "cat", "error: search: expected an object of arguments, found 'cat'"),
        ("search", {"query": 3}, "error: search: query: expected string, found 3"),
        ("search", {"query": "a", "pages": True}, "error: search: pages: expected integer, found True"),
        ("search", {"query": "a", "kind": "film"}, "error: search: kind: expected one of 'web', 'book', found 'film'"),
        (
            "search",
            {"query": "a", "near": [1, "x"]},
            "error: search: near: expected an array of which each is number or null, found [1, 'x']",
        ),
        (
            "search",
            {"query": "a", "lang": "en"},
            "error: search: expected the arguments query, pages, kind, near, found lang",
        ),
        ("broken", {}, "error: broken: KeyError: 'no such thing'"),
    ],
)
def test_a_call_that_cannot_be_made_is_an_observation(name: str, arguments: object, said: str) -> None:
    assert answer(name, arguments) == said


def test_calls_are_counted_by_tool() -> None:
    box = Toolbox([search, broken])
    for name in ("search", "broken", "nothing", "search"):
        answer(name, {"query": "a"} if name == "search" else {}, box)
    metrics = box.metrics()
    assert {name: value for name, value in metrics.items() if not name.endswith("seconds")} == {
        "tools/search/calls": 2,
        "tools/broken/calls": 1,
        "tools/broken/failures": 1,
        "tools/unknown/calls": 1,
        "tools/unknown/failures": 1,
    }
    assert metrics["tools/search/seconds"] >= 0


def test_a_tool_without_named_parameters_is_refused() -> None:
    def tool(*numbers: int) -> int:
        return sum(numbers)

    with pytest.raises(TypeError, match=r"tool tool: expected named parameters only, found \*numbers"):
        schema(tool)
    with pytest.raises(ToolFailed, match="missing argument query"):
        asyncio.run(Toolbox([search]).result(ToolCall("search", {})))
