"""The HTTP application over an engine it is given: completions, chat, models, health.

A handler reads and checks the body, has the prompt tokenized in a worker thread, submits to the engine's thread
and turns the events that come back into a reply. All that can be wrong with a request is found before the first
byte of an answer, so a stream that cannot begin is a 400 like any other. It imports no engine.

Gates: gates.stream. Proof: tests/test_app.py. Story: app.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

from fastapi import FastAPI
from pydantic import ValidationError
from pydantic.json_schema import models_json_schema
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from reference.request import Engine
from reference.tokenizer import Tokenizer
from serve.access import Access, Sink, note_answers
from serve.errors import (
    NOT_FOUND,
    ApiError,
    bad_request,
    from_validation_error,
    from_value_error,
    install_error_handlers,
    shown,
)
from serve.loop import EngineLoop
from serve.metrics import CONTENT_TYPE, Metrics
from serve.prompts import Job, limits_of, plan_chat, plan_completion
from serve.protocol import ChatBody, CompletionBody, SamplingBody
from serve.replies import ChatReply, CompletionReply, to_json, usage
from serve.stream import Answer, ClientGone, EventStream, pieces, sse, until_gone
from serve.ticket import Ticket

B = TypeVar("B", bound=SamplingBody)

HALF_PAIR = re.compile(r"\\u[dD][89a-fA-F]")  # JSON can spell half a surrogate pair, which UTF-8 cannot hold
CLIENT_CLOSED_REQUEST = 499  # nginx's number for an answer that nobody waits for


def build_app(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    max_open: int = 1024,
    max_body_bytes: int = 8 * 2**20,
    stuck_after_s: float = 60.0,
    drain_s: float = 30.0,
    on_death: Callable[[BaseException], None] | None = None,
    sinks: Sequence[Sink] = (),
) -> FastAPI:
    """An application whose lifespan runs `engine` in a thread of its own; nobody else may call the engine then.

    `max_open` bounds the answers that are open at once, waiting ones included (429 beyond it). `stuck_after_s` is
    how long one engine step may take before `/health` says so and open requests are given up. `drain_s` is how
    long open requests may go on after a shutdown began. `on_death` is called on the event loop when the engine
    raised; the process is then of no use and its owner should end it. `sinks` get a record of every request that is
    over.
    """
    metrics = Metrics(
        model_name=model_name,
        stats=lambda: loop.stats,
        num_open=lambda: loop.num_open,
        up=lambda: loop.status == "ok",
    )
    loop = EngineLoop(engine, max_open=max_open, stuck_after_s=stuck_after_s, on_death=on_death, observer=metrics)
    api = Api(
        loop,
        tokenizer,
        model_name=model_name,
        max_model_len=engine.max_model_len,
        max_body_bytes=max_body_bytes,
        boot=engine.describe(),
        metrics=metrics,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop.start()
        yield
        await loop.stop(drain_s=drain_s)

    # The pages of /docs load scripts from elsewhere; the document itself stays at /openapi.json.
    app = FastAPI(title="nanoserve", docs_url=None, redoc_url=None, lifespan=lifespan)
    install_error_handlers(app)
    for body, path, handler in (
        (CompletionBody, "/v1/completions", api.completions),
        (ChatBody, "/v1/chat/completions", api.chat_completions),
    ):
        app.post(path, openapi_extra=_takes(body))(handler)
    app.get("/v1/models")(api.models)
    app.get("/v1/models/{model_id:path}")(api.model)
    app.get("/health")(api.health)
    app.get("/metrics")(api.metrics)
    app.add_middleware(Access, metrics=metrics, model_name=model_name, sinks=sinks)
    app.state.engine_loop = loop
    _document_bodies(app)
    return app


class Api:
    """The handlers, and what they share."""

    def __init__(
        self,
        loop: EngineLoop,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        max_model_len: int,
        max_body_bytes: int,
        boot: dict[str, Any],
        metrics: Metrics,
    ) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._limits = limits_of(tokenizer, max_model_len=max_model_len, max_answers=loop.max_open)
        self._max_body_bytes = max_body_bytes
        self._created = int(time.time())
        self._boot = boot
        self._metrics = metrics

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        try:
            body = await self._body(request, CompletionBody)
            id = f"cmpl-{uuid.uuid4().hex}"
            job = await asyncio.to_thread(plan_completion, body, self._tokenizer, id=id, limits=self._limits)
            logprobs = job.params.logprobs is not None
            reply = CompletionReply(id, int(time.time()), self._model_name, self._tokenizer, logprobs)
            return await self._answer(request, body, job, reply)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        try:
            body = await self._body(request, ChatBody)
            id = f"chatcmpl-{uuid.uuid4().hex}"
            job = await asyncio.to_thread(plan_chat, body, self._tokenizer, id=id, limits=self._limits)
            logprobs = job.params.logprobs is not None
            reply = ChatReply(id, int(time.time()), self._model_name, self._tokenizer, logprobs)
            return await self._answer(request, body, job, reply)
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)

    async def models(self) -> Response:
        """`GET /v1/models`: the one model there is."""
        return _json_response({"object": "list", "data": [self._model_object()]})

    async def model(self, model_id: str) -> Response:
        """`GET /v1/models/{id}`."""
        self._check_model(model_id)
        return _json_response(self._model_object())

    async def health(self) -> Response:
        """`GET /health`: 200 while requests are taken, else 503; counts now, and what start-up decided."""
        status = self._loop.status
        state = {"status": status, "model": self._model_name, "open": self._loop.num_open, "engine": self._loop.stats}
        state["boot"] = self._boot
        return _json_response(state, status=200 if status == "ok" else 503)

    async def metrics(self) -> Response:
        """`GET /metrics`: Prometheus's text format."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def _body(self, request: Request, kind: type[B]) -> B:
        """The request's JSON as a checked body, for the model that is served."""
        raw = await read_json(request, max_bytes=self._max_body_bytes)
        if not isinstance(raw, dict):
            raise bad_request(f"body: {shown(raw)} is not a JSON object")
        try:
            body = kind.model_validate(raw)
        except ValidationError as error:
            raise from_validation_error(error) from None
        self._check_model(body.model)
        self._loop.check_up()
        return body

    async def _answer(
        self, request: Request, body: SamplingBody, job: Job, reply: CompletionReply | ChatReply
    ) -> Response:
        try:
            ticket = await self._loop.submit(job.requests)
        except ValueError as error:
            raise from_value_error(error, names=job.names) from None
        note_answers(request, ticket)
        answers = [Answer(self._tokenizer, job.params) for _ in job.requests]
        if body.stream:
            return EventStream(_chunks(ticket, answers, body, job, reply), on_end=ticket.close)
        try:
            await until_gone(request.receive, _drain(ticket, answers))
        finally:
            ticket.close()
        return _json_response(reply.whole(answers, usage(answers, num_prompt_tokens=job.num_prompt_tokens)))

    def _check_model(self, name: str) -> None:
        if name != self._model_name:
            message = f"model: {shown(name)} is not served here; this server has {self._model_name!r}"
            raise ApiError(404, message, type=NOT_FOUND, param="model", code="model_not_found")

    def _model_object(self) -> dict[str, Any]:
        return {
            "id": self._model_name,
            "object": "model",
            "created": self._created,
            "owned_by": "nanoserve",
            "max_model_len": self._max_model_len,
        }


