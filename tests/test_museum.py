"""Faults that public engines had, seeded into this engine's own source: each is noticed by the gate that is named."""

from __future__ import annotations

import re

import pytest

from fast.slots import SlotTable
from reference.request import Completion
from tests.museum import scenes
from tests.museum.catalogue import EXHIBITS, ROOMS, render, rows_of, summary
from tests.museum.exhibit import HARMLESS, LOCKSTEP, Caught, Edit, Exhibit, visit, watch

# A thread, or a file of an engine whose fault was read there.
THREAD = re.compile(r"[\w.-]+/[\w.-]+#\d+|[\w./-]+ [\w./]+\.(py|md)")
SCENES = sorted({exhibit.scene for exhibit in EXHIBITS}, key=lambda scene: scene.__name__)


def name_of(exhibit: Exhibit) -> str:
    return exhibit.name.replace(" ", "_")


def fires(caught: Caught) -> tuple[str, ...]:
    """The gates that are to have fired: the one that stopped the run, or none when no gate did."""
    return (caught.by,) if "." in caught.by else ()


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scene", SCENES, ids=lambda scene: scene.__name__)
def test_the_sound_engine_passes_every_scene_at_full_gates(scene):
    assert watch(scene, "full") == Caught(HARMLESS, "", ())


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=name_of)
def test_the_fault_is_noticed_by_the_gate_that_is_named_and_by_no_other(exhibit: Exhibit):
    caught = visit(exhibit, "full")
    assert (caught.by, caught.fired) == (exhibit.full, fires(caught)), caught.message
    assert exhibit.says in caught.message


@pytest.mark.parametrize("level", ["cheap", "off"])
@pytest.mark.parametrize("exhibit", EXHIBITS, ids=name_of)
def test_what_a_server_and_what_an_unguarded_engine_would_notice(exhibit: Exhibit, level: str):
    caught = visit(exhibit, level)
    assert (caught.by, caught.fired) == (getattr(exhibit, level), fires(caught)), caught.message


def test_no_fault_passes_the_full_gates_and_the_tokens():
    assert len(EXHIBITS) >= 30
    assert not [exhibit.name for exhibit in EXHIBITS if exhibit.full == HARMLESS]


def test_most_faults_would_stop_a_server_before_a_client_sees_a_token():
    by_gate = [exhibit for exhibit in EXHIBITS if "." in exhibit.cheap]
    seen_by_clients = [exhibit for exhibit in EXHIBITS if exhibit.cheap == LOCKSTEP]
    assert len(by_gate) > len(seen_by_clients)
    # Whatever the cheap gates let through to a client, the full gates or the tokens show.
    assert all(exhibit.full != HARMLESS for exhibit in seen_by_clients)


def test_every_exhibit_has_a_name_a_source_and_a_sentence():
    names = [exhibit.name for exhibit in EXHIBITS]
    assert len(set(names)) == len(names)
    for exhibit in EXHIBITS:
        assert THREAD.fullmatch(exhibit.thread), exhibit.thread
        assert exhibit.story.endswith("."), exhibit.story
        assert exhibit.edits
        assert all(edit.old != edit.new for edit in exhibit.edits)


def test_the_catalogue_shows_who_noticed_and_the_line_that_was_changed():
    table = rows_of(ROOMS["steps"][:1])
    assert table[0][:5] == ("a plan runs once", "vllm-project/vllm#26385", "plan.fresh", "plan.fresh", LOCKSTEP)
    shown = render("steps", table)
    assert (
        "| a plan runs once | vllm-project/vllm#26385 | plan.fresh | plan.fresh | lockstep | gate plan.fresh:" in shown
    )
    assert "# fast/decode.py DecodePath.run\n-self._check_before(plan)\n+plan = " in shown
    assert summary(table) == "1 exhibits.\nGates full: 1 a gate.\nGates cheap: 1 a gate.\nGates off: 1 only by tokens."


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("old", ["a line that nobody wrote", "length"])
def test_an_edit_of_a_line_that_is_gone_or_ambiguous_is_refused(old: str):
    exhibit = Exhibit("x", "a/b#1", "X.", (Edit(SlotTable.move_row, old, "pass"),), scenes.eager_rush, "", "", "", "")
    with pytest.raises(ValueError, match=r"fast/slots\.py SlotTable\.move_row: \d+ places hold"):
        visit(exhibit, "full")


def test_a_fault_is_gone_after_the_visit_whatever_stopped_it():
    code = SlotTable.move_row.__code__
    broken = Edit(SlotTable.move_row, "length = self._lengths[src]", "length = None")
    exhibit = Exhibit("x", "a/b#1", "X.", (broken,), scenes.eager_rush, "", "", "", "")
    assert visit(exhibit, "off").by == "TypeError"
    assert SlotTable.move_row.__code__ is code
    assert watch(scenes.eager_rush, "full").by == HARMLESS


def test_other_tokens_are_told_with_their_place():
    wanted = Completion("a", (1, 2), [7, 8, 9], finish_reason="length")
    scenes.compare(Completion("a", (1, 2), [7, 8], finish_reason="abort"), wanted)  # as far as it came
    caught = watch(lambda: scenes.compare(Completion("a", (1, 2), [7, 9, 9], finish_reason="length"), wanted), "full")
    assert caught == Caught(LOCKSTEP, "request 'a': token 1 is [9], alone it is [8]", ())
    caught = watch(lambda: scenes.compare(Completion("a", (1, 2), [7, 8, 9], finish_reason="stop"), wanted), "full")
    assert caught == Caught(LOCKSTEP, "request 'a' ends with 'stop' (None), alone with 'length'", ())
