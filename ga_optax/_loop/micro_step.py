"""One micro-step: the loss of a micro-batch, what is added in place, what is folded.

    state  ->  state + (gradients, results) of micro-batch i

A `LossProgram`, its `Operands` and a `DeviceContext` are all that a loop knows of a
call. Fences keep the bits of a micro-step in every grouping. A `Fold` puts results of
micro-batches together.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from .. import accumulator
from .._checks import is_on_host, named_leaves
from .._devices import collectives, meshes
from .._devices.meshes import Axes, DeviceContext
from .._passes import about, jaxprs, table
from .._passes.about import Facts, Reason
from .._passes.primitives import ADD_TO, NEW_REF, PUT
from .._passes.table import arrival, is_cut, use_of

# == The loss of a micro-batch, its arrays and devices =================================

Flat = Any  # an Accumulator whose total is a list


class LossProgram(NamedTuple):
    """The program of `fun` for one micro-batch.

    Attributes:
      jaxpr: of the flat arguments `(params, batch, keys, carry)` to the flat results
        `(loss, weight, carry, results)`; no weight if there is none.
      results: the types of the loss and of the other results.
      folds: the name of the fold of each of these results, see `FOLDS`.
      weighted: True if there is a weight.
      varying: the mesh axes over which every sum differs between devices: the axes of
        the data, and of the weight.
      multiplies: True if the weight multiplies the gradients, and not the cotangent.
      arrivals: how the gradient of each leaf of the parameters arrives, see `arrival`.
      optimize: True if passes run on programs; False is the plain scan.
      grouped: True if sums have the same bits in every grouping of micro-batches.
    """

    jaxpr: core.Jaxpr
    results: list[Any]
    folds: list[str]
    weighted: bool
    varying: Axes
    multiplies: bool
    arrivals: list[str | None]
    optimize: bool
    grouped: bool

    @property
    def same_bits(self) -> bool:
        """True if rounding and fences give a micro-step the same bits everywhere."""
        return self.optimize and self.grouped

    @property
    def sliced(self) -> list[bool]:
        """For each gradient, True if slices of the gradient can be added in place."""
        can = _can_add_in_place(self.side_effects, self.multiplies)
        return [can and arrives == "slices" for arrives in self.arrivals]

    @property
    def side_effects(self) -> about.SideEffects:
        """The effects of the program, and of its backward pass, beside the results."""
        return _side_effects(self.jaxpr, len(self.arrivals))

    @property
    def low_precision(self) -> bool:
        """True if anything is computed in less than 32 bits."""
        results = [x.aval for e in jaxprs.equations(self.jaxpr) for x in e.outvars]
        dtypes = {getattr(aval, "dtype", np.dtype(np.int32)) for aval in results}
        return any(jnp.issubdtype(d, np.floating) and d.itemsize < 4 for d in dtypes)


class Operands(NamedTuple):
    """The arrays of a loop, flat by role; the batch is split into micro-batches.

    Attributes:
      num_real: how many micro-batches count; None for all.
      rows: how many leaves of the batch are differentiated: the first ones. The last
        leaf of the batch is `indices` then.
    """

    consts: Sequence[Any]
    params: list[jax.Array]
    batch: list[jax.Array]
    keys: list[jax.Array]
    carry: list[jax.Array]
    acc: Flat
    num_real: jax.Array | None = None
    rows: int = 0

    @property
    def indices(self) -> jax.Array:
        """The index of each micro-batch, if the program of the loss reads it."""
        return self.batch[-1]


def run_passes(
    program: jaxprs.Program, devices: DeviceContext, multiplies: bool, optimize: bool
) -> tuple[jaxprs.Program, list[str | None]]:
    """Runs all passes on the program of a micro-batch; tells how gradients arrive."""
    number = len(devices.names)
    if not optimize:
        return program, [None] * number
    effects = _side_effects(program.jaxpr, number)
    facts = Facts(devices, _can_add_in_place(effects, multiplies))
    program = table.run_scope("fun", program, facts)
    arrivals = [arrival(program.jaxpr, x) for x in program.jaxpr.invars[:number]]
    return table.run_scope("sharded fun", program, facts), arrivals


# == In place or not ===================================================================
# The choice of the gradients that the backward pass adds to the accumulator.
#
# If a model scans over a parameter (stacked layers), the backward pass can add the
# gradient to the accumulator slice by slice, through a reference, so that no second
# gradient tree exists. `arrival` reads off the program of `fun` for which parameters
# these additions have the bits of the plain sum; `reasons_not_in_place` lists the other
# conditions. For the other parameters XLA reuses the buffers by itself.

# `jax.vjp(...).with_refs` transposes `lax.scan` correctly from jax 0.11.0 on (jax PR
# 38929), and a `custom_vmap` may have references inside it from 0.11.1 on.
HAS_REFS = jax.__version_info__ >= (0, 11, 1)

# A leaf of so small a part of the largest saves no memory. And the gradient of a
# vector, such as a bias, is no matrix product into which XLA could fuse the addition:
# each layer would take one more kernel.
_SMALL = 1000


def _side_effects(jaxpr: core.Jaxpr, number: int) -> about.SideEffects:
    """The side effects of a program, of which so many operands are parameters."""
    return about.side_effects(jaxpr, frozenset(jaxpr.invars[:number]))


def _can_add_in_place(effects: about.SideEffects, multiplies: bool) -> bool:
    """True if gradients may be added in place. Weights must not multiply them."""
    return HAS_REFS and not multiplies and not effects.reordering


def reasons_not_in_place(
    off: str, program: Any, operands: Any, scattered: Mapping[int, Any]
) -> list[Reason | None]:
    """For each leaf the reason why it is not added in place; None if it is.

    Args:
      off: the reason that holds for all leaves; empty if there is none.
      program: a `LossProgram`.
      operands: the `Operands` of the loop.
      scattered: the gradients that are scattered before they are added, and how.
    """
    if not off and not HAS_REFS:
        off = f"jax {jax.__version__} is older than 0.11.1"
    if not off and program.multiplies:  # the weight needs the gradient by itself
        off = "weights multiply the gradients"
    largest = max((jaxprs.numbers(x.shape) for x in operands.params), default=0)

    def reason(i: int, total: jax.Array, param: jax.Array) -> Reason | None:
        if off:
            return Reason(off)
        variable = program.jaxpr.invars[i]
        if program.arrivals[i] is None:
            line = use_of(program.jaxpr, variable)
            return Reason("used more than once, or not only in sums over rows", line)
        why = _why_whole(program.jaxpr, total, param, variable)
        if program.arrivals[i] != "slices":
            why = "no scan runs over the parameter itself: XLA reuses the buffer"
        elif i in scattered and is_cut(program.jaxpr, i, scattered[i]):
            why = "grad_specs split a dimension that a scan runs over"
        elif jaxprs.numbers(param.shape) * _SMALL < largest:
            why = f"less than 1/{_SMALL} of the largest: added as a whole"
        # Custom rules do not go with effects, such as printing or a collective.
        return Reason(why) if why else program.side_effects.reordering

    return list(map(reason, itertools.count(), operands.acc.total, operands.params))


def _why_whole(
    jaxpr: core.Jaxpr, total: jax.Array, param: jax.Array, variable: Any
) -> str:
    """The reason why no slices can be added to an accumulator; empty if they can."""
    dtype = total.dtype
    if is_on_host(param) and not table.is_moved_in(jaxpr, variable):
        return "the parameter lies on the host, and not one move alone reads it"
    if jnp.finfo(dtype).bits < jnp.finfo(param.dtype).bits:
        return f"the parameter is {param.dtype}, the accumulator {dtype}"
    # The mesh of the gradient: a program may be written without a mesh.
    if not meshes.same_mesh(jax.typeof(total), variable.aval):
        return "the accumulator has another mesh"
    return f"{dtype} would round too often" if jnp.finfo(dtype).bits < 32 else ""


# -- The log ---------------------------------------------------------------------------


def log_in_place(names: Sequence[str], whys: Sequence[Reason | None]) -> None:
    """Logs the leaves that are added in place, and for the others the reason."""
    pairs = []
    for name, why in zip(names, whys, strict=True):
        what = f"not added in place ({why.why})" if why else "added in place"
        pairs.append((what, f"{name} at {why.line}" if why and why.line else name))
    for what, members in about.by_reason(pairs):
        about.log_sentence(f"Gradients {what}: {members}.")


# == Types of arrays ===================================================================


def blank(types: Sequence[Any]) -> list[jax.Array]:
    """Zeros of these types, sharded and varying over devices as the types say."""
    return [varying_like(collectives.zeros(x), x) for x in types]


def varying_like(x: jax.Array, other: Any, axes: Axes = ()) -> jax.Array:
    """`x`, marked as varying over devices as `other` does, and over some axes."""
    return collectives.vary(x, (*axes, *meshes.varying(other)))


def strong(x: ArrayLike) -> jax.Array:
    """`x` without a weak type, which the carry of a loop has to keep."""
    x = jnp.asarray(x)
    weak = jax.typeof(x).weak_type  # an array of PRNG keys has no such attribute
    return jax.lax.convert_element_type(x, x.dtype) if weak else x


# == Fences ============================================================================
# Fences keep a micro-step one program in every grouping.
#
# A micro-step has the same bits in a loop of any length if XLA compiles it the same
# way, whatever is around it. Three of its passes look at what is around it: it moves
# what does not change out of loops, it removes loops of one iteration, and on CPUs it
# compiles small loops as one function.
#
# `accumulate` alone promises such bits. Everywhere the operands of a micro-step are
# behind a barrier: XLA would move casts and transposes of parameters out of the loop,
# and hold them while the loop runs.


def fusion_barrier(tree: Any) -> Any:
    """`tree` behind a barrier: XLA moves and fuses nothing across.

    Without the barrier, XLA would compute values of the parameters alone before a loop
    of several micro-steps, and round these values otherwise than in a loop of one.
    """
    leaves, structure = jax.tree.flatten(tree)
    groups: dict[Any, list[int]] = {}
    for i, x in enumerate(leaves):  # jax 0.10 mixes the varying axes of one barrier
        if _is_value(x):
            groups.setdefault(meshes.varying(x), []).append(i)
    for members in groups.values():
        fenced = jax.lax.optimization_barrier([leaves[i] for i in members])
        leaves = jaxprs.put(leaves, members, fenced)
    return jax.tree.unflatten(structure, leaves)


def _is_value(x: Any) -> bool:
    """True for an array, and not for a reference that `fun` closes over."""
    return isinstance(jax.typeof(x), jax.core.ShapedArray)


def cast_inside(
    leaves: list[jax.Array], narrowed: list[bool], zero: jax.Array
) -> list[jax.Array]:
    """The leaves. XLA casts the leaves that are `narrowed` in each micro-step.

    On TPUs XLA drops barriers, casts such leaves before the loop over micro-batches,
    and holds the casts while the loop runs. XLA cannot do so if the leaves depend on a
    zero that XLA does not know. The subtraction and the cast are one kernel, and x - 0
    is x for every x.
    """
    chosen = [i for i, is_narrowed in enumerate(narrowed) if is_narrowed]
    if not chosen:
        return leaves

    def inside(zero: jax.Array, *xs: jax.Array) -> list[jax.Array]:
        return [x - zero.astype(x.dtype) for x in xs]

    xs = [leaves[i] for i in chosen]
    new = jax.lax.platform_dependent(
        zero, *xs, tpu=inside, default=lambda _, *xs: [*xs]
    )
    return jaxprs.put(leaves, chosen, new)


def single_step(step: Callable[..., Any], start: Any, batch: list[jax.Array]) -> Any:
    """Runs one micro-step in a conditional that XLA cannot fold on CPUs.

    XLA compiles a branch by itself, as the body of a loop. XLA would inline a loop of
    one iteration, and on CPUs round differently.
    """
    true = jax.lax.platform_dependent(
        cpu=lambda: jax.lax.optimization_barrier(jnp.ones([], bool)),
        default=lambda: jnp.ones([], bool),
    )
    state, collected = if_holds(true, step, start, batch)
    return state, jax.tree.map(lambda x: x[None], collected)


def if_holds(
    predicate: jax.Array, step: Callable[..., Any], start: Any, batch: list[jax.Array]
) -> Any:
    """`step(start, batch)`, or `start` and zeros to collect."""
    step, (_, types) = _traced_once(step, start, batch)
    types, structure = jax.tree.flatten(types)

    def stay() -> Any:
        return start, jax.tree.unflatten(structure, blank(types))

    return jax.lax.cond(predicate, lambda: step(start, batch), stay)


def next_count(count: jax.Array) -> jax.Array:
    """`count + 1`. On CPUs by a sort, which XLA does not fuse into one function.

    In a loop that is one function, XLA adds in another order and contracts other
    products than in operations compiled one by one (jaxlib 0.10 to 0.12).
    """
    return jax.lax.platform_dependent(
        count,
        accumulator.increment(count),
        cpu=lambda *pair: jax.lax.sort(jnp.stack(pair))[1],
        default=lambda _, following: following,
    )


def _traced_once(fun: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """`fun` as a program that is traced, and the types of its results.

    Where it is called, its equations are run; Python and differentiation are done.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def replayed(*args: Any) -> Any:
        return jax.tree.unflatten(
            structure, jaxprs.results(closed, jax.tree.leaves(args))
        )

    return replayed, jax.tree.unflatten(
        structure, [x.aval for x in closed.jaxpr.outvars]
    )


