"""What the host packs is what the device unpacks."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.core.config import CacheConfig, EngineConfig, SamplingParams
from mtp_jax.core.layout import NO_LOGPROBS, NO_TOKEN, OutputColumn
from mtp_jax.core.shapes import PrefillShape, StepShape
from mtp_jax.core.types import Logprobs, PrefillInputs, StepInputs, StepOutputs
from mtp_jax.engine.batch import BatchBuilder
from mtp_jax.engine.decisions import Decision, LaunchDecision, PrefillDecision, SlotDecision, StepDecision
from mtp_jax.engine.requests import Request, RequestState
from mtp_jax.engine.slots import SlotTable
from mtp_jax.ops.placement import Placement

CONFIG = EngineConfig(
    max_model_len=32,
    max_num_seqs=4,
    cache=CacheConfig(page_size=4),
    max_stop_token_ids=3,
    max_logit_bias=2,
    max_bad_words=3,
    max_bad_word_len=4,
)
LOOKAHEAD = 2

all_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.0, 0.7, 2.0**-126, 3e38)),
    top_k=st.sampled_from((0, 5, 2**40)),
    top_p=st.sampled_from((1.0, 0.1)),
    min_p=st.sampled_from((0.0, 0.1)),
    min_tokens=st.sampled_from((0, 3, 2**40)),
    presence_penalty=st.sampled_from((0.0, -1.5)),
    frequency_penalty=st.sampled_from((0.0, 2)),
    repetition_penalty=st.sampled_from((1.0, 1.3)),
    logit_bias=st.none() | st.dictionaries(st.integers(0, 9), st.sampled_from((-1.5, 3e38, 7)), max_size=2),
    bad_words=st.none() | st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=3),
    logprobs=st.sampled_from((None, 0, 2)),
    stop_token_ids=st.lists(st.integers(0, 9), max_size=2, unique=True),
    max_tokens=st.none() | st.integers(1, 50),
    ignore_eos=st.booleans(),
)


def state_of(name: str, prompt: tuple[int, ...], params: SamplingParams, seed: int) -> RequestState:
    request = Request(name, prompt, params, seed, eos_token_ids=(11,))
    return RequestState(request, limit=request.longest_text(32) - 1)


def launch_of(decision: Decision) -> LaunchDecision:
    return LaunchDecision(decision.number, decision.shape, (decision,))


@given(
    params=st.lists(all_params, min_size=3, max_size=3),
    seeds=st.lists(st.integers(0, 2**64 - 1), min_size=3, max_size=3),
    takes_part=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_decode_inputs_arrive_as_they_were_decided(
    params: list[SamplingParams], seeds: list[int], takes_part: list[bool]
) -> None:
    batch, slots = BatchBuilder(CONFIG, Placement()), SlotTable(4)
    seated = [
        slots.seat(state_of(str(i), (1, 2), params[i], seeds[i]), pages=list(range(3 * i + 1, 3 * i + 1 + i)))
        for i in range(3)
    ]
    decided = tuple(
        SlotDecision(slot.index, slot.admission, slot.index, slot.index + 1, slot.index + 1, len(slot.pages), False)
        for slot in seated
        if takes_part[slot.index]
    )
    for _ in range(2):  # the second time from the rows and the upload that were kept
        packed = batch.build(launch_of(StepDecision(1, StepShape(4, 3), decided)), [slots])
        inputs = StepInputs.unpack(packed, num_stop_ids=3)
        assert inputs.live.tolist() == [*takes_part, False]
        for slot in seated:
            i, request = slot.index, slot.state.request
            if not takes_part[i]:
                assert not bool(inputs.sampling.is_edited[i])
                assert inputs.sampling.num_logprobs_B[i] == NO_LOGPROBS
                assert inputs.sampling.temperature_B[i] == 0
                assert not inputs.page_table_BP[i].any()
                continue
            assert int(inputs.draft_cap[i]) == i
            assert int(inputs.limit[i]) == slot.state.limit
            assert inputs.page_table_BP[i].tolist() == slot.pages + [0] * (8 - i)
            held_back = list(request.held_back_ids)
            sampling = inputs.sampling
            assert sampling.stop_ids_BI[i].tolist() == held_back + [NO_TOKEN] * (3 - len(held_back))
            assert int(sampling.num_stop_ids_B[i]) == len(request.stop_ids)
            high, low = (int(half) for half in sampling.key_B2[i])
            assert (high << 32) + low == seeds[i]
            assert np.float32(sampling.temperature_B[i]) == np.float32(params[i].temperature)
            assert np.float32(sampling.top_p_B[i]) == np.float32(params[i].top_p)
            assert int(sampling.top_k_B[i]) == min(params[i].top_k, 2**31 - 1)
            assert int(sampling.num_logprobs_B[i]) == (
                NO_LOGPROBS if params[i].logprobs is None else params[i].logprobs
            )
            for name in ("min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
                assert np.float32(getattr(sampling, f"{name}_B")[i]) == np.float32(getattr(params[i], name)), name
            assert int(sampling.prompt_len_B[i]) == 2
            assert int(sampling.min_tokens_B[i]) == min(params[i].min_tokens, 2**31 - 1)
            assert int(sampling.num_biases_B[i]) == len(params[i].logit_bias or {})
            assert int(sampling.num_bad_words_B[i]) == len(params[i].bad_words or ())


def test_a_row_that_was_kept_follows_the_slot() -> None:
    """More pages, and another owner of the slot: neither is served from the row kept."""
    batch, slots = BatchBuilder(CONFIG, Placement()), SlotTable(4)
    first = slots.seat(state_of("a", (1,), SamplingParams(), 1), pages=[5])

    def table(slot: object) -> list[int]:
        decided = SlotDecision(0, slots.find(0, slot.admission).admission, 0, 1, 1, 1, wants_logprobs=False)  # type: ignore[union-attr, attr-defined]
        packed = batch.build(launch_of(StepDecision(1, StepShape(1, 0), (decided,))), [slots])
        return StepInputs.unpack(packed, num_stop_ids=3).page_table_BP[0].tolist()

    assert table(first)[:2] == [5, 0]
    first.pages.append(6)
    assert table(first)[:2] == [5, 6]
    slots.vacate(first)
    second = slots.seat(state_of("b", (1,), SamplingParams(), 2), pages=[7, 8])
    assert table(second)[:2] == [7, 8]


@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=12).map(tuple), params=all_params, data=st.data())
def test_prefill_inputs_arrive_with_the_tokens_ahead(
    prompt: tuple[int, ...], params: SamplingParams, data: st.DataObject
) -> None:
    batch, slots = BatchBuilder(CONFIG, Placement()), SlotTable(4)
    slot = slots.seat(state_of("a", prompt, params, 3), pages=[1, 2, 3])
    start = data.draw(st.integers(0, len(prompt) - 1))
    num_tokens = data.draw(st.integers(1, len(prompt) - start))
    slot.pending_token = data.draw(st.none() | st.integers(0, 9))
    is_first, is_last = data.draw(st.booleans()), start + num_tokens == len(prompt)
    decision = PrefillDecision(
        1, PrefillShape(16), 0, slot.admission, start, num_tokens, is_first, is_last, wants_logprobs=False
    )
    packed = batch.build(launch_of(decision), [slots])
    inputs = PrefillInputs.unpack(
        packed, num_stop_ids=3, list_sizes=CONFIG.list_sizes, max_model_len=CONFIG.max_model_len
    )
    facts = [inputs.slot, inputs.start, inputs.num_tokens, inputs.num_known]
    facts += [inputs.is_first, inputs.is_last, inputs.pending_token]
    expected = [
        0,
        start,
        num_tokens,
        len(prompt),
        is_first,
        is_last,
        NO_TOKEN if slot.pending_token is None else slot.pending_token,
    ]
    assert [fact.tolist() for fact in facts] == [[fact] for fact in expected]
    ahead = prompt[start : start + num_tokens + LOOKAHEAD]
    assert inputs.tokens_from(0, 16 + LOOKAHEAD)[0, : len(ahead)].tolist() == list(ahead)
    assert inputs.text_YS[0].tolist() == [*prompt, *[0] * (CONFIG.max_model_len - len(prompt))]
    assert inputs.inputs.live.tolist() == [True]
    assert inputs.inputs.page_table_BP[0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    lists, num_biases = inputs.inputs.sampling.lists, int(inputs.inputs.sampling.num_biases_B[0])
    assert lists is not None
    assert lists is inputs.lists
    biases = [np.float32(value) for value in (params.logit_bias or {}).values()]
    assert lists.bias_ids_BA[0, :num_biases].tolist() == list(params.logit_bias or {})
    assert lists.biases_BA[0, :num_biases].tolist() == biases
    words = params.bad_words or []
    rooms = [[NO_TOKEN] * (4 - len(word)) + list(word) for word in words] + [[NO_TOKEN] * 4] * (3 - len(words))
    assert lists.bad_words_BMO[0].tolist() == rooms


def test_outputs_keep_their_order() -> None:
    outputs = StepOutputs(
        tokens_BE=jnp.array([[10, 11, 12]]),
        num_emitted=jnp.array([1]),
        num_accepted=jnp.array([2]),
        num_drafted=jnp.array([3]),
        draft_depth=jnp.array([6]),
        committed_len=jnp.array([4]),
        finished=jnp.array([True]),
        drafts_BK=jnp.array([[20, 21]]),
        target_tokens_BW=jnp.array([[30, 31, 32]]),
        logprobs=Logprobs(*jax.tree.map(jnp.zeros, ((1, 3), (1, 3, 1), (1, 3, 1), (1, 3)), is_leaf=is_shape)),
    )
    packed = outputs.pack().small_BX[0].tolist()
    assert packed[: len(OutputColumn)] == [1, 2, 3, 6, 4, 1]
    assert packed[len(OutputColumn) :] == [10, 11, 12, 20, 21, 30, 31, 32]
    of_tree = replace(outputs, parent_BK=jnp.array([[40, 41]])).pack().small_BX[0].tolist()
    assert of_tree == [*packed, 40, 41]


def is_shape(x: object) -> bool:
    return isinstance(x, tuple) and all(isinstance(size, int) for size in x)
