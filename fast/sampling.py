"""Every row's next token at once, from the logits and the per-row state, each row as if it were alone.

Rows without work of their own (greedy, nothing added or masked) are one argmax over the raw logits. The rest are
lifted to float64 and changed in place; only rows that asked for a penalty, a bias or a cut pay for it. A draw is a
function of (seed, position), so it depends on no neighbour, row, bucket or preemption. A row without a usable number
fails alone. It knows no block and no queue.

Source of the draws: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

Gates: gates.sampling. Proof: tests/test_fast_sampling.py. Story: sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fast.rows import Rows
from gates import FULL, GateError, enabled
from gates.sampling import (
    check_draw_position,
    check_guides_told,
    check_kept_set,
    check_token_allowed,
    check_token_guided,
)
from reference.request import LOGPROB_FLOOR, Allowed, TokenLogprobs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
NO_TOKEN = -1


@dataclass(frozen=True, slots=True)
class Sampled:
    """N rows' outcome, in the order asked for. A row that failed has `NO_TOKEN` and its error."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs | None]
    errors: list[str | None]


@dataclass(frozen=True, slots=True, eq=False)
class Work:
    """What n rows of logits ask for beyond their highest: an entry a row, in plain arrays that a kernel can read."""

    picked: Ints  # [n] rows of the logits
    temperature: Floats  # [n]; 0 takes the highest score
    min_p: Floats  # [n]
    top_k: Ints  # [n]; 0 is off
    top_p: Floats  # [n]
    u: Floats  # [n] in [0, 1): the numbers that are drawn
    bounds: Ints  # [n + 1]: row r's changes are bounds[r]..bounds[r + 1] - 1
    ids: Ints  # [c] changed token ids
    scores: Floats  # [c] and the scores that they have instead of their logits
    mask_of: Ints  # [n] line of `masks`, or -1
    masks: NDArray[np.bool_]  # [m, V]; False may not be chosen

    @classmethod
    def none(cls, vocab_size: int) -> Work:
        """The work of no rows: what a kernel is compiled with."""
        ints, floats = np.zeros(0, np.int64), np.zeros(0, np.float64)
        masks = np.zeros((0, vocab_size), np.bool_)
        return cls(ints, floats, floats, ints, floats, floats, np.zeros(1, np.int64), ints, floats, ints, masks)


@dataclass(frozen=True, slots=True, eq=False)
class _Busy:
    """n rows with work of their own."""

    rows: Rows
    picked: Ints  # [n] their rows of the logits
    at: Ints  # [n] their rows of the batch
    positions: Ints  # [n]
    forbidden: list[tuple[int, ...]]  # n: ids that may not be chosen now
    allowed: list[Allowed | None]  # n: what their guides say


class Chooser(Protocol):
    """What does the work of rows on behalf of `sample_rows`, with the meaning of the numpy code below."""

    def draw(self, logits: Tensor, work: Work) -> tuple[Ints, Ints]:  # [N, V] -> [n], [n]
        """Each row's token, `NO_TOKEN` where every id is masked, and how many ids were left to draw from."""


