"""The families computed plainly: numpy, float64, one token at a time where that is simplest, nothing absorbed.

Reads checkpoint tensors by their published names and the config by its published fields, and shares no code with the
package, so that agreement means something.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _rms(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return weight * x / np.sqrt((x**2).mean(-1, keepdims=True) + eps)


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1


@dataclass
class Reference:
    """`tensors` by checkpoint name. Call `hidden`, then `logits` or `draft`."""

    config: Mapping[str, Any]
    tensors: Mapping[str, np.ndarray]

    def t(self, name: str) -> np.ndarray:
        return self.tensors[name].astype(np.float64)

    @property
    def eps(self) -> float:
        return self.config.get("rms_norm_eps", 1e-5 if self.config["model_type"] == "glm4_moe" else 1e-6)

    def has_bias(self, is_output: bool) -> bool:
        """Grouped-query attention: whether q, k and v, or the output, have a bias."""
        stated = self.config.get("attention_bias", False)
        by_kind = {"glm4_moe": (stated, False), "qwen2": (True, False), "mimo": (True, False)}
        return by_kind.get(self.config["model_type"], (stated, stated))[is_output]

    def rope_fields(self) -> dict[str, Any]:
        fields = dict(self.config.get("rope_scaling") or self.config.get("rope_parameters") or {})
        fields.setdefault("rope_theta", self.config.get("rope_theta", 10000.0))
        return fields

    def rotate(self, x: np.ndarray, position: int, interleaved: bool) -> np.ndarray:
        """All channels of x, a vector."""
        fields = self.rope_fields()
        kind = fields.get("rope_type", fields.get("type", "default"))
        dim, theta = len(x), fields["rope_theta"]
        amplitude = 1.0
        if kind == "yarn":
            factor = fields["factor"]
            if fields.get("mscale") and fields.get("mscale_all_dim"):
                amplitude = _mscale(factor, fields["mscale"]) / _mscale(factor, fields["mscale_all_dim"])
            else:
                amplitude = _mscale(factor, 1)
        out = np.array(x)
        for pair in range(dim // 2):
            frequency = theta ** (-2 * pair / dim)
            if kind == "linear":
                frequency /= fields["factor"]
            if kind == "yarn":
                length = fields["original_max_position_embeddings"]
                ends = [
                    dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
                    for turns in (fields["beta_fast"], fields["beta_slow"])
                ]
                low, high = max(math.floor(ends[0]), 0), min(math.ceil(ends[1]), dim - 1)
                stretch = min(max((pair - low) / (high - low), 0), 1)
                frequency = (1 - stretch) * frequency + stretch * frequency / fields["factor"]
            if kind == "llama3":
                wavelength = 2 * math.pi / frequency
                length, low, high = (
                    fields[name] for name in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor")
                )
                if wavelength > length / low:
                    frequency /= fields["factor"]
                elif wavelength >= length / high:
                    smooth = (length / wavelength - low) / (high - low)
                    frequency = (1 - smooth) * frequency / fields["factor"] + smooth * frequency
            first, second = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + dim // 2)
            angle = position * frequency
            cos, sin = amplitude * math.cos(angle), amplitude * math.sin(angle)
            out[first] = x[first] * cos - x[second] * sin
            out[second] = x[second] * cos + x[first] * sin
        return out

    def attend(self, queries: np.ndarray, keys: np.ndarray, values: np.ndarray, scale: float) -> np.ndarray:
        """[S, H, C] each, heads already repeated; [S, H * E]."""
        out = []
        for position, query in enumerate(queries):
            scores = scale * np.einsum("hc,shc->hs", query, keys[: position + 1])
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out.append(np.einsum("hs,she->he", weights, values[: position + 1]).reshape(-1))
        return np.stack(out)

    def attention(self, x: np.ndarray, name: str) -> np.ndarray:
        return self.latent(x, name) if self.config["model_type"] == "deepseek_v3" else self.grouped(x, name)

    def project(self, x: np.ndarray, name: str, has_bias: bool) -> np.ndarray:
        out = x @ self.t(f"{name}.weight").T
        return out + self.t(f"{name}.bias") if has_bias else out

    def latent(self, x: np.ndarray, name: str) -> np.ndarray:
        config = self.config
        heads, nope, rope = config["num_attention_heads"], config["qk_nope_head_dim"], config["qk_rope_head_dim"]
        v_dim, rank, has_bias = config["v_head_dim"], config["kv_lora_rank"], config.get("attention_bias", False)
        interleaved = config.get("rope_interleave", True)
        if config["q_lora_rank"] is None:
            q = self.project(x, f"{name}.q_proj", False)
        else:
            q = self.project(x, f"{name}.q_a_proj", has_bias)
            q = self.project(_rms(q, self.t(f"{name}.q_a_layernorm.weight"), 1e-6), f"{name}.q_b_proj", False)
        q = q.reshape(len(x), heads, nope + rope)
        compressed = self.project(x, f"{name}.kv_a_proj_with_mqa", has_bias)
        latent = _rms(compressed[:, :rank], self.t(f"{name}.kv_a_layernorm.weight"), 1e-6)
        kv = (latent @ self.t(f"{name}.kv_b_proj.weight").T).reshape(len(x), heads, nope + v_dim)
        queries, keys = np.zeros_like(q), np.zeros((len(x), heads, nope + rope))
        for position in range(len(x)):
            shared = self.rotate(compressed[position, rank:], position, interleaved)
            for head in range(heads):
                rotated = self.rotate(q[position, head, nope:], position, interleaved)
                queries[position, head] = np.concatenate([q[position, head, :nope], rotated])
                keys[position, head] = np.concatenate([kv[position, head, :nope], shared])
        scale = (nope + rope) ** -0.5
        fields = self.rope_fields()
        if fields.get("mscale_all_dim"):
            scale *= _mscale(fields["factor"], fields["mscale_all_dim"]) ** 2
        return self.project(self.attend(queries, keys, kv[..., nope:], scale), f"{name}.o_proj", has_bias)

    def grouped(self, x: np.ndarray, name: str) -> np.ndarray:
        config = self.config
        heads, groups = config["num_attention_heads"], config["num_key_value_heads"]
        channels = config.get("head_dim", config["hidden_size"] // heads)
        q, k, v = (
            self.project(x, f"{name}.{part}_proj", self.has_bias(False)).reshape(len(x), -1, channels)
            for part in ("q", "k", "v")
        )
        if config.get("use_qk_norm") or config["model_type"] == "qwen3":
            q = _rms(q, self.t(f"{name}.q_norm.weight"), self.eps)
            k = _rms(k, self.t(f"{name}.k_norm.weight"), self.eps)
        default = 0.5 if config["model_type"] == "glm4_moe" else 1.0
        fraction = self.rope_fields().get("partial_rotary_factor", config.get("partial_rotary_factor", default))
        rotary = int(channels * fraction)
        for array in (q, k):
            for position in range(len(x)):
                for head in range(array.shape[1]):
                    array[position, head, :rotary] = self.rotate(array[position, head, :rotary], position, False)
        k, v = (np.repeat(array, heads // groups, axis=1) for array in (k, v))
        return self.project(self.attend(q, k, v, channels**-0.5), f"{name}.o_proj", self.has_bias(True))

    def gated(self, x: np.ndarray, name: str) -> np.ndarray:
        gate, up = (x @ self.t(f"{name}.{part}_proj.weight").T for part in ("gate", "up"))
        return (_silu(gate) * up) @ self.t(f"{name}.down_proj.weight").T

    def experts(self, x: np.ndarray, name: str) -> np.ndarray:
        config = self.config
        count, groups = config["n_routed_experts"], config["n_group"]
        logits = x @ self.t(f"{name}.gate.weight").T
        if config.get("scoring_func") == "softmax":
            scores = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
        else:
            scores = 1 / (1 + np.exp(-logits))
        default_scale = {"deepseek_v3": 2.5, "glm4_moe": 1.0}[config["model_type"]]
        out = []
        for token, score in zip(x, scores, strict=True):
            biased = score + self.t(f"{name}.gate.e_score_correction_bias")
            by_group = biased.reshape(groups, -1)
            group_score = np.sort(by_group, -1)[:, -2:].sum(-1)
            for group in np.argsort(-group_score)[config["topk_group"] :]:
                by_group[group] = -np.inf
            chosen = np.argsort(-by_group.reshape(count))[: config["num_experts_per_tok"]]
            weights = score[chosen]
            if config["norm_topk_prob"]:
                weights = weights / weights.sum()
            weights = weights * config.get("routed_scaling_factor", default_scale)
            out.append(sum(w * self.gated(token, f"{name}.experts.{e}") for w, e in zip(weights, chosen, strict=True)))
        y = np.stack(out)
        return y + self.gated(x, f"{name}.shared_experts") if config["n_shared_experts"] else y

    def layer(self, x: np.ndarray, index: int, name: str | None = None) -> np.ndarray:
        name = name or f"model.layers.{index}"
        x = x + self.attention(_rms(x, self.t(f"{name}.input_layernorm.weight"), self.eps), f"{name}.self_attn")
        normed = _rms(x, self.t(f"{name}.post_attention_layernorm.weight"), self.eps)
        has_experts = (
            self.config.get("n_routed_experts")
            and index >= self.config["first_k_dense_replace"]
            and index % self.config.get("moe_layer_freq", 1) == 0
        )
        return x + (self.experts if has_experts else self.gated)(normed, f"{name}.mlp")

    def states(self, tokens: np.ndarray) -> list[np.ndarray]:
        """What enters each layer, and what the last one gives."""
        states = [self.t("model.embed_tokens.weight")[tokens]]
        for index in range(self.config["num_hidden_layers"]):
            states.append(self.layer(states[-1], index))
        return states

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        """After the final norm."""
        return _rms(self.states(tokens)[-1], self.t("model.norm.weight"), self.eps)

    def logits(self, hidden: np.ndarray) -> np.ndarray:
        tied = self.config.get("tie_word_embeddings", False)
        return hidden @ self.t("model.embed_tokens.weight" if tied else "lm_head.weight").T

    def draft(self, depth: int, tokens: np.ndarray, hidden: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(logits, recycled hidden) of MTP layer `depth`; row i pairs hidden i with the token given for it."""
        index = self.config["num_hidden_layers"] + depth
        if self.config["model_type"] == "mimo":
            name = f"model.mtp_layers.{depth}"
            names = ("hidden_layernorm", "token_layernorm", "input_proj", "final_layernorm")
        else:
            name, names = f"model.layers.{index}", ("hnorm", "enorm", "eh_proj", "shared_head.norm")
        hidden_norm, token_norm, join, head_norm = (f"{name}.{part}.weight" for part in names)
        embedded = _rms(self.t("model.embed_tokens.weight")[tokens], self.t(token_norm), self.eps)
        normed = _rms(hidden, self.t(hidden_norm), self.eps)
        pair = [normed, embedded] if self.config["model_type"] == "mimo" else [embedded, normed]
        x = self.layer(np.concatenate(pair, -1) @ self.t(join).T, index, name)
        out = _rms(x, self.t(head_norm), self.eps)
        return self.logits(out), x if self.config["model_type"] == "glm4_moe" else out


