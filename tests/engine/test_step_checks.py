"""The checks of step records name what does not add up, and let pass what a rule may do."""

from dataclasses import replace
from typing import Any

import pytest

from mtp_jax.engine.requests import StepRecord
from mtp_jax.testing.checks import CheckFailed, check_step_record, check_trace

SOUND = StepRecord(
    draft_len=3,
    draft_cap=3,
    drafts=(4, 9, 5),
    target_tokens=(4, 9, 6, 7),
    num_accepted=2,
    emitted=(4, 9, 6),
    committed_len_before=7,
    committed_len_after=10,
    num_pages=1,
)
FAULTS: dict[str, dict[str, Any]] = {
    "a cap of 4 under K = 3": {"draft_cap": 4},
    "3 drafts under a cap of 2": {"draft_cap": 2},
    "3 target tokens for 3 drafts": {"target_tokens": (4, 9, 6)},
    "a live slot emitted nothing": {"emitted": ()},
    "but the target says": {"emitted": (4, 9, 5)},
    "1 accepted, but 2 drafts match": {"num_accepted": 1},
    "7 became 11 with 3 tokens emitted": {"committed_len_after": 11},
    "wrote into 2 pages while the slot held 1": {"committed_len_before": 14, "committed_len_after": 17},
}


@pytest.mark.parametrize(("sentence", "changes"), FAULTS.items(), ids=FAULTS)
def test_each_fault_gets_its_sentence(sentence: str, changes: dict[str, Any]) -> None:
    check_step_record(SOUND, limit=20, page_size=16)
    with pytest.raises(CheckFailed, match=sentence):
        check_step_record(replace(SOUND, **changes), limit=20, page_size=16)


def test_a_rule_may_refuse_drafts_that_are_right() -> None:
    cautious = replace(SOUND, num_accepted=1, emitted=(4, 9), committed_len_after=9)
    with pytest.raises(CheckFailed, match="2 drafts match"):
        check_step_record(cautious, limit=20)
    check_step_record(cautious, limit=20, keeps_right_drafts=False)
    check_trace([cautious], [1, 4, 9], prompt_len=7, limit=20, stop_ids=(9,), keeps_right_drafts=False)
    with pytest.raises(CheckFailed, match="but the target says"):
        check_step_record(replace(cautious, emitted=(4, 8)), limit=20, keeps_right_drafts=False)
    with pytest.raises(CheckFailed, match="3 tokens emitted"):
        check_step_record(replace(SOUND, num_accepted=1), limit=20, keeps_right_drafts=False)
