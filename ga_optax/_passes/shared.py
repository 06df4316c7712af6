"""Passes on what all micro-batches share: parameters, constants."""

import math
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.sharding import NamedSharding, PartitionSpec

from .._devices import meshes
from . import effects, jaxprs, primitives, shards
from .facts import Facts
from .jaxprs import Program
from .places import left_alone, line_of

# == Arrivals of gradients =============================================================

# XLA:CPU adds two to four rows together with the accumulator, in another order.
FEW = 8


def arrival(jaxpr: core.Jaxpr, variable: Any, piece: str = "whole") -> str | None:
    """The form in which a parameter's gradient comes out of the backward pass.

    "slices": a scan runs over the parameter, uses each slice once, and the gradient of
    a slice is a sum of two terms or more. Adding slices in place saves memory and has
    the bits of the plain sum. Two uses would be two additions, `(total + a) + b`; a
    bare product and the addition may become one fused multiply-add, which rounds once
    and not twice.

    "whole": a sum likewise, but in one piece, which exists before the addition. So are
    the slices of a scan that is unrolled as a whole, or behind a reshape, a transpose,
    a cast or `jax.checkpoint`, through which no reference goes.

    "scatter": one look-up of rows (an embedding), whose sum XLA scatters into the
    accumulator.

    None: anything else, such as a bare product, which has to be `accumulator.rounded`.
    """
    use = jaxprs.only_use(jaxpr, variable)
    if use is None or not variable.aval.size:  # a stack of no layers
        return None
    equation, i = use
    name, row = equation.primitive.name, primitives.entry_of(equation)
    if jaxprs.kind(equation) in jaxprs.THROUGH:
        return _inside(equation, i, piece)
    if name == primitives.PRODUCT:
        return piece if _more(_num_terms(equation, i), 1) else None
    out: Any = next(iter(equation.outvars), None)  # printing has no results
    terms = out.aval.size // variable.aval.size if row.broadcasts else 1
    if _more(terms, 1):
        return piece if piece != "slices" or _more(terms, FEW - 1) else "whole"
    if name == "gather" and i == 0 and piece == "whole":
        return "scatter"
    is_put = name == primitives.PUT  # one equation for a whole tree
    if (row.moves and name != "squeeze") or name == primitives.CAST or is_put:
        # The gradient comes back through these as it is.
        form = arrival(jaxpr, equation.outvars[i] if is_put else out, piece)
        return "whole" if form == "slices" and piece == "whole" else form
    return None


def _inside(equation: core.JaxprEqn, i: int, piece: str) -> str | None:
    """The form of the gradient of an argument of a program inside an equation."""
    [inner] = jaxprs.inner_programs(equation)
    if jaxprs.kind(equation) == "scan":
        if not jaxprs.is_sliced(equation, i):
            return None  # used in every iteration
        if jaxprs.scan_of(equation).unroll < jaxprs.times(equation):
            piece = "slices"
    form = arrival(inner, inner.invars[i], piece)
    is_whole = jaxprs.kind(equation) == "checkpoint" and piece != "slices"
    return "whole" if form == "slices" and is_whole else form


def is_moved_in(jaxpr: core.Jaxpr, variable: Any) -> bool:
    """True if an array of the host is read once, by a move, perhaps slice by slice."""
    use = jaxprs.only_use(jaxpr, variable)
    if use is None or variable.aval.memory_space != jax.memory.Space.Host:
        return False
    equation, i = use
    if jaxprs.is_inline(equation) or jaxprs.is_sliced(equation, i):
        [inner] = jaxprs.inner_programs(equation)
        return is_moved_in(inner, inner.invars[i])
    return equation.primitive.name == primitives.PUT


def _num_terms(equation: core.JaxprEqn, i: int) -> int:
    """The number of terms that the gradient of an operand of a product sums up."""
    other: Any = equation.invars[1 - i].aval
    pairs = equation.params["dimension_numbers"]
    both = math.prod(other.shape[axis] for pair in pairs for axis in pair[1 - i])
    return other.size // both if both else 0


