"""Which line of the user's code an equation is from.

JAX knows the calls that led to an equation, from the function that was traced down to
JAX itself. Here the innermost line counts that belongs to nobody's package; if there is
none, the innermost one that belongs to neither JAX nor this library.
"""

import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable
from typing import Any

from jax.extend import core, source_info_util

from ga_optax._passes import read

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_INSTALLED = [f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages")]
_DEEPEST = 100  # calls
_OWN = 2  # how much a line of the user's is one


def in_name_of(fun: Callable[..., Any], run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, of which errors of JAX say that it is `fun`, a function of the user's."""
    signature = inspect.signature(run)
    run = functools.update_wrapper(run, fun, updated=())
    run.__signature__ = signature  # pyrefly: ignore[missing-attribute]
    return run


def line_of(source: Any) -> str:
    """The file, line and function of an equation's source, as far as JAX tells."""
    return _ranked(source)[1] or "code without lines"  # such as an exported program


def short(line: str) -> str:
    """A line of code without the folder of its file."""
    path, *rest = line.split(":")
    return ":".join([os.path.basename(path), *rest])


def place_of(source: Any, around: Any = None) -> str:
    """The line, and beside it the module or the function of a package inside of it.

    Args:
      source: that of an equation.
      around: the names that its program is in; None if its own are all.
    """
    line = line_of(source)
    names = source.name_stack if around is None else around
    names = _LABEL.sub("", str(names))
    # The names of transformations alone, such as `vmap()`, are no place.
    inside = re.sub(r"\w+\(\)", "", str(names)).strip("/") or _function(source)
    return f"{line}, in {inside}" if inside else line


_LABEL = re.compile(r"/?\{(\S+): ([^{}]*)\}")  # a name of a primitive, with a text


def labelled(equation: core.JaxprEqn, text: str) -> core.JaxprEqn:
    """An equation with a text for people, which stays with it through all passes."""
    source = equation.source_info
    name = f"{{{equation.primitive.name}: {text}}}"
    source = source.replace(name_stack=source.name_stack.extend(name))
    return equation.replace(source_info=source)


def label_of(equation: core.JaxprEqn) -> str:
    """That text, not one of an equation around it; or nothing."""
    pairs = _LABEL.findall(str(equation.source_info.name_stack))
    texts = [text for name, text in pairs if name == equation.primitive.name]
    return texts[-1] if texts else ""


def type_of(aval: Any) -> str:
    """The dtype and the shape of a value, for people."""
    return f"{aval.dtype}[{','.join(map(str, aval.shape))}]"


def _function(source: Any) -> str:
    """The innermost function of a package that a line of the user's code calls."""
    rank, line = _ranked(source)
    innermost = _frames(source)[0] if rank == _OWN else line
    return innermost.rpartition("(")[2].rstrip(")") if innermost != line else ""


def placed(equation: core.JaxprEqn, around: Any) -> core.JaxprEqn:
    """An equation with the source of the one around it, if that is the user's code.

    Args:
      equation: the equation.
      around: the source of the one whose program it is in; None if there is none.

    A function of JAX's that is jitted, such as `jnp.var`, knows nothing of its caller.
    What has no line, such as a loss that is a checkpoint, has the last one in it.
    """
    source, programs = equation.source_info, read.inner_programs(equation)
    others = [] if around is None else [around]
    if not (others or programs):
        return equation
    if not (own := _ranked(source)[0]):
        inside = itertools.chain(*map(read.equations, programs))
        others += [e.source_info for e in inside][::-1]
    found = next((x for x in others if _ranked(x)[0] > own), None)
    if found is None:
        return equation
    here = source.replace(traceback=found.traceback)
    return equation.replace(source_info=here)


def _ranked(source: Any) -> tuple[int, str]:
    """How much a line of the user's code it is, and that line."""
    known = _frames(source)
    own = [x for x in known if not any(part in x for part in _INSTALLED)]
    return (_OWN, own[0]) if own else (1, known[0]) if known else (0, "")


def _frames(source: Any) -> list[str]:
    """The calls that led to an equation but JAX's and ours; the innermost first."""
    try:
        calls = source_info_util.summarize(source, _DEEPEST).splitlines()[::-1]
    except Exception:  # Any: they only add to messages.
        return []
    return [x for x in calls if x and not x.startswith(_OURS)]
