"""What the sections share: choices that other rooms name too, and keys with a range."""

from dataclasses import field
from typing import Any, Literal

Dtype = Literal["float32", "bfloat16"]
DtypeChoice = Literal["auto", Dtype]
BYTES: dict[str, int] = {"float32": 4, "bfloat16": 2}
Table = dict[str, bool | int | float | str]
Tables = dict[str, Table]  # by name
Scalar = bool | int | float | str
NestedTables = dict[str, dict[str, Scalar | list[Scalar] | Table]]  # by name; a value may be a list or a table
Switch = Literal[True, False, "auto"]
HeadDtype = Literal["model", "float32"]
Quantization = Literal["none", "fp8", "int8"]
RoutedFamily = Literal["qwen3_moe", "gpt_oss", "glm4_moe"]
Family = Literal[
    "llama3", "qwen2", "qwen3", "mistral", "smollm3", "olmo2", "olmo3", "phi3", "glm4", "gemma3", RoutedFamily
]
FamilyChoice = Literal["auto", Family]
Level = Literal["token", "sequence"]
Aggregation = Literal["token_mean", "sequence_mean", "sequence_sum"]
Estimator = Literal["k1", "k2", "k3"]
Weight = Literal["none", "token_tis", "sequence_tis", "token_mask", "sequence_mask"]
Rejection = Literal["none", "token", "geometric", "second_moment"]
PairLoss = Literal["none", "dpo", "ipo"]


MOST_SECONDS = 10**7
"""Upper bound of every timeout, 116 days: clocks and timers overflow far above it."""
MOST_RANKS = 2**12
"""Upper bound of every parallel degree and number of replicas."""


def bounds(
    default: Any,
    *,
    ge: float | None = None,
    gt: float | None = None,
    le: float | None = None,
    lt: float | None = None,
) -> Any:
    """Return a field with a default and a range, which toml.py enforces. Every number has a limit on both sides."""
    return field(default=default, metadata={"ge": ge, "gt": gt, "le": le, "lt": lt})
