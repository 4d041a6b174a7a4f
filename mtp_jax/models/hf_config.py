"""Reading a Hugging Face `config.json`: typed fields, and a refusal for each field that would change the computation.

A field is read (by a family), known to be harmless, or refused where its value is not neutral. A field nobody has heard
of is refused only if its name speaks of the computation ("attention", "rope", "expert", ...): metadata may be anything.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

from mtp_jax.core.errors import ConfigError

LARGEST_INTEGER = 2**31 - 1
NUM_MTP_LAYERS_NAMES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")

# fmt: off
_HARMLESS = frozenset({
    "_name_or_path", "architectures", "attention_dropout", "auto_map", "aux_loss_alpha", "bos_token_id", "dtype",
    "ep_size", "head_dim", "num_key_value_heads", "output_router_logits", "pad_token_id", "pretraining_tp",
    "qk_head_dim", "router_aux_loss_coef", "seq_aux", "torch_dtype", "transformers_version", "use_cache",
    "model_type", "output_attentions", "output_hidden_states", "attn_implementation", "_attn_implementation",
    "_attn_implementation_internal", "experts_implementation", "_experts_implementation",
    "_experts_implementation_internal",
})
# fmt: on
_NEUTRAL = (None, False, [], {}, "")
_SPEAKS_OF_COMPUTATION = re.compile(
    r"attn|attention|rope|rotary|yarn|position|window|chunk|expert|moe|rout|topk|top_k|gate|scor|group|norm|bias|act$|"
    r"activation|scal|multiplier|softcap|cap$|quant|lora|layer|head|kv_|linear|conv|mamba|ssm|index|sparse|sink|"
    r"temperature|mtp|nextn|residual|hyper|embed",
    re.IGNORECASE,
)
_ALLOWED: Mapping[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "scoring_func": ("sigmoid", "softmax"),
    "topk_method": ("noaux_tc",),
    "is_decoder": (True, False),
    "is_encoder_decoder": (False,),
    "add_cross_attention": (False,),
    "mtp_hidden_states_first": (False,),
}


class HfConfig:
    """The fields of one `config.json`. Every read is remembered; `refuse_unknown` then looks at what is left."""

    def __init__(self, fields: Mapping[str, Any]):
        self._fields = fields
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """The field as it is; `default` where it is absent or null."""
        self._read.add(name)
        value = self._fields.get(name)
        return default if value is None else value

    def ignore(self, *names: str) -> None:
        """Fields that mean nothing in this config."""
        self._read.update(names)

    def integer(self, name: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number that an int32 holds, as positions and token ids are."""
        value = self.get(name, default)
        if value is None:
            raise ConfigError(f"config field {name!r} is missing; it must be a whole number of at least {at_least}.")
        if isinstance(value, bool) or not isinstance(value, int) or value < at_least:
            raise ConfigError(f"config field {name!r} is {value!r}; it must be a whole number of at least {at_least}.")
        if value > LARGEST_INTEGER:
            raise ConfigError(f"config field {name!r} is {value}; it must be at most {LARGEST_INTEGER}.")
        return value

    def positive(self, name: str, default: float) -> float:
        """A number above zero."""
        return positive_number(self.get(name, default), f"config field {name!r}")

    def flag(self, name: str, default: bool) -> bool:
        """True or false."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"config field {name!r} is {value!r}; it must be true or false.")
        return value

    def choice(self, name: str, default: str) -> str:
        """One of the values this project has for the field."""
        value = self.get(name, default)
        if value not in _ALLOWED[name]:
            raise ConfigError(f"config field {name!r} is {value!r}; allowed: {_listed(_ALLOWED[name])}.")
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """None, one id, or a list of ids, each below `vocab_size`."""
        value = self.get(name, [])
        ids = tuple(value) if isinstance(value, list | tuple) else (value,)
        if not all(isinstance(token, int) and not isinstance(token, bool) and token >= 0 for token in ids):
            raise ConfigError(f"config field {name!r} is {value!r}; it must be a token id or a list of token ids.")
        if max(ids, default=0) >= vocab_size:
            raise ConfigError(
                f"config field {name!r} is {value!r}; with {vocab_size=} ids go from 0 to {vocab_size - 1}."
            )
        return ids

    def refuse_unknown(self) -> None:
        """`ConfigError` for a field that nobody read, is not neutral, and changes the computation."""
        for name, value in self._fields.items():
            if name in self._read or name in _HARMLESS or value in _NEUTRAL:
                continue
            if name == "layer_types" and isinstance(value, list) and all(kind == "full_attention" for kind in value):
                continue
            if name in _ALLOWED:
                self.choice(name, "")
            elif _SPEAKS_OF_COMPUTATION.search(name):
                raise ConfigError(
                    f"config field {name!r} is {_shortened(value)}, which this family does not have; "
                    "allowed: leave it out, null or false."
                )


def positive_number(value: Any, what: str) -> float:
    """`value` as a float above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise ConfigError(f"{what} is {value!r}; it must be a number above zero.")
    return float(value)


def _listed(values: Collection[Any]) -> str:
    return ", ".join(repr(value) for value in values)


def _shortened(value: Any, length: int = 60) -> str:
    text = repr(value)
    return text if len(text) <= length else text[:length] + "..."
