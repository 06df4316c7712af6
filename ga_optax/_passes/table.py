"""The passes: what is done to a user's program, in this order.

| program of    | pass       | law                  | what it does                    |
| ------------- | ---------- | -------------------- | ------------------------------- |
| `fun`         | constants  | same bits in every   | computes tables before the loop |
|               |            | grouping             |                                 |
| `fun`         | casts      | same bits            | casts parameters by layer       |
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
    products,
    repeats,
    shards,
)
from ga_optax._passes.facts import Facts
from ga_optax._passes.read import Program


class Pass(NamedTuple):
    """A change of programs.

    Attributes:
      name: what it is called in warnings and the log.
      scope: the programs that it changes: "fun", "sharded fun", "micro-step" (what is
        differentiated) or "loop".
      law: what its results equal, and how exactly.
      change: from a program to one that does the same.
      applies: whether it has something to do in a call.
    """

    name: str
    scope: str
    law: str
    change: Callable[[Program, Facts], Program]
    applies: Callable[[Facts], bool] = lambda facts: True


PASSES = (
    Pass("constants", "fun", "same bits in every grouping", constants.hoisted),
    Pass("casts", "fun", "same bits", casts.sunk, lambda its: its.adds_in_place),
    Pass("gathered", "sharded fun", "same to rounding", gathered.gathered),
    Pass(
        "shards",
        "sharded fun",
        "same to rounding",
        shards.gathered_at_use,
        lambda its: bool(its.shards),
    ),
    Pass("repeats", "micro-step", "same program", repeats.called),
    Pass("products", "loop", "rounded once", products.added_inside),
    Pass(
        "duplicates",
        "loop",
        "same bits on any number of devices",
        duplicates.merged,
        lambda its: its.logical,
    ),
)
_failed: set[str] = set()


def run(scope: str, program: Program, facts: Facts) -> Program:
    """The program after all passes of a scope that apply; one that raises is left out.

    Args:
      scope: that of `Pass`.
      program: the program.
      facts: what is known of the call.
    """
    for one in PASSES:
        if one.scope == scope and one.applies(facts):
            try:
                with log.of_pass(one.name):
                    new = one.change(program, facts)
                if _types(new) != _types(program):
                    raise TypeError("the results have other types")
                program = new
            except Exception as error:  # Any: what JAX will change is not known.
                _warn(one, error)
    return program


def _types(program: Program) -> list[Any]:
    avals: list[Any] = [x.aval for x in program.jaxpr.outvars]
    return [(aval.shape, aval.dtype) for aval in avals]


def _warn(one: Pass, error: Exception) -> None:
    """Once for each pass."""
    if one.name in _failed:
        return
    _failed.add(one.name)
    warnings.warn(
        f"The pass {one.name!r} of ga_optax ({one.law}) failed with jax "
        f"{jax.__version__}: {type(error).__name__}: {error}. The call goes on without "
        "it. Use a newer ga_optax; optimize=False changes no program.",
        stacklevel=2,
    )
