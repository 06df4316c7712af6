"""One of two processes that train together; `test_processes.py` starts them.

python tests/process_worker.py PROCESS_ID PORT FOLDER {peace,killed,restored,each}
"""

import os
import pathlib
import signal
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from helpers import mean_of
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

PROCESSES, DEVICES, K, ROWS, WIDTH = 2, 8, 4, 64, 8
SAVE_AFTER, KILL_AFTER, LAST = 6, 7, 2 * K  # micro-steps; 6 is inside the second window


def loss(params, batch):
    h = jnp.tanh(batch["x"] @ params)
    return jnp.sum(jnp.square(h) * batch["mask"]) / jnp.sum(batch["mask"])


def count(batch):
    return jnp.sum(batch["mask"])


def make_params():
    rng = np.random.default_rng(0)
    return (rng.normal(size=(WIDTH, WIDTH)) / 4).astype(np.float32)


def make_batch(number):
    rng = np.random.default_rng(number + 1)
    lengths = rng.integers(1, WIDTH + 1, size=(ROWS, 1))
    return {
        "x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32),
        "mask": (np.arange(WIDTH) < lengths).astype(np.float32),
    }


def make_gradient(num_microbatches, mesh, make=ga.value_and_grad):
    axis = ga.DataAxis("data", mesh=mesh)
    return jax.jit(make(loss, num_microbatches, data_axis=axis))


def make_micro_step(tx, mesh):
    def step(params, state, batch):
        own = jax.lax.pcast(params, ("data",), to="varying")
        grads = jax.grad(loss)(own, batch)
        return ga.apply_gradients(tx, grads, state, params, weight=count(batch))

    specs = (P(), tx.state_specs)
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(*specs, P("data")), out_specs=specs)
    )


def make_tx():
    return ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")


def put(tree, mesh, spec):
    """Each process puts its own part of what all of them know."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, sharding, lambda i: x[i]), tree
    )


def main(process_id, port, folder, mode):
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", DEVICES // PROCESSES)
    # Gloo takes collectives for one another that are under way at the same time.
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", PROCESSES, process_id)
    mesh = jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))
    params = put(make_params(), mesh, P())
    results = {}

    if mode == "each":  # where the processes disagree, with a reduction a micro-step
        own = put(make_params(), mesh, P("data"))
        axis = ga.DataAxis("data", mesh=mesh, param_specs=P("data"), sync="each")
        fun = mean_of(loss, 2 + 2 * process_id, data_axis=axis)
        jax.block_until_ready(jax.jit(fun)(own, put(make_batch(0), mesh, P("data"))))
        return

    if mode == "peace":
        batch = put(make_batch(0), mesh, P("data"))
        value, grads = make_gradient(4, mesh)(params, batch)
        results |= {"value": value, "grads": grads}
        # The processes disagree: two micro-batches on each device here, four there.
        other = make_gradient(2 + 2 * process_id, mesh, mean_of)
        results["mixed_value"], results["mixed_grads"] = other(params, batch)

    tx = make_tx()
    step = make_micro_step(tx, mesh)
    with jax.set_mesh(mesh):
        state = jax.jit(
            tx.init,
            out_shardings=jax.tree.map(
                lambda spec: NamedSharding(mesh, spec),
                tx.state_specs,
                is_leaf=lambda x: isinstance(x, P),
            ),
        )(params)
    run = {"params": params, "state": state}
    options = ocp.CheckpointManagerOptions(enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder / "checkpoints", options=options) as checkpoints:
        done = 0
        if mode == "restored":
            done = checkpoints.latest_step()
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, run)
            run = checkpoints.restore(done, args=ocp.args.StandardRestore(like))
        for number in range(done, LAST):
            if mode == "killed" and number == KILL_AFTER and process_id == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            batch = put(make_batch(number), mesh, P("data"))
            params, state = step(run["params"], run["state"], batch)
            run = {"params": params, "state": state}
            if mode == "killed" and number + 1 == SAVE_AFTER:
                jax.block_until_ready(run)
                checkpoints.save(number + 1, args=ocp.args.StandardSave(run))

    results["params"] = run["params"]
    results["mu"] = run["state"].inner_opt_state[0].mu
    results["steps"] = run["state"].gradient_step
    results["restored_at"] = jnp.int32(done)
    arrays = {
        name: np.asarray(x.addressable_data(0)) if hasattr(x, "addressable_data") else x
        for name, x in results.items()
    }
    np.savez(folder / f"{mode}_{process_id}.npz", **arrays)
    multihost_utils.sync_global_devices("the end")
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], pathlib.Path(sys.argv[3]), sys.argv[4])
