from pathlib import Path

import pytest

from support.checked_configs import config
from titan_rl.preflight.checks import problems, warnings

TWO = "[task]\nrewards = {exact = 1, last_number = 1}"


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        (
            'name = "rloo"\n[rollout]\ngroup_size = 1',
            'rollout.group_size: expected at least 2, because algorithm.advantage = "leave_one_out" compares',
        ),
        (
            'advantage = "leave_one_out"',
            'algorithm.normalize: expected "none" or "batch", because algorithm.advantage = "leave_one_out" is not '
            'divided by the group\'s deviation, found "group"',
        ),
        (
            'advantage = "return"',
            'because algorithm.advantage = "return" is not divided by the group\'s deviation, found "group"',
        ),
        (
            'name = "reinforce_pp"\ndynamic_sampling = true\n[rollout]\ngroup_size = 1',
            "algorithm.dynamic_sampling: expected false, because all rewards of a group are equal with "
            "rollout.group_size = 1, found true",
        ),
        (
            'advantage = "return"\nnormalize = "batch"\ndynamic_sampling = true',
            'algorithm.dynamic_sampling: expected false, because algorithm.advantage = "return" does not compare the '
            "samples of a group, and equal rewards teach too, found true",
        ),
        (
            'name = "otb"\n[rollout]\ngroup_size = 1',
            'because algorithm.advantage = "optimal_token" compares the samples',
        ),
        (
            'advantage = "leave_one_out"\nnormalize = "mean"',
            'algorithm.normalize: expected "none" or "batch", because algorithm.advantage = "leave_one_out" is not '
            'divided by a mean, found "mean"',
        ),
        (
            'name = "maxrl"\nkl_coef = 0.5\nkl_in = "reward"',
            'algorithm.kl_in: expected "loss", because algorithm.normalize = "mean" needs rewards of at least 0',
        ),
        ('name = "maxrl"\noverlong_buffer = 4', "algorithm.overlong_buffer: expected 0, because algorithm.normalize ="),
        (
            'name = "maxrl"\nlength_reward = "kimi"',
            'algorithm.length_reward: expected "none", because algorithm.normalize = "mean" needs rewards of at least',
        ),
        (
            'name = "gdpo"\n[task]\nrewards = {exact = 1}',
            'task.rewards: expected at least two rewards, because algorithm.advantage = "per_reward" normalizes each',
        ),
        (
            f'name = "gdpo"\nnormalize = "none"\n{TWO}',
            'algorithm.normalize: expected "group" or "batch", because algorithm.advantage = "per_reward" divides by',
        ),
        (
            f'name = "gdpo"\ncredit = "turn"\n{TWO}',
            'algorithm.credit: expected "outcome", because algorithm.advantage =',
        ),
        (
            f'name = "gdpo"\nkl_coef = 0.5\nkl_in = "reward"\n{TWO}',
            'algorithm.kl_in: expected "loss", because algorithm.advantage = "per_reward" normalizes each reward by',
        ),
        (
            f'name = "gdpo"\n{TWO}\n[training]\nstream_groups = 2',
            'training.stream_groups: expected 0, because algorithm.normalize is "batch", found 2',
        ),
        (
            'name = "opo"\ncredit = "turn"',
            'because algorithm.advantage = "length_weighted" weighs rollouts, found "turn"',
        ),
        (
            'name = "pass_at_k"\npass_k = 17',
            "algorithm.pass_k: expected 0, or 2 to rollout.group_size = 16, found 17",
        ),
        ('name = "pass_at_k"\npass_k = 1', "algorithm.pass_k: expected 0, or 2 to rollout.group_size = 16, found 1"),
        (
            'name = "remax"\ndynamic_sampling = true',
            'algorithm.dynamic_sampling: expected false, because algorithm.advantage = "greedy" does not compare the '
            "samples of a group",
        ),
        (
            'name = "remax"\nlength_reward = "kimi"',
            'algorithm.length_reward: expected "none" or "target", because algorithm.advantage = "greedy" is outside '
            'the group, found "kimi"',
        ),
        (
            'name = "reinforce_pp"\nlength_reward = "kimi"\n[rollout]\ngroup_size = 1',
            'rollout.group_size: expected at least 2, because algorithm.length_reward = "kimi" compares the lengths of',
        ),
        (
            'name = "sft"\n[task]\nfilter = "mine:keeps"',
            'task.filter: expected "", because algorithm.name = "sft" samples no groups, found "mine:keeps"',
        ),
        (
            '[task]\nfilter = "operator:not_"\n[training]\nstream_groups = 1',
            "training.stream_groups: expected 0, because task.filter replaces groups",
        ),
        (
            '[task]\nfilter = "operator:neg"',
            "task.filter = 'operator:neg': TypeError: bad operand type",
        ),
        (
            '[task]\nfilter = "builtins:max"',
            "task.filter = 'builtins:max': expected a function whose arguments Python can list, found <built-in "
            "function max>; call it from your own",
        ),
        (
            'length_reward = "target"',
            'algorithm.length_target: expected at least 1, because algorithm.length_reward = "target", found 0',
        ),
        (
            'length_reward = "target"\nlength_target = 65',
            "algorithm.length_target: expected at most rollout.max_new_tokens = 64, found 65",
        ),
        (
            "dual_clip = 1.25\nclip_high = 0.28",
            "algorithm.dual_clip: expected a value above 1 + clip_high = 1.28, or 0 for off, found 1.25",
        ),
        (
            'name = "cispo"\ndual_clip = 6',
            'algorithm.dual_clip: expected 0, because algorithm.clip = "cispo" does not use it, found 6',
        ),
        (
            'clip = "gmpo"',
            'algorithm.ratio: expected "sequence", because algorithm.clip = "gmpo" is a mean over each sequence, '
            'found "token"',
        ),
        (
            'clip = "vespo"\nratio = "sequence"',
            'algorithm.ratio: expected "token", because algorithm.clip = "vespo" multiplies the ratios of a sequence',
        ),
        (
            'clip = "dppo_tv"\nclip_high = 4',
            'algorithm.clip_high: expected a value below 1, because algorithm.clip = "dppo_tv" bounds the change of a',
        ),
        (
            'name = "clip_cov"\ncov_low = 5',
            "algorithm.cov_low: expected a value below algorithm.cov_high = 5, found 5",
        ),
        (
            "entropy_target = 0.5\nentropy_coef = 2",
            "algorithm.entropy_coef: expected a value in [0, 1] with algorithm.entropy_target, found 2",
        ),
        (
            "entropy_target = 0.5\nentropy_coef_max = 0.1\nentropy_coef_min = 0.2",
            "algorithm.entropy_coef_min: expected at most algorithm.entropy_coef_max = 0.1, found 0.2",
        ),
        (
            "correction_low = 2",
            "algorithm.correction_low: expected a value below algorithm.correction_high = 2, found 2",
        ),
        (
            "rejection_high = 0.25",
            "algorithm.rejection_low: expected a value below algorithm.rejection_high = 0.25, found 0.5",
        ),
        (
            'correction = "token_tis"',
            'algorithm.proximal: expected "trainer", because with algorithm.correction = "token_tis" the ratio would',
        ),
        ("minibatches = 3", "algorithm.minibatches: expected a divisor of rollout.groups_per_step = 16, found 3"),
        (
            "overlong_buffer = 65",
            "algorithm.overlong_buffer: expected at most rollout.max_new_tokens = 64, found 65",
        ),
        (
            'name = "reward_model"\n[cold_start]\nsteps = 5',
            "cold_start.steps: expected 0, because a reward model generates no answers, found 5",
        ),
        (
            'kl_coef = 0.5\n[reference]\nmesh = "none"',
            'reference.mesh: expected "trainer" or "own", because algorithm.kl_coef = 0.5 needs a reference, '
            'found "none"',
        ),
        (
            'name = "kto"\n[training]\nglobal_batch_size = 1',
            'training.global_batch_size: expected at least 2, because algorithm.name = "kto" measures a KL with '
            "answers to other prompts of the step, found 1",
        ),
        (
            'name = "kto"\ndesirable_weight = 0\nundesirable_weight = 0',
            "algorithm.desirable_weight: expected a value above 0, because algorithm.undesirable_weight is 0 too, "
            "found 0",
        ),
        (
            'name = "online_dpo"\n[reference]\nmesh = "none"',
            'reference.mesh: expected "trainer" or "own", because algorithm.pair_loss = "dpo" needs a reference, '
            'found "none"',
        ),
        (
            'name = "online_dpo"\n[rollout]\ngroup_size = 1',
            'rollout.group_size: expected at least 2, because algorithm.advantage = "group" compares the samples of a',
        ),
        *(
            (
                f'pair_loss = "ipo"\n{key} = {value}',
                f'algorithm.{key}: expected {usual}, the default, because algorithm.pair_loss = "ipo" learns from '
                f"pairs, without advantages or ratios, found {value}",
            )
            for key, value, usual in (
                ("clip_high", "0.28", "0.2"),
                ("ratio", '"sequence"', '"token"'),
                ("aggregation", '"sequence_mean"', '"token_mean"'),
                ("credit", '"turn"', '"outcome"'),
                ("entropy_coef", "0.01", "0.0"),
                ("kl_coef", "0.01", "0.0"),
                ("proximal", '"trainer"', '"generator"'),
                ("rejection", '"geometric"', '"none"'),
            )
        ),
        (
            'name = "dpo"\npair_loss = "dpo"',
            'algorithm.pair_loss: expected "none", because algorithm.name = "dpo" samples no answers, found "dpo"',
        ),
        (
            'name = "online_dpo"\n[task]\nname = "calc"\ntemplate = "chat"\nthinking = "template"\n'
            '[environment]\nname = "calc"',
            'task.thinking: expected "keep", because algorithm.pair_loss = "dpo" needs rollouts of one branch, '
            'found "template"',
        ),
        (
            'name = "dpo"\n[reference]\nmesh = "none"',
            'reference.mesh: expected "trainer" or "own", because algorithm.name = "dpo" needs a reference, '
            'found "none"',
        ),
        (
            'name = "ppo"',
            'critic.lr: expected a value above 0, because algorithm.name = "ppo" trains a critic, found 0',
        ),
        (
            'name = "opd"',
            'teacher.hf_assets_path: expected a Hugging Face folder, required by algorithm.name = "opd", found ""',
        ),
        (
            'name = "opd"\n[teacher]\nhf_assets_path = "/no/such"',
            "teacher.hf_assets_path: expected a Hugging Face folder, found none at /no/such",
        ),
        (
            '[task]\nreward = "model"\neval_reward = "exact"',
            'reward_model.hf_assets_path: expected a Hugging Face folder, required by task.reward = "model", found ""',
        ),
        (
            '[task]\neval_reward = "model"',
            'task.eval_reward: expected a reward other than "model", because a reward model',
        ),
        ('[task]\neval_reward = "exct"', 'task.eval_reward: expected "exact", "last_number"'),
        ('[task]\neval_reward = "no_such:f"', "task.eval_reward = 'no_such:f': No module named 'no_such'"),
        (
            'name = "sft"\n[task]\nreward = "model"',
            'task.eval_reward: expected a reward for the held-out answers, because task.reward is "model"',
        ),
        (
            'kl_coef = 0.5\n[reference]\nmesh = "own"\ntensor_parallel_degree = 4',
            "reference.tensor_parallel_degree: expected a divisor of the model's n_kv_heads = 2, found 4",
        ),
        (
            'name = "ppo"\n[critic]\nlr = 1e-3\ndata_parallel_shard_degree = 15',
            "hosts.slots: expected room for 17 processes (1 of the trainer, 1 of the generators, 15 of the critic)",
        ),
    ],
)
def test_one_problem_of_an_algorithm_or_its_roles(tmp_path: Path, toml: str, message: str) -> None:
    (problem,) = problems(config(tmp_path, f"[algorithm]\n{toml}"))
    assert message in problem


