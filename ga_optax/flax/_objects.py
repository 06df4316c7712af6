"""Converts the NNX objects in the arguments of a call to arrays, and back.

As in Flax's transforms, an `nnx.UpdateContext` maps objects inside of a trace to the
caller's objects, so that changes by `fun` reach the caller's objects:

    1. split, outside  ->  2. merge, inside  ->  fun  ->  3. split  ->  4. merge
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx
from flax.nnx.extract import NodeStates
from jax.extend import core

from .._calls.options import place_of
from .._checks import check_not_empty, check_structure, parts_of_prefix
from .._passes import jaxprs

_TAG = "ga_optax"
in_context = nnx.update_context(_TAG)

Arrays = Mapping[int, Any]  # variables by their position among all of a call


class Objects:
    """The NNX objects of one call, split into arrays and merged for `fun`.

    Attributes:
      args: the positional arguments; of each object, the variables to differentiate.
      kwargs: the keyword arguments, in the same way.
      keys: the keys of random streams, if they are separate.
      rest: all other variables.
    """

    # For each variable after `fun`, its position before; None if changed or added.
    _sources: Sequence[Any]

    def __init__(
        self,
        fun: Callable[..., Any],
        argnums: Any,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        keys: bool = False,
    ) -> None:
        def place(a: Any) -> Any:
            return place_of("argnums", number_of(a), len(args), kwargs, fun)

        argnums = tuple(argnums) if isinstance(argnums, list) else argnums
        self._fun, self._argnums = fun, jax.tree.map(place, argnums)
        named = jax.tree.leaves(argnums)
        filters = {place(a): getattr(a, "filter", nnx.Param) for a in named}

        def selection(i: int | str) -> nnx.DiffState:
            return nnx.DiffState(-1, filters.get(i, False))

        self._prefix = (
            tuple(map(selection, range(len(args)))),
            {i: selection(i) for i in kwargs},
        )
        self._key_type = nnx.RngKey if keys else False
        tree = self._split((args, kwargs), self._prefix)
        self._parts, self._tree = jax.tree.flatten(tree, is_leaf=_is_node)
        self._nodes = _nodes_of(self._parts)
        states = ((k, s) for x in self._nodes for k, s in enumerate(x.states))
        self._kinds = [k for k, state in states for _ in jax.tree.leaves(state)]
        variables = list(enumerate(jax.tree.leaves(self._nodes)))
        self.keys, self.rest = (
            {i: x for i, x in variables if self._kinds[i] == kind} for kind in (1, 2)
        )
        self.args, self.kwargs = nnx.as_pure(self._selected)
        for i in filters:
            todo = "Select parameters with nnx.DiffState(argnum, filter)."
            name = f"The selection of argnums in argument {i!r}"
            check_not_empty(name, _at(self._selected, i), todo)

    @property
    def differentiated(self) -> Any:
        """The variables to differentiate, in the structure of the gradient."""
        return jax.tree.map(lambda i: _at(self._selected, i), self._argnums)

    def pure_prefix(self, prefix: Any) -> Any:
        """A prefix of `differentiated` as a tree of the pure arguments."""
        pairs = parts_of_prefix("accumulator_dtype", prefix, self.differentiated)
        pure = jax.tree.map(lambda i: _at((self.args, self.kwargs), i), self._argnums)
        leaves = [x for x, part in pairs for _ in jax.tree.leaves(part)]
        return jax.tree.structure(pure).unflatten(leaves)

    @property
    def _selected(self) -> Any:
        return self._with((x.states[0] for x in self._nodes), self._parts)

    def run(self, args: Any, kwargs: Any, others: Arrays) -> tuple[Any, list[Any]]:
        """Steps 2 and 3: the result of `fun`, and all variables after `fun`.

        `others` are the variables that are not differentiated.
        """
        parts = self._tree.flatten_up_to((args, kwargs))
        pairs = zip(parts, self._parts, strict=True)
        selected = iter(jax.tree.leaves([x for x, part in pairs if _is_node(part)]))
        numbers = range(len(self._kinds))
        before = [others[i] if i in others else next(selected) for i in numbers]

        def run_pure(variables: Sequence[Any]) -> tuple[Any, Any]:
            nodes = jax.tree.unflatten(jax.tree.structure(self._nodes), variables)
            arguments = self._with(nodes, parts)
            args, kwargs = nnx.from_tree(arguments, is_inner=True, ctxtag=_TAG)
            out = self._fun(*args, **kwargs)
            prefix = self._prefix, nnx.DiffState(-1, False)
            tree, out = self._split(((args, kwargs), out), prefix, check_aliasing=False)
            return out, _nodes_of(tree)

        out, nodes = run_pure(before)
        variables, self._tree_after = jax.tree.flatten(nodes)
        position = {id(x): i for i, x in enumerate(before)}
        self._sources = [position.get(id(x)) for x in variables]
        if not {*numbers} - {*self.rest} <= {*self._sources}:
            # An `nnx.remat` inside of `fun` returns unchanged variables as new arrays.
            # The program shows which variables are unchanged.
            program = jax.make_jaxpr(lambda x: jax.tree.leaves(run_pure(x)[1]))(before)
            self._sources = _forwarded(program.jaxpr)
        return out, variables

    def changed(self, variables: Sequence[Any]) -> Arrays:
        """The variables that `fun` changed or added."""
        return {i: x for i, x in enumerate(variables) if self._sources[i] is None}

    def carry(self, variables: Sequence[Any]) -> Arrays:
        """The new `rest`; raises if `fun` changed any other variable."""
        nodes = jax.tree.unflatten(self._tree_after, variables)
        old, new = ([nnx.as_pure(x.states) for x in y] for y in (self._nodes, nodes))
        todo = "Remove variables that fun adds with nnx.pop, and return them as aux."
        check_structure(
            old,
            new,
            name="The variables after fun",
            expected="the arguments",
            todo=todo,
        )
        if _graphs(nodes) != _graphs(self._nodes):
            raise ValueError(_GRAPH)
        if any(i not in self.rest and x != i for i, x in enumerate(self._sources)):
            raise ValueError(_ASSIGNED)
        return {i: variables[i] for i in self.rest}

    def update(self, new: Arrays, out: Any) -> Any:
        """Step 4: gives the caller's objects their new variables, and returns `out`.

        An unchanged variable keeps its array, and is not averaged over devices.
        """
        old = jax.tree.leaves(self._nodes)
        leaves = [
            new[i] if i in new and source != i else old[source]
            for i, source in enumerate(self._sources)
        ]
        nodes = jax.tree.unflatten(self._tree_after, leaves)
        return nnx.from_tree((nodes, out), is_inner=False, ctxtag=_TAG)[1]

    def _split(self, tree: Any, prefix: Any, check_aliasing: bool = True) -> Any:
        def split(ctx: Any, path: Any, diff: nnx.DiffState, x: Any) -> NodeStates:
            states = ctx.split(x, diff.filter, self._key_type, ...)
            return NodeStates.from_split(*states)

        options = {"check_aliasing": check_aliasing, "ctxtag": _TAG}
        return nnx.to_tree(tree, prefix=prefix, split_fn=split, **options)

    def _with(self, nodes: Any, parts: Sequence[Any]) -> Any:
        """The arguments with `nodes` in the place of the objects."""
        new, pairs = iter(nodes), zip(parts, self._parts, strict=True)
        return self._tree.unflatten(
            [next(new) if _is_node(part) else x for x, part in pairs]
        )


_GRAPH = (
    "fun must not change or add parameters, or attributes of modules that are no "
    "variables, but it does. Call model.train() or model.eval() before, or keep "
    "attributes that change in an nnx.Variable."
)
_ASSIGNED = (
    "fun must not assign to variables that argnums selects, nor (with a data_axis) to "
    "the keys of random streams, but it does. Update parameters after the window."
)


def number_of(argnum: Any) -> Any:
    """The position of one of `argnums`."""
    return getattr(argnum, "argnum", argnum)


def like(tree: Any, leaves: Any) -> Any:
    """The leaves of `leaves`, in the variables and containers of `tree`."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(leaves))


