"""What `fun` returns: loss, carry and aux, taken apart, checked and put together."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._calls.options import Options
from ga_optax._checks import check_structure, named_leaves


class Returned(NamedTuple):
    """The value of micro-batches, in the parts that devices return it in.

    Attributes:
      loss: the loss.
      carry: the carry, a tuple.
      shared: the aux, with None for leaves that were stacked: of those each of several
        devices has its own part.
      stacked: those leaves, in the tree of the aux, with None for the others.
    """

    loss: Any
    carry: Any
    shared: Any
    stacked: Any

    @classmethod
    def of(
        cls, loss: Any, carry: Any, leaves: list[Any], stacked: list[bool], tree: Any
    ) -> "Returned":
        """From the leaves of the aux, its structure, and which of them are stacked."""
        shared, own = map(tree.unflatten, apart(leaves, stacked))
        return cls(loss, carry, shared, own)


def apart(leaves: Sequence[Any], stacked: Sequence[bool]) -> list[list[Any]]:
    """The leaves that are not stacked, and those that are; None for the others."""
    pairs = list(zip(leaves, stacked, strict=True))
    return [
        [x if its == asked else None for x, its in pairs] for asked in (False, True)
    ]


def put_together(options: Options, value: Returned) -> Any:
    """The value in the form in which `fun` returns it."""
    carry, rest = value.carry, []
    if options.has_aux:
        rest = [
            jax.tree.map(
                lambda x, y: y if x is None else x,
                *(value.shared, value.stacked),
                is_leaf=lambda x: x is None,
            )
        ]
    if options.carries:
        rest = [carry[0] if isinstance(options.carry_argnums, int) else carry, *rest]
    if not rest:
        return value.loss
    return value.loss, rest[0] if len(rest) == 1 else tuple(rest)


def taken_apart(
    options: Options, out: Any, any_aux: bool = False
) -> tuple[Any, Any, Any]:
    """The reverse of `put_together`: loss, carry and aux, checked.

    With `any_aux` its leaves may be anything, for they come back as they are.
    """
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
        kept = any_aux and not isinstance(leaf, jax.ShapeDtypeStruct)
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
