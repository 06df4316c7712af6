"""What `fun` does to one micro-batch: traced once, checked and read."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from ga_optax._devices import collectives, membership, meshes
from ga_optax._inside import aux_modes, in_place, trees
from ga_optax._inside.call import Call
from ga_optax._inside.merges import Sum
from ga_optax._inside.options import FromAux
from ga_optax._inside.results import check_carry, taken_apart
from ga_optax._passes import constraints, ir, known, references, table
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts
from ga_optax.accumulator import as_weight

_UNBOUND = (
    "For a collective over all micro-batches of a window, pass the name of its axis to "
    "value_and_grad(axis_name=). It needs the whole window in one call, so accumulate "
    "and MultiSteps cannot have it."
)


class ManualAxisError(ValueError):
    """`fun` shards something over a data axis that is bound, or over its mesh."""


class Program(NamedTuple):
    """What `fun` does to one micro-batch.

    Attributes:
      jaxpr: of the flat arguments `(params, batch, keys, carry)` to the flat results
        `(loss, weight, carry, aux)`; no weight without a `weight_fn`.
      consts: the values of its constants: tracers, if `fun` closes over some.
      batch: the leaves of the batch, split into micro-batches.
      results: the types of the loss and of the leaves of the aux.
      modes: how each of them is put together over the micro-batches.
      axes: the axis along which "concat" joins each of them.
      carry: the structure of the carry.
      aux: the structure of the aux.
      weighted: whether there is a weight.
      varying: the mesh axes over which every sum differs between devices: those of
        the data, and of the weight.
      multiplies: whether the weight multiplies the gradients, and not the cotangent.
      arrivals: how the gradient of each leaf of the parameters arrives, see `arrival`.
      merges: how it is merged over micro-batches and devices.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    batch: list[jax.Array]
    results: list[Any]
    modes: list[aux_modes.Name]
    axes: list[int]
    carry: Any
    aux: Any
    weighted: bool
    varying: tuple[str, ...]
    multiplies: bool
    arrivals: list[str | None]
    merges: Sequence[Sum]

    @property
    def sliced(self) -> list[bool]:
        """Which gradients come in slices that can be added in place."""
        sliced = [came == "slices" for came in self.arrivals]
        can = in_place.HAS_REFS and not self.multiplies
        can = can and any(sliced) and not self.deeds.acts
        return [can and its for its in sliced]

    @property
    def deeds(self) -> known.Deeds:
        """What it does beside its results, there and back."""
        return known.deeds(self.jaxpr)

    @property
    def low_precision(self) -> bool:
        """Whether it computes anything in less than 32 bits."""
        results = (x.aval for e in ir.equations(self.jaxpr) for x in e.outvars)
        dtypes = (getattr(aval, "dtype", np.dtype(np.int32)) for aval in results)
        return any(jnp.issubdtype(d, np.floating) and d.itemsize < 4 for d in dtypes)


def trace(call: Call) -> Program:
    """Traces `fun` for one micro-batch; raises if what it returns does not fit."""
    params, _, keys, carry = map(call.role, call.roles)
    with jax.named_scope("split"):
        pairs = zip(call.batch, call.split_axes, strict=True)
        batch = [_split(call, x, axis) for x, axis in pairs]
    first = [x[0] for x in batch]
    run = _micro_batch(call, first[0])
    trace_one = jax.make_jaxpr(run, axis_env=call.axis_env, return_shape=True)
    closed, shapes = _traced(call, lambda: trace_one(params, first, keys, carry))
    if call.axis_env:
        references.check_own(closed.jaxpr, f"axis_name={call.options.axis_name!r}")
    closed = closed.replace(jaxpr=constraints.without_axes(closed.jaxpr, call.axes))
    # The types of the results say over which devices they vary; their shapes do not.
    avals = [variable.aval for variable in closed.jaxpr.outvars]
    loss, weight, new, aux = jax.tree.unflatten(jax.tree.structure(shapes), avals)

    def aux_of(batch: list[Any]) -> Any:
        return trace_one(params, batch, keys, carry)[1][-1]

    modes = _modes(call, aux, first, aux_of)
    _check_not_reduced(call, loss)
    arguments = jax.tree.leaves(params), first, keys, carry
    multiplies = weight is not None and _multiplies(call, closed, arguments)
    (jaxpr, consts), arrivals = _after_passes(call, closed, multiplies)
    return Program(
        jaxpr=ir.without_values(jaxpr),
        consts=consts,
        batch=batch,
        results=[loss, *jax.tree.leaves(aux)],
        modes=["mean", *(mode for mode, _ in modes)],
        axes=[0, *(axis for _, axis in modes)],
        carry=jax.tree.structure(new),
        aux=jax.tree.structure(aux),
        weighted=weight is not None,
        varying=tuple(sorted({*call.axes, *meshes.varying(weight)})),
        multiplies=multiplies,
        arrivals=arrivals,
        merges=call.merges,
    )