def _at(arguments: Any, place: int | str) -> Any:
    return arguments[isinstance(place, str)][place]


def _is_node(x: Any) -> bool:
    return isinstance(x, NodeStates)


def _nodes_of(tree: Any) -> list[NodeStates]:
    return [x for x in jax.tree.leaves(tree, is_leaf=_is_node) if _is_node(x)]


def _graphs(nodes: Sequence[NodeStates]) -> list[Any]:
    return [x.graphdef.with_no_outer_index() for x in nodes]


def _forwarded(jaxpr: core.Jaxpr) -> list[int | None]:
    """For each result, the number of the argument that it equals; None if computed.

    `jax.checkpoint` gives pass-through results new variables, so its body is read, too.
    """
    found: dict[Any, int | None] = {x: i for i, x in enumerate(jaxpr.invars)}

    def of(x: Any) -> int | None:
        return found.get(x) if jaxprs.is_variable(x) else None

    for equation in jaxpr.eqns:
        how, every = jaxprs.kind(equation), []
        programs = jaxprs.inner_programs(equation) if how not in (None, "while") else ()
        for program in programs:
            given = list(map(of, jaxprs.operands(equation, program)))
            places = _forwarded(program)
            if how == "scan":
                places = list(
                    map(jaxprs.scan_of(equation).kept, range(len(places)), places)
                )
            every.append([None if i is None else given[i] for i in places])
        for out, *its in zip(equation.outvars, *every, strict=bool(every)):
            found[out] = its[0] if len({*its}) == 1 else None
    return list(map(of, jaxpr.outvars))
