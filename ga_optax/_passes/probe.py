"""A check that this version of JAX writes programs as the passes read them.

A small program with all primitives is traced once in a process. If a primitive has
another name, or lacks a parameter, calls run the plain loop, and a warning says so.
"""

import concurrent.futures
import functools
import warnings
from typing import Any

import jax
import jax.numpy as jnp

from ga_optax._passes import read
from ga_optax._passes.primitives import ADD_TO, CAST, NEW_REF, PRODUCT, READ_OUT, WRITE

# Parameters that the passes read or give, by primitive.
PARAMETERS = {
    "scan": ("length", "reverse", "unroll"),
    "jit": ("in_shardings", "out_shardings", "in_layouts", "donated_invars"),
    "remat2": ("prevent_cse", "policy"),
    PRODUCT: ("dimension_numbers", "precision", "preferred_element_type"),
    CAST: ("new_dtype", "weak_type", "sharding"),
    "broadcast_in_dim": ("shape", "broadcast_dimensions", "sharding"),
    **dict.fromkeys((NEW_REF, ADD_TO, WRITE, READ_OUT), ()),
}


@functools.cache
def usable() -> bool:
    """True if programs can be changed; warns if not."""
    missing = differences()
    if missing:
        warnings.warn(
            f"ga_optax changes no program with jax {jax.__version__}, which lacks "
            f"{', '.join(missing)}. Calls run the plain loop, which takes more memory, "
            "and groupings agree to rounding only. Use a newer ga_optax; "
            "optimize=False runs the same loop without this warning.",
            stacklevel=2,
        )
    return not missing


def differences() -> list[str]:
    """The names and parameters in `PARAMETERS` that this JAX does not have.

    The program is traced in another thread, which no context of the caller reaches: in
    the context of a mesh the program would have other types, or fail.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_differences).result()


def _differences() -> list[str]:
    try:
        with jax.disable_jit(False), jax.numpy_dtype_promotion("standard"):
            equations = list(read.equations(_probe_program()))
        by_name: dict[str, Any] = {e.primitive.name: e for e in equations}
        missing = []
        for name, parameters in PARAMETERS.items():
            if name not in by_name:
                missing.append(f"the primitive {name}")
            else:
                params = by_name[name].params
                missing += [
                    f"{name}'s parameter {x}" for x in parameters if x not in params
                ]
        if not missing:
            scan = read.scan_of(by_name["scan"])
            roles = scan.num_consts, scan.num_carry, len(scan.body.jaxpr.invars)
            if roles != (1, 1, 3):
                missing = ["a scan's arguments in the order (consts, carry, slices)"]
    except Exception as error:  # Any: what it will be is not known.
        missing = [f"something that raises {type(error).__name__}: {error}"]
    return missing


def _probe_program() -> Any:
    """A program with every primitive of `PARAMETERS` in it."""

    @jax.jit
    def scanned(w: Any, x: Any, scale: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            return h @ w.astype(h.dtype) * jnp.broadcast_to(scale, h.shape), None

        return jax.lax.scan(layer, x, w)[0]

    def run(w: Any, x: Any, scale: Any) -> Any:
        ref = jax.new_ref(scanned(w, x, scale))
        ref[...] = x
        jax.ref.addupdate(ref, ..., x)
        return jax.ref.freeze(ref)

    shapes = ((1, 2, 2), jnp.bfloat16), ((2, 2), jnp.float32), ((), jnp.float32)
    program: Any = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    return program.jaxpr