async def read_json(request: Request, *, max_bytes: int) -> Any:
    """The body as JSON in UTF-8, whatever its content-type says.

    Raises:
        ApiError: 400 when it is not JSON, 413 when it is longer than `max_bytes`.
        ClientGone: the client left before the body's end.
    """
    data = bytearray()
    try:
        async for part in request.stream():
            data += part
            if len(data) > max_bytes:
                raise ApiError(413, f"body: longer than {max_bytes} bytes", code="body_too_large")
    except ClientDisconnect:
        raise ClientGone from None
    try:
        text = data.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
        if HALF_PAIR.search(text):
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        return value
    except UnicodeEncodeError:
        raise bad_request("body: a lone surrogate is not a character") from None
    except UnicodeDecodeError as error:
        raise bad_request(f"body: not UTF-8, byte {error.start} is {data[error.start]:#04x}") from None
    except (ValueError, RecursionError) as error:
        raise bad_request(f"body: not JSON: {error}") from None


def _refuse_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is not a JSON number")


def _json_response(value: Any, *, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


async def _drain(ticket: Ticket, answers: Sequence[Answer]) -> None:
    async for _ in pieces(ticket, answers):
        pass


async def _chunks(
    ticket: Ticket, answers: Sequence[Answer], body: SamplingBody, job: Job, reply: CompletionReply | ChatReply
) -> AsyncGenerator[bytes, None]:
    """The events of a stream, as many as have come at a time. Usage is null in all but the last, when asked for."""
    nulls = {"usage": None} if body.include_usage else {}
    async for batch in pieces(ticket, answers):
        chunks = [chunk for index, piece in batch for chunk in reply.chunks(index, piece)]
        yield b"".join(sse(to_json({**chunk, **nulls})) for chunk in chunks)
    if body.include_usage:
        yield sse(to_json(reply.last(usage(answers, num_prompt_tokens=job.num_prompt_tokens))))


def _takes(body: type[SamplingBody]) -> dict[str, Any]:
    """The OpenAPI words for a body that the handler reads itself."""
    schema = {"$ref": f"#/components/schemas/{body.__name__}"}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _document_bodies(app: FastAPI) -> None:
    """Add the schemas that `_takes` refers to."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        document = plain()
        bodies = [(CompletionBody, "validation"), (ChatBody, "validation")]
        template = "#/components/schemas/{model}"
        _, schemas = models_json_schema(bodies, ref_template=template)  # type: ignore[arg-type]
        document.setdefault("components", {}).setdefault("schemas", {}).update(schemas["$defs"])
        return document

    app.openapi = openapi  # type: ignore[method-assign]
