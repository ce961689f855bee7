"""A page's own words: `[[...]]` on a line of its own, or `[[gate NAME]]` in a sentence, turned into Markdown.

    [[code fast/slots.py SlotTable.append]]     a region of the source (`nodoc`, `from "text"`, `to "text"`)
    [[made coverage]]                           a block made by the engines: docs/made/coverage.md or .txt
    [[fault slots]]                             the one-line fault of a page and the gate that fires
    [[figure window "what it shows"]]           a drawing, inline, in the colours of the page
    [[stepper compact]]                         a step trace to play
    [[exercise 10]]                             how to start, check and end the exercise of a day
    [[sources]]                                 every source file with what it is
    [[gate slots.window]]                       (in a sentence) a gate, linked to the catalogue
    [[src fast/slots.py SlotTable]]             (in a sentence) a name, linked to its line

The reference pages (gates, museum, cli, http) are read off the code when the site is built, so they cannot be stale.
Everything that is missing raises `MissingRegion`, and with it the build fails.
"""

from __future__ import annotations

import ast
import html
import json
import re
import shlex
from collections.abc import Callable

from tests.pages.regions import ROOT, MissingRegion, modules, parsed, region

BLOCK = re.compile(r"^\[\[(code|made|fault|figure|stepper|exercise|sources)(?: (.+?))?\]\]$", re.M)
INLINE = re.compile(r"\[\[(gate|src) ([^\]]+?)\]\]")
STYLE = re.compile(r"<style>.*?</style>", re.S)
LEAST_SCALE = 0.85  # of a drawing on a narrow screen; below it letters are too small, so the drawing scrolls
LIVE = ("gates", "museum", "cli", "http")
STEPPER_LINKS = {
    "grow": ("fast/scheduler.py", "Scheduler._grow"),
    "compact": ("fast/scheduler.py", "Scheduler._compact"),
    "admit": ("fast/scheduler.py", "Scheduler._admit"),
    "prefill": ("fast/forwards.py", "Forwards.chunks"),
    "decode": ("fast/decode.py", "DecodePath.run"),
    "commit": ("fast/commit.py", "Commit.take"),
}


def render(markdown: str, *, depth: int) -> str:
    """A page as Markdown that mkdocs knows; `depth` is how many folders its URL is below the site's root."""
    up = "../" * depth
    markdown = BLOCK.sub(lambda m: _BLOCKS[m[1]](m[2] or "", up), markdown)
    return INLINE.sub(lambda m: _INLINES[m[1]](m[2], up), markdown)


def source_url(path: str, line: int = 0) -> str:
    """Where the site shows a source file, from its root."""
    anchor = f"#__codelineno-0-{line}" if line else ""
    return f"source/{path.removesuffix('.py')}/{anchor}"


def source_page(path: str, text: str, rows: list[tuple[str, int, str]]) -> str:
    """The page of one source file: what it offers, then all of it."""
    lines = [
        "---",
        f"title: {path}",
        "search:",
        "  exclude: true",
        "hide:",
        "  - navigation",
        "  - toc",
        "---",
        f"# `{path}`",
        "",
    ]
    if rows:
        lines += ["| name | what it is |", "| --- | --- |"]
        for name, line, summary in rows:
            lines.append(f'| <a href="#__codelineno-0-{line}"><code>{name}</code></a> | {_cell(summary)} |')
    return "\n".join([*lines, "", "````python", text.rstrip(), "````", ""])


def _code(words: str, up: str) -> str:
    parts = shlex.split(words)
    path, name, rest = parts[0], parts[1], parts[2:]
    options = {"start": "", "stop": ""}
    for word, key in (("from", "start"), ("to", "stop")):
        if word in rest:
            options[key] = rest[rest.index(word) + 1]
    found = region(path, name, doc="nodoc" not in rest, **options)
    fence = "```" if "```" not in found.text else "````"
    link = f'<a href="{up}{source_url(path, found.first)}"><code>{path}</code> {html.escape(name)}</a>'
    if not path.startswith(("reference", "fast", "gates", "serve")):
        link = f"<code>{path}</code> {html.escape(name)}"
    return f'<p class="region">{link}</p>\n\n{fence}python\n{found.text}\n{fence}'


