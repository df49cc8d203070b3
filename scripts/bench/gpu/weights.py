"""A weight sync between two processes on one GPU, through pinned memory that both map."""

import asyncio
import math
import multiprocessing
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.gpu.measured import DEVICE, ON_CPU, say, say_equal, seconds_of
from titan_rl.actors.sync.landing import Landing
from titan_rl.actors.sync.staging import Staging
from titan_rl.actors.vllm.vllm_params import SCALE, is_quantized, param_shapes, pieces
from titan_rl.config.choices import Quantization
from titan_rl.config.sections import WeightSyncSection
from titan_rl.ext.quantization.ranks.quantize_rows import FP8, quantize_rows
from titan_rl.wire.manifest import Manifest
from titan_rl.wire.model_shape import ModelShape
from titan_rl.wire.weight_plan import Shard, WeightPlan, plan
from titan_rl.wire.weight_source import Source

BLOCK, SLICE = 1 << 20, 8 << 20  # bytes, as by default
PATIENCE = 40  # seconds to wait for the reader
LLAMA_1B = ModelShape(
    family="llama3",
    vocab_size=128256,
    dim=2048,
    n_layers=16,
    n_heads=32,
    n_kv_heads=8,
    head_dim=64,
    hidden_dim=8192,
    max_seq_len=4096,
    rope_theta=5e5,
    norm_eps=1e-5,
    tied=False,
)
TINY = replace(LLAMA_1B, vocab_size=320, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_dim=96)
SHAPE = TINY if ON_CPU else LLAMA_1B


class Reader:
    """A generator's rank: lands versions in its parameters."""

    def __init__(self) -> None:
        self.landing: Landing | None = None
        self.live = live_params("none")

    def ready(self) -> bool:
        return True

    def connect(self, sources: Sequence[Source], sync: WeightSyncSection, quantization: Quantization = "none") -> None:
        self.landing = None  # its pins end
        self.live = live_params(quantization)
        self.landing = Landing(self.live, sources, sync, quantization=quantization)

    def land(self, manifests: Sequence[Manifest]) -> tuple[Any, Any, dict[str, float]]:
        """Return what fetching and writing took, and the sum of each parameter."""
        assert self.landing is not None
        fetched = asyncio.run(self.landing.fetch_weights(manifests, PATIENCE))
        written = asyncio.run(self.landing.write_weights(PATIENCE))
        return fetched, written, {name: float(p.float().double().sum()) for name, p in self.live.items()}

    def damage(self, manifests: Sequence[Manifest]) -> int:
        """Negate one element. Return how many blocks then differ from the manifests."""
        assert self.landing is not None
        name = next(name for name in self.live if name.endswith("qkv_proj.weight"))
        param = self.live[name]
        octets = (param if param.is_contiguous() else param.t()).view(torch.uint8).view(-1)
        last = 12345 % param.numel() * param.itemsize + param.itemsize - 1
        octets[last] ^= 128  # the sign
        return sum(map(len, self.landing._strange(manifests)))


def live_params(quantization: Quantization) -> dict[str, torch.Tensor]:
    """Return parameters as vLLM has them: fp8 weights are transposed, and have a float32 scale of each row."""
    params = {n: torch.zeros(s, dtype=torch.bfloat16, device=DEVICE) for n, s in param_shapes(SHAPE, 1).items()}
    if quantization == "fp8":
        for name in filter(is_quantized, [*params]):
            params[name + SCALE] = torch.zeros(len(params[name]), 1, device=DEVICE)
            params[name] = params[name].to(FP8).t()
    return params


def serve(pipe: Connection) -> None:
    """Call a Reader's methods as the pipe asks, until it asks for None. Answer with the result, or with an error."""
    reader = Reader()
    while (asked := pipe.recv()) is not None:
        method, *args = asked
        try:
            pipe.send(getattr(reader, method)(*args))
        except Exception as error:  # it crosses the pipe, and fails the part there
            pipe.send(RuntimeError(f"{type(error).__name__}: {error}"))


