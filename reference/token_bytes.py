"""The bytes of each token, read off the decoder that a tokenizer declares.

Two decoders cover the families here: `ByteLevel` (GPT-2's printable alphabet, one character a byte) and the
SentencePiece sequence (`▁` is a space, `<0xNN>` is a byte, one leading space may go). Any other is refused by
name: text that cannot be cut into bytes cannot be streamed. It knows no special tokens and no UTF-8.

Proof: tests/test_tokenizer.py. Story: tokenizer.
"""

from __future__ import annotations

import json
import re
from functools import lru_cache
from typing import Any

import tokenizers

SPACE = "▁"
BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
REPLACE = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
SENTENCEPIECE = [REPLACE, {"type": "ByteFallback"}, {"type": "Fuse"}]


class TokenBytes:
    """`self[token_id]` is the bytes of a token, b"" for an id the vocabulary does not hold."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        self._byte_level, self.strips_leading_space = _decoder_kind(backend)
        self._added = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
        self._known: dict[int, bytes] = {}  # filled as ids are seen: most answers use little of a vocabulary

    def __getitem__(self, token_id: int) -> bytes:
        data = self._known.get(token_id)
        if data is None:
            data = self._known[token_id] = self._look_up(token_id)
        return data

    def _look_up(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) if 0 <= token_id < 2**32 else None
        if token is None:
            return b""
        if self._byte_level:
            # An added token stands for its own text, though its letters may all be letters of the alphabet.
            return token.encode() if token_id in self._added else _byte_level_bytes(token)
        byte = BYTE_TOKEN.fullmatch(token)
        return bytes([int(byte[1], 16)]) if byte else token.replace(SPACE, " ").encode()


@lru_cache(maxsize=1)
def byte_alphabet() -> tuple[str, ...]:
    """GPT-2's alphabet: the character that stands for each byte 0..255.

    Printable Latin-1 stands for itself; the 68 others take the characters from U+0100 on, in byte order.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    spare = iter(range(256, 512))
    return tuple(chr(byte if byte in printable else next(spare)) for byte in range(256))


@lru_cache(maxsize=1)
def _byte_of() -> dict[str, int]:
    return {character: byte for byte, character in enumerate(byte_alphabet())}


def _byte_level_bytes(token: str) -> bytes:
    byte_of = _byte_of()
    if all(character in byte_of for character in token):
        return bytes(byte_of[character] for character in token)
    return token.encode()  # not written in the alphabet: a token that was put in as plain text


def _decoder_kind(backend: tokenizers.Tokenizer) -> tuple[bool, bool]:
    """(byte level?, strips one leading space?) of the declared decoder; ValueError when it is another kind."""
    state: dict[str, Any] = json.loads(backend.decoder.__getstate__()) if backend.decoder else {"type": "none"}
    steps = state["decoders"] if state["type"] == "Sequence" else [state]
    kinds = [step["type"] for step in steps]
    if kinds == ["ByteLevel"]:
        return True, False
    if steps[:3] == SENTENCEPIECE and steps[3:] in ([], [STRIP]):
        return False, bool(steps[3:])
    raise ValueError(
        f"decoder: {' + '.join(kinds)} is neither ByteLevel nor the SentencePiece sequence "
        "(Replace '▁', ByteFallback, Fuse, Strip of one leading space)"
    )
