"""A digest of the program of every loss of the corpora: did a redesign change one?

    python tests/digests.py > before.txt
    python tests/digests.py > after.txt      # and then: diff before.txt after.txt
    python tests/digests.py batch_norm mesh  # those with all of these words

Each line has a digest of a program as JAX lowers it (StableHLO), with passes and loops,
without lines of code, and without names of functions; of a report, that of its text; of
a call outside of `jit`, that of the bits of its results. If a line differs, something
else runs. PYTHONPATH= names another checkout whose digests are taken. They are those of
one version of JAX, on CPUs.
"""

import hashlib
import os
import pathlib
import re
import sys
import warnings

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
sys.path.append(str(pathlib.Path(__file__).parent))

import jax
import jax.numpy as jnp
import numpy as np
import optax
from corpus import architectures, losses, models, random_programs, scans
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ga_optax as ga

MESH = jax.make_mesh((4,), ("data",), (AxisType.Auto,), devices=jax.devices()[:4])
AXIS = ga.DataAxis("data", mesh=MESH)
LOGICAL = ga.DataAxis("data", mesh=MESH, logical_devices=4)
SHARDED = NamedSharding(MESH, PartitionSpec("data"))


def cast(tree, dtype):
    """The tree, whose floats have this dtype."""
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)  # noqa: E731
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(x) else x, tree)


def text(lowered):
    """The program without names and addresses: functions are numbered as they come."""
    names = {}
    number = lambda found: names.setdefault(found[0], f"@{len(names)}")  # noqa: E731
    program = re.sub(r"0x[0-9a-f]+|\b\d{12,}\b", "address", lowered.as_text())
    return re.sub(r'(?<!custom_call )@(?:[\w.$-]+|"[^"]*")', number, program)


def lowered(fun, *args):
    """The text of the program that `jax.jit` runs."""
    return text(jax.jit(fun).lower(*args))


def bits(fun, *args):
    """The results of a call outside of `jit`."""
    leaves = [np.asarray(x) for x in jax.tree.leaves(fun(*args))]
    return "".join(f"{x.dtype}{x.shape}{x.tobytes().hex()}" for x in leaves)


def whole(k, **options):
    """The program of `value_and_grad`."""
    return lambda f, *args: lowered(ga.value_and_grad(f, k, **options), *args)


def accumulated(loss, k, **options):
    """A step of `accumulate`."""
    step = ga.accumulate(loss, k, **options)
    return lambda p, b: step(ga.accumulator.init(p), p, b)


def in_calls(loss, k, emit=None):
    """A micro-step of `MultiSteps`."""
    tx = ga.MultiSteps(optax.adam(1e-3), k)

    def step(p, b):
        grads = jax.grad(loss)(p, b)
        return ga.apply_gradients(tx, grads, tx.init(p), p, emit=emit)

    return step


def flushed(loss):
    """A window that is closed early."""
    tx = ga.MultiSteps(optax.sgd(1e-3), 4)

    def step(p, b):
        _, state = tx.update(jax.grad(loss)(p, b), tx.init(p), p)
        return ga.flush(tx, state, p)

    return step


def of_rows(loss, k):
    """The gradient of `microbatch`, of the rows as well."""
    return jax.grad(ga.microbatch(loss, k), (0, 1), allow_int=True)


def twice(loss, k):
    """A second derivative."""
    value = ga.microbatch(loss, k)
    return jax.grad(lambda p, b: optax.global_norm(jax.grad(value)(p, b)))


# What is made of a loss, by name: a function of the loss, of parameters and a batch.
WAYS = {
    **{f"value_and_grad, {k}": whole(k) for k in (1, 2, 3, 4)},
    "bfloat16": lambda f, *a: whole(4)(f, *cast(a, jnp.bfloat16)),
    "bfloat16, accumulate": lambda f, *a: lowered(
        accumulated(f, 2), *cast(a, jnp.bfloat16)
    ),
    "optimize=False": whole(4, optimize=False),
    "residual_bytes=0": whole(4, residual_bytes=0),
    "microbatch": lambda f, *a: lowered(ga.microbatch(f, 4), *a),
    "gradient of microbatch": lambda f, *a: lowered(of_rows(f, 4), *a),
    "second derivative": lambda f, *a: lowered(twice(f, 2), *a),
    "accumulate": lambda f, *a: lowered(accumulated(f, 4), *a),
    "not jitted": lambda f, *a: bits(ga.value_and_grad(f, 4), *a),
    "report": lambda f, *a: str(ga.batch_dependencies(f, 4)(*a).details),
    "mesh": whole(3, data_axis=AXIS),
    "mesh of the compiler": lambda f, p, b: whole(3)(f, p, jax.device_put(b, SHARDED)),
    "mesh, accumulate": lambda f, *a: lowered(accumulated(f, 3, data_axis=AXIS), *a),
    "mesh, logical devices": lambda f, *a: lowered(
        accumulated(f, 3, data_axis=LOGICAL), *a
    ),
    "MultiSteps": lambda f, *a: lowered(in_calls(f, 4), *a),
    "MultiSteps, emit": lambda f, *a: lowered(in_calls(f, 4, True), *a),
    "MultiSteps, flush": lambda f, *a: lowered(flushed(f), *a),
}
FEW = {
    name: WAYS[name]
    for name in (
        *("value_and_grad, 3", "microbatch", "gradient of microbatch"),
        *("accumulate", "report"),
    )
}


def cases():
    """`(name, ways, loss, parameters, batch)` of each loss."""
    args = losses.arguments(24, jnp.float32)
    for name, row in losses.LOSSES.items():
        yield name, WAYS, row.value, *args
    for body in scans.BODIES:
        for how in (scans.How(), scans.How(remat=True), scans.How(reverse=True)):
            told = f"{', remat' * how.remat}{', reverse' * how.reverse}"
            args = scans.arguments(how.length, 12, jnp.float32)
            ways = FEW if told else WAYS
            yield f"scan {body.__name__}{told}", ways, scans.loss_of(body, how), *args
    for name, make in architectures.MODELS.items():
        loss, params, batch = make()
        yield name, FEW, loss, params, batch
    for seed in range(12):
        loss, *args = models.draw(seed, 12)
        yield f"model {seed}", FEW, lambda *args, f=loss: f(*args)[0], *args
    ways = {"value_and_grad, 3": whole(3, batch_axes=random_programs.AXES)}
    for seed in range(40):
        program = random_programs.draw(seed)
        args = cast(program.arguments(), jnp.float32)
        yield f"program {seed}", ways, lambda *args, f=program: f.run(*args)[0], *args


def digest(way, *case):
    """The digest of the outcome, which may be an error."""
    kind = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = way(*case)
    except Exception as error:  # Any: the user's loss, or what is refused.
        kind = f" {type(error).__name__}"
        found = f"{type(error).__name__}: {error}"
    return f"{hashlib.sha256(found.encode()).hexdigest()[:12]}{kind}"


def main(words):
    """Prints the digests."""
    for name, ways, *case in cases():
        for way in ways:
            if all(word in f"{name}: {way}" for word in words):
                print(f"{name}: {way}  {digest(ways[way], *case)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
