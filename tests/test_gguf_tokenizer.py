"""Tokenizers from GGUF metadata: text is cut as `tokenizer.ggml.pre` says, ids equal those of independent builds.

Oracles: `tokenizers`' own pre-tokenisers and published patterns, transformers-style builds of the same vocabulary,
and SentencePiece's merge rule written out naively.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Regex, pre_tokenizers
from transformers import AutoTokenizer

from reference.gguf_tokenizer import SPLITS, build_tokenizer
from reference.tokenizer import Tokenizer
from tests.tokenizer_samples import TEXTS, byte_level_parts, sentencepiece_backend, sentencepiece_parts

# The patterns as the model authors published them (Llama 3 and Qwen2, in their tokenizer.json).
PUBLISHED = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BYTES_ONLY = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
ORACLES = {
    "gpt-2": GPT2,
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), GPT2]),
    "llama-bpe": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PUBLISHED % r"\p{N}{1,3}"), "isolated"), BYTES_ONLY]
    ),
    "qwen2": pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(PUBLISHED % r"\p{N}"), "isolated"), BYTES_ONLY]),
}


def gpt2_fields(pre: str | None = "gpt-2", **changes: Any) -> dict[str, Any]:
    """Metadata of a byte-level model: 3 control tokens, the learned pieces, a user-defined and an unused one."""
    vocab, merges = byte_level_parts()
    tokens = ["<unk>", "<s>", "</s>", *sorted(vocab, key=vocab.get), "<tool>", "[PAD0]"]
    fields = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3, 3, 3, *[1] * len(vocab), 4, 5],
        "tokenizer.ggml.merges": [f"{left} {right}" for left, right in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        **({} if pre is None else {"tokenizer.ggml.pre": pre}),
    }
    return {**fields, **{f"tokenizer.{name.replace('__', '.')}": value for name, value in changes.items()}}


def llama_fields(**changes: Any) -> dict[str, Any]:
    """Metadata of a SentencePiece model, as converted from a Llama 2 vocabulary."""
    tokens, scores, types = sentencepiece_parts()
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.token_type": types,
    }
    return {**fields, **{f"tokenizer.ggml.{name}": value for name, value in changes.items()}}


def words_of(pre: str, text: str) -> list[str]:
    """How a text is cut, each piece in the byte alphabet."""
    return [word for word, _ in build_tokenizer(gpt2_fields(pre)).backend.pre_tokenizer.pre_tokenize_str(text)]


def naive_sentencepiece(text: str, tokens: list[str], scores: list[float], types: list[int]) -> list[str]:
    """SentencePiece BPE as its rule reads: join the adjacent pair whose joined piece scores best, leftmost first."""
    score = {token: scores[index] for index, token in enumerate(tokens) if types[index] == 1}
    symbols = list("▁" + text.replace(" ", "▁")) if text else []
    while True:
        joined = [(score[a + b], -at) for at, (a, b) in enumerate(pairwise(symbols)) if a + b in score]
        if not joined:
            break
        at = -max(joined)[1]
        symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
    pieces = []
    for symbol in symbols:
        pieces += [symbol] if symbol in score else [f"<0x{byte:02X}>" for byte in symbol.encode()]
    return pieces


# --- holds ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", list(ORACLES))
def test_text_is_cut_as_the_named_pre_tokenizer_cuts_it(pre: str):
    for text in TEXTS:
        assert words_of(pre, text) == [word for word, _ in ORACLES[pre].pre_tokenize_str(text)], text


@pytest.mark.parametrize(
    ("pre", "words"),
    [
        ("default", ["a", "Ġ", "$", "123", "45", "b", "!?", "Ġ", "Ġx"]),
        ("gpt-2", ["a", "Ġ$", "12345", "b", "!?", "Ġ", "Ġx"]),
        ("llama-bpe", ["a", "Ġ$", "123", "45", "b", "!?", "Ġ", "Ġx"]),
        ("qwen2", ["a", "Ġ$", "1", "2", "3", "4", "5", "b", "!?", "Ġ", "Ġx"]),
        ("smollm", ["a", "Ġ$", "1", "2", "3", "4", "5", "b", "!?", "Ġ", "Ġx"]),
    ],
)
def test_the_pre_tokenizers_differ_where_they_should(pre: str, words: list[str]):
    assert words_of(pre, "a $12345b!?  x") == words


def test_every_supported_name_has_an_oracle_or_a_worked_example():
    assert set(SPLITS) == {*ORACLES, "default"}
    assert words_of("default", "1234567 ٣٤") == ["123", "456", "7", "Ġ", "Ù£Ù¤"]


@pytest.mark.parametrize("pre", ["gpt-2", "smollm", "qwen2"])
def test_byte_level_ids_are_the_merges_of_the_cut_words(pre: str):
    tokenizer = Tokenizer.from_gguf(gpt2_fields(pre))
    vocab, merges = byte_level_parts()
    rank = {pair: index for index, pair in enumerate(merges)}
    for text in TEXTS:
        expected = []
        for word in words_of(pre, text):
            symbols = list(word)
            while pairs := [(rank[p], at) for at, p in enumerate(pairwise(symbols)) if p in rank]:
                at = min(pairs)[1]
                symbols[at : at + 2] = [symbols[at] + symbols[at + 1]]
            expected += [vocab[symbol] + 3 for symbol in symbols]
        assert tokenizer.encode(text) == expected, text
        assert tokenizer.decode(expected) == text


def test_llama_bpe_takes_a_word_that_is_a_token_whole():
    # No merge builds "zebra" here; the word is a token all the same, and with merges alone it is five letters.
    fields = gpt2_fields("llama-bpe", ggml__add_bos_token=False)
    fields["tokenizer.ggml.tokens"] = [*fields["tokenizer.ggml.tokens"], "zebra"]
    fields["tokenizer.ggml.token_type"] = [*fields["tokenizer.ggml.token_type"], 1]
    whole = len(fields["tokenizer.ggml.tokens"]) - 1
    assert Tokenizer.from_gguf(fields).encode("zebra") == [whole]
    assert whole not in Tokenizer.from_gguf({**fields, "tokenizer.ggml.pre": "qwen2"}).encode("zebra")


def test_sentencepiece_ids_equal_a_build_from_merges():
    ours, theirs = Tokenizer.from_gguf(llama_fields()), sentencepiece_backend(adds_bos=True)
    for text in [*TEXTS, "a</s> b<tool>c  <tool>"]:
        assert ours.encode(text) == theirs.encode(text).ids, text
        assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text).ids), text


def test_sentencepiece_ids_follow_the_scores():
    parts = sentencepiece_parts()
    tokenizer = Tokenizer.from_gguf(llama_fields(add_bos_token=False))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert [parts[0][token] for token in ids] == naive_sentencepiece(text, *parts), text


@pytest.mark.parametrize(("prefix", "first"), [(True, "▁the"), (False, "the")])
def test_the_space_prefix_is_put_in_front_and_taken_away_again(prefix: bool, first: str):
    tokens = ["<unk>", "<s>", "</s>", "t", "h", "e", "▁", "he", "the", "▁the"]
    fields = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [0.0, 0.0, 0.0, -9.0, -9.0, -9.0, -9.0, -1.0, -2.0, -3.0],
        "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1, 1, 1],
        "tokenizer.ggml.add_space_prefix": prefix,
        "tokenizer.ggml.add_bos_token": False,
    }
    tokenizer = Tokenizer.from_gguf(fields)
    ids = tokenizer.encode("the the")
    assert [tokens[token] for token in ids] == [first, "▁the"]
    assert tokenizer.decode(ids) == "the the"
    assert tokenizer.strips_leading_space is prefix


@pytest.mark.parametrize(
    ("fields", "around"),
    [
        (gpt2_fields(), ([], [])),
        (gpt2_fields(ggml__add_bos_token=True), ([1], [])),
        (gpt2_fields(ggml__add_bos_token=True, ggml__add_eos_token=True), ([1], [2])),
        (gpt2_fields(ggml__add_eos_token=True), ([], [2])),
        (gpt2_fields("llama-bpe"), ([1], [])),
        (gpt2_fields("llama-bpe", ggml__add_bos_token=False), ([], [])),
        (llama_fields(), ([1], [])),
        (llama_fields(add_bos_token=False), ([], [])),
    ],
)
def test_bos_and_eos_are_added_as_the_flags_say(fields: dict[str, Any], around):
    tokenizer = Tokenizer.from_gguf(fields)
    plain = tokenizer.encode("lamp", add_special_tokens=False)
    assert tokenizer.encode("lamp") == [*around[0], *plain, *around[1]]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


@pytest.mark.parametrize("fields", [gpt2_fields("qwen2"), llama_fields(add_bos_token=False)])
def test_control_tokens_are_special_and_user_defined_ones_are_text(fields: dict[str, Any]):
    tokenizer = Tokenizer.from_gguf(fields)
    tool = fields["tokenizer.ggml.tokens"].index("<tool>")
    ids = tokenizer.encode("</s><tool></s>")
    assert ids == [2, tool, 2]
    assert tokenizer.decode(ids) == "<tool>"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "</s><tool></s>"


def test_unused_entries_are_neither_made_nor_shown():
    tokenizer = Tokenizer.from_gguf(gpt2_fields("llama-bpe", ggml__add_bos_token=False))
    unused = gpt2_fields()["tokenizer.ggml.tokens"].index("[PAD0]")
    assert tokenizer.vocab_size == unused
    assert tokenizer.token_bytes(unused) == b""
    assert unused not in tokenizer.encode("[PAD0]")


def test_a_missing_pre_tokenizer_means_default():
    text = "a$12345b!?  x"
    assert Tokenizer.from_gguf(gpt2_fields(None)).encode(text) == Tokenizer.from_gguf(gpt2_fields("default")).encode(
        text
    )


def test_chat_templates_are_read_by_name():
    fields = gpt2_fields(chat_template="A", chat_templates=["tool_use"], chat_template__tool_use="B")
    tokenizer = Tokenizer.from_gguf(fields)
    assert tokenizer.chat_templates == {"default": "A", "tool_use": "B"}
    assert Tokenizer.from_gguf(gpt2_fields()).chat_template is None


@pytest.mark.parametrize("fields", [gpt2_fields("smollm"), gpt2_fields("default"), llama_fields()])
def test_a_saved_gguf_tokenizer_is_what_transformers_reads(tmp_path: Path, fields: dict[str, Any]):
    ours = Tokenizer.from_gguf(fields)
    ours.save(tmp_path)
    theirs, again = AutoTokenizer.from_pretrained(tmp_path), Tokenizer.from_dir(tmp_path)
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text) == again.encode(text), text
    assert (again.bos_token_id, again.special_ids) == (ours.bos_token_id, ours.special_ids)


@pytest.mark.model
def test_smollm2_splits_every_digit_alone_and_equals_transformers():
    from serve.models import model_path

    folder = model_path("smollm2-135m-instruct")
    ours, theirs = Tokenizer.from_dir(folder), AutoTokenizer.from_pretrained(folder)
    assert ours.encode("٣٤٥ ½") == [164, 113, 164, 114, 164, 115, 216, 16738]
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text), text
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text
    messages = [{"role": "user", "content": "Is it raining? 😀"}]
    assert ours.apply_chat_template(messages) == theirs.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


# --- rejects -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (gpt2_fields("tekken"), "tokenizer.ggml.pre: 'tekken' is not one of default, gpt-2, llama-bpe, qwen2, smollm"),
        (gpt2_fields(ggml__model="t5"), "tokenizer.ggml.model: 't5' is not one of 'gpt2', 'llama'"),
        (gpt2_fields(ggml__model=None), "tokenizer.ggml.model: missing"),
        (gpt2_fields(ggml__merges=None), "tokenizer.ggml.merges: missing"),
        (gpt2_fields(ggml__merges=["a absent"]), "tokenizer.ggml.merges: "),
        (gpt2_fields(ggml__merges=["ab"]), "tokenizer.ggml.merges: 'ab' is not two pieces"),
        (gpt2_fields(ggml__token_type=[1]), "tokenizer.ggml.token_type: 1 types for"),
        (gpt2_fields(ggml__bos_token_id=99999), "tokenizer.ggml.bos_token_id: 99999 is outside"),
        (gpt2_fields(ggml__add_bos_token=True, ggml__bos_token_id=None), "add_bos_token: set, and no bos_token_id"),
        (llama_fields(scores=None), "tokenizer.ggml.scores: missing"),
        (llama_fields(scores=[0.0]), "tokenizer.ggml.scores: 1 scores for"),
    ],
)
def test_metadata_that_cannot_be_honoured_is_refused_by_name(fields: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        Tokenizer.from_gguf(fields)


# --- any order -----------------------------------------------------------------------------------------------------

any_text = st.text(
    st.one_of(st.sampled_from("aA's12٣½ \n\t.$é今😀ſ"), st.characters(exclude_categories=["Cs"])), max_size=30
)


@pytest.mark.parametrize("pre", list(ORACLES))
@given(text=any_text)
def test_any_text_is_cut_as_by_the_oracle(pre: str, text: str):
    assert words_of(pre, text) == [word for word, _ in ORACLES[pre].pre_tokenize_str(text)]


@given(text=any_text)
def test_any_text_gets_the_ids_that_the_scores_say(text: str):
    parts = sentencepiece_parts()
    ids = Tokenizer.from_gguf(llama_fields(add_bos_token=False)).encode(text)
    assert [parts[0][token] for token in ids] == naive_sentencepiece(text, *parts)
