"""An interrupt from the keyboard waits for the end of an engine step, so that a step happens whole or not at all."""

import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_held() -> Generator[None, None, None]:
    """Holds SIGINT back until the block ends; a second one goes through at once.

    Python raises `KeyboardInterrupt` between any two instructions. Between a launch, which takes the device state as a
    donation, and the assignment of the state that it returns, that would leave the engine without any.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    held: list[FrameType | None] = []

    def hold(number: int, frame: FrameType | None) -> None:
        held.append(frame)
        if len(held) > 1:
            handler(number, frame)

    signal.signal(signal.SIGINT, hold)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if len(held) == 1:
            handler(signal.SIGINT, held[0])
