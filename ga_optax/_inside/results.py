"""What `fun` returns: loss, carry and aux, taken apart, checked and put together."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._checks import check_structure, named_leaves
from ga_optax._devices import collectives, membership
from ga_optax._inside import aux_modes
from ga_optax._inside.call import Call
from ga_optax._inside.options import Options


class Value(NamedTuple):
    """The value of a window, in the parts that devices return it in.

    Attributes:
      loss: the loss.
      carry: the carry, a tuple.
      shared: the aux, with None for leaves that were collected: of several devices,
        each has its own part of those.
      collected: those leaves, in the tree of the aux, with None for the others: by the
        axis of the leaf that has to have the micro-batches or rows. Here that is axis
        0, where the parts of several devices are joined.
    """

    loss: Any
    carry: Any
    shared: Any
    collected: Any


def value_of(call: Call, program: Any, leaves: list[jax.Array], carry: Any) -> Value:
    """The value of a window, given its loss, the leaves of its aux, and its carry.

    Asked of the `Program` that computed them.
    """
    loss, *of_aux = leaves
    shared: list[Any] = [None] * len(of_aux)
    collected: dict[int, list[Any]] = {}
    modes = zip(program.modes[1:], program.axes[1:], strict=True)
    for i, (x, (mode, axis)) in enumerate(zip(of_aux, modes, strict=True)):
        if mode == "concat":
            x = _joined(call, jnp.moveaxis(x, axis + 1, 1))
        if aux_modes.find(mode).collects:
            collected.setdefault(axis, [None] * len(of_aux))[i] = x
        else:
            shared[i] = x
    tree = program.aux.unflatten
    return Value(loss, carry, tree(shared), {a: tree(x) for a, x in collected.items()})


def put_together(options: Options, value: Value) -> Any:
    """The value in the form in which `fun` returns it."""
    carry, aux = value.carry, value.shared
    for axis, tree in value.collected.items():
        aux = jax.tree.map(
            lambda x, y, axis=axis: x if y is None else jnp.moveaxis(y, 0, axis),
            *(aux, tree),
            is_leaf=lambda x: x is None,
        )
    rest = [aux] if options.has_aux else []
    if options.carries:
        rest = [carry[0] if isinstance(options.carry_argnums, int) else carry, *rest]
    if not rest:
        return value.loss
    return value.loss, rest[0] if len(rest) == 1 else tuple(rest)


def taken_apart(options: Options, out: Any) -> tuple[Any, Any, Any]:
    """The reverse of `put_together`: loss, carry and aux, checked."""
    carries, has_aux = options.carries, options.has_aux
    form, loss, carry, aux = "the loss", out, (), ()
    if carries and has_aux:
        form = "(loss, (carry, aux))"
        loss, rest = _pair(out, form)
        carry, aux = _pair(rest, form)
    elif carries:
        form = "(loss, carry)"
        loss, carry = _pair(out, form)
    elif has_aux:
        form = "(loss, aux)"
        loss, aux = _pair(out, form)
    for path, leaf in jax.tree_util.tree_leaves_with_path(aux):
        # The whole batch's comes back as it is, whatever it is, if it is something.
        kept = options.whole_batch and not isinstance(leaf, jax.ShapeDtypeStruct)
        if not (kept or is_value(leaf)):
            raise TypeError(
                "The leaves of aux must be arrays or numbers, but "
                f"{jax.tree_util.keystr(path) or 'aux itself'} is {leaf!r}. Leave it "
                "out, or return a number in its place."
            )
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise TypeError(
            f"fun must return {form}, but its loss is of type {type(loss).__name__}. "
            "Pass has_aux=True if it returns (loss, aux), or return the loss alone."
        )
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != ():
        raise ValueError(
            f"The loss must be a scalar, but it has shape {shape}. Return its mean."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"The loss must be real and floating, but it has dtype {dtype}. Cast it."
        )
    return loss, (carry,) if isinstance(options.carry_argnums, int) else carry, aux


def is_value(leaf: Any) -> bool:
    """Whether JAX has a type for it, and it is no type itself."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return False
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _pair(out: Any, form: str) -> tuple[Any, Any]:
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    length = f" of {len(out)}" if isinstance(out, (tuple, list)) else ""
    raise TypeError(
        f"fun must return {form} with these has_aux and carry_argnums, but instead "
        f"of a pair came a {type(out).__name__}{length}. Return one, or change those."
    )


def check_carry(old: Any, new: Any) -> None:
    todo = "Return each carried argument with the tree, shapes and dtypes it came with."
    check_structure(old, new, name="The carry", expected="its arguments", todo=todo)
    for (name, want), got in zip(named_leaves(old), jax.tree.leaves(new), strict=True):
        due, came = (
            f"shape {jnp.shape(x)} and dtype {jnp.result_type(x).name}"
            for x in (want, got)
        )
        if came != due:
            raise ValueError(
                f"The carry must keep the {due} of {name}, but fun returned {came} "
                f"there. {todo}"
            )


def _joined(call: Call, x: jax.Array) -> jax.Array:
    """Undoes the split of a batch for a result: micro-batches and rows on axes 0, 1."""
    if call.mesh is not None:
        return collectives.join_shards(x, call.options.axes, call.mesh)
    k, size, *rest = x.shape
    # An axis of several numbers a row has them row by row.
    rows = math.gcd(size, call.batch[0].shape[call.split_axes[0]] // k)
    x = jnp.reshape(x, (k, rows, size // rows, *rest))
    return jnp.reshape(membership.join(x, 0, call.strided), (k * size, *rest))
