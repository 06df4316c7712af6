"""The values of least size that every way through a program goes through.

A minimum cut: each value is an edge as wide as its bytes (Ford and Fulkerson, 1956;
shortest ways first, as Edmonds and Karp have it).
"""

import collections
from collections.abc import Callable, Container, Hashable, Iterable, Iterator, Mapping
from typing import Any

from jax.extend import core

from ga_optax._passes.ir import variables

_Node = tuple[Any, str]  # a value where it comes in, or where it goes out
_SOURCE, _SINK = (None, "source"), (None, "sink")


def readers(
    equations: Iterable[core.JaxprEqn], sources: Iterable[Any]
) -> dict[Any, list[Any]]:
    """What is computed of each of `sources`, of what that is, and so on.

    Args:
      equations: those that compute it, in their order.
      sources: the values to begin with.
    """
    found: dict[Any, list[Any]] = {x: [] for x in sources}
    for e in equations:
        inputs = [x for x in variables(e.invars) if x in found]
        for x in inputs:
            found[x] += e.outvars
        if inputs:
            found |= {x: [] for x in e.outvars if x not in found}
    return found


def smallest(
    readers: Mapping[Any, Iterable[Any]],
    sources: Iterable[Hashable],
    sinks: Container[Any],
    size: Callable[[Any], float],
) -> list[Any]:
    """The values to keep; of two choices of one size, that which is nearer to `sinks`.

    Args:
      readers: what is computed of each value, see `readers`.
      sources: the values that must not be computed again.
      sinks: those that have to be known, if they are computed of `sources`.
      size: what keeping a value takes; infinite if it cannot be kept. One on each way
        is finite.
    """
    room: dict[_Node, dict[_Node, float]] = collections.defaultdict(dict)

    def edge(start: _Node, end: _Node, width: float) -> None:
        room[start][end] = room[start].get(end, 0.0) + width
        room[end].setdefault(start, 0.0)

    made = (y for ys in readers.values() for y in ys)
    values = dict.fromkeys([*readers, *made])
    for x in values:
        edge((x, "in"), (x, "out"), size(x))
    for x, ys in readers.items():
        for y in ys:
            edge((x, "out"), (y, "in"), float("inf"))
    for x in sources:
        edge(_SOURCE, (x, "in"), float("inf"))
    for x in readers:
        if x in sinks:
            edge((x, "out"), _SINK, float("inf"))

    def ahead(node: _Node) -> Iterator[_Node]:
        return (other for other, width in room[node].items() if width > 0)

    def behind(node: _Node) -> Iterator[_Node]:
        return (other for other in room[node] if room[other][node] > 0)

    while _SINK in (came := _reached(_SOURCE, ahead)):
        way, node = [], _SINK
        while node != _SOURCE:
            way.append((came[node], node))
            node = came[node]
        width = min(room[a][b] for a, b in way)
        for a, b in way:
            room[a][b] -= width
            room[b][a] += width
    near = _reached(_SINK, behind)
    return [x for x in values if (x, "out") in near and (x, "in") not in near]


def _reached(
    start: _Node, nexts: Callable[[_Node], Iterable[_Node]]
) -> dict[_Node, _Node]:
    """The nodes on all ways from one, and the node before each on a shortest way."""
    came: dict[_Node, _Node] = {start: start}
    due = collections.deque([start])
    while due:
        node = due.popleft()
        for other in nexts(node):
            if other not in came:
                came[other] = node
                due.append(other)
    return came
