"""The state of an optimizer in the host's memory.

    state  =  to_host(opt.init(params))
    updates, state  <-  to_host(opt.update(grads, to_device(state), params))

Arrays of the state that do not meet, such as the moments of two parameters, are moved
in one after another: a group of arrays follows when the results of the group before
are there. So the device holds one group at a time if XLA keeps the order, which it
does on GPUs. Nothing says which arrays meet but the program of `opt.update`, so this
program is traced, and its equations are grouped.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .._checks import check_structure, is_on_host, named_leaves
from .._devices.collectives import on_device
from .._passes import jaxprs
from .choices import cast_like
from .config import accumulators_in, check_optimizer


def on_host(
    opt: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """`opt`, whose state lies in the host's memory and visits the device for a step.

    For states that do not fit beside the activations: two trees of the size of the
    parameters for Adam. Inside of `MultiSteps` the state moves once a window, and no
    other micro-step touches it. The same holds of one update after `value_and_grad`.

    >>> import jax, jax.numpy as jnp, optax, ga_optax as ga
    >>> tx = ga.MultiSteps(ga.on_host(optax.adam(1e-3)), 4)
    >>> params = jnp.zeros((8, 8))
    >>> state = jax.jit(tx.init)(params)
    >>> adam = state.inner_opt_state[0]
    >>> adam.mu.sharding.memory_kind, adam.count.sharding.memory_kind
    ('pinned_host', 'device')
    >>> step = jax.jit(
    ...     lambda params, state, grads: ga.apply_gradients(tx, grads, state, params),
    ...     donate_argnums=(0, 1))
    >>> params, state = step(params, state, jnp.ones((8, 8)))

    **Cost.** A step moves the state twice: to the device, and back. Arrays that the
    optimizer computes one by one move one after another, so a GPU holds few at a time;
    a TPU's compiler moves arrays earlier. Donate parameters and state, and return them
    in this order: JAX would give the buffer of a state on the host to a result of the
    same shape that comes first, and stop.

    **Exactness.** The same operations as those of `opt`, in the same dtypes.

    Args:
      opt: any `optax.GradientTransformation`, but for one that accumulates gradients.

    Returns:
      A transformation whose state has the tree of the state of `opt`. Arrays with an
      axis lie in memory of the kind `"pinned_host"`, sharded as before; scalars, such
      as counts, and keys stay on the device. `init` under `jax.jit` makes the state
      where it belongs; outside, the device holds all of it for a moment.

    Raises:
      TypeError: if `opt` is no optimizer.
      ValueError: in `init`, if `opt` accumulates gradients; in `update`, if an array of
        the state does not lie in the host's memory.
    """
    check_optimizer("opt", opt, "Pass an optimizer, such as optax.adam(1e-3).")
    inner = optax.with_extra_args_support(opt)

    def init(params: optax.Params) -> optax.OptState:
        state = inner.init(params)
        for where in accumulators_in(state):
            raise ValueError(
                "on_host must not move a sum of gradients, which changes in every "
                f"micro-step, but {where}. Put it inside: MultiSteps(on_host(opt), k)."
            )
        return jax.tree.map(lambda x: _to_host(x) if _moves(x) else x, state)

    def update(
        updates: optax.Updates,
        state: optax.OptState,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, optax.OptState]:
        _check(state)
        leaves, structure = jax.tree.flatten(state)
        places = [i for i, x in enumerate(leaves) if is_on_host(x)]
        trees: list[Any] = []

        def updated(*moved: jax.Array) -> list[Any]:
            here = jaxprs.put(leaves, places, [*map(on_device, moved)])
            old = structure.unflatten(here)
            out, new = inner.update(updates, old, params, **extra_args)
            names = {"name": "The state that opt.update returns", "expected": "state"}
            check_structure(old, new, **names)
            trees.append(jax.tree.structure(out))
            return [*jax.tree.leaves(cast_like(new, old)), *jax.tree.leaves(out)]

        moved = [leaves[i] for i in places]
        is_traced = any(isinstance(x, jax.core.Tracer) for x in moved)
        results = _in_turn(updated, moved) if is_traced else updated(*moved)
        new = jaxprs.put(results, places, [_to_host(results[i]) for i in places])
        out = trees[-1].unflatten(new[len(leaves) :])
        return out, structure.unflatten(new[: len(leaves)])

    return optax.GradientTransformationExtraArgs(init, update)


def _to_host(x: Any) -> jax.Array:
    return jax.device_put(x, jax.memory.Space.Host)


def _moves(x: Any) -> bool:
    """True for an array with an axis, but for PRNG keys.

    A scalar would take a transfer as long as that of a kilobyte, and is read by what
    runs inside of the window, such as a log.
    """
    return jnp.ndim(x) > 0 and not jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _check(state: Any) -> None:
    """Raises if an array lies on the device that `init` put on the host."""
    for name, x in named_leaves(state):
        if _moves(x) and not is_on_host(x):
            raise ValueError(
                f"The state of on_host must lie in the host's memory, but {name} does "
                "not. Restore checkpoints into the shardings of init(params), or pass "
                "jax.device_put(leaf, jax.memory.Space.Host). Shapes from "
                "jax.eval_shape say nothing of memory: give them shardings. Use "
                "on_host once, around the whole optimizer."
            )


# -- One group after another -----------------------------------------------------------


def _in_turn(fun: Callable[..., Any], args: list[jax.Array]) -> list[Any]:
    """`fun(*args)`. Arguments that do not meet are read in turn."""
    program = jaxprs.program_of(fun, *args)
    program = jaxprs.program_of(lambda *xs: _inlined(program, xs), *args)
    jaxpr: Any = program.jaxpr
    names, arguments = [*jaxpr.constvars, *jaxpr.invars], {*jaxpr.invars}
    env: dict[Any, Any] = dict(zip(names, [*program.consts, *args], strict=True))
    done: list[jax.Array] = []
    for group in _groups(jaxpr):
        atoms = jaxprs.variables(x for e in group for x in e.invars)
        read = [x for x in dict.fromkeys(atoms) if x in env]
        moved = [x for x in read if x in arguments]
        if done:
            xs, _ = jax.lax.optimization_barrier(([env[x] for x in moved], done))
            env |= dict(zip(moved, xs, strict=True))
        made = [x for e in group for x in e.outvars if jaxprs.num_readers(jaxpr, x)]
        out = jaxprs.bind(jaxpr, group, read, made, [env[x] for x in read])
        env |= dict(zip(made, out, strict=True))
        done = out if moved else []
    return [env[x] if jaxprs.is_variable(x) else x.val for x in jaxpr.outvars]


def _inlined(program: jaxprs.Program, args: Sequence[Any]) -> list[Any]:
    """The results of a program, with the equations of jitted functions in their place.

    Some optimizers call one for a whole tree, where arrays would seem to meet.
    """

    def rule(equation: Any, values: list[Any]) -> list[Any] | None:
        if jaxprs.kind(equation) != "call":
            return None
        return _inlined(jaxprs.inner(equation)[0], values)

    return jaxprs.evaluate(program, args, rule)


def _groups(jaxpr: Any) -> list[list[Any]]:
    """Equations that depend on no argument; then, for arguments that meet, theirs."""
    parent = {x: x for x in jaxpr.invars}

    def root(x: Any) -> Any:
        while parent[x] is not x:
            parent[x] = x = parent[parent[x]]
        return x

    def of(atoms: Iterable[Any]) -> list[Any]:
        return [root(x) for x in jaxprs.variables(atoms) if x in parent]

    for equation in jaxpr.eqns:
        its = of(equation.invars)
        for other in its[1:]:
            parent[root(other)] = root(its[0])
        parent.update((x, root(its[0])) for x in equation.outvars if its)
    groups: dict[Any, list[Any]] = {None: []}
    for equation in jaxpr.eqns:
        groups.setdefault(next(iter(of(equation.invars)), None), []).append(equation)
    return [*groups.values()]
