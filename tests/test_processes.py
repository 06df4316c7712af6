"""Two processes that meet through `jax.distributed`: one run, killed and restored.

Each start takes seconds, for JAX, its compiler and the meeting: four starts in all.
"""

import os
import pathlib
import socket
import subprocess
import sys
import time

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

pytestmark = pytest.mark.published

pytest.importorskip("orbax.checkpoint")

WORKER = pathlib.Path(__file__).with_name("process_worker.py")
worker = helpers.load(WORKER)

LIMIT = 120  # seconds; a run takes ten


def start(folder, mode):
    """Runs both processes; returns their exit statuses, and stops who is left."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, ["", *sys.path]))
    # How long a collective waits for the others; half an hour is the default.
    environment["XLA_FLAGS"] = "--xla_cpu_collective_timeout_seconds=5"
    environment["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
    processes = []
    for i in range(worker.PROCESSES):
        with (folder / f"{mode}_{i}.log").open("w") as log:
            command = [sys.executable, WORKER, str(i), str(port), str(folder), mode]
            processes.append(
                subprocess.Popen(command, env=environment, stdout=log, stderr=log)
            )
    try:
        until = time.monotonic() + LIMIT
        while time.monotonic() < until:
            codes = [p.poll() for p in processes]
            if all(code == 0 for code in codes) or any(code for code in codes):
                return codes
            time.sleep(0.05)
        return ["too long"]
    finally:
        for p in processes:
            p.kill()
            p.wait()


def load(folder, mode, process_id):
    log = (folder / f"{mode}_{process_id}.log").read_text()[-2000:]
    file = folder / f"{mode}_{process_id}.npz"
    assert file.exists(), log
    return dict(np.load(file))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("processes")


@pytest.fixture(scope="module")
def peace(folder):
    codes = start(folder, "peace")
    results = [load(folder, "peace", i) for i in range(worker.PROCESSES)]
    assert codes == [0, 0]
    return results


def alone():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return worker.make_gradient(4, mesh)(worker.make_params(), worker.make_batch(0))


def bound():
    """c·n·eps: two orders of adding up the rows of a batch, of terms of order 1."""
    return 4 * worker.ROWS * float(jnp.finfo(jnp.float32).eps)


def test_two_processes_have_the_numbers_of_one(peace):
    value, grads = alone()
    whole = jax.value_and_grad(worker.loss)(worker.make_params(), worker.make_batch(0))
    for results in peace:
        for due in ((value, grads), whole):
            for name, want in zip(("value", "grads"), due, strict=True):
                np.testing.assert_allclose(results[name], want, rtol=0, atol=bound())
    # The twin: half of the rows have another gradient, far outside the bound.
    half = jax.tree.map(lambda x: x[: worker.ROWS // 2], worker.make_batch(0))
    grads = jax.grad(worker.loss)(worker.make_params(), half)
    assert np.max(np.abs(peace[0]["grads"] - grads)) > 10 * bound()


def test_both_processes_hold_the_same_bits(peace):
    first, second = peace
    for name in first:
        np.testing.assert_array_equal(first[name], second[name], err_msg=name)


def test_processes_that_disagree_on_k_neither_hang_nor_drift_apart(peace):
    """The mean is then over all micro-batches there were, on both."""
    params, batch = worker.make_params(), worker.make_batch(0)
    own = worker.ROWS // worker.DEVICES
    terms = []
    for device in range(worker.DEVICES):
        k = 2 if device < worker.DEVICES // 2 else 4
        for i in range(k):
            rows = slice(device * own + i * own // k, device * own + (i + 1) * own // k)
            part = jax.tree.map(lambda x, r=rows: x[r], batch)
            terms.append(jax.value_and_grad(worker.loss)(params, part))
    value = np.mean([value for value, _ in terms])
    grads = np.mean([grads for _, grads in terms], axis=0)
    for results in peace:
        np.testing.assert_allclose(results["mixed_value"], value, rtol=0, atol=bound())
        np.testing.assert_allclose(results["mixed_grads"], grads, rtol=0, atol=bound())


def test_killed_inside_a_window_and_restored_the_bits_are_the_same(folder, peace):
    codes = start(folder, "killed")
    assert any(codes)
    assert "too long" not in codes
    codes = start(folder, "restored")
    results = [load(folder, "restored", i) for i in range(worker.PROCESSES)]
    assert codes == [0, 0]
    for before, after in zip(peace, results, strict=True):
        assert int(after["restored_at"]) == worker.SAVE_AFTER
        assert worker.SAVE_AFTER % worker.K != 0
        assert int(after["steps"]) == 2
        for name in ("params", "mu", "steps"):
            np.testing.assert_array_equal(before[name], after[name], err_msg=name)
    assert np.max(np.abs(peace[0]["params"] - worker.make_params())) > 1e-3


def test_with_sync_each_processes_that_disagree_time_out_with_a_message(folder):
    codes = start(folder, "each")
    assert "too long" not in codes
    assert codes[1], "process 1 has two reductions more than process 0"
    log = (folder / "each_1.log").read_text()
    assert "Timed out waiting 5000ms" in log, log[-2000:]