def _more(number: Any, least: int) -> bool:
    """True if a number is larger for all dimensions that `jax.export` leaves open."""
    try:
        return bool(number > least)
    except jax.errors.InconclusiveDimensionOperation:
        return False


def is_cut(jaxpr: core.Jaxpr, i: int, placement: Any) -> bool:
    """True if a parameter is split along a dimension that its slices lack.

    The gradient of the parameter comes in slices, says `arrival`.
    """
    gone = _num_scanned(jaxpr, jaxpr.invars[i])
    return any(dim < gone for dim, _ in placement.dims)


def _num_scanned(jaxpr: core.Jaxpr, variable: Any) -> int:
    """The number of a parameter's dimensions that are sliced where it is used."""
    [(equation, i)] = jaxprs.uses(jaxpr, variable)
    if jaxprs.kind(equation) not in ("call", "scan"):
        return 0
    [inner] = jaxprs.inner_programs(equation)
    inside: Any = inner.invars[i]
    gone = len(variable.aval.shape) - len(inside.aval.shape)
    return gone + _num_scanned(inner, inside)


def use_of(jaxpr: core.Jaxpr, variable: Any) -> str:
    """The line of the user's code that says most about how a parameter is used."""
    reads = jaxprs.uses(jaxpr, variable)
    return line_of(reads[-1][0].source_info) if reads else "nowhere"


# == Casts of parameters ===============================================================
# Casts of parameters, moved to where a scan has sliced them.
#
# Many losses cast all parameters first, and then scan over the layers. The gradients of
# all layers then exist at once, to be cast back, beside a copy of the parameters. If
# each layer is cast inside the scan, its gradient can be added there. The values are
# the same.
#
# Inside of a scan, a cast moves on into a rematerialised function. Otherwise the scan
# would keep the cast layer as a residual.
#
# A cast of a whole parameter stays where it is, in each micro-step: see `is_narrowed`.


def casts_sunk(program: Program, facts: Facts) -> Program:
    """The program with casts moved into scans, where gradients then come in slices.

    Otherwise a cast stays: the gradients of all layers would be a wider stack.
    """
    jaxpr = program.jaxpr
    for x in jaxpr.invars[: len(facts.devices.names)]:
        moved = _sunk(jaxpr, x)
        if arrival(moved, x) == "slices":
            jaxpr = moved
            continue
        for cast, _ in jaxprs.uses(jaxpr, x):
            if cast.primitive.name == primitives.CAST and _sinks(jaxpr, cast, False):
                left_alone(cast, "its gradient does not come in slices")
    return program._replace(jaxpr=jaxpr)


def _sunk(jaxpr: core.Jaxpr, x: Any, sliced: bool = False) -> core.Jaxpr:
    """The program, with the cast of an argument inside of the scan over the argument.

    `sliced` is True for the body of such a scan.
    """
    use, cast = jaxprs.only_use(jaxpr, x), None
    if (
        use
        and use[0].primitive.name == primitives.CAST
        and _sinks(jaxpr, use[0], sliced)
    ):
        cast = use[0]
        use = jaxprs.only_use(jaxpr, cast.outvars[0])
    if use is None or jaxprs.kind(use[0]) not in jaxprs.THROUGH:
        return jaxpr
    equation, i = use

    def inside(inner: core.Jaxpr) -> core.Jaxpr:
        if cast is not None:
            inner = _with_cast(inner, i, cast)
        return _sunk(inner, inner.invars[i], sliced or jaxprs.kind(equation) == "scan")

    new = jaxprs.with_inner(equation, inside)
    if new is equation:
        return jaxpr
    new = new.replace(invars=jaxprs.put(equation.invars, [i], [x]))
    eqns = [new if e is equation else e for e in jaxpr.eqns if e is not cast]
    return jaxpr.replace(eqns=eqns)


