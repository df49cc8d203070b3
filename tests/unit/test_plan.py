"""Plans: the recommended TOMLs pass the dry run, models that do not fit name a cluster, bad input is refused."""

import re
from pathlib import Path

import pytest

from support.shapes import LLAMA_8B
from titan_rl.config.auto import on_device
from titan_rl.config.toml import find, load
from titan_rl.plan import choose
from titan_rl.plan.__main__ import main, parser, read_case
from titan_rl.plan.choose import Case, Plan, plans
from titan_rl.plan.facts import read_facts
from titan_rl.plan.rates import Spread, Work
from titan_rl.plan.roofline import Roofline, StepTime, drawn, step_time
from titan_rl.preflight.memory import GIB, on_gpus
from titan_rl.preflight.shapes import shape_of
from titan_rl.wire.model_shape import ModelShape

QUESTIONS = {
    "small": ["--model", "SmolLM2-1.7B", "--gpus", "1 x RTX 4090", "--tokens", "prompt 200, answer 500 +- 300"],
    "8B": ["--model", "Llama-3.1-8B", "--gpus", "8 x H100"],
    "70B": ["--model", "Llama-3.1-70B", "--gpus", "64 x H100", "--days", "7", "--tokens", "300, answer 2000 +- 1500"],
    "512": ["--model", "Llama-3.1-405B", "--gpus", "512 x H100"],
}


