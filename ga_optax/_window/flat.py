"""The program of `fun` as one flat list of equations, which shows every collective.

    scan(body with collectives)  ->  scans of parts, and the collectives between

Functions are opened here; scans in whose bodies rows meet are split below.
"""

import collections
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.extend import core

from .._devices import collectives
from .._partition.held import MEETS
from .._passes import checkpoints, effects, feedback, jaxprs, primitives
from .._passes.jaxprs import bind, is_variable, variables
from .._passes.places import better_placed
from . import cuts
from .meetings import is_collective

# == One list of equations =============================================================

# A scan of more iterations than this is an error if a collective in it depends on its
# own results: each would be a level of its own, which costs a pass over the window and
# compile time.
LONGEST = 64


def mentions(equation: core.JaxprEqn, axis: str) -> bool:
    """True if an equation, or an equation inside it, names the axis."""
    inside = jaxprs.within(equation)
    return any(jaxprs.is_mark(e, axis) or is_collective(e, axis) for e in inside)


class Opening(NamedTuple):
    """The axis whose collectives come into the open, out of inner programs.

    Attributes:
      axis: the name of the axis.
      size: the size of the axis.
      loops: for the body of a scan, the parts of the arguments of inner loops, by the
        ids of the loops; else None. In such a body each equation of a checkpoint gets a
        checkpoint of its own, for one checkpoint may have equations of several parts.
    """

    axis: str
    size: int
    loops: dict[int, list[int]] | None = None


def flat(jaxpr: core.Jaxpr, args: Sequence[Any], opening: Opening) -> jaxprs.Program:
    """The same program in one list of equations.

    `args` are values for the constants and arguments of the program, or their types.
    """
    count = len(jaxpr.constvars)

    def in_the_open(*args: Any) -> list[Any]:
        return _opened(jaxprs.Program(jaxpr, args[:count]), args[count:], opening)

    axes = [(opening.axis, opening.size)]
    closed: Any = jax.make_jaxpr(in_the_open, axis_env=axes)(*args)
    return jaxprs.Program(closed.jaxpr, closed.consts)


def summed(jaxpr: core.Jaxpr, folds: Sequence[str]) -> tuple[core.Jaxpr, list[str]]:
    """The program in which results that are sums are added up at their own level."""
    eqns, outs, folds = list(jaxpr.eqns), list(jaxpr.outvars), list(folds)
    for i, x in enumerate(outs):
        if i and folds[i] == "sum" and jaxprs.is_variable(x):
            marked = functools.partial(checkpoint_name, name=f"{MEETS}psum")
            [e] = jax.make_jaxpr(marked)(x.aval).jaxpr.eqns
            total = core.Var(x.aval)
            outs[i], folds[i] = total, "last"
            eqns.append(e.replace(invars=[x], outvars=[total]))
    return jaxpr.replace(eqns=eqns, outvars=outs), folds


def _opened(
    program: jaxprs.Program, args: Sequence[Any], opening: Opening, around: Any = None
) -> list[Any]:
    """The results of a program, with the equations of inner programs in the open.

    `around` is the source of the equation that the program is inside of.
    """

    def rule(equation: core.JaxprEqn, values: list[Any]) -> Sequence[Any] | None:
        placed = better_placed(equation, around)
        if jaxprs.kind(equation) == "call":
            [inner] = jaxprs.inner(equation)
            return _opened(inner, values, opening, placed.source_info)
        if mentions(equation, opening.axis):
            return _open(equation, values, opening)
        if placed is equation:
            return None
        return bind(program.jaxpr, [placed], placed.invars, placed.outvars, values)

    return jaxprs.evaluate(program, args, rule)


def _open(
    equation: core.JaxprEqn, values: list[Any], opening: Opening
) -> Sequence[Any] | None:
    axis, kind = opening.axis, jaxprs.kind(equation)
    if is_collective(equation, axis) or jaxprs.is_mark(equation, axis):
        return None
    if kind == "checkpoint":
        split = _checkpointed if opening.loops is None else _singly
        return split(equation, values, opening)
    if kind == "scan":
        return _in_parts(equation, values, opening)
    name = equation.primitive.name
    raise NotImplementedError(f"Rows must not meet inside of {name}, but they do.")


