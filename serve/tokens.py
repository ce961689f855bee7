"""`/tokenize` and `/detokenize`: what a text is to the model, and back, without computing anything.

The bodies and replies are vLLM's. A prompt gives the ids that `/v1/completions` would continue from, a conversation
those of `/v1/chat/completions`; ids give their text with special tokens written out. It knows no engine.

Proof: tests/test_tokens.py. Story: app.
"""

from __future__ import annotations

from typing import Any

from pydantic import model_validator

from reference.tokenizer import Tokenizer
from serve.errors import bad_request
from serve.messages import Body, Message, Tool
from serve.prompts import Limits, check_size, render
from serve.replies import token_text


class TokenizeBody(Body):
    """`POST /tokenize`: a prompt or a conversation, not both."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None  # default: true for a prompt, false for a conversation, as when they run
    add_generation_prompt: bool | None = None  # default: true; of a conversation
    return_token_strs: bool | None = None

    @model_validator(mode="after")
    def check_one_is_given(self) -> TokenizeBody:
        """Exactly one of `prompt` and `messages`."""
        if (self.prompt is None) == (self.messages is None):
            raise ValueError("prompt: exactly one of prompt and messages is needed")
        if self.messages == []:
            raise ValueError("messages: an empty list; at least one message is needed")
        for name in ("add_generation_prompt", "tools"):
            if self.messages is None and getattr(self, name) is not None:
                raise ValueError(f"{name}: only allowed with messages")
        return self


class DetokenizeBody(Body):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


def tokenize(body: TokenizeBody, tokenizer: Tokenizer, *, limits: Limits) -> dict[str, Any]:
    """Ids of a text, their number, and how long a request may be.

    Raises:
        ApiError: 400 for a text that could never be a prompt here, or that the template refuses.
    """
    if body.prompt is not None:
        text, field, add_special = body.prompt, "prompt", body.add_special_tokens is not False
    else:
        opened = body.add_generation_prompt is not False
        text = render(tokenizer, body.messages or (), tools=body.tools, add_generation_prompt=opened)
        field, add_special = "messages", bool(body.add_special_tokens)
    check_size(text, limits, field=field)
    ids = tokenizer.encode(text, add_special_tokens=add_special)
    reply: dict[str, Any] = {"count": len(ids), "max_model_len": limits.max_model_len, "tokens": ids}
    if body.return_token_strs:
        reply["token_strs"] = [token_text(tokenizer, token, prefix="") for token in ids]
    return reply


def detokenize(body: DetokenizeBody, tokenizer: Tokenizer) -> dict[str, str]:
    """The text of ids.

    Raises:
        ApiError: 400 for an id that is no token's.
    """
    for index, token in enumerate(body.tokens):
        if not 0 <= token < tokenizer.vocab_size:
            raise bad_request(
                f"tokens: {token} at index {index} is not a token id in 0..{tokenizer.vocab_size - 1}", param="tokens"
            )
    return {"prompt": tokenizer.decode(body.tokens, skip_special_tokens=False)}
