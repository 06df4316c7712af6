"""How to read a program as JAX traces it.

`core.Jaxpr` is data. This module alone knows the names of parameters that hold
other programs, which change between versions of JAX.
"""

import collections
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

# What runs its program once, as if that stood there itself.
INLINE = ("call", "checkpoint")


# Also what runs it slice by slice: arguments and results are those of the program.
THROUGH = (*INLINE, "scan")


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
        """The argument of the scan that a result is, if the body's is that one."""
        start, stop = self.num_consts, self.num_consts + self.num_carry
        if argument is None or argument == start + result:
            return argument
        return argument if result >= self.num_carry and argument >= stop else None


def numbers(shape: Iterable[Any]) -> int:
    """How many numbers an array holds, to compare; sizes left open count as 1,024.

    `jax.export` leaves sizes open, and these compare with nothing.
    """
    return math.prod(n if isinstance(n, int) else 1024 for n in shape)


def times(equation: core.JaxprEqn) -> int:
    """How often what is inside an equation runs, to compare: once, unless it scans."""
    return numbers([scan_of(equation).length]) if kind(equation) == "scan" else 1


def computed(equation: core.JaxprEqn) -> int:
    """How many numbers an equation computes on its way, in all iterations of a loop."""
    inside = sum(computed(e) for p in inner_programs(equation) for e in p.eqns)
    made = sum(numbers(getattr(x.aval, "shape", (0,))) for x in equation.outvars)
    return times(equation) * inside or made


def name_of(equation: core.JaxprEqn) -> str:
    """What an equation does: its primitive, or what is hidden in that."""
    hidden = equation.params.get("_prim")
    return equation.primitive.name if hidden is None else type(hidden).__name__


def kind(equation: core.JaxprEqn) -> str | None:
    """How it runs what is inside it: one of `PROGRAM_KINDS`; None for anything else."""
    kind = primitives.entry_of(equation).kind
    return kind if kind in primitives.PROGRAM_KINDS else None


def is_inline(equation: core.JaxprEqn) -> bool:
    """Whether it runs one program once: a jitted function or a `jax.checkpoint`."""
    return kind(equation) in INLINE


def inner(equation: core.JaxprEqn) -> list[Program]:
    """The programs inside an equation: loop bodies, branches, jitted functions."""
    return [
        Program(getattr(x, "jaxpr", x), getattr(x, "consts", ()))
        for x in _programs(equation.params.values())
    ]


def _programs(parameters: Iterable[Any]) -> Iterator[Any]:
    """Those parameters, or parts of tuples among them, that are programs."""
    for x in parameters:
        if hasattr(x, "eqns"):
            yield x
        elif isinstance(x, (tuple, list)):
            yield from _programs(x)


def inner_programs(equation: core.JaxprEqn) -> list[core.Jaxpr]:
    """Those programs without their constants."""
    return [program.jaxpr for program in inner(equation)]


def operands(equation: core.JaxprEqn, program: core.Jaxpr) -> list[Any]:
    """What a program inside an equation has for arguments, as far as it is given.

    All of them for a jitted function, a checkpoint, a scan (whole for its slices) and
    the branches of a conditional.
    """
    return list(equation.invars[len(equation.invars) - len(program.invars) :])


def within(equation: core.JaxprEqn) -> Iterator[core.JaxprEqn]:
    """An equation, and all that are inside it."""
    yield equation
    for program in inner_programs(equation):
        yield from equations(program)


def equations(jaxpr: core.Jaxpr) -> Iterator[core.JaxprEqn]:
    """All equations of a program, those of inner programs too."""
    for equation in jaxpr.eqns:
        yield from within(equation)


def axes_of(equation: core.JaxprEqn) -> list[Any]:
    """The named axes, and the numbers of dimensions, that an equation itself has."""
    found = map(equation.params.get, ("axes", "axis_name", "axis_names"))
    given = [axes for axes in found if axes is not None]
    return jax.tree.leaves(given) if given else []


