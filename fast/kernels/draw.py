"""The next token of rows that do more than take their highest logit: changed, weighed, cut, and drawn, a task a row.

A row is its raw logits and a short list of ids whose score differs (penalties, biases, masked ids), and perhaps a
mask over all of them. What follows is the numpy version in `fast.sampling`, in the same order and in float64: weights
relative to the highest score, `min_p`, `top_k`, `top_p`, and the first id whose running mass passes the drawn number.
Only the exponential is another one, within two units in the last place. It knows no request.

Proof: tests/test_draw.py. Story: sampling.
"""

# numba compiles its functions by the arguments they are called with; their shapes are in the docstrings.
# mypy: disallow_untyped_defs=False, disallow_incomplete_defs=False

from __future__ import annotations

import math

import numpy as np
from numba import njit

from fast.kernels.team import claim, close
from fast.sampling import NO_TOKEN

PART = 512  # numbers that are weighed at once: they stay in a core's first cache
FEW = 256  # a top_k up to here is found by a short sorted list
_LOG2_E = 1.0 / math.log(2.0)
_LN2_HIGH, _LN2_LOW = 0.693147180369123816490, 1.90821492927058770002e-10
_ROUNDER = 6755399441055744.0  # adding 1.5 * 2**52 leaves a whole number in the low bits
_LOWEST = -708.0  # below it a weight is zero, not subnormal
_EXP = tuple(1.0 / math.factorial(n) for n in range(13, -1, -1))


@njit(nogil=True, cache=True)
def draw(
    words, phase, logits, stride, size, picked, temperature, min_p, top_k, top_p, u,
    bounds, ids, scores, mask_of, masks, tokens, kept,
):  # fmt: skip
    """tokens [n] and kept [n], the ids that were left to draw from, of n rows.

    Row r of them is logits.flat[picked[r] * stride :][:size], with `scores` instead at `ids`, both from bounds[r] to
    bounds[r + 1], and nothing where masks [m, size] has 0 in line mask_of[r] (-1: no mask). u [n] is in [0, 1); a
    temperature of 0 takes the highest score. A row with no id left gets `NO_TOKEN`. One phase; returns the next.
    """
    rows, mine = picked.size, 0
    row = claim(words, phase, rows)
    while row >= 0:
        mass = np.empty(size, np.float64)
        begin = picked[row] * stride
        for at in range(size):
            mass[at] = logits[begin + at]
        for change in range(bounds[row], bounds[row + 1]):
            mass[ids[change]] = scores[change]
        if mask_of[row] >= 0:
            for at in range(size):
                if not masks[mask_of[row], at]:
                    mass[at] = -np.inf
        tokens[row], kept[row] = _choose(mass, temperature[row], min_p[row], top_k[row], top_p[row], u[row])
        mine += 1
        row = claim(words, phase, rows)
    return close(words, phase, rows, mine)


@njit(nogil=True, cache=True, error_model="numpy")
def _choose(mass, temperature, min_p, top_k, top_p, u):
    """Token and number of ids kept, from the scores [V] of a row, which are overwritten."""
    best = _highest(mass)
    if mass[best] == -np.inf:
        return NO_TOKEN, 0
    if temperature == 0.0:
        return best, 1
    weigh(mass, mass[best], temperature)
    if not (min_p > 0.0 or 0 < top_k < mass.size or top_p < 1.0):
        return _first_beyond_of_all(mass, u)
    total = mass.sum()
    for at in range(mass.size):
        mass[at] /= total
    ids = _at_least(mass, min_p * mass[best]) if min_p > 0.0 else np.arange(mass.size)
    if 0 < top_k < ids.size:
        ids = _largest(mass, ids, top_k)
    if top_p < 1.0:
        ids = _nucleus(mass, ids, top_p)
    return _first_beyond(mass, ids, u)


@njit(nogil=True, cache=True)
def _highest(scores):
    """The lowest id of the highest score."""
    lanes = np.full(8, -np.inf)
    whole = scores.size // 8 * 8
    for at in range(0, whole, 8):
        for lane in range(8):
            lanes[lane] = max(lanes[lane], scores[at + lane])
    peak = lanes.max()
    for at in range(whole, scores.size):
        peak = max(peak, scores[at])
    for begin in range(0, scores.size, PART):
        end, found = min(scores.size, begin + PART), 0
        for at in range(begin, end):
            found += scores[at] == peak
        if found:
            for at in range(begin, end):
                if scores[at] == peak:
                    return at
    return 0


@njit(nogil=True, cache=True, error_model="numpy")
def weigh(scores, peak, temperature):
    """scores [V] = exp((scores - peak) / temperature), in place; exactly 1 at the peak and 0 below exp(-708)."""
    x, rounded = np.empty(PART, np.float64), np.empty(PART, np.float64)
    power = np.empty(PART, np.int64)
    whole, scale = rounded.view(np.int64), power.view(np.float64)
    for begin in range(0, scores.size, PART):
        count = min(PART, scores.size - begin)
        # A loop for each kind of operation: every one of them is a vector loop.
        for at in range(count):
            exponent = (scores[begin + at] - peak) / temperature
            x[at] = exponent if exponent > _LOWEST else _LOWEST
            rounded[at] = x[at] * _LOG2_E + _ROUNDER
        for at in range(count):
            power[at] = (whole[at] + 1023) << 52  # the float64 2**n, by its bits
        for at in range(count):
            n = rounded[at] - _ROUNDER
            part = (x[at] - n * _LN2_HIGH) - n * _LN2_LOW
            value = 0.0
            for coefficient in _EXP:
                value = value * part + coefficient
            scores[begin + at] = value * scale[at] if x[at] > _LOWEST else 0.0


