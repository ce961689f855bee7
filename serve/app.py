"""The HTTP application over an engine it is given: completions, chat, models, health.

A handler reads and checks the body, has the prompt tokenized in a worker thread, submits to the engine's thread
and turns the events that come back into a reply. All that can be wrong with a request is found before the first
byte of an answer, so a stream that cannot begin is a 400 like any other. It imports no engine.

Gates: gates.stream. Proof: tests/test_app.py. Story: app.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from starlette.requests import Request
from starlette.responses import Response

from reference.request import Engine
from reference.tokenizer import Tokenizer
from serve.access import Access, Sink, note_answers
from serve.answer import Answer, best
from serve.bodies import B, BodyReader
from serve.errors import NOT_FOUND, ApiError, from_value_error, install_error_handlers, shown
from serve.events import EventWriter, sse
from serve.guard import install_guards
from serve.guide import Guides
from serve.limits import ServerLimits
from serve.live import LiveSteps
from serve.loop import EngineLoop
from serve.memory import memory
from serve.metrics import CONTENT_TYPE, Metrics
from serve.openapi import document_bodies, gives, takes
from serve.playground import playground
from serve.prompts import Job, check_num_answers, limits_of, plan_chat, plan_completion
from serve.protocol import ChatBody, CompletionBody, SamplingBody
from serve.replies import ChatReply, CompletionReply, to_json, usage
from serve.stream import ClientGone, EventStream, pieces, until_gone
from serve.ticket import Ticket
from serve.tokens import DetokenizeBody, TokenizeBody, detokenize, tokenize
from serve.version import version

MANY_POSITIONS = 100  # a prompt's tokens may be thousands, which a thread writes while others' events go out
CLIENT_CLOSED_REQUEST = 499  # nginx's number for an answer that nobody waits for


def build_app(
    engine: Engine,
    tokenizer: Tokenizer,
    *,
    model_name: str,
    limits: ServerLimits | None = None,
    on_death: Callable[[BaseException], None] | None = None,
    sinks: Sequence[Sink] = (),
) -> FastAPI:
    """An application whose lifespan runs `engine` in a thread of its own; nobody else may call the engine then.

    `on_death` is called on the event loop when the engine raised; the process is then of no use and its owner should
    end it. `sinks` get a record of every request that is over.
    """
    limits = limits or ServerLimits()
    metrics = Metrics(
        model_name=model_name,
        stats=lambda: loop.stats,
        num_open=lambda: loop.num_open,
        up=lambda: loop.status == "ok",
    )
    loop = EngineLoop(
        engine,
        max_open=limits.max_open,
        stuck_after_s=limits.stuck_after_s,
        request_timeout_s=limits.request_timeout_s,
        on_death=on_death,
        observer=metrics,
    )
    api = Api(
        loop,
        tokenizer,
        model_name=model_name,
        max_model_len=engine.max_model_len,
        limits=limits,
        boot=engine.describe(),
        metrics=metrics,
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        loop.start()
        yield
        await loop.stop(drain_s=limits.drain_s)

    # The pages of /docs load scripts from elsewhere; the document itself stays at /openapi.json.
    app = FastAPI(title="nanoserve", docs_url=None, redoc_url=None, lifespan=lifespan)
    install_error_handlers(app)
    install_guards(app, limits)
    _add_routes(app, api)
    app.add_middleware(Access, metrics=metrics, model_name=model_name, sinks=sinks)
    app.state.engine_loop = loop
    document_bodies(app, (CompletionBody, ChatBody, TokenizeBody, DetokenizeBody))
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
        limits: ServerLimits,
        boot: dict[str, Any],
        metrics: Metrics,
    ) -> None:
        self._loop = loop
        self._tokenizer = tokenizer
        self._model_name = model_name
        self._max_model_len = max_model_len
        self._limits = limits_of(tokenizer, max_model_len=max_model_len, max_answers=loop.max_open)
        self._server_limits = limits
        self._bodies = BodyReader(max_bytes=limits.max_body_bytes, timeout_s=limits.body_timeout_s)
        loop.on_stop = self._bodies.stop
        self._guides = Guides(tokenizer)
        self._created = int(time.time())
        self._boot = boot
        self._metrics = metrics
        self._live = LiveSteps(loop, boot=boot, keep_alive_s=limits.keep_alive_s)

    async def completions(self, request: Request) -> Response:
        """`POST /v1/completions`."""
        return await unless_gone(self._completions(request))

    async def chat_completions(self, request: Request) -> Response:
        """`POST /v1/chat/completions`."""
        return await unless_gone(self._chat_completions(request))

    async def tokenize(self, request: Request) -> Response:
        """`POST /tokenize`."""
        return await unless_gone(self._tokenize(request))

    async def detokenize(self, request: Request) -> Response:
        """`POST /detokenize`."""
        return await unless_gone(self._detokenize(request))

    async def models(self) -> Response:
        """`GET /v1/models`: the one model there is."""
        return _json_response({"object": "list", "data": [self._model_object()]})

    async def model(self, model_id: str) -> Response:
        """`GET /v1/models/{id}`."""
        self._check_model(model_id)
        return _json_response(self._model_object())

    async def health(self) -> Response:
        """`GET /health`: 200 while the engine lives, else 503; counts now, and what start-up decided."""
        status = self._loop.checked_status()
        state: dict[str, Any] = {"status": status}
        if not self._server_limits.api_keys:  # this route asks for no key, and the rest is nobody else's business
            state |= {"model": self._model_name, "open": self._loop.num_open, "engine": self._loop.stats}
            state |= {"memory": memory(self._boot), "boot": self._boot}
        return _json_response(state, status=200 if status == "ok" else 503)

    async def metrics(self) -> Response:
        """`GET /metrics`: Prometheus's text format."""
        return Response(self._metrics.render(), media_type=CONTENT_TYPE)

    async def steps(self) -> Response:
        """`GET /steps`: the engine's picture, as server-sent events."""
        return self._live.open()

    async def playground(self) -> Response:
        """`GET /`: the page that shows it, beside a chat."""
        return playground()

    async def ready(self) -> Response:
        """`GET /ready`: 200 while a request would be taken, else the 503, or 429, that it would meet."""
        with self._loop.reserve(1):
            return _json_response({"status": "ready"})

    async def version(self) -> Response:
        """`GET /version`."""
        return _json_response({"version": version()})

    async def _completions(self, request: Request) -> Response:
        body = await self._body(request, CompletionBody)
        id = f"cmpl-{uuid.uuid4().hex}"
        with self._loop.reserve(check_num_answers(body, self._limits)):
            job = await asyncio.to_thread(
                plan_completion, body, self._tokenizer, self._guides, id=id, limits=self._limits
            )
        logprobs = body.logprobs is not None  # a ranking asks for them too
        reply = CompletionReply(id, int(time.time()), self._model_name, self._tokenizer, logprobs)
        return await self._answer(request, body, job, reply)

    async def _chat_completions(self, request: Request) -> Response:
        body = await self._body(request, ChatBody)
        id = f"chatcmpl-{uuid.uuid4().hex}"
        with self._loop.reserve(check_num_answers(body, self._limits)):
            job = await asyncio.to_thread(plan_chat, body, self._tokenizer, self._guides, id=id, limits=self._limits)
        logprobs = job.params.logprobs is not None
        reply = ChatReply(id, int(time.time()), self._model_name, self._tokenizer, logprobs, job.tools)
        return await self._answer(request, body, job, reply)

    async def _tokenize(self, request: Request) -> Response:
        body = await self._body(request, TokenizeBody)
        return _json_response(await asyncio.to_thread(tokenize, body, self._tokenizer, limits=self._limits))

    async def _detokenize(self, request: Request) -> Response:
        body = await self._body(request, DetokenizeBody)
        return _json_response(await asyncio.to_thread(detokenize, body, self._tokenizer))

    async def _body(self, request: Request, kind: type[B]) -> B:
        """The request's JSON as a checked body, for the model that is served."""
        body = await self._bodies.read(request, kind)
        model = getattr(body, "model", None)
        if model is not None:
            self._check_model(model)
        return body

    async def _answer(
        self, request: Request, body: SamplingBody, job: Job, reply: CompletionReply | ChatReply
    ) -> Response:
        try:
            ticket = await self._loop.submit(job.requests)
        except ValueError as error:
            raise from_value_error(error, names=job.names) from None
        note_answers(request, ticket)
        answers = [Answer(self._tokenizer, job.params, prompt=prompt) for prompt in job.prompts]
        if body.stream:
            events = _chunks(ticket, answers, body, job, reply)
            return EventStream(events, on_end=ticket.close, keep_alive_s=self._server_limits.keep_alive_s)
        try:
            await until_gone(request.receive, _drain(ticket, answers))
        finally:
            ticket.close()
        counts = usage(answers, num_prompt_tokens=job.num_prompt_tokens, n=job.params.n)
        if isinstance(body, CompletionBody) and body.ranks:
            answers = best(answers, of=job.params.n, keep=body.n or 1)
        if job.prompts[0].num_wanted is not None:
            return _json_response(await asyncio.to_thread(reply.whole, answers, counts))
        return _json_response(reply.whole(answers, counts))

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


