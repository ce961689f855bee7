"""A `tokenizers.Tokenizer` from the metadata of a GGUF file, splitting text as the file says.

`tokenizer.ggml.model` is `gpt2` (byte-level BPE with merges) or `llama` (SentencePiece BPE: scores, byte
fallback, `▁` for a space); for `gpt2`, `tokenizer.ggml.pre` names how text is cut into words before the merges.
A cut that is not ours gives other ids and a worse model without a word, so an unknown name is refused. Regular
expressions and defaults are those of llama.cpp (src/llama-vocab.cpp). It takes the metadata as a mapping and
never opens a file.

Proof: tests/test_gguf_tokenizer.py. Story: tokenizer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = 1, 2, 3, 4, 5  # tokenizer.ggml.token_type (6: one byte)

SPACE = "▁"  # SentencePiece writes a space as U+2581
CONTRACTIONS = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
WORDS = rf"{CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|%s| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"

# Applied in turn, each to the pieces of the one before; text between matches is a piece too.
SPLITS: dict[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", GPT2_WORDS, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (GPT2_WORDS,),
    "llama-bpe": (WORDS % r"\p{N}{1,3}",),
    "qwen2": (WORDS % r"\p{N}",),
    "smollm": (r"\p{N}", GPT2_WORDS),
}
BOS_BY_DEFAULT = ("llama-bpe",)  # of the pre-tokenisers above: those whose models expect BOS when no flag says so

SPECIAL_FIELDS = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
}
LLAMA_SPECIAL_IDS = {"bos_token": 1, "eos_token": 2, "unk_token": 0}  # what a `llama` file means by silence


@dataclass(frozen=True, slots=True)
class GGUFTokenizer:
    """What the metadata says: the tokenizer, its named special tokens (text), and its chat templates by name."""

    backend: Tokenizer
    special_tokens: dict[str, str]
    chat_templates: dict[str, str]


def build_tokenizer(fields: Mapping[str, Any]) -> GGUFTokenizer:
    """Build from a GGUF file's metadata (`tokenizer.*` keys; arrays are sequences).

    Raises:
        ValueError: a field is missing, or names a tokenizer that is not implemented here.
    """
    model = _need(fields, "tokenizer.ggml.model")
    tokens = [str(token) for token in _need(fields, "tokenizer.ggml.tokens")]
    types = [int(kind) for kind in fields.get("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)]
    if len(types) != len(tokens):
        raise ValueError(f"tokenizer.ggml.token_type: {len(types)} types for {len(tokens)} tokens")
    special = _special_tokens(fields, tokens, LLAMA_SPECIAL_IDS if model == "llama" else {})
    # Unused entries only pad the vocabulary to a round size: no text makes them and they stand for no text.
    vocab = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    if model == "gpt2":
        backend = _byte_level_bpe(fields, vocab)
        add_bos = _pre(fields) in BOS_BY_DEFAULT
    elif model == "llama":
        backend = _sentencepiece_bpe(fields, tokens, types, vocab, special.get("unk_token"))
        add_bos = True
    else:
        raise ValueError(f"tokenizer.ggml.model: {model!r} is not one of 'gpt2', 'llama'")
    _add_whole_tokens(backend, tokens, types)
    _add_post_processor(
        backend,
        bos=_added(fields, special, "bos", default=add_bos),
        eos=_added(fields, special, "eos", default=False),
    )
    return GGUFTokenizer(backend, special, _chat_templates(fields))


def _need(fields: Mapping[str, Any], name: str) -> Any:
    if fields.get(name) is None:
        raise ValueError(f"{name}: missing from the GGUF metadata")
    return fields[name]


def _pre(fields: Mapping[str, Any]) -> str:
    name = fields.get("tokenizer.ggml.pre", "default")
    if name not in SPLITS:
        raise ValueError(f"tokenizer.ggml.pre: {name!r} is not one of {', '.join(sorted(SPLITS))}")
    return name


def _special_tokens(fields: Mapping[str, Any], tokens: Sequence[str], silent: Mapping[str, int]) -> dict[str, str]:
    special = {}
    for name, field in SPECIAL_FIELDS.items():
        index = fields.get(field, silent.get(name))
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise ValueError(f"{field}: {index} is outside the vocabulary of {len(tokens)} tokens")
        special[name] = tokens[index]
    return special


def _byte_level_bpe(fields: Mapping[str, Any], vocab: dict[str, int]) -> Tokenizer:
    """GPT-2's scheme: text as UTF-8 bytes, each byte one printable character, then the listed merges."""
    splits = SPLITS[_pre(fields)]
    merges = []
    for line in _need(fields, "tokenizer.ggml.merges"):
        middle = line.find(" ", 1)
        if middle < 0:
            raise ValueError(f"tokenizer.ggml.merges: {line!r} is not two pieces with a space between")
        merges.append((line[:middle], line[middle + 1 :]))
    # Llama 3 takes a word that is itself a token whole, even where the merges would not build it.
    whole_words = _pre(fields) == "llama-bpe"
    try:
        backend = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=whole_words))
    except Exception as error:  # the library raises nothing narrower
        raise ValueError(f"tokenizer.ggml.merges: {error}") from error
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in splits),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece_bpe(
    fields: Mapping[str, Any], tokens: Sequence[str], types: Sequence[int], vocab: dict[str, int], unknown: str | None
) -> Tokenizer:
    """Llama 2's scheme: the whole text is one word, pairs join in order of the joined piece's score."""
    scores = _need(fields, "tokenizer.ggml.scores")
    if len(scores) != len(tokens):
        raise ValueError(f"tokenizer.ggml.scores: {len(scores)} scores for {len(tokens)} tokens")
    pieces = {token: float(scores[index]) for index, token in enumerate(tokens) if types[index] == NORMAL}
    backend = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=_merges_from_scores(pieces, vocab),
            unk_token=unknown,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = bool(fields.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if prefix else spaces
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace(SPACE, " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            *([decoders.Strip(" ", 1, 0)] if prefix else []),
        ]
    )
    return backend


