"""Without the compilers of accelerators these tests are not collected."""

import importlib.util

NEEDED = ("libtpu", "jax_cuda12_plugin")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
collect_ignore_glob = ["test_*.py"] if MISSING else []
if not MISSING:
    import targets  # noqa: F401  # before another file of tests starts a backend
