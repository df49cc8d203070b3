"""Drafts from tokens that an engine has: which ones, and how many are kept."""

import random
from array import array

from titan_rl.actors.vllm.engine import EngineSettings, OpenRequest
from titan_rl.ext.drafts.ranks.drafts import END, MATCHED, Answers, Drafts, next_tokens
from titan_rl.wire.types import Completion, Request, Sampling


def written(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()


def expected_tokens(history: list[int], text: list[int], most: int) -> list[int]:
    """Look at every place of the history, the latest first, for the most last tokens of the text."""
    for matched in MATCHED:
        tail = text[-matched:]
        for begin in range(len(history) - 1 - len(tail), -1, -1):
            if history[begin : begin + len(tail)] == tail:
                found = history[begin + len(tail) : begin + len(tail) + min(most, matched)]
                return found[: found.index(-1)] if -1 in found else found
    return []


def test_a_draft_follows_the_latest_place_of_the_most_last_tokens() -> None:
    """Also where tokens look like parts of others, as bytes: 1 is 01000000, 256 is 00010000."""
    rng, found = random.Random(1), 0
    for _ in range(2000):
        alphabet = rng.choice([[0, 1, 256], [1, 2, 3, 65536, 16777216 - 1], range(50)])
        history = rng.choices([*alphabet, -1], k=rng.randrange(60))
        text = rng.choices(alphabet, k=rng.randrange(1, 40))
        other = rng.choice([history, text])
        expected = expected_tokens(other, text, most := rng.randrange(1, 5))
        assert next_tokens(written(other), written(text), most) == expected
        found += bool(expected)
    assert found > 500


def test_answers_are_bounded_and_the_oldest_go_first() -> None:
    rng, answers = random.Random(2), Answers(most=2000, most_of_prompt=300)
    for _ in range(500):
        prompt, answer = written([rng.randrange(20)]), written(rng.choices(range(9), k=rng.randrange(40)))
        answers.add(prompt, answer)
        assert answers.of(prompt).endswith((answer + END)[-300:])
        kept = [prompt + text for prompt, text in answers._texts.items()]
        assert answers.bytes == sum(map(len, kept)) <= 2000
        assert max(len(text) for text in answers._texts.values()) <= 300
    assert 5 < len(answers._texts) < 20


def test_turns_of_a_group_draft_from_the_answers_to_its_prompt() -> None:
    drafts = Drafts(EngineSettings(model_dir="", drafts="siblings"), {}, on_cpu=True)
    first = Request("a", [1, 2, 3], [0], Sampling(9), affinity=("play", "group"))
    later = Request("b", [1, 2, 3, 7, 8, 9, 4], [0], Sampling(9), affinity=("play", "group"))
    other = Request("c", [5, 6], [0], Sampling(9), affinity=("another", "another group"))
    for request in (first, later):
        opened = OpenRequest.of(request)
        opened.samples[0] = Completion([11, 12, 13], [0.0] * 3, [0] * 3, "stop")
        drafts.left("0", opened, 0)
    text = written([1, 2, 3, 11, 12])
    assert drafts._draft(first, text, 4) == [13]
    assert drafts._draft(Request("d", [1, 2, 3], [0], Sampling(9)), text, 4) == [13], "in a later epoch"
    assert drafts._draft(later, written([1, 9, 4, 11]), 4) == [12, 13]
    assert drafts._draft(other, text, 4) == []
