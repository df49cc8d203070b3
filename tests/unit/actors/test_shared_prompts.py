"""Rows that share prompts have the losses, log-probs, values and gradients of plain rows, in every objective."""

import math
from dataclasses import replace
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from support.flash_on_cpu import flash_on_cpu
from support.named import case_named
from support.packed_rows import groups_of
from support.shapes import TINY
from support.whole_model import whole_model
from titan_rl.actors.titan import document_attention
from titan_rl.actors.titan.document_masks import Attended, SharedMetadata, classed_masks, varlen_masks
from titan_rl.actors.titan.model import DeviceRows, TitanModel
from titan_rl.actors.titan.objectives import Objectives
from titan_rl.batch.packing import pack, unpack
from titan_rl.config.choices import Family
from titan_rl.config.presets import preset
from titan_rl.config.sections import AlgorithmSection, Config, TrainingSection
from titan_rl.wire.types import Batch, Sample

CPU = torch.device("cpu")
WINDOW = 5  # it begins within most prompts
ALGORITHMS = {
    "grpo": AlgorithmSection(kl_coef=0.05, entropy_coef=0.01, rejection="geometric", rejection_low=0.2),
    "gspo": preset("gspo"),
    "cispo": preset("cispo"),
    "dr_grpo": preset("dr_grpo", correction="sequence_tis"),
    "sft": preset("sft"),
    "dpo": preset("dpo"),
    "ipo": preset("ipo"),
    "orpo": preset("orpo"),
    "kto": preset("kto"),
    "online_dpo": preset("online_dpo", pair_loss="dpo"),
    "reward_model": preset("reward_model"),
    "critic": preset("ppo"),
}


@cache
def model(family: Family, head: str, device: str = "cpu") -> TitanModel:
    shape = replace(TINY, family=family, sliding_window=WINDOW if family == "mistral" else 0)
    config = Config(training=TrainingSection(seq_len=80))
    compute = "float32" if device == "cpu" else "bfloat16"
    return whole_model(shape if head == "lm" else shape.with_value_head(), config, device, compute)


def rows_of(samples: list[Sample], algorithm: AlgorithmSection, share: bool) -> list[Batch]:
    together = 2 if algorithm.kind in ("preference", "reward") or algorithm.online_pairs else 1
    return pack(samples, shards=1, seq_len=80, rows_per_microbatch=1, pad_id=0, together=together, share=share)


def learnt(name: str, family: Family, samples: list[Sample], share: bool) -> dict[str, Any]:
    """Return loss, statistics and gradients of one update, and the scores of the samples."""
    algorithm = ALGORITHMS[name]
    on = model(family, "value" if name in ("critic", "reward_model") else "lm")
    objective = Objectives(on, replace(on.config, algorithm=algorithm)).named(
        "value" if name == "critic" else algorithm.kind
    )
    on.model.zero_grad(set_to_none=False)
    batches, losses, statistics = rows_of(samples, algorithm, share), [], []
    for batch in batches:
        for rows in batch.microbatches:
            loss, measured = objective(DeviceRows.of(rows, CPU), batch)
            loss.backward()
            losses.append(loss.item())
            statistics.append(measured.tokens | measured.sequences)
    scores = unpack(batches, [[on.score(rows) for rows in batch.microbatches] for batch in batches], samples)
    return {
        "places": sum(rows.tokens.size for batch in batches for rows in batch.microbatches),
        "loss": math.fsum(losses),
        "statistics": {key: sum(float(each[key]) for each in statistics) for key in statistics[0]},
        "scores": [np.asarray(s)[np.asarray(sample.mask) > 0] for s, sample in zip(scores, samples, strict=True)],
        "gradients": [parameter.grad.clone() for parameter in on.model.parameters() if parameter.grad is not None],
    }


def judged(samples: list[Sample]) -> list[Sample]:
    """Return the samples with one token under the mask, the last, as a reward model reads them."""
    return [replace(s, tokens=[*s.tokens, 0], mask=[0] * len(s.tokens) + [1], columns={}) for s in samples]


def with_role_columns(samples: list[Sample], seed: int) -> list[Sample]:
    random = np.random.default_rng(seed)
    made = [random.standard_normal((2, len(s.tokens))) for s in samples]
    return [s.with_columns(value=value, **{"return": back}) for s, (value, back) in zip(samples, made, strict=True)]


