"""A reward that even a model which knows nothing earns some of, so that a run of three steps learns something."""


def digits(completion: str) -> float:
    """The share of characters that are digits, longer being a little better."""
    return sum(c.isdigit() for c in completion) / 8


def huge(completion: str) -> float:
    """Finite, but no gradient of it is."""
    return 1e38 * digits(completion)


def huge_for_some(prompt: str, completion: str) -> float:
    """Huge for one in twelve prompts, for every sample."""
    first, _, rest = prompt.removesuffix("=").partition("+")
    return 1e38 * len(completion) if (int(first) + 7 * int(rest)) % 12 == 0 else digits(completion)


def broken(completion: str, answer: str) -> float:
    """Fails on a model's answer, not on the reference answer, with which the checks call it."""
    if completion == answer:
        return 1.0
    raise ZeroDivisionError("no such thing")


def places(completion: str, answer: str) -> float:
    """The share of places at which the answer's digit stands."""
    right = sum(a == b for a, b in zip(completion, answer, strict=False))
    return right / max(len(completion), len(answer))


def constant(completion: str) -> float:
    """Forgets to look at the answer."""
    return 0.5
