"""One rank of a model without Monarch, in a separate process: its state when it resumes, and its files."""

from pathlib import Path
from typing import Any

import pytest

from support.one_rank import results_of_rank

RESUME = """
shape = shape_of(config.model)
part = SnapshotPart(f"/proc/{os.getpid()}/fd/{os.memfd_create('part')}", 1)
other = replace(
    config,
    optimizer=c.OptimizerSection(
        lr=1e-3, beta1=0.8, beta2=0.99, eps=1e-6, weight_decay=0.1
    ),
    lr_scheduler=c.LRSchedulerSection(warmup_steps=0, decay_ratio=1.0, decay_type="cosine", min_lr_factor=0.1),
    critic=c.CriticSection(lr=1e-3),
)
models = RoleModel("trainer", config, shape, config.parallelism), None
models = models[0], RoleModel("critic", config, shape.with_value_head(), config.parallelism)
models[0].initialize()
models[0].write(folder / "hf")
(folder / "hf/config.json").write_text(json.dumps(shape.hf_config(bos=1, eos=2, pad=0)))
models[1].load_weights(str(folder / "hf"))

def settings(model):
    (optimizer,) = model.phase._optimizers
    (group,) = optimizer.param_groups
    moments = [state["step"].item() for state in optimizer.state.values()]
    return {k: v for k, v in group.items() if k not in ("params", "param_names")} | {"steps": sorted(set(moments))}

def taken(model, n):  # stats of N steps, and the rate that each was really made with
    rates = []
    (optimizer,) = model.phase._optimizers
    optimizer.register_step_pre_hook(lambda made, *_: rates.append(made.param_groups[0]["lr"]))
    stats = [step(model) for _ in range(n)]
    return {"stats": stats, "rates": rates, "checksum": model.checksum()}

for model in models:
    model.begin_phase("rl", 0)
    for _ in range(3):
        step(model)
    model.phase.save(3, "{}")
    model.phase.snapshot(3, "{}", part)
    model.phase.settle()
    before = settings(model)
    whole = taken(model, 3)
    for at in (3, part):
        for given in (config, other):
            model.config = given
            model.begin_phase("rl", at)
            resumed = settings(model)
            tell(
                role=model.role,
                at="checkpoint" if at == 3 else "snapshot",
                changed=given is other,
                before=before,
                resumed=resumed,
                whole=whole,
                then=taken(model, 3),
            )
    model.config = config
"""
SCHEDULED = {"lr", "initial_lr", "steps"}  # not settings of the optimizer alone


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    found = results_of_rank(RESUME, tmp_path_factory.mktemp("resume"))
    assert [(one["role"], one["at"], one["changed"]) for one in found] == [
        (role, at, changed)
        for role in ("trainer", "critic")
        for at in ("checkpoint", "snapshot")
        for changed in (False, True)
    ]
    return found


def test_with_the_same_keys_a_phase_continues_to_the_last_bit(resumed: list[dict[str, Any]]) -> None:
    for one in (one for one in resumed if not one["changed"]):
        assert one["resumed"] == one["before"]
        assert one["then"] == one["whole"]
        assert len({loss for loss, _, _ in one["then"]["stats"]}) == 3, "the steps differ"


def test_changed_keys_hold_from_the_next_step_on(resumed: list[dict[str, Any]]) -> None:
    """Moments and step counts are resumed; every setting is the config's, and the reported rate is the one used."""
    changed = [one for one in resumed if one["changed"]]
    assert len(changed) == 4
    for one in changed:
        settings = one["resumed"]
        assert settings["steps"] == one["before"]["steps"] == [3.0]
        assert settings["initial_lr"] == 1e-3
        expected = {"betas": [0.8, 0.99], "eps": 1e-6, "weight_decay": 0.1}
        assert {key: settings[key] for key in expected} == expected
        assert {key for key in settings.keys() - SCHEDULED if settings[key] != one["before"][key]} == set(expected)
        rates = one["then"]["rates"]
        assert rates == [lr for _, _, lr in one["then"]["stats"]]
        if one["role"] == "critic":
            assert rates == [1e-3] * 3
        else:
            assert 1e-4 < rates[2] < rates[1] < rates[0] < 1e-3


