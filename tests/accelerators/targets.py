"""Compilers of accelerators on a machine that has none: import it before a backend."""

import contextlib
import functools
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

# libtpu must not lock the machine. The plugin for GPUs must not look for a driver, and
# there is no GPU on which it could time kernels.
os.environ |= {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 " + os.environ.get("XLA_FLAGS", ""),
}

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, SingleDeviceSharding

from ga_optax._compiled import plan

jax.config.update("jax_platforms", "cpu")  # where arrays lie
# What was compiled for a device that is not there cannot be loaded for it.
jax.config.update("jax_enable_compilation_cache", False)

TARGETS = ("h200", "v5e", "v5p", "v6e")


@contextlib.contextmanager
def flags(options: dict[str, Any]) -> Iterator[None]:
    """Options in `XLA_FLAGS`, where they are looked up; XLA read it when it started."""
    before = os.environ["XLA_FLAGS"]
    said = [f"--{name}={str(value).lower()}" for name, value in options.items()]
    os.environ["XLA_FLAGS"] = " ".join([before, *said])
    yield
    os.environ["XLA_FLAGS"] = before


@functools.cache
def device(target: str) -> Any:
    """The first device of a target."""
    return plan.find_machine(target).topology.devices[0]


def compiled(
    target: str,
    fun: Callable[..., Any],
    *args: Any,
    donate_argnums: Any = (),
    **options: Any,
) -> jax.stages.Compiled:
    """`fun`, jitted and compiled for a target; only shapes of `args` are read."""
    sharding = SingleDeviceSharding(device(target))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    # The suite has several CPUs, for all of which a program may be, if it names none.
    one = AbstractMesh((1,), ("one",), axis_types=(AxisType.Auto,))
    with flags(options), jax.sharding.use_abstract_mesh(one):
        lowered = jax.jit(fun, donate_argnums=donate_argnums).lower(*shapes)
    return lowered.compile(compiler_options=options)


def shapes(tree: Any) -> Any:
    """The types of arrays of float32, of a tree of their dimensions."""
    of = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    return jax.tree.map(of, tree, is_leaf=lambda x: isinstance(x, tuple))


def of_adam(target: str, gradient: Any, params: Any, x: Any, **options: Any) -> Any:
    """A step of Adam for types of parameters and of a batch, compiled."""
    tx = optax.adam(1e-3)

    def step(params: Any, state: Any, x: Any) -> Any:
        value, grads = gradient(params, x)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = params, jax.eval_shape(tx.init, params), x
    return compiled(target, step, *args, donate_argnums=(0, 1), **options)


def computations(program: jax.stages.Compiled) -> dict[str, list[str]]:
    """The instructions of each computation, by its name; the entry's is "ENTRY"."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.as_text().splitlines():
        opens = re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)
        if opens and not line.startswith(" "):
            lines = found["ENTRY" if opens[1] else opens[2]] = []
        elif " = " in line:
            lines.append(line)
    return found


def temporaries(program: jax.stages.Compiled) -> int:
    """The bytes of its temporaries."""
    return plan.temporaries(program.memory_analysis())
