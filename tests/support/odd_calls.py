"""Tool calls with odd texts, drawn from a seed, and the schema of the tools that they call."""

import json
import random
from collections.abc import Sequence
from typing import Any

PROPERTIES = {
    **{name: {"type": "string"} for name in ("text", "code", "Path-2")},
    **{name: {"type": "integer"} for name in ("count", "big")},
    **{"share": {"type": "number"}, "exact": {"type": "boolean"}, "none": {"type": "null"}},
    **{"more": {"type": "object"}, "items": {"type": "array"}},
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Do it.",
            "parameters": {"type": "object", "properties": PROPERTIES, "required": []},
        },
    }
    for name in ("f", "look_up", "fs.read-all")
]
PIECES = (
    *(
        "",
        " ",
        "\n",
        "\t",
        "  a",
        "12",
        "true",
        "null",
        "None",
        "{",
        "}",
        "[1",
        "]",
        ":",
        ",",
        "'",
        '"',
        "\\",
        "\\n",
        "\\u00e9",
    ),
    *(
        "é",
        "東京",
        "🙂",
        "\u200d",
        "\u2028",
        "e\u0301",
        "<b>",
        "</b>",
        "<a href='x'>",
        "]]>",
        "&lt;",
        "</s>",
        "<think>",
        "```",
    ),
    *('{"name": "g", "arguments": {}}', "call:g{a:1}", "to=functions.g", "a:b,c", "https://x.y/?a=1&b=[2]"),
)


class OddCalls:
    """Draws calls. `pieces`: further texts in arguments, such as the format's control tokens."""

    def __init__(self, seed: int, pieces: Sequence[str] = ()) -> None:
        self._draw, self._pieces = random.Random(seed), (*PIECES, *pieces)

    def call(self) -> tuple[str, dict[str, Any]]:
        names = self._draw.sample(list(PROPERTIES), self._draw.randrange(5))
        tool = self._draw.choice(TOOLS)["function"]["name"]
        return tool, {name: self._value(str(PROPERTIES[name]["type"])) for name in names}

    def _text(self) -> str:
        return "".join(self._draw.choice(self._pieces) for _ in range(self._draw.randrange(6)))

    def _value(self, kind: str, depth: int = 0) -> Any:
        draw = self._draw
        match kind:
            case "string":
                return self._text()
            case "integer":
                return draw.choice((0, -1, 7, 10**30))
            case "number":
                return draw.choice((0.5, -2.5e-9, 1e22, 3))
            case "boolean":
                return draw.random() < 0.5
            case "null":
                return None
            case _:
                kinds = ("string", "integer", "number", "boolean", "null", *(("object", "array") if depth < 3 else ()))
                found = [self._value(draw.choice(kinds), depth + 1) for _ in range(draw.randrange(4))]
                return found if kind == "array" else {f"key_{i}": value for i, value in enumerate(found)}


def message(calls: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return an assistant's message with these calls."""
    made = [
        {"id": f"call{i:05d}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}
