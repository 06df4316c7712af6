"""Programs as JAX traces them: how to read one, to run it, and to change it.

`core.Jaxpr` is data. This module alone knows the names of primitives that hold other
programs, and the names of their parameters, which change between versions of JAX.

    calls, inner, scan_of      what is inside an equation, and how it runs it
    expanded                   the program of a primitive that JAX writes in JAX
    in_two                     a reshape that transposes, as two equations
    chosen                     the branch of a conditional that the platform decides
    with_constants             a program with arguments that are constants
    without_constants          the reverse
    closing_over               a program with other constants and arguments
    within, equations          all equations, those of inner programs too
    axes_of                    which named axes an equation refers to
    is_mark                    what `checkpoint_name` marks
    acts, silent               whether one checks, prints or calls back; without that
    uses, uses_inside          who reads a variable; functions opened, too
    made_by                    who computes a variable (both by an index)
    only_use, num_readers      whether nobody else reads it, the program's results too
    needed, following          what a value takes, and what depends on it
    unrounded, roundings       results before they are rounded, and how they are
    live                       a program without what nobody reads, inside it too
    forwarded                  which argument a result is, if nothing computes it
    results, evaluate, bind    a program or an equation, run on values
    of_some, put               a function of some of its operands alone
    checkpointed, scan         checkpoints and loops of other functions
    key_of, form               what equal equations, or programs, have in common
    changed, with_inner        a program with other equations, or other inner programs
    renamed                    equations with other variables
    retyped                    a program with variables of other types
    program_of                 what a Python function computes
    traced                     equations that compute what a Python function does
    name_of                    what an equation does, in a word for people
    numbers, computed          how large an array is, and all that an equation computes
    as_of                      has what is traced name the line of an equation
"""

import collections
import contextlib
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

from ga_optax._passes import primitives

# What runs its program once, as if that stood there itself.
INLINE = ("call", "checkpoint")
# Also what runs it slice by slice: arguments and results are those of the program.
THROUGH = (*INLINE, "scan")


class Program(NamedTuple):
    """A program and the values of its constants."""

    jaxpr: core.Jaxpr
    consts: Sequence[Any] = ()


def program_of(fun: Callable[..., Any], *types: Any) -> Program:
    """What a function computes of arguments of these types."""
    closed: Any = jax.make_jaxpr(fun)(*types)
    return Program(closed.jaxpr, closed.consts)


def traced_before(jaxpr: core.Jaxpr, consts: Sequence[Any]) -> Program:
    """A program that JAX traced and keeps, such as that of a rule, and its constants.

    In newer JAX they are the first of its arguments.
    """
    number = len(consts) - len(jaxpr.constvars)
    return Program(with_constants(jaxpr, number) if number else jaxpr, consts)


def without_values(jaxpr: Any) -> core.Jaxpr:
    """The program alone; newer JAX holds the values of its constants in it, too.

    Whoever keeps a program for later would keep tracers that end before.
    """
    held = getattr(jaxpr, "consts", ())
    return jaxpr.with_consts([None] * len(held)) if held else jaxpr


def with_constants(jaxpr: core.Jaxpr, number: int) -> core.Jaxpr:
    """The same program, of which so many of the first arguments are constants, too."""
    variables = [*jaxpr.constvars, *jaxpr.invars[:number]]
    values = [None] * len(variables)
    return closing_over(jaxpr, variables, values, jaxpr.invars[number:])


