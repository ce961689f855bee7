"""`nanoserve learn`: the exercises of the course, one a day, checked by running the engine with the learner's function.

The exercises stand in `tests/lessons` of a checkout, beside the workloads that judge them, and are imported from there
by name: nothing of a server needs them. A wrong answer fails as the engine would, with the gate's own words.

Proof: tests/test_learn.py. Story: gates.
"""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from serve.options import UsageError, integer, program

ROOT = Path(__file__).resolve().parent.parent


def add_learn_arguments(commands: argparse._SubParsersAction[Any]) -> None:
    """Add the command `learn [DAY] [--check | --solution]`."""
    learn = commands.add_parser("learn", help="the exercises of the course, one a day", allow_abbrev=False)
    learn.add_argument("day", type=integer(1), nargs="?", metavar="DAY", help="without it: the list of exercises")
    learn.add_argument("--file", type=Path, metavar="FILE", help="default: learn/dayDD.py, made when missing")
    action = learn.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="run the day's checks against your file")
    action.add_argument("--solution", action="store_true", help="show the engine's own function")


def learn(args: argparse.Namespace) -> int:
    """Run `learn`: 1 when a check fails.

    Raises:
        UsageError: there is no such exercise, no checkout, or no file to check.
    """
    lessons = _lessons()
    if args.day is None:
        for lesson in lessons.values():
            print(f"{lesson.day:>3}  {lesson.subject:<22}{lesson.path} {lesson.name}")
        return 0
    if args.day not in lessons:
        raise UsageError(f"day: {args.day} has no exercise; there are {min(lessons)}..{max(lessons)}")
    lesson = lessons[args.day]
    file = args.file or Path("learn") / f"day{args.day:02d}.py"
    if args.solution:
        print(f"# {lesson.path} {lesson.name}\n{lesson.solution()}")
        return 0
    return _check(lesson, file) if args.check else _start(lesson, file)


def _lessons() -> dict[int, Any]:
    if not (ROOT / "tests" / "lessons").is_dir():
        raise UsageError("the exercises are in a checkout of the repository, this is an installed copy")
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    try:
        rooms = [importlib.import_module(f"tests.lessons.{room}") for room in ("whiteboard", "path", "edge")]
    except ModuleNotFoundError as missing:
        raise UsageError(f"needs the test tools ({missing.name}); `make venv` installs them") from None
    return {lesson.day: lesson for room in rooms for lesson in room.LESSONS}


def _start(lesson: Any, file: Path) -> int:
    fresh = not file.exists()
    if fresh:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lesson.starter(program()), "utf-8")
    print(f"Day {lesson.day}, {lesson.subject}. {lesson.task}")
    print(f"Hint: {lesson.hint}")
    print(f"{'Your file is' if fresh else 'Your file is already'} {file}. When it is done:")
    print(f"  {program()} learn {lesson.day} --check")
    return 0


def _check(lesson: Any, file: Path) -> int:
    if not file.exists():
        raise UsageError(f"--check: {file} is missing; `{program()} learn {lesson.day}` makes it")
    caught = lesson.check(file.read_text("utf-8"), file=os.fspath(file))
    if caught.by == "harmless":
        print(f"day {lesson.day}: it holds. `{program()} learn {lesson.day} --solution` shows the engine's own.")
        return 0
    said = caught.message if "." in caught.by else f"{caught.by}: {caught.message}"
    print(f"day {lesson.day}: not yet. With {lesson.name} from {file}:\n  {said}")
    return 1