def is_mark(equation: core.JaxprEqn, name: str) -> bool:
    """Whether it is `checkpoint_name(x, name)`."""
    return equation.primitive.name == "name" and equation.params.get("name") == name


# Effects that are between values: order, or an axis, and nothing that others see.
_OF_VALUES = {"JaxprInputEffect", "InternalMutableArrayEffect", "NamedAxisEffect"}


def acts(equation: core.JaxprEqn) -> bool:
    """True if it does something beside its results: it checks, prints or calls back."""
    return not all(map(is_of_values, equation.effects))


def is_of_values(effect: Any) -> bool:
    return any(x.__name__ in _OF_VALUES for x in type(effect).__mro__)


def scan_of(equation: core.JaxprEqn) -> Scan:
    """How a scan runs. The roles of its arguments are in their shapes."""
    [body] = inner(equation)
    whole = list(map(_same_rank, body.jaxpr.invars, equation.invars))
    carry = list(map(_same_rank, body.jaxpr.outvars, equation.outvars))
    how = (equation.params[name] for name in ("length", "reverse", "unroll"))
    return Scan(body, sum(whole) - sum(carry), sum(carry), *how)


def is_sliced(equation: core.JaxprEqn, i: int) -> bool:
    """Whether it is a scan that runs over an argument."""
    if kind(equation) != "scan":
        return False
    [body] = inner_programs(equation)
    return not _same_rank(body.invars[i], equation.invars[i])


def _same_rank(x: Any, y: Any) -> bool:
    return len(x.aval.shape) == len(y.aval.shape)


def is_variable(x: Any) -> bool:
    """Whether it is no literal."""
    return not isinstance(x, core.Literal)


def is_among(x: Any, some: Collection[Any]) -> bool:
    """Whether it is one of some variables; a literal has no hash."""
    return is_variable(x) and x in some


def is_reference(x: Any) -> bool:
    """Whether it is a mutable array, as `jax.new_ref` makes it."""
    return hasattr(x.aval, "inner_aval")


def is_inexact(x: Any) -> bool:
    """Whether what has a type, or is one, holds real or complex numbers."""
    dtype = getattr(getattr(x, "aval", x), "dtype", None)
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.inexact))


def variables(atoms: Iterable[Any]) -> list[Any]:
    """Those that are no literals."""
    return [x for x in atoms if not isinstance(x, core.Literal)]


Use = tuple[core.JaxprEqn, int]  # an equation, and which of its arguments


class _Index(NamedTuple):
    """Who reads and who makes the variables of a program."""

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
    """The equations that read a variable, and as which of their arguments."""
    return _index(jaxpr).uses.get(variable, [])


def uses_inside(jaxpr: core.Jaxpr, variable: Any) -> Iterator[Use | None]:
    """Those, with what reads it inside functions and checkpoints in place of these.

    And None for each result that it is, inside of those, too.
    """
    yield from [None] * _index(jaxpr).results[variable]
    for equation, i in uses(jaxpr, variable):
        if is_inline(equation):
            [inner] = inner_programs(equation)
            yield from uses_inside(inner, inner.invars[i])
        else:
            yield equation, i


def num_readers(jaxpr: core.Jaxpr, variable: Any) -> int:
    """How often a variable is read: by equations, and as a result of the program."""
    return len(uses(jaxpr, variable)) + _index(jaxpr).results[variable]


def only_use(jaxpr: core.Jaxpr, variable: Any) -> Use | None:
    """The equation that reads a variable, if that is read once, and not returned."""
    read = uses(jaxpr, variable)
    return read[0] if read and num_readers(jaxpr, variable) == 1 else None


def made_by(jaxpr: core.Jaxpr, variable: Any) -> core.JaxprEqn | None:
    """The equation that computes a variable; None for arguments and literals."""
    made = _index(jaxpr).made
    return None if isinstance(variable, core.Literal) else made.get(variable)


