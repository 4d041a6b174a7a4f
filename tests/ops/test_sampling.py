"""From logits to tokens: filters by definition, noise by its key alone, laws by counting."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from mtp_jax.core.sampling_params import FLOAT32_RANGE, SamplingParams
from mtp_jax.ops.filters import filter_logits
from mtp_jax.ops.logprobs import token_logprobs
from mtp_jax.ops.sampling import (
    Stream,
    _uniform,
    choose_tokens,
    gumbel_noise,
    target_noise,
)
from mtp_jax.testing.oracle import filtered_logits, log_softmax, target_noise_at
from mtp_jax.testing.rows import no_text, sampling_rows

VOCAB = 12


OTHER_STREAMS = [(0, 0, stream) for stream in Stream if stream is not Stream.TARGET]
adjusted = jax.jit(filter_logits)
chosen = jax.jit(lambda logits, noise, rows: choose_tokens(logits, noise, rows, no_text(logits)))
noise = jax.jit(gumbel_noise, static_argnums=2)
IDS = jnp.arange(VOCAB, dtype=jnp.int32)

FALLING = -np.arange(VOCAB, dtype=np.float32) * np.float32(0.28)
"""Each token about 0.75 times as likely as the one before."""
logits_rows = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB).map(
    lambda values: np.array(values, np.float32) / 4
)
params_rows = st.builds(
    SamplingParams,
    temperature=st.sampled_from((0.05, 0.5, 1.0, 3.0, 50.0)),
    min_p=st.sampled_from((0.0, 0.0, 0.01, 0.3, 1.0)),
    top_k=st.integers(0, VOCAB + 3),
    top_p=st.sampled_from((1.0, 0.999, 0.9, 0.6, 0.31, 0.05, 1e-6)),
)


@settings(max_examples=8 * settings().max_examples)
@given(logits_V=logits_rows, params=params_rows)
@example(np.zeros(VOCAB, np.float32), SamplingParams(top_k=1))  # all equal: all stay
@example(np.zeros(VOCAB, np.float32), SamplingParams(top_p=1e-6))
@example(-np.arange(VOCAB, dtype=np.float32), SamplingParams(temperature=0.05, top_k=3))  # the first has all the mass
@example(FALLING, SamplingParams(top_k=2, top_p=0.55))  # 0.57 of the two that are left, 0.25 of all
@example(FALLING, SamplingParams(temperature=3.0, min_p=0.4))  # warmed up, more are likely enough
def test_filters_are_their_definition(logits_V: np.ndarray, params: SamplingParams) -> None:
    """Temperature, min-p, top-k, top-p, what equals the last kept token stays: against sorting and adding up."""
    actual_V = np.asarray(adjusted(logits_V[None, None, :], sampling_rows(params)))[0, 0]
    expected_V = filtered_logits(logits_V, params)
    assert np.array_equal(np.isinf(actual_V), np.isinf(expected_V))
    # One float32 division on either side: equal to the last place.
    np.testing.assert_allclose(actual_V[np.isfinite(actual_V)], expected_V[np.isfinite(expected_V)], rtol=2e-7)


@pytest.mark.parametrize("temperature", [FLOAT32_RANGE[0], 1e-30, 1e-3, 1.0, FLOAT32_RANGE[1]])
@pytest.mark.parametrize("top_p", [FLOAT32_RANGE[0], 1e-30, 0.5, 1.0])
def test_extreme_parameters_keep_the_most_likely_token(temperature: float, top_p: float) -> None:
    """At both ends of what is allowed: never NaN, never an empty set of tokens."""
    logits = jnp.array([[[0.5, 2.0, -3.0, 1.0]]])
    row = sampling_rows(SamplingParams(temperature=temperature, top_p=top_p))
    scores = np.asarray(adjusted(logits, row))[0, 0]
    assert not np.isnan(scores).any()
    assert scores[1] == scores.max() > -np.inf
    if temperature < 2:
        assert chosen(logits, jnp.zeros((1, 1, 4)), row).tolist() == [[1]]


def test_bug_b11_a_greedy_row_keeps_its_argmax_beside_sampled_ones() -> None:
    logits = jax.random.normal(jax.random.key(0), (4, 3, VOCAB))
    params = [SamplingParams(temperature=t, top_k=3) for t in (0.0, 0.7, 1.0, 2.0)]
    row = sampling_rows(*params)
    positions = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    tokens = chosen(logits, target_noise(row, positions, VOCAB), row)
    assert tokens[0].tolist() == jnp.argmax(logits[0], axis=-1).tolist()


def test_equal_logits_go_to_the_lowest_id() -> None:
    logits = jnp.array([[[1.0, 3.0, 3.0, 3.0]], [[1.0, 3.0, 3.0, 3.0]]])
    row = sampling_rows(SamplingParams(temperature=0.0), SamplingParams(temperature=1.0, top_k=1))
    no_noise = jnp.zeros((2, 1, 4))
    assert chosen(logits, no_noise, row).tolist() == [[1], [1]]


# ---- noise


def test_noise_is_that_of_the_oracle_for_each_seed_and_position() -> None:
    seeds = (0, 1, 2**32, 2**64 - 1)
    row = sampling_rows(*[SamplingParams()] * 4, seeds=seeds)
    positions = np.array([[3, 70, 200]] * 4, np.int32)
    drawn = np.asarray(target_noise(row, jnp.asarray(positions), VOCAB))
    for b, seed in enumerate(seeds):
        for w, position in enumerate(positions[b]):
            # The same integers; the logarithms are compiled once more.
            np.testing.assert_allclose(drawn[b, w], target_noise_at(seed, int(position), VOCAB), rtol=1e-5, atol=1e-6)


def test_a_shard_of_the_vocabulary_draws_its_part_of_the_noise() -> None:
    key, positions = jnp.array([[1, 2], [3, 4]], jnp.uint32), jnp.array([[5, 6, 7], [8, 9, 10]], jnp.int32)
    whole = gumbel_noise(key, positions, Stream.TARGET, jnp.arange(VOCAB, dtype=jnp.int32))
    for start in range(0, VOCAB, 4):
        part = gumbel_noise(key, positions, Stream.TARGET, jnp.arange(start, start + 4, dtype=jnp.int32))
        assert jnp.array_equal(part, whole[..., start : start + 4])


def test_noise_depends_on_no_row_but_its_own() -> None:
    key, positions = jnp.array([[1, 2], [3, 4]], jnp.uint32), jnp.array([[5, 6], [5, 6]], jnp.int32)
    both = gumbel_noise(key, positions, Stream.TARGET, IDS)
    assert jnp.array_equal(gumbel_noise(key[1:], positions[1:], Stream.TARGET, IDS), both[1:])
    assert jnp.array_equal(gumbel_noise(key[::-1], positions[:, ::-1], Stream.TARGET, IDS), both[::-1, ::-1])


def test_bug_b01_seeds_positions_and_streams_are_independent() -> None:
    """Noise of two keys is uncorrelated: over n draws the correlation is below 5 / sqrt(n) but for one case in 10^6."""
    num_draws = 20_000
    positions = np.arange(num_draws // VOCAB, dtype=np.int32)[None, :]
    drawn = {
        (seed, shift, stream): np.asarray(
            noise(jnp.array([[0, seed]], jnp.uint32), positions + shift, stream, IDS)
        ).ravel()
        for seed, shift, stream in ((0, 0, Stream.TARGET), (1, 0, Stream.TARGET), (0, 1, Stream.TARGET), *OTHER_STREAMS)
    }
    names = list(drawn)
    correlation = np.corrcoef([drawn[name] for name in names])
    assert np.abs(correlation - np.eye(len(names))).max() < 5 / np.sqrt(num_draws)


def test_bug_b01_every_bit_of_seed_position_and_token_id_matters() -> None:
    """Two draws that part in one bit of one of them are different draws: nothing repeats after so many."""
    seeds = [0, *(1 << bit for bit in range(64))]
    positions = [0, *(1 << bit for bit in range(31))]
    ids_V = jnp.array([0, *(1 << bit for bit in range(31))], jnp.int32)
    key_B2 = jnp.array([[seed >> 32, seed & 0xFFFFFFFF] for seed in seeds], jnp.uint32)
    position_BW = jnp.broadcast_to(jnp.array(positions, jnp.int32), (len(seeds), len(positions)))
    drawn_BWV = np.asarray(noise(key_B2, position_BW, Stream.TARGET, ids_V))
    for drawn in (drawn_BWV[:, 0, 0], drawn_BWV[0, :, 0], drawn_BWV[0, 0]):
        assert len(np.unique(drawn)) == len(drawn)


def test_bug_b10_uniform_numbers_exclude_both_ends() -> None:
    """Of all that random bits can be: noise is finite, and no coin is 0 or 1."""
    ends = np.asarray(_uniform(jnp.array([0, 2**9 - 1, 2**9, 2**32 - 1], jnp.uint32)))
    assert 0 < ends[0] == ends[1] < ends[2] < ends[3] < 1
    assert np.isfinite(-np.log(-np.log(ends))).all()


def test_noise_is_gumbel_and_finite() -> None:
    """Mean 0.5772, variance pi^2 / 6; 200,000 draws put the mean within 5 sigma = 0.0143."""
    drawn = np.asarray(
        noise(jnp.array([[7, 7]], jnp.uint32), np.arange(16_667, dtype=np.int32)[None, :], Stream.TARGET, IDS)
    )
    assert np.isfinite(drawn).all()
    assert abs(drawn.mean() - np.euler_gamma) < 0.0143
    assert abs(drawn.var() - np.pi**2 / 6) < 0.05


def test_greedy_batches_draw_no_noise() -> None:
    row = sampling_rows(SamplingParams(temperature=0.0))
    assert not jnp.any(target_noise(row, jnp.zeros((1, 2), jnp.int32), VOCAB))


# ---- laws


def counts(params: SamplingParams, logits_V: np.ndarray, num_draws: int, seed: int) -> np.ndarray:
    """How often each token is drawn at `num_draws` positions of one request."""
    row = sampling_rows(params, seeds=(seed,))
    positions = jnp.arange(num_draws, dtype=jnp.int32)[None, :]
    logits = jnp.broadcast_to(jnp.asarray(logits_V), (1, num_draws, len(logits_V)))
    tokens = chosen(logits, target_noise(row, positions, len(logits_V)), row)
    return np.bincount(np.asarray(tokens).ravel(), minlength=len(logits_V))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.5),
        SamplingParams(top_k=4),
        SamplingParams(top_p=0.7),
        SamplingParams(min_p=0.3),
    ],
    ids=["T=1", "T=0.5", "top-k", "top-p", "min-p"],
)
def test_tokens_follow_the_filtered_softmax(params: SamplingParams) -> None:
    """Chi-square over 200,000 draws; df + 10 sqrt(2 df) is passed by chance once in 10^20."""
    logits_V = np.linspace(-1.5, 1.5, 16).astype(np.float32)
    num_draws = 200_000
    observed = counts(params, logits_V, num_draws, seed=9)
    law = np.exp(log_softmax(filtered_logits(logits_V, params)))
    assert observed[law == 0].sum() == 0
    kept = law > 0
    chi_square = ((observed[kept] - num_draws * law[kept]) ** 2 / (num_draws * law[kept])).sum()
    df = kept.sum() - 1
    assert chi_square < df + 10 * np.sqrt(2 * df)


def test_coupled_draws_agree_as_often_as_the_theorem_says() -> None:
    """P(equal) >= (1 - TV) / (1 + TV), and more often than the draft's argmax is drawn; 5 sigma = 0.008."""
    target_V = np.linspace(0, 2.5, 16).astype(np.float32)
    draft_V = target_V[::-1] * 0.3 + target_V
    num_draws = 100_000
    row = sampling_rows(SamplingParams())
    positions = jnp.arange(num_draws, dtype=jnp.int32)[None, :]
    shared = target_noise(row, positions, 16)

    def draws(logits_V: np.ndarray) -> np.ndarray:
        return np.asarray(chosen(jnp.broadcast_to(jnp.asarray(logits_V), (1, num_draws, 16)), shared, row))

    target, draft = draws(target_V), draws(draft_V)
    p, q = np.exp(log_softmax(target_V)), np.exp(log_softmax(draft_V))
    variation = np.abs(p - q).sum() / 2
    agreement = (target == draft).mean()
    assert agreement > (1 - variation) / (1 + variation) - 0.008
    assert agreement > p[int(np.argmax(draft_V))] + 0.2


