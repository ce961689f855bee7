"""From a checked body to engine requests: text becomes ids here, n becomes n requests, stop strings stay behind.

Every prompt of a body and every one of its n answers is one engine request, in prompt-major order, which is
the order of `choices`. Runs in a worker thread, since a long prompt takes a tokenizer a while and the event
loop has streams to serve. What can never be taken is refused by its size, before that work. It knows no engine
beyond its limits.

Proof: tests/test_http_cases.py. Story: app.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tokenizers.models import BPE

from reference.request import MAX_N, Guide, Request, SamplingParams
from reference.token_bytes import byte_alphabet
from reference.tokenizer import ChatTemplateError, Tokenizer
from serve.echo import Prompt, text_offsets
from serve.errors import bad_request, from_value_error
from serve.guide import Guides
from serve.messages import Message, Tool
from serve.protocol import ChatBody, CompletionBody, SamplingBody
from serve.tools import Form, ToolUse, call_form, call_guide

NEVER_IN_UTF8 = {0xC0, 0xC1, *range(0xF5, 0x100)}
NFC_SHRINKS = 4  # a character's canonical equivalents have at most 3.5 times its UTF-8 bytes


@dataclass(frozen=True, slots=True)
class Limits:
    """What one request may ask for."""

    max_model_len: int  # tokens, prompt and answer together
    max_answers: int  # prompts times n
    max_bytes: int | None = None  # UTF-8 bytes beyond which no text fits `max_model_len`; None: not known
    silent: bytes = b""  # bytes that do not count towards `max_bytes`


@dataclass(frozen=True, slots=True)
class Job:
    """One HTTP request's work for the engine, and what is needed to turn ids back into its answers."""

    requests: tuple[Request, ...]  # one an answer, in the order of `choices`
    params: SamplingParams  # as asked, stop strings included; limits may differ by prompt; its n is what is computed
    num_prompt_tokens: int  # each prompt once, however many answers it gets
    prompts: tuple[Prompt, ...]  # of each request, one object for all of a prompt's; what is told of it
    names: Mapping[str, str]  # engine field to the client's field
    tools: ToolUse | None = None  # how to read calls out of the answers


def limits_of(tokenizer: Tokenizer, *, max_model_len: int, max_answers: int) -> Limits:
    """The limits of a server; reads the whole vocabulary, so once at start-up."""
    per_token = bytes_per_token(tokenizer)
    max_bytes = None if per_token is None else per_token * max_model_len
    return Limits(max_model_len, max_answers, max_bytes, silent_bytes(tokenizer))


def bytes_per_token(tokenizer: Tokenizer) -> int | None:
    """The most UTF-8 bytes of a text that one token can cover, the `silent_bytes` not counted.

    Special tokens may be spelled in the text. None where there is no such number: the tokenizer drops text, joins
    unknown characters or swallows white space.
    """
    backend = tokenizer.backend
    steps = _steps(backend.normalizer) + _steps(backend.pre_tokenizer)
    kinds = {step["type"] for step in steps}
    vocab = backend.get_vocab(with_added_tokens=True)
    swallows = any(token.lstrip or token.rstrip for token in backend.get_added_tokens_decoder().values())
    if swallows or not all(map(_keeps_text, steps)) or not _accounts_for_bytes(backend.model, kinds, vocab):
        return None
    # As spelled in the vocabulary, where no character takes fewer bytes than those it stands for.
    longest = max(len(token.encode("utf-8", "surrogatepass")) for token in vocab)
    return longest * (NFC_SHRINKS if "NFC" in kinds else 1)


def silent_bytes(tokenizer: Tokenizer) -> bytes:
    """The bytes that a byte-level vocabulary lacks: encoding drops them, however many there are."""
    backend = tokenizer.backend
    if all(step["type"] != "ByteLevel" for step in _steps(backend.pre_tokenizer)):
        return b""
    return bytes(sorted(_missing(backend.get_vocab(with_added_tokens=True))))


