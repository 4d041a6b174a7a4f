"""Full-size layouts against their configs, from the names of their tensors alone; and what a check finds wrong."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mtp_jax.checkpoints.check import check_model
from mtp_jax.checkpoints.errors import CheckpointError
from mtp_jax.cli.main import main
from tests.checkpoints.support import golden_tensors, write_index, write_model, write_sharded

DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "qk_nope_head_dim": 128,
    "topk_method": "noaux_tc",
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "moe_layer_freq": 1,
    "first_k_dense_replace": 3,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "hidden_act": "silu",
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "attention_bias": False,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}
GLM_4_5_AIR: dict[str, Any] = {
    "model_type": "glm4_moe",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "n_shared_experts": 1,
    "n_routed_experts": 128,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 1,
    "norm_topk_prob": True,
    "use_qk_norm": False,
    "attention_bias": True,
    "hidden_act": "silu",
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "eos_token_id": [151329, 151336, 151338],
    "torch_dtype": "bfloat16",
}
GATED = ("gate_proj", "up_proj", "down_proj")


def deepseek_v3_names() -> Iterator[str]:
    """The released index: bfloat16 embedding, head, norms, router and `eh_proj`; everything else with scales."""
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for layer in range(62):
        folder = f"model.layers.{layer}"
        yield f"{folder}.input_layernorm.weight"
        yield f"{folder}.post_attention_layernorm.weight"
        yield f"{folder}.self_attn.q_a_layernorm.weight"
        yield f"{folder}.self_attn.kv_a_layernorm.weight"
        scaled = [f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")]
        if layer < 3:
            scaled += [f"mlp.{name}" for name in GATED]
        else:
            yield f"{folder}.mlp.gate.weight"
            yield f"{folder}.mlp.gate.e_score_correction_bias"
            scaled += [f"mlp.shared_experts.{name}" for name in GATED]
            scaled += [f"mlp.experts.{expert}.{name}" for expert in range(256) for name in GATED]
        for name in scaled:
            yield f"{folder}.{name}.weight"
            yield f"{folder}.{name}.weight_scale_inv"
    for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"):
        yield f"model.layers.61.{name}.weight"


def glm_4_5_air_names() -> Iterator[str]:
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    for layer in range(47):
        folder = f"model.layers.{layer}"
        yield f"{folder}.input_layernorm.weight"
        yield f"{folder}.post_attention_layernorm.weight"
        for name in ("q_proj", "k_proj", "v_proj"):
            yield f"{folder}.self_attn.{name}.weight"
            yield f"{folder}.self_attn.{name}.bias"
        yield f"{folder}.self_attn.o_proj.weight"
        if layer < 1:
            yield from (f"{folder}.mlp.{name}.weight" for name in GATED)
        else:
            yield f"{folder}.mlp.gate.weight"
            yield f"{folder}.mlp.gate.e_score_correction_bias"
            yield from (f"{folder}.mlp.shared_experts.{name}.weight" for name in GATED)
            yield from (f"{folder}.mlp.experts.{expert}.{name}.weight" for expert in range(128) for name in GATED)
    for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"):
        yield f"model.layers.46.{name}.weight"


def write_names(folder: Path, config: dict[str, Any], names: list[str]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_index(folder, dict.fromkeys(names, "model-00001-of-00163.safetensors"))
    return folder


def test_deepseek_v3_of_671_g_parameters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_names(tmp_path / "v3", DEEPSEEK_V3, list(deepseek_v3_names()))
    assert main(["convert", str(folder), "--check"]) == 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (last["checked"], last["family"], last["num_mtp_layers"]) == ("names", "deepseek_v3", 1)
    assert round((last["num_parameters"] - last["num_mtp_parameters"]) / 1e9) == 671
    attention = 1536 * 7168 + 24576 * 1536 + 576 * 7168 + 32768 * 512 + 7168 * 16384 + 1536 + 512
    experts = 257 * 3 * 7168 * 2048 + 256 * 7168 + 256
    join_and_norms = 7168 * 14336 + 5 * 7168
    assert last["num_mtp_parameters"] == attention + experts + join_and_norms


def test_glm_4_5_air_of_106_g_parameters(tmp_path: Path) -> None:
    checked = check_model(write_names(tmp_path / "air", GLM_4_5_AIR, list(glm_4_5_air_names())))
    assert (checked.depth, checked.family.num_mtp_layers) == ("names", 1)
    assert round((checked.num_parameters - checked.num_mtp_parameters) / 1e9) == 107


def test_what_an_index_does_not_have_or_has_too_much(tmp_path: Path) -> None:
    names = list(glm_4_5_air_names())
    lost = "model.layers.45.mlp.experts.127.down_proj.weight"
    with pytest.raises(CheckpointError, match=f"lacks tensor '{lost}', which family 'glm4_moe' needs"):
        check_model(write_names(tmp_path / "air", GLM_4_5_AIR, [name for name in names if name != lost]))
    with pytest.raises(CheckpointError, match=r"has tensor 'model\.layers\.3\.mlp\.up\.weight', which family"):
        check_model(write_names(tmp_path / "air", GLM_4_5_AIR, [*names, "model.layers.3.mlp.up.weight"]))


def test_the_files_that_are_there_are_opened_for_their_shapes(tmp_path: Path) -> None:
    assert check_model(write_model(tmp_path / "whole")).depth == "names and shapes"
    tensors = golden_tensors()
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1].copy()
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' of shape"):
        check_model(write_model(tmp_path / "short", tensors))
    weight_map = write_sharded(tmp_path / "parts", golden_tensors(), 3)
    (tmp_path / "parts" / weight_map["model.norm.weight"]).unlink()
    with pytest.raises(CheckpointError, match=r"is missing; model\.safetensors\.index\.json says"):
        check_model(tmp_path / "parts")


def test_an_orbax_folder_is_restored(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "tiny-mtp", "--check"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["checked"] == "data"


def test_checking_takes_one_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["convert", "tiny-mtp", str(tmp_path / "x"), "--check"]) == 2
    assert capsys.readouterr().err == "mtp-jax: convert --check takes one folder, and writes nothing.\n"