def _checkpointed(
    equation: core.JaxprEqn, values: list[Any], opening: Opening
) -> list[Any]:
    """A `jax.checkpoint` of each piece between the collectives."""
    [(inside, inner_consts)] = jaxprs.inner(equation)
    values = [*inner_consts, *values]
    program, consts = flat(inside, values, opening)
    given = [*program.constvars, *program.invars]
    env = dict(zip(given, [*consts, *values], strict=True))
    meets = functools.partial(mentions, axis=opening.axis)

    def in_checkpoint(
        piece: list[core.JaxprEqn], reads: list[Any], outs: list[Any]
    ) -> Any:
        body = functools.partial(bind, program, piece, reads, outs)
        return body if meets(piece[0]) else checkpoints.checkpointed(equation, body)

    pairs = itertools.groupby(sorted_apart(program.eqns, meets), meets)
    pieces = [list(group) for _, group in pairs]
    run_in_groups(pieces, env, program.outvars, in_checkpoint)
    return [read_from(x, env) for x in program.outvars]


def _singly(equation: core.JaxprEqn, values: list[Any], opening: Opening) -> list[Any]:
    """A `jax.checkpoint` of each equation. `SplitScan` puts them together again."""
    [(inside, inner_consts)] = jaxprs.inner(equation)
    values = [*inner_consts, *values]
    program = flat(inside, values, opening)

    def rule(e: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
        if mentions(e, opening.axis):
            return None
        one = single(equation, program.jaxpr, e)
        return bind(program.jaxpr, [one], e.invars, one.outvars, values)

    return jaxprs.evaluate(program, values, rule)


def _in_parts(
    equation: core.JaxprEqn, values: list[Any], opening: Opening
) -> list[Any]:
    """A scan as several scans without collectives, and the collectives between them."""
    how, axis = jaxprs.scan_of(equation), opening.axis
    if not how.length:
        _, carry, _ = how.split(values)
        stacks = equation.outvars[how.num_carry :]
        return [*carry, *(collectives.zeros(x.aval) for x in stacks)]

    def meets(e: core.JaxprEqn) -> bool:
        return any(is_collective(x, axis) for x in jaxprs.within(e))

    loops = feedback.inside(how, meets) if opening.loops is None else opening.loops
    body, consts = how.body
    types = [*map(jax.typeof, consts), *(x.aval for x in body.invars)]
    program = flat(body, types, opening._replace(loops=loops))
    how = how._replace(body=program, num_consts=len(consts) + how.num_consts)
    start = loops.get(id(equation), [0] * len(body.invars))
    marks = functools.partial(jaxprs.is_mark, name=axis)
    start, values = [*[0] * len(consts), *start], [*consts, *values]
    return SplitScan(how, meets, marks, start, values).run()


# == Split scans =======================================================================
# A scan with collectives becomes several scans without, and the collectives between.
#
# A collective that does not depend on its own results of earlier iterations, by way of
# the carry, leaves the scan: it runs once, on the stack of its operands.
#
#     part of a value  how many collectives are on the longest way to it in the body, by
#                       way of the carry of earlier iterations, too
#     part j           one scan of the values of part j: it reads slices of the stacks
#                       of earlier parts, and stacks values for later parts
#
# Where collectives are on a ring with the carry (see `feedback`), the ring counts as
# one collective. Its part holds the ring and what is computed of it, and is not a scan:
# the iterations stand one after the other, with their collectives in the open.
#
# A part stacks the smallest set of values from which later parts compute what they read
# by cheap equations, or by equations that a `jax.checkpoint` lets run again.

_Env = dict[Any, Any]


class SplitScan:
    """A scan, part by part.

    Attributes:
      scan: the scan; all equations of its body are in the open.
      meets: tells of an equation whether it is a collective.
      is_mark: tells of an equation whether it names a residual of later levels.
      carry: for each carry of the body, the result that the next iteration gets.
      part: the part of each variable of the body.
      part_of: the part that runs an equation, by its id; -1 for a collective that
        leaves the scan.
      meetings: the collectives that leave the scan, by their part.
      unrolled: the parts with other collectives.
      known: values that are the same in all iterations.
      stacks: values of all iterations, along axis 0.
      last: the last value of each carry.
      start: the first values of the carries, in order.
    """

    def __init__(
        self,
        scan: jaxprs.Scan,
        meets: feedback.Test,
        is_mark: feedback.Test,
        start: Sequence[int],
        values: Sequence[Any],
    ) -> None:
        self.scan, self.meets, self.is_mark = scan, meets, is_mark
        self.program, body_consts = scan.body
        consts, carry, slices = scan.split(self.program.invars)
        given, self.start, stacks = scan.split(values)
        fixed, given = [*self.program.constvars, *consts], [*body_consts, *given]
        self.known: _Env = dict(zip(fixed, given, strict=True))
        self.stacks: _Env = dict(zip(slices, stacks, strict=True))
        self.last: _Env = {}
        self.carry = dict(zip(carry, self.program.outvars, strict=False))
        self.meetings: dict[int, list[core.JaxprEqn]] = {}
        self.unrolled: set[int] = set()
        self.part = dict.fromkeys(self.program.constvars, 0)
        self.part_of: dict[int, int] = {}
        self._find_parts(feedback.graph(scan, lambda e: False, start))
        # A rule must see the cotangents of its iteration, and not the sum of all.
        rules = [x for e in self.program.eqns if effects.has_rule(e) for x in e.outvars]
        self.varying = jaxprs.following(self.program, [*carry, *slices, *rules])

    def _find_parts(self, graph: feedback.Graph) -> None:
        names = [*self.program.invars, *self.carry]
        for ring in graph.rings(self.meets):
            for i in ring.members:
                e = graph.nodes[i].equation
                outs = [names[i]] if e is None else e.outvars
                self.part |= dict.fromkeys(outs, ring.level)
                self.part_of[id(e)] = ring.level
            if ring.counted and ring.closed:
                self.unrolled.add(ring.level)
            elif ring.counted:
                self.meetings.setdefault(ring.level, []).extend(ring.counted)
                self.part_of |= {id(e): -1 for e in ring.counted}

    def run(self) -> list[Any]:
        """The results of the scan."""
        for part in range(max(self.part.values(), default=0) + 1):
            self._run_part(part)
            for e in self.meetings.get(part + 1, ()):
                self._meet(e)
        stacked = self.program.outvars[self.scan.num_carry :]
        return [*map(self.last.get, self.carry), *map(self._stacked, stacked)]

    def _stacked(self, x: Any) -> Any:
        """The values of all iterations."""
        if is_variable(x) and x in self.stacks:
            return self.stacks[x]
        x = _strong(read_from(x, self.known), x.aval)
        return jnp.broadcast_to(x, (self.scan.length, *x.shape))

    def _meet(self, equation: core.JaxprEqn) -> None:
        """Runs a collective for all iterations; or once, if all have one operand."""
        xs, outs = equation.invars, equation.outvars
        if self.varying.isdisjoint(variables(xs)):
            is_known = self.known.__contains__
            equations, reads = jaxprs.needed_for(self.program, outs, is_known)
            given = [self.known[x] for x in reads]
            out = bind(self.program, equations, reads, outs, given)
            self.known |= zip(outs, out, strict=True)
        else:
            run = functools.partial(bind, self.program, [equation], xs, outs)
            stacks = jax.vmap(lambda *xs: run(xs))(*map(self._stacked, xs))
            self.stacks |= zip(outs, stacks, strict=True)

    # -- Parts -------------------------------------------------------------------------

    def _run_part(self, part: int) -> None:
        """Computes the last carry of a part, and the stacks that are read later."""
        carry = [x for x in self.carry if self.part[x] == part]
        stacked = self._to_stack(part)
        results = [*(self.carry[x] for x in carry), *stacked]

        def acts(e: core.JaxprEqn) -> bool:
            return bool(e.effects) and self.part_of[id(e)] == part

        equations, reads = jaxprs.needed_for(
            self.program, results, self._is_there, acts
        )
        if not results and not equations:
            return
        sliced = [x for x in reads if x not in self.known]
        unrolled = part in self.unrolled

        def step(state: Any, slices: Any) -> Any:
            values = [*state, *slices]
            env = self.known | dict(zip([*carry, *sliced], values, strict=True))
            self._run_iteration(equations, env, results, unrolled)
            out = [_strong(read_from(x, env), x.aval) for x in results]
            return out[: len(carry)], out[len(carry) :]

        run = _unrolled if unrolled else _scanned
        start = dict(zip(self.carry, self.start, strict=True))
        state = [_strong(start[x], x.aval) for x in carry]
        out = run(self.scan, step, state, [self.stacks[x] for x in sliced])
        marks = [] if unrolled else list(filter(self.is_mark, equations))
        if marks:
            # All results of the part become residuals: then nothing of the part runs
            # again, and a nonlinear rule sees all of its cotangent at once.
            name = marks[0].params["name"]
            out = jax.tree.map(lambda x: checkpoint_name(x, name), out)
        last, stacks = out
        self.last |= zip(carry, last, strict=True)
        self.stacks |= zip(stacked, stacks, strict=True)

    def _run_iteration(
        self,
        equations: list[core.JaxprEqn],
        env: _Env,
        results: Sequence[Any],
        marks: bool,
    ) -> None:
        """Runs the equations of one iteration; names are marked if `marks`.

        Each collective stands alone. Between collectives one checkpoint holds all
        equations of checkpoints with the same options.
        """

        def is_alone(e: core.JaxprEqn) -> bool:
            return self.meets(e) or self.is_mark(e)

        def key(e: core.JaxprEqn) -> Any:
            return is_alone(e) and id(e), _checkpoint_options(e)

        def of_group(
            group: list[core.JaxprEqn], reads: list[Any], outs: list[Any]
        ) -> Any:
            if _checkpoint_options(group[0]) is not None:
                inside = [e for one in group for e in _inside(one)]
                body = functools.partial(bind, self.program, inside, reads, outs)
                return checkpoints.checkpointed(group[0], body)
            if self.is_mark(group[0]) and not marks:
                return lambda values: values
            return functools.partial(bind, self.program, group, reads, outs)

        pairs = itertools.groupby(sorted_apart(equations, is_alone), key)
        run_in_groups([list(group) for _, group in pairs], env, results, of_group)

    # -- Stacks ------------------------------------------------------------------------

    def _is_there(self, x: Any) -> bool:
        return x in self.known or x in self.stacks

    def _to_stack(self, part: int) -> list[Any]:
        """The values that a part stacks.

        The first are results of the scan, operands of collectives, and marked values.
        The others are the smallest set from which later parts compute what they read.
        """
        atoms = list(self.program.outvars[self.scan.num_carry :])
        for e in itertools.chain(*self.meetings.values()):
            if not self.varying.isdisjoint(variables(e.invars)):
                atoms += e.invars
        atoms += [x for e in self.program.eqns if self.is_mark(e) for x in e.outvars]
        first = self._new_at(part, atoms)
        reads = [x for c, x in self.carry.items() if self.part[c] > part]
        for e in self.program.eqns:
            if self.part_of[id(e)] > part:
                reads += e.invars

        def size(x: Any) -> float:
            return 0.0 if x in first else 1.0 + jaxprs.nbytes(x)

        equations, sources = self._equations_and_sources(part)
        others = cuts.smallest_cut(equations, sources, self._new_at(part, reads), size)
        return list(first | dict.fromkeys(others))

    def _new_at(self, part: int, atoms: Sequence[Any]) -> dict[Any, None]:
        """The variables among atoms that a part has to compute, in order."""
        here = (x for x in variables(atoms) if self.part[x] == part)
        return dict.fromkeys(x for x in here if not self._is_there(x))

    def _equations_and_sources(self, part: int) -> tuple[list[core.JaxprEqn], Any]:
        """The equations of a part, and the values that later parts cannot compute."""
        sources = [x for x in self.carry if self.part[x] == part]
        equations = [e for e in self.program.eqns if self.part_of[id(e)] == part]
        for e in equations:
            is_dear = not jaxprs.is_cheap(e) or self.meets(e)
            may_run_again = not is_dear or _checkpoint_options(e) is not None
            if e.effects or self.is_mark(e) or not may_run_again:
                sources += e.outvars
        return equations, sources


# -- Loops -----------------------------------------------------------------------------


def _scanned(scan: jaxprs.Scan, step: Any, start: list[Any], slices: list[Any]) -> Any:
    return jax.lax.scan(step, start, slices, scan.length, scan.reverse, scan.unroll)


def _unrolled(scan: jaxprs.Scan, step: Any, state: list[Any], slices: list[Any]) -> Any:
    """The iterations of a scan, one after the other."""
    parts, stacked = list(map(_along_axis_0, slices)), []
    order = range(scan.length)
    for i in reversed(order) if scan.reverse else order:
        state, out = step(state, [x[i] for x in parts])
        stacked.append(out)
    if scan.reverse:
        stacked.reverse()
    return state, [jnp.stack(xs) for xs in zip(*stacked, strict=True)]


def _along_axis_0(x: jax.Array) -> list[jax.Array]:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return list(x)
    # A split, whose gradient is one concatenation, and not a sum of padded slices.
    # JAX has none for an array in the host's memory of which some parts are not read.
    x = collectives.on_device(x)
    return [part.squeeze(0) for part in jax.lax.split(x, [1] * len(x))]


# -- Equations -------------------------------------------------------------------------


_Place = tuple[int, bool]  # the number of a group; False if its equations stand alone


def sorted_apart(
    equations: Iterable[core.JaxprEqn], is_alone: feedback.Test
) -> list[core.JaxprEqn]:
    """Equations in an order in which few that stand alone part the others.

    What grows from what is known, such as zeros or the mask of an attention, stands
    with each group that reads it: then its result need not be stored. Nor need that of
    a product, such as scores that wait for a mask, which stands with its first reader.
    """
    equations, level = list(equations), {}
    first: dict[int, _Place] = {}
    for e in equations:
        alone = is_alone(e)
        place = alone + max((level.get(x, 0) for x in variables(e.invars)), default=0)
        level |= dict.fromkeys(e.outvars, place)
        first[id(e)] = place, not alone
    cheap, growing = _growing(equations, is_alone)
    late = _late(equations, is_alone)
    # The groups that read each value, and those of them that compute it anew.
    readers, anew = collections.defaultdict(set), collections.defaultdict(set)
    places: dict[int, set[_Place]] = {}
    for e in reversed(equations):
        mine = {first[id(e)]}
        reads, again = (
            set().union(*(x[v] for v in e.outvars)) for x in (readers, anew)
        )
        if id(e) in growing:
            mine = again = reads or mine
        else:
            if id(e) in late and reads and not mine & reads:
                mine = {min(reads)}
            if id(e) in cheap:
                mine = again | (mine if reads - again or not reads else set())
        for x in variables(e.invars):
            # One that stands alone reads results of the group before it.
            readers[x] |= {(n - (not in_group), True) for n, in_group in mine}
            anew[x] |= again if id(e) in cheap else set()
        places[id(e)] = mine
    pairs = ((place, e) for e in equations for place in places[id(e)])
    return [e for _, e in sorted(pairs, key=lambda pair: pair[0])]


def _late(equations: Iterable[core.JaxprEqn], is_alone: feedback.Test) -> set[int]:
    """The equations, by id, that need not run before their first reader.

    They take more bytes than what they are computed of, as the scores of an attention,
    or are computed of such scores.
    """
    late, wide = set(), set()
    for e in equations:
        if e.effects or is_alone(e):
            continue
        reads = variables(e.invars)
        read, computed = (sum(map(jaxprs.nbytes, x)) for x in (reads, e.outvars))
        kept = sum(jaxprs.nbytes(x) for x in reads if x not in wide)
        if read < computed or kept < read <= computed:
            late.add(id(e))
            wide.update(e.outvars)
    return late


def _growing(
    equations: Iterable[core.JaxprEqn], is_alone: feedback.Test
) -> tuple[set[int], set[int]]:
    """The cheap equations, by id, and those of them whose results grow.

    They are computed of results of others, and of what is known before all. If these
    are smaller than a result, the result grows.
    """
    known: dict[Any, set[Any]] = {}  # what the result of a cheap one is computed of
    cheap, growing = set(), set()
    for e in equations:
        if e.effects or is_alone(e) or not all(map(_is_cheaper, jaxprs.within(e))):
            continue
        reads = set().union(*(known.get(x, {x}) for x in variables(e.invars)))
        known |= dict.fromkeys(e.outvars, reads)
        cheap.add(id(e))
        read, computed = (sum(map(jaxprs.nbytes, x)) for x in (reads, e.outvars))
        if read < computed:
            growing.add(id(e))
    return cheap, growing


def _is_cheaper(e: core.JaxprEqn) -> bool:
    """True if an equation is cheap, and no function such as `exp` of many digits.

    What runs a program, or is linear in some operand, is no such function.
    """
    row, has_digits = primitives.entry_of(e), any(map(jaxprs.is_inexact, e.outvars))
    other = jaxprs.inner_programs(e) or row.each or row.linear_in(len(e.invars))
    return jaxprs.is_cheap(e) and bool(other or not has_digits)


def run_in_groups(
    groups: Sequence[Sequence[core.JaxprEqn]],
    env: _Env,
    results: Sequence[Any],
    run: Callable[..., Any],
) -> None:
    """Adds to `env` the values that later groups, or `results`, read of each group.

    `run(group, variables that it reads, variables to return)` is a function of values.
    """
    last_reader, reads_of = {}, []
    for i, group in enumerate(groups):
        computed = {x for e in group for x in e.outvars}
        reads = dict.fromkeys(variables(x for e in group for x in e.invars))
        reads_of.append([x for x in reads if x not in computed])
        last_reader |= dict.fromkeys(reads_of[i], i)
    last_reader |= dict.fromkeys(variables(results), len(groups))
    for i, group in enumerate(groups):
        outs = [x for e in group for x in e.outvars if last_reader.get(x, i) > i]
        outs = [x for x in outs if x not in env]
        reads = [x for x in reads_of[i] if x in env]
        env |= zip(outs, run(group, reads, outs)([env[x] for x in reads]), strict=True)


def single(checkpoint: core.JaxprEqn, jaxpr: core.Jaxpr, e: core.JaxprEqn) -> Any:
    """A checkpoint of one equation of a program. `SplitScan` groups them again."""
    reads = list(dict.fromkeys(variables(e.invars)))
    ends = {"constvars": [], "invars": reads, "outvars": e.outvars}
    inside = jaxpr.replace(eqns=[e], effects=e.effects, **ends)
    one = jaxprs.with_inner(checkpoint, lambda _: inside)
    return one.replace(invars=reads, outvars=e.outvars, effects=e.effects)


def _checkpoint_options(e: core.JaxprEqn) -> Any:
    """The options of a checkpoint of one equation; None for other equations."""
    if jaxprs.kind(e) != "checkpoint" or len(jaxprs.inner_programs(e)[0].eqns) != 1:
        return None
    return [e.params[key] for key in ("prevent_cse", "policy")]


def _inside(e: core.JaxprEqn) -> list[core.JaxprEqn]:
    """The equations in a checkpoint, with the variables outside."""
    [inside] = jaxprs.inner_programs(e)
    known = dict(zip(inside.invars, e.invars, strict=True))
    return jaxprs.renamed(
        inside.eqns, known | dict(zip(inside.outvars, e.outvars, strict=True))
    )


def _strong(x: Any, aval: Any) -> Any:
    """`x` with the dtype that a loop carries."""
    is_extended = jnp.issubdtype(aval.dtype, jax.dtypes.extended)
    return x if is_extended else jax.lax.convert_element_type(x, aval.dtype)


def read_from(x: Any, env: _Env) -> Any:
    return env[x] if is_variable(x) else x.val
