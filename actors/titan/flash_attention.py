"""Lets a trainer use the FlashAttention that is installed.

TorchTitan 0.3.0 takes FlashAttention 3 on Hopper and 4 on Blackwell, whether they are installed or not, and then no
model can be built. Without them it uses torch's own, version 2, as on older GPUs.
"""

from importlib.util import find_spec

from torchtitan.tools import utils as titan_utils
from torchtitan.tools.logging import logger

MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute"}

_wanted = titan_utils.get_cuda_flash_attention_impl


def use_installed() -> None:
    """Make TorchTitan use an installed implementation, and warn if a faster one is missing."""
    titan_utils.get_cuda_flash_attention_impl = installed


def installed() -> str | None:
    """Return the implementation for this GPU if it is installed. None: torch's own."""
    wanted = _wanted()
    if wanted is None or _found(MODULES[wanted]):
        return wanted
    missing = f"{wanted} is faster on this GPU, but {MODULES[wanted]} is not installed"
    logger.warning(f"{missing}: using torch's FlashAttention 2")
    return None


def _found(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that would have it
        return False
