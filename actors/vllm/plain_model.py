"""Runs vLLM's model on rows of its batch."""

from typing import Any

import numpy as np
import torch
from vllm.forward_context import set_forward_context


class PlainModel:
    def __init__(self, runner: Any, block_size: int) -> None:
        self._runner, self._size = runner, block_size
        batch, table = runner.input_batch, runner.input_batch.block_table[0]
        self._tokens, self._lengths = batch.token_ids_cpu, batch.num_tokens_no_spec
        self._computed = batch.num_computed_tokens_cpu
        self._table, self._held, self._slots = table.block_table.np, table.num_blocks_per_row, table.slot_mapping
        self._layers = runner.kv_cache_config.kv_cache_groups[0].layer_names

    def logits(self, rows: np.ndarray, reads: np.ndarray, nths: np.ndarray) -> torch.Tensor:
        """Read the last `reads` tokens of each of these rows, ascending. Return the logits after the `nths` of them, of
        which some may be asked for more than once.  # [N, V]"""
        runner, n, ends = self._runner, len(rows), np.cumsum(reads)
        total, size, lengths = int(ends[-1]), self._size, self._lengths[rows]
        row, at = rows, self._computed[rows]
        if total > n:
            row = np.repeat(rows, reads)
            at = runner.arange_np[:total] - np.repeat(ends - lengths, reads)
        runner.input_ids.np[:total] = self._tokens[row, at]
        runner._positions[:total] = at
        starts = runner.query_start_loc.np
        starts[0], starts[1 : n + 1], starts[n + 1 :] = 0, ends, total
        for known in (runner._seq_lens, runner._known_lens):
            known[:n], known[n:] = lengths, 0
        self._slots.np[:total] = self._table[row, at // size].astype(np.int64) * size + at % size
        slots = self._slots.gpu[:total]
        metadata, _ = runner._build_attention_metadata(
            num_tokens=total, num_reqs=n, max_query_len=int(reads.max()), slot_mappings={0: slots}
        )
        if rows[-1] >= n:  # vLLM took the first n rows of its table
            blocks = torch.from_numpy(self._table[rows])
            for of_layer in metadata.values():
                of_layer.block_table = blocks
        by_layer: Any = dict.fromkeys(self._layers, slots)
        with set_forward_context(metadata, runner.vllm_config, num_tokens=total, slot_mapping=by_layer):
            hidden = runner.model(
                input_ids=runner.input_ids.gpu[:total],
                positions=runner.positions[:total],
                intermediate_tensors=None,
                inputs_embeds=None,
            )
        return runner.model.compute_logits(hidden[torch.from_numpy(ends[nths] - 1)])

    def copy_contexts(self, since: np.ndarray, to: np.ndarray) -> None:
        """Copy the keys and values of some rows to others of the same context, but for blocks that both have."""
        held = self._held[to]
        nth, at = np.repeat(self._runner.arange_np[: len(to)], held), np.concatenate([np.arange(n) for n in held])
        old, new = self._table[since[nth], at], self._table[to[nth], at]
        own = old != new
        self.copy_blocks(old[own], new[own])

    def copy_blocks(self, since: np.ndarray, to: np.ndarray) -> None:
        """Copy blocks, all before any is written to."""
        for cache in self._runner.kv_caches:
            blocks = cache.view(torch.uint8).numpy()  # numpy copies them three times as fast, and has no bfloat16
            blocks[to] = blocks[since]
