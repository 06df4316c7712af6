"""Runs the plan of a window: a scan for each level there, a `Loop` for each back."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax import accumulator
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives
from ga_optax._inside import in_place
from ga_optax._inside.axis import plan as planning
from ga_optax._inside.axis.read import bind, flat, variables
from ga_optax._inside.axis.rules import own_part
from ga_optax._inside.call import Call
from ga_optax._inside.loop import Flat, Loop, Operands, State, merged
from ga_optax._inside.program import Program
from ga_optax._passes.arrivals import arrival
from ga_optax.accumulator import Accumulator

Arrays = list[jax.Array]
Outcome = tuple[Loop, State]
Wanted = Sequence[tuple[Any, str]]  # variables, and how they are put together


def fold(
    call: Call, program: Program, operands: Operands
) -> tuple[Arrays, Arrays, Flat]:
    """The loss and aux of a window, its carry, and its accumulator, which starts empty.

    Every micro-batch sees the carry as it came, as devices do, and the new carry is the
    mean of theirs.
    """
    axis = call.options.axis_name
    try:
        return _Window(call, program, operands).run()
    except NameError as error:
        if f"axis name: {axis}" not in str(error):
            raise
        raise NotImplementedError(
            f"Collectives over axis_name={axis!r} must be seen one by one, but a rule "
            "of a custom_vjp or custom_jvp in fun calls one. Take it out of the rule."
        ) from error


class _Window:
    """One window: what it has computed so far.

    Attributes:
      size: the number of micro-batches, on all devices.
      xs: what differs between this device's: the index, the batch and the keys.
      params: the leaves to differentiate with respect to.
      totals: the sums of their gradients so far.
      buffers: the buffers that are filled, by number.
      cotangents: the sums of their cotangents so far, by number.
      weight: Σ w of the window, if weights must multiply gradients; else None.
    """

    weight: jax.Array | None = None

    def __init__(self, call: Call, program: Program, operands: Operands) -> None:
        k, self.axes = call.options.num_microbatches, call.axes
        self.call, self.program, self.start = call, program, operands.acc
        [(axis, self.size)] = call.axis_env
        index = jnp.arange(k, dtype=jnp.int32)
        fold_in = jax.vmap(jax.random.fold_in, in_axes=(None, 0))
        keys = [fold_in(key, index) for key in operands.keys]
        if self.axes:
            index = index + k * jax.lax.axis_index(self.axes).astype(index.dtype)
        self.xs = [index, *operands.batch, *keys]
        self.params, self.carry = operands.params, operands.carry
        self.totals = [-x for x in operands.acc.total]
        self.buffers: dict[int, jax.Array] = {}
        self.cotangents: dict[int, jax.Array] = {}

        groups = operands.consts, self.params, [x[0] for x in self.xs[1:]], self.carry
        values = [x for group in groups for x in group]
        jaxpr, consts = flat(program.jaxpr, values, axis, self.size)
        variables = iter(jaxpr.invars)
        of_consts, of_params, of_own, of_carry = (
            [next(variables) for _ in group] for group in groups
        )
        self.of_params, self.of_own = of_params, of_own
        fixed = [*jaxpr.constvars, *of_consts, *of_carry]
        known = [*consts, *operands.consts, *self.carry]
        self.fixed = dict(zip(fixed, known, strict=True))
        self.plan = planning.make(jaxpr, axis, of_params, of_own)
        self.check_auto()
        self.plan.keep(merged=self.can_merge())

    def run(self) -> tuple[Arrays, Arrays, Flat]:
        """All levels, there and back."""
        plan, program, carry = self.plan, self.program, self.carry
        for level in range(1, plan.last + 1 - plan.merged):
            self.fill(level)
        modes = ["sum" if _is_inexact(x) else "last" for x in carry]
        rest = plan.jaxpr.outvars[1 + program.weighted :]
        pairs = zip(rest, [*modes, *program.modes[1:]], strict=True)
        wanted = dict(enumerate(pairs))
        roots, results = plan.jaxpr.outvars[:1], {}
        value: Any = None
        if plan.merged:
            value, results = self.fill_at_once(wanted)
            wanted = {i: pair for i, pair in wanted.items() if i not in results}
            roots = [x for x in roots if plan.is_last(x)]
        outcome = self.gradients(plan.last + 1, roots, list(wanted.values()))
        if program.multiplies:
            weight = outcome[1].acc.weight
            self.weight = jax.lax.psum(weight, self.axes) if self.axes else weight
        for level in range(plan.last - plan.merged, plan.first, -1):
            self.back(level)
        loss, rest, acc = self.finished(outcome, self.call, self.totals)
        results |= dict(zip(wanted, rest, strict=True))
        leaves = [results[i] for i in sorted(results)]
        new = [
            (x / self.size).astype(old.dtype) if _is_inexact(old) else x
            for x, old in zip(leaves, carry, strict=False)
        ]
        aux = leaves[len(carry) :]
        count = self.start.count + self.call.options.num_microbatches
        return [loss if roots else value, *aux], new, acc._replace(count=count)

    def check_auto(self) -> None:
        """Raises if "auto" would add or join what all micro-batches share."""
        tree, plan = self.program.aux, self.plan
        aux = plan.jaxpr.outvars[-tree.num_leaves :] if tree.num_leaves else []
        of_leaves = jax.tree.broadcast(self.call.options.aux, tree.unflatten(aux))
        modes = self.program.modes[1:]
        met = planning.following(plan.jaxpr, plan.views)
        leaves = zip(jax.tree.leaves(of_leaves), modes, aux, strict=True)
        for i, (asked, mode, x) in enumerate(leaves):
            shared = (
                not isinstance(x, core.Literal) and x in met and not plan.fact(x).own
            )
            if asked == "auto" and mode in ("sum", "concat") and shared:
                name, _ = named_leaves(tree.unflatten(range(tree.num_leaves)))[i]
                raise ValueError(
                    'aux="auto" must have the results of single micro-batches, but '
                    f"{name} of the aux is a collective over axis_name, the same in "
                    'all of them. Name "last" in aux for it.'
                )

    # -- There -------------------------------------------------------------------------

    def fill(self, level: int) -> None:
        """Fills the buffers of a level: one pass over the micro-batches."""
        members = {j: self.plan.buffers[j] for j in self.plan.at(level)}
        operands = [buffer.operand for buffer in members.values()]
        start = {
            j: collectives.vary(_start(buffer.operand.aval, buffer.kind), self.axes)
            for j, buffer in members.items()
            if buffer.kind in _FOLDS
        }

        def step(folded: Any, x: Arrays) -> tuple[Any, Any]:
            values = self.evaluate(operands, level, self.params, self.buffers, x)
            given = dict(zip(members, values, strict=True))
            is_first = x[0] == self.xs[0][0]
            new = {
                j: _folded(members[j].kind, x, given[j], is_first)
                for j, x in folded.items()
            }
            return new, {j: x for j, x in given.items() if j not in folded}

        with jax.named_scope("forward"):
            folded, stacked = jax.lax.scan(step, start, self.xs)
        self.keep(folded | stacked)

    def fill_at_once(self, wanted: dict[int, Any]) -> tuple[jax.Array, dict[int, Any]]:
        """Fills the last level in the loop that takes its gradients.

        Returns:
          The loss and those of the results that do not need the last level.
        """
        plan, roots = self.plan, self.plan.jaxpr.outvars[:1]
        members = plan.at(plan.last)
        operands = [(plan.buffers[j].operand, "sum") for j in members]
        early = {i: pair for i, pair in wanted.items() if not plan.is_last(pair[0])}
        cotangents = None
        if plan.is_last(roots[0]):
            cotangents = self.foreseen() or {}
            roots = [plan.buffers[j].operand for j in cotangents]
        outcome = self.gradients(
            plan.last, roots, [*early.values(), *operands], cotangents
        )
        value, results, _ = self.finished(outcome, self.call._replace(where=()), [])
        sums = zip(members, operands, results[len(early) :], strict=True)
        self.buffers |= {
            j: collectives.vary(total.astype(x.aval.dtype), self.axes)
            for j, (x, _), total in sums
        }
        return value, dict(zip(early, results, strict=False))

    def can_merge(self) -> bool:
        """Whether `fill_at_once` can fill the last level."""
        plan, weighted = self.plan, self.program.weighted
        loss, *rest = plan.jaxpr.outvars
        weights, results = rest[:weighted], rest[weighted:]
        return (
            plan.last > plan.first
            and all(plan.buffers[j].kind == "sum" for j in plan.at(plan.last))
            and not any(plan.is_last(x) and plan.fact(x).own for x in [loss, *results])
            and not any(map(plan.is_last, weights))
            and not (plan.is_last(loss) and (weighted or self.foreseen() is None))
        )

    def foreseen(self) -> dict[int, jax.Array] | None:
        """The last level's cotangents; None if they depend on what it computes."""
        plan = self.plan
        zeros = {j: self.zeros(buffer) for j, buffer in enumerate(plan.buffers)}
        last = {j: zeros[j] for j in plan.at(plan.last)}
        smooth = {j: x for j, x in last.items() if plan.buffers[j].has_cotangent}

        def pulled(last: Any) -> Any:
            def loss(smooth: Any) -> jax.Array:
                buffers = zeros | self.buffers | last | smooth
                root = plan.jaxpr.outvars[:1]
                return self.evaluate(root, plan.last + 1, self.params, buffers)[0]

            value, pullback = jax.vjp(loss, {j: last[j] for j in smooth})
            [cotangents] = pullback(jnp.full_like(value, self.size))
            return cotangents

        closed: Any = jax.make_jaxpr(pulled)(last)
        depending = planning.following(closed.jaxpr, closed.jaxpr.invars)
        if not depending.isdisjoint(variables(closed.jaxpr.outvars)):
            return None
        leaves = jax.tree.leaves(last)
        cotangents = jax.core.eval_jaxpr(closed.jaxpr, closed.consts, *leaves)
        return {j: _wide(x) for j, x in zip(sorted(smooth), cotangents, strict=True)}

    # -- Back --------------------------------------------------------------------------

    def back(self, level: int) -> None:
        """Takes the cotangents of a level back to parameters and earlier buffers."""
        members = [j for j in self.plan.at(level) if j in self.cotangents]
        if not members:
            return
        with jax.named_scope("merge"):
            cotangents = {j: self.cotangents.pop(j) for j in members}
            shared = [j for j in members if self.plan.buffers[j].kind != "own"]
            if self.axes and shared:
                whole = jax.lax.psum([cotangents[j] for j in shared], self.axes)
                cotangents |= zip(shared, whole, strict=True)
            if self.weight is not None:
                # Not Σ w·ct, which overflows in narrow operands, but its mean.
                mean = accumulator.average
                cotangents = {j: mean(x, self.weight) for j, x in cotangents.items()}
        roots = [self.plan.buffers[j].operand for j in members]
        self.gradients(level, roots, None, cotangents)

    def gradients(
        self,
        level: int,
        roots: Sequence[Any],
        wanted: Wanted | None,
        cotangents: dict[int, jax.Array] | None = None,
    ) -> Outcome:
        """A `Loop` that adds gradients, with the buffers below a level known.

        Args:
          level: the level.
          roots: the loss, or nothing; or the operands that have `cotangents`.
          wanted: what else to compute; None on the way back.
          cotangents: those of the buffers of the operands.
        """
        plan, program = self.plan, self.program
        multiplied = wanted is None and self.weight is not None
        weighted = program.weighted and cotangents is None
        weights = plan.jaxpr.outvars[1:2] if weighted else []
        aux = [x for x, _ in wanted or ()]
        _, read = self.needed(roots, level)
        params = [i for i, x in enumerate(self.of_params) if x in read]
        views = {plan.views[x].buffer for x in read if x in plan.views}
        last = plan.last - plan.merged
        buffers = [
            j
            for j in sorted(views)
            if plan.buffers[j].has_cotangent and plan.buffers[j].level <= last
        ]

        def micro_batch(diff: Arrays, x: Arrays) -> Any:
            values = iter(diff)
            here = [*self.params]
            for i in params:
                here[i] = next(values)
            known = self.buffers | dict(zip(buffers, values, strict=True))
            due = [*roots, *weights, *aux]
            out = self.evaluate(due, level, here, known, x, wanted is not None)
            loss, rest = out[: len(roots)], out[len(roots) :]
            if cotangents is not None:
                kinds = [plan.buffers[j].kind for j in cotangents]
                parts = [
                    ct if kind in _FOLDS else own_part(ct, x[0])
                    for kind, ct in zip(kinds, cotangents.values(), strict=True)
                ]
                loss = [sum(map(_paired, parts, loss), jnp.zeros([], float))]
            rest = [self.weight] if multiplied else rest
            return *(loss or [jnp.zeros([], float)]), *rest

        diff = [*(self.params[i] for i in params), *(self.buffers[j] for j in buffers)]
        first = [x[0] for x in self.xs]
        closed: Any = jax.make_jaxpr(micro_batch)(diff, first)
        jaxpr = closed.jaxpr
        weighted = weighted or multiplied
        types = [x.aval for x in jaxpr.outvars]
        of_loop = program._replace(
            jaxpr=jaxpr,
            consts=(),
            batch=[],
            results=[types[0], *types[1 + weighted :]],
            modes=["mean", *(mode for _, mode in wanted or ())],
            carry=jax.tree.structure(()),
            weighted=weighted,
            multiplies=weighted and program.multiplies,
            arrivals=[arrival(jaxpr, x) for x in jaxpr.invars[: len(diff)]],
        )
        for j in buffers:
            if j not in self.cotangents:
                zeros = _wide(jnp.zeros_like(self.buffers[j]))
                self.cotangents[j] = collectives.vary(-zeros, self.axes)
        before = [*(self.totals[i] for i in params)]
        before += [self.cotangents[j] for j in buffers]
        # It is not empty, and its totals are added to.
        acc = Accumulator(
            before, jnp.zeros_like(self.start.weight), jnp.ones([], jnp.int32)
        )
        operands = Operands(closed.consts, diff, self.xs, [], [], acc)
        optimize = self.call.options.optimize
        whys = in_place.reasons(optimize, of_loop, operands)
        names = [name for name, _ in named_leaves(self.call.params)]
        in_place.report([names[i] for i in params], whys[: len(params)])
        inside = [why is None for why in whys]
        k = self.call.options.num_microbatches
        loop = Loop(of_loop, k, False, inside, optimize)
        state = loop(operands)
        after = iter(state.acc.total)
        for i in params:
            self.totals[i] = next(after)
        self.cotangents |= dict(zip(buffers, after, strict=True))
        return loop, state

    def finished(
        self, outcome: Outcome, call: Call, totals: Arrays
    ) -> tuple[jax.Array, Arrays, Flat]:
        """The loss and the results of a loop on all devices, and the accumulator."""
        loop, state = outcome
        acc = state.acc._replace(total=totals)
        state = State(acc, [], state.results)
        if self.axes:
            with jax.named_scope("merge"):
                state = merged(state, call)
        loss, *results = loop.results(state)
        return loss, results, state.acc

    # -- Values ------------------------------------------------------------------------

    def needed(
        self, wanted: Sequence[Any], level: int, acts: bool = False
    ) -> tuple[list[core.JaxprEqn], list[Any]]:
        """The equations that compute `wanted` with the buffers below a level known.

        If the loop `acts`, it also runs those that print or call back: each once.
        """
        plan, axis = self.plan, self.call.options.axis_name
        given = {*self.fixed, *self.of_params, *self.of_own, *plan.index}
        lowest = plan.last if plan.merged and level > plan.last else 0

        def known(x: Any) -> bool:
            return x in given or plan.is_known(x, level)

        def runs(equation: core.JaxprEqn) -> bool:
            others = [e for e in equation.effects if getattr(e, "name", "") != axis]
            its = max((plan.fact(x).level for x in equation.invars), default=0)
            return acts and bool(others) and lowest <= its < level

        return planning.needed(plan.jaxpr, wanted, known, runs)

    def evaluate(
        self,
        wanted: Sequence[Any],
        level: int,
        params: Arrays,
        buffers: dict[int, jax.Array],
        x: Any = None,
        acts: bool = False,
    ) -> list[Any]:
        """The values of variables in a micro-batch `x`; in any, if none is given."""
        index, *own = self.xs if x is None else x
        values = dict.fromkeys(self.plan.index, index) | self.fixed
        values |= zip(self.of_params, params, strict=True)
        values |= zip(self.of_own, own, strict=True)
        equations, read = self.needed(wanted, level, acts)
        for v in read:
            if v not in values:
                place, of = self.plan.views[v]
                values[v] = of(buffers[place], index)
        given = [values[v] for v in read]
        out = bind(self.plan.jaxpr, equations, read, wanted, given)
        return [
            x if isinstance(x, jax.Array) else jnp.asarray(x, v.aval.dtype)
            for v, x in zip(wanted, out, strict=True)
        ]

    def keep(self, new: dict[int, jax.Array]) -> None:
        """Keeps the buffers of a level, of all devices, in the dtypes of values."""
        axes, kinds = self.axes, {j: self.plan.buffers[j].kind for j in new}
        if axes:
            for kind, across in _ACROSS.items():
                group = [j for j in new if kinds[j] == kind]
                new |= zip(group, across([new[j] for j in group], axes), strict=True)
        for j, x in new.items():
            dtype = self.plan.buffers[j].operand.aval.dtype
            x = x if x.dtype == dtype else x.astype(dtype)
            self.buffers[j] = collectives.vary(x, axes)

    def zeros(self, buffer: planning.Buffer) -> jax.Array:
        """A buffer before it is filled."""
        aval = buffer.operand.aval
        more = (self.size,) if buffer.kind == "stack" else ()
        return jnp.zeros((*more, *aval.shape), aval.dtype)