def _with_cast(jaxpr: core.Jaxpr, i: int, cast: core.JaxprEqn) -> core.Jaxpr:
    """The program, which casts its i-th argument first."""
    whole: Any = cast.invars[0].aval
    x = core.Var(jaxpr.invars[i].aval.update(dtype=whole.dtype))
    first = cast.replace(invars=[x], outvars=[jaxpr.invars[i]])
    invars = jaxprs.put(jaxpr.invars, [i], [x])
    return jaxpr.replace(invars=invars, eqns=[first, *jaxpr.eqns])


def _sinks(jaxpr: core.Jaxpr, cast: core.JaxprEqn, sliced: bool) -> bool:
    """True if a cast can move into the scan over its result, or on inside the scan."""
    [out] = cast.outvars
    if cast.params["sharding"] is None and _is_read_once(jaxpr, out, sliced):
        return True
    if any(use and jaxprs.is_sliced(*use) for use in jaxprs.uses_inside(jaxpr, out)):
        left_alone(cast, "the cast is sharded, or not read by one scan alone")
    return False


def _is_read_once(jaxpr: core.Jaxpr, variable: Any, sliced: bool) -> bool:
    """True if a variable is read once, by a scan over the variable or inside one."""
    use = jaxprs.only_use(jaxpr, variable)
    if use is None:
        return False
    equation, i = use
    if not jaxprs.is_inline(equation):
        return jaxprs.is_sliced(equation, i)
    [inner] = jaxprs.inner_programs(equation)
    return sliced or _is_read_once(inner, inner.invars[i], sliced)


def is_narrowed(jaxpr: core.Jaxpr, variable: Any) -> bool:
    """True if only casts to fewer bits read a variable."""
    reads = list(jaxprs.uses_inside(jaxpr, variable))
    return bool(reads) and all(use and _narrows(use[0]) for use in reads)


def _narrows(equation: core.JaxprEqn) -> bool:
    """True for a cast to fewer bits, but not to 8, which not every network carries."""
    if (
        equation.primitive.name != primitives.CAST
        or equation.params["sharding"] is not None
    ):
        return False
    before: Any = equation.invars[0].aval
    after: Any = equation.outvars[0].aval
    is_narrower = 2 <= after.dtype.itemsize < before.dtype.itemsize
    return is_narrower and jaxprs.is_inexact(after)


# == Narrowed parameters ===============================================================
# Sharded parameters that are cast before they are gathered: `sync="last"`.
#
# A loss often casts a parameter to bfloat16, and does nothing else with it. If each
# device casts its part before all parts are gathered, the network carries half as much,
# and the gathered parameter takes half the memory. No micro-batch casts it any more.
#
# The program then takes the parameter in low precision, and returns the gradient that
# the cast would get. One cast alone must read the parameter, once in a run: the
# gradients of several casts are added up in the precision of the parameter.


def params_narrowed(program: Program, facts: Facts) -> Program:
    """The program, which takes some parameters in the dtype to which it casts them."""
    jaxpr = program.jaxpr
    for i, is_gathered in enumerate(facts.devices.gathered_once):
        if not is_gathered:
            continue
        if narrowed := _narrowed(jaxpr, i):
            jaxpr = narrowed
            continue
        for reader, _ in jaxprs.uses(jaxpr, jaxpr.invars[i]):
            if _narrows(reader):
                left_alone(reader, "not one cast alone reads the parameter")
    return program._replace(jaxpr=jaxpr)


