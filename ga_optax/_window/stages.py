"""A scan with collectives as scans without, and each collective once, between them.

A collective that does not depend on its own results of earlier iterations, by way of
the carry, leaves the loop: it runs once, on the stack of its operands.

    level of a value  how many collectives are on the longest way to it in the body, by
                      way of the carry of earlier iterations, too
    stage j           one scan of what has level j: it reads slices of what earlier
                      stages stacked, and stacks what later ones read

Where collectives are on a ring with the carry (see `feedback`), the ring counts as one
of them. Its stage holds it and what comes of it, and is not a scan: its iterations
stand one after the other, with their collectives in the open.

Of what a later stage reads, the smallest set is stacked from which the rest is cheap to
compute again, or computed again by the wish of a `jax.checkpoint` around it.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from ga_optax._passes import feedback, ir, known
from ga_optax._passes.ir import is_variable, variables
from ga_optax._window import cost, cut

Values = dict[Any, Any]


class Stages:
    """A scan, stage by stage.

    Attributes:
      how: the scan; all equations of its body are in the open.
      meets: whether an equation is a collective.
      is_mark: whether it names what is kept for later levels.
      carry: what an iteration puts into each place of the carry.
      level: that of each variable of the body.
      of_equation: the stage that runs an equation, by its id; -1 for a collective that
        leaves the loop.
      meetings: the collectives that leave the loop, by their level.
      unrolled: the levels of the stages with others.
      known: values that are the same in all iterations.
      stacks: those of all iterations, along axis 0.
      ends: the last values of places of the carry.
    """

    def __init__(
        self,
        how: ir.Scan,
        meets: feedback.Test,
        is_mark: feedback.Test,
        start: Sequence[int] | None = None,
    ) -> None:
        self.how, self.meets, self.is_mark = how, meets, is_mark
        self.program = how.body.jaxpr
        consts, carry, self.slices = how.split(self.program.invars)
        self.fixed = [*self.program.constvars, *consts]
        self.carry = dict(zip(carry, self.program.outvars, strict=False))
        self.meetings: dict[int, list[core.JaxprEqn]] = {}
        self.unrolled: set[int] = set()
        self.level = dict.fromkeys(self.program.constvars, 0)
        self.of_equation: dict[int, int] = {}
        self._find_levels(feedback.graph(how, lambda e: False, start))
        # A rule must see the cotangents of its iteration, and not the sum of all.
        rules = [x for e in self.program.eqns if known.has_rule(e) for x in e.outvars]
        self.varying = ir.following(self.program, [*carry, *self.slices, *rules])
        self.known: Values = {}
        self.stacks: Values = {}
        self.ends: Values = {}

    def _find_levels(self, graph: feedback.Graph) -> None:
        names = [*self.program.invars, *self.carry]
        for ring in graph.rings(self.meets):
            for i in ring.members:
                e = graph.nodes[i].equation
                outs = [names[i]] if e is None else e.outvars
                self.level |= dict.fromkeys(outs, ring.level)
                self.of_equation[id(e)] = ring.level
            if ring.counted and ring.closed:
                self.unrolled.add(ring.level)
            elif ring.counted:
                self.meetings.setdefault(ring.level, []).extend(ring.counted)
                self.of_equation |= {id(e): -1 for e in ring.counted}

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """The results of the scan."""
        consts, self.start, slices = self.how.split(values)
        self.known = dict(
            zip(self.fixed, [*self.how.body.consts, *consts], strict=True)
        )
        self.stacks = dict(zip(self.slices, slices, strict=True))
        for level in range(max(self.level.values(), default=0) + 1):
            self._stage(level)
            for e in self.meetings.get(level + 1, ()):
                self._meet(e)
        stacked = self.program.outvars[self.how.num_carry :]
        return [*map(self.ends.get, self.carry), *map(self._stacked, stacked)]

    def _stacked(self, x: Any) -> Any:
        """The values of all iterations."""
        if is_variable(x) and x in self.stacks:
            return self.stacks[x]
        value = _strong(self.known[x] if is_variable(x) else x.val, x.aval)
        return jnp.broadcast_to(value, (self.how.length, *value.shape))

    # -- Collectives -------------------------------------------------------------------

    def _meet(self, equation: core.JaxprEqn) -> None:
        """A collective of all iterations; or once, of what is the same in all."""
        xs, outs = equation.invars, equation.outvars
        if self.varying.isdisjoint(variables(xs)):
            is_known = self.known.__contains__
            equations, read = ir.needed(self.program, outs, is_known)
            given = [self.known[x] for x in read]
            out = ir.bind(self.program, equations, read, outs, given)
            self.known |= zip(outs, out, strict=True)
        else:

            def run(*values: Any) -> list[Any]:
                return ir.bind(self.program, [equation], xs, outs, values)

            stacks = jax.vmap(run)(*map(self._stacked, xs))
            self.stacks |= zip(outs, stacks, strict=True)

    # -- Stages ------------------------------------------------------------------------

    def _stage(self, level: int) -> None:
        """Ends what has this level of the carry, and stacks what is read later."""
        ends = [x for x in self.carry if self.level[x] == level]
        wanted = self._wanted(level)
        roots = [*(self.carry[x] for x in ends), *wanted]

        def acts(e: core.JaxprEqn) -> bool:
            return bool(e.effects) and self.of_equation[id(e)] == level

        equations, read = ir.needed(self.program, roots, self._is_there, acts)
        if not roots and not equations:
            return
        fixed = [x for x in read if x in self.known]
        sliced = [x for x in read if x not in self.known]

        def step(state: Any, slices: Any) -> Any:
            env = {x: self.known[x] for x in fixed}
            env |= zip(ends, state, strict=True)
            env |= zip(sliced, slices, strict=True)
            self._run(equations, env, roots, level in self.unrolled)
            out = [_strong(value(x, env), x.aval) for x in roots]
            return out[: len(ends)], out[len(ends) :]

        start = dict(zip(self.carry, self.start, strict=True))
        run = _unrolled if level in self.unrolled else _scanned
        state = [_strong(start[x], x.aval) for x in ends]
        last, stacks = run(self.how, step, state, [self.stacks[x] for x in sliced])
        if any(map(self.is_mark, equations)) and level not in self.unrolled:
            last, stacks = self._marked(equations, [last, stacks])
        self.ends |= zip(ends, last, strict=True)
        self.stacks |= zip(wanted, stacks, strict=True)

    def _marked(self, equations: list[core.JaxprEqn], out: Any) -> Any:
        """What a stage returns, to be kept for later levels if something in it is.

        All of it: then nothing of the stage runs there, and a rule in it that is not
        linear sees all of its cotangent at once.
        """
        mark = next(filter(self.is_mark, equations))
        return jax.tree.map(lambda x: checkpoint_name(x, mark.params["name"]), out)

    def _run(
        self,
        equations: list[core.JaxprEqn],
        env: Values,
        wanted: Sequence[Any],
        marks: bool,
    ) -> None:
        """Runs the equations of one iteration; `marks`, if it marks for itself."""

        def is_alone(e: core.JaxprEqn) -> bool:
            return self.meets(e) or self.is_mark(e)

        def key(e: core.JaxprEqn) -> Any:
            """Each collective is alone; between them one checkpoint holds the rest."""
            return is_alone(e) and id(e), _wish(e)

        pairs = itertools.groupby(apart(equations, is_alone), key)
        groups = [list(members) for _, members in pairs]
        last = {
            x: i for i, es in enumerate(groups) for e in es for x in variables(e.invars)
        }
        last |= dict.fromkeys(variables(wanted), len(groups))
        for i, group in enumerate(groups):
            made = [x for e in group for x in e.outvars if last.get(x, i) > i]
            xs = variables(x for e in group for x in e.invars)
            xs = [x for x in dict.fromkeys(xs) if x in env]
            values = [env[x] for x in xs]
            if _wish(group[0]) is not None:
                inside = [e for one in group for e in _opened(one)]
                run = functools.partial(ir.bind, self.program, inside, xs, made)
                values = ir.checkpointed(group[0], run)(values)
            elif marks or not self.is_mark(group[0]):
                values = ir.bind(self.program, group, xs, made, values)
            env.update(zip(made, values, strict=True))

    # -- What goes over to later stages ------------------------------------------------

    def _is_there(self, x: Any) -> bool:
        return x in self.known or x in self.stacks

    def _wanted(self, level: int) -> list[Any]:
        """What a stage stacks: what collectives and results read, and later stages."""
        due = variables(self.program.outvars[self.how.num_carry :])
        for e in itertools.chain(*self.meetings.values()):
            if not self.varying.isdisjoint(variables(e.invars)):
                due += variables(e.invars)
        due += [x for e in self.program.eqns if self.is_mark(e) for x in e.outvars]
        late = [x for c, x in self.carry.items() if self.level[c] > level]
        for e in self.program.eqns:
            if self.of_equation[id(e)] > level:
                late += e.invars

        def own(atoms: Sequence[Any]) -> dict[Any, None]:
            here = [x for x in variables(atoms) if self.level[x] == level]
            return dict.fromkeys(x for x in here if not self._is_there(x))

        due = own(due)
        return list(due | dict.fromkeys(self._between(level, due, own(late))))

    def _between(
        self, level: int, due: dict[Any, None], late: dict[Any, None]
    ) -> list[Any]:
        """The smallest set that `late` is computed of; what is due takes nothing."""
        sources = [x for x in self.carry if self.level[x] == level]
        its = [e for e in self.program.eqns if self.of_equation[id(e)] == level]
        for e in its:
            dear = not cost.is_cheap(e) or self.meets(e)
            if e.effects or self.is_mark(e) or (dear and _wish(e) is None):
                sources += e.outvars

        def size(x: Any) -> float:
            return 0.0 if x in due else 1.0 + cost.nbytes(x)

        return cut.smallest(its, sources, late, size)


# -- Loops -----------------------------------------------------------------------------


def _scanned(how: ir.Scan, step: Any, start: list[Any], slices: list[Any]) -> Any:
    return jax.lax.scan(step, start, slices, how.length, how.reverse, how.unroll)


def _unrolled(how: ir.Scan, step: Any, state: list[Any], slices: list[Any]) -> Any:
    """The iterations of a scan, one after the other."""
    parts, stacked = list(map(_along_axis_0, slices)), []
    order = range(how.length)
    for i in reversed(order) if how.reverse else order:
        state, out = step(state, [x[i] for x in parts])
        stacked.append(out)
    if how.reverse:
        stacked.reverse()
    return state, [jnp.stack(xs) for xs in zip(*stacked, strict=True)]


def _along_axis_0(x: jax.Array) -> list[jax.Array]:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return list(x)
    # A split, whose gradient is one concatenation, and not a sum of padded slices.
    return [part.squeeze(0) for part in jax.lax.split(x, [1] * len(x))]


# -- Equations -------------------------------------------------------------------------


def apart(
    equations: Iterable[core.JaxprEqn], is_alone: feedback.Test
) -> list[core.JaxprEqn]:
    """Equations in an order in which few of those that stand alone part the others.

    What reads nothing, such as zeros, stands with the first that reads it: there is no
    need to keep it.
    """
    level: dict[Any, int] = {}
    places: dict[int, tuple[int, bool]] = {}
    equations = list(equations)
    for e in equations:
        alone = is_alone(e)
        its = alone + max((level.get(x, 0) for x in variables(e.invars)), default=0)
        level |= dict.fromkeys(e.outvars, its)
        places[id(e)] = its, not alone
    first: dict[Any, int] = {}
    for e in reversed(equations):
        its, others = places[id(e)]
        read = variables(e.invars)
        if others and not read:
            its = min((first[x] for x in e.outvars if x in first), default=its)
            places[id(e)] = its, others
        for x in read:
            due = its - (not others)
            first[x] = min(first.get(x, due), due)
    return sorted(equations, key=lambda e: places[id(e)])


def single(checkpoint: core.JaxprEqn, jaxpr: core.Jaxpr, e: core.JaxprEqn) -> Any:
    """A checkpoint of one equation of a program, which `Stages` puts together again."""
    read = list(dict.fromkeys(variables(e.invars)))
    ends = {"constvars": [], "invars": read, "outvars": e.outvars}
    inside = jaxpr.replace(eqns=[e], effects=e.effects, **ends)
    one = ir.with_inner(checkpoint, lambda _: inside)
    return one.replace(invars=read, outvars=e.outvars, effects=e.effects)


def _wish(e: core.JaxprEqn) -> Any:
    """What a checkpoint around an equation is like; None if there is none."""
    if ir.kind(e) != "checkpoint" or len(ir.inner_programs(e)[0].eqns) != 1:
        return None
    return [e.params[key] for key in ("prevent_cse", "policy")]


def _opened(e: core.JaxprEqn) -> list[core.JaxprEqn]:
    """What a checkpoint holds, with the variables outside."""
    [inside] = ir.inner_programs(e)
    known = dict(zip(inside.invars, e.invars, strict=True))
    return ir.renamed(
        inside.eqns, known | dict(zip(inside.outvars, e.outvars, strict=True))
    )


def _strong(x: Any, aval: Any) -> Any:
    """`x` with the dtype that a loop carries."""
    is_extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return x if is_extended else jax.lax.convert_element_type(x, aval.dtype)


def value(x: Any, env: Values) -> Any:
    return env[x] if is_variable(x) else x.val
