"""From a command line to a running engine, and from a running engine to a socket that answers.

This is the one place that knows both engines by name; everything above it holds the `Engine` protocol. The port is
taken before any weight is read, so that a port in use is known at once; a client that connects meanwhile waits in
the socket's backlog and is answered when the engine is ready.

Proof: tests/test_boot.py. Story: app.
"""

from __future__ import annotations

import argparse
import errno
import json
import logging
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from reference.request import Engine
from serve.device import on_gpu
from serve.limits import ServerLimits, limits_from
from serve.memory import peak_rss_bytes, returned_at_once
from serve.models import LoadedModel, load_model
from serve.options import UsageError
from serve.trace import attach_trace

if TYPE_CHECKING:
    from serve.access import Sink

ENGINES = ("fast", "reference")
WHY_LOWERED = "the model's positions or --kv-cache-memory end there"


def build_engine(
    loaded: LoadedModel,
    *,
    engine: str = "fast",
    max_batch_size: int = 32,
    block_size: int = 16,
    kv_cache_bytes: int = 2**30,
    max_model_len: int | None = None,
    chunk_tokens: int | None = None,
    prefix_cache: bool = False,
    dtype: torch.dtype = torch.float32,
    bucket_decode: bool = False,
    persist_inputs: bool = False,
    capture_decode: bool = False,
    compact_rows: bool = False,
    gather_rows: bool = False,
    compile_decode: bool = False,
    width_multiple: int = 128,
    warm_rows: int | None = None,
    warm_width: int | None = None,
    kernels: bool = False,
    half_weights: bool = False,
    half_kv: bool = False,
    threads: int | None = None,
    take_weights: bool = False,
    device: str = "cpu",
    triton: bool = False,
    invariant: bool = False,
    overlap: bool = False,
) -> Engine:
    """An idle engine over a loaded model, warm when it captures. `dtype` is what it computes in.

    The switches stay apart here, and the reference has none. `take_weights` empties `loaded.weights` while it packs.

    Raises:
        ValueError: the engine's name, or a size or switch that cannot work, with the range allowed.
    """
    if loaded.weights is None:
        raise ValueError(f"loaded: {loaded.name} has given its weights to another engine; load it again")
    if engine == "reference":
        from reference.engine import Engine as ReferenceEngine

        kv_dtype = torch.float16 if half_kv else None
        kept: dict[str, Any] = {"max_model_len": max_model_len, "dtype": dtype, "kv_dtype": kv_dtype}
        return ReferenceEngine(loaded.config, loaded.weights, **kept)
    if engine == "fast":
        from fast.engine import Engine as FastEngine

        sizes: dict[str, Any] = {"max_batch_size": max_batch_size, "block_size": block_size, "kv_bytes": kv_cache_bytes}
        sizes |= {"max_model_len": max_model_len, "width_multiple": width_multiple, "chunk_tokens": chunk_tokens}
        how: dict[str, Any] = {"dtype": dtype, "device": device, "kernels": kernels, "threads": threads}
        how |= {"half_weights": half_weights, "half_kv": half_kv, "take_weights": take_weights, "triton": triton}
        how |= {"invariant": invariant, "bucket_decode": bucket_decode, "persist_inputs": persist_inputs}
        how |= {"capture_decode": capture_decode, "compile_decode": compile_decode, "compact_rows": compact_rows}
        how |= {"gather_rows": gather_rows, "prefix_cache": prefix_cache, "reserve_growth": True, "overlap": overlap}
        fast = FastEngine.build(loaded.config, loaded.weights, **sizes, **how)
        if capture_decode or compile_decode:  # the pool is allocated, and nobody can ask for anything yet
            print(fast.warm_decode(max_rows=warm_rows, max_width=warm_width).render(), file=sys.stderr)
        return fast
    raise ValueError(f"engine: {engine!r} is not one of {', '.join(ENGINES)}")


