"""A batch on the toy model, in this process or in one of its own.

python -m tests.batch.toy_job INPUT OUTPUT [PROCESS NUM_PROCESSES [EVENTS]]
"""

import functools
import json
import random
import sys
from pathlib import Path
from typing import Any

import jax

from mtp_jax.batch import Summary, run_batch
from mtp_jax.batch.shares import Share
from mtp_jax.batch.team import ALONE, Team
from mtp_jax.batch.watching import EventLog
from mtp_jax.llm import LLM
from mtp_jax.policies.fixed import FixedDraftLen
from mtp_jax.testing.engines import without_optimizations
from mtp_jax.testing.toy_family import ToyFamily


@functools.cache
def toy_llm() -> LLM:
    """Three slots, drafts of two tokens; token ids only."""
    family = ToyFamily()
    return without_optimizations(
        lambda: LLM.from_weights(
            family,
            family.init_weights(jax.random.key(0), None),
            max_num_seqs=3,
            max_model_len=40,
            block_size=4,
            prefill_chunk=16,
            speculative_config={"num_speculative_tokens": 2},
        )
    )


def restarted_llm() -> LLM:
    """The same, its books empty: what a new one would be."""
    llm = toy_llm()
    llm.engine = llm.engine.restarted(llm.engine.config, FixedDraftLen)
    return llm


def good_line(number: int, **body: Any) -> bytes:
    """A request that differs from all others; every third one draws its tokens."""
    dice = random.Random(number)
    asked = {
        "prompt": [dice.randrange(29) for _ in range(dice.randrange(1, 12))],
        "max_tokens": dice.randrange(1, 20),
        "temperature": 1.0 if number % 3 == 0 else 0.0,
        **body,
    }
    return json.dumps({"custom_id": f"request-{number}", "url": "/v1/completions", "body": asked}).encode() + b"\n"


def run_toy_batch(source: Path | str, output: Path | str, **options: Any) -> Summary:
    """The job, with small parts so that a kill finds some written and some not."""
    make_llm = options.pop("make_llm", restarted_llm)
    return run_batch(make_llm, [str(source)], output, model="toy", job={}, lines_per_part=5, look_ahead=16, **options)


def team_of(process: int, num_processes: int) -> Team:
    """One of several independent processes."""
    return Team(Share(process, num_processes, (process,), num_processes), process, num_processes)


if __name__ == "__main__":
    source, output, *place = sys.argv[1:]
    team = team_of(*map(int, place[:2])) if place else ALONE
    logs = [EventLog(Path(place[2]), {}, seconds_between=1)] if len(place) > 2 else []
    run_toy_batch(Path(source), Path(output), resume=True, team=team, watchers=logs)
