"""The passes, which change a program, in this order.

| program of    | pass       | law                  | what it does                    |
| ------------- | ---------- | -------------------- | ------------------------------- |
| `fun`         | constants  | same bits in every   | computes tables before the loop |
|               |            | grouping             |                                 |
| `fun`         | casts      | same bits            | casts parameters by layer       |
| `fun`         | narrowed   | same to rounding     | casts sharded parameters before |
|               |            |                      | they are gathered               |
| sharded `fun` | gathered   | same to rounding     | gathers parameters at their use |
| sharded `fun` | shards     | same to rounding     | gathers other arrays at their   |
|               |            |                      | use                             |
| a micro-step  | repeats    | same program         | differentiates equations that   |
|               |            |                      | are alike once                  |
| the loop      | products   | rounded once         | adds sums of products before    |
|               |            |                      | they are rounded                |
| the loop      | duplicates | same bits on any     | computes nothing twice          |
|               |            | number of devices    |                                 |

No program needs a pass to be right: with `optimize=False` none runs.
"""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from ga_optax._passes import (
    casts,
    constants,
    duplicates,
    gathered,
    log,
    narrowed,
    places,
    products,
    repeats,
    shards,
)
from ga_optax._passes.facts import Facts
from ga_optax._passes.read import Program


class Pass(NamedTuple):
    """A change of programs.

    Attributes:
      name: the name in warnings and in the log.
      scope: the programs that it changes: "fun", "sharded fun", "micro-step" (what is
        differentiated) or "loop".
      law: what the results of the new program equal, and how exactly.
      change: returns a program that does the same.
      applies: True if the pass has something to do in a call.
    """

    name: str
    scope: str
    law: str
    change: Callable[[Program, Facts], Program]
    applies: Callable[[Facts], bool] = lambda facts: True


PASSES = (
    Pass("constants", "fun", "same bits in every grouping", constants.hoisted),
    Pass("casts", "fun", "same bits", casts.sunk, lambda facts: facts.adds_in_place),
    Pass(
        "narrowed",
        "fun",
        "same to rounding",
        narrowed.narrowed,
        lambda facts: any(facts.gathered_once),
    ),
    Pass("gathered", "sharded fun", "same to rounding", gathered.gathered),
    Pass(
        "shards",
        "sharded fun",
        "same to rounding",
        shards.gathered_at_use,
        lambda facts: bool(facts.shards),
    ),
    Pass("repeats", "micro-step", "same program", repeats.called),
    Pass("products", "loop", "rounded once", products.added_inside),
    Pass(
        "duplicates",
        "loop",
        "same bits on any number of devices",
        duplicates.merged,
        lambda facts: facts.logical,
    ),
)
_failed: set[str] = set()


def run(scope: str, program: Program, facts: Facts) -> Program:
    """The program after all passes of a scope that apply, but those that raise."""
    for change in PASSES:
        if change.scope == scope and change.applies(facts):
            try:
                with log.of_pass(change.name):
                    new = change.change(program, facts)
                if _types(new) != _types(program):
                    raise TypeError("the results have other types")
                program = new
            except Exception as error:  # Any: what JAX will change is not known.
                if places.is_of_user(error):
                    raise
                _warn(change, error)
    return program


def _types(program: Program) -> list[Any]:
    avals: list[Any] = [x.aval for x in program.jaxpr.outvars]
    return [(aval.shape, aval.dtype) for aval in avals]


def _warn(change: Pass, error: Exception) -> None:
    """Warns of a pass that failed, once for each pass."""
    if change.name in _failed:
        return
    _failed.add(change.name)
    warnings.warn(
        f"The pass {change.name!r} of ga_optax ({change.law}) failed with jax "
        f"{jax.__version__}: {type(error).__name__}: {error}. The call goes on without "
        "the pass. Use a newer ga_optax; optimize=False runs no pass.",
        stacklevel=2,
    )
