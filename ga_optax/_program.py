"""What `fun` does to one micro-batch: traced once, checked and read."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from ga_optax import _aux, _collectives, _mesh
from ga_optax._call import Call
from ga_optax._checks import check_structure, check_weight, leaf_name
from ga_optax._in_place import arrival, inner_programs
from ga_optax._options import Options


class Program(NamedTuple):
    """What `fun` does to one micro-batch.

    Attributes:
      jaxpr: of the flat arguments `(params, batch, keys, carry)` to the flat results
        `(loss, weight, carry, aux)`; no weight without a `weight_fn`.
      consts: the values of its constants: tracers, if `fun` closes over some.
      batch: the leaves of the batch, split into micro-batches.
      loss: the shape and dtype of the loss.
      carry: the tree of the carry, of shapes and dtypes.
      aux: the tree of the aux, of shapes and dtypes.
      modes: the mode of each leaf of `aux`.
      weighted: whether there is a weight.
      varying: the mesh axes over which every sum differs between devices: those of
        the data, and of the weight.
      multiplies: whether the weight multiplies the gradients, and not the cotangent.
      arrivals: how the gradient of each leaf of the parameters arrives, see `arrival`.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    batch: list[jax.Array]
    loss: Any
    carry: Any
    aux: Any
    modes: list[str]
    weighted: bool
    varying: tuple[str, ...]
    multiplies: bool
    arrivals: list[str | None]


def trace(call: Call) -> Program:
    """Traces `fun` for one micro-batch; raises if what it returns does not fit."""
    options = call.options
    positions = [i for group in call.roles.values() for i in group]

    def micro_batch(*roles: tuple[Any, ...]) -> tuple[Any, ...]:
        _, batch, _, carry = roles
        weight = None
        if options.weight_fn is not None:
            weight = check_weight(options.weight_fn(*batch))
        new = dict(zip(positions, itertools.chain(*roles), strict=True))
        out = options.fun(*call.with_args(new).args, **call.kwargs)
        loss, carry, aux = _returned(options, out, carry)
        return loss, weight, carry, aux

    params, batch, keys, carry = (call.role(name) for name in call.roles)
    with jax.named_scope("split"):
        batch = jax.tree.map(lambda x: _split(call, x), batch)
    first = jax.tree.map(lambda x: x[0], batch)
    closed, shapes = jax.make_jaxpr(micro_batch, return_shape=True)(
        params, first, keys, carry
    )
    # The types of the results say over which devices they vary; their shapes do not.
    avals = [variable.aval for variable in closed.jaxpr.outvars]
    loss, weight, carry, aux = jax.tree.unflatten(jax.tree.structure(shapes), avals)
    _check_not_reduced(call, loss)
    weighted = options.weight_fn is not None
    return Program(
        jaxpr=closed.jaxpr,
        consts=closed.consts,
        batch=jax.tree.leaves(batch),
        loss=loss,
        carry=carry,
        aux=aux,
        modes=_aux.modes_of(options.aux, aux),
        weighted=weighted,
        varying=tuple(
            sorted({*call.axes, *(_mesh.varying(weight) if weighted else ())})
        ),
        multiplies=weighted
        and not (jnp.finfo(loss.dtype).bits >= 32 and _scales(closed.jaxpr)),
        arrivals=[
            arrival(closed.jaxpr, variable)
            for variable in closed.jaxpr.invars[: len(jax.tree.leaves(params))]
        ],
    )


def _split(call: Call, x: ArrayLike) -> jax.Array:
    """`[batch, ...]` as `[num_microbatches, micro-batch, ...]`."""
    k = call.options.num_microbatches
    if call.mesh is not None:
        return _collectives.split_shards(x, k, call.options.axes, call.mesh)
    shape = jnp.shape(x)
    return jnp.reshape(jnp.asarray(x), (k, shape[0] // k, *shape[1:]))


def _scales(jaxpr: core.Jaxpr) -> bool:
    """Whether scaling the loss's cotangent does no more than scale the gradients.

    A `jax.custom_vjp` may clip or quantise what comes back through it, and the small
    exponents of float16 and float8 overflow at weights that count tokens.
    """

    def is_wide(variable: Any) -> bool:
        dtype = getattr(variable.aval, "dtype", np.dtype(np.int32))
        return not jnp.issubdtype(dtype, jnp.floating) or (
            jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
        )

    return all(
        "custom_vjp" not in equation.primitive.name
        and all(map(is_wide, equation.outvars))
        and all(map(_scales, inner_programs(equation)))
        for equation in jaxpr.eqns
    )


# -- What fun returned -----------------------------------------------------------------


def _returned(
    options: Options, out: Any, carry: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...], Any]:
    """Takes what `fun` returned apart and checks it: loss, carry and aux."""
    form = "the loss"
    loss, new, aux = out, (), ()
    if options.carry_argnums != () and options.has_aux:
        form = "(loss, (carry, aux))"
        loss, rest = _unpack(out, form)
        new, aux = _unpack(rest, form)
    elif options.carry_argnums != ():
        form = "(loss, carry)"
        loss, new = _unpack(out, form)
    elif options.has_aux:
        form = "(loss, aux)"
        loss, aux = _unpack(out, form)
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise TypeError(
            f"fun must return {form}, but its loss is of type {type(loss).__name__}. "
            "Pass has_aux=True if it returns (loss, aux), or return the loss alone."
        )
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != ():
        raise ValueError(
            f"The loss must be a scalar, but it has shape {shape}. Return its mean "
            "over the micro-batch."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"The loss must be real and floating, but it has dtype {dtype.name}. Cast "
            "it, or return the quantity that is to be minimised."
        )
    if isinstance(options.carry_argnums, int):
        new = (new,)
    _check_carry(carry, new)
    return loss, new, aux


def _unpack(out: Any, form: str) -> tuple[Any, Any]:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        what = f"of type {type(out).__name__}"
        if isinstance(out, (tuple, list)):
            what = f"a {type(out).__name__} of {len(out)}"
        raise TypeError(
            f"fun must return {form} with these has_aux and carry_argnums, but where a "
            f"pair is due it returned something {what}. Return that, or change the "
            "options."
        )
    return out[0], out[1]


def _check_carry(old: Any, new: Any) -> None:
    todo = "Return each carried argument with the tree, shapes and dtypes it came with."
    check_structure(old, new, name="The carry", expected="its arguments", todo=todo)
    paths = jax.tree_util.tree_flatten_with_path(old)[0]
    for (path, want), got in zip(paths, jax.tree.leaves(new), strict=True):
        came, due = (
            f"shape {jnp.shape(x)} and dtype {jnp.result_type(x).name}"
            for x in (got, want)
        )
        if came != due:
            raise ValueError(
                f"The carry must keep the {due} of {leaf_name(path)}, but fun returned "
                f"{came} there. {todo}"
            )


def _check_not_reduced(call: Call, loss: Any) -> None:
    reduced = [name for name in call.axes if name not in _mesh.varying(loss)]
    if reduced and _mesh.checks_varying():
        raise ValueError(
            "fun must return the loss of one device's micro-batch, but its loss is the "
            f"same on all devices along {reduced[0]!r}: it is reduced already. Take "
            "the psum or pmean over it out of fun: value, gradients and aux "
            "are reduced once, at the end of the window."
        )
