"""How updates are computed on a GPU: the fastest way that fits, and where none does, changes that do."""

import random
import re
from dataclasses import replace
from typing import Any

import pytest

from titan_rl.config import sections as c
from titan_rl.config.auto import resolved
from titan_rl.config.changes import changed
from titan_rl.kernels.logit_windows import most_flops, most_logits
from titan_rl.preflight import memory
from titan_rl.preflight.added_parameters import with_adapter_sync
from titan_rl.preflight.checks.machine import check_gpu_memory
from titan_rl.preflight.memory import (
    GIB,
    GPU_TOKENS,
    SPARE,
    filled_cache,
    needs,
    on_gpus,
    sequences_at_once,
    update_choices,
    with_rows,
)
from titan_rl.tools.plan.facts import Facts, read_facts
from titan_rl.tools.plan.updates import UpdateTimes
from titan_rl.wire.model_shape import ModelShape

FACTS: Facts = read_facts()
CARDS = [card for card in FACTS.gpus.values() if card.memory_gb]
DRAWN = 60
KEPT = {"activation_checkpoint.mode": "none", "training.keep_logits": True}


def asked(name: str, card: str, answer: int, seq_len: int, gpus: int = 1, *, colocated: bool = True) -> c.Config:
    shape = FACTS.shape(name)
    sizes = ("dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "hidden_dim", "vocab_size")
    model: dict[str, Any] = {key: getattr(shape, key) for key in sizes}
    return c.Config(
        model=c.ModelSection(name=shape.family, enable_weight_tying=shape.tied, **model),
        rollout=c.RolloutSection(groups_per_step=16, group_size=16, max_new_tokens=answer),
        training=c.TrainingSection(seq_len=seq_len),
        placement=c.PlacementSection(kind="colocated" if colocated else "disaggregated"),
        parallelism=c.ParallelismSection(data_parallel_shard_degree=gpus),
        generator=c.GeneratorSection(replicas=gpus),
        hosts=c.HostsSection(slots=8, gpu=card, gpu_memory_gb=FACTS.gpu(card).memory_gb),
    )


def drawn(seed: int) -> tuple[c.Config, ModelShape, int]:
    rng = random.Random(seed)
    card, name = rng.choice(CARDS), rng.choice(list(FACTS.models))
    answer = rng.choice((128, 512, 1024, 4096, 8192))
    seq_len = rng.choice((1, 1, 2)) * (answer + rng.choice((128, 512, 2048)))
    config = asked(name, card.name, answer, seq_len, rng.choice((1, 2, 4, 8)), colocated=rng.random() < 0.5)
    config = replace(config, lora=c.LoraSection(rank=rng.choice((0, 0, 0, 16))))
    shape = FACTS.shape(name)
    return with_adapter_sync(config, shape, "cuda"), shape, int(card.memory_gb * GIB)


def simple(config: c.Config, shape: ModelShape, gpu_bytes: int) -> c.Config:
    """Return what a rule without times chooses: recomputation by the length of rows, gradients whole where they fit,
    then rows by powers of two."""

    def fits(tried: c.Config) -> bool:
        found = needs(tried, shape, int((1 - SPARE) * gpu_bytes))
        return all(need.fits for name, need in found.items() if name != "generator")

    chosen = resolved(config, "cuda", gradients_fit=fits(resolved(config, "cuda")))
    while 2 * chosen.training.local_batch_size * chosen.training.seq_len <= GPU_TOKENS:
        twice = with_rows(chosen, 2 * chosen.training.local_batch_size)
        if not fits(twice):
            break
        chosen = twice
    return chosen


def test_the_choice_fits_and_is_never_slower_than_a_rule_without_times() -> None:
    compared = faster = 0
    for seed in range(DRAWN):
        config, shape, gpu_bytes = drawn(seed)
        rule, choices = simple(config, shape, gpu_bytes), update_choices(config, shape, gpu_bytes)
        fits = needs(choices[0].config, shape, gpu_bytes)["trainer"].fits
        assert fits or not needs(rule, shape, gpu_bytes)["trainer"].fits
        if not needs(rule, shape, gpu_bytes)["trainer"].fits:
            continue
        ratio = choices[0].seconds / UpdateTimes(shape, gpu_bytes).seconds(rule)
        assert ratio <= memory.EQUAL, (seed, ratio)
        compared, faster = compared + 1, faster + (ratio < 0.98)
        assert [each.seconds for each in choices[1:]] >= [choices[0].seconds / memory.EQUAL] * (len(choices) > 1)
        assert on_gpus(choices[0].config, shape, gpu_bytes).training == choices[0].config.training
    assert compared > DRAWN / 3
    assert faster > compared / 3


def test_awake_engines_fit_beside_trainers_and_cost_updates_no_time() -> None:
    kept = {True: 0, False: 0}
    for seed in range(DRAWN):
        config, shape, gpu_bytes = drawn(seed)
        config = replace(config, placement=replace(config.placement, kind="colocated"))
        found, best = on_gpus(config, shape, gpu_bytes), update_choices(config, shape, gpu_bytes)[0]
        assert on_gpus(found, shape, gpu_bytes) == found
        by_mesh = needs(found, shape, gpu_bytes)
        cache, filled = found.generator.kv_cache_memory_mb << 20, filled_cache(found, shape)
        if by_mesh["generator"].fits:
            assert cache <= max(filled, found.training.seq_len * memory.cache_bytes_per_token(found, shape))
        if not (by_mesh["generator"].fits and by_mesh["trainer"].fits):
            assert found.placement.sleep is True
            continue
        kept[bool(found.placement.sleep)] += 1
        if not found.placement.sleep:
            together = by_mesh["trainer"].own.total + memory.engine(found, shape, cache).total
            assert together == by_mesh["trainer"].nbytes <= (1 - SPARE) * gpu_bytes
            assert cache == filled
            assert UpdateTimes(shape, gpu_bytes).seconds(found) <= memory.EQUAL * best.seconds
    assert min(kept.values()) >= 3


@pytest.mark.parametrize("sleep", [True, False])
def test_a_key_decides_whether_engines_sleep(sleep: bool) -> None:
    config, shape = asked("Qwen3-0.6B", "H200", 512, 1024), FACTS.shape("Qwen3-0.6B")
    assert on_gpus(config, shape, 139 * GIB).placement.sleep is False
    given = replace(config, placement=replace(config.placement, sleep=sleep))
    assert on_gpus(given, shape, 139 * GIB).placement.sleep is sleep
    assert resolved(config, "cpu").placement.sleep is True  # where it frees nothing
    small = replace(given, generator=replace(given.generator, kv_cache_memory_mb=8 << 10))
    refused = list(check_gpu_memory(small, shape, 24 * GIB, most=1))
    assert [each.rpartition("; ")[2].startswith("placement.sleep = true needs") for each in refused] == [True] * (
        not sleep
    )


def test_evaluations_and_waiting_turns_have_room_in_the_cache() -> None:
    config = asked("Qwen3-0.6B", "H200", 512, 1024)
    few = changed(config, {"rollout.groups_per_step": 2, "eval.size": 0})
    assert sequences_at_once(few) == 32
    assert sequences_at_once(few, policies=3) == 96
    assert sequences_at_once(changed(few, {"eval.size": 64})) == 256  # generator.max_num_seqs
    assert sequences_at_once(changed(few, {"generator.max_num_seqs": 8})) == 8
    turns = changed(few, {"generator.max_num_seqs": 8, "environment.name": "calc", "environment.processes": 4})
    assert sequences_at_once(turns) == 32


def test_keys_of_the_user_decide() -> None:
    given = asked("Qwen3-0.6B", "H100", 512, 1024)
    keys: dict[str, Any] = {
        "training.local_batch_size": 5,
        "activation_checkpoint.mode": "full",
        "training.gradient_sync": "microbatch",
        "training.parameter_gather": "microbatch",
        "training.keep_logits": True,
    }
    (only,) = update_choices(changed(given, keys), FACTS.shape("Qwen3-0.6B"), 79 * GIB)
    t, mode = only.config.training, only.config.activation_checkpoint.mode
    assert [t.local_batch_size, mode, t.gradient_sync, t.parameter_gather, t.keep_logits] == [*keys.values()]
    free = update_choices(given, FACTS.shape("Qwen3-0.6B"), 79 * GIB)
    assert len(free) == 13
    assert free[0].seconds < only.seconds


def test_logits_are_kept_where_they_fit_and_cost_a_product_less() -> None:
    shape, times = FACTS.shape("Qwen3-0.6B"), UpdateTimes(FACTS.shape("Qwen3-0.6B"), 139 * GIB)
    best, *others = update_choices(asked("Qwen3-0.6B", "H200", 512, 1024), shape, 139 * GIB)
    again = next(each for each in others if each.config.training.keep_logits is False)
    assert best.config.training.keep_logits is True
    assert str(best).endswith(", logits kept")
    assert str(best).removesuffix(", logits kept") == str(again)  # the same rows
    head = {
        each: times.seconds(replace(again.config, training=replace(again.config.training, keep_logits=each)))
        for each in (True, False)
    }
    assert 0.02 < 1 - head[True] / head[False] < 0.25 * 0.25
    barely = on_gpus(asked("Qwen3-8B", "H100", 4096, 4608, 8), FACTS.shape("Qwen3-8B"), 79 * GIB)
    assert barely.training.keep_logits is False  # more activations pay more
    refused = changed(asked("Qwen3-0.6B", "H200", 512, 2**15), {"training.local_batch_size": 1, **KEPT})
    (problem,) = check_gpu_memory(refused, shape, 79 * GIB, most=1)
    assert "training.keep_logits = false needs" in problem


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(("wide", "each"), [("auto", 2), ("float32", 4)])
def test_kept_logits_are_counted(wide: Any, each: int, tp: int) -> None:
    shape, gpu_bytes = FACTS.shape("Qwen3-0.6B"), 139 * GIB
    config = asked("Qwen3-0.6B", "H200", 512, 1024)
    config = replace(
        config, model=replace(config.model, head_dtype=wide), training=replace(config.training, local_batch_size=2)
    )
    p = c.ParallelismSection(tensor_parallel_degree=tp)
    nbytes = {}
    for keep in (True, False):
        found = resolved(config, "cuda", keep_logits=keep)
        nbytes[keep] = memory.trained(found, shape, p, gpu_bytes=gpu_bytes).parts["head"].nbytes
        frozen = memory.frozen(found, shape, p, gpu_bytes=gpu_bytes).parts["head"].nbytes  # no backward follows
        assert frozen == nbytes[keep] or keep
    targets, words = 2 * 2 * 1024, -(-shape.vocab_size // tp)
    window = most_logits(targets, words, shape.dim, most_flops(gpu_bytes))
    unneeded = window * 4 if each == 4 else 0  # products are written where they stay
    assert nbytes[True] - nbytes[False] == targets * words * each - unneeded


def test_slow_links_change_the_choice() -> None:
    """A gathering over PCIe costs more than what larger microbatches recompute."""
    chosen = {}
    for card in ("H100", "H100 PCIe"):
        config = asked("Qwen3-8B", card, 4096, 4608, 8)
        chosen[card] = on_gpus(config, FACTS.shape("Qwen3-8B"), 79 * GIB)
    assert chosen["H100"].activation_checkpoint.mode == "none"
    assert chosen["H100 PCIe"].training.local_batch_size > chosen["H100"].training.local_batch_size


def test_an_unknown_card_is_planned_as_the_nearest_in_memory() -> None:
    config, times = asked("Qwen3-0.6B", "H200", 512, 1024), UpdateTimes(FACTS.shape("Qwen3-0.6B"), 24 * GIB)
    for name, planned in (("", "RTX 4090"), ("NVIDIA GeForce RTX 9090", "RTX 4090"), ("A100-SXM4-80GB", "A100")):
        assert times.card(replace(config, hosts=replace(config.hosts, gpu=name))) == planned


def test_an_installation_without_the_planner_chooses_by_the_length_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        return None

    monkeypatch.setattr(memory, "part", missing)
    shape = FACTS.shape("Qwen3-0.6B")
    for seq_len, mode in ((1024, "none"), (4608, "selective")):
        assert on_gpus(asked("Qwen3-0.6B", "H100", 512, seq_len), shape, 79 * GIB).activation_checkpoint.mode == mode


@pytest.mark.parametrize(
    ("name", "card", "gpus", "keys"),
    [
        ("Qwen3-1.7B", "RTX 4090", 1, ["training.enable_cpu_offload", "lora.rank"]),
        ("Qwen3-8B", "H200", 1, ["optimizer.moments", "training.enable_cpu_offload", "lora.rank"]),
        ("Llama-3.1-405B", "H100", 8, ["training.enable_cpu_offload"]),
    ],
)
def test_a_refusal_names_each_resort_that_fits_with_its_price(name: str, card: str, gpus: int, keys: list[str]) -> None:
    shape, nbytes = FACTS.shape(name), int(FACTS.gpu(card).memory_gb * GIB)
    config = with_adapter_sync(asked(name, card, 512, 1024, gpus), shape, "cuda")
    refused = next(check_gpu_memory(config, shape, nbytes, most=gpus))
    advice = refused.rpartition("; ")[2]
    named = re.findall(r'([a-z_]+\.[a-z_]+) = "?(\w+)"? needs ([\d.]+) GiB \(([^)]+)\)', advice)
    assert [key for key, *_ in named] == keys, refused
    for key, value, gib, price in named:
        other = changed(config, {key: {"true": True, "bfloat16": value}.get(value) or int(value)})
        assert not [each for each in check_gpu_memory(other, shape, nbytes, most=gpus) if "[parallelism]" in each]
        need = needs(on_gpus(other, shape, nbytes), shape, nbytes)["trainer"]
        assert f"{need.nbytes / GIB:.1f}" == gib
        assert ("host memory per rank" in price) == (key == "training.enable_cpu_offload")
        assert ("trains adapters of" in price) == (key == "lora.rank")
        assert ("keep 8 of 24 bits" in price) == (key == "optimizer.moments")


def test_no_resort_is_named_that_another_check_refuses() -> None:
    """Adapters on a model that is trained from random weights, and states that exceed the stated memory of a host."""
    shape, nbytes = FACTS.shape("Qwen3-1.7B"), int(23.9 * GIB)
    config = asked("Qwen3-1.7B", "RTX 4090", 512, 1024)
    small = replace(config, hosts=replace(config.hosts, memory_gb=16))
    (advice, *_) = (each.rpartition("; ")[2] for each in check_gpu_memory(small, shape, nbytes, most=1))
    assert "enable_cpu_offload" not in advice
    assert "lora.rank" in advice
    shape, nbytes = FACTS.shape("Qwen3-8B"), int(FACTS.gpu("H200").memory_gb * GIB)
    slow = replace(asked("Qwen3-8B", "H200", 512, 1024), optimizer=c.OptimizerSection(beta2=0.999))
    assert "optimizer.moments" not in next(check_gpu_memory(slow, shape, nbytes, most=1)).rpartition("; ")[2]
    shape, nbytes = FACTS.shape("Qwen3-1.7B"), int(23.9 * GIB)
    small = replace(small, algorithm=replace(config.algorithm, routing_replay=True), lora=c.LoraSection(rank=16))
    assert all("lora.rank = 16 needs" not in each for each in check_gpu_memory(small, shape, nbytes, most=1))


def test_meshes_that_are_apart_are_told_to_share_their_gpus() -> None:
    shape, config = FACTS.shape("Llama-3.1-8B"), asked("Llama-3.1-8B", "H100", 512, 1024, 1, colocated=False)
    refused = next(check_gpu_memory(config, shape, 79 * GIB, most=2))
    named = "parallelism.data_parallel_shard_degree = 2, generator.replicas = 2"
    assert f'placement.kind = "colocated", {named} needs' in refused
    keys: dict[str, Any] = {
        "placement.kind": "colocated",
        "parallelism.data_parallel_shard_degree": 2,
        "generator.replicas": 2,
    }
    assert not list(check_gpu_memory(changed(config, keys), shape, 79 * GIB, most=2))
