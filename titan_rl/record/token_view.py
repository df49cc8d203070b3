"""Shows a conversation on the terminal, token by token: read, sampled and control tokens."""

from collections.abc import Sequence

from rich.text import Text

from titan_rl.text.tokenizer import TextTokenizer

STYLES = {"control": "bold magenta", "sampled": "green", "read": ""}


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
