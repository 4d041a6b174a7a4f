"""The library's own examples run: the worked one finds its bug."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest

import mtp_jax.testing

MODULES = [
    "mtp_jax.testing",
    *(f"mtp_jax.testing.{info.name}" for info in pkgutil.iter_modules(mtp_jax.testing.__path__)),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_hold(name: str) -> None:
    results = doctest.testmod(importlib.import_module(name))
    assert results.failed == 0
    if name == "mtp_jax.testing":
        assert results.attempted > 10


def test_only_strategies_and_the_state_machine_need_hypothesis() -> None:
    needed = [name for name in MODULES if name.rsplit(".", 1)[-1] not in ("strategies", "host_model")]
    code = f"import sys; sys.modules['hypothesis'] = None\nfor name in {needed}: __import__(name)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