def _merges_from_scores(pieces: Mapping[str, float], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best score of the joined piece first, then lowest id."""
    merges = []
    for piece, score in pieces.items():
        for middle in range(1, len(piece)):
            left, right = piece[:middle], piece[middle:]
            if left in pieces and right in pieces:
                merges.append((-score, vocab[piece], -len(left), left, right))
    merges.sort()
    return [(left, right) for *_, left, right in merges]


def _add_whole_tokens(backend: Tokenizer, tokens: Sequence[str], types: Sequence[int]) -> None:
    """Tokens found in the text before anything is cut; all but the user-defined are special (not shown)."""
    for kinds, special in (((CONTROL, UNKNOWN), True), ((USER_DEFINED,), False)):
        whole = [token for index, token in enumerate(tokens) if types[index] in kinds and token]
        backend.add_tokens([AddedToken(token, special=special, normalized=False) for token in whole])


def _added(fields: Mapping[str, Any], special: Mapping[str, str], name: str, *, default: bool) -> str | None:
    """The special token put around a plain text, or None; a flag without its token cannot be honoured."""
    flag = fields.get(f"tokenizer.ggml.add_{name}_token")
    if flag and f"{name}_token" not in special:
        raise ValueError(f"tokenizer.ggml.add_{name}_token: set, and no {name}_token_id names the token")
    return special.get(f"{name}_token") if (default if flag is None else flag) else None


def _add_post_processor(backend: Tokenizer, *, bos: str | None, eos: str | None) -> None:
    parts = [*([bos] if bos else []), "$A", *([eos] if eos else [])]
    if len(parts) > 1:
        backend.post_processor = processors.TemplateProcessing(
            single=parts,
            special_tokens=[(token, backend.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token],
        )


def _chat_templates(fields: Mapping[str, Any]) -> dict[str, str]:
    templates = {name: fields[f"tokenizer.chat_template.{name}"] for name in fields.get("tokenizer.chat_templates", [])}
    if fields.get("tokenizer.chat_template"):
        templates["default"] = fields["tokenizer.chat_template"]
    return templates
