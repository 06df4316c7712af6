"""Knowledge about a program, and sentences about it.

The line of the user's code of each equation; sentences for the log; side effects, which
say whether equations may move, and mutable arrays, whose order no variable tells;
sharding constraints; the facts of the call that passes need; and whether this JAX
writes programs as they are read here.
"""

import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import itertools
import logging
import operator
import os
import re
import sysconfig
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import jaxlib
import numpy as np
from jax.extend import core, source_info_util
from jax.sharding import NamedSharding, PartitionSpec

from .._devices import meshes
from .._devices.meshes import DeviceContext
from . import jaxprs, primitives
from .primitives import ADD_TO, CAST, NEW_REF, PRODUCT, READ_OUT, WRITE

# == Places ============================================================================
# The line of the user's code from which an equation is, or an error.
#
# JAX knows the calls that led to an equation, from the function that was traced down to
# JAX itself. The line is the innermost one outside of installed packages; or, if there
# is none, the innermost one outside of JAX and this library.

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INSTALLED = [f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")]
# Code that both the user's code and ours call. Packages lie within the second of these.
_BETWEEN = tuple(os.path.dirname(x.__file__) + os.sep for x in (jax, jaxlib, np))
_PYTHON = "<frozen ", sysconfig.get_path("stdlib") + os.sep
_DEEPEST = 100  # calls
_USERS = 2  # the rank of a line of the user's; 1 is that of another package


def in_name_of(fun: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run` with the name that errors of JAX print for `fun`, the user's function."""
    signature = inspect.signature(run)
    run = functools.update_wrapper(run, fun, updated=())
    run.__signature__ = signature  # pyrefly: ignore[missing-attribute]
    return run


def is_of_user(error: Exception) -> bool:
    """True if an error came out of the user's code, or is what JAX says of numbers.

    The innermost code that is neither JAX's nor Python's raised the error, if only by
    a call of JAX. Code of other packages, such as a rule of Flax, is the user's.
    """
    if of_numbers(error) is not None:
        return True
    file, _ = raised_at(error)
    return bool(file) and not file.startswith(_OURS)


def of_numbers(error: Exception) -> Exception | None:
    """The error by which JAX says that numbers are wrong; None for another error.

    Where an equation of `jit` runs outside of `jit`, and no function of the user's, JAX
    raises an error that it means to catch itself.
    """
    if type(error).__name__ == "InternalFloatingPointError":
        name, kind = error.args
        return FloatingPointError(f"invalid value ({kind}) encountered in {name}")
    return error if isinstance(error, _OF_NUMBERS) else None


def raised_at(error: Exception) -> tuple[str, int]:
    """The file and line at which code that is neither JAX's nor Python's raised.

    It is the innermost of such code; without any, the name of the file is empty.
    """
    calls = traceback.walk_tb(error.__traceback__)
    some = [(x.f_code.co_filename, n) for x, n in calls if not _is_between(x)]
    return some[-1] if some else ("", 0)


# The checks of `jax_debug_nans`, what a program raises where it runs, and no memory.
_OF_NUMBERS = FloatingPointError, jax.errors.JaxRuntimeError, MemoryError


def _is_between(frame: Any) -> bool:
    """True if a call is of the code of JAX, of NumPy or of Python itself."""
    path = frame.f_code.co_filename
    is_installed = any(part in path for part in _INSTALLED)
    return path.startswith(_BETWEEN) or (path.startswith(_PYTHON) and not is_installed)


def line_of(source: Any) -> str:
    """The file, line and function of an equation's source, as far as JAX knows."""
    return _ranked(source)[1] or "code without lines"  # such as an exported program


def short_line(line: str) -> str:
    """A line of code without the folder of its file; "cell" for one of a notebook."""
    path, *rest = line.split(":")
    folder, name = os.path.split(path)
    in_cell = "ipykernel_" in folder or name.startswith("<ipython-input")
    return ":".join(["cell" if in_cell else name, *rest])


def place_of(source: Any, around: Any = None) -> str:
    """The line, and the module, or the function of a package, that the line calls.

    Args:
      source: the source of an equation.
      around: the names of the program around; None to use the equation's names alone.
    """
    line = line_of(source)
    names = source.name_stack if around is None else around
    names = _LABEL.sub("", str(names))
    # The names of transformations alone, such as `vmap()`, are no place.
    inside = re.sub(r"\w+\(\)", "", str(names)).strip("/") or _function(source)
    return f"{line}, in {inside}" if inside else line


_LABEL = re.compile(r"/?\{(\S+): ([^{}]*)\}")  # a name of a primitive, with a text


def labelled(equation: core.JaxprEqn, text: str) -> core.JaxprEqn:
    """The equation with a text for people, which all passes keep."""
    source = equation.source_info
    name = f"{{{equation.primitive.name}: {text}}}"
    source = source.replace(name_stack=source.name_stack.extend(name))
    return equation.replace(source_info=source)


def label_of(equation: core.JaxprEqn) -> str:
    """The text of an equation, without those of the equations around; else ""."""
    pairs = _LABEL.findall(str(equation.source_info.name_stack))
    texts = [text for name, text in pairs if name == equation.primitive.name]
    return texts[-1] if texts else ""


def type_in_words(aval: Any) -> str:
    """The dtype and the shape of a value, for people."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _function(source: Any) -> str:
    """The innermost function of a package that a line of the user's code calls."""
    rank, line = _ranked(source)
    innermost = _frames(source)[0] if rank == _USERS else line
    return innermost.rpartition("(")[2].rstrip(")") if innermost != line else ""


def better_placed(equation: core.JaxprEqn, around: Any) -> core.JaxprEqn:
    """The equation with a better source: that of the equation around, `around`, if any.

    A jitted function of JAX, such as `jnp.var`, has no line of its caller. An equation
    without a line, such as a loss that is a checkpoint, gets the last line inside.
    """
    source, programs = equation.source_info, jaxprs.inner_programs(equation)
    others = [] if around is None else [around]
    if not (others or programs):
        return equation
    if not (rank := _ranked(source)[0]):
        inside = itertools.chain(*map(jaxprs.equations, programs))
        others += [e.source_info for e in inside][::-1]
    better = next((x for x in others if _ranked(x)[0] > rank), None)
    if better is None:
        return equation
    return equation.replace(source_info=source.replace(traceback=better.traceback))


def _ranked(source: Any) -> tuple[int, str]:
    """The rank of the best line of a source, and the line: the user's come first."""
    lines = _frames(source)
    users = [x for x in lines if not any(part in x for part in _INSTALLED)]
    return (_USERS, users[0]) if users else (1, lines[0]) if lines else (0, "")


def _frames(source: Any) -> list[str]:
    """The calls that led to an equation but JAX's and ours, the innermost first."""
    try:
        calls = source_info_util.summarize(source, _DEEPEST).splitlines()[::-1]
    except Exception:  # Any: they only add to messages.
        return []
    return [x for x in calls if x and not x.startswith(_OURS)]


# == The log ===========================================================================

Item = TypeVar("Item")
_MAX_PLACES = 4  # in one sentence

_logger = logging.getLogger("ga_optax")
_notes: contextvars.ContextVar[list[str]] = contextvars.ContextVar("_notes")
_unchanged: contextvars.ContextVar[list[tuple[str, str]]]
_unchanged = contextvars.ContextVar("_unchanged")


def log_sentence(sentence: str, level: int = logging.DEBUG) -> None:
    """Logs a sentence about the program of a window, and hands it to `recordings`."""
    _logger.log(level, "%s", sentence)
    notes = _notes.get([])
    if sentence not in notes:
        notes.append(sentence)


def is_heard(level: int) -> bool:
    """True if a sentence of this level is logged, or recorded."""
    return _logger.isEnabledFor(level) or _notes.get(None) is not None


@contextlib.contextmanager
def listed(variable: contextvars.ContextVar[list[Item]]) -> Iterator[list[Item]]:
    """A new list, which the variable holds inside of the context."""
    items: list[Item] = []
    token = variable.set(items)
    try:
        yield items
    finally:
        variable.reset(token)


def recordings() -> contextlib.AbstractContextManager[list[str]]:
    """The list of all sentences that are logged inside of the context, each once."""
    return listed(_notes)


_batches: contextvars.ContextVar[list[int]] = contextvars.ContextVar("_batches")


def seen_batches() -> contextlib.AbstractContextManager[list[int]]:
    """The list of the rows of each batch whose gradient is traced in the context."""
    return listed(_batches)


def note_batch(rows: Any) -> None:
    """Adds a number of rows to `seen_batches`, unless `jax.export` leaves it open."""
    if isinstance(rows, int):
        _batches.get([]).append(rows)


def left_alone(equation: core.JaxprEqn, why: str) -> None:
    """Notes that the current pass does not change an equation, and why."""
    _unchanged.get([]).append((why, line_of(equation.source_info)))


@contextlib.contextmanager
def log_of_pass(name: str) -> Iterator[None]:
    """Logs the equations that a pass leaves alone, by reason and with their lines."""
    with listed(_unchanged) as pairs:
        yield
    for why, lines in by_reason(pairs):
        log_sentence(f"The pass {name!r} leaves alone {lines} ({why}).")


def by_reason(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each reason, and a text that names the first places with this reason."""
    groups: dict[str, dict[str, None]] = {}
    for why, place in pairs:
        groups.setdefault(why, {})[place] = None
    return [(why, _some(list(places))) for why, places in groups.items()]


def _some(places: list[str]) -> str:
    rest = len(places) - _MAX_PLACES
    return ", ".join(places[:_MAX_PLACES]) + (f" and {rest} more" if rest > 0 else "")


# == Known primitives and side effects =================================================
# Primitives that passes know, and the side effects of programs.
#
# A pass changes equations of known primitives alone, and leaves the others where they
# are. An unknown primitive may have any backward rule: so it is differentiated by
# itself to see if the rule prints, calls back or communicates.

_CUSTOM_JVP = "custom_jvp_call"  # JAX runs the rule when it differentiates
_READ = ("", "open", *primitives.PROGRAM_KINDS)


def hidden_kind(name: str) -> str | None:
    """The kind of code that a primitive hides; None for code that can be read."""
    kind = primitives.TABLE.get(name, primitives.UNKNOWN).kind
    return None if kind in _READ or not name.isidentifier() else kind


def hides(equation: core.JaxprEqn) -> str | None:
    """The name of a primitive in an equation that hides its code, or None.

    An equation without results, such as a check, does not count: nothing depends on it.
    """
    names = (e.primitive.name for e in jaxprs.within(equation) if e.outvars)
    return next(filter(hidden_kind, names), None)


def constrained_to(equation: core.JaxprEqn) -> Any:
    """The sharding that a constraint asks for; None for other equations."""
    is_constraint = equation.primitive.name == primitives.CONSTRAINT
    return equation.params.get("sharding") if is_constraint else None


def has_rule(equation: core.JaxprEqn) -> bool:
    """True if an equation, or one inside it, has a backward rule of the user's."""
    rules = ("custom_vjp_call", "linear_call")
    return any(e.primitive.name in rules for e in jaxprs.within(equation))


def has_rules(jaxpr: core.Jaxpr) -> bool:
    """True if functions in a program have rules of their own."""
    rules = ("custom_vjp_call", _CUSTOM_JVP)
    return any(e.primitive.name in rules for e in jaxprs.equations(jaxpr))


def is_known(equation: core.JaxprEqn) -> bool:
    """True if a pass may move an equation: it and all equations inside are known."""
    return all(
        not e.effects
        and (is_built_in(e) or jaxprs.kind(e) or e.primitive.name == _CUSTOM_JVP)
        for e in jaxprs.within(equation)
    )


def is_built_in(equation: core.JaxprEqn) -> bool:
    """True for a primitive of `jax.lax` that does nothing but compute."""
    return not (equation.effects or primitives.entry_of(equation).kind)


# -- Side effects ----------------------------------------------------------------------


class Reason(NamedTuple):
    """The reason why a program is not changed, and the line of the user's code."""

    why: str
    line: str = ""


class SideEffects(NamedTuple):
    """Reasons why a program may do more than compute results and gradients.

    Attributes:
      reordering: why effects could come in another order; None if they cannot.
      nonlinear_backward: why the gradient may not scale with the cotangent, or None.
      of_rules: the effects of backward rules of the user's.
    """

    reordering: Reason | None = None
    nonlinear_backward: Reason | None = None
    of_rules: frozenset[Any] = frozenset()

    def __or__(self, other: Any) -> "SideEffects":
        return SideEffects(
            self.reordering or other.reordering,
            self.nonlinear_backward or other.nonlinear_backward,
            self.of_rules | other.of_rules,
        )


_side_effects: Any = weakref.WeakKeyDictionary()  # by program, then by operands


def side_effects(jaxpr: core.Jaxpr, start: frozenset[Any] | None = None) -> SideEffects:
    """The side effects of a program and of its backward pass.

    Operands in `start` can have a tangent; all, if it is None.
    """
    known = _side_effects.setdefault(jaxpr, {})
    if start not in known:
        can_move = functools.cache(lambda: moving(jaxpr, start))
        own = (e for e in jaxpr.eqns if not is_built_in(e))
        effects = (_effects_of(jaxpr, e, can_move) for e in own)
        known[start] = functools.reduce(operator.or_, effects, SideEffects())
    return known[start]


def _effects_of(
    jaxpr: core.Jaxpr, equation: core.JaxprEqn, can_move: Callable[[], set[Any]]
) -> SideEffects:
    name, line = equation.primitive.name, line_of(equation.source_info)
    if (is_program := jaxprs.kind(equation) is not None) or equation.effects:
        effects = SideEffects()
        for program in jaxprs.inner_programs(equation) if is_program else ():
            asks = has_rules(program)
            start = moving_inside(equation, program, can_move()) if asks else None
            effects |= side_effects(program, start)
        if equation.effects:
            why = "fun prints, calls back or communicates"
            effects |= SideEffects(Reason(why, line))
        return effects
    nonlinear = None
    if name != _CUSTOM_JVP:
        nonlinear = Reason(f"{name} may have a rule of its own", line)
    try:
        effects = backward(jaxpr, equation, can_move()).effects
    except Exception as error:  # Any: the rule is the user's.
        why = f"{name} raises {type(error).__name__} if it is differentiated alone"
        return SideEffects(Reason(why, line), nonlinear)
    why = f"the rule of {name} prints, calls back or communicates"
    reordering = Reason(why, line) if effects else None
    return SideEffects(reordering, nonlinear, frozenset(effects))


def backward(
    jaxpr: core.Jaxpr, equation: core.JaxprEqn, can_move: set[Any]
) -> core.Jaxpr:
    """The program that computes an equation and takes a cotangent back through it.

    It goes back to operands in `can_move` alone: a rule may refuse the others, and if a
    rule raises, JAX forgets the trees of an earlier trace of the rule.
    """
    ins = list(dict.fromkeys(jaxprs.variables(equation.invars)))
    smooth = [i for i, x in enumerate(ins) if x in can_move]
    outs = [x for x in equation.outvars if jaxprs.is_inexact(x)]

    def forward(*values: Any) -> list[Any]:
        return jaxprs.bind(jaxpr, [equation], ins, outs, values)

    def pulled_back(*values: Any) -> Any:
        of_smooth = jaxprs.of_some(forward, values, smooth)
        out, pullback = jax.vjp(of_smooth, *(values[i] for i in smooth))
        return pullback(list(map(jnp.ones_like, out)))

    return jaxprs.program_of(pulled_back, *(x.aval for x in ins)).jaxpr


def moving(jaxpr: core.Jaxpr, start: Iterable[Any] | None = None) -> set[Any]:
    """The variables of a program that can have a tangent, if operands in `start` can.

    Without `start` all operands can, and references always.
    """
    every = [*jaxpr.constvars, *jaxpr.invars]
    found = {x for x in every if jaxprs.is_reference(x)}
    found |= {x for x in (every if start is None else start) if jaxprs.is_inexact(x)}
    for e in jaxpr.eqns:
        ins = jaxprs.variables(e.invars)
        if e.primitive.name != "stop_gradient" and not found.isdisjoint(ins):
            found |= {x for x in e.outvars if jaxprs.is_inexact(x)}
            # What is written to a reference may be read later.
            found |= {x for x in [*ins, *e.outvars] if jaxprs.is_reference(x)}
    return found


def moving_inside(
    equation: core.JaxprEqn, program: core.Jaxpr, can_move: set[Any]
) -> frozenset[Any] | None:
    """The operands of a program inside that can have a tangent; None in a loop.

    `can_move` are the variables around the equation that can have one.
    """
    if jaxprs.kind(equation) not in (*jaxprs.INLINE, "cond"):
        return None
    pairs = zip(jaxprs.operands(equation, program), program.invars, strict=True)
    return frozenset(x for outer, x in pairs if jaxprs.is_among(outer, can_move))


# == References ========================================================================
# References: mutable arrays that a program makes (`jax.new_ref`).
#
#     r = new_ref x;  r[0] <- y;  z = r[...]    ->    z = jit(the same)(x, y)
#
# Equations over one reference must stay in order, and all run equally often, but no
# variable between them says so. So code that reorders or repeats equations gets them as
# one equation: a jitted function that nobody opens.


def references_grouped(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program with one equation for all that touch references it makes."""
    made = any(jaxprs.is_reference(x) for e in jaxpr.eqns for x in e.outvars)
    return _with_group(jaxpr) if made else jaxpr


def is_reference_group(equation: core.JaxprEqn) -> bool:
    """True for a jitted function whose own equations touch references."""
    programs = (
        jaxprs.inner_programs(equation) if jaxprs.kind(equation) == "call" else ()
    )
    return any(_touches(e) for program in programs for e in program.eqns)


def references_inside(equation: core.JaxprEqn) -> bool:
    """True if an equation, or one inside it, touches references."""
    return any(map(_touches, jaxprs.within(equation)))


def check_own_references(jaxpr: core.Jaxpr) -> None:
    """Raises if a program reads or writes a reference from outside."""
    if any(map(jaxprs.is_reference, (*jaxpr.constvars, *jaxpr.invars))):
        raise TypeError(
            "With value_and_grad micro-batches run more than once, so fun must not "
            "read or write a reference (jax.new_ref) from outside of it, but it does. "
            "Pass the value of the reference, ref[...], return what is new as aux, and "
            "write it after the call. A reference that fun makes itself is fine."
        )


def _touches(equation: core.JaxprEqn) -> bool:
    return any(map(jaxprs.is_reference, (*equation.invars, *equation.outvars)))


def _with_group(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """The program with one equation for all that touch references, or stand between."""
    touching = [e for e in jaxpr.eqns if _touches(e)]
    dependent = jaxprs.following(jaxpr, (x for e in touching for x in e.outvars))
    needed, _ = jaxprs.needed_for(jaxpr, (x for e in touching for x in e.invars))
    between = [e for e in needed if not dependent.isdisjoint(e.outvars)]
    grouped = set(map(id, (*touching, *between)))
    group: list[core.JaxprEqn] = []
    rest: list[core.JaxprEqn] = []
    later: list[core.JaxprEqn] = []
    for e in jaxpr.eqns:
        follows = not dependent.isdisjoint(jaxprs.variables(e.invars))
        (group if id(e) in grouped else later if follows else rest).append(e)
    calls, same = _as_call(jaxpr, group, [*rest, *later])
    return jaxpr.replace(
        eqns=[*rest, *calls, *jaxprs.renamed(later, same)],
        outvars=jaxprs.rename(jaxpr.outvars, same),
    )


def _as_call(
    jaxpr: core.Jaxpr, group: list[core.JaxprEqn], others: list[core.JaxprEqn]
) -> tuple[list[core.JaxprEqn], dict[Any, Any]]:
    """A jitted function of a group, and results that are operands, by variable."""
    ends = {*jaxprs.variables(jaxpr.outvars)}
    ends.update(x for e in others for x in jaxprs.variables(e.invars))
    outvars = dict.fromkeys(x for e in group for x in e.outvars)
    invars = dict.fromkeys(x for e in group for x in jaxprs.variables(e.invars))
    inputs = [x for x in invars if x not in outvars]
    results = [x for x in outvars if x in ends]

    def plain(*values: Any) -> list[Any]:
        return jaxprs.bind(jaxpr, group, inputs, results, values)

    program = jaxprs.program_of(jax.jit(plain), *(x.aval for x in inputs)).jaxpr
    known = dict(zip(program.invars, inputs, strict=True))
    pairs = list(zip(program.outvars, results, strict=True))
    same = {result: known[x] for x, result in pairs if x in known}
    known |= {x: result for x, result in pairs if x not in known}
    calls = [e.replace(source_info=group[0].source_info) for e in program.eqns]
    return jaxprs.renamed(calls, known), same


# == Sharding constraints ==============================================================
# Sharding constraints where some axes of their mesh are bound.
#
# A model constrains its activations on the whole mesh. Where a program runs on one
# device of some axes (in a `jax.shard_map`), a constraint on these axes already holds,
# and goes. A constraint on the other axes stays.


def constraints_without(jaxpr: core.Jaxpr, axes: meshes.Axes) -> core.Jaxpr:
    """The program without constraints on `axes`, to run inside their `shard_map`."""
    if not axes:
        return jaxpr

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        place = constrained_to(equation)
        if isinstance(place, NamedSharding):
            equation = _without(equation, place, axes)
        return [
            jaxprs.with_inner(equation, lambda inner: constraints_without(inner, axes))
        ]

    return jaxprs.changed(jaxpr, change)


def _without(
    equation: core.JaxprEqn, place: NamedSharding, axes: meshes.Axes
) -> core.JaxprEqn:
    mesh = jax.sharding.get_abstract_mesh()
    spec = PartitionSpec(*(entry_without(entry, axes) for entry in place.spec))
    sharding = NamedSharding(mesh, spec)
    [out] = equation.outvars
    return constraint_on(equation.invars[0], out, sharding, equation)


def entry_without(entry: Any, axes: meshes.Axes) -> Any:
    """An entry of a spec without some axes."""
    if entry is PartitionSpec.UNCONSTRAINED:
        return entry
    names = meshes.names_in(entry)
    return meshes.as_entry(tuple(name for name in names if name not in axes))


def constraint_on(
    x: Any, result: core.Var, sharding: NamedSharding, at: core.JaxprEqn
) -> core.JaxprEqn:
    """An equation that constrains `x` to a sharding."""

    def constrained(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding)

    [equation] = jaxprs.traced(constrained, [x], result, at)
    return equation


# == Facts of the call =================================================================


class Facts(NamedTuple):
    """Facts about a call.

    Attributes:
      devices: the devices; parameters are the program's first arguments.
      adds_in_place: True if gradients may be added inside the backward pass.
      sliced: for each sum of gradients (the first results), True if the sum can be
        added slice by slice. Otherwise a stack of slices exists as a whole, and stays
        in low precision.
      rounds_once: True if gradients are rounded in those sums alone.
    """

    devices: DeviceContext = DeviceContext()
    adds_in_place: bool = False
    sliced: Sequence[bool] = ()
    rounds_once: bool = False


# == Probe =============================================================================
# A check that this version of JAX writes programs as the passes read them.
#
# A small program with all primitives is traced once in a process. If a primitive has
# another name, or lacks a parameter, calls run the plain loop, and a warning says so.

# Parameters that the passes read or give, by primitive.
PARAMETERS = {
    "scan": ("length", "reverse", "unroll"),
    "jit": ("in_shardings", "out_shardings", "in_layouts", "donated_invars", "inline"),
    "remat2": ("prevent_cse", "policy"),
    PRODUCT: ("dimension_numbers", "precision", "preferred_element_type"),
    CAST: ("new_dtype", "weak_type", "sharding"),
    "broadcast_in_dim": ("shape", "broadcast_dimensions", "sharding"),
    **dict.fromkeys((NEW_REF, ADD_TO, WRITE, READ_OUT), ()),
}


@functools.cache
def usable() -> bool:
    """True if programs can be changed; warns if not."""
    missing = differences()
    if missing:
        warnings.warn(
            f"ga_optax changes no program with jax {jax.__version__}, which lacks "
            f"{', '.join(missing)}. Calls run the plain loop, which takes more memory, "
            "and groupings agree to rounding only. Use a newer ga_optax; "
            "optimize=False runs the same loop without this warning.",
            stacklevel=2,
        )
    return not missing


def differences() -> list[str]:
    """The names and parameters in `PARAMETERS` that this JAX does not have.

    The program is traced in another thread, which no context of the caller reaches: in
    the context of a mesh the program would have other types, or fail.
    """
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_differences).result()


def _differences() -> list[str]:
    try:
        with jax.disable_jit(False), jax.numpy_dtype_promotion("standard"):
            equations = list(jaxprs.equations(_probe_program()))
        by_name: dict[str, Any] = {e.primitive.name: e for e in equations}
        missing = []
        for name, parameters in PARAMETERS.items():
            if name not in by_name:
                missing.append(f"the primitive {name}")
            else:
                params = by_name[name].params
                missing += [
                    f"{name}'s parameter {x}" for x in parameters if x not in params
                ]
        if not missing:
            scan = jaxprs.scan_of(by_name["scan"])
            roles = scan.num_consts, scan.num_carry, len(scan.body.jaxpr.invars)
            if roles != (1, 1, 3):
                missing = ["a scan's arguments in the order (consts, carry, slices)"]
    except Exception as error:  # Any: what it will be is not known.
        missing = [f"something that raises {type(error).__name__}: {error}"]
    return missing


def _probe_program() -> Any:
    """A program with every primitive of `PARAMETERS` in it."""

    @jax.jit
    def scanned(w: Any, x: Any, scale: Any) -> Any:
        @jax.checkpoint
        def layer(h: Any, w: Any) -> Any:
            return h @ w.astype(h.dtype) * jnp.broadcast_to(scale, h.shape), None

        return jax.lax.scan(layer, x, w)[0]

    def loss(w: Any, x: Any, scale: Any) -> Any:
        ref = jax.new_ref(scanned(w, x, scale))
        ref[...] = x
        jax.ref.addupdate(ref, ..., x)
        return jax.ref.freeze(ref)

    shapes = ((1, 2, 2), jnp.bfloat16), ((2, 2), jnp.float32), ((), jnp.float32)
    program: Any = jax.make_jaxpr(loss)(*(jax.ShapeDtypeStruct(*x) for x in shapes))
    return program.jaxpr