# == Parameters in the host's memory ===================================================
# Their gradients stay on the device.
#
# JAX moves the gradient of what was moved in back to the host, and nothing is added up
# there. So a stand-in on the device is differentiated, a second operand of the move,
# whose value nothing reads. In a scan over layers it is sliced as the parameter is, and
# its gradient can be added in place.


@jax.custom_jvp
def _stand_in(x: jax.Array, other: jax.Array) -> jax.Array:
    """`x`, which has the derivative of `x + other`."""
    del other
    return x


_stand_in.defjvps(lambda t, *_: t, lambda t, *_: t)


def with_stand_ins(
    program: jaxprs.Program, params: Sequence[jax.Array], rest: Sequence[jax.Array]
) -> tuple[jaxprs.Program, Sequence[jax.Array], Sequence[jax.Array]]:
    """A program of stand-ins for parameters that are moved in, and its arguments."""
    types = {
        i: x.aval.update(memory_space=jax.memory.Space.Device)
        for i, x in enumerate(program.jaxpr.invars[: len(params)])
        if table.is_moved_in(program.jaxpr, x)
    }
    if not types:
        return program, params, rest

    def differentiated(*args: jax.Array) -> list[Any]:
        some, args = args[: len(params)], args[len(params) :]
        here = jaxprs.put(some, types, args[: len(types)])
        stand_ins = {i: some[i] for i in types}
        return _with_stand_ins(program, [*here, *args[len(types) :]], stand_ins)

    some = jaxprs.put(params, types, blank([*types.values()]))
    rest = [*(params[i] for i in types), *rest]
    return jaxprs.program_of(differentiated, *some, *rest), some, rest


