"""Records what Hugging Face transformers computes for `dense_goldens.CONFIGS`. Needs torch and transformers.

Run at the top of the repository, in an environment of its own:

    python -m tests.models.record_dense_goldens

MiMo-7B is no model of transformers. Its trunk is Qwen2's; its MTP layer is put together here from Qwen2's own modules:
block(input_proj([hidden_layernorm(h), token_layernorm(embedding of the next token)])), final_layernorm, the head.
"""

from typing import Any

import numpy as np
import torch
import transformers
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from tests.models.dense_goldens import CONFIGS, EXPECTED, NUM_GREEDY, NUM_ROWS, prompt_of, tensor_of


def filled(module: nn.Module, prefix: str = "") -> nn.Module:
    """The module with `tensor_of` its checkpoint names as weights, in float64."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            parameter.copy_(torch.from_numpy(tensor_of(prefix + name, tuple(parameter.shape))))
    return module.to(torch.float64).eval()


def recorded(name: str) -> dict[str, np.ndarray]:
    fields = {key: value for key, value in CONFIGS[name].items() if key != "model_type"}
    model_type = CONFIGS[name]["model_type"]
    config = AutoConfig.for_model("qwen2" if model_type == "mimo" else model_type, **fields)
    config._attn_implementation = "eager"
    model = filled(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
    text = prompt_of(name).tolist()
    with torch.no_grad():
        logits = model(torch.tensor([text])).logits[0, -NUM_ROWS:]
        for _ in range(NUM_GREEDY):
            text.append(int(model(torch.tensor([text])).logits[0, -1].argmax()))
    out = {"logits": logits.numpy(), "greedy": np.array(text[-NUM_GREEDY:], np.int32)}
    if model_type == "mimo":
        out["mtp_logits"] = mimo_mtp(model, config, torch.tensor([text[:-1]]), torch.tensor([text[1:]]))
    return {f"{name}/{key}": value.astype(np.float32) if key != "greedy" else value for key, value in out.items()}


def mimo_mtp(model: nn.Module, config: Any, known: torch.Tensor, following: torch.Tensor) -> np.ndarray:
    size, prefix = config.hidden_size, "model.mtp_layers.0."
    parts = nn.ModuleDict(
        {
            "hidden_layernorm": Qwen2RMSNorm(size, config.rms_norm_eps),
            "token_layernorm": Qwen2RMSNorm(size, config.rms_norm_eps),
            "input_proj": nn.Linear(2 * size, size, bias=False),
            "final_layernorm": Qwen2RMSNorm(size, config.rms_norm_eps),
        }
    )
    filled(parts, prefix)
    block = filled(Qwen2DecoderLayer(config, 0), prefix)
    with torch.no_grad():
        trunk = model.model
        hidden = trunk(known).last_hidden_state
        embedded = parts["token_layernorm"](trunk.embed_tokens(following))
        x = parts["input_proj"](torch.cat([parts["hidden_layernorm"](hidden), embedded], dim=-1))
        length = known.shape[1]
        mask = torch.full((length, length), -torch.inf, dtype=torch.float64).triu(1)[None, None]
        rotation = trunk.rotary_emb(x, torch.arange(length)[None])
        x = block(x, attention_mask=mask, position_embeddings=rotation)
        x = x[0] if isinstance(x, tuple) else x
        return model.lm_head(parts["final_layernorm"](x))[0, -NUM_ROWS:].numpy()


def main() -> None:
    arrays = {key: value for name in CONFIGS for key, value in recorded(name).items()}
    arrays["made_with"] = np.array(f"transformers {transformers.__version__}, torch {torch.__version__}, float64")
    np.savez_compressed(EXPECTED, **arrays)
    print(EXPECTED, EXPECTED.stat().st_size, "bytes,", arrays["made_with"])


if __name__ == "__main__":
    main()
