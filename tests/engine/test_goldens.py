"""The whole engine against the golden checkpoints: plain tokens, drafts of every step, recursive drafts."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import jax
import numpy as np
import pytest

from mtp_jax.checkpoints import load_model
from mtp_jax.core.config import PLAIN, CacheConfig, EngineConfig, SamplingParams, SpeculativeConfig
from mtp_jax.engine.engine import Engine
from mtp_jax.engine.requests import Request, RequestState

GOLDENS = Path(__file__).parents[1] / "goldens"
NUM_TOKENS = 40


@contextmanager
def compilations() -> Iterator[list[float]]:
    """Collects the seconds of every backend compilation that happens inside."""
    seconds: list[float] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seconds.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield seconds
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def run(folder: Path, speculative: SpeculativeConfig, prompts: list[tuple[int, ...]]) -> list[RequestState]:
    loaded = load_model(folder, dtype="float32")
    config = EngineConfig(
        max_model_len=96, max_num_seqs=1, prefill_chunk=16, cache=CacheConfig(page_size=4), speculative=speculative
    )
    engine = Engine(loaded.family, loaded.weights, config)
    states: dict[str, RequestState] = {}
    with compilations() as compiled:
        for index, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
            engine.submit(Request(str(index), prompt, params, seed=index, wants_trace=True))
        for progress in engine.run():
            states[progress.request_id] = progress.state
    assert compiled == []
    assert engine.launcher.num_traces == len(engine.grid.all_steps()) + len(engine.grid.all_prefills())
    return [states[str(index)] for index in range(len(prompts))]


@pytest.mark.parametrize(
    ("name", "max_draft_len"),
    [("deepseek_v3_tiny", 0), ("deepseek_v3_tiny", 3), ("deepseek_v3_mtp2_tiny", 2), ("glm4_moe_tiny", 1)],
)
def test_engine_tokens_and_drafts_are_the_golden_ones(name: str, max_draft_len: int) -> None:
    folder = GOLDENS / name
    expected = np.load(folder / "expected.npz")
    num_layers = json.loads((folder / "config.json").read_text())["num_nextn_predict_layers"]
    speculative = SpeculativeConfig(num_speculative_tokens=max_draft_len) if max_draft_len else PLAIN
    prompts = [tuple(int(token) for token in expected[f"prompt_{case}"]) for case in range(3)]
    num_checked = 0
    for case, state in enumerate(run(folder, speculative, prompts)):
        assert state.tokens == expected[f"greedy_{case}"].tolist()
        drafts_at = dict(
            zip(expected[f"mtp_draft_context_{case}"].tolist(), expected[f"mtp_draft_tokens_{case}"], strict=True)
        )
        for record in state.records:
            golden = drafts_at.get(record.committed_len_before + 1, [])
            for drafted, wanted in zip(record.drafts[:num_layers], golden, strict=False):
                assert drafted == wanted
                num_checked += 1
        if f"recursive_draft_tokens_{case}" in expected and max_draft_len:
            recursive = expected[f"recursive_draft_tokens_{case}"]
            assert list(state.records[0].drafts) == recursive[:max_draft_len].tolist()
    assert num_checked >= 3 * (NUM_TOKENS // 2) or not max_draft_len
