import json
import os
import re
from pathlib import Path

import datasets
import pytest

from yardstick.corpora.arithmetic import task_problems, word_problems
from yardstick.corpora.texts import load_text
from yardstick.errors import YardstickError
from yardstick.files import sha256_text
from yardstick.gsm8k.answers import canonical_number, extract_answer
from yardstick.gsm8k.problems import Problem, load_problems

TRAIN = Path(os.environ.get("GSM8K_TRAIN", ""))  # train.jsonl of GSM8K, as published
STEP = re.compile(r"(\d+) ([-+*/]) (\d+) = (\d+)")


def test_worked_solutions_are_right_and_use_the_numbers_of_the_question():
    problems = task_problems(600, seed=4)
    for index, problem in enumerate(problems):
        steps = STEP.findall(problem.solution)
        assert len(steps) == 1 + index % 2
        known = re.findall(r"\d+", problem.question)
        for left, operator, right, result in steps:
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__, "/": int.__truediv__}[operator]
            assert value(int(left), int(right)) == int(result)
            assert left in known and right in known
            known.append(result)
        assert int(steps[-1][3]) == problem.answer > 0
        used = {number for left, _, right, _ in steps for number in (left, right)}
        assert used >= set(re.findall(r"\d+", problem.question))
        assert problem.text.endswith(f"\n#### {problem.answer}")


def test_problems_differ_and_are_a_function_of_the_seed():
    problems = task_problems(400, seed=4)
    assert len({problem.question for problem in problems}) == 400
    assert task_problems(400, seed=4) == problems != task_problems(400, seed=5)
    assert task_problems(31, seed=4) == problems[:31]
    assert {operator for problem in problems for _, operator, _, _ in STEP.findall(problem.solution)} == set("+-*/")
    assert {len(str(problem.answer)) for problem in problems} == {1, 2}


def test_more_problems_than_there_are_is_an_error(monkeypatch):
    one = task_problems(1, seed=0)[0]
    monkeypatch.setattr("yardstick.corpora.arithmetic.ONE_STEP", (lambda rng: one,))
    with pytest.raises(YardstickError, match="there are not 3 different ones"):
        task_problems(3, seed=0)


def test_the_texts_of_word_problems_stay_as_they_are_pinned():
    text = "\n\n".join(problem.text for problem in word_problems(50, seed=7))
    assert sha256_text(text) == "84e20566d8fe91e21b59df2c8183e8703b49e605882185720a726178773ab95b"


def test_synthetic_problems():
    problems = load_problems({"kind": "synthetic", "problems": 12, "seed": 3})
    assert [problem.question for problem in problems] == [problem.question for problem in task_problems(12, 3)]
    for problem in problems:
        assert problem.solution.splitlines()[-1] == f"#### {problem.answer}"
        assert problem.steps == problem.solution.removesuffix(f"\n#### {problem.answer}")
        assert canonical_number(problem.answer) == problem.answer


ROWS = [
    {"question": "Half of 48?", "answer": "It is 48/2 = <<48/2=24>>24.\n#### 24"},
    {"question": "Lost\u2028twice?", "answer": "5 - 8 = <<5-8=-3>>-3 < 0\n#### -3"},
    {"question": "Many?", "answer": "1000 + 80\n#### 1,080"},
]


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return {"kind": "file", "path": str(path)}


def test_a_file_of_gsm8k(tmp_path):
    source = write_lines(tmp_path / "t.jsonl", ROWS)
    problems = load_problems(source)
    assert problems[0] == Problem("Half of 48?", "It is 48/2 = 24.\n#### 24", "24")
    assert problems[1] == Problem("Lost\u2028twice?", "5 - 8 = -3 < 0\n#### -3", "-3")
    assert problems[2].answer == "1080" and problems[2].solution.endswith("#### 1,080")
    assert load_problems(source | {"skip": 1}) == problems[1:]
    assert load_problems(source | {"skip": 1, "take": 1}) == problems[1:2]
    data = (tmp_path / "t.jsonl").read_bytes()
    (tmp_path / "t.jsonl").write_bytes(b"\xef\xbb\xbf" + data.replace(b"\n", b"\r\n\r\n"))
    assert load_problems(source) == problems


