"""Killed again and again, and resumed on other devices each time: the same bits.

    python examples/elastic.py
    python examples/elastic.py --kills 20     # a few minutes on two cores

A small model trains in windows of four micro-steps, on eight logical devices. A process
kills itself with SIGKILL before a random micro-step, mostly inside a window. The run
then starts again from the last checkpoint (Orbax, every third micro-step) on a random
number of devices: one, two, four or eight, in one or two processes. At the end the
program compares the run with one on eight devices that was not disturbed: every bit of
the parameters, of the optimizer's state and of all losses. The model draws dropout
masks, weighs micro-batches by their tokens, and computes its activations again in the
backward pass. Without `logical_devices` each of these would depend on the devices.

Every start would import JAX first. So the processes are forked from one that has
(`forkserver`), and they share their compiled programs.

It runs on the devices of CPUs. It needs orbax-checkpoint: the dependency group `demo`.
"""

import argparse
import collections
import multiprocessing
import multiprocessing.connection
import os
import pathlib
import signal
import socket
import sys
import tempfile
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

LOGICAL = 8
K = 4  # micro-steps in a window
SAVE_EVERY = 3  # micro-steps; not a multiple of K, so that it cuts windows
ROWS, WIDTH, SEED = 16, 8, 0
PLACES = [(1, 1), (2, 1), (4, 1), (8, 1), (2, 2), (4, 2), (8, 2)]  # devices, processes
LIMIT = 1800  # seconds for one life; most take a few

# -- The task --------------------------------------------------------------------------


def layer(h: jax.Array, w: jax.Array) -> tuple[jax.Array, None]:
    """One layer; its activations are computed again in the backward pass."""
    return h + jnp.tanh(h @ w) * jax.nn.silu(h), None


def loss_fn(params: Any, batch: Any, key: jax.Array) -> jax.Array:
    """The mean over the tokens that are not padding, with dropout."""
    mask = jax.random.bernoulli(key, 0.9, batch["x"].shape)
    h = jnp.where(mask, batch["x"], 0) * params["gain"]
    h, _ = jax.lax.scan(jax.checkpoint(layer), h, params["layers"])
    h = jax.nn.softmax(h) @ params["out"]
    return jnp.sum(h**2 * batch["mask"]) / jnp.sum(batch["mask"])


def count_tokens(batch: Any) -> jax.Array:
    """The number of tokens that the loss averages."""
    return jnp.sum(batch["mask"])


def make_params() -> Any:
    """The parameters that every run starts from."""
    rng = np.random.default_rng(SEED)
    shapes = {"gain": (WIDTH,), "layers": (2, WIDTH, WIDTH), "out": (WIDTH, WIDTH)}
    return {n: rng.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def make_batch(number: int) -> Any:
    """The rows of micro-step `number`: a pure function of that number."""
    rng = np.random.default_rng((SEED, number))
    lengths = rng.integers(1, WIDTH + 1, size=(ROWS, 1))
    mask = (np.arange(WIDTH) < lengths).astype(np.float32)
    return {"x": rng.normal(size=(ROWS, WIDTH)).astype(np.float32), "mask": mask}


def make_micro_step(tx: ga.MultiSteps, mesh: Mesh) -> Any:
    """`(run, batch, number) -> run`: one micro-step, on any number of devices."""
    accumulate = ga.accumulate(
        loss_fn,
        2,
        rng_argnums=2,
        weight_fn=count_tokens,
        data_axis=ga.DataAxis("data", mesh=mesh, logical_devices=LOGICAL),
    )

    def micro_step(run: Any, batch: Any, number: jax.Array) -> Any:
        key = jax.random.fold_in(jax.random.key(SEED), number)
        start = ga.accumulator.init(run["params"])
        value, acc = accumulate(start, run["params"], batch, key)
        grads, tokens = ga.accumulator.mean(acc), acc.weight
        params, state = ga.apply_gradients(
            tx, grads, run["state"], run["params"], weight=tokens
        )
        losses = run["losses"].at[number].set(value)
        return {"params": params, "state": state, "losses": losses}

    return jax.jit(micro_step, donate_argnums=0)


# -- One life --------------------------------------------------------------------------


class Life(NamedTuple):
    """The work of the processes of one start.

    Attributes:
      folder: the folder of the checkpoints and the result.
      number: the number of the start.
      devices: the number of devices of all processes.
      processes: the number of processes.
      port: the port of `jax.distributed`.
      last: the last micro-step of the run.
      kill_at: the micro-step before which a process kills itself; None in the last.
    """

    folder: pathlib.Path
    number: int
    devices: int
    processes: int
    port: int
    last: int
    kill_at: int | None


def live(life: Life, process_id: int) -> None:
    """The program of each process: from the last checkpoint to the end, or to death."""
    log = os.open(log_of(life, process_id), os.O_WRONLY | os.O_CREAT)
    for output in (sys.stdout, sys.stderr):
        os.dup2(log, output.fileno())
    jax.config.update("jax_num_cpu_devices", life.devices // life.processes)
    if life.processes > 1:
        # Gloo confuses collectives that run at the same time.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        address = f"127.0.0.1:{life.port}"
        jax.distributed.initialize(address, life.processes, process_id)
    mesh = jax.make_mesh((life.devices,), ("data",), axis_types=(AxisType.Auto,))

    def put(tree: Any, spec: P) -> Any:
        """Puts this process's part of an array that all processes have."""
        place = NamedSharding(mesh, spec)
        return jax.tree.map(
            lambda x: jax.make_array_from_callback(x.shape, place, lambda i: x[i]), tree
        )

    tx = ga.MultiSteps(optax.adam(1e-2, eps=1e-6), K)
    params = make_params()
    losses = np.zeros(life.last, np.float32)
    start = {"params": params, "state": tx.init(params), "losses": losses}
    run = put(jax.tree.map(np.asarray, start), P())
    micro_step = make_micro_step(tx, mesh)
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
    )
    with ocp.CheckpointManager(life.folder / "saved", options=options) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, run)
            run = checkpoints.restore(done, args=ocp.args.StandardRestore(like))
        for number in range(done, life.last):
            if number == life.kill_at and process_id == number % life.processes:
                os.kill(os.getpid(), signal.SIGKILL)
            run = micro_step(run, put(make_batch(number), P("data")), np.int32(number))
            # Concurrent steps of virtual devices can wait for each other's threads.
            jax.block_until_ready(run)
            if (number + 1) % SAVE_EVERY == 0 and life.kill_at is not None:
                checkpoints.save(number + 1, args=ocp.args.StandardSave(run))
    leaves = jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), run)
    if process_id == 0:
        named = jax.tree_util.tree_leaves_with_path(leaves)
        named = {jax.tree_util.keystr(path): leaf for path, leaf in named}
        np.savez(life.folder / "result.npz", **named)
    if life.processes > 1:
        multihost_utils.sync_global_devices("the end")
        jax.distributed.shutdown()


