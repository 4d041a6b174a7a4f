"""What a `config.json` may say: fields that are followed, fields that are refused, and the number of MTP layers."""

from typing import Any

import pytest

from mtp_jax.core.errors import ConfigError
from mtp_jax.core.types import KVSpec
from mtp_jax.models.registry import FAMILIES, family_from_config
from tests.models.shapes import config_of


def names_with_mtp_layers(*indices: int) -> list[str]:
    return ["model.embed_tokens.weight", *(f"model.layers.{index}.eh_proj.weight" for index in indices)]


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_act", "gelu"),
        ("use_sliding_window", True),
        ("layer_types", ["sliding_attention", "full_attention", "full_attention"]),
        ("quantization_config", {"quant_method": "fp8"}),
        ("index_topk", 2048),
        ("attn_logit_softcapping", 50.0),
        ("attention_chunk_size", 8192),
        ("scoring_func", "tanh"),
        ("topk_method", "greedy"),
        ("mtp_hidden_states_first", True),
        ("rope_scaling", {"type": "dynamic", "factor": 2.0}),
        ("rope_scaling", {"rope_type": "llama3", "factor": 8.0}),
        ("rope_scaling", {"type": "linear", "factor": 2.0, "new_field": 3}),
        ("rope_scaling", {"type": "linear"}),
        ("rope_scaling", "yarn"),
        ("rope_theta", -1.0),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "rope_theta": 1.0}),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "beta_fast": 1.0, "beta_slow": 32.0}),
        ("rope_scaling", {"type": "yarn", "factor": 2.0, "beta_fast": 0.5}),
        ("max_position_embeddings", 1),
        ("max_position_embeddings", True),
        ("vocab_size", 2**40),
        ("hidden_size", 2**31),
        ("eos_token_id", 48),
        ("eos_token_id", [1, 1000]),
        ("eos_token_id", [True]),
        ("num_hidden_layers", 0),
        ("num_hidden_layers", "three"),
        ("vocab_size", None),
        ("norm_topk_prob", "yes"),
        ("n_group", 3),
        ("eos_token_id", "</s>"),
        ("partial_rotary_factor", 0.4),
        ("moe_layer_freq", [0, 1, 1]),
        ("mlp_bias", True),
        ("num_nextn_predict_layers", -1),
    ],
)
def test_a_field_that_changes_the_computation_is_refused_by_name(model_type: str, field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refused:
        family_from_config(config_of(model_type, **{field: value}))
    sentence = str(refused.value)
    names = [*value, "rope_type", "factor"] if isinstance(value, dict) else [field]
    assert any(name in sentence for name in names)
    assert sentence.endswith(".")
    assert "\n" not in sentence


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transformers_version", "5.0"),
        ("license", "mit"),
        ("attention_dropout", 0.0),
        ("sliding_window", None),
        ("use_sliding_window", False),
        ("quantization_config", None),
        ("aux_loss_alpha", 0.001),
        ("ep_size", 1),
        ("hidden_act", "silu"),
        ("rope_scaling", None),
        ("layer_types", ["full_attention"] * 3),
        ("auto_map", {"AutoModel": "modeling.Model"}),
    ],
)
def test_harmless_fields_pass(model_type: str, field: str, value: Any) -> None:
    assert family_from_config(config_of(model_type, **{field: value})) == family_from_config(config_of(model_type))


def test_an_unknown_model_type_names_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match="'model_type' is 'gpt2'; allowed: 'deepseek_v3', 'glm4_moe', 'llama'"):
        family_from_config({"model_type": "gpt2"})
    with pytest.raises(ConfigError, match="'model_type' is None"):
        family_from_config({})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"num_key_value_heads.* 3.*num_attention_heads=4"):
        family_from_config(config_of("glm4_moe", num_key_value_heads=3))