def _made(words: str, up: str) -> str:
    name = words.strip()
    if name in LIVE:
        from tests.pages import catalogue  # imports the engine's parser and exhibits

        return INLINE.sub(lambda m: _INLINES[m[1]](m[2], up), getattr(catalogue, f"{name}_page")())
    for suffix in (".md", ".txt"):
        file = ROOT / "docs" / "made" / f"{name}{suffix}"
        if file.is_file():
            text = file.read_text("utf-8").rstrip()
            return INLINE.sub(lambda m: _INLINES[m[1]](m[2], up), text) if suffix == ".md" else f"```text\n{text}\n```"
    raise MissingRegion(f"docs/made/{name}: neither .md nor .txt; run `python -m tests.pages`")


def _fault(words: str, up: str) -> str:
    return _made(f"fault.{words.strip()}", up)


def _figure(words: str, up: str) -> str:
    name, *rest = shlex.split(words)
    file = ROOT / "docs" / "figures" / f"{name}.svg"
    if not file.is_file():
        raise MissingRegion(f"docs/figures/{name}.svg: no such drawing")
    svg = STYLE.sub("", file.read_text("utf-8")).replace("\n", " ").strip()
    width = re.search(r'viewBox="0 0 (\d+)', svg)
    least = f' style="min-width:{int(width[1]) * LEAST_SCALE:.0f}px"' if width else ""
    svg = svg.replace("<svg", f"<svg{least}", 1)
    caption = f"<figcaption>{html.escape(rest[0])}</figcaption>" if rest else ""
    return f'<figure class="drawn"><div class="scroll" tabindex="0">{svg}</div>{caption}</figure>'


def _stepper(words: str, up: str) -> str:
    name = words.strip()
    file = ROOT / "docs" / "made" / f"trace.{name}.json"
    if not file.is_file():
        raise MissingRegion(f"docs/made/trace.{name}.json: no such trace")
    links = {phase: up + source_url(p, region(p, n).first) for phase, (p, n) in STEPPER_LINKS.items()}
    data = json.loads(file.read_text("utf-8")) | {"links": links}
    text = json.dumps(data, separators=(",", ":")).replace("</", "<\\/")
    return (
        f'<link rel="stylesheet" href="{up}assets/stepper.css"><script src="{up}assets/stepper.js" defer></script>'
        f'<div class="stepper" id="stepper-{name}"><script type="application/json">{text}</script>'
        "<noscript>The player needs JavaScript; the trace is in the repository.</noscript></div>"
    )


def _exercise(words: str, up: str) -> str:
    return _made(f"exercise.{words.strip()}", up)


def _sources(words: str, up: str) -> str:
    lines: list[str] = []
    package = ""
    for path in modules():
        if path.partition("/")[0] != package:
            package = path.partition("/")[0]
            lines += ["", f"## {package}/", "", "| file | what it is |", "| --- | --- |"]
        about = (ast.get_docstring(parsed(path)) or "").split("\n\n")[0]
        lines.append(f'| <a href="{up}{source_url(path)}"><code>{path}</code></a> | {_cell(" ".join(about.split()))} |')
    return "\n".join(lines)


def _gate(words: str, up: str) -> str:
    name = words.strip()
    return f'<a class="gate" href="{up}gates/#{name.replace(".", "-")}"><code>{name}</code></a>'


def _src(words: str, up: str) -> str:
    path, _, name = words.strip().partition(" ")
    if not name:
        return f'<a href="{up}{source_url(path)}"><code>{path}</code></a>'
    shown = name.replace("__", "&#95;&#95;")  # Markdown would set what two underlines enclose in bold
    return f'<a href="{up}{source_url(path, region(path, name).first)}"><code>{shown}</code></a>'


def _cell(text: str) -> str:
    return html.escape(text, quote=False).replace("|", "\\|")


_BLOCKS: dict[str, Callable[[str, str], str]] = {
    "code": _code,
    "made": _made,
    "fault": _fault,
    "figure": _figure,
    "stepper": _stepper,
    "exercise": _exercise,
    "sources": _sources,
}
_INLINES: dict[str, Callable[[str, str], str]] = {"gate": _gate, "src": _src}
