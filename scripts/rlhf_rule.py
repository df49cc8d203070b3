"""The rule that scripts/rlhf.py lets a reward model learn: one short sentence that names its subject.

`follows` labels the pairs, and grades the answers of the runs. No model sees the rule itself.
"""

import re

MOST_WORDS = 12
PARTS = 3


def follows(completion: str, answer: str) -> float:
    """Return the share of PARTS that hold: the text names the subject, is one sentence, has at most MOST_WORDS."""
    text = completion.strip()
    names = re.search(r"\b" + re.escape(answer.rstrip("s")), text, re.IGNORECASE) is not None
    one = text.endswith(".") and len(re.findall(r"[.!?]", text)) == 1 and "\n" not in text
    short = 0 < len(text.split()) <= MOST_WORDS
    return (names + one + short) / PARTS
