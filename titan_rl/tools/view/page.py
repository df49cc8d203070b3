"""Assembles the page: one HTML file that loads nothing from a network."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from time import time
from typing import Any

from titan_rl import __version__
from titan_rl.record.lines import strict
from titan_rl.record.metric_docs import DOCS
from titan_rl.tools.view.run_data import run_data


def page_data(folders: Sequence[Path], *, sample_bytes: int, live_seconds: float = 0.0) -> dict[str, Any]:
    """Return the runs as the page reads them. A live page asks for them again every `live_seconds`."""
    runs = [run_data(folder, sample_bytes=sample_bytes // len(folders)) for folder in folders]
    tags = {tag for run in runs for part in ("curves", "cold_start") for tag in run[part]["values"]}
    return {
        "title": ", ".join(run["name"] for run in runs),
        "version": __version__,
        "made": time(),
        "live": {"seconds": live_seconds} if live_seconds else None,
        "docs": {tag: DOCS[tag] for tag in sorted(tags) if tag in DOCS},
        "runs": runs,
    }


def page(data: Mapping[str, Any]) -> str:
    """Return the HTML page of `data`."""
    folder = files("titan_rl.tools.view")
    html, css, js = ((folder / f"page.{kind}").read_text(encoding="utf-8") for kind in ("html", "css", "js"))
    parts = {"{css}": css, "{js}": js, "{data}": script_json(data), "{title}": _escaped(str(data["title"]))}
    for place, text in parts.items():
        html = html.replace(place, text, 1)
    return html


def script_json(data: Mapping[str, Any]) -> str:
    """Return JSON that cannot end the script element around it: a model wrote parts of it."""
    text = json.dumps(strict(data), ensure_ascii=False, separators=(",", ":"))
    text = text.encode("utf-8", "backslashreplace").decode()  # lone surrogates, which are \\u escapes in JSON too
    return text.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
