"""Reads facts.toml: GPUs, models by name, and rates that no data sheet gives. A user's file replaces or adds rows."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli

from titan_rl.config.toml import did_you_mean
from titan_rl.wire.model_families import BY_MODEL_TYPE, FAMILIES
from titan_rl.wire.model_shape import ModelShape

SHIPPED = Path(__file__).with_name("facts.toml")
MEASURED_ON = "H200"
SMALL = "Qwen3-0.6B"
"""GPU and model of the measured rates."""
NUMBER = int | float


LEAST_REPORTED = 0.9
"""Share of the GB in a card's name that nvidia-smi reports in GiB, at least."""
VENDOR = {"NVIDIA", "TESLA", "GEFORCE", "DGX", "HGX", "TENSOR", "CORE", "GPU", "GPUS"}
FORM = re.compile(r"SXM\d?|HBM\d?E?")
SIZE = re.compile(r"(\d+(?:\.\d+)?)(?:GI?B?)")


def _words(name: str) -> tuple[frozenset[str], list[float]]:
    """Return the words that tell a card from others, and the sizes among them: "A100-SXM4-40GB" is A100 of 40. A name
    without a form is the one on a board with NVLink."""
    spaced = re.sub(r"(?<=\d)(SXM|PCIE|NVL)", r" \1", re.sub(r"[-_,()\s]+|(?<=RTX)(?=\d)", " ", name.upper()))
    words = [word for word in spaced.split() if word not in VENDOR and not FORM.fullmatch(word)]
    sizes = [float(match[1]) for word in words if (match := SIZE.fullmatch(word))]
    return frozenset(word for word in words if not SIZE.fullmatch(word)), sizes


@dataclass(frozen=True, slots=True)
class Gpu:
    """A row of [gpus]."""

    name: str
    memory_gb: float
    flops: float
    fp8: float
    hbm: float
    nvlink: float
    network: float
    per_node: int
    source: str
    ports: int = 1

    @property
    def node_network(self) -> float:
        """Return the bytes/s each way of a node's ports together."""
        return self.network * self.ports


@dataclass(frozen=True)
class Facts:
    gpus: Mapping[str, Gpu]
    models: Mapping[str, Mapping[str, Any]]
    rates: Mapping[str, float]

    @cached_property
    def small(self) -> ModelShape:
        """Return the shape of the model that was measured."""
        return self.shape(SMALL)

    def matmul(self, gpu: Gpu) -> float:
        """Return the FLOP/s of a GPU's matmuls, at the share of its data sheet that was measured."""
        return gpu.flops * self.rates["matmul"] / self.gpus[MEASURED_ON].flops

    def hbm(self, gpu: Gpu) -> float:
        """Return the bytes/s of a GPU's memory, at the share of its data sheet that was measured."""
        return gpu.hbm * self.rates["copy"] / self.gpus[MEASURED_ON].hbm

    def slower(self, gpu: Gpu) -> float:
        """Return how many times as long a GPU takes for measured seconds of products."""
        return self.gpus[MEASURED_ON].flops / gpu.flops

    def expected(self, gpu: Gpu, seconds: float) -> float:
        """Return the seconds of a step to expect: published steps took longer than planned ones by this factor."""
        return seconds if gpu.name == "CPU" else seconds / self.rates["published_median"]

    def gpu(self, name: str) -> Gpu:
        """Return the row of a GPU, by its name or by the one that nvidia-smi prints. All words of a name count, and a
        size has to be the row's: an unknown card is refused, never planned as a similar one."""
        cards = {known: gpu for known, gpu in self.gpus.items() if known != "CPU"}
        words, sizes = _words(name)
        for known, gpu in cards.items():
            if known.upper() == name.strip().upper() or _words(known) == (words, sizes):
                return gpu
        alike = [gpu for known, gpu in cards.items() if _words(known)[0] == words]
        alike.sort(key=lambda gpu: bool(_words(gpu.name)[1]))  # without a size in its name first, as asked without one
        fitting = [gpu for gpu in alike if all(LEAST_REPORTED <= gpu.memory_gb / size <= 1.02 for size in sizes)]
        if fitting:
            return fitting[0]
        if alike:
            known = " or ".join(f"{gpu.memory_gb:g} GiB ({gpu.name})" for gpu in alike)
            raise ValueError(f"expected {known}, or a row of --facts, found {name!r}")
        rows = {" ".join(sorted(_words(known)[0])): known for known in cards}
        near = [known for known in cards if _words(known)[0] & words]
        near = near or [rows[each] for each in get_close_matches(" ".join(sorted(words)), rows, cutoff=0.5)]
        meant = f"; did you mean {' or '.join(map(repr, near))}?" if near else ""
        raise ValueError(f"expected {', '.join(cards)}, or a row of --facts (docs/plan.md), found {name!r}{meant}")

    def row(self, name: str) -> Mapping[str, Any]:
        """Return the row of a model, by its name or the name of its repository."""
        short = name.rpartition("/")[2].removesuffix("-Instruct").lower()
        for known, row in self.models.items():
            if known.lower() == short:
                return row
        known = f"a folder with a config.json, or a name of {', '.join(self.models)}"
        raise ValueError(f"--model: expected {known}, found {name!r}{did_you_mean(name, self.models)}")

    def shape(self, name: str) -> ModelShape:
        """Return the shape of a model by its name."""
        found = self.row(name)
        family = BY_MODEL_TYPE[found["model_type"]]
        filled = {
            "architectures": [FAMILIES[family].architectures["lm"]],
            "rms_norm_eps": 1e-6,
            "max_position_embeddings": 2**17,
            "rope_theta": 1e6,
            "tie_word_embeddings": False,
        }
        return ModelShape.from_hf(filled | {key: value for key, value in found.items() if key != "repo"})


