"""Gradients that cross the network once: char_lm.py's model, on many devices.

    python examples/data_parallel.py
    python examples/data_parallel.py --devices 4 --processes 2
    python examples/data_parallel.py --devices 4 --processes 2 --kill

Each device has its own rows of every window, and splits them into micro-batches. The
loss is a mean over the tokens of all rows, so their number crosses the network first, a
few bytes. After the last micro-batch, the sums of gradients are added up over the
devices, once. The program prints what the compiled step communicates (`ga.audit`),
tokens a second, and how far the run is from the same run on a single device without
micro-batches.

The program runs on the accelerators of the machine, or else on eight virtual CPU
devices. `--devices` asks for another number of virtual devices, which the processes
share. `--processes` starts that many processes, which connect through
`jax.distributed`. Each reads its own rows, by `jax.process_index()`, and all of them
write the checkpoints (Orbax). With `--kill` there are two runs. The first is not
disturbed. In the second, the last process is killed half-way; all processes then start
again and resume from the last checkpoint. Both runs must end with the same bits.

It needs flax, matplotlib, orbax-checkpoint and tqdm: the dependency group `demo`.
"""

import argparse
import functools
import hashlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any

import char_lm
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

SAVE_EVERY = 4  # windows
CPU_DEVICES = 8  # where there is no accelerator


def make_config(steps: int) -> char_lm.Config:
    """A small model without dropout, whose masks would depend on the devices."""
    return char_lm.Config(
        layers=2, width=64, heads=2, length=48, dropout=0.0, steps=steps
    )


# -- The devices -----------------------------------------------------------------------


def make_mesh(devices: int | None, processes: int, process_id: int, port: int) -> Mesh:
    """Makes the mesh of all devices of all processes. Call it before JAX starts."""
    if devices is not None:
        jax.config.update("jax_platforms", "cpu")
    share = (devices or CPU_DEVICES) // processes
    jax.config.update("jax_num_cpu_devices", max(share, 1))  # of any other kind, all
    if processes > 1:
        # Gloo confuses collectives that run at the same time.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{port}", processes, process_id)
    return jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))


def own_rows(window: np.ndarray) -> np.ndarray:
    """The rows of a window that this process feeds to its devices."""
    return np.split(window, jax.process_count())[jax.process_index()]


# -- One step --------------------------------------------------------------------------


