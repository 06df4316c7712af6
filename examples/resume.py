"""Killed in the middle of a window, restored in a new process: the same bits.

    python examples/resume.py

A small network learns scikit-learn's digits, four micro-batches of 16 a step, in four
ways side by side: `MultiSteps` with `apply_gradients`, `accumulate` with the
accumulator in the checkpoint, the Flax train state, and the NNX optimizer. Orbax writes
a checkpoint every third micro-step, so most checkpoints are inside a window.

There are two runs. The first is not disturbed. The second runs in processes that are
killed with SIGKILL at random micro-steps; each new process restores the last complete
checkpoint and continues. At the end the program compares every bit of the parameters,
optimizer states, accumulators and losses of both runs. Any difference ends it with an
error.

Nothing about the data is saved. The examples of a micro-step depend only on the seed
and on the number of the micro-step, see `ga_optax.data`.

It needs chex, flax, orbax-checkpoint and scikit-learn: the dependency group `demo`.
"""

import argparse
import functools
import hashlib
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import sklearn.datasets
from flax import nnx

import ga_optax as ga
import ga_optax.flax
from ga_optax import accumulator, data, testing

BATCH = 64  # examples in a window
K = 4  # micro-batches in a window
SAVE_EVERY = 3  # micro-steps; not a multiple of K, so that it cuts windows
SEED = 0

# -- The task --------------------------------------------------------------------------


def micro_batch(images: np.ndarray, labels: np.ndarray, number: int) -> Any:
    """The examples of micro-step `number`: a pure function of that number."""
    step, position = divmod(number, K)
    key = jax.random.key(SEED)
    rows = np.asarray(data.window_indices(key, step, len(labels), BATCH, K))[position]
    return images[rows], labels[rows]


def cross_entropy(logits: jax.Array, labels: Any) -> jax.Array:
    """The mean over the examples."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, labels))


def mlp_loss(params: Any, batch: Any) -> jax.Array:
    """The loss of a network of two layers. Its parameters are a dictionary."""
    images, labels = batch
    hidden = jnp.tanh(images @ params["hidden"] + params["bias"])
    return cross_entropy(hidden @ params["out"], labels)


def mlp_params(width: int) -> Any:
    """The initial parameters of that network."""
    shapes = {"hidden": (64, width), "bias": (width,), "out": (width, 10)}
    rng = np.random.default_rng(SEED)
    return {
        name: jnp.asarray(rng.normal(scale=0.1, size=shape), jnp.float32)
        for name, shape in shapes.items()
    }


class Model(nnx.Module):
    """The same network in NNX."""

    def __init__(self, width: int, rngs: nnx.Rngs) -> None:
        """Makes its two layers."""
        self.hidden = nnx.Linear(64, width, rngs=rngs)
        self.out = nnx.Linear(width, 10, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Maps `[batch, 64]` to logits `[batch, 10]`."""
        return self.out(jnp.tanh(self.hidden(images)))


def nnx_loss(model: Model, batch: Any) -> jax.Array:
    """The loss of `Model`."""
    return cross_entropy(model(batch[0]), batch[1])


# -- Four ways to accumulate -----------------------------------------------------------


class Way(NamedTuple):
    """One way to accumulate across calls.

    Attributes:
      start: `() -> state`: everything that a checkpoint has to hold, a tree of arrays.
      micro_step: `(state, batch, closes) -> (state, loss)`. `closes` says whether this
        is the last micro-step of a window. Only `accumulate` needs it.
    """

    start: Callable[[], Any]
    micro_step: Callable[[Any, Any, bool], tuple[Any, jax.Array]]


def make_ways(width: int = 32) -> dict[str, Way]:
    """The four ways, by name."""
    opt = optax.adam(3e-3, eps=1e-6)
    tx = ga.MultiSteps(opt, K)
    compiled = functools.partial(jax.jit, donate_argnums=0, static_argnums=2)

    def start_multi_steps() -> Any:
        params = mlp_params(width)
        return {"params": params, "opt_state": tx.init(params)}

    @compiled
    def multi_steps(state: Any, batch: Any, closes: bool) -> Any:
        del closes  # the state counts micro-steps
        loss, grads = jax.value_and_grad(mlp_loss)(state["params"], batch)
        params, opt_state = ga.apply_gradients(
            tx, grads, state["opt_state"], state["params"]
        )
        return {"params": params, "opt_state": opt_state}, loss

    def start_accumulate() -> Any:
        params = mlp_params(width)
        return {
            "params": params,
            "opt_state": opt.init(params),
            "accumulator": accumulator.init(params),
        }

    @compiled
    def accumulate(state: Any, batch: Any, closes: bool) -> Any:
        params, opt_state = state["params"], state["opt_state"]
        loss, acc = ga.accumulate(mlp_loss)(state["accumulator"], params, batch)
        if closes:
            updates, opt_state = opt.update(accumulator.mean(acc), opt_state, params)
            params, acc = optax.apply_updates(params, updates), accumulator.init(params)
        new = {"params": params, "opt_state": opt_state, "accumulator": acc}
        return new, loss

    def start_train_state() -> Any:
        state = ga_optax.flax.TrainState.create(
            apply_fn=mlp_loss, params=mlp_params(width), tx=tx
        )
        return jax.tree.map(jnp.asarray, state)  # Flax's first step is a Python int

    @compiled
    def train_state(state: Any, batch: Any, closes: bool) -> Any:
        del closes
        loss, grads = jax.value_and_grad(state.apply_fn)(state.params, batch)
        return state.apply_gradients(grads=grads), loss

    model = Model(width, nnx.Rngs(SEED))
    optimizer = ga_optax.flax.Optimizer(model, tx, wrt=nnx.Param)
    graph, first = nnx.split((model, optimizer))
    first = nnx.as_pure(first)

    @compiled
    def nnx_optimizer(state: Any, batch: Any, closes: bool) -> Any:
        del closes
        model, optimizer = nnx.merge(graph, state)
        loss, grads = nnx.value_and_grad(nnx_loss)(model, batch)
        optimizer.update(model, grads)
        return nnx.as_pure(nnx.state((model, optimizer))), loss

    return {
        "multi_steps": Way(start_multi_steps, multi_steps),
        "accumulate": Way(start_accumulate, accumulate),
        "train_state": Way(start_train_state, train_state),
        "nnx": Way(lambda: jax.tree.map(jnp.copy, first), nnx_optimizer),
    }


