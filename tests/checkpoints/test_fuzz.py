"""Mutated checkpoints: each gives one clear sentence, or loads to exactly the weights that it was made from."""

import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from mtp_jax.checkpoints import load_model
from mtp_jax.core.errors import ConfigError
from tests.checkpoints.support import GOLDEN_NAMES, assert_same_bits, golden_config, golden_tensors, write_index
from tests.checkpoints.test_fp8 import write_tensors

NUM_QUICK, NUM_ALL = 40, 500
Mutation = Callable[["Case"], bool]
"""Changes the case; whether what it says stays true, so that it must load."""


class Case:
    """A checkpoint about to be written, and the dice that spoil it."""

    def __init__(self, seed: int) -> None:
        self.dice = np.random.default_rng(seed)
        self.golden = GOLDEN_NAMES[seed % len(GOLDEN_NAMES)]
        self.config = golden_config(self.golden)
        self.tensors = golden_tensors(self.golden)
        self.num_shards = int(self.dice.integers(1, 4))
        self.weight_map: dict[str, str] = {}
        self.after_writing: Callable[[Path], None] | None = None

    def name(self) -> str:
        """Any tensor's name."""
        names = sorted(self.tensors)
        return names[int(self.dice.integers(len(names)))]

    def matrix(self) -> str:
        """The name of a tensor of two dimensions."""
        names = sorted(name for name, array in self.tensors.items() if array.ndim == 2)
        return names[int(self.dice.integers(len(names)))]

    def write(self, folder: Path) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        files = [f"model-{shard:05d}.safetensors" for shard in range(self.num_shards)]
        names = sorted(self.tensors)
        if self.num_shards == 1:
            files = ["model.safetensors"]
        for shard, file in enumerate(files):
            write_tensors(folder / file, {name: self.tensors[name] for name in names[shard :: len(files)]})
        if len(files) > 1:
            in_file = {name: files[at % len(files)] for at, name in enumerate(names)}
            write_index(folder, in_file | self.weight_map)
        if self.after_writing is not None:
            self.after_writing(folder)
        return folder


def nothing(case: Case) -> bool:
    return True


def truncated(case: Case) -> bool:
    share = case.dice.random()

    def cut(folder: Path) -> None:
        file = sorted(folder.glob("*.safetensors"))[0]
        data = file.read_bytes()
        file.write_bytes(data[: int(len(data) * share)])

    case.after_writing = cut
    return False


def renamed(case: Case) -> bool:
    name = case.name()
    case.tensors[name + "s"] = case.tensors.pop(name)
    return False


def dropped(case: Case) -> bool:
    name = case.name()
    del case.tensors[name]
    return is_a_copy(name)


def is_a_copy(name: str) -> bool:
    """Embedding and head that an MTP layer repeats may be left out."""
    return ".layers." in name and name.endswith(("embed_tokens.weight", "shared_head.head.weight"))


def reshaped(case: Case) -> bool:
    name = case.matrix()
    rows, columns = case.tensors[name].shape
    case.tensors[name] = case.tensors[name].reshape(columns, rows)
    return rows == columns


def shorter(case: Case) -> bool:
    name = case.name()
    case.tensors[name] = case.tensors[name][:-1]
    return False


def integers(case: Case) -> bool:
    name = case.name()
    case.tensors[name] = case.tensors[name].view(np.int32)
    return False


def not_a_number(case: Case) -> bool:
    name = case.name()
    array = case.tensors[name].copy()
    array.reshape(-1)[int(case.dice.integers(array.size))] = np.nan
    case.tensors[name] = array
    return False


def twice(case: Case) -> bool:
    """One tensor in two files."""
    case.num_shards = 2
    names = sorted(case.tensors)

    def copy(folder: Path) -> None:
        both = [names[0], *names[1::2]]
        write_tensors(folder / "model-00001.safetensors", {name: case.tensors[name] for name in both})

    case.after_writing = copy
    return False


def wrong_map(case: Case) -> bool:
    case.num_shards = 3
    names = sorted(case.tensors)
    at = int(case.dice.integers(len(names)))
    case.weight_map = {names[at]: f"model-{(at + 1) % 3:05d}.safetensors"}
    return False


def map_of_another_folder(case: Case) -> bool:
    case.num_shards = 2
    case.weight_map = {case.name(): "../model-00000.safetensors"}
    return False


def lost_shard(case: Case) -> bool:
    case.num_shards = 2
    case.after_writing = lambda folder: (folder / "model-00001.safetensors").unlink()
    return False


def config_lies(case: Case) -> bool:
    """Every one of these fields decides a shape, or how many layers there are."""
    fields = [
        name
        for name in (
            "hidden_size",
            "vocab_size",
            "num_hidden_layers",
            "intermediate_size",
            "moe_intermediate_size",
            "n_routed_experts",
            "kv_lora_rank",
            "num_nextn_predict_layers",
        )
        if case.config.get(name)
    ]
    field = fields[int(case.dice.integers(len(fields)))]
    case.config[field] += int(case.dice.choice([-1, 1]))
    return False


def config_of_odd_types(case: Case) -> bool:
    fields = ["hidden_size", "num_hidden_layers", "vocab_size", "num_attention_heads"]
    odd = [None, "7", [], {}, 1.5, True]
    case.config[fields[int(case.dice.integers(len(fields)))]] = odd[int(case.dice.integers(len(odd)))]
    return False


def damaged_header(case: Case) -> bool:
    def damage(folder: Path) -> None:
        file = sorted(folder.glob("*.safetensors"))[0]
        data = bytearray(file.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        data[8 + int(case.dice.integers(length))] = 0
        file.write_bytes(data)

    case.after_writing = damage
    return False


MUTATIONS: tuple[Mutation, ...] = (
    nothing,
    truncated,
    renamed,
    dropped,
    reshaped,
    shorter,
    integers,
    not_a_number,
    twice,
    wrong_map,
    map_of_another_folder,
    lost_shard,
    config_lies,
    config_of_odd_types,
    damaged_header,
)


def check(seed: int, folder: Path) -> None:
    case = Case(seed)
    mutation = MUTATIONS[seed % len(MUTATIONS)]
    must_load = mutation(case)
    case.write(folder)
    try:
        loaded = load_model(folder)
    except ConfigError as error:
        sentence = str(error)
        assert not must_load, f"{mutation.__name__}: {sentence}"
        assert "\n" not in sentence, sentence
        assert sentence.endswith("."), sentence
        return
    original = load_model(Path(__file__).parents[1] / "goldens" / case.golden)
    assert loaded.family == original.family, mutation.__name__
    assert_same_bits(loaded.weights, original.weights)


@pytest.mark.parametrize("first", range(0, NUM_QUICK, 10))
def test_a_mutated_checkpoint_is_refused_or_loads_right(first: int, tmp_path: Path) -> None:
    for seed in range(first, first + 10):
        check(seed, tmp_path / str(seed))


@pytest.mark.long
def test_five_hundred_mutated_checkpoints(tmp_path: Path) -> None:
    for seed in range(NUM_ALL):
        check(seed, tmp_path / str(seed))


def test_a_silently_wrong_load_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One bit of one weight: no reader can know, and the comparison does."""

    def flipped(case: Case) -> bool:
        name = case.matrix()
        case.tensors[name] = case.tensors[name].copy()
        case.tensors[name].view(np.uint32)[0, 0] ^= 1
        return False

    monkeypatch.setitem(globals(), "MUTATIONS", (flipped,))
    with pytest.raises(AssertionError):
        check(0, tmp_path / "flipped")
