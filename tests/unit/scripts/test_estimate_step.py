"""The estimate of an 8B step: its terms add up, and the page and the table are what the script computes."""

import csv
from pathlib import Path

import pytest
from estimate_step import CASES, Step, estimated, summary

from bench.estimate_facts import FACTS

DOCS = Path(__file__).parents[3] / "docs"


@pytest.fixture(scope="module")
def steps() -> dict[str, Step]:
    return {name: estimated(preset, keys) for name, (preset, keys) in CASES.items()}


def test_terms_add_up(steps: dict[str, Step]) -> None:
    for step in steps.values():
        assert sum(step.sides) == pytest.approx(sum(term.seconds for term in step.terms))
        assert step.seconds == pytest.approx(max(step.sides) if step.overlaps else sum(step.sides))
        assert all(0 <= term.avoidable <= term.seconds for term in step.terms)
        assert all(term.source or not term.seconds or "as the terms above" in term.formula for term in step.terms[:-1])
    assert all(fact.source for fact in FACTS.values())


def test_at_most_a_tenth_of_the_presets_step_is_avoidable(steps: dict[str, Step]) -> None:
    preset, *others = steps.values()
    assert preset.overlaps
    assert preset.avoidable <= 0.1
    assert all(other.avoidable > 0.2 for other in others)


def test_more_work_takes_longer() -> None:
    short, long = (estimated("grpo_llama3_8b", (), 64, answers) for answers in ((64, 128), (128, 256)))
    assert all(0 < own < longer for own, longer in zip(short.sides, long.sides, strict=True))


def test_the_page_has_the_shares_at_other_lengths() -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    deeper = [("rollout.max_staleness_steps", "2"), ("generator.max_num_seqs", "384")]
    one, two = (estimated("grpo_llama3_8b", keys, answers=(128, 1024)) for keys in ([], deeper))
    assert f"engines bound the step, and {one.avoidable:.0%} are avoidable" in page
    assert f"makes it {two.avoidable:.0%}" in page


def test_the_page_and_the_table_are_the_scripts(steps: dict[str, Step]) -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    assert "\n".join(["<!-- scripts/estimate_step.py -->", *summary(steps), ""]) in page
    with (DOCS / "benchmarks/step_8b.csv").open(newline="", encoding="utf-8") as file:
        written = [(row["case"], row["side"], row["name"], row["seconds"]) for row in csv.DictReader(file)]
    assert written == [(n, t.side, t.name, f"{t.seconds:.3f}") for n, step in steps.items() for t in step.terms]