def check_num_answers(body: SamplingBody, limits: Limits) -> int:
    """How many answers a body asks for, known before anything is tokenized.

    Raises:
        ApiError: 400 for more than any request may ask for, or an `n` out of its range.
    """
    if body.n is not None and not 1 <= body.n <= MAX_N:
        raise bad_request(f"n: {body.n} is not an integer in 1..{MAX_N}", param="n")
    n, num_prompts = body.num_candidates, body.num_prompts
    if num_prompts * n > limits.max_answers:
        what = f"{num_prompts} prompts" if n == 1 else f"{n} answers (prompts: {num_prompts})"
        field = "prompt" if n == 1 else "n"
        message = f"{field}: {what} exceed the limit of {limits.max_answers} answers in one request"
        raise bad_request(message, param=field)
    return num_prompts * n


def plan_completion(body: CompletionBody, tokenizer: Tokenizer, guides: Guides, *, id: str, limits: Limits) -> Job:
    """Requests of a completions body.

    Raises:
        ApiError: 400 naming the field that cannot be honoured.
    """
    prompts = body.prompt if isinstance(body.prompt, list) else [body.prompt]
    single = bool(prompts) and isinstance(prompts[0], int)
    todo: list[Any] = [prompts] if single else list(prompts)
    guide = _guide(body, guides)
    requests: list[Request] = []
    told: list[Prompt] = []
    num_prompt_tokens = 0
    for index, item in enumerate(todo):
        field = "prompt" if len(todo) == 1 else f"prompt[{index}]"
        if isinstance(item, str):
            check_size(item, limits, field=field)
        ids = item if isinstance(item, list) else tokenizer.encode(item)
        if not ids:
            raise bad_request(f"{field}: empty; there is no token to continue from", param="prompt")
        room = _room(len(ids), limits.max_model_len, field=field, least=body.max_tokens != 0)
        num_prompt_tokens += len(ids)
        try:
            params = body.sampling(room=room)
            made = _expanded(body, ids, params, id if len(todo) == 1 else f"{id}-{index}", guide)
        except ValueError as error:
            raise from_value_error(error, names=body.engine_names) from None
        requests += made
        told += [_prompt(body, ids, item if isinstance(item, str) else None, tokenizer)] * len(made)
    return Job(tuple(requests), params, num_prompt_tokens, tuple(told), body.engine_names)


def plan_chat(body: ChatBody, tokenizer: Tokenizer, guides: Guides, *, id: str, limits: Limits) -> Job:
    """Requests of a chat body: the template writes the prompt and its special tokens.

    Raises:
        ApiError: 400 naming the field, or carrying the template's own reason.
    """
    form = _call_form(body, tokenizer)
    text = render(tokenizer, body.messages, tools=body.tools if body.may_call else None)
    check_size(text, limits, field="messages")
    ids = tokenizer.encode(text, add_special_tokens=False)
    if not ids:
        raise bad_request("messages: the chat template renders them to nothing", param="messages")
    try:
        params = body.sampling()
        _room(len(ids), limits.max_model_len, field="messages", least=params.max_tokens != 0)
        guide, tools = _guide(body, guides), None
        if form is not None:
            guide, tools = _calls(body, guides, form)
        requests = _expanded(body, ids, params, id, guide)
    except ValueError as error:
        raise from_value_error(error, names=body.engine_names) from None
    prompts = (Prompt(tuple(ids), num_asked=body.prompt_logprobs),) * len(requests)
    return Job(tuple(requests), params, len(ids), prompts, body.engine_names, tools=tools)


