"""What bench_engine.py gives to every engine, and what it computes from their answers."""

import pytest
from bench_engine import BEFORE, OURS, VLLM, rows_of

from bench.engine_requests import GROUP_SIZE, LENGTHS, Forward, engine_shape, groups_of


@pytest.mark.parametrize("name", LENGTHS)
@pytest.mark.parametrize("sequences", [128, 256])
def test_every_generation_has_its_own_prompts_and_the_lengths_of_the_shape(name: str, sequences: int) -> None:
    shape = engine_shape(name, sequences)
    first, again, second = groups_of(shape, 0), groups_of(shape, 0), groups_of(shape, 1)
    assert first == again
    assert sum(len(group.seeds) for group in first) == sequences == shape.samples
    assert {len(group.seeds) for group in first} == {GROUP_SIZE}
    assert (first[0].length, first[-1].length) == LENGTHS[name]
    assert [group.length for group in second] == [group.length for group in first]
    assert not {tuple(group.prompt) for group in first} & {tuple(group.prompt) for group in second}
    seeds = [seed for group in first for seed in group.seeds]
    assert len(set(seeds)) == len(seeds)


def test_the_forward_is_timed_with_its_projection_and_counted_without() -> None:
    import torch

    class Model(torch.nn.Linear):
        def compute_logits(self, hidden: object) -> object:
            return hidden

    model = Model(2, 2)
    forward = Forward(model)
    hidden = model(torch.zeros(1, 2))
    inside = forward.seconds
    assert model.compute_logits(hidden) is hidden
    assert (forward.calls, forward.seconds > inside > 0) == (1, True)


def test_host_time_is_what_the_forward_leaves_and_ratios_are_to_bare_vllm() -> None:
    def rounds(*walls: float) -> list[dict[str, float]]:
        return [{"wall": wall, "cpu": wall, "forward": 0.1, "forward_cpu": 0.05} for wall in walls]

    rows = list(rows_of("case", {BEFORE: rounds(0.2, 0.3, 0.4), OURS: rounds(0.2), VLLM: rounds(0.125)}))
    found = {(row.way, row.measure): row for row in rows}
    assert found[BEFORE, "host, ms"].values == pytest.approx([100, 200, 300])
    assert found[OURS, "host share"].values == pytest.approx([0.5])
    assert found[OURS, "host CPU, ms"].values == pytest.approx([150])
    assert found[OURS, "wall, ms"].ratio == pytest.approx(1.6)
    assert found[BEFORE, "host, ms"].ratio == pytest.approx(8)
    assert {row.ratio for row in rows if row.way == VLLM} == {1}
    assert all(row.ratio is None for row in rows_of("case", {OURS: rounds(0.2)}))