def _narrowed(jaxpr: core.Jaxpr, place: int) -> core.Jaxpr | None:
    """The program, whose argument is the result of the cast that alone reads it.

    None if something else reads the argument.
    """
    x: Any = jaxpr.invars[place]
    use = jaxprs.only_use(jaxpr, x)
    if use is None:
        return None
    equation, i = use
    if jaxprs.is_inline(equation) or jaxprs.is_sliced(equation, i):
        [inner] = jaxprs.inner_programs(equation)
        narrowed = _narrowed(inner, i)
        if narrowed is None:
            return None
        aval: Any = narrowed.invars[i].aval
        new = core.Var(x.aval.update(dtype=aval.dtype, weak_type=False))
        call = jaxprs.with_inner(equation, lambda _: narrowed)
        call = call.replace(invars=jaxprs.put(call.invars, [i], [new]))
        eqns = [call if e is equation else e for e in jaxpr.eqns]
    elif _narrows(equation):
        [new] = equation.outvars
        eqns = [e for e in jaxpr.eqns if e is not equation]
    else:
        return None
    return jaxpr.replace(invars=jaxprs.put(jaxpr.invars, [place], [new]), eqns=eqns)


# == Gathered parameters ===============================================================
# Sharded parameters that are gathered where they are used: `sync="each"`.
#
# Left to itself the compiler shards activations as the parameters are sharded, over the
# axis that splits the batch. Every layer then communicates activations. A sharding
# constraint here says that a parameter is whole over that axis, after the parameter is
# cast, and after a scan has sliced the parameter. So the network carries the layer's
# parameters in low precision, and a reduce-scatter of their gradients.
#
# A constraint before this one says that each device casts its own part. The compiler
# carries constraints back over casts and barriers, and would gather in high precision.

Entries = tuple[Any, ...]  # of a PartitionSpec, one for each dimension


class _Specs(NamedTuple):
    """The entries of a parameter while it is sharded, and once it is gathered."""

    sharded: Entries
    gathered: Entries

    def of_last(self, rank: int) -> "_Specs":
        """The entries of the last dimensions; a scan slices along the leading one."""
        sharded, gathered = (x[len(x) - rank :] for x in self)
        return _Specs(sharded, gathered)


def params_gathered(program: Program, facts: Facts) -> Program:
    """The program with constraints where it uses parameters, its first arguments."""
    jaxpr, devices, sharded = program.jaxpr, facts.devices, {}
    axes, mesh = devices.compiled
    if not axes or meshes.explicit_names(mesh):
        return program
    params: list[Any] = jaxpr.invars[: len(devices.specs)]
    for x, spec in zip(params, devices.specs, strict=True):
        entries = tuple(spec or ())
        entries += (None,) * (x.aval.ndim - len(entries))
        rest = tuple(meshes.entry_without(entry, axes) for entry in entries)
        if rest != entries:
            sharded[x] = _Specs(entries, rest)
    return program._replace(jaxpr=_gathered(jaxpr, sharded, mesh))


def _gathered(jaxpr: core.Jaxpr, sharded: dict[Any, _Specs], mesh: Any) -> core.Jaxpr:
    """The program with constraints; `sharded` are variables and their specs."""
    sharded, whole = dict(sharded), dict[Any, core.Var]()

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        ins: list[Any] = equation.invars
        params = [x for x in jaxprs.variables(ins) if x in sharded]
        if not params:
            return [equation]
        if equation.primitive.name == primitives.CAST:
            sharded[equation.outvars[0]] = sharded[ins[0]]
            return [equation]
        if jaxprs.kind(equation) in jaxprs.THROUGH:

            def change_inner(inner: core.Jaxpr) -> core.Jaxpr:
                pairs: Any = zip(inner.invars, ins, strict=True)
                specs = {v: sharded[x] for v, x in pairs if jaxprs.is_among(x, sharded)}
                specs = {v: x.of_last(v.aval.ndim) for v, x in specs.items()}
                return _gathered(inner, specs, mesh)

            return [jaxprs.with_inner(equation, change_inner)]
        is_table = equation.primitive.name == "gather" and params == ins[:1]
        if is_table and (found := _looked_up(equation, sharded[ins[0]], mesh)):
            return found
        if jaxprs.inner_programs(equation):
            name = equation.primitive.name
            left_alone(equation, f"{name} gets parameters that are gathered before")
        new = []
        for x in dict.fromkeys(params):
            for entries in () if x in whole else sharded[x]:
                before, whole[x] = whole.get(x, x), core.Var(x.aval)
                place = NamedSharding(mesh, PartitionSpec(*entries))
                new.append(shards.constraint_on(before, whole[x], place, equation))
        return [*new, equation.replace(invars=jaxprs.rename(ins, whole))]

    return jaxprs.changed(jaxpr, change)


