"""Writes a number with its noun."""


def counted(number: int, noun: str) -> str:
    """Return "1 problem" or "2 problems"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
