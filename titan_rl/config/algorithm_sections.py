"""Keys of the task, the algorithm and its roles: [task] [eval] [rollout] [algorithm] [reference] [critic]
[reward_model] [teacher]."""

from dataclasses import dataclass, field, fields
from typing import Literal

from titan_rl.config.algorithms import PRESETS, Kind, kind_of
from titan_rl.config.choices import (
    MOST_RANKS,
    MOST_SECONDS,
    Aggregation,
    Estimator,
    Level,
    NestedTables,
    PairLoss,
    Rejection,
    Table,
    Tables,
    Weight,
    bounds,
)
from titan_rl.config.methods import ADVANTAGES, CLIPS, advantage_of
from titan_rl.config.model_sections import ParallelismSection

TASKS = ("addition", "calc", "hunt", "jsonl", "reasoning_gym")


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskSection:
    name: str = field(default="addition", metadata={"named": dict.fromkeys(TASKS), "own": True})
    """"addition" generates its own data, as do "calc" (products, with a calculator) and "hunt" (a treasure on a board),
    which need environment.name; "jsonl" reads files, JSONL or Parquet; "reasoning_gym" generates the problems of
    task.datasets without end; or your own function, which returns rows (docs/data.md)."""
    path: str = ""
    """Training prompts: a JSONL or Parquet file, a folder of them, or a data set in the Hub's local cache, such as
    hf:openai/gsm8k:main:train (docs/data.md)."""
    sources: NestedTables = field(default_factory=dict, hash=False)
    """Several weighted sources of training prompts, instead of path: tables [task.sources.NAME] (docs/data.md)."""
    datasets: NestedTables = field(default_factory=dict, hash=False)
    """Data sets of the package reasoning-gym with task.name = "reasoning_gym": tables [task.datasets.NAME] of their
    settings, and a weight of being drawn (docs/data.md)."""
    eval_path: str = ""
    """Held-out prompts, as in path. The first eval.size rows are used."""
    prompt_key: str = "question"
    """Column of the prompt: a string or a list of chat messages. With dots inside a table. If it is the default and the
    rows lack it, the columns of TRL, verl, slime and verifiers are recognized, here and in answer_key."""
    answer_key: str = "answer"
    """Column of the reference answer, such as "reward_model.ground_truth"."""
    demonstration_key: str = ""
    """Column of a conversation that solves the problem: cold_start and sft train on the assistant's messages, and show
    the others. Rows without one teach their answer, as all do if this is empty."""
    images_key: str = ""
    """Column of images, in the order in which the prompt reads them: a path, a data URL or bytes, or a list of these.
    Chat messages may hold images themselves (docs/data.md)."""
    chosen_key: str = "chosen"
    """Column of the preferred answer (dpo, ipo, simpo, orpo, kto, reward_model)."""
    rejected_key: str = "rejected"
    """Column of the rejected answer, likewise."""
    reward: str = "exact"
    """A built-in verifier (docs/data.md), "model" (see [reward_model]), or your own "package.module:function", also
    one written for TRL or verl."""
    eval_reward: str = ""
    """Reward of the held-out answers, as in reward. Empty: the same as reward. "model" is not allowed: a reward model
    cannot measure a policy trained against it."""
    rewards: Table = field(default_factory=dict, hash=False)
    """Several rewards and their weights, instead of reward: {"my_rewards:correct" = 1.0, format = 0.2}. Their weighted
    sum is trained on, and each is logged (docs/data.md)."""
    reward_args: Table = field(default_factory=dict, hash=False)
    """Arguments of built-in verifiers, such as {pattern = "^yes", longest = 200} (docs/data.md)."""
    filter: str = ""
    """Your own function of a judged group, "package.module:function": where it returns false, the group is replaced, as
    with algorithm.dynamic_sampling (docs/algorithms.md)."""
    grader: str = ""
    """Another reward of every training answer, as in reward. It is logged and never trained on: see `python -m
    titan_rl audit --rewards`."""
    reward_workers: int = bounds(4, ge=0, le=1024)
    """Maximum number of processes that call your own reward functions. They are started when calls wait. 0: calls them
    one at a time on a thread of the controller, which cannot be killed."""
    reward_seconds: float = bounds(0.0, ge=0, le=MOST_SECONDS)
    """Deadline of one call of a reward function. Its process is killed then, and the answer has no reward. 0:
    rollout.timeout_seconds."""
    reward_memory_mb: int = bounds(0, ge=0, le=2**24)
    """Memory of a reward process in MiB above which it is killed. 0: half of the host's."""
    agent: str = ""
    """Your own agent as "package.module:function". It reaches the policy by the URL and key of an OpenAI-compatible
    endpoint, and returns the reward (docs/environments.md). [environment] has its limits; its name stays empty."""
    template: Literal["plain", "chat"] = "plain"
    """"plain" feeds BOS and the prompt text; "chat" applies the tokenizer's chat template."""
    system_prompt: str = ""
    """System message put before the prompt. Requires template = "chat"."""
    chat_template: str = ""
    """Jinja chat template, or the path of a file with one. Empty: the template in model.hf_assets_path."""
    chat_template_kwargs: Table = field(default_factory=dict, hash=False)
    """Variables of the chat template, such as {enable_thinking = false}. date_string pins the date of templates that
    write today's."""
    thinking: Literal["keep", "template"] = "keep"
    """Thinking of earlier turns: "keep" it as sampled, or strip it where the chat "template" does. That begins a branch
    of the rollout."""
    bad_rows: Literal["refuse", "drop"] = "refuse"
    """Rows that cannot be read, lack a usable prompt or answer, or are too long for training.seq_len and
    generator.max_model_len: "refuse" to start, or "drop" them and print how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CurriculumSection:
    solved_visits: int = bounds(0, ge=0, le=10**6)
    """A prompt drops out when all answers were correct at its last N visits (docs/data.md). 0: none drops out."""
    hopeless_wait: int = bounds(0, ge=0, le=10**6)
    """Number of its turns for which a prompt waits after a visit without a correct answer. 0: none waits."""
    correct_at: float = bounds(1.0, ge=0, le=1e6)
    """Lowest reward of an answer that counts as correct."""

    @property
    def on(self) -> bool:
        return self.solved_visits > 0 or self.hopeless_wait > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSection:
    size: int = bounds(256, ge=0, le=10**6)
    """Number of held-out problems. 0: no evaluation."""
    interval: int = bounds(20, ge=0, le=10**9)
    """Steps between evaluations. 0: only at the start and at the end."""
    sets: Tables = field(default_factory=dict, hash=False)
    """More evaluation sets, measured together with the held-out problems, each a table [eval.sets.NAME] with the keys
    path, size, samples, temperature, reward and correct_at (docs/operations.md)."""
    keep_best: str = ""
    """Metric of an evaluation, such as "eval/score" or "eval/NAME/pass@4": the weights with its highest value are kept
    as a Hugging Face folder, best/ in the dump folder. Empty: none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSection:
    groups_per_step: int = bounds(16, ge=1, le=2**14)
    """Number of prompts per RL step."""
    group_size: int = bounds(16, ge=1, le=2**12)
    """Number of samples per prompt."""
    max_new_tokens: int = bounds(64, ge=1, le=2**20)
    """Maximum number of tokens sampled in one turn."""
    temperature: float = bounds(1.0, gt=0, le=100)
    """Sampling temperature. The trainer computes its log-probs at the same temperature."""
    top_p: float = bounds(1.0, gt=0, le=1)
    """Nucleus sampling: sample from the fewest most likely tokens whose probabilities add up to top_p. 1: from all.
    Trainers compute the log-probs of truncated samples over the same tokens (docs/algorithms.md)."""
    top_k: int = bounds(0, ge=0, le=2**20)
    """Sample from the top_k most likely tokens only. 0: from all. It also bounds the memory of the kept sets."""
    min_p: float = bounds(0.0, ge=0, lt=1)
    """Drop tokens that are less likely than min_p times the most likely one. 0: none."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Additional stop tokens. EOS always stops."""
    max_staleness_steps: int = bounds(0, ge=0, le=2000)
    """Maximum age, in optimizer steps, of the weights that sampled a token when it is trained on. Above 0, sampling and
    training overlap. 0: exact on-policy."""
    overtake_steps: int = bounds(0, ge=0, le=1000)
    """Number of steps, out of max_staleness_steps, by which finished groups may overtake a slow one."""
    timeout_seconds: int = bounds(600, ge=5, le=MOST_SECONDS)
    """Timeout for sampling one prompt's group, including the wait for a free or replaced engine (the run ends), and for
    one call of your own reward function (the call fails), unless task.reward_seconds is set."""

    @property
    def steps_ahead(self) -> int:
        """Return for how many steps after the next one groups are sampled."""
        return self.max_staleness_steps - self.overtake_steps

    @property
    def truncates(self) -> bool:
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AlgorithmSection:
    """The defaults make "grpo"; algorithms.py lists the keys that every other name changes."""

    name: str = field(default="grpo", metadata={"named": PRESETS})
    """Preset: sets every key below that the file does not set. See docs/algorithms.md for the table."""
    advantage: str = field(default="group", metadata={"own": True, "named": ADVANTAGES})
    """Baseline of a reward (docs/algorithms.md), or your own function."""
    teacher_coef: float = bounds(0.0, ge=0, le=1e6)
    """Weight of the teacher's log-prob less the sampling log-prob, which is added to each token's advantage of rewards.
    0: no teacher, unless advantage = "teacher", which uses nothing else."""
    teacher_weights: Literal["folder", "reference", "average", "policy"] = "folder"
    """Weights of the teacher: of teacher.hf_assets_path, of the policy at the start of RL, a moving average of the
    policy, or the policy itself. The last three need no other model, but a teacher_context."""
    teacher_decay: float = bounds(0.95, ge=0, lt=1)
    """Decay of the moving average in a step: average = decay x average + (1 - decay) x policy."""
    teacher_context: list[str] = field(default_factory=list, hash=False)
    """Texts that the teacher reads besides the prompt: the first of these that an answer has. "sibling": another
    answer of its group, with a reward of at least curriculum.correct_at; "feedback": the text that the reward function
    or the environment returned; "demonstration" or "answer": the row's. An answer without any gets no signal from the
    teacher. Empty: the teacher reads what the policy has read (docs/algorithms.md)."""
    distill_top_k: int = bounds(0, ge=0, le=2**16)
    """With advantage = "teacher", train on the divergence from the teacher at each token, over the teacher's k most
    likely tokens and one bucket of all others (GKD). 0: on its estimate from the sampled token."""
    distill_beta: float = bounds(0.5, ge=0, le=1)
    """Divergence of distill_top_k: forward KL, which covers all that the teacher may say (0); reverse KL (1); between
    them the generalized Jensen-Shannon divergence."""
    normalize: Literal["none", "group", "mean", "batch"] = "group"
    """Scale of the advantages: unchanged, divided by the group's standard deviation or its mean, or whitened over the
    step's tokens."""
    role_decay: float = bounds(0.95, ge=0, le=1)
    """Weight of the mean so far when a reward is added to it, with advantage = "role_mean"."""
    pass_k: int = bounds(0, ge=0, le=2**12)
    """k of advantage = "pass_at_k". 0: the whole group."""
    credit: Literal["outcome", "turn"] = "outcome"
    """What a token of a rollout with several turns is credited with: the rollout's reward ("outcome"), or what its turn
    and the later ones earned ("turn"), compared with the turns of the same number in its group."""
    gamma: float = bounds(1.0, ge=0, le=1)
    """Discount per token (advantage "return", "greedy", "optimal_token", "gae"), or per turn (the others with credit =
    "turn")."""
    gae_lambda: float = bounds(0.95, ge=0, le=1)
    """Lambda of GAE."""
    ratio: Level = "token"
    """Importance ratio: per token, or the geometric mean over a sequence (GSPO)."""
    clip: str = field(default="ppo", metadata={"named": CLIPS})
    """"ppo" clips the objective; "cispo" the weight of the log-prob; "sapo" fades the gradient out. "dppo_*" and
    "prob_diff" drop tokens whose probability moved too far. "gmpo" clips log-ratios; "vespo" weighs whole sequences.
    "clip_cov" and "kl_cov" hold back tokens that would lower the entropy most (docs/algorithms.md)."""
    loss: str = ""
    """Your own "package.module:function" of a token's log-prob and advantage, instead of clip (docs/algorithms.md).
    Empty: clip."""
    clip_low: float = bounds(0.2, ge=0, le=1)
    """Clip the ratio from below at 1 - clip_low. Of "gmpo": the log-ratio at -clip_low. Of "dppo_*" and "prob_diff":
    largest fall of a probability, or the largest KL."""
    clip_high: float = bounds(0.2, ge=0, le=1e6)
    """Clip the ratio from above at 1 + clip_high. Of "gmpo", "dppo_*" and "prob_diff": as clip_low, for a rise."""
    dual_clip: float = bounds(0.0, ge=0, le=1e6)
    """Upper limit of the ratio where the advantage is negative; of "dppo_*" for every advantage. 0: off. 3 is a common
    value, for "dppo_*" 20."""
    sapo_tau_positive: float = bounds(1.0, gt=0, le=1e6)
    """Sharpness of "sapo" where the advantage is positive."""
    sapo_tau_negative: float = bounds(1.05, gt=0, le=1e6)
    """Sharpness of "sapo" where the advantage is not positive."""
    vespo_k_positive: float = bounds(2.0, ge=0, le=1e3)
    """Power of a sequence's ratio in the weight of "vespo": how little unlikely answers with a good advantage count."""
    vespo_k_negative: float = bounds(3.0, ge=0, le=1e3)
    """The same for negative advantages."""
    vespo_lambda_positive: float = bounds(3.0, gt=0, le=1e3)
    """Decay of the weight of "vespo" with a sequence's ratio, where the advantage is not negative."""
    vespo_lambda_negative: float = bounds(2.0, gt=0, le=1e3)
    """The same for negative advantages."""
    cov_share: float = bounds(2e-4, gt=0, le=1)
    """Share of a microbatch's trained tokens that "clip_cov" and "kl_cov" select, at least one token."""
    cov_low: float = bounds(1.0, ge=0, le=1e6)
    """"clip_cov" selects among tokens whose covariance of log-prob and advantage is above this."""
    cov_high: float = bounds(5.0, gt=0, le=1e6)
    """"clip_cov" selects among tokens whose covariance is below this."""
    cov_kl_coef: float = bounds(1.0, ge=0, le=1e6)
    """Weight of |log ratio| on the tokens that "kl_cov" selects."""
    ratio_penalty: float = bounds(0.0, ge=0, le=1e6)
    """Weight of (log ratio)^2, which holds every token near the policy that the ratio compares with."""
    aggregation: Aggregation = "token_mean"
    """Loss of a step: mean over its tokens, mean over sequences of each sequence's token mean, or mean over sequences
    of each sequence's sum / length_constant."""
    length_constant: int = bounds(0, ge=0, le=10**9)
    """Divisor for "sequence_sum". 0: rollout.max_new_tokens."""
    kl_coef: float = bounds(0.0, ge=0, le=1e6)
    """Weight of the KL to the reference, a frozen copy of the policy at the start of RL. 0: no reference is loaded."""
    kl: Estimator = "k3"
    """Estimator of the KL to the reference."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the KL is added. "reward" subtracts each token's KL from its reward."""
    entropy_coef: float = bounds(0.0, ge=0, le=1e6)
    """Weight of the entropy bonus. With entropy_target: its value before the first step."""
    entropy_target: float = bounds(0.0, ge=0, le=100)
    """Mean entropy in nats to hold: entropy_coef grows by entropy_coef_delta per step at or below it, falls above it,
    and adds a bonus only after a step at or below it. 0: entropy_coef is constant."""
    entropy_coef_delta: float = bounds(0.005, gt=0, le=1e6)
    """Change of entropy_coef per step."""
    entropy_coef_min: float = bounds(0.0, ge=0, le=1e6)
    """Lower bound of entropy_coef."""
    entropy_coef_max: float = bounds(1.0, ge=0, le=1e6)
    """Upper bound of entropy_coef."""
    top_entropy_share: float = bounds(1.0, gt=0, le=1)
    """Share of a microbatch's trained tokens that learn: those with the highest entropy. 1: all; the paper has 0.2."""
    pair_loss: PairLoss = "none"
    """Learn from the best and the worst rollout of each group, by DPO or IPO against the reference, instead of
    advantages (online DPO). beta and label_smoothing belong to it."""
    minibatches: int = bounds(1, ge=1, le=2**14)
    """Number of optimizer updates that the groups of a step are split into."""
    epochs: int = bounds(1, ge=1, le=1000)
    """Number of passes over the groups of a step."""
    proximal: Literal["generator", "trainer"] = "generator"
    """Source of the log-probs in the denominator of the ratio: the generator at sampling time, or the trainer before
    the step's first update."""
    correction: Weight = "none"
    """Weight by the probability ratio of trainer to generator: truncated above ("*_tis"), or 0 outside its bounds
    ("*_mask"; IcePop is "token_mask")."""
    correction_low: float = bounds(0.5, ge=0, le=1e6)
    """Lower bound of "token_mask" and "sequence_mask"."""
    correction_high: float = bounds(2.0, gt=0, le=1e6)
    """Value at which "*_tis" truncates the weight; upper bound of "*_mask"."""
    rejection: Rejection = "none"
    """Drop tokens ("token"), or whole sequences by their geometric mean ("geometric"), whose probability ratio of
    trainer to generator is outside the bounds; or the tokens with the largest log-ratios ("second_moment"; M2PO)."""
    rejection_low: float = bounds(0.5, ge=0, le=1e6)
    """Lower bound of the ratio that is kept."""
    rejection_high: float = bounds(2.0, gt=0, le=1e6)
    """Upper bound of the ratio that is kept."""
    rejection_moment: float = bounds(0.04, gt=0, le=1e6)
    """"second_moment" drops tokens until the mean of (log ratio)^2 over a microbatch is below this."""
    routing_replay: bool = False
    """Mixtures of experts: trainers send each token to the experts that the generator sent it to. Their own routers
    only weight these experts (docs/algorithms.md)."""
    dynamic_sampling: bool = False
    """Replace groups whose rewards are all equal until the step is full (DAPO)."""
    max_refills: int = bounds(10, ge=1, le=1000)
    """Maximum rounds of replacements per step. After that the step continues with the groups it has, unless task.filter
    refuses one: then the run ends."""
    overlong_filter: bool = False
    """Exclude truncated rollouts from training."""
    overlong_buffer: int = bounds(0, ge=0, le=2**20)
    """Soft overlong punishment: number of tokens before rollout.max_new_tokens over which the penalty grows from 0 to
    1. 0: off."""
    length_reward: Literal["none", "kimi", "target"] = "none"
    """Reward for the number of sampled tokens, added to the task's: "kimi" prefers the shorter answers of a group,
    "target" those near length_target."""
    length_weight: float = bounds(0.5, gt=0, le=1e6)
    """Weight of the length reward, which is in [-0.5, 0.5] ("kimi"), or -1 at twice the target ("target"). With
    advantage = "per_reward" also the weight of overlong_buffer."""
    length_target: int = bounds(0, ge=0, le=2**20)
    """Tokens of an answer without a penalty by length_reward = "target"."""
    max_dead_steps: int = bounds(20, ge=0, le=10**9)
    """Stop after this many consecutive steps without any learning signal. 0: never stop."""
    beta: float = bounds(0.1, gt=0, le=1e6)
    """Scale of log-ratios in DPO, IPO, SimPO and KTO; weight of the odds ratio in ORPO (its lambda)."""
    label_smoothing: float = bounds(0.0, ge=0, le=0.5)
    """Fraction of preferences assumed to be mislabeled (conservative DPO; SimPO too)."""
    simpo_gamma: float = bounds(1.0, ge=0, le=1e6)
    """Margin of SimPO: by how much beta times the mean log-prob of a chosen answer should exceed the rejected one's."""
    desirable_weight: float = bounds(1.0, ge=0, le=1e6)
    """Weight of chosen answers in KTO."""
    undesirable_weight: float = bounds(1.0, ge=0, le=1e6)
    """Weight of rejected answers in KTO."""

    @property
    def kind(self) -> Kind:
        return kind_of(self.name)

    @property
    def needs_reference(self) -> bool:
        return self.compares_with_reference or (self.needs_teacher and self.teacher_weights == "reference")

    @property
    def compares_with_reference(self) -> bool:
        """Return True if the loss or the reward has the reference's log-probs."""
        return self.name in ("dpo", "ipo", "kto") or (self.kind == "rl" and (self.kl_coef > 0 or self.online_pairs))

    @property
    def own_advantage(self) -> bool:
        """Return True if `advantage` names a user's function."""
        return ":" in self.advantage

    @property
    def online_pairs(self) -> bool:
        """Return True if a step learns from the best and the worst rollout of each group."""
        return self.kind == "rl" and self.pair_loss != "none"

    @property
    def needs_critic(self) -> bool:
        return self.kind == "rl" and advantage_of(self.advantage).needs == "value"

    @property
    def needs_teacher(self) -> bool:
        return self.kind == "rl" and (advantage_of(self.advantage).needs == "teacher" or self.teacher_coef > 0)

    @property
    def loads_teacher(self) -> bool:
        """Return True if the teacher's weights are not the policy's."""
        return self.needs_teacher and self.teacher_weights == "folder"

    @property
    def averages(self) -> bool:
        """Return True if the trainers keep a moving average of the policy."""
        return self.needs_teacher and self.teacher_weights == "average"

    @property
    def updates(self) -> int:
        """Optimizer updates per step."""
        return self.minibatches * self.epochs


