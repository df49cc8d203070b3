"""Shows a conversation on the terminal, token by token: read, sampled and control tokens. Finds a run's tokenizer."""

import math
from collections.abc import Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path

from rich.text import Text

from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.tools.inspect.run_files import RunFiles

STYLES = {"control": "bold magenta", "sampled": "green", "read": ""}
UNLIKELY, UNLIKELY_STYLE = 0.1, "bold red"  # below this probability a sampled token is marked


def shown(title: str, tokenizer: TextTokenizer, turns: Sequence[tuple[Sequence[int], Sequence[int]]]) -> Text:
    """Return a conversation as the policy reads it, token by token: control tokens and sampled turns are marked."""
    control = tokenizer.control_ids
    text = Text.assemble(
        (f"\n{title}: ", "bold"), ("control tokens", STYLES["control"]), ", ", ("sampled", STYLES["sampled"])
    )
    text.append(" (trained on), and read\n")
    for read_tokens, sampled in turns:
        for kind, tokens in (("read", read_tokens), ("sampled", sampled)):
            if kind == "sampled":
                text.append("⟦", "dim")
            for run, is_control in _runs(tokens, control):
                said = tokenizer.decode(run, skip_special=False)
                text.append(printed(said), STYLES["control" if is_control and kind == "read" else kind])
            if kind == "sampled":
                text.append("⟧", "dim")
    return text


def conversation_tokens(
    tokenizer: TextTokenizer, tokens: Sequence[int], mask: Sequence[int], logprobs: Sequence[float | None]
) -> Text:
    """Return a rollout as its policy read and sampled it: sampled turns in brackets, and the probability behind each
    sampled token that was unlikely."""
    control, text = tokenizer.control_ids, Text()
    text.append("⟦sampled⟧", STYLES["sampled"]).append(", control tokens", STYLES["control"])
    text.append(f", {{probability}} of a sampled token below {UNLIKELY:g}\n", UNLIKELY_STYLE)
    for is_sampled, group in groupby(zip(tokens, mask, logprobs, strict=False), key=lambda each: bool(each[1])):
        text.append("⟦", "dim") if is_sampled else None
        for unlikely, run in groupby(group, key=lambda each: is_sampled and _unlikely(each[2])):
            for part in [[each] for each in run] if unlikely else [list(run)]:
                for ids, is_control in _runs([token for token, _, _ in part], control):
                    kind = UNLIKELY_STYLE if unlikely else STYLES["control" if is_control else _kind(is_sampled)]
                    text.append(printed(tokenizer.decode(ids, skip_special=False)), kind)
                if unlikely:
                    text.append(f"{{{math.exp(part[0][2] or 0.0):.2g}}}", UNLIKELY_STYLE)
        text.append("⟧", "dim") if is_sampled else None
    return text


def _kind(is_sampled: bool) -> str:
    return "sampled" if is_sampled else "read"


def _unlikely(logprob: float | None) -> bool:
    return logprob is not None and logprob < math.log(UNLIKELY)


def _runs(tokens: Sequence[int], control: frozenset[int]) -> list[tuple[list[int], bool]]:
    """Split tokens where control tokens begin and end."""
    runs: list[tuple[list[int], bool]] = []
    for token in tokens:
        is_control = token in control
        if runs and runs[-1][1] == is_control:
            runs[-1][0].append(token)
        else:
            runs.append(([token], is_control))
    return runs


def printed(text: str) -> str:
    """Escape what a terminal would act on; lines stay lines."""
    return "".join(c if c.isprintable() or c == "\n" else c.encode("unicode_escape").decode() for c in text)


def tokenizer_of(run: RunFiles) -> TextTokenizer | None:
    """Return the tokenizer of a run's policy; None if neither its model's folder nor the run has it any more."""
    folders = [run / "model", run / "hf"]
    config, _ = run.config_or_why()
    if config is not None and config.model.hf_assets_path:
        folders.insert(0, Path(config.model.hf_assets_path))
    for folder in folders:
        with suppress(Exception):  # the tokenizers library raises its own
            return TextTokenizer.load(folder)
    return None
