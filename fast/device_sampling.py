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


def sample_on_device(
    logits: Tensor,  # [N, V]
    rows: Rows,
    *,
    index: Sequence[int],  # N: the row of the batch that each row of logits belongs to
    positions: Sequence[int],  # N: the place, in its sequence, of the token chosen here
    fail_alone: bool = False,
) -> Sampled:
    """As `fast.sampling.sample_rows`, with one transfer for all rows, and one more for those it has to do itself."""
    at, places = np.asarray(index, np.int64), np.asarray(positions, np.int64)
    check_draw_position(positions=positions, known_tokens=[len(rows.sequence[row].tokens) for row in index])
    hard = np.array([_is_hard(rows, row) for row in index], np.bool_)
    easy, rest = np.flatnonzero(~hard), np.flatnonzero(hard)
    sampled = Sampled([NO_TOKEN] * len(at), [None] * len(at), [None] * len(at))

    def judge(some: Sequence[int]) -> None:
        token_ids = [sampled.token_ids[n] for n in some]
        check_token_allowed(token_ids=token_ids, vocab_size=logits.shape[1], forbidden_ids=[()] * len(some))

    if easy.size:
        _easy(logits, rows, at, places, easy, sampled)
        for place, fault in faults(judge, [int(n) for n in easy if sampled.errors[n] is None], fail_alone).items():
            sampled.token_ids[place], sampled.errors[place] = NO_TOKEN, fault
    if rest.size:
        own = logits[_on(rest, logits.device)]
        where = {"index": at[rest].tolist(), "positions": places[rest].tolist()}
        done = sample_rows(own, rows, **where, fail_alone=fail_alone)
        for n, token, logprob, error in zip(rest, done.token_ids, done.logprobs, done.errors, strict=True):
            sampled.token_ids[n], sampled.logprobs[n], sampled.errors[n] = token, logprob, error
    return sampled


def _easy(logits: Tensor, rows: Rows, at: Ints, places: Ints, easy: Ints, sampled: Sampled) -> None:
    """Fill in the rows `easy` of the outcome."""
    drawn = easy[rows.temperature[at[easy]] > 0.0]
    tokens = logits.argmax(dim=1)  # the lowest id among ties
    peaks = logits.gather(1, tokens[:, None])[:, 0].double()  # hands a NaN on
    for part in np.split(drawn, range(DRAWN_ROWS, drawn.size, DRAWN_ROWS)) if drawn.size else ():
        picked = _on(part, logits.device)
        tokens = tokens.index_copy(0, picked, _drawn(logits[picked], rows, at[part], places[part]))
    told = torch.stack([tokens.double(), peaks]).cpu().numpy()  # ids are whole in a double
    for n in easy:
        token, peak = int(told[0, n]), told[1, n]
        sampled.errors[n] = error_of(bool(peak < np.inf), bool(peak == -np.inf), None)
        sampled.token_ids[n] = NO_TOKEN if sampled.errors[n] is not None else token


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


def _is_hard(rows: Rows, row: int) -> bool:
    """True for a row that asks for more than a temperature and a cut."""
    unready = rows.sequence[row].num_generated < rows.min_tokens[row] and bool(rows.forbidden[row])
    return unready or any(
        (rows.counts[row] is not None, rows.bias[row] is not None, rows.guide[row] is not None, rows.logprobs[row] >= 0)
    )


def _on(values: np.ndarray, device: torch.device) -> Tensor:
    """Host numbers on the device, of their own dtype; through pinned memory, without waiting, on CUDA."""
    host = torch.from_numpy(np.ascontiguousarray(values))
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host.to(device)
