"""Compiled transformer blocks: one graph per kind of call, however long its rows and prompts are.

TorchTitan compiles each block with fullgraph=True, so that one graph more than torch's limit ends the run. The kinds of
calls are four: with gradients or without, with shared prompts or without.
"""

import torch

from titan_rl.actors.titan import private

GRAPH_LIMIT = 32
"""Number of graphs of one function that torch compiles before it raises. Its default is 8."""
VARYING = (
    *(r"L\['x'\]:1", r"L\['positions'\]:1", r"L\['attention_masks'\].*"),
    *(r"L\['args'\]\[[02]\]:1", r"L\['args'\]\[1\].*"),  # the same three of a block in torch's CheckpointWrapper
)
"""Arguments of a block whose sizes and numbers differ from call to call. Without this, torch takes them as constants
first and compiles again when they change."""


def use_few_graphs() -> None:
    """Make lengths of rows, documents and prefixes symbols in compiled blocks. Call this before the first forward."""
    torch.compiler.config.dynamic_sources = ",".join(VARYING)
    torch._dynamo.config.recompile_limit = GRAPH_LIMIT


def graphs_compiled() -> int:
    """Return the number of graphs that this process has compiled."""
    return private.compile_counters["stats"]["unique_graphs"]
