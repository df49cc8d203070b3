"""Small runs, written without engines, and served as a live page."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from titan_rl.config.sections import Config, TrainingSection
from titan_rl.record.run_log import RunLog
from titan_rl.tools.view.__main__ import state_of
from titan_rl.tools.view.live import LiveServer
from titan_rl.tools.view.page import page_data
from titan_rl.wire.types import Branch, Completion, Group, Prompt, Rollout, Turn

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)> <!-- \u2028 \ud800 &lt;"


def group(prompt_id: int, text: str, *, constant: bool = False) -> Group:
    def rollout(reward: float) -> Rollout:
        completion = Completion(tokens=[8, 9, 2], logprobs=[-0.25, -1.5, -0.5], versions=[0, 1, 1], finish="stop")
        turn = Turn([1, 8, 17, 9, 20], completion)
        return Rollout([Branch([turn])], text=text, reward=reward, advantage=reward - 0.5, messages=[])

    return Group(Prompt(prompt_id, "1+2=", [1, 8, 17, 9, 20], "3"), [rollout(1.0), rollout(float(constant))])


def write_run(folder: Path, steps: int = 4, *, text: str = "12", groups: int = 2, constant: bool = False) -> Path:
    with RunLog(folder, "tiny", Config(training=TrainingSection(steps=steps))) as log:
        log.startup(0, 3.5)
        for step in range(1, steps + 1):
            metrics = {"reward/mean": step / steps, "time/step": 1.0, "time/train": 0.4, "entropy": float("nan")}
            if constant:
                metrics |= {"reward/mean": 1.0, "reward/std": 0.0, "frac_reward_zero_std": 1.0}
            log.step(step, metrics, {}, [group(step * groups + i, text, constant=constant) for i in range(groups)])
        log.eval(steps, {"eval/score": 0.5, "eval/low": 0.4, "eval/high": 0.6}, 1.0)
    return folder


@contextmanager
def serving(run: Path) -> Iterator[LiveServer]:
    read = partial(page_data, [run], sample_bytes=10**5, live_seconds=1.0)
    with LiveServer(0, read, partial(state_of, [run])) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield server
        server.shutdown()
