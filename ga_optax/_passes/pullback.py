"""The pullback of a program, in which equal equations are differentiated once.

Each layer of a model has the equations of the layer before, and JAX applies the rule
of a primitive to every equation, which takes most of the time of a trace. Here JAX
differentiates each kind of equation once, all kinds in one trace, and the equations
there and back are copied for its equals. The result is the program of `jax.vjp`:
cotangents are added in the same order.
"""

import dataclasses
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import SymbolicZero
from jax.extend import core, source_info_util
from jax.interpreters import ad

from . import jaxprs, primitives
from .places import is_of_user, looked_at

Pull = Callable[[jax.Array], list[jax.Array]]


def with_pullback_of_equals(
    program: jaxprs.Program, params: Sequence[Any], rest: Sequence[Any], known: "Known"
) -> tuple[list[Any], Pull]:
    """The results of a program, and the pullback of the first one to `params`.

    These are its first arguments, and `rest` are the others. What is learned of its
    kinds of equations is added to `known`.
    """
    jaxpr, first = jaxprs.without_constants(program.jaxpr), len(program.consts)
    way = _Backward(jaxpr, jaxpr.invars[first : first + len(params)], known)
    there, back, gives = way.both_ways()
    consts, number = list(way.consts.values()), len(jaxpr.outvars)
    out = jaxprs.inserted(there, [*consts, *program.consts, *params, *rest])

    def pull(cotangent: jax.Array) -> list[jax.Array]:
        grads = iter(jaxprs.inserted(back, [*consts, *out[number:], cotangent]))
        pairs = zip(params, gives, strict=True)
        return [next(grads) if given else jnp.zeros_like(x) for x, given in pairs]

    return out[:number], pull


class _Part(NamedTuple):
    """A part of a program: equations, and the variables that it takes and returns."""

    eqns: Sequence[core.JaxprEqn]
    ins: Sequence[Any]
    outs: Sequence[Any]

    def copied(
        self, args: Sequence[Any], at: core.JaxprEqn, to: list[core.JaxprEqn]
    ) -> list[Any]:
        """Appends the equations to others, for other arguments; returns the results.

        They have the line of the equation `at`.
        """
        names, source = dict(zip(self.ins, args, strict=True)), at.source_info
        for e in self.eqns:
            outvars = [core.Var(x.aval) for x in e.outvars]
            stack = source.name_stack + e.source_info.name_stack
            new = e.replace(invars=jaxprs.rename(e.invars, names), outvars=outvars)
            to.append(new.replace(source_info=source.replace(name_stack=stack)))
            names.update(zip(e.outvars, outvars, strict=True))
        return jaxprs.rename(self.outs, names)


# A key that equal equations share; the operands that may get a cotangent, and the
# results that have one, by number.
_Kind = tuple[Any, tuple[int, ...], tuple[int, ...]]


class _BothWays(NamedTuple):
    """A kind of equation there and back.

    Attributes:
      there: takes the operands; returns the results, then what the way back reads.
      back: takes what it reads, and cotangents; returns gradients.
      gives: for each gradient, False if JAX has no cotangent for the operand.
    """

    there: _Part
    back: _Part
    gives: Sequence[bool]


@dataclasses.dataclass
class Known:
    """The kinds of equations that JAX differentiated, for all programs of a call.

    Attributes:
      ways: the kinds that are known there and back.
      consts: the constants of these.
      sums: the addition of two cotangents, by their types.
    """

    ways: dict[_Kind, _BothWays] = dataclasses.field(default_factory=dict)
    consts: dict[Any, Any] = dataclasses.field(default_factory=dict)
    sums: dict[Any, _Part] = dataclasses.field(default_factory=dict)