def without_constants(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The same program, whose constants are its first arguments."""
    return closing_over(jaxpr, [], [], [*jaxpr.constvars, *jaxpr.invars])


def closing_over(
    jaxpr: core.Jaxpr, constants: Sequence[Any], values: Sequence[Any], invars: Any
) -> core.Jaxpr:
    """The same program with other constants and arguments."""
    # In newer JAX a program holds the values of its constants, too.
    more = {"consts": values} if hasattr(jaxpr, "consts") else {}
    return jaxpr.replace(constvars=constants, invars=invars, **more)


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


def expanded(equation: core.JaxprEqn) -> Program | None:
    """What a primitive computes that is written in JAX itself, if it can be read."""
    primitive = equation.params.get("_prim")
    if not hasattr(primitive, "expand") or not hasattr(primitive, "in_tree"):
        return None
    avals: list[Any] = [x.aval for x in equation.invars]
    types = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in avals]

    def run(*leaves: Any) -> Any:
        return primitive.expand(*jax.tree.unflatten(primitive.in_tree, leaves))

    return program_of(run, *types)


def in_two(equation: core.JaxprEqn) -> Program | None:
    """A reshape that transposes first, as one of `order="F"` does; or None."""
    order = equation.params.get("dimensions")
    if equation.primitive.name != "reshape" or order is None:
        return None

    shape = equation.params["new_sizes"]

    def run(x: jax.Array) -> jax.Array:
        return jax.lax.reshape(jax.lax.transpose(x, order), shape)

    return program_of(run, equation.invars[0].aval)


def chosen(equation: core.JaxprEqn, which: core.JaxprEqn | None) -> Program | None:
    """The branch of a conditional that is taken, if that is known; `which` computes it.

    JAX has branches for the kernels of an accelerator, where none of ours is written.
    """
    platforms: Any = which.params.get("platforms") if which else None
    if platforms is None:
        return None
    pairs = zip(inner(equation), platforms, strict=True)
    left = [branch for branch, names in pairs if set(names or ("",)) - {"mosaic"}]
    return left[0] if len(left) == 1 else None


# -- What is inside an equation --------------------------------------------------------


def kind(equation: core.JaxprEqn) -> str | None:
    """How it runs what is inside it: one of `CALLS`; None for anything else."""
    kind = primitives.row_of(equation).kind
    return kind if kind in primitives.CALLS else None


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
    return not all(map(_is_of_values, equation.effects))


def _is_of_values(effect: Any) -> bool:
    return any(x.__name__ in _OF_VALUES for x in type(effect).__mro__)


def silent(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program without the equations that act and return nothing."""
    eqns = [silent_equation(e) for e in jaxpr.eqns if e.outvars or not acts(e)]
    return jaxpr.replace(eqns=eqns, effects=_of_values(jaxpr))


def silent_equation(equation: core.JaxprEqn) -> core.JaxprEqn:
    """The equation without what acts inside of it, and returns nothing."""
    if not acts(equation):
        return equation
    return with_inner(equation, silent).replace(effects=_of_values(equation))


def _of_values(x: Any) -> Any:
    return type(x.effects)(filter(_is_of_values, x.effects))


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


# -- Variables -------------------------------------------------------------------------


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


def forwarded(jaxpr: core.Jaxpr) -> list[int | None]:
    """Which argument each result is; None if it is computed, as far as is known.

    A checkpoint returns what it only hands on as something new.
    """
    found: dict[Any, int | None] = {x: i for i, x in enumerate(jaxpr.invars)}

    def of(x: Any) -> int | None:
        return found.get(x) if is_variable(x) else None

    for equation in jaxpr.eqns:
        how, every = kind(equation), []
        programs = inner_programs(equation) if how not in (None, "while") else ()
        for program in programs:
            given = list(map(of, operands(equation, program)))
            places = forwarded(program)
            if how == "scan":
                places = list(map(scan_of(equation).kept, range(len(places)), places))
            every.append([None if i is None else given[i] for i in places])
        for out, *its in zip(equation.outvars, *every, strict=bool(every)):
            found[out] = its[0] if len({*its}) == 1 else None
    return list(map(of, jaxpr.outvars))


def unrounded(jaxpr: core.Jaxpr, results: Iterable[int]) -> core.Jaxpr:
    """The program whose numbers among some results come before they are rounded."""
    outvars = list(jaxpr.outvars)
    for i in results:
        outvars[i] = roundings(jaxpr, outvars[i])[0]
    return jaxpr.replace(outvars=outvars)


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


# Parameters that say how functions with rules of their own are differentiated.
DERIVED = frozenset(("jvp_jaxpr_fun", "fwd_jaxpr_thunk", "bwd", "out_trees"))


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


# -- Running a program -----------------------------------------------------------------

# What an equation gives, given its arguments; None to run it as it is.
Rule = Callable[[core.JaxprEqn, list[Any]], Sequence[Any] | None]


def evaluate(program: Program, args: Sequence[Any], rule: Rule) -> list[Any]:
    """The results of a program, equation by equation as `rule` has it."""
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
            ends = equation.invars, equation.outvars
            out = bind(jaxpr, [equation], *ends, values)
        env.update(zip(equation.outvars, out, strict=True))
    return list(map(value, jaxpr.outvars))


def in_the_open(equation: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
    """A rule by which functions and checkpoints run as if they stood there."""
    if not is_inline(equation):
        return None
    [program] = inner(equation)
    return evaluate(program, values, in_the_open)


def results(program: Any, args: Sequence[Any]) -> list[Any]:
    """The results of a program as it is."""
    return jax.core.eval_jaxpr(program.jaxpr, program.consts, *args)


def bind(
    jaxpr: core.Jaxpr,
    equations: Sequence[core.JaxprEqn],
    invars: Sequence[Any],
    outvars: Sequence[Any],
    values: Sequence[Any],
) -> list[Any]:
    """The values of `outvars`, from those of `invars`, by equations of `jaxpr`.

    What is given stays so, if an equation that computes it runs because it prints.
    """
    pairs = zip(invars, values, strict=True)
    known = {v: x for v, x in pairs if not isinstance(v, core.Literal)}
    equations = [_without_results(e, known) for e in equations]
    effects = frozenset().union(*(equation.effects for equation in equations))
    program = jaxpr.replace(
        constvars=[],
        invars=list(known),
        outvars=list(outvars),
        eqns=list(equations),
        effects=effects,
    )
    return jax.core.eval_jaxpr(program, (), *known.values())


def _without_results(equation: core.JaxprEqn, known: Mapping[Any, Any]) -> Any:
    """The equation with other variables in place of results that are known."""
    if known.keys().isdisjoint(equation.outvars):
        return equation
    new = [core.Var(x.aval) if x in known else x for x in equation.outvars]
    return equation.replace(outvars=new)


def of_some(
    fun: Callable[..., Any], xs: Sequence[Any], places: Iterable[int]
) -> Callable[..., Any]:
    """A function of its operands at some places alone; the others are those of `xs`."""
    places = list(places)

    def run(*some: Any) -> Any:
        return fun(*put(xs, places, some))

    return run


def put(xs: Sequence[Any], places: Iterable[int], new: Sequence[Any]) -> list[Any]:
    """The values, with others at some places."""
    return list((dict(enumerate(xs)) | dict(zip(places, new, strict=True))).values())


def checkpointed(equation: core.JaxprEqn, body: Callable[..., Any]) -> Any:
    """`jax.checkpoint` of another function, as an equation has it."""
    keep = {key: equation.params[key] for key in ("prevent_cse", "policy")}
    return jax.checkpoint(body, **keep)


def scan(how: Scan, body: Callable[[list[Any]], Any], values: list[Any]) -> list[Any]:
    """The results of a scan like another one, whose body is `body`."""
    consts, start, slices = how.split(values)

    def step(carry: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
        out = body([*consts, *carry, *slices])
        return list(out[: how.num_carry]), list(out[how.num_carry :])

    carry, stacked = jax.lax.scan(
        step, start, slices, how.length, how.reverse, how.unroll
    )
    return [*carry, *stacked]


# -- Changing a program ----------------------------------------------------------------


def renamed(
    equations: Iterable[core.JaxprEqn], known: Mapping[Any, Any]
) -> list[core.JaxprEqn]:
    """Equations with other variables, or literals, in place of those in `known`."""
    return [
        e.replace(invars=rename(e.invars, known), outvars=rename(e.outvars, known))
        for e in equations
    ]


# The equations in place of one, given its operands and its results of other types.
Write = Callable[[core.JaxprEqn, list[Any], list[Any]], Iterable[core.JaxprEqn]]


def retyped(
    jaxpr: core.Jaxpr,
    type_of: Callable[[Any], Any],
    write: Write,
) -> core.Jaxpr:
    """The program with variables and literals of other types, from their types."""
    known: dict[Any, Any] = {}

    def new(x: Any) -> Any:
        if isinstance(x, core.Literal):
            aval = type_of(x.aval)
            return core.Literal(np.asarray(x.val, aval.dtype), aval)
        if x not in known:
            known[x] = core.Var(type_of(x.aval))
        return known[x]

    def all_of(atoms: Iterable[Any]) -> list[Any]:
        return list(map(new, atoms))

    def of_new(effects: Iterable[Any]) -> frozenset[Any]:
        """Those of references name the variable."""
        return frozenset(
            x.replace(input=known[x.input]) if getattr(x, "input", None) in known else x
            for x in effects
        )

    eqns = [
        other.replace(effects=of_new(other.effects))
        for e in jaxpr.eqns
        for other in write(e, all_of(e.invars), all_of(e.outvars))
    ]
    ends = ("constvars", "invars", "outvars")
    new_ends = {end: all_of(getattr(jaxpr, end)) for end in ends}
    return jaxpr.replace(eqns=eqns, effects=of_new(jaxpr.effects), **new_ends)


def changed(
    jaxpr: core.Jaxpr, change: Callable[[core.JaxprEqn], Iterable[core.JaxprEqn]]
) -> core.Jaxpr:
    """The program, with others in place of each equation; itself if none is new."""
    eqns = [new for equation in jaxpr.eqns for new in change(equation)]
    same = len(eqns) == len(jaxpr.eqns) and all(map(operator.is_, eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def rename(atoms: Iterable[Any], known: Mapping[Any, Any]) -> list[Any]:
    """The atoms, with those in `known` replaced."""
    return [x if isinstance(x, core.Literal) else known.get(x, x) for x in atoms]


def with_inner(
    equation: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
    """The equation, with each program inside it changed; itself if none is."""
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


def traced(
    fun: Callable[..., Any], invars: Sequence[Any], result: core.Var, at: core.JaxprEqn
) -> list[core.JaxprEqn]:
    """Equations that compute `result` as `fun` of other values of a program.

    They have the line of the equation `at`.
    """
    jaxpr = program_of(fun, *(x.aval for x in invars)).jaxpr
    known = dict(zip(jaxpr.invars, invars, strict=True)) | {jaxpr.outvars[0]: result}
    new = renamed(jaxpr.eqns, known)
    return [e.replace(source_info=at.source_info) for e in new]


def traced_once(fun: Callable[..., Any], *args: Any) -> tuple[Callable[..., Any], Any]:
    """`fun` as a program that is traced, and the types of its results.

    Where it is called, its equations are run; Python and differentiation are done.
    """
    closed, shapes = jax.make_jaxpr(fun, return_shape=True)(*args)
    structure = jax.tree.structure(shapes)

    def run(*args: Any) -> Any:
        return jax.tree.unflatten(structure, results(closed, jax.tree.leaves(args)))

    return run, jax.tree.unflatten(structure, [x.aval for x in closed.jaxpr.outvars])


@contextlib.contextmanager
def as_of(equation: core.JaxprEqn, outer: Any) -> Iterator[None]:
    """What is traced inside has the equation's line, and its name behind `outer`.

    If JAX knows no line of it, that is the line of the equation around it.
    """
    info = equation.source_info
    has_line = source_info_util.summarize(info)
    lines = (info if has_line else source_info_util.current()).traceback
    names = outer + info.name_stack
    with source_info_util.user_context(lines, name_stack=names):
        yield