KEPT = """
model = RoleModel("trainer", config, shape_of(config.model), config.parallelism)
model.begin_phase("rl", 0)
for n in range(1, 5):
    step(model)
    model.phase.save(n, "{}")
model.close()
steps = sorted(path.parent for path in (folder / "checkpoint").glob("step-*/.metadata"))
sums = [json.loads((step / SUMS).read_text())["files"] for step in steps]
wrong = [damage(step, read=True) for step in steps]
others = [{path.name for path in step.iterdir()} - {SUMS, *files} for step, files in zip(steps, sums)]
tell(steps=[step.name for step in steps], wrong=wrong, others=[sorted(names) for names in others], files=list(sums[0]))
"""


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_a_rank_deletes_no_checkpoint_and_sums_every_file(mode: str, tmp_path: Path) -> None:
    """Which of them may go depends on the other models' as well: the controller decides."""
    (found,) = results_of_rank(KEPT, tmp_path, mode)
    assert found["steps"] == ["step-1", "step-2", "step-3", "step-4"]
    assert found["files"] == ["__0_0.distcp", ".metadata"]
    assert found["wrong"] == [""] * 4
    assert found["others"] == [[]] * 4


FULL = """
import resource
from concurrent.futures import wait
def room(size):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

model = RoleModel("trainer", config, shape_of(config.model), config.parallelism)
model.begin_phase("rl", 0)
outcomes = []
for n, size, on_disk in zip(range(1, 7), [-1, 4096, -1, -1, 4096, -1], [False] * 3 + [True] * 3):
    step(model)
    if (saving := model.phase._checkpoints.save_future) is not None:
        wait([saving])  # it failed or not, before there is more room or less
    room(size)
    try:
        model.phase.save(n, "{}", on_disk=on_disk)
        outcomes.append("on disk" if on_disk and (folder / f"checkpoint/step-{n}/.metadata").exists() else "begun")
    except BaseException:  # CheckpointException
        outcomes.append("failed")
step(model)
room(4096)
model.phase.save(7, "{}")
resumed = model.begin_phase("rl", 6).step
steps = sorted(path.parent.name for path in (folder / "checkpoint").glob("step-*/.metadata"))
tell(resumed=resumed, outcomes=outcomes, steps=steps)
"""


def test_a_failed_asynchronous_save_is_told_once_and_the_next_one_counts(tmp_path: Path) -> None:
    """The save of step 2 fails in the background, the one of step 5 at once, because it had to be on disk."""
    (found,) = results_of_rank(FULL, tmp_path, "async")
    assert found["outcomes"] == ["begun", "begun", "failed", "on disk", "failed", "on disk"]
    assert found["steps"] == ["step-1", "step-4", "step-6"]
    assert found["resumed"] == 6, "the save of step 7 fails while the next phase begins"


TIED = """
import torch, transformers
from titan_rl.tasks.prompts import to_judge
from titan_rl.wire.model_shape import shape_of_folder
sizes = dict(
    vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=32, max_position_embeddings=256, num_labels=1, pad_token_id=0,
)
for family in ("Qwen3", "Llama"):
    for tied in (True, False):
        torch.manual_seed(0)
        of = getattr(transformers, family + "Config")(**sizes, tie_word_embeddings=tied)
        theirs = getattr(transformers, family + "ForSequenceClassification")(of).eval()
        theirs.save_pretrained(folder)
        shape = shape_of_folder(str(folder), "reward_model.hf_assets_path")
        model = RoleModel("reward_model", config, shape, config.reward_model.parallelism)
        model.load_weights(str(folder))
        documents = [[5, 7, 9, 11, 13], list(range(20, 40))]
        samples = [to_judge(tokens, 0) for tokens in documents]
        batches = pack(samples, shards=1, seq_len=32, rows_per_microbatch=2, pad_id=0)
        answers, _ = model.scores(batches[0], 1.0)
        ours = [float(scored[-1]) for scored in unpack(batches, [answers], samples)]
        with torch.no_grad():
            want = [theirs(input_ids=torch.tensor([tokens])).logits.item() for tokens in documents]
        tell(family=family, tied=tied, ours=ours, theirs=want)
"""


