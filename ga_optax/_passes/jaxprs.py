"""Programs as data: jaxprs, read, rewritten, run and traced.

    run(program, xs)  =  run(rewritten(program), xs)

The names of parameters that hold other programs change between versions of JAX, and are
known here alone. Functions that read come first, then those that change a program, and
those that run one or trace one.
"""

import collections
import contextlib
import functools
import itertools
import math
import operator
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util
from jax.interpreters import partial_eval

from . import primitives

# == Reading ===========================================================================
# Functions that read a program as JAX traces it.
#
# `core.Jaxpr` is data. This module alone knows the names of parameters that hold other
# programs, which change between versions of JAX.

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
    return math.prod([n if isinstance(n, int) else 1024 for n in shape])


def nbytes(x: Any) -> int:
    """The bytes of an array, of a variable or of a type; 0 of what is none."""
    aval = getattr(x, "aval", x)
    is_array = hasattr(aval, "shape") and hasattr(aval, "dtype")
    return numbers(aval.shape) * aval.dtype.itemsize if is_array else 0


def times(equation: core.JaxprEqn) -> int:
    """The number of times that an equation runs a program: 1 unless it is a scan."""
    return numbers([scan_of(equation).length]) if kind(equation) == "scan" else 1


def computed(equation: core.JaxprEqn) -> int:
    """The number of elements that an equation computes, in all iterations of a loop."""
    inside = sum([computed(e) for p in inner_programs(equation) for e in p.eqns])
    results = sum([numbers(getattr(x.aval, "shape", ())) for x in equation.outvars])
    return times(equation) * inside or results


def is_cheap(equation: core.JaxprEqn) -> bool:
    """True if running an equation again costs little more than reading its results."""
    for e in within(equation):
        if (kind(e) in _REPEATED) if inner(e) else primitives.is_dear(e):
            return False
    return True


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


def name_of(equation: core.JaxprEqn) -> str:
    """The name of the primitive of an equation, or of one that the primitive hides."""
    hidden = equation.params.get("_prim")
    return equation.primitive.name if hidden is None else type(hidden).__name__


def kind(equation: core.JaxprEqn) -> str | None:
    """One of `PROGRAM_KINDS`, if an equation runs programs; None for others."""
    return primitives.KINDS.get(equation.primitive.name)


def is_inline(equation: core.JaxprEqn) -> bool:
    """True if an equation runs one program once: a `jit` or a `jax.checkpoint`."""
    return kind(equation) in INLINE


def inner(equation: core.JaxprEqn) -> list[Program]:
    """The programs inside an equation: loop bodies, branches, jitted functions.

    They are parameters, or in tuples of these.
    """
    found, stack = [], list(equation.params.values())[::-1]
    while stack:
        x = stack.pop()
        if isinstance(x, (tuple, list)):
            stack += x[::-1]
        elif type(x) not in _SCALARS and hasattr(x, "eqns"):
            found.append(Program(getattr(x, "jaxpr", x), getattr(x, "consts", ())))
    return found


_SCALARS = {int, float, bool, str, type(None)}


def inner_programs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """The programs inside an equation, without their constants."""
    return [program.jaxpr for program in inner(equation)]


def operands(equation: core.JaxprEqn, program: core.Jaxpr) -> list[Any]:
    """The operands of an equation that are the arguments of a program inside.

    These are all arguments of a jitted function, of a checkpoint, of a scan (a whole
    operand for a slice) and of the branches of a conditional.
    """
    return list(equation.invars[len(equation.invars) - len(program.invars) :])


