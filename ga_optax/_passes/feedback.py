"""What the body of a scan computes from its own results of earlier iterations.

    node   an equation of the body, or a place of its carry
    reads  what it is computed of; a place of the carry also reads what the iteration
           before put there
    ring   nodes that all depend on each other: a strongly connected component, found
           as Kosaraju and Sharir did (Sharir, 1981)

What is on no ring can leave the loop: in all iterations it is one computation, on the
stacks of what it reads.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from ga_optax._passes import ir

Test = Callable[[core.JaxprEqn], bool]


class Node(NamedTuple):
    """An equation and what it reads, by number; no equation for a place of the carry."""

    equation: core.JaxprEqn | None
    reads: list[int]


def nodes_of(how: ir.Scan, opens: Test = lambda equation: False) -> list[Node]:
    """The nodes of a scan. Those of its carry come first, in their order.

    Args:
      how: the scan.
      opens: whether what is inside an equation counts by itself.
    """
    nodes: list[Node] = []
    _loop(nodes, how, [None] * len(how.body.jaxpr.invars), opens)
    return nodes


def comes_apart(how: ir.Scan, is_sought: Test) -> bool:
    """Whether no equation that is sought depends on its own results."""

    def holds_some(e: core.JaxprEqn) -> bool:
        return any(map(is_sought, ir.within(e)))

    nodes = nodes_of(how, holds_some)
    return not any(
        is_ring(nodes, ring) and any(e and holds_some(e) for e in equations(nodes, ring))
        for ring in rings(nodes)
    )


def equations(nodes: Sequence[Node], members: Sequence[int]) -> list[Any]:
    """The equations of some nodes; None for places of the carry."""
    return [nodes[i].equation for i in members]


def is_ring(nodes: Sequence[Node], members: Sequence[int]) -> bool:
    """Whether they depend on themselves: one alone may not."""
    return len(members) > 1 or members[0] in nodes[members[0]].reads


def rings(nodes: Sequence[Node]) -> Iterator[list[int]]:
    """All nodes, in groups that depend on themselves, each after what it reads."""
    reads = [node.reads for node in nodes]
    readers: list[list[int]] = [[] for _ in nodes]
    for i, read in enumerate(reads):
        for j in read:
            readers[j].append(i)
    found: set[int] = set()
    order = [i for root in range(len(nodes)) for i in _from(root, readers, found)]
    found = set()
    for root in reversed(order):
        if ring := _from(root, reads, found):
            yield ring


def _from(root: int, edges: Sequence[Sequence[int]], found: set[int]) -> list[int]:
    """What a node leads to and is not found yet, each after what it leads to."""
    if root in found:
        return []
    found.add(root)
    order, work = [], [(root, iter(edges[root]))]
    while work:
        node, rest = work[-1]
        new = next((x for x in rest if x not in found), None)
        if new is None:
            order.append(node)
            work.pop()
        else:
            found.add(new)
            work.append((new, iter(edges[new])))
    return order


# -- Nodes -----------------------------------------------------------------------------

_Places = list[int | None]  # the nodes of values; None for what comes from outside


def _loop(nodes: list[Node], how: ir.Scan, given: _Places, opens: Test) -> _Places:
    """The nodes of the results of a scan."""
    consts, carry, slices = how.split(given)
    places = range(len(nodes), len(nodes) + len(carry))
    nodes += [Node(None, _some([x])) for x in carry]
    out = _program(nodes, how.body.jaxpr, [*consts, *places, *slices], opens)
    for place, x in zip(places, out, strict=False):
        nodes[place].reads.extend(_some([x]))
    return [*places, *out[len(places) :]]


def _program(
    nodes: list[Node], jaxpr: core.Jaxpr, given: _Places, opens: Test
) -> _Places:
    """The nodes of the results of a program."""
    env: dict[Any, int | None] = dict(zip(jaxpr.invars, given, strict=True))

    def places(atoms: Sequence[Any]) -> _Places:
        return [env.get(x) if ir.is_variable(x) else None for x in atoms]

    for e in jaxpr.eqns:
        read, is_open = places(e.invars), opens(e)
        if is_open and ir.is_inline(e):
            [inner] = ir.inner_programs(e)
            out = _program(nodes, inner, read, opens)
        elif is_open and ir.kind(e) == "scan":
            out = _loop(nodes, ir.scan_of(e), read, opens)
        else:
            nodes.append(Node(e, _some(read)))
            out = [len(nodes) - 1] * len(e.outvars)
        env.update(zip(e.outvars, out, strict=True))
    return places(jaxpr.outvars)


def _some(places: _Places) -> list[int]:
    return [x for x in places if x is not None]