def test_every_problem_of_an_algorithm_at_once(tmp_path: Path) -> None:
    toml = """
        [algorithm]
        name = "ppo"
        normalize = "group"
        dynamic_sampling = true
        dual_clip = 1.125
        clip = "none"
        correction = "token_mask"
        correction_low = 3
        rejection_low = 3
        minibatches = 5
        overlong_buffer = 100
        kl_coef = 0.1
        [rollout]
        group_size = 1
        [reference]
        mesh = "none"
        [task]
        reward = "model"
    """
    keys = [problem.split(":")[0] for problem in problems(config(tmp_path, toml))]
    assert keys == [
        "algorithm.normalize",
        "algorithm.dual_clip",
        "algorithm.dynamic_sampling",
        "algorithm.dual_clip",
        "algorithm.correction_low",
        "algorithm.rejection_low",
        "algorithm.proximal",
        "algorithm.minibatches",
        "algorithm.overlong_buffer",
        "reference.mesh",
        "critic.lr",
        "reward_model.hf_assets_path",
        "task.eval_reward",
    ]


@pytest.mark.parametrize(
    "toml",
    [
        'name = "ppo"\n[critic]\nlr = 1e-3\n[rollout]\ngroup_size = 1',  # its baseline is the critic
        'name = "reinforce_pp"\n[rollout]\ngroup_size = 1',
        'correction = "token_tis"\nproximal = "trainer"',
        'rejection = "geometric"',
        "dual_clip = 3",
        "minibatches = 4\nepochs = 3",
        "overlong_buffer = 64",
        '[reference]\nmesh = "none"',  # nothing needs one
        'name = "sft"\nminibatches = 3\ndual_clip = 0.5',  # keys of RL
        'clip = "dppo_kl"\nclip_high = 2\ndual_clip = 20',  # a KL may be above 1
        "entropy_coef = 2\nentropy_coef_max = 1",  # without a target the bounds do not hold
        'name = "reward_model"\n[task]\nreward = "model"',  # it is judged by the order of pairs
        'name = "reward_model"\n[hosts]\nslots = 1',  # it has no generators
        'name = "dpo"\n[eval]\nsize = 0\n[hosts]\nslots = 1',
    ],
)
def test_no_problem_of_an_algorithm(tmp_path: Path, toml: str) -> None:
    assert problems(config(tmp_path, f"[algorithm]\n{toml}")) == []