def test_a_reward_model_scores_as_in_transformers_tied_or_not(tmp_path: Path) -> None:
    found = results_of_rank(TIED, tmp_path)
    assert [(one["family"], one["tied"]) for one in found] == [
        ("Qwen3", True),
        ("Qwen3", False),
        ("Llama", True),
        ("Llama", False),
    ]
    for one in found:
        assert one["ours"] == pytest.approx(one["theirs"], abs=1e-5)
        assert abs(one["ours"][0] - one["ours"][1]) > 1e-3


ENTROPY = """
config = replace(
    config,
    algorithm=c.AlgorithmSection(
        entropy_target=9.0, entropy_coef=0.01, entropy_coef_delta=0.002, entropy_coef_max=0.015, top_entropy_share=0.5
    ),
)
plain = replace(config, algorithm=replace(config.algorithm, entropy_target=0.0))
part = SnapshotPart(f"/proc/{os.getpid()}/fd/{os.memfd_create('part')}", 1)

def step(model):
    at = model.phase.state.step
    tokens = np.random.default_rng(at).integers(3, 60, 12).tolist()
    columns = {"behaviour": -np.ones(12), "advantage": np.ones(12)}
    batches = pack([Sample(tokens, [0] + [1] * 11, columns)], shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0)
    stats = model.step(batches)
    return stats.loss, stats.grad_norm, stats.metrics.get("entropy_coef"), stats.metrics["entropy/top_share"]

model = RoleModel("trainer", config, shape_of(config.model), config.parallelism)
model.initialize()
model.begin_phase("rl", 0)
first = [step(model) for _ in range(3)]
model.phase.save(3, "{}")
model.phase.snapshot(3, "{}", part)
model.phase.settle()
whole = [step(model) for _ in range(3)]
for at in (3, part):
    model.begin_phase("rl", at)
    tell(whole=whole, then=[step(model) for _ in range(3)], first=first)

model.config = plain
model.begin_phase("rl", 3)
step(model)
model.phase.save(4, "{}")
model.config = config
model.begin_phase("rl", 4)
tell(coefs=[step(model)[2] for _ in range(2)])
"""


def test_the_entropys_control_resumes_to_the_last_bit(tmp_path: Path) -> None:
    """It begins at the key's value if a run is resumed with a target that it had not."""
    *resumed, changed = results_of_rank(ENTROPY, tmp_path)
    for one in resumed:
        assert one["then"] == one["whole"]
        assert [coef for _, _, coef, _ in one["first"] + one["whole"]] == [0, 0.012, 0.014, 0.015, 0.015, 0.015]
        assert all(0.4 < share < 0.6 for *_, share in one["whole"])
    assert len(resumed) == 2
    assert changed["coefs"] == [0, 0.012]


DEAD = """
from titan_rl.config.presets import preset
config = replace(config, algorithm=preset("grpo"))
model = RoleModel("trainer", config, shape_of(config.model), config.parallelism)
model.initialize()
model.begin_phase("rl", 0)

def step_of(advantage):
    tokens = np.random.default_rng(7).integers(3, 60, 12).tolist()
    columns = {"behaviour": np.full(12, -4.0), "advantage": np.full(12, advantage)}
    batches = pack([Sample(tokens, [0] + [1] * 11, columns)], shards=1, seq_len=32, rows_per_microbatch=1, pad_id=0)
    return model.step(batches).grad_norm

moved = [model.checksum()]
norms = []
for advantage in (1.0, 0.0, 0.0, -1.0):
    norms.append(step_of(advantage))
    moved.append(model.checksum())
tell(norms=norms, moved=[a != b for a, b in zip(moved, moved[1:])], step=model.phase.state.step)
"""


def test_a_step_without_any_advantage_does_not_move_the_weights(tmp_path: Path) -> None:
    """Adam's moments of earlier steps would, and its decay."""
    (found,) = results_of_rank(DEAD, tmp_path)
    assert found["moved"] == [True, False, False, True]
    assert found["norms"][1:3] == [0.0, 0.0]
    assert found["step"] == 4
