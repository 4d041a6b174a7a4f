"""What we write, read by Hugging Face transformers: the same greedy tokens, and its own MTP decoding with our layers.

Needs torch and transformers 5, which are no dependencies: skipped where they are not.
"""

import warnings
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mtp_jax.checkpoints import load_model, write_hf
from mtp_jax.models.api import ModelFamily, Weights
from mtp_jax.models.registry import family_from_config
from mtp_jax.train.attention import DenseAttend
from tests.checkpoints.support import GOLDENS, golden_config
from tests.models.dense_goldens import CONFIGS, prompt_of, tensor_of
from tests.models.support import pack_weights

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of packages that are not ours
    torch = pytest.importorskip("torch", reason="torch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    MtpModel = pytest.importorskip("transformers.modeling_layers").MtpModel

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("ignore")]
NUM_GREEDY = 16
GOLDEN_NAMES = ("deepseek_v3_tiny", "glm4_moe_tiny")


def written(name: str, folder: Path) -> Path:
    """A model in memory, written by us: a golden's weights, or a dense model's."""
    if name in GOLDEN_NAMES:
        loaded, config = load_model(GOLDENS / name), golden_config(name)
        family, weights = loaded.family, loaded.weights
    else:
        config = {**CONFIGS[name], "architectures": ["LlamaForCausalLM"]}
        family = family_from_config(config)
        weights = pack_weights(
            family.tensors(),
            {
                source: tensor_of(source, shape)
                for spec in family.tensors()
                for source, shape in zip(spec.sources, spec.source_shapes, strict=True)
            },
        )
    write_hf(family, weights, config, folder)
    return folder


def ours(family: ModelFamily, weights: Weights, prompt: list[int]) -> list[int]:
    """Greedy tokens, each from a pass over the whole text in float32, padded so that one program does."""
    length = len(prompt) + NUM_GREEDY
    positions = jnp.arange(length)[None, :]

    @jax.jit
    def logits(tokens_BW: Any) -> Any:
        no_kv = (None,) * len(family.kv_specs())
        return family.unembed(weights, family.forward(weights, tokens_BW, positions, no_kv, DenseAttend())[0])

    text = np.zeros((1, length), np.int32)
    text[0, : len(prompt)] = prompt
    for at in range(len(prompt), length):
        text[0, at] = int(np.argmax(logits(jnp.asarray(text))[0, at - 1]))
    return text[0, len(prompt) :].tolist()


def first_draft(family: ModelFamily, weights: Weights, text: list[int]) -> int:
    """Our MTP layer's token after `text`, whose last token is the target's own."""
    tokens_BX = jnp.asarray([text])
    positions = jnp.arange(len(text) - 1)[None, :]
    no_kv = (None,) * len(family.kv_specs())
    hidden, _ = family.forward(weights, tokens_BX[:, :-1], positions, no_kv, DenseAttend())
    head, _, _ = family.draft_forward(weights, 0, tokens_BX[:, 1:], hidden, positions, None, DenseAttend())
    return int(np.argmax(family.draft_unembed(weights, 0, head)[0, -1]))


def read_by_theirs(folder: Path) -> Any:
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def theirs(model: Any, prompt: list[int], **options: Any) -> list[int]:
    text = torch.tensor([prompt])
    mask = torch.ones_like(text)
    with torch.no_grad():
        out = model.generate(text, attention_mask=mask, do_sample=False, max_new_tokens=NUM_GREEDY, **options)
    return out[0, len(prompt) :].tolist()


def prompt_for(name: str) -> list[int]:
    return prompt_of(name).tolist() if name in CONFIGS else [5, 17, 200, 31, 4, 99, 301, 12]


@pytest.mark.parametrize("name", [*GOLDEN_NAMES, "llama", "smollm2"])
def test_transformers_reads_what_we_write_and_writes_the_same_tokens(name: str, tmp_path: Path) -> None:
    folder = written(name, tmp_path / "model")
    loaded = load_model(folder, dtype="float32")
    prompt = prompt_for(name)
    assert theirs(read_by_theirs(folder), prompt) == ours(loaded.family, loaded.weights, prompt)


@pytest.mark.parametrize("name", GOLDEN_NAMES)
def test_its_mtp_decoding_drafts_with_the_layers_that_we_write(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = written(name, tmp_path / "model")
    prompt, num_layers = prompt_for(name), golden_config(name)["num_hidden_layers"]
    model = read_by_theirs(folder)
    # It knows the MTP layers of a family by their number in the released models, which this small one does not have.
    monkeypatch.setattr(model, "_keys_to_ignore_on_load_unexpected", [rf"model\.layers\.{num_layers}\."])
    drafted: list[list[int]] = []
    forward = MtpModel.forward

    def watched(self: Any, *arguments: Any, **options: Any) -> Any:
        out = forward(self, *arguments, **options)
        drafted.append(out[0][0].tolist())
        return out

    monkeypatch.setattr(MtpModel, "forward", watched)
    tokens = theirs(model, prompt, use_mtp=True)
    assert tokens == theirs(model, prompt)
    loaded = load_model(folder, dtype="float32")
    assert drafted[0] == [first_draft(loaded.family, loaded.weights, [*prompt, tokens[0]])]
