"""Complex losses and integer parameters, as `jax.value_and_grad` has them.

    holomorphic    ∂f  =  ∂ Re f,     the gradient of a real loss
    allow_int      the gradient of what is no floating or complex leaf is a float0

Both are `value_and_grad` of another function.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ga_optax._calls.batches import argument
from ga_optax._calls.options import INTEGERS, Argument, Options
from ga_optax._calls.results import taken_apart
from ga_optax._checks import check_arrays, named_leaves

Make = Callable[[Options], Callable[..., Any]]  # of `value_and_grad`, with options


def of_any_kind(options: Options, make: Make) -> Callable[..., Any]:
    """`make(options)`, of losses and parameters of the kinds that the options name."""
    if options.holomorphic:
        make = functools.partial(_holomorphic, make=make)
    if options.allow_int:
        return _with_integers(options, make)
    return make(options)


def _holomorphic(options: Options, make: Make) -> Callable[..., Any]:
    @functools.wraps(options.fun)
    def fun(*args: Any, **kwargs: Any) -> Any:
        out = options.fun(*args, **kwargs)
        loss, _, aux = taken_apart(options, out, any_aux=True)
        return loss.real, (loss, aux)

    step = make(options._replace(fun=fun, has_aux=True, holomorphic=False))

    @functools.wraps(options.fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        for i, tree in _params(options, args, kwargs).items():
            check_arrays(argument(i), tree)
            for name, x in named_leaves(tree):
                dtype = jax.dtypes.result_type(x)
                if not jnp.issubdtype(dtype, jnp.complexfloating):
                    raise TypeError(
                        "With holomorphic=True parameters must be complex, but "
                        f"{name} of {argument(i)} has dtype {dtype}. Make it complex, "
                        "or leave holomorphic out."
                    )
        (_, (loss, aux)), grads = step(*args, **kwargs)
        return ((loss, aux) if options.has_aux else loss), grads

    return value_and_grad_fun


def _with_integers(options: Options, make: Make) -> Callable[..., Any]:
    """The same, in which such leaves come by a keyword, and None in their place."""

    @functools.wraps(options.fun)
    def fun(*args: Any, **kwargs: Any) -> Any:
        whole = kwargs.pop(INTEGERS)
        params = _params(options, args, kwargs)
        pairs = zip(params.items(), whole, strict=True)
        joined = {i: _map(_either, x, y) for (i, x), y in pairs}
        args, kwargs = _replaced(args, kwargs, joined)
        return options.fun(*args, **kwargs)

    step = make(options._replace(fun=fun, allow_int=False))

    @functools.wraps(options.fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        params = _params(options, args, kwargs)
        own = {i: _map(_without_whole, tree) for i, tree in params.items()}
        whole = [_map(_whole_alone, tree) for tree in params.values()]
        args, kwargs = _replaced(args, kwargs, own)
        out, grads = step(*args, **kwargs, **{INTEGERS: whole})
        zeros = _map(_zero, whole)
        if isinstance(options.argnums, int):
            return out, _map(_either, grads, *zeros)
        return out, _map(_either, grads, tuple(zeros))

    return value_and_grad_fun


def _params(options: Options, args: Any, kwargs: Any) -> dict[Argument, Any]:
    """The arguments to differentiate with respect to, by their places."""
    places = options.roles(len(args), kwargs)["argnums"]
    return {i: kwargs[i] if isinstance(i, str) else args[i] for i in places}


def _replaced(args: Any, kwargs: Any, new: Mapping[Argument, Any]) -> tuple[Any, Any]:
    return (
        tuple(new.get(i, x) for i, x in enumerate(args)),
        {i: new.get(i, x) for i, x in kwargs.items()},
    )


def _map(fun: Callable[..., Any], *trees: Any) -> Any:
    """`jax.tree.map`, for which None is a leaf."""
    return jax.tree.map(fun, *trees, is_leaf=lambda x: x is None)


def _either(x: Any, y: Any) -> Any:
    return y if x is None else x


def _is_whole(x: Any) -> bool:
    """True for an array or a number that has no gradient: integers, flags and keys."""
    try:
        return not jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)
    except TypeError:  # no array: `value_and_grad` says so
        return False


def _without_whole(x: Any) -> Any:
    return None if _is_whole(x) else x


def _whole_alone(x: Any) -> Any:
    return x if _is_whole(x) else None


def _zero(x: Any) -> Any:
    return None if x is None else np.zeros(jnp.shape(x), jax.dtypes.float0)
