"""Gradients that are rounded to the accumulator's dtype, and not to the model's before.

In a bfloat16 model the gradient of a matrix is a product of bfloat16 matrices. Its sums
run in float32 on every machine; they are rounded to bfloat16, cast to float32 and added
to the accumulator. Here the cast's own sum comes out in float32. That leaves out one
rounding, and nothing stands between product and addition any more: they become one
kernel (cuBLAS's `beta = 1`, in the slice of the layer if the model scans).

Only sums that go nowhere but into an accumulator are changed: the program of a
micro-step is followed from its accumulators back to the casts.
"""

import collections
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

_WIDE = np.dtype(np.float32)  # in which products of narrower matrices are summed
_ALGORITHMS = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)
INLINE = ("jit", "pjit", "remat2", "checkpoint")
_CALLS = (*INLINE, "scan", "cond")
_MOVES = ("transpose", "reshape", "squeeze", "broadcast_in_dim")
# What a gradient passes between its cast and the accumulator.
_SENT = ("reduce_scatter", "psum", "psum_invariant", "pvary")
_PASSED = (*_MOVES, *_SENT, "add", "add_any", "select_n", "custom_jvp_call")


def rounded_once(step: Callable[..., Any], num_sums: int, *args: Any) -> Any:
    """`step`, the first results of which are sums of gradients rounded once."""
    closed, out = jax.make_jaxpr(step, return_shape=True)(*args)
    jaxpr, _ = _followed(closed.jaxpr, range(num_sums), ())
    if jaxpr is closed.jaxpr:
        return step

    def run(*args: Any) -> Any:
        flat = jax.core.eval_jaxpr(jaxpr, closed.consts, *jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(out), flat)

    return run


def _followed(
    jaxpr: core.Jaxpr, results: Iterable[int], refs: Iterable[int]
) -> tuple[core.Jaxpr, list[int]]:
    """The program, in which what some results sum up, or references, is rounded once.

    It is `jaxpr` itself if nothing is changed. Also the arguments that are summed up.
    """
    body = _Body(jaxpr)
    sums = {x for i in results if isinstance(x := jaxpr.outvars[i], core.Var)}
    held = {jaxpr.invars[i] for i in refs}
    for n, equation in reversed(list(enumerate(jaxpr.eqns))):
        name = equation.primitive.name
        ins: list[Any] = equation.invars
        outs = [i for i, x in enumerate(equation.outvars) if x in sums]
        into = [i for i, x in enumerate(ins) if isinstance(x, core.Var) and x in held]
        if name in _CALLS and (outs or into):

            def inside(inner: core.Jaxpr, ins=ins, outs=outs, into=into) -> core.Jaxpr:
                rest = len(ins) - len(inner.invars)  # the predicate of a conditional
                new, summed = _followed(inner, outs, [i - rest for i in into])
                sums.update(
                    x for i in summed if isinstance(x := ins[i + rest], core.Var)
                )
                return new

            body.replace(n, with_inner(equation, inside))
        elif name in ("addupdate", "swap") and into:
            sums.add(ins[1])
        elif name == "freeze" and outs:
            held.add(ins[0])
        elif name == "convert_element_type" and outs:
            is_wide = equation.params["new_dtype"] == _WIDE
            if is_wide and (x := body.wide(ins[0])) is not None:
                body.replace(n, equation.replace(invars=[x]))
        elif name in _PASSED and outs and len(equation.outvars) == 1:
            sums.update(x for x in ins if isinstance(x, core.Var))
    return body.program(), [i for i, x in enumerate(jaxpr.invars) if x in sums]