def make_step(config: char_lm.Config, mesh: Mesh, num_microbatches: int) -> Any:
    """`(params, state, tokens) -> (params, state, loss)`, over one window."""
    tx = char_lm.make_optimizer(config)
    value_and_grad = ga.value_and_grad(
        functools.partial(char_lm.loss_fn, char_lm.make_model(config)),
        num_microbatches,
        data_axis=ga.DataAxis("data", mesh=mesh),
    )

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = value_and_grad(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def make_undivided_step(config: char_lm.Config) -> Any:
    """The same on one device, without micro-batches, with only JAX and Optax."""
    tx = char_lm.make_optimizer(config)
    loss_fn = functools.partial(char_lm.loss_fn, char_lm.make_model(config))

    def step(params: Any, state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    return jax.jit(step, donate_argnums=(0, 1))


def start(config: char_lm.Config) -> Any:
    """Parameters, the optimizer's state, and an array for the loss of each step."""
    params = char_lm.init_params(config)
    state = char_lm.make_optimizer(config).init(params)
    return {"params": params, "state": state, "losses": jnp.zeros(config.steps)}


# -- The run ---------------------------------------------------------------------------


def open_checkpoints(folder: pathlib.Path) -> ocp.CheckpointManager:
    """The checkpoints of all processes. `save` returns after it has written one."""
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(folder.absolute(), options=options)


def train(
    config: char_lm.Config,
    mesh: Mesh,
    num_microbatches: int,
    folder: pathlib.Path,
    kill_at: int | None,
) -> Any:
    """Runs to the end, starting from the last checkpoint in `folder`, if any."""
    say = print if jax.process_index() == 0 else lambda *args, **kwargs: None
    corpus = char_lm.load_corpus(config.length)
    key = char_lm.make_key(config, "windows")
    everywhere = NamedSharding(mesh, P())
    split = NamedSharding(mesh, P("data"))
    # Every process makes the same arrays, so this needs no communication.
    run = jax.tree.map(
        lambda x: jax.make_array_from_callback(x.shape, everywhere, lambda i: x[i]),
        jax.tree.map(np.asarray, start(config)),
    )
    step = make_step(config, mesh, num_microbatches)

    with open_checkpoints(folder) as checkpoints:
        done = checkpoints.latest_step() or 0
        if done:
            like = jax.tree.map(ocp.utils.to_shape_dtype_struct, run)
            run = checkpoints.restore(done, args=ocp.args.StandardRestore(like))
            say(f"    restored after window {done} of {config.steps}", flush=True)
        tokens = seconds = 0.0
        for i in range(done, config.steps):
            if i == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            begin = time.perf_counter()
            window = char_lm.draw_window(corpus.train, key, i, config.batch_size)
            rows = jax.make_array_from_process_local_data(split, own_rows(window))
            if i == 0:
                program = step.lower(run["params"], run["state"], rows).compile()
                say(f"\n{ga.audit(program, mesh)}\n", flush=True)
            params, state, loss = step(run["params"], run["state"], rows)
            losses = run["losses"].at[i].set(loss)
            run = {"params": params, "state": state, "losses": losses}
            jax.block_until_ready(run)
            if i > done:  # the first call compiles
                tokens += np.count_nonzero(window[:, 1:])
                seconds += time.perf_counter() - begin
            if (i + 1) % SAVE_EVERY == 0 or i + 1 == config.steps:
                checkpoints.save(i + 1, args=ocp.args.StandardSave(run), force=True)
    if seconds:
        say(f"    {tokens / seconds:,.0f} tokens a second", flush=True)
    # Every device holds the whole run, so each process reads its own copy.
    return jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), run)


def train_alone(config: char_lm.Config) -> Any:
    """The same windows as undivided batches on one device."""
    corpus = char_lm.load_corpus(config.length)
    key = char_lm.make_key(config, "windows")
    step, run = make_undivided_step(config), start(config)
    params, state, losses = run["params"], run["state"], []
    for i in range(config.steps):
        window = char_lm.draw_window(corpus.train, key, i, config.batch_size)
        params, state, loss = step(params, state, window)
        losses.append(float(loss))
    return {"params": params, "losses": np.array(losses)}


def compare(run: Any, alone: Any) -> None:
    """Prints how far a run on many devices is from the run on one."""
    off = np.abs(run["losses"] - alone["losses"])
    distance, size = (
        np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))
        for tree in (
            jax.tree.map(lambda a, b: a - b, run["params"], alone["params"]),
            alone["params"],
        )
    )
    print(
        f"    loss {run['losses'][0]:.4f} to {run['losses'][-1]:.4f}; against one "
        f"device and undivided batches: first loss off by {off[0]:.1e}, largest "
        f"{np.max(off):.1e}, parameters by {distance / size:.1e} of their norm"
    )


def digest(run: Any) -> str:
    """A hash of all bits of a run."""
    leaves = (np.ascontiguousarray(x).tobytes() for x in jax.tree.leaves(run))
    return hashlib.sha256(b"".join(leaves)).hexdigest()[:16]


def work(args: argparse.Namespace) -> None:
    """The program of each process."""
    mesh = make_mesh(args.devices, args.processes, args.process_id, args.port)
    config = make_config(args.steps)
    if config.batch_size % (mesh.size * args.num_microbatches):
        raise SystemExit(
            f"{mesh.size} devices with {args.num_microbatches} micro-batches each must "
            f"divide a window of {config.batch_size} lines."
        )
    first = jax.process_index() == 0
    if first:
        print(
            f"    {mesh.size} devices, processes: {jax.process_count()}, "
            f"{args.num_microbatches} micro-batches on each, "
            f"{config.batch_size} lines in a window",
            flush=True,
        )
    run = train(config, mesh, args.num_microbatches, args.folder, args.kill_at)
    if first:
        compare(run, train_alone(config))
        (args.folder / "digest").write_text(digest(run))
    if jax.process_count() > 1:
        # The others must not leave before process 0 does.
        multihost_utils.sync_global_devices("the end")
        jax.distributed.shutdown()


