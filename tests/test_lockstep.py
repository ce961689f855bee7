"""The fast engine emits the reference's tokens, whatever else is in the batch, and says where when it does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fast.decode import DecodePath
from fast.engine import Engine
from fast.forwards import Forwards
from fast.rows import Rows
from gates.core import at_level
from reference.request import Event, Request, SamplingParams, TokenLogprobs
from tests.fast_run import FastRun
from tests.harness import SHAPES, compare, engine_of, lockstep, run_fast
from tests.traces import ALL_ON, KERNEL_ARMS, Arrival, LockstepError, Trace

pytestmark = pytest.mark.differential

# One arm a row policy; `tests/test_matrix.py` has them all.
EACH_ROW_POLICY = pytest.mark.parametrize("arm", ["exact-free", ALL_ON, "warm-gather"])


def _greedy(max_tokens: int | None, **changes) -> SamplingParams:
    return SamplingParams(**({"max_tokens": max_tokens, "temperature": 0.0, "ignore_eos": True} | changes))


def _at_once(*requests: Request) -> tuple[Arrival, ...]:
    return tuple(Arrival(0, request) for request in requests)


# ---- holds ------------------------------------------------------------------------------------------------------


@EACH_ROW_POLICY
@pytest.mark.parametrize("shape", SHAPES)
def test_every_shape_agrees_over_long_greedy_answers(shape: str, arm: str):
    requests = [Request(range(3, 3 + length), _greedy(40, ignore_eos=False), f"p{length}") for length in (1, 4, 9)]
    arrivals = tuple(Arrival(step, request) for step, request in enumerate(requests))
    lockstep(Trace(arrivals, arm=arm, shape=shape, num_blocks=40, max_model_len=60))


@EACH_ROW_POLICY
@pytest.mark.parametrize("length", [1, 3, 4, 5, 7, 8, 9, 15, 16, 17])
def test_prompts_around_block_boundaries_agree_in_a_tight_pool(length: int, arm: str):
    params = SamplingParams(max_tokens=20, temperature=0.8, seed=length, ignore_eos=True)
    arrivals = _at_once(*(Request(range(5, 5 + length), params, f"r{i}") for i in range(3)))
    run = lockstep(Trace(arrivals, arm=arm, num_blocks=10))
    answers = {tuple(completion.token_ids) for completion in run.completions.values()}
    assert len(answers) == 1, "the same request three times has one answer"


@EACH_ROW_POLICY
def test_a_whole_pool_of_one_token_blocks_agrees(arm: str):
    arrivals = _at_once(*(Request((9, i), _greedy(6), f"r{i}") for i in range(4)))
    run = lockstep(Trace(arrivals, arm=arm, block_size=1, num_blocks=8, max_model_len=8))
    assert run.engine.stats()["preemptions"] > 0


@pytest.mark.parametrize("arm", ["exact-compact", "bucket-compact", ALL_ON])
@pytest.mark.parametrize(("rows", "lengths"), [(4, (17, 17, 3)), (8, (3, 4, 5, 6, 6))])
def test_padded_rows_write_over_nobody_in_a_full_pool(rows: int, lengths: tuple[int, ...], arm: str):
    # Five blocks of 16, all owned, the last slot of the pool among them; three rows in a bucket of 4, five in one of 8.
    arrivals = _at_once(*(Request(range(3, 3 + n), _greedy(10), f"r{i}") for i, n in enumerate(lengths)))
    limits = Trace(arm=arm, max_batch_size=rows, block_size=16, num_blocks=5, max_model_len=64)
    run = FastRun(limits, engine_of(limits))
    for arrival in arrivals:
        run.submit(arrival.request)
    run.step()
    assert run.engine.stats()["free_blocks"] == 0
    run.drain()  # each step compares the K/V of every live token with a copy taken before it
    for answer in run.answers:
        compare(run, answer)
    assert run.engine.decode.buckets is None or run.engine.decode.buckets.padded_rows > 0


@EACH_ROW_POLICY
def test_a_resumed_sequence_loses_and_repeats_no_token(arm: str):
    arrivals = _at_once(*(Request(range(3 + i, 15 + i), _greedy(40), f"r{i}") for i in range(2)))
    run = lockstep(Trace(arrivals, arm=arm, block_size=16, num_blocks=5, max_model_len=80))
    assert run.engine.stats()["preemptions"] > 0
    assert [len(completion.token_ids) for completion in run.completions.values()] == [40, 40]


@EACH_ROW_POLICY
@pytest.mark.parametrize("limit", [64, 70])
def test_an_answer_ends_at_the_length_limit_on_or_off_a_block(limit: int, arm: str):
    lengths = (60, 60, limit - 1, limit, limit + 1)
    arrivals = _at_once(*(Request([7] * n, _greedy(None), f"r{i}") for i, n in enumerate(lengths)))
    run = lockstep(Trace(arrivals, arm=arm, block_size=16, num_blocks=20, max_model_len=limit))
    assert [answer.refusal is not None for answer in run.answers] == [False, False, False, True, True]
    for answer in run.answers[:3]:
        assert answer.completion.finish_reason == "length"
        assert len(answer.completion.token_ids) == limit - len(answer.request.prompt_ids)
    assert run.engine.decode.last_plan.width <= limit


@EACH_ROW_POLICY
def test_a_seeded_request_is_the_same_beside_anybody_anywhere(arm: str):
    ours = Request((11, 12, 13), SamplingParams(16, temperature=0.8, seed=42, ignore_eos=True), "ours")
    unseeded = replace(ours, id="other", params=replace(ours.params, seed=None))
    seeded = replace(ours, id="other", params=replace(ours.params, seed=7))
    answers = set()
    for others in ((), (unseeded,), (seeded,)):
        for requests in ((ours, *others), (*others, ours)):
            for num_blocks in (16, 6):
                run = lockstep(Trace(_at_once(*requests), arm=arm, num_blocks=num_blocks))
                answers.add(tuple(run.completions["ours"].token_ids))
    assert len(answers) == 1


@EACH_ROW_POLICY
@pytest.mark.parametrize("change", [{"temperature": t} for t in (1e-4, 1e-5, 1e-12)] + [{"top_p": 1e-4}], ids=str)
def test_a_tiny_temperature_or_nucleus_is_greedy_beside_a_normal_request(change: dict[str, float], arm: str):
    greedy = Request((5, 6), _greedy(100), "greedy")
    tiny = replace(greedy, id="tiny", params=replace(greedy.params, **({"temperature": 1.0, "seed": 3} | change)))
    normal = Request((5, 6, 7), SamplingParams(30, temperature=1.0, seed=1, ignore_eos=True), "normal")
    run = lockstep(Trace(_at_once(greedy, tiny, normal), arm=arm, num_blocks=80, max_model_len=120))
    assert run.completions["tiny"].token_ids == run.completions["greedy"].token_ids
    assert len(run.completions["tiny"].token_ids) == 100


@EACH_ROW_POLICY
@pytest.mark.parametrize(("stops", "biased"), [((), 5), ((9,), 9)])
def test_no_id_that_ends_an_answer_is_among_its_first_min_tokens(stops: tuple[int, ...], biased: int, arm: str):
    params = SamplingParams(16, temperature=0.0, min_tokens=4, logit_bias={biased: 100.0}, stop_token_ids=stops)
    run = lockstep(Trace(_at_once(Request((7, 8), params, "r")), arm=arm, shape="three_to_one"))
    answer = run.completions["r"]
    assert not {2, 5, *stops} & set(answer.token_ids[:4])
    assert (answer.token_ids[4:], answer.finish_reason) == ([biased], "stop")


@EACH_ROW_POLICY
def test_a_bias_outside_the_vocabulary_is_refused_and_disturbs_nobody(arm: str):
    arrivals = [Arrival(0, Request((7, 8, 9), _greedy(12), "normal"))]
    arrivals += [Arrival(3, Request((7,), _greedy(4, logit_bias={t: 5.0}), f"b{t}")) for t in (60, 61, 191222)]
    run = lockstep(Trace((*arrivals, Arrival(5, Request((9, 9), _greedy(5), "after"))), arm=arm))
    refused = {answer.request.id: answer.refusal for answer in run.answers if answer.refusal}
    assert set(refused) == {"b61", "b191222"}
    assert all("logit_bias" in message and "0..60" in message for message in refused.values())


@EACH_ROW_POLICY
def test_a_greedy_row_is_greedy_beside_a_random_one_whatever_its_cuts(arm: str):
    cuts = ({}, {"top_p": 0.9}, {"top_k": 1}, {"min_p": 1.0})
    requests = [Request((8, 9), _greedy(12, **cut), f"g{i}") for i, cut in enumerate(cuts)]
    requests.insert(2, Request((8, 9), SamplingParams(9, temperature=0.9, seed=3), "random"))
    run = lockstep(Trace(_at_once(*requests), arm=arm, max_batch_size=5, num_blocks=40))
    assert len({tuple(run.completions[f"g{i}"].token_ids) for i in range(len(cuts))}) == 1


@EACH_ROW_POLICY
def test_penalties_count_the_same_after_a_preemption(arm: str):
    penalties = ({"repetition_penalty": 2.0}, {"presence_penalty": 1.5}, {"frequency_penalty": 1.0})
    requests = [Request((7, 7, 9), _greedy(20, **changes), next(iter(changes))) for changes in penalties]
    run = lockstep(Trace(_at_once(*requests), arm=arm, num_blocks=9))
    assert run.engine.stats()["preemptions"] > 0
    plain = lockstep(Trace(_at_once(Request((7, 7, 9), _greedy(20), "plain")))).completions["plain"].token_ids
    assert all(completion.token_ids != plain for completion in run.completions.values())


# ---- rejects ----------------------------------------------------------------------------------------------------


def _one(params: SamplingParams) -> Trace:
    return Trace(_at_once(Request((7, 8, 9), params, "one")))


def test_a_changed_token_is_reported_with_its_place_its_gaps_and_a_program():
    run = run_fast(_one(_greedy(6)))
    (answer,) = run.answers
    true_token = answer.completion.token_ids[3]
    answer.completion.token_ids[3] = (true_token + 1) % 61
    with pytest.raises(LockstepError) as caught:
        compare(run, answer)
    assert f"step 3, position 6 (answer token 3): fast [{(true_token + 1) % 61}]" in caught.value.fact
    assert f"reference [{true_token}]; top two fast [{true_token}, " in caught.value.fact
    assert str(caught.value).endswith(_one(_greedy(6)).program())


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda a: a.completion.token_ids.pop(), r"\(answer token 5\): fast \[\], reference \[\d+\]"),
        (lambda a: a.completion.token_ids.append(3), r"step none, .*\(answer token 6\): fast \[3\], reference \[\]"),
        (
            lambda a: setattr(a.completion, "finish_reason", "stop"),
            "fast ends with 'stop', the reference with 'length'",
        ),
        (lambda a: a.completion.logprobs.pop(), "5 logprobs for 6 tokens"),
        (lambda a: setattr(a, "refusal", "no"), "fast says 'no', the reference Completion"),
        (lambda a: setattr(a, "id_was_open", True), "taken while a request of that id is open"),
    ],
)
def test_an_answer_that_differs_in_anything_is_refused(spoil, told: str):
    run = run_fast(_one(_greedy(6, logprobs=2)))
    spoil(run.answers[0])
    with pytest.raises(LockstepError, match=f"^one: .*{told}"):
        compare(run, run.answers[0])


@pytest.mark.parametrize(
    "change",
    [
        lambda held: replace(held, rank=held.rank + 1),
        lambda held: replace(held, logprob=held.logprob + 1e-8),
        lambda held: replace(held, top=held.top[::-1]),
        lambda held: replace(held, top=held.top[:1]),
    ],
)
def test_logprobs_that_differ_in_rank_id_or_value_are_refused(change):
    run = run_fast(_one(_greedy(6, logprobs=2)))
    held: list[TokenLogprobs] = run.answers[0].completion.logprobs
    held[4] = change(held[4])
    with pytest.raises(LockstepError, match="^one: step 4: logprobs of answer token 4: "):
        compare(run, run.answers[0])


def test_an_answer_cut_by_an_abort_must_begin_the_references():
    run = run_fast(replace(_one(_greedy(6)), aborts=((3, "one"),)))
    (answer,) = run.answers
    compare(run, answer)
    assert (len(answer.completion.token_ids), answer.completion.finish_reason) == (3, "abort")
    answer.completion.token_ids[0] = (answer.completion.token_ids[0] + 1) % 61
    with pytest.raises(LockstepError, match=r"^one: step 0, position 3 \(answer token 0\)"):
        compare(run, answer)


def test_an_engine_that_fails_in_a_step_is_reported_with_the_program(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Forwards, "chunks", lambda forwards, chunks: 1 / 0)
    with pytest.raises(LockstepError, match="^step 0: ZeroDivisionError: ") as caught:
        lockstep(_one(_greedy(6)))
    assert "Request((7, 8, 9), SamplingParams(max_tokens=6" in caught.value.program


def test_events_of_nobody_are_reported(monkeypatch: pytest.MonkeyPatch):
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda engine: [*step(engine), Event("ghost", 3)])
    with pytest.raises(LockstepError, match="^step 0: an event of 'ghost', which is not open"):
        lockstep(_one(_greedy(6)))


def test_live_kv_that_is_written_over_is_reported(monkeypatch: pytest.MonkeyPatch):
    decode = DecodePath.run

    def tramples(path: DecodePath, *step):
        path.cache.v[1][path.cache.tables[0].slot(0)] += 1.0
        return decode(path, *step)

    monkeypatch.setattr(DecodePath, "run", tramples)
    with pytest.raises(LockstepError, match="^step 1: the K/V of 'one' was written over"):
        lockstep(_one(_greedy(6)))


def test_an_idle_engine_that_holds_a_block_is_reported():
    run = run_fast(_one(_greedy(6)))
    run.engine.cache.allocator.allocate(1)
    with pytest.raises(LockstepError, match="^an idle engine holds something: "):
        run.finish()


def test_a_step_that_was_eager_on_a_warm_arm_is_reported():
    run = run_fast(replace(_one(_greedy(6)), arm=ALL_ON))
    run.engine.decode.captured.eager["unseen shape"] += 1
    run.engine.decode.captured.replays -= 1
    with pytest.raises(LockstepError, match="^arm warm-compact may run eagerly for set\\(\\)"):
        run.finish()


def test_the_printed_program_is_the_trace():
    params = SamplingParams(max_tokens=2, temperature=0.5, seed=-3, logit_bias={4: 2.0}, stop_token_ids=(9,), n=2)
    trace = replace(_one(params), aborts=((1, "one-0"),), arm=ALL_ON, shape="biases", num_blocks=9)
    seen: list[Trace] = []
    exec(trace.program().replace("lockstep(Trace(", "seen.append(Trace("), {"seen": seen})
    assert seen == [trace]
    assert run_fast(trace).trace == trace, "a run knows what it was told"


def test_a_move_that_forgets_a_column_is_caught(monkeypatch: pytest.MonkeyPatch):
    move = Rows.move

    def forgets_the_seed(rows: Rows, *, src: int, dst: int) -> None:
        seed = rows.seed[dst]
        move(rows, src=src, dst=dst)
        rows.seed[dst] = seed

    params = SamplingParams(temperature=5.0, seed=9, ignore_eos=True)
    sizes = (("short", 2), ("long", 12))
    trace = Trace(
        _at_once(*(Request((7, 8), replace(params, max_tokens=n), name) for name, n in sizes)), arm="exact-compact"
    )
    lockstep(trace)
    monkeypatch.setattr(Rows, "move", forgets_the_seed)
    with at_level("off"), pytest.raises(LockstepError, match="long: step"):
        lockstep(trace)  # no gate at all: the tokens alone give it away


# ---- the real model ---------------------------------------------------------------------------------------------

MODEL = "smollm2-135m-instruct"
PROMPTS = {
    "The capital of France is": {"temperature": 0.0},
    "def fibonacci(n):\n    ": {"temperature": 0.0, "repetition_penalty": 1.2, "logprobs": 2, "prompt_logprobs": 3},
    "Привет, как дела? 今日は": {"temperature": 0.8, "top_p": 0.95},
    "1": {"temperature": 1.0, "top_k": 20, "frequency_penalty": 0.5, "max_tokens": 24},
    "Once upon a time, in a": {"temperature": 1.2, "min_p": 0.05, "presence_penalty": 1.0},
    "Q: What is 2 + 2?\nA:": {"temperature": 0.0, "max_tokens": 1},
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n": {"temperature": 0.7, "n": 2, "ignore_eos": False},
    "\n": {"temperature": 0.0, "min_tokens": 4, "logit_bias": {28: 3.0}},
}


@pytest.mark.model
@pytest.mark.parametrize("arm", ["exact-free", ALL_ON, "half-warm-compact"])
def test_the_real_model_agrees_in_a_tight_pool(arm: str):
    from serve.models import load_model

    encode = load_model(MODEL).tokenizer.encode
    arrivals = []
    for index, (text, changes) in enumerate(PROMPTS.items()):
        params = SamplingParams(**({"max_tokens": 14, "seed": index, "ignore_eos": True} | changes))
        arrivals.append(Arrival(index // 3, Request(tuple(encode(text)), params, f"p{index}")))
    blocks = {"block_size": 16, "num_blocks": 6} if arm in KERNEL_ARMS else {"block_size": 4, "num_blocks": 22}
    limits = {"max_batch_size": 5, "max_model_len": 48, **blocks}
    trace = Trace(tuple(arrivals), arm=arm, shape=MODEL, dtype="float32", width_multiple=16, **limits)
    run = lockstep(trace)
    stats = run.engine.stats()
    assert stats["preemptions"] > 0
    assert stats["moves"] > 0 or arm == "exact-free"
    assert stats["replayed"] == stats["decode_steps"] or arm == "exact-free"
