"""What an exercise is: a function of the source, a first attempt at it, and a workload that passes with the real one.

The learner's function takes the place of the real one for a run: its code is put into the very function object, so
every caller runs it and a wrong answer fails as the engine would, at full gates. Starter and solution are read from the
source, so neither can go stale.
"""

from __future__ import annotations
import __future__

import ast
import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from tests.museum.exhibit import Caught, watch
from tests.pages.regions import ROOT, region


class WrongFile(ValueError):
    """The learner's file cannot take the function's place; the message says why."""


@dataclass(frozen=True, slots=True)
class Lesson:
    """One exercise. `draft` is a first attempt at the body; or `cut` replaces a piece of the real source by another.

    `fails` is what stops the starter: a gate, an error's name, or `lockstep`.
    """

    day: int
    subject: str
    where: FunctionType
    task: str
    hint: str
    scene: Callable[[], object]
    fails: str
    draft: str = ""
    cut: tuple[str, str] = ("", "")

    @property
    def function(self) -> FunctionType:
        """The plain function below its decorators."""
        return inspect.unwrap(self.where)  # type: ignore[return-value]

    @property
    def path(self) -> str:
        """The file of the function, from the root of the checkout."""
        return str(inspect.getsourcefile(self.function)).removeprefix(f"{ROOT}/")

    @property
    def name(self) -> str:
        """The function's dotted name in its file."""
        return self.function.__qualname__

    def solution(self) -> str:
        """The real function, as it stands in the source, without decorators."""
        source = region(self.path, self.name).text
        return source[source.index("def ") :] if source.startswith("@") else source

    def starter(self, program: str = "nanoserve") -> str:
        """The file a learner begins with; `program` is what they type for `nanoserve`."""
        real = self.solution()
        if self.cut[0]:
            if real.count(self.cut[0]) != 1:
                raise ValueError(f"day {self.day}: {real.count(self.cut[0])} places hold {self.cut[0]!r}")
            body = real.replace(*self.cut)
        else:
            body = _head(real) + "\n" + textwrap.indent(textwrap.dedent(self.draft).strip("\n"), "    ")
        words = f"Day {self.day}, {self.subject}. {self.task}"
        about = textwrap.fill(words, 110)
        hint = textwrap.fill(f"Hint: {self.hint}", 110)
        names = f"Every name of {self.path} can be used here."
        how = f"Check it with: {program} learn {self.day} --check"
        return f'"""{about}\n\n{hint}\n\n{names}\n{how}\n"""\n\n\n{body}\n'

    def check(self, text: str, *, file: str = "<your file>") -> Caught:
        """Run the workload with the learner's function in place; `by` is `harmless` when everything held.

        Raises:
            WrongFile: the text is no Python, or does not define the function.
        """
        with _in_place(self.function, text, file):
            return watch(self.scene, "full")


def _head(source: str) -> str:
    """The signature, comments on its lines included, and the docstring."""
    node = ast.parse(source).body[0]
    assert isinstance(node, ast.FunctionDef)
    last = node.body[0].end_lineno if ast.get_docstring(node) else node.body[0].lineno - 1
    return "\n".join(source.split("\n")[:last])


@contextmanager
def _in_place(function: FunctionType, text: str, file: str) -> Iterator[None]:
    new, names = _function_of(function, text, file)
    held = function.__code__, function.__defaults__, function.__kwdefaults__
    before = {name: function.__globals__[name] for name in names if name in function.__globals__}
    function.__globals__.update(names)
    try:
        function.__code__ = new.__code__
        function.__defaults__, function.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
    except ValueError as error:
        raise WrongFile(f"{file}: {function.__name__} uses variables of a surrounding function ({error})") from None
    try:
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = held
        for name in names:
            del function.__globals__[name]
        function.__globals__.update(before)


def _function_of(function: FunctionType, text: str, file: str) -> tuple[FunctionType, dict[str, Any]]:
    """The learner's function, and what else the file defines for it."""
    namespace = dict(function.__globals__)
    known = dict(namespace)
    try:
        exec(compile(text, file, "exec", flags=__future__.annotations.compiler_flag), namespace)
    except Exception as error:
        raise WrongFile(f"{file}: {type(error).__name__}: {error}") from None
    made = namespace.get(function.__name__)
    if not isinstance(made, FunctionType) or made is known.get(function.__name__):
        raise WrongFile(f"{file}: defines no function {function.__name__}")
    changed = {n: v for n, v in namespace.items() if n not in known or known[n] is not v}
    return made, {n: v for n, v in changed.items() if n not in (function.__name__, "__builtins__", "__doc__")}
