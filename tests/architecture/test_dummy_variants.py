"""A variant of each seam that the packages know nothing of runs once its table has a line for it, and nothing else."""

from pathlib import Path

import pytest

from kernels_pallas.paged_attention import BACKENDS
from mtp_jax import LLM, SamplingParams
from mtp_jax.acceptance.registry import RULES
from mtp_jax.checkpoints.folders import write_json
from mtp_jax.checkpoints.safetensors_io import write_tensors
from mtp_jax.models.registry import FAMILIES
from mtp_jax.policies.registry import POLICIES
from mtp_jax.proposers.method import Method
from mtp_jax.proposers.registry import PROPOSERS
from tests.architecture import dummies

KMAX = 2
SHIFT = 4


def dummy_model(folder: Path) -> Path:
    write_json(folder / "config.json", {"model_type": "dummy", "max_position_embeddings": 32})
    write_tensors(folder, dummies.tensors(SHIFT).items())
    return folder


def test_a_line_in_each_table_is_all_that_a_variant_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counted = dummies.CountedBackend()
    monkeypatch.setitem(FAMILIES, "dummy", dummies.sum_family)
    monkeypatch.setitem(BACKENDS, "dummy", counted.backend)
    monkeypatch.setitem(PROPOSERS, "dummy", Method(lambda family, spec: dummies.Repeater()))
    monkeypatch.setitem(RULES, "dummy", lambda spec: dummies.AcceptNothing())
    monkeypatch.setitem(POLICIES, "dummy", lambda spec, costs: dummies.UpAndDown())
    speculative = {"method": "dummy", "policy": "dummy", "acceptance": "dummy", "num_speculative_tokens": KMAX}
    llm = LLM(
        dummy_model(tmp_path),
        speculative_config=speculative,
        attention_backend="dummy",
        max_num_seqs=1,
        block_size=4,
        prefill_chunk=16,
    )
    assert counted.num_calls >= KMAX + 2  # the programs of every draft length, and prefill

    prompt, num_tokens = [5, 1, 9], 8
    expected: list[int] = []
    while len(expected) < num_tokens:
        expected.append(dummies.next_token([*prompt, *expected], SHIFT))
    records = list(llm.trace(prompt, SamplingParams(temperature=0, max_tokens=num_tokens)))

    assert [token for record in records for token in record.emitted] == expected[1:]
    assert [record.draft_len for record in records][:4] == [KMAX, 0, KMAX, 0]
    assert all(record.num_accepted == 0 for record in records)
    drafts = {draft for record in records for draft in record.drafts}
    assert drafts == {dummies.ALWAYS}
    assert dummies.ALWAYS in expected, "a rule that accepts by match would have kept a draft"
