"""Gates and entropy control against TRL 1.16.0, verl 0.9.1 and prime-rl (tests/golden/README.md).

A loss that selects among the tokens of a microbatch runs in one microbatch, the others in several. If a peer computes
something else on purpose, a test pins the difference.
"""

from dataclasses import replace

import pytest

from golden.gates import PRIME, TRL, VERL, Ours, gate_loss
from golden.replay import cases, compare, compare_gradients, trained, trl_advantages
from titan_rl.actors.titan.entropy_control import EntropyControl
from titan_rl.config.sections import AlgorithmSection
from titan_rl.kernels.surrogate import Surrogate

TRL_GATES, VERL_GATES = cases("trl_gates.json"), cases("verl_gates.json")
PRIME_GATES = cases("prime_gates.json")
BONUS = "top_entropy_bonus"
ADAPTIVE = sorted(name for name in TRL_GATES if name.startswith("adaptive"))


def test_every_case_is_compared() -> None:
    assert TRL_GATES.keys() == {*TRL, *ADAPTIVE}
    assert VERL_GATES.keys() == {*VERL}
    assert PRIME_GATES.keys() == {*PRIME}


@pytest.mark.parametrize("name", sorted(TRL.keys() - {BONUS}))
def test_gates_have_trls_loss_and_gradients(name: str) -> None:
    case = TRL_GATES[name]
    loss, _, x = gate_loss(case, TRL[name])
    loss.backward()
    compare(trl_advantages(case), case["outputs"]["advantages"])
    compare(loss, case["outputs"]["loss"])
    compare_gradients(x, case)


def test_trl_averages_the_bonus_over_the_tokens_of_highest_entropy_alone() -> None:
    case, ours = TRL_GATES[BONUS], TRL[BONUS]
    _, sums, _ = gate_loss(case, ours)
    share = sums["entropy/top_share"] / trained(case["inputs"])
    coef = ours.surrogate.entropy_coef / share
    loss, _, x = gate_loss(case, replace(ours, surrogate=replace(ours.surrogate, entropy_coef=coef)))
    loss.backward()
    compare(loss, case["outputs"]["loss"])
    compare_gradients(x, case)
    assert 0.4 < share < 0.5


@pytest.mark.parametrize("name", sorted(VERL))
def test_gates_have_verls_loss_gradients_and_shares(name: str) -> None:
    case = VERL_GATES[name]
    loss, sums, x = gate_loss(case, VERL[name])
    loss.backward()
    compare(loss, case["outputs"]["loss"])
    compare_gradients(x, case)
    theirs, tokens = case["outputs"], trained(case["inputs"])
    if name.startswith("dppo"):
        compare((sums["clip_ratio/low"] + sums["clip_ratio/high"]) / tokens, theirs["clipped"])
        compare(sums["clip_ratio/dual"] / tokens, theirs["dual_clipped"])
        assert 0 < theirs["clipped"] < 1
    if name.startswith("clip_cov"):
        compare(sums["clip_ratio/selected"] / tokens, theirs["clipped"])
        assert sums["clip_ratio/selected"] > 1
    if name.startswith("geo_mean"):  # verl counts a clip on either side, also where the minimum does not take it
        counted = (sums["clip_ratio/low"] + sums["clip_ratio/high"]) / tokens
        assert 0 < counted <= theirs["clipped"] + theirs["dual_clipped"]


@pytest.mark.parametrize("name", sorted(PRIME))
def test_masks_of_probabilities_are_prime_rls(name: str) -> None:
    """Its default loss differentiates the ratio, where DPPO weighs the score function: one gradient, two values."""
    case = PRIME_GATES[name]
    loss, sums, x = gate_loss(case, PRIME[name])
    loss.backward()
    compare_gradients(x, case)
    if name != "default":
        compare(loss, case["outputs"]["loss"])
    compare((sums["clip_ratio/low"] + sums["clip_ratio/high"]) / trained(case["inputs"]), case["outputs"]["clipped"])
    assert 0 < case["outputs"]["clipped"] < 1


@pytest.mark.parametrize("name", ADAPTIVE)
def test_the_entropy_bonus_adapts_as_in_trl(name: str) -> None:
    case = TRL_GATES[name]
    keys, theirs = case["settings"], case["outputs"]
    share = keys.get("top_entropy_quantile", 1.0)
    control = EntropyControl(
        AlgorithmSection(**{key: value for key, value in keys.items() if key.startswith("entropy")})
    )
    coefs = []
    for step, loss_of_step in enumerate(theirs["loss"]):
        inputs = {key: values[step] for key, values in case["inputs"].items()}
        one = {"inputs": inputs, "settings": keys, "gradients": {k: v[step] for k, v in case["gradients"].items()}}
        coefs.append(control.coef)

        def ours(coef: float) -> Ours:
            return Ours(Surrogate(entropy_coef=coef, top_entropy_share=share), whole=True)

        _, sums, _ = gate_loss(one, ours(0.0))
        tokens = trained(inputs)
        top = sums.get("entropy/top_share", tokens)
        loss, _, x = gate_loss(one, ours(control.coef * tokens / top))  # TRL averages over the tokens that learn
        loss.backward()
        compare(loss, loss_of_step)
        compare_gradients(x, one)
        metrics = {"entropy": sums["entropy"] / tokens}
        if share < 1:
            metrics["entropy/top"] = sums["entropy/top"] / top
        control.observe(metrics)
        compare(control.state_dict()["coef"], theirs["entropy_coef"][step])
    assert coefs.count(0.0) > 1
    assert any(coefs)
