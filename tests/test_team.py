"""The team: each task runs once, what a phase wrote is seen in the next, and nobody waits for an idle member."""

from __future__ import annotations

import gc
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numba import njit

from fast.kernels.team import WORD, Team, claim, close


@njit(nogil=True)
def count_tasks(words, phase, sizes, counts):
    """One phase for each size: counts[phase, task] += 1."""
    for at in range(sizes.size):
        mine = 0
        task = claim(words, phase, sizes[at])
        while task >= 0:
            counts[at, task] += 1
            mine += 1
            task = claim(words, phase, sizes[at])
        phase = close(words, phase, sizes[at], mine)


@njit(nogil=True)
def prefix_sums(words, phase, values):
    """values[r] = values[r - 1] shifted by one and summed: every task of a row reads two of the row before."""
    for row in range(1, values.shape[0]):
        mine = 0
        task = claim(words, phase, values.shape[1])
        while task >= 0:
            values[row, task] = values[row - 1, task] + values[row - 1, task - 1]
            mine += 1
            task = claim(words, phase, values.shape[1])
        phase = close(words, phase, values.shape[1], mine)


@njit(nogil=True)
def fail_at(words, phase, sizes, counts, phase_index, failing_task):
    """`count_tasks`, but one task of one phase is claimed and then lost to an error."""
    for at in range(sizes.size):
        mine = 0
        task = claim(words, phase, sizes[at])
        while task >= 0:
            if at == phase_index and task == failing_task:
                raise MemoryError("no room")
            counts[at, task] += 1
            mine += 1
            task = claim(words, phase, sizes[at])
        phase = close(words, phase, sizes[at], mine)


def counted(team: Team) -> list[int]:
    counts = np.zeros((3, 9), np.int64)
    team.run(count_tasks, np.array([9, 1, 4]), counts)
    return list(counts.sum(axis=1).tolist())


# ---- holds ----


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_what_a_phase_wrote_is_seen_in_the_next(threads: int) -> None:
    team = Team(threads)
    first = np.random.default_rng(0).integers(0, 2**60, 7)
    wanted = [first]
    for _ in range(400):
        wanted.append(wanted[-1] + np.roll(wanted[-1], 1))
    values = np.zeros((401, 7), np.int64)
    values[0] = first
    team.run(prefix_sums, values)
    assert np.array_equal(values, np.stack(wanted))


def test_a_member_that_never_runs_delays_nobody() -> None:
    team = Team(2)
    team._jobs[0].put(None)  # its helper leaves, as if the machine never gave it a turn
    counts = np.zeros((3, 9), np.int64)
    team.run(count_tasks, np.array([9, 1, 4]), counts)
    assert counts.sum(axis=1).tolist() == [9, 1, 4]


def test_a_member_that_comes_late_finds_nothing_to_do() -> None:
    team = Team(1)
    counts = np.zeros((2, 5), np.int64)
    late = (int(team._words[WORD]) >> 24, np.array([5, 5]), counts)
    team.run(count_tasks, np.array([5, 5]), counts)
    count_tasks(team._words, *late)
    assert (counts == 1).all()
    team.run(count_tasks, np.array([5, 5]), counts)
    assert (counts == 2).all()


def test_after_a_fork_a_team_has_helpers_of_its_own() -> None:
    team = Team(2)
    others = team._jobs
    team._process -= 1  # what a child sees: a team that another process made, whose helper is not here
    others[0].put(None)
    assert counted(team) == [9, 1, 4]
    assert team._jobs is not others
    assert all(helper.is_alive() for helper in team._helpers)


def test_helpers_end_with_their_team() -> None:
    before = set(threading.enumerate())
    team = Team(3)
    helpers = set(threading.enumerate()) - before
    assert len(helpers) == 2
    del team
    gc.collect()
    for helper in helpers:
        helper.join(timeout=60)
        assert not helper.is_alive()


# ---- rejects ----


@pytest.mark.parametrize("threads", [0, 257])
def test_a_team_of_nobody_or_of_too_many_is_refused(threads: int) -> None:
    with pytest.raises(ValueError, match=f"threads: {threads} is not in 1..256"):
        Team(threads)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_member_that_fails_ends_the_call_and_no_other(threads: int) -> None:
    team = Team(threads)
    for task in range(5):
        with pytest.raises(MemoryError, match="no room"):
            team.run(fail_at, np.array([9, 5, 4]), np.zeros((3, 9), np.int64), 1, task)
        assert counted(team) == [9, 1, 4]


def test_a_helper_that_fails_ends_the_call_that_waits_for_it() -> None:
    team, caller, claimed = Team(2), threading.get_ident(), threading.Event()

    def kernel(words, phase, sizes, counts):
        if threading.get_ident() == caller:
            assert claimed.wait(timeout=60)
            count_tasks(words, phase, sizes, counts)
        else:
            claim(words, phase, sizes[0])
            claimed.set()
            raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        team.run(kernel, np.array([9, 5, 4]), np.zeros((3, 9), np.int64))
    assert counted(team) == [9, 1, 4]


def test_a_call_that_is_interrupted_leaves_nobody_inside_the_next() -> None:
    team, sizes = Team(2), np.full(3000, 40)

    def kernel(words, phase, *args):
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        count_tasks(words, phase, *args)

    for _ in range(40):
        with pytest.raises(KeyboardInterrupt):
            team.run(kernel, sizes, np.zeros((3000, 40), np.int64))
        assert counted(team) == [9, 1, 4]


# ---- any order ----


@given(
    calls=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=6), min_size=1, max_size=5),
    threads=st.sampled_from([1, 2, 4]),
)
def test_every_task_of_every_phase_runs_once(calls: list[list[int]], threads: int) -> None:
    team = Team(threads)
    for sizes in calls:
        counts = np.zeros((len(sizes), 40), np.int64)
        team.run(count_tasks, np.array(sizes), counts)
        assert np.array_equal(counts, (np.arange(40) < np.array(sizes)[:, None]).astype(np.int64))