def _with_stand_ins(
    program: jaxprs.Program, args: Sequence[Any], of: Mapping[int, jax.Array]
) -> list[Any]:
    """The results of a program, some of whose arguments have stand-ins, by place."""
    if not of:
        return jaxprs.results(program, args)
    stand_in_of: Any = {program.jaxpr.invars[i]: x for i, x in of.items()}

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
        pairs = enumerate(equation.invars)
        its = {i: stand_in_of[x] for i, x in pairs if jaxprs.is_among(x, stand_in_of)}
        if not its:
            return None
        if equation.primitive.name == PUT:
            ins, outs = equation.invars, equation.outvars
            moved = jaxprs.bind(program.jaxpr, [equation], ins, outs, values)
            return jaxprs.put(
                moved, its, [_stand_in(moved[i], x) for i, x in its.items()]
            )
        [body] = jaxprs.inner(equation)  # `table.is_moved_in` knows of no other

        def inside(xs: Sequence[Any]) -> list[Any]:
            num = len(body.jaxpr.invars)
            return _with_stand_ins(
                body, xs[:num], dict(zip(its, xs[num:], strict=True))
            )

        xs = [*values, *its.values()]
        if jaxprs.kind(equation) == "scan":
            return jaxprs.scan(jaxprs.scan_of(equation), inside, xs)
        if jaxprs.kind(equation) == "checkpoint":
            return jaxprs.checkpointed(equation, lambda *xs: inside(xs))(*xs)
        return inside(xs)

    return jaxprs.evaluate(program, args, rule)


