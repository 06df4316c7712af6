"""One micro-step: the loss of a micro-batch, the same program in every grouping.

    state  ->  state + (gradients, results) of micro-batch i

A `LossProgram`, its `Operands` and `Devices` are all that a loop knows of a
call.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.typing import ArrayLike

from .. import accumulator
from .._devices import collectives, meshes
from .._devices.meshes import Axes
from .._devices.record import Devices
from .._passes import effects, jaxprs, table
from .._passes.facts import Facts
from .._passes.primitives import check_names
from .._passes.shared import arrival

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
    def side_effects(self) -> effects.SideEffects:
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
    program: jaxprs.Program, devices: Devices, multiplies: bool, optimize: bool
) -> tuple[jaxprs.Program, list[str | None]]:
    """Runs all passes on the program of a micro-batch; tells how gradients arrive."""
    number = len(devices.names)
    if not optimize:
        return program, [None] * number
    check_names()
    found = _side_effects(program.jaxpr, number)
    facts = Facts(devices, _can_add_in_place(found, multiplies))
    program = table.run_scope("fun", program, facts)
    arrivals = [arrival(program.jaxpr, x) for x in program.jaxpr.invars[:number]]
    return table.run_scope("sharded fun", program, facts), arrivals


# `jax.vjp(...).with_refs` transposes `lax.scan` correctly from jax 0.11.0 on (jax PR
# 38929), and a `custom_vmap` may have references inside it from 0.11.1 on.
HAS_REFS = jax.__version_info__ >= (0, 11, 1)


def _side_effects(jaxpr: core.Jaxpr, number: int) -> effects.SideEffects:
    """The side effects of a program, of which so many operands are parameters."""
    return effects.side_effects(jaxpr, frozenset(jaxpr.invars[:number]))


def _can_add_in_place(found: effects.SideEffects, multiplies: bool) -> bool:
    """True if gradients may be added in place. Weights must not multiply them."""
    return HAS_REFS and not multiplies and not found.reordering


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
    once = Replay.of(step, start, batch)
    _, types = jax.tree.unflatten(once.out, once.program.out_avals)
    types, structure = jax.tree.flatten(types)

    def stay() -> Any:
        return start, jax.tree.unflatten(structure, blank(types))

    return jax.lax.cond(predicate, lambda: once(start, batch), stay)


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


class Replay(NamedTuple):
    """A function that is traced: where it is called its equations run.

    Attributes:
      program: the program, of the leaves of the arguments.
      out: the structure of the results.
    """

    program: Any
    out: Any

    @classmethod
    def of(cls, fun: Callable[..., Any], *args: Any) -> "Replay":
        """`fun`, traced for arguments of these types."""
        closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
        return cls(closed, jax.tree.structure(shapes))

    def __call__(self, *args: Any) -> Any:
        out = jaxprs.results(self.program, jax.tree.leaves(args))
        return jax.tree.unflatten(self.out, out)


# -- Carries that XLA may lose: `accumulator.loses_rows` -------------------------------


def scan() -> Callable[..., Any]:
    """`jax.lax.scan`, or a scan with fences, in those inside as well."""
    return _fenced_scan if accumulator.LOSES_ROWS else jax.lax.scan


def _fenced_scan(step: Callable[..., Any], start: Any, xs: Any) -> Any:
    closed, out = Replay.of(functools.partial(jax.lax.scan, step), start, xs)
    program = jaxprs.Program(carries_fenced(closed.jaxpr), closed.consts)
    return Replay(program, out)(start, xs)


def carries_fenced(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program, with a barrier on each carry of a scan to which rows are added."""

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        equation = jaxprs.with_inner(equation, carries_fenced)
        if jaxprs.kind(equation) != "scan":
            return [equation]
        of_body = functools.partial(_fenced_carry, jaxprs.scan_of(equation))
        return [jaxprs.with_inner(equation, of_body)]

    return jaxprs.changed(jaxpr, change)


def _fenced_carry(how: jaxprs.Scan, body: core.Jaxpr) -> core.Jaxpr:
    """The body of a scan, with a barrier on what is as large as a result of a scatter.

    XLA looks at a scatter through casts, reshapes and transposes. A dead scatter, such
    as that of a sort's derivative, needs none.
    """
    every = jaxprs.equations(jaxprs.live(body))
    outs = (e.outvars for e in every if e.primitive.name.startswith("scatter"))
    written: list[Any] = list(itertools.chain(*outs))
    sizes = {jaxprs.numbers(x.aval.shape) for x in written}
    carry = [
        x for x in how.split(body.invars)[1] if jaxprs.numbers(x.aval.shape) in sizes
    ]
    if not carry:
        return body
    new = {x: core.Var(x.aval) for x in carry}
    fences = [_fence().replace(invars=[x], outvars=[y]) for x, y in new.items()]
    eqns = [*fences, *jaxprs.renamed(body.eqns, new)]
    return body.replace(eqns=eqns, outvars=jaxprs.rename(body.outvars, new))


@functools.cache
def _fence() -> core.JaxprEqn:
    """A barrier."""
    [equation] = jaxprs.program_of(jax.lax.optimization_barrier, 0.0).jaxpr.eqns
    return equation
