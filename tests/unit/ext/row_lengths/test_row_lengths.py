"""Rows that a run cannot use are found before it starts."""

import re
from pathlib import Path
from typing import Any

import pytest

from support.checked_configs import config, edit, rows
from titan_rl.preflight.checks import problems
from titan_rl.preflight.plan import prepare
from titan_rl.run import main
from titan_rl.wire.parts import PARTS

SHORT = {"question": "1+1=", "answer": "2", "chosen": "2", "rejected": "3"}  # 5 tokens with BOS, 2 of an answer
LONG = SHORT | {"question": "1+1=" + "+" * 24}
SAID = {"role": "assistant", "content": "1234567890"}
WORDY = SHORT | {"answer": "2" * 40, "chosen": "2" * 22}
SIZES = "[training]\nseq_len = 32\n[rollout]\nmax_new_tokens = 4\n"


def written(folder: Path, train: list[Any], heldout: list[Any] = [SHORT], more: str = "", task: str = "") -> str:  # noqa: B006
    path, held = rows(folder / "train.jsonl", *train), rows(folder / "held.jsonl", *heldout)
    size = f"[eval]\nsize = {len(heldout)}\n"
    return f'{SIZES}{size}{more}\n[task]\nname = "jsonl"\npath = "{path}"\neval_path = "{held}"\n{task}\n'


@pytest.mark.parametrize(
    ("train", "heldout", "more", "message"),
    [
        (
            [SHORT, SHORT, "", LONG, LONG],
            [SHORT],
            "",
            r"train.jsonl:4: expected a prompt of at most 28 tokens \(training.seq_len = 32, rollout.max_new_tokens = "
            r"4\), found 29; raise training.seq_len \(or lower rollout.max_new_tokens\) by at least 1, or set "
            r'task.bad_rows = "drop" to drop 2 of 4 rows',
        ),
        ([SHORT], [SHORT, LONG], "", r"held.jsonl:2: expected a prompt of at most 28 tokens .*drop 1 of 2 rows"),
        (
            [SHORT],
            [SHORT | {"question": "1+1=" + "+" * 4}],
            "[generator]\nmax_model_len = 12",
            r"held.jsonl:1: .* at most 8 tokens \(generator.max_model_len = 12, .* raise generator.max_model_len",
        ),
        (
            [SHORT, WORDY],
            [SHORT],
            "[cold_start]\nsteps = 1",
            r"train.jsonl:2: expected at most 33 tokens of prompt, answer",
        ),
        (
            [SHORT, WORDY],
            [SHORT],
            '[algorithm]\nname = "sft"',
            r"at most 33 tokens .*, found 46; raise training.seq_len by",
        ),
        (
            [SHORT, WORDY],
            [SHORT],
            '[algorithm]\nname = "dpo"',
            r"train.jsonl:2: expected a pair of at most 32 tokens.* found 33",
        ),
        (
            [SHORT, SHORT | {"question": "1+1=" + "+" * 9}],  # 14 and 4 new ones, twice
            [SHORT],
            '[algorithm]\nname = "online_dpo"',
            r"train.jsonl:2: expected a pair of at most 32 tokens.* found 34; raise training.seq_len by at least 2",
        ),
        ([SHORT, WORDY], [SHORT], '[algorithm]\nname = "ipo"', r"train.jsonl:2: expected a pair of at most 32 tokens"),
        ([SHORT, WORDY], [SHORT], '[algorithm]\nname = "reward_model"', r"a pair of at most 32 tokens.* found 35"),
        (
            [SHORT],
            [SHORT | {"rejected": "3" * 40}],
            '[algorithm]\nname = "reward_model"',
            r"held.jsonl:1: expected at most 32 tokens of prompt, answer and EOS .*, found 46",
        ),
    ],
)
def test_rows_that_are_too_long(tmp_path: Path, train: list[Any], heldout: list[Any], more: str, message: str) -> None:
    (problem,) = problems(config(tmp_path, written(tmp_path, train, heldout, more)))
    assert re.search(message, problem), problem


def test_a_demonstration_is_measured_with_all_its_turns(tmp_path: Path) -> None:
    train = [SHORT, SHORT | {"shown": [SAID, SAID | {"role": "tool"}, SAID]}]  # 5 + 10 + 1 + 10 + 10 + 1 tokens
    for more, found in (("[cold_start]\nsteps = 1", ["train.jsonl:2: expected at most 33 tokens"]), ("", [])):
        text = written(tmp_path, train, more=more, task='demonstration_key = "shown"')
        problem = problems(config(tmp_path, text))
        assert [re.search(r"train.*tokens", each)[0] for each in problem] == found  # pyright: ignore[reportOptionalSubscript]
        assert all("found 37;" in each for each in problem)
    text = written(tmp_path, train, more='[algorithm]\nname = "dpo"', task='demonstration_key = "shown"')
    (problem,) = problems(config(tmp_path, text))
    assert problem.startswith('task.demonstration_key: expected "" with algorithm.name = "dpo"')


