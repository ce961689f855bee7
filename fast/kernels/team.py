"""A team of threads that runs one compiled step together, and waits for work to be done, never for a thread.

Every member runs the same compiled function. Where the work divides, a phase hands out its tasks one by one: a member
claims the next index until none is left, and goes on when all of them are finished, by whoever it was. A member that
the machine holds back has claimed nothing and delays nobody: the others do its share, and when it returns it finds
the phases over and runs through. So a busy core costs its own part of the speed, and no more.

All of it is one word, `phase << 24 | next task`, moved by compare-and-swap: a claim made for a phase that is over
fails. Waiting is a short spin, then turns given up to the machine. Which member runs a task changes no bit of it.
A member that fails leaves a word of no phase behind, on which nobody waits: the call ends, with its error.

Proof: tests/test_team.py. Story: kernels.
"""

# numba compiles its functions by the arguments they are called with; their shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

import os
import platform
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import types
from numba.core import cgutils
from numpy.typing import NDArray

from fast.kernels.kernel import intrinsic, kernel

MOST_THREADS = 256
MOST_TASKS = 1 << 24  # of one phase
TASK_BITS = 24
SPINS = 400  # looks at the word, a few microseconds, before a turn is given up
OVER = -1  # a word of no phase
WORD, FINISHED = 0, 16  # where the two numbers of a team lie: in cache lines of their own

_I64 = ir.IntType(64)
_X86 = platform.machine().lower() in ("x86_64", "amd64")
_sched_yield: Any = types.ExternalFunction("sched_yield", types.int32())

Kernel = Callable[..., Any]
Job = tuple[Kernel, NDArray[np.int64], int, tuple[Any, ...]]


class Team:
    """`threads` members: the caller of `run`, and helpers of its own that sleep between calls.

    A call that ended early (an error in any member, an interrupt) costs the next one new helpers, and so does a fork.

    Raises:
        ValueError: the number of threads is not in 1..256.
    """

    def __init__(self, threads: int) -> None:
        if not 1 <= threads <= MOST_THREADS:
            raise ValueError(f"threads: {threads} is not in 1..{MOST_THREADS}")
        self.threads = threads
        self._unfinished = False  # a call is under way, or ended before its work did
        self._gather()

    def run(self, kernel: Kernel, *args: Any) -> None:
        """Call `kernel(words, phase, *args)`, a compiled function without the GIL, on every member.

        Returns when its work is done. A helper may still be on its way through it; it will claim nothing.

        Raises:
            Exception: what a member raised. The work is not done, and no member is at it when the next call begins.
        """
        phase = int(self._words[WORD]) >> TASK_BITS
        if self._unfinished or self._failures or self._process != os.getpid():
            self._begin_anew()
            phase = 0
        self._unfinished = True
        try:
            for jobs in self._jobs:
                jobs.put((kernel, self._words, phase, args))
            kernel(self._words, phase, *args)
        except BaseException:
            self._words[WORD] = OVER
            raise
        if self._failures:
            raise self._failures[0]
        self._unfinished = False

    def _gather(self) -> None:
        self._process = os.getpid()
        self._failures: list[BaseException] = []  # of helpers
        self._words = np.zeros(32, np.int64)
        self._jobs: list[SimpleQueue[Job | None]] = [SimpleQueue() for _ in range(self.threads - 1)]
        self._helpers = [
            threading.Thread(target=_help, args=(jobs, self._failures), name=f"kernels-{number}", daemon=True)
            for number, jobs in enumerate(self._jobs, 1)
        ]
        for helper in self._helpers:
            helper.start()
        self._dismissal = weakref.finalize(self, _dismiss, self._jobs)

    def _begin_anew(self) -> None:
        """New words and helpers, once nobody is inside the call that ended early: its buffers are the next one's."""
        if self._process == os.getpid():
            self._dismissal()
            for helper in self._helpers:
                while helper.is_alive():
                    self._words[WORD] = OVER  # more than once: whoever ends a phase opens the next
                    helper.join(timeout=0.001)
        else:
            self._dismissal.detach()  # the helpers are the parent's, and so is what they wait for
        self._gather()
        self._unfinished = False


def _help(jobs: SimpleQueue[Job | None], failures: list[BaseException]) -> None:
    while (job := jobs.get()) is not None:
        kernel, words, phase, args = job
        try:
            kernel(words, phase, *args)
        except BaseException as failure:
            failures.append(failure)
            words[WORD] = OVER  # what this member claimed will never be finished
            return
        del job, kernel, words, phase, args  # what a step was given is not kept until the next one


def _dismiss(jobs: list[SimpleQueue[Job | None]]) -> None:
    for each in jobs:
        each.put(None)


@kernel
def claim(words, phase, tasks):
    """The next task of a phase of `tasks` tasks, -1 when all are claimed or the phase is over."""
    while True:
        seen = _read(words, WORD)
        if seen >> TASK_BITS != phase:
            return -1
        task = seen & (MOST_TASKS - 1)
        if task >= tasks:
            return -1
        if _swap(words, WORD, seen, seen + 1):
            return task


@kernel
def close(words, phase, tasks, mine):
    """Report `mine` tasks of a phase as finished and wait for the others; returns the next phase.

    Whoever reports the last one opens the next phase. What was written in a phase is seen in the next.
    """
    if tasks == 0:
        return phase  # nobody would open the next one
    if mine > 0 and _add(words, FINISHED, mine) + mine == tasks:
        _write(words, FINISHED, 0)
        _write(words, WORD, (phase + 1) << TASK_BITS)
        return phase + 1
    spins = 0
    while _read(words, WORD) >> TASK_BITS == phase:
        spins += 1
        if spins < SPINS:
            _pause()
        else:
            _sched_yield()
    return phase + 1


def _place(context, builder, array_type, array, index):
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _is_words(array):
    return isinstance(array, types.Array) and array.layout == "C" and array.dtype == types.int64


@intrinsic
def _read(typingctx, words, index):
    """words[index], with all that its writer wrote before it."""
    if not _is_words(words):
        return None

    def codegen(context, builder, sig, args):
        return builder.load_atomic(_place(context, builder, sig.args[0], *args), "acquire", 8)

    return types.int64(words, types.intp), codegen


@intrinsic
def _write(typingctx, words, index, value):
    """words[index] = value, and with it all that was written before."""
    if not _is_words(words):
        return None

    def codegen(context, builder, sig, args):
        builder.store_atomic(args[2], _place(context, builder, sig.args[0], *args[:2]), "release", 8)
        return context.get_dummy_value()

    return types.void(words, types.intp, types.int64), codegen


@intrinsic
def _add(typingctx, words, index, value):
    """words[index] += value as one operation; returns what it was."""
    if not _is_words(words):
        return None

    def codegen(context, builder, sig, args):
        return builder.atomic_rmw("add", _place(context, builder, sig.args[0], *args[:2]), args[2], "acq_rel")

    return types.int64(words, types.intp, types.int64), codegen


@intrinsic
def _swap(typingctx, words, index, old, new):
    """words[index] = new if it is still `old`, as one operation; whether it was."""
    if not _is_words(words):
        return None

    def codegen(context, builder, sig, args):
        place = _place(context, builder, sig.args[0], *args[:2])
        return builder.extract_value(builder.cmpxchg(place, args[2], args[3], "acq_rel", "acquire"), 1)

    return types.boolean(words, types.intp, types.int64, types.int64), codegen


@intrinsic
def _pause(typingctx):
    """Tell the core that this is a spin, where it has a way to be told."""

    def codegen(context, builder, sig, args):
        if _X86:
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_dummy_value()

    return types.void(), codegen
