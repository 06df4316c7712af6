"""Two processes that meet through `jax.distributed`, and disagree on k.

Runs that are killed inside a window, and go on in other processes with the same bits,
are those of examples/elastic.py and data_parallel.py, which test_examples.py runs.

    python tests/test_processes.py PROCESS_ID PORT FILE    # one of them
"""

import socket
import sys

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

pytestmark = pytest.mark.published

PROCESSES, DEVICES, ROWS, WIDTH = 2, 8, 64, 8


def loss(params, batch):
    h = jnp.tanh(batch["x"] @ params)
    return jnp.sum(jnp.square(h) * batch["mask"]) / jnp.sum(batch["mask"])


def make_inputs():
    rng = np.random.default_rng(0)
    lengths = rng.integers(1, WIDTH + 1, size=(ROWS, 1))
    batch = {
        "x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "mask": (np.arange(WIDTH) < lengths).astype(np.float32),
    }
    return (rng.normal(size=(WIDTH, WIDTH)) / 4).astype(np.float32), batch


def main(process_id, port, file):
    """The gradient of the whole batch, and a mean of 2 micro-batches here, 4 there."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // PROCESSES)
    # Gloo takes collectives for one another that are under way at the same time.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process_id)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))

    def put(tree, spec):
        """Puts this process's part of an array that all processes have."""
        place = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, place, lambda i: x[i]), tree
        )

    params, batch = make_inputs()
    args, axis = (
        (put(params, P()), put(batch, P("data"))),
        ga.DataAxis("data", mesh=mesh),
    )
    whole = jax.jit(ga.value_and_grad(loss, 4, data_axis=axis))(*args)
    own = jax.jit(helpers.mean_of(loss, 2 + 2 * process_id, data_axis=axis))(*args)
    results = [np.asarray(x.addressable_data(0)) for x in (*whole, *own)]
    np.savez(file, *results)
    jax.distributed.shutdown()


def test_processes_that_disagree_on_k_neither_hang_nor_drift_apart(tmp_path):
    """The mean is then over all micro-batches there were, on both."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    files = [tmp_path / f"{i}.npz" for i in range(PROCESSES)]
    # How long a collective waits for the others; half an hour is the default.
    flags = {"XLA_FLAGS": "--xla_cpu_collective_timeout_seconds=5"}
    processes = [
        helpers.started(__file__, i, port, file, **flags)
        for i, file in enumerate(files)
    ]
    try:
        said = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    first, second = (list(np.load(file).values()) for file in files)
    assert helpers.bits(first) == helpers.bits(second)

    params, batch = make_inputs()
    size, parts = ROWS // DEVICES, []
    for device in range(DEVICES):
        k = 2 if device < DEVICES // 2 else 4
        for i in range(k):
            at = device * size + i * size // k
            parts.append(jax.tree.map(lambda x: x[at : at + size // k], batch))  # noqa: B023
    each = [jax.value_and_grad(loss)(params, part) for part in parts]
    mean = jax.tree.map(lambda *x: np.mean(x, axis=0), *each)
    # c·n·eps: two orders of adding up the rows of a batch, of terms of order 1.
    bound = 4 * ROWS * float(jnp.finfo(jnp.float32).eps)
    due = *jax.value_and_grad(loss)(params, batch), *mean
    for got, want in zip(first, due, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=bound)
    assert np.max(np.abs(first[1] - first[3])) > 10 * bound  # the twin


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3])