# -- Processes -------------------------------------------------------------------------


def free_port() -> int:
    """A free port for the coordinator."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def pass_on(lines: Any) -> None:
    """Prints the output of a process, without Gloo's greetings."""
    for line in lines:
        if "[Gloo]" not in line and "peer ranks" not in line:
            print(line, end="", flush=True)


def run_all(
    args: argparse.Namespace, folder: pathlib.Path, kill_at: int | None = None
) -> bool:
    """Starts all processes, and returns whether all of them finished.

    If one dies, the others would wait for it, so this stops them at once.
    """
    folder.mkdir(exist_ok=True)
    port = free_port()
    workers = []
    for process_id in range(args.processes):
        command = [
            *(sys.executable, __file__, "--folder", str(folder)),
            *("--steps", str(args.steps), "--processes", str(args.processes)),
            *("--num-microbatches", str(args.num_microbatches)),
            *("--process-id", str(process_id), "--port", str(port)),
        ]
        if args.devices is not None:
            command += ["--devices", str(args.devices)]
        if kill_at is not None and process_id == args.processes - 1:
            command += ["--kill-at", str(kill_at)]
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # All runs share their compiled programs.
            "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
        }
        environment.pop("XLA_FLAGS", None)  # it may ask for other virtual devices
        # A process that loses another one prints errors, which are expected here.
        stderr = None if kill_at is None else subprocess.DEVNULL
        worker = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=stderr, text=True
        )
        threading.Thread(target=pass_on, args=(worker.stdout,), daemon=True).start()
        workers.append(worker)
    try:
        while all(worker.poll() in (None, 0) for worker in workers):
            if all(worker.poll() == 0 for worker in workers):
                return True
            time.sleep(0.1)
        return False
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()


def main(argv: list[str] | None = None) -> int:
    """Runs once, or twice with `--kill`, and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    virtual = (
        f"virtual CPU devices; default: all accelerators, or {CPU_DEVICES} of these"
    )
    parser.add_argument("--devices", type=int, metavar="N", help=virtual)
    parser.add_argument("--processes", type=int, metavar="N", default=1)
    parser.add_argument("--num-microbatches", type=int, metavar="N", default=2)
    parser.add_argument("--steps", type=int, metavar="N", default=16)
    parser.add_argument("--kill", action="store_true", help="kill a process half-way")
    for hidden in ("--process-id", "--port", "--kill-at"):
        parser.add_argument(hidden, type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=pathlib.Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    sizes = (args.processes, args.num_microbatches, args.steps)
    if min(sizes) < 1 or (args.devices or args.processes) % args.processes:
        parser.error("All numbers must be at least 1, and processes share the devices.")
    if args.process_id is not None:
        work(args)
        return 0

    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        print("Undisturbed:", flush=True)
        if not run_all(args, folder / "peaceful"):
            return 1
        if not args.kill:
            return 0
        kill_at = args.steps // 2 + 1
        print(f"With the last process killed before window {kill_at + 1}:", flush=True)
        if run_all(args, folder / "killed", kill_at):
            print("The process that should have been killed finished.")
            return 1
        print("    killed; all processes start again", flush=True)
        if not run_all(args, folder / "killed"):
            return 1
        digests = [
            (folder / run / "digest").read_text() for run in ("peaceful", "killed")
        ]
        same = digests[0] == digests[1]
        print(f"{'Same bits' if same else 'DIFFERENT BITS'}: {' and '.join(digests)}")
        return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
