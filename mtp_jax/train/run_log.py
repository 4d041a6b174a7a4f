"""A run's log: a line of JSON each time, and TensorBoard's curves beside it where they are asked for."""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any

from mtp_jax.core.errors import ConfigError


class RunLog:
    """Adds to `log.jsonl` in `folder`, and to the events in `board`, if given. A context manager."""

    def __init__(self, folder: Path, board: Path | None = None) -> None:
        check_board(board)
        self._file, self._board = folder / "log.jsonl", board
        self._stack = ExitStack()

    def __enter__(self) -> "RunLog":
        with self._stack as stack:
            self._log = stack.enter_context(self._file.open("a", encoding="utf-8"))
            self._writer = None
            if self._board is not None:
                from tensorboard.summary import Writer  # pyright: ignore[reportMissingImports]

                self._writer = Writer(str(self._board))
                stack.callback(self._writer.close)
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def write(self, record: Mapping[str, Any]) -> None:
        """One line. `record` has the "step" that its numbers are of."""
        print(json.dumps(record), file=self._log, flush=True)
        if self._writer is not None:
            for name, value in curves(record):
                self._writer.add_scalar(name, value, record["step"])


def curves(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a record, each with the name of its curve; entries of a list are counted from 1.

    >>> list(curves({"step": 9, "loss": 2.5, "mtp_loss": [3.0, 4.0]}))
    [('loss', 2.5), ('mtp_loss/1', 3.0), ('mtp_loss/2', 4.0)]
    """
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from curves(value, f"{prefix}{name}/")
        elif isinstance(value, list | tuple):
            yield from curves({str(number): one for number, one in enumerate(value, start=1)}, f"{prefix}{name}/")
        elif isinstance(value, int | float) and name != "step":
            yield f"{prefix}{name}", float(value)


def check_board(board: Path | None) -> None:
    """`ConfigError` if TensorBoard's events are asked for and cannot be written."""
    if board is not None and find_spec("tensorboard") is None:
        raise ConfigError(f"TensorBoard's events in {board} need its package: pip install tensorboard.")
