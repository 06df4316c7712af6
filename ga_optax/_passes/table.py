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
| a micro-step  | backward   | same program         | differentiates equations that   |
|               |            |                      | are alike once: `pullback`      |
| the loop      | products   | rounded once         | adds sums of products before    |
|               |            |                      | they are rounded                |
| the loop      | duplicates | same bits on any     | computes nothing twice          |
|               |            | number of devices    |                                 |

No program needs a pass to be right: with `optimize=False` none runs.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from . import jaxprs, products, shards, shared
from .facts import Facts
from .jaxprs import Program
from .places import log_of_pass


class Pass(NamedTuple):
    """A change of programs.

    Attributes:
      name: the name in warnings and in the log.
      scope: the programs that it changes: "fun", "sharded fun" or "loop".
      change: returns a program that does the same.
      applies: True if the pass has something to do in a call.
    """

    name: str
    scope: str
    change: Callable[[Program, Facts], Program]
    applies: Callable[[Facts], bool] = lambda facts: True


PASSES = (
    Pass("constants", "fun", shared.constants_hoisted),
    Pass("casts", "fun", shared.casts_sunk, lambda facts: facts.adds_in_place),
    Pass(
        "narrowed",
        "fun",
        shared.params_narrowed,
        lambda facts: any(facts.devices.gathered_once),
    ),
    Pass("gathered", "sharded fun", shared.params_gathered),
    Pass(
        "shards",
        "sharded fun",
        shards.gathered_at_use,
        lambda facts: bool(facts.devices.shards),
    ),
    Pass("products", "loop", products.added_in_products),
    Pass(
        "duplicates",
        "loop",
        shards.duplicates_merged,
        lambda facts: facts.devices.logical > 0,
    ),
)


def run_scope(scope: str, program: Program, facts: Facts) -> Program:
    """The program after all passes of a scope that apply."""
    if scope == "loop":  # what the backward pass inserted is equations for all passes
        program = program._replace(jaxpr=jaxprs.opened(program.jaxpr))
    for change in PASSES:
        if change.scope == scope and change.applies(facts):
            with log_of_pass(change.name):
                new = change.change(program, facts)
            if new.jaxpr is not program.jaxpr and _types(new) != _types(program):
                raise TypeError(f"the pass {change.name!r} changed types of results")
            program = new
    return program


def _types(program: Program) -> list[Any]:
    avals: list[Any] = [x.aval for x in program.jaxpr.outvars]
    return [(aval.shape, aval.dtype) for aval in avals]
