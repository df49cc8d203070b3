"""The audit names what was changed in the ledger of a run, though its numbers and checksums are right."""

from pathlib import Path

import pytest

from support.forging import Forge, Line, every, found_in, ledger, of, place, swap, tail_cut, without
from titan_rl.record.ledger import digest


def trained_twice(found: list[Line]) -> None:
    for event in every(found, event="trained"):
        half = {**event, "prompts": event["prompts"][:1]}
        event["prompts"] = event["prompts"][1:]
        found.insert(found.index(event), half)


def steps_swapped(found: list[Line]) -> None:
    swap(of(found, event="trained", step=3), of(found, event="trained", step=4), "prompts")


def forged_digest(found: list[Line]) -> None:
    of(found, event="sampled", prompt=6)["digests"][0] = digest([1, 2], [3, 3])


def begun_again(step: int, next: int, **more: object) -> Forge:
    def forge(found: list[Line]) -> None:
        first = found[0]
        found.insert(place(found, event="trained", step=6) + 3, {**first, "step": step, "next": next, **more})

    return forge


LEDGER: dict[str, tuple[Forge, str]] = {
    "versions from the future": (
        lambda e: of(e, event="sampled", prompt=6).update(versions=[99, 99]),
        "(sampled): prompt 6 was sampled from version 99 after step 3",
    ),
    "the newest version 50 ahead": (
        lambda e: of(e, event="sampled", prompt=6).update(versions=[3, 53]),
        "(sampled): prompt 6 was sampled from version 53 after step 3",
    ),
    "a version that is older than the bound": (
        lambda e: of(e, event="sampled", prompt=6).update(versions=[1, 1]),
        "prompt 6 was 2 steps old at step 4, the bound is 0",
    ),
    "no versions": (
        lambda e: [event.update(versions=[]) for event in every(e, event="sampled")],
        "prompt 0 has samples of [2, 3] tokens from versions []",
    ),
    "versions in the wrong order": (
        lambda e: of(e, event="sampled", prompt=6).update(versions=[3, 2]),
        "from versions [3, 2]",
    ),
    "no rewards and tokens": (
        lambda e: (
            [event.update(tokens=[], digests=[]) for event in every(e, event="sampled")]
            + [event.update(rewards=[]) for event in every(e, event="scored")]
        ),
        "prompt 0 has samples of [] tokens",
    ),
    "a token more": (
        lambda e: of(e, event="sampled", prompt=6)["tokens"].__setitem__(0, 9),
        "prompt 6, sample 0 at step 4: 2 sampled tokens, 9 in the ledger",
    ),
    "another digest": (forged_digest, "prompt 6, sample 0 at step 4: its tokens or versions are not those"),
    "no digests": (
        lambda e: of(e, event="sampled", prompt=6).pop("digests"),
        "prompt 6 has no digests",
    ),
    "other rewards": (
        lambda e: of(e, event="scored", prompt=6)["rewards"].__setitem__(0, 7.0),
        "prompt 6, sample 0 at step 4: reward",
    ),
    "a reward more": (
        lambda e: of(e, event="scored", prompt=6)["rewards"].append(1.0),
        "prompt 6 has 3 rewards for 2 samples",
    ),
    "every step trained twice with half a batch": (trained_twice, "expected step 2, found 1"),
    "a step skipped": (
        lambda e: [event.update(step=event["step"] + 1) for event in every(e, event="trained") if event["step"] > 3],
        "expected step 4, found 5",
    ),
    "steps swapped": (steps_swapped, "prompt 6 at step 4, the ledger does not"),
    "a step without a prompt": (
        lambda e: of(e, event="trained", step=4)["prompts"].pop(),
        "step 4 trained on 1 prompts, expected 2",
    ),
    "a prompt trained twice": (
        lambda e: of(e, event="trained", step=4)["prompts"].__setitem__(0, 1),
        "prompt 1 has an outcome already: trained at step 1",
    ),
    "no saves": (
        lambda e: without(e, *every(e, event="saved")),
        "checkpoint/step-8 is whole, but the ledger never saved step 8",
    ),
    "a save missing": (
        lambda e: without(e, of(e, event="saved", step=2)),
        "step 2 was due to be saved, with checkpoint.interval 2",
    ),
    "a save of another step": (
        lambda e: of(e, event="saved", step=4).update(step=3),
        "(saved): step 3 is saved after step 4",
    ),
    "begun at step 99": (lambda e: e[0].update(step=99), "the run begins after step 99"),
    "begun again at step 99": (begun_again(99, 12), "resumes after step 99, but the last step is 6"),
    "begun at step 0, and undoes nothing": (
        begun_again(0, 12),
        "resumes after step 0 and does not undo prompt 0, trained at step 1",
    ),
    "begun at a step that was not saved": (begun_again(5, 10), "resumes after step 5, which was not saved"),
    "begun at a step whose prompts it undoes": (begun_again(6, 3), "resumes after step 6 and undoes prompt 3"),
    "begun without bounds": (
        lambda e: e[0].pop("bounds"),
        "has no bounds, though its samples have digests",
    ),
    "a bound raised": (
        lambda e: e[0]["bounds"].update({"rollout.max_staleness_steps": 99}),
        "config.toml: rollout.max_staleness_steps is 0, 99 was in force by the ledger",
    ),
    "a sampled step never trained, tail cut": (tail_cut, "step 8, which the ledger has not trained"),
    "everything cut": (lambda e: e.clear(), "ledger.jsonl: expected the start of a run, found nothing"),
    "no start": (lambda e: e.pop(0), "ledger.jsonl: expected the start of a run, found none"),
    "no checksums": (
        lambda e: without(e, *every(e, event="logged")),
        "the ledger has no checksums of the lines of step 1",
    ),
    "a step logged twice": (
        lambda e: e.insert(place(e, event="logged", step=3), of(e, event="logged", step=3)),
        "step 3 is logged after step 3, or twice",
    ),
    "a prompt that was never admitted": (
        lambda e: without(e, of(e, event="admitted", prompt=7)),
        "prompt 7 was never admitted",
    ),
    "a prompt admitted twice": (
        lambda e: e.insert(place(e, event="admitted", prompt=7), of(e, event="admitted", prompt=6)),
        "prompt 6 is admitted twice in one history",
    ),
    "prompts out of order": (
        lambda e: swap(of(e, event="admitted", prompt=6), of(e, event="admitted", prompt=7), "prompt"),
        "prompt 6 was skipped",
    ),
    "a prompt sampled twice": (
        lambda e: e.insert(place(e, event="sampled", prompt=7), of(e, event="sampled", prompt=7)),
        "prompt 7 is sampled twice",
    ),
    "a prompt scored twice": (
        lambda e: e.insert(place(e, event="scored", prompt=7), of(e, event="scored", prompt=7)),
        "prompt 7 is scored twice",
    ),
    "a prompt dropped that was trained on": (
        lambda e: e.append({"event": "dropped", "prompt": 7, "reason": "flat", "tokens": 5}),
        "prompt 7 has an outcome already: trained at step 4",
    ),
    "a turn that the lag forbids": (
        lambda e: of(e, event="admitted", prompt=7).update(turn=6),
        "prompt 7 was admitted after step 3 for step 6, rollout.max_staleness_steps - overtake_steps is 0",
    ),
    "a prompt that missed its turn": (
        lambda e: of(e, event="admitted", prompt=7).update(turn=3),
        "prompt 7 was trained on at step 4, its turn was step 3",
    ),
    "an attempt that never was": (
        lambda e: of(e, event="admitted", prompt=7).update(attempt=2),
        "prompt 7 is attempt 2, expected 1",
    ),
}


