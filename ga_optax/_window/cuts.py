"""Minimum cuts: the smallest values that every way through a program goes through.

Each value is an edge as wide as its bytes (Ford and Fulkerson, 1956; shortest paths
first, as in Edmonds and Karp). Paths are searched from the sinks: of two cuts of one
size, the nearer to the sinks is found.
"""

import collections
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any

from jax.extend import core

from .._passes.jaxprs import variables

_Node = tuple[Any, str]  # a value where it comes in, or where it goes out

_SOURCE, _SINK = (None, "source"), (None, "sink")


def smallest_cut(
    equations: Iterable[core.JaxprEqn],
    sources: Iterable[Any],
    sinks: Container[Any],
    size: Callable[[Any], float],
) -> list[Any]:
    """The values of a minimum cut between `sources` and `sinks`, nearest to the sinks.

    Args:
      equations: the equations of the program, in order.
      sources: the values that must not be computed again.
      sinks: the values that must be known, if they are computed of `sources`.
      size: the price of keeping a value; infinite if it cannot be kept. A value on each
        path has a finite price.
    """
    inf, readers = float("inf"), _readers(equations, sources)
    capacity: dict[_Node, dict[_Node, float]] = collections.defaultdict(dict)
    edges = [((x, "out"), (x, "in"), size(x)) for x in readers]
    edges += [((y, "in"), (x, "out"), inf) for x, ys in readers.items() for y in ys]
    edges += [((x, "in"), _SOURCE, inf) for x in sources]
    edges += [(_SINK, (x, "out"), inf) for x in readers if x in sinks]
    for start, end, width in edges:
        capacity[start][end] = capacity[start].get(end, 0.0) + width
        capacity[end].setdefault(start, 0.0)
    while _SOURCE in (previous := _reached(capacity)):
        path, node = [], _SOURCE
        while node != _SINK:
            path.append((previous[node], node))
            node = previous[node]
        width = min(capacity[a][b] for a, b in path)
        for a, b in path:
            capacity[a][b] -= width
            capacity[b][a] += width
    return [x for x in readers if (x, "out") in previous and (x, "in") not in previous]


def _readers(
    equations: Iterable[core.JaxprEqn], sources: Iterable[Any]
) -> dict[Any, list[Any]]:
    """The values computed of each source, and of each value that is computed of one."""
    readers: dict[Any, list[Any]] = {x: [] for x in sources}
    for e in equations:
        inputs = [x for x in variables(e.invars) if x in readers]
        for x in inputs:
            readers[x] += e.outvars
        if inputs:
            readers |= {x: [] for x in e.outvars if x not in readers}
    return readers


def _reached(capacity: Mapping[_Node, Mapping[_Node, float]]) -> dict[_Node, _Node]:
    """For each node with capacity left to the sink, the previous node on a path."""
    previous: dict[_Node, _Node] = {_SINK: _SINK}
    queue = collections.deque(previous)
    while queue:
        node = queue.popleft()
        for other in capacity[node]:
            if capacity[node][other] > 0 and other not in previous:
                previous[other] = node
                queue.append(other)
    return previous
