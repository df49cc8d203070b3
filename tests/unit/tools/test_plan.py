"""Plans: the recommended TOMLs pass the dry run, models that do not fit name a cluster, bad input is refused."""

import csv
import json
import random
import re
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from bench.gpu import trainer_steps
from support.shapes import LLAMA_8B
from support.slow_cases import slow_except
from titan_rl.config.auto import on_device
from titan_rl.config.toml import find, load
from titan_rl.preflight.memory import GIB, on_gpus
from titan_rl.preflight.shapes import shape_of
from titan_rl.tools.plan import choose
from titan_rl.tools.plan.__main__ import main, parser, read_case
from titan_rl.tools.plan.choose import Case, Plan, plans
from titan_rl.tools.plan.draft_gains import Drafted, drafted_in, read_drafted, speed_up
from titan_rl.tools.plan.facts import read_facts
from titan_rl.tools.plan.rates import NOTHING, EngineRates, Spread, Work
from titan_rl.tools.plan.roofline import Roofline, StepTime, drawn, step_time
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


@pytest.mark.parametrize("name", slow_except(QUESTIONS, 0, 1, 2))
def test_what_is_recommended_passes_the_dry_runs_checks(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "plan.toml"
    monkeypatch.setenv("COLUMNS", "80")
    assert main([*QUESTIONS[name], "--price", "2.5", "--out", str(out)]) == 0  # which checks it
    config, lines = load(out, gpus=True), capsys.readouterr().out.splitlines()
    assert config.training.steps > 0
    assert len(lines) <= 55
    assert max(map(len, lines[:-2])) <= 80  # then come paths and a command
    assert any("lower bound" in line and "expected" in line for line in lines)
    for label in ("placement", "lengths", "weight sync", "step", "likeliest failures", "first kernel", "cost"):
        assert any(line.startswith(label) for line in lines)


def test_keys_of_the_user_are_kept_and_drafts_are_estimated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.toml"
    keys = ["--generator.tensor_parallel_degree", "2", "--rollout.group_size", "8"]
    assert main([*QUESTIONS["8B"], *keys, "--drafts", "0.5", "--out", str(out)]) == 0
    text = " ".join(capsys.readouterr().out.split())
    found = re.search(r"drafts 2\.00 of 4\.00 drafted tokens accepted .*? (\S+) times as fast with 8 sequences", text)
    assert found
    assert 1 < float(found[1]) < 3
    assert re.search(r" with 64, \S+ with 256; an estimate that no GPU has measured: generator.drafts is refused", text)
    config = load(out, gpus=True)
    assert (config.generator.tensor_parallel_degree, config.rollout.group_size) == (2, 8)


def test_what_cannot_fit_names_the_smallest_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["--lora.rank", "0", "--generator.quantization", "none", "--out", str(tmp_path / "plan.toml")]
    question = ["--model", "Llama-3.1-8B", *keys, "--gpus"]
    assert main([*question, "4 x RTX 4090"]) == 1
    printed = " ".join(capsys.readouterr().err.split())
    least = int(printed.split(" are the smallest")[0].rsplit(maxsplit=1)[-1])
    assert plans(asked([*question, f"{least} x RTX 4090"]))
    assert "a trainer needs" in printed
    assert not (tmp_path / "plan.toml").exists()


@pytest.mark.parametrize("seed", range(8))
def test_drafts_gain_between_what_they_sample_and_what_they_multiply(seed: int) -> None:
    """Where a step waits for its weights, drafts are free; where it waits for products, each costs a token."""
    draws = random.Random(seed)
    n, context, tokens = draws.randint(1, 300), draws.uniform(10, 5000), draws.uniform(0.1, 4)
    drafted = Drafted(tokens, accepted=draws.uniform(0, tokens))
    rates = EngineRates(
        step_s=draws.uniform(0, 1e-3),
        weights_s=draws.uniform(1e-4, 1e-2),
        sequence_s=draws.uniform(1e-7, 1e-3),
        context_s=draws.uniform(0, 1e-8),
        gap_s=draws.uniform(0, 5e-3),
        host_s=draws.uniform(0, 1e-4),
    )
    samples, multiplies = 1 + drafted.accepted, 1 + drafted.tokens
    assert samples / multiplies - 1e-9 <= speed_up(rates, n, context, drafted) <= samples + 1e-9
    assert speed_up(replace(rates, sequence_s=0.0), n, context, drafted) == pytest.approx(samples)
    bound = EngineRates(step_s=0.0, sequence_s=rates.sequence_s)
    assert speed_up(bound, n, context, drafted) == pytest.approx(samples / multiplies)
    assert speed_up(replace(rates, ahead=True), n, context, drafted) <= speed_up(rates, n, context, drafted) + 1e-9


def test_drafts_of_a_run_are_counted_by_its_sequences_steps(tmp_path: Path) -> None:
    draws, lines, total = random.Random(0), list[dict[str, object]](), [0, 0, 0]
    for step in range(1, 30):
        line: dict[str, object] = {"kind": "rl", "step": step, "time": float(step)}
        steps, each = draws.randint(1, 5000), draws.uniform(0, 4)
        drafted = round(each * steps)
        accepted = draws.randint(0, drafted)
        if draws.random() < 0.8:
            line |= {"engine/drafted_tokens": drafted, "engine/accepted_tokens": accepted}
        line["tokens/sampled"] = steps + accepted
        if draws.random() < 0.2:
            line["eval/score"] = 0.5
        elif "engine/drafted_tokens" in line:
            total = [a + b for a, b in zip(total, (steps, drafted, accepted), strict=True)]
        lines.append(line)
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    expected = (total[1] / total[0], total[2] / total[0])
    assert read_drafted(str(tmp_path)) == drafted_in(lines) == pytest.approx(expected)
    (tmp_path / "metrics.jsonl").write_text(json.dumps({"kind": "rl", "step": 1, "time": 1.0}) + "\n")
    for bad in (str(tmp_path), str(tmp_path / "none"), "1.2", "-0.1", "nan"):
        with pytest.raises(ValueError, match="expected a share from 0 to 1, or a run's folder with engine/drafted"):
            read_drafted(bad)


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
                "--drafts",
                "2",
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
        "--drafts: expected a share from 0 to 1",
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


OWN = """[gpus.{0}]
memory_gb = 39
flops = 1e14
fp8 = 0
hbm = 1e12
nvlink = 3e10
network = 1e9
per_node = 4
source = "mine"
"""


@pytest.mark.parametrize(
    ("asked", "row"),
    [
        ("H100", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("H100-PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("a100-40gb", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-PCIE-40GB", "A100 PCIe 40GB"),
        ("RTX4090", "RTX 4090"),
    ],
)
def test_cards_by_the_names_in_use(asked: str, row: str) -> None:
    assert read_facts().gpu(asked).name == row


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ("A100-60GB", "expected 79 GiB (A100) or 39.5 GiB (A100 40GB), or a row of --facts, found 'A100-60GB'"),
        ("H100 94GB", "expected 79 GiB (H100)"),
        ("L40", "did you mean 'L40S'?"),
        ("RTX 4090 Laptop GPU", "found 'RTX 4090 Laptop GPU'; did you mean 'RTX 4090'?"),
        ("GH200", "did you mean"),
        ("MI300X", "found 'MI300X'"),
        ("CPU", "found 'CPU'"),
    ],
)
def test_other_cards_are_refused_by_name(asked: str, why: str) -> None:
    with pytest.raises(ValueError, match=re.escape(why)):
        read_facts().gpu(asked)


