"""What the body of a scan computes from its own results of earlier iterations.

    node   an argument, an equation of the body, or a place of its carry
    reads  what it is computed of; a place of the carry also reads what the iteration
           before put there
    ring   nodes that all depend on each other: a strongly connected component
    level  how many equations that count are on the longest way to a node; a ring with
           some counts as one

What is on no ring can leave the loop: in all iterations it is one computation, on the
stacks of what it reads.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._passes import read

Test = Callable[[core.JaxprEqn], bool]
_Places = list[int | None]  # the nodes of values, by number; None for literals


class Node(NamedTuple):
    """One of a graph.

    Attributes:
      reads: the nodes that it is computed of, by number.
      equation: for equations alone.
      length: for places of a carry, how often the loop runs; 0 for others.
      start: for arguments, their level.
    """

    reads: list[int]
    equation: core.JaxprEqn | None = None
    length: int = 0
    start: int = 0


class Ring(NamedTuple):
    """Nodes that depend on each other, or one that may not.

    Attributes:
      members: the nodes, by number.
      closed: whether they depend on themselves.
      counted: the equations among them that count.
      level: see above.
    """

    members: list[int]
    closed: bool
    counted: list[core.JaxprEqn]
    level: int


class Graph(NamedTuple):
    """The nodes of a scan.

    Attributes:
      nodes: all of them; its arguments come first, and then the places of its carry.
      loops: those of the arguments of each loop inside, by the loop's id.
    """

    nodes: list[Node]
    loops: dict[int, _Places]

    def rings(self, counts: Test) -> list[Ring]:
        """All nodes, in rings, by their first ones; and which equations count."""
        levels: dict[int, int] = {}
        found: list[Ring] = []
        for members in _components([node.reads for node in self.nodes]):
            nodes = [self.nodes[i] for i in members]
            inputs = {j for node in nodes for j in node.reads}
            closed = not inputs.isdisjoint(members)
            counted = [x.equation for x in nodes if x.equation and counts(x.equation)]
            before = [levels[j] for j in inputs if j in levels]
            level = max([*before, *(node.start for node in nodes)]) + bool(counted)
            levels.update(dict.fromkeys(members, level))
            found.append(Ring(members, closed, counted, level))
        return sorted(found, key=lambda ring: ring.members)


def graph(how: read.Scan, opens: Test, start: Sequence[int] | None = None) -> Graph:
    """The graph of a scan.

    Args:
      how: the scan.
      opens: whether an equation is opened, and what is in it counts by itself.
      start: the levels of its arguments.
    """
    arguments = [Node([], start=x) for x in start or [0] * len(how.body.jaxpr.invars)]
    found = Graph(arguments, {})
    _iterate(found, how, list(range(len(arguments))), opens)
    return found


def inside(how: read.Scan, counts: Test) -> dict[int, list[int]]:
    """The levels of the arguments of each loop with equations that count, by its id."""
    found = graph(how, counts)
    levels = {i: ring.level for ring in found.rings(counts) for i in ring.members}
    return {
        loop: [0 if x is None else levels[x] for x in places]
        for loop, places in found.loops.items()
    }


def comes_apart(how: read.Scan, counts: Test, longest: int) -> bool:
    """Whether no equation that counts depends on itself in a loop longer than that."""
    found = graph(how, counts)
    return not any(
        ring.counted and any(found.nodes[i].length > longest for i in ring.members)
        for ring in found.rings(counts)
    )


# -- Nodes -----------------------------------------------------------------------------


def _iterate(found: Graph, how: read.Scan, given: _Places, opens: Test) -> _Places:
    """The nodes of the results of a scan."""
    nodes = found.nodes
    consts, carry, slices = how.split(given)
    places = range(len(nodes), len(nodes) + len(carry))
    nodes.extend(Node(_some([x]), length=how.length) for x in carry)
    args = [*consts, *places, *slices]
    out = _scan_program(found, how.body.jaxpr, args, opens)
    for place, x in zip(places, out, strict=False):
        nodes[place].reads.extend(_some([x]))
    return [*places, *out[len(places) :]]


def _scan_program(
    found: Graph, jaxpr: core.Jaxpr, given: _Places, opens: Test
) -> _Places:
    """The nodes of the results of a program."""
    env: dict[Any, int | None] = dict(zip(jaxpr.invars, given, strict=True))

    def places(atoms: Sequence[Any]) -> _Places:
        return [env.get(x) if read.is_variable(x) else None for x in atoms]

    for e in jaxpr.eqns:
        inputs, is_open = places(e.invars), opens(e)
        if is_open and read.is_inline(e):
            [inner] = read.inner_programs(e)
            out = _scan_program(found, inner, inputs, opens)
        elif is_open and read.kind(e) == "scan":
            found.loops[id(e)] = inputs
            out = _iterate(found, read.scan_of(e), inputs, opens)
        else:
            found.nodes.append(Node(_some(inputs), e))
            out = [len(found.nodes) - 1] * len(e.outvars)
        env.update(zip(e.outvars, out, strict=True))
    return places(jaxpr.outvars)


def _some(places: _Places) -> list[int]:
    return [x for x in places if x is not None]


# -- Components ------------------------------------------------------------------------


def _components(reads: Sequence[Sequence[int]]) -> list[list[int]]:
    """The strongly connected ones of a graph, each after those that it reads.

    Their nodes reach the same ones, and more than those that they read.
    """
    reached, before = [1 << i for i in range(len(reads))], []  # a bit for each node
    while reached != before:
        before = list(reached)
        for i, inputs in enumerate(reads):
            for j in inputs:
                reached[i] |= reached[j]
    found: dict[int, list[int]] = {}
    for i, nodes in enumerate(reached):
        found.setdefault(nodes, []).append(i)
    return [found[nodes] for nodes in sorted(found, key=int.bit_count)]
