"""Places: the line of the user's code that an equation or an error comes from.

JAX knows the calls that led to an equation, from the function that was traced down to
JAX itself. The line is the innermost one outside of installed packages; or, if there
is none, the innermost one outside of JAX and this library. The log names such lines.
"""

import contextlib
import contextvars
import functools
import inspect
import itertools
import logging
import os
import re
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import jax
import jaxlib
import numpy as np
from jax.extend import core, source_info_util

from . import jaxprs

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


def looked_at(run: Callable[..., Any], *args: Any) -> tuple[Any, Exception | None]:
    """`run(*args)`, or the error, where code of the user's runs to see what it does.

    Such as a rule, which JAX may never run: who calls raises the error where JAX does.
    """
    try:
        return run(*args), None
    except Exception as error:
        return None, error


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


def is_inside(equation: core.JaxprEqn, function: Any) -> bool:
    """True if a function of JAX made the equation."""
    code = inspect.unwrap(function).__code__
    frames = getattr(equation.source_info.traceback, "frames", ())
    of_code = (code.co_filename, code.co_name)
    return any((x.file_name, x.function_name) == of_code for x in frames)


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
    # They only add to messages, so what raises is no line.
    lines, _ = looked_at(lambda: source_info_util.summarize(source, _DEEPEST))
    calls = (lines or "").splitlines()[::-1]
    return [x for x in calls if x and not x.startswith(_OURS)]


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
