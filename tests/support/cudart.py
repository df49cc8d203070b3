"""What a GPU process sees of CUDA where there is none: an account of page-locked memory, by CUDA's documented rules."""

from pathlib import Path
from typing import Any

import pytest
import torch

from titan_rl.actors.sync import landing, staging

REGISTERED, NOT_REGISTERED, NOT_SUPPORTED, INVALID = 712, 713, 801, 1


class Cudart:
    """Registers memory and counts. `wrong` lists errors that no driver reports: memory unmapped before it was
    unregistered."""

    def __init__(self) -> None:
        self.held: dict[int, tuple[int, str]] = {}  # by address: bytes, and the file that is mapped there
        self.most = 0
        self.wrong: list[str] = []
        self.synchronized = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.check()
        if any(address < at + size and at < address + nbytes for at, (size, _) in self.held.items()):
            return REGISTERED
        access, file = mapping_at(address)
        if "w" not in access:  # cudaHostRegisterReadOnly is for devices that support it, and this one does not
            return NOT_SUPPORTED if flags & 8 else INVALID
        self.held[address] = nbytes, file
        self.most = max(self.most, len(self.held))
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.check()
        return 0 if self.held.pop(address, None) else NOT_REGISTERED

    def check(self) -> None:
        for address, (_, file) in self.held.items():
            if mapping_at(address)[1] != file:
                self.wrong.append(f"{address:#x} was unmapped while it was registered")

    def synchronize(self, device: Any = None) -> None:
        self.synchronized += 1


def mapping_at(address: int) -> tuple[str, str]:
    """Return the access and the file of the memory mapped at an address."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        bounds, access, _, device, inode, *_ = line.split()
        start, end = (int(bound, 16) for bound in bounds.split("-"))
        if start <= address < end:
            return access, f"{device} {inode}"
    return "", ""


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    """Make both ends of a weight sync treat CPU tensors as a GPU's."""
    cudart = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
    monkeypatch.setattr(torch.cuda, "synchronize", cudart.synchronize)
    for module in (landing, staging):
        monkeypatch.setattr(module, "gpu_of", lambda params: torch.device("cpu"))
    return cudart
