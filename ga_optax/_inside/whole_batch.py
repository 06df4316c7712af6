"""A loss of the whole batch, as it is written, over micro-batches.

    value, grads  =  jax.value_and_grad(fun)(params, all rows)

`fun` is traced once, at all rows, and its program is partitioned (`_partition`): what
comes out is the loss of a micro-batch with collectives over an axis of the window,
which `axis/` runs level by level. A loss without collectives, such as a mean over rows,
goes through the loop of `loop`, also on a mesh. What such a program reads of the axis,
to draw its part of a dropout mask, is which micro-batch it is: one more leaf of the
batch says that of each row. What has rows in the aux comes back whole, in order.

Which rows are neighbours is part of the program. So micro-batches hold neighbouring
rows, unless the compiler is known to distribute the batch and rows do not meet: then
they hold every k-th row, as without the option, and no row moves.
"""

import dataclasses
import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax._devices import meshes
from ga_optax._inside.axis.read import LONGEST
from ga_optax._inside.call import Call
from ga_optax._inside.options import AXIS_OF_ROWS, Options
from ga_optax._inside.program import is_wide
from ga_optax._inside.results import taken_apart
from ga_optax._partition import (
    PARTIAL,
    WHOLE,
    Argument,
    Axis,
    Layout,
    Partitioned,
    Rows,
    is_inexact,
    partition,
)
from ga_optax._passes import ir, known, references

# Why options have no place here.
_NOT_NEEDED = {
    "weight_fn": "The whole batch has one mean, whatever its micro-batches count",
    "rng_argnums": "fun gets its own keys, and draws what the whole batch draws",
    "rng_argnames": "fun gets its own keys, and draws what the whole batch draws",
    "carry_argnums": "fun runs once, over all rows: return what is new as aux",
    "axis_name": "fun needs no collectives, for it sees all rows",
    "num_real_microbatches": "All rows count",
}


def check(given: dict[str, Any]) -> None:
    """Raises if an option is given that has no place beside `whole_batch=True`."""
    for name, why in _NOT_NEEDED.items():
        if given[name] is not None and given[name] != ():
            raise ValueError(
                f"With whole_batch=True {name} must be left out, but it is "
                f"{given[name]!r}. {why}."
            )
    if given["aux"] != "auto":
        raise ValueError(
            "With whole_batch=True aux must be left out, but it is "
            f"{given['aux']!r}. It comes back as fun returns it for the whole batch."
        )


class Trace(NamedTuple):
    """The program of `fun` at all rows.

    Attributes:
      closed: the program, of the leaves of the parameters and of the batch.
      out: the tree of what it returns.
      part: the program of a micro-batch.
      num_params: how many leaves the parameters have.
      strided: whether a micro-batch holds every k-th row, and not neighbours.
    """

    closed: Any
    out: Any
    part: Partitioned
    num_params: int
    strided: bool

    @property
    def loss_has_gradients(self) -> bool:
        """Whether the loss depends on the parameters."""
        n = len(self.closed.consts)
        jaxpr = self.part.jaxpr
        params = jaxpr.invars[n : n + self.num_params]
        loss = jaxpr.outvars[0]
        return ir.is_variable(loss) and loss in ir.following(jaxpr, params)


class _MeetsInsideError(Exception):
    """Rows meet in the program of a region, but not in the one outside of it."""


