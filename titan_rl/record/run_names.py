"""Names of all files and folders that a run writes to its folder, and may move away or remove."""

from titan_rl.config.toml import CONFIG

LEDGER = "ledger.jsonl"
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
EVALUATIONS = "evaluations.jsonl"
ANSWERS = "evaluation_answers.jsonl"
FAULTS = "faults.jsonl"
SUMMARY = "summary.json"
SEAT_MODELS = "seat_models.json"
TIMELINE = "timeline.json"
FILES = (
    *(CONFIG, LEDGER, METRICS, ROLLOUTS, EVALUATIONS, ANSWERS, FAULTS, SUMMARY, TIMELINE),
    *(SEAT_MODELS, "control.json", "trackers.json", ".lock", ".id"),
)
FOLDERS = (
    *("hf", "model", "checkpoint", "tb", "profiling", "trackers", "batches", "replays"),
    *("best", "start", "hosts", "policies", "tinker"),
)
