"""How each token of an answer came: drafted and accepted, corrected, or plain."""

from collections.abc import Sequence
from typing import Any

from tokenizers import Tokenizer

from mtp_jax.engine.requests import StepRecord
from mtp_jax.outputs import CompletionOutput
from mtp_jax.text import pieces

DRAFTED, CORRECTED, PLAIN = "d", "c", "p"


def origins_of(one: CompletionOutput, tokenizer: Tokenizer | None) -> dict[str, Any]:
    """What a result says of a traced sample: a letter and a text for each token, and five numbers for each step.

    Those are the launch, K, drafts verified, drafts accepted, tokens emitted. Nothing where it was not traced.
    """
    if one.records is None:
        return {}
    return {
        "token_origins": letters(one.records, len(one.token_ids)),
        "token_texts": None if tokenizer is None else pieces(tokenizer, one.token_ids),
        "steps": [
            [record.launch, record.draft_len, len(record.drafts), record.num_accepted, len(record.emitted)]
            for record in one.records
        ],
    }


def letters(records: Sequence[StepRecord], num_tokens: int) -> str:
    """One for each token: "d" a draft that stood, "c" the target's own in place of one that did not, "p" any other.

    Plain are the prefill's token, all tokens of steps without drafts, and the one after drafts that all stood.
    """
    text = "".join(_of_step(record) for record in records)
    return PLAIN * (num_tokens - len(text)) + text


def _of_step(record: StepRecord) -> str:
    longest = len(record.drafts) if record.parents is None else min(record.draft_len, len(record.drafts))
    own = CORRECTED if record.num_accepted < longest else PLAIN
    return (DRAFTED * record.num_accepted + own)[: len(record.emitted)]
