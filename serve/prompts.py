"""From a checked body to engine requests: text becomes ids here, n becomes n requests, stop strings stay behind.

Every prompt of a body and every one of its n answers is one engine request, in prompt-major order, which is
the order of `choices`. Runs in a worker thread, since a long prompt takes a tokenizer a while and the event
loop has streams to serve. It knows no engine beyond its length limit.

Proof: tests/test_http_cases.py. Story: app.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from reference.request import Request, SamplingParams
from reference.tokenizer import ChatTemplateError, Tokenizer
from serve.errors import bad_request, from_value_error
from serve.protocol import ChatBody, CompletionBody


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request's work for the engine, and what is needed to turn ids back into its answers."""

    requests: tuple[Request, ...]  # one an answer, in the order of `choices`
    params: SamplingParams  # as asked, stop strings included; limits may differ by prompt
    num_prompt_tokens: int  # each prompt once, however many answers it gets
    names: Mapping[str, str]  # engine field to the client's field


def plan_completion(body: CompletionBody, tokenizer: Tokenizer, *, id: str, max_model_len: int) -> Job:
    """Requests of a completions body.

    Raises:
        ApiError: 400 naming the field that cannot be honoured.
    """
    prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    single = bool(prompts) and isinstance(prompts[0], int)
    todo: list[Any] = [prompts] if single else list(prompts)
    ids_of = [item if isinstance(item, list) else tokenizer.encode(item) for item in todo]
    requests: list[Request] = []
    for index, ids in enumerate(ids_of):
        field = "prompt" if len(todo) == 1 else f"prompt[{index}]"
        if not ids:
            raise bad_request(f"{field}: empty; there is no token to continue from", param="prompt")
        room = _room(len(ids), max_model_len, field=field)
        try:
            params = body.sampling(room=room)
            requests += _expanded(ids, params, id if len(todo) == 1 else f"{id}-{index}")
        except ValueError as error:
            raise from_value_error(error, names=body.engine_names) from None
    return Job(tuple(requests), params, sum(map(len, ids_of)), body.engine_names)


def plan_chat(body: ChatBody, tokenizer: Tokenizer, *, id: str, max_model_len: int) -> Job:
    """Requests of a chat body: the template writes the prompt and its special tokens.

    Raises:
        ApiError: 400 naming the field, or carrying the template's own reason.
    """
    try:
        ids = tokenizer.apply_chat_template([message.for_template() for message in body.messages])
    except ChatTemplateError as error:
        raise bad_request(str(error), param="messages", code="chat_template_error") from None
    if not ids:
        raise bad_request("messages: the chat template renders them to nothing", param="messages")
    _room(len(ids), max_model_len, field="messages")
    try:
        params = body.sampling()
        requests = _expanded(ids, params, id)
    except ValueError as error:
        raise from_value_error(error, names=body.engine_names) from None
    return Job(tuple(requests), params, len(ids), body.engine_names)


def _room(num_prompt_tokens: int, max_model_len: int, *, field: str) -> int:
    """Tokens left for an answer."""
    room = max_model_len - num_prompt_tokens
    if room < 1:
        raise bad_request(
            f"{field}: {num_prompt_tokens} tokens leave no room for an answer; the length limit, prompt and answer "
            f"together, is {max_model_len} tokens",
            param=field.partition("[")[0],
            code="context_length_exceeded",
        )
    return room


def _expanded(ids: list[int], params: SamplingParams, id: str) -> list[Request]:
    """n requests of one answer each, without the stop strings, which are matched where there is text."""
    return Request(tuple(ids), replace(params, stop=()), id).expand()
