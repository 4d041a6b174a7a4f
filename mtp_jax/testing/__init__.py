"""Property tests for engines that draft: a toy model, an oracle, checks, and Hypothesis strategies.

    toy_family    an integer model: exact, fast, and quick to notice a wrong page, length or drafter entry
    oracle        plain decoding one token at a time, by definition: what every engine must emit
    checks        `check_step_record`, `check_trace` (any engine that records its steps), `check_pages`, `check_seats`
    tree_oracle   the same for trees of drafts: which nodes a drafter's laws ask for
    policies      a draft-length policy that says what the test tells it
    engines       small engines, compiled once and used for many examples
    launches      what an engine's launches were given, so that a step can be done again by hand
    driving       runs requests by a plan of arrivals, preemptions and cancellations, checking after every step
    rows          slots and their sampling by hand: rules, proposers and sampling without an engine
    numbered      requests whose text follows from their number
    strategies    requests near their limits, draft-length schedules, acceptance masks, plans    (needs hypothesis)
    fake_device   the scheduler's loop on stamps instead of a model: no jax, any acceptance
    fake_mesh     several processes of such, and their vote
    host_model    a state machine over it                                                       (needs hypothesis)

A worked example: an engine of your own, and the bug in it
-----------------------------------------------------------
Say you wrote a decoder that drafts, over the toy model here to keep it short. One line is wrong.

>>> from mtp_jax.engine.requests import StepRecord
>>> from mtp_jax.testing.oracle import plain_decode, plain_drafts, plain_token
>>> from mtp_jax.testing.toy_family import ToyFamily
>>> family = ToyFamily()
>>> def my_engine(request, draft_len, max_model_len=48):
...     def target(text):
...         return plain_token(family.plain_logits(text), request, text)
...
...     limit = request.longest_text(max_model_len) - 1
...     text, records = [*request.prompt, target(request.prompt)], []
...     while len(text) - 1 < limit and text[-1] not in request.stop_ids:
...         before = len(text) - 1
...         cap = min(draft_len, limit - before - 1)
...         drafts = plain_drafts(family.plain_draft_logits, request, text, cap)
...         targets = tuple(target([*text, *drafts[:j]]) for j in range(cap + 1))
...         num_right = 0
...         while num_right < cap and drafts[num_right] == targets[num_right]:
...             num_right += 1
...         emitted = targets[: num_right + 1]  # wrong: an accepted draft may be a stop
...         text += emitted
...         records.append(
...             StepRecord(draft_len, cap, drafts, targets, num_right, emitted, before, len(text) - 1, num_pages=0)
...         )
...     return text[len(request.prompt) :], records

A few requests by hand may all pass. Hypothesis, told what a request can be, finds one that does not, and shrinks it:
one draft is enough, and it must be the stop.

>>> from hypothesis import find, settings, strategies as st
>>> from mtp_jax.testing.strategies import requests
>>> def differs(case):
...     request, draft_len = case
...     return tuple(my_engine(request, draft_len)[0]) != plain_decode(
...         family.plain_logits, request, max_model_len=48
...     ).tokens
>>> cases = st.tuples(requests(29, max_model_len=48, temperatures=(0.0,)), st.integers(0, 3))
>>> request, draft_len = find(cases, differs, settings=settings(max_examples=2000, derandomize=True, database=None))
>>> draft_len, len(request.stop_ids)
(1, 1)

The records say it too, and name the rule:

>>> from mtp_jax.testing.checks import check_trace
>>> tokens, records = my_engine(request, draft_len)
>>> limit = request.longest_text(48) - 1
>>> check_trace(records, tokens, prompt_len=len(request.prompt), limit=limit, stop_ids=request.stop_ids)
... # doctest: +ELLIPSIS
Traceback (most recent call last):
mtp_jax.testing.checks.CheckFailed: tokens go on after stop id [...]
"""
