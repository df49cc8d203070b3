"""Real meshes in tests: Monarch reads its environment when it is imported."""

from titan_rl.environment import prepare_environment

prepare_environment()
