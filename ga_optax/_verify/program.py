"""What the program of the loss shows, without running it.

Some mistakes are in the undivided batch's gradient and in its parts' alike, so no
comparison of numbers finds them. The program that JAX traces does.
"""

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.extend import core

from ga_optax._passes import ir, references
from ga_optax._verify.problem import Problem

_DRAWS = ("random_", "threefry", "rng_")  # how the names of their primitives begin
_SAME_VALUE = ("convert_element_type", "copy", "copy_p")


def warnings(problem: Problem) -> tuple[str, ...]:
    """What is wrong with a loss although the gradients may be equal, in sentences."""
    program = _traced(problem)
    found = _ignored_batch(problem, program), _division_by_k(problem, program.jaxpr)
    return tuple(filter(None, found))


def draws_random_numbers(problem: Problem) -> bool:
    """Whether the program of the loss draws random numbers with JAX."""
    names = (e.primitive.name for e in ir.equations(_traced(problem).jaxpr))
    return any(name.startswith(_DRAWS) for name in names)


def depends_on_device_count(problem: Problem) -> bool:
    """Whether the loss is another one if the process has another number of devices."""
    other = problem.k if jax.device_count() != problem.k else 1
    try:
        with _device_count(other) as calls:
            program = _traced(problem)
    except Exception:
        return False  # Any: the code is the user's, and may refuse that number.
    return bool(calls) and _shape(program) != _shape(_traced(problem))


def _traced(problem: Problem) -> Any:
    """The program of the loss of the first micro-batch, or of all if it runs so.

    Functions that it calls, and checkpoints, are in the open.
    """
    fun, name = problem.fun, problem.axis_name
    if isinstance(fun, jax.stages.Wrapped):
        fun = getattr(fun, "__wrapped__", fun)  # JAX remembers what it has traced.
    axes = [] if name is None else [(name, problem.k)]
    with jax.enable_x64(problem.x64):
        batch = problem.batch
        if not problem.whole_batch:
            batch = problem.take(batch, problem.rows(0))
        args = problem.params, batch, *problem.keys(0)
        program: Any = jax.make_jaxpr(lambda *x: fun(*x), axis_env=axes)(*args)

        def opened(*leaves: Any) -> list[Any]:
            return ir.evaluate(program, leaves, ir.in_the_open)

        return jax.make_jaxpr(opened, axis_env=axes)(*jax.tree.leaves(args))


# -- A loss that does not use its batch ------------------------------------------------


def _ignored_batch(problem: Problem, program: Any) -> str:
    first = len(jax.tree.leaves(problem.params))
    number = len(jax.tree.leaves(problem.batch))
    batch = program.jaxpr.invars[first : first + number]
    jaxpr = references.grouped(program.jaxpr)
    _, read = ir.needed(jaxpr, jaxpr.outvars, set(batch).__contains__)
    if problem.k == 1 or read:
        return ""
    shapes = {np.shape(x) for x in program.consts}
    data = sorted(shape for shape in shapes if problem.batch_size in shape)
    of = f", of shape {data[-1]} for example," if data else ""
    return f"""The loss does not use its batch. Each of the {problem.k} micro-batches
        computes the same, which takes {problem.k} times the time and saves no memory.
        Most likely the loss closes over the data{of} instead of reading it from its
        batch argument."""


# -- A loss that is divided by the number of micro-batches -----------------------------


def _division_by_k(problem: Problem, jaxpr: core.Jaxpr) -> str:
    k = problem.k
    # A half belongs to many losses.
    if k <= 2 or not _ends_with_division(jaxpr, k):
        return ""
    return f"""The last operation of the loss divides it by {k}, which is the number of
        micro-batches. PyTorch needs that division, but ga_optax divides itself: remove
        it, unless it has another reason. Both gradients have this factor, so they do
        not differ by it."""


def _ends_with_division(jaxpr: core.Jaxpr, k: int) -> bool:
    """Whether the result is a mean, or another scalar but a sum, over a literal k."""
    last = _made_by(jaxpr, jaxpr.outvars[0])
    if last is None or last.primitive.name != "div":
        return False
    total, number = last.invars
    of = _made_by(jaxpr, total)
    # The division of a sum makes the mean itself.
    is_mean = of is not None and of.primitive.name == "reduce_sum"
    return not is_mean and isinstance(number, core.Literal) and number.val == k


def _made_by(jaxpr: core.Jaxpr, variable: Any) -> core.JaxprEqn | None:
    """The equation that computes a value, before casts."""
    equation = ir.made_by(jaxpr, variable)
    while equation is not None and equation.primitive.name in _SAME_VALUE:
        equation = ir.made_by(jaxpr, equation.invars[0])
    return equation


# -- A loss that reads the number of devices -------------------------------------------


@contextlib.contextmanager
def _device_count(number: int) -> Iterator[list[int]]:
    """Tells the user's code another number of devices; lists each time it asks."""
    calls: list[int] = []

    def count(*_: Any, **__: Any) -> int:
        calls.append(number)
        return number

    names = "device_count", "local_device_count"
    functions = {name: getattr(jax, name) for name in names}
    users = [
        (module, name)
        for module in list(sys.modules.values())
        for name, function in functions.items()
        if getattr(module, "__dict__", {}).get(name) is function
        and not str(getattr(module, "__name__", "")).startswith("jax.")
    ]
    try:
        for module, name in users:
            setattr(module, name, count)
        yield calls
    finally:
        for module, name in users:
            setattr(module, name, functions[name])


def _shape(program: Any) -> list[Any]:
    """What a program does, comparable between two traces."""
    equations = [
        (
            e.primitive.name,
            [str(out.aval) for out in e.outvars],
            [str(x.val) for x in e.invars if isinstance(x, core.Literal)],
        )
        for e in ir.equations(program.jaxpr)
    ]
    return [*equations, *(str(x) for x in program.consts if np.ndim(x) == 0)]