def test_signs_of_gold_answers(tmp_path):
    rows = [{"question": "x", "answer": f"so\n#### {gold}"} for gold in ("+5", "- 10", "-3")]
    assert [problem.answer for problem in load_problems(write_lines(tmp_path / "t", rows))] == ["5", "-10", "-3"]


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        (b'{"question": "x", "answer"', "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'["question", "answer"]', "is not an object with question and answer"),
        (b'{"answer": "#### 3"}', "has no question"),
        (b'{"question": " ", "answer": "#### 3"}', "has no question"),
        (b'{"question": 3, "answer": "#### 3"}', "has no question"),
        (b'{"question": "x", "answer": null}', "has no answer"),
        (b'{"question": "x", "answer": "It is 3."}', "its answer does not end in #### and a number"),
        (b'{"question": "x", "answer": "#### three"}', "its answer does not end in #### and a number"),
        (b'{"question": "x", "answer": "#### 1/2"}', "its answer does not end in #### and a number"),
        (b'{"question": "x", "answer": "#### 2\\n#### 3"}', "its first #### gives another number than its last"),
        (b'{"question": "\\ud83d", "answer": "#### 3"}', "its question holds half of a surrogate pair"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, fault):
    source = write_lines(tmp_path / "t.jsonl", ROWS[:2])
    with (tmp_path / "t.jsonl").open("ab") as file:
        file.write(b"\n" + line + b"\n")
    with pytest.raises(YardstickError, match=f"t.jsonl line 4: {fault}"):
        load_problems(source)


def test_a_file_that_holds_too_little_is_named(tmp_path):
    source = write_lines(tmp_path / "t.jsonl", ROWS)
    with pytest.raises(YardstickError, match="t.jsonl: has 3 rows, skip 2 and take 2 need 4"):
        load_problems(source | {"skip": 2, "take": 2})
    with pytest.raises(YardstickError, match="t.jsonl: has 3 rows, skip 3 and take 1 need 4"):
        load_problems(source | {"skip": 3})
    (tmp_path / "t.jsonl").write_bytes(b"\n \n")
    with pytest.raises(YardstickError, match="t.jsonl: is empty"):
        load_problems(source)
    (tmp_path / "t.jsonl").write_bytes(b'{"question": "\xff"}\n')
    with pytest.raises(YardstickError, match="t.jsonl: not UTF-8"):
        load_problems(source)
    with pytest.raises(YardstickError, match="no-such.jsonl: no such file"):
        load_problems({"kind": "file", "path": "no-such.jsonl"})


HUB = {"kind": "hub", "dataset": "owner/data", "config": "main", "revision": "a" * 40, "split": "test"}


def test_a_dataset_of_the_hub(tmp_path, monkeypatch):
    asked = []

    def load_dataset(*names, **settings):
        asked.append((names, settings))
        return datasets.Dataset.from_list(ROWS)

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    problems = load_problems(HUB | {"skip": 1, "take": 2})
    assert problems == load_problems(write_lines(tmp_path / "t.jsonl", ROWS))[1:]
    assert asked == [(("owner/data", "main"), {"split": "test", "revision": "a" * 40})]
    with pytest.raises(
        YardstickError, match="dataset owner/data@aaaaaaaaaaaa test: has 3 rows, skip 0 and take 4 need"
    ):
        load_problems(HUB | {"take": 4})
    text = load_text("math", HUB | {"fields": ["question", "answer"], "skip": 1, "take": 9, "separator": "|"}, tmp_path)
    assert text.text == "|".join(f"{row['question']}\n{row['answer']}" for row in ROWS[1:])
    assert text.origin == "owner/data@aaaaaaaaaaaa: test"


def test_a_bad_row_or_dataset_of_the_hub_is_named(monkeypatch):
    rows = [*ROWS, {"question": "x", "answer": "none"}]
    monkeypatch.setattr(datasets, "load_dataset", lambda *names, **settings: datasets.Dataset.from_list(rows))
    assert len(load_problems(HUB | {"take": 3})) == 3
    with pytest.raises(YardstickError, match="owner/data@aaaaaaaaaaaa test row 3: its answer does not end in ####"):
        load_problems(HUB)

    def fail(*names, **settings):
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr(datasets, "load_dataset", fail)
    with pytest.raises(YardstickError, match=r"owner/data@aaaaaaaaaaaa: cannot be loaded \(no route\)"):
        load_problems(HUB)


@pytest.mark.skipif(not TRAIN.is_file(), reason="GSM8K is not on this machine")
def test_every_problem_of_gsm8k_loads():
    problems = load_problems({"kind": "file", "path": str(TRAIN)})
    assert len(problems) == 7473
    assert [problem.answer for problem in problems if problem.answer.startswith("-")] == ["-7", "-47", "-12"]
    raw = [json.loads(line)["answer"] for line in TRAIN.read_text().split("\n") if line]
    assert [problem.answer for problem in problems] == [
        answer.split("#### ")[1].strip().replace(",", "") for answer in raw
    ]
    assert all("<<" not in problem.solution for problem in problems)
    assert all(extract_answer(problem.solution, "hash") == problem.answer for problem in problems)