class _Backward:
    """Writes a program there and back.

    Attributes:
      jaxpr: the program.
      wrt: the arguments to differentiate with respect to.
      moving: the variables through which the first result depends on these.
      kinds: by its id, the kind of an equation that such variables go through, if all
        results that may have a cotangent have one.
      known: kinds there and back.
      consts: the constants that the program reads there and back, beside its own.
    """

    def __init__(self, jaxpr: core.Jaxpr, wrt: Sequence[Any], known: Known) -> None:
        self.jaxpr, self.wrt, self.known = jaxpr, wrt, known
        self.kinds: dict[int, _Kind] = {}
        self.consts: dict[Any, Any] = {}
        moved = jaxprs.moved_by(jaxpr, jaxpr.outvars[:1])
        self.moving = moved.intersection(wrt)
        kinds: dict[_Kind, core.JaxprEqn] = {}
        for e in jaxpr.eqns:
            stops = e.primitive.name == "stop_gradient"
            outs = set() if stops else moved.intersection(e.outvars)
            if outs and not self.moving.isdisjoint(jaxprs.variables(e.invars)):
                self.moving |= outs
                key = jaxprs.key_of(e, operator.attrgetter("aval"))
                self.kinds[id(e)] = kind = self._kind(e, key, outs)
                if kind not in known.ways:
                    kinds[kind] = e
        if kinds:
            self._learn(kinds)

    def both_ways(self) -> tuple[core.Jaxpr, core.Jaxpr, list[bool]]:
        """The program there, the program back, and whether it gives each gradient.

        Both take the constants first. The program there returns more results, which the
        program back takes before the cotangent.
        """
        jaxpr, kinds, names = self.jaxpr, self._kinds(), dict[Any, Any]()
        there: list[core.JaxprEqn] = []
        left: dict[int, list[Any]] = {}  # what the way back reads
        for e in jaxpr.eqns:
            ins = jaxprs.rename(e.invars, names)
            if id(e) not in kinds:
                there.append(e.replace(invars=ins))
                continue
            pairs = zip(ins, e.invars, strict=True)
            args = [x for x, old in pairs if not isinstance(old, core.Literal)]
            way = self.known.ways[kinds[id(e)]]
            out = way.there.copied(args, e, there)
            names.update(zip(e.outvars, out, strict=False))
            left[id(e)] = out[len(e.outvars) :]
        back, seed, grads = self._back(kinds, left)
        given = [g for g in grads if g is not None]
        ins = [x for e in back for x in e.invars]
        reads = {x for x in ins if not isinstance(x, core.Literal)}
        free = reads.difference(*[e.outvars for e in back])
        way = _flat(jaxpr, [], given, back)
        back, reads = jaxprs.needed_for(way, given, free.__contains__)
        known, outs = self.known.consts, jaxprs.rename(jaxpr.outvars, names)
        more = [x for x in reads if x is not seed and x not in known]
        both = [*[x for e in [*there, *back] for x in e.invars], *outs, *given]
        some = [x for x in dict.fromkeys(jaxprs.variables(both)) if x in known]
        self.consts, outs = {x: known[x] for x in some}, [*outs, *more]
        return (
            _flat(jaxpr, [*self.consts, *jaxpr.invars], outs, there),
            _flat(jaxpr, [*self.consts, *more, seed], given, back),
            [g is not None for g in grads],
        )

    def _kind(self, equation: core.JaxprEqn, key: Any, cotangents: set[Any]) -> _Kind:
        """The kind of an equation if results among some variables have cotangents."""
        ins, outs = enumerate(equation.invars), enumerate(equation.outvars)
        moving, literal = self.moving, core.Literal
        wrt = [i for i, x in ins if not isinstance(x, literal) and x in moving]
        given = [i for i, x in outs if x in cotangents]
        return key, tuple(wrt), tuple(given)

    def _kinds(self) -> dict[int, _Kind]:
        """The kind of each equation on the way back, by its id."""
        cotangents, kinds = set(jaxprs.variables(self.jaxpr.outvars[:1])), {}
        for e in reversed(self.jaxpr.eqns):
            if id(e) in self.kinds and not cotangents.isdisjoint(e.outvars):
                kind = self.kinds[id(e)]
                if not cotangents.issuperset([e.outvars[i] for i in kind[2]]):
                    kind = self._kind(e, kind[0], cotangents)
                if kind not in self.known.ways:
                    self._learn({kind: e})
                kinds[id(e)] = kind
                pairs = zip(kind[1], self.known.ways[kind].gives, strict=True)
                cotangents.update([e.invars[i] for i, gives in pairs if gives])
        return kinds

    def _back(self, kinds: Any, left: Any) -> tuple[list[core.JaxprEqn], Any, Any]:
        """The equations back, the first cotangent, and the gradients; None for zero."""
        result: Any = self.jaxpr.outvars[0]
        seed, back = core.Var(result.aval), list[core.JaxprEqn]()
        is_literal = isinstance(result, core.Literal)
        found: dict[Any, Any] = {} if is_literal else {result: seed}
        for e in reversed(self.jaxpr.eqns):
            if id(e) not in kinds:
                continue
            _, wrt, given = kind = kinds[id(e)]
            way = self.known.ways[kind]
            cotangents = [found.pop(e.outvars[i]) for i in given]
            grads = way.back.copied([*left[id(e)], *cotangents], e, back)
            triples = list(zip(wrt, way.gives, grads, strict=True))
            for i, gives, g in triples[::-1]:  # JAX transposes the last part first
                x = e.invars[i]
                if gives:
                    found[x] = self._sum(found[x], g, e, back) if x in found else g
        return back, seed, [found.get(x) for x in self.wrt]

    def _sum(self, x: Any, y: Any, at: core.JaxprEqn, to: list[core.JaxprEqn]) -> Any:
        """The sum of two cotangents."""
        sums = self.known.sums
        if (types := (x.aval, y.aval)) not in sums:
            jaxpr = jaxprs.program_of(ad.add_jaxvals, *types).jaxpr
            sums[types] = _Part(jaxpr.eqns, jaxpr.invars, jaxpr.outvars)
        return sums[types].copied([x, y], at, to)[0]

    def _learn(self, kinds: dict[_Kind, core.JaxprEqn]) -> None:
        """Has JAX differentiate kinds of equations, all at once."""
        cases: list[tuple[core.JaxprEqn, list[Any], int]] = []
        types, moving, seeds = list[Any](), list[int](), list[int]()
        for (_, wrt, given), e in kinds.items():
            ins = [
                x if isinstance(x, core.Literal) else core.Var(x.aval) for x in e.invars
            ]
            source = source_info_util.new_source_info()  # each copy has its own
            operands, at = jaxprs.variables(ins), len(types)
            cases.append((e.replace(invars=ins, source_info=source), operands, at))
            moving += [at + operands.index(ins[i]) for i in wrt]
            types += [x.aval for x in [*operands, *[e.outvars[i] for i in given]]]
            seeds += range(at + len(operands), len(types))

        gives: set[int] = set()  # the places of arguments that get a cotangent

        def every(*xs: Any) -> list[Any]:
            def of_moving(*some: Any) -> tuple[list[Any], list[list[Any]]]:
                noted = _noted(gives.update, some)
                new, outs, smooth = jaxprs.put(xs, moving, noted), [], []
                for (e, ins, at), (*_, given) in zip(cases, kinds, strict=True):
                    values = new[at : at + len(ins)]
                    out = jaxprs.bind(self.jaxpr, [e], ins, e.outvars, values)
                    outs, smooth = [*outs, *out], [*smooth, *[out[i] for i in given]]
                return smooth, outs

            _, pull, outs = jax.vjp(of_moving, *[xs[i] for i in moving], has_aux=True)
            return [*outs, *pull([xs[i] for i in seeds])]

        closed: Any = jax.make_jaxpr(every)(*types)
        jaxpr, results = closed.jaxpr, closed.jaxpr.outvars
        if any(isinstance(x, jax.core.Tracer) for x in closed.consts):
            ways, consts = self.known.ways, self.known.consts
            self.known = Known({**ways}, {**consts})  # they are of this trace alone
        self.known.consts.update(zip(jaxpr.constvars, closed.consts, strict=True))
        later = jaxprs.following(jaxpr, [jaxpr.invars[i] for i in seeds])
        n, first = 0, sum([len(e.outvars) for e, *_ in cases])
        m = first  # of gradients, which follow all results
        for kind, (e, ins, at) in zip(kinds, cases, strict=True):
            operands = jaxpr.invars[at : at + len(ins) + len(kind[2])]
            outs, grads = results[n:][: len(e.outvars)], results[m:][: len(kind[1])]
            there, back = _in_two(jaxpr, later, operands, outs, grads)
            given = [i + m - first in gives for i in range(len(grads))]
            self.known.ways[kind] = _BothWays(there, back, given)
            n, m = n + len(outs), m + len(grads)


