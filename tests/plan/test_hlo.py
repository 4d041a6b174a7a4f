"""Collectives read from HLO text, in each of the forms that lowering and compilers write."""

import pytest

from mtp_jax.plan.hlo import Collective, Collectives, Group, read_collectives

MODULE = """HloModule jit_run, is_scheduled=true, entry_computation_layout={(f32[8]{0})->f32[8]{0}}

%add (a: f32[], b: f32[]) -> f32[] {
  ROOT %r = f32[] add(%a, %b)
}

%asked.1 (p: f32[8]) -> f32[8] {
  %big = f32[4,8,100]{2,1,0:T(8,128)} all-gather(%p), replica_groups=mesh['data'=2,'model'=4] {'model'}, dimensions={2}
  ROOT %x = f32[8]{0} copy(%p)
}

%not_asked (p: f32[8]) -> f32[8] {
  ROOT %small = f32[4]{0} all-reduce(%p), replica_groups=mesh['data'=2,'model'=4] {'data','model'}, to_apply=%add
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %moved = f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}
  ROOT %t = (s32[], f32[8]) tuple(%i, %moved)
}

%cond (p: (s32[], f32[8])) -> pred[] {
  ROOT %lt = pred[] compare(%i, %n), direction=LT
}

%wrapped (p: bf16[8,7168]) -> bf16[4,7168] {
  ROOT %rs = bf16[4,7168]{1,0} reduce-scatter(%p), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}, to_apply=%add
}

ENTRY %main.5 (x: f32[8]) -> f32[8] {
  %both = (bf16[8,1,16]{2,1,0}, bf16[8,4,16]{2,1,0}) all-reduce(%a), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %gathering = (f32[2,3]{1,0}, f32[8,3]{1,0}) all-gather-start(%y), replica_groups=[2,4]<=[8], dimensions={0}
  %gathered = f32[8,3]{1,0} all-gather-done(%gathering)
  %scattering = ((bf16[8,7168]), bf16[4,7168]) async-start(%z), calls=%wrapped
  %scattered = bf16[4,7168] async-done(%scattering), calls=%wrapped
  %loop = (s32[], f32[8]) while(%init), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"3"}}
  %swap = f32[16]{0} all-to-all(%w), replica_groups=[4,2]<=[2,4]T(1,0), dimensions={0}
  ROOT %choice = f32[8]{0} conditional(%index, %x, %x), branch_computations={%not_asked, %asked.1}
}
"""


def test_every_form_is_read_once() -> None:
    found = read_collectives(MODULE, num_devices=8)
    always = [
        Collective("all-reduce", 2 * (8 * 16 + 8 * 4 * 16), Group(4)),
        Collective("all-gather", 4 * 8 * 3, Group(4)),
        Collective("all-to-all", 4 * 16, Group(2)),
        Collective("reduce-scatter", 2 * 2 * 4 * 7168, Group(2)),  # the larger side is what goes in
        *[Collective("collective-permute", 4 * 8, Group(2))] * 3,
    ]
    assert list(found.least) == [*always, Collective("all-reduce", 16, Group(8))]
    assert list(found.most) == [*always, Collective("all-gather", 4 * 4 * 8 * 100, Group(4))]


def test_groups_tell_how_many_hosts_they_span() -> None:
    hosts = [one.group.num_hosts for one in read_collectives(MODULE, num_devices=8, devices_per_host=4).least]
    # Devices 0-3 are one host: `model` stays on it, `data` (0 and 4) does not.
    assert hosts == [1, 1, 2, 2, 1, 1, 1, 2]


@pytest.mark.parametrize(
    ("kind", "size", "hosts", "sent", "far"),
    [
        ("all-reduce", 4, 1, 150.0, 0.0),
        ("all-gather", 4, 1, 75.0, 0.0),
        ("all-reduce", 4, 2, 150.0, 2 * 0.5 * 100 / 2),
        ("all-to-all", 4, 2, 75.0, 0.5 * 100),
        ("collective-permute", 2, 1, 100.0, 0.0),
    ],
)
def test_what_a_device_must_send(kind: str, size: int, hosts: int, sent: float, far: float) -> None:
    one = Collective(kind, 100, Group(size, hosts))
    assert (one.sent_bytes, one.sent_to_hosts_bytes) == (sent, far)


def test_a_program_without_any_has_none() -> None:
    assert read_collectives("ENTRY main {\n  ROOT r = f32[2]{0} add(a, b)\n}\n", num_devices=1) == Collectives()