def test_a_clip_that_cannot_act_is_warned_of(tmp_path: Path) -> None:
    trainer = '[rollout]\nmax_staleness_steps = 1\n[algorithm]\nproximal = "trainer"\ncorrection = "token_tis"\n'
    for keys, found in (
        ("clip_low = 0.3", "algorithm.clip_low = 0.3"),
        ("dual_clip = 3", "algorithm.dual_clip = 3.0"),
        ('name = "dapo"', "algorithm.clip_high = 0.28"),
        ('name = "gspo"', "algorithm.clip_low = 0.0003, algorithm.clip_high = 0.0004"),
        ('clip = "sapo"', 'algorithm.clip = "sapo"'),
        ('name = "cispo"', 'algorithm.clip = "cispo", algorithm.clip_low = 1.0, algorithm.clip_high = 4.0'),
    ):
        (warning,) = warnings(config(tmp_path, f"{trainer}{keys}"))
        assert warning == (
            f'{found}: no clip can act, because with algorithm.proximal = "trainer" and one update per step the ratio '
            'is 1 on every token; set algorithm.proximal = "generator" with algorithm.correction = "none", or '
            "algorithm.minibatches or algorithm.epochs above 1"
        )
        for more in ("minibatches = 2", "epochs = 2"):
            assert warnings(config(tmp_path, f"{trainer}{keys}\n{more}")) == []
    assert warnings(config(tmp_path, f'{trainer}clip = "clip_cov"')) == []  # it acts at a ratio of 1, too
    assert warnings(config(tmp_path, trainer)) == []  # decoupled PPO with the usual clip, on purpose
    (warning,) = warnings(config(tmp_path, '[algorithm]\nproximal = "trainer"\nclip_high = 0.28'))
    assert warning.endswith("ratio is 1 on every token; set algorithm.minibatches or algorithm.epochs above 1")