# ---- log-probabilities


def test_logprobs_are_raw_and_ranked() -> None:
    """Before temperature and filters; a list longer than the vocabulary is filled with -inf."""
    logits = np.asarray(jax.random.normal(jax.random.key(3), (2, 2, 5))) * 3
    tokens = jnp.array([[0, 1], [2, 4]], jnp.int32)
    row = sampling_rows(SamplingParams(temperature=0.3, top_k=1, logprobs=2), SamplingParams())
    listed = token_logprobs(jnp.asarray(logits), tokens, row, 7)
    assert listed is not None
    for b in range(2):
        for w in range(2):
            expected = log_softmax(logits[b, w])
            token = int(tokens[b, w])
            assert float(listed.chosen_BE[b, w]) == pytest.approx(expected[token], abs=1e-5)
            assert int(listed.rank_BE[b, w]) == 1 + (expected > expected[token]).sum()
            assert listed.top_ids_BEQ[b, w, :5].tolist() == np.argsort(-expected).tolist()
            assert np.isneginf(listed.top_BEQ[b, w, 5:]).all()


def test_nobody_asking_costs_no_logprobs() -> None:
    listed = token_logprobs(jnp.ones((1, 1, 5)), jnp.zeros((1, 1), jnp.int32), sampling_rows(SamplingParams()), 3)
    assert listed is not None
    assert not jnp.any(listed.chosen_BE)
    assert not jnp.any(listed.rank_BE)
