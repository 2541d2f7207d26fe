"""Room for beams: never more than the bound, first come first served, nothing lost."""

from __future__ import annotations

import asyncio
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.beam_gate import BeamGate


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 12), st.lists(st.integers(1, 15), max_size=25), st.integers(0, 10_000))
def test_the_bound_holds_and_everyone_gets_in_whoever_is_cancelled(bound, widths, seed):
    rng = random.Random(seed)
    inside = 0
    entered: list[int] = []
    waited: list[int] = []

    async def request(gate: BeamGate, number: int, width: int) -> None:
        nonlocal inside
        others = gate.waiting
        ticks: list[None] = []
        asyncio.get_running_loop().call_soon(ticks.append, None)
        async with gate.enter(width):
            if ticks:
                waited.append(number)
            else:  # nobody goes straight in past one that waits
                assert others == 0
            inside += min(width, bound)
            entered.append(number)
            assert inside <= bound
            try:
                for _ in range(rng.randint(0, 4)):
                    await asyncio.sleep(0)
            finally:
                inside -= min(width, bound)

    async def run() -> None:
        gate = BeamGate(bound)
        tasks = []
        for number, width in enumerate(widths):
            tasks.append(asyncio.create_task(request(gate, number, width)))
            for _ in range(rng.randint(0, 2)):
                await asyncio.sleep(0)
            if rng.random() < 0.4:
                rng.choice(tasks).cancel()
        done = await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        failed = [one for one in done if isinstance(one, AssertionError)]
        assert not failed
        assert waited == sorted(waited)
        finished = {number for number, one in enumerate(done) if one is None}
        assert finished <= set(entered)
        assert (gate.waiting, inside) == (0, 0)
        # All room is back: a request as wide as the bound goes straight in.
        async with asyncio.timeout(1), gate.enter(bound):
            pass

    asyncio.run(run())


def test_a_request_wider_than_the_bound_goes_in_alone():
    async def run() -> None:
        gate = BeamGate(4)
        async with gate.enter(100):
            other = asyncio.create_task(gate.enter(1).__aenter__())
            await asyncio.sleep(0.01)
            assert gate.waiting == 1
            assert not other.done()
        await asyncio.wait_for(other, 1)

    asyncio.run(run())
