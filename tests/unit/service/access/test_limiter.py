"""The rate limit against a plain count."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.access.limiter import RateLimiter


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def allowed(limiter: RateLimiter, times: int, caller: str = "a") -> int:
    return sum(limiter.hit(caller).allowed for _ in range(times))


def test_two_seconds_worth_at_once_then_the_steady_rate() -> None:
    clock = Clock()
    limiter = RateLimiter(5, clock)
    assert (limiter.burst, limiter.window_s) == (10, 2)
    assert allowed(limiter, 100) == 10
    clock.now += 0.19
    assert allowed(limiter, 100) == 0
    clock.now += 0.02
    assert allowed(limiter, 100) == 1
    clock.now += 1
    assert allowed(limiter, 100) == 5
    clock.now += 60
    assert allowed(limiter, 100) == 10


def test_callers_do_not_share() -> None:
    limiter = RateLimiter(1, Clock())
    assert allowed(limiter, 9) == 2
    assert allowed(limiter, 9, "b") == 2


def test_below_one_a_second() -> None:
    clock = Clock()
    limiter = RateLimiter(0.1, clock)
    assert (limiter.burst, limiter.window_s) == (1, 10)
    assert allowed(limiter, 5) == 1
    clock.now += 9.8
    refused = limiter.hit("a")
    assert (refused.allowed, refused.retry_after_s) == (False, pytest.approx(0.2))
    clock.now += 0.21
    assert allowed(limiter, 5) == 1


def test_what_it_says_of_the_rest() -> None:
    clock = Clock()
    limiter = RateLimiter(2, clock)
    said = [limiter.hit("a") for _ in range(5)]
    assert [allowance.allowed for allowance in said] == [True] * 4 + [False]
    assert [allowance.remaining for allowance in said] == [3, 2, 1, 0, 0]
    assert [allowance.retry_after_s for allowance in said] == pytest.approx([0, 0, 0, 0.5, 0.5])
    assert [allowance.full_after_s for allowance in said] == pytest.approx([0.5, 1, 1.5, 2, 2])


@given(
    st.floats(0.05, 2000, allow_nan=False),
    st.lists(st.floats(0, 3, allow_nan=False), max_size=200),
)
def test_never_more_than_rate_and_burst(rate: float, waits: list[float]) -> None:
    clock = Clock()
    limiter = RateLimiter(rate, clock)
    passed = []
    for wait_s in waits:
        clock.now += wait_s
        allowance = limiter.hit("a")
        if allowance.allowed:
            passed.append(clock.now)
        else:
            # Who waits as long as told may go on.
            clock.now += allowance.retry_after_s
            assert limiter.hit("a").allowed
            passed.append(clock.now)
    for first in range(len(passed)):
        count = len(passed) - first
        span_s = passed[-1] - passed[first]
        assert count <= limiter.burst + span_s * rate + 1.01


def test_the_memory_of_quiet_callers_is_freed() -> None:
    clock = Clock()
    limiter = RateLimiter(1, clock)
    for number in range(20_000):
        clock.now += 0.01
        limiter.hit(str(number))
    assert len(limiter._due) <= 1025