def _looked_up(
    equation: core.JaxprEqn, specs: _Specs, mesh: Any
) -> list[core.JaxprEqn] | None:
    """A lookup in each device's columns of a table, such as an embedding; or None.

    What is found is sent to the devices of the rows, if that is less than the table.
    Columns that are also split over another axis are not looked up: the compiler sums
    their gradients whole.
    """
    how, [out] = equation.params, equation.outvars
    table: Any = equation.invars[0].aval
    found: Any = out.aval
    numbers = how["dimension_numbers"]
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    entries: list[Any] = [PartitionSpec.UNCONSTRAINED] * found.ndim
    places, parts = iter(numbers.offset_dims), 1
    for d, (before, after) in enumerate(zip(*specs, strict=True)):
        place = None if d in gone else next(places)
        if before == after:
            continue
        if place is None or after or how["slice_sizes"][d] != table.shape[d]:
            return None
        entries[place] = None
        parts *= math.prod(mesh.shape[name] for name in meshes.names_in(before))
    if jaxprs.numbers(found.shape) > parts * jaxprs.numbers(table.shape):
        return None
    result = core.Var(found)
    sharding = NamedSharding(mesh, PartitionSpec(*entries))
    return [
        equation.replace(outvars=[result]),
        shards.constraint_on(result, out, sharding, equation),
    ]


# == Constants =========================================================================
# Tables that a loss computes of constants alone, such as those of rotary positions.
#
# XLA hoists such a table out of a loop of several micro-batches. In a call of one
# micro-batch, XLA fuses the table with its readers, and rounds in other places. So the
# library computes the table before the loop in both.
#
# The pass hoists floating-point tables that are rounded. Numbers that are only moved or
# compared, such as a mask, have the same bits anywhere, and are cheaper to compute
# again. XLA computes scalars and arrays of equal numbers itself, when it compiles. The
# pass looks into `jax.jit` and `jax.checkpoint`. Out of loops inside the loss XLA
# hoists tables by itself, whatever is around the loops.

# A value that depends on arguments; of constants alone: equal numbers, different
# numbers, a table.
_OTHER, _EQUAL, _COUNTED, _TABLE = range(-1, 3)

# The parameters of a jitted function that have an entry for each argument.
_ONE_EACH = ("in_shardings", "in_layouts", "donated_invars")


def constants_hoisted(program: Program, facts: Facts) -> Program:
    """The program with its tables among its constants."""
    jaxpr, consts = program
    split = _split(jaxpr, set())
    if not split.tables:
        return program
    values = jaxprs.bind(jaxpr, split.hoisted, [], list(split.tables), [])
    consts = [*consts, *map(jax.lax.optimization_barrier, values)]
    variables = [*jaxpr.constvars, *split.tables.values()]
    # In jax 0.12 a program without its constants has them among its arguments.
    return Program(
        jaxprs.closing_over(split.rest, variables, consts, jaxpr.invars), consts
    )


class _Split(NamedTuple):
    """A program in two.

    Attributes:
      hoisted: equations of constants alone, which compute the tables.
      tables: the variables of the tables, and those that the rest reads instead.
      rest: the program without the hoisted equations.
    """

    hoisted: list[core.JaxprEqn]
    tables: dict[Any, core.Var]
    rest: core.Jaxpr


