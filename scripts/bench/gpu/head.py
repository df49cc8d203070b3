"""The log-prob kernel's numbers against float64."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from bench.gpu.measured import DEVICE, ON_CPU, relative, say, say_within
from titan_rl.kernels import token_logprob_triton as fused
from titan_rl.kernels.kept_bits import DROPPED
from titan_rl.kernels.token_logprob import token_logprob


def interpret_products() -> None:
    """Let tensors on a CPU take the path of a GPU's: Triton's kernels, and products whose sums stay float32."""
    from titan_rl.kernels import token_logprob

    mm, addmm = torch.mm, torch.addmm

    def wide_mm(a: Any, b: Any, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Any:
        return mm(a, b, out=out) if out_dtype is None else out.copy_(mm(a.float(), b.float()))

    def wide_addmm(total: Any, a: Any, b: Any, *, out_dtype: torch.dtype | None = None, out: Any = None) -> Any:
        return addmm(total, a, b, out=out) if out_dtype is None else out.copy_(addmm(total, a.float(), b.float()))

    torch.mm, torch.addmm = wide_mm, wide_addmm
    token_logprob._triton = lambda hidden: None if hidden.dtype == torch.float64 else fused


if ON_CPU:
    interpret_products()


@dataclass(frozen=True, slots=True)
class Case:
    vocabulary: int
    tokens: int
    width: int
    dtype: torch.dtype = torch.bfloat16
    temperature: float = 1.0
    kept: bool = False  # sets of truncated sampling: few words, a third, all
    entropy: bool = False  # has a gradient
    float32: bool = False  # logits
    keep: bool = False  # the logits
    window: tuple[int, int] | None = None  # tokens, vocabulary; None: as shipped

    def __str__(self) -> str:
        named = (name for name in ("kept", "entropy", "float32", "keep") if getattr(self, name))
        sizes = f"V {self.vocabulary} T {self.tokens} D {self.width}"
        return " ".join([sizes, str(self.dtype).removeprefix("torch."), f"temperature {self.temperature}", *named])


CASES = [
    Case(151936, 1003, 1024),
    Case(151936, 1003, 1024, temperature=0.7, entropy=True),
    Case(151936, 1003, 1024, entropy=True, keep=True),
    Case(128256, 777, 4096, kept=True),
    Case(128256, 777, 4096, kept=True, entropy=True, float32=True),
    Case(128256, 130, 512, temperature=0.01, float32=True),
    Case(50257, 333, 512, torch.float32, 1.3, kept=True, entropy=True),
    Case(50257, 1, 512),
    Case(50264, 1003, 512, kept=True, entropy=True, window=(256, 4096)),
    Case(50257, 1003, 512, entropy=True, window=(256, 4096)),
    Case(50257, 1003, 512, float32=True, keep=True, window=(256, 4096)),
]


def tiny(case: Case) -> Case:
    window = case.window and (4, 4096)
    return replace(case, vocabulary=min(case.vocabulary, 5003), tokens=min(case.tokens, 7), width=32, window=window)


def head() -> None:
    shipped = fused.window
    for case in map(tiny, CASES) if ON_CPU else CASES:
        fused.window = shipped if case.window is None else lambda *_, case=case: case.window
        compare(case)
        if not ON_CPU:
            torch.cuda.empty_cache()
    fused.window = shipped


@dataclass(slots=True)
class Drawn:
    hidden_TD: torch.Tensor
    weight_VD: torch.Tensor
    targets_T: torch.Tensor
    kept_TV: torch.Tensor | None
    logprob_grad_T: torch.Tensor
    entropy_grad_T: torch.Tensor  # zero if the entropy has no gradient


def drawn(case: Case) -> Drawn:
    g = torch.Generator(DEVICE).manual_seed(case.vocabulary + case.tokens)
    normal = partial(torch.randn, device=DEVICE, generator=g)
    hidden = normal(case.tokens, case.width).to(case.dtype)
    weight = (normal(case.vocabulary, case.width) * 2 * case.width**-0.5).to(case.dtype)
    targets = torch.randint(0, case.vocabulary, (case.tokens,), device=DEVICE, generator=g)
    targets[0], targets[-1], kept = 0, case.vocabulary - 1, None
    rows = torch.arange(case.tokens, device=DEVICE)
    if case.kept:
        share = torch.tensor([2e-4, 0.3, 1.0], device=DEVICE)[rows % 3].unsqueeze(1)
        kept = torch.rand(case.tokens, case.vocabulary, device=DEVICE, generator=g) < share
        kept[rows, targets] = True
    return Drawn(hidden, weight, targets, kept, normal(case.tokens), normal(case.tokens) * case.entropy)


def bits(kept_TV: torch.Tensor) -> torch.Tensor:
    """Return the masks as kernels read them: eight words to a byte, the first in its lowest bit."""
    padded = torch.nn.functional.pad(kept_TV.to(torch.uint8), (0, -kept_TV.shape[1] % 8))
    weights = 2 ** torch.arange(8, device=DEVICE, dtype=torch.uint8)
    return (padded.unflatten(1, (-1, 8)) * weights).sum(-1).to(torch.uint8)


@dataclass(slots=True)
class Exact:
    """What float64 computes: from exact logits, and log-probs from logits that are rounded as the kernel's are."""

    logprob_T: torch.Tensor
    rounded_logprob_T: torch.Tensor
    entropy_T: torch.Tensor
    hidden_grad_TD: torch.Tensor
    weight_grad_VD: torch.Tensor
    largest: float  # logit, before the temperature


