"""From one row of logits to one token, written as the definition reads; and the random numbers it draws.

The order of work is that of `SamplingParams`, every step is a function of whole rows [V] in float64, and
nothing is kept between calls: a draw depends on (seed, position) and on this row alone. So a request's answer
cannot depend on its neighbours. It knows no cache, no batch and no text.

Source of the draws: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011).

Gates: gates.sampling. Proof: tests/test_sampling.py. Story: sampling.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from gates.sampling import check_draw_position, check_kept_set, check_token_allowed, check_token_guided
from reference.request import LOGPROB_FLOOR, Allowed, PromptLogprobs, SamplingParams, TokenLogprobs

MASKED = float("-inf")


class UnusableLogits(ArithmeticError):
    """A row from which no token can be chosen: NaN or +inf in it, or every id masked. It ends one request."""


def sample(
    logits: Tensor,  # [V], any float dtype, as the model gave them
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
    position: int,
    seed: int,
    eos_token_ids: Sequence[int],
    allowed: Allowed | None = None,
) -> tuple[int, TokenLogprobs | None]:
    """Choose the next token of one request, and its log probabilities when the request asks for them.

    `position` is the index in the sequence of the token chosen here: prompt tokens + answer tokens so far.
    `allowed` is what the request's guide says, if it has one.

    Raises:
        UnusableLogits: the row holds NaN or +inf, or masks left no id to choose.
    """
    check_draw_position(positions=[position], known_tokens=[len(prompt_ids) + len(output_ids)])
    raw = logits.to(torch.float64)
    if not bool((raw < float("inf")).all()):  # false for NaN as well
        raise UnusableLogits(f"logits: NaN or +inf at token id {int((~(raw < float('inf'))).nonzero()[0])}")

    # 1 and 2. Change the row by what was said so far and by what the request wants.
    scores = penalize(raw, params, prompt_ids=prompt_ids, output_ids=output_ids)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    forbidden = forbidden_ids(params, num_output_tokens=len(output_ids), eos_token_ids=eos_token_ids)
    if allowed is not None:
        scores[~torch.from_numpy(allowed.ids)] = MASKED
        if allowed.only_end:
            forbidden = []  # an answer that has nothing more to say ends, however short it is
    scores[forbidden] = MASKED
    if bool((scores == MASKED).all()):
        reason = None if allowed is None else allowed.error
        raise UnusableLogits(reason or "logits: every token id is masked, there is none to choose")

    # 3 to 5. Choose.
    if params.greedy:
        token = greedy_token(scores)
    else:
        token = draw_token(keep(probabilities(scores, params.temperature), params), uniform(seed, position))
    check_token_allowed(token_ids=[token], vocab_size=len(raw), forbidden_ids=[forbidden])
    check_token_guided(token_ids=[token], allowed=[allowed is None or bool(allowed.ids[token])])
    return token, None if params.logprobs is None else token_logprobs(raw, token, num_top=params.logprobs)


def penalize(
    logits: Tensor,  # [V] float64
    params: SamplingParams,
    *,
    prompt_ids: Sequence[int],
    output_ids: Sequence[int],
) -> Tensor:  # [V] float64, a copy
    """Penalties for repeating: over prompt and answer for `repetition_penalty`, over the answer for the other two.

    Sources: Keskar et al. 2019 (CTRL) for the first, the OpenAI API reference for the others.
    """
    scores = logits.clone()
    seen = sorted({*prompt_ids, *output_ids})
    before = scores[seen]
    # Division lowers a positive logit, multiplication a negative one.
    scores[seen] = torch.where(before > 0, before / params.repetition_penalty, before * params.repetition_penalty)
    for token, times in Counter(output_ids).items():
        scores[token] -= params.presence_penalty + params.frequency_penalty * times
    return scores


def forbidden_ids(params: SamplingParams, *, num_output_tokens: int, eos_token_ids: Sequence[int]) -> list[int]:
    """The ids that would end the answer too early: every EOS and every stop id, until `min_tokens` exist.

    EOS ids are among them even with `ignore_eos`: an answer that may run past its end still should not begin there.
    """
    return sorted({*eos_token_ids, *params.stop_token_ids}) if num_output_tokens < params.min_tokens else []


def greedy_token(scores: Tensor) -> int:  # [V]
    """The id of the highest score, the lowest id among ties. No temperature imitates this: it would draw a tie."""
    return int((scores == scores.max()).nonzero()[0])


def probabilities(scores: Tensor, temperature: float) -> Tensor:  # [V] float64 -> [V] float64
    """softmax(scores / temperature). The maximum goes first: 0 / temperature is 0 however small the temperature."""
    weights = torch.exp((scores - scores.max()) / temperature)
    return weights / weights.sum()


def keep(probs: Tensor, params: SamplingParams) -> Tensor:  # [V] float64 -> [V] float64
    """Zero what `min_p`, `top_k` and `top_p` reject, in that order; what is left is not scaled back to 1."""
    kept = torch.where(probs >= params.min_p * probs.max(), probs, 0.0)
    order = torch.sort(kept, descending=True, stable=True).indices  # stable: among equals the lower id is first
    if params.top_k > 0:
        kept[order[params.top_k :]] = 0.0
    if params.top_p < 1.0:
        total = kept.cumsum(0)[-1]  # summed in id order, so that a tie has one answer
        mass = kept[order].cumsum(0)
        before = torch.cat([mass.new_zeros(1), mass[:-1]])  # what the prefix holds without this token
        kept[order[before >= params.top_p * total]] = 0.0
    check_kept_set(num_kept=int((kept > 0).sum()), top_k=params.top_k)
    return kept


def draw_token(kept: Tensor, u: float) -> int:  # [V] float64 masses, some zero
    """Inverse CDF in id order: the first id whose running mass exceeds `u` times the whole.

    An id of mass 0 never exceeds what the id before it did, so it is never returned.
    """
    running = kept.cumsum(0)
    beyond = (running > u * running[-1]).nonzero()
    # u < 1, but u * mass may round up to the mass itself; then the last id that has any mass is meant.
    return int(beyond[0]) if len(beyond) else int((kept > 0).nonzero()[-1])


def token_logprobs(raw: Tensor, token: int, *, num_top: int) -> TokenLogprobs:  # raw [V] float64
    """Log probabilities under the model itself: no temperature, penalty or mask. The rank breaks ties by lower id."""
    logprobs = (raw - raw.logsumexp(0)).clamp(min=LOGPROB_FLOOR)
    order = torch.sort(raw, descending=True, stable=True).indices
    rank = int((order == token).nonzero()) + 1
    top = tuple((int(i), float(logprobs[i])) for i in order[:num_top])
    return TokenLogprobs(logprob=float(logprobs[token]), rank=rank, top=top)


def prompt_logprobs(
    logits: Tensor,  # [T, V], the model's, after each of the prompt's T tokens
    prompt_ids: Sequence[int],
    *,
    num_top: int,
) -> PromptLogprobs:
    """What the model made of each prompt token, given those before it; nothing comes before the first.

    Raises:
        UnusableLogits: a row that speaks of a prompt token holds NaN or +inf.
    """
    scored: list[TokenLogprobs | None] = [None]
    for position in range(1, len(prompt_ids)):
        raw = logits[position - 1].to(torch.float64)
        if not bool((raw < float("inf")).all()):
            raise UnusableLogits(f"logits: NaN or +inf where prompt token {position} is due")
        scored.append(token_logprobs(raw, prompt_ids[position], num_top=num_top))
    return tuple(scored)


def uniform(seed: int, position: int) -> float:
    """The random number in [0, 1) of (seed, position): 53 bits, the same on every machine and in any order."""
    key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
    counter = (position & 0xFFFFFFFF, position >> 32 & 0xFFFFFFFF, 0, 0)
    low, high, _, _ = philox4x32(counter, key)
    return (high << 32 | low) // 2**11 / 2**53


def philox4x32(
    counter: tuple[int, int, int, int],  # 32-bit words, low first
    key: tuple[int, int],
) -> tuple[int, int, int, int]:
    """Philox4x32-10: ten rounds that turn a counter into four random 32-bit words, with no state to carry."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * x0, 0xCD9E8D57 * x2
        high0, low0 = product0 >> 32, product0 & 0xFFFFFFFF
        high1, low1 = product1 >> 32, product1 & 0xFFFFFFFF
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return x0, x1, x2, x3
