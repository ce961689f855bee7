"""What a lockstep run is told: an arm of the fast engine, who arrives and who leaves at which step, over which limits.

`ARMS` names every legal setting of the decode path's switches, `KERNEL_ARMS` some of them on the CPU kernels. A `Trace`
is a value; `Trace.program` writes it as Python that runs it again, and a `LockstepError` carries it. Nothing here runs
an engine: `tests/harness.py` does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any

from fast.scheduler import DUE_AFTER
from reference.request import Request, SamplingParams
from tests.gpu_mode import DEVICE


@dataclass(frozen=True)
class Arm:
    """One setting of the fast engine's switches (arguments of `Engine.build`), and how much of its list is warmed."""

    switches: Mapping[str, bool]
    warm: str = "nothing"  # "nothing", "all", or "half" of either axis
    eager: frozenset[str] = frozenset({"no capture"})  # the reasons for which a step of this arm may run eagerly


_CAPTURE = {"bucket_decode": True, "persist_inputs": True, "capture_decode": True}
_DECODE = {
    "exact": Arm({}),
    "persist": Arm({"persist_inputs": True}),
    "bucket": Arm({"bucket_decode": True}),
    "bucket+persist": Arm({"bucket_decode": True, "persist_inputs": True}),
    "warm": Arm(_CAPTURE, "all", frozenset()),
    "lazy": Arm(_CAPTURE | {"record_on_miss": True}, "nothing", frozenset()),
    "trimmed": Arm(_CAPTURE, "half", frozenset({"unseen shape"})),
}
_ROWS = {"free": {}, "compact": {"compact_rows": True}, "gather": {"gather_rows": True}}


def _arm(decode: Arm, rows: str) -> Arm:
    scattered = {"scattered rows"} if "capture_decode" in decode.switches and rows == "free" else set()
    return Arm({**decode.switches, **_ROWS[rows]}, decode.warm, decode.eager | scattered)


# `capture_decode` needs the two switches before it, and rows cannot be moved and gathered at once: 7 x 3 are legal.
ARMS = {f"{name}-{rows}": _arm(decode, rows) for name, decode in _DECODE.items() for rows in _ROWS}
# The same decode paths over the CPU kernels, in float32 and blocks of 16; `half` rounds the weights, for both engines,
# and `half-kv` rounds what the pool stores as well.
_KERNELS = {"kernels": True}
_HALVES = _KERNELS | {"half_weights": True}
_HALF_KV = _HALVES | {"half_kv": True}
KERNEL_ARMS = {
    f"{kind}-{name}": Arm({**ARMS[name].switches, **on}, ARMS[name].warm, ARMS[name].eager)
    for kind, on in (("kernels", _KERNELS), ("half", _HALVES))
    for name in ("exact-free", "bucket+persist-free", "warm-compact", "warm-gather", "trimmed-compact")
}
KERNEL_ARMS |= {
    f"half-kv-{name}": Arm({**ARMS[name].switches, **_HALF_KV}, ARMS[name].warm, ARMS[name].eager)
    for name in ("exact-free", "warm-compact")
}
# And over the GPU's Triton kernels, interpreted where there is no card: slow, so for short traces.
_TRITON: dict[str, Any] = {"triton": True, "device": DEVICE}
GPU_ARMS = {
    f"{kind}-{name}": Arm({**ARMS[name].switches, **on}, ARMS[name].warm, ARMS[name].eager)
    for kind, on in (("triton", _TRITON), ("invariant", _TRITON | {"invariant": True}))
    for name in ("exact-free", "warm-compact", "warm-gather")
}
ALL_ON = "warm-compact"  # what the command line bundles by default


def arm_of(name: str) -> Arm:
    """An arm by its name, of torch's operators or of the CPU's or the GPU's kernels."""
    return (ARMS | KERNEL_ARMS | GPU_ARMS)[name]


# `Trace.aborts` may name a state instead of an id: whoever is in it first, right before that step or a later one.
WAITING, PREEMPTED, RUNNING = "@waiting", "@preempted", "@running"  # last in line, never ran; has run; the lowest row
ENDING, ENDED = "@ending", "@ended"  # its next token is its last one; the last step ended it
STATES = (WAITING, PREEMPTED, RUNNING, ENDING, ENDED)


IMPORTS = (
    "from reference.request import Request, SamplingParams",
    "from tests.harness import lockstep",
    "from tests.traces import Arrival, Trace",
)


@dataclass(frozen=True)
class Arrival:
    """A request that is submitted right before step `step` (0-based), as the `n` requests that it stands for."""

    step: int
    request: Request


@dataclass(frozen=True)
class Trace:
    """One run of the fast engine: its limits, who arrives and who is aborted right before which step.

    An id may arrive again: while it is open that has to be refused, later it is a request like any other.
    """

    arrivals: tuple[Arrival, ...] = ()
    aborts: tuple[tuple[int, str], ...] = ()  # (step, request id or one of STATES); after that step's arrivals
    arm: str = "exact-free"
    shape: str = "gqa"  # a key of harness.SHAPES, or the name of an installed model
    dtype: str = "float64"
    max_batch_size: int = 4
    block_size: int = 4
    num_blocks: int = 16
    max_model_len: int = 40
    width_multiple: int = 16
    chunk_tokens: int | None = None  # of one step; None: the engine's own default, which no tiny prompt fills
    prefix_cache: bool = False
    reserve_growth: bool = False
    mixed_steps: bool = False
    due_after: int = DUE_AFTER
    overlap: bool = False

    @property
    def last_step(self) -> int:
        """The last step before which something is told to the engine."""
        return max([arrival.step for arrival in self.arrivals] + [step for step, _ in self.aborts], default=0)

    def program(self) -> str:
        """Python that runs this trace again, from the repository's root."""
        lines = [*IMPORTS, "", "lockstep(Trace("]
        if self.arrivals:
            lines.append("    arrivals=(")
        for arrival in self.arrivals:
            request = arrival.request
            told = {"priority": 0, "cache_salt": "", "prefix_cache": True}
            more = [f", {name}={getattr(request, name)!r}" for name in told if getattr(request, name) != told[name]]
            made = f"Request({request.prompt_ids}, {_render(request.params)}, {request.id!r}{''.join(more)})"
            lines.append(f"        Arrival({arrival.step}, {made}),")
        if self.arrivals:
            lines.append("    ),")
        for column in fields(self):
            value = getattr(self, column.name)
            if column.name != "arrivals" and value != column.default:
                lines.append(f"    {column.name}={value!r},")
        return "\n".join([*lines, "))"]) + "\n"


class LockstepError(AssertionError):
    """The two engines disagree, or the fast one broke: `fact` says where and how, `program` shows it again."""

    def __init__(self, fact: str, trace: Trace) -> None:
        self.fact = fact
        self.program = trace.program()
        super().__init__(f"{fact}\n\nThis shows it again, from the repository's root:\n\n{self.program}")


def _render(params: SamplingParams) -> str:
    shown = []
    for column in fields(params):
        value: Any = getattr(params, column.name)
        value = dict(value) if column.name == "logit_bias" else value
        default = column.default if column.default_factory is MISSING else column.default_factory()
        if value != default:
            shown.append(f"{column.name}={value!r}")
    return f"SamplingParams({', '.join(shown)})"