def sample_rows(
    logits: Tensor,  # [N, V]
    rows: Rows,
    *,
    index: Sequence[int],  # N: the row of the batch that each row of logits belongs to
    positions: Sequence[int],  # N: the place, in its sequence, of the token chosen here
    chooser: Chooser | None = None,
    fail_alone: bool = False,
) -> Sampled:
    """Choose one token a row by the order of work that `SamplingParams` states, here or by a chooser.

    With `fail_alone` a row whose choice breaks a gate gets that as its error, and the others their tokens.
    """
    at = np.asarray(index, np.int64)
    known = [len(rows.sequence[row].tokens) for row in index]
    check_draw_position(positions=positions, known_tokens=known)
    raw = as_numpy(logits)
    # 1. Rows that take the highest raw logit.
    tokens = raw.argmax(axis=1)  # the lowest id among ties, and the first NaN where there is one
    peak = raw[np.arange(len(raw)), tokens]
    usable, masked = peak < np.inf, peak == -np.inf
    allowed = _allowed(rows, index)
    forbidden = [_forbidden(rows, row, guide) for row, guide in zip(index, allowed, strict=True)]
    # 2. Rows with work of their own.
    guided = np.array([guide is not None for guide in allowed], np.bool_)
    busy = np.flatnonzero(usable & (guided | _has_work(rows, at, forbidden)))
    if busy.size:
        places = np.asarray(positions, np.int64)[busy]
        own = _Busy(rows, busy, at[busy], places, [forbidden[n] for n in busy], [allowed[n] for n in busy])
        if chooser is None:
            tokens[busy], masked[busy] = _draw_here(raw, own)
        else:
            tokens[busy], kept = chooser.draw(logits, _work(raw, own))
            masked[busy] = tokens[busy] == NO_TOKEN
            if enabled(FULL):
                _check_kept(kept[~masked[busy]], rows.top_k[at[busy][~masked[busy]]])
    # 3. What each row gets: a token, or the reason why there is none.
    errors = [_error(bool(usable[n]), bool(masked[n]), allowed[n]) for n in range(len(index))]
    chosen = [int(token) if error is None else NO_TOKEN for token, error in zip(tokens, errors, strict=True)]
    good = [n for n, error in enumerate(errors) if error is None]

    def judge(some: Sequence[int]) -> None:
        token_ids = [chosen[n] for n in some]
        check_token_allowed(token_ids=token_ids, vocab_size=raw.shape[1], forbidden_ids=[forbidden[n] for n in some])
        if guided.any():
            own = [_own_guide_allows(rows, index[n], chosen[n]) for n in some]
            check_token_guided(token_ids=token_ids, allowed=own)

    for place, fault in _faults(judge, good, fail_alone).items():
        chosen[place], errors[place] = NO_TOKEN, fault
        good.remove(place)
    wanted = rows.logprobs[at]
    asked = {n: token_logprobs(raw[n], chosen[n], num_top=int(wanted[n])) for n in good if wanted[n] >= 0}
    return Sampled(chosen, [asked.get(n) for n in range(len(chosen))], errors)


def uniform(seeds: Ints, positions: Ints) -> Floats:  # [n], [n] -> [n]
    """A number in [0, 1) for each (seed, position): 53 bits of Philox4x32-10, the same in any order and company."""
    low32, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    key, count = seeds.astype(np.int64).view(np.uint64), positions.astype(np.int64).view(np.uint64)
    k0, k1 = key & low32, key >> shift
    x0, x1 = count & low32, count >> shift
    x2 = x3 = np.zeros_like(x0)
    for _ in range(10):
        a, b = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2  # 32 x 32 bits fit in 64
        x0, x1, x2, x3 = (b >> shift) ^ x1 ^ k0, b & low32, (a >> shift) ^ x3 ^ k1, a & low32
        k0, k1 = (k0 + np.uint64(0x9E3779B9)) & low32, (k1 + np.uint64(0xBB67AE85)) & low32
    bits = (x1 << shift | x0) >> np.uint64(11)
    return bits.astype(np.float64) * 2.0**-53


def _faults(judge: Callable[[Sequence[int]], None], rows: Sequence[int], fail_alone: bool) -> dict[int, str]:
    """The rows that `judge` rejects, each with its gate's words; without `fail_alone` the first one raises."""
    faults: dict[int, str] = {}
    try:
        judge(rows)
    except GateError:
        if not fail_alone:
            raise
        for n in rows:
            try:
                judge([n])
            except GateError as fault:
                faults[n] = str(fault)
    return faults


def as_numpy(logits: Tensor) -> NDArray[np.floating]:  # [N, V]
    """Logits on the host, as they are or widened to a type that numpy has."""
    narrow = logits.dtype not in (torch.float32, torch.float64)  # numpy has no bfloat16
    return (logits.float() if narrow else logits).cpu().numpy()


def _allowed(rows: Rows, index: Sequence[int]) -> list[Allowed | None]:
    """What each row's guide says, None for a row without one; the masks were worked out during the forward."""
    guides = [rows.guide[row] for row in index]
    if not any(guide is not None for guide in guides):
        return [None] * len(guides)
    held = [row for row, guide in zip(index, guides, strict=True) if guide is not None]
    check_guides_told(
        told=[rows.guide[row].num_accepted for row in held],
        generated=[rows.sequence[row].num_generated for row in held],
    )
    return [None if guide is None else guide.allowed() for guide in guides]


def _own_guide_allows(rows: Rows, row: int, token: int) -> bool:
    guide = rows.sequence[row].guide
    return guide is None or bool(guide.allowed().ids[token])


def _forbidden(rows: Rows, row: int, guide: Allowed | None) -> tuple[int, ...]:
    """The ids this row may not choose now: what would end an answer shorter than `min_tokens`, if it can go on."""
    if guide is not None and guide.only_end:
        return ()
    return rows.forbidden[row] if rows.sequence[row].num_generated < rows.min_tokens[row] else ()


