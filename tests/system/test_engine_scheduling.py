"""A real vLLM with asynchronous scheduling returns the tokens and versions that it returns without, over updates of its
weights. test_engine.py, test_engine_updates.py, test_engine_slots.py and test_engine_fuzz.py run with it, too.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from support.forked_programs import results_of
from support.tiny import perturbed, tiny_llama
from titan_rl.actors.vllm.engine import Engine, EngineSettings

PROGRAM = """
import json, sys
sys.path.insert(0, sys.argv[4])
from support.scheduled_engine import sample
sample(sys.argv[1], sys.argv[2], **json.loads(sys.argv[3]))
"""
TESTS = Path(__file__).parents[1]
SWITCHES = (1, 3, 8, 9, 17)
Samples = dict[str, list[dict[str, Any]]]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of two models of one shape."""
    model = tiny_llama(max_position_embeddings=128)
    folders = [tmp_path_factory.mktemp(name) for name in ("first", "second")]
    for folder, each in zip(folders, (model, perturbed(model)), strict=True):
        each.save_pretrained(folder)
    return folders


def sampled(folders: list[Path], **options: Any) -> Samples:
    (found,) = results_of("generator", PROGRAM, *folders, json.dumps({"switches": SWITCHES, **options}), TESTS)
    return found


def of(samples: Samples, field: str) -> dict[str, list[Any]]:
    return {id: [sample[field] for sample in completions] for id, completions in samples.items()}


def logprobs_of(samples: Samples) -> list[float]:
    return [logprob for completions in of(samples, "logprobs").values() for one in completions for logprob in one]


def test_tokens_and_versions_are_those_of_synchronous_steps(folders: list[Path]) -> None:
    """Over kept and dropped keys and values, stop tokens, a sleep, and samples that are withdrawn and resumed."""
    synchronous, asynchronous = (sampled(folders, asynchronous=on, disturbed=True) for on in (False, True))
    for field in ("tokens", "versions", "finish"):
        assert of(asynchronous, field) == of(synchronous, field)
    assert logprobs_of(asynchronous) == pytest.approx(logprobs_of(synchronous), abs=1e-5)
    finishes = {finish for completions in of(synchronous, "finish").values() for finish in completions}
    assert finishes == {"stop", "length"}
    versions = [one for completions in of(synchronous, "versions").values() for one in completions]
    assert {version for one in versions for version in one} == set(range(len(SWITCHES) + 1))


def test_16_bits_are_equal_to_the_last(folders: list[Path]) -> None:
    synchronous, asynchronous = (sampled(folders, asynchronous=on, dtype="bfloat16") for on in (False, True))
    assert asynchronous == synchronous


def test_without_the_drain_the_recorded_versions_are_one_token_early(folders: list[Path]) -> None:
    """A planted bug: the batch in flight at a switch has been sampled by the old weights."""
    switches = SWITCHES[1:]  # a sample without a token would start again
    right, wrong = (sampled(folders, asynchronous=True, drains=on, switches=switches) for on in (True, False))
    assert of(wrong, "tokens") == of(right, "tokens")
    expected = [sum(step > at for at in switches) for step in range(1, 25)]
    assert of(right, "versions") == {"group": [expected] * 8}
    assert of(wrong, "versions") == {"group": [[*expected[1:], expected[-1]]] * 8}


def test_records_that_steps_make_need_synchronous_ones() -> None:
    with pytest.raises(ValueError, match="expected no records with asynchronous scheduling, found kept, routes"):
        Engine(EngineSettings(model_dir="", async_scheduling=True, records=("kept", "routes")))