@pytest.mark.parametrize("name", ["A100-40GB", "SmallA100", "H100 SXM5"])
def test_a_row_of_the_user_comes_first(name: str, tmp_path: Path) -> None:
    own = tmp_path / "own.toml"
    own.write_text(OWN.format(f'"{name}"'))
    assert read_facts(str(own)).gpu(name.replace("-", " ")).memory_gb == 39


def test_the_memory_of_the_users_gpus_and_other_keys_that_nothing_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = ["--out", str(tmp_path / "plan.toml")]
    case = asked([*QUESTIONS["8B"], "--hosts.gpu_memory_gb", "60"])
    assert plans(case)[0].config.hosts.gpu_memory_gb == 60
    keys = ["--lora.rank", "0", "--hosts.gpu_memory_gb", "20", "--placement.kind", "colocated"]
    assert main([*QUESTIONS["8B"], *keys, *out]) == 1
    assert "GiB of 20.0" in capsys.readouterr().err
    assert main([*QUESTIONS["8B"], "--generator.replicas", "64", *out]) == 1
    assert "generator.replicas is set to 64" in capsys.readouterr().err


def test_several_gpus_train_and_sample_in_turn() -> None:
    """An engine shares its GPU with a part of the trainer, not with all of it."""
    assert plans(asked([*QUESTIONS["8B"], "--placement.kind", "colocated"]))


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
    assert waiting.decode_steps > ours.decode_steps


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


