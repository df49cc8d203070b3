"""Compile Triton kernels as their launchers launch them, for GPUs that are not there, and read the machine code."""

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
TYPES |= {torch.int64: "i64", torch.int32: "i32", torch.uint8: "u8"}


@dataclass(frozen=True, slots=True)
class Launch:
    """What one launch compiles: the JIT's key, without the device."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[str, Any]
    aligned: dict[tuple[int, ...], list[list[Any]]]
    options: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Compiled:
    """What ptxas made of a kernel."""

    registers: int  # per thread
    spilled: int  # bytes of stack and local memory per thread
    shared: int  # bytes per program
    warps: int
    instructions: Counter[str]  # by opcode with its modifiers, e.g. LDG.E.128

    @property
    def resident_warps(self) -> int:
        """How many warps a multiprocessor holds of the 64 that it has room for, by the 65,536 registers that they share
        (given out by 8 a thread)."""
        programs = 65536 // (-(-self.registers // 8) * 8 * 32 * self.warps)
        return min(programs * self.warps, 64 // self.warps * self.warps)

    def count(self, *opcodes: str) -> int:
        return sum(n for name, n in self.instructions.items() if name.split(".")[0] in opcodes)


@contextmanager
def launches() -> Iterator[list[Launch]]:
    """Record the launches of Triton kernels instead of running them. Tensors may be on the meta device: they are taken
    to begin at an aligned address, as addresses from torch's allocator do."""
    recorded: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        recorded.append(_launch(kernel, args, options))

    run = JITFunction.run
    JITFunction.run = record  # pyright: ignore[reportAttributeAccessIssue]
    try:
        yield recorded
    finally:
        JITFunction.run = run


def _launch(kernel: Any, args: tuple[Any, ...], options: dict[str, Any]) -> Launch:
    names: list[str] = kernel.arg_names
    given = dict(zip(names, args, strict=False)) | {name: options.pop(name) for name in names if name in options}
    values = {name: given[name] for name in names}
    signature, constants, aligned = {}, {}, {}
    for i, (parameter, value) in enumerate(zip(kernel.params, values.values(), strict=True)):
        one = type(value) is int and value == 1 and not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or one:
            signature[parameter.name], constants[parameter.name] = "constexpr", value
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            sixteenths = value.storage_offset() * value.element_size()
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
            sixteenths = value if type(value) is int else 1
        as_given = parameter.do_not_specialize or parameter.do_not_specialize_on_alignment
        if sixteenths % 16 == 0 and not as_given:
            aligned[(i,)] = [["tt.divisibility", 16]]
    return Launch(kernel, signature, constants, aligned, options)


def compile_for(launch: Launch, capability: int) -> Compiled:
    source = ASTSource(launch.kernel, launch.signature, launch.constants, launch.aligned)
    compiled: Any = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(compiled.asm["cubin"])
        usage, code = (_output("cuobjdump", flag, file.name) for flag in ("-res-usage", "-sass"))
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", usage)
    assert found, usage
    registers, stack, local = map(int, found.groups())
    opcodes = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9_.]+)", code)
    assert opcodes, code
    metadata = compiled.metadata
    return Compiled(registers, stack + local, metadata.shared, metadata.num_warps, Counter(opcodes))


def _output(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], check=True, capture_output=True, text=True).stdout


def recorded(call: Callable[[], Any]) -> list[Launch]:
    """Return the distinct launches of a call on meta tensors."""
    with launches() as found:
        call()
    return list({(id(x.kernel), str(x.signature), str(x.constants), str(x.aligned)): x for x in found}.values())