def _micro_batch(call: Call, x: jax.Array) -> Callable[..., Any]:
    """`fun` of one micro-batch, of which `x` is the first leaf: what is traced."""
    options, weight_fn = call.options, call.options.weight_fn

    def run(params: Any, batch: list[Any], keys: Any, old: Any) -> Any:
        own = jax.tree.map(lambda x: x, old)  # `fun` may change a dict where it is
        new = dict(zip(call.unsplit, (*params, *keys, *own), strict=True))
        one = call.with_args(new).with_batch(batch)
        whole = one.role("batch_argnums")
        weight = None
        try:
            if weight_fn is not None and not isinstance(weight_fn, FromAux):
                weight = as_weight(weight_fn(*whole), float)
            out = options.fun(*one.args, **one.kwargs)
        except Exception as error:
            error.add_note(_in_words(call, x))
            raise
        loss, carry, aux = taken_apart(options, out)
        check_carry(old, carry)
        if isinstance(weight_fn, FromAux):
            weight = as_weight(weight_fn.fun(aux), float)
        return loss, weight, carry, aux

    return run


def _traced(call: Call, trace_one: Callable[[], Any]) -> Any:
    """`trace_one()`; what JAX says of axes is said in the words of the options."""
    try:
        return trace_one()
    except NameError as error:
        if "unbound axis name" in str(error):
            error.add_note(_UNBOUND)
        raise
    except NotImplementedError as error:
        if "Closing over" in str(error):
            error.add_note(f"In terms of ga_optax: {_CLOSED_OVER}")
        raise
    except ValueError as error:
        _explain_manual_axis(call, error)
        raise


def _modes(
    call: Call, aux: Any, first: list[Any], aux_of: Callable[[list[Any]], Any]
) -> list[tuple[aux_modes.Name, int]]:
    """How the leaves of the aux are put together; `aux_of` gives that of a batch."""
    k, rows = call.num_parts, first[0].shape[call.split_axes[0]]
    joins = k == 1 and call.axes != ()  # one part of each device

    def grown() -> Any:
        more = call.batch
        if joins:
            pairs = zip(more, call.split_axes, strict=True)
            more = [jnp.concatenate([x, x], axis) for x, axis in pairs]
        return aux_of(more)

    factor = 2 if joins else k
    return aux_modes.resolved(call.options.aux, aux, rows, factor, grown)


def _multiplies(call: Call, closed: core.ClosedJaxpr, arguments: Any) -> bool:
    """Whether weights have to multiply gradients, and not the cotangent of the loss."""
    options = call.options
    loss: Any = closed.jaxpr.outvars[0].aval
    # What the backward pass sums over devices cannot be multiplied after that.
    by_hand = not (options.optimize or options.each)
    low = jnp.finfo(loss.dtype).bits < 32
    return low or by_hand or not _scales(call, closed, *arguments)


def _after_passes(
    call: Call, closed: core.ClosedJaxpr, multiplies: bool
) -> tuple[ir.Program, list[str | None]]:
    """The program as it is to run, and how its gradients arrive."""
    options, number = call.options, len(call.merges)
    can = options.optimize and in_place.HAS_REFS and not multiplies
    facts = Facts(
        optimize=options.optimize,
        num_params=number,
        adds_in_place=can and not known.deeds(closed.jaxpr).acts,
    )
    automatic = call.mesh is not None and not meshes.explicit_names(call.mesh)
    if options.each and automatic:
        specs = meshes.broadcast_specs(call.specs, call.params)
        facts = facts._replace(specs=specs, axes=options.axes, mesh=call.mesh)
    program = ir.Program(closed.jaxpr, closed.consts)
    program = table.run("fun", program, facts)
    leaves = program.jaxpr.invars[:number]
    arrivals: list[str | None] = [None] * number
    if options.optimize:
        arrivals = [arrival(program.jaxpr, x) for x in leaves]
    return table.run("sharded fun", program, facts), arrivals