def names_it(said: str, problems: list[str]) -> None:
    assert any(said in problem for problem in problems), problems


@pytest.mark.parametrize("name", LEDGER)
def test_a_forged_ledger_is_named(finished: Path, tmp_path: Path, name: str) -> None:
    forge, said = LEDGER[name]
    names_it(said, found_in(finished, tmp_path, ledger(forge)))


def test_a_step_that_a_resumed_run_repeats_without_undoing_it(resumed: Path, tmp_path: Path) -> None:
    def forge(found: list[Line]) -> None:
        second = every(found, event="begun")[1]
        second.update(open=[], next=second["next"] + 2)

    said = "resumes after step 4 without prompt 8, which was unfinished"
    names_it(said, found_in(resumed, tmp_path, ledger(forge)))


def test_a_version_of_an_undone_history(resumed: Path, tmp_path: Path) -> None:
    def forge(found: list[Line]) -> None:
        second = found.index(every(found, event="begun")[1])
        of(found[second:], event="sampled").update(versions=[3, 4])

    said = "was sampled from version 3, though the run began after step 4"
    names_it(said, found_in(resumed, tmp_path, ledger(forge)))


REPLACED: dict[str, tuple[Forge, str]] = {
    "flat groups without dynamic sampling": (
        lambda e: e[0]["bounds"].update({"algorithm.dynamic_sampling": False}),
        "is dropped as flat, though algorithm.dynamic_sampling is off",
    ),
    "a drop missing": (lambda e: without(e, of(e, event="dropped")), "was neither trained on nor dropped"),
    "other tokens dropped": (lambda e: of(e, event="dropped").update(tokens=99), "is dropped with 99 tokens"),
    "a failure missing": (
        lambda e: without(e, *every(e, event="failed")),
        "prompt 2 is dropped as failed, but no attempt failed",
    ),
    "another reason": (
        lambda e: of(e, event="dropped", prompt=2).update(reason="flat"),
        "prompt 2 is dropped (flat) before it is scored",
    ),
}


@pytest.mark.parametrize("name", REPLACED)
def test_a_forged_replacement_is_named(replaced: Path, tmp_path: Path, name: str) -> None:
    forge, said = REPLACED[name]
    names_it(said, found_in(replaced, tmp_path, ledger(forge)))