def line_of(model: str, tokens: str, *keys: str, gpus: str = "8 x H100") -> Roofline:
    return plans(asked(["--model", model, "--gpus", gpus, "--tokens", tokens, *keys]))[0].line


def test_attention_is_measured_by_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measured rows hold answers behind a shared prompt, not documents as long as the row."""
    monkeypatch.setattr(trainer_steps, "ON_CPU", False)
    (batch,) = trainer_steps.drawn(trainer_steps.LAST, 8, 997)
    (rows,) = batch.microbatches
    facts = read_facts()
    assert rows.tokens.size == facts.rates["small_places"]
    begin, length, _, prefix = rows.segments.T
    real = (prefix > 0) | (begin % rows.tokens.shape[1] == 0)  # else padding
    keys = length * prefix + length * (length + 1) / 2
    measured = float(keys[real].sum() / length[real].sum())
    assert facts.rates["small_keys"] == pytest.approx(measured, abs=0.1)


def test_attention_of_the_measured_rows_and_of_long_ones() -> None:
    facts = read_facts()
    line = line_of("Qwen3-0.6B", "prompt 150, answer 216", "--rollout.group_size", "8", gpus="1 x H200")
    assert line.keys == pytest.approx(facts.rates["small_keys"], rel=0.01)
    assert line.attention == pytest.approx(facts.rates["small_attention"] / facts.rates["small_places"], rel=0.01)
    long = replace(line, work=Work(NOTHING, Spread(16000)))
    assert long.keys == pytest.approx(8000)
    shape, seconds = line.shape, long.attention  # causal: a place is multiplied with its keys, twice
    rate = 3.5 * 4 * shape.n_layers * shape.n_heads * shape.head_dim * 8000 / seconds
    assert 150e12 < rate < 335e12  # FlashAttention 2 on an H100, forward


@pytest.mark.parametrize(("n", "experts"), [(1, 8.0), (2, 15.5), (10**6, 128.0)])
def test_a_decode_step_reads_the_experts_that_its_tokens_meet(n: int, experts: float) -> None:
    line = line_of("Qwen3-30B-A3B", "prompt 300, answer 3000", gpus="16 x H100")
    shape, tp = line.shape, line.config.generator.tensor_parallel_degree
    each = 3 * shape.n_layers * shape.dim * shape.hidden_dim * 2 / tp
    dense = shape.parameters * 2 / tp - 128 * each - 2 * shape.vocab_size * shape.dim / tp  # embeddings are not read
    seconds = (dense + experts * each) / line.facts.hbm(line.gpu)
    assert line.rates.engine.read_s(n) == pytest.approx(seconds, rel=1e-6)


def test_a_dense_model_reads_all_its_weights() -> None:
    assert EngineRates(0.0, weights_s=2.0).read_s(1) == 2.0
    rates = line_of("Llama-3.1-8B", "prompt 300, answer 1000").rates.engine
    assert rates.read_s(1) == rates.read_s(500) == rates.weights_s


def test_the_host_of_a_decode_step_grows_with_its_sequences() -> None:
    facts, rates = read_facts().rates, line_of("Qwen3-0.6B", "prompt 300, answer 1000").rates.engine
    assert (rates.gap_s, rates.host_s) == (facts["gap"], facts["gap_sequence"])
    ahead, alone = replace(rates, ahead=True), replace(rates, ahead=False)
    for n, tokens in ((1, 1000), (64, 40_000), (512, 500_000)):
        host_s, device_s = alone.waited_s(n, tokens), alone.device_s(n, tokens)
        assert host_s == facts["gap"] + n * facts["gap_sequence"]
        assert device_s + ahead.waited_s(n, tokens) == pytest.approx(max(host_s, device_s))


def test_a_version_goes_through_all_ports_of_a_node() -> None:
    gpus = read_facts().gpus
    assert gpus["H100"].node_network * 8 == pytest.approx(3.2e12)
    line = line_of("Llama-3.1-8B", "prompt 300, answer 1000", "--placement.kind", "colocated", gpus="16 x H100")
    assert line.config.hosts.link_gbps == pytest.approx(3200)
    assert line.sync["switch_s"]["weights between nodes"] == pytest.approx(line.version_bytes / 2 / 400e9)
    given = line_of(
        "Llama-3.1-8B",
        "answer 1000, prompt 300",
        "--placement.kind",
        "colocated",
        "--hosts.link_gbps",
        "400",
        gpus="16 x H100",
    )
    assert given.sync["switch_s"]["weights between nodes"] == pytest.approx(given.version_bytes / 2 / 50e9)


def test_experts_take_as_long_as_a_published_mixture() -> None:
    keys = ["--training.seq_len", "4096", "--generator.max_model_len", "4096", "--placement.kind", "colocated"]
    keys += ["--activation_checkpoint.mode", "selective"]
    line = line_of("Qwen3-30B-A3B", "prompt 1, answer 4095 at most 4095", *keys, gpus="16 x H100")
    trainer, published = line.rates.trainer, 5275
    seconds = trainer.place_s + trainer.microbatch_s / (4096 * line.config.training.local_batch_size)
    assert seconds == pytest.approx(1 / published, rel=0.05)


def test_what_is_expected_is_of_published_steps() -> None:
    """scripts/bench_published.py writes the rows: planned seconds over published ones."""
    with (Path(__file__).parents[3] / "docs/benchmarks/published.csv").open(encoding="utf-8") as file:
        rows = [row for row in csv.DictReader(file) if row["expected_ratio"]]
    ratios, rates = [float(row["ratio"]) for row in rows], read_facts().rates
    assert rates["published_median"] == pytest.approx(median(ratios), abs=0.006)
    assert (rates["published_least"], rates["published_most"]) == pytest.approx((min(ratios), max(ratios)), abs=0.006)
    assert all(0.6 < float(row["expected_ratio"]) < 1.6 for row in rows)


def test_many_passes_over_few_prompts_are_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.toml"
    assert main([*QUESTIONS["8B"], "--days", "7", "--out", str(out)]) == 0
    title, note, *lines = capsys.readouterr().out.splitlines()
    assert "8 x H100, 7 days" in title
    assert note.startswith("note")
    assert "each prompt is trained on" in note
    assert any(line.startswith("cheaper") for line in lines[:6])
    config, less = load(out, gpus=True), load(tmp_path / "plan_cheaper.toml", gpus=True)  # both were checked
    assert less.training.steps < config.training.steps / 2
    assert less.rollout.group_size > config.rollout.group_size


def test_a_full_cache_and_idle_trainers_are_said_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    question = ["--model", "Llama-3.1-8B", "--gpus", "8 x H100", "--tokens", "prompt 300, answer 16000 +- 5000"]
    assert main([*question, "--placement.kind", "disaggregated", "--out", str(tmp_path / "plan.toml")]) == 0
    said = capsys.readouterr().out.split("placement")[0]
    assert "fit its cache" in said