def _noted(note: Callable[[Any], None], xs: Sequence[Any]) -> Sequence[Any]:
    """`xs`; `note` is called with the numbers of those to which a cotangent comes.

    That may be of zeros, if JAX does not know that it is zero.
    """

    def back(_: None, cotangents: Any) -> Any:
        known = [isinstance(ct, SymbolicZero) for ct in cotangents]
        note([i for i, is_zero in enumerate(known) if not is_zero])
        pairs = zip(cotangents, known, strict=True)
        return tuple(None if is_zero else ct for ct, is_zero in pairs)

    same = jax.custom_vjp(lambda *xs: xs)
    there = lambda *xs: (tuple(x.value for x in xs), None)  # noqa: E731
    same.defvjp(there, back, symbolic_zeros=True)
    return same(*xs)


def _in_two(
    jaxpr: core.Jaxpr, later: set[Any], operands: list[Any], outs: Any, grads: Any
) -> tuple[_Part, _Part]:
    """A kind there and back, of a program that has many.

    `later` are the cotangents, and all that depends on them. A gradient need not: a
    rule of the user's may return constants.
    """
    known = set(operands).__contains__
    eqns, _ = jaxprs.needed_for(jaxpr, [*outs, *grads], known)
    back = [e for e in eqns if not later.isdisjoint(e.outvars)]
    reads = jaxprs.variables([*[x for e in back for x in e.invars], *grads])
    fixed = later.union(jaxpr.constvars)
    left = list(dict.fromkeys([x for x in reads if x not in fixed]))
    ins = [x for x in operands if x not in later]
    cotangents = [x for x in operands if x in later]
    return (
        _Part([e for e in eqns if later.isdisjoint(e.outvars)], ins, [*outs, *left]),
        _Part(back, [*left, *cotangents], grads),
    )


