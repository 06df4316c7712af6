"""The program that JAX derives of a function with a custom derivative rule."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._partition.values import Value, type_here
from ga_optax._partition.writer import Writer
from ga_optax._passes import interpret, read, rewrite
from ga_optax._passes.read import is_inexact


class Derived(NamedTuple):
    """A function and the rule of the function, in the whole batch.

    Attributes:
      program: from the arguments of the function, and the cotangents of `given`, to
        the results of the function that are read, the residuals, and the cotangents of
        the `moving` arguments.
      num_results: the number of results of the function that are read.
      num_residuals: the number of residuals.
      given: the results that have a cotangent, by number among the results read.
      moving: the arguments that have a cotangent, by number.
    """

    program: read.Program
    num_results: int
    num_residuals: int
    given: list[int]
    moving: list[int]

    def split(self, xs: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Results of the program as `(results, residuals, cotangents)`."""
        n, m = self.num_results, self.num_results + self.num_residuals
        return list(xs[:n]), list(xs[n:m]), list(xs[m:])

    @property
    def cotangents(self) -> list[Any]:
        """The arguments of the program that are cotangents of results."""
        invars = self.program.jaxpr.invars
        return invars[len(invars) - len(self.given) :]

    @property
    def backward(self) -> read.Program:
        """The backward program: of residuals and arguments, and then of cotangents."""
        jaxpr, cts = self.program.jaxpr, self.cotangents
        results, residuals, grads = self.split(jaxpr.outvars)
        variables = read.variables([*results, *residuals])
        known = {*jaxpr.constvars, *jaxpr.invars, *variables}
        eqns, inputs = read.needed(jaxpr, grads, known.__contains__)
        invars = [*(x for x in inputs if x not in cts), *cts]
        program = jaxpr.replace(eqns=eqns, outvars=grads)
        return read.Program(rewrite.closing_over(program, [], [], invars))


def derived(
    w: Writer, e: core.JaxprEqn, vs: Sequence[Value], inputs: Sequence[bool]
) -> Derived:
    """The program that JAX derives of an equation; `inputs` says of which results."""
    outs: list[Any] = [x for x, reads in zip(e.outvars, inputs, strict=True) if reads]
    given = [i for i, x in enumerate(outs) if x in w.given]
    # JAX refuses cotangents of what a rule closes over: its constants, in a loop.
    args = range(e.params["num_consts"], len(vs))
    moving = [i for i in args if vs[i].smooth and is_inexact(vs[i].aval)]

    def results(*xs: Any) -> list[Any]:
        return [x for x, reads in zip(given_of(w, e, xs), inputs, strict=True) if reads]

    def run(xs: list[Any], cts: list[Any]) -> Any:
        of_moving = interpret.of_some(results, xs, moving)
        out, pullback = jax.vjp(of_moving, *(xs[i] for i in moving))
        every = interpret.put(list(map(zero, out)), given, cts)
        return out, jax.tree.leaves(pullback), pullback(every)

    types = [type_here(v.aval, v.shape, None) for v in vs]
    cts = [type_here(outs[i].aval, outs[i].aval.shape, None) for i in given]
    closed: Any
    closed, shapes = jax.make_jaxpr(run, return_shape=True)(types, cts)
    program = read.Program(closed.jaxpr, closed.consts)
    return Derived(program, len(outs), len(shapes[1]), given, moving)


def given_of(w: Writer, e: core.JaxprEqn, xs: Sequence[Any]) -> list[Any]:
    """The results of an equation; the cotangent of some is zero, and JAX knows it.

    To a rule such a zero is not what an array of zeros is: under `jax.vmap` JAX refuses
    arrays for what examples share.
    """
    pairs = zip(w.bound(e, xs), w.gives(e), strict=True)
    return [x if gives or not is_inexact(x) else stopped(x) for x, gives in pairs]


def stopped(x: Any) -> Any:
    """A value without derivatives."""
    return jax.lax.stop_gradient(x) if is_inexact(x) else x


def zero(x: Any) -> Any:
    """The tangent, or the cotangent, of what does not move."""
    if is_inexact(x):
        return jnp.zeros_like(x)
    return np.zeros(x.shape, jax.dtypes.float0)
