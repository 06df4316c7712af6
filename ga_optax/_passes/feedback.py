"""Feedback in a scan: equations that depend on their results of earlier iterations.

    node   an argument, an equation of the body, or a place of the carry
    reads  the nodes of the operands; a place of the carry also reads the node whose
           value the iteration before put there
    ring   nodes that all depend on each other: a strongly connected component
    level  the number of counted equations on the longest way to a node; all in one ring
           count as one

An equation on no ring can leave the loop: all iterations are one computation, on stacks
of the operands.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from . import jaxprs

Test = Callable[[core.JaxprEqn], bool]
_Places = list[int | None]  # the nodes of values, by number; None for literals


class Node(NamedTuple):
    """A node of a graph.

    Attributes:
      reads: the nodes that it reads, by number.
      equation: the equation, if the node is one.
      length: for a place of a carry, the number of iterations; 0 for others.
      start: for an argument, the level.
    """

    reads: list[int]
    equation: core.JaxprEqn | None = None
    length: int = 0
    start: int = 0


class Ring(NamedTuple):
    """Nodes that depend on each other, or a node on no ring.

    Attributes:
      members: the nodes, by number.
      closed: True if the nodes depend on themselves.
      counted: the counted equations among the nodes.
      level: the level of the nodes.
    """

    members: list[int]
    closed: bool
    counted: list[core.JaxprEqn]
    level: int


class Graph(NamedTuple):
    """The nodes of a scan.

    Attributes:
      nodes: all nodes: first the arguments, then the places of the carry, then others.
      loops: the nodes of the arguments of each loop inside, by the loop's id.
    """

    nodes: list[Node]
    loops: dict[int, _Places]

    def rings(self, counts: Test) -> list[Ring]:
        """All rings, in the order of their first nodes."""
        levels: dict[int, int] = {}
        rings: list[Ring] = []
        for members in _components([node.reads for node in self.nodes]):
            nodes = [self.nodes[i] for i in members]
            inputs = {j for node in nodes for j in node.reads}
            closed = not inputs.isdisjoint(members)
            counted = [x.equation for x in nodes if x.equation and counts(x.equation)]
            before = [levels[j] for j in inputs if j in levels]
            level = max([*before, *(node.start for node in nodes)]) + bool(counted)
            levels.update(dict.fromkeys(members, level))
            rings.append(Ring(members, closed, counted, level))
        return sorted(rings, key=lambda ring: ring.members)


def graph(how: jaxprs.Scan, opens: Test, start: Sequence[int] | None = None) -> Graph:
    """The graph of a scan.

    Args:
      how: the scan.
      opens: True for an equation whose program has nodes in the graph.
      start: the levels of the arguments.
    """
    arguments = [Node([], start=x) for x in start or [0] * len(how.body.jaxpr.invars)]
    nodes = Graph(arguments, {})
    _iterate(nodes, how, list(range(len(arguments))), opens)
    return nodes


def inside(how: jaxprs.Scan, counts: Test) -> dict[int, list[int]]:
    """The levels of the arguments of each loop with counted equations, by its id."""
    of_scan = graph(how, counts)
    levels = {i: ring.level for ring in of_scan.rings(counts) for i in ring.members}
    return {
        loop: [0 if x is None else levels[x] for x in places]
        for loop, places in of_scan.loops.items()
    }


def comes_apart(how: jaxprs.Scan, counts: Test, longest: int) -> bool:
    """True if no counted equation depends on itself in a loop of more iterations."""
    of_scan = graph(how, counts)
    return not any(
        ring.counted and any(of_scan.nodes[i].length > longest for i in ring.members)
        for ring in of_scan.rings(counts)
    )


# -- Nodes -----------------------------------------------------------------------------


def _iterate(graph: Graph, how: jaxprs.Scan, args: _Places, opens: Test) -> _Places:
    """The nodes of the results of a scan, whose nodes are added to the graph."""
    nodes = graph.nodes
    consts, carry, slices = how.split(args)
    places = range(len(nodes), len(nodes) + len(carry))
    nodes.extend(Node(_some([x]), length=how.length) for x in carry)
    args = [*consts, *places, *slices]
    out = _scan_program(graph, how.body.jaxpr, args, opens)
    for place, x in zip(places, out, strict=False):
        nodes[place].reads.extend(_some([x]))
    return [*places, *out[len(places) :]]


def _scan_program(
    graph: Graph, jaxpr: core.Jaxpr, args: _Places, opens: Test
) -> _Places:
    """The nodes of the results of a program, whose nodes are added to the graph."""
    env: dict[Any, int | None] = dict(zip(jaxpr.invars, args, strict=True))

    def places(atoms: Sequence[Any]) -> _Places:
        return [env.get(x) if jaxprs.is_variable(x) else None for x in atoms]

    for e in jaxpr.eqns:
        inputs, is_open = places(e.invars), opens(e)
        if is_open and jaxprs.is_inline(e):
            [inner] = jaxprs.inner_programs(e)
            out = _scan_program(graph, inner, inputs, opens)
        elif is_open and jaxprs.kind(e) == "scan":
            graph.loops[id(e)] = inputs
            out = _iterate(graph, jaxprs.scan_of(e), inputs, opens)
        else:
            graph.nodes.append(Node(_some(inputs), e))
            out = [len(graph.nodes) - 1] * len(e.outvars)
        env.update(zip(e.outvars, out, strict=True))
    return places(jaxpr.outvars)


def _some(places: _Places) -> list[int]:
    return [x for x in places if x is not None]


# -- Components ------------------------------------------------------------------------


def _components(reads: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected components, each after those that it reads.

    The nodes of a component reach the same nodes, and more than any node they read.
    """
    reached, before = [1 << i for i in range(len(reads))], []  # a bit for each node
    while reached != before:
        before = list(reached)
        for i, inputs in enumerate(reads):
            for j in inputs:
                reached[i] |= reached[j]
    members: dict[int, list[int]] = {}
    for i, nodes in enumerate(reached):
        members.setdefault(nodes, []).append(i)
    return [members[nodes] for nodes in sorted(members, key=int.bit_count)]
