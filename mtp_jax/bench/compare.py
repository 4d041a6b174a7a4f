"""Drafting against plain decoding: one prompt through both, in turns; speeds, acceptance, and whether tokens agree."""

from collections.abc import Callable
from dataclasses import dataclass

from tokenizers import Tokenizer

from mtp_jax.bench.equality import Difference, differences, top_two_margin
from mtp_jax.bench.measure import Timing, Variant, Workload, time_in_turns
from mtp_jax.bench.tables import shares, step_counts, table
from mtp_jax.core.config import SamplingParams, SpeculativeConfig
from mtp_jax.llm import LLM


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `margin` is plain decoding's lead of best over second token at the difference.

    `caveat`: why equal tokens are not promised, where they are not.
    """

    drafting: Timing
    plain: Timing
    difference: Difference | None
    margin: float | None
    caveat: str | None = None

    def as_text(self, tokenizer: Tokenizer | None = None) -> str:
        """The speeds, the rates, and the sentence about the tokens."""
        acceptance = self.drafting.acceptance
        speeds = [["", "tokens/s", "ms/step", "tokens/step"]]
        for name, timing in (("plain decoding", self.plain), ("with drafts", self.drafting)):
            figures = (timing.tokens_per_s, timing.ms_per_step, timing.mean_acceptance_length)
            speeds.append([name, *(f"{figure:.2f}" for figure in figures)])
        return "\n".join(
            [
                table(speeds),
                f"{self.drafting.ratio_to(self.plain):.2f} times plain decoding's speed "
                f"(medians of {len(self.plain.runs)} rounds of both, after warm-up)",
                f"drafts kept, by position: {shares(acceptance.unconditional)}",
                f"where all before were:    {shares(acceptance.conditional)}",
                f"draft lengths used:       {step_counts(acceptance.draft_lens)}",
                self.sentence(tokenizer),
            ]
        )

    def sentence(self, tokenizer: Tokenizer | None = None) -> str:
        """Whether every run wrote plain decoding's tokens; if not, where the first difference is."""
        return " ".join(filter(None, (self.caveat, self._finding(tokenizer))))

    def _finding(self, tokenizer: Tokenizer | None) -> str:
        different = self.difference
        if different is None:
            return f"The tokens are equal: all {len(self.plain.runs[0].tokens[0])}, in every round."
        lead = "" if self.margin is None else f"; its best token led the second by {self.margin:.2g} in log-probability"
        return (
            f"The tokens are NOT equal: at output position {different.position} drafting gave "
            f"{_named(different.token, tokenizer)} and plain decoding {_named(different.plain_token, tokenizer)}{lead}."
        )


def compare(
    drafting: LLM, plain: LLM, workload: Workload, *, repeats: int, on_run: Callable[[], object] = lambda: None
) -> Comparison:
    """Times both on the same prompt, `repeats` rounds after one that is not counted."""
    variants = {"plain": Variant(plain), "drafting": Variant(drafting)}
    timings = time_in_turns(variants, workload, repeats=repeats, on_run=on_run)
    reference = timings["plain"].runs[0]
    found = [
        difference for timing in timings.values() for run in timing.runs for difference in differences(run, reference)
    ]
    first = min(found, key=lambda difference: difference.position, default=None)
    return Comparison(
        drafting=timings["drafting"],
        plain=timings["plain"],
        difference=first,
        margin=None if first is None else top_two_margin(variants["plain"], workload, first),
        caveat=caveat(drafting.engine.config.speculative, workload.params),
    )


def caveat(speculative: SpeculativeConfig, params: SamplingParams) -> str | None:
    """Why drafting this way does not promise plain decoding's tokens; None where it does.

    >>> caveat(SpeculativeConfig(acceptance="rejection"), SamplingParams(temperature=1.0))
    "Equal tokens are not promised: rejection sampling keeps plain decoding's law, not its tokens."
    """
    if speculative.keeps == "neither":
        return "Equal tokens are not promised: this way to accept drafts is lossy."
    if speculative.keeps == "law" and params.temperature > 0:
        return "Equal tokens are not promised: rejection sampling keeps plain decoding's law, not its tokens."
    return None


def _named(token: int | None, tokenizer: Tokenizer | None) -> str:
    if token is None:
        return "nothing more"
    return f"token {token}" if tokenizer is None else f"token {token} ({tokenizer.decode([token])!r})"
