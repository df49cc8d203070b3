"""Steps of a trainer rank at 0.6B: seconds, MFU, the host's share, graphs and memory."""

import math
import time
from collections.abc import Mapping

import torch

from bench.gpu.measured import GIB, ON_CPU, kernel_times, say, say_within, seconds_of
from bench.gpu.trainer_rank import config_of, gpu_bytes, model_of, samples
from titan_rl.actors.titan.compiled_blocks import graphs_compiled
from titan_rl.actors.titan.role_model import RoleModel
from titan_rl.batch.packing import pack
from titan_rl.config.sections import Config
from titan_rl.preflight.memory import block_inputs, needs
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.types import Batch

LAYERS, SEQ_LEN = 28, 2048
LAST = 3  # seed of the steps that are measured
ROWS = (1, 2) if ON_CPU else (1, 8)  # a microbatch's, training.local_batch_size


def eager() -> None:
    steps(compiled=False)


def compiled() -> None:
    if ON_CPU:
        return say("compiled", "needs a GPU: on a CPU the preflight refuses it")
    steps(compiled=True)


def recompute() -> None:
    """Compare the modes that recompute blocks: seconds, memory, and what "offload" pins on the host."""
    for mode in ("offload", "full", "selective"):
        steps_with(mode)


def steps_with(mode: str) -> None:
    rows = ROWS[-1]
    config = config_of(LAYERS, SEQ_LEN, rows=rows, recompute=mode)
    model, shape = model_of(config)
    _, hardware = measure(model, shape, rows, name := f"{mode}, rows {rows}")
    if ON_CPU:
        return
    say_memory(model, config, shape, name, hardware)
    if mode == "offload":
        pinned = torch.cuda.host_memory_stats()["allocated_bytes.peak"] / GIB
        say_within(f"{name}: pinned, GiB", pinned, block_inputs(config, shape, config.parallelism) / GIB, "estimate")


def steps(*, compiled: bool) -> None:
    began = time.perf_counter()
    model, shape = model_of(config_of(LAYERS, SEQ_LEN, compiled=compiled))
    say("build, s", time.perf_counter() - began, f"{shape.parameters / 1e6:.0f}M parameters")
    for rows in ROWS:
        seconds, hardware = measure(model, shape, rows, name := f"rows {rows}")
        if compiled:
            say_graphs(name)
        if not ON_CPU:
            config = config_of(LAYERS, SEQ_LEN, rows=rows)
            say_memory(model, config, shape, name, hardware)  # before the profiler takes memory
            say_rates(model, shape, rows, seconds, hardware.get("throughput/mfu", math.nan))
            torch.cuda.empty_cache()  # other rows are measured as if they were the first


def drawn(seed: int, rows: int, vocabulary: int) -> list[Batch]:
    """Return one update of 8 groups of 8 samples, each of which fills a row with its prompt in common."""
    sizes = (2, 4, 10, (10, 20)) if ON_CPU else (8, 8, 150, (186, 248))
    made = samples(seed, *sizes, vocabulary)
    seq_len = 128 if ON_CPU else SEQ_LEN
    return pack(made, shards=1, seq_len=seq_len, rows_per_microbatch=rows, pad_id=0, share=True)


def measure(model: RoleModel, shape: ModelShape, rows: int, name: str) -> tuple[float, dict[str, float]]:
    """Take some steps. Return the last one's seconds, and its metrics of the hardware."""
    times, hardware, microbatches = list[float](), dict[str, float](), []
    for seed in (0, 1, 2, LAST, LAST) if rows == 1 else (0, LAST, LAST):  # the last step has no new shape to compile
        batches = drawn(seed, rows, shape.vocab_size)
        microbatches = batches[0].microbatches

        def run(batches: list[Batch] = batches) -> None:
            hardware.update(model.step(batches).hardware)

        times.append(seconds_of(run))
    places = sum(each.tokens.size for each in microbatches)
    what = f"{len(microbatches)} microbatches of {rows} x {microbatches[0].tokens.shape[1]}"
    say(f"{name}: steps, s", " ".join(f"{each:.2f}" for each in times), what)
    say(f"{name}: places a second in the last step", places / times[-1])
    return times[-1], hardware


def say_rates(model: RoleModel, shape: ModelShape, rows: int, seconds: float, mfu: float) -> None:
    say(f"rows {rows}: MFU of the last step, %", mfu, "of this card's bfloat16 peak")
    kernels = kernel_times(lambda: model.step(drawn(LAST, rows, shape.vocab_size)))
    busy, launches = sum(each[1] for each in kernels) / 1e3, sum(each[2] for each in kernels)
    say(f"rows {rows}: seconds of all kernels of a step", busy, f"{launches} launches")
    share = f"what kernels leave of the last step's {seconds:.3g} s; 0: the device is the limit"
    say(f"rows {rows}: the host's share, %", 100 * max(0.0, 1 - busy / seconds), share)
    for name, took, count in kernels[:4]:
        say(f"rows {rows}: kernel {name[:60]}, ms", took, f"{count} launches")


def say_graphs(name: str) -> None:
    say_within(f"{name}: graphs compiled so far", graphs_compiled(), 4, "the kinds of calls of a block")


def say_memory(model: RoleModel, config: Config, shape: ModelShape, name: str, hardware: Mapping[str, float]) -> None:
    """Compare what the last step took with the preflight's estimate for this config."""
    own = needs(config, shape, gpu_bytes())["trainer"].own
    peak, reserved = hardware["memory/max_active_gib"], hardware["memory/max_reserved_gib"]
    parts = sum(part.nbytes for part in own.parts.values()) / GIB
    say_within(f"{name}: peak allocated, GiB", peak, parts, f"estimate, allowances apart: {own}")
    say(f"{name}: peak reserved minus peak allocated, GiB", reserved - peak, f"reserved {reserved:.2f}")
    for when, estimate, what in (
        ("taken of the device", own.total, "estimate with allowances"),
        ("taken after release_memory", own.idle, "estimate of a waiting rank"),
    ):
        free, total = torch.cuda.mem_get_info()
        now = f"allocated {torch.cuda.memory_allocated() / GIB:.2f}, reserved {torch.cuda.memory_reserved() / GIB:.2f}"
        say_within(f"{name}: {when}, GiB", (total - free) / GIB, estimate / GIB, f"{what}; {now}")
        model.release_memory()
