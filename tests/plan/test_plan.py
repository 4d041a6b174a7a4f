"""Plans: what is exchanged, the least time of a step, what is refused."""

import itertools
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_jax.bench.suite.floors import Floor as SuiteFloor
from mtp_jax.cli import main
from mtp_jax.core.config import MeshConfig, SpeculativeConfig
from mtp_jax.core.errors import ConfigError
from mtp_jax.core.shapes import StepShape
from mtp_jax.plan import make_plan, planned_family, slice_named
from mtp_jax.plan.chips import chips
from mtp_jax.plan.floor import Roofline, expected_experts
from mtp_jax.plan.plan import Question, num_lowered, sum_parameters
from mtp_jax.plan.program import Depth, PlannedStep, abstract_target
from tests.models.shapes import config_of
from tests.plan.small import question, small_family


def test_what_few_layers_say_is_what_all_of_them_exchange() -> None:
    family = small_family("deepseek_v3", num_hidden_layers=5, first_k_dense_replace=2)
    asked = question(family, speculative=SpeculativeConfig(method=None), batch_sizes=(6,))
    told: list[str] = []
    plan = make_plan(asked, told.append)
    assert plan.depth == Depth(dense=2, experts=3)
    assert len(told) == num_lowered(asked)
    for draft_len, exchanged in enumerate(plan.exchanged):
        config = asked.config(slots_per_shard=3)
        step = PlannedStep(family, config, asked.dtype, abstract_target(asked.where, config))
        whole = step.collectives(StepShape(3, draft_len))
        assert Counter(exchanged.least) == Counter(whole.least)
        assert Counter(exchanged.most) == Counter(whole.most)
        assert whole.least != whole.most


@pytest.mark.long
def test_few_layers_of_deepseek_v3_say_what_all_61_exchange() -> None:
    family = planned_family("deepseek-v3")
    asked = Question(family, slice_named("v5p:4x4x4"), MeshConfig(data=4, model=16), SpeculativeConfig())
    plan = make_plan(replace(asked, batch_sizes=(32,), attention_backend="reference"))
    config = plan.question.config(slots_per_shard=8)
    step = PlannedStep(family, config, asked.dtype, abstract_target(asked.where, config))
    for draft_len in (0, 3):
        whole = step.collectives(StepShape(8, draft_len))
        assert Counter(plan.exchanged[draft_len].least) == Counter(whole.least)
        assert Counter(plan.exchanged[draft_len].most) == Counter(whole.most)


def test_the_least_time_of_a_small_model_by_hand() -> None:
    family = small_family("llama", "no_mtp")
    asked = question(family, data=1, model=1, speculative=SpeculativeConfig(method=None), batch_sizes=(3,))
    [batch] = make_plan(asked).batches
    [floor] = batch.floors
    hidden, ffn, vocab, heads, kv_heads, channels, layers = 16, 24, 48, 4, 2, 4, 3
    products = layers * (hidden * (heads + 2 * kv_heads) * channels + heads * channels * hidden + 3 * hidden * ffn)
    norms = (layers * 2 + 1) * hidden
    assert floor.load.weight_bytes == 2 * (products + norms + vocab * hidden)
    assert floor.load.kv_bytes == 3 * 64 * layers * 2 * kv_heads * channels * 2
    assert floor.load.flop == 2 * 3 * (products + vocab * hidden) + 3 * 64 * layers * 2 * 2 * heads * channels
    assert floor.seconds == pytest.approx(floor.load.num_bytes / 4.8e12)
    assert (floor.bound, floor.links_s, batch.break_even) == ("memory", 0.0, ())


def test_experts_are_read_as_far_as_tokens_choose_them() -> None:
    family = small_family("deepseek_v3")
    asked = question(family, data=1, model=1)
    config = asked.config(1)
    roofline = Roofline(PlannedStep(family, config, asked.dtype, abstract_target(asked.where, config)), 64)
    one, two, more = (roofline.floor(1, k, ()).load.expert_bytes for k in (0, 1, 2))
    per_layer = 2 * 8 * 3 * 16 * 8  # bytes of 8 experts
    # Two layers of the target have experts, and the MTP layer, which sees one token a draft.
    assert one == pytest.approx(2 * per_layer * expected_experts(8, 2, 1) / 8)
    assert two == pytest.approx(2 * per_layer * expected_experts(8, 2, 2) / 8 + per_layer * 2 / 8)
    assert more - two < two - one  # the more tokens, the more of their experts are read already
    every = roofline.floor(1000, 0, ()).load.expert_bytes
    assert every == pytest.approx(2 * per_layer)


@pytest.mark.parametrize("features", [("deepseek_v3",), ("glm4_moe", "tied"), ("mimo",)], ids=str)
def test_on_one_device_the_suites_floor_reads_the_same_bytes(features: tuple[str, ...]) -> None:
    """`bench decode --suite` counts them in another way, for steps that it measures."""
    family = small_family(*features)
    asked = question(family, data=1, model=1)
    config = asked.config(1)
    roofline = Roofline(PlannedStep(family, config, asked.dtype, abstract_target(asked.where, config)), 64)
    for batch, draft_len in itertools.product((1, 5, 64), (0, 1, 3)):
        planned = roofline.floor(batch, draft_len, ()).load.num_bytes
        assert planned == pytest.approx(SuiteFloor.of(family, itemsize=2).step_bytes(batch, 64, draft_len))