def _has_work(rows: Rows, at: Ints, forbidden: list[tuple[int, ...]]) -> NDArray[np.bool_]:  # [N]
    own = [
        rows.counts[row] is not None or rows.bias[row] is not None or bool(ids)
        for row, ids in zip(at, forbidden, strict=True)
    ]
    return (rows.temperature[at] > 0.0) | np.array(own, np.bool_)


def _changed(
    raw: NDArray[np.floating],  # [V]
    rows: Rows,
    row: int,
    forbidden: tuple[int, ...],
) -> tuple[Ints, Floats]:  # [c], [c]
    """The ids that penalties, then bias, then the mask of a short answer name, ascending, and their scores."""
    seen, bias = rows.counts[row], rows.bias[row]
    if seen is None and bias is None and not forbidden:
        return np.zeros(0, np.int64), np.zeros(0, np.float64)
    named = [np.array(forbidden, np.int64)]
    named += [] if seen is None else [seen.ids]
    named += [] if bias is None else [bias[0]]
    ids = np.unique(np.concatenate(named))
    score = raw[ids].astype(np.float64)
    if seen is not None:
        places, times = np.searchsorted(ids, seen.ids), seen.counts
        before = score[places]
        # Division lowers a positive logit, multiplication a negative one.
        scaled = np.where(before > 0.0, before / rows.repetition[row], before * rows.repetition[row])
        score[places] = scaled - np.where(times > 0.0, rows.presence[row] + rows.frequency[row] * times, 0.0)
    if bias is not None:
        score[np.searchsorted(ids, bias[0])] += bias[1]
    score[np.searchsorted(ids, named[0])] = -np.inf
    return ids, score


def _change(
    score: Floats,  # [V], in place
    rows: Rows,
    row: int,
    forbidden: tuple[int, ...],
    guide: Allowed | None,
) -> None:
    """Penalties, then bias, then the masks; each touches the ids it names and no other."""
    ids, values = _changed(score, rows, row, forbidden)
    score[ids] = values
    if guide is not None:
        score[~guide.ids] = -np.inf


def _work(raw: NDArray[np.floating], busy: _Busy) -> Work:  # [N, V]
    """The work of busy rows for a chooser."""
    rows, at = busy.rows, busy.at
    each = zip(busy.picked, at, busy.forbidden, strict=True)
    changes = [_changed(raw[n], rows, int(row), ids) for n, row, ids in each]
    masks = [guide.ids for guide in busy.allowed if guide is not None]
    guided = np.array([guide is not None for guide in busy.allowed], np.bool_)
    return Work(
        picked=busy.picked,
        temperature=rows.temperature[at],
        min_p=rows.min_p[at],
        top_k=rows.top_k[at],
        top_p=rows.top_p[at],
        u=uniform(rows.seed[at], busy.positions),
        bounds=np.cumsum([0, *(ids.size for ids, _ in changes)], dtype=np.int64),
        ids=np.concatenate([ids for ids, _ in changes]),
        scores=np.concatenate([scores for _, scores in changes]),
        mask_of=np.where(guided, np.cumsum(guided) - 1, -1),
        masks=np.array(masks, np.bool_).reshape(len(masks), raw.shape[1]),
    )


def _draw_here(raw: NDArray[np.floating], busy: _Busy) -> tuple[Ints, NDArray[np.bool_]]:  # [N, V] -> [n], [n]
    """The tokens of busy rows, and which of them have every id masked."""
    scores = raw[busy.picked].astype(np.float64)
    for score, row, ids, guide in zip(scores, busy.at, busy.forbidden, busy.allowed, strict=True):
        _change(score, busy.rows, int(row), ids, guide)
    masked = scores.max(axis=1) == -np.inf
    scores[masked] = 0.0
    return _choose(scores, busy.rows, busy.at, busy.positions), masked


def _check_kept(kept: Ints, top_k: Ints) -> None:  # [n], [n]
    for count, most in zip(kept.tolist(), top_k.tolist(), strict=True):
        check_kept_set(num_kept=count, top_k=most)


