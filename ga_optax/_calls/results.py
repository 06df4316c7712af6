"""The results of `fun`: loss, carry and aux, taken apart, checked and put together."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._calls.options import Options
from ga_optax._checks import check_structure, named_leaves


def put_together(options: Options, value: tuple[Any, Any, Any]) -> Any:
    """Loss, carry (a tuple) and aux in the form in which `fun` returns them."""
    loss, carry, aux = value
    rest = [aux] if options.has_aux else []
    if options.carries:
        rest = [carry[0] if isinstance(options.carry_argnums, int) else carry, *rest]
    if not rest:
        return loss
    return loss, rest[0] if len(rest) == 1 else tuple(rest)


def taken_apart(
    options: Options, out: Any, any_aux: bool = False
) -> tuple[Any, Any, Any]:
    """The reverse of `put_together`: loss, carry and aux, checked.

    With `any_aux` its leaves may be anything, for they come back as they are.
    """
    carries, has_aux = options.carries, options.has_aux
    form, loss, carry, aux = "the loss", out, (), ()
    if carries and has_aux:
        form = "(loss, (carry, aux)) with carry_argnums and has_aux=True"
        loss, rest = _pair(out, form)
        carry, aux = _pair(rest, form)
    elif carries:
        form = "(loss, carry) with carry_argnums"
        loss, carry = _pair(out, form)
    elif has_aux:
        form = "(loss, aux) with has_aux=True"
        loss, aux = _pair(out, form)
    check_values("The leaves of aux", aux, any_aux)
    check_number(loss, form)
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != ():
        raise ValueError(
            f"The loss must be a scalar, but it has shape {shape}. Return its mean."
        )
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if options.holomorphic and not is_complex:
        raise TypeError(
            "The loss must be complex with holomorphic=True, but it has dtype "
            f"{dtype}. Return a complex loss, or leave holomorphic out."
        )
    if not (options.holomorphic or jnp.issubdtype(dtype, jnp.floating)):
        todo = "Cast it to float32."
        if is_complex:
            todo = (
                "Return its real part, or pass holomorphic=True, which "
                "ga_optax.value_and_grad has."
            )
        raise TypeError(
            f"The loss must be real and floating, but it has dtype {dtype}. {todo}"
        )
    return loss, (carry,) if isinstance(options.carry_argnums, int) else carry, aux


def check_number(loss: Any, form: str = "the loss") -> None:
    """Raises unless a loss, returned in this form, is an array or a number."""
    if isinstance(loss, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        return
    todo = "Return a number there."
    if loss is None:
        todo = "Is a return missing?"
    elif form == "the loss" and isinstance(loss, (tuple, list)):
        todo = "Pass has_aux=True if it returns (loss, aux), or return the loss alone."
    raise TypeError(f"fun must return {form}, but its loss is {_kind(loss)}. {todo}")


def check_values(what: str, tree: Any, any_leaf: bool = False) -> None:
    """Raises unless each leaf is a value that has a type in JAX.

    With `any_leaf` a leaf may be anything but a `jax.ShapeDtypeStruct`.
    """
    for name, leaf in named_leaves(tree):
        is_type = isinstance(leaf, jax.ShapeDtypeStruct)
        if is_type or not (any_leaf or _has_type(leaf)):
            raise TypeError(
                f"{what} must be arrays or numbers, but {name} is {leaf!r}. Leave it "
                "out, or return a number in its place."
            )


def _has_type(leaf: Any) -> bool:
    try:
        jax.typeof(leaf)
    except TypeError:
        return False
    return True


def _pair(out: Any, form: str) -> tuple[Any, Any]:
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    options = form.partition(" with ")[2]
    todo = (
        "Is a return missing?"
        if out is None
        else f"Return such a pair, or leave out {options}."
    )
    raise TypeError(f"fun must return {form}, but it returned {_kind(out)}. {todo}")


def _kind(out: Any) -> str:
    """A result of `fun`, in words."""
    if out is None:
        return "None"
    if isinstance(out, (jax.Array, np.ndarray)):
        return f"an array of shape {np.shape(out)}"
    if isinstance(out, (tuple, list)):
        return f"a {type(out).__name__} of {len(out)}"
    return f"an object of type {type(out).__name__}"


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


# -- Of any aux ------------------------------------------------------------------------


def returning_pair(options: Options) -> Options:
    """The options of a function that returns `(loss, aux)`, a real loss and any aux.

    A leaf of the aux that is no array comes back as it is, as in `jax.value_and_grad`.
    A holomorphic loss has the gradient of its real part, so it comes with the aux.
    """

    @functools.wraps(options.fun)
    def fun(*args: Any, **kwargs: Any) -> Any:
        out = options.fun(*args, **kwargs)
        loss, _, aux = taken_apart(options, out, any_aux=True)
        aux = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else _Static(x), aux)
        if options.holomorphic:
            return loss.real, (loss, aux)
        return loss, aux

    return options._replace(fun=fun, has_aux=True)


def as_returned(options: Options, value: tuple[Any, Any]) -> Any:
    """The result of `fun`, from such a pair; the options are those of `fun`."""
    loss, aux = value[1] if options.holomorphic else value
    if not options.has_aux:
        return loss
    is_static = lambda x: isinstance(x, _Static)  # noqa: E731
    return loss, jax.tree.map(
        lambda x: x.value if is_static(x) else x, aux, is_leaf=is_static
    )


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False)
class _Static:
    """A node without leaves that holds what is no array of JAX's: a number, a text."""

    value: Any
