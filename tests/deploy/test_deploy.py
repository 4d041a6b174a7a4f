"""The manifests: fields that JobSet has, options that run-batch has, and scripts that run here with stand-ins."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
import yaml

# pyright: reportAttributeAccessIssue=false
from mtp_jax.cli.options import Parser, read_options
from mtp_jax.cli.run_batch import add_options
from tests.architecture.repository import ROOT
from tests.batch.test_run import answer, expected
from tests.batch.toy_job import good_line

DEPLOY = ROOT / "deploy"
SHIM = f"""#!/bin/sh
cd {ROOT} && exec {sys.executable} -m tests.deploy.toy_cli "$@"
"""
SSH = """#!/bin/sh
shift
exec sh -c "$*"
"""
SRUN = """#!/usr/bin/env bash
# Two tasks, and the worst of their statuses.
shift
export SLURM_JOB_ID=7 SLURM_STEP_NODELIST=localhost SLURM_NTASKS=2
SLURM_PROCID=0 SLURM_LOCALID=0 "$@" & first=$!
SLURM_PROCID=1 SLURM_LOCALID=1 "$@" & second=$!
wait $first; a=$?
wait $second; b=$?
exit $(( a > b ? a : b ))
"""


def manifest() -> dict[str, Any]:
    return yaml.safe_load((DEPLOY / "jobset-tpu.yaml").read_text())


def test_the_jobset_has_the_fields_that_jobset_has() -> None:
    jobset = manifest()
    assert (jobset["apiVersion"], jobset["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    assert {*jobset} == {"apiVersion", "kind", "metadata", "spec"}
    assert {*jobset["spec"]} == {"failurePolicy", "replicatedJobs"}
    (job,) = jobset["spec"]["replicatedJobs"]
    assert {*job} == {"name", "replicas", "template"}
    spec = job["template"]["spec"]
    assert {*spec} == {"completionMode", "completions", "parallelism", "backoffLimit", "template"}
    assert spec["completions"] == spec["parallelism"] > 1
    pod = spec["template"]["spec"]
    assert {*pod} == {"restartPolicy", "serviceAccountName", "nodeSelector", "containers"}
    assert pod["restartPolicy"] == "Never"
    (container,) = pod["containers"]
    assert {*container} == {"name", "image", "command", "args", "ports", "resources"}


def test_the_jobsets_mesh_is_its_chips_and_its_options_are_run_batchs() -> None:
    spec = manifest()["spec"]["replicatedJobs"][0]["template"]["spec"]
    container = spec["template"]["spec"]["containers"][0]
    assert container["command"] == ["mtp-jax", "run-batch"]
    parser = Parser(prog="run-batch")
    add_options(parser)
    parser.add_argument("--config")
    options = read_options(parser, container["args"])
    assert options.resume
    assert options.distributed
    num_chips = container["resources"]["limits"]["google.com/tpu"] * spec["completions"]
    rows, columns = spec["template"]["spec"]["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert options.mesh["data"] * options.mesh["model"] == num_chips == int(rows) * int(columns)
    assert options.max_num_seqs % options.mesh["data"] == 0
    assert container["ports"] == [{"containerPort": options.metrics_port}]


@pytest.mark.parametrize(
    ("script", "stand_in", "arguments"),
    [
        pytest.param("slurm.sh", ("srun", SRUN), [], marks=pytest.mark.long),
        ("ssh.sh", ("ssh", SSH), ["here there"]),
    ],
)
def test_a_script_serves_a_file_with_two_processes(
    tmp_path: Path, script: str, stand_in: tuple[str, str], arguments: list[str]
) -> None:
    """One of the two dies at its first start."""
    commands = tmp_path / "bin"
    commands.mkdir()
    for name, text in [("mtp-jax", SHIM), stand_in]:
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    lines = [good_line(number) for number in range(12)]
    folder = tmp_path / "with space"
    folder.mkdir()
    (folder / "in.jsonl").write_bytes(b"".join(lines))
    environment = os.environ | {
        "PATH": f"{commands}:{os.environ['PATH']}",
        "FAIL_ONCE": str(tmp_path / "failed"),
        "JAX_NUM_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(jax.config.jax_compilation_cache_dir),
        "JAX_COMPILATION_CACHE_MAX_SIZE": str(jax.config.jax_compilation_cache_max_size),
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    }
    options = ["-i", str(folder / "in*.jsonl"), "-o", str(folder / "out.jsonl"), "--max-model-len", "40"]
    command = [str(DEPLOY / script), *arguments, *options, "--method", "none", "--max-num-seqs", "2"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "attempt 1 ended with status 1" in ended.stderr
    results = [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]
    assert [answer(result) for result in results] == [expected(raw.rstrip(b"\n")) for raw in lines]
    if script == "ssh.sh":
        return
    bad = subprocess.run([*command, "--coordinator"], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert bad.returncode == 2
    assert "attempt" not in bad.stderr
