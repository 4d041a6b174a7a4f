"""What every test runs under: eight CPU devices, strict promotion, warnings as errors, and a Hypothesis profile.

Options:
    --gpu: use the machine's GPU. Tests marked ``gpu`` run, and jax chooses its own platform.
    --optimized: compile every test's programs as users run them.
    --hypothesis-profile: ``dev`` (random; the default), ``ci`` (the same examples in every run; the default where the
        environment says ``CI=true``) or ``thorough`` (eight times as many).

Programs are compiled without most of the compiler's optimizations: a test's steps are short, its compiles are not. The
tests of kernels and those marked ``optimized`` keep them. Where XLA still has its older emitter of CPU code, which
compiles in a third of the time, all tests use it (not under ``--optimized``). Compiled programs are kept below pytest's
own cache folder, or in ``JAX_COMPILATION_CACHE_DIR`` where that is set.
"""

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import jaxlib
import pytest

NUM_CPU_DEVICES = 8
OPTIMIZED_FOLDERS = frozenset({"aot", "gpu", "kernels"})
_GIB = 2**30
_MOST_MAPPINGS = 45_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--gpu", action="store_true", help="run on the GPU, the tests marked `gpu` included")
    parser.addoption("--optimized", action="store_true", help="compile every test's programs as users run them")


def pytest_configure(config: pytest.Config) -> None:
    _choose_devices(on_gpu=bool(config.getoption("--gpu")))
    if not config.getoption("--optimized"):
        _choose_older_emitter()
    _keep_compiled_programs(config)
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")


def _choose_devices(*, on_gpu: bool) -> None:
    if on_gpu:
        return
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", NUM_CPU_DEVICES)
    # XLA's CPU collectives block a thread each; as many threads as devices can all wait for a device that has none.
    os.environ.setdefault("NPROC", str(2 * NUM_CPU_DEVICES))
    os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # the TPU compiler is used without a TPU,
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # and by several workers at once


def _choose_older_emitter() -> None:
    if jaxlib.version.__version_info__ < (0, 11):  # later ones end the process at a flag that they do not know
        flags = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"{flags} --xla_cpu_use_fusion_emitters=false".strip()


def _keep_compiled_programs(config: pytest.Config) -> None:
    folder = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    if folder is None:
        folder = str(_cache_root(config) / f"jax-{jax.__version__}-shared")
        # Under a limit of size jax locks the folder for each read and write: workers can share what they compile.
        jax.config.update("jax_compilation_cache_max_size", 4 * _GIB)
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _cache_root(config: pytest.Config) -> Path:
    cache = getattr(config, "cache", None)  # none under `-p no:cacheprovider`
    return config.rootpath / ".cache" if cache is None else cache.mkdir("compiled")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--gpu"):
        return
    skip = pytest.mark.skip(reason="needs a GPU: run with --gpu")
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(skip)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Before the fixtures of a test, whatever their scope: they compile too."""
    is_wanted = item.config.getoption("--gpu") or item.config.getoption("--optimized")
    is_optimized = is_wanted or "optimized" in item.keywords or item.path.parent.name in OPTIMIZED_FOLDERS
    jax.config.update("jax_disable_most_optimizations", not is_optimized)


def pytest_runtest_teardown() -> None:
    """Lets go of compiled programs before there are too many for one process.

    Each takes some dozens of the memory mappings of which Linux allows a process 65,530 (`vm.max_map_count`); past them
    the compiler does not fail, it crashes.
    """
    if _num_mappings() > _MOST_MAPPINGS:
        from mtp_jax.testing.engines import toy_engine  # not before its imports are checked for types

        toy_engine.cache_clear()
        jax.clear_caches()
        gc.collect()


def _num_mappings() -> int:
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:  # not Linux
        return 0


@pytest.fixture(autouse=True)
def _promotion(request: pytest.FixtureRequest) -> Iterator[None]:
    """Relaxes promotion for a test marked ``standard_promotion``; every other test keeps the strict rules."""
    with contextlib.ExitStack() as stack:
        if request.node.get_closest_marker("standard_promotion") is not None:
            stack.enter_context(jax.numpy_dtype_promotion("standard"))
            stack.enter_context(jax.numpy_rank_promotion("allow"))
        yield


# A first example may compile: no example has a deadline, and slow generation is not a fault.
hypothesis.settings.register_profile(
    "dev", deadline=None, max_examples=25, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.register_profile("ci", parent=hypothesis.settings.get_profile("dev"), derandomize=True)
hypothesis.settings.register_profile("thorough", parent=hypothesis.settings.get_profile("dev"), max_examples=200)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") == "true" else "dev")
