"""Policy for every test: nothing is promoted, broadcast or warned about in silence."""

import os

# Virtual devices must be asked for before JAX starts.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import hypothesis
import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "default", deadline=None, max_examples=50, derandomize=True
)
hypothesis.settings.register_profile("fuzz", deadline=None, max_examples=10_000)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "default"))


@pytest.fixture
def optax_promotion():
    """Optax itself promotes (`1 - decay**count`), so its optimizers need the usual."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture
def fast_compilation():
    """For programs that compile far longer than they run: XLA optimises little."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_collection_modifyitems(items):
    """Marks the property tests, so that `make fuzz` finds them."""
    for item in items:
        if getattr(item.obj, "is_hypothesis_test", False):
            item.add_marker(pytest.mark.fuzz)