# == Sending ===========================================================================
# Gradients that are scattered over devices inside of the backward pass.
#
# The backward pass adds a gradient to a reference, slice by slice if the model scans
# over layers. Here each slice is scattered first: the program of the backward pass runs
# equation by equation, and a function gets each gradient in place of the reference.

# Adds a gradient, or a slice of it, to the reference that `write_gradients` got.
Write = Callable[[Any, jax.Array], None]


def write_gradients(
    backward: Callable[..., list[jax.Array]],
    types: Sequence[Any],
    refs: Sequence[Any],
    writes: Sequence[Write],
) -> list[jax.Array]:
    """`backward(*references)`, with `writes` in place of the additions to references.

    Args:
      backward: adds a gradient to each reference, and does nothing else with it.
      types: the types of these gradients.
      refs: a reference for each of `writes`; in a scan over slices of the gradient,
        `writes` get the slices of the reference.
      writes: a function of the reference and of the gradient.
    """
    program = jaxprs.program_of(lambda: backward(*map(jax.new_ref, blank(types))))
    equations = program.jaxpr.eqns
    new_refs = [e for e in equations if e.primitive.name == NEW_REF][: len(types)]
    rest = [e for e in equations if e not in new_refs]
    invars = [e.outvars[0] for e in new_refs]
    jaxpr = program.jaxpr.replace(invars=invars, eqns=rest)
    return _write(program._replace(jaxpr=jaxpr), writes, refs)


