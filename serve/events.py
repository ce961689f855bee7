"""A reply's chunks as the bytes of server-sent events.

Nearly every event of a stream is the one before it with another text, so those are cut from a pattern: the event of a
marker, taken apart at the marker. Encoding one is then one string escaped between two constants, and what it gives is
what encoding the whole chunk gives. It knows no JSON shape and no socket.

Proof: tests/test_events.py. Story: stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from serve.answer import Piece
from serve.replies import to_json

MARKER = "\u0000text\u0000"


class Chunked(Protocol):
    """A reply that can be told in chunks."""

    def chunks(self, index: int, piece: Piece) -> list[dict[str, Any]]:
        """The chunks of the next piece of choice `index`."""

    def is_plain(self, index: int, piece: Piece) -> bool:
        """True when its one chunk is that of any other plain piece of this choice, but for the text."""


class EventWriter:
    """Encodes the chunks of one stream."""

    def __init__(self, reply: Chunked, *, more: Mapping[str, Any]) -> None:
        """`more` are fields that every chunk has besides its own."""
        self._reply = reply
        self._more = more
        self._patterns: dict[int, tuple[bytes, bytes]] = {}  # of each choice: before its text, and behind it

    def write_all(self, pieces: Sequence[tuple[int, Piece]]) -> bytes:
        """The events of (choice, piece) pairs, in order."""
        return b"".join([self.write(index, piece) for index, piece in pieces])

    def write(self, index: int, piece: Piece) -> bytes:
        """The events of one piece, one for each of its chunks."""
        if not self._reply.is_plain(index, piece):
            return self._whole(index, piece)
        if index not in self._patterns:
            before, behind = self._whole(index, Piece(MARKER)).split(to_json(MARKER))
            self._patterns[index] = before, behind
        before, behind = self._patterns[index]
        return before + to_json(piece.text) + behind

    def _whole(self, index: int, piece: Piece) -> bytes:
        return b"".join(sse(to_json({**chunk, **self._more})) for chunk in self._reply.chunks(index, piece))


def sse(data: bytes) -> bytes:
    """One event; `data` holds no line break, since JSON escapes them."""
    return b"data: " + data + b"\n\n"
