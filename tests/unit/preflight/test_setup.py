"""What a run consists of, resolved from its config."""

from pathlib import Path

from titan_rl.config.sections import ColdStartSection, Config, DebugSection
from titan_rl.preflight.plan import prepare


def test_the_cold_start_is_measured_on_a_random_sample_of_the_training_problems(tmp_path: Path) -> None:
    def practice(seed: int) -> tuple[list[str], list[str]]:
        cold_start = ColdStartSection(steps=10, stop_at=0.6)
        config = Config(cold_start=cold_start, debug=DebugSection(seed=seed))
        setup = prepare("test", config, device="cpu", scratch=tmp_path)
        return [p.text for p in setup.practice.prompts], [str(example.prompt) for example in setup.task.train]

    chosen, train = practice(seed=0)
    assert len(set(chosen)) == 256
    assert set(chosen) <= set(train)
    assert len({text[:2] for text in chosen}) > 80  # first summands: the first 256 sums in order have only three
    assert chosen == practice(seed=0)[0]
    assert chosen != practice(seed=1)[0]
