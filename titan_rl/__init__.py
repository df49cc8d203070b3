"""titan_rl: RL post-training with Monarch meshes, TorchTitan trainers and vLLM generators."""

__version__ = "0.1.0"
