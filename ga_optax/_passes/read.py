"""Functions that read a program as JAX traces it.

`core.Jaxpr` is data. This module alone knows the names of parameters that hold other
programs, which change between versions of JAX.
"""

import collections
import itertools
import math
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core
from jax.interpreters import partial_eval

from ga_optax._passes import primitives

# Kinds of equations that run one program once, as if the program stood there itself.
INLINE = ("call", "checkpoint")
# Also those that run the program slice by slice.
THROUGH = (*INLINE, "scan")
_REPEATED = ("scan", "while")
_DEEP = 100  # operations for each number that something unknown reads or returns


class Program(NamedTuple):
    """A program and the values of its constants."""

    jaxpr: core.Jaxpr
    consts: Sequence[Any] = ()


class Scan(NamedTuple):
    """A scan: its arguments and those of its body are `(consts, carry, slices)`."""

    body: Program
    num_consts: int
    num_carry: int
    length: int
    reverse: bool
    unroll: int

    def split(self, xs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Arguments as `(consts, carry, slices)`."""
        start, stop = self.num_consts, self.num_consts + self.num_carry
        return list(xs[:start]), list(xs[start:stop]), list(xs[stop:])

    def kept(self, result: int, argument: int | None) -> int | None:
        """The argument that a result of the scan is, if in the body it is this one."""
        start, stop = self.num_consts, self.num_consts + self.num_carry
        if argument is None or argument == start + result:
            return argument
        return argument if result >= self.num_carry and argument >= stop else None


def numbers(shape: Iterable[Any]) -> int:
    """The number of elements of an array; sizes that are left open count as 1,024.

    `jax.export` leaves sizes open, and symbolic sizes cannot be compared.
    """
    return math.prod(n if isinstance(n, int) else 1024 for n in shape)


def times(equation: core.JaxprEqn) -> int:
    """The number of times that an equation runs a program: 1 unless it is a scan."""
    return numbers([scan_of(equation).length]) if kind(equation) == "scan" else 1


def computed(equation: core.JaxprEqn) -> int:
    """The number of elements that an equation computes, in all iterations of a loop."""
    inside = sum(computed(e) for p in inner_programs(equation) for e in p.eqns)
    results = sum(numbers(getattr(x.aval, "shape", (0,))) for x in equation.outvars)
    return times(equation) * inside or results


def is_cheap(equation: core.JaxprEqn) -> bool:
    """True if running an equation again costs little more than reading its results."""
    return all(
        kind(e) not in _REPEATED
        if inner_programs(e)
        else not primitives.entry_of(e).is_dear
        for e in within(equation)
    )


def work(equation: core.JaxprEqn) -> float:
    """About how many scalar operations an equation takes."""
    shapes = [
        getattr(x.aval, "shape", ()) for x in (*equation.invars, *equation.outvars)
    ]
    largest = max(map(numbers, shapes), default=0)
    if programs := inner_programs(equation):
        return times(equation) * sum(work(e) for p in programs for e in p.eqns)
    name = equation.primitive.name
    if primitives.entry_of(equation).is_exact and primitives.is_linear(equation):
        return 0.0
    if name == primitives.PRODUCT:
        (contracted, _), _ = equation.params["dimension_numbers"]
        return 2.0 * numbers(shapes[-1]) * numbers(shapes[0][i] for i in contracted)
    if name == primitives.CONVOLUTION:
        features = shapes[1][equation.params["dimension_numbers"].rhs_spec[0]]
        of_one = numbers(shapes[1]) / max(numbers([features]), 1)
        return 2.0 * numbers(shapes[-1]) * of_one
    return float(largest if is_cheap(equation) else _DEEP * largest)


LITTLE = 1 / 20  # of the work of the rows


def shares_much(jaxpr: core.Jaxpr, rows: Iterable[Any]) -> bool:
    """True if more than a little of the work of a program needs no rows.

    `rows` are the arguments that have rows.
    """
    shared, of_rows = _shared_and_other(jaxpr, set(rows))
    return shared > LITTLE * of_rows


def _shared_and_other(jaxpr: core.Jaxpr, of_rows: set[Any]) -> tuple[float, float]:
    """The work of equations that are not cheap and read no rows; and of the others."""
    shared = other = 0.0
    for e in jaxpr.eqns:
        its = [is_among(x, of_rows) for x in e.invars]
        if not any(its):
            shared += 0.0 if is_cheap(e) else work(e)
        elif is_inline(e):
            [inside] = inner_programs(e)
            some = set(itertools.compress(inside.invars, its))
            both = _shared_and_other(inside, some)
            shared, other = shared + both[0], other + both[1]
        else:
            other += work(e)
        of_rows.update(e.outvars if any(its) else ())
    return shared, other


def name_of(equation: core.JaxprEqn) -> str:
    """The name of the primitive of an equation, or of one that the primitive hides."""
    hidden = equation.params.get("_prim")
    return equation.primitive.name if hidden is None else type(hidden).__name__


def kind(equation: core.JaxprEqn) -> str | None:
    """One of `PROGRAM_KINDS`, if an equation runs programs; None for others."""
    kind = primitives.entry_of(equation).kind
    return kind if kind in primitives.PROGRAM_KINDS else None


def is_inline(equation: core.JaxprEqn) -> bool:
    """True if an equation runs one program once: a `jit` or a `jax.checkpoint`."""
    return kind(equation) in INLINE


def inner(equation: core.JaxprEqn) -> list[Program]:
    """The programs inside an equation: loop bodies, branches, jitted functions."""
    return [
        Program(getattr(x, "jaxpr", x), getattr(x, "consts", ()))
        for x in _programs(equation.params.values())
    ]


def _programs(parameters: Iterable[Any]) -> Iterator[Any]:
    """The programs among parameters, or in tuples of these."""
    for x in parameters:
        if hasattr(x, "eqns"):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _programs(x)


def inner_programs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs inside an equation, without their constants."""
    return [program.jaxpr for program in inner(equation)]


def operands(equation: core.JaxprEqn, program: core.Jaxpr) -> list[Any]:
    """The operands of an equation that are the arguments of a program inside.

    These are all arguments of a jitted function, of a checkpoint, of a scan (a whole
    operand for a slice) and of the branches of a conditional.
    """
    return list(equation.invars[len(equation.invars) - len(program.invars) :])


def within(equation: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """An equation, and all equations inside it."""
    yield equation
    for program in inner_programs(equation):
        yield from equations(program)


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations of a program, and of the programs inside."""
    for equation in jaxpr.eqns:
        yield from within(equation)


def axes_of(equation: core.JaxprEqn) -> list[Any]:
    """The named axes, and the numbers of dimensions, that an equation itself has."""
    params = map(equation.params.get, ("axes", "axis_name", "axis_names"))
    return jax.tree.leaves([axes for axes in params if axes is not None])


def is_mark(equation: core.JaxprEqn, name: str) -> bool:
    """True for an equation of `checkpoint_name(x, name)`."""
    return equation.primitive.name == "name" and equation.params.get("name") == name


# Effects between values, such as an order or an axis, that nobody outside can see.
_OF_VALUES = {"JaxprInputEffect", "InternalMutableArrayEffect", "NamedAxisEffect"}


def acts(equation: core.JaxprEqn) -> bool:
    """True if an equation checks, prints or calls back."""
    return not all(map(is_of_values, equation.effects))


def is_of_values(effect: Any) -> bool:
    return any(x.__name__ in _OF_VALUES for x in type(effect).__mro__)


def scan_of(equation: core.JaxprEqn) -> Scan:
    """The `Scan` of an equation. The ranks of its arguments tell their roles."""
    [body] = inner(equation)
    whole = list(map(_same_rank, body.jaxpr.invars, equation.invars))
    carry = list(map(_same_rank, body.jaxpr.outvars, equation.outvars))
    how = (equation.params[name] for name in ("length", "reverse", "unroll"))
    return Scan(body, sum(whole) - sum(carry), sum(carry), *how)


def is_sliced(equation: core.JaxprEqn, i: int) -> bool:
    """True for a scan that runs over its i-th argument."""
    if kind(equation) != "scan":
        return False
    [body] = inner_programs(equation)
    return not _same_rank(body.invars[i], equation.invars[i])


def _same_rank(x: Any, y: Any) -> bool:
    return len(x.aval.shape) == len(y.aval.shape)


def is_variable(x: Any) -> bool:
    """True for a variable, which is no literal."""
    return not isinstance(x, core.Literal)


def is_among(x: Any, some: Collection[Any]) -> bool:
    """True if an operand is one of some variables; a literal has no hash."""
    return is_variable(x) and x in some


def is_reference(x: Any) -> bool:
    """True for a mutable array, as `jax.new_ref` makes it."""
    return hasattr(x.aval, "inner_aval")


def is_inexact(x: Any) -> bool:
    """True for a type, or a value, of real or complex numbers."""
    dtype = getattr(getattr(x, "aval", x), "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """The variables among operands; the others are literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


Use = tuple[core.JaxprEqn, int]  # an equation, and which of its arguments


class _Index(NamedTuple):
    """The equations that read and make the variables of a program."""

    uses: dict[Any, list[Use]]
    made: dict[Any, core.JaxprEqn]
    place: dict[int, int]  # where an equation stands, by its id
    results: collections.Counter[Any]  # how often the program returns them


_indices: Any = weakref.WeakKeyDictionary()  # by program, which never changes


def _index(jaxpr: core.Jaxpr) -> _Index:
    if jaxpr not in _indices:
        index = _Index({}, {}, {}, collections.Counter(variables(jaxpr.outvars)))
        for place, equation in enumerate(jaxpr.eqns):
            index.place[id(equation)] = place
            index.made.update(dict.fromkeys(equation.outvars, equation))
            for i, x in enumerate(equation.invars):
                if not isinstance(x, core.Literal):
                    index.uses.setdefault(x, []).append((equation, i))
        _indices[jaxpr] = index
    return _indices[jaxpr]


def uses(jaxpr: core.Jaxpr, variable: Any) -> list[Use]:
    """The equations that read a variable, each with the number of the argument."""
    return _index(jaxpr).uses.get(variable, [])


def uses_inside(jaxpr: core.Jaxpr, variable: Any) -> Iterator[Use | None]:
    """The uses of a variable, inside of functions and checkpoints in place of these.

    A program that returns the variable counts as a use None.
    """
    yield from [None] * _index(jaxpr).results[variable]
    for equation, i in uses(jaxpr, variable):
        if is_inline(equation):
            [inner] = inner_programs(equation)
            yield from uses_inside(inner, inner.invars[i])
        else:
            yield equation, i


def num_readers(jaxpr: core.Jaxpr, variable: Any) -> int:
    """The number of readers of a variable; each result that it is counts as one."""
    return len(uses(jaxpr, variable)) + _index(jaxpr).results[variable]


def only_use(jaxpr: core.Jaxpr, variable: Any) -> Use | None:
    """The only use of a variable, if it has one reader and is not returned."""
    of_variable = uses(jaxpr, variable)
    is_only = of_variable and num_readers(jaxpr, variable) == 1
    return of_variable[0] if is_only else None


def made_by(jaxpr: core.Jaxpr, variable: Any) -> core.JaxprEqn | None:
    """The equation that computes a variable; None for arguments and literals."""
    return _index(jaxpr).made.get(variable) if is_variable(variable) else None


def needed(
    jaxpr: core.Jaxpr,
    wanted: Iterable[Any],
    known: Callable[[Any], bool] = lambda x: False,
    runs: Callable[[core.JaxprEqn], bool] | None = None,
) -> tuple[list[core.JaxprEqn], list[Any]]:
    """The equations that compute `wanted`, and the known variables that they read.

    Equations for which `runs` is True are needed for their effects, such as printing.
    Without `runs`, the time is linear in the needed equations, not in the program.
    """
    index, equations = _index(jaxpr), {}
    stack, read = variables(wanted)[::-1], {}
    for equation in filter(runs, jaxpr.eqns) if runs else ():
        equations[index.place[id(equation)]] = equation
        stack += variables(equation.invars)
    while stack:
        x = stack.pop()
        equation = index.made.get(x)
        if known(x):
            read[x] = None
        elif equation is not None and index.place[id(equation)] not in equations:
            equations[index.place[id(equation)]] = equation
            stack += variables(equation.invars)
    return [equations[place] for place in sorted(equations)], list(read)


def live(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program without equations that nobody reads, inside of its equations too."""
    every = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, every, instantiate=True)[0]


def following(
    jaxpr: core.Jaxpr, start: Iterable[Any], stops: Sequence[str] = ()
) -> set[Any]:
    """The variables `start`, and all that depend on them.

    The results of the primitives `stops` depend on nothing.
    """
    dependent = set(start)
    for equation in jaxpr.eqns:
        depends = not dependent.isdisjoint(variables(equation.invars))
        if depends and equation.primitive.name not in stops:
            dependent.update(equation.outvars)
    return dependent


def moved_by(jaxpr: core.Jaxpr, results: Iterable[Any]) -> set[Any]:
    """The variables that may get a cotangent if some results of a program have one."""
    found = set(filter(is_inexact, variables(results)))
    for equation in reversed(jaxpr.eqns):
        # A reference gets its cotangent by effects, such as that of writing to it.
        if equation.effects or not found.isdisjoint(equation.outvars):
            its = _operands_moved_by(equation, found)
            found.update(filter(is_inexact, variables(its)))
    return found


def _operands_moved_by(equation: core.JaxprEqn, found: Collection[Any]) -> list[Any]:
    """The operands that may get a cotangent if results among `found` have one."""
    if equation.primitive.name == "stop_gradient":
        return []
    if equation.effects or kind(equation) not in (*INLINE, "cond"):
        return equation.invars
    moved, outs = [], [x in found for x in equation.outvars]
    for program in inner_programs(equation):
        inside = moved_by(program, itertools.compress(program.outvars, outs))
        pairs = zip(operands(equation, program), program.invars, strict=True)
        moved += [x for x, name in pairs if name in inside]
    return moved


def roundings(jaxpr: core.Jaxpr, result: Any) -> list[Any]:
    """A scalar before the first cast that rounds it, and after each of these casts.

    The last one is the result. A cast to a wider type may follow a rounding, as for a
    mean in bfloat16 in a float32 loss.
    """
    casts, first = [result], 0
    while (e := made_by(jaxpr, casts[-1])) is not None and result.aval.shape == ():
        is_cast = e.primitive.name == primitives.CAST
        if not is_cast or not _bits(e.invars[0]) or not _bits(casts[-1]):
            break
        casts.append(e.invars[0])
        if _bits(casts[-1]) > _bits(casts[-2]):
            first = len(casts) - 1
    return casts[first::-1]


def _bits(x: Any) -> int:
    """The bits of a floating-point number; 0 for other types."""
    dtype = x.aval.dtype
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 0


def key_of(
    equation: core.JaxprEqn, of: Callable[[Any], Any], without: Collection[str] = ()
) -> Any:
    """A key, which can be hashed, that equal equations share.

    `of` returns the key of a variable. Literals are equal by value, programs by their
    `form`; a parameter without a hash is equal to itself alone. The parameters named in
    `without` do not count.
    """
    ins = equation.invars
    operands = tuple(of(x) if is_variable(x) else _value_of(x) for x in ins)
    params = tuple(
        (name, _form_of(x, without))
        for name, x in sorted(equation.params.items())
        if name not in without
    )
    # The context of the trace: a mesh, a type of computation.
    return equation.primitive, operands, params, id(getattr(equation, "ctx", None))


def _value_of(literal: Any) -> tuple[Any, bytes]:
    """A key that equal literals share."""
    return literal.aval, np.asarray(literal.val).tobytes()


def form(jaxpr: core.Jaxpr, without: Collection[str] = ()) -> Any:
    """A key that equal programs share, whatever their variables are called."""
    numbers: dict[Any, int] = {}

    def number(x: Any) -> Any:
        return numbers.setdefault(x, len(numbers)) if is_variable(x) else _value_of(x)

    def new(xs: Iterable[Any]) -> Any:
        return tuple((number(x), x.aval) for x in xs)

    args = new((*jaxpr.constvars, *jaxpr.invars))
    equations = [(key_of(e, number, without), new(e.outvars)) for e in jaxpr.eqns]
    return args, tuple(equations), tuple(map(number, jaxpr.outvars))


def _form_of(x: Any, without: Collection[str]) -> Any:
    if hasattr(x, "eqns"):
        consts = tuple(map(id, getattr(x, "consts", ())))
        return form(getattr(x, "jaxpr", x), without), consts
    if isinstance(x, (tuple, list)):
        return tuple(_form_of(y, without) for y in x)
    try:
        hash(x)
    except TypeError:
        return id(x)
    return x
