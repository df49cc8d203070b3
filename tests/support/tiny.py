"""A model small enough to be built in every test file that needs one."""

from typing import Any


def tiny_llama(**overrides: Any) -> Any:
    """Return a model with random weights, large enough that its distributions are far from flat."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return LlamaForCausalLM(LlamaConfig(**{**size, **heads, "initializer_range": 0.1, **overrides})).eval()


def perturbed(model: Any) -> Any:
    """Return a copy of the model with other weights."""
    import copy

    import torch

    torch.manual_seed(1)
    changed = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in changed.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return changed


def tiny_model(model_type: str, **overrides: Any) -> Any:
    """Return a model of any family of transformers with random weights, some of which are 0."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    size = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = AutoConfig.for_model(model_type, **{**size, **heads, "initializer_range": 0.1, **overrides})
    return AutoModelForCausalLM.from_config(config).eval()
