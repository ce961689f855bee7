"""A checked-in figure is what the running engines draw today, or what the table of a measurement says."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from tests.pages import measured

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"


def drawn(script: Path) -> str:
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.draw()


@pytest.mark.parametrize("script", sorted(FIGURES.glob("*.py")), ids=lambda path: path.stem)
def test_a_figure_is_what_the_engines_draw_now(script: Path):
    assert script.with_suffix(".svg").read_text("utf-8") == drawn(script), "run `make figures`"


def test_a_table_is_read_as_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# A\n\nTimes:\n\n| arm | 1 row |\n| --- | ---: |\n| x | 1,091 (0.99) |\n\n| b |\n\nNothing:\n\n# B\n"
    )
    monkeypatch.setattr(measured, "PAGE", page)
    assert measured.table("Times:") == [["arm", "1 row"], ["x", "1,091 (0.99)"]]
    assert measured.number("1,091 (0.99)") == 1091
    with pytest.raises(LookupError, match="no table stands behind 'Nothing:'"):
        measured.table("Nothing:")
    with pytest.raises(LookupError, match="no line is 'Time:'"):
        measured.table("Time:")
    with pytest.raises(ValueError, match="'n/a' begins with no number"):
        measured.number("n/a")


def test_a_drawing_of_measurements_follows_its_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = measured.PAGE.read_text("utf-8")
    page = tmp_path / "page.md"
    monkeypatch.setattr(measured, "PAGE", page)
    page.write_text(re.sub(r"(\| decode \| 1 \| 72 \|) [\d.]+ ms", r"\1 1.5 ms", text))
    with pytest.raises(AssertionError, match=r"decode of 1: 1.5 ms is less than the [\d.]+ ms that the roofs allow"):
        drawn(FIGURES / "roofline.py")
    page.write_text(re.sub(r"(\| nanoserve, float32 K/V \|) \d+", r"\1 131", text, count=1))
    assert "131 at 1 row" in drawn(FIGURES / "peers.py")