def _flat(
    jaxpr: core.Jaxpr, ins: Sequence[Any], outs: Sequence[Any], eqns: Sequence[Any]
) -> core.Jaxpr:
    """A program of other equations, without constants."""
    effects = frozenset().union(*[e.effects for e in eqns])
    new = jaxpr.replace(eqns=list(eqns), outvars=list(outs), effects=effects)
    return jaxprs.closing_over(new, [], [], list(ins))


def with_pullback(
    program: jaxprs.Program,
    params: Sequence[Any],
    rest: Sequence[Any],
    known: Known | None,
) -> tuple[jax.Array, Any, list[jax.Array]]:
    """The first result of a program, the pullback to `params`, and the other results.

    As by `jax.vjp`. Equations that are alike, also those of `known`, are differentiated
    once, in a program without effects and without code that JAX cannot see, such as
    callbacks. None for `known`: each is differentiated by itself.
    """

    def evaluate(*params: jax.Array) -> tuple[jax.Array, list[Any]]:
        loss, *more = jaxprs.results(program, [*params, *rest])
        return loss, list(map(jax.numpy.asarray, more))  # an aux may be a plain number

    names = {e.primitive.name for e in program.jaxpr.eqns}
    if known is not None and not program.jaxpr.effects and names <= primitives.SEEN:
        way = with_pullback_of_equals
        both, error = looked_at(way, program, params, rest, known)
        if error is None:
            [loss, *more], pull = both
            return loss, pull, list(map(jax.numpy.asarray, more))
        # A rule of a function may have failed, and JAX, which runs a rule only if a
        # tangent reaches it, may raise as well. JAX 0.10 to 0.12 lose what they
        # know of a rule under vmap that they differentiate once more, by itself.
        results = jax.vjp(evaluate, *params, has_aux=True)
        is_lost = type(error).__name__ == "StoreException"
        if not is_lost and not is_of_user(error):
            raise error
        return results
    return jax.vjp(evaluate, *params, has_aux=True)
