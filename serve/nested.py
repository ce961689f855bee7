"""JSON that a client wrote, read one way wherever it stands: as a body, or inside a string of a body.

What JSON allows and no later step could hold is refused here: half a surrogate pair, NaN, a name given twice, and
nesting so deep that templates and grammars would run out of stack. It knows no field and no HTTP.

Proof: tests/test_http_cases.py. Story: limits.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any, NoReturn

MAX_DEPTH = 100  # objects and arrays within each other; templates recurse over them, a few frames a level
MAX_NAME = 120  # characters of a name that a message repeats
HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # JSON can spell half a surrogate pair, which UTF-8 cannot hold


class GivenTwice(ValueError):
    """An object names one field twice, so one of two values would be dropped."""

    def __init__(self, name: str) -> None:
        self.name = name[:MAX_NAME]
        super().__init__(f"{self.name}: given more than once in one object")


def parse(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is not JSON, or cannot be held; `GivenTwice` for a name given twice.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_each_once)
        if text.count("{") + text.count("[") > MAX_DEPTH:
            _check_depth(value)
        if HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
    except GivenTwice:
        raise
    except UnicodeEncodeError:
        raise ValueError("a lone surrogate is not a character") from None
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from None
    return value


TOO_DEEP = f"nested more than {MAX_DEPTH} levels deep"


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH + 1:  # the innermost level holds no object and no array
            raise RecursionError
        inner = [item.values() if isinstance(item, dict) else item for item in level if isinstance(item, dict | list)]
        level = [item for items in inner for item in items]


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = sorted(name for name, _ in pairs)
        raise GivenTwice(next(name for name, after in pairwise(names) if name == after))
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")
