"""From result lines to the numbers of a report: counts of all lines, and a few answers whole. Memory stays flat."""

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

_LONGEST_MESSAGE = 200


@dataclass(frozen=True)
class Answer:
    """One sample of a request, to be shown. `origins` is None where the run did not record them."""

    custom_id: str
    text: str
    num_tokens: int
    tokens_a_step: float
    finish_reason: str
    origins: str | None = None
    pieces: tuple[str, ...] = ()
    seconds: float | None = None


@dataclass
class Findings:
    """What the result lines say together."""

    num_answered: int = 0
    num_refused: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_completion_tokens: int = 0
    num_steps: int = 0
    num_accepted: int = 0
    num_drafted: int = 0
    accepted_per_pos: Counter[int] = field(default_factory=Counter[int])
    drafted_per_pos: Counter[int] = field(default_factory=Counter[int])
    origins: Counter[str] = field(default_factory=Counter[str])
    draft_lens: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])
    """By launch: sum of K over the requests in it, and their number. Launches of several processes fall together."""
    errors: Counter[str] = field(default_factory=Counter[str])
    first: list[Answer] = field(default_factory=list[Answer])
    slowest: list[Answer] = field(default_factory=list[Answer])  # the slowest first

    @property
    def num_lines(self) -> int:
        """All result lines."""
        return self.num_answered + self.num_refused + self.num_failed

    @property
    def tokens_a_step(self) -> float:
        """Mean tokens that a decode step of one request emitted."""
        return 1 + self.num_accepted / self.num_steps if self.num_steps else 1.0

    @property
    def acceptance(self) -> list[tuple[float, int]]:
        """By position: accepted of the drafts made there, and how many those were."""
        drafted = [self.drafted_per_pos[place] for place in range(len(self.drafted_per_pos))]
        return [(self.accepted_per_pos[place] / count, count) for place, count in enumerate(drafted) if count]


def read_results(lines: Iterable[bytes], *, num_shown: int = 20) -> Findings:
    """Reads result lines of `run-batch`. Of answers it keeps the first and the slowest `num_shown`.

    `ValueError`, naming the line, for one that is no result line.
    """
    findings = Findings()
    slowest: list[tuple[float, int, Answer]] = []
    for number, line in enumerate(lines):
        try:
            answers = _read(json.loads(line), findings)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(
                f"line {number + 1} is no result of run-batch ({type(error).__name__}: {error})."
            ) from None
        for answer in answers:
            if len(findings.first) < num_shown:
                findings.first.append(answer)
            if answer.seconds is not None:
                heapq.heappush(slowest, (answer.seconds, -number, answer))
                if len(slowest) > num_shown:
                    heapq.heappop(slowest)
    findings.slowest = [answer for _, _, answer in sorted(slowest, key=lambda entry: entry[:2], reverse=True)]
    return findings


def _read(result: Mapping[str, Any], findings: Findings) -> list[Answer]:
    if result["error"] is not None:
        is_refused = result["response"]["status_code"] == 400
        findings.num_refused += is_refused
        findings.num_failed += not is_refused
        findings.errors[str(result["error"]["message"])[:_LONGEST_MESSAGE]] += 1
        return []
    body = result["response"]["body"]
    metrics = body["metrics"]
    findings.num_answered += 1
    findings.num_prompt_tokens += body["usage"]["prompt_tokens"]
    findings.num_completion_tokens += body["usage"]["completion_tokens"]
    findings.num_steps += metrics["num_steps"]
    findings.num_drafted += metrics["num_draft_tokens"]
    findings.num_accepted += metrics["num_accepted_tokens"]
    for counts, name in (
        (findings.accepted_per_pos, "accepted_per_pos"),
        (findings.drafted_per_pos, "drafted_per_pos"),
    ):
        by_position: list[int] = metrics[name]
        counts.update(dict(enumerate(by_position)))
    times = metrics.get("times_s")
    answers = list[Answer]()
    for choice in body["choices"]:
        findings.origins.update(choice.get("token_origins") or "")
        for launch, draft_len, *_ in choice.get("steps") or ():
            total, count = findings.draft_lens.get(launch, (0, 0))
            findings.draft_lens[launch] = (total + draft_len, count + 1)
        answers.append(_answer(result, choice, metrics, None if times is None else times[1] - times[0]))
    return answers


def _answer(
    result: Mapping[str, Any], choice: Mapping[str, Any], metrics: Mapping[str, Any], seconds: float | None
) -> Answer:
    text = choice["message"]["content"] if "message" in choice else choice["text"]
    pieces = choice.get("token_texts")
    if pieces is None:  # no tokenizer: token ids are all there is to show
        pieces = [f"{token} " for token in choice["token_ids"]]
    return Answer(
        custom_id=str(result["custom_id"]),
        text=str(text) or "".join(pieces),
        num_tokens=len(choice["token_ids"]),
        tokens_a_step=float(metrics["mean_acceptance_length"]),
        finish_reason=str(choice["finish_reason"]),
        origins=choice.get("token_origins"),
        pieces=tuple(map(str, pieces)),
        seconds=seconds,
    )