def boot(args: argparse.Namespace) -> tuple[LoadedModel, Engine]:
    """Load the model and build the engine that the arguments name, with one line on stderr that says what runs.

    Raises:
        UsageError: an engine argument is out of range for this model.
        ModelError, ValueError, OSError: as `load_model`.
    """
    start = time.perf_counter()
    for note in without_effect(args):
        print(f"note: {note}", file=sys.stderr)
    set_threads(args.threads)
    with returned_at_once():
        weights, loaded, engine = _load_and_build(args)
    print(boot_line(weights, engine, args, seconds=time.perf_counter() - start), file=sys.stderr)
    most, wanted = engine.max_model_len, args.max_model_len or loaded.config.max_positions
    if most < wanted:
        print(f"note: a request may have {most:,} tokens, not {wanted:,}: {WHY_LOWERED}", file=sys.stderr)
    if args.trace is not None:
        attach_trace(engine, args.trace, model=args.model, config=loaded.config)
    return loaded, engine


def _load_and_build(args: argparse.Namespace) -> tuple[str, LoadedModel, Engine]:
    """What was loaded in words, the model without its weights, and the engine that has them."""
    from fast.backend import compiled_before

    loaded = load_model(args.model)
    weights = weights_line(loaded)
    try:
        chosen = backend(args, loaded)
        if args.engine == "fast" and chosen.get("kernels") and not compiled_before():
            print("compiling the kernels, once: about half a minute (they are kept on disk)", file=sys.stderr)
        if chosen["half_weights"]:
            loaded = round_weights(loaded)
        engine = build_engine(
            loaded,
            engine=args.engine,
            max_batch_size=args.max_batch_size,
            block_size=args.block_size,
            kv_cache_bytes=args.kv_cache_memory,
            max_model_len=args.max_model_len,
            chunk_tokens=args.chunk_tokens,
            prefix_cache=args.prefix_cache,
            dtype=getattr(torch, args.dtype),
            width_multiple=args.width_multiple,
            warm_rows=args.warm_rows,
            warm_width=args.warm_width,
            take_weights=True,
            **switches(args),
            **chosen,
        )
    except ValueError as error:
        raise as_option(error) from error
    watch_bits(engine, every=args.recheck_every)
    # The engine has its own copy, packed or cast; what it was made from is not held beside it.
    return weights, replace(loaded, weights=None), engine


def watch_bits(engine: Engine, *, every: int) -> None:
    """Have one request in so many computed again alone, by an engine whose backend promises the same bits."""
    from fast.engine import Engine as FastEngine
    from fast.recheck import Recheck

    if isinstance(engine, FastEngine) and engine.describe()["backend"]["schedule_invariant"]:
        engine.recheck = Recheck(engine.forward, engine.cache, every=every)


def prepare_for_many(engine: Engine, *, mixed_steps: bool) -> None:
    """A gate that speaks of one answer ends that one alone; chunks may be computed with decoding rows."""
    from fast.engine import Engine as FastEngine

    if isinstance(engine, FastEngine):
        engine.fail_alone, engine.mixed_steps = True, mixed_steps


def switches(args: argparse.Namespace) -> dict[str, Any]:
    """The one place where switches are bundled: `--cuda-graphs` means all that a recording needs to be of use.

    `--persistent-batch` unset follows the capture; `--gather-rows` is the other way to keep rows at one address.
    """
    captures = args.cuda_graphs
    persistent = captures and not args.gather_rows if args.persistent_batch is None else args.persistent_batch
    return {
        "bucket_decode": captures or args.compile,
        "persist_inputs": captures,
        "capture_decode": captures,
        "compact_rows": persistent,
        "gather_rows": args.gather_rows,
        "compile_decode": args.compile,
        "overlap": on_gpu(args) if args.overlap is None else args.overlap,
    }


def without_effect(args: argparse.Namespace) -> list[str]:
    """A line for each option that was given and changes nothing beside the others."""
    records = args.cuda_graphs or args.compile
    warm = {"--warm-rows": args.warm_rows, "--warm-width": args.warm_width}
    fast = {"--persistent-batch": args.persistent_batch, "--gather-rows": args.gather_rows, "--compile": args.compile}
    if args.engine == "reference":
        fast |= {**warm, "--half-kv": args.half_kv, "--overlap": args.overlap}
        return [f"{name} has no effect: the reference engine has no batch" for name, given in fast.items() if given]
    idle = {} if records else {name: given for name, given in warm.items() if given is not None}
    notes = [f"{name} has no effect: with --no-cuda-graphs nothing is recorded" for name in idle]
    if args.gather_rows and not args.cuda_graphs:
        notes.append("--gather-rows only costs a copy a step: with --no-cuda-graphs nothing is replayed")
    return notes