# -- Checkpoints -----------------------------------------------------------------------


def open_checkpoints(folder: pathlib.Path) -> ocp.CheckpointManager:
    """The checkpoints in a folder. `save` returns after it has written one.

    Orbax can also write in the background. This program waits instead, because the next
    micro-step takes over the buffers of the state.
    """
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2, enable_async_checkpointing=False
    )
    return ocp.CheckpointManager(
        folder.absolute(),
        options=options,
        item_handlers=ocp.StandardCheckpointHandler(),  # for `item_metadata` below
    )


def save(checkpoints: ocp.CheckpointManager, number: int, tree: Any) -> None:
    """Writes a checkpoint after `number` micro-steps, completely or not at all.

    With it goes a checksum of all that it holds, since Orbax keeps none.
    """
    checkpoints.save(
        number,
        args=ocp.args.StandardSave(tree),
        custom_metadata={"sha256": checksum(tree)},
        force=True,
    )


def checksum(tree: Any) -> str:
    """The SHA-256 of the name, dtype, shape and bytes of every leaf."""
    digest = hashlib.sha256()
    for name, leaf in sorted(named_leaves(tree).items()):
        array = np.asarray(leaf)
        digest.update(f"{name} {array.dtype.name}{array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their paths, the same before and after it was saved."""
    paths = jax.tree_util.tree_flatten_with_path(tree)[0]
    name = functools.partial(jax.tree_util.keystr, simple=True, separator="/")
    return {name(path): leaf for path, leaf in paths}


def restore(checkpoints: ocp.CheckpointManager, number: int, like: Any) -> Any:
    """Reads the checkpoint after `number` micro-steps, with the shapes of `like`.

    Orbax itself compares the names. But if a shape differs, its error does not name the
    leaf. If a dtype differs, it converts silently, and the run would continue with
    different bits. So this function compares names, shapes and dtypes first. If they
    differ, it reads and changes nothing. Bytes that changed on the disk Orbax may
    restore without a word, so the checksum is compared at the end.

    Raises:
      ValueError: if a leaf does not fit; the message has the path of the first one. Or
        if what was read is not what was saved.
    """
    wanted = named_leaves(like)
    saved = named_leaves(checkpoints.item_metadata(number).tree)
    for path in [*wanted, *(path for path in saved if path not in wanted)]:
        want, got = (
            f"{np.dtype(tree[path].dtype).name}{list(tree[path].shape)}"
            if path in tree
            else "nothing"
            for tree in (wanted, saved)
        )
        if want != got:
            raise ValueError(
                f"The checkpoint of micro-step {number} must fit the model: at {path} "
                f"the model has {want}, but the checkpoint has {got}. Use the model "
                "and the optimizer with which it was saved, or choose another folder. "
                "The files were not changed."
            )
    restored = checkpoints.restore(number, args=ocp.args.StandardRestore(like))
    saved, actual = checkpoints.metadata(number).custom_metadata, checksum(restored)
    if saved["sha256"] != actual:
        raise ValueError(
            f"The checkpoint of micro-step {number} must have the SHA-256 "
            f"{saved['sha256'][:12]}..., but the files give {actual[:12]}...: they "
            "have changed on the disk. Delete that checkpoint; the run continues from "
            "the previous one."
        )
    return restored


# -- The run ---------------------------------------------------------------------------


def start(ways: dict[str, Way], micro_steps: int) -> Any:
    """Everything that a checkpoint holds, before the first micro-step."""
    return {
        "states": {name: way.start() for name, way in ways.items()},
        "losses": {name: jnp.zeros(micro_steps) for name in ways},
    }


def train(
    folder: pathlib.Path, ways: dict[str, Way], steps: int, kill_at: int | None = None
) -> None:
    """Runs to the end, starting from the last checkpoint in `folder`, if any.

    Args:
      folder: the folder of the checkpoints.
      ways: what to run, side by side.
      steps: the number of windows in the whole run.
      kill_at: the micro-step before which the process kills itself with SIGKILL.
    """
    digits: Any = sklearn.datasets.load_digits()
    images = (digits["data"] / 16).astype(np.float32)
    labels = digits["target"].astype(np.int32)
    micro_steps = steps * K
    with open_checkpoints(folder) as checkpoints:
        run, done = start(ways, micro_steps), checkpoints.latest_step() or 0
        if done:
            run = restore(checkpoints, done, run)
            print(f"    restored after micro-step {place(done)}", flush=True)
        for number in range(done, micro_steps):
            if number == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            batch = micro_batch(images, labels, number)
            closes = (number + 1) % K == 0
            for name, way in ways.items():
                state, loss = way.micro_step(run["states"][name], batch, closes)
                run["states"][name] = state
                run["losses"][name] = run["losses"][name].at[number].set(loss)
            if (number + 1) % SAVE_EVERY == 0 or number + 1 == micro_steps:
                save(checkpoints, number + 1, run)


def place(number: int) -> str:
    """The position in the run after `number` micro-steps, in words."""
    inside = number % K
    where = f"{inside} of {K} in its window" if inside else "between two windows"
    return f"{number} ({where})"


def finished(folder: pathlib.Path, ways: dict[str, Way], steps: int) -> Any:
    """The last checkpoint of a run that has finished."""
    with open_checkpoints(folder) as checkpoints:
        assert checkpoints.latest_step() == steps * K
        return restore(checkpoints, steps * K, start(ways, steps * K))


def compare(interrupted: Any, peaceful: Any) -> None:
    """Asserts that two runs ended with the same bits; prints a line for each way."""
    for name, losses in peaceful["losses"].items():
        testing.assert_trees_bitwise_equal(
            interrupted["states"][name], peaceful["states"][name]
        )
        testing.assert_trees_bitwise_equal(interrupted["losses"][name], losses)
        size = sum(x.nbytes for x in jax.tree.leaves(peaceful["states"][name]))
        first, last = (float(jnp.mean(part)) for part in (losses[:K], losses[-K:]))
        print(
            f"    {name:12} same bits: state ({size:,} bytes) and {len(losses)} losses "
            f"({first:.4f} to {last:.4f})"
        )


def in_a_new_process(
    folder: pathlib.Path, steps: int, kill_at: int | None
) -> subprocess.CompletedProcess[str]:
    """Runs this program again, in a folder with or without checkpoints."""
    command = [sys.executable, __file__, "--steps", str(steps), "--work-in", folder]
    if kill_at is not None:
        command += ["--kill-at", str(kill_at)]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        # All processes share their compiled programs.
        "JAX_COMPILATION_CACHE_DIR": str(folder.parent / "programs"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    return subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=False
    )


def main(argv: list[str] | None = None) -> int:
    """Trains without kills, then with kills, and compares; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=8, help="default: %(default)s")
    parser.add_argument("--kills", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=SEED, help="for the kills")
    parser.add_argument("--work-in", type=pathlib.Path, help=argparse.SUPPRESS)
    parser.add_argument("--kill-at", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.steps < 1 or not 0 <= args.kills < args.steps * K:
        parser.error("--steps must be at least 1, and --kills less than micro-steps.")
    if args.work_in is not None:
        train(args.work_in, make_ways(), args.steps, args.kill_at)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        experiment(pathlib.Path(folder), args.steps, args.kills, args.seed)
    return 0


def experiment(folder: pathlib.Path, steps: int, kills: int, seed: int) -> None:
    """The whole program, as described at the top of the file."""
    print(f"Undisturbed: {steps} steps of {K} micro-batches.", flush=True)
    child = in_a_new_process(folder / "peaceful", steps, None)
    assert child.returncode == 0, child.returncode

    numbers = np.random.default_rng(seed).permutation(np.arange(1, steps * K))
    for kill_at in [*sorted(numbers[:kills].tolist()), None]:
        print("In a new process, in another folder:", flush=True)
        child = in_a_new_process(folder / "killed", steps, kill_at)
        print(child.stdout, end="")
        if kill_at is None:
            assert child.returncode == 0, child.returncode
            print("    finished")
        else:
            assert child.returncode == -signal.SIGKILL, child.returncode
            print(f"    killed after micro-step {place(kill_at)}")

    print("At the end of both runs:")
    ways = make_ways()
    compare(
        finished(folder / "killed", ways, steps),
        finished(folder / "peaceful", ways, steps),
    )

    print("A wider model does not fit the same checkpoints:")
    message = "no error: it was restored"
    try:
        finished(folder / "killed", make_ways(width=48), steps)
    except ValueError as error:
        message = str(error)
    print(textwrap.indent(textwrap.fill(message, 80), "    "))
    assert "the model has float32[48]" in message, message


if __name__ == "__main__":
    sys.exit(main())
