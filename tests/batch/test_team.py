"""Which process this is, and which lines are its own."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtp_jax.batch.shares import Share, shares_of
from mtp_jax.batch.team import ALONE, place_by_cluster
from mtp_jax.cli.options import Parser, add_model, read_options
from mtp_jax.cli.processes import add_processes, team_and_mesh
from mtp_jax.core.errors import ConfigError


def told(*arguments: str) -> Any:
    parser = Parser(prog="x")
    add_processes(parser)
    add_model(parser)
    parser.add_argument("--config")
    parser.set_defaults(method="mtp")
    return team_and_mesh(read_options(parser, arguments))


@given(data=st.integers(1, 6), model=st.integers(1, 4), per_process=st.integers(1, 4), numbers=st.integers(0, 50))
def test_each_line_is_written_by_one_process(data: int, model: int, per_process: int, numbers: int) -> None:
    """Meshes row by row over processes of `per_process` devices, where no shard is split unequally."""
    devices = data * model
    if devices % per_process or (model % per_process and per_process % model):
        return
    shards = [
        tuple(sorted({device // model for device in range(first, first + per_process)}))
        for first in range(0, devices, per_process)
    ]
    shares = shares_of(shards, data)
    for number in range(numbers):
        (writer,) = [share for share in shares if share.takes(number) and share.is_writer]
        assert number % data in writer.shards
    assert {share.index for share in shares} == set(range(shares[0].count))


def test_one_process_has_everything() -> None:
    team, mesh = told("--mesh", "data=2")
    assert team is ALONE
    assert mesh == {"data": 2}
    assert all(team.share.takes(number) for number in range(5))


def test_processes_are_independent_unless_they_have_a_mesh() -> None:
    team, mesh = told("--process-id", "1", "--num-processes", "4")
    assert team.share == Share(1, 4, (1,), 4)
    assert not team.is_together
    assert mesh == {"data": 8}  # the fake devices of this process
    team, mesh = told("--process-id", "1", "--num-processes", "4", "--mesh", "data=2,model=2", "--independent")
    assert not team.is_together
    assert mesh == {"data": 2, "model": 2}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--process-id", "0"], "--process-id and --num-processes go together"),
        (["--process-id", "4", "--num-processes", "4"], "must be from 0 to --num-processes - 1 = 3."),
        (["--distributed", "--process-id", "0"], "leave --process-id and --num-processes out"),
        (["--coordinator", "a:1"], "--coordinator is for several processes"),
        (["--independent"], "--independent is for several processes"),
        (["--process-id", "0", "--num-processes", "2", "--no-independent"], "--no-independent needs --mesh"),
        (["--process-id", "0", "--num-processes", "2", "--mesh", "data=2"], "needs --coordinator HOST:PORT"),
        (["--distributed"], "this is no Slurm, Kubernetes, GKE TPU or MPI job"),
    ],
)
def test_what_does_not_fit_is_said(arguments: list[str], sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "KUBERNETES_SERVICE_HOST", "OMPI_MCA_orte_hnp_uri"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=sentence):
        told(*arguments)


def test_slurm_says_which_process_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"JOB_ID": "7", "STEP_NODELIST": "node[1-2]", "NTASKS": "4", "PROCID": "3", "LOCALID": "1"}
    for name, value in variables.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    place = place_by_cluster()
    assert (place.process, place.num_processes, place.local_devices) == (3, 4, (1,))
    assert place.on_host == 1
    assert place.coordinator is not None
    assert place.coordinator.startswith("node1:")


def test_gke_says_which_host_of_a_slice_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variables of a TPU pod; a single slice has none that begin with MEGASCALE."""
    from jax._src.clusters import cloud_tpu_cluster

    monkeypatch.setattr(cloud_tpu_cluster, "running_in_cloud_tpu_vm", True)
    monkeypatch.setattr(cloud_tpu_cluster, "get_tpu_env_value_from_metadata", lambda name: None)
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")
    monkeypatch.setenv("TPU_WORKER_HOSTNAMES", "localhost,batch-slice-0-1.batch,batch-slice-0-2.batch")
    monkeypatch.setenv("TPU_WORKER_ID", "2")
    place = place_by_cluster()
    assert (place.process, place.num_processes, place.coordinator) == (2, 3, "localhost:8482")
    monkeypatch.setenv("MEGASCALE_COORDINATOR_ADDRESS", "localhost")
    monkeypatch.setenv("MEGASCALE_NUM_SLICES", "4")
    monkeypatch.setenv("MEGASCALE_SLICE_ID", "1")
    place = place_by_cluster()
    assert (place.process, place.num_processes) == (3 + 2, 4 * 3)


def test_kubernetes_says_which_pod_of_a_jobset_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By its own interface, which jax asks through the package `kubernetes`."""
    from jax._src.clusters.k8s_cluster import K8sCluster

    labels = {"jobset.sigs.k8s.io/jobset-name": "batch"}
    job = SimpleNamespace(
        metadata=SimpleNamespace(name="localhost", labels=labels), spec=SimpleNamespace(parallelism=4)
    )
    answers = {"_job": job, "_pod": SimpleNamespace(), "_controller": SimpleNamespace(kind="Job")}
    for name, said in answers.items():
        monkeypatch.setattr(K8sCluster, name, lambda said=said: said)
    client = SimpleNamespace(CoreV1Api=object, BatchV1Api=object, exceptions=SimpleNamespace(ApiException=OSError))
    package = SimpleNamespace(config=SimpleNamespace(load_incluster_config=lambda: None), client=client)
    monkeypatch.setitem(sys.modules, "kubernetes", package)
    monkeypatch.setattr("socket.gethostbyname", lambda name: "127.0.0.1")
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.setenv("JOB_COMPLETION_INDEX", "3")
    place = place_by_cluster()
    assert (place.process, place.num_processes, place.on_host) == (3, 4, 0)
    assert place.coordinator == "localhost-0.batch:55527"
    monkeypatch.delenv("JOB_COMPLETION_INDEX")
    with pytest.raises(ConfigError, match=r"could not be read .*Indexed.*give --process-id and --num-processes"):
        place_by_cluster()
