"""What one client may cost the others: how many answers, how many bytes, how long, and with which key.

The values come from the command line (or, for keys, from the environment, which `ps` does not show) and are kept by
the parts that can: the loop counts answers, the reader of bodies counts bytes and seconds, `serve.guard` checks keys
and origins. It knows no engine and imports no framework, so `--help` stays quick.

Proof: tests/test_limits.py. Story: limits.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass, field

from serve.options import UsageError, integer, num_bytes, seconds

KEY_VARIABLE = "NANOSERVE_API_KEY"


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """One value each; the defaults suit a server on one machine."""

    max_open: int = 1024  # answers open at once, waiting ones included; 429 beyond
    max_body_bytes: int = 8 * 2**20  # of one request; 413 beyond
    body_timeout_s: float = 60.0  # for a client to send its body; 408 beyond
    request_timeout_s: float = 600.0  # from admission to the last token; 504, or an error event, beyond; 0: none
    keep_alive_s: float = 15.0  # a stream that is silent for so long gets a comment, for proxies that count
    stuck_after_s: float = 60.0  # one engine step that takes longer is a hung engine
    drain_s: float = 25.0  # open answers may go on for so long after a shutdown began
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # any of them opens every route; none: no key is asked
    allow_origins: tuple[str, ...] = ()  # origins of web pages that may call; `*` is every one


def add_limit_arguments(parser: argparse._ArgumentGroup) -> None:
    """The options of `nanoserve serve` that `limits_from` reads."""
    add, default = parser.add_argument, ServerLimits()
    add(
        "--max-open",
        type=integer(1),
        default=default.max_open,
        metavar="N",
        help=f"answers open at once, waiting ones included; 429 beyond; default: {default.max_open}",
    )
    add("--max-body", type=num_bytes, default=default.max_body_bytes, metavar="SIZE", help="default: 8MiB; 413 beyond")
    add(
        "--request-timeout",
        type=seconds,
        default=default.request_timeout_s,
        metavar="S",
        help=f"seconds one request may take, queue included; default: {default.request_timeout_s:g}; 0: no limit",
    )
    add(
        "--drain-timeout",
        type=seconds,
        default=default.drain_s,
        metavar="S",
        help=f"seconds open answers may go on after SIGTERM or Ctrl-C; default: {default.drain_s:g}",
    )
    add(
        "--api-key",
        action="append",
        default=[],
        metavar="KEY",
        help=f"ask for `Authorization: Bearer KEY` everywhere but on /health and /ready; repeatable, and so are the "
        f"commas in ${KEY_VARIABLE}, which no process list shows; default: no key",
    )
    add(
        "--allow-origin",
        action="append",
        default=[],
        metavar="ORIGIN",
        help="let web pages of ORIGIN (https://host, or * for all) call this server; repeatable; default: none",
    )


def limits_from(args: argparse.Namespace) -> ServerLimits:
    """The limits that the arguments and the environment name.

    Raises:
        UsageError: a key that no header can carry.
    """
    named = [key.strip() for key in os.environ.get(KEY_VARIABLE, "").split(",")]
    keys = (*args.api_key, *(key for key in named if key))
    for key in keys:
        if not key.isascii() or not key.isprintable() or " " in key or not key:
            raise UsageError(f"--api-key: {len(key)} characters that are not all printable ASCII without spaces")
    return ServerLimits(
        max_open=args.max_open,
        max_body_bytes=args.max_body,
        request_timeout_s=args.request_timeout,
        drain_s=args.drain_timeout,
        api_keys=keys,
        allow_origins=tuple(args.allow_origin),
    )