def log_of(life: Life, process_id: int) -> pathlib.Path:
    """The log file of a process."""
    return life.folder / f"life_{life.number}_{process_id}.log"


def is_killed(context: Any, life: Life) -> bool:
    """Starts the processes; returns True, and stops all processes, if one was killed.

    Raises:
      RuntimeError: if a process ended with an error; the message has its output.
    """
    processes = [
        context.Process(target=live, args=(life, i)) for i in range(life.processes)
    ]
    for process in processes:
        process.start()
    waiting = {process.sentinel: i for i, process in enumerate(processes)}
    try:
        while waiting:
            for sentinel in multiprocessing.connection.wait(waiting, LIMIT) or [None]:
                process_id = waiting.pop(sentinel, 0)
                processes[process_id].join(0)
                code = processes[process_id].exitcode
                if code == -signal.SIGKILL and life.kill_at is not None:
                    return True
                if code != 0:
                    wrote = log_of(life, process_id).read_text()[-3000:]
                    raise RuntimeError(f"{life} ended with {code}:\n{wrote}")
        return False
    finally:
        for process in processes:
            process.kill()
            process.join()


def free_port() -> int:
    """A free port for processes to meet."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


# -- The experiment --------------------------------------------------------------------


def draw_kills(rng: np.random.Generator, kills: int) -> tuple[list[int], int]:
    """The micro-steps to die before, and how many there are in the whole run."""
    numbers, saved = [], 0
    for _ in range(kills):
        numbers.append(saved + int(rng.integers(1, 2 * SAVE_EVERY + 1)))
        saved = numbers[-1] // SAVE_EVERY * SAVE_EVERY
    return numbers, (saved // K + 2) * K


def different_bits(a: np.ndarray, b: np.ndarray) -> int:
    """In how many bits two arrays differ."""
    x, y = (np.frombuffer(z.tobytes(), np.uint8) for z in (a, b))
    return int(np.sum(np.unpackbits(x ^ y)))


def main(argv: list[str] | None = None) -> int:
    """Runs both, compares them, and returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=200, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="of the kills")
    args = parser.parse_args(argv)
    if args.kills < 1:
        parser.error(f"--kills must be at least 1, but it is {args.kills}.")
    rng = np.random.default_rng(args.seed)
    kills, last = draw_kills(rng, args.kills)
    os.environ |= {
        "JAX_PLATFORMS": "cpu",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    os.environ.pop("XLA_FLAGS", None)  # it may ask for other virtual devices
    used = collections.Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "programs")
        context = multiprocessing.get_context("forkserver")
        for run in ("undisturbed", "killed"):
            (folder / run).mkdir()
        peace = Life(folder / "undisturbed", 0, LOGICAL, 1, free_port(), last, None)
        if is_killed(context, peace):
            raise RuntimeError(f"{peace} was killed.")
        for number, kill_at in enumerate([*kills, None]):
            devices, processes = PLACES[rng.integers(len(PLACES))]
            place = devices, processes, free_port()
            life = Life(folder / "killed", number, *place, last, kill_at)
            if is_killed(context, life) != (kill_at is not None):
                raise RuntimeError(f"{life} was not killed.")
            used[f"{devices} in {processes}"] += 1
            if number % 20 == 19:
                print(f"    {number + 1} lives", flush=True)
        want, got = (
            dict(np.load(folder / run / "result.npz"))
            for run in ("undisturbed", "killed")
        )
    assert want.keys() == got.keys()
    cut = sum(number % K > 0 for number in kills)
    print(f"{args.kills} kills, {cut} of them inside a window")
    print("devices in processes, and how often:", dict(sorted(used.items())))
    step = next(name for name in want if name.endswith("gradient_step"))
    lost = last // K - int(got[step])
    print(f"windows lost: {lost} of {last // K}")
    differ = sum(different_bits(want[name], got[name]) for name in want)
    bits = sum(8 * x.nbytes for x in want.values())
    print(f"bits that differ: {differ} of {bits:,}")
    return 0 if lost == differ == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