@pytest.mark.parametrize(
    ("longest", "more"),
    [
        (SHORT | {"question": "1+1=" + "+" * 23}, ""),  # 28 and 4 new ones
        (SHORT | {"answer": "2" * 27}, '[algorithm]\nname = "sft"'),  # 33 tokens, of which the last is not read
        (SHORT | {"chosen": "2" * 21}, '[algorithm]\nname = "dpo"'),
        (SHORT | {"chosen": "2" * 19}, '[algorithm]\nname = "reward_model"'),
    ],
)
def test_rows_that_just_fit_pack(tmp_path: Path, longest: dict[str, Any], more: str) -> None:
    """What passes is what packing accepts."""
    from titan_rl.batch.packing import pack
    from titan_rl.tasks.prompts import SAMPLES

    whole = config(tmp_path, written(tmp_path, [longest], more=more))
    assert problems(whole) == []
    setup = prepare("x", whole, device="cpu", scratch=tmp_path / "model")
    prompt = setup.task.prompt(setup.task.train[0], 0, setup.tokenizer)
    kind = whole.algorithm.kind
    if kind == "rl":
        assert len(prompt.tokens) + whole.rollout.max_new_tokens == whole.training.seq_len
        return
    samples = SAMPLES[kind](prompt, setup.tokenizer)
    packed = pack(samples, shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0, together=len(samples))
    assert packed[0].sequences == len(samples)
    with pytest.raises(ValueError, match="a packed row has 31"):
        pack(samples, shards=1, seq_len=31, rows_per_microbatch=1, pad_id=0, together=len(samples))


def test_a_prompt_without_tokens(tmp_path: Path, folder: Path) -> None:
    none = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    edit(folder / "tokenizer.json", post_processor=none)  # it adds no BOS
    text = written(tmp_path, [SHORT, SHORT | {"question": ""}], more=f'[model]\nhf_assets_path = "{folder}"')
    (problem,) = problems(config(tmp_path, text))
    assert "train.jsonl:2: expected a prompt of at least 1 token, found none" in problem


def test_a_row_that_the_chat_template_refuses(tmp_path: Path, folder: Path) -> None:
    template = "{{ raise_exception('no system message') if messages[0].role == 'system' else bos_token }}"
    edit(folder / "tokenizer_config.json", chat_template=template)
    system = SHORT | {"question": [{"role": "system", "content": "x"}, {"role": "user", "content": "1+1="}]}
    text = written(tmp_path, [SHORT, system], more=f'[model]\nhf_assets_path = "{folder}"', task='template = "chat"')
    (problem,) = problems(config(tmp_path, text))
    assert "train.jsonl:2: expected a prompt that the chat template accepts, found TemplateError: no system" in problem


def test_unfit_rows_may_be_dropped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = written(tmp_path, [SHORT, LONG, SHORT, SHORT], [LONG, SHORT], task='bad_rows = "drop"')
    whole = config(tmp_path, text)
    assert problems(whole) == []
    setup = prepare("x", whole, device="cpu", scratch=tmp_path / "model")
    assert setup.task.unfit == {1}
    assert len(setup.heldout.prompts) == 1
    train, heldout = setup.dropped
    assert train.startswith("task.bad_rows: 1 of 4 training rows are dropped; ")
    assert "train.jsonl:2: expected a prompt of at most 28 tokens" in train
    assert heldout.startswith("task.bad_rows: 1 of 2 held-out rows are dropped; ")
    assert main(["--config", str(tmp_path / "run.toml"), "--dry-run"]) == 0
    out = re.sub(r"\s+", " ", capsys.readouterr().out)
    assert "jsonl: 3 problems, 1 held out" in out
    assert "1 of 4 training rows are dropped" in out


def test_not_every_row_may_be_dropped(tmp_path: Path) -> None:
    text = written(tmp_path, [LONG, LONG], task='bad_rows = "drop"')
    (problem,) = problems(config(tmp_path, text))
    assert problem.endswith("by at least 1; no row fits, so they cannot be dropped")


def test_practice_problems_are_drawn_by_the_seed(tmp_path: Path) -> None:
    """The first training problems of addition are 00+00 to 02+.., which say little about the others."""

    def practised(seed: int) -> list[str]:
        toml = f"[cold_start]\nsteps = 1\nstop_at = 0.5\n[debug]\nseed = {seed}"
        setup = prepare("x", config(tmp_path, toml), device="cpu", scratch=tmp_path / "model")
        return [prompt.text for prompt in setup.practice.prompts]

    first = practised(0)
    assert len(set(first)) == 256
    assert len({text[:2] for text in first}) > 80
    assert practised(0) == first != practised(1)


def test_without_the_part_no_row_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = written(tmp_path, [SHORT, LONG])
    run = config(tmp_path, path)
    assert any("expected a prompt of at most" in line for line in problems(run))
    for name in ("row lengths", "lengths of endless rows"):
        monkeypatch.setitem(PARTS, name, "ext.gone.module:load")
    assert problems(run) == []
