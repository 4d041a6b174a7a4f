"""What the host has to know of an acceptance rule: one line for each that is not like `match`.

The rules themselves are a table further up (`acceptance.registry`), which may know more than are named here: those
take the drafts that `match` takes, have no options and keep plain decoding's tokens.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class RuleFacts:
    """`draft_samplings`: the ways to draw drafts that it judges rightly; the first is taken unless one is given.

    `options`: fields of `SpeculativeConfig` that it alone reads. `keeps`: what of plain decoding is kept, its tokens,
    their law or neither. `reads_thinking`: whether it looks at a request's thinking tokens.
    """

    draft_samplings: tuple[str, ...] = ("coupled", "greedy")
    options: tuple[str, ...] = ()
    keeps: Literal["tokens", "law", "neither"] = "tokens"
    reads_thinking: bool = False


_LIKE_MATCH = RuleFacts()
RULE_FACTS: Mapping[str, RuleFacts] = {
    "rejection": RuleFacts(("probabilistic", "greedy"), options=("block_verification",), keeps="law"),
    "relaxed": RuleFacts(options=("relaxed_topk", "relaxed_delta"), keeps="neither", reads_thinking=True),
}


def facts_of(rule: str) -> RuleFacts:
    """What is known of the rule of this name.

    >>> facts_of("rejection").draft_samplings, facts_of("match").keeps
    (('probabilistic', 'greedy'), 'tokens')
    """
    return RULE_FACTS.get(rule, _LIKE_MATCH)
