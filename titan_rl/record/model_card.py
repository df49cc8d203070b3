"""README.md of an exported model: its base, data, algorithm and scores, from the records of its run.

Model hubs show it. Names of files and folders appear without their paths, and neither arguments of your code, prompts
nor addresses appear at all.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from titan_rl.config.sections import Config
from titan_rl.record.lines import is_number
from titan_rl.record.metric_docs import EVAL_SCORE
from titan_rl.record.run_names import METRICS
from titan_rl.record.summary import known_lines

CARD = "README.md"
COLD_START = "cold_start/"
"""Begins the name of a step of the cold start, as in cold_start/3."""
NOT_AUDITED = "Not audited: `titan_rl audit` compares the run's ledger, samples and checkpoints."
ON_A_HUB = re.compile(r"\w[\w.-]*/\w[\w.-]*")
SUPERVISED, TRAINED = ("cold_start",), ("rl", "fit", "eval")
Lines = Sequence[Mapping[str, Any]]


def model_card(
    folder: Path,
    config: Config,
    versions: Mapping[str, str],
    *,
    step: str = "",
    scores: Mapping[str, Any] | None = None,
    verdict: str = NOT_AUDITED,
    head: str = "lm",
    own_loop: bool = False,
    dtype: str = "",
) -> str:
    """Return the card of the weights that a step of the run in `folder` made, by default the last one. `scores` of
    these weights, if no line of the run's metrics has them yet; their `dtype`, by default the one of training."""
    lines = list(known_lines(folder / METRICS)) if (folder / METRICS).exists() else []
    trained = [line["step"] for line in lines if line["kind"] in ("rl", "fit")]
    step = step or str(trained[-1] if trained else 0)
    paragraphs = [
        _front_matter(config, head),
        f"# {_plain(folder.resolve().name)}",
        f"{_base(config)}, trained by titan_rl with `{_plain(config.algorithm.name)}`.",
        "The records of the run made this page. No checksum covers it: edit it as you like.",
        "## Training\n\n" + _table(("", ""), _training(config, step, lines, own_loop)),
        "## Scores\n\n" + _scores(config, step, lines, scores),
        f"## Audit\n\n{verdict}",
        "## Versions\n\n" + (", ".join(_plain(" ".join(each)) for each in versions.items()) or "Not recorded."),
        "## Use\n\n" + (_use(config, dtype) if head == "lm" else SCORING),
    ]
    return "\n\n".join(paragraphs) + "\n"


def _front_matter(config: Config, head: str) -> str:
    """Return what hubs read. JSON's texts are YAML's too."""
    hub_name = config.model.hub_name
    data_sets = sorted({path.split(":")[1] for path in _paths(config) if path.startswith("hf:")})
    found: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": "text-generation" if head == "lm" else "text-classification",
        "base_model": hub_name if ON_A_HUB.fullmatch(hub_name) else None,
        "datasets": [name for name in data_sets if ON_A_HUB.fullmatch(name)],
        "tags": ["titan_rl", config.algorithm.kind, _plain(config.algorithm.name)],
    }
    return "\n".join(["---", *(f"{key}: {json.dumps(value)}" for key, value in found.items() if value), "---"])


def _base(config: Config) -> str:
    model = config.model
    if ON_A_HUB.fullmatch(model.hub_name):
        return f"`{model.hub_name}`"
    name = _public(model.hub_name or model.hf_assets_path)
    return f"`{name}`" if name else f"A model of the family `{model.name}` from random weights"


def _training(config: Config, step: str, lines: Lines, own_loop: bool) -> Iterator[tuple[str, str]]:
    task, rollout, algorithm = config.task, config.rollout, config.algorithm
    yield "base model", _base(config)
    made_by = [f"`{_plain(algorithm.name)}`"]
    for key in ("advantage", "loss"):
        value = getattr(algorithm, key)
        if ":" in value:
            made_by.append(f"{key} `{_public(value)}`")
    if own_loop:
        made_by.append("a loop of its author's")
    yield "algorithm", ", with ".join(made_by)
    data = _paths(config)
    if not data:
        data = [f"{task.name}: {name}" for name in task.datasets] or [task.name]
    yield "data", ", ".join(f"`{_public(each)}`" for each in data)
    if config.rollout_code:
        yield "environment or agent", f"`{_public(config.rollout_code)}`"
    if algorithm.kind == "rl":
        rewards = list(task.rewards) or [task.reward]
        yield "reward", ", ".join(f"`{_public(each)}`" for each in rewards)
        yield "batch", f"{rollout.groups_per_step} prompts of {rollout.group_size} samples"
        yield "sampling", f"at most {rollout.max_new_tokens} tokens a turn, temperature {rollout.temperature:g}"
    if step.startswith(COLD_START):
        yield "steps", f"{step.removeprefix(COLD_START)} of the cold start"
    else:
        cold = max((line["step"] for line in lines if line["kind"] == "cold_start"), default=0)
        before = f", after {cold} of a cold start" if cold else ""
        yield "steps", f"{step} of {config.training.steps}{before}"
    yield "learning rate", f"{config.optimizer.lr:g}"
    if config.lora.on:
        yield "adapters", f"LoRA of rank {config.lora.rank}"
    yield "dtype", config.training.dtype
    yield "seed", str(config.debug.seed)