@pytest.fixture(autouse=True)
def closed_form(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank by the closed form: simulations take seconds."""

    def same(case: Case, plan: Plan) -> Plan:
        return plan

    monkeypatch.setattr(choose, "simulated", same)


def asked(question: list[str]) -> Case:
    return read_case(*parser().parse_known_args(question))


def preset(name: str, *keys: tuple[str, str]) -> StepTime:
    model = ("n_layers", "dim", "n_heads", "n_kv_heads", "hidden_dim", "vocab_size")
    sizes = ((f"model.{key}", str(getattr(LLAMA_8B, key))) for key in model)
    given = load(find(name), [("model.hf_assets_path", ""), *sizes, *keys])
    shape, facts = shape_of(given.model), read_facts()
    config = on_gpus(on_device(given, "cuda"), shape, int(given.hosts.gpu_memory_gb * GIB))
    work = Work(Spread(256), Spread(768, 148, 1024))
    return step_time(Roofline(config, shape, facts.gpus["H100"], facts, work))


@pytest.mark.parametrize("question", QUESTIONS.values(), ids=list(QUESTIONS))
def test_what_is_recommended_passes_the_dry_runs_checks(
    question: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "plan.toml"
    assert main([*question, "--price", "2.5", "--out", str(out)]) == 0  # which checks it
    config, lines = load(out, gpus=True), capsys.readouterr().out.splitlines()
    assert config.training.steps > 0
    assert len(lines) <= 45
    assert max(map(len, lines[:-1])) <= 110
    for label in ("placement", "weight sync", "step", "likeliest failures", "first kernel", "cost"):
        assert any(line.startswith(label) for line in lines)


def test_keys_of_the_user_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "plan.toml"
    keys = ["--generator.tensor_parallel_degree", "2", "--rollout.group_size", "8"]
    assert main([*QUESTIONS["8B"], *keys, "--out", str(out)]) == 0
    config = load(out, gpus=True)
    assert (config.generator.tensor_parallel_degree, config.rollout.group_size) == (2, 8)


def test_what_cannot_fit_names_the_smallest_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--lora.rank", "0", "--generator.quantization", "none", "--out", str(tmp_path / "plan.toml")]
    question = ["--model", "Llama-3.1-8B", *keys, "--gpus"]
    assert main([*question, "4 x RTX 4090"]) == 1
    printed = capsys.readouterr().err
    least = int(printed.split(" are the smallest")[0].rsplit(maxsplit=1)[-1])
    assert plans(asked([*question, f"{least} x RTX 4090"]))
    assert "a trainer needs" in printed
    assert not (tmp_path / "plan.toml").exists()


def test_all_bad_input_is_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        main(
            [
                "--model",
                "Lama-3.1-8B",
                "--gpus",
                "64 H101",
                "--tokens",
                "answers 5",
                "--days",
                "0",
                "--tranining.steps",
                "1",
            ]
        )
    assert refused.value.code == 2
    printed = capsys.readouterr().err
    for part in (
        "did you mean 'Llama-3.1-8B'",
        "--gpus: expected",
        "--tokens: expected",
        "--days: expected",
        "[tranining]",
    ):
        assert part in printed


def test_models_by_name_have_their_parameters() -> None:
    facts = read_facts()
    shapes: dict[str, ModelShape] = {name: facts.shape(name) for name in facts.models}
    assert shapes["Llama-3.1-8B"].parameters == LLAMA_8B.parameters
    for name, shape in shapes.items():
        size = name.split("-A")[0].rsplit("-", 1)[1]
        named = float(size[:-1]) * {"B": 1e9, "M": 1e6}[size[-1]]
        assert shape.parameters == pytest.approx(named, rel=0.24), name  # Llama 3.2 1B has 1.24B


def test_facts_of_the_user(tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(
        '[gpus.H100]\nmemory_gb = 93\nsource = "an NVL card"\n[rates.gap]\nvalue = 1e-3\nsource = "measured"\n'
    )
    facts = read_facts(str(own))
    assert (facts.gpus["H100"].memory_gb, facts.rates["gap"]) == (93, 1e-3)
    assert facts.gpus["H100"].flops == read_facts().gpus["H100"].flops
    own.write_text('[gpus.H100]\nmemory_gb = "93"\nsource = "x"\n[rates.gap]\nvalue = 1\n[sizes]\n')
    with pytest.raises(ValueError, match=r"rates.gap(.|\n)*memory_gb"):
        read_facts(str(own))


def test_the_8b_presets_step() -> None:
    ours, waiting = preset("grpo_llama3_8b"), preset("grpo_llama3_8b", ("rollout.max_staleness_steps", "0"))
    colocated = preset("grpo_llama3_8b_colocated")
    trainer, engine = sum(ours.trainer.values()), sum(ours.engine.values())
    products = 6 * (LLAMA_8B.parameters - 2 * LLAMA_8B.vocab_size * LLAMA_8B.dim) * ours.places / 758.5e12
    assert ours.trainer["block products"] == pytest.approx(products, rel=0.01)
    assert products < trainer < 2 * products
    assert ours.overlaps
    assert ours.seconds == pytest.approx(max(trainer, engine) + ours.rest)
    assert colocated.seconds == pytest.approx(
        sum(colocated.trainer.values()) + sum(colocated.engine.values()) + colocated.rest
    )
    assert ours.seconds < colocated.seconds < 2 * ours.seconds
    assert waiting.engine["host between decode steps"] > ours.engine["host between decode steps"]


def test_more_lag_and_longer_answers() -> None:
    lengths = drawn(Spread(2000, 1500, 6500))
    assert lengths.mean() == pytest.approx(2000, rel=0.05)
    assert lengths.std() == pytest.approx(1500, rel=0.2)
    assert lengths.max() == 6500
    case = asked(QUESTIONS["8B"])
    by_lag: dict[int, float] = {}
    for plan in plans(case):
        lag = plan.config.rollout.max_staleness_steps
        by_lag[lag] = min(by_lag.get(lag, plan.seconds), plan.seconds)
    assert by_lag[0] > by_lag[1] >= by_lag[2]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("gpus = 3", "[gpus.]: expected a row"),
        ('[gpus.H100]\nmemry = 3\nsource = "me"', "[gpus.H100] memry: expected no such key; did you mean 'memory_gb'?"),
        ('[models.X]\nmodel_type = "foo"\nhidden_size = 8\nrepo = "a/b"\nsource = "me"', "[models.X] model_type:"),
    ],
)
def test_facts_that_do_not_fit_are_refused(text: str, found: str, tmp_path: Path) -> None:
    own = tmp_path / "facts.toml"
    own.write_text(text)
    with pytest.raises(ValueError, match=re.escape(found)):
        read_facts(str(own))