def test_a_presets_own_keys_are_not_warned_of(tmp_path: Path) -> None:
    """gspo in 16 bits compares with the trainer where nothing is stale."""
    dtype = 'dtype = "bfloat16"\n[training]\nmixed_precision_param = "bfloat16"\n'
    gspo = f'[generator]\n{dtype}[algorithm]\nname = "gspo"\n'
    assert warnings(config(tmp_path, gspo)) == []
    (warning,) = warnings(config(tmp_path, f"{gspo}clip_low = 0.02"))
    assert warning.startswith("algorithm.clip_low = 0.02: no clip can act")
    opd = '[rollout]\nmax_staleness_steps = 1\n[algorithm]\nname = "opd"\n'
    assert warnings(config(tmp_path, opd)) == []
    (warning,) = warnings(config(tmp_path, f'{opd}clip = "ppo"'))
    assert warning.startswith('algorithm.clip = "ppo": no clip can act')


def test_k1_in_the_loss_is_warned_of(tmp_path: Path) -> None:
    (warning,) = warnings(config(tmp_path, '[algorithm]\nkl_coef = 0.1\nkl = "k1"'))
    assert warning.startswith('algorithm.kl is "k1" in the loss: its gradient is zero on average')
    (unread,) = warnings(config(tmp_path, '[algorithm]\nkl = "k1"'))
    assert unread == 'algorithm.kl = "k1": no effect, because algorithm.kl_coef is 0.0'
    for silent in ('kl = "k3"', 'kl_coef = 0.1\nkl = "k1"\nkl_in = "reward"', 'kl_coef = 0.1\nkl = "k2"'):
        assert warnings(config(tmp_path, f"[algorithm]\n{silent}")) == []


