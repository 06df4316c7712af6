"""The values of least size that every way through a program goes through.

A minimum cut: each value is an edge as wide as its bytes (Ford and Fulkerson, 1956;
shortest ways first, as Edmonds and Karp have it).
"""

import collections
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

_Node = tuple[Any, str]  # a value where it comes in, or where it goes out
_SOURCE, _SINK = (None, "source"), (None, "sink")


def smallest(
    readers: Mapping[Any, Iterable[Any]],
    sources: Iterable[Hashable],
    sinks: Iterable[Hashable],
    size: Callable[[Any], float],
    early: bool = False,
) -> list[Any]:
    """The values to keep; of two choices of one size, that which is nearer to `sinks`.

    Args:
      readers: what is computed of each value.
      sources: the values that must not be computed again.
      sinks: those that have to be known.
      size: what keeping a value takes; infinite if it cannot be kept. One on each way
        is finite.
      early: whether to take that which is nearer to `sources` instead.
    """
    room: dict[_Node, dict[_Node, float]] = collections.defaultdict(dict)

    def edge(start: _Node, end: _Node, width: float) -> None:
        room[start][end] = room[start].get(end, 0.0) + width
        room[end].setdefault(start, 0.0)

    made = (y for ys in readers.values() for y in ys)
    values = dict.fromkeys([*sources, *sinks, *readers, *made])
    for x in values:
        edge((x, "in"), (x, "out"), size(x))
    for x, ys in readers.items():
        for y in ys:
            edge((x, "out"), (y, "in"), float("inf"))
    for x in sources:
        edge(_SOURCE, (x, "in"), float("inf"))
    for x in sinks:
        edge((x, "out"), _SINK, float("inf"))
    while way := _way(room):
        width = min(room[a][b] for a, b in way)
        for a, b in way:
            room[a][b] -= width
            room[b][a] += width
    if early:
        far = _reachable(room)
        return [x for x in values if (x, "in") in far and (x, "out") not in far]
    near = _reaching_the_sink(room)
    return [x for x in values if (x, "out") in near and (x, "in") not in near]


def _way(room: Mapping[_Node, Mapping[_Node, float]]) -> list[tuple[_Node, _Node]]:
    """The edges of a shortest way from the source to the sink that has room."""
    came: dict[_Node, _Node] = {_SOURCE: _SOURCE}
    due = collections.deque([_SOURCE])
    while due and _SINK not in came:
        node = due.popleft()
        for other, width in room[node].items():
            if width > 0 and other not in came:
                came[other] = node
                due.append(other)
    way: list[tuple[_Node, _Node]] = []
    node = _SINK
    while node in came and node != _SOURCE:
        way.append((came[node], node))
        node = came[node]
    return way


def _reaching_the_sink(room: Mapping[_Node, Mapping[_Node, float]]) -> set[_Node]:
    """The nodes from which there is room to the sink."""
    found, due = {_SINK}, [_SINK]
    while due:
        node = due.pop()
        for other in room[node]:
            if room[other][node] > 0 and other not in found:
                found.add(other)
                due.append(other)
    return found


def _reachable(room: Mapping[_Node, Mapping[_Node, float]]) -> set[_Node]:
    """The nodes to which there is room from the source."""
    found, due = {_SOURCE}, [_SOURCE]
    while due:
        for other, width in room[due.pop()].items():
            if width > 0 and other not in found:
                found.add(other)
                due.append(other)
    return found