class Peer:
    """The reader's process, as this one sees it."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would share the CUDA context
        self._pipe, there = context.Pipe()
        context.Process(target=serve, args=(there,), daemon=True).start()

    def ask(self, method: str, *args: object) -> Any:
        self._pipe.send((method, *args))
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"expected the reader to answer {method}() within {PATIENCE} s, found nothing")
        if isinstance(found := self._pipe.recv(), Exception):
            raise found
        return found


def weights() -> None:
    reader, g = Peer(), torch.Generator(DEVICE).manual_seed(0)
    params = {name: torch.randn(size, device=DEVICE, generator=g) for name, size in SHAPE.hf_tensors().items()}
    shards = [Shard(name, 0, p.shape[0], 0, p.shape[1] if p.dim() > 1 else 1) for name, p in params.items()]
    made = plan([shards], [pieces(SHAPE, tp=1, rank=0)])
    say("the reader's process is ready, s", seconds_of(lambda: reader.ask("ready")))
    for kind in ("live", "transfer"):
        sync = WeightSyncSection(verify=kind, delta=kind == "transfer")
        began = time.perf_counter()
        staging = Staging(params, made.outgoing(0), torch.bfloat16, slice_bytes=SLICE, block_bytes=BLOCK)
        nbytes = sum(run.nbytes for run in staging.runs[0].values())
        say(
            f'verify = "{kind}": stage 2 x {nbytes / 2**30:.2f} GiB, s',
            time.perf_counter() - began,
            "touched and pinned",
        )
        offer = staging.offer(remote=False)[0]
        sources = [Source(0, offer, copies, "bfloat16", BLOCK) for copies in made.incoming(0).values()]
        say("the reader maps and pins it, s", seconds_of(lambda to=(sources, sync): reader.ask("connect", *to)))
        for version in range(1, 4):
            if version == 3:  # differs in one parameter
                params[next(name for name in params if "q_proj" in name)] += 1
            publish(version, staging, params, reader)
        if kind == "live":
            found = reader.ask("damage", list(staging.pack(4, 0, 4).values()))
            say("blocks that differ after one element was negated", str(found), "1: the hash sees a sign", found == 1)
        asyncio.run(staging.drop())
    quantized(params, made, reader)


def quantized(params: dict[str, torch.Tensor], made: WeightPlan, reader: Peer) -> None:
    """Land a version in fp8, and compare the attention's codes and scales with a CPU's."""
    sync = WeightSyncSection(verify="live")
    staging = Staging(params, made.outgoing(0), torch.bfloat16, slice_bytes=SLICE, block_bytes=BLOCK)
    offer = staging.offer(remote=False)[0]
    sources = [Source(0, offer, copies, "bfloat16", BLOCK) for copies in made.incoming(0).values()]
    reader.ask("connect", sources, sync, "fp8")
    _, written, sums = reader.ask("land", list(staging.pack(1, 0, 1).values()))
    say("fp8: quantize and write, s", written.write)
    say("fp8: verify, s", written.verify, "bytes hashed, rows quantized again")
    equal = True
    for name, parts in held():
        codes, scale = quantize_rows(torch.cat([params[part] for part in parts]).to(torch.bfloat16).cpu(), "fp8")
        expected = {name: float(codes.float().double().sum()), name + SCALE: float(scale.double().sum())}
        equal &= all(math.isclose(sums[key], value, rel_tol=1e-9, abs_tol=1e-9) for key, value in expected.items())
    say_equal("fp8: sums of the attention's codes and scales", equal, True, "as a CPU quantizes the packed weights")
    found = reader.ask("damage", list(staging.pack(2, 0, 2).values()))
    say("fp8: blocks with other rows after one code was changed", str(found), "at least 1", found > 0)
    asyncio.run(staging.drop())


def publish(version: int, staging: Staging, params: dict[str, torch.Tensor], reader: Peer) -> None:
    """Pack a version, let the reader land it, and compare the sums of its parameters."""
    manifests = dict[int, Manifest]()
    packed = seconds_of(lambda: manifests.update(staging.pack(version, version % 2, version)))
    fetched, written, sums = reader.ask("land", list(manifests.values()))
    nbytes = sum(run.nbytes for run in staging.runs[0].values())
    rate = f"{nbytes / packed / 1e9:.1f} GB/s" + ", with compiling" * (version == 1)
    say(f"version {version}: pack and hash, s", packed, rate)
    rate = f"{fetched.bytes / max(written.write, 1e-9) / 1e9:.1f} GB/s; {fetched.changed} of {fetched.blocks} blocks"
    say("write, s", written.write, rate)
    say("verify, s", fetched.verify + written.verify)
    true = {
        name: sum(float(params[part].to(torch.bfloat16).double().sum()) for part in parts) for name, parts in held()
    }
    close = {name: math.isclose(sums[name], value, rel_tol=1e-9, abs_tol=1e-3) for name, value in true.items()}
    say_equal("sums of the attention's weights", all(close.values()), True, "the packed weights, summed in float64")


def held() -> list[tuple[str, list[str]]]:
    """Return the reader's parameters of attention, each with the trainer's that it is made of."""
    names = [name for name in param_shapes(SHAPE, 1) if "qkv_proj" in name or "o_proj" in name]
    return [
        (name, [name.replace("qkv_proj", f"{x}_proj") for x in "qkv"] if "qkv" in name else [name]) for name in names
    ]
