"""What the theme's stylesheets hold for other sites is left out of ours: half of what a first page would load.

A theme styles every colour, icon and widget that any site may want. After the build it is known which of its classes
stand in a page or can be set by its script; a rule that needs another one can never apply, and goes. A sheet's name
carries a digest of what is in it, so that no browser keeps an older one.

Proof: tests/test_site.py.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

NESTED = ("@media", "@supports")
PALETTE = ("dir", "data-md-color-scheme", "data-md-color-primary", "data-md-color-accent")
CLASS = re.compile(r"\.((?:[\w-]|\\.)+)")
TEST = re.compile(rf"\[({'|'.join(PALETTE)})=[\"']?([\w-]+)[\"']?\]")
QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*'|/\*.*?\*/", re.S)
VARIABLE = re.compile(r"--[\w-]+")


def slim_site(site: Path) -> None:
    """Rewrite the theme's sheets of a built site, and the names by which its pages ask for them."""
    pages = {path: path.read_text("utf-8") for path in sorted(site.rglob("*.html"))}
    scripts = [path.read_text("utf-8") for path in sorted(site.rglob("*.js"))]
    known = names_in(pages.values(), scripts)
    sheets = sorted((site / "assets" / "stylesheets").glob("*.min.css"))
    kept = {sheet: used_rules(sheet.read_text("utf-8"), known) for sheet in sheets}
    others = [path.read_text("utf-8") for path in (site / "assets").glob("*.css")]
    for _ in range(2):  # a variable may be read by another one that nobody reads
        read = set(re.findall(r"var\((--[\w-]+)", " ".join([*kept.values(), *others, *pages.values(), *scripts])))
        kept = {sheet: used_variables(text, read) for sheet, text in kept.items()}
    renamed = {}
    for sheet, text in kept.items():
        name = f"{sheet.name.partition('.')[0]}.{hashlib.sha256(text.encode()).hexdigest()[:8]}.min.css"
        renamed[sheet.name] = name
        sheet.with_name(f"{sheet.name}.map").unlink(missing_ok=True)
        sheet.unlink()
        sheet.with_name(name).write_text(text, "utf-8")
    for path, text in pages.items():
        for old, new in renamed.items():
            text = text.replace(old, new)
        path.write_text(text, "utf-8")


def names_in(pages: Iterable[str], scripts: Iterable[str]) -> set[str]:
    """Every class of a page, every word of a script, and `attribute=value` of what sets the palette."""
    known: set[str] = set()
    for text in pages:
        for value in re.findall(r'\sclass="([^"]*)"', text):
            known.update(value.split())
        known.update(f"{name}={value}" for name, value in re.findall(r'\s([\w-]+)="([\w-]*)"', text) if name in PALETTE)
    for text in scripts:
        known.update(re.findall(r"[\w-]+", text))
    return known


def used_rules(css: str, known: set[str]) -> str:
    """The rules that can apply to a page on which these names are all there is."""
    parts = []
    for head, body in _rules(css):
        if body is None:
            parts.append("" if head.startswith("@charset") else f"{head};")
        elif head.startswith(NESTED):
            inner = used_rules(body, known)
            parts.append(f"{head}{{{inner}}}" if inner else "")
        elif head.startswith("@"):
            parts.append(f"{head}{{{body}}}")
        else:
            selectors = [one for one in _split(head, ",") if _can_match(one, known)]
            parts.append(f"{','.join(selectors)}{{{body}}}" if selectors else "")
    return "".join(parts)


def used_variables(css: str, read: set[str]) -> str:
    """The rules without the variables that are set and never read."""
    parts = []
    for head, body in _rules(css):
        if body is None:
            parts.append(f"{head};")
        elif head.startswith(NESTED):
            parts.append(f"{head}{{{used_variables(body, read)}}}")
        else:
            lines = [line for line in _split(body, ";") if line and not _unread(line, read)]
            parts.append(f"{head}{{{';'.join(lines)}}}" if lines else "")
    return "".join(parts)


def _unread(line: str, read: set[str]) -> bool:
    found = VARIABLE.match(line.lstrip())
    return found is not None and found[0] not in read


def _can_match(selector: str, known: set[str]) -> bool:
    plain = re.sub(r"\([^()]*(?:\([^()]*\)[^()]*)*\)", "", selector)  # :not(.x), :is(.x,.y): never a reason to drop
    classes = (name.replace("\\", "") for name in CLASS.findall(TEST.sub("", plain)))
    return all(name in known for name in classes) and all(f"{a}={v}" in known for a, v in TEST.findall(plain))


def _rules(css: str) -> Iterator[tuple[str, str | None]]:
    """(selectors or at-rule, what stands in its braces), in order; None for an at-rule without braces."""
    begin = depth = inside = 0
    for at, mark in _marks(css, "{};"):
        if mark == "{":
            if depth == 0:
                inside = at + 1
            depth += 1
        elif mark == "}":
            depth -= 1
            if depth == 0:
                yield css[begin : inside - 1].strip(), css[inside:at]
                begin = at + 1
        elif depth == 0:
            yield css[begin:at].strip(), None
            begin = at + 1


def _split(text: str, mark: str) -> list[str]:
    parts, begin, depth = [], 0, 0
    for at, found in _marks(text, mark + "()[]"):
        if found == mark and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
        elif found != mark:
            depth += 1 if found in "([" else -1
    return [*parts, text[begin:]]


def _marks(text: str, wanted: str) -> Iterator[tuple[int, str]]:
    """Where the wanted characters stand outside of quotes and comments."""
    masked = QUOTED.sub(lambda m: " " * len(m[0]), text)
    for found in re.finditer(f"[{re.escape(wanted)}]", masked):
        yield found.start(), found[0]