def backend(args: argparse.Namespace, loaded: LoadedModel) -> dict[str, Any]:
    """The other bundle: the CPU kernels wherever they can run, on packed halves where those are still the model.

    Both engines get these, so that the reference computes from the weights that the fast engine has packed.
    """
    from fast.backend import why_no_kernels
    from fast.linear import half_loss

    dtype = getattr(torch, args.dtype)
    kernels, half = args.kernels, args.half_weights
    if on_gpu(args):
        halves = {"half_weights": bool(half), "half_kv": args.half_kv}
        triton = kernels is not False and not args.compile
        return {"device": args.device, "triton": triton, "invariant": args.invariant, **halves}
    if kernels is None:
        kernels = not args.compile and not why_no_kernels(dtype=dtype, device="cpu", block_size=args.block_size)
    if half is None:
        half = kernels and loaded.weights is not None and half_loss(loaded.weights).acceptable
    threads = torch.get_num_threads() if kernels else None
    if args.invariant and not kernels:
        raise UsageError("--invariant: the kernels alone promise it, and they are off")
    return {"kernels": kernels, "half_weights": half, "half_kv": args.half_kv, "threads": threads}


def round_weights(loaded: LoadedModel) -> LoadedModel:
    """The model with its matrices rounded to half precision once, in the memory that it has; itself when stored so."""
    from fast.linear import round_to_half

    return loaded if loaded.weights is None else replace(loaded, weights=round_to_half(loaded.weights, in_place=True))


def set_threads(threads: int | None) -> None:
    """One number for torch and the kernels alike: what was asked for, else the physical cores there are."""
    from fast.backend import default_threads

    torch.set_num_threads(default_threads() if threads is None else threads)


def as_option(error: ValueError) -> UsageError:
    """An error of the contract (`max_tokens: 0 is not …`) in the words of the command line (`--max-tokens: …`)."""
    field, colon, rest = str(error).partition(":")
    if not colon or not field.replace("_", "").isalpha():
        return UsageError(str(error))
    renamed = {"kv_bytes": "kv_cache_memory", "kv_cache_bytes": "kv_cache_memory", "num_blocks": "kv_cache_memory"}
    renamed |= {"compile_decode": "compile"}
    return UsageError(f"--{renamed.get(field, field).replace('_', '-')}:{rest}")


def weights_line(loaded: LoadedModel) -> str:
    """The model and its weights as they are stored."""
    if loaded.weights is None:
        return loaded.name
    num_weights = sum(tensor.numel() for tensor in loaded.weights.tensors())
    stored = str(loaded.weights.embedding.dtype).removeprefix("torch.")
    return f"{loaded.name}: {num_weights / 1e6:.1f} M weights in {stored} ({loaded.weights.num_bytes / 1e6:.0f} MB)"


def boot_line(weights: str, engine: Engine, args: argparse.Namespace, *, seconds: float) -> str:
    """One line: the model and its weights, the engine, its backend and limits, and how long the start took."""
    rows = args.max_batch_size if args.engine == "fast" else 1
    facts, peak = engine.describe().get("backend"), peak_rss_bytes()
    runs_on = ""
    held = "" if peak is None else f", {peak / 1e6:.0f} MB of memory at most"
    if facts is not None:
        held += f" (weights {facts['weight_bytes'] / 1e6:.0f} MB)" if held else ""
        promise = "invariant" if facts["schedule_invariant"] else "not invariant"
        products = f"; products by the {facts['products']}" if "products" in facts else ""
        runs_on = f" on {facts['name']} (weights {facts['weights']}, K/V {facts['kv']}; schedule {promise}{products})"
    return (
        f"{weights} | {args.engine} engine in {args.dtype}{runs_on}, {rows} rows, "
        f"up to {engine.max_model_len:,} tokens a request, "
        f"K/V room for {engine.stats()['kv_capacity_tokens']:,} tokens | {torch.get_num_threads()} threads | "
        f"ready in {seconds:.1f} s{held}"
    )


