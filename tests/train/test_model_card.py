"""The card says what the run's files say."""

from mtp_jax.train.model_card import model_card
from mtp_jax.train.tiny_mtp import CONFIG

HEADS = {
    "conditional": [0.71, 0.6],
    "mean_acceptance_length": 2.14,
    "control": [0.03],
    "chance": [0.031],
    "target_loss": 2.5,
    "mtp_loss": [2.9],
}
PHASE = {"mode": "joint", "steps": 7, "batch_size": 2, "window": 4, "peak_rate": 3e-3, "tokens": 56, "seconds": 1.0}
REPORT = {
    "parameters": 5_200_000,
    "heldout": {"prose": HEADS},
    "phases": {"one": PHASE | {"objective": {"depths": 1}}, "two": PHASE | {"steps": 9, "objective": {"depths": 3}}},
    "tokens_seen": 112e6,
    "seconds": 300.0,
    "device": "an accelerator",
    "versions": {"jax": "0"},
}
SOURCE = {
    "name": "speeches",
    "version": "1.2",
    "registry": "pypi",
    "licence": "MIT",
    "kind": "prose",
    "train_tokens": 3e6,
}
CORPUS = {
    "files": {"train": {"documents": 1234}},
    "sources": [SOURCE, SOURCE | {"name": "library", "kind": "code", "train_tokens": 1e6}],
}


def test_the_card_carries_figures_licences_and_the_commands():
    card = model_card(CONFIG, REPORT, CORPUS)
    for piece in (
        "5.2 million parameters",
        "| prose | 2.500 | 2.900 | 0.710 | 0.600 | 2.14 | 0.030 (0.031) |",
        "--steps 7 9",
        "| speeches 1.2 | pypi | MIT | 3.00 M |",
        "- MIT: library 1.2.",
        "25% of them Python code",
        f"{CONFIG['num_hidden_layers']} layers",
    ):
        assert piece in card
