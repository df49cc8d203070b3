"""Gated DeltaNet against transformers' loop over tokens, and packed documents against each alone."""

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule

from titan_rl.kernels.gated_delta import causal_conv, gated_delta_rule

KEY_HEADS, VALUE_HEADS, K, V = 2, 6, 16, 8


def drawn(rows: int, length: int) -> list[torch.Tensor]:
    """Draw queries, keys, values, decays from none to near all, and betas."""
    draw = torch.Generator().manual_seed(length)
    heads = ((KEY_HEADS, K), (KEY_HEADS, K), (VALUE_HEADS, V))
    q, k, v = (torch.randn(rows, length, *sizes, generator=draw) for sizes in heads)
    decay, beta = torch.rand(2, rows, length, VALUE_HEADS, generator=draw)
    return [q, k, v, -20 * decay**6, beta]


@pytest.mark.parametrize("length", [1, 63, 64, 65, 200])
def test_outputs_and_last_state_are_those_of_a_loop(length: int) -> None:
    q, k, v, decay, beta = drawn(2, length)
    state = torch.randn(2, VALUE_HEADS, K, V, generator=torch.Generator().manual_seed(0))
    out, last = gated_delta_rule(q, k, v, decay, beta, state_BNKV=state)
    repeated = (x.repeat_interleave(VALUE_HEADS // KEY_HEADS, dim=2) for x in (q, k))
    keys = {"initial_state": state, "output_final_state": True, "use_qk_l2norm_in_kernel": True}
    expected, expected_last = torch_recurrent_gated_delta_rule(*repeated, v, g=decay, beta=beta, **keys)
    torch.testing.assert_close(out, expected, atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(last, expected_last, atol=2e-6, rtol=1e-5)


def test_each_document_is_as_if_it_were_alone() -> None:
    lengths = [[3, 70, 64, 1, 62], [100, 1, 1, 98]]
    documents = torch.stack([torch.arange(len(row)).repeat_interleave(torch.tensor(row)) for row in lengths])
    inputs = drawn(2, 200)
    weight = torch.randn(V, 4, generator=torch.Generator().manual_seed(1)).requires_grad_()
    for x in inputs:
        x.requires_grad_()

    def outputs(part: list[torch.Tensor], documents: torch.Tensor | None = None) -> torch.Tensor:
        out = gated_delta_rule(*part, documents_BL=documents)[0]
        return torch.stack([causal_conv(x, weight, documents) for x in out.unbind(2)], dim=2)

    packed, alone = outputs(inputs, documents), list[torch.Tensor]()
    for row, sizes in enumerate(lengths):
        parts = zip(*(x[row : row + 1].split(sizes, dim=1) for x in inputs), strict=True)
        alone.append(torch.cat([outputs(list(part)) for part in parts], dim=1))
    torch.testing.assert_close(packed, torch.cat(alone), atol=2e-6, rtol=1e-5)
    gradients = (torch.autograd.grad(out.square().sum(), [*inputs, weight]) for out in (packed, torch.cat(alone)))
    for found, expected in zip(*gradients, strict=True):
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_the_convolution_is_torchs() -> None:
    x, weight = torch.randn(2, 9, V), torch.randn(V, 4)
    expected = F.conv1d(F.pad(x.transpose(1, 2), (3, 0)), weight[:, None], groups=V).transpose(1, 2)
    torch.testing.assert_close(causal_conv(x, weight), F.silu(expected))