def place_of(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> int:
    """Where an equation stands in a program."""
    return _index(jaxpr).place[id(equation)]


def needed(
    jaxpr: core.Jaxpr,
    wanted: Iterable[Any],
    known: Callable[[Any], bool] = lambda x: False,
    runs: Callable[[core.JaxprEqn], bool] | None = None,
) -> tuple[list[core.JaxprEqn], list[Any]]:
    """The equations that compute `wanted`, and the known variables that they read.

    Those that `runs` names are among them for what they do, such as printing. Without
    it, this takes time for what it finds, and not for the whole program.
    """
    index, found = _index(jaxpr), {}
    due, read = variables(wanted)[::-1], {}
    acting = filter(runs, jaxpr.eqns) if runs else ()
    for equation in acting:
        found[index.place[id(equation)]] = equation
        due += variables(equation.invars)
    while due:
        x = due.pop()
        equation = index.made.get(x)
        if known(x):
            read[x] = None
        elif equation is not None and index.place[id(equation)] not in found:
            found[index.place[id(equation)]] = equation
            due += variables(equation.invars)
    return [found[place] for place in sorted(found)], list(read)


def live(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program without what nobody reads, inside of its equations, too."""
    every = [True] * len(jaxpr.outvars)
    return partial_eval.dce_jaxpr(jaxpr, every, instantiate=True)[0]


def following(
    jaxpr: core.Jaxpr, start: Iterable[Any], stops: Sequence[str] = ()
) -> set[Any]:
    """The variables that depend on some of `start`, and those.

    Nothing depends on what a primitive reads that is among `stops`.
    """
    found = set(start)
    for equation in jaxpr.eqns:
        reads = not found.isdisjoint(variables(equation.invars))
        if reads and equation.primitive.name not in stops:
            found.update(equation.outvars)
    return found


def roundings(jaxpr: core.Jaxpr, result: Any) -> list[Any]:
    """A number before the first of the casts that round it, after each, and the result.

    A cast to a wider type may follow, as of the mean of bfloat16 in a float32 loss.
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
    """Those of a real number that is no integer; 0 of others."""
    dtype = x.aval.dtype
    return jnp.finfo(dtype).bits if jnp.issubdtype(dtype, jnp.floating) else 0


def key_of(
    equation: core.JaxprEqn, of: Callable[[Any], Any], without: Collection[str] = ()
) -> Any:
    """What equal equations have in common, which can be compared and hashed.

    `of` gives what their variables have in common; literals are equal by value, and
    programs by their `form`. What has none of its own is equal to itself alone.
    Parameters of the names in `without` do not count.
    """
    ins = equation.invars
    operands = tuple(of(x) if is_variable(x) else _value_of(x) for x in ins)
    params = tuple(
        (name, _form_of(x, without))
        for name, x in sorted(equation.params.items())
        if name not in without
    )
    # What it was traced under: a mesh, a type of computation.
    return equation.primitive, operands, params, id(getattr(equation, "ctx", None))


def _value_of(literal: Any) -> tuple[Any, bytes]:
    """What equal literals have in common."""
    return literal.aval, np.asarray(literal.val).tobytes()


def form(jaxpr: core.Jaxpr, without: Collection[str] = ()) -> Any:
    """What programs have in common that compute the same, whatever their variables."""
    numbers: dict[Any, int] = {}

    def number(x: Any) -> Any:
        return numbers.setdefault(x, len(numbers)) if is_variable(x) else _value_of(x)

    def made(xs: Iterable[Any]) -> Any:
        return tuple((number(x), x.aval) for x in xs)

    given = made((*jaxpr.constvars, *jaxpr.invars))
    equations = [(key_of(e, number, without), made(e.outvars)) for e in jaxpr.eqns]
    return given, tuple(equations), tuple(map(number, jaxpr.outvars))


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
