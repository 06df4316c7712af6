"""Gradients of modules: what the loss changes in them goes back into them."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cached_property, partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.nnx import filterlib

from ga_optax._checks import check_not_empty, check_structure
from ga_optax._devices.data_axis import DataAxis
from ga_optax._inside import dependencies, microbatch
from ga_optax._inside.options import found
from ga_optax._passes import ir
from ga_optax.accumulator import Accumulator


def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., tuple[Any, Any]]:
    """`flax.nnx.value_and_grad` over micro-batches: for modules as arguments.

    >>> import jax.numpy as jnp, ga_optax.flax
    >>> from flax import nnx
    >>> model = nnx.Sequential(
    ...     nnx.Linear(2, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    >>> def loss(model, x):
    ...     return jnp.mean(model(x)[:, 0] ** 3)
    >>> step = nnx.jit(ga_optax.flax.value_and_grad(loss, num_microbatches=4))
    >>> value, grads = step(model, jnp.eye(8, 2))
    >>> grads["layers"][0]["kernel"].shape
    (2, 4)

    Every argument may be, or hold, modules and other NNX objects, also `nnx.Rngs` and
    metrics. What `fun` changes in them, such as batch statistics and the counts of
    random streams, goes from one micro-batch to the next in order. After the call they
    are as if the micro-batches had been run one after another. Every micro-batch draws
    other random numbers. Call it inside `nnx.jit`.

    **Exactness.** As `ga_optax.value_and_grad`. With a `data_axis` every device starts
    from the same variables, and floating ones are averaged over devices afterwards;
    devices draw other random numbers, and other ones than without it. With an
    `axis_name` the same holds of micro-batches: each starts from the same variables.
    With `whole_batch=True` value, gradients, aux and what `fun` changes are those of
    `nnx.value_and_grad` over the whole batch, to rounding, on any number of devices:
    `fun` runs once over all rows, so batch statistics are updated once, by those of the
    whole batch, and each random stream counts once.

    Args:
      fun: a function like that of `nnx.value_and_grad`.
      num_microbatches: how many, static.
      microbatch_size: in its place, how many rows one of them has.
      argnums: the positional arguments to differentiate with respect to: an int for
        every `nnx.Param` in one, an `nnx.DiffState` for what its filter selects (LoRA:
        `nnx.DiffState(0, nnx.LoRAParam)`), or a sequence of those.
      has_aux: whether `fun` returns `(loss, aux)`.
      **options: all other options of `ga_optax.value_and_grad`, but `carry_argnums`.

    Returns:
      A function that returns what `nnx.value_and_grad` returns, and updates the modules
      that it is given.

    Raises:
      TypeError, ValueError: if an argument does not fit, as in
        `ga_optax.value_and_grad`; if `argnums` selects no variable; if `fun` assigns to
        what is differentiated, adds or removes variables, or changes an attribute that
        is no variable.
    """
    size = {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size}
    core = partial(microbatch.value_and_grad, **size)
    modules = _Modules(fun, core, argnums, has_aux, options).checked()

    @microbatch.warns_outside_jit
    @wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = _Call(modules, args, kwargs)
        value, grads = call.run()
        return value, _like(call.differentiated, grads)

    return value_and_grad_fun


def accumulate(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    has_aux: bool = False,
    **options: Any,
) -> Callable[..., tuple[Any, Accumulator]]:
    """`ga_optax.accumulate` for modules: some micro-batches now, and others later.

    >>> import jax.numpy as jnp, optax, ga_optax.flax
    >>> from flax import nnx
    >>> from ga_optax import accumulator
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    >>> def loss(model, x):
    ...     return jnp.mean(model(x) ** 2)
    >>> step = nnx.jit(ga_optax.flax.accumulate(loss))
    >>> acc = accumulator.init(nnx.state(model, nnx.Param))
    >>> for x in jnp.ones((2, 4, 2)):
    ...     value, acc = step(acc, model, x)
    >>> _ = optimizer.update(model, accumulator.mean(acc))

    What `fun` changes in modules goes from one micro-batch to the next, and from one
    call to the next, as with `value_and_grad`.

    **Exactness.** As `ga_optax.accumulate`.

    Args:
      fun: a function like that of `nnx.value_and_grad`.
      num_microbatches: how many micro-batches are in one call, static; 1 by default.
      microbatch_size: in its place, how many rows one of them has.
      argnums: as for `value_and_grad`. It counts the arguments of `fun`.
      has_aux: whether `fun` returns `(loss, aux)`.
      **options: all other options of `ga_optax.accumulate`, but `carry_argnums`.

    Returns:
      A function `(acc, *args, **kwargs) -> (value, acc)`, which updates the modules
      that it is given. Make the first `acc` with `accumulator.init` from what `argnums`
      selects, such as `nnx.state(model, nnx.Param)`.

    Raises:
      TypeError, ValueError: as `value_and_grad`, and if the accumulator does not match
        the selected variables.
    """
    size = {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size}
    core = partial(microbatch.accumulate, **size)
    modules = _Modules(fun, core, argnums, has_aux, options).checked()

    @microbatch.warns_outside_jit
    @wraps(fun)
    def add(acc: Accumulator, *args: Any, **kwargs: Any) -> tuple[Any, Accumulator]:
        pure = acc._replace(total=nnx.as_pure(acc.total))
        value, new = _Call(modules, args, kwargs).run(pure)
        return value, new._replace(total=_like(acc.total, new.total))

    return add


def batch_dependencies(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | nnx.DiffState | Sequence[int | nnx.DiffState] = 0,
    batch_argnums: int | Sequence[int] = 1,
    batch_axes: Any = 0,
    has_aux: bool = False,
    residual_bytes: int | None = None,
    data_axis: str | Sequence[str] | DataAxis | None = None,
) -> Callable[..., dependencies.BatchDependencies]:
    """`ga_optax.batch_dependencies` of modules: where rows meet, and what that costs.

    >>> import jax.numpy as jnp, ga_optax as ga
    >>> from flax import nnx
    >>> model = nnx.Sequential(
    ...     nnx.Linear(2, 4, rngs=nnx.Rngs(0)), nnx.BatchNorm(4, rngs=nnx.Rngs(1)))
    >>> def loss(model, x):
    ...     return jnp.mean(model(x)[:, 0] ** 3)
    >>> found = ga.flax.batch_dependencies(loss, 4)(model, jnp.eye(8, 2))
    >>> print(sorted({x.kind for x in found.meetings}), found.backward_passes)
    ['sum'] 1

    It changes no variable of the modules.

    **Exactness.** As `ga_optax.batch_dependencies`, for `ga_optax.flax.value_and_grad(
    whole_batch=True)`.

    Args:
      fun: a function like that of `nnx.value_and_grad`.
      num_microbatches: how many, static.
      microbatch_size: in its place, how many rows one of them has.
      argnums: as for `value_and_grad`.
      batch_argnums: the positional arguments to split.
      batch_axes: where to split them.
      has_aux: whether `fun` returns `(loss, aux)`.
      residual_bytes: what may be kept so that less runs again.
      data_axis: the mesh axes that split the batch.

    Returns:
      A function of `fun`'s arguments.

    Raises:
      TypeError, ValueError: as `value_and_grad`.
    """
    given = {
        "batch_argnums": batch_argnums,
        "batch_axes": batch_axes,
        "residual_bytes": residual_bytes,
        "data_axis": data_axis,
        "whole_batch": True,
    }
    size = {"num_microbatches": num_microbatches, "microbatch_size": microbatch_size}

    def core(fun: Callable[..., Any], *, whole_batch: bool, **options: Any) -> Any:
        return dependencies.batch_dependencies(fun, **size, **options)

    modules = _Modules(fun, core, argnums, has_aux, given).checked()

    @wraps(fun)
    def of_arguments(*args: Any, **kwargs: Any) -> dependencies.BatchDependencies:
        return _Call(modules, args, kwargs).applied()

    return of_arguments


@dataclasses.dataclass(frozen=True)
class _Modules:
    """What one of the functions above was given.

    Attributes:
      fun: the loss.
      core: our function of the same name, for pure arguments.
      argnums: what to differentiate with respect to.
      has_aux: whether `fun` returns `(loss, aux)`.
      given: the other options.
    """

    fun: Callable[..., Any]
    core: Callable[..., Callable[..., Any]]
    argnums: Any
    has_aux: bool
    given: dict[str, Any]

    def checked(self) -> "_Modules":
        """Itself; raises if an option does not fit."""
        if "carry_argnums" in self.given:
            raise TypeError(
                "carry_argnums must be left out, but it is "
                f"{self.given['carry_argnums']!r}. What fun changes in NNX objects is "
                "carried already: keep other state in an nnx.Variable."
            )
        self.core(self.fun, has_aux=self.has_aux, **self.options)
        return self

    @property
    def several(self) -> bool:
        """Whether `argnums` is a sequence."""
        return isinstance(self.argnums, (tuple, list))

    @property
    def _named(self) -> Any:
        return self.argnums if self.several else [self.argnums]

    @property
    def filters(self) -> list[Any]:
        """What selects the variables of each of `argnums`."""
        filters = (getattr(a, "filter", nnx.Param) for a in self._named)
        return [filterlib.to_predicate(x) for x in filters]

    @property
    def options(self) -> dict[str, Any]:
        """The options of `core`."""
        numbers = tuple(getattr(a, "argnum", a) for a in self._named)
        argnums = numbers if self.several else numbers[0]
        return {"batch_argnums": 1, **self.given, "argnums": argnums}

    @property
    def averages(self) -> bool:
        """Whether variables do not go from one micro-batch to the next."""
        names = ("data_axis", "axis_name")
        apart = any(self.given.get(name) is not None for name in names)
        return apart and not self.whole

    @property
    def whole(self) -> bool:
        """Whether `fun` sees all rows at once, so that its variables change once."""
        return self.given.get("whole_batch", False)


class _Call:
    """One call: its NNX objects taken apart, and put together in each micro-batch.

    Attributes:
      graph: the structure of the NNX objects among the arguments.
      params: the variables that `argnums` selects, by argument.
      keys: the keys of random streams, if they must differ between micro-batches.
      state: all other variables.
    """

    def __init__(
        self, modules: _Modules, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.modules, self.args, self.kwargs = modules, args, kwargs
        groups: Any = {"args": dict(enumerate(args)), "kwargs": kwargs}
        self.nodes = {
            group: {name: x for name, x in named.items() if _holds_variables(x)}
            for group, named in groups.items()
        }
        numbers = jax.tree.leaves(self.roles["argnums"])
        self.wanted = dict(zip(numbers, modules.filters, strict=True))
        self.graph, self.params, self.keys, self.state = self._split(self.nodes)
        self.changed: list[bool] = []
        for i, variables in self.selected.items():
            todo = "Select parameters with nnx.DiffState(argnum, filter)."
            check_not_empty(f"What argnums selects of argument {i}", variables, todo)

    @cached_property
    def roles(self) -> dict[str, Any]:
        """The options that count positional arguments, none of them negative."""
        return {
            name: jax.tree.map(partial(found, name, num_args=len(self.args)), numbers)
            for name, numbers in self.modules.options.items()
            if name.endswith("argnums")
        }

    @property
    def selected(self) -> dict[int, Any]:
        """The variables of each argument that `argnums` names and that has some."""
        params = self.params.get("args", {})
        return {i: params.get(i, ()) for i in self.wanted if i in self.nodes["args"]}

    @property
    def differentiated(self) -> Any:
        """What the gradient is that of, in its structure."""
        of = tuple(self.selected.get(i, self.args[i]) for i in self.wanted)
        return of if self.modules.several else of[0]

    def run(self, *acc: Accumulator) -> tuple[Any, Any]:
        """The value, and what `core` returns beside it; updates the NNX objects."""
        (loss, new), result = self.applied(*acc)
        value, new = ((loss, new[1]), new[0]) if self.modules.has_aux else (loss, new)
        self._update(new)
        return value, result

    def applied(self, *acc: Accumulator) -> Any:
        """What `core` returns for pure arguments."""
        modules, n = self.modules, len(self.args)
        roles = dict(self.roles) if modules.whole else self.roles | {"carry_argnums": n}
        if modules.averages:  # makes keys differ between devices and micro-batches
            others = jax.tree.leaves(roles.get("rng_argnums", ()))
            roles["rng_argnums"] = (*others, n + 1)
        options = modules.options | roles
        has_aux = modules.has_aux or modules.whole  # new variables are aux or a carry
        core = modules.core(self._micro_batch, has_aux=has_aux, **options)
        return core(*acc, *self._pure(), **self._others())

    def _pure(self) -> tuple[Any, ...]:
        """The positional arguments of `core`: the state and the keys come last."""
        given = (
            nnx.as_pure(self.selected.get(i)) if i in self.nodes["args"] else x
            for i, x in enumerate(self.args)
        )
        scalars = [list(key.reshape(-1)) for key in jax.tree.leaves(self.keys)]
        return (*given, nnx.as_pure(self.state), scalars)

    def _others(self) -> dict[str, Any]:
        """The keyword arguments without variables."""
        return {k: x for k, x in self.kwargs.items() if k not in self.nodes["kwargs"]}

    def _micro_batch(self, *inside: Any, **others: Any) -> Any:
        """`fun` of pure arguments; what it changed comes back beside its value."""
        *given, old, scalars = inside
        keys = [
            jnp.stack(x).reshape(key.shape)
            for x, key in zip(scalars, jax.tree.leaves(self.keys), strict=True)
        ]
        came = [given[i] for i in sorted(self.selected)], keys, old

        def run(came: Any) -> tuple[Any, Any]:
            return self._run(given, others, came)

        out, left = run(came)
        fixed, self.changed[:] = _changed(run, came, left)
        if any(fixed):
            raise ValueError(_ASSIGNED)
        new = nnx.as_pure(left[-1])
        if not self.modules.has_aux:
            return out, new
        is_pair = isinstance(out, (tuple, list)) and len(out) == 2
        return (out[0], (new, out[1])) if is_pair else out

    def _run(self, given: Any, others: Any, came: Any) -> tuple[Any, Any]:
        """What `fun` returns, and the variables that it leaves, in the order of `came`.

        `came` are the selected variables, the keys of streams and all others.
        """
        whole = self.params, self.keys, self.state
        objects = nnx.merge(self.graph, *map(_like, whole, came))
        given = [objects["args"].get(i, x) for i, x in enumerate(given)]
        out = self.modules.fun(*given, **others, **objects["kwargs"])
        graph, *left = self._split(objects)
        _check_graph(self.graph, graph, self.state, left[-1])
        return out, left

    def _split(self, nodes: Any) -> tuple[Any, ...]:
        """Graph, selected variables, keys of streams and other variables of objects."""

        def is_selected(path: tuple[Any, ...], value: Any) -> bool:
            group, name, *inside = path
            wanted = self.wanted.get(name) if group == "args" else None
            return wanted is not None and wanted(tuple(inside), value)

        keys = nnx.RngKey if self.modules.averages else False
        return nnx.split(nodes, is_selected, keys, ...)

    def _update(self, new: Any) -> None:
        """Puts variables back into the NNX objects.

        What stood still keeps its array: it is not copied or averaged over devices.
        """
        leaves = zip(
            *map(jax.tree.leaves, (self.state, new)), self.changed, strict=True
        )
        moved = [y if differs else x for x, y, differs in leaves]
        nnx.update(self.nodes, _like(self.state, moved))


_ASSIGNED = (
    "fun must not assign to what argnums selects, nor (with a data_axis or axis_name) "
    "to the keys of random streams, but it does. Update parameters after the window."
)


def _holds_variables(x: Any) -> bool:
    return any(isinstance(node, nnx.Variable) for _, node in nnx.iter_graph(x))


def _like(tree: Any, leaves: Any) -> Any:
    """The leaves of a tree, as the variables and containers of another."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(leaves))


def _changed(run: Callable[[Any], Any], came: Any, left: Any) -> tuple[Any, Any]:
    """Which variables `run` assigned to: of those that are fixed, and of the others.

    What an `nnx.remat` inside of it only hands on comes back as another array. Then
    the program of `run` tells.
    """
    number = len(jax.tree.leaves(came[:-1]))
    old, new = map(jax.tree.leaves, (came, left))
    changed = [x is not y for x, y in zip(old, new, strict=True)]
    if any(changed[:number]):
        closed = jax.make_jaxpr(lambda came: jax.tree.leaves(run(came)[1]))(came)
        changed = [i != place for i, place in enumerate(ir.forwarded(closed.jaxpr))]
    return changed[:number], changed[number:]


def _check_graph(old_graph: Any, graph: Any, old: Any, new: Any) -> None:
    todo = "Take out what fun adds with nnx.pop, and return it as aux."
    check_structure(
        *map(nnx.as_pure, (old, new)),
        name="What fun leaves",
        expected="its arguments",
        todo=todo,
    )
    if graph != old_graph:
        raise ValueError(
            "fun must leave the attributes of modules that are no variables, and the "
            "parameters, as they are, but it changes or adds some. Call model.train() "
            "or model.eval() before, or keep what changes in an nnx.Variable."
        )
