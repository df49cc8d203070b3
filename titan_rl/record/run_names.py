"""Names of all files and folders that a run writes to its folder, and may move away or remove."""

FILES = (
    *("config.toml", "control.json", "faults.jsonl", "ledger.jsonl", "metrics.jsonl", "rollouts.jsonl"),
    *("evaluations.jsonl", "evaluation_answers.jsonl", "summary.json", "timeline.json", "trackers.json"),
    *(".lock", ".id"),
)
FOLDERS = (
    *("hf", "model", "checkpoint", "tb", "profiling", "trackers", "batches", "replays"),
    *("best", "start", "hosts", "policies", "tinker"),
)
