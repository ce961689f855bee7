"""Text to token ids and back, so that an answer can be sent as it grows and still read as one text.

`Tokenizer` wraps a `tokenizers.Tokenizer` and gives each id its bytes; text is those bytes, joined and read as
UTF-8. `IncrementalDecoder` reads the same bytes one token at a time, so its pieces join to `decode` whatever
the token boundaries. `ByteTokenizer` is one that needs no file. Encoding is the library's; of chats it knows
that a template renders them and that the template, not the tokenizer, writes their special tokens.

Gates: gates.tokenizer. Proof: tests/test_tokenizer.py. Story: tokenizer.
"""

from __future__ import annotations

import codecs
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors

from reference.chat_template import ChatTemplate, ChatTemplateError
from reference.gguf_tokenizer import build_tokenizer
from reference.token_bytes import TokenBytes, byte_alphabet
from reference.tokenizer_files import read_tokenizer_dir, write_tokenizer_dir

__all__ = ["ByteTokenizer", "ChatTemplateError", "IncrementalDecoder", "Tokenizer"]


class Tokenizer:
    """A vocabulary with its rules. `special_tokens` maps names (`bos_token`) to text; ids are derived from it."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: Mapping[str, str] | None = None,
        chat_templates: Mapping[str, str] | None = None,
    ) -> None:
        """Take a backend over; `chat_templates` by name, empty or None for a model without one.

        Raises:
            ValueError: the backend's decoder is none whose bytes are known here.
        """
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special_tokens = dict(special_tokens or {})
        self.chat_templates = dict(chat_templates or {})
        self.vocab_size = max(backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(index for index, token in added.items() if token.special)
        self._bytes = TokenBytes(backend)
        self._adds_bos = backend.encode("").ids[:1] == [self.bos_token_id]

    @classmethod
    def from_dir(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json`, with special tokens and chat template from the files beside it.

        Raises:
            FileNotFoundError: the folder holds no `tokenizer.json`.
            ValueError: a file cannot be read as what it should be, or the decoder is not supported.
        """
        files = read_tokenizer_dir(Path(folder))
        return Tokenizer(files.backend, special_tokens=files.special_tokens, chat_templates=files.chat_templates)

    @classmethod
    def from_gguf(cls, fields: Mapping[str, Any]) -> Tokenizer:
        """Build from a GGUF file's metadata.

        Raises:
            ValueError: naming the field that is missing or whose value is not supported.
        """
        built = build_tokenizer(fields)
        return Tokenizer(built.backend, special_tokens=built.special_tokens, chat_templates=built.chat_templates)

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text, or None."""
        return self._special_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        """Id of the token that ends a text, or None; a model's full list is in its `ModelConfig`."""
        return self._special_id("eos_token")

    @property
    def chat_template(self) -> str | None:
        """Source of the default chat template, or None for a model that has none."""
        return self.chat_templates.get("default")

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Special tokens written out in the text are found as such.

        `add_special_tokens` adds what the model expects around a plain text, once: text that already begins with
        the BOS string gets no second one.

        Raises:
            ValueError: the text holds a lone surrogate, which no UTF-8 and so no token can carry.
        """
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise ValueError(f"text: character {error.start} is a lone surrogate, not a character") from None
        ids = self.backend.encode(text, add_special_tokens=add_special_tokens).ids
        if add_special_tokens and self._adds_bos and ids[1:2] == [self.bos_token_id]:
            return ids[1:]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of `ids`; bytes that are not UTF-8 become U+FFFD, ids beyond the vocabulary nothing."""
        joined = b"".join(self.token_bytes(token, skip_special_tokens=skip_special_tokens) for token in ids)
        if self.strips_leading_space:
            joined = joined.removeprefix(b" ")
        return joined.decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = True) -> bytes:
        """Bytes one id contributes, perhaps part of a character; b"" beyond the vocabulary and for skipped specials.

        A model's logits may be wider than its tokenizer; an id sampled in that gap is silent.
        """
        return b"" if skip_special_tokens and token_id in self.special_ids else self._bytes[token_id]

    @property
    def strips_leading_space(self) -> bool:
        """True when a decoded text loses one leading space: the one that encoding put in front (SentencePiece)."""
        return self._bytes.strips_leading_space

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Prompt ids of a conversation. The template writes its own BOS, so none is added here.

        Raises:
            ChatTemplateError: there is no template, or it refuses the conversation.
        """
        text = self.render_chat(messages, tools=tools, add_generation_prompt=add_generation_prompt)
        return self.encode(text, add_special_tokens=False)

    def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
    ) -> str:
        """Prompt text of a conversation, before tokenisation. Raises as `apply_chat_template` does."""
        if not self.chat_templates:
            raise ChatTemplateError("chat template: this model has none; send a plain prompt instead of messages")
        return ChatTemplate(self.chat_templates).render(
            messages, tools=tools, add_generation_prompt=add_generation_prompt, special_tokens=self.special_tokens
        )

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json`, `tokenizer_config.json` and the chat template, as transformers reads them."""
        write_tokenizer_dir(Path(folder), self.backend, self.special_tokens, self.chat_templates)

    def _special_id(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self.backend.token_to_id(token)


class ByteTokenizer(Tokenizer):
    """One id a byte: 0..255 are the bytes, then BOS, EOS and the mark that opens a chat turn. Needs no file."""

    BOS, EOS, TURN = "<bos>", "<eos>", "<turn>"
    CHAT_TEMPLATE = (
        "{{ bos_token }}{% for message in messages %}<turn>{{ message.role }}\n{{ message.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
    )

    def __init__(self) -> None:
        vocab = {character: byte for byte, character in enumerate(byte_alphabet())}
        backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(token, normalized=False) for token in (self.BOS, self.EOS, self.TURN)])
        backend.post_processor = processors.TemplateProcessing(
            single=[self.BOS, "$A"], special_tokens=[(self.BOS, 256)]
        )
        super().__init__(
            backend,
            special_tokens={"bos_token": self.BOS, "eos_token": self.EOS},
            chat_templates={"default": self.CHAT_TEMPLATE},
        )


class IncrementalDecoder:
    """One per answer: takes ids as they are sampled, gives text whose pieces join to `Tokenizer.decode` of all ids.

    A character whose bytes are spread over tokens appears when its last byte does, never as half a character.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._at_start = tokenizer.strips_leading_space

    def push(self, token_id: int) -> str:
        """The text that became certain with this token, often none."""
        data = self._tokenizer.token_bytes(token_id, skip_special_tokens=self._skip)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._utf8.decode(data)

    def flush(self) -> str:
        """What the last token left unfinished, as `decode` shows it (U+FFFD), or ""."""
        return self._utf8.decode(b"", final=True)
