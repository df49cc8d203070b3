"""Why a rollout ended."""

from typing import Literal

Status = Literal[
    "completed",
    "max_turns",
    "max_tokens",  # the whole rollout's limit
    "context_overflow",  # the next turn's context leaves no room to sample
    "parse_error",  # the driver could not read the policy's answer
    "tool_error",
    "timeout",  # the rollout's own deadline passed
    "error",  # the user's code raised
    "lost",  # its process died, on every attempt
]

FAILED: frozenset[Status] = frozenset(("timeout", "error", "lost"))
"""Endings that say nothing about the policy: such a rollout has no reward, and is not trained on."""