def within(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
    """An equation, and all equations inside it."""
    programs = inner_programs(equation)
    return [equation, *[e for program in programs for e in equations(program)]]


_equations: Any = weakref.WeakKeyDictionary()  # by program, which never changes


def equations(jaxpr: core.Jaxpr) -> list[core.JaxprEqn]:
    """All equations of a program, and of the programs inside."""
    if (found := _equations.get(jaxpr)) is None:
        found = [e for equation in jaxpr.eqns for e in within(equation)]
        _equations[jaxpr] = found
    return found


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


def outer_effects(jaxpr: core.Jaxpr) -> frozenset[Any]:
    """The effects of a program, without those on references it makes itself."""
    internal = "InternalMutableArrayEffect"
    return frozenset(x for x in jaxpr.effects if type(x).__name__ != internal)


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
    return not isinstance(x, core.Literal) and x in some


def is_reference(x: Any) -> bool:
    """True for a mutable array, as `jax.new_ref` makes it."""
    return hasattr(x.aval, "inner_aval")


def is_inexact(x: Any) -> bool:
    """True for a type, or a value, of real or complex numbers."""
    dtype = getattr(getattr(x, "aval", x), "dtype", None)
    return dtype is not None and _is_inexact(dtype)


@functools.cache
def _is_inexact(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact)


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
    if (index := _indices.get(jaxpr)) is None:
        index = _Index({}, {}, {}, collections.Counter(variables(jaxpr.outvars)))
        for place, equation in enumerate(jaxpr.eqns):
            index.place[id(equation)] = place
            index.made.update(dict.fromkeys(equation.outvars, equation))
            for i, x in enumerate(equation.invars):
                if not isinstance(x, core.Literal):
                    index.uses.setdefault(x, []).append((equation, i))
        _indices[jaxpr] = index
    return index


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


def needed_for(
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


class Same:
    """A key that equals another key of the same object alone."""

    def __init__(self, of: Any) -> None:
        self.of = of

    def __eq__(self, other: Any) -> bool:
        return isinstance(other, Same) and self.of is other.of

    def __hash__(self) -> int:
        return id(self.of)


def key_of(
    equation: core.JaxprEqn, of: Callable[[Any], Any], without: Collection[str] = ()
) -> Any:
    """A key, which can be hashed, that equal equations share.

    `of` returns the key of a variable. Literals are equal by value, programs by their
    `form`; a parameter without a hash is equal to itself alone. The parameters named in
    `without` do not count.
    """
    ins = equation.invars
    operands = [_value_of(x) if isinstance(x, core.Literal) else of(x) for x in ins]
    params = [
        (name, _form_of(x, without))
        for name, x in sorted(equation.params.items())
        if name not in without
    ]
    # The context of the trace: a mesh, a type of computation.
    context = getattr(equation, "ctx", None)
    return equation.primitive, tuple(operands), tuple(params), context


def _value_of(literal: Any) -> tuple[Any, bytes]:
    """A key that equal literals share."""
    return literal.aval, np.asarray(literal.val).tobytes()


_forms: Any = weakref.WeakKeyDictionary()  # by program, which never changes


def form(jaxpr: core.Jaxpr, without: Collection[str] = ()) -> Any:
    """A key that equal programs share, whatever their variables are called."""
    if not without and (found := _forms.get(jaxpr)) is not None:
        return found
    numbers: dict[Any, int] = {}

    def number(x: Any) -> Any:
        return numbers.setdefault(x, len(numbers)) if is_variable(x) else _value_of(x)

    def new(xs: Iterable[Any]) -> Any:
        return tuple([(number(x), x.aval) for x in xs])

    args = new((*jaxpr.constvars, *jaxpr.invars))
    equations = [(key_of(e, number, without), new(e.outvars)) for e in jaxpr.eqns]
    found = args, tuple(equations), tuple(map(number, jaxpr.outvars))
    return found if without else _forms.setdefault(jaxpr, found)


def _form_of(x: Any, without: Collection[str]) -> Any:
    if hasattr(x, "eqns"):
        consts = tuple(map(Same, getattr(x, "consts", ())))
        return form(getattr(x, "jaxpr", x), without), consts
    if isinstance(x, (tuple, list)):
        return tuple([_form_of(y, without) for y in x])
    try:
        hash(x)
    except TypeError:
        return Same(x)
    return x


# == Rewriting =========================================================================


def without_values(jaxpr: Any) -> core.Jaxpr:
    """The program without the values of its constants, which newer JAX holds in it.

    A program that is kept for later would keep tracers whose trace has ended.
    """
    consts = getattr(jaxpr, "consts", ())
    return jaxpr.with_consts([None] * len(consts)) if consts else jaxpr


def with_constants(jaxpr: core.Jaxpr, number: int) -> core.Jaxpr:
    """The same program, whose first arguments, `number` of them, become constants."""
    variables = [*jaxpr.constvars, *jaxpr.invars[:number]]
    values = [None] * len(variables)
    return closing_over(jaxpr, variables, values, jaxpr.invars[number:])


def without_constants(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same program, whose constants are its first arguments."""
    return closing_over(jaxpr, [], [], [*jaxpr.constvars, *jaxpr.invars])


def closing_over(
    jaxpr: core.Jaxpr, constants: Sequence[Any], values: Sequence[Any], invars: Any
) -> core.Jaxpr:
    """The same program with other constants and arguments; itself if there are none."""
    if not constants and not jaxpr.constvars and list(invars) == jaxpr.invars:
        return jaxpr
    # In newer JAX a program holds the values of its constants, too.
    more = {"consts": values} if hasattr(jaxpr, "consts") else {}
    return jaxpr.replace(constvars=constants, invars=invars, **more)


def silent(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program without equations that check or print, and return nothing."""
    eqns = [silent_equation(e) for e in jaxpr.eqns if e.outvars or not acts(e)]
    return jaxpr.replace(eqns=eqns, effects=_of_values(jaxpr))


def silent_equation(equation: core.JaxprEqn) -> core.JaxprEqn:
    """The equation without equations inside that check or print, and return nothing."""
    if not acts(equation):
        return equation
    return with_inner(equation, silent).replace(effects=_of_values(equation))


def _of_values(x: Any) -> Any:
    return type(x.effects)(filter(is_of_values, x.effects))


def renamed(
    equations: Iterable[core.JaxprEqn], known: Mapping[Any, Any]
) -> list[core.JaxprEqn]:
    """The equations, with other variables or literals in place of those in `known`."""
    return [
        e.replace(invars=rename(e.invars, known), outvars=rename(e.outvars, known))
        for e in equations
    ]


def changed(
    jaxpr: core.Jaxpr, change: Callable[[core.JaxprEqn], Iterable[core.JaxprEqn]]
) -> core.Jaxpr:
    """The program with new equations in place of each; itself if all stay the same."""
    new = [x for equation in jaxpr.eqns for x in change(equation)]
    return with_equations(jaxpr, new)


def with_equations(jaxpr: core.Jaxpr, eqns: list[core.JaxprEqn]) -> core.Jaxpr:
    """The program of other equations; itself if all are the same."""
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def rename(atoms: Iterable[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The atoms, with those in `known` replaced."""
    return [x if isinstance(x, core.Literal) else known.get(x, x) for x in atoms]


def with_inner(
    equation: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
    """The equation with new programs inside; itself if all stay the same."""
    programs = inner_programs(equation)
    new = {id(program): change(program) for program in programs}
    if all(new[id(program)] is program for program in programs):
        return equation

    def changed(x: Any) -> Any:
        if not hasattr(x, "eqns"):
            return x
        program = getattr(x, "jaxpr", x)
        return new[id(x)] if program is x else x.replace(jaxpr=new[id(program)])

    params = {
        key: tuple(map(changed, x)) if isinstance(x, tuple) else changed(x)
        for key, x in equation.params.items()
    }
    return equation.replace(params=params)


# == Running and tracing ===============================================================


def program_of(fun: Callable[..., Any], *types: Any) -> Program:
    """The program of a function, for arguments of these types."""
    closed: Any = jax.make_jaxpr(fun)(*types)
    return Program(closed.jaxpr, closed.consts)


# Returns the results of an equation with these arguments; None to run the equation.
Override = Callable[[core.JaxprEqn, list[Any]], Sequence[Any] | None]


def evaluate(program: Program, args: Sequence[Any], rule: Override) -> list[Any]:
    """The results of a program, whose equations `rule` computes."""
    jaxpr = program.jaxpr
    names = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(names, [*program.consts, *args], strict=True))

    def value(x: Any) -> Any:
        return x.val if isinstance(x, core.Literal) else env[x]

    outer = source_info_util.current_name_stack()
    for equation in jaxpr.eqns:
        values = list(map(value, equation.invars))
        with as_of(equation, outer):
            out = rule(equation, values)
        if out is None:
            out = bind(jaxpr, [equation], equation.invars, equation.outvars, values)
        env.update(zip(equation.outvars, out, strict=True))
    return list(map(value, jaxpr.outvars))


def results(program: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a program as it is."""
    return jax.core.eval_jaxpr(program.jaxpr, program.consts, *args)


def bind(*places: Any) -> list[Any]:
    """The values of `outvars`, see `between`."""
    program, args = between(*places)
    return jax.core.eval_jaxpr(program, (), *args)


def between(
    jaxpr: core.Jaxpr,
    equations: Sequence[core.JaxprEqn],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    values: Sequence[Any],
) -> tuple[core.Jaxpr, list[Any]]:
    """The program that computes `outvars` from `invars` by equations of `jaxpr`.

    A variable in `invars` keeps its value, even if an equation computes the variable
    (which runs because it prints).

    Returns: the program, and the arguments among the values of `invars`.
    """
    pairs = zip(invars, values, strict=True)
    known = {v: x for v, x in pairs if not isinstance(v, core.Literal)}
    equations = [_without_results(e, known) for e in equations]
    effects = frozenset().union(*[equation.effects for equation in equations])
    program = jaxpr.replace(
        constvars=[],
        invars=list(known),
        outvars=list(outvars),
        eqns=list(equations),
        effects=effects,
    )
    return program, list(known.values())


def _without_results(equation: core.JaxprEqn, known: Mapping[Any, Any]) -> Any:
    """The equation with new variables in place of results that are known."""
    if known.keys().isdisjoint(equation.outvars):
        return equation
    new = [core.Var(x.aval) if x in known else x for x in equation.outvars]
    return equation.replace(outvars=new)


def inserted(jaxpr: core.Jaxpr, args: Sequence[Any]) -> list[Any]:
    """The results of a program without constants, which becomes a part of another.

    It is one equation, until the program around is `opened`: to run equations that
    exist already JAX would infer all types anew.
    """
    return _inserted().bind(*args, program=core.ClosedJaxpr(jaxpr, []))


@functools.cache
def _inserted() -> core.Primitive:
    new = core.Primitive(primitives.INSERTED)
    new.multiple_results = True

    def run_now(*xs: Any, program: Any) -> list[Any]:
        return results(program, xs)

    def types(*_: Any, program: Any) -> tuple[Any, Any]:
        return program.out_avals, program.effects

    new.def_impl(run_now)
    new.def_effectful_abstract_eval(types)
    return new


def opened(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program with the equations of programs that were `inserted`, in loops too."""
    names, new = dict[Any, Any](), list[core.JaxprEqn]()
    for e in jaxpr.eqns:
        e = e.replace(invars=rename(e.invars, names)) if names else e
        if e.primitive.name in ("scan", "cond"):
            e = with_inner(e, opened)
        if e.primitive.name != primitives.INSERTED:
            new.append(e)
            continue
        [program], stack = inner_programs(e), e.source_info.name_stack
        names.update(zip(program.invars, e.invars, strict=True))
        for x in program.eqns:
            source = x.source_info.replace(name_stack=stack + x.source_info.name_stack)
            ins = rename(x.invars, names)
            new.append(x.replace(invars=ins, source_info=source))
        outs = rename(program.outvars, names)
        names.update(zip(e.outvars, outs, strict=True))
    same = with_equations(jaxpr, new)
    outs = rename(jaxpr.outvars, names)
    return same.replace(outvars=outs) if names else same


def of_some(
    fun: Callable[..., Any], xs: Sequence[Any], places: Iterable[int]
) -> Callable[..., Any]:
    """A function of the operands at some places; the others have the values in `xs`."""
    places = list(places)

    def fewer(*some: Any) -> Any:
        return fun(*put(xs, places, some))

    return fewer


def put(xs: Sequence[Any], places: Iterable[int], new: Sequence[Any]) -> list[Any]:
    """The values, with others at some places."""
    return list((dict(enumerate(xs)) | dict(zip(places, new, strict=True))).values())


def scan(how: Scan, body: Callable[[list[Any]], Any], values: list[Any]) -> list[Any]:
    """The results of a scan with another body."""
    consts, start, slices = how.split(values)

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body([*consts, *carry, *slices])
        return list(out[: how.num_carry]), list(out[how.num_carry :])

    carry, stacked = jax.lax.scan(
        step, start, slices, how.length, how.reverse, how.unroll
    )
    return [*carry, *stacked]


def traced(
    fun: Callable[..., Any], invars: Sequence[Any], result: core.Var, at: core.JaxprEqn
) -> list[core.JaxprEqn]:
    """Equations that compute `result` as `fun` of values of a program.

    The equations have the line of the equation `at`.
    """
    jaxpr = program_of(fun, *(x.aval for x in invars)).jaxpr
    known = dict(zip(jaxpr.invars, invars, strict=True)) | {jaxpr.outvars[0]: result}
    new = renamed(jaxpr.eqns, known)
    return [e.replace(source_info=at.source_info) for e in new]


@contextlib.contextmanager
def as_of(equation: core.JaxprEqn, outer: Any) -> Iterator[None]:
    """A context, in which new equations have the line and the names of an equation.

    The names stand behind `outer`. Without a line of its own, the equation has the line
    of the equation around.
    """
    info = equation.source_info
    has_line = source_info_util.summarize(info)
    lines = (info if has_line else source_info_util.current()).traceback
    names = outer + info.name_stack
    with source_info_util.user_context(lines, name_stack=names):
        yield