def test_every_problem_of_a_self_distillation_at_once(tmp_path: Path) -> None:
    toml = """
        [algorithm]
        name = "sdpo"
        teacher_coef = 0.5
        normalize = "batch"
        teacher_context = ["sibling", "hint"]
        [teacher]
        hf_assets_path = "/no/such"
        template = "{prompt}"
        [cold_start]
        teacher_prompts = true
    """
    keys = [problem.split(":")[0] for problem in problems(config(tmp_path, toml))]
    assert keys == [
        "cold_start.teacher_prompts",
        "algorithm.teacher_context",
        "algorithm.teacher_coef",
        "algorithm.normalize",
        "teacher.hf_assets_path",
        "teacher.template",
    ]


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ('teacher_weights = "average"', 'algorithm.teacher_weights: expected "folder", because there is no teacher'),
        ('teacher_context = ["answer"]', "algorithm.teacher_context: expected [], because there is no teacher"),
        (
            'name = "sdpo"\nteacher_weights = "policy"\nteacher_context = []',
            'algorithm.teacher_context: expected "sibling", "feedback", "demonstration" or "answer", because',
        ),
        (
            'name = "sdpo"\nteacher_context = ["sibling"]\n[rollout]\ngroup_size = 1',
            "rollout.group_size: expected at least 2, because algorithm.teacher_context",
        ),
        (
            'name = "opsd"\n[reference]\nmesh = "none"',
            'because algorithm.teacher_weights = "reference" needs a reference',
        ),
        ('name = "opsd"\n[teacher]\ntemplate = "no_such:f"', "teacher.template = 'no_such:f': ModuleNotFoundError"),
        ("teacher_coef = 0.5", "teacher.hf_assets_path: expected a Hugging Face folder"),
    ],
)
def test_one_problem_of_a_self_distillation(tmp_path: Path, toml: str, message: str) -> None:
    (problem,) = problems(config(tmp_path, f"[algorithm]\n{toml}"))
    assert message in problem


@pytest.mark.parametrize(
    ("toml", "key"),
    [
        ("[rollout]\ntop_k = 8", "rollout.top_p, top_k or min_p"),
        ("[algorithm]\nrouting_replay = true", "algorithm.routing_replay"),
    ],
)
def test_steps_are_not_launched_ahead_where_engines_record(toml: str, key: str, tmp_path: Path) -> None:
    expected = f"generator.async_scheduling: expected false with {key}, because steps launched ahead mix up records"
    found = problems(config(tmp_path, f"[generator]\nasync_scheduling = true\n{toml}"))
    assert any(each.startswith(expected) for each in found)
    assert not any("async_scheduling" in each for each in problems(config(tmp_path, toml)))