class _Body:
    """The equations of a program, some of them replaced."""

    def __init__(self, jaxpr: core.Jaxpr) -> None:
        self.jaxpr = jaxpr
        self._new: dict[int, list[core.JaxprEqn]] = {}
        self._made = {x: n for n, e in enumerate(jaxpr.eqns) for x in e.outvars}
        read = [x for e in jaxpr.eqns for x in e.invars] + jaxpr.outvars
        self._uses = collections.Counter(x for x in read if isinstance(x, core.Var))

    def replace(self, n: int, *equations: core.JaxprEqn) -> None:
        if equations != (self.jaxpr.eqns[n],):
            self._new[n] = list(equations)

    def program(self, outvars: list[Any] | None = None) -> core.Jaxpr:
        if not self._new:
            return self.jaxpr
        eqns = [x for n, e in enumerate(self.jaxpr.eqns) for x in self._new.get(n, [e])]
        return self.jaxpr.replace(eqns=eqns, outvars=outvars or self.jaxpr.outvars)

    def wide(self, x: Any) -> Any:
        """The sum `x` before it was rounded; None if it is none, or is read twice."""
        if not isinstance(x, core.Var) or self._uses[x] != 1 or x not in self._made:
            return None
        dtype: Any = getattr(x.aval, "dtype", _WIDE)
        if not jnp.issubdtype(dtype, np.floating) or dtype.itemsize > 2:
            return None
        n = self._made[x]
        equation = self.jaxpr.eqns[n]
        name, params, ins = equation.primitive.name, equation.params, equation.invars
        wide = _widened(x)
        outs = [wide if y is x else y for y in equation.outvars]
        casts: list[core.JaxprEqn] = []

        def cast(y: Any) -> Any:
            new = _widened(y)
            how = {"new_dtype": _WIDE, "weak_type": False, "sharding": None}
            ends = {"invars": [y], "outvars": [new], "effects": core.no_effects}
            primitive = jax.lax.convert_element_type_p
            casts.append(equation.replace(primitive=primitive, params=how, **ends))
            return new

        if name in _MOVES:
            ins = [self.wide(ins[0]), *ins[1:]]
            if ins[0] is None:
                return None
        elif name in ("dot_general", "conv_general_dilated"):
            if isinstance(params["precision"], _ALGORITHMS):
                return None  # it names the dtype
            self.replace(n, *_product(equation, wide))
            return wide
        elif name == "add_any":
            parts = list(map(self.wide, ins))
            if parts == [None, None]:
                return None
            ins = [new or cast(y) for new, y in zip(parts, ins, strict=True)]
        elif name == "reduce_sum":
            ins = [self.wide(ins[0]) or cast(ins[0])]
        elif name == "scatter-add":
            table, rows, updates = ins
            ins = [cast(table), rows, cast(updates)]
            params = params | {"update_jaxpr": _retyped(params["update_jaxpr"])}
        elif name in INLINE:
            [i] = [i for i, y in enumerate(equation.outvars) if y is x]
            found: list[Any] = []

            def inside(jaxpr: core.Jaxpr) -> core.Jaxpr:
                body = _Body(jaxpr)
                found.append(body.wide(jaxpr.outvars[i]))
                new = [found[0] if j == i else y for j, y in enumerate(jaxpr.outvars)]
                return jaxpr if found[0] is None else body.program(new)

            params = with_inner(equation, inside).params
            if found[0] is None:
                return None
        else:
            return None
        new = equation.replace(invars=ins, outvars=outs, params=params)
        self.replace(n, *casts, new)
        return wide


def _product(equation: core.JaxprEqn, result: core.Var) -> list[core.JaxprEqn]:
    """A product of narrow matrices or images in float32.

    On CPUs its operands are cast. XLA would do the same, but forgets some of them if
    the result is transposed, and then cannot run the program (jaxlib 0.10 to 0.12).
    """
    params = equation.params | {"preferred_element_type": _WIDE}

    def direct(*operands: jax.Array) -> jax.Array:
        return equation.primitive.bind(*operands, **params)

    def cast(*operands: jax.Array) -> jax.Array:
        return direct(*(x.astype(_WIDE) for x in operands))

    def product(*operands: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(*operands, cpu=cast, default=direct)

    ins = equation.invars
    jaxpr = jax.make_jaxpr(product)(*(x.aval for x in ins)).jaxpr
    known = dict(zip(jaxpr.invars, ins, strict=True)) | {jaxpr.outvars[0]: result}

    def renamed(xs: Iterable[Any]) -> list[Any]:
        return [x if isinstance(x, core.Literal) else known.get(x, x) for x in xs]

    return [
        e.replace(invars=renamed(e.invars), outvars=renamed(e.outvars))
        for e in jaxpr.eqns
    ]


def _widened(x: Any) -> Any:
    return core.Var(x.aval.update(dtype=_WIDE))


def _retyped(jaxpr: core.Jaxpr) -> core.Jaxpr:
    """A program of narrow scalars, of wide ones."""
    known = {}

    def retype(x: Any) -> Any:
        return known.setdefault(x, _widened(x))

    def all_of(xs: Iterable[Any]) -> list[Any]:
        return list(map(retype, xs))

    eqns = [
        e.replace(invars=all_of(e.invars), outvars=all_of(e.outvars))
        for e in jaxpr.eqns
    ]
    ends = {"invars": all_of(jaxpr.invars), "outvars": all_of(jaxpr.outvars)}
    return jaxpr.replace(eqns=eqns, **ends)


def with_inner(
    equation: core.JaxprEqn, change: Callable[[core.Jaxpr], core.Jaxpr]
) -> core.JaxprEqn:
    """The equation, with each program inside it changed; itself if none is."""

    def changed(x: Any) -> Any:
        if not hasattr(x, "eqns"):
            return x
        inner = getattr(x, "jaxpr", x)
        new = change(inner)
        return x if new is inner else x.replace(jaxpr=new) if inner is not x else new

    params = {
        key: tuple(map(changed, x)) if isinstance(x, tuple) else changed(x)
        for key, x in equation.params.items()
    }
    same = all(
        x is y or (isinstance(x, tuple) and all(map(lambda a, b: a is b, x, y)))
        for x, y in zip(params.values(), equation.params.values(), strict=True)
    )
    return equation if same else equation.replace(params=params)