@dataclass(frozen=True, slots=True, kw_only=True)
class RoleSection:
    """A model besides the policy, on its own mesh or in the trainer's processes."""

    data_parallel_shard_degree: int = bounds(1, ge=1, le=MOST_RANKS)
    """Number of ranks that its weights are sharded over (FSDP2), on its own mesh."""
    tensor_parallel_degree: int = bounds(1, ge=1, le=MOST_RANKS)
    """Tensor-parallel degree on its own mesh."""
    context_parallel_degree: int = bounds(1, ge=1, le=MOST_RANKS)
    """Number of ranks that each packed row is cut over, on its own mesh."""

    @property
    def parallelism(self) -> ParallelismSection:
        return ParallelismSection(**{key.name: getattr(self, key.name) for key in fields(RoleSection)})


@dataclass(frozen=True, slots=True, kw_only=True)
class ReferenceSection(RoleSection):
    mesh: Literal["trainer", "own", "none"] = "trainer"
    """"trainer" swaps the frozen weights into the trainer's model; "own" spawns processes for them. Loaded only if the
    algorithm needs a reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CriticSection(RoleSection):
    lr: float = bounds(0.0, ge=0, le=10)
    """Peak learning rate of the critic. ppo requires a value above 0."""
    warmup_steps: int = bounds(0, ge=0, le=10**9)
    """Steps of linear warm-up of the critic's rate."""
    hf_assets_path: str = ""
    """Hugging Face folder to start from, such as a reward model. Empty: the policy at the start of RL, with a new
    head."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RewardModelSection(RoleSection):
    hf_assets_path: str = ""
    """Folder that a reward_model run exported (its hf/). Required by task.reward = "model"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TeacherSection(RoleSection):
    mesh: Literal["trainer", "own"] = "own"
    """"own" spawns processes for the teacher; "trainer" swaps its weights into the trainer's model, which requires the
    policy's shape."""
    hf_assets_path: str = ""
    """Hugging Face folder of the teacher, with the policy's tokenizer. Required by algorithm.teacher_weights =
    "folder", as opd has it."""
    template: str = "{prompt}\n\nFor reference:\n\n{context}\n\nNow answer the original question."
    """The prompt that the teacher reads with algorithm.teacher_context: the last user's message, with {prompt} and
    {context} in it. Or "package.module:function", which gets messages and context, and returns messages."""
