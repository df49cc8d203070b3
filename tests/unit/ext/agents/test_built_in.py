"""The rules of calc and hunt, and what their demonstrations teach."""

from pathlib import Path

from support.played import playing, prompt_of
from titan_rl.config.sections import TaskSection
from titan_rl.ext.agents import calc, hunt
from titan_rl.tasks.task import load_task
from titan_rl.text.tokenizer import TextTokenizer


def test_calc_rewards_the_answer_only_and_answers_calls(tmp_path: Path) -> None:
    row = {"a": 347, "b": 862}
    said = {
        0: ["?347*862", "299114"],
        1: ["299114"],
        2: ["299115"],
        3: ["?347*862", "299114="],  # the result is not the answer with its sign
        4: ["?1000*2", "?a*2", "?3"],
        5: ["?347*862", "?347*862", "?347*862"],
    }
    with playing("calc", tmp_path) as played:
        prompts = [prompt_of(calc.prompt(row), row)] * len(said)
        outcomes = played.play(prompts, lambda id, turn: said[id][turn] if turn < len(said[id]) else "0")
    assert [outcome.reward for outcome in outcomes] == [1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert [message["content"] for message in outcomes[0].messages] == ["?347*862", "299114=", "299114"]
    assert [message["content"] for message in outcomes[4].messages[1:6:2]] == ["x=", "x=", "x="]
    assert outcomes[4].metrics == {"calls": 3.0, "malformed": 3.0}


def test_a_cut_off_answer_of_calc_is_no_answer(tmp_path: Path) -> None:
    row = {"a": 100, "b": 100}
    with playing("calc", tmp_path) as played:
        (outcome,) = played.play([prompt_of(calc.prompt(row), row)], lambda id, turn: [*map(int, [8, 7, 8])])
    assert outcome.reward == 0.0


def test_calc_has_all_products_and_most_demonstrations_call_nothing() -> None:
    assert (calc.row(0), calc.row(calc.COUNT - 1)) == ({"a": 100, "b": 100}, {"a": 999, "b": 999})
    rows = [calc.row(number) for number in range(0, calc.COUNT, 405)]
    demonstrations = [calc.demonstration(row, seed) for seed, row in enumerate(rows)]
    assert 0.27 < sum(len(turns) == 2 for turns in demonstrations) / len(rows) < 0.33
    assert max(sum(len(said) + len(read) + 1 for said, read in turns) for turns in demonstrations) <= calc.LONGEST
    both = [calc.demonstration({"a": 100, "b": 100}, seed) for seed in range(20)]
    assert [("?100*100", "010000="), ("010000", "")] in both
    assert [("010000", "")] in both


def test_hunt_ends_at_the_treasure_or_after_eight_moves(tmp_path: Path) -> None:
    row = {"x": 0, "y": 0, "treasure_x": 2, "treasure_y": 1}
    assert hunt.prompt(row) == "dr"
    moves = {0: "rrd", 1: "rrrrrrrr", 2: "lllludrrr", 3: "xxxxxxxxx"}
    with playing("hunt", tmp_path) as played:
        outcomes = played.play([prompt_of("dr", row)] * 4, lambda id, turn: moves[id][turn])
    assert [outcome.reward for outcome in outcomes] == [1.0, 0.0, 1.0, 0.0]
    assert [len(contexts) for contexts in played.contexts.values()][:2] == [3, 8]
    assert [message["content"] for message in outcomes[0].messages] == ["r", "dr", "r", "d.", "d"]


def test_hunt_demonstrates_random_moves_by_its_own_rules() -> None:
    rows = [hunt.row(number) for number in range(hunt.COUNT)]
    assert len({tuple(row.values()) for row in rows}) == 600
    for seed, row in enumerate(rows):
        board = hunt.Board(row)
        assert not board.over
        turns = hunt.demonstration(row, seed)
        assert sum(len(said) + len(read) + 1 for said, read in turns) <= hunt.LONGEST
        for move, hint in turns:
            board.move(move)
            assert hint == ("" if board.over else board.hint())
        assert board.over


def test_demonstrations_of_a_game_differ_each_time_but_not_between_runs(text: TextTokenizer) -> None:
    task = load_task(TaskSection(name="hunt"), seed=3, eval_size=20)
    assert (len(task.train), len(task.heldout)) == (580, 20)
    assert not {str(example.row) for example in task.train} & {str(example.row) for example in task.heldout}
    first, second, again = (task.prompt(task.train[0], id, text).demonstration for id in (1, 2, 1))
    assert first == again
    assert first != second
