"""Half an hour of arrivals, cancels and preemptions on one engine: books balanced, answers right, memory flat."""

import random
import time

import pytest

from mtp_jax.engine.requests import Progress, Request
from mtp_jax.testing.checks import check_pages, check_seats
from mtp_jax.testing.engines import restart
from mtp_jax.testing.oracle import plain_decode
from mtp_jax.testing.toy_family import ToyFamily
from tests.laws.support import THREE_SLOTS, request

MINUTES = 30
MOST_OPEN = 12


def drawn(dice: random.Random, number: int) -> Request:
    prompt = tuple(dice.randrange(29) for _ in range(dice.randrange(1, 30)))
    temperature = dice.choice((0.0, 0.0, 1.0))
    return request(
        f"{number}", prompt, seed=dice.randrange(2**32), temperature=temperature, max_tokens=dice.randrange(1, 30)
    )


def resident_mib() -> float:
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * 4096 / 2**20


@pytest.mark.long
def test_half_an_hour_of_arrivals_cancels_and_preemptions() -> None:
    dice = random.Random(0)
    engine = restart(THREE_SLOTS(), num_pages=20)  # fewer than three long requests need
    num_pages = 20
    open_requests: dict[str, Request] = {}
    number = num_right = num_cancelled = num_preempted = num_checks = 0
    sizes: list[float] = []
    began_s = last_s = time.monotonic()
    while time.monotonic() - began_s < 60 * MINUTES:
        while len(open_requests) < MOST_OPEN and dice.random() < 0.3:
            one = drawn(dice, number)
            number += 1
            open_requests[one.request_id] = one
            engine.submit(one)
        if open_requests and dice.random() < 0.03:
            gone = dice.choice([*open_requests])
            assert engine.cancel(gone)
            del open_requests[gone]
            num_cancelled += 1
        if open_requests and dice.random() < 0.05:
            num_preempted += engine.group.preempt(dice.choice([*open_requests]))
        for progress in engine.step():
            if progress.finish_reason is not None and progress.request_id in open_requests:
                num_right += is_right(open_requests.pop(progress.request_id), progress)
        if time.monotonic() - last_s >= 1:
            last_s = time.monotonic()
            check_pages(engine.scheduler)
            check_seats(engine.group)
            num_checks += 1
            sizes.append(resident_mib())
    for request_id in open_requests:
        engine.cancel(request_id)
    engine.drain()
    assert engine.scheduler.pool.num_free == num_pages
    settled = sizes[len(sizes) // 6]
    print(
        f"\n{number} requests, {num_right} right, {num_cancelled} cancelled, {num_preempted} preempted by hand, "
        f"{engine.group.totals.num_preemptions} in all, {num_checks} checks; "
        f"{settled:.0f} MiB after a sixth of the time, {max(sizes):.0f} at most, {sizes[-1]:.0f} at the end"
    )
    assert max(sizes) < settled + 32


def is_right(one: Request, progress: Progress) -> bool:
    expected = plain_decode(ToyFamily().plain_logits, one, max_model_len=48)
    assert tuple(progress.state.tokens) == expected.tokens
    return True