def _write(
    program: jaxprs.Program, writes: Sequence[Write | None], args: Sequence[Any]
) -> list[Any]:
    """The results of a program. `writes` is None for an argument of another kind."""
    write_of: Any = dict(zip(program.jaxpr.invars, writes, strict=True))

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
        ins = equation.invars
        inner = [write_of.get(x) if jaxprs.is_variable(x) else None for x in ins]
        if not any(inner):
            return None
        if equation.primitive.name == ADD_TO:
            inner[0](*values)  # pyrefly: ignore[not-callable]
            return ()
        # A jitted function, or a scan: see `is_cut`.
        [body] = jaxprs.inner(equation)
        inside = functools.partial(_write, body, inner)
        if jaxprs.kind(equation) == "scan":
            return jaxprs.scan(jaxprs.scan_of(equation), inside, values)
        return inside(values)

    return jaxprs.evaluate(program, args, rule)


# == Folds of results ==================================================================
# The results of micro-batches become one result: one `Fold` for each leaf.
#
# The loss is one more leaf: of the fold "mean" in `accumulate`, otherwise of "sum". A
# new fold is one more record in `FOLDS`.


class Weighting(NamedTuple):
    """The weight of a micro-batch, and the zeros that round its results.

    Attributes:
      weight: the weight; None for 1.
      zero: see `accumulator.rounded`; None if no result is rounded before it is added.
      zero_of_weighted: such a zero for results that the weight multiplies.
    """

    weight: jax.Array | None = None
    zero: jax.Array | None = None
    zero_of_weighted: jax.Array | None = None

    def rounded(self, x: Any) -> Any:
        """A leaf, rounded before it is added."""
        if self.zero is None:
            return x
        return accumulator.rounded(jnp.asarray(x), self.zero)