def render(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    tools: Sequence[Tool] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of a conversation, as the model's template writes it.

    Raises:
        ApiError: 400 with the template's own reason.
    """
    turns = [message.for_template() for message in messages]
    given = None if tools is None else [tool.for_template() for tool in tools]
    try:
        return tokenizer.render_chat(turns, tools=given, add_generation_prompt=add_generation_prompt)
    except ChatTemplateError as error:
        raise bad_request(str(error), param="messages", code="chat_template_error") from None


def check_size(text: str, limits: Limits, *, field: str) -> None:
    """Refuse a text that no tokenizing can make fit, since tokenizing holds up every other thread."""
    size = len(text.encode("utf-8", "surrogatepass").translate(None, limits.silent))
    if limits.max_bytes is not None and size > limits.max_bytes:
        raise bad_request(
            f"{field}: {size} bytes cannot fit; the length limit, prompt and answer together, is "
            f"{limits.max_model_len} tokens, which are at most {limits.max_bytes} bytes",
            param=field.partition("[")[0],
            code="context_length_exceeded",
        )


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer, nested sequences laid flat."""
    todo = [] if part is None else [json.loads(part.__getstate__())]
    steps: list[dict[str, Any]] = []
    while todo:
        step = todo.pop()
        if step["type"] == "Sequence":
            todo += step.get("normalizers", []) + step.get("pretokenizers", [])
        else:
            steps.append(step)
    return steps


def _keeps_text(step: Mapping[str, Any]) -> bool:
    """True of a step after which there is still a byte for each of the text's; NFC is accounted for elsewhere."""
    if step["type"] == "Split":
        return bool(step["behavior"] != "Removed")
    if step["type"] == "Replace":
        return bool(step["pattern"] == {"String": " "} and step["content"])
    return step["type"] in ("ByteLevel", "Digits", "Metaspace", "Prepend", "NFC")


def _accounts_for_bytes(model: Any, kinds: set[str], vocab: Mapping[str, int]) -> bool:
    """True of a BPE without unknown characters, or one that drops just the bytes of `silent_bytes`."""
    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    if "ByteLevel" in kinds:
        # With NFC a byte that is counted may become one that is dropped.
        return not _missing(vocab) - NEVER_IN_UTF8 or (model.unk_token is None and "NFC" not in kinds)
    return model.byte_fallback and all(f"<0x{byte:02X}>" in vocab for byte in range(256))


def _missing(vocab: Mapping[str, int]) -> set[int]:
    return {byte for byte, character in enumerate(byte_alphabet()) if character not in vocab}


def _prompt(body: CompletionBody, ids: list[int], text: str | None, tokenizer: Tokenizer) -> Prompt:
    """What the answers to a prompt tell of it."""
    prompt = Prompt(tuple(ids), num_shown=body.prompt_shown, num_asked=body.prompt_logprobs)
    if body.echo:
        prompt.text = tokenizer.decode(ids) if text is None else text
    if prompt.num_shown is not None:
        prompt.offsets = text_offsets(tokenizer, ids, prompt.text)
    return prompt


def _room(num_prompt_tokens: int, max_model_len: int, *, field: str, least: int) -> int:
    """Tokens left for an answer, `least` or more."""
    room = max_model_len - num_prompt_tokens
    if room < least:
        raise bad_request(
            f"{field}: {num_prompt_tokens} tokens leave no room for an answer; the length limit, prompt and answer "
            f"together, is {max_model_len} tokens",
            param=field.partition("[")[0],
            code="context_length_exceeded",
        )
    return room


def _guide(body: SamplingBody, guides: Guides) -> Guide | None:
    """The compiled guide of a body that asks for one."""
    if body.guide_spec is None:
        return None
    try:
        return guides.compile(body.guide_spec)
    except ValueError as error:
        raise bad_request(str(error), param=body.guide_spec.field) from None


def _call_form(body: ChatBody, tokenizer: Tokenizer) -> Form | None:
    """The form of this model's calls, when the conversation has any to do with calls."""
    knows = any("tool_calls" in template for template in tokenizer.chat_templates.values())
    if any(message.tool_calls for message in body.messages) and not knows:
        raise bad_request("messages: tool_calls are not supported by this model's chat template", param="messages")
    if not body.may_call:
        return None
    special = [tokenizer.backend.id_to_token(index) or "" for index in tokenizer.special_ids]
    form = call_form(tokenizer.chat_templates, special)
    if form is None:
        raise bad_request(
            "tools: not supported by this model's chat template, or its calls have a form that is not known here",
            param="tools",
        )
    return form


def _calls(body: ChatBody, guides: Guides, form: Form) -> tuple[Guide | None, ToolUse]:
    """What holds the answers to calls, and how to read them."""
    tools, called = body.tools or [], body.called
    parallel = body.parallel_tool_calls is not False
    spec = call_guide(tools, form, choice=called, parallel=parallel)
    names = frozenset(tool.function.name for tool in tools)
    guide = None if spec is None else guides.compile(spec)
    schemas = {tool.function.name: tool.function.parameters or {} for tool in tools}
    return guide, ToolUse(form, names, named=called not in ("auto", "required"), schemas=schemas)


def _expanded(
    body: SamplingBody, ids: list[int], params: SamplingParams, id: str, guide: Guide | None
) -> list[Request]:
    """n requests of one answer each, without the stop strings, which are matched where there is text."""
    return body.in_queue(Request(tuple(ids), replace(params, stop=()), id, guide)).expand()
