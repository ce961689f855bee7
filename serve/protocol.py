"""What a client may send: the request bodies of OpenAI's completions and chat, checked field by field.

Nothing is dropped in silence. A field is honoured, or it is known and refused by name, or it is unknown and
refused by name; null always means "not given". Ranges are those of `SamplingParams`, which is built here and
checks them. Extensions carry vLLM's names. This module knows no engine, no tokenizer and no socket.

Proof: tests/test_http_cases.py. Story: app.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, PlainValidator, model_validator

from reference.request import MAX_LOGPROBS, MAX_N, Request, SamplingParams
from serve.formats import Format, Structure
from serve.guide import GuideSpec
from serve.messages import Body, Message, NamedTool, Tool

DEFAULT_COMPLETION_TOKENS = 16
MAX_STOPS = 4
MAX_SALT = 256  # characters; it is hashed with every block of a prompt
TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,17}")

Prompt = str | list[str] | list[int] | list[list[int]]


def checked_prompt(value: Any) -> Prompt:
    """A text, texts, token ids or lists of token ids; what remains to be computed is judged after tokenizing."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value) or _all_integers(value):
            return value
        if all(isinstance(item, list) and _all_integers(item) for item in value):
            return value
    shape = "empty list" if value == [] else type(value).__name__
    raise ValueError(f"{shape} is not a string, a list of strings, a list of token ids or a list of such lists")


def checked_stop(value: Any) -> tuple[str, ...]:
    """One string or up to four, none of them empty."""
    strings = () if value is None else (value,) if isinstance(value, str) else value
    ok = isinstance(strings, list | tuple) and all(isinstance(s, str) and s for s in strings)
    if not ok or len(strings) > MAX_STOPS:
        raise ValueError(f"not a non-empty string or a list of up to {MAX_STOPS} of them")
    return tuple(strings)


def checked_bias(value: Any) -> dict[int, float]:
    """Token id, spelled as a JSON key, to a number that is added to its logit."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError("not an object that maps token ids to numbers from -100 to 100")
    for key in value:
        if not TOKEN_ID.fullmatch(key):
            raise ValueError(f"key {key[:40]!r} is not a token id: an integer from 0 to the vocabulary's last id")
    return {int(key): number for key, number in value.items()}


class StreamOptions(Body):
    """`include_usage` asks for one last chunk with the counts."""

    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {"include_obfuscation": (None, False)}
    include_usage: bool | None = None


class SamplingBody(Body):
    """The fields that completions and chat share."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(checked_stop, json_schema_input_type=str | list[str] | None)] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: Annotated[
        dict[int, float], PlainValidator(checked_bias, json_schema_input_type=dict[str, float] | None)
    ] = Field(default_factory=dict)
    # Labels for the operator's log; they change no answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    response_format: Format = None
    # vLLM's extensions.
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    structured_outputs: Structure = None
    priority: int | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT)] | None = None
    prompt_logprobs: int | None = None
    # Ours: false keeps a prompt out of the cache that prompts share.
    prefix_cache: bool | None = None

    @model_validator(mode="after")
    def check_shared_fields(self) -> SamplingBody:
        """`stream_options` is for streams, and an answer has one shape."""
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only allowed when stream is true")
        if self.response_format is not None and self.structured_outputs is not None:
            raise ValueError("structured_outputs: not allowed with response_format, which says what shape to give")
        if self.prompt_logprobs is not None:
            if not 0 <= self.prompt_logprobs <= MAX_LOGPROBS:
                raise ValueError(f"prompt_logprobs: {self.prompt_logprobs} is not an integer in 0..{MAX_LOGPROBS}")
            if self.stream:
                raise ValueError("prompt_logprobs: not allowed with stream; they come with a whole reply")
        return self

    @property
    def guide_spec(self) -> GuideSpec | None:
        """The shape that the answer is to have, if one was asked for."""
        return self.response_format or self.structured_outputs

    def in_queue(self, request: Request) -> Request:
        """The request with its priority, and with what it shares of its prompt; none of them changes a token."""
        return replace(
            request,
            priority=self.priority or 0,
            cache_salt=self.cache_salt or "",
            prefix_cache=self.prefix_cache is not False,
        )

    @property
    def num_candidates(self) -> int:
        """How many answers are computed for a prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_prompts(self) -> int:
        """How many prompts are to be continued."""
        return 1

    @property
    def include_usage(self) -> bool:
        """True when a stream is to end with the counts."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def prompt_shown(self) -> int | None:
        """How many alternatives to each token of the prompt stand before an answer; None: its tokens do not."""
        return None

    def params(self, *, max_tokens: int | None, logprobs: int | None) -> SamplingParams:
        """The engine's parameters, stop strings included.

        Raises:
            ValueError: naming the field, its value and the range.
        """
        top_k = self.top_k
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=_given(self.temperature, 1.0),
            # vLLM spells "off" as -1.
            top_k=0 if top_k is None or top_k == -1 else top_k,
            top_p=_given(self.top_p, 1.0),
            min_p=_given(self.min_p, 0.0),
            seed=self.seed,
            repetition_penalty=_given(self.repetition_penalty, 1.0),
            presence_penalty=_given(self.presence_penalty, 0.0),
            frequency_penalty=_given(self.frequency_penalty, 0.0),
            logit_bias=self.logit_bias,
            stop=self.stop,
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            prompt_logprobs=max((k for k in (self.prompt_logprobs, self.prompt_shown) if k is not None), default=None),
            n=self.num_candidates,
        )


