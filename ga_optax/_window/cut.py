"""The values of least size that every way through a program goes through.

A minimum cut: each value is an edge as wide as its bytes (Ford and Fulkerson, 1956;
shortest ways first, as Edmonds and Karp have it). Ways begin at the end: of two cuts
of one size, that which is found is nearer to it.
"""

import collections
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from jax.extend import core

from ga_optax._passes.ir import variables

_Node = tuple[Any, str]  # a value where it comes in, or where it goes out
_SOURCE, _SINK = (None, "source"), (None, "sink")


def smallest(
    equations: Iterable[core.JaxprEqn],
    sources: Iterable[Any],
    sinks: Container[Any],
    size: Callable[[Any], float],
) -> list[Any]:
    """The values to keep; of two choices of one size, that which is nearer to `sinks`.

    Args:
      equations: those that compute one of another, in their order.
      sources: the values that must not be computed again.
      sinks: those that have to be known, if they are computed of `sources`.
      size: what keeping a value takes; infinite if it cannot be kept. One on each way
        is finite.
    """
    inf, readers = float("inf"), _readers(equations, sources)
    room: dict[_Node, dict[_Node, float]] = collections.defaultdict(dict)
    edges = [((x, "out"), (x, "in"), size(x)) for x in readers]
    edges += [((y, "in"), (x, "out"), inf) for x, ys in readers.items() for y in ys]
    edges += [((x, "in"), _SOURCE, inf) for x in sources]
    edges += [(_SINK, (x, "out"), inf) for x in readers if x in sinks]
    for start, end, width in edges:
        room[start][end] = room[start].get(end, 0.0) + width
        room[end].setdefault(start, 0.0)
    while _SOURCE in (came := _reached(room)):
        way, node = [], _SOURCE
        while node != _SINK:
            way.append((came[node], node))
            node = came[node]
        width = min(room[a][b] for a, b in way)
        for a, b in way:
            room[a][b] -= width
            room[b][a] += width
    return [x for x in readers if (x, "out") in came and (x, "in") not in came]


def _readers(
    equations: Iterable[core.JaxprEqn], sources: Iterable[Any]
) -> dict[Any, list[Any]]:
    """What is computed of each of `sources`, of what that is, and so on."""
    found: dict[Any, list[Any]] = {x: [] for x in sources}
    for e in equations:
        inputs = [x for x in variables(e.invars) if x in found]
        for x in inputs:
            found[x] += e.outvars
        if inputs:
            found |= {x: [] for x in e.outvars if x not in found}
    return found


def _reached(room: Mapping[_Node, Mapping[_Node, float]]) -> dict[_Node, _Node]:
    """Where there is room to go to, and the node before each on a shortest way."""
    came: dict[_Node, _Node] = {_SINK: _SINK}
    due = collections.deque(came)
    while due:
        node = due.popleft()
        for other in room[node]:
            if room[node][other] > 0 and other not in came:
                came[other] = node
                due.append(other)
    return came
