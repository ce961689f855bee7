"""Random requests and traces for Hypothesis: small limits, boundaries likely, shrinking to little.

Every choice lists its plainest value first, so that a failing trace shrinks to the fewest requests with the fewest
parameters, on the plainest arm that still shows the fault.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from reference.request import Request, SamplingParams
from tests.harness import SHAPES
from tests.traces import ARMS, STATES, Arrival, Trace

VOCABULARY = 61
ENDS = (2, 5)  # the EOS ids of the tiny shapes: 2 of all of them, 5 of one


def prompt_lengths(block_size: int, longest: int) -> st.SearchStrategy[int]:
    """Lengths of prompts, block boundaries and their neighbours as likely as all others together."""
    edges = [k * block_size + off for k in range(longest // block_size + 1) for off in (-1, 0, 1)]
    inside = sorted({edge for edge in edges if 1 <= edge <= longest})
    return st.sampled_from(inside) | st.integers(1, longest)


@st.composite
def sampling_params(draw: st.DrawFn, vocab_size: int = VOCABULARY) -> SamplingParams:
    """Seeded parameters, about half of them greedy; each of the rest is mostly off, so shrinking drops it."""

    def sometimes(neutral: Any, *others: Any) -> Any:
        return draw(st.sampled_from([neutral, neutral, *others]))

    max_tokens = draw(st.sampled_from([1, 2, 3, 5, 8, 12]) | st.none())
    tokens = st.integers(0, vocab_size - 1)
    biased = st.dictionaries(tokens | st.sampled_from(ENDS), st.sampled_from([-100.0, 2.5, 100.0]), max_size=3)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.sampled_from([0.0, 0.0, 0.7, 1.0, 1e-12, 5.0])),
        top_k=sometimes(0, 1, 4, vocab_size, vocab_size + 1),
        top_p=sometimes(1.0, 0.9, 0.3, 1e-4),
        min_p=sometimes(0.0, 0.05, 1.0),
        seed=draw(st.sampled_from([0, 1, -1, 42, 2**63 - 1, -(2**63)])),
        repetition_penalty=sometimes(1.0, 1.3, 0.7),
        presence_penalty=sometimes(0.0, 1.5, -1.0),
        frequency_penalty=sometimes(0.0, 0.8, -0.5),
        logit_bias=draw(st.just({}) | biased),
        stop_token_ids=tuple(draw(st.just([]) | st.lists(tokens, max_size=3))),
        min_tokens=min(sometimes(0, 1, 3), 3 if max_tokens is None else max_tokens),
        ignore_eos=draw(st.booleans()),
        logprobs=sometimes(None, 0, 3),
        prompt_logprobs=sometimes(None, 0, 2),
    )


@st.composite
def plain_params(draw: st.DrawFn) -> SamplingParams:
    """Greedy parameters that leave the raw logits alone, so that the gap between the top two is what decides."""
    logprobs = draw(st.sampled_from([None, 0, 3]))
    scored = draw(st.sampled_from([None, None, 0, 2]))
    max_tokens = draw(st.sampled_from([1, 2, 5, 12, 0]))
    how = {"temperature": 0.0, "ignore_eos": draw(st.booleans()), "logprobs": logprobs, "prompt_logprobs": scored}
    return SamplingParams(max_tokens=max_tokens, **how)


@st.composite
def requests(
    draw: st.DrawFn, name: str, limits: Trace, params: st.SearchStrategy[SamplingParams] | None = None
) -> Request:
    """One request for an engine of these limits; one in ten cannot run, and one in five is several or has no seed."""
    room = min(limits.max_model_len, limits.num_blocks * limits.block_size)
    length = draw(prompt_lengths(limits.block_size, max(1, min(room - 1, 30))))
    prompt = draw(st.lists(st.integers(0, VOCABULARY - 1), min_size=length, max_size=length))
    common = draw(st.integers(0, length))
    prompt[:common] = [3 + 5 * i % 50 for i in range(common)]  # so that many begin alike
    chosen = draw(sampling_params() if params is None else params)
    left = max(1, room - length)
    if chosen.max_tokens is not None and chosen.max_tokens > left:
        chosen = replace(chosen, max_tokens=left, min_tokens=min(chosen.min_tokens, left))
    kind = draw(st.integers(0, 19))
    if kind == 19:
        return draw(st.sampled_from(spoiled(Request(tuple(prompt), chosen, name), room)))
    if kind >= 16:
        chosen = replace(chosen, **draw(st.sampled_from([{"seed": None}, {"n": 2}, {"n": 3}])))
    return Request(tuple(prompt), chosen, name, priority=draw(st.sampled_from([0, 0, 1, -7])))


def spoiled(request: Request, room: int) -> list[Request]:
    """Versions of a request that every engine of `room` tokens and this vocabulary has to refuse."""
    params = request.params
    beyond = room - len(request.prompt_ids) + 1
    return [
        replace(request, prompt_ids=tuple([7] * (room + (params.max_tokens == 0)))),
        replace(request, params=replace(params, max_tokens=max(beyond, params.min_tokens, 1))),
        replace(request, prompt_ids=(*request.prompt_ids[1:], VOCABULARY)),
        replace(request, params=replace(params, logit_bias={VOCABULARY: 1.0})),
        replace(request, params=replace(params, stop_token_ids=(VOCABULARY,))),
        replace(request, params=replace(params, stop=("text",))),
    ]


@st.composite
def limits(draw: st.DrawFn, arms: Sequence[str] = tuple(ARMS), **fixed: Any) -> Trace:
    """A trace without requests: pools of a few blocks, row counts beside the buckets 1, 2, 4 and 8."""
    block_size = draw(st.sampled_from([4, 1, 3, 8]))
    num_blocks = draw(st.integers(2, 14) | st.integers(15, 30)) if block_size > 1 else draw(st.integers(6, 40))
    pool = num_blocks * block_size
    chosen = {
        "arm": draw(st.sampled_from(arms)),
        "shape": draw(st.sampled_from(sorted(SHAPES))),
        "max_batch_size": draw(st.sampled_from([1, 3, 5, 8, 9, 2, 4])),
        "block_size": block_size,
        "num_blocks": num_blocks,
        "max_model_len": max(2, min(draw(st.sampled_from([40, 24, pool - 1, pool])), 60)),
        "width_multiple": draw(st.sampled_from([16, 8, 5, 128])),
        "prefix_cache": draw(st.booleans()),
        "reserve_growth": draw(st.booleans()),
        "mixed_steps": draw(st.booleans()),
        "due_after": draw(st.sampled_from([256, 1, 3])),
        "overlap": draw(st.booleans()),
    }
    budget = draw(st.none() | st.integers(0, 9))
    chosen["chunk_tokens"] = None if budget is None else chosen["max_batch_size"] + budget
    return Trace(**(chosen | fixed))


@st.composite
def traces(draw: st.DrawFn, *, params: st.SearchStrategy[SamplingParams] | None = None, **within: Any) -> Trace:
    """Traces of up to ten requests, some of an id seen before, and up to four aborts; `within` is `limits`'."""
    chosen = draw(limits(**within))
    ids: list[str] = []
    arrivals = []
    for index in range(draw(st.integers(1, 5) | st.integers(5, 10))):
        again = ids and draw(st.integers(0, 7)) == 7
        ids.append(draw(st.sampled_from(ids)) if again else f"r{index}")
        arrivals.append(Arrival(draw(st.integers(0, 8)), draw(requests(ids[-1], chosen, params))))
    whom = st.sampled_from([*sorted(set(ids)), *STATES])
    aborts = draw(st.lists(st.tuples(st.integers(0, 15), whom), max_size=4))
    order = sorted(range(len(arrivals)), key=lambda i: arrivals[i].step)
    return replace(chosen, arrivals=tuple(arrivals[i] for i in order), aborts=tuple(sorted(aborts, key=lambda a: a[0])))