@dataclass
class Eagle3Reference(Reference):
    """An Eagle3 drafter by the published names of its tensors; `taps` count hidden states, the embedding's being 0."""

    target: Reference
    taps: tuple[int, ...]

    def draft_logits(self, known: Sequence[int], drafts: Sequence[int]) -> np.ndarray:
        """[V] logits of the token after `known` and `drafts`, made from scratch; -inf where it has no such token.

        `known` ends in the pending token, whose hidden state nobody has yet.
        """
        tokens = np.asarray(known)
        states = self.target.states(tokens[:-1])
        rows = list(np.concatenate([states[tap] for tap in self.taps], -1) @ self.t("fc.weight").T)
        following = list(tokens[1:])
        out = self.layer_rows(np.stack(rows), np.asarray(following))
        for draft in drafts:  # each takes in what the row before it gave
            rows.append(out[-1])
            following.append(draft)
            out = self.layer_rows(np.stack(rows), np.asarray(following))
        logits = _rms(out[-1], self.t("norm.weight"), self.eps) @ self.t("lm_head.weight").T
        ids = np.arange(len(logits)) + self.tensors.get("d2t", 0)
        whole = np.full(self.config["vocab_size"], -np.inf)
        whole[ids] = logits
        return whole

    def layer_rows(self, hidden: np.ndarray, following: np.ndarray) -> np.ndarray:
        """The drafter's layer over rows of (hidden, next token) from position 0 on, before its norm."""
        owner = self if "embed_tokens.weight" in self.tensors else self.target
        embedding = owner.t("embed_tokens.weight" if owner is self else "model.embed_tokens.weight")[following]
        normed = _rms(hidden, self.t("midlayer.hidden_norm.weight"), self.eps)
        embedded = _rms(embedding, self.t("midlayer.input_layernorm.weight"), self.eps)
        attended = self.grouped(np.concatenate([embedded, normed], -1), "midlayer.self_attn")
        x = (normed if self.config.get("norm_before_residual") else hidden) + attended
        normed = _rms(x, self.t("midlayer.post_attention_layernorm.weight"), self.eps)
        return x + self.gated(normed, "midlayer.mlp")
