"""Labels on equations: the part of each result that a micro-batch holds.

Reports read the labels, see `places.label_of`. A label stays with an equation while
passes rewrite the program.
"""

from collections.abc import Sequence
from typing import Any

from jax.extend import core

from ga_optax._partition.axis import Axis
from ga_optax._partition.values import Value
from ga_optax._passes import places, read


def values_of(axis: Axis, results: Sequence[Value]) -> list[Value]:
    """All values of a program that results are computed of; none without labels."""
    found: dict[int, Value] = {}
    left = list(results) if axis.labels else []
    while left:
        v = left.pop()
        if v.made is not None and id(v) not in found:
            found[id(v)] = v
            left += v.made[1]
    return list(found.values())


def in_words(v: Value) -> str:
    """The part of a value that a micro-batch holds, and the type of the whole value."""
    holds = f"rows {v.dim}" if v.rows else "part" if v.is_partial else "all"
    return f"{holds} of {places.type_of(v.aval)}"


def labelled(closed: Any, labels: Sequence[str]) -> Any:
    """A program whose last results have these labels, without these results."""
    jaxpr = closed.jaxpr
    number = len(jaxpr.outvars) - len(labels)
    pairs = zip(jaxpr.outvars[number:], labels, strict=True)
    texts = {x: text for x, text in pairs if read.is_variable(x)}

    def with_label(e: core.JaxprEqn) -> core.JaxprEqn:
        of_results = [texts[x] for x in e.outvars if x in texts]
        return places.labelled(e, ", ".join(of_results)) if of_results else e

    eqns = list(map(with_label, jaxpr.eqns))
    return closed.replace(
        jaxpr=jaxpr.replace(eqns=eqns, outvars=jaxpr.outvars[:number])
    )
