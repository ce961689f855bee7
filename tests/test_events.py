"""An event cut from a pattern is the event that encoding its chunk gives, for every text and in every order."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from reference.request import TokenLogprobs
from reference.tokenizer import ByteTokenizer
from serve.answer import Piece, Position
from serve.events import MARKER, EventWriter, sse
from serve.replies import ChatReply, CompletionReply, to_json

KINDS = (CompletionReply, ChatReply)


def reply(kind: type[Any], *, logprobs: bool = False) -> Any:
    return kind("id-1", 1_700_000_000, 'a "model"', ByteTokenizer(), logprobs)


def plainly(told: Any, pieces: list[tuple[int, Piece]], more: dict[str, Any]) -> bytes:
    """What a stream is without patterns."""
    chunks = [chunk for index, piece in pieces for chunk in told.chunks(index, piece)]
    return b"".join(b"data: " + to_json({**chunk, **more}) + b"\n\n" for chunk in chunks)


# ---- holds ------------------------------------------------------------------------------------------------------


def test_an_event_is_one_line_and_a_blank_one():
    assert sse(b"{}") == b"data: {}\n\n"


@pytest.mark.parametrize("kind", KINDS)
def test_a_pattern_is_made_once_for_a_choice(kind: type[Any], monkeypatch: pytest.MonkeyPatch):
    told, encoded = reply(kind), []
    monkeypatch.setattr(
        kind, "chunks", lambda self, *given, plain=kind.chunks: encoded.append(given) or plain(self, *given)
    )
    writer = EventWriter(told, more={})
    for _ in range(9):
        writer.write(0, Piece("a"))
    # A chat's first piece opens its choice, and is no pattern.
    assert [piece.text for _, piece in encoded] == ([MARKER] if kind is CompletionReply else ["a", MARKER])


# ---- rejects ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_what_has_more_than_a_text_is_no_pattern(kind: type[Any]):
    told = reply(kind, logprobs=True)
    told.chunks(0, Piece("begun"))
    position = Position(97, 0, TokenLogprobs(-0.5, 1))
    assert told.is_plain(0, Piece("a"))
    assert not told.is_plain(0, Piece("a", (position,)))
    assert not told.is_plain(0, Piece("a", (), "stop"))


# ---- any order --------------------------------------------------------------------------------------------------

texts = st.one_of(
    st.text(max_size=6), st.sampled_from([MARKER, '"', "\\", "\u2028", "\U0001f600", "\n\ndata: x", "</s>"])
)
positions = st.sampled_from([(), (Position(97, 3, TokenLogprobs(-0.25, 1, ((97, -0.25),))),)])
made = st.builds(Piece, texts, positions, st.sampled_from([None, None, None, "stop", "length"]))
streams = st.lists(st.tuples(st.integers(0, 2), made), min_size=1, max_size=12)


@pytest.mark.parametrize("kind", KINDS)
@given(pieces=streams, logprobs=st.booleans(), usage=st.booleans())
def test_patterns_change_no_byte(kind: type[Any], pieces: list[tuple[int, Piece]], logprobs: bool, usage: bool):
    more = {"usage": None} if usage else {}
    writer = EventWriter(reply(kind, logprobs=logprobs), more=more)
    written = b"".join(writer.write(index, piece) for index, piece in pieces)
    assert written == plainly(reply(kind, logprobs=logprobs), pieces, more)
    for event in written.split(b"\n\n")[:-1]:
        assert json.loads(event.removeprefix(b"data: "))["model"] == 'a "model"'
