"""Run the comparison: `python -m tests.bench.peers` (or `make bench-peers`).

Every arm is a process of its own on the same processors; arms take turns, round by round and context by context, and
every other round goes the other way. It writes `peers.json` and `peers.md` to `--out`. `--install-only` makes
environments and converted models, which takes long once; a peer that fails is told with its reason.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from reference.config import ModelConfig
from serve.machine import commit, processor
from serve.models import model_path
from serve.options import integer, integers
from tests.bench.peers.install import ARMS, Arm, Unavailable, interpreter, run
from tests.bench.peers.report import Results, markdown, summary
from tests.bench.peers.workload import Job, as_argument

JOB_SECONDS = 900
SHORT = 128  # contexts up to here are run by every arm, in every round


def main(argv: Sequence[str] | None = None) -> int:
    """Install, measure, write; 0 even when a peer failed, for that is told."""
    args = _parser().parse_args(argv)
    names = {arm.name for arm in ARMS}
    unknown = [name for name in args.arms.split(",") if args.arms and name not in names]
    if unknown:
        print(f"--arms: {unknown[0]!r} is not one of {', '.join(sorted(names))}", file=sys.stderr)
        return 2
    arms = [arm for arm in ARMS if not args.arms or arm.name in args.arms.split(",")]
    begin, model, reasons = time.perf_counter(), model_path(args.model), {}
    ready: dict[str, tuple[str, Path]] = {}
    for arm in arms:
        try:
            ready[arm.name] = interpreter(arm, args.home), arm.prepare(args.home, model)
        except (Unavailable, OSError, ValueError) as error:
            reasons[arm.name] = str(error)
            print(f"{arm.name}: {error}", file=sys.stderr)
    if args.install_only:
        return 0
    results = compare(arms, ready, reasons, model, args)
    about = {"model": args.model, "threads": args.threads, "processor": processor(), "system": platform.platform()}
    about |= {"commit": commit(), "rounds": args.rounds, "minutes": round((time.perf_counter() - begin) / 60, 1)}
    entries = summary(arms, results, reasons)
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "peers.json").write_text(json.dumps({"about": about, "arms": entries}, indent=1) + "\n", "utf-8")
    (args.out / "peers.md").write_text(markdown(entries, about), "utf-8")
    print(markdown(entries, about))
    return 0


def compare(
    arms: Sequence[Arm],
    ready: dict[str, tuple[str, Path]],
    reasons: dict[str, str],
    model: Path,
    args: argparse.Namespace,
) -> Results:
    """Every arm's every process in turn; an arm that fails once is out, and `reasons` gets the reason."""
    results: Results = {}
    vocab_size = ModelConfig.from_dir(model).vocab_size
    pin = frozenset(sorted(os.sched_getaffinity(0))[: args.threads])
    for turn, (number, contexts, prefills) in enumerate(_turns(args)):
        for arm in arms if number % 2 == 0 else reversed(arms):
            if arm.name in reasons or arm.name not in ready or not (arm.long or max(contexts) <= SHORT):
                continue
            python, loads = ready[arm.name]
            sizes: dict[str, Any] = {"contexts": contexts, "batches": args.batch, "steps": args.steps}
            sizes |= {"prefills": prefills, "prefill_rounds": args.prefill_rounds, "vocab_size": vocab_size}
            job = Job(str(loads), args.threads, **sizes, options=arm.options)
            began = time.perf_counter()
            log = args.home / "logs" / f"{arm.name}-{turn}.log"
            command = [python, "-m", f"tests.bench.peers.{arm.peer}_peer", as_argument(job)]
            try:
                said = run(command, log, seconds=JOB_SECONDS, pin=pin, threads=args.threads)
                results.setdefault(arm.name, []).append(json.loads(said.splitlines()[-1]))
                how = "done"
            except (Unavailable, ValueError, IndexError) as error:
                reasons[arm.name] = how = f"context {max(contexts)}: {error}"
            print(f"{arm.name}, context {contexts}: {how}, {time.perf_counter() - began:.0f} s", file=sys.stderr)
    return results


def _turns(args: argparse.Namespace) -> Iterator[tuple[int, tuple[int, ...], tuple[int, ...]]]:
    """(round, contexts, prefills) of each process: short contexts with the prefills, then each long one by itself."""
    short = tuple(context for context in args.context if context <= SHORT)
    for number in range(args.rounds):
        if short:
            yield number, short, args.prefill
        if number < args.long_rounds:
            for context in args.context:
                if context > SHORT:
                    yield number, (context,), ()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.peers", allow_abbrev=False)
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", help="an installed model")
    add("--home", type=Path, default=Path(".venv-peers"), help="environments and converted models")
    add("--out", type=Path, default=Path(".venv-peers/results"), help="where peers.json and peers.md go")
    add("--arms", default="", metavar="A,B", help=f"default: {','.join(arm.name for arm in ARMS)}")
    add("--threads", type=integer(1, 1024), default=2)
    add("--batch", type=integers(1), default=(1, 2, 4, 8, 16, 32), metavar="1,8,32")
    add("--context", type=integers(1), default=(64, 512, 1024), metavar="64,512")
    add("--prefill", type=integers(1), default=(64, 512, 2048), metavar="64,512")
    add("--steps", type=integer(4), default=16, help="decode steps at each batch size; default: 16")
    add("--prefill-rounds", type=integer(1), default=2, help="in each process; default: 2")
    add("--rounds", type=integer(1), default=2, help="default: 2")
    add("--long-rounds", type=integer(0), default=1, help="rounds that include contexts over 128; default: 1")
    add("--install-only", action="store_true")
    return parser


if __name__ == "__main__":
    sys.exit(main())
