"""What bench_step.py computes from its measurements, and the plot of it."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from bench.peak_memory import memory_of, run_and_measure
from bench.rows import append_rows, csv_rows
from bench.step_ours import requests_of
from bench.step_shapes import SHAPES, TOOL_SAYS, Tool, chats
from bench.step_torch import padded
from bench.step_waterfall import floor, layers, of_one_commit, ratios, steps_of
from bench.step_ways import LAG, OURS, PARTS, PEAK, PROMPTS_FILE, TORCH, TRL, VLLM, medians, run_keys
from titan_rl.ext.agents.episodes import Reply
from titan_rl.wire.types import Request, Sampling

ROUNDS = {  # way: generation, training, sync, step of each round
    TORCH: [(0.0, 0.11, 0.0, 0.11), (0.0, 0.12, 0.0, 0.12), (0.0, 0.10, 0.0, 0.10)],
    VLLM: [(0.16, 0.0, 0.0, 0.16), (0.17, 0.0, 0.0, 0.17), (0.15, 0.0, 0.0, 0.15)],
    OURS: [(0.15, 0.26, 0.01, 0.46), (0.14, 0.25, 0.01, 0.44), (0.16, 0.27, 0.02, 0.47)],
    LAG: [(0.2, 0.3, 0.01, 0.36), (0.2, 0.3, 0.01, 0.35), (0.2, 0.3, 0.01, 0.37)],
    TRL: [(0.1, 0.12, 0.0, 0.22), (0.1, 0.12, 0.0, 0.23), (0.1, 0.12, 0.0, 0.21)],
}
PEAKS = {OURS: "1.2", LAG: "1.5", TRL: "3.0"}  # the other ways have none, as rows of older commits
ROWS = [
    {"shape": shape, "way": way, "rest": "0", "cpu": "0.5", PEAK: PEAKS.get(way, "")}
    | {part: str(value) for part, value in zip(("generation", "training", "sync", "step"), values, strict=True)}
    for shape in SHAPES
    for way, rounds in ROUNDS.items()
    for values in rounds
]
STEPS = steps_of(ROWS, "grpo_llama")


def test_the_parts_of_a_way_add_up_to_its_step() -> None:
    for step in STEPS.values():
        assert sum(step[part] for part in PARTS) == pytest.approx(step["step"])
    assert STEPS[OURS]["rest"] == pytest.approx(0.46 - 0.15 - 0.26 - 0.01)
    assert STEPS[LAG]["rest"] < 0  # generation and training overlap


def test_commits_are_not_pooled() -> None:
    rows = [{"shape": shape, "way": OURS, "commit": commit} for commit in ("aaa1", "bbb2") for shape in ("20M", "calc")]
    rows.append({"shape": "20M", "way": TRL, "commit": "bbb2"})
    assert of_one_commit(rows, "20M") == [rows[2], rows[4]]
    assert of_one_commit(rows, "calc", "aa") == [rows[1]]
    assert of_one_commit(rows, "calc", "c") == of_one_commit(rows, "grpo_llama") == []


def test_a_program_prints_only_what_it_measures_and_medians_fill_in_the_rest() -> None:
    found = medians([{"step": 3.0, "training": 3.0, "cpu": 5.0}, {"step": 1.0, "training": 1.0, "cpu": 2.0}])
    assert found == {"generation": 0, "training": 2, "sync": 0, "step": 2, "cpu": 3.5, "rest": 0}


def test_ratios_are_to_trl_and_to_the_floor() -> None:
    found = ratios(STEPS)
    assert floor(STEPS) == pytest.approx(0.27)
    assert found[f"{OURS}: step / TRL"] == pytest.approx(0.46 / 0.22)
    assert found[f"{OURS}: step / floor"] == pytest.approx(0.46 / 0.27)
    assert found[f"{OURS}: CPU / TRL"] == pytest.approx(1)
    assert found[f"{OURS}: CPU / floor"] == pytest.approx(0.5)
    assert found[f"{LAG}: step / TRL"] == pytest.approx(0.36 / 0.22)
    assert found[f"{OURS}: training / torch"] == pytest.approx(0.26 / 0.11)
    assert found[f"{OURS}: generation / vLLM"] == pytest.approx(0.15 / 0.16)
    assert found[f"{OURS}: memory / TRL"] == pytest.approx(0.4)
    assert found[f"{LAG}: memory / TRL"] == pytest.approx(0.5)
    assert PEAK not in STEPS[TORCH]
    older = {**STEPS, TRL: {part: value for part, value in STEPS[TRL].items() if part != PEAK}}
    assert not any("memory" in name for name in ratios(older))
    assert not any("TRL" in name for name in ratios({way: STEPS[way] for way in (TORCH, VLLM, OURS)}))


def test_a_new_column_leaves_the_older_rows_readable(tmp_path: Path) -> None:
    path = tmp_path / "step.csv"
    append_rows(path, [{"way": TORCH, "engines": "a, b"}])
    append_rows(path, [{"way": OURS, PEAK: "1.20", "engines": "c"}])
    append_rows(path, [{"way": TRL, "engines": "d"}])
    assert path.read_text().splitlines()[0] == f"way,engines,{PEAK}"
    assert [(row["way"], row["engines"], row[PEAK]) for row in csv_rows(path)] == [
        (TORCH, "a, b", ""),
        (OURS, "c", "1.20"),
        (TRL, "d", ""),
    ]


def test_the_memory_of_a_command_is_measured_and_its_failure_says_why(tmp_path: Path) -> None:
    held = "import sys; held = b'x' * (64 << 20); print('holds', flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", held], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout
        assert process.stdout.readline() == b"holds\n"
        assert memory_of(process.pid) > 64 << 20
        process.communicate()
    log = tmp_path / "log"
    assert run_and_measure([sys.executable, "-c", "print('said')"], {}, log) >= 0
    assert log.read_text() == "said\n"
    with pytest.raises(RuntimeError, match=r"ended with 1:\n(?s:.*)no such thing"):
        run_and_measure([sys.executable, "-c", "raise SystemExit('no such thing')"], {}, log)


def test_the_layers_lead_from_zero_over_the_floor_to_the_step() -> None:
    found = layers(STEPS)
    assert found[0].start == 0
    assert found[1].end == pytest.approx(floor(STEPS))
    assert found[-1].end == pytest.approx(STEPS[OURS]["step"])
    assert all(before.end == after.start for before, after in pairwise(found))
    assert found[3].end < found[3].start  # generation took less than bare vLLM


@pytest.mark.parametrize("name", [name for name, shape in SHAPES.items() if not shape.read])
def test_every_step_of_a_shape_has_the_same_tokens_and_each_sample_one_seed(name: str) -> None:
    shape = SHAPES[name]
    for step in range(5):
        lengths = shape.lengths(step)
        assert (min(lengths), max(lengths), len(lengths)) == (shape.shortest, shape.longest, shape.samples)
        parts = []
        for group in range(shape.groups):
            request = Request(
                f"prompt-{step * shape.groups + group}",
                [1] * shape.prompt,
                list(range(shape.group_size)),
                Sampling(999),
            )
            parts += requests_of(request, shape)
        assert [part.sampling.max_new_tokens for part in parts for _ in part.seeds] == lengths
        assert sum(lengths) + shape.samples * shape.prompt == shape.tokens
        assert all(part.sampling.stop_token_ids == () for part in parts)


def test_a_rollout_of_two_turns_has_a_request_of_set_length_for_each() -> None:
    shape = SHAPES["calc"]
    for turn, length in enumerate((shape.longest, shape.second)):
        (request,) = requests_of(Request(f"prompt-7.3:{turn}", [1], [5], Sampling(999, stop_token_ids=(2,))), shape)
        assert (request.sampling, request.seeds) == (Sampling(length), [5])
    assert shape.sampled == shape.samples * (shape.longest + shape.second)
    assert shape.tokens == shape.sampled + shape.samples * (7 + shape.read)


def test_a_prompt_of_another_length_than_the_shapes_is_refused() -> None:
    with pytest.raises(ValueError, match="expected prompts of 29 tokens, found 37"):
        requests_of(Request("prompt-0", [1] * 37, [5], Sampling(16)), SHAPES["smollm2"])


def test_a_pretrained_model_reads_chats_of_one_length_from_its_folder(tmp_path: Path) -> None:
    shape = SHAPES["smollm2"]
    assert (shape.tokens, shape.sampled) == (64 * 45, 64 * 16)
    keys = run_keys(shape, tmp_path)
    assert keys["task.path"] == tmp_path / PROMPTS_FILE
    assert (keys["task.name"], keys["task.template"], keys["model.hf_assets_path"]) == ("jsonl", "chat", tmp_path)
    assert (keys["generator.max_num_seqs"], keys["rollout.max_new_tokens"], keys["training.steps"]) == (64, 16, 5)
    assert "task.name" not in run_keys(SHAPES["20M"], tmp_path)
    assert {len(json.dumps(chat)) for chat in chats()} == {len(json.dumps(chats()[0]))}
    assert len({chat[1]["content"] for chat in chats()}) > shape.groups * keys["training.steps"]


def test_what_the_guard_of_the_engines_asks_has_no_set_length() -> None:
    asked = Request("engine-proof-0", [1], [5], Sampling(3))
    assert all(requests_of(asked, shape) == [asked] for shape in SHAPES.values())


def test_bare_torch_trains_on_the_sampled_tokens_of_both_turns() -> None:
    shape = SHAPES["calc"]
    ((tokens, filled, mask),) = padded(shape, 0)
    assert tokens.shape == (shape.samples, 30)
    assert bool(filled.all())
    assert mask[0].tolist() == [1.0] * 8 + [0.0] * 8 + [1.0] * 7
    chunks = list(padded(SHAPES["20M"], 3))
    assert all(bool((filled == mask).all()) for _, filled, mask in chunks)
    assert sum(int(mask.sum()) for _, _, mask in chunks) == SHAPES["20M"].sampled


async def test_the_tool_answers_once() -> None:
    tool = Tool()
    await tool.reset()
    assert [await tool.step(Reply(said, [], "length")) for said in ("?347*862", "29x")] == [
        (TOOL_SAYS, 0.0, False, {}),
        ("", pytest.approx(2 / 3), True, {}),
    ]
