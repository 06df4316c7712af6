"""Policy for every test: nothing is promoted, broadcast or warned about in silence."""

import os
import pathlib

# Virtual devices must be asked for before JAX starts; so must, on a GPU, the order of
# sums, without which the promises of same bits do not hold there (docs/exactness.md).
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_force_host_platform_device_count=8"
    + " --xla_gpu_deterministic_ops=true --xla_gpu_autotune_level=0"
    * any(pathlib.Path("/dev").glob("nvidia[0-9]*")),
)

import hypothesis
import index
import jax
import pytest
from jax._src import lru_cache

from ga_optax import _text

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

# Most of the time goes into compiling, so what was compiled once is kept in .jax_cache.
_CACHE = pathlib.Path(__file__).parents[1] / ".jax_cache"
jax.config.update("jax_compilation_cache_dir", str(_CACHE))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _put(cache, key, value):
    """Writes an entry at once, since JAX does not, and other workers may read it."""
    part = cache.path / f"{key}-{os.getpid()}"
    part.write_bytes(value)
    part.replace(cache.path / f"{key}-cache")


lru_cache.LRUCache.put = _put

hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=50, derandomize=True
)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=10_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture(autouse=True)
def nothing_was_said_before():
    """What is said once is said anew in each test, whichever tests ran before it."""
    _text._said.clear()


@pytest.fixture
def optax_promotion():
    """Optax itself promotes (`1 - decay**count`), so its optimizers need the usual."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


@pytest.fixture
def fast_compilation():
    """For programs that compile far longer than they run: XLA optimises little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Marks tests of quick.txt, the property tests, and the rest of each grid."""
    grids = {}
    quick = set(index.quick())
    elsewhere = pytest.mark.skip(reason="holds of CPUs")
    for item in items:
        if item.get_closest_marker("cpu") and jax.default_backend() != "cpu":
            item.add_marker(elsewhere)
        if getattr(item.obj, "is_hypothesis_test", False):
            item.add_marker(pytest.mark.fuzz)
        name = f"{item.path.relative_to(index.TESTS).as_posix()}::{item.name}"
        if not quick.isdisjoint((name, name.partition("[")[0])):
            item.add_marker(pytest.mark.quick)
        if item.get_closest_marker("grid") and not item.get_closest_marker("quick"):
            grids.setdefault((item.path, item.originalname), []).append(item)
    for cases in grids.values():
        few, *more = cases[0].get_closest_marker("grid").args
        most = _spread(cases, *more or (few,))
        for item in cases:
            if item not in most:
                item.add_marker(pytest.mark.exhaustive)
            elif item not in _spread(most, few):
                item.add_marker(pytest.mark.slow)


def _spread(cases, number):
    """So many of the cases, from all over the grid."""
    number = min(number, len(cases))
    return [cases[len(cases) * i // number] for i in range(number)]