@given(groups_of(8, 6))
def test_a_place_counts_for_each_target_that_it_predicts(samples: list[Sample]) -> None:
    """A mixture of experts counts its routes by this: as often as in plain rows."""
    counted = []
    for share in (False, True):
        counts: dict[tuple[int, int], float] = {}
        for batch in rows_of(samples, ALGORITHMS["grpo"], share):
            for rows in batch.microbatches:
                read = zip(rows.tokens.ravel().tolist(), rows.positions.ravel().tolist(), strict=True)
                for place, n in zip(read, DeviceRows.of(rows, CPU).trained_at.ravel().tolist(), strict=True):
                    counts[place] = counts.get(place, 0) + n
        counted.append({place: n for place, n in counts.items() if n})
    assert counted[0] == counted[1]


@pytest.mark.parametrize(  # an objective sees nothing of the family: each once, and each kind of rows with both
    ("name", "family"),
    [*((name, "llama3") for name in ALGORITHMS), *((name, "qwen3") for name in ("grpo", "dpo", "critic"))],
)
@settings(max_examples=4)
@given(data=st.data())
def test_losses_scores_and_gradients_are_those_of_plain_rows(name: str, family: Family, data: st.DataObject) -> None:
    pairs = ALGORITHMS[name].kind in ("preference", "reward") or ALGORITHMS[name].online_pairs
    samples = with_role_columns(data.draw(groups_of(12, 12, members=2 if pairs else 0)), 0)
    if pairs:  # an answer has its end of sequence at least
        samples = [s for i, s in enumerate(samples) if all(sum(samples[j].mask) for j in (i, i ^ 1))]
    assume(samples)
    samples = judged(samples) if name == "reward_model" else samples
    plain, shared = (learnt(name, family, samples, share) for share in (False, True))
    assert shared["places"] <= plain["places"]
    assert shared["loss"] == pytest.approx(plain["loss"], rel=1e-6, abs=1e-6)
    assert shared["statistics"] == pytest.approx(plain["statistics"], rel=1e-5, abs=1e-5)
    for ours, theirs in zip(shared["scores"], plain["scores"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=2e-6)
    loss = abs(plain["loss"])  # ipo squares: its terms may be larger than the gradients that they sum to
    for ours, theirs in zip(shared["gradients"], plain["gradients"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6 * max(1.0, loss, float(theirs.abs().max())))


def group(size: int, prompt: int, answer: int) -> list[Sample]:
    random = np.random.default_rng(size)
    asked = random.integers(3, 50, prompt).tolist()
    return [
        Sample(asked + random.integers(3, 50, answer).tolist(), [0] * prompt + [1] * answer, {}, prompt).with_columns(
            behaviour=np.full(prompt + answer, -4.0), advantage=random.standard_normal(prompt + answer)
        )
        for _ in range(size)
    ]


def test_a_step_repeats_to_the_last_bit_with_several_threads() -> None:
    samples = group(30, 40, 3)
    torch.set_num_threads(2)
    try:
        one, two = (learnt("grpo", "llama3", samples, share=True) for _ in range(2))
    finally:
        torch.set_num_threads(1)
    assert 5 * one["places"] < learnt("grpo", "llama3", samples, share=False)["places"]
    assert one["loss"] == two["loss"]
    assert all(torch.equal(a, b) for a, b in zip(one["gradients"], two["gradients"], strict=True))


@pytest.mark.parametrize("name", ["grpo", "sft", "critic"])
def test_shared_prompts_in_a_window_are_those_of_plain_rows(name: str) -> None:
    """The window begins within the prompt, at its end, and beyond it."""
    samples = with_role_columns([s for prompt in (2, 5, 20) for s in group(4, prompt, 9)], 0)
    plain, shared = (learnt(name, "mistral", samples, share) for share in (False, True))
    assert shared["places"] < plain["places"]
    assert shared["loss"] == pytest.approx(plain["loss"], rel=1e-5, abs=1e-6)
    for ours, theirs in zip(shared["scores"], plain["scores"], strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=5e-6)
    for ours, theirs in zip(shared["gradients"], plain["gradients"], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5 * max(1.0, float(theirs.abs().max())))


def test_a_window_hides_what_is_before_it() -> None:
    """Two layers see at most 2 * (WINDOW - 1) places back. Earlier tokens change no log-prob, later ones do."""
    tokens, on = np.random.default_rng(0).integers(3, 50, 30).tolist(), model("mistral", "lm")
    reach = 2 * (WINDOW - 1)

    def last(tokens: list[int]) -> float:
        (batch,) = batches = rows_of([Sample(tokens, [0] * 29 + [1], {})], ALGORITHMS["sft"], share=False)
        (scored,) = unpack(batches, [[on.score(rows) for rows in batch.microbatches]], [Sample(tokens, [0] * 29 + [1])])
        return float(scored[-1])

    def changed(place: int) -> list[int]:
        return [*tokens[:place], (tokens[place] + 1) % 47 + 3, *tokens[place + 1 :]]

    assert last(changed(28 - reach - 1)) == last(tokens)
    assert last(changed(28 - reach)) != last(tokens)
    assert last(changed(28 - WINDOW + 1)) != last(tokens)


@pytest.mark.parametrize("family", ["llama3", "mistral"])
def test_flash_attention_shares_prompts(family: Family) -> None:
    """What CUDA computes in bfloat16, on its operators' CPU kernels: as near as rounding lets it be. In float32 the
    model's other attention computes the same."""
    samples, found = group(8, 20, 6), []
    with flash_on_cpu() as calls:
        on = model(family, "lm", "cuda")
        before = dict(calls)
        for share in (False, True):
            on.model.zero_grad(set_to_none=False)
            (batch,) = batches = rows_of(samples, ALGORITHMS["sft"], share)
            for each in batches:
                for rows in each.microbatches:
                    logprob, _ = on.logprobs(DeviceRows.of(rows, CPU), temperature=1.0)
                    (logprob * torch.from_numpy(rows.weights)).sum().backward()
            scores = unpack(batches, [[on.score(rows) for rows in b.microbatches] for b in batches], samples)
            found.append(
                (np.stack(scores), [p.grad.float() for p in on.model.parameters() if p.grad is not None], batch)
            )
        assert calls["forward"] - before["forward"] >= 8
        assert calls["backward"] - before["backward"] >= 4
    (plain, ours), (shared, theirs), batch = found[0][:2], found[1][:2], found[1][2]
    assert batch.microbatches[0].segments[:, 3].any()
    np.testing.assert_allclose(plain, shared, atol=0.05)
    exact, cpu = rows_of(samples, ALGORITHMS["sft"], share=False), model(family, "lm")
    scored = unpack(exact, [[cpu.score(rows) for rows in b.microbatches] for b in exact], samples)
    np.testing.assert_allclose(plain, np.stack(scored), atol=0.1)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(a.abs().max()))


def check_gathers(segments_G4: np.ndarray) -> None:
    """Compare the gradients of every gather with plain indexing."""
    attended = Attended.whole(segments_G4)
    masks, places = varlen_masks(attended, CPU), attended.keys
    classed = [*classed_masks(attended, CPU)[1:]]
    gathers = classed + ([masks.keys] if isinstance(masks, SharedMetadata) else [])
    for gather in gathers:
        x = torch.randn(places, 2, 3, dtype=torch.float64, requires_grad=True)
        weights = torch.randn(len(gather.source), 2, 3, dtype=torch.float64)
        (ours,) = torch.autograd.grad((gather(x) * weights).sum(), x)
        (theirs,) = torch.autograd.grad((x[gather.source] * weights).sum(), x)
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


@given(groups_of(12, 12))
def test_gathered_keys_have_the_gradients_of_indexing(samples: list[Sample]) -> None:
    for batch in rows_of(samples, ALGORITHMS["sft"], share=True):
        for rows in batch.microbatches:
            check_gathers(rows.segments)


def test_keys_of_prefixes_of_any_length_at_any_place() -> None:
    """A prefix of three places behind others, with a single answer, ended a run: two sizes of 1 were padded as one."""
    for before, prefix, answers in product(range(4), range(1, 6), range(1, 4)):
        begin = before + prefix
        own = [(begin + 2 * n, 2, before, prefix) for n in range(answers)]  # begin, length; prefix begin, prefix length
        with case_named((before, prefix, answers)):
            check_gathers(np.array([*[(0, before, 0, 0)][: before > 0], (before, prefix, 0, 0), *own]))


def test_an_attention_of_others_is_refused() -> None:
    on = model("llama3", "lm", "cuda")
    (batch,) = rows_of(group(8, 20, 6), ALGORITHMS["sft"], share=True)
    config = on.model.config
    found = [layer.attention.inner_attention for layer in config.layers]
    for layer in config.layers:
        layer.attention.inner_attention = document_attention.VarlenAttention.Config()
    try:
        with pytest.raises(TypeError, match=r"found VarlenAttention.Config, which override.imports"):
            document_attention.masks_of(on.model, Attended.whole(batch.microbatches[0].segments), CPU)
    finally:
        for layer, own in zip(config.layers, found, strict=True):
            layer.attention.inner_attention = own