def _split(call: Call, x: ArrayLike, axis: int) -> jax.Array:
    """`x` as `[num_microbatches, ...]`, micro-batches split along `axis`."""
    k = call.num_parts
    if call.mesh is not None:
        return collectives.split_shards(x, k, call.options.axes, call.mesh, axis)
    return membership.split(x, k, axis, call.strided)


def _in_words(call: Call, x: jax.Array) -> str:
    """What `fun` was given, for a note to an error of its own."""
    return (
        f"ga_optax called fun with one of {call.num_parts} "
        f"micro-batches: the first leaf of the batch has shape {jnp.shape(x)}, split "
        f"along axis {call.split_axes[0]} of {jnp.shape(call.batch[0])}. batch_argnums "
        "and batch_axes say what is split; all else goes whole."
    )


def _scales(
    call: Call, closed: core.ClosedJaxpr, params: list[Any], *rest: Any
) -> bool:
    """Whether scaling the loss's cotangent does no more than scale the gradients.

    A rule of the user's own may clip or quantise what comes back through it. And the
    weight must fit wherever it goes: the small exponents of float16 and float8 overflow
    at weights that count tokens. Where it goes is read off the backward pass, which has
    casts and rules (`jax.custom_jvp`) that the loss does not show.
    """
    if known.deeds(closed.jaxpr).bends:
        return False

    if call.axis_env:
        from ga_optax._inside.axis.read import without_collectives

        leaves = [*params, *jax.tree.leaves(rest)]
        closed = without_collectives(closed, leaves, *call.axis_env[0])

    def backward(params: list[Any], *rest: Any) -> Any:
        def loss_of(*params: Any) -> jax.Array:
            return ir.results(closed, [*params, *jax.tree.leaves(rest)])[0]

        loss, pullback = jax.vjp(loss_of, *params)
        return pullback(trees.like(jnp.ones_like(loss), loss))

    trace_back = jax.make_jaxpr(backward, axis_env=call.axis_env)
    jaxpr = trace_back(params, *rest).jaxpr
    return all(
        equation.params.get("exponent_bits", 8) >= 8
        and all(map(is_wide, (*equation.invars, *equation.outvars)))
        for equation in ir.equations(jaxpr)
    )


def is_wide(variable: Any) -> bool:
    """Whether a variable has the exponents of float32, or is not floating."""
    dtype = getattr(variable.aval, "dtype", np.dtype(np.int32))
    return not jnp.issubdtype(dtype, jnp.floating) or (
        jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
    )


_CLOSED_OVER = (
    "If fun closes over an array that lies on the mesh, pass it as an argument: what "
    "has no role there goes whole to every device."
)


def _explain_manual_axis(call: Call, error: ValueError) -> None:
    """Raises if `error` is JAX's of a sharding over a data axis that is bound."""
    names = [name for name in call.axes if f"'{name}'" in str(error)]
    if names and "Manual" in str(error):
        each = "" if call.options.whole_batch else 'sync="each", or '
        raise ManualAxisError(
            "With a data_axis fun must not shard anything over it by a PartitionSpec, "
            f"since it sees the rows of one device, but it names {names[0]!r}. Pass "
            "with_sharding_constraint a NamedSharding, out of which the data axis is "
            "taken, or a PartitionSpec of other axes alone (in Flax, take the name out "
            "of the logical axis rules, in Haliax out of the axis mapping). In your "
            "own jax.shard_map, pass "
            f"check_vma=False, too. Or pass {each}no data_axis, and every micro-batch "
            f"is reduced. {_CLOSED_OVER} JAX says: {error}"
        ) from error


def _check_not_reduced(call: Call, loss: Any) -> None:
    reduced = [name for name in call.axes if name not in meshes.varying(loss)]
    if reduced and meshes.checks_varying():
        raise ValueError(
            "fun must return the loss of one device's micro-batch, but its loss is the "
            f"same on all devices along {reduced[0]!r}: it is reduced already. Take "
            "the psum or pmean out of fun: the window is reduced once, at its end."
        )
