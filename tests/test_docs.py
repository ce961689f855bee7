"""The site: what it shows is what the code and the engines say now, and every command, link and session on it works."""

from __future__ import annotations

import ast
import doctest
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fast.slots import SlotTable
from serve.cli import build_parser, main
from serve.metrics import Metrics
from tests.museum.exhibit import Edit
from tests.pages import markup, regions
from tests.pages.catalogue import diff
from tests.pages.made import BLOCKS, folder
from tests.pages.regions import ROOT, MissingRegion

DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if "made" not in path.parts)
DAYS = sorted((DOCS / "days").glob("day*.md"))
FENCE = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^\1```$", re.S | re.M)
STORY = re.compile(r"Story: (\w+)\.")
SECTIONS = [
    "The problem",
    "What must hold",
    "Predict",
    "The obvious way",
    "The fast way",
    "Proof",
    "Break it",
    "Measure",
    "Elsewhere",
    "Exercise",
    "Check yourself",
]
SERVES = {"serve", "chat", "bench"}  # commands that stay, or take minutes; their words are parsed and not run


def name_of(page: Path) -> str:
    return page.relative_to(DOCS).as_posix()


def rendered(page: Path) -> str:
    depth = 0 if page.stem == "index" else len(page.relative_to(DOCS).parts)
    return markup.render(page.read_text("utf-8"), depth=depth)


def fences(text: str, *languages: str) -> Iterator[str]:
    """The text of every fence, or of every one in the languages that are named."""
    for _, language, body in FENCE.findall(text):
        if not languages or language in languages:
            yield body


def commands(text: str) -> list[str]:
    """Every command of a page's `sh` fences."""
    joined = "".join(fences(text, "sh")).replace("\\\n", " ")
    return [line.strip() for line in joined.split("\n") if line.strip() and not line.startswith("#")]


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_what_the_engines_make_now(name: str):
    torch.set_num_threads(1)
    file = folder() / name
    assert file.is_file(), f"docs/made/{name} is missing: run `make figures`"
    assert file.read_text("utf-8") == BLOCKS[name]().rstrip() + "\n", f"docs/made/{name} is stale: run `make figures`"


def test_there_is_no_block_that_nobody_makes_or_shows():
    made = {path.name for path in folder().iterdir()}
    assert made == set(BLOCKS), "docs/made and tests/pages/made.py differ"
    shown = " ".join(page.read_text("utf-8") for page in PAGES)
    for name in made:
        kind, _, rest = name.rpartition(".")[0].partition(".")
        word = {"fault": "fault", "trace": "stepper", "exercise": "exercise"}.get(kind, "made")
        wanted = rest if word != "made" else name.rpartition(".")[0]
        assert f"[[{word} {wanted}]]" in shown, f"docs/made/{name} is on no page"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_holds_nothing_that_is_missing(page: Path):
    text = rendered(page)
    assert not re.findall(r"^\[\[[a-z].*", text, re.M), "a word of tests/pages/markup.py is misspelt"
    assert not [body for body in fences(text) if '<p class="region">' in body], "a word stands inside a fence"
    # Code is included by name; what a page writes itself is a command, an output or a session that is run.
    assert not list(fences(page.read_text("utf-8"), "python", "py")), f"{name_of(page)} holds pasted code"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_a_page_exists(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for command in commands(rendered(page)):
        check_command(command)


def check_command(command: str) -> None:
    """Run what is quick and needs nothing; of the rest, see that every target, module and test it names exists."""
    words = shlex.split(command)
    program = words[0].removeprefix(".venv/bin/")
    if program == "make":
        targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.M)
        assert not {w for w in words[1:] if "=" not in w} - set(targets), command
    elif program == "nanoserve":
        args = build_parser().parse_args(words[1:])
        quick = getattr(args, "model", None) == "tiny-random" or args.command in ("coverage", "trace", "learn")
        if quick and args.command not in SERVES:
            plain = ["--no-kernels"] if args.command == "generate" else []  # compiling them is another test's time
            assert main(words[1:] + plain) == 0, command
    elif program == "python" and words[1] == "-m":
        check_module(words[2], words[3:], command)
    else:
        assert program in ("curl", "pip", "export"), f"{command!r}: nothing here can check that"


def check_module(module: str, words: list[str], command: str) -> None:
    if module == "pytest":
        for file in (w for w in words if w.startswith("tests/")):
            path, _, test = file.partition("::")
            names = {n.name for n in ast.walk(regions.parsed(path)) if isinstance(n, ast.FunctionDef)}
            wanted = [test] if test else []
            wanted += [words[words.index("-k") + 1]] if "-k" in words else []
            assert all(any(want in name for name in names) for want in wanted), command
        return
    where = ROOT.joinpath(*module.split("."))
    assert where.with_suffix(".py").is_file() or (where / "__main__.py").is_file(), command
    if words[:1] == ["break"]:
        assert f"fault.{words[1]}.md" in BLOCKS, command


@pytest.mark.parametrize("page", [p for p in PAGES if "```pycon" in p.read_text("utf-8")], ids=name_of)
def test_a_session_on_a_page_gives_what_it_shows(page: Path):
    torch.set_num_threads(1)
    text = "\n".join(fences(page.read_text("utf-8"), "pycon"))
    test = doctest.DocTestParser().get_doctest(text, {}, name_of(page), str(page), 0)
    assert test.examples
    results = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS).run(test)
    assert results.failed == 0, f"{results.failed} of {results.attempted} lines say something else"