@njit(nogil=True, cache=True)
def _at_least(mass, bound):
    """The ids whose mass reaches `bound`, ascending."""
    ids, count = np.empty(mass.size, np.int64), 0
    for at in range(mass.size):
        if mass[at] >= bound:
            ids[count] = at
            count += 1
    return ids[:count]


@njit(nogil=True, cache=True)
def _largest(mass, ids, count):
    """The `count` ids of the largest mass, ascending; the lower ids of those that tie for the last place stay."""
    bound = _rank(mass, ids, count) if count <= FEW else np.partition(mass[ids], ids.size - count)[ids.size - count]
    above = 0
    for at in ids:
        above += mass[at] > bound
    spare, kept, at_kept = count - above, np.empty(count, np.int64), 0
    for at in ids:
        tied = mass[at] == bound
        if mass[at] > bound or (tied and spare > 0):
            kept[at_kept] = at
            at_kept += 1
            spare -= tied
    return kept


@njit(nogil=True, cache=True)
def _rank(mass, ids, count):
    """The `count`-th largest mass: one look at each, and a short sorted list that few of them enter."""
    top = np.full(count, -1.0)  # ascending
    for at in ids:
        value = mass[at]
        if value > top[0]:
            place = 0
            while place + 1 < count and top[place + 1] < value:
                top[place] = top[place + 1]
                place += 1
            top[place] = value
    return top[0]


@njit(nogil=True, cache=True)
def _nucleus(mass, ids, top_p):
    """The smallest prefix of (mass descending, id ascending) that reaches `top_p` of the whole, as ascending ids."""
    total = 0.0
    for at in ids:
        total += mass[at]
    # Ids below this floor add up to less than 1 - top_p together, so the prefix ends before it meets one.
    floor = 0.5 * (1.0 - top_p) * total / mass.size
    heap = np.empty(ids.size, np.int64)
    size = 0
    for at in ids:
        if mass[at] >= floor:
            heap[size] = at
            size += 1
    for root in range(size // 2 - 1, -1, -1):
        _sift(mass, heap, root, size)
    before, last = 0.0, size  # what was taken lies behind the heap that is left
    while last > 0 and before < top_p * total:
        before += mass[heap[0]]
        last -= 1
        heap[0], heap[last] = heap[last], heap[0]
        _sift(mass, heap, 0, last)
    return np.sort(heap[last:size])


@njit(nogil=True, cache=True)
def _sift(mass, heap, root, size):
    """Let the id at `root` sink until no child goes before it: more mass first, then the lower id."""
    while True:
        child = 2 * root + 1
        if child >= size:
            return
        if child + 1 < size and _before(mass, heap[child + 1], heap[child]):
            child += 1
        if not _before(mass, heap[child], heap[root]):
            return
        heap[root], heap[child] = heap[child], heap[root]
        root = child


@njit(nogil=True, cache=True)
def _before(mass, one, other):
    return mass[one] > mass[other] or (mass[one] == mass[other] and one < other)


@njit(nogil=True, cache=True)
def _first_beyond(mass, ids, u):
    """The first of ascending ids whose running mass exceeds `u` times the whole, and how many have any."""
    total, kept = 0.0, 0
    for at in ids:
        total += mass[at]
        kept += mass[at] > 0.0
    running, last = 0.0, 0
    for at in ids:
        if mass[at] > 0.0:
            running += mass[at]
            last = at
            if running > u * total:
                return at, kept
    # u < 1, but u * mass may round up to the mass itself; then the last id with any mass is meant.
    return last, kept


@njit(nogil=True, cache=True)
def _first_beyond_of_all(mass, u):
    """`_first_beyond` over every id, part by part: each part's sum has eight lanes, and one part is looked into."""
    parts = -(-mass.size // PART)
    sums, kept = np.zeros(parts), 0
    for part in range(parts):
        lanes, end = np.zeros(8), min(mass.size, (part + 1) * PART)
        whole = part * PART + (end - part * PART) // 8 * 8
        for at in range(part * PART, whole, 8):
            for lane in range(8):
                lanes[lane] += mass[at + lane]
        for at in range(whole, end):
            lanes[0] += mass[at]
        sums[part] = lanes.sum()
        for at in range(part * PART, end):
            kept += mass[at] > 0.0
    wanted, running = u * sums.sum(), 0.0
    for part in range(parts):
        if running + sums[part] > wanted:
            for at in range(part * PART, min(mass.size, (part + 1) * PART)):
                running += mass[at]
                if mass[at] > 0.0 and running > wanted:
                    return at, kept
        else:
            running += sums[part]
    # Sums in two orders differ in their last bits: then the last id with any mass is meant.
    last = mass.size - 1
    while mass[last] == 0.0:
        last -= 1
    return last, kept
