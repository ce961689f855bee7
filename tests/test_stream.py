"""An answer's pieces join to its text, whatever its tokens and stops; events after the end are refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gates import GateError
from gates.stream import check_all_answers_ended, check_answers_end_once
from reference.request import Event, SamplingParams, TokenLogprobs
from reference.tokenizer import ByteTokenizer
from serve.answer import Answer, AnswerFailed, Piece
from tests.server import EOS, piece_tokenizer

BYTES = ByteTokenizer()


def run(ids: list[int], *, finish: str = "length", tokenizer=BYTES, logprobs: bool = False, **params) -> Run:
    """Push ids one by one; the last carries `finish`. Stops early when the answer says it has ended."""
    answer = Answer(tokenizer, SamplingParams(max_tokens=None, **params))
    made = []
    for i, token in enumerate(ids):
        reason = finish if i == len(ids) - 1 else None
        made.append(answer.push(Event("r", token, reason, TokenLogprobs(-1.0, 1) if logprobs else None)))
        if answer.finish_reason is not None:
            break
    return Run(answer, made)


class Run:
    def __init__(self, answer: Answer, pieces: list[Piece]) -> None:
        self.answer, self.pieces = answer, pieces
        self.texts = [piece.text for piece in pieces if piece.text]


# ---- holds ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["ď", "😀", "aď😀b", "ďďď😀😀"])
def test_no_piece_holds_half_a_character(text: str):
    ran = run([*text.encode(), EOS], finish="stop")
    assert ran.texts == list(text)
    assert ran.answer.num_tokens == len(text.encode()) + 1


@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_character_left_unfinished_is_shown_once_at_the_end(cut: int):
    ran = run([*b"a", *"😀".encode()[:cut]])
    assert ran.texts == ["a", "�"]


@pytest.mark.parametrize(
    ("stop", "shown"),
    [("ber la", "The am"), ("T", ""), ("amber lamp glows", "The "), ("r", "The ambe"), ("glows", "The amber lamp ")],
)
def test_text_ends_before_its_stop_string(stop: str, shown: str):
    ran = run(list(b"The amber lamp glows"), stop=(stop,))
    assert ran.answer.text == shown
    assert ran.answer.finish_reason == "stop"
    assert ran.answer.num_tokens == len(shown) + len(stop)


def test_only_what_can_become_a_stop_is_withheld():
    ran = run(list(b"xaxab"), stop=("ab",))
    assert [piece.text for piece in ran.pieces] == ["x", "", "ax", "", ""]


def test_withheld_text_appears_when_the_answer_ends_without_the_stop():
    for finish, ids in (("stop", [*b"gam", EOS]), ("length", [*b"gam"])):
        ran = run(ids, finish=finish, stop=("gamma",))
        assert (ran.answer.text, ran.answer.finish_reason) == ("gam", finish)


def test_a_stop_completed_by_the_last_token_is_a_stop_not_a_length():
    ran = run(list(b"one two"), stop=("two",))
    assert (ran.answer.text, ran.answer.finish_reason) == ("one ", "stop")


@pytest.mark.parametrize("min_tokens", [0, 1, 3, 7])
def test_stop_strings_count_only_after_min_tokens(min_tokens: int):
    ran = run(list(b"abababab"), stop=("ab",), min_tokens=min_tokens)
    assert ran.answer.num_tokens == {0: 2, 1: 4, 3: 6, 7: 8}[min_tokens]


def test_the_token_that_ends_an_answer_is_counted_and_not_shown():
    ran = run([*b"hi", ord("!")], finish="stop", stop_token_ids=(ord("!"),), logprobs=True)
    assert (ran.answer.text, ran.answer.num_tokens, len(ran.answer.positions)) == ("hi", 3, 2)


def test_logprobs_travel_with_the_first_text_at_or_after_their_token():
    ran = run([*"aďb".encode()], logprobs=True)
    assert [(p.text, [q.offset for q in p.positions]) for p in ran.pieces] == [
        ("a", [0]),
        ("", []),
        ("ď", [1, 1]),
        ("b", [2]),
    ]


# ---- rejects ----------------------------------------------------------------------------------------------------


def test_an_answer_the_engine_gave_up_is_an_error_with_its_words():
    answer = Answer(BYTES, SamplingParams())
    with pytest.raises(AnswerFailed, match="logits are not finite"):
        answer.push(Event("r", None, "error", error="logits are not finite"))


def test_gate_rejects_an_event_after_the_last():
    with pytest.raises(GateError, match=r"stream\.ends_once: event for 'a' after the one that ended it"):
        check_answers_end_once(events=[("a", "stop"), ("b", None), ("a", None)], open_ids=["a", "b"])


def test_gate_rejects_an_event_for_an_answer_that_is_not_open():
    with pytest.raises(GateError, match=r"event for 'ghost', the server has 1 answers open, not it"):
        check_answers_end_once(events=[("ghost", None)], open_ids=["a"])


def test_gate_rejects_a_reply_with_an_unfinished_choice():
    check_all_answers_ended(open_ids=[], finish_reasons=["stop", "length"])
    with pytest.raises(GateError, match=r"choice \[1\] of 2 has no finish reason"):
        check_all_answers_ended(open_ids=[], finish_reasons=["stop", None])
    with pytest.raises(GateError, match="1 answers open"):
        check_all_answers_ended(open_ids=["r-1"], finish_reasons=["stop"])


def test_gate_rejects_a_decoder_that_shows_each_token_alone(monkeypatch: pytest.MonkeyPatch):
    # The usual fault: every id decoded by itself, so a character of two tokens becomes two U+FFFD.
    alone = {"push": lambda self, token: BYTES.decode([token]), "flush": lambda self: ""}
    monkeypatch.setattr("serve.answer.IncrementalDecoder", type("Alone", (), {"__init__": lambda *_: None, **alone}))
    with pytest.raises(GateError, match=r"tokenizer\.stream"):
        run(list("ď".encode()))


# ---- any order --------------------------------------------------------------------------------------------------

PIECES = [b"\xf0\x9f", b"\x98\x80", b"\xc4", b"\x8fx", b"ab", b"bc", b" a", b"\xf0\x9f\x98"]
MANY = piece_tokenizer(PIECES)
tokens = st.one_of(
    st.sampled_from(list(b"abc ")), st.sampled_from([0xC4, 0x8F, 0xF0, 0x9F, 0x98, 0x80]), st.integers(256, 263)
)
stops = st.lists(st.text("abc 😀ď", min_size=1, max_size=4), max_size=4).map(tuple)


@given(ids=st.lists(tokens, min_size=1, max_size=30), stop=stops, min_tokens=st.integers(0, 5))
def test_pieces_join_to_the_text_of_the_whole_answer(ids: list[int], stop: tuple[str, ...], min_tokens: int):
    ran = run(ids, stop=stop, min_tokens=min_tokens, tokenizer=MANY, logprobs=True)
    answer = ran.answer
    assert "".join(ran.texts) == answer.text
    used = ids[: answer.num_tokens]
    whole = MANY.decode(used)
    if answer.finish_reason == "length":
        assert (answer.text, used) == (whole, ids)
    else:
        assert whole.startswith(answer.text)
        assert whole[len(answer.text) :].startswith(stop)
    # Nothing was sent that a stop then took back, and every token has its logprobs once, in order.
    assert [position.token_id for piece in ran.pieces for position in piece.positions] == used
    offsets = [position.offset for position in answer.positions]
    assert all(a <= b for a, b in pairwise(offsets))


@given(text=st.text("abc", min_size=1, max_size=20), stop=stops)
def test_an_answer_without_a_stop_in_it_is_never_cut(text: str, stop: tuple[str, ...]):
    ran = run(list(text.encode()), stop=stop)
    first = min((text.find(s) + len(s) for s in stop if s in text), default=None)
    assert (ran.answer.finish_reason == "stop") == (first is not None)
    assert ran.answer.num_tokens == (len(text) if first is None else first)