def read_facts(own: str = "") -> Facts:
    """Read the shipped facts, and a user's own over them. The ValueError lists everything that is wrong with these."""
    tables, given, problems = tomli.loads(SHIPPED.read_text(encoding="utf-8")), dict[str, Any](), list[str]()
    tables["models"].pop("source")
    try:
        given = tomli.loads(Path(own).read_text(encoding="utf-8")) if own else {}
    except (OSError, ValueError) as error:
        problems.append(f"expected a TOML file, found {error}")
    for table, rows in given.items():
        for name, row in rows.items() if isinstance(rows, dict) else [("", None)]:
            if table in tables and isinstance(row, dict) and row.get("source"):
                tables[table][name] = tables[table].get(name, {}) | row
            else:
                problems.append(f"[{table}.{name}]: expected a row of [gpus], [models] or [rates] with a source")
    known = [each.name for each in fields(Gpu) if each.name != "name"]
    needed = {"gpus": {key: NUMBER for key in known if key not in ("source", "ports")}, "rates": {"value": NUMBER}}
    needed |= {"models": {"model_type": str, "hidden_size": int, "repo": str}}
    for table, name, row in ((t, n, r) for t, rows in tables.items() for n, r in rows.items()):
        for key, kind in needed[table].items():
            if not isinstance(row.get(key), kind):
                what = "text" if kind is str else "a number"
                problems.append(f"[{table}.{name}] {key}: expected {what}, found {row.get(key)!r}")
        for key in sorted(row.keys() - set(known)) if table == "gpus" else ():
            problems.append(f"[{table}.{name}] {key}: expected no such key{did_you_mean(key, known)}")
        if table == "models" and row.get("model_type") not in BY_MODEL_TYPE:
            expected = ", ".join(BY_MODEL_TYPE)
            problems.append(f"[{table}.{name}] model_type: expected {expected}, found {row.get('model_type')!r}")
    if problems:
        raise ValueError("\n".join(f"--facts: {problem}" for problem in problems))
    first = sorted(tables["gpus"].items(), key=lambda row: row[0] not in given.get("gpus", {}))  # the user's rows
    gpus = {name: Gpu(name, **row) for name, row in first}
    return Facts(gpus, tables["models"], {name: float(row["value"]) for name, row in tables["rates"].items()})
