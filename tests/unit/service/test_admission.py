"""Admission: what is let in, what is refused, and when the refused should come back."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.admission import MOST_RETRY_AFTER_S, Admission, OverloadError


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def measured(rows_per_s: float, *, always_rows: int = 0) -> tuple[Admission, Clock]:
    """An admission of 100 rows whose engine did so many rows a second for a while."""
    clock = Clock()
    admission = Admission(100, 1000, always_rows, clock=clock)
    for _ in range(10):
        with admission.enter(10, 5):
            clock.now += 10 / rows_per_s
    return admission, clock


def test_beams_count_and_come_back() -> None:
    admission = Admission(100, 1000)
    with ExitStack() as stack:
        stack.enter_context(admission.enter(60, 10))
        stack.enter_context(admission.enter(40, 10))
        assert (admission.requests, admission.beam_rows, admission.prompt_tokens) == (2, 100, 20)
        with pytest.raises(OverloadError, match="100 beams are under way"), admission.enter(1, 10):
            pass
        assert (admission.requests, admission.beam_rows) == (2, 100)
    assert (admission.requests, admission.beam_rows, admission.prompt_tokens) == (0, 0, 0)


def test_prompt_tokens_count() -> None:
    admission = Admission(100, 1000)
    with (
        admission.enter(1, 990),
        pytest.raises(OverloadError, match="prompts of 990 tokens"),
        admission.enter(1, 11),
    ):
        pass


def test_one_alone_is_always_let_in() -> None:
    admission, clock = measured(1)
    with admission.enter(500, 5000, clock.now - 1):
        assert admission.beam_rows == 500


def test_a_failure_gives_its_room_back() -> None:
    admission = Admission(100, 1000)
    with pytest.raises(ZeroDivisionError), admission.enter(100, 10):
        raise ZeroDivisionError
    assert admission.beam_rows == 0


def test_the_speed_is_that_of_busy_seconds() -> None:
    admission, clock = measured(50)
    clock.now += 1000  # idle
    with admission.enter(10, 5):
        clock.now += 0.2
    assert admission.rows_per_s == pytest.approx(50)


def test_what_the_queue_makes_late_is_refused_and_told_when_to_come() -> None:
    admission, clock = measured(10)
    with (
        admission.enter(50, 5),
        pytest.raises(OverloadError, match=r"4\.0 s longer") as caught,
        admission.enter(20, 5, clock.now + 3),
    ):
        pass
    assert caught.value.retry_after_s == 4
    with admission.enter(50, 5), admission.enter(20, 5, clock.now + 7.1):
        assert admission.beam_rows == 70


def test_the_queue_is_bounded_in_time_whatever_the_deadline() -> None:
    clock = Clock()
    admission = Admission(1000, 10_000, 20, 2.0, clock)
    for _ in range(10):
        with admission.enter(10, 5):
            clock.now += 0.1  # a hundred rows a second
    assert admission.full_for(500) is None  # alone
    with admission.enter(150, 5):
        assert admission.full_for(50) is None
        assert admission.full_for(51) == 1
        assert admission.full_for(450) == 4
        with pytest.raises(OverloadError), admission.enter(60, 5, clock.now + 100):
            pass
    assert admission.full_for(1000) is None


def test_given_up_work_does_not_shut_the_door() -> None:
    """Clients that leave make the engine look slow; a few requests at a time still come in."""
    admission, clock = measured(50, always_rows=40)
    for _ in range(100):
        with suppress(TimeoutError), admission.enter(20, 5):
            clock.now += 5
            raise TimeoutError
    assert admission.rows_per_s is None or admission.rows_per_s < 1
    for _ in range(30):
        with admission.enter(20, 5), admission.enter(20, 5, clock.now + 1):
            clock.now += 0.8
    assert admission.rows_per_s == pytest.approx(50, rel=0.3)


@given(
    st.lists(st.tuples(st.integers(1, 120), st.integers(1, 900), st.booleans()), max_size=60),
    st.randoms(use_true_random=False),
)
def test_counts_are_those_of_what_is_inside(steps, rng):
    admission = Admission(200, 2000, clock=Clock())
    inside: list[tuple[int, int, ExitStack]] = []
    for rows, tokens, leaves in steps:
        if leaves and inside:
            inside.pop(rng.randrange(len(inside)))[2].close()
        else:
            stack = ExitStack()
            fits = (
                sum(r for r, _, _ in inside) + rows <= 200
                and sum(t for _, t, _ in inside) + tokens <= 2000
            )
            if fits or not inside:
                stack.enter_context(admission.enter(rows, tokens))
                inside.append((rows, tokens, stack))
            else:
                with pytest.raises(OverloadError) as caught:
                    stack.enter_context(admission.enter(rows, tokens))
                assert 1 <= caught.value.retry_after_s <= MOST_RETRY_AFTER_S
        assert admission.requests == len(inside)
        assert admission.beam_rows == sum(r for r, _, _ in inside)
        assert admission.prompt_tokens == sum(t for _, t, _ in inside)
