"""The expert products: each token through its own few experts, by the way that is fastest for the shapes at hand.

Microseconds a layer on a shared 2-core CPU, float32, jax 0.10.2 (best of 8 to 25 runs of 4 to 8 layers):

| D, F, X, k     | way                                    |   1 |    2 |    4 |     8 |   32 |   256 tokens |
| -------------- | -------------------------------------- | --- | ---- | ---- | ----- | ---- | ------------ |
| 160, 24, 8, 2  | `through_all`                          |   6 |    8 |   10 |    15 |   63 |   390        |
|                | `expert_by_expert`                     |  10 |   18 |   46 |    36 |   78 |   433        |
|                | weights gathered per (token, expert)   |  10 |   15 |   24 |    49 |    - |     -        |
| 256, 64, 8, 2  | `through_all`                          |  22 |   39 |  103 |   171 |  222 |  1185        |
|                | `expert_by_expert`                     |  18 |   33 |   51 |   166 |  224 |  1332        |
|                | weights gathered                       |  17 |   52 |  134 |   303 |    - |     -        |
|                | `grouped`                              | 147 |  146 |  184 |   202 |  478 |  3213        |
|                | sorted, padded to blocks of 32 tokens  | 200 |  226 |  250 |   249 |  337 |  1267        |
| 512, 256, 16, 2| `through_all`                          | 985 | 1102 | 1346 |  1669 | 3263 | 19734        |
|                | `expert_by_expert`                     | 198 |  414 |  754 |  1344 | 3710 | 17224        |
|                | weights gathered                       | 370 | 3154 | 6377 | 12433 |    - |     -        |

So on a CPU experts that fit its cache together go through one product, larger ones are visited one by one and idle ones
skipped. An accelerator would have to wait for each such decision: there few tokens go through every expert (each weight
is read once either way), and many are sorted for the grouped product.
"""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from kernels_pallas.grouped_matmul import grouped_matmul
from mtp_jax.models.layers import gated

MAX_BYTES_THROUGH_ALL = 1 << 20
"""On a CPU: experts of a layer up to this size stay in the cache of a core."""

MAX_TOKENS_THROUGH_ALL = 64
"""Up to here an accelerator is bound by reading weights, so the products that are thrown away cost little."""


def expert_products(
    x_TD: Float[Array, "T D"],
    ids_Tk: Int[Array, "T k"],
    weights_Tk: Float[Array, "T k"],
    gate_up_XDkF: Float[Array, "X D 2 F"],
    down_XFD: Float[Array, "X F D"],
    *,
    backend: str = "reference",
) -> Float[Array, "T D"]:
    """Weighted sum of each token's experts, in x's dtype. Ids outside 0..X-1 add nothing (experts of other shards).

    Rows do not mix: a NaN token is NaN alone. Any `backend` but the reference is a grouped matmul's name, and then the
    way for any number of tokens; `NotImplementedError`, with the limit, for weights that it cannot do.
    """
    if backend != "reference":
        multiply = partial(grouped_matmul, backend=backend)
        return grouped(x_TD, ids_Tk, weights_Tk, gate_up_XDkF, down_XFD, multiply=multiply)
    is_small = (gate_up_XDkF.size + down_XFD.size) * down_XFD.dtype.itemsize <= MAX_BYTES_THROUGH_ALL
    on_cpu = through_all if is_small else expert_by_expert
    elsewhere = through_all if x_TD.shape[0] <= MAX_TOKENS_THROUGH_ALL else grouped
    return lax.platform_dependent(x_TD, ids_Tk, weights_Tk, gate_up_XDkF, down_XFD, cpu=on_cpu, default=elsewhere)


