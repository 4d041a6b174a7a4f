"""What a launch was given can be looked at after the launch, whose state is donated to the next one."""

from mtp_jax.core.config import SamplingParams
from mtp_jax.core.shapes import PrefillShape, StepShape
from mtp_jax.engine.requests import Request
from mtp_jax.testing.driving import run_plan
from mtp_jax.testing.engines import restart, toy_engine
from mtp_jax.testing.launches import recorded_launches


def test_each_launch_leaves_its_inputs() -> None:
    engine = restart(toy_engine(), readback_depth=0)
    request = Request("0", (3, 1, 4), SamplingParams(temperature=0, max_tokens=9), seed=0, wants_trace=True)
    with recorded_launches(engine) as launches:
        records = run_plan(engine, [request]).finished["0"].state.records
    shapes = [launch.shape for launch in launches]
    decodes = [launch for launch in launches if isinstance(launch.shape, StepShape)]

    assert [isinstance(shape, PrefillShape) for shape in shapes] == [True] + [False] * len(records)
    assert [int(launch.state.committed_len[0]) for launch in decodes] == [one.committed_len_before for one in records]
    assert [shape.draft_len for shape in shapes if isinstance(shape, StepShape)] == [
        record.draft_len for record in records
    ]
    assert "launch" not in vars(engine.launcher), "the engine is left as it was"
