import json
import subprocess
import sys
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.batch.packing import pack
from titan_rl.config.algorithms import PRESETS
from titan_rl.config.sections import AlgorithmSection
from titan_rl.tasks.prompts import SAMPLES, PromptSource, judged, preference, supervised
from titan_rl.tasks.task import Example, Task
from titan_rl.text.tokenizer import TextTokenizer
from titan_rl.wire.errors import RunError
from titan_rl.wire.types import Prompt

TASK = Task([Example(f"{i}=", str(i), {"i": i}) for i in range(7)], [])


def take(source: PromptSource, n: int) -> list[Prompt]:
    return [source.next() for _ in range(n)]


def test_ids_count_and_every_epoch_covers_every_example_once(text: TextTokenizer) -> None:
    prompts = take(PromptSource(TASK, text, seed=0), 28)
    assert [p.id for p in prompts] == list(range(28))
    epochs = list(zip(*[iter(p.row["i"] for p in prompts)] * 7, strict=True))
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len(set(epochs)) == 4
    assert all(p.text == f"{p.row['i']}=" and p.tokens == text.prompt(p.text, "plain") for p in prompts)


def test_the_order_is_the_seeds_alone(text: TextTokenizer) -> None:
    orders = [take(PromptSource(TASK, text, seed=seed), 14) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]


def test_any_split_resumes(text: TextTokenizer) -> None:
    @given(st.integers(0, 30), st.integers(0, 30), st.integers(0, 2**70))
    def resumes(first: int, second: int, seed: int) -> None:
        source = PromptSource(TASK, text, seed=seed)
        take(source, first)
        state = json.dumps(source.state_dict())
        rest = take(source, second)

        resumed = PromptSource(TASK, text, seed=seed)
        take(resumed, 3)  # what a source had issued before is forgotten
        resumed.load_state_dict(json.loads(state))
        assert json.dumps(resumed.state_dict()) == state
        assert take(resumed, second) == rest

    resumes()


RESUME = """
import json, sys
from pathlib import Path
from titan_rl.tasks.prompts import PromptSource
from titan_rl.tasks.task import Example, Task, load_task
from titan_rl.text.tokenizer import TextTokenizer

folder, state = Path(sys.argv[1]), json.loads(sys.argv[2])
task = Task([Example(f"{i}=", str(i), {"i": i}) for i in range(7)], [])
source = PromptSource(task, TextTokenizer.load(folder), seed=5)
source.load_state_dict(state)
print(json.dumps([(p.id, p.text) for p in (source.next() for _ in range(20))]))
assert "torch" not in sys.modules
"""


# As it was written while torchdata counted, after 9 prompts of seed 5, when prompt 10 had overtaken prompt 9.
BEFORE = """{"seed": 5, "examples": 7, "loader": {"_index_sampler_state": {"issued": 9}, "_sampler_iter_state":
{"issued": 9}, "_sampler_iter_yielded": 9, "_num_yielded": 9, "_IterableDataset_len_called": null, "_shared_seed": null,
"fetcher_state": null, "dataset_state": null, "_iterator_finished": false}, "taken": [10], "next": 11, "open": [9]}"""


def test_a_cursor_that_torchdata_counted_resumes(text: TextTokenizer) -> None:
    source, resumed = PromptSource(TASK, text, seed=5), PromptSource(TASK, text, seed=5)
    resumed.load_state_dict(json.loads(BEFORE))
    assert take(resumed, 9) == [prompt for prompt in take(source, 19) if prompt.id == 9 or prompt.id > 10]
    assert resumed.state_dict() == source.state_dict()


def test_the_order_never_changes(text: TextTokenizer) -> None:
    """A run that resumes depends on these very numbers."""
    prompts = take(PromptSource(TASK, text, seed=5), 14)
    assert [prompt.row["i"] for prompt in prompts] == [3, 2, 4, 6, 0, 5, 1, 1, 0, 6, 4, 3, 2, 5]


def test_another_process_resumes(text: TextTokenizer) -> None:
    source = PromptSource(TASK, text, seed=5)
    take(source, 9)
    state = json.dumps(source.state_dict())
    assert len(state) < 1000
    run = subprocess.run(
        [sys.executable, "-c", RESUME, str(text.folder), state], capture_output=True, text=True, check=True
    )
    assert json.loads(run.stdout) == [[p.id, p.text] for p in take(source, 20)]


def test_another_order_is_refused(text: TextTokenizer) -> None:
    state = PromptSource(TASK, text, seed=0).state_dict()
    fewer = Task(TASK.train[:6], [])
    for source in (PromptSource(TASK, text, seed=1), PromptSource(fewer, text, seed=0)):
        with pytest.raises(RunError, match=r"'examples': 7.*debug\.seed"):
            source.load_state_dict(state)


def test_a_refused_resume_says_how_to_continue(text: TextTokenizer) -> None:
    state = PromptSource(TASK, text, seed=0).state_dict()
    with pytest.raises(RunError, match=r'every row of its file \(task\.bad_rows = "drop" leaves out'):
        PromptSource(Task(TASK.train[:6], []), text, seed=0).load_state_dict(state)


@pytest.mark.parametrize("unfit", [{3}, {0, 6}, {0, 1, 2, 3, 4, 5}])
def test_unfit_examples_are_skipped_and_the_others_keep_their_order(text: TextTokenizer, unfit: set[int]) -> None:
    whole = take(PromptSource(TASK, text, seed=5), 28)
    source = PromptSource(replace(TASK, unfit=frozenset(unfit)), text, seed=5)
    fit = [prompt.row["i"] for prompt in whole if prompt.row["i"] not in unfit]
    prompts = take(source, len(fit))
    assert [prompt.row["i"] for prompt in prompts] == fit
    assert [prompt.id for prompt in prompts] == list(range(len(fit)))


