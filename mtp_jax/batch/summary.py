"""What a run did, in numbers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Summary:
    """What this process did. Counts are of lines of its share; `num_resumed` had a result before it began.

    `is_complete`: the results of the whole job are in their place, because every share has come to its end.
    """

    num_answered: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_resumed: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_decode_steps: int = 0
    num_accepted_tokens: int = 0
    num_engine_starts: int = 0
    seconds: float = 0.0
    is_complete: bool = False

    @property
    def num_lines(self) -> int:
        """All of this share of the input."""
        return self.num_done + self.num_resumed

    @property
    def num_done(self) -> int:
        """Lines that got their result in this run."""
        return self.num_answered + self.num_refused + self.num_failed

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens a decode step of one request brought."""
        return 1 + self.num_accepted_tokens / self.num_decode_steps if self.num_decode_steps else 1.0

    def count(self, result: Mapping[str, Any]) -> None:
        """Adds one result line."""
        status = result["response"]["status_code"]
        if status == 200:
            body = result["response"]["body"]
            self.num_answered += 1
            self.num_prompt_tokens += body["usage"]["prompt_tokens"]
            self.num_completion_tokens += body["usage"]["completion_tokens"]
            self.num_decode_steps += body["metrics"]["num_steps"]
            self.num_accepted_tokens += body["metrics"]["num_accepted_tokens"]
        elif status == 400:
            self.num_refused += 1
        else:
            self.num_failed += 1
