"""Small tokenizers of both kinds, and text in many scripts to try them on; shared by three test files."""

from __future__ import annotations

import json
from functools import lru_cache

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from reference.token_bytes import byte_alphabet

CORPUS = [
    "The amber lamp glows while the river runs north under the old stone bridge.",
    "def area(width, height):\n    return width * height  # square metres\n",
    "Zażółć gęślą jaźń; ďábel, šťastný den! Straße, façade, naïve coöperation.",
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "今日は良い天気ですね。明日も晴れるでしょう。",
    "I'm sure we'll see 12 or 345 of them; they've 6789 more than I'D like.",
]
TEXTS = [
    *CORPUS,
    "",
    " ",
    "a",
    "  two  spaces, a\ttab and a newline \n\n  end ",
    "٣٤٥ ½ ४२ Ⅷ ² 1234567",
    "😀😀 👩‍👩‍👧‍👦 🇨🇿 flag",
    "שלום עולם مرحبا بالعالم नमस्ते दुनिया 안녕하세요 세계",
    "\x00\x01\x7f control \u00a0 nbsp \u3000 ideographic \ufeff bom \ufffd replacement",
    "e\u0301 combining, ﬁ ligature, K kelvin",
    'https://example.org/a?b=c&d=%20#e <b>&amp;</b> {"k": [1, 2.5e-3, null]}',
    "'s 't 're'VE don'T ''' \"\"\" \\n \\\\",
    "x" * 300,
    "unseen: \U0001f9ea\U00010348\u0e01\u0f40",
]


@lru_cache(maxsize=4)
def _trained(sentencepiece: bool) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Pieces and merges learned from CORPUS; character pieces first, then joined ones in merge order."""
    backend = tokenizers.Tokenizer(models.BPE())
    if sentencepiece:
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # as SentencePiece: ▁ only leads
    else:
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = [] if sentencepiece else list(byte_alphabet())
    trainer = trainers.BpeTrainer(vocab_size=520, initial_alphabet=alphabet, show_progress=False, max_token_length=8)
    backend.train_from_iterator(CORPUS * 2, trainer)
    state = json.loads(backend.to_str())["model"]
    return state["vocab"], [tuple(merge) for merge in state["merges"]]


def byte_level_parts() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Vocabulary and merges of a trained byte-level BPE; all 256 bytes are in it."""
    vocab, merges = _trained(False)
    return dict(vocab), list(merges)


def byte_level_backend(*, adds_bos: bool = False) -> tokenizers.Tokenizer:
    """A GPT-2 style tokenizer with `<s>`, `</s>`, `<|turn|>` special and `<tool>` added but not special."""
    vocab, merges = byte_level_parts()
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<s>", "</s>", "<|turn|>")])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    if adds_bos:
        _post_process(backend)
    return backend


def sentencepiece_parts() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and GGUF types of a Llama 2 style vocabulary: 3 control, 256 bytes, learned pieces."""
    vocab, _ = _trained(True)
    pieces = sorted(vocab, key=lambda piece: (len(piece) == 1, vocab[piece]))
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    tokens = ["<unk>", "<s>", "</s>", *bytes_, *pieces, "<tool>"]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0]
    return tokens, scores, [2, 3, 3, *[6] * 256, *[1] * len(pieces), 4]


def sentencepiece_backend(*, adds_bos: bool = True) -> tokenizers.Tokenizer:
    """The same vocabulary as transformers would write it: merges, Prepend, ByteFallback and Strip."""
    tokens, scores, types = sentencepiece_parts()
    vocab = {token: index for index, token in enumerate(tokens)}
    rank = {token: scores[index] for token, index in vocab.items() if types[index] == 1}
    splits = [(piece[:cut], piece[cut:]) for piece in rank for cut in range(1, len(piece))]
    merges = [pair for pair in splits if pair[0] in rank and pair[1] in rank]
    merges.sort(key=lambda pair: (-rank[pair[0] + pair[1]], -len(pair[0])))
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in ("<unk>", "<s>", "</s>")])
    backend.add_tokens([AddedToken("<tool>", normalized=False)])
    if adds_bos:
        _post_process(backend)
    return backend


def _post_process(backend: tokenizers.Tokenizer) -> None:
    backend.post_processor = processors.TemplateProcessing(
        single=["<s>", "$A"], special_tokens=[("<s>", backend.token_to_id("<s>"))]
    )
