"""`value_and_grad` as one equation, whose derivatives are those of the law.

    run          the program of the window, written when `fun` is traced
    derivatives  those of `jax.value_and_grad(fun)`, as a function over micro-batches

The program of a window has the first derivative of each rule of the user's, and not the
rules, see `rules`. So only without such rules is the tangent of that program the right
one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from ga_optax._calls import equation, layouts, rules, whole
from ga_optax._calls.call import Call
from ga_optax._calls.options import Options
from ga_optax._passes import ir
from ga_optax._passes.divided import Divided


def of_options(options: Options) -> Callable[..., tuple[Any, Any]]:
    """`value_and_grad` with options that are checked."""
    of_both = whole.of_pair(options)

    @functools.wraps(options.fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = Call.make(of_both, args, kwargs, hint=True)
        (loss, aux), grads = whole.of_call(call, _as_equation)
        aux = whole.as_came(aux)
        return ((loss, aux) if options.has_aux else loss), grads

    return value_and_grad_fun


def _as_equation(call: Call, trace: layouts.Traced) -> Any:
    """What `whole.divided` returns, by one equation if anything is traced."""
    leaves = call.leaves("argnums") | call.leaves("batch_argnums")
    xs = [*trace.closed.consts, *map(jnp.asarray, leaves.values())]
    traced = any(isinstance(x, jax.core.Tracer) for x in xs)
    rule = rules.rule_in(trace.closed.jaxpr) if traced else None
    if not traced or (call.options.axes and rule is None):
        return whole.divided(call, trace)
    first = len(trace.closed.consts)

    def run(*xs: Any) -> Any:
        closed = trace.closed.replace(consts=list(xs[:first]))
        here = call.with_leaves(dict(zip(leaves, xs[first:], strict=True)))
        return whole.divided(here, trace._replace(closed=closed))

    if call.axes and rule is not None:
        error = rules.refused(call, rule, "What value_and_grad returns")
        return run(*(rules.fixed(x, error) for x in xs))
    program, out = jax.make_jaxpr(run, return_shape=True)(*xs)
    operands = [*program.consts, *xs]
    jaxpr = ir.live(ir.without_constants(program.jaxpr))
    # What nobody reads is no operand, so that `jax.jit` sees that it is not used.
    types: list[Any] = [x.aval for x in jaxpr.invars]
    is_key = [jnp.issubdtype(x.dtype, jax.dtypes.extended) for x in types]
    pairs = enumerate(zip(jaxpr.invars, is_key, strict=True))
    read = [i for i, (x, key) in pairs if key or ir.num_readers(jaxpr, x)]
    kept = [operands[i] for i in read]
    jaxpr = ir.closing_over(jaxpr, [], [], [jaxpr.invars[i] for i in read])
    program = core.ClosedJaxpr(jaxpr, [])
    flat, rows = _flat(trace, list(map(jax.typeof, operands)), read), call.split_axes
    axes = [*[None] * (len(operands) - len(rows)), *rows]
    how = equation.over_micro_batches(call)
    if call.options.axes:
        how |= {"runs": _at_once, "finds": lambda its: [None] * len(its.results)}
    its = Divided(
        flat=flat,
        types=tuple(program.in_avals),
        results=tuple(program.out_avals),
        axes=tuple(axes[i] for i in read),
        exact=rule is None,
        **how,
    )
    return jax.tree.unflatten(jax.tree.structure(out), its.bind(kept, program))


def _flat(
    trace: layouts.Traced, types: Sequence[Any], read: Sequence[int]
) -> Callable[..., list[Any]]:
    """`jax.value_and_grad` of the traced function, whose operands are the last.

    Of all operands, by their types, those come that are read.
    """
    jaxpr, num_params = trace.closed.jaxpr, trace.num_params
    number = len(types)

    def zero(i: int) -> Any:
        return None if i in read else jnp.zeros(types[i].shape, types[i].dtype)

    unread = number - len(jaxpr.constvars) - len(jaxpr.invars)

    def flat(*some: Any) -> list[Any]:
        xs = ir.put([*map(zero, range(number))], read, some)
        own = xs[number - len(jaxpr.invars) :]
        consts = xs[unread : number - len(own)]

        def loss_of(*params: Any) -> tuple[Any, list[Any]]:
            args = [*params, *own[num_params:]]
            loss, *aux = jax.core.eval_jaxpr(jaxpr, consts, *args)
            return loss, aux

        loss, pull, aux = jax.vjp(loss_of, *own[:num_params], has_aux=True)
        return [loss, *aux, *pull(jnp.ones_like(loss))]

    return flat


# -- On a mesh -------------------------------------------------------------------------


def _at_once(its: Divided, xs: Sequence[Any]) -> list[Any]:
    """A derivative of all rows of a device at once: the compiler distributes it."""
    return ir.results(its.program, xs)
