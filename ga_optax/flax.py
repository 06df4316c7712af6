"""Train state, NNX optimizer and NNX gradients: Flax's own, for windows.

`TrainState` and `Optimizer` take micro-steps with `ga_optax.apply_gradients`, so that
inside a window only the accumulator is touched. `value_and_grad` takes a module; what
the loss changes in it goes from one micro-batch to the next, and back into the module.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial, wraps
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.linen import fp8_ops
from flax.nnx import filterlib
from flax.training import train_state
from jax.typing import ArrayLike

from ga_optax._across import multi_steps, state
from ga_optax._checks import check_not_empty, check_structure, nodes_of
from ga_optax._inside import microbatch
from ga_optax._inside.options import found

__all__ = ["Optimizer", "TrainState", "value_and_grad"]

M = TypeVar("M")
_OVERWRITTEN = fp8_ops.OVERWRITE_WITH_GRADIENT


class TrainState(train_state.TrainState):
    """`flax.training.train_state.TrainState` for a `tx` that accumulates.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> from ga_optax.flax import TrainState
    >>> state = TrainState.create(
    ...     apply_fn=None, params={"w": jnp.ones(2)},
    ...     tx=ga.MultiSteps(optax.sgd(0.5), 2))
    >>> for g in ([1.0, 1.0], [1.0, 3.0], [0.0, 0.0]):
    ...     state = state.apply_gradients(grads={"w": jnp.array(g)})
    >>> state.params["w"], int(state.step)
    (Array([0.5, 0. ], dtype=float32), 3)
    >>> int(state.optimizer_steps), int(state.micro_step)
    (1, 1)

    Use it like Flax's: jit the training step and donate the state, and subclass it to
    add fields. Any `tx` works but for `optax.MultiSteps`. Without a `MultiSteps` in it,
    this is Flax's train state.

    Attributes:
      step: calls of `apply_gradients` so far, as in Flax: micro-steps, whether or not
        they closed a window. A key that `step` is folded into differs in each.
    """

    @property
    def optimizer_steps(self) -> jax.Array:
        """Updates of the inner optimizer so far, which its schedules count."""
        stats = _stats(self.opt_state)
        return jnp.asarray(self.step) if stats is None else stats.steps

    @property
    def micro_step(self) -> jax.Array:
        """Micro-steps in the open window; 0 if `tx` does not accumulate."""
        stats = _stats(self.opt_state)
        return jnp.int32(0) if stats is None else stats.fill

    def apply_gradients(
        self,
        *,
        grads: Any,
        weight: ArrayLike | None = None,
        emit: bool | jax.Array | None = None,
        **kwargs: Any,
    ) -> "TrainState":
        """Takes one micro-step, which updates `params` if it closes the window.

        Args:
          grads: the micro-batch's gradient, with the tree and shapes of `params`.
          weight: how much the micro-batch counts; see `ga_optax.accumulator.add`.
          emit: see `ga_optax.apply_gradients`.
          **kwargs: new values for fields of the state, as in Flax, and extra arguments
            for the optimizer.

        Returns:
          The new state.

        Raises:
          TypeError: if `tx` accumulates with `optax.MultiSteps`.
          ValueError: if `grads` does not fit `params`; the message names the leaf.
        """
        _check_accumulator(self.opt_state)
        fields = {field.name for field in dataclasses.fields(self)}
        replaced = {name: kwargs.pop(name) for name in fields & kwargs.keys()}
        # As in Flax: the gradient of an fp8 scaling factor is its new value.
        overwrites = isinstance(grads, Mapping) and _OVERWRITTEN in grads
        params, opt_state = multi_steps.apply_gradients(
            self.tx,
            grads["params"] if overwrites else grads,
            self.opt_state,
            self.params["params"] if overwrites else self.params,
            weight=weight,
            emit=emit,
            **kwargs,
        )
        if overwrites:
            params = {"params": params, _OVERWRITTEN: grads[_OVERWRITTEN]}
        return self.replace(
            step=self.step + 1, params=params, opt_state=opt_state, **replaced
        )

    def flush(self, **extra_args: Any) -> "TrainState":
        """Closes the window early, see `ga_optax.flush`; `step` stays as it is.

        Args:
          **extra_args: for the optimizer.

        Returns:
          The new state.

        Raises:
          TypeError: if `tx` is not a `MultiSteps`.
        """
        overwrites = isinstance(self.params, Mapping) and _OVERWRITTEN in self.params
        params = self.params["params"] if overwrites else self.params
        tx: Any = self.tx
        params, opt_state = multi_steps.flush(tx, self.opt_state, params, **extra_args)
        if overwrites:
            params = {**self.params, "params": params}
        return self.replace(params=params, opt_state=opt_state)


class Optimizer(nnx.Optimizer[M]):
    """`flax.nnx.Optimizer` for a `tx` that accumulates.

    >>> import jax.numpy as jnp, optax, ga_optax as ga
    >>> from flax import nnx
    >>> from ga_optax.flax import Optimizer
    >>> model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    >>> optimizer = Optimizer(model, ga.MultiSteps(optax.adam(1e-3), 2), wrt=nnx.Param)
    >>> def loss(model, x):
    ...     return jnp.mean(model(x) ** 2)
    >>> for _ in range(3):
    ...     optimizer.update(model, nnx.grad(loss)(model, jnp.ones((4, 2))))
    >>> int(optimizer.step[...]), int(optimizer.optimizer_steps)
    (3, 1)

    Attributes:
      step: calls of `update` so far, as in Flax: micro-steps, whether or not they
        closed a window.
    """

    @property
    def optimizer_steps(self) -> jax.Array:
        """Updates of the inner optimizer so far, which its schedules count."""
        stats = _stats(nnx.as_pure(self.opt_state))
        return self.step[...] if stats is None else stats.steps

    @property
    def micro_step(self) -> jax.Array:
        """Micro-steps in the open window; 0 if `tx` does not accumulate."""
        stats = _stats(nnx.as_pure(self.opt_state))
        return jnp.int32(0) if stats is None else stats.fill

    def update(  # pyrefly: ignore[bad-override]  # returns no updates
        self,
        model: M,
        grads: Any,
        /,
        *,
        weight: ArrayLike | None = None,
        emit: bool | jax.Array | None = None,
        **kwargs: Any,
    ) -> None:
        """Takes one micro-step, which changes `model` if it closes the window.

        Unlike Flax's `update` it returns nothing: inside a window there are no updates,
        not even zeros.

        Args:
          model: the model to update, in place.
          grads: what `nnx.grad` returned for the micro-batch.
          weight: how much the micro-batch counts; see `ga_optax.accumulator.add`.
          emit: see `ga_optax.apply_gradients`.
          **kwargs: extra arguments for the optimizer.

        Raises:
          TypeError: if `tx` accumulates with `optax.MultiSteps`.
          ValueError: if `grads` does not fit the model; the message names the leaf.
        """
        _check_accumulator(nnx.as_pure(self.opt_state))
        grads = nnx.as_pure(nnx.state(grads, self.wrt, graph=self.graph))
        named = {"weight": weight, "emit": emit, **nnx.as_pure(kwargs)}
        self._run(partial(multi_steps.apply_gradients, self.tx, grads, **named), model)
        self.step[...] += 1

    def flush(self, model: M, /, **extra_args: Any) -> None:
        """Closes the window early, see `ga_optax.flush`; `step` stays as it is.

        Args:
          model: the model to update, in place.
          **extra_args: for the optimizer.

        Raises:
          TypeError: if `tx` is not a `MultiSteps`.
        """
        self._run(partial(multi_steps.flush, self.tx, **nnx.as_pure(extra_args)), model)

    def _run(self, change: Callable[..., Any], model: M) -> None:
        """Replaces state and parameters by `change(state, params)`, in place."""
        params, opt_state = change(
            nnx.as_pure(self.opt_state),
            nnx.as_pure(nnx.state(model, self.wrt, graph=self.graph)),
        )
        nnx.update(model, params)
        nnx.update(self.opt_state, nnx.state(opt_state, graph=self.graph))


def _stats(opt_state: Any) -> state.Stats | None:
    """The counters of the `MultiSteps` in a state, None if there is none."""
    _check_accumulator(opt_state)
    return state.stats(opt_state) if state.find_states(opt_state) else None


def _check_accumulator(opt_state: Any) -> None:
    """Raises if Optax's accumulator is in a state: it cannot tell what we count."""
    if nodes_of(optax.MultiStepsState, opt_state):
        raise TypeError(
            "tx must accumulate with ga_optax.MultiSteps, but its state holds one of "
            "optax.MultiSteps. Pass ga_optax.MultiSteps(opt, k), which takes the same "
            "arguments; ga_optax.from_optax converts a saved state."
        )


