"""The NNX objects among the arguments of a call, as arrays and back.

As in Flax's own transforms, an `nnx.UpdateContext` knows which object inside is which
outside, so that what `fun` does to objects is done to those of the caller:

    1. apart, outside  ->  2. together, inside  ->  fun  ->  3. apart  ->  4. together
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx.extract import NodeStates

from ga_optax._calls.options import found
from ga_optax._checks import check_not_empty, check_structure
from ga_optax._passes import ir

_TAG = "ga_optax"
in_context = nnx.update_context(_TAG)

Arrays = Mapping[int, Any]  # of variables, by their number among all of a call


class Objects:
    """One call: its NNX objects taken apart, and put together for `fun`.

    Attributes:
      args: the positional arguments as arrays; of each object what is differentiated.
      kwargs: the keyword arguments, in the same way.
      keys: the keys of random streams, if they are kept apart.
      rest: all other variables.
    """

    _places: Sequence[Any]  # numbers; None for what is new

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        keys: bool = False,
    ) -> None:
        def place(a: Any) -> Any:
            return found("argnums", number_of(a), len(args), kwargs, fun)

        argnums = tuple(argnums) if isinstance(argnums, list) else argnums
        self._fun, self._argnums = fun, jax.tree.map(place, argnums)
        named = jax.tree.leaves(argnums)
        filters = {place(a): getattr(a, "filter", nnx.Param) for a in named}

        def wanted(i: int | str) -> nnx.DiffState:
            return nnx.DiffState(-1, filters.get(i, False))

        self._prefix = (
            tuple(map(wanted, range(len(args)))),
            {i: wanted(i) for i in kwargs},
        )
        self._keys = nnx.RngKey if keys else False
        tree = self._apart((args, kwargs), self._prefix)
        self._parts, self._tree = jax.tree.flatten(tree, is_leaf=_is_node)
        self._nodes = _nodes_of(self._parts)
        states = ((k, s) for x in self._nodes for k, s in enumerate(x.states))
        self._kinds = [k for k, state in states for _ in jax.tree.leaves(state)]
        every = list(enumerate(jax.tree.leaves(self._nodes)))
        self.keys, self.rest = (
            {i: x for i, x in every if self._kinds[i] == kind} for kind in (1, 2)
        )
        self.args, self.kwargs = nnx.as_pure(self._own)
        for i in filters:
            todo = "Select parameters with nnx.DiffState(argnum, filter)."
            name = f"What argnums selects of argument {i!r}"
            check_not_empty(name, _at(self._own, i), todo)

    @property
    def differentiated(self) -> Any:
        """The variables that the gradient is that of, in its structure."""
        return jax.tree.map(lambda i: _at(self._own, i), self._argnums)

    @property
    def _own(self) -> Any:
        return self._with((x.states[0] for x in self._nodes), self._parts)

    def run(self, args: Any, kwargs: Any, others: Arrays) -> tuple[Any, list[Any]]:
        """Steps 2 and 3: what `fun` returns, and all variables that it leaves.

        `others` are those that are not differentiated.
        """
        parts = self._tree.flatten_up_to((args, kwargs))
        pairs = zip(parts, self._parts, strict=True)
        own = iter(jax.tree.leaves([x for x, part in pairs if _is_node(part)]))
        numbers = range(len(self._kinds))
        came = [others[i] if i in others else next(own) for i in numbers]

        def of(came: Sequence[Any]) -> tuple[Any, Any]:
            nodes = jax.tree.unflatten(jax.tree.structure(self._nodes), came)
            given = self._with(nodes, parts)
            args, kwargs = nnx.from_tree(given, is_inner=True, ctxtag=_TAG)
            out = self._fun(*args, **kwargs)
            prefix = self._prefix, nnx.DiffState(-1, False)
            left, out = self._apart(((args, kwargs), out), prefix, check_aliasing=False)
            return out, _nodes_of(left)

        out, nodes = of(came)
        left, self._left = jax.tree.flatten(nodes)
        number = {id(x): i for i, x in enumerate(came)}
        self._places = [number.get(id(x)) for x in left]
        if not {*numbers} - {*self.rest} <= {*self._places}:
            # What an `nnx.remat` inside of `fun` only hands on comes back as another
            # array. Then the program tells.
            closed = jax.make_jaxpr(lambda came: jax.tree.leaves(of(came)[1]))(came)
            self._places = ir.forwarded(closed.jaxpr)
        return out, left

    def changed(self, left: Sequence[Any]) -> Arrays:
        """Those of the variables that `fun` left that it changed or added."""
        return {i: x for i, x in enumerate(left) if self._places[i] is None}

    def carry(self, left: Sequence[Any]) -> Arrays:
        """The new `rest`; raises if `fun` changed anything else."""
        nodes = jax.tree.unflatten(self._left, left)
        check_structure(
            *([nnx.as_pure(x.states) for x in of] for of in (self._nodes, nodes)),
            name="What fun leaves",
            expected="its arguments",
            todo="Take out what fun adds with nnx.pop, and return it as aux.",
        )
        if _graphs(nodes) != _graphs(self._nodes):
            raise ValueError(_GRAPH)
        if any(i not in self.rest and x != i for i, x in enumerate(self._places)):
            raise ValueError(_ASSIGNED)
        return {i: left[i] for i in self.rest}

    def update(self, new: Arrays, out: Any) -> Any:
        """Step 4: the caller's objects are as `fun` left them; returns `out`.

        What stood still keeps its array: it is not copied or averaged over devices.
        """
        old = jax.tree.leaves(self._nodes)
        leaves = [
            new[i] if i in new and place != i else old[place]
            for i, place in enumerate(self._places)
        ]
        left = jax.tree.unflatten(self._left, leaves)
        return nnx.from_tree((left, out), is_inner=False, ctxtag=_TAG)[1]

    def _apart(self, tree: Any, prefix: Any, check_aliasing: bool = True) -> Any:
        def split(ctx: Any, path: Any, wanted: nnx.DiffState, x: Any) -> NodeStates:
            return NodeStates.from_split(*ctx.split(x, wanted.filter, self._keys, ...))

        options = {"check_aliasing": check_aliasing, "ctxtag": _TAG}
        return nnx.to_tree(tree, prefix=prefix, split_fn=split, **options)

    def _with(self, nodes: Any, parts: Sequence[Any]) -> Any:
        """Arguments with these in place of the objects."""
        new, pairs = iter(nodes), zip(parts, self._parts, strict=True)
        return self._tree.unflatten(
            [next(new) if _is_node(part) else x for x, part in pairs]
        )


_GRAPH = (
    "fun must leave the attributes of modules that are no variables, and the "
    "parameters, as they are, but it changes or adds some. Call model.train() or "
    "model.eval() before, or keep what changes in an nnx.Variable."
)
_ASSIGNED = (
    "fun must not assign to what argnums selects, nor (with a data_axis) to the keys "
    "of random streams, but it does. Update parameters after the window."
)


def number_of(argnum: Any) -> Any:
    """The position of one of `argnums`."""
    return getattr(argnum, "argnum", argnum)


def like(tree: Any, leaves: Any) -> Any:
    """The leaves of a tree, as the variables and containers of another."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(leaves))


def _at(arguments: Any, place: int | str) -> Any:
    return arguments[isinstance(place, str)][place]


def _is_node(x: Any) -> bool:
    return isinstance(x, NodeStates)


def _nodes_of(tree: Any) -> list[NodeStates]:
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_node) if _is_node(x)]


def _graphs(nodes: Sequence[NodeStates]) -> list[Any]:
    return [x.graphdef.with_no_outer_index() for x in nodes]
