"""The kinds of value a command line option takes, each refusing a bad one with its value and its range, and its name.

These are argparse `type` functions: argparse names the option, the message here says what was given and what is
allowed. Nothing here imports torch, so `--help` and a typing error answer at once.

Proof: tests/test_cli.py. Story: app.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class UsageError(ValueError):
    """A bad argument that shows only once the model is known; the command line exits with 2."""


def program() -> str:
    """What to type for `nanoserve` here, so that a command that is printed can be pasted: `.venv/bin/nanoserve`."""
    python = Path(sys.executable)
    script = python.with_name("nanoserve.exe" if os.name == "nt" else "nanoserve")
    if not script.is_file():
        return f"{_from_here(python)} -m serve"
    found = shutil.which("nanoserve")
    return "nanoserve" if found and Path(found) == script else _from_here(script)


def _from_here(path: Path) -> str:
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def integer(low: int, high: int | None = None) -> Callable[[str], int]:
    """A whole number in low..high (high None: no end)."""
    allowed = f"{low}..{'' if high is None else high}"

    def read(text: str) -> int:
        value = int(text) if re.fullmatch(r"[+-]?\d+", text.strip()) else None
        if value is None or value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not an integer in {allowed}")
        return value

    return read


def number(text: str) -> float:
    """A real number; its range is the affair of `SamplingParams`."""
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None


def seconds(text: str) -> float:
    """A time of 0 seconds or more, at most a year."""
    value = number(text)
    if not 0 <= value <= 366 * 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds in 0..{366 * 86400}")
    return value


def num_bytes(text: str) -> int:
    """Bytes: `1GiB`, `512MiB`, `1.5GB` or a plain count; at least 1."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text.strip())
    unit = UNITS.get(match[2].upper()) if match else None
    value = int(float(match[1]) * unit) if match and unit else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 1GiB, 512MiB or 1000000000 (at least 1 byte)")
    return value


def integers(low: int) -> Callable[[str], tuple[int, ...]]:
    """Whole numbers of at least `low`, separated by commas."""

    def read(text: str) -> tuple[int, ...]:
        parts = [part.strip() for part in text.split(",")]
        if not all(re.fullmatch(r"\d+", part) and int(part) >= low for part in parts):
            raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers of at least {low}, such as 1,2,3")
        return tuple(int(part) for part in parts)

    return read


def bias(text: str) -> tuple[int, float]:
    """One `--logit-bias`: `ID:VALUE`."""
    match = re.fullmatch(r"(\d+)\s*[:=]\s*([+-]?\d+(?:\.\d+)?)", text.strip())
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not ID:VALUE, such as 42:-100 (VALUE in -100..100)")
    return int(match[1]), float(match[2])