def exact(case: Case, x: Drawn) -> Exact:
    weight, parts = x.weight_VD.double(), list[tuple[torch.Tensor, ...]]()
    weight_grad, largest = torch.zeros_like(weight), 0.0
    for part in torch.arange(case.tokens, device=DEVICE).split(128):  # whole logits in float64 would not fit

        def of_own(logits: torch.Tensor, part: torch.Tensor = part) -> torch.Tensor:
            kept = None if x.kept_TV is None else x.kept_TV[part]
            logits = logits / case.temperature
            return (logits if kept is None else logits.masked_fill(~kept, DROPPED)).log_softmax(-1)

        hidden, own = x.hidden_TD[part].double().requires_grad_(), weight.detach().requires_grad_()
        logits = hidden @ own.T
        logs, at = of_own(logits), x.targets_T[part, None]
        logprob, entropy = logs.gather(1, at)[:, 0], -(logs.exp() * logs).sum(-1)
        (logprob * x.logprob_grad_T[part] + entropy * x.entropy_grad_T[part]).sum().backward()
        assert hidden.grad is not None
        assert own.grad is not None
        weight_grad += own.grad
        largest = max(largest, float(logits.detach().abs().max()))
        rounds = case.dtype == torch.bfloat16 and not case.float32
        rounded = (x.hidden_TD[part] @ x.weight_VD.T).double() if rounds else logits.detach()
        parts.append((logprob.detach(), of_own(rounded).gather(1, at)[:, 0], entropy.detach(), hidden.grad))
        del logits, logs, rounded
    logprob, rounded, entropy, hidden_grad = (torch.cat(each) for each in zip(*parts, strict=True))
    return Exact(logprob, rounded, entropy, hidden_grad, weight_grad, largest)


def bound(case: Case, largest: float) -> tuple[float, str]:
    """Return how far a log-prob may be off, and why. Both follow the size of a logit over the temperature."""
    size = largest / case.temperature
    if case.dtype == torch.bfloat16 and not case.float32:
        # cuBLAS may take another order for a tile of another shape, and a logit then round to its other neighbour.
        return size * 2**-8, "a logit may round to its other bfloat16 neighbour"
    # A logit is a float32 sum of D products. Each addition rounds a partial sum, which is hardly larger than the
    # largest logit, by at most its last place, 2^-23 of it: tensor cores truncate. The D roundings add up like a
    # random walk, hence sqrt(D). A log-prob is a difference of two logits: the target's, and the most likely words'.
    return 2 * case.width**0.5 * 2**-23 * size, "2 sqrt(D) 2^-23 of the largest logit / temperature: float32 sums"


def compare(case: Case) -> None:
    x = drawn(case)
    hidden, weight = x.hidden_TD.clone().requires_grad_(), x.weight_VD.clone().requires_grad_()
    logprob, entropy = token_logprob(
        hidden,
        weight,
        x.targets_T,
        case.temperature,
        with_entropy_grad=case.entropy,
        float32_logits=case.float32,
        keep_logits=case.keep,
        kept=None if x.kept_TV is None else bits(x.kept_TV),
    )
    ((logprob * x.logprob_grad_T).sum() + (entropy * x.entropy_grad_T).sum()).backward()
    true = exact(case, x)
    say_within(
        f"{case}: log-prob, max", float((logprob - true.rounded_logprob_T).abs().max()), *bound(case, true.largest)
    )
    say("log-prob of exact logits, max", float((logprob - true.logprob_T).abs().max()), "no bound: what rounding costs")
    say("entropy, max", float((entropy - true.entropy_T).abs().max()), "no bound: of exact logits")
    limit, why = (2e-2, "bfloat16 has 8 bits") if case.dtype == torch.bfloat16 else (2e-5, "float32 has 24 bits")
    for name, found, wanted in (("hidden", hidden, true.hidden_grad_TD), ("weight", weight, true.weight_grad_VD)):
        assert found.grad is not None
        say_within(f"gradient of {name}, relative", relative(found.grad, wanted), limit, why)