def test_two_contradicting_rope_layouts_are_refused() -> None:
    config = config_of("deepseek_v3", "linear", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    with pytest.raises(ConfigError, match=r"rope_parameters.*rope_scaling"):
        family_from_config(config)


@pytest.mark.parametrize("model_type", FAMILIES)
@pytest.mark.parametrize(
    ("field", "above", "among"),
    [
        ("partial_rotary_factor", 1.0, 0.5),
        ("rope_theta", 10000.0, 500.0),
        ("original_max_position_embeddings", 32, 64),
    ],
)
def test_a_rope_field_stated_twice_must_be_the_same(model_type: str, field: str, above: float, among: float) -> None:
    scaling = {"rope_type": "yarn", "factor": 2.0}
    with pytest.raises(ConfigError, match=f"'{field}' is {above}, and {among} among the rope fields"):
        family_from_config(config_of(model_type, rope_parameters={**scaling, field: among}, **{field: above}))
    above = above if field != "partial_rotary_factor" or model_type == "deepseek_v3" else 0.5
    once = config_of(model_type, rope_parameters={**scaling, field: above}, **{field: None})
    twice = config_of(model_type, rope_parameters={**scaling, field: above}, **{field: above})
    assert family_from_config(once) == family_from_config(twice)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_old_and_new_rope_layouts_mean_the_same(model_type: str) -> None:
    fraction = config_of(model_type).get("partial_rotary_factor")
    scaling = {"factor": 3.0, "original_max_position_embeddings": 32}
    old = config_of(model_type, rope_theta=500.0, rope_scaling={"type": "yarn", **scaling})
    new = config_of(
        model_type,
        rope_theta=None,
        partial_rotary_factor=None,
        rope_parameters={"rope_type": "yarn", "rope_theta": 500.0, "partial_rotary_factor": fraction, **scaling},
    )
    assert family_from_config(old) == family_from_config(new)


@pytest.mark.parametrize("name", ["num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers"])
def test_the_number_of_mtp_layers_has_three_names(name: str) -> None:
    config = config_of("deepseek_v3", **({"num_nextn_predict_layers": None} | {name: 2}))
    assert family_from_config(config).num_mtp_layers == 2
    assert family_from_config(config, names_with_mtp_layers(3, 4)).num_mtp_layers == 2


@pytest.mark.parametrize("count", [0, 1, 2, 3])
def test_mtp_layers_are_counted_in_the_checkpoint(count: int) -> None:
    config = config_of("glm4_moe", num_nextn_predict_layers=None)
    assert family_from_config(config, names_with_mtp_layers(*range(3, 3 + count))).num_mtp_layers == count


def test_without_field_and_checkpoint_there_are_no_mtp_layers() -> None:
    assert family_from_config(config_of("deepseek_v3", num_nextn_predict_layers=None)).num_mtp_layers == 0


def test_a_config_without_checkpoint_is_trusted() -> None:
    assert family_from_config(config_of("deepseek_v3"), None).num_mtp_layers == 1


def test_config_and_checkpoint_that_disagree_are_both_shown() -> None:
    with pytest.raises(ConfigError, match=r"num_nextn_predict_layers' is 1 but the checkpoint has 2"):
        family_from_config(config_of("deepseek_v3"), names_with_mtp_layers(3, 4))
    with pytest.raises(ConfigError, match="num_nextn_predict_layers=1 and num_mtp_layers=2"):
        family_from_config(config_of("deepseek_v3", num_mtp_layers=2))
    with pytest.raises(ConfigError, match=r"\[4\].*from 3 on"):
        family_from_config(config_of("deepseek_v3"), names_with_mtp_layers(4))


def test_the_checkpoint_says_whether_an_mtp_layer_has_experts() -> None:
    config = config_of("deepseek_v3", first_k_dense_replace=9)
    dense = family_from_config(config, names_with_mtp_layers(3))
    with_experts = family_from_config(config, [*names_with_mtp_layers(3), "model.layers.3.mlp.gate.weight"])

    def mtp_tensors(family: Any) -> set[str]:
        return {name for tensor in family.tensors() for name in tensor.sources if name.startswith("model.layers.3.mlp")}

    assert "model.layers.3.mlp.down_proj.weight" in mtp_tensors(dense)
    assert "model.layers.3.mlp.experts.7.down_proj.weight" in mtp_tensors(with_experts)


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "llama"])
def test_a_window_is_refused_where_the_family_knows_none(model_type: str) -> None:
    with pytest.raises(ConfigError, match="'sliding_window' is 4096"):
        family_from_config(config_of(model_type, sliding_window=4096))


@pytest.mark.parametrize("model_type", ["mimo", "qwen2", "qwen3"])
def test_a_window_that_no_layer_uses_means_nothing(model_type: str) -> None:
    plain = family_from_config(config_of(model_type))
    assert family_from_config(config_of(model_type, sliding_window=4096)) == plain
    assert family_from_config(config_of(model_type, use_sliding_window=True, max_window_layers=3)) == plain
    with pytest.raises(ConfigError, match="layers from 2 to 2 would attend a sliding window"):
        family_from_config(config_of(model_type, use_sliding_window=True, max_window_layers=2))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"low_freq_factor": 4.0}, "'high_freq_factor' is 4.0 and 'low_freq_factor' is 4.0"),
        ({"low_freq_factor": None}, "'low_freq_factor' is None"),
        ({"factor": 0}, "'factor' is 0"),
        ({"beta_fast": 3}, "'beta_fast' is 3, which rope type 'llama3' does not have"),
    ],
)
def test_llama3_scaling_that_makes_no_sense_is_refused(changes: dict[str, Any], sentence: str) -> None:
    scaling = config_of("llama", "llama3")["rope_scaling"] | changes
    with pytest.raises(ConfigError, match=sentence):
        family_from_config(config_of("llama", rope_scaling=scaling))


def test_mimo_counts_its_own_mtp_layers() -> None:
    names = ["model.mtp_layers.0.input_proj.weight", "model.layers.3.eh_proj.weight"]
    config = config_of("mimo", num_nextn_predict_layers=None)
    assert family_from_config(config, names).num_mtp_layers == 1
    assert family_from_config(config, names[1:]).num_mtp_layers == 0
    with pytest.raises(ConfigError, match=r"\[1\].*from 0 on"):
        family_from_config(config, ["model.mtp_layers.1.input_proj.weight"])


def test_kv_layouts() -> None:
    latent = family_from_config(config_of("deepseek_v3", "three_mtp"))
    assert latent.kv_specs() == (KVSpec(1, 12, None, None),) * 3
    assert latent.draft_kv_specs() == latent.kv_specs()
    grouped = family_from_config(config_of("glm4_moe", "one_kv_head"))
    assert grouped.kv_specs() == (KVSpec(1, 8, 8, "kv_heads"),) * 3


def test_facts_the_engine_asks_for() -> None:
    family = family_from_config(config_of("deepseek_v3"))
    assert (family.vocab_size, family.hidden_size, family.max_position_embeddings) == (48, 16, 128)
    assert family.eos_token_ids == (1, 2)
    assert family_from_config(config_of("deepseek_v3", eos_token_id=7)).eos_token_ids == (7,)
    assert family_from_config(config_of("deepseek_v3", eos_token_id=None)).eos_token_ids == ()