class Fold(NamedTuple):
    """The functions by which a leaf of all micro-batches becomes one result.

        carry = init(type of the leaf, axes)
        carry = step(carry, leaf, weighting)        for each micro-batch
        carry = join(carry, carry of a neighbour)   for each pair of logical devices
        carry = merge(carry, data axes)             on several devices
        result = finish(carry, Σ w)

    Attributes:
      init: makes the first carry. A sum is marked as varying over `axes`, and as one of
        the terms does.
      step: adds a leaf.
      join: puts together the carries of two logical devices.
      merge: puts together the carries of all devices, whose axes are bound. None for a
        sum: it is reduced together with the gradients.
      finish: makes the result.
      adds: True if leaves are added up or compared: they must be numbers, and not the
        rows of different examples.
      collects: True if the loop stacks the leaves of all micro-batches along a new axis
        0. After the loop this stack is the carry.
    """

    init: Callable[[Any, Axes], Any] = lambda x, axes: ()
    step: Callable[[Any, Any, Weighting], Any] = lambda carry, x, weighting: carry
    join: Callable[[Any, Any], Any] = lambda a, b: b
    merge: Callable[[Any, Axes], Any] | None = None
    finish: Callable[[Any, Any], Any] = lambda carry, weight: carry
    adds: bool = False
    collects: bool = False


def _start_of_mean(x: Any, axes: Axes) -> Any:
    [term] = map(_inexact, blank([x]))
    total: Any = accumulator.init(term).total
    return varying_like(-total, term, axes)


def _mean(total: Any, x: Any, weighting: Weighting) -> Any:
    """Adds w·x, weighted as the loss is. The sum of integers is float32."""
    x, weight = _inexact(weighting.rounded(x)), weighting.weight
    if weight is not None:
        x = accumulator.weighted(x, weight, total.dtype, weighting.zero_of_weighted)
    return accumulator.add_terms([total], [x], weight)[0]


