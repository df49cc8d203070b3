"""The audit of a run folder whose files do not agree, are malformed, missing, or of an earlier version."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.forging import (
    Change,
    Line,
    both,
    crc,
    every,
    found_in,
    ledger,
    made_old,
    metrics,
    of,
    raw,
    rollouts,
    tail_cut,
    third,
    without,
)
from support.written_runs import WrittenRun, config
from titan_rl.config.sections import RolloutSection
from titan_rl.config.toml import load, to_toml
from titan_rl.record.audit_rules import audit
from titan_rl.record.ledger import NAME


def raise_bound(folder: Path) -> None:
    changed = replace(
        load(folder / "config.toml"), rollout=RolloutSection(groups_per_step=2, group_size=2, max_staleness_steps=99)
    )
    (folder / "config.toml").write_text(to_toml(changed))


def another_checkpoint(folder: Path) -> None:
    shutil.copytree(folder / "checkpoint" / "step-8", folder / "checkpoint" / "step-9")


def cut_everywhere(folder: Path) -> None:
    """As if step 8 had never been made, in the three files that grow."""
    ledger(tail_cut)(folder)
    metrics(lambda m: m.pop())(folder)
    rollouts(lambda r: without(r, *every(r, step=8)))(folder)


OTHER: dict[str, tuple[Change, str]] = {
    "config.toml with a larger lag": (
        raise_bound,
        "config.toml: rollout.max_staleness_steps is 99, 0 was in force by the ledger",
    ),
    "config.toml with another seed": (
        raw("config.toml", lambda whole: whole.replace(b"seed = 0", b"seed = 1")),
        "config.toml: it is not the file that the run wrote",
    ),
    "a stale prompt under a raised lag": (
        both(raise_bound, ledger(lambda e: of(e, event="sampled", prompt=6).update(versions=[0, 0]))),
        "prompt 6 was 3 steps old at step 4, the bound is 0",
    ),
    "a checkpoint that was never saved": (another_checkpoint, "checkpoint/step-9 is whole, but the ledger never saved"),
    "the last step cut everywhere": (cut_everywhere, "summary.json: 8 steps, the ledger has 7"),
    "the last step cut, and no summary": (
        both(cut_everywhere, lambda folder: (folder / "summary.json").unlink()),
        "checkpoint/step-8 is whole, but the ledger never saved step 8",
    ),
    "a summary of more steps": (
        lambda folder: (folder / "summary.json").write_text('{"steps": 20}'),
        "summary.json: 20 steps, the ledger has 8",
    ),
}


MALFORMED: dict[str, tuple[Change, str]] = {
    **{
        f"{name}: {what}": (raw(name, third(line)), f"{name}, line 3: expected")
        for name in (NAME, "metrics.jsonl", "rollouts.jsonl")
        for what, line in {
            "garbage": b"\x00\xff garbage \xf0\x9f\n",
            "a list": b"[]\n",
            "an empty line": b"\n",
            "truncated utf-8": '{"kind": "rl", "text": "数'.encode()[:-1] + b"\n",
            "deep": b"[" * 100_000 + b"\n",
            "a huge number": b'{"step": ' + b"9" * 5000 + b"}\n",
            "null": b"null\n",
        }.items()
    },
    **{
        f"{name}: missing keys": (raw(name, third(b"{}\n")), f"{name}, line 3: expected a valid kind, found none")
        for name in ("metrics.jsonl", "rollouts.jsonl")
    },
    "rollouts.jsonl: text for a number": (
        rollouts(lambda r: r[2].update(step="1")),
        "rollouts.jsonl, line 3: expected a valid step, found 1",
    ),
    "rollouts.jsonl: text among tokens": (
        rollouts(lambda r: r[2].update(tokens=["a"])),
        "rollouts.jsonl, line 3: expected a valid tokens, found ['a']",
    ),
    "ledger.jsonl: a list with its checksum": (raw(NAME, third(crc(b"[]"))), f"{NAME}, line 3: expected event 2"),
    "ledger.jsonl: an object without a number": (raw(NAME, third(crc(b"{}"))), f"{NAME}, line 3: expected event 2"),
    "ledger.jsonl: an unknown event": (
        raw(NAME, third(crc(b'{"n":2,"event":"say"}'))),
        f"{NAME}, line 3 (say): unknown event, expected one of begun",
    ),
    "ledger.jsonl: a missing key": (
        raw(NAME, third(crc(b'{"n":2,"event":"admitted","prompt":1}'))),
        f"{NAME}, line 3 (admitted): expected a valid turn, found none",
    ),
    "ledger.jsonl: text for a number": (
        raw(NAME, third(crc(b'{"n":2,"event":"admitted","prompt":"1","turn":1,"attempt":1}'))),
        f"{NAME}, line 3 (admitted): expected a valid prompt, found 1",
    ),
    "ledger.jsonl: a negative prompt": (
        raw(NAME, third(crc(b'{"n":2,"event":"admitted","prompt":-1,"turn":1,"attempt":1}'))),
        f"{NAME}, line 3 (admitted): expected a valid prompt, found -1",
    ),
    "ledger.jsonl: a prompt far away": (
        raw(NAME, third(crc(b'{"n":2,"event":"admitted","prompt":1000000000000,"turn":1,"attempt":1}'))),
        f"{NAME}, line 3 (admitted): prompt 1 was skipped",
    ),
    "ledger.jsonl: a reward that is not finite": (
        raw(NAME, third(crc(b'{"n":2,"event":"scored","prompt":0,"rewards":[Infinity,0.0]}'))),
        f"{NAME}, line 3 (scored): expected a valid rewards, found [inf",
    ),
    "ledger.jsonl: bounds that are none": (
        ledger(lambda e: e[0].update(bounds={"rollout.max_staleness_steps": 1})),
        f"{NAME}, line 1 (begun): expected a valid bounds",
    ),
    "ledger.jsonl: a flipped bit": (
        raw(NAME, lambda whole: bytes(b ^ (i == 400) for i, b in enumerate(whole))),
        "and its checksum, found",
    ),
    "ledger.jsonl: a line missing": (raw(NAME, third(b"")), "expected event 2, found event 3: lines are missing"),
    **{
        f"{name}: empty": (raw(name, lambda _: b""), said)
        for name, said in {
            NAME: "ledger.jsonl: expected the start of a run, found nothing",
            "metrics.jsonl": "metrics.jsonl: step 1 is missing",
            "rollouts.jsonl": "the ledger has prompt 0 at step 1, rollouts.jsonl does not",
            "config.toml": "config.toml: ",
            "summary.json": "summary.json: JSONDecodeError",
        }.items()
    },
    **{
        f"{name}: missing": (lambda folder, name=name: (folder / name).unlink(), f"{name}: ")
        for name in ("metrics.jsonl", "rollouts.jsonl", "config.toml")
    },
    **{
        f"{name}: a folder": (
            lambda folder, name=name: ((folder / name).unlink(), (folder / name).mkdir()),
            f"{name}: Is a directory",
        )
        for name in (NAME, "metrics.jsonl", "rollouts.jsonl")
    },
    "config.toml: garbage": (raw("config.toml", lambda _: b"\xff\x00["), "config.toml"),
    "config.toml: an unknown key": (raw("config.toml", lambda whole: whole + b"[nope]\nx = 1\n"), "nope"),
    "summary.json: a list": (raw("summary.json", lambda _: b"[]"), "summary.json: TypeError"),
}


@pytest.mark.parametrize("name", OTHER | MALFORMED)
def test_a_file_that_does_not_agree_or_is_malformed_is_a_finding(finished: Path, tmp_path: Path, name: str) -> None:
    change, said = (OTHER | MALFORMED)[name]
    problems = found_in(finished, tmp_path, change)
    assert any(said in problem for problem in problems), problems


def test_an_old_ledger_is_audited_as_far_as_it_goes(finished: Path, resumed: Path, tmp_path: Path) -> None:
    for original in (finished, resumed):
        folder = tmp_path / original.parent.name
        assert found_in(original, folder, ledger(made_old)) == []
        assert "of an earlier version, without digests, checksums and bounds" in audit(folder)[1]
    forge = both(
        ledger(made_old), rollouts(lambda r: [line.update(reward=1.0) for line in r]), metrics(lambda m: m.pop())
    )
    problems = found_in(finished, tmp_path / "forged", forge)
    assert any("reward 1.0, " in problem for problem in problems), problems
    assert "metrics.jsonl: step 8 is missing, which the ledger has" in problems


def test_an_old_run_that_resumes_with_a_new_ledger(tmp_path: Path) -> None:
    run = WrittenRun(tmp_path)
    run.life(config(max_staleness_steps=1), last=4)
    ledger(made_old)(tmp_path)
    run.life(config(max_staleness_steps=2, groups_per_step=3))
    assert audit(tmp_path)[0] == []


VALUES = [None, -1, 0, 1, 10**18, 1 << 70, 1.5, "", "1", [], [[]], [0], [-1], {}, {"a": 1}, True]


@settings(max_examples=60)
@given(data=st.data())
def test_no_ledger_makes_the_audit_raise(
    resumed: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever values and events a writer's bug puts there."""

    def forge(found: list[Line]) -> None:
        for _ in range(data.draw(st.integers(1, 4))):
            event = found[data.draw(st.integers(0, len(found) - 1))]
            key = data.draw(st.sampled_from(sorted(event)))
            match data.draw(st.sampled_from(["value", "number", "gone", "moved"])):
                case "value":
                    event[key] = data.draw(st.sampled_from(VALUES)) if key != "event" else "begun"
                case "number" if key != "event":
                    event[key] = data.draw(st.integers(0, 20))
                case "gone":
                    found.remove(event)
                case "moved":
                    found.remove(event)
                    found.insert(data.draw(st.integers(0, len(found))), event)

    folder = tmp_path_factory.mktemp("any")
    problems = found_in(resumed, folder, ledger(forge))
    assert all(isinstance(problem, str) for problem in problems)
