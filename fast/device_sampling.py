"""Every row's next token, chosen where the logits are, so that a step brings back two numbers a row and not V.

Rows that take the highest logit, and rows that draw with temperature, `min_p`, `top_k` and `top_p`, are done on the
device, in float64 and by the order of work that `SamplingParams` states. Rows with a penalty, a bias, a mask, a guide
or log probabilities go to `fast.sampling`, and only their logits travel. A draw is the same function of (seed,
position) on either side; sums over a vocabulary may differ in the last of 53 bits, which moves a token with a chance
of about 1e-11.

Gates: gates.sampling. Proof: tests/test_device_sampling.py. Story: sampling.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fast.rows import Rows
from fast.sampling import NO_TOKEN, Ints, Sampled, sample_rows, uniform
from fast.sampling import _error as error_of
from fast.sampling import _faults as faults
from gates.sampling import check_draw_position, check_token_allowed

DRAWN_ROWS = 32  # rows that are drawn at once: float64 over a vocabulary, several times over, is what they take
DRAWN_BYTES = 128  # of a row, for each id of the vocabulary


class DeviceChoice:
    """N rows' tokens: queued behind the logits when this is made, waited for in `read`.

    `tokens` [N] int64 are on the device from the start; a line with a reason in `host_reasons` is chosen in `read`,
    and has any id there until then.
    """

    def __init__(
        self,
        logits: Tensor,  # [N, V]
        rows: Rows,
        *,
        index: Sequence[int],  # N: the row of the batch that each row of logits belongs to
        positions: Sequence[int],  # N: the place, in its sequence, of the token chosen here
    ) -> None:
        known = [rows.sequence[row].num_tokens for row in index]
        check_draw_position(positions=positions, known_tokens=known)
        self._logits, self._rows = logits, rows
        self._at, self._places = np.asarray(index, np.int64), np.asarray(positions, np.int64)
        reasons = [_why_host(rows, row, place) for row, place in zip(index, positions, strict=True)]
        self.host_reasons = set(reasons) - {""}
        hard = np.array([bool(reason) for reason in reasons], np.bool_)
        self._easy, self._hard = np.flatnonzero(~hard), np.flatnonzero(hard)
        self.tokens, peaks = _chosen(logits, rows, self._at, self._places, self._easy)
        self._told, self._arrived = _to_host(torch.stack([self.tokens.double(), peaks]))  # ids are whole in a double

    def read(self, *, fail_alone: bool = False) -> Sampled:
        """As `fast.sampling.sample_rows`, with one transfer for all rows, and one more for those it has to do itself.

        A row keeps its place in the batch from the choice to here.
        """
        if self._arrived is not None:
            self._arrived.synchronize()
        size, vocab_size = len(self._at), self._logits.shape[1]
        sampled = Sampled([NO_TOKEN] * size, [None] * size, [None] * size)
        told = self._told.numpy()
        for n in self._easy:
            peak = told[1, n]
            sampled.errors[n] = error_of(bool(peak < np.inf), bool(peak == -np.inf), None)
            sampled.token_ids[n] = NO_TOKEN if sampled.errors[n] is not None else int(told[0, n])

        def judge(some: Sequence[int]) -> None:
            token_ids = [sampled.token_ids[n] for n in some]
            check_token_allowed(token_ids=token_ids, vocab_size=vocab_size, forbidden_ids=[()] * len(some))

        good = [int(n) for n in self._easy if sampled.errors[n] is None]
        for place, fault in faults(judge, good, fail_alone).items():
            sampled.token_ids[place], sampled.errors[place] = NO_TOKEN, fault
        if self._hard.size:
            own = self._logits[_on(self._hard, self._logits.device)]
            where = {"index": self._at[self._hard].tolist(), "positions": self._places[self._hard].tolist()}
            done = sample_rows(own, self._rows, **where, fail_alone=fail_alone)
            for n, token, logprob, error in zip(self._hard, done.token_ids, done.logprobs, done.errors, strict=True):
                sampled.token_ids[n], sampled.logprobs[n], sampled.errors[n] = token, logprob, error
        return sampled


def sample_on_device(
    logits: Tensor,  # [N, V]
    rows: Rows,
    *,
    index: Sequence[int],  # N: the row of the batch that each row of logits belongs to
    positions: Sequence[int],  # N: the place, in its sequence, of the token chosen here
    fail_alone: bool = False,
) -> Sampled:
    """`DeviceChoice`, read at once."""
    return DeviceChoice(logits, rows, index=index, positions=positions).read(fail_alone=fail_alone)


def _chosen(
    logits: Tensor,  # [N, V]
    rows: Rows,
    at: Ints,  # [N]
    places: Ints,  # [N]
    easy: Ints,  # lines that are chosen here
) -> tuple[Tensor, Tensor]:  # [N], [N] float64
    """The token of each line, and its highest logit."""
    drawn = easy[rows.temperature[at[easy]] > 0.0]
    tokens = logits.argmax(dim=1)  # the lowest id among ties
    peaks = logits.gather(1, tokens[:, None])[:, 0].double()  # hands a NaN on
    for part in np.split(drawn, range(DRAWN_ROWS, drawn.size, DRAWN_ROWS)) if drawn.size else ():
        picked = _on(part, logits.device)
        tokens = tokens.index_copy(0, picked, _drawn(logits[picked], rows, at[part], places[part]))
    return tokens, peaks


def _drawn(logits: Tensor, rows: Rows, at: Ints, places: Ints) -> Tensor:  # [n, V] -> [n]
    columns = [rows.temperature[at], rows.min_p[at], rows.top_p[at], uniform(rows.seed[at], places)]
    temperature, min_p, top_p, u = (x[:, None] for x in _on(np.stack(columns), logits.device))
    scores = logits.double()
    weights = ((scores - scores.amax(1, keepdim=True)) / temperature).exp()
    mass = weights / weights.sum(1, keepdim=True)
    mass = mass.masked_fill(mass < min_p * mass.amax(1, keepdim=True), 0.0)
    if ((rows.top_k[at] > 0) | (rows.top_p[at] < 1.0)).any():
        limit = np.where(rows.top_k[at] > 0, rows.top_k[at], logits.shape[1])
        mass = _cut(mass, _on(limit, logits.device)[:, None], top_p)
    running = mass.cumsum(1)
    beyond = running > u * running[:, -1:]
    # u < 1, but u * mass may round up to the mass itself; then the last id with any mass is meant.
    beyond[:, -1] |= ~beyond.any(1)
    first = beyond.int().argmax(1)
    last = mass.shape[1] - 1 - (mass > 0.0).flip(1).int().argmax(1)
    return torch.minimum(first, last)


def _cut(mass: Tensor, limit: Tensor, top_p: Tensor) -> Tensor:  # [n, V], [n, 1], [n, 1] -> [n, V]
    """Keep `limit` ids in the order (mass descending, id ascending), then the shortest prefix that reaches `top_p`."""
    ordered, ids = mass.sort(dim=1, descending=True, stable=True)
    place = torch.arange(mass.shape[1], device=mass.device)[None, :]
    ordered = ordered.masked_fill(place >= limit, 0.0)
    reached = ordered.cumsum(1)
    before = torch.nn.functional.pad(reached[:, :-1], (1, 0))  # what the prefix holds without this id
    kept = ordered.masked_fill((before >= top_p * reached[:, -1:]) & (top_p < 1.0), 0.0)
    return torch.zeros_like(mass).scatter_(1, ids, kept)


def _why_host(rows: Rows, row: int, position: int) -> str:
    """What a row asks for beyond a temperature and a cut, which the host has to do; empty for nothing."""
    if rows.guide[row] is not None:
        return "guide"
    if rows.counts[row] is not None:
        return "penalty"
    if rows.bias[row] is not None:
        return "bias"
    if rows.logprobs[row] >= 0:
        return "logprobs"
    generated = position - len(rows.sequence[row].request.prompt_ids)
    return "min_tokens" if generated < rows.min_tokens[row] and rows.forbidden[row] else ""


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, there once the event has happened; nothing is waited for."""
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    arrived = torch.cuda.Event()
    arrived.record()
    return host, arrived


def _on(values: np.ndarray, device: torch.device) -> Tensor:
    """Host numbers on the device, of their own dtype; through pinned memory, without waiting, on CUDA."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
