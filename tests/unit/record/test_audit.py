"""The audit names a lost, repeated or stale rollout, and a damaged or missing file of a finished run: 8 steps with 2
prompts of 2 samples each. Each case changes one thing."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.forging import (
    Change,
    Forge,
    Line,
    crc,
    every,
    found_in,
    ledger,
    metrics,
    of,
    place,
    raw,
    rollouts,
    swap,
    third,
    without,
)
from titan_rl.record.ledger import digest
from titan_rl.record.run_names import LEDGER
from titan_rl.wire.checkpoint_sums import sum_files


def trained_twice(e: list[Line]) -> None:
    for event in every(e, event="trained"):
        half = {**event, "prompts": event["prompts"][:1]}
        event["prompts"] = event["prompts"][1:]
        e.insert(e.index(event), half)


def begun_again(step: int, next: int) -> Forge:
    def forge(e: list[Line]) -> None:
        e.insert(place(e, event="trained", step=6) + 3, {**e[0], "step": step, "next": next})

    return forge


def repeated(event: str, **what: int) -> Forge:
    return lambda e: e.insert(place(e, event=event, **what), of(e, event=event, **what))


def sampled(e: list[Line]) -> Line:
    return of(e, event="sampled", prompt=6)


BAD_LEDGERS: dict[str, tuple[Forge, str]] = {
    "a version from the future": (
        lambda e: sampled(e).update(versions=[3, 53]),
        "(sampled): prompt 6 was sampled from version 53 after step 3",
    ),
    "a stale version": (
        lambda e: sampled(e).update(versions=[1, 1]),
        "prompt 6 was 2 steps old at step 4, the bound is 0",
    ),
    "no versions": (lambda e: sampled(e).update(versions=[]), "prompt 6 has samples of [2, 3] tokens from versions []"),
    "other tokens": (
        lambda e: sampled(e)["digests"].__setitem__(0, digest([1, 2], [3, 3])),
        "prompt 6, sample 0 at step 4: its tokens or versions do not have the digest",
    ),
    "a digest less than samples": (
        lambda e: sampled(e)["digests"].pop(),
        "prompt 6 has another number of digests, statuses or attempts than 2 samples",
    ),
    "another reward": (
        lambda e: of(e, event="scored", prompt=6)["rewards"].__setitem__(0, 7.0),
        "prompt 6, sample 0 at step 4: reward",
    ),
    "a reward more than samples": (
        lambda e: of(e, event="scored", prompt=6)["rewards"].append(1.0),
        "prompt 6 has 3 rewards for 2 samples",
    ),
    "every step trained twice with half a batch": (trained_twice, "expected step 2, found 1"),
    "a step without a prompt": (
        lambda e: of(e, event="trained", step=4)["prompts"].pop(),
        "step 4 trained on 1 prompts, expected 2",
    ),
    "a prompt trained twice": (
        lambda e: of(e, event="trained", step=4)["prompts"].__setitem__(0, 1),
        "prompt 1 has an outcome already: trained at step 1",
    ),
    "prompts trained out of order": (
        lambda e: of(e, event="trained", step=4)["prompts"].reverse(),
        "prompt 6 was trained on after a later one, though rollout.overtake_steps is 0",
    ),
    "no saves": (
        lambda e: without(e, *every(e, event="saved")),
        "checkpoint/step-8 is whole, but the ledger never saved step 8",
    ),
    "a save of another step": (
        lambda e: of(e, event="saved", step=4).update(step=3),
        "(saved): step 3 is saved after step 4",
    ),
    "begun at step 99": (lambda e: e[0].update(step=99), "the run begins after step 99"),
    "begun again at step 99": (begun_again(99, 12), "resumes after step 99, but the last step is 6"),
    "begun again, and undoes nothing": (
        begun_again(0, 12),
        "resumes after step 0 and does not undo prompt 0, trained at step 1",
    ),
    "begun at a step that was not saved": (begun_again(5, 10), "resumes after step 5, which was not saved"),
    "begun at a step whose prompts it undoes": (begun_again(6, 3), "resumes after step 6 and undoes prompt 3"),
    "the tail lost": (
        lambda e: e.__delitem__(slice(place(e, event="trained", step=8), None)),
        "step 8, which the ledger has not trained",
    ),
    "everything lost": (lambda e: e.clear(), "ledger.jsonl: expected the start of a run, found nothing"),
    "no start": (lambda e: e.pop(0), "ledger.jsonl: expected the start of a run, found none"),
    "a step logged twice": (repeated("logged", step=3), "step 3 is logged after step 3, or twice"),
    "a prompt that was never admitted": (
        lambda e: without(e, of(e, event="admitted", prompt=7)),
        "prompt 7 was never admitted",
    ),
    "a prompt admitted twice": (repeated("admitted", prompt=6), "prompt 6 is admitted twice in one history"),
    "prompts out of order": (
        lambda e: swap(of(e, event="admitted", prompt=6), of(e, event="admitted", prompt=7), "prompt"),
        "prompt 6 was skipped",
    ),
    "a prompt sampled twice": (repeated("sampled", prompt=7), "prompt 7 is sampled twice"),
    "a prompt scored twice": (repeated("scored", prompt=7), "prompt 7 is scored twice"),
    "a prompt that was not scored": (
        lambda e: without(e, of(e, event="scored", prompt=7)),
        "prompt 7 is trained on before it is scored",
    ),
    "a prompt dropped that was trained on": (
        lambda e: e.append({"event": "dropped", "prompt": 7, "reason": "flat", "tokens": 5}),
        "prompt 7 has an outcome already: trained at step 4",
    ),
    "a judge that failed after its prompt was trained on": (
        lambda e: e.append({"event": "failed", "prompt": 7, "attempt": 1, "error": "no"}),
        "the judge of prompt 7 failed after the prompt was scored or dropped",
    ),
    "a prompt admitted too early": (
        lambda e: of(e, event="admitted", prompt=7).update(turn=6),
        "prompt 7 was admitted after step 3 for step 6, rollout.max_staleness_steps - overtake_steps is 0",
    ),
    "a prompt that missed its turn": (
        lambda e: of(e, event="admitted", prompt=7).update(turn=3),
        "prompt 7 was trained on at step 4, its turn was step 3",
    ),
}
ROLLOUTS: dict[str, tuple[Forge, str]] = {
    "one token changed": (
        lambda r: (t := of(r, prompt_id=9)["tokens"]).__setitem__(-1, t[-1] + 1),
        "prompt 9, sample 0 at step 5: its tokens or versions do not have the digest",
    ),
    "a stale version": (
        lambda r: [line.update(versions=[0] * len(line["versions"])) for line in every(r, step=6)],
        "prompt 10, sample 0 at step 6: its tokens or versions do not have the digest",
    ),
    "mask shifted": (
        lambda r: r[0].update(mask=[0, *r[0]["mask"][:-1]]),
        "prompt 0, sample 0 at step 1: its tokens or versions do not have the digest",
    ),
    "a sample twice and another missing": (
        lambda r: of(r, prompt_id=3, sample=1).update(of(r, prompt_id=3, sample=0)),
        "sample 0 of prompt 3 at step 2 is there twice",
    ),
    "a sample missing": (
        lambda r: without(r, of(r, prompt_id=3, sample=1)),
        "prompt 3 at step 2 has the samples [0], expected 0 to 1",
    ),
    "a sample too many": (
        lambda r: r.insert(1, {**r[0], "sample": 2}),
        "prompt 0, sample 2 at step 1: the ledger has 2 samples",
    ),
    "another reward": (lambda r: r[2].update(reward=float("nan")), "prompt 1, sample 0 at step 1: reward nan"),
    "advantages changed": (
        lambda r: of(r, step=7).update(advantage=3.0),
        "the lines of step 7 are not as the run wrote them",
    ),
    "another step": (
        lambda r: [line.update(step=5) for line in every(r, prompt_id=7)],
        "has prompt 7 at step 5, the ledger does not",
    ),
    "another prompt": (
        lambda r: [line.update(prompt_id=70) for line in every(r, prompt_id=7)],
        "the ledger has prompt 7 at step 4, rollouts.jsonl does not",
    ),
    "a step missing": (
        lambda r: without(r, *every(r, step=8)),
        "the ledger has prompt 14 at step 8, rollouts.jsonl does not",
    ),
    "a step that was never made": (
        lambda r: r.extend({**line, "step": 9} for line in every(r, step=8)),
        "has prompt 14 at step 9, the ledger does not",
    ),
    "text for a number": (lambda r: r[2].update(step="1"), "line 3: expected a valid step, found 1"),
    "text among tokens": (lambda r: r[2].update(tokens=["a"]), "line 3: expected a valid tokens, found ['a']"),
}
METRICS: dict[str, tuple[Forge, str]] = {
    "a metric changed": (
        lambda m: of(m, step=3, kind="rl").update(loss=0.25),
        "the lines of step 3 are not as the run wrote them",
    ),
    "a line missing": (lambda m: without(m, of(m, step=4, kind="rl")), "metrics.jsonl: step 4 is missing"),
    "a line twice": (lambda m: m.append(m[-1]), "step 8 follows step 8"),
    "a step that was never made": (
        lambda m: m.append({**m[-1], "step": 9}),
        "step 9, which the ledger has not trained",
    ),
}


def another_checkpoint(folder: Path) -> None:
    shutil.copytree(folder / "checkpoint" / "step-8", folder / "checkpoint" / "step-9")


def evaluations(*rewards: dict[str, list[object]], step: int = 8) -> Change:
    def change(folder: Path) -> None:
        head = {"kind": "eval", "step": step, "set": "heldout"}
        lines = [json.dumps({**head, "rewards": each}) + "\n" for each in rewards]
        (folder / "evaluations.jsonl").write_text("".join(lines))

    return change


def cut_with_invented_start(folder: Path) -> None:
    """As if a process had resumed from step 6 and were killed before the ledger had its start."""
    for name in ("metrics.jsonl", "rollouts.jsonl"):
        lines = [json.loads(line) for line in (folder / name).read_bytes().splitlines()]
        lines = [line for line in lines if line["step"] <= 6]
        if name == "metrics.jsonl":
            lines.append({"kind": "startup", "step": 6, "time": time.time() + 1.0})
        (folder / name).write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))


def changed_model(folder: Path) -> None:
    (folder / "hf").mkdir()
    (folder / "hf/model.safetensors").write_bytes(b"weights")
    sum_files(folder / "hf")
    (folder / "hf/model.safetensors").write_bytes(b"Weights")


def fifo(name: str) -> Change:
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


FILES: dict[str, tuple[Change, str]] = {
    "a checkpoint that was never saved": (another_checkpoint, "checkpoint/step-9 is whole, but the ledger never saved"),
    "no checkpoint": (lambda folder: shutil.rmtree(folder / "checkpoint"), "the ledger saved step 8, of which"),
    "not the newest checkpoint": (
        lambda folder: shutil.rmtree(folder / "checkpoint/step-8"),
        "the ledger saved step 8",
    ),
    "half of a checkpoint": (
        lambda folder: (folder / "checkpoint/step-8/.metadata").unlink(),
        "the ledger saved step 8",
    ),
    "a summary of fewer steps": (
        raw("summary.json", lambda _: b'{"steps": 3}'),
        "summary.json: 3 steps, the ledger has 8",
    ),
    "a summary of another score": (
        raw("summary.json", lambda _: b'{"steps": 8, "final_eval": 1.0}'),
        "summary.json: final_eval is 1.0, None in metrics.jsonl",
    ),
    "a summary of another seed": (raw("summary.json", lambda _: b'{"steps": 8, "seed": 7}'), "the seed is 7, 0 in"),
    "a summary that is a FIFO": (fifo("summary.json"), "summary.json: expected a file"),
    "an evaluation of a step that was never made": (
        evaluations({"0": [1.0]}, step=99),
        "evaluations.jsonl, line 1: an evaluation of step 99, which the ledger has not trained",
    ),
    "an evaluation twice": (evaluations({"0": [1.0]}, {"0": [1.0]}), "line 2: an evaluation that is there twice"),
    "an evaluation with text": (evaluations({"0": ["x"]}), "line 1: expected a valid rewards"),
    "steps that no restart has moved": (
        cut_with_invented_start,
        "metrics.jsonl: step 7 is missing, and no restart has moved it aside",
    ),
    "an invented superseded step": (
        lambda folder: (folder / "rollouts.superseded.jsonl").write_text('{"kind":"rl","step":3}\n'),
        "rollouts.superseded.jsonl has step 3, to before which the run never returned",
    ),
    "a superseded file that is none": (
        lambda folder: os.mkfifo(folder / "rollouts.superseded.jsonl"),
        "rollouts.superseded.jsonl: expected a file",
    ),
    "no start in the metrics": (
        metrics(lambda m: without(m, *every(m, kind="startup"))),
        "metrics.jsonl has no line of a start, the ledger has 1",
    ),
    "an exported model without weights": (lambda folder: (folder / "hf").mkdir(), "hf: it has no weights"),
    "a changed exported model": (changed_model, "hf: model.safetensors: expected the checksum"),
    "a planted call in the newest checkpoint": (
        raw("checkpoint/step-8/.metadata", lambda _: b"cos\nsystem\n(S'true'\ntR."),
        "checkpoint/step-8: .metadata cannot be read: it would call os.system",
    ),
    "a .lock that is a folder, and a lost line": (
        lambda folder: ((folder / ".lock").mkdir(), (folder / "metrics.jsonl").write_bytes(b"")),
        "metrics.jsonl: step 1 is missing",
    ),
    "a summary that is none": (raw("summary.json", lambda _: b"[]"), "summary.json: TypeError"),
    **{f"{name}: a FIFO": (fifo(name), f"{name}: ") for name in (LEDGER, "metrics.jsonl", "rollouts.jsonl")},
    **{
        f"{name}: {what}": (raw(name, third(line)), f"{name}, line 3: expected")
        for name in (LEDGER, "metrics.jsonl", "rollouts.jsonl")
        for what, line in {
            "garbage": b"\x00\xff garbage \xf0\x9f\n",
            "a list": b"[]\n",
            "an empty line": b"\n",
            "truncated utf-8": '{"kind": "rl", "text": "数'.encode()[:-1] + b"\n",
            "deep": b"[" * 100_000 + b"\n",
            "a huge number": b'{"step": ' + b"9" * 5000 + b"}\n",
            "missing keys": b"{}\n",
        }.items()
    },
    **{
        f"{LEDGER}: {text}": (raw(LEDGER, third(crc(text.encode()))), f"{LEDGER}, line 3{expected}")
        for text, expected in {
            "[]": ": expected event 2",
            "{}": ": expected event 2",
            '{"n":2,"event":"say"}': " (say): unknown event, expected one of begun",
            '{"n":2,"event":"admitted","prompt":1}': " (admitted): expected a valid turn, found none",
            '{"n":2,"event":"admitted","prompt":-1,"turn":1,"attempt":1}': " (admitted): expected a valid prompt",
            '{"n":2,"event":"admitted","prompt":1000000000000,"turn":1,"attempt":1}': " (admitted): prompt 1 was skip",
            '{"n":2,"event":"scored","prompt":0,"rewards":[Infinity,0.0]}': " (scored): expected a valid rewards",
        }.items()
    },
    f"{LEDGER}: bounds that are none": (
        ledger(lambda e: e[0].update(bounds={"rollout.max_staleness_steps": 1})),
        f"{LEDGER}, line 1 (begun): expected a valid bounds",
    ),
    f"{LEDGER}: a flipped bit": (
        raw(LEDGER, lambda whole: bytes(b ^ (i == 400) for i, b in enumerate(whole))),
        "and its checksum, found",
    ),
    f"{LEDGER}: a line missing": (raw(LEDGER, third(b"")), "expected event 2, found event 3: lines are missing"),
    **{
        f"{name}: empty": (raw(name, lambda _: b""), expected)
        for name, expected in {
            LEDGER: "ledger.jsonl: expected the start of a run, found nothing",
            "metrics.jsonl": "metrics.jsonl: step 1 is missing",
            "rollouts.jsonl": "the ledger has prompt 0 at step 1, rollouts.jsonl does not",
        }.items()
    },
    **{
        f"{name}: missing": (lambda folder, name=name: (folder / name).unlink(), f"{name}: ")
        for name in ("metrics.jsonl", "rollouts.jsonl", "config.toml")
    },
    **{
        f"{name}: a folder": (
            lambda folder, name=name: ((folder / name).unlink(), (folder / name).mkdir()),
            f"{name}: expected a file, found a folder",
        )
        for name in (LEDGER, "metrics.jsonl", "rollouts.jsonl")
    },
    "config.toml: garbage": (raw("config.toml", lambda _: b"\xff\x00["), "config.toml"),
    "config.toml: an unknown key": (raw("config.toml", lambda whole: whole + b"[nope]\nx = 1\n"), "nope"),
}
CASES: dict[str, tuple[Change, str]] = {
    **{f"ledger: {name}": (ledger(forge), expected) for name, (forge, expected) in BAD_LEDGERS.items()},
    **{f"rollouts: {name}": (rollouts(forge), expected) for name, (forge, expected) in ROLLOUTS.items()},
    **{f"metrics: {name}": (metrics(forge), expected) for name, (forge, expected) in METRICS.items()},
    **FILES,
}


@pytest.mark.parametrize("name", CASES)
def test_a_change_is_named(finished: Path, tmp_path: Path, name: str) -> None:
    change, expected = CASES[name]
    problems = found_in(finished, tmp_path, change)
    assert any(expected in problem for problem in problems), problems


def test_a_step_that_a_resumed_run_repeats_without_undoing_it(resumed: Path, tmp_path: Path) -> None:
    def forge(e: list[Line]) -> None:
        second = every(e, event="begun")[1]
        second.update(open=[], next=second["next"] + 2)

    problems = found_in(resumed, tmp_path, ledger(forge))
    assert any("resumes after step 4 without prompt 8, which was unfinished" in each for each in problems), problems


def test_a_version_of_an_undone_history(resumed: Path, tmp_path: Path) -> None:
    def forge(e: list[Line]) -> None:
        of(e[e.index(every(e, event="begun")[1]) :], event="sampled").update(versions=[3, 4])

    problems = found_in(resumed, tmp_path, ledger(forge))
    expected = "was sampled from version 3, though the run began after step 4"
    assert any(expected in problem for problem in problems), problems


@pytest.mark.parametrize(
    ("forge", "expected"),
    [
        (lambda e: without(e, of(e, event="dropped")), "was neither trained on nor dropped"),
        (
            lambda e: of(e, event="dropped", prompt=2).update(reason="flat"),
            "prompt 2 is dropped (flat) before it is scored",
        ),
    ],
)
def test_a_dropped_group(replaced: Path, tmp_path: Path, forge: Forge, expected: str) -> None:
    problems = found_in(replaced, tmp_path, ledger(forge))
    assert any(expected in problem for problem in problems), problems


VALUES = [None, -1, 0, 1, 10**18, 1 << 70, 1.5, "", "1", [], [[]], [0], [-1], {}, {"a": 1}, True]


@settings(max_examples=60)
@given(data=st.data())
def test_no_ledger_makes_the_audit_raise(
    resumed: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any values and events that a bug of the writer could put there."""

    def forge(e: list[Line]) -> None:
        for _ in range(data.draw(st.integers(1, 4))):
            event = e[data.draw(st.integers(0, len(e) - 1))]
            key = data.draw(st.sampled_from(sorted(event)))
            match data.draw(st.sampled_from(["value", "number", "gone", "moved"])):
                case "value":
                    event[key] = data.draw(st.sampled_from(VALUES)) if key != "event" else "begun"
                case "number" if key != "event":
                    event[key] = data.draw(st.integers(0, 20))
                case "gone":
                    e.remove(event)
                case "moved":
                    e.remove(event)
                    e.insert(data.draw(st.integers(0, len(e))), event)

    problems = found_in(resumed, tmp_path_factory.mktemp("any"), ledger(forge))
    assert all(isinstance(problem, str) for problem in problems)
