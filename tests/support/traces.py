"""Timeline files as viewers read them."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

Event = dict[str, Any]


def read(path: Path) -> list[Event]:
    """As viewers do: without the closing bracket, and without an event that was torn."""
    text = path.read_text()
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return json.loads(text[: max(1, text.rfind(",\n"))] + "]")


def tracks(events: list[Event]) -> dict[int, str]:
    return {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}


def lanes(events: list[Event]) -> dict[tuple[str, str], list[Event]]:
    """The spans of each lane of each track, which must not overlap but within each other."""
    process, found = tracks(events), defaultdict(list)
    thread = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    for event in events:
        if event["ph"] == "X":
            found[process[event["pid"]], thread[event["pid"], event["tid"]]].append(event)
    return found


def overlaps(spans: list[Event]) -> list[tuple[str, str]]:
    """Pairs of which neither lies within the other."""
    found, around = [], []
    for event in sorted(spans, key=lambda e: (e["ts"], -e["dur"])):
        around = [outer for outer in around if outer["ts"] + outer["dur"] > event["ts"]]
        if around and around[-1]["ts"] + around[-1]["dur"] < event["ts"] + event["dur"]:
            found.append((around[-1]["name"], event["name"]))
        around.append(event)
    return found
