"""`nanoserve chat`: a conversation in the terminal, on an engine in this process.

Each turn renders the whole history through the model's own template and streams the answer; the tokens per second are
printed after it. Lines come from any text stream, so a pipe works as a keyboard does. It knows the `Engine` protocol
and no HTTP.

Proof: tests/test_cli.py. Story: app.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TextIO

from reference.request import Engine, Request, SamplingParams
from reference.tokenizer import Tokenizer
from serve.boot import as_option, boot
from serve.generate import Continuation, sampling_params
from serve.options import UsageError

HELP = "/reset forgets the conversation, /system TEXT sets the system message (empty: the model's own), /exit leaves"


class Conversation:
    """The messages so far, and the engine that answers the next one."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, params: SamplingParams, *, system: str | None) -> None:
        self.engine = engine
        self.tokenizer = tokenizer
        self.params = params
        self.system = system
        self.messages: list[dict[str, str]] = []
        self.last: Continuation | None = None

    def reset(self) -> None:
        """Forget every message; the system message stays."""
        self.messages.clear()

    def say(self, text: str) -> Iterator[str]:
        """Answer `text`, piece by piece; both become history when the answer ends or is broken off.

        Raises:
            ChatTemplateError: the model's template refuses the conversation.
            ValueError: history and message no longer fit; the conversation is as before.
        """
        asked = {"role": "user", "content": text}
        first = [{"role": "system", "content": self.system}] if self.system else []
        prompt_ids = self.tokenizer.apply_chat_template([*first, *self.messages, asked])
        limit = self.engine.max_model_len
        room = limit - len(prompt_ids)
        if room < 1:
            raise ValueError(f"{len(prompt_ids):,} tokens leave no room for an answer; the context holds {limit:,}")
        params = replace(self.params, max_tokens=min(room, self.params.max_tokens or room))
        self.last = Continuation(self.engine, self.tokenizer, Request(tuple(prompt_ids), params))
        answer = ""
        try:
            for piece in self.last:
                answer += piece
                yield piece
        finally:
            self.messages += [asked, {"role": "assistant", "content": answer}]


def chat(args: argparse.Namespace) -> int:
    """Run the command until `/exit` or the end of the input.

    Raises:
        UsageError: an option is out of range, or the model has no chat template.
    """
    try:
        params = sampling_params(args)
    except ValueError as error:
        raise as_option(error) from error
    loaded, engine = boot(args)
    if loaded.tokenizer.chat_template is None:
        raise UsageError(f"--model: {loaded.name} has no chat template; `nanoserve generate` continues plain text")
    conversation = Conversation(engine, loaded.tokenizer, params, system=args.system)
    prompt = "> " if sys.stdin.isatty() else ""
    if prompt:
        print(HELP, file=sys.stderr)
    talk(conversation, lines=_lines(prompt), out=sys.stdout, notes=sys.stderr)
    return 0


def talk(conversation: Conversation, *, lines: Iterator[str], out: TextIO, notes: TextIO) -> None:
    """Answers go to `out`; what is said about them (speed, refusals, help) goes to `notes`."""
    for line in lines:
        command, _, rest = line.partition(" ")
        if not line:
            continue
        if command == "/exit":
            return
        if command == "/reset":
            conversation.reset()
            print("the conversation begins anew", file=notes)
        elif command == "/system":
            conversation.system = rest.strip() or None
            conversation.reset()
            print("the system message is set and the conversation begins anew", file=notes)
        elif command.startswith("/"):
            print(f"{command} is not a command; {HELP}", file=notes)
        else:
            _turn(conversation, line, out=out, notes=notes)


def _turn(conversation: Conversation, text: str, *, out: TextIO, notes: TextIO) -> None:
    start = time.perf_counter()
    try:
        for piece in conversation.say(text):
            print(piece, end="", flush=True, file=out)
    except KeyboardInterrupt:  # Ctrl-C ends this answer, not the conversation
        pass
    except ValueError as error:  # ChatTemplateError too: the conversation is as it was before
        print(f"not answered: {error} (/reset starts over)", file=notes)
        return
    seconds = time.perf_counter() - start
    print(flush=True, file=out)
    if conversation.last is not None:
        print(_summary(conversation.last, seconds, conversation.engine.max_model_len), file=notes)


def _summary(answer: Continuation, seconds: float, limit: int) -> str:
    num_tokens, prompt = len(answer.token_ids), len(answer.request.prompt_ids)
    rate = num_tokens / max(seconds, 1e-9)
    line = f"[{num_tokens} tokens, {rate:.1f} tokens/s, {prompt + num_tokens:,} of {limit:,} in the context]"
    if answer.error is not None:
        return f"{line} the engine failed: {answer.error}"
    if answer.finish_reason == "length" and prompt + num_tokens >= limit:
        return f"{line} the context is full and the answer is cut; /reset starts over"
    if answer.finish_reason in ("length", "abort"):
        return f"{line} cut {'at --max-tokens' if answer.finish_reason == 'length' else 'by Ctrl-C'}"
    return line


def _lines(prompt: str) -> Iterator[str]:
    """Lines of stdin, stripped, until it ends; with a prompt and editing when it is a terminal."""
    if prompt:
        import readline  # noqa: F401  (its import is what gives `input` history and editing)
    while True:
        try:
            yield input(prompt).strip() if prompt else next(sys.stdin).strip()
        except KeyboardInterrupt:
            print("(/exit leaves)", file=sys.stderr)
        except (EOFError, StopIteration):
            return
