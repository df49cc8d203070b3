"""The card's own rates, FlashAttention over shared prompts, and the kernels of a weight sync."""

from contextlib import nullcontext
from functools import partial

import numpy as np
import torch
import triton

from bench.gpu.measured import DEVICE, ON_CPU, milliseconds, relative, say, say_equal, say_within, seconds_of
from titan_rl.config.sections import MemorySection

# A prompt of 37 places, two answers of 50 and 19 that see it, and a document of 64. See titan_rl/batch/prefixes.py.
SEGMENTS = np.array([[0, 37, 0, 0], [37, 50, 0, 37], [87, 19, 0, 37], [106, 64, 0, 0]])


def machine() -> None:
    say("torch, triton, CUDA", f"{torch.__version__}, {triton.__version__}, {torch.version.cuda}")
    if ON_CPU:
        return
    p = torch.cuda.get_device_properties(0)
    say(
        "GPU",
        f"{p.name}, {p.total_memory / 2**30:.1f} GiB, {p.multi_processor_count} SMs, L2 {p.L2_cache_size >> 20} MiB",
    )
    free, total = torch.cuda.mem_get_info()
    allowed = MemorySection().cuda_context_mb / 1024
    say_within("memory of a context, GiB", (total - free) / 2**30, allowed, "memory.cuda_context_mb")
    a = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    b, host = torch.empty_like(a), torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    say("copy on the device, TB/s read and written", 2 * a.nbytes / milliseconds(lambda: b.copy_(a)) / 1e9)
    say("pinned host to device, GB/s", a.nbytes / milliseconds(lambda: a.copy_(host, non_blocking=True)) / 1e6)
    say("device to pinned host, GB/s", a.nbytes / milliseconds(lambda: host.copy_(a, non_blocking=True)) / 1e6)
    for size, dtype in ((8192, torch.bfloat16), (4096, torch.float32)):
        x = torch.randn(size, size, device="cuda", dtype=dtype)
        rate = 2 * size**3 / milliseconds(lambda x=x: x @ x) / 1e9
        say(f"matmul {size}^3 {dtype}, TFLOP/s", rate, "no TF32" if dtype == torch.float32 else "")


def varlen() -> None:
    """Compare the trainer's attention over rows that share prompts with SDPA in float32."""
    if ON_CPU:
        return say("varlen", "needs a GPU")
    from titan_rl.actors.titan import flash_attention
    from titan_rl.actors.titan.document_attention import DocumentSDPA, SharedVarlen
    from titan_rl.actors.titan.document_masks import Attended, classed_masks, varlen_masks

    flash_attention.use_installed()
    device, places = torch.device("cuda"), int(SEGMENTS[:, 1].sum())
    for heads, kv, size, window in ((16, 8, 128, (-1, 0)), (32, 8, 64, (-1, 0)), (8, 8, 128, (15, 0))):
        qkv = [torch.randn(1, places, n, size, device=device).to(torch.bfloat16) for n in (heads, kv, kv)]
        weight, found = torch.randn(1, places, heads, size, device=device), list[list[torch.Tensor]]()
        for kind, dtype in ((SharedVarlen, torch.bfloat16), (DocumentSDPA, torch.float32)):
            exact = kind is DocumentSDPA
            masks = (classed_masks if exact else varlen_masks)(Attended.whole(SEGMENTS), device)
            own = [x.to(dtype, copy=True).requires_grad_() for x in qkv]
            attention = kind(kind.Config(window_size=window))
            out = attention(*own, attention_masks=masks, enable_gqa=heads != kv)
            (out.float() * weight).sum().backward()
            found.append([out, *(x.grad for x in own if x.grad is not None)])
        for name, a, b in zip(("output", "dq", "dk", "dv"), *found, strict=True):
            what = f"heads {heads}/{kv} of {size}, window {window[0]}: {name}, relative"
            say_within(what, relative(a, b), 0.02, "float32 SDPA; bfloat16 has 8 bits, a wrong mask is off by tenths")


def checksums() -> None:
    from titan_rl.kernels import pack_weights_triton
    from titan_rl.kernels.block_hash import reference_block_hash
    from titan_rl.kernels.block_hash_triton import HashTable
    from titan_rl.kernels.pack_weights import reference_pack
    from titan_rl.wire.weight_plan import Copy

    if ON_CPU:
        torch.cuda.stream, torch.cuda.synchronize = lambda _: nullcontext(), lambda _=None: None
    g, device, n = torch.Generator().manual_seed(0), torch.device(DEVICE), 2 if ON_CPU else 200
    memory = torch.randn(64 * n + 64, 33, generator=g)
    for dtype in (torch.bfloat16, torch.float32):
        host = memory.to(dtype)
        places = {"device": host.to(DEVICE)} | ({} if ON_CPU else {"pinned host": host.pin_memory()})
        for place, m in places.items():
            blocks = [[m[i * 64 : i * 64 + 63, :32], m[i * 64 + 5 : i * 64 + 6]] for i in range(n)]
            true = [reference_block_hash(block) for block in blocks]
            table = HashTable(blocks, device)
            say_equal(f"hash of {n} blocks, {place}, {dtype}", table.sums(range(n)), true, "torch's reference")
            say_equal("one of them", table.sums([1]), true[1:2], "torch's reference")
    for place in () if ON_CPU else ("device", "pinned host"):
        run = torch.empty(2**29, dtype=torch.bfloat16, device=DEVICE if place == "device" else "cpu")
        run = run if place == "device" else run.pin_memory()
        parts = [[part.view(1, -1)] for part in run.zero_().split(2**19)]
        table = HashTable(parts, device)
        table.sums(range(len(parts)))
        seconds = seconds_of(partial(table.sums, range(len(parts))))
        say(f"hash 1 GiB, {place}, GB/s", run.nbytes / seconds / 1e9)
    sizes = {"a": (257, 96), "b": (4096, 64), "c": (33,)}
    params = {name: torch.randn(size, generator=g).to(DEVICE) for name, size in sizes.items()}
    copies = [Copy("a", 3, 8, 100, 64, "p", 0, 0), Copy("b", 0, 0, 4096, 64, "p", 0, 0)]
    copies += [Copy("c", 0, 0, 33, 1, "p", 0, 0), Copy("a", 200, 0, 57, 96, "p", 0, 0)]
    kind = torch.float16 if ON_CPU else torch.bfloat16  # the interpreter truncates to bfloat16
    for these in (copies, copies[:2]):
        elements = sum(copy.elements for copy in these)
        run, true = torch.zeros(elements, dtype=kind, pin_memory=not ON_CPU), torch.zeros(elements, dtype=kind)
        pack_weights_triton.pack(params, these, run)
        reference_pack(params, these, true)
        say_equal(f"{elements} elements packed into host memory", torch.equal(run, true), True, "torch's reference")
