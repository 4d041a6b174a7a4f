"""The import contracts of pyproject.toml hold, and each breaks under the violation that it is there for."""

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.repository import ROOT, Checkout, copy_to

CONTRACTS = {
    contract["id"]: contract
    for contract in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
}
LAYERS = "Imports point one way"
HOST = "Host bookkeeping knows no jax"


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return copy_to(tmp_path)


def lint(checkout: Checkout) -> str:
    return checkout.run("lint-imports", "--no-cache").stdout


def test_contracts_hold(checkout: Checkout) -> None:
    report = lint(checkout)
    assert f"{LAYERS} KEPT" in report, report
    assert f"{HOST} KEPT" in report, report


@pytest.mark.parametrize(
    ("path", "line", "contract"),
    [
        pytest.param("mtp_jax/core/types.py", "import mtp_jax.engine.engine", LAYERS, id="core-imports-engine"),
        pytest.param("mtp_jax/ops/sampling.py", "import mtp_jax.models.api", LAYERS, id="ops-imports-models"),
        pytest.param("mtp_jax/proposers/api.py", "import mtp_jax.acceptance.api", LAYERS, id="sibling"),
        pytest.param("mtp_jax/engine/engine.py", "import mtp_jax.checkpoints", LAYERS, id="engine-imports-checkpoints"),
        pytest.param("kernels_pallas/__init__.py", "import mtp_jax.core.types", LAYERS, id="kernels-import-engine"),
        pytest.param("mtp_jax/engine/pages.py", "import jax", HOST, id="jax"),
        pytest.param("mtp_jax/engine/slots.py", "import numpy as np", HOST, id="numpy"),
        pytest.param("mtp_jax/policies/api.py", "import mtp_jax.core.types", HOST, id="jax-through-another-module"),
    ],
)
def test_a_planted_import_breaks_its_contract(checkout: Checkout, path: str, line: str, contract: str) -> None:
    checkout.plant(path, line)
    report = lint(checkout)
    assert f"{contract} BROKEN" in report, report


def test_every_module_has_a_layer() -> None:
    layers = CONTRACTS["layers"]["layers"]
    named = {module.strip(" ()") for layer in layers for module in layer.split("|")}
    modules = {f"mtp_jax.{path.stem}" for path in (ROOT / "mtp_jax").glob("*.py") if path.stem != "__init__"}
    modules |= {f"mtp_jax.{path.parent.name}" for path in (ROOT / "mtp_jax").glob("*/__init__.py")}
    assert modules <= named


def test_loading_host_bookkeeping_does_not_load_jax() -> None:
    modules = ["mtp_jax", *CONTRACTS["host-bookkeeping"]["source_modules"]]
    program = f"import sys, {', '.join(modules)}; import json; print(json.dumps(sorted(sys.modules)))"
    printed = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"jax", "jaxlib", "numpy"} & set(json.loads(printed.stdout))