def test_a_run_resumes_without_the_rows_that_ended_it(text: TextTokenizer) -> None:
    """Of seed 5's order 3 2 4 6 0 5 1, the run had trained on three, and the fifth does not fit."""
    source = PromptSource(TASK, text, seed=5)
    take(source, 3)
    state = json.dumps(source.state_dict())
    resumed = PromptSource(replace(TASK, unfit=frozenset({0})), text, seed=5)
    resumed.load_state_dict(json.loads(state))
    prompts = take(resumed, 6)
    assert [prompt.row["i"] for prompt in prompts] == [6, 5, 1, 1, 6, 4]
    assert [prompt.id for prompt in prompts] == [3, 4, 5, 6, 7, 8]
    state = json.dumps(resumed.state_dict())
    again = PromptSource(TASK, text, seed=5)  # with longer rows: all of them fit
    again.load_state_dict(json.loads(state))
    assert [prompt.row["i"] for prompt in take(again, 3)] == [3, 2, 5]


def test_prompts_that_overtook_are_skipped_with_their_examples(text: TextTokenizer) -> None:
    task = replace(TASK, unfit=frozenset({2}))
    whole = take(PromptSource(task, text, seed=5), 12)
    resumed = PromptSource(task, text, seed=5)
    take(resumed, 4)
    state = resumed.state_dict() | {"taken": [5, 6]}
    resumed.load_state_dict(json.loads(json.dumps(state)))
    assert take(resumed, 4) == [whole[4], *whole[7:10]]


def test_supervised_trains_the_answer_and_eos(text: TextTokenizer) -> None:
    (sample,) = supervised(TASK.prompt(TASK.train[5], 0, text), text)
    assert text.decode(sample.tokens, skip_special=False) == "<s>5=5</s>"
    assert sample.mask == [0, 0, 0, 1, 1]
    assert not sample.columns


PAIR = Prompt(0, "5=", [1, 12, 20], "5", rejected="65")


def test_a_preference_trains_both_answers_chosen_first(text: TextTokenizer) -> None:
    chosen, rejected = preference(PAIR, text)
    assert text.decode(chosen.tokens, skip_special=False) == "<s>5=5</s>"
    assert text.decode(rejected.tokens, skip_special=False) == "<s>5=65</s>"
    assert (chosen.mask, rejected.mask) == ([0, 0, 0, 1, 1], [0, 0, 0, 1, 1, 1])


def test_a_reward_models_pair_is_scored_where_it_has_read_the_last_token(text: TextTokenizer) -> None:
    """A place predicts the next token: the place that has read EOS predicts the padding behind it."""
    chosen, rejected = judged(PAIR, text)
    assert text.decode(chosen.tokens, skip_special=False) == "<s>5=5</s><pad>"
    assert text.decode(rejected.tokens, skip_special=False) == "<s>5=65</s><pad>"
    assert (chosen.mask, rejected.mask) == ([0, 0, 0, 0, 0, 1], [0, 0, 0, 0, 0, 0, 1])
    (batch,) = pack([chosen], shards=1, seq_len=16, rows_per_microbatch=1, pad_id=text.pad)
    (rows,) = batch.microbatches
    assert rows.tokens[rows.mask > 0].tolist() == [text.eos]


def test_every_kind_but_rl_has_its_samples() -> None:
    kinds = {AlgorithmSection(name=name).kind for name in PRESETS}
    assert set(SAMPLES) == kinds - {"rl"}


def test_a_demonstration_trains_what_the_policy_says_and_never_what_it_reads(text: TextTokenizer) -> None:
    """Planted: with tool output in the mask, the policy would learn to make the results up."""
    shown = [("?347*862", "299114="), ("299114", "")]
    prompt = Prompt(0, "347*862=", text.encode("347*862="), "299114", demonstration=shown)
    (sample,) = supervised(prompt, text)
    said = [token for token, trained in zip(sample.tokens, sample.mask, strict=True) if trained]
    read = [token for token, trained in zip(sample.tokens, sample.mask, strict=True) if not trained]
    assert text.decode(said, skip_special=False) == "?347*862</s>299114</s>"
    assert text.decode(read, skip_special=False) == "347*862=299114="


def test_a_demonstration_in_messages_is_that_in_text_and_a_chat_renders_their_roles(text: TextTokenizer) -> None:
    observed = [{"role": "tool", "content": "299114="}]
    prompt = Prompt(0, "347*862=", text.encode("347*862="), "299114", demonstration=[("?347*862", observed)])
    in_text = replace(prompt, demonstration=[("?347*862", "299114=")])
    assert supervised(prompt, text) == supervised(in_text, text)
    asked = [{"role": "user", "content": "347*862="}]
    tokens = text.prompt(asked, "chat")
    chat = replace(prompt, tokens=tokens, messages=asked, demonstration=[("?347*862", observed), ("299114", [])])
    (sample,) = supervised(chat, text)
    assert text.decode(sample.tokens[len(tokens) :], skip_special=False).startswith("?347*862</s>")
    said = [token for token, trained in zip(sample.tokens, sample.mask, strict=True) if trained]
    assert text.decode(said, skip_special=False) == "?347*862</s>299114</s>"