# -- Kinds of buffers ------------------------------------------------------------------


def _gather(stacks: Arrays, axes: Any) -> Arrays:
    return [jax.lax.all_gather(x, axes, tiled=True) for x in stacks]


_FOLDS = {
    "sum": lambda total, x: total + x.astype(total.dtype),
    "max": jnp.maximum,
    "min": jnp.minimum,
}
_ACROSS = {
    "sum": jax.lax.psum,
    "max": jax.lax.pmax,
    "min": jax.lax.pmin,
    "stack": _gather,
}


def _start(aval: Any, kind: str) -> jax.Array:
    """Zeros, in the dtype of sums if they are to be one."""
    zeros = collectives.zeros(aval)
    return _wide(zeros) if kind == "sum" and _is_inexact(zeros) else zeros


def _folded(kind: str, so_far: jax.Array, x: jax.Array, is_first: Any) -> jax.Array:
    """An extremum starts with its first value: infinities would stop `debug_infs`."""
    new = _FOLDS[kind](so_far, x)
    return new if kind == "sum" else jnp.where(is_first, x, new)


def _wide(x: jax.Array) -> jax.Array:
    """`x` in the dtype of its sums."""
    return x.astype(accumulator.accumulator_dtype(x, np.dtype(np.float32)))


def _paired(cotangent: jax.Array, x: jax.Array) -> jax.Array:
    """Σ cotangent · x, whose gradient is the cotangent."""
    product = cotangent * x.astype(cotangent.dtype)
    return jnp.sum(product.real).astype(float)


def _is_inexact(x: jax.Array) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))
