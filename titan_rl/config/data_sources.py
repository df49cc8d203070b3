"""Where rows come from and how they are read."""

from dataclasses import dataclass

from titan_rl.config.algorithm_sections import TaskSection


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSource:
    """Files whose rows are read in one way."""

    path: str
    path_key: str  # of the config, that names the files
    prompt_key: str
    answer_key: str
    chosen_key: str
    rejected_key: str
    skip_bad_rows: bool
    demonstration_key: str = ""
    name: str = ""  # of its table; empty: the keys are those of [task]

    @property
    def section(self) -> str:
        return f"task.sources.{self.name}" if self.name else "task"


def source_of(task: TaskSection, path: str, path_key: str) -> DataSource:
    """Return files that are read with the keys of [task]."""
    return DataSource(
        path=path,
        path_key=path_key,
        prompt_key=task.prompt_key,
        answer_key=task.answer_key,
        chosen_key=task.chosen_key,
        rejected_key=task.rejected_key,
        skip_bad_rows=task.skip_bad_rows,
        demonstration_key=task.demonstration_key,
    )