class CompletionBody(SamplingBody):
    """`POST /v1/completions`."""

    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {"suffix": (None, "")}
    prompt: Annotated[Prompt, PlainValidator(checked_prompt, json_schema_input_type=Prompt)]
    logprobs: int | None = None
    best_of: int | None = None
    echo: bool | None = None

    @model_validator(mode="after")
    def check_fields_agree(self) -> CompletionBody:
        """The best are among at least as many, and known only at the end; no token at all needs a prompt to tell of."""
        n = 1 if self.n is None else self.n
        if self.best_of is not None and not n <= self.best_of <= MAX_N:
            raise ValueError(f"best_of: {self.best_of} is not an integer in {n}..{MAX_N}, from n up")
        if self.ranks and self.stream:
            raise ValueError("best_of: not allowed with stream; which answers are the best is known at the end only")
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise ValueError("max_tokens: 0 is not an integer in 1..; with echo or prompt_logprobs it may be 0")
        return self

    @property
    def ranks(self) -> bool:
        """True when more answers are computed than are returned."""
        return self.best_of is not None and self.best_of > (1 if self.n is None else self.n)

    @property
    def prompt_shown(self) -> int | None:
        """How many alternatives to each token of the prompt stand before an answer; None: its tokens do not."""
        return self.logprobs if self.echo else None

    @property
    def num_candidates(self) -> int:
        """How many answers are computed for a prompt."""
        return self.best_of or super().num_candidates

    @property
    def num_prompts(self) -> int:
        """How many prompts there are; one list of ids is one."""
        one = isinstance(self.prompt, str) or (bool(self.prompt) and isinstance(self.prompt[0], int))
        return 1 if one else len(self.prompt)

    @property
    def engine_names(self) -> dict[str, str]:
        """Engine field to the field of this body that it came from, where the two differ."""
        return {"prompt_ids": "prompt"}

    def sampling(self, *, room: int) -> SamplingParams:
        """Parameters for a prompt that leaves `room` tokens: 16 by default, fewer when fewer fit."""
        max_tokens = min(DEFAULT_COMPLETION_TOKENS, room) if self.max_tokens is None else self.max_tokens
        logprobs = 0 if self.ranks and self.logprobs is None else self.logprobs  # what answers are ranked by
        return self.params(max_tokens=max_tokens, logprobs=logprobs)


class ChatBody(SamplingBody):
    """`POST /v1/chat/completions`."""

    not_supported: ClassVar[dict[str, tuple[Any, ...]]] = {
        "functions": (None, []),
        "function_call": (None, "none"),
        "audio": (None,),
        "modalities": (None, ["text"]),
        "prediction": (None,),
        "store": (None, False),
        "service_tier": (None, "auto", "default"),
        "web_search_options": (None,),
        "reasoning_effort": (None,),
        "verbosity": (None,),
        "moderation": (None,),
        "prompt_cache_key": (None,),
        "prompt_cache_options": (None,),
        "prompt_cache_retention": (None,),
        "safety_identifier": (None,),
    }
    messages: list[Message]
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    @model_validator(mode="after")
    def check_fields_agree(self) -> ChatBody:
        """Both names of the limit may be given only with one value; `top_logprobs` needs `logprobs`."""
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError(
                f"max_tokens: {self.max_tokens} and max_completion_tokens {self.max_completion_tokens} disagree; "
                "give one of them, or both with the same value"
            )
        if self.top_logprobs is not None:
            if not self.logprobs:
                raise ValueError("top_logprobs: only allowed when logprobs is true")
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise ValueError(f"top_logprobs: {self.top_logprobs} is not an integer in 0..{MAX_LOGPROBS}")
        for name in ("max_tokens", "max_completion_tokens"):
            if getattr(self, name) == 0 and self.prompt_logprobs is None:
                raise ValueError(f"{name}: 0 is not an integer in 1..; with prompt_logprobs it may be 0")
        if not self.messages:
            raise ValueError("messages: an empty list; at least one message is needed")
        return self

    @model_validator(mode="after")
    def check_tools(self) -> ChatBody:
        """A choice among tools needs tools, with different names; an answer that may be a call has no other shape."""
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise ValueError("tools: two functions have one name")
        if self.tool_choice not in (None, "none") and not names:
            raise ValueError("tool_choice: only allowed with tools")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise ValueError(
                f"tool_choice: {self.tool_choice.function.name[:64]!r} is not the name of one of the tools"
            )
        if self.parallel_tool_calls is not None and not names:
            raise ValueError("parallel_tool_calls: only allowed with tools")
        if self.may_call and self.guide_spec is not None:
            raise ValueError("response_format: not supported with tools; set tool_choice to none, or leave tools out")
        return self

    @property
    def may_call(self) -> bool:
        """True when the answer may be a call: there are tools, and the choice is not `none`."""
        return bool(self.tools) and self.tool_choice != "none"

    @property
    def called(self) -> str:
        """`auto`, `required`, or the name of the function to call."""
        choice = self.tool_choice
        return choice.function.name if isinstance(choice, NamedTool) else choice or "auto"

    @property
    def engine_names(self) -> dict[str, str]:
        """Engine field to the field of this body that it came from, where the two differ."""
        names = {"prompt_ids": "messages", "logprobs": "top_logprobs"}
        return names if self.max_completion_tokens is None else names | {"max_tokens": "max_completion_tokens"}

    def sampling(self) -> SamplingParams:
        """Parameters with as many tokens as asked for, or up to the length limit when nothing was asked."""
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return self.params(max_tokens=limit, logprobs=(self.top_logprobs or 0) if self.logprobs else None)


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _all_integers(value: list[Any]) -> bool:
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)
