"""The command group `nanoserve bench`: each measurement is a module of its own, imported when it is asked for.

Proof: tests/test_bench_serve.py, tests/test_bench_soak.py, tests/test_bench_http.py,
tests/test_bench_engine.py. Story: metrics.
"""

from __future__ import annotations

import argparse
import re
from typing import Any

from serve.options import integer, integers

ENGINES = ("fast", "reference")


def add_bench_arguments(commands: argparse._SubParsersAction[Any], *, default_model: str) -> None:
    """Add the command `bench` and its actions."""
    bench = commands.add_parser("bench", help="measure the engine or the server", allow_abbrev=False)
    actions = bench.add_subparsers(dest="action", required=True, metavar="ACTION")
    _serve_arguments(
        actions.add_parser("serve", help="the server under an open load, arms in turn", allow_abbrev=False),
        default_model=default_model,
    )
    _soak_arguments(actions.add_parser("soak", help="rude clients, a tight pool, and what is left", allow_abbrev=False))
    _http_arguments(
        actions.add_parser("http", help="tokens a second over HTTP and without", allow_abbrev=False),
        default_model=default_model,
    )
    _decode_arguments(actions.add_parser("decode", help="time decode steps", allow_abbrev=False), default_model)
    _prefill_arguments(actions.add_parser("prefill", help="time whole prompts", allow_abbrev=False), default_model)


def bench(args: argparse.Namespace) -> int:
    """Run one action."""
    if args.action == "serve":
        from serve.bench_serve import bench_serve

        return bench_serve(args)
    if args.action == "soak":
        from serve.bench_soak import bench_soak

        return bench_soak(args)
    if args.action == "http":
        from serve.bench_http import bench_http

        return bench_http(args)
    from serve.bench_engine import bench_engine

    return bench_engine(args)


def _serve_arguments(parser: argparse.ArgumentParser, *, default_model: str) -> None:
    add = parser.add_argument
    add(
        "--rates",
        type=_rates,
        default=(1.0, 2.0, 4.0, 8.0),
        metavar="1,2,4,8",
        help="requests a second; default: 1,2,4,8",
    )
    add(
        "--arms",
        type=_words,
        default=("eager", "graph", "no-compact"),
        metavar="A,B",
        help="ways to start the server; default: eager,graph,no-compact",
    )
    add("--dataset", default="synthetic", metavar="FILE", help="JSONL of prompt and max_tokens, or synthetic")
    add("--requests", type=integer(1), default=32, metavar="N", help="at each rate; default: 32")
    add("--prompt-tokens", type=integer(1), default=64, metavar="T", help="of a synthetic prompt; default: 64")
    add(
        "--gens",
        type=integers(1),
        default=(16, 32, 64, 128),
        metavar="16,32",
        help="answer lengths; default: 16,32,64,128",
    )
    add("--seed", type=integer(0), default=0, help="of arrivals, prompts and lengths; default: 0")
    add("--slo-ttft-ms", type=integer(1), default=1000, metavar="MS", help="a good request's; default: 1000")
    add("--slo-itl-ms", type=integer(1), default=100, metavar="MS", help="a good request's mean; default: 100")
    add("--model", default=default_model, help=f"default: {default_model}")
    add("--max-batch-size", type=integer(1, 1024), default=32, metavar="R", help="rows; default: 32")
    add("--max-model-len", type=integer(1), metavar="T", help="tokens; default: what the model allows")
    add("--threads", type=integer(1, 1024), metavar="N", help="of each server; default: physical cores")
    add("--json", action="store_true", help="print one JSON object")


def _soak_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--seconds", type=integer(1), default=600, metavar="S", help="default: 600")
    add("--clients", type=integer(1, 256), default=24, metavar="N", help="at once; default: 24")
    add("--seed", type=integer(0), default=0, help="of what the clients do; default: 0")
    add("--model", default="tiny-random", help="default: tiny-random")
    add("--kv-cache-memory", metavar="SIZE", help="default: room for a few of the clients' answers")
    add("--json", action="store_true", help="print one JSON object")


def _http_arguments(parser: argparse.ArgumentParser, *, default_model: str) -> None:
    add = parser.add_argument
    add("--streams", type=integers(1), default=(1, 8, 32), metavar="1,8,32", help="requests at once; default: 1,8,32")
    add("--tokens", type=integer(2), default=128, metavar="T", help="of each answer; default: 128")
    add("--prompt-tokens", type=integer(1), default=16, metavar="T", help="default: 16")
    add("--rounds", type=integer(1), default=5, metavar="N", help="of each arm, in turn; default: 5")
    add("--model", default=default_model, help=f"default: {default_model}")
    add("--threads", type=integer(1, 1024), metavar="N", help="of each engine; default: physical cores")
    add("--json", action="store_true", help="print one JSON object")


def _decode_arguments(parser: argparse.ArgumentParser, default_model: str) -> None:
    add = parser.add_argument
    add("--batch", type=integers(1), default=(1, 2, 4, 8, 16, 32), metavar="1,8,32", help="default: 1,2,4,8,16,32 rows")
    add("--prompt-tokens", type=integer(1), default=64, metavar="T", help="default: 64")
    add("--context", type=integer(1), metavar="T", help="tokens before the first decode step: a longer prompt")
    add("--new-tokens", type=integer(6), default=64, metavar="T", help="at least 6; default: 64")
    add("--rounds", type=integer(1), default=3, metavar="N", help="default: 3")
    _arm_arguments(parser, default_model)


def _prefill_arguments(parser: argparse.ArgumentParser, default_model: str) -> None:
    parser.add_argument(
        "--tokens",
        type=integers(1),
        default=(64, 512, 2048),
        metavar="64,512",
        help="prompt lengths; default: 64,512,2048",
    )
    parser.add_argument("--rounds", type=integer(1), default=5, metavar="N", help="default: 5")
    _arm_arguments(parser, default_model)


def _arm_arguments(parser: argparse.ArgumentParser, default_model: str) -> None:
    add = parser.add_argument
    add("--model", default=default_model, help=f"default: {default_model}")
    add("--engine", type=_engines, default=("fast",), metavar="fast,reference", help="arms; default: fast")
    add("--threads", type=integers(1), metavar="1,2", help="arms; default: physical cores")
    add("--half-kv", action="store_true", help="K/V in half precision")
    add("--no-kernels", action="store_true", help="plain torch operators")
    add("--json", action="store_true", help="print one JSON object")


def _engines(text: str) -> tuple[str, ...]:
    names = _words(text)
    for name in names:
        if name not in ENGINES:
            raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(ENGINES)}")
    return names


def _rates(text: str) -> tuple[float, ...]:
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"\d+(\.\d+)?", part) and float(part) > 0 for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of rates above 0, such as 0.5,1,2")
    return tuple(float(part) for part in parts)


def _words(text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