@pytest.mark.parametrize("page", DAYS, ids=name_of)
def test_a_day_has_the_form_of_a_day(page: Path):
    text = page.read_text("utf-8")
    heads = re.findall(r"^## (.+)$", text, re.M)
    assert heads == SECTIONS
    words = len(re.sub(r"```.*?```", "", re.sub(r"^\[\[.*$", "", text, flags=re.M), flags=re.S).split())
    assert 700 <= words <= 1400, f"{words} words of prose"
    day, subject = re.fullmatch(r"day(\d+)-(\w+)", page.stem).groups()  # type: ignore[union-attr]
    assert f"[[exercise {int(day)}]]" in text
    assert f"[[fault {subject}]]" in text.partition("## Break it")[2], "a day breaks a real line, and a gate says so"
    assert not re.search(r"\b(simply|just|obviously|basically)\b", text.replace("obviously right", ""), re.I)


def test_every_story_of_a_module_is_a_page():
    pages = {page.stem.partition("-")[2] for page in DAYS} | {page.stem for page in PAGES}
    told = {}
    for path in [ROOT / p for p in regions.modules()]:
        found = STORY.search(ast.get_docstring(ast.parse(path.read_text("utf-8"))) or "")
        told[path.relative_to(ROOT).as_posix()] = found[1] if found else ""
    assert not {path: story for path, story in told.items() if story not in pages}


def test_the_navigation_has_every_page():
    nav = (ROOT / "mkdocs.yml").read_text("utf-8")
    assert not [name_of(page) for page in PAGES if name_of(page) not in nav]


def test_an_edit_is_shown_as_the_lines_it_changes():
    within = Edit(SlotTable.move_row, "length = self._lengths[src]", "length = 0")
    twice = Edit(SlotTable.move_row, "length = 0", "length = 1")  # of the first one's work
    [_, place, *first] = diff([within, twice])
    assert place == "# fast/slots.py SlotTable.move_row"
    assert first == ["-length = self._lengths[src]", "+length = 0", place, "-length = 0", "+length = 1", "```", ""]
    [_, _, *lines] = diff([Edit(Metrics.ended, "    if timeline.num_tokens == 0:\n        return\n", "    pass\n")])
    assert lines == ["-if timeline.num_tokens == 0:", "-    return", "+pass", "```", ""]


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_a_region_that_is_gone_is_refused_and_told_what_there_is():
    with pytest.raises(MissingRegion, match=r"no 'appendix' of 'SlotTable\.appendix'; there are .*append"):
        markup.render("[[code fast/slots.py SlotTable.appendix]]", depth=0)
    with pytest.raises(MissingRegion, match="no such file"):
        markup.render("[[code fast/slot.py SlotTable]]", depth=0)
    with pytest.raises(MissingRegion, match="no line holds 'nowhere'"):
        markup.render('[[code fast/slots.py SlotTable.append from "nowhere"]]', depth=0)


@pytest.mark.parametrize("word", ["made nothing", "fault nothing", "figure nothing", "stepper nothing", "exercise 99"])
def test_a_block_that_nobody_made_is_refused(word: str):
    with pytest.raises(MissingRegion):
        markup.render(f"[[{word}]]", depth=0)


def test_a_dead_link_is_found(tmp_path: Path):
    from tests.pages.hook import dead_links

    (tmp_path / "a.html").write_text('<h1 id="x"></h1><a href="b.html#y">b</a><a href="#x">x</a><a href="#z">z</a>')
    (tmp_path / "b.html").write_text(
        '<h2 id="y"></h2><a href="c/">c</a><script src="https://cdn.example/x.js"></script>'
    )
    found = dead_links(tmp_path)
    assert sorted(line.split(": ")[0] for line in found) == ["a.html", "b.html", "b.html"]
    assert any("#z" in line for line in found)


@pytest.mark.parametrize(
    "command", ["make nothing", "rm -rf /", ".venv/bin/python -m pytest tests/test_slots.py -k no_such_test"]
)
def test_a_command_that_does_not_exist_is_found(command: str):
    with pytest.raises(AssertionError):
        check_command(command)


def test_code_is_shown_without_its_indentation_and_on_wish_without_its_docstring():
    whole = regions.region("fast/slots.py", "SlotTable.reset")
    bare = regions.region("fast/slots.py", "SlotTable.reset", doc=False)
    assert whole.text.startswith("def reset(")
    assert '"""' in whole.text
    assert '"""' not in bare.text
    assert regions.region("fast/slots.py", "CELL_BYTES").text.startswith("CELL_BYTES = 8")
    assert regions.source("fast/slots.py").split("\n")[whole.first - 1].lstrip().startswith("def reset(")
