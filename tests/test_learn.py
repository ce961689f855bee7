"""The exercises: every solution passes, every starter fails as promised, and nothing of a learner stays behind."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fast.compact import plan_compaction
from serve.cli import main
from serve.learn import _lessons
from tests.lessons.lesson import Lesson, WrongFile
from tests.museum.exhibit import HARMLESS

LESSONS = list(_lessons().values())
DAYS = Path(__file__).resolve().parent.parent / "docs" / "days"


def name_of(lesson: Lesson) -> str:
    return f"day{lesson.day:02d}"


@pytest.fixture(autouse=True)
def one_thread():
    torch.set_num_threads(1)


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lesson", LESSONS, ids=name_of)
def test_the_solution_passes_and_the_starter_fails_as_promised(lesson: Lesson):
    right = lesson.check(lesson.solution())
    assert right.by == HARMLESS, right.message
    wrong = lesson.check(lesson.starter())
    assert wrong.by == lesson.fails, wrong.message
    assert wrong.message


def test_every_exercise_belongs_to_a_page_and_tells_its_hint():
    pages = {int(page.stem[3:5]) for page in DAYS.glob("day*.md")}
    assert {lesson.day for lesson in LESSONS} <= pages
    assert len({lesson.day for lesson in LESSONS}) == len(LESSONS)
    assert all(lesson.hint in lesson.starter().replace("\n", " ") for lesson in LESSONS)


def test_a_learner_starts_fails_and_passes_from_the_command_line(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["learn"]) == 0
    assert "17  compaction" in capsys.readouterr().out
    assert main(["learn", "17"]) == 0
    assert Path("learn/day17.py").is_file()
    assert main(["learn", "17", "--check"]) == 1
    assert "gate compact.moves_minimal: " in capsys.readouterr().out
    assert main(["learn", "17", "--solution"]) == 0
    Path("learn/day17.py").write_text(capsys.readouterr().out)
    assert main(["learn", "17", "--check"]) == 0
    assert "it holds" in capsys.readouterr().out
    assert main(["learn", "17"]) == 0  # a file that is there is left as it is
    assert "already" in capsys.readouterr().out


def test_a_learners_helpers_and_imports_can_be_used_and_are_gone_afterwards():
    lesson = next(lesson for lesson in LESSONS if lesson.day == 17)
    text = "import itertools\ndef pairs(a, b):\n    return zip(a, b)\n" + lesson.solution().replace(
        "zip(strays(rows), holes(rows), strict=True)", "itertools.chain(pairs(strays(rows), holes(rows)))"
    )
    assert lesson.check(text).by == HARMLESS
    assert "pairs" not in plan_compaction.__globals__


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "says"),
    [("def f(:", "SyntaxError"), ("x = 1", "defines no function plan_compaction"), ("1 / 0", "ZeroDivisionError")],
)
def test_a_file_that_cannot_take_the_functions_place_is_told_so(text: str, says: str):
    lesson = next(lesson for lesson in LESSONS if lesson.day == 17)
    code = plan_compaction.__code__
    with pytest.raises(WrongFile, match=says):
        lesson.check(text)
    assert plan_compaction.__code__ is code


def test_a_day_without_an_exercise_and_a_file_that_is_missing_are_told(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["learn", "99"]) == 2
    assert "day: 99 has no exercise" in capsys.readouterr().err
    assert main(["learn", "10", "--check"]) == 2
    assert "learn/day10.py is missing" in capsys.readouterr().err