def of_last_device(xs: list[jax.Array], axes: Axes) -> list[jax.Array]:
    """The arrays of the last device, on all devices."""
    is_last = jax.lax.axis_index(axes) == meshes.num_devices(axes) - 1

    def last(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            data = last(jax.random.key_data(x))
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
        count = x.astype(_sum_dtype(x.dtype))
        here = jnp.where(is_last, count, -jnp.zeros_like(count))  # -0.0 + x is x
        return jax.lax.psum(here, axes).astype(x.dtype)

    return list(map(last, collectives.vary(xs, axes)))


def _extremum(larger: Any, across: Any) -> Fold:
    """The largest or the smallest number; the carry has the number of terms, too."""

    def step(carry: Any, x: Any, _: Weighting) -> Any:
        (most, number), x = carry, strong(x)
        # Infinities would stop `jax_debug_infs`, so a count says that there is no term.
        return varying_like(
            jnp.where(number == 0, x, larger(most, x)), most
        ), number + 1

    def merge(carry: Any, axes: Axes) -> Any:
        return across(collectives.vary(carry[0], axes), axes), carry[1]

    return Fold(
        init=lambda x, axes: (varying_like(blank([x])[0], x, axes), jnp.int32(0)),
        step=step,
        merge=merge,
        finish=lambda carry, weight: carry[0],
        adds=True,
    )


# The folds of the option `aux`; "max" and "min" are of windows alone.
OPTIONS = ("mean", "sum", "last", "stack")
FOLDS = {
    "mean": Fold(
        _start_of_mean, _mean, collectives.rounded_sum, None, accumulator.average, True
    ),
    # Unweighted: counts stay counts, and are added up in 32 bits at least.
    "sum": Fold(
        init=lambda x, axes: varying_like(
            blank([x])[0].astype(_sum_dtype(x.dtype)), x, axes
        ),
        step=lambda total, x, w: total + w.rounded(x).astype(total.dtype),
        join=collectives.rounded_sum,
        adds=True,
    ),
    # Of several devices, the leaf of the last.
    "last": Fold(
        init=lambda x, axes: blank([x])[0],
        step=lambda carry, x, _: strong(x),
        merge=lambda x, axes: of_last_device([x], axes)[0],
    ),
    # Of several devices, in their order.
    "stack": Fold(merge=lambda stack, axes: stack, collects=True),
    "max": _extremum(jnp.maximum, jax.lax.pmax),
    "min": _extremum(jnp.minimum, jax.lax.pmin),
}


# -- The option ------------------------------------------------------------------------


def check_aux(option: Any) -> None:
    """Raises unless the option `aux` is a tree of names of folds."""
    for name in jax.tree.leaves(option, is_leaf=lambda x: x is None):
        if not isinstance(name, str) or name not in OPTIONS:
            raise ValueError(
                f"aux must be one of {', '.join(map(repr, OPTIONS))}, or a tree of "
                "these words that is a prefix of the aux tree, but it holds "
                f"{name!r}. Pass one of these."
            )


def folds_of(option: Any, aux: Any, rows: int, grown: Callable[[], Any]) -> list[str]:
    """The name of the fold of each leaf of `aux`.

    Args:
      option: names of folds, a prefix of the tree of `aux`.
      aux: the types of the aux of one micro-batch.
      rows: how many rows a micro-batch has.
      grown: returns the types of the aux of twice as many rows. It is called only if a
        leaf that is added up may have rows.
    """
    try:
        modes = jax.tree.leaves(jax.tree.broadcast(option, aux))
    except ValueError as error:
        raise ValueError(
            f"aux must be a tree that is a prefix of the aux tree, but it is {option!r}"
            f" and fun returned {jax.tree.structure(aux)}: {error}. Name the same "
            "keys, or use one word for all of them."
        ) from None
    longer: Any = None
    for i, ((name, x), mode) in enumerate(zip(named_leaves(aux), modes, strict=True)):
        if not FOLDS[mode].adds:
            continue
        if not (jnp.issubdtype(x.dtype, np.number) or x.dtype == jnp.bool_):
            raise TypeError(
                f'aux="{mode}" must have numbers to work on, but {name} of the '
                f'aux has dtype {x.dtype.name}. Use "last" or "stack" there.'
            )
        if rows in x.shape:
            longer = longer or jax.tree.leaves(grown())
            if longer[i].shape != x.shape:
                raise ValueError(
                    f'aux="{mode}" must not add up different examples, but {name} of '
                    f"the aux has shape {x.shape} for {rows} rows, one number for "
                    'each row. Use "stack" to keep the rows of every micro-batch.'
                )
    return modes


# -- Leaves ----------------------------------------------------------------------------


def _inexact(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype in which "sum" adds up: of integers if x is, and of 32 bits or more."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return accumulator.accumulator_dtype(np.zeros([], dtype), np.dtype(np.float32))
    kind = np.uint32 if jnp.issubdtype(dtype, jnp.unsignedinteger) else np.int32
    return np.promote_types(dtype, kind)
