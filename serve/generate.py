"""`nanoserve generate`, and `Continuation`: one request on an idle engine, as text while it grows.

The command prints the text, or as its last line one JSON object with `prompt_ids, token_ids, text, finish_reason`, so
that a script can compare two engines by their ids. Stop strings are matched here, where there is text; the engine
behind it may be either.

Proof: tests/test_cli.py. Story: engine.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace

from reference.request import Engine, Event, Request, SamplingParams
from reference.tokenizer import Tokenizer
from serve.answer import Answer
from serve.boot import as_option, boot
from serve.options import UsageError


class Continuation:
    """One request from its submission to its last event; iterate over it for the text, piece by piece.

    `token_ids` holds every token emitted, the one that ended the answer included; the text leaves out special tokens,
    the token that ended it, and everything from a stop string on.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer, request: Request, *, stops: Sequence[str] = ()) -> None:
        """Submit the request. Raises ValueError, and leaves the engine unchanged, when it can never run."""
        engine.submit(request)
        self.request = request
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.error: str | None = None
        self._engine = engine
        self._answer = Answer(tokenizer, replace(request.params, stop=tuple(stops)))

    def __iter__(self) -> Iterator[str]:
        """The pieces of text; an iteration that is broken off aborts the request."""
        try:
            while self.finish_reason is None:
                for event in self._engine.step():
                    yield from self._take(event)
        finally:
            if self.finish_reason is None:
                self._close("abort")

    def _take(self, event: Event) -> Iterator[str]:
        if event.token_id is None:
            self.finish_reason, self.error = event.finish_reason, event.error
            return
        self.token_ids.append(event.token_id)
        piece = self._answer.push(event)
        self.finish_reason = event.finish_reason
        if piece.text:
            yield piece.text
        if self._answer.finish_reason != self.finish_reason:
            self._close("stop")

    def _close(self, reason: str) -> None:
        """End the request before the engine would have, and leave the engine idle."""
        self._engine.abort(self.request.id)
        while self._engine.has_work:
            self._engine.step()
        self.finish_reason = reason


def generate(args: argparse.Namespace) -> int:
    """Run the command.

    Raises:
        UsageError: an option is out of range, for sampling or for this model.
        RuntimeError: the engine could not finish the request.
    """
    try:
        params = sampling_params(args)
        stops = SamplingParams(stop=tuple(args.stop)).stop
    except ValueError as error:
        raise as_option(error) from error
    loaded, engine = boot(args)
    prompt_ids = _prompt_ids(args, loaded.tokenizer)
    try:
        answer = Continuation(engine, loaded.tokenizer, Request(prompt_ids, params), stops=stops)
    except ValueError as error:
        raise as_option(error) from error
    text = ""
    for piece in answer:
        text += piece
        if not args.json:
            print(piece, end="", flush=True)
    if answer.error is not None:
        raise RuntimeError(answer.error)
    result = {
        "prompt_ids": list(prompt_ids),
        "token_ids": answer.token_ids,
        "text": text,
        "finish_reason": answer.finish_reason,
    }
    print(json.dumps(result) if args.json else "")
    return 0


def sampling_params(args: argparse.Namespace) -> SamplingParams:
    """The sampling options that `chat` and `generate` share, and those that `generate` alone has.

    Raises:
        ValueError: naming the field, its value and its range.
    """
    shared = SamplingParams(
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        seed=args.seed,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
    )
    if args.command == "chat":
        return shared
    return replace(
        shared,
        logit_bias=dict(args.logit_bias),
        stop_token_ids=args.stop_token_ids,
        min_tokens=args.min_tokens,
        ignore_eos=args.ignore_eos,
    )


def _prompt_ids(args: argparse.Namespace, tokenizer: Tokenizer) -> tuple[int, ...]:
    if args.prompt_ids is not None:
        return tuple(args.prompt_ids)
    ids = tokenizer.encode(args.prompt)
    if not ids:
        raise UsageError(f"--prompt: {args.prompt!r} has no tokens; at least one is needed")
    return tuple(ids)
