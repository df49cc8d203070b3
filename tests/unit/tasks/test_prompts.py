import json
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from titan_rl.batch.packing import pack
from titan_rl.config.sections import AlgorithmName, AlgorithmSection
from titan_rl.tasks import tokenizer
from titan_rl.tasks.prompts import SAMPLES, PromptSource, judged, preference, supervised
from titan_rl.tasks.task import Example, Task
from titan_rl.tasks.tokenizer import TextTokenizer
from titan_rl.wire.types import Prompt

TASK = Task([Example(f"{i}=", str(i), {"i": i}) for i in range(7)], [])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer")
    tokenizer.build(path)
    return path


@pytest.fixture(scope="module")
def text(folder: Path) -> TextTokenizer:
    return TextTokenizer.load(folder)


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
from titan_rl.tasks.task import Example, Task
from titan_rl.tasks.tokenizer import TextTokenizer

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


def test_another_process_resumes(folder: Path, text: TextTokenizer) -> None:
    source = PromptSource(TASK, text, seed=5)
    take(source, 9)
    state = json.dumps(source.state_dict())
    assert len(state) < 1000
    run = subprocess.run([sys.executable, "-c", RESUME, str(folder), state], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == [[p.id, p.text] for p in take(source, 20)]


def test_another_order_is_refused(text: TextTokenizer) -> None:
    state = PromptSource(TASK, text, seed=0).state_dict()
    fewer = Task(TASK.train[:6], [])
    for source in (PromptSource(TASK, text, seed=1), PromptSource(fewer, text, seed=0)):
        with pytest.raises(ValueError, match=r"'examples': 7.*debug\.seed"):
            source.load_state_dict(state)


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
    kinds = {AlgorithmSection(name=name).kind for name in get_args(AlgorithmName)}
    assert set(SAMPLES) == kinds - {"rl"}