def serve(args: argparse.Namespace) -> int:
    """`nanoserve serve`: take the port, load, say where, answer until interrupted.

    Raises:
        OSError: the port cannot be had.
        RuntimeError: the engine died; open requests got an error and the server has shut down.
    """
    from serve.shutdown import terminate_as_interrupt

    limits, sinks = limits_from(args), record_sinks(args)
    with listen(args.host, args.port) as listener, terminate_as_interrupt():
        loaded, engine = boot(args)
        prepare_for_many(engine, mixed_steps=args.mixed_steps)
        name, url = args.served_model_name or loaded.name, base_url(listener)
        print(f"serving on {url}/v1 (Ctrl-C stops); try:\n{example(url, name, chat=has_chat(loaded))}", flush=True)
        try:
            death = _run(engine, loaded, listener, name=name, limits=limits, sinks=sinks)
        except KeyboardInterrupt:  # uvicorn has shut down in order and hands the signal on
            print("stopped", file=sys.stderr)
            return 0
    if death:
        raise RuntimeError(f"the engine died: {type(death[0]).__name__}: {death[0]}")
    return 0


def record_sinks(args: argparse.Namespace) -> list[Sink]:
    """Where the records of finished requests go: the request log on stderr, an OTLP collector, both or neither.

    Raises:
        UsageError: spans are asked for and the extra `otel` is not installed.
    """
    from serve.access import log_request, request_log

    sinks: list[Sink] = []
    if args.access_log:
        request_log.setLevel(logging.INFO)
        request_log.addHandler(logging.StreamHandler())
        request_log.propagate = False
        sinks.append(log_request)
    if args.otlp_traces_endpoint is not None:
        from serve.spans import otlp_sink

        sinks.append(otlp_sink(args.otlp_traces_endpoint))
    return sinks


def _run(
    engine: Engine,
    loaded: LoadedModel,
    listener: socket.socket,
    *,
    name: str,
    limits: ServerLimits,
    sinks: Sequence[Sink],
) -> list[BaseException]:
    """Serve until told to stop; what killed the engine, if something did."""
    from serve.app import build_app
    from serve.shutdown import DrainingServer
    from serve.wire import server_config

    death: list[BaseException] = []

    def on_death(error: BaseException) -> None:
        death.append(error)
        server.should_exit = True

    app = build_app(engine, loaded.tokenizer, model_name=name, limits=limits, on_death=on_death, sinks=sinks)
    server = DrainingServer(server_config(app), app.state.engine_loop, drain_s=limits.drain_s)
    try:
        server.run(sockets=[listener])
    finally:
        if (
            server.force_exit
        ):  # told twice: the engine's thread is left where it is, and may not outlive the interpreter
            print("stopped at once", file=sys.stderr, flush=True)
            os._exit(130)
    return death


def listen(host: str, port: int) -> socket.socket:
    """A listening socket on `host`; port 0 takes a free one.

    Raises:
        OSError: the port is in use, or the host is not this machine's; the message names both options.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise OSError(f"--port: {port} is in use on {host}; name another, or 0 for a free one") from None
        raise OSError(f"--host {host}, --port {port}: {error.strerror or error}") from None


def base_url(listener: socket.socket) -> str:
    """`http://host:port` as a client on this machine would write it."""
    host, port = listener.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def has_chat(loaded: LoadedModel) -> bool:
    """True when the model came with a chat template."""
    return loaded.tokenizer.chat_template is not None


def example(url: str, name: str, *, chat: bool) -> str:
    """A curl command that works as printed."""
    messages = [{"role": "user", "content": "Why is the sky blue?"}]
    prompt = {"messages": messages} if chat else {"prompt": "The sky is"}
    data = json.dumps({"model": name, **prompt, "max_tokens": 64})
    return (
        f"curl {url}/v1/{'chat/completions' if chat else 'completions'} -H 'content-type: application/json' -d '{data}'"
    )
