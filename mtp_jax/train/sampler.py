"""Thousands of texts of a model at once: one program that reads prompts and writes on until all of a batch is done.

For text to train on, not for serving. All prompts of a batch end in one column, so a step writes one column of keys,
and no host stands between two steps. `run-batch` writes the same greedy tokens; it has pages, and takes any mixture of
lengths and options.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int
from tqdm import tqdm

from mtp_jax.core.errors import ConfigError
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.train.rows import TextRows, joined, rows_of


@dataclass(frozen=True, kw_only=True)
class SamplerConfig:
    """`batch_size` texts at once, each of at most `prompt_tokens` and `max_tokens` more. `seed` is of temperatures."""

    batch_size: int = 1024
    prompt_tokens: int = 160
    max_tokens: int = 224
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low in (("batch_size", 1), ("prompt_tokens", 1), ("max_tokens", 1), ("seed", 0)):
            if getattr(self, name) < low:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be at least {low}.")

    @property
    def width(self) -> int:
        """Columns of a row."""
        return self.prompt_tokens + self.max_tokens


class Sampler:
    """Writes on from prompts with one model. The program is compiled at the first call.

    >>> rows = Sampler(family, weights, SamplerConfig()).write([[1, 2, 3]], [0.0])      # doctest: +SKIP
    """

    def __init__(self, family: ModelFamily, weights: Weights, config: SamplerConfig):
        if config.width > family.max_position_embeddings:
            raise ConfigError(
                f"prompt_tokens + max_tokens is {config.width}; this model has "
                f"max_position_embeddings={family.max_position_embeddings}."
            )
        if any(spec.v_channels is None for spec in family.kv_specs()):
            raise ConfigError("models with latent KV are sampled with run-batch.")
        self._family, self._weights, self.config = family, weights, config
        self._write = _program(family, config)

    def write(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], *, max_tokens: int | None = None
    ) -> TextRows:
        """What the model writes after each prompt until an end-of-text token, which is kept, or `max_tokens`.

        A batch has texts of like temperature, 0 being greedy; the rows come in the order of the prompts.
        """
        config, limit = self.config, self.config.max_tokens if max_tokens is None else max_tokens
        if not 1 <= limit <= config.max_tokens:
            raise ConfigError(f"max_tokens is {limit}; this sampler has room for 1 to {config.max_tokens}.")
        for prompt in prompts:
            if not 1 <= len(prompt) <= config.prompt_tokens:
                raise ConfigError(f"a prompt has {len(prompt)} tokens; allowed are 1 to {config.prompt_tokens}.")
        order = sorted(range(len(prompts)), key=lambda index: temperatures[index])
        key = jax.random.key(config.seed)
        parts: list[TextRows] = []
        for start in tqdm(range(0, len(order), config.batch_size), desc="sampling", unit="batch", disable=None):
            indices = order[start : start + config.batch_size]
            parts.append(
                self._batch(
                    [prompts[index] for index in indices],
                    [temperatures[index] for index in indices],
                    limit,
                    jax.random.fold_in(key, start),
                )
            )
        return joined(parts).at(np.argsort(order))

    def _batch(
        self, prompts: Sequence[Sequence[int]], temperatures: Sequence[float], limit: int, key: Array
    ) -> TextRows:
        size, columns = self.config.batch_size, self.config.prompt_tokens
        tokens_BP, lens_B, hot_B = np.zeros((size, columns), np.int32), np.ones(size, np.int32), np.zeros(size)
        for row, prompt in enumerate(prompts):
            tokens_BP[row, columns - len(prompt) :] = prompt
            lens_B[row], hot_B[row] = len(prompt), temperatures[row]
        live_B = np.arange(size) < len(prompts)
        written = self._write(self._weights, tokens_BP, lens_B, hot_B.astype(np.float32), live_B, np.int32(limit), key)
        answers_BN, counts_B = jax.device_get(written)
        answers = [answers_BN[row, : counts_B[row]].tolist() for row in range(len(prompts))]
        return rows_of(zip(prompts, answers, strict=True), self.config.width)


@dataclass(frozen=True)
class _ColumnAttend:
    """Keys and values of a batch by column, [B, G, S, C]; this call's rows are columns `column` and following.

    Satisfies `models.api.Attend`. A row attends the columns from its text's first one to its own.
    """

    column: Int[Array, ""]
    first_B: Int[Array, " B"]

    def __call__(
        self,
        layer_kv: tuple[Float[Array, "B G S C"], Float[Array, "B G S E"]],
        q_BWHC: Float[Array, "B W H C"],
        k_BWGC: Float[Array, "B W G C"],
        v_BWGE: Float[Array, "B W G E"] | None,
        *,
        scale: float,
        v_channels: int,
    ) -> tuple[Float[Array, "B W H E"], Any]:
        assert v_BWGE is not None
        new_kv = tuple(
            lax.dynamic_update_slice(old, jnp.swapaxes(new, 1, 2), (0, 0, self.column, 0))
            for old, new in zip(layer_kv, (k_BWGC, v_BWGE), strict=True)
        )
        batch, width, heads, channels = q_BWHC.shape
        k_BGSC, v_BGSE = new_kv
        groups = k_BGSC.shape[1]
        q_BGWMC = jnp.swapaxes(q_BWHC.reshape(batch, width, groups, heads // groups, channels), 1, 2)
        q_BGXC = (q_BGWMC * jnp.asarray(scale, q_BWHC.dtype)).reshape(batch, groups, -1, channels)
        scores = jnp.einsum("bgxc,bgsc->bgxs", q_BGXC, k_BGSC, preferred_element_type=jnp.float32)
        columns_11S = jnp.arange(k_BGSC.shape[2])[None, None]
        own_1W1 = (self.column + jnp.arange(width))[None, :, None]
        visible_BWS = (columns_11S <= own_1W1) & (columns_11S >= self.first_B[:, None, None])
        # Before its text begins a row sees itself alone, lest it divide by nothing; nobody reads what it gives.
        visible_BWS = visible_BWS | (columns_11S == own_1W1)
        scores = scores.reshape(batch, groups, width, heads // groups, -1)
        weights = jax.nn.softmax(jnp.where(visible_BWS[:, None, :, None, :], scores, -jnp.inf), axis=-1)
        weights_BGXS = weights.astype(v_BGSE.dtype).reshape(batch, groups, width * (heads // groups), -1)
        out_BGXE = jnp.einsum("bgxs,bgse->bgxe", weights_BGXS, v_BGSE, preferred_element_type=jnp.float32)
        out_BGWME = out_BGXE.reshape(batch, groups, width, heads // groups, v_channels)
        return jnp.swapaxes(out_BGWME, 1, 2).reshape(batch, width, heads, v_channels).astype(q_BWHC.dtype), new_kv


def _program(family: ModelFamily, config: SamplerConfig) -> Callable[..., tuple[Array, Array]]:
    @partial(jax.jit)
    def write(
        weights: Weights,
        tokens_BP: Int[Array, "B P"],
        lens_B: Int[Array, " B"],
        temperature_B: Float[Array, " B"],
        live_B: Bool[Array, " B"],
        limit: Int[Array, ""],
        key: Array,
    ) -> tuple[Int[Array, "B N"], Int[Array, " B"]]:
        size, prompt_columns = tokens_BP.shape
        first_B = prompt_columns - lens_B
        dtype = jax.tree.leaves(weights)[0].dtype
        kv = tuple(
            tuple(
                jnp.zeros((size, spec.num_kv_heads, config.width, channels), dtype)
                for channels in (spec.k_channels, spec.v_channels)
            )
            for spec in family.kv_specs()
        )
        ends_1E = jnp.asarray(family.eos_token_ids, jnp.int32).reshape(1, -1)

        def forward(tokens_BW: Array, column: Array, kv: Any) -> tuple[Array, Any]:
            positions_BW = column + jnp.arange(tokens_BW.shape[1])[None] - first_B[:, None]
            attend = _ColumnAttend(column, first_B)
            hidden_BWD, kv = family.forward(weights, tokens_BW, jnp.maximum(positions_BW, 0), kv, attend)
            return family.unembed(weights, hidden_BWD[:, -1]), kv

        def draw(logits_BV: Array, step: Array) -> Array:
            def heated() -> Array:
                noise_BV = jax.random.gumbel(jax.random.fold_in(key, step), logits_BV.shape, jnp.float32)
                return jnp.argmax(logits_BV + temperature_B[:, None] * noise_BV, axis=-1)

            hot = jnp.any(temperature_B > 0)
            return lax.cond(hot, heated, lambda: jnp.argmax(logits_BV, axis=-1)).astype(jnp.int32)

        def goes_on(state: tuple[Array, ...]) -> Array:
            step, live_B = state[0], state[2]
            return (step < limit) & jnp.any(live_B)

        def one_more(state: tuple[Any, ...]) -> tuple[Any, ...]:
            step, logits_BV, live_B, answers_BN, counts_B, kv = state
            token_B = draw(logits_BV, step)
            answers_BN = lax.dynamic_update_slice(answers_BN, token_B[:, None], (0, step))
            counts_B = counts_B + live_B.astype(jnp.int32)
            live_B = live_B & ~jnp.any(token_B[:, None] == ends_1E, axis=-1)
            logits_BV, kv = forward(token_B[:, None], prompt_columns + step, kv)
            return step + 1, logits_BV, live_B, answers_BN, counts_B, kv

        logits_BV, kv = forward(tokens_BP, jnp.int32(0), kv)
        nothing_BN = jnp.zeros((size, config.max_tokens), jnp.int32)
        state = (jnp.int32(0), logits_BV, live_B, nothing_BN, jnp.zeros(size, jnp.int32), kv)
        _, _, _, answers_BN, counts_B, _ = lax.while_loop(goes_on, one_more, state)
        return answers_BN, counts_B

    return write
