"""The page that plays a trace: its frames say what the engine's tables said, and a browser shows them step by step."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from fast.engine import Engine
from reference.request import Request, SamplingParams
from serve.cli import main
from serve.trace import attach_trace
from serve.trace_html import frames, page, write_page
from serve.trace_read import TraceError, TraceReader
from tests.browser import dom, needs_chromium
from tests.harness import TINY, tiny_engine
from tests.pages import runs


@pytest.fixture
def trace(tmp_path: Path) -> tuple[Path, list[dict[int, int]]]:
    """A trace with preemptions, and after each step the tokens that the engine's own tables held in it."""
    sizes = {"max_batch_size": 3, "block_size": 4, "num_blocks": 8, "chunk_tokens": 6, "prefix_cache": True}
    engine = tiny_engine(**sizes, compact_rows=True, bucket_decode=True)
    path = tmp_path / "trace.jsonl"
    attach_trace(engine, path, model="tiny", config=TINY)
    for name, prompt, answer in (("A", 5, 14), ("B", 6, 14), ("</script>", 7, 14)):
        params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
        engine.submit(Request(tuple(range(3, 3 + prompt)), params, name))
    held = []
    while engine.has_work:
        held.append(_lengths_when_sampled(engine))
    return path, held


def _lengths_when_sampled(engine: Engine) -> dict[int, int]:
    """Run one step; tokens stored by row as they were planned, before rows that ended are vacated."""
    seen: dict[int, int] = {}
    schedule = engine.scheduler.schedule

    def watched():
        output = schedule()
        counts = dict.fromkeys(output.decode_rows, 1) | {chunk.row: chunk.count for chunk in output.chunks}
        lengths = {row: engine.cache.tables[row].length for row in engine.scheduler.running}
        seen.update({row: length + counts.get(row, 0) for row, length in lengths.items()})
        return output

    engine.scheduler.schedule = watched  # type: ignore[method-assign]
    engine.step()
    engine.scheduler.schedule = schedule  # type: ignore[method-assign]
    return seen


# ---- holds ------------------------------------------------------------------------------------------------------


def test_frames_store_what_the_tables_stored(trace):
    path, held = trace
    data = frames(TraceReader(path))
    assert [frame["stored"] for frame in data["steps"]] == held
    assert any(frame["preempted"] for frame in data["steps"])
    for frame in data["steps"]:
        assert frame["stored"].keys() == frame["blocks"].keys() == frame["rows"].keys()
        assert all(n <= len(frame["blocks"][row]) * data["block_size"] for row, n in frame["stored"].items())


def test_a_page_is_whole_and_holds_no_markup_of_a_client(trace, tmp_path: Path):
    path, held = trace
    out = tmp_path / "page.html"
    assert write_page(path, out) == 0
    text = out.read_text("utf-8")
    assert not re.search(r'(?:src|href)="', text)
    data = re.search(r'<script type="application/json">(.*?)</script>', text, re.S)
    assert data
    assert len(json.loads(data[1])["steps"]) == len(held)


def test_the_command_writes_the_page_beside_the_trace(trace, capsys):
    path, _ = trace
    assert main(["trace", "html", str(path), "--steps", "3-5"]) == 0
    assert capsys.readouterr().out.strip().endswith("trace.jsonl.html: 3 steps")
    assert path.with_name("trace.jsonl.html").is_file()


@needs_chromium
@pytest.mark.browser
def test_a_browser_plays_the_trace_forwards_and_back(tmp_path: Path):
    keys = """<script>addEventListener("load", function () {
      var host = document.querySelector(".stepper"), seen = [];
      function press(key) { host.dispatchEvent(new KeyboardEvent("keydown", { key: key, bubbles: true })); }
      function text(name) { return host.querySelector(name).textContent; }
      function look() { seen.push(text(".st-title") + " | " + text(".st-words")); }
      look();
      for (var i = 0; i < 4; i++) press("ArrowRight");
      look();
      ["ArrowLeft", "End", "Home"].forEach(function (key) { press(key); look(); });
      document.title = JSON.stringify(seen);
      host.setAttribute("data-rects", host.querySelectorAll("svg rect").length);
    });</script>"""
    file = tmp_path / "compact.html"
    file.write_text(page(runs.stepper("compact"), title="compact").replace("</body>", keys + "</body>"), "utf-8")
    text = dom(file)
    title = re.search(r"<title>(.*?)</title>", text)
    assert title
    first, fifth, fourth, last, again = json.loads(title[1].replace("&amp;", "&"))
    assert first.startswith("step 1 of 24 | Step 1: admit A into row 0")
    assert fifth.startswith("step 5 of 24 | Step 5: compact row 3 → 0; admit E into row 3")
    assert "decode 4 rows in bucket 4 × 16, replayed; commit A ends" in fourth
    assert last.startswith("step 24 of 24")
    assert again == first
    assert int(re.search(r'data-rects="(\d+)"', text)[1]) > 24  # the pool's blocks and the rows' boxes


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_a_damaged_trace_is_refused_and_no_page_is_written(trace, tmp_path: Path):
    path, _ = trace
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2] + lines[3:]))
    with pytest.raises(TraceError, match="lines between are lost"):
        write_page(path, tmp_path / "page.html")
    assert not (tmp_path / "page.html").exists()