def expert_by_expert(x_TD: Array, ids_Tk: Array, weights_Tk: Array, gate_up_XDkF: Array, down_XFD: Array) -> Array:
    """A loop over the experts that at least one token has chosen."""
    is_chosen_TX, weights_TX = _by_expert(ids_Tk, weights_Tk, down_XFD.shape[0])

    def add_expert(expert: Array, y_TD: Array) -> Array:
        is_mine_T1 = lax.dynamic_slice_in_dim(is_chosen_TX, expert, 1, axis=1)
        weight_T1 = lax.dynamic_slice_in_dim(weights_TX, expert, 1, axis=1)

        def with_expert(y_TD: Array) -> Array:
            gate_up = jnp.einsum("td,dkf->tkf", x_TD, lax.dynamic_index_in_dim(gate_up_XDkF, expert, keepdims=False))
            out_TD = jnp.einsum("tf,fd->td", gated(gate_up), lax.dynamic_index_in_dim(down_XFD, expert, keepdims=False))
            return y_TD + jnp.where(is_mine_T1, out_TD * weight_T1.astype(x_TD.dtype), 0)

        return lax.cond(jnp.any(is_mine_T1), with_expert, lambda y_TD: y_TD, y_TD)

    # Zeros made from the choice, so that under `shard_map` the loop starts with the type it ends with.
    zeros_TD = jnp.where(is_chosen_TX[:, :1], jnp.zeros_like(x_TD), 0)
    return lax.fori_loop(0, down_XFD.shape[0], add_expert, zeros_TD)


def through_all(x_TD: Array, ids_Tk: Array, weights_Tk: Array, gate_up_XDkF: Array, down_XFD: Array) -> Array:
    """Every token through every expert, in two products; what was not chosen is dropped before the second.

    The first has the experts as leading dimension, the second sums over experts and channels as one: both use the
    weights as they lie. (Left to `einsum`, either product copies its weights first.)
    """
    num_experts, hidden_size, _, ffn_size = gate_up_XDkF.shape
    is_chosen_TX, weights_TX = _by_expert(ids_Tk, weights_Tk, num_experts)
    x_XTD = jnp.broadcast_to(x_TD, (num_experts, *x_TD.shape))
    gate_up_XTE = lax.batch_matmul(x_XTD, gate_up_XDkF.reshape(num_experts, hidden_size, 2 * ffn_size))
    hidden_TXF = gated(gate_up_XTE.reshape(num_experts, -1, 2, ffn_size)).swapaxes(0, 1)
    hidden_TXF = jnp.where(is_chosen_TX[:, :, None], hidden_TXF * weights_TX[:, :, None].astype(x_TD.dtype), 0)
    return hidden_TXF.reshape(-1, num_experts * ffn_size) @ down_XFD.reshape(num_experts * ffn_size, hidden_size)


def grouped(
    x_TD: Array,
    ids_Tk: Array,
    weights_Tk: Array,
    gate_up_XDkF: Array,
    down_XFD: Array,
    *,
    multiply: Callable[[Array, Array, Array], Array] = lax.ragged_dot,
) -> Array:
    """(token, expert) pairs sorted by expert, then one ragged product each way."""
    num_experts, ffn_size, hidden_size = down_XFD.shape
    num_active = ids_Tk.shape[1]
    is_mine_P = ((ids_Tk >= 0) & (ids_Tk < num_experts)).reshape(-1)
    expert_P = jnp.where(is_mine_P, ids_Tk.reshape(-1), num_experts)
    order_P = jnp.argsort(expert_P, stable=True)
    token_P = order_P // num_active
    num_rows_X = jnp.sum(expert_P[:, None] == jnp.arange(num_experts)[None, :], axis=0, dtype=jnp.int32)
    gate_up_XDE = gate_up_XDkF.reshape(num_experts, hidden_size, 2 * ffn_size)
    gate_up = multiply(x_TD[token_P], gate_up_XDE, num_rows_X).reshape(-1, 2, ffn_size)
    out_PD = multiply(gated(gate_up), down_XFD, num_rows_X)
    out_PD = out_PD * weights_Tk.reshape(-1)[order_P][:, None].astype(x_TD.dtype)
    # Pairs of other shards come last, in no group: what stands in their rows means nothing.
    out_PD = jnp.where(is_mine_P[order_P][:, None], out_PD, 0)
    back_P = jnp.argsort(order_P)
    return jnp.sum(out_PD[back_P].reshape(-1, num_active, hidden_size), axis=1)


def _by_expert(
    ids_Tk: Int[Array, "T k"], weights_Tk: Float[Array, "T k"], num_experts: int
) -> tuple[Bool[Array, "T X"], Float[Array, "T X"]]:
    """Whether each token has chosen each expert, and with which weight."""
    is_pair_TkX = ids_Tk[:, :, None] == jnp.arange(num_experts)[None, None, :]
    weights_TX = jnp.sum(jnp.where(is_pair_TkX, weights_Tk[:, :, None], 0), axis=1)
    return jnp.any(is_pair_TkX, axis=1), weights_TX