def _scores(config: Config, step: str, lines: Lines, scores: Mapping[str, Any] | None) -> str:
    """Return a table of the scores of these weights, and of the weights before them."""
    cold, n = step.startswith(COLD_START), int(step.removeprefix(COLD_START))
    this = (SUPERVISED if cold else TRAINED, n)
    points = {(SUPERVISED, 0): "before the cold start"} | ({} if cold else {(TRAINED, 0): "before training"})
    rows = list[Sequence[str]]()
    for (kinds, at), name in (points | {this: f"**step {step}**"}).items():
        found = scores if (kinds, at) == this else None
        for line in lines if found is None else ():
            if line["kind"] in kinds and line["step"] == at and any(_measured(line)):
                found = line
        rows += [(name, *row) for row in _measured(found or {})]
    if not rows or not rows[-1][0].startswith("**"):
        return f"The run did not evaluate the weights of step {step}."
    note = f"Held-out problems: {config.eval.size}, or all if there are fewer. An answer without a reward counts as 0."
    return _table(("weights", "measure", "score", "95% interval"), rows) + f"\n\n{note}"


def _measured(line: Mapping[str, Any]) -> Iterator[Sequence[str]]:
    """Yield measure, score and interval of each score of a line of metrics.jsonl."""
    heads = {key.removesuffix("/low"): key.removesuffix("/low") for key in line if key.endswith("/low")}
    heads["eval"] = EVAL_SCORE
    for head, key in heads.items():
        score, low, high = line.get(key), line.get(f"{head}/low"), line.get(f"{head}/high")
        if not is_number(score):
            continue
        measure = "held-out problems" if key == EVAL_SCORE else _plain(key.removeprefix("eval/"))
        interval = f"{low:.3f} to {high:.3f}" if is_number(low) and is_number(high) else "not measured"
        yield measure, f"{score:.3f}", interval


def _use(config: Config, dtype: str) -> str:
    """Return how transformers and vLLM load the folder and answer a prompt as in training."""
    chat = config.task.template == "chat"
    more = "\n\nTraining put a system prompt before each prompt." if chat and config.task.system_prompt else ""
    return (CHAT if chat else PLAIN).replace("DTYPE", dtype or config.training.dtype) + more


def _paths(config: Config) -> list[str]:
    sources = [str(table.get("path", "")) for table in config.task.sources.values()]
    return [path for path in sources or [config.task.path] if path]


def _public(name: str) -> str:
    """Return the name of a function, a data set of a hub, or a file without its folders."""
    return _plain(name if name.startswith("hf:") else PurePath(name).name)


def _plain(text: str) -> str:
    """Return a text that cannot end its place in Markdown."""
    return re.sub(r"[^\w.:/@+ -]", "_", text)


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


LOADED = """```python
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "."  # the folder of this file
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder)
"""
PLAIN = f"""{LOADED}prompt = tokenizer("PROMPT", return_tensors="pt")
answer = model.generate(**prompt)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```

```python
from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM's processes import this file
    llm = LLM(".", dtype="DTYPE")
    (answer,) = llm.generate("PROMPT", SamplingParams(temperature=0, max_tokens=256))
    print(answer.outputs[0].text)
```"""
CHAT = f"""{LOADED}messages = [{{"role": "user", "content": "PROMPT"}}]
prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
answer = model.generate(**prompt)[0, prompt["input_ids"].shape[1] :]
print(tokenizer.decode(answer, skip_special_tokens=True))
```

```python
from vllm import LLM, SamplingParams

if __name__ == "__main__":  # vLLM's processes import this file
    llm = LLM(".", dtype="DTYPE")
    messages = [{{"role": "user", "content": "PROMPT"}}]
    (answer,) = llm.chat(messages, SamplingParams(temperature=0, max_tokens=256))
    print(answer.outputs[0].text)
```"""
SCORING = "transformers' `AutoModelForSequenceClassification` scores the prompt, the answer and EOS together."
