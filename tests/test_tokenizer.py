"""Tokens to text and back: equal to the library and to transformers, streamed without half a character or a lost one.

Oracles: `tokenizers`' own encode and decode, transformers' fast tokenizer on the same folder, and naive matchers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers
from transformers import AutoTokenizer

import reference.stops
from gates.core import GateError
from gates.tokenizer import check_text_is_stream, check_withheld_is_stop_prefix
from reference.stops import StopMatcher
from reference.token_bytes import byte_alphabet
from reference.tokenizer import ByteTokenizer, IncrementalDecoder, Tokenizer
from tests.tokenizer_samples import TEXTS, byte_level_backend, sentencepiece_backend

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
TOKENIZERS = {
    "byte-level": Tokenizer(byte_level_backend(), special_tokens=SPECIAL),
    "byte-level-bos": Tokenizer(byte_level_backend(adds_bos=True), special_tokens=SPECIAL),
    "sentencepiece": Tokenizer(sentencepiece_backend(), special_tokens=SPECIAL),
    "bytes": ByteTokenizer(),
}
every_kind = pytest.mark.parametrize("kind", list(TOKENIZERS))


def pieces_of(tokenizer: Tokenizer, ids: list[int], *, skip: bool = True) -> list[str]:
    decoder = IncrementalDecoder(tokenizer, skip_special_tokens=skip)
    return [*(decoder.push(token) for token in ids), decoder.flush()]


def tokenizer_of(tokens: list[bytes]) -> Tokenizer:
    """A byte-level tokenizer whose ids are exactly these byte strings; it can only decode."""
    alphabet = byte_alphabet()
    vocab = {"".join(alphabet[byte] for byte in token): index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def feed(matcher: StopMatcher, pieces: list[str]) -> tuple[list[str], str | None]:
    """What a client is sent, piece by piece, and the stop that ended it."""
    sent = []
    for piece in pieces:
        text, stop = matcher.push(piece)
        sent.append(text)
        if stop is not None:
            return sent, stop
    return [*sent, matcher.flush()], None


# --- holds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("make", [byte_level_backend, sentencepiece_backend])
def test_ids_and_text_equal_those_of_transformers(tmp_path: Path, make, adds_bos: bool):
    ours = Tokenizer(make(adds_bos=adds_bos), special_tokens=SPECIAL)
    ours.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_dir(tmp_path)
    assert (again.bos_token_id, again.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    for text in [*TEXTS, "a<|turn|>b</s> <tool>x"]:
        ids = again.encode(text)
        assert ids == theirs.encode(text), text
        assert again.encode(text, add_special_tokens=False) == theirs.encode(text, add_special_tokens=False), text
        for skip in (True, False):
            assert again.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip), text


@every_kind
def test_a_text_returns_from_its_ids(kind: str):
    tokenizer = TOKENIZERS[kind]
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@every_kind
def test_special_tokens_are_added_once(kind: str):
    tokenizer = TOKENIZERS[kind]
    bos, begins = tokenizer.bos_token_id, tokenizer.special_tokens["bos_token"]
    plain = tokenizer.encode("Is it raining?", add_special_tokens=False)
    adds = tokenizer.encode("Is it raining?")[: -len(plain)]
    assert adds == ([] if kind == "byte-level" else [bos])
    written = tokenizer.encode(begins + "Is it raining?")
    assert written[0] == bos
    assert written[1:].count(bos) == 0


def test_bos_written_twice_by_the_user_stays_twice():
    for kind in ("byte-level", "byte-level-bos"):
        tokenizer = TOKENIZERS[kind]
        assert tokenizer.encode("<s><s>a").count(tokenizer.bos_token_id) == 2


@every_kind
def test_ids_beyond_the_vocabulary_are_silent(kind: str):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode("lamp", add_special_tokens=False)
    gap = [tokenizer.vocab_size, tokenizer.vocab_size + 150, 2**40, -1]
    assert [tokenizer.token_bytes(token) for token in gap] == [b""] * 4
    assert tokenizer.decode([*ids, *gap, *ids]) == tokenizer.decode([*ids, *ids])


@every_kind
def test_special_tokens_are_skipped_or_shown(kind: str):
    tokenizer = TOKENIZERS[kind]
    bos, shown = tokenizer.bos_token_id, tokenizer.special_tokens["bos_token"]
    assert bos in tokenizer.special_ids
    assert tokenizer.token_bytes(bos) == b""
    assert tokenizer.token_bytes(bos, skip_special_tokens=False) == shown.encode()
    assert tokenizer.decode([bos]) == ""
    assert tokenizer.decode([bos], skip_special_tokens=False) == shown


@pytest.mark.parametrize(
    "tokens",
    [
        [b"\xc4", b"\x8f"],
        [b"\xf0\x9f", b"\x98\x80"],
        [b"\xf0", b"\x9f\x98", b"\x80"],
        [b"\xf0", b"\x9f", b"\x98", b"\x80"],
        [b"a", b"\xf0\x9f\x98", b"\x80b"],
        [b"a\xf0", b"\x9f", b"\x98", b"\x80b", b"\xc4", b"\x8f\xf0\x9f", b"\x98\x80\xc3", b"\xa9"],
    ],
)
def test_a_character_split_over_tokens_appears_once_and_whole(tokens: list[bytes]):
    distinct = list(dict.fromkeys(tokens))
    tokenizer = tokenizer_of(distinct)
    ids = [distinct.index(token) for token in tokens] * 3
    pieces = pieces_of(tokenizer, ids)
    assert not any("\ufffd" in piece for piece in pieces)
    assert "".join(pieces) == (b"".join(tokens) * 3).decode() == tokenizer.decode(ids)


def test_a_character_left_unfinished_is_shown_as_decode_shows_it():
    tokenizer = tokenizer_of([b"a\xf0\x9f", b"\x98"])
    assert pieces_of(tokenizer, [0, 1]) == ["a", "", "\ufffd"]
    assert tokenizer.decode([0, 1]) == "a\ufffd"


def test_words_of_a_leading_space_vocabulary_do_not_join():
    tokenizer = TOKENIZERS["sentencepiece"]
    text = "The river runs under the bridge"
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert "".join(pieces_of(tokenizer, ids)) == text
    # Decoding each id alone, as if it began a text, loses the space in front of every word.
    assert "".join(tokenizer.decode([token]) for token in ids) != text


def test_an_added_token_in_latin_letters_keeps_them():
    backend = byte_level_backend()
    backend.add_tokens(["é", "à la"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.decode(tokenizer.encode("xéy à la z")) == "xéy à la z"


def test_save_and_load_keep_ids_specials_and_templates(tmp_path: Path):
    templates = {"default": "{{ bos_token }}{{ messages[0].content }}\r\n", "tool_use": "tools\n"}
    first = Tokenizer(byte_level_backend(adds_bos=True), special_tokens=SPECIAL, chat_templates=templates)
    first.save(tmp_path / "new" / "folder")
    again = Tokenizer.from_dir(tmp_path / "new" / "folder")
    assert (again.special_tokens, again.chat_templates) == (SPECIAL, templates)
    assert (again.special_ids, again.vocab_size) == (first.special_ids, first.vocab_size)
    assert again.chat_template == templates["default"]


def test_byte_tokenizer_loads_from_its_own_files(tmp_path: Path):
    ByteTokenizer().save(tmp_path)
    again = Tokenizer.from_dir(tmp_path)
    messages = [{"role": "user", "content": "ď 😀"}]
    assert again.apply_chat_template(messages) == ByteTokenizer().apply_chat_template(messages)
    assert again.encode("ab\x00ÿ") == [256, 97, 98, 0, 0xC3, 0xBF]
    assert again.vocab_size == 259


def test_specials_are_read_from_every_file_that_may_hold_them(tmp_path: Path):
    backend = byte_level_backend()
    backend.save(str(tmp_path / "tokenizer.json"))
    listed = {"content": "<new>", "special": True, "normalized": False}
    config = {"eos_token": {"content": "</s>"}, "added_tokens_decoder": {backend.get_vocab_size(): listed}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": "<s>", "eos_token": "wrong"}', "utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    new = tokenizer.encode("<new>")
    assert new == [backend.get_vocab_size()]
    assert set(new) <= tokenizer.special_ids


def test_a_named_special_token_is_special_though_only_the_vocabulary_holds_it(tmp_path: Path):
    vocab = {character: byte for byte, character in enumerate(byte_alphabet())} | {"<s>": 256}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.encode("a<s>") == AutoTokenizer.from_pretrained(tmp_path).encode("a<s>") == [97, 256]
    assert tokenizer.special_ids == {256}


def test_truncation_and_padding_of_the_file_are_not_applied(tmp_path: Path):
    backend = byte_level_backend()
    backend.enable_truncation(4)
    backend.enable_padding(length=4)
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.decode(tokenizer.encode("x" * 50)) == "x" * 50
    assert tokenizer.encode("") == []


@pytest.mark.parametrize(
    ("stops", "sent", "stop"),
    [
        (["ber la"], "The am", "ber la"),
        (["lamp glows, and then"], "The amber lamp glows", None),
        (["amber lamp glows. Th"], "The amber lamp glows", None),
        (["w"], "The amber lamp glo", "w"),
        ([" lamp", " la"], "The amber", " la"),
        ([" la", " lamp"], "The amber", " la"),
        (["r l", "er l"], "The amb", "er l"),
        (["amber lamp", "ber"], "The am", "ber"),
        (["glows"], "The amber lamp ", "glows"),
        (["The amber lamp glows"], "", "The amber lamp glows"),
        (["zebra"], "The amber lamp glows", None),
        ([], "The amber lamp glows", None),
    ],
)
@pytest.mark.parametrize("width", [1, 3, 7, 100])
def test_nothing_of_a_stop_is_sent_however_text_is_cut(stops, sent, stop, width: int):
    answer = "The amber lamp glows"
    pieces = [answer[at : at + width] for at in range(0, len(answer), width)]
    got, matched = feed(StopMatcher(stops), pieces)
    assert ("".join(got), matched) == (sent, stop)


def test_only_what_can_become_a_stop_is_withheld():
    matcher = StopMatcher(["gamma\nZZZZZZ"])
    assert [matcher.push(piece)[0] for piece in ("alpha ", "beta g", "amm", "a")] == ["alpha ", "beta ", "", ""]
    assert matcher.flush() == "gamma"
    assert matcher.flush() == ""


def test_text_after_a_stop_is_dropped():
    matcher = StopMatcher(["b"])
    assert matcher.push("abc") == ("a", "b")
    assert matcher.push("more") == ("", "b")
    assert matcher.flush() == ""


# --- rejects -------------------------------------------------------------------------------------------------------


def test_gate_rejects_text_decoded_token_by_token():
    tokenizer = tokenizer_of([b"a", b"\xc4", b"\x8f"])
    streamed = "".join(tokenizer.decode([token]) for token in [0, 1, 2])
    with pytest.raises(GateError, match=r"gate tokenizer.stream: .* at character 1 where .* has 'ď'"):
        check_text_is_stream(streamed=streamed, decoded=tokenizer.decode([0, 1, 2]))


def test_gate_rejects_withheld_text_lost_at_the_end():
    matcher = StopMatcher(["gamma\nZ"])
    streamed = "".join(matcher.push(piece)[0] for piece in ("alpha ", "gamma"))  # and no flush
    with pytest.raises(GateError, match="6 characters sent, 11 decoded"):
        check_text_is_stream(streamed=streamed, decoded="alpha gamma")


def test_gate_rejects_the_first_part_of_a_stop_already_sent():
    with pytest.raises(GateError, match="cut at character 9 for stop 'ber la'"):
        check_text_is_stream(streamed="The amber", decoded="The amber lamp", stop="ber la")
    check_text_is_stream(streamed="The am", decoded="The amber lamp", stop="ber la")


def test_gate_rejects_text_withheld_for_no_stop(monkeypatch: pytest.MonkeyPatch):
    # A table that falls back one character at a time believes "yy" to be the beginning of "xyz".
    monkeypatch.setattr(reference.stops, "_failure_table", lambda stop: list(range(len(stop))))
    with pytest.raises(GateError, match=r"gate tokenizer.withheld: 2 characters withheld"):
        StopMatcher(["xyz"]).push("xyy")


def test_gate_rejects_a_whole_stop_withheld():
    with pytest.raises(GateError, match="beginning of none of 1 stops"):
        check_withheld_is_stop_prefix(withheld="stop", stops=["stop"])


@pytest.mark.parametrize(
    "decoder", [None, decoders.WordPiece(), decoders.Metaspace(), decoders.Sequence([decoders.Fuse()])]
)
def test_a_decoder_without_known_bytes_is_refused_by_name(decoder):
    backend = tokenizers.Tokenizer(models.BPE())
    if decoder is not None:
        backend.decoder = decoder
    name = "none" if decoder is None else type(decoder).__name__.replace("Sequence", "Fuse")
    with pytest.raises(ValueError, match=f"decoder: {name} is neither ByteLevel nor"):
        Tokenizer(backend)


def test_a_lone_surrogate_is_refused_where_it_stands():
    with pytest.raises(ValueError, match="text: character 2 is a lone surrogate"):
        ByteTokenizer().encode("ab\ud800c")


def test_an_empty_stop_is_refused():
    with pytest.raises(ValueError, match="stop: '' is empty"):
        StopMatcher(["a", ""])


def test_missing_and_broken_files_are_named(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"tokenizer.json"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{", "utf-8")
    with pytest.raises(ValueError, match=r"tokenizer.json: "):
        Tokenizer.from_dir(tmp_path)
    byte_level_backend().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[]", "utf-8")
    with pytest.raises(ValueError, match=r"tokenizer_config.json: list is not an object"):
        Tokenizer.from_dir(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"added_tokens_decoder": {"9999": {"content": "<x>"}}}', "utf-8")
    with pytest.raises(ValueError, match="'<x>' is listed as id 9999 and became"):
        Tokenizer.from_dir(tmp_path)


DAMAGE = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 400) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["content", "special", "name", "template", "258", "x"]), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(key=st.sampled_from(["added_tokens_decoder", "bos_token", "chat_template"]), value=DAMAGE)
def test_a_damaged_config_is_read_or_refused_by_its_path_and_key(tmp_path_factory, key: str, value: Any):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    ByteTokenizer().save(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({key: value}), "utf-8")
    try:
        Tokenizer.from_dir(folder)
        told = ""
    except ValueError as error:
        told = str(error)
    assert not told or told.startswith(f"{folder / 'tokenizer_config.json'}: {key}: ")


def test_a_template_that_is_not_utf_8_is_named(tmp_path: Path):
    ByteTokenizer().save(tmp_path)
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"chat_template\.jinja is not UTF-8"):
        Tokenizer.from_dir(tmp_path)


# --- any order -----------------------------------------------------------------------------------------------------


@every_kind
@given(data=st.data(), skip=st.booleans())
def test_any_ids_stream_to_what_they_decode_to(kind: str, data: st.DataObject, skip: bool):
    tokenizer = TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 3), max_size=40))
    decoded = tokenizer.decode(ids, skip_special_tokens=skip)
    check_text_is_stream(streamed="".join(pieces_of(tokenizer, ids, skip=skip)), decoded=decoded)


@given(tokens=st.lists(st.binary(min_size=1, max_size=3), min_size=1, max_size=20, unique=True), data=st.data())
def test_any_bytes_stream_to_what_they_decode_to(tokens: list[bytes], data: st.DataObject):
    tokenizer = tokenizer_of(tokens)
    ids = data.draw(st.lists(st.integers(0, len(tokens) - 1), max_size=30))
    decoded = tokenizer.decode(ids)
    assert decoded == tokenizer.backend.decode(ids)
    check_text_is_stream(streamed="".join(pieces_of(tokenizer, ids)), decoded=decoded)


@every_kind
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
def test_any_text_returns_from_its_ids(kind: str, text: str):
    tokenizer = TOKENIZERS[kind]
    ids = tokenizer.encode(text)
    plain = tokenizer.backend.decode(ids)
    assert tokenizer.decode(ids) == plain
    if kind != "sentencepiece" or "▁" not in text:
        assert tokenizer.decode(ids) == text


def naive_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """The rule itself: the shortest beginning of `text` that ends in a stop, cut before the longest such stop."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@given(
    stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4),
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
)
def test_any_stops_and_any_cutting_give_the_naive_answer(stops: list[str], pieces: list[str]):
    matcher = StopMatcher(stops)
    arrived, sent = "", ""
    for piece in pieces:
        arrived += piece
        text, stop = matcher.push(piece)
        sent += text
        if stop is not None:
            break
        # Sent early enough: every beginning that still waits could become a stop.
        beginnings = {stop[:size] for stop in stops for size in range(1, len(stop))}
        waiting = max((len(begin) for begin in beginnings if arrived.endswith(begin)), default=0)
        assert len(arrived) - len(sent) == waiting
    sent += matcher.flush()
    assert (sent, matcher.matched) == naive_stop("".join(pieces), stops)