def _choose(scores: Floats, rows: Rows, at: Ints, positions: Ints) -> Ints:  # [n, V], [n], [n] -> [n]
    tokens = scores.argmax(axis=1)
    drawn = np.flatnonzero(rows.temperature[at] > 0.0)
    if drawn.size:
        at = at[drawn]
        mass = _probabilities(scores[drawn], rows.temperature[at])
        for one, row in zip(mass, at, strict=True):
            _cut(one, min_p=rows.min_p[row], top_k=int(rows.top_k[row]), top_p=rows.top_p[row])
            if enabled(FULL):
                check_kept_set(num_kept=int(np.count_nonzero(one)), top_k=int(rows.top_k[row]))
        tokens[drawn] = _draw(mass, uniform(rows.seed[at], positions[drawn]))
    return tokens


def _probabilities(scores: Floats, temperature: Floats) -> Floats:  # [n, V], [n] -> [n, V]
    # The maximum goes first: 0 / temperature is 0 however small the temperature, and nothing overflows upwards.
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((scores - scores.max(axis=1, keepdims=True)) / temperature[:, None])
    return weights / weights.sum(axis=1, keepdims=True)


def _cut(mass: Floats, *, min_p: float, top_k: int, top_p: float) -> None:  # [V], in place
    """Zero what `min_p`, then `top_k`, then `top_p` reject."""
    if min_p > 0.0:
        mass[mass < min_p * mass.max()] = 0.0
    if 0 < top_k < mass.size:
        bound = np.partition(mass, mass.size - top_k)[mass.size - top_k]  # the k-th largest
        ties = np.flatnonzero(mass == bound)
        spare = top_k - int(np.count_nonzero(mass > bound))
        mass[mass < bound] = 0.0
        mass[ties[spare:]] = 0.0  # the lower ids of the tied stay
    if top_p < 1.0:
        _cut_nucleus(mass, top_p)


def _cut_nucleus(mass: Floats, top_p: float) -> None:  # [V], in place
    """Keep the smallest prefix of (mass descending, id ascending) that reaches `top_p` of the whole."""
    total = np.cumsum(mass)[-1]  # in id order, as the definition sums: numpy's own sum rounds another way at a tie
    # Ids below this floor add up to less than 1 - top_p together, so the prefix ends before it meets one: a sort of
    # a few hundred ids stands in for a sort of the vocabulary. Half of it leaves room for rounding.
    ids = np.flatnonzero(mass >= 0.5 * (1.0 - top_p) * total / mass.size)
    order = ids[np.argsort(-mass[ids], kind="stable")]
    reached = np.cumsum(mass[order])
    before = np.concatenate([[0.0], reached[:-1]])  # what the prefix holds without this id
    keep = order[before < top_p * total]
    kept = mass[keep]
    mass[:] = 0.0
    mass[keep] = kept


def _draw(mass: Floats, u: Floats) -> Ints:  # [n, V], [n] -> [n]
    """Inverse CDF in id order: the first id whose running mass exceeds `u` times the whole."""
    running = np.cumsum(mass, axis=1)
    beyond = running > (u * running[:, -1])[:, None]
    tokens = beyond.argmax(axis=1)
    # u < 1, but u * mass may round up to the mass itself; then the last id with any mass is meant.
    for n in np.flatnonzero(~beyond.any(axis=1)):
        tokens[n] = np.flatnonzero(mass[n])[-1]
    return tokens


def _error(usable: bool, masked: bool, guide: Allowed | None) -> str | None:
    if not usable:
        return "logits: NaN or +inf among them"
    if masked and guide is not None and guide.error is not None:
        return guide.error
    return "logits: every token id is masked, there is none to choose" if masked else None


def token_logprobs(raw: NDArray[np.floating], token: int, *, num_top: int) -> TokenLogprobs:  # raw [V]
    """Log probabilities of the model itself, before any change; ranks and the top break ties by lower id."""
    wide = raw.astype(np.float64)
    peak = wide.max()
    with np.errstate(under="ignore"):
        log_total = peak + np.log(np.exp(wide - peak).sum())
    rank = 1 + int(np.count_nonzero(wide > wide[token])) + int(np.count_nonzero(wide[:token] == wide[token]))
    top: list[int] = []
    if num_top > 0:
        bound = np.partition(wide, wide.size - min(num_top, wide.size))[wide.size - min(num_top, wide.size)]
        ids = np.flatnonzero(wide >= bound)
        top = [int(i) for i in ids[np.argsort(-wide[ids], kind="stable")][:num_top]]

    def logprob(i: int) -> float:
        return max(float(wide[i] - log_total), LOGPROB_FLOOR)

    return TokenLogprobs(logprob(token), rank, tuple((i, logprob(i)) for i in top))