def value_and_grad(core: Callable[[Options], Any], given: dict[str, Any]) -> Any:
    """`value_and_grad` with `whole_batch=True`; `core` is the one without."""
    options, fun = prepared(given)
    warned = False

    @functools.wraps(options.fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> Any:
        nonlocal warned
        call = Call.make(options, args, kwargs)
        check_region(call)
        check_batch(call)
        trace = traced(call, fun)
        warned = warned or _warn(call, trace)
        (value, aux), grads = window(core, fun, call, trace)
        return ((value, aux) if options.has_aux else value), grads

    return value_and_grad_fun


def window(
    core: Callable[[Options], Any], fun: Callable[..., Any], call: Call, trace: Trace
) -> Any:
    """`((value, aux), grads)` of a call whose program is traced."""
    options, numbers = call.options, _numbers_of_rows(call, trace)
    axis = options.data_axis
    if axis is not None and call.mesh is not None:
        axis = dataclasses.replace(axis, mesh=call.mesh)
    run = core(
        options._replace(
            fun=micro_batch(call, trace, fun),
            argnums=0,
            batch_argnums=1,
            batch_argnames=(),
            batch_axes=((*call.split_axes, *[0] * len(numbers)), None),
            has_aux=True,
            aux=MODES,
            axis_name=AXIS_OF_ROWS if trace.part.meets else None,
            data_axis=axis,
            strided=trace.strided,
        )
    )
    given_whole = trace.closed.consts if call.mesh is None else call.others()
    batch = (*call.batch, *numbers), jax.tree.map(_as_data, given_whole)
    after = _scales_after(trace)
    try:
        found = run(_widened(call.params) if after else call.params, batch)
    except _MeetsInsideError:  # As it does in the region of a mesh alone.
        part = trace.part._replace(meets=True)
        return window(core, fun, call, trace._replace(part=part))
    (loss, kept), grads = _scaled(call, *found) if after else found
    loss = loss.astype(trace.closed.out_avals[0].dtype)
    leaves = [loss, *put_together(call, trace, kept)]
    structure = jax.tree.structure(trace.out)
    if len(leaves) > structure.num_leaves:  # the loss once more, whole
        leaves[0] = leaves.pop()
    value = jax.tree.unflatten(structure, leaves)
    return jax.tree.map(_value_of, value, is_leaf=_is_own), grads


def prepared(given: dict[str, Any]) -> tuple[Options, Callable[..., Any]]:
    """The options, checked, and a function that returns `(loss, aux)`."""
    check(given)
    options = Options(**given, whole_batch=True).checked()
    if options.axes:
        options._replace(axis_name=AXIS_OF_ROWS).checked()

    def fun(*args: Any, **kwargs: Any) -> Any:
        loss, _, aux = taken_apart(options, options.fun(*args, **kwargs))
        return loss, jax.tree.map(_kept, aux)

    return options, fun


@jax.tree_util.register_pytree_node_class
class _Own:
    """A node without leaves for what is no array: a number, a text, NumPy's."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def tree_flatten(self) -> tuple[tuple[()], "_Own"]:
        return (), self

    @classmethod
    def tree_unflatten(cls, own: "_Own", leaves: Any) -> "_Own":
        return own


def _kept(leaf: Any) -> Any:
    """A leaf of the aux, which `jax.value_and_grad` returns as it is."""
    return leaf if isinstance(leaf, jax.Array) else _Own(leaf)


def _is_own(node: Any) -> bool:
    return isinstance(node, _Own)


def _value_of(node: Any) -> Any:
    return node.value if _is_own(node) else node


def _warn(call: Call, trace: Trace) -> bool:
    """Warns if something is computed whole that is larger than a micro-batch's step."""
    step = sum(map(ir.computed, trace.closed.jaxpr.eqns)) // num_parts(call)
    large = [note for note in trace.part.whole if note.size > step]
    if large:
        note = max(large, key=lambda note: note.size)
        warnings.warn(
            f"With whole_batch=True {note.name} at {note.line} is computed whole in "
            f"each micro-batch, because nothing better is known of it: {note.size:,} "
            f"numbers, more than a micro-batch's step has ({step:,}). Write it with "
            "other functions, or use fewer micro-batches; ga_optax.batch_dependencies "
            "shows what else is.",
            stacklevel=4,
        )
    return bool(large)


def num_parts(call: Call) -> int:
    """Into how many micro-batches all devices together split the rows."""
    axes = call.options.axes
    devices = meshes.num_devices(axes, call.mesh) if axes else 1
    return call.options.num_microbatches * devices


def _numbers_of_rows(call: Call, trace: Trace) -> list[jax.Array]:
    """Which micro-batch each row is in, if the loop has to say it."""
    part, k = trace.part, call.options.num_microbatches
    # In the region of a mesh the program is traced anew.
    if part.meets or not (part.reads_index or call.mesh is not None):
        return []
    rows = jnp.shape(call.batch[0])[call.split_axes[0]]
    numbers = jnp.arange(rows, dtype=jnp.int32)
    if trace.strided:
        return [numbers % k]
    numbers = numbers // (rows // (k if call.mesh is None else num_parts(call)))
    if call.axes:
        numbers = numbers + k * jax.lax.axis_index(call.axes)
    return [numbers]


def check_region(call: Call) -> None:
    """Raises in a `jax.shard_map` that checks how values vary over devices."""
    if meshes.checks_varying():
        raise ValueError(
            "Inside a jax.shard_map whole_batch=True needs check_vma=False, but this "
            "one checks: JAX has no types for an axis beside its mesh. Pass that, or "
            "call at top level with data_axis=."
        )


def check_batch(call: Call) -> None:
    """Raises if the type of the batch says that its rows are spread over a mesh."""
    for x, axis in zip(call.batch, call.split_axes, strict=True):
        spec = meshes.spec_of_type(x)
        if not call.options.axes and any(spec[axis : axis + 1]):
            raise ValueError(
                "With whole_batch=True rows along a mesh axis of explicit type need "
                f"data_axis=, but the batch is sharded as {spec} along axis "
                f"{axis}. Pass data_axis={spec[axis]!r}."
            )


# -- The program -----------------------------------------------------------------------


def traced(
    call: Call, fun: Callable[..., Any], due: Sequence[Layout] | None = None
) -> Trace:
    """Traces `fun` once, for all rows, and partitions it, with results as are due."""
    size, params = num_parts(call), jax.tree.leaves(call.params)
    structure = jax.tree.structure(call.params)
    several = not isinstance(call.options.argnums, int)

    def run(leaves: Sequence[Any], batch: Sequence[Any]) -> Any:
        tree = jax.tree.unflatten(structure, leaves)
        new = tree if several else (tree,)
        places = call.roles["argnums"]
        one = call.with_args(dict(zip(places, new, strict=True))).with_batch(batch)
        return fun(*one.args, **one.kwargs)

    trace = jax.make_jaxpr(run, return_shape=True)
    closed, out = trace(_whole_params(call, params), _whole_batch(call))
    jaxpr = closed.jaxpr
    references.check_own(jaxpr, "whole_batch=True")
    n, strided = len(params), call.strided is True

    def split(strided: bool) -> Partitioned:
        arguments = _arguments(jaxpr, call.split_axes, n, size, strided)
        return partition(jaxpr, arguments, Axis(AXIS_OF_ROWS, size, LONGEST), due)

    part = split(strided)
    if strided and part.meets:
        strided, part = False, split(False)
    return Trace(closed, out, part, n, strided)


def _arguments(
    jaxpr: Any, axes: Sequence[int], num_params: int, size: int, strided: bool
) -> list[Argument]:
    """Constants, parameters, and the batch with its rows along these axes.

    If nothing depends on the parameters, as in `microbatch`, nobody knows what somebody
    may differentiate with respect to: then it may be anything.
    """
    params, batch = jaxpr.invars[:num_params], jaxpr.invars[num_params:]
    any_of_them = not any(ir.num_readers(jaxpr, x) for x in params)

    def smooth(x: Any) -> bool:
        return any_of_them and is_inexact(x.aval)

    arguments = [
        *(Argument(x.aval, WHOLE, smooth(x)) for x in jaxpr.constvars),
        *(Argument(x.aval, WHOLE, True) for x in params),
    ]
    for x, axis in zip(batch, axes, strict=True):
        segments = x.aval.shape[axis] // size if strided else 1
        layout = Rows(axis, segments) if size > 1 else WHOLE
        arguments.append(Argument(x.aval, layout, smooth(x)))
    return arguments


def _whole_batch(call: Call) -> list[Any]:
    """The types of the batch's leaves with the rows of all devices."""
    devices = meshes.num_devices(call.axes, None) if call.axes else 1
    types = []
    for x, axis in zip(call.batch, call.split_axes, strict=True):
        shape = list(jnp.shape(x))
        shape[axis] *= devices
        types.append(jax.ShapeDtypeStruct(tuple(shape), jnp.result_type(x)))
    return types


def _whole_params(call: Call, leaves: Sequence[Any]) -> Sequence[Any]:
    """The parameters, or their types, whole, if a mesh shards them for the window."""
    if call.mesh is not None:
        return [jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves]
    if not call.axes:
        return leaves
    where = meshes.placements(call.params, call.specs, call.axes, None)
    whole = []
    for x, place in zip(leaves, where, strict=True):
        shape = list(jnp.shape(x))
        for dim, names in place.dims:
            shape[dim] *= meshes.num_devices(names, None)
        whole.append(jax.ShapeDtypeStruct(tuple(shape), jnp.result_type(x)))
    return whole


def micro_batch(
    call: Call, trace: Trace, fun: Callable[..., Any]
) -> Callable[..., Any]:
    """The loss of a micro-batch, and all else that `fun` returns, by its layout."""
    layouts = trace.part.layouts
    rows = [jnp.shape(x)[a] for x, a in zip(call.batch, call.split_axes, strict=True)]
    due = rows[0] // call.options.num_microbatches
    if call.mesh is not None:
        due //= meshes.num_devices(call.options.axes, call.mesh)

    def run(params: Any, batch: Any) -> Any:
        own, given_whole = batch
        own, numbers = own[: len(call.batch)], own[len(call.batch) :]
        if own[0].shape[call.split_axes[0]] != due:
            raise ValueError("The program is that of one micro-batch.")
        pairs = zip(*map(jax.tree.leaves, (params, call.params)), strict=True)
        leaves = [x.astype(jnp.result_type(like)) for x, like in pairs]
        if call.mesh is None:
            part = trace.part
            consts = map(_as_given, given_whole, trace.closed.consts)
        else:
            here = _in_region(call, fun, given_whole, layouts)
            part, consts = here.part, here.closed.consts
        args = *consts, *leaves, *own
        if trace.part.meets:
            loss, *rest = ir.results(part, args)
        else:
            if part.meets:
                raise _MeetsInsideError
            index = numbers[0][0] if numbers else None
            loss, *rest = part.alone(index, args)
        loss = _addend(call, trace, loss)
        kept: dict[str, list[Any]] = {mode: [] for mode in MODES}
        for x, layout in zip(rest, layouts[1:], strict=True):
            kept[_kind(layout)].append(x)
        return loss, kept

    return run


def _in_region(
    call: Call, fun: Callable[..., Any], others: dict[int, Any], due: Sequence[Layout]
) -> Trace:
    """The program of `fun` in the region of a mesh, with results as are due.

    Types name the mesh otherwise there. The program may have other equations, so its
    results need not come in the layouts of the one outside.
    """
    came = call.others()
    inside = {i: _as_given(x, came[i]) for i, x in others.items()}
    return traced(call.with_others(inside), fun, due)


# -- The window takes the mean of micro-batches ----------------------------------------


def _addend(call: Call, trace: Trace, loss: jax.Array) -> jax.Array:
    """What a micro-batch adds: the mean of all is the loss, or its part of it."""
    is_part, after = trace.part.layouts[0] == PARTIAL, _scales_after(trace)
    size = num_parts(call)
    if is_part or after:
        loss = loss.astype(_wide(loss.dtype))
    if is_part and not after:
        return loss * jnp.asarray(size, loss.dtype)
    return loss / jnp.asarray(size, loss.dtype) if after and not is_part else loss


def _scales_after(trace: Trace) -> bool:
    """Whether the mean is multiplied by the number of micro-batches after the window.

    In the loss it would multiply all that comes back through sums over all rows, and
    the exponents of float16 and float8 are too small for that. And a backward rule that
    is not linear must see the cotangents of the whole batch, in the plain loop: over an
    axis that of each micro-batch is divided (`Backward.as_mean`).
    """
    part = trace.part
    if part.meets and known.deeds(part.jaxpr).bends:
        return False
    if part.bends and not part.meets:
        return True
    jaxpr = trace.closed.jaxpr
    results = (x for e in ir.equations(jaxpr) for x in e.outvars)
    return not all(map(is_wide, (*jaxpr.invars, *results)))


def _wide(dtype: Any) -> Any:
    """The dtype, or float32 if that has more bits."""
    return dtype if jnp.finfo(dtype).bits >= 32 else jnp.float32


def _widened(params: Any) -> Any:
    """Parameters whose gradients lose nothing before they are multiplied."""
    arrays = jax.tree.map(jnp.asarray, params)
    return jax.tree.map(lambda x: x.astype(_wide(x.dtype)), arrays)


def _scaled(call: Call, value: tuple[jax.Array, Any], grads: Any) -> tuple[Any, Any]:
    (loss, kept), size = value, num_parts(call)

    def times(x: jax.Array) -> jax.Array:
        return x * jnp.asarray(size, x.dtype)

    def as_given(g: jax.Array, x: Any) -> jax.Array:
        return times(g).astype(jnp.result_type(x))

    return (times(loss), kept), jax.tree.map(as_given, grads, call.params)


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and bool(
        jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    )


def _as_data(x: Any) -> Any:
    return jax.random.key_data(x) if _is_key(x) else x


def _as_given(x: Any, given: Any) -> Any:
    """What is a key again, if that was given."""
    is_key = _is_key(given)
    return jax.random.wrap_key_data(x, impl=jax.random.key_impl(given)) if is_key else x


# -- What comes back -------------------------------------------------------------------

# How results are put together over micro-batches, by their layout.
MODES = {"whole": "last", "partial": "sum", "rows": "stack"}


def _kind(layout: Any) -> str:
    return "rows" if isinstance(layout, Rows) else layout


def put_together(call: Call, trace: Trace, kept: dict[str, Any]) -> list[Any]:
    """The results after the loss, as `fun` returns them for the whole batch."""
    rest = {name: iter(leaves) for name, leaves in kept.items()}
    found = []
    loss, *others = trace.closed.out_avals
    pairs = zip(trace.part.layouts[1:], [*others, loss], strict=False)
    for layout, due in pairs:
        x = next(rest[_kind(layout)])
        if isinstance(layout, Rows):
            x = _joined(call, x, layout)
            length = min(x.shape[layout.dim], due.shape[layout.dim])
            x = jax.lax.slice_in_dim(x, 0, length, axis=layout.dim)
        found.append(x.astype(due.dtype) if layout == PARTIAL else x)
    return found


def _joined(call: Call, x: jax.Array, rows: Rows) -> jax.Array:
    """Rows in their order, from those of each micro-batch along axis 0.

    In a region of the user's a device has its own, if they are neighbours.
    """
    d, segments = rows.dim, rows.segments
    if call.axes and (segments > 1 or rows.extra):
        x = jax.lax.all_gather(x, call.axes, tiled=True)
    x = jnp.moveaxis(x, 0, d)
    before, (parts, n), after = x.shape[:d], x.shape[d : d + 2], x.shape[d + 2 :]
    shape, spec = (*before, parts * n, *after), meshes.spec_of_type(x)
    if segments == 1:
        return x.reshape(shape)
    x = x.reshape(*before, parts, segments, n // segments, *after).swapaxes(d, d + 1)
    if not any(spec):
        return x.reshape(shape)
    due = *spec[: d + 1], *spec[d + 2 :]
    return jax.lax.reshape(x, shape, out_sharding=meshes.on_mesh_of(x, due))