async def unless_gone(answer: Awaitable[Response]) -> Response:
    """The answer, or a 499 for the log when the client has left before it."""
    try:
        return await answer
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)


def _add_routes(app: FastAPI, api: Api) -> None:
    app.post("/v1/completions", openapi_extra=takes(CompletionBody, streams=True))(api.completions)
    app.post("/v1/chat/completions", openapi_extra=takes(ChatBody, streams=True))(api.chat_completions)
    app.post("/tokenize", openapi_extra=takes(TokenizeBody))(api.tokenize)
    app.post("/detokenize", openapi_extra=takes(DetokenizeBody))(api.detokenize)
    app.get("/v1/models", openapi_extra=gives())(api.models)
    app.get("/v1/models/{model_id:path}", openapi_extra=gives("404"))(api.model)
    app.get("/health", openapi_extra=gives("503"))(api.health)
    app.get("/ready", openapi_extra=gives("429", "503"))(api.ready)
    app.get("/version", openapi_extra=gives())(api.version)
    app.get("/metrics", openapi_extra=gives(text=True))(api.metrics)
    app.get("/steps", include_in_schema=False)(api.steps)
    app.get("/", include_in_schema=False)(api.playground)


def _json_response(value: Any, *, status: int = 200) -> Response:
    return Response(to_json(value), status, media_type="application/json")


async def _drain(ticket: Ticket, answers: Sequence[Answer]) -> None:
    async for _ in pieces(ticket, answers):
        pass


async def _chunks(
    ticket: Ticket, answers: Sequence[Answer], body: SamplingBody, job: Job, reply: CompletionReply | ChatReply
) -> AsyncGenerator[bytes, None]:
    """The events of a stream, as many as have come at a time. Usage is null in all but the last, when asked for."""
    writer = EventWriter(reply, more={"usage": None} if body.include_usage else {})
    shows_prompt = job.prompts[0].num_shown is not None
    async for batch in pieces(ticket, answers):
        if shows_prompt and any(len(piece.positions) > MANY_POSITIONS for _, piece in batch):
            yield await asyncio.to_thread(writer.write_all, batch)
        else:
            yield writer.write_all(batch)
    if body.include_usage:
        yield sse(to_json(reply.last(usage(answers, num_prompt_tokens=job.num_prompt_tokens, n=job.params.n))))
