"""A checked-in figure is what the running engines draw today."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"


@pytest.mark.parametrize("script", sorted(FIGURES.glob("*.py")), ids=lambda path: path.stem)
def test_a_figure_is_what_the_engines_draw_now(script: Path):
    spec = importlib.util.spec_from_file_location(script.stem, script)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    drawn = module.draw()
    assert module.TARGET.read_text("utf-8") == drawn, f"run `python {script.relative_to(FIGURES.parent.parent)}`"
