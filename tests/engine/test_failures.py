"""An engine whose books do not add up says so once, and launches nothing more."""

import pytest

from mtp_jax.core.errors import EngineFailed, InvariantError
from mtp_jax.testing.engines import restart
from tests.laws.support import THREE_SLOTS, request


def test_the_first_error_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = restart(THREE_SLOTS())
    engine.submit(request("a", (1, 2, 3), max_tokens=8))
    for _ in range(3):
        engine.step()

    def broken() -> None:
        raise InvariantError("a page is held twice")

    monkeypatch.setattr(engine.group, "decide", broken)
    with pytest.raises(InvariantError, match="a page is held twice"):
        engine.step()
    engine.drain()  # what a caller does on the way out: no second error hides the first
    with pytest.raises(EngineFailed, match="The engine's books do not add up: a page is held twice"):
        engine.step()
