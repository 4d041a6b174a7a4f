"""The linter's configuration refuses what it is there to refuse, and leaves alone what the naming rules ask for."""

from pathlib import Path

import pytest

from tests.architecture.repository import copy_to

DOCSTRING = '"""A module."""\n'


@pytest.mark.parametrize(
    ("code", "rule"),
    [
        ("# total = total + 1\n", "ERA001"),
        ("def committed(tokens):\n    return tokens\n", "D103"),
        ("import numpy as np\n\nx = np.random.rand(3)\n", "NPY002"),
        ("def _keep(items=[]):\n    return items\n", "B006"),
    ],
)
def test_a_planted_fault_is_refused(tmp_path: Path, code: str, rule: str) -> None:
    checkout = copy_to(tmp_path)
    checkout.plant("mtp_jax/planted.py", DOCSTRING + code)
    report = checkout.run("ruff", "check", "--no-cache", "--output-format=concise", "mtp_jax/planted.py")
    assert report.returncode == 1
    assert rule in report.stdout


def test_dimension_suffixes_and_shapes_are_allowed(tmp_path: Path) -> None:
    checkout = copy_to(tmp_path)
    code = (
        f"{DOCSTRING}\nfrom jaxtyping import Array, Float, Int\n\n\n"
        "def _scale(logits_BWV: Float[Array, 'B W V'], lens_B: Int[Array, ' B']) -> Float[Array, 'B W V']:\n"
        "    scaled_BWV = logits_BWV * lens_B[:, None, None]\n    return scaled_BWV\n"
    )
    checkout.plant("mtp_jax/planted.py", code)
    report = checkout.run("ruff", "check", "--no-cache", "mtp_jax/planted.py")
    assert report.returncode == 0, report.stdout
