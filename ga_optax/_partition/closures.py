"""Closures: the arrays that a derivative rule takes from the function around it.

A rule may close over an array that the function around it computes. JAX leaves the
tracer of that array in the rule, and so the rule runs only while JAX traces the
function around it. The tracer of a `jax.vmap` stands for no variable of that program,
so a rule that was made in there cannot take it as an operand: it has escaped.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core

from .._passes import checkpoints, effects, jaxprs
from .._passes.equation import NoDerivativeError, not_differentiable
from .._passes.places import looked_at, place_of


class EscapedError(NoDerivativeError):
    """A rule closes over what a `jax.vmap` around it maps.

    Attributes:
      traced: the program with that rule, and the tree of its results.
    """

    traced: Any = None


def without_closures(
    closed: Any, axis_env: Sequence[Any], smooth: int | None = None
) -> Any:
    """A traced program, whose rules take what they close over as operands.

    Args:
      closed: the program.
      axis_env: the names of axes in it.
      smooth: the number of operands that have a derivative, which is that of the first
        result; None if all have, and all results.
    """
    jaxpr = closed.jaxpr
    start, results = jaxpr.invars[:smooth], jaxpr.outvars[:1]
    if smooth is None:
        start, results = None, jaxpr.outvars
    taken = _closed_over(jaxpr, start, results)
    if not taken:
        return closed

    def fun(*args: Any) -> list[Any]:
        return _evaluated(closed, args, taken, {})

    new: Any = jax.make_jaxpr(fun, axis_env=list(axis_env))(*closed.in_avals)
    return new.replace(jaxpr=new.jaxpr.replace(debug_info=jaxpr.debug_info))


def _evaluated(
    program: Any, args: Sequence[Any], taken: "_Taken", outer: Mapping[Any, Any]
) -> list[Any]:
    """The results of a program, some of whose rules take what they close over.

    `outer` has values of variables of programs around it.
    """
    jaxpr = program.jaxpr
    names = [*jaxpr.constvars, *jaxpr.invars]
    known = dict(outer) | dict(zip(names, [*program.consts, *args], strict=True))

    def rule(e: core.JaxprEqn, values: list[Any]) -> list[Any]:
        out = inside(e, values)
        if out is None:
            out = jaxprs.bind(jaxpr, [e], e.invars, e.outvars, values)
        known.update(zip(e.outvars, out, strict=True))
        return out

    def inside(e: core.JaxprEqn, values: list[Any]) -> list[Any] | None:
        if not any(id(x) in taken for x in jaxprs.within(e)):
            return None
        runs = [_run_by(x, rule) for x in jaxprs.inner(e)]
        if id(e) in taken:
            (ruled, tracers), error = taken[id(e)], _closes_over(e)
            kept = {key: known.get(key, x) for key, x in tracers.items()}
            kept = {key: not_differentiable(x, error) for key, x in kept.items()}
            return _taking(ruled, list(kept), runs[0])(list(kept.values()), *values)
        return _with_programs(e, runs, values)

    return jaxprs.evaluate(program, args, rule)


def _closes_over(e: core.JaxprEqn) -> Exception:
    return NoDerivativeError(
        f"The rule of the function at {place_of(e.source_info)} must not close "
        "over an array that depends on what is differentiated, but it does. Make that "
        "array an argument of the function and of the rule."
    )


def _run_by(program: jaxprs.Program, rule: jaxprs.Override) -> Callable[..., list[Any]]:
    return lambda *xs: jaxprs.evaluate(program, xs, rule)


def _with_programs(
    e: core.JaxprEqn, runs: Sequence[Callable[..., Any]], values: list[Any]
) -> list[Any] | None:
    """The results of an equation with other programs inside; None of a `while`."""
    kind, run = jaxprs.kind(e), runs[0]
    if kind == "scan":
        return jaxprs.scan(jaxprs.scan_of(e), lambda xs: run(*xs), values)
    if kind == "cond":
        return jax.lax.switch(values[0], runs, *values[1:])
    if kind == "checkpoint":
        return checkpoints.checkpointed(e, run)(*values)
    return run(*values) if kind == "call" else None


class _Ruled(NamedTuple):
    """A function with a rule: an equation of a program.

    Attributes:
      equation: the equation.
      program: the program around it.
      places: the operands that can have a tangent; a rule may refuse others.
    """

    equation: core.JaxprEqn
    program: core.Jaxpr
    places: list[int]

    @property
    def has_jvp(self) -> bool:
        return self.equation.primitive.name == "custom_jvp_call"

    def results(self, *xs: Any) -> list[Any]:
        """The results, for these operands."""
        e = self.equation
        e = e.replace(invars=[core.Var(x.aval) for x in e.invars])  # may be one, twice
        return jaxprs.bind(self.program, [e], e.invars, e.outvars, xs)

    def of_moving(self, xs: Sequence[Any]) -> tuple[Callable[..., Any], list[Any]]:
        """The results as a function of the operands that can move, and these."""
        some = [xs[i] for i in self.places]
        return jaxprs.of_some(self.results, xs, self.places), some

    def constants(self) -> Sequence[Any]:
        """The constants of the rule."""
        e = self.equation
        moving = [e.invars[i] for i in self.places]
        program, error = looked_at(effects.backward, self.program, e, moving)
        if isinstance(error, jax.errors.UnexpectedTracerError):
            raise EscapedError(
                "A rule must not close over what a jax.vmap around it maps, but that "
                f"at {place_of(e.source_info)} does. Make it an argument of the "
                "function and of the rule."
            ) from error
        return program.consts if program else ()


def _ruled(
    jaxpr: core.Jaxpr, start: Collection[Any] | None, results: Sequence[Any]
) -> Iterator[_Ruled]:
    """The functions whose rules the derivative of `results` needs, if `start` moves."""
    if not effects.has_rules(jaxpr):
        return
    moving, given = effects.moving(jaxpr, start), jaxprs.moved_by(jaxpr, results)
    for e in jaxpr.eqns:
        if given.isdisjoint(e.outvars):
            continue
        is_jvp = e.primitive.name == "custom_jvp_call"
        if is_jvp or e.primitive.name == "custom_vjp_call":
            # JAX refuses tangents of what a function closes over: its constants.
            every = range(e.params["num_consts"], len(e.invars))
            moves = [i for i in every if jaxprs.is_among(e.invars[i], moving)]
            # A `jax.custom_gradient` is a function of JAX, with a rule of the user's.
            if moves and not (is_jvp and effects.is_of_jax(e)):
                yield _Ruled(e, jaxpr, moves)
            continue
        for program in jaxprs.inner_programs(e):
            inside = effects.moving_inside(e, program, moving)
            yield from _ruled(program, inside, program.outvars)


_Taken = dict[int, tuple[_Ruled, dict[Any, Any]]]  # by the `id` of an equation


def _closed_over(
    jaxpr: core.Jaxpr, start: Collection[Any] | None, results: Sequence[Any]
) -> _Taken:
    """Functions whose rules close over tracers, and these by a key."""
    found: _Taken = {}
    for ruled in _ruled(jaxpr, start, results):
        its = [x for x in ruled.constants() if isinstance(x, jax.core.Tracer)]
        if its:
            found[id(ruled.equation)] = ruled, {_key(x): x for x in its}
    return found


def _key(x: Any) -> Any:
    """The variable of a tracer of a program; the identity of all else."""
    variable = getattr(x, "val", None) if isinstance(x, jax.core.Tracer) else None
    return variable if isinstance(variable, core.Var) else id(x)


def _taking(
    ruled: _Ruled, keys: Sequence[Any], run: Callable[..., Any]
) -> Callable[..., list[Any]]:
    """A function whose rule takes what it closes over: a list, the first argument.

    `keys` tell what is in that list, `run` is the function without the rule.
    """

    def with_values(values: Sequence[Any], fun: Callable[..., Any], *args: Any) -> Any:
        """`fun(*args)`, where `fun` closes over variables with these values."""
        known = dict(zip(keys, values, strict=True))
        closed: Any
        closed, shape = jax.make_jaxpr(fun, return_shape=True)(*args)
        consts = [known.get(_key(x), x) for x in closed.consts]
        program = jaxprs.Program(closed.jaxpr, consts)
        # A rule may call the function again, which closes over the same.
        taken = _closed_over(closed.jaxpr, closed.jaxpr.invars, closed.jaxpr.outvars)
        out = _evaluated(program, jax.tree.leaves(args), taken, known)
        return jax.tree.unflatten(jax.tree.structure(shape), out)

    def jvp(primals: Any, tangents: Any) -> Any:
        (values, *xs), (_, *dots) = primals, tangents
        fun, some = ruled.of_moving(xs)
        dots = [dots[i] for i in ruled.places]
        return with_values(values, lambda *pair: jax.jvp(fun, *pair), some, dots)

    def forward(values: Any, *xs: Any) -> Any:
        fun, some = ruled.of_moving(xs)
        out, pullback = with_values(values, lambda *some: jax.vjp(fun, *some), *some)
        return out, (values, pullback)

    def backward(kept: Any, cts: Any) -> Any:
        values, pullback = kept
        grads = with_values(values, lambda f, cts: f(cts), pullback, cts)
        nothing = [None] * len(ruled.equation.invars)
        return None, *jaxprs.put(nothing, ruled.places, grads)

    if ruled.has_jvp:
        call: Any = jax.custom_jvp(lambda _, *xs: run(*xs))
        call.defjvp(jvp)
    else:
        call = jax.custom_vjp(lambda _, *xs: run(*xs))
        call.defvjp(forward, backward)
    return call