def _split(jaxpr: core.Jaxpr, given: set[Any]) -> _Split:
    """Takes the tables out of a program; `given` are arguments that are tables."""
    grade = dict.fromkeys(given, _TABLE)  # of what depends on constants alone
    hoisted: list[core.JaxprEqn] = []
    tables: dict[Any, core.Var] = {}
    rest: list[core.JaxprEqn] = []

    def reads(x: Any) -> Any:
        """The variable that has the value of `x` in the rest of the program."""
        is_table = jaxprs.is_variable(x) and grade.get(x) == _TABLE and x not in given
        return tables.setdefault(x, core.Var(x.aval)) if is_table else x

    for equation in jaxpr.eqns:
        ins, more = jaxprs.variables(equation.invars), []
        grades = [grade.get(x, _OTHER) for x in ins]
        highest = _OTHER if _OTHER in grades else max([_counts(equation), *grades])
        if highest != _OTHER and effects.is_known(equation):
            hoisted.append(equation)
            highest += highest == _COUNTED and _rounds(equation)
            for x in equation.outvars:
                grade[x] = highest if jaxprs.is_inexact(x) else min(highest, _COUNTED)
            rest.append(equation)  # the rest may read results that are no tables
            continue
        if _takes_more(equation):
            given_tables = {x for x in ins if grade.get(x) == _TABLE}
            equation, lifted, more = _lifted(equation, given_tables)
            hoisted += lifted
            grade |= dict.fromkeys(more, _TABLE)
        elif highest >= _COUNTED:
            name = equation.primitive.name
            left_alone(equation, f"a table is made by {name}, which is not known")
        rest.append(
            equation.replace(invars=list(map(reads, [*equation.invars, *more])))
        )
    outvars = list(map(reads, jaxpr.outvars))
    if not tables:
        return _Split([], {}, jaxpr)
    new = jaxpr.replace(eqns=rest, outvars=outvars)
    rest, _ = jaxprs.needed_for(
        new, outvars, runs=lambda e: grade.keys().isdisjoint(e.outvars)
    )
    hoisted, _ = jaxprs.needed_for(jaxpr.replace(eqns=hoisted), tables)
    return _Split(hoisted, tables, new.replace(eqns=rest))


def _lifted(
    equation: core.JaxprEqn, tables: set[Any]
) -> tuple[core.JaxprEqn, list[core.JaxprEqn], list[Any]]:
    """An equation without the tables of the program inside it.

    Returns: the equation, which takes the tables as more arguments; the equations that
    compute the tables, for the program around; and the variables of the tables there.
    """
    [inner] = jaxprs.inner_programs(equation)
    pairs = list(zip(inner.invars, equation.invars, strict=True))
    split = _split(inner, {v for v, x in pairs if jaxprs.is_among(x, tables)})
    if not split.tables:
        return equation, [], []
    names = dict[Any, Any](pairs)
    names |= {x: core.Var(x.aval) for e in split.hoisted for x in e.outvars}
    rest = split.rest.replace(invars=[*inner.invars, *split.tables.values()])
    equation = jaxprs.with_inner(equation, lambda _: rest)
    params, more = equation.params, len(split.tables)
    longer = {k: (*params[k], *params[k][:1] * more) for k in _ONE_EACH if k in params}
    equation = equation.replace(params=params | longer)
    return (
        equation,
        jaxprs.renamed(split.hoisted, names),
        jaxprs.rename(split.tables, names),
    )


def _takes_more(equation: core.JaxprEqn) -> bool:
    """True if an equation can get more arguments: all have the same parameters."""
    params = [equation.params.get(key, ()) for key in _ONE_EACH]
    alike = all(x == entries[0] for entries in params for x in entries)
    return jaxprs.is_inline(equation) and alike


def _counts(equation: core.JaxprEqn) -> bool:
    """True if an equation makes different numbers. XLA folds arrays of equal ones."""
    return any(e.primitive.name == "iota" for e in jaxprs.within(equation))


def _rounds(equation: core.JaxprEqn) -> bool:
    """True if an equation rounds floating-point numbers, and does not only move."""
    return any(
        not jaxprs.inner_programs(e)
        and not primitives.entry_of(e).is_exact
        and any(map(jaxprs.is_inexact, e.outvars))
        for e in jaxprs.within(equation)
    )
