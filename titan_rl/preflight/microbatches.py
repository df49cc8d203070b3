"""Sizes the microbatches of a run on CPU by their tokens, where training.local_batch_size is 0."""

from titan_rl.config.auto import resolved
from titan_rl.config.sections import Config
from titan_rl.preflight import device_memory
from titan_rl.wire.model_shape import ModelShape

# Tokens x hidden_dim. Measured on cores with 1 MiB of L2 and 32 MiB of L3: at hidden_dim 384 the fastest microbatch has
# 4096 tokens (512 take 1.34 times as long, 10,240 take 1.1 times), at 1024 about 1000 (3300 take 1.09 times as long).
CPU_ELEMENTS = 3 * 2**19
MEMORY_SHARE = 4  # all microbatches at once take at most a quarter of the host's memory


def on_cpu(config: Config, shape: ModelShape, host_bytes: int) -> Config:
    """Return the config as ranks on CPUs work with it."""
    one = resolved(config, "cpu", rows=1)
    meshes = [config.parallelism, *(role.parallelism for name, role in config.roles.items() if name == "critic")]
    row = sum(p.world_size * device_memory.activations(one, shape, p).nbytes for p in meshes)
    by_cache = CPU_ELEMENTS // shape.hidden_per_token // config.training.seq_len
    return resolved(config, "cpu", rows=max(1, min(by_cache, host_bytes // MEMORY_SHARE // row)))
