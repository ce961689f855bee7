"""Code by name: the lines of a function, class, method or constant, found in the syntax tree and never by number.

A page names `fast/slots.py SlotTable.append`; a name that is gone is an error, so a page cannot show what is not there.
Standard library only: the site builds where no engine can run.
"""

from __future__ import annotations

import ast
import textwrap
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SOURCES = ("reference", "fast", "gates", "serve")


class MissingRegion(LookupError):
    """A page names code that the source does not hold."""


@dataclass(frozen=True, slots=True)
class Region:
    """Lines first..last (1-based, both included) of a file, and their text without the indentation they share."""

    path: str
    name: str
    first: int
    last: int
    text: str


@cache
def source(path: str) -> str:
    """The text of a file of the repository. Raises MissingRegion when there is none."""
    file = ROOT / path
    if not file.is_file():
        raise MissingRegion(f"{path}: no such file")
    return file.read_text("utf-8")


@cache
def parsed(path: str) -> ast.Module:
    """The syntax tree of a file of the repository."""
    return ast.parse(source(path), filename=path)


def region(path: str, name: str, *, doc: bool = True, start: str = "", stop: str = "") -> Region:
    """The lines of `name` (`Class.method`, `function`, `CONSTANT`), with its decorators.

    `doc` False leaves the docstring out; `start` and `stop` cut to the line that holds one text up to, and without,
    the line that holds the other.
    """
    node = find(path, name)
    lines = source(path).split("\n")
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", ()))])
    last = node.end_lineno or node.lineno
    kept = lines[first - 1 : last]
    if not doc:
        kept = _without_docstring(node, kept, first)
    if start or stop:
        kept, skipped = _cut(kept, start, stop, f"{path} {name}")
        first += skipped
        last = first + len(kept) - 1
    return Region(path, name, first, last, textwrap.dedent("\n".join(kept)).rstrip())


def find(path: str, name: str) -> ast.AST:
    """The node of a dotted name. Raises MissingRegion, naming what is there, when the file has no such name."""
    body: list[ast.stmt] = parsed(path).body
    node: ast.AST | None = None
    for part in name.split("."):
        node = next((child for child in body if part in _names(child)), None)
        if node is None:
            there = ", ".join(sorted(n for child in body for n in _names(child)))
            raise MissingRegion(f"{path}: no {part!r} of {name!r}; there are {there}")
        body = getattr(node, "body", [])
    assert node is not None
    return node


def public_names(path: str) -> list[tuple[str, int, str]]:
    """(dotted name, line, first line of its docstring) of every public class, function and method of a file."""
    found = []
    for node in parsed(path).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            found.append((node.name, node.lineno, _summary(node)))
            for child in node.body if isinstance(node, ast.ClassDef) else ():
                if isinstance(child, ast.FunctionDef) and not child.name.startswith("_"):
                    found.append((f"{node.name}.{child.name}", child.lineno, _summary(child)))
    return found


def modules() -> list[str]:
    """Every Python file of the four packages, in the order of the packages and then by name."""
    return [
        path.relative_to(ROOT).as_posix()
        for package in SOURCES
        for path in sorted((ROOT / package).rglob("*.py"))
        if "__pycache__" not in path.parts and path.name not in ("__init__.py", "__main__.py")
    ]


def _names(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [target.id for target in targets if isinstance(target, ast.Name)]


def _summary(node: ast.FunctionDef | ast.ClassDef) -> str:
    return (ast.get_docstring(node) or "").partition("\n")[0]


def _without_docstring(node: ast.AST, lines: list[str], first: int) -> list[str]:
    body = getattr(node, "body", [])
    if not body or not isinstance(node, ast.FunctionDef | ast.ClassDef) or ast.get_docstring(node) is None:
        return lines
    start, stop = body[0].lineno - first, (body[0].end_lineno or 0) - first + 1
    kept = lines[:start] + lines[stop:]
    if start < len(kept) and not kept[start].strip():
        del kept[start]
    return kept


def _cut(lines: list[str], start: str, stop: str, where: str) -> tuple[list[str], int]:
    begin = _line_with(lines, start, where) if start else 0
    end = begin + 1 + _line_with(lines[begin + 1 :], stop, where) if stop else len(lines)
    return lines[begin:end], begin


def _line_with(lines: list[str], text: str, where: str) -> int:
    found = [index for index, line in enumerate(lines) if text in line]
    if not found:
        raise MissingRegion(f"{where}: no line holds {text!r}")
    return found[0]