def test_two_devices_share_what_is_split_and_all_read_what_is_not() -> None:
    family = small_family("llama", "no_mtp")
    alone, shared = (
        make_plan(question(family, data=1, model=m, speculative=SpeculativeConfig(method=None), batch_sizes=(4,)))
        for m in (1, 2)
    )
    [one], [two] = alone.batches[0].floors, shared.batches[0].floors
    assert two.load.kv_bytes == one.load.kv_bytes / 2
    assert one.load.weight_bytes / 2 < two.load.weight_bytes < 0.6 * one.load.weight_bytes  # norms are whole
    assert two.links_s > 0


def test_a_longer_draft_must_be_worth_its_step() -> None:
    speculative = SpeculativeConfig(num_speculative_tokens=3)
    plan = make_plan(question(small_family("deepseek_v3"), data=1, model=1, speculative=speculative))
    for batch in plan.batches:
        times = [floor.seconds for floor in batch.floors]
        assert times == sorted(times)
        assert all(rate is None or 0 <= rate <= 1 for rate in batch.break_even)
        assert batch.best["50%"] <= batch.best["70%"] <= batch.best["90%"]


def test_every_chip_names_its_source() -> None:
    for name, chip in chips().items():
        assert chip.source, name
        assert chip.kernel == {"tpu": "mosaic_tpu", "cuda": "mosaic_gpu"}[chip.platform]
        assert slice_named(f"{name}:" + "x".join(["2"] * max(chip.dimensions, 1))).num_devices > 0


def test_deepseek_v3_whole_is_planned_from_its_config() -> None:
    family = planned_family("deepseek-v3")
    assert sum_parameters(family) / 1e9 == pytest.approx(671.0 + 11.6, abs=0.1)  # and its MTP layer
    assert Depth.of(family) == Depth(dense=3, experts=58)
    with pytest.raises(ConfigError, match=r"682\.6 billion parameters does not fit.* GiB too little"):
        make_plan(Question(family, slice_named("h200:8"), MeshConfig(model=8), SpeculativeConfig(), batch_sizes=(1,)))


def test_drafts_are_those_that_the_model_has_layers_for() -> None:
    with pytest.raises(ConfigError, match="needs MTP layers"):
        make_plan(question(small_family("llama", "no_mtp"), data=1, model=1))
    vanilla = SpeculativeConfig(method="mtp_vanilla", num_speculative_tokens=3)
    with pytest.warns(UserWarning, match="drafting 1 tokens a step"):
        plan = make_plan(question(small_family("deepseek_v3"), data=1, model=1, speculative=vanilla))
    assert [floor.draft_len for floor in plan.batches[0].floors] == [0, 1]


def refusal(capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert main(["plan", "--model", "tiny-mtp", "--topology", "h200:2", *more]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    return printed.err


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--topology", "v9:2x2"], "its chip must be one of 'v5e'"),
        (["--topology", "v5p:2x2"], "a v5p has 3 dimensions, such as 'v5p:2x2x1'"),
        (["--topology", "h200"], "a h200 is a number of chips, such as 'h200:8'"),
        (["--topology", "v5e:0x2"], "v5e has 2 dimensions"),
        (
            ["--mesh", "data=4,model=8"],
            "has 32 devices; h200:2 has 2: of 2 devices data=2,model=1 or data=1,model=2 fit",
        ),
        (["--topology", "h200:3"], "needs a multiple of 3: no mesh of 3 devices divides this model"),
        (["--mesh", "pipe=2,model=8"], "mesh is"),
        (["--model", "no-such-model"], "no-such-model"),
        (["--context", "1000000"], "context is 1000000; it must be an integer from 2 to 1024"),
        (["--context", "0"], "context is 0"),
        (["--batch-sizes", "0"], "batch_sizes is 0"),
        (["--memory-share", "1.5"], "memory_share is 1.5"),
        (["--accepted-per-pos", "0.9"], "accepted_per_pos has 1 shares; 3 drafts need as many"),
        (["--accepted-per-pos", "0.5", "0.6", "0.7"], "none above the one before"),
        (["--method", "none", "--accepted-per-pos", "0.9"], "--accepted-per-pos"),
        (["--plot", "plan.gif"], "must end in .png or .svg"),
        (["--plot", "no/such/folder/plan.png"], "in no folder that exists"),
        (["--attention-backend", "fast"], "fast"),
        (["--moe-backend", "fast"], "moe_backend is 'fast'"),
        (["--num-speculative-tokens", "9"], "num_speculative_tokens"),
        (["--memory-share", "1e-6"], "MiB too little"),
    ],
)
def test_what_cannot_be_planned_is_refused(capsys: pytest.CaptureFixture[str], more: list[str], told: str) -> None:
    assert told in refusal(capsys, *more)


def test_the_command_prints_tables_and_json_and_draws(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    config, file = tmp_path / "config.json", tmp_path / "plan.svg"
    config.write_text(json.dumps(config_of("llama")))
    given = ["plan", "--model", str(config), "--topology", "h200:2", "--context", "64", "--batch-sizes", "2", "4"]
    drafting = ["--num-speculative-tokens", "1", "--accepted-per-pos", "0.9"]
    assert main([*given, *drafting, "--plot", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "exchanges read from: lowered programs of" in printed
    assert "temporaries: an estimate" in printed
    plan = json.loads(printed.splitlines()[-1])["plan"]
    assert plan["mesh"] == {"data": 1, "model": 2}
    assert [batch["batch"] for batch in plan["batches"]] == [2, 4]
    assert plan["batches"][0]["best_draft_len"].keys() == {"50%", "70%", "90%", "as given"}
    assert plan["collectives"][1]["num_bytes_most"] > plan["collectives"][1]["num_bytes_greedy"] > 0
    assert file.read_text().startswith("<?xml")
