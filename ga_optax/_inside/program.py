"""What `fun` does to one micro-batch: traced once, checked and read."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from ga_optax._checks import check_structure, named_leaves
from ga_optax._devices import collectives, membership, meshes
from ga_optax._inside import aux_modes, in_place
from ga_optax._inside.call import Call
from ga_optax._inside.options import FromAux, Options
from ga_optax._passes import ir, known, table
from ga_optax._passes.arrivals import arrival
from ga_optax._passes.facts import Facts
from ga_optax.accumulator import as_weight

_UNBOUND = (
    "For a collective over all micro-batches of a window, pass the name of its axis to "
    "value_and_grad(axis_name=). It needs the whole window in one call, so accumulate "
    "and MultiSteps cannot have it."
)


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
      arrivals: how the gradient of each leaf of the parameters arrives, see `arrival`;
        "replaces" if it is the leaf's new value, of which the largest is kept.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    batch: list[jax.Array]
    results: list[Any]
    modes: list[str]
    axes: list[int]
    carry: Any
    aux: Any
    weighted: bool
    varying: tuple[str, ...]
    multiplies: bool
    arrivals: list[str | None]

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
    def narrow(self) -> bool:
        """Whether it computes anything in less than 32 bits."""
        results = (x.aval for e in ir.equations(self.jaxpr) for x in e.outvars)
        dtypes = (getattr(aval, "dtype", np.dtype(np.int32)) for aval in results)
        return any(jnp.issubdtype(d, np.floating) and d.itemsize < 4 for d in dtypes)


def trace(call: Call) -> Program:
    """Traces `fun` for one micro-batch; raises if what it returns does not fit."""
    options = call.options
    weight_fn = options.weight_fn

    def micro_batch(params: Any, batch: list[Any], keys: Any, old: Any) -> Any:
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
            error.add_note(_in_words(call, batch[0]))
            raise
        loss, carry, aux = taken_apart(options, out)
        _check_carry(old, carry)
        if isinstance(weight_fn, FromAux):
            weight = as_weight(weight_fn.fun(aux), float)
        return loss, weight, carry, aux

    params, _, keys, carry = map(call.role, call.roles)
    with jax.named_scope("split"):
        pairs = zip(call.batch, call.split_axes, strict=True)
        batch = [_split(call, x, axis) for x, axis in pairs]
    first = [x[0] for x in batch]
    trace_one = jax.make_jaxpr(micro_batch, axis_env=call.axis_env, return_shape=True)
    try:
        closed, shapes = trace_one(params, first, keys, carry)
    except NameError as error:
        if "unbound axis name" in str(error):
            error.add_note(_UNBOUND)
        raise
    except ValueError as error:
        _explain_manual_axis(call, error)
        raise
    k, rows = call.num_parts, first[0].shape[call.split_axes[0]]
    joins = k == 1 and call.axes != ()  # one part of each device

    def grown() -> Any:
        more = call.batch
        if joins:
            pairs = zip(more, call.split_axes, strict=True)
            more = [jnp.concatenate([x, x], axis) for x, axis in pairs]
        return trace_one(params, more, keys, carry)[1][-1]

    # The types of the results say over which devices they vary; their shapes do not.
    avals = [variable.aval for variable in closed.jaxpr.outvars]
    loss, weight, carry, aux = jax.tree.unflatten(jax.tree.structure(shapes), avals)
    modes = aux_modes.resolved(options.aux, aux, rows, 2 if joins else k, grown)
    _check_not_reduced(call, loss)
    narrow = jnp.finfo(loss.dtype).bits < 32
    arguments = jax.tree.leaves(params), first, keys, carry
    # What the backward pass sums over devices cannot be multiplied after that.
    by_hand = not (options.optimize or options.each)
    multiplies = weight is not None and (
        narrow or by_hand or not _scales(call, closed, *arguments)
    )
    can = options.optimize and in_place.HAS_REFS and not multiplies
    facts = Facts(
        optimize=options.optimize,
        num_params=len(call.replaced),
        adds_in_place=can and not known.deeds(closed.jaxpr).acts,
    )
    automatic = call.mesh is not None and not meshes.explicit_names(call.mesh)
    if options.each and automatic:
        specs = meshes.broadcast_specs(call.specs, call.params)
        facts = facts._replace(specs=specs, axes=options.axes, mesh=call.mesh)
    jaxpr, consts = table.run("fun", ir.Program(closed.jaxpr, closed.consts), facts)
    of_params = zip(call.replaced, jaxpr.invars, strict=False)  # which come first
    arrivals = ["replaces" if new else arrival(jaxpr, x) for new, x in of_params]
    jaxpr, consts = table.run("sharded fun", ir.Program(jaxpr, consts), facts)
    return Program(
        jaxpr=jaxpr,
        consts=consts,
        batch=batch,
        results=[loss, *jax.tree.leaves(aux)],
        modes=["mean", *(mode for mode, _ in modes)],
        axes=[0, *(axis for _, axis in modes)],
        carry=jax.tree.structure(carry),
        aux=jax.tree.structure(aux),
        weighted=weight is not None,
        varying=tuple(sorted({*call.axes, *meshes.varying(weight)})),
        multiplies=multiplies,
        arrivals=arrivals,
    )


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


def _joined(call: Call, x: jax.Array) -> jax.Array:
    """The reverse of `_split` for a result: micro-batches on axis 0, rows on axis 1."""
    if call.mesh is not None:
        return collectives.join_shards(x, call.options.axes, call.mesh)
    k, size, *rest = x.shape
    # An axis of several numbers a row has them row by row.
    rows = math.gcd(size, call.batch[0].shape[call.split_axes[0]] // k)
    x = jnp.reshape(x, (k, rows, size // rows, *rest))
    return jnp.reshape(membership.join(x, 0, call.strided), (k * size, *rest))


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
            leaves = *params, *jax.tree.leaves(rest)
            return jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)[0]

        loss, pullback = jax.vjp(loss_of, *params)
        return pullback(aux_modes.like(jnp.ones_like(loss), loss))

    trace_back = jax.make_jaxpr(backward, axis_env=call.axis_env)
    jaxpr = trace_back(params, *rest).jaxpr
    return all(
        equation.params.get("exponent_bits", 8) >= 8
        and all(map(_is_wide, (*equation.invars, *equation.outvars)))
        for equation in ir.equations(jaxpr)
    )


def _is_wide(variable: Any) -> bool:
    """Whether a variable has the exponents of float32, or is not floating."""
    dtype = getattr(variable.aval, "dtype", np.dtype(np.int32))
    return not jnp.issubdtype(dtype, jnp.floating) or (
        jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
    )


# -- What fun returns ------------------------------------------------------------------


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


def value_of(
    call: Call, program: Program, leaves: list[jax.Array], carry: Any
) -> Value:
    """The value of a window, given its loss, the leaves of its aux, and its carry."""
    loss, *of_aux = leaves
    shared: list[Any] = [None] * len(of_aux)
    collected: dict[int, list[Any]] = {}
    modes = zip(program.modes[1:], program.axes[1:], strict=True)
    for i, (x, (mode, axis)) in enumerate(zip(of_aux, modes, strict=True)):
        if mode == "concat":
            x = _joined(call, jnp.moveaxis(x, axis + 1, 1))
        if aux_modes.MODES[mode].collects:
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


def _pair(out: Any, form: str) -> tuple[Any, Any]:
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    length = f" of {len(out)}" if isinstance(out, (tuple, list)) else ""
    raise TypeError(
        f"fun must return {form} with these has_aux and carry_argnums, but instead "
        f"of a pair came a {type(out).__name__}{length}. Return one, or change those."
    )


def _check_carry(old: Any, new: Any) -> None:
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


def _explain_manual_axis(call: Call, error: ValueError) -> None:
    """Raises if `error` is JAX's of a sharding over a data axis that is bound."""
    names = [name for name in call.axes if f"'{name}'" in str(error)]
    if names and "Manual" in str(error):
        raise ValueError(
            "With a data_axis fun must not shard anything over it, since it sees the "
            f"rows of one device, but it names {names[0]!r}, or a whole Mesh. Pass "
            "with_sharding_constraint a PartitionSpec of other axes alone (in Flax, "
            'take the name out of the logical axis rules); or pass sync="each", or no '
            f"data_axis, and every micro-batch is reduced. JAX says: {error}"
        ) from error


def _check_not_reduced(call: Call, loss: Any) -> None:
    reduced = [name for name in call.axes if name not in meshes.varying(loss)]
    if reduced and meshes.checks_varying():
        raise ValueError(
            "fun must return the loss of one device's micro-batch, but its loss is the "
            f"same on all devices along {reduced[0]!r}: it is reduced already. Take "
            "the psum or pmean out of fun: the window is reduced once, at its end."
        )