# -- Gradients of modules --------------------------------------------------------------


def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int,
    *,
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

    Args:
      fun: a function like that of `nnx.value_and_grad`.
      num_microbatches: how many, static.
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
    if "carry_argnums" in options:
        raise TypeError(
            "carry_argnums must be left out, but it is "
            f"{options['carry_argnums']!r}. What fun changes in NNX objects is carried "
            "already: keep other state in an nnx.Variable."
        )
    several = isinstance(argnums, (tuple, list))
    named: Any = argnums if several else [argnums]
    positions = tuple(getattr(a, "argnum", a) for a in named)
    filters = [filterlib.to_predicate(getattr(a, "filter", nnx.Param)) for a in named]
    options.setdefault("batch_argnums", 1)
    options["argnums"] = positions if several else positions[0]
    core = partial(
        microbatch.value_and_grad,
        num_microbatches=num_microbatches,
        has_aux=has_aux,
    )
    core(fun, **options)  # raises if an option does not fit
    # Then the carry does not thread from one micro-batch to the next.
    keyed = any(options.get(name) is not None for name in ("data_axis", "axis_name"))

    @microbatch.warns_outside_jit
    @wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        n = len(args)
        roles: dict[str, Any] = {
            name: jax.tree.map(partial(found, name, num_args=n), numbers)
            for name, numbers in options.items()
            if name.endswith("argnums")
        }
        wanted = dict(zip(jax.tree.leaves(roles["argnums"]), filters, strict=True))
        groups: Any = {"args": dict(enumerate(args)), "kwargs": kwargs}
        nodes = {
            group: {name: x for name, x in named.items() if _holds_variables(x)}
            for group, named in groups.items()
        }
        split = partial(_split, wanted, nnx.RngKey if keyed else False)
        graph, params, keys, state = split(nodes)
        selected = {
            i: params.get("args", {}).get(i, ()) for i in wanted if i in nodes["args"]
        }
        for i, variables in selected.items():
            todo = "Select parameters with nnx.DiffState(argnum, filter)."
            check_not_empty(f"What argnums selects of argument {i}", variables, todo)
        changed: list[bool] = []

        def micro_batch(*inside: Any, **others: Any) -> Any:
            *given, old, scalars = inside
            whole = [
                jnp.stack(x).reshape(key.shape)
                for x, key in zip(scalars, jax.tree.leaves(keys), strict=True)
            ]
            fixed = [given[i] for i in sorted(selected)], whole
            parts = _like(params, fixed[0]), _like(keys, whole), _like(state, old)
            inner = nnx.merge(graph, *parts)
            given = [inner["args"].get(i, x) for i, x in enumerate(given)]
            out = fun(*given, **others, **inner["kwargs"])
            new_graph, *rest, new = split(inner)
            _check_graph(graph, new_graph, state, new)
            if any(_differ(fixed, rest)):
                raise ValueError(_ASSIGNED)
            changed[:] = _differ(old, new)
            new = nnx.as_pure(new)
            if not has_aux:
                return out, new
            is_pair = isinstance(out, (tuple, list)) and len(out) == 2
            return (out[0], (new, out[1])) if is_pair else out

        if keyed:  # makes keys differ between devices and micro-batches
            others = jax.tree.leaves(roles.get("rng_argnums", ()))
            roles["rng_argnums"] = (*others, n + 1)
        given = [
            nnx.as_pure(selected.get(i)) if i in nodes["args"] else x
            for i, x in enumerate(args)
        ]
        scalars = [list(key.reshape(-1)) for key in jax.tree.leaves(keys)]
        others = {name: x for name, x in kwargs.items() if name not in nodes["kwargs"]}
        run = core(micro_batch, carry_argnums=n, **(options | roles))
        (loss, new), grads = run(*given, nnx.as_pure(state), scalars, **others)
        value, new = ((loss, new[1]), new[0]) if has_aux else (loss, new)
        # What stood still keeps its array: it is not copied or averaged over devices.
        leaves = zip(*map(jax.tree.leaves, (state, new)), changed, strict=True)
        nnx.update(nodes, _like(state, [y if moved else x for x, y, moved in leaves]))
        of = tuple(selected.get(i, args[i]) for i in wanted)
        return value, _like(of if several else of[0], grads)

    return value_and_grad_fun


_ASSIGNED = (
    "fun must not assign to what argnums selects, nor (with a data_axis or axis_name) "
    "to the keys of random streams, but it does. Update parameters after the window."
)


def _holds_variables(x: Any) -> bool:
    return any(isinstance(node, nnx.Variable) for _, node in nnx.iter_graph(x))


def _split(wanted: Mapping[int, Any], keys: Any, nodes: Any) -> tuple[Any, ...]:
    """Graph, selected variables, `keys` and other variables of NNX objects."""

    def is_selected(path: tuple[Any, ...], value: Any) -> bool:
        group, name, *inside = path
        return group == "args" and name in wanted and wanted[name](tuple(inside), value)

    return nnx.split(nodes, is_selected, keys, ...)


def _like(tree: Any, leaves: Any) -> Any:
    """The leaves of a tree, as the variables and containers of another."""
    return jax.tree.unflatten(jax.tree.structure(tree), jax.tree.leaves(leaves))


def _differ(old: Any, new: Any) -> list[bool]:
    """Which leaves are not the same object."""
    return [x is not y for x, y in zip(*map(jax.tree.leaves, (old, new)), strict=True)]


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
