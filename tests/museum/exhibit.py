"""What an exhibit is: a fault as an edit of real source, a workload, and who notices it at each gate level.

An edit replaces one line of one function and compiles the result into the very function object, so every importer
runs the faulty code and the catalogue can show the line. A source line that is no longer there is an error: an
exhibit cannot go stale in silence.
"""

from __future__ import annotations

import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import CodeType, FunctionType

from gates.core import GateError, at_level, counters
from tests.museum.scenes import OtherTokens

LOCKSTEP = "lockstep"  # no gate and no error: only the comparison with the reference's tokens shows it
HARMLESS = "harmless"  # nothing fires, and every token is the reference's
ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True, slots=True)
class Edit:
    """A piece of the source of `where` (a function, or a method taken from its class), `old`, replaced by `new`."""

    where: FunctionType
    old: str
    new: str

    @property
    def place(self) -> str:
        """`fast/slots.py SlotTable.move_row`."""
        file = Path(inspect.getsourcefile(self.where) or "").resolve()
        return f"{file.relative_to(ROOT).as_posix()} {self.where.__qualname__}"

    def apply(self, source: str) -> str:
        """The function's dedented source with the edit in it. Raises ValueError unless `old` stands there once."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.place}: {source.count(self.old)} places hold {self.old!r}, an exhibit needs one")
        return source.replace(self.old, self.new)


@dataclass(frozen=True, slots=True)
class Exhibit:
    """A fault named by the property it breaks, and what notices it first: a gate, an error, lockstep, or nothing.

    `full`, `cheap` and `off` name what stops the workload at that level of the gates; `says` is part of the
    message at `full`.
    """

    name: str
    thread: str  # where a public engine's users reported a fault of this kind; often the symptom alone
    story: str  # one sentence on what the edits here do, which need not be what went wrong there
    edits: tuple[Edit, ...]
    scene: Callable[[], object]
    full: str
    says: str
    cheap: str
    off: str


@dataclass(frozen=True, slots=True)
class Caught:
    """What stopped a workload, its message, and every gate that fired on the way, by the gates' own counters."""

    by: str
    message: str
    fired: tuple[str, ...]


def visit(exhibit: Exhibit, level: str) -> Caught:
    """Run an exhibit's workload at a gate level with its fault in place."""
    with applied(exhibit.edits):
        return watch(exhibit.scene, level)


def watch(scene: Callable[[], object], level: str) -> Caught:
    """Run a workload at a gate level and tell what stopped it."""
    before = {name: count.failures for name, count in counters().items()}
    by, message = HARMLESS, ""
    try:
        with at_level(level):
            scene()
    except GateError as error:
        by, message = error.name, str(error)
    except OtherTokens as error:
        by, message = LOCKSTEP, str(error)
    except Exception as error:  # a refusal or a crash is an outcome like any other
        by, message = type(error).__name__, str(error).partition("\n")[0]
    fired = tuple(name for name, count in counters().items() if count.failures != before.get(name, 0))
    return Caught(by, message, fired)


@contextmanager
def applied(edits: tuple[Edit, ...]) -> Iterator[None]:
    """Run a block with every edit in place; those of one function are applied to its source one after the other."""
    with ExitStack() as stack:
        for function in dict.fromkeys(edit.where for edit in edits):
            stack.enter_context(_swapped(function, [edit for edit in edits if edit.where is function]))
        yield


@contextmanager
def _swapped(function: FunctionType, edits: list[Edit]) -> Iterator[None]:
    kept = function.__code__
    # In place: a name imported elsewhere, a bound method and a kept reference are all the same function object.
    function.__code__ = _faulty_code(function, edits)
    try:
        yield
    finally:
        function.__code__ = kept


def _faulty_code(function: FunctionType, edits: list[Edit]) -> CodeType:
    linecache.checkcache()
    source = textwrap.dedent(inspect.getsource(function))
    for edit in edits:
        source = edit.apply(source)
    namespace = dict(function.__globals__)
    code = compile("from __future__ import annotations\n" + source, f"<fault in {edits[0].place}>", "exec")
    exec(code, namespace)
    made = namespace[function.__name__]
    # What a decorator made of it is undone: the edit goes into the plain function below.
    return inspect.unwrap(getattr(made, "fget", None) or getattr(made, "__func__", made)).__code__
