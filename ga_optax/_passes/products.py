"""Passes on sums and on equal equations.

    total + float32(bfloat16(xᵀ·g))  ->  total + xᵀ·g

Products that add to a sum; and backward passes, which differentiate equal equations
once.
"""

import collections
import dataclasses
import functools
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.custom_derivatives import SymbolicZero
from jax.extend import core, source_info_util
from jax.interpreters import ad, batching, mlir

from . import jaxprs, primitives
from .about import Facts, left_alone
from .jaxprs import Program

# == Products ==========================================================================
# Gradients that are added by the very products that compute them.
#
# The gradient of a matrix is a product. A kernel can add the product to the accumulator
# while it computes (cuBLAS's `beta = 1`, in the slice of the layer if the model scans),
# if nothing stands between product and addition. Two things do:
#
# In a bfloat16 model the sums of a product run in float32 on every machine; they are
# rounded to bfloat16, cast to float32 and added. Here the product comes out in float32,
# *wide*, which leaves out one rounding.
#
# On GPUs XLA merges products that share an operand, such as those of query, key and
# value if they are small; then kernels have to cut the result into pieces and add
# these. Here a fence keeps the products apart.
#
# Triton's products cannot add to the slice of a layer in place: XLA copies the slice
# out, adds to the copy in the product's kernel, and copies the sum back. Behind a
# fence, a kernel of its own adds the product in place: one slice of memory less, and
# four reads and writes in place of six. A product of cuBLAS takes two, and must not be
# fenced. XLA's flag says which of them writes products; a device's choice comes too
# late for the addition (docs/accelerators.md). Where the compiler distributes a program
# there is no fence: it would keep a reduction over devices inside the loop.
#
# Only sums that go nowhere but into an accumulator are changed: the program of a
# micro-step is followed from its accumulators back to the products.

_WIDE = np.dtype(np.float32)  # in which machines sum products of low precision
_ALGORITHMS = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)
_INLINED = (*jaxprs.THROUGH, "cond")


def added_in_products(program: Program, facts: Facts) -> Program:
    """A loop, the first results of which are sums of gradients, added by products."""
    sums = {i: _Sum(sliced) for i, sliced in enumerate(facts.sliced)}
    jaxpr, _ = _Rewriter(program.jaxpr, facts, {}).rewritten(sums, ())
    return program._replace(jaxpr=jaxpr)


class _Sum(NamedTuple):
    """A value that goes nowhere but into an accumulator.

    Attributes:
      sliced: True if the value can be added slice by slice.
      wide: the variable of the value before it is rounded, which is read instead.
    """

    sliced: bool
    wide: core.Var | None = None


class _Rewriter:
    """Rewrites a program from its results back to its arguments.

    Attributes:
      jaxpr: the program.
      facts: the facts of the call.
      calls: functions that compute products, by what equal products have in common.
      sums: the values known to be sums: first results, then what these are made of.
      refs: the references known to hold sums.
      products: the products that are sums.
    """

    def __init__(self, jaxpr: core.Jaxpr, facts: Facts, calls: dict[Any, Any]) -> None:
        self.jaxpr, self.facts, self.calls = jaxpr, facts, calls
        self.sums: dict[Any, _Sum] = {}
        self.refs: set[Any] = set()
        self.products: list[core.JaxprEqn] = []

    def rewritten(
        self, sums: dict[int, _Sum], refs: Iterable[int]
    ) -> tuple[core.Jaxpr, dict[int, _Sum]]:
        """The program, in which products add to sums.

        Args:
          sums: the sums among the results. A `wide` one comes before it is rounded.
          refs: the references to sums among the arguments.

        Returns: the program, and the sums among the arguments.
        """
        eqns, invars, outvars = self.jaxpr.eqns, self.jaxpr.invars, self.jaxpr.outvars
        for i, (sliced, wide) in sums.items():
            if jaxprs.is_variable(x := outvars[i]):
                self.sums[x] = _Sum(sliced, wide and _widened(x))
        self.refs.update(invars[i] for i in refs)
        new = {id(e): self._replacement(e) for e in reversed(eqns)}
        new |= self._new_products()
        changed = [x for e in eqns for x in new[id(e)]]
        jaxpr = jaxprs.with_equations(self.jaxpr, changed)
        if (widest := self._widest(outvars)) != outvars:
            jaxpr = jaxpr.replace(outvars=widest)
        return jaxpr, {i: self.sums[x] for i, x in enumerate(invars) if x in self.sums}

    def _widest(self, xs: list[Any]) -> list[Any]:
        """Variables, with the wide ones in place of those that have one."""
        return [
            self.sums[x].wide or x if jaxprs.is_among(x, self.sums) else x for x in xs
        ]

    def _widen(self, x: Any, sliced: bool) -> core.Var | None:
        """The wide variable of a new sum, or None if the sum must be rounded."""
        if not _can_be_wide(self.jaxpr, x, sliced):
            return None
        self.sums[x] = _Sum(sliced, _widened(x))
        return self.sums[x].wide

    def _replacement(self, equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        """The equations in place of one whose readers are replaced already."""
        ins: list[Any] = equation.invars
        sums = [self.sums[x] for x in equation.outvars if x in self.sums]
        pairs = enumerate(ins if self.refs else ())
        refs = [i for i, x in pairs if jaxprs.is_among(x, self.refs)]
        if not sums and not refs:
            return [equation]
        name, entry = equation.primitive.name, primitives.entry_of(equation)
        sliced, is_wide = [x.sliced for x in sums], [x.wide for x in sums]
        sliced, is_wide = False not in sliced, is_wide != [None] * len(sums)
        if jaxprs.kind(equation) in _INLINED:
            return [self._call(equation, refs)]
        if name == primitives.PRODUCT or (is_wide and name == primitives.CONVOLUTION):
            self.products.append(equation)
        elif is_wide:
            return self._unrounded(equation, sliced)
        elif name in (primitives.ADD_TO, primitives.WRITE) and refs:
            return self._added(equation)
        elif name == primitives.READ_OUT:
            self.refs.add(ins[0])
        elif name == primitives.CAST:
            if self.facts.rounds_once and equation.params["new_dtype"] == _WIDE:
                return [self._cast(equation, sliced)]
        elif entry.is_passed and len(sums) == len(equation.outvars):
            self.sums.update(dict.fromkeys(jaxprs.variables(ins), _Sum(sliced)))
        return [equation]

    def _call(self, equation: core.JaxprEqn, refs: list[int]) -> core.JaxprEqn:
        """A call, the programs inside of which are rewritten."""
        ins, pairs = equation.invars, enumerate(equation.outvars)
        sums = {i: self.sums[x] for i, x in pairs if x in self.sums}

        def change(inner: core.Jaxpr) -> core.Jaxpr:
            first = len(ins) - len(inner.invars)  # behind a conditional's predicate
            rewriter = _Rewriter(inner, self.facts, self.calls)
            new, of_args = rewriter.rewritten(sums, [i - first for i in refs])
            args = ((ins[i + first], x) for i, x in of_args.items())
            self.sums.update((x, s) for x, s in args if jaxprs.is_variable(x))
            return new

        new, outvars = jaxprs.with_inner(equation, change), equation.outvars
        widest = self._widest(outvars)
        return new if widest == outvars else new.replace(outvars=widest)

    def _added(self, equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        """An addition to a reference, or a write: what it adds is a sum."""
        x = equation.invars[1]
        self.sums[x] = _Sum(True)
        is_local, name = self.facts.devices.is_local, equation.primitive.name
        adds = is_local and name == primitives.ADD_TO
        return _fenced(equation) if adds and _is_product(self.jaxpr, x) else [equation]

    def _cast(self, cast: core.JaxprEqn, sliced: bool) -> core.JaxprEqn:
        """A cast of a sum, which reads the sum before it is rounded, if it can."""
        [x] = cast.invars
        if (wide := self._widen(x, sliced)) is not None:
            return cast.replace(invars=[wide])
        if _is_low(x):
            maker = jaxprs.made_by(self.jaxpr, x)
            why = "a sum in low precision is read by more than its accumulator"
            if maker is not None and jaxprs.num_readers(self.jaxpr, x) == 1:
                why = f"a sum comes out of {maker.primitive.name} in low precision"
            left_alone(cast, why)
        return cast

    def _unrounded(self, equation: core.JaxprEqn, sliced: bool) -> list[core.JaxprEqn]:
        """An equation whose result is wide, and casts of its operands."""
        name, params, casts = equation.primitive.name, equation.params, []
        moves = primitives.entry_of(equation).moves
        scatters = name == primitives.SCATTER
        ins: list[Any] = list(equation.invars)
        for i, x in enumerate(ins):
            if (i and moves) or (i == 1 and scatters):
                continue  # an index
            wide = None if scatters else self._widen(x, sliced)
            if wide is None:
                wide = _widened(x)
                casts += jaxprs.traced(lambda y: y.astype(_WIDE), [x], wide, equation)
            ins[i] = wide
        if scatters:
            number = jax.ShapeDtypeStruct((), _WIDE)
            adds = jaxprs.program_of(jax.lax.add, number, number).jaxpr
            params = params | {"update_jaxpr": adds}
        ends = {"invars": ins, "outvars": self._widest(equation.outvars)}
        return [*casts, equation.replace(params=params, **ends)]

    def _new_products(self) -> dict[int, list[core.JaxprEqn]]:
        """By id, products that come out wide, or that share an operand with another."""
        operands = {
            id(e): {id(_before(self.jaxpr, x)) for x in e.invars} for e in self.products
        }
        number = collections.Counter(x for some in operands.values() for x in some)
        new = {}
        for e in self.products:
            outvars, fences = self._widest(e.outvars), []
            shares = any(number[x] > 1 for x in operands[id(e)])
            if shares and e.primitive.name == primitives.PRODUCT:
                fences = [_kept_apart(e, e.invars)]
            product = e if outvars == e.outvars else self._wide_product(e, outvars[0])
            if fences:
                product = product.replace(invars=[*fences[0].outvars])
            new[id(e)] = [*fences, product]
        return new

    def _wide_product(self, equation: core.JaxprEqn, wide: Any) -> core.JaxprEqn:
        """A product that comes out wide. Equal products are one function."""
        key = jaxprs.key_of(equation, lambda x: x.aval)
        if key not in self.calls:
            product = jax.jit(_wide(equation))
            [self.calls[key]] = jaxprs.traced(product, equation.invars, wide, equation)
        ends = {"invars": equation.invars, "outvars": [wide]}
        return self.calls[key].replace(source_info=equation.source_info, **ends)


def _can_be_wide(jaxpr: core.Jaxpr, x: Any, sliced: bool) -> bool:
    """True if a value is a sum that can come before it is rounded, and is read once.

    If `sliced`, the value may be a stack of such sums.
    """
    maker = jaxprs.made_by(jaxpr, x)
    if maker is None or not _is_low(x) or jaxprs.num_readers(jaxpr, x) != 1:
        return False
    name, ins = maker.primitive.name, maker.invars
    if name in (primitives.PRODUCT, primitives.CONVOLUTION):
        return not isinstance(maker.params["precision"], _ALGORITHMS)  # with a dtype
    if primitives.entry_of(maker).moves:
        return _can_be_wide(jaxpr, ins[0], sliced)
    if name == primitives.SUM_OF_TWO:
        return any(_can_be_wide(jaxpr, y, sliced) for y in ins)
    if jaxprs.kind(maker) in jaxprs.THROUGH:
        [inner] = jaxprs.inner_programs(maker)
        result: Any = inner.outvars[maker.outvars.index(x)]
        is_sum = result.aval.ndim == x.aval.ndim  # over the iterations of a scan
        # A wide stack of all layers would be twice as large.
        stays = jaxprs.kind(maker) == "scan" and (is_sum or not sliced)
        return not stays and _can_be_wide(inner, result, sliced)
    return name in (primitives.SUM, primitives.SCATTER)


def _wide(equation: core.JaxprEqn) -> Callable[..., jax.Array]:
    """A product of matrices or images, whose result is wide.

    The operands are cast on CPUs. XLA would do the same, but forgets some casts if the
    result is transposed, and then cannot run the program (jaxlib 0.10 to 0.12). Each
    product casts its own operands: a shared cast would be kept, in float32, for as long
    as the last product reads the operand.
    """
    params = equation.params | {"preferred_element_type": _WIDE}

    def direct(*operands: jax.Array) -> jax.Array:
        return equation.primitive.bind(*operands, **params)

    def cast(*operands: jax.Array) -> jax.Array:
        return direct(*(x.astype(_WIDE) for x in _alone(operands)))

    def product(*operands: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(*operands, cpu=cast, default=direct)

    return product


def _before(jaxpr: core.Jaxpr, x: Any, cast: str = "") -> Any:
    """A value before it was moved, or before equations of the name `cast`."""
    maker = jaxprs.made_by(jaxpr, x)
    while maker and (primitives.entry_of(maker).moves or maker.primitive.name == cast):
        x = maker.invars[0]
        maker = jaxprs.made_by(jaxpr, x)
    return x


def _is_product(jaxpr: core.Jaxpr, x: Any) -> bool:
    """True if a value is a product of matrices, which may have been moved or cast."""
    x = _before(jaxpr, x, primitives.CAST)
    maker = jaxprs.made_by(jaxpr, x)
    if maker is not None and jaxprs.is_inline(maker):
        [inner] = jaxprs.inner_programs(maker)
        return _is_product(inner, inner.outvars[maker.outvars.index(x)])
    return maker is not None and maker.primitive.name == primitives.PRODUCT


def _fenced(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
    """The addition of a product to a slice, fenced on GPUs if Triton is used there."""
    if _cublas_alone():
        return [equation]
    ref, x, *rest = equation.invars
    fence = _kept_apart(equation, [x], sliced=True)
    return [fence, equation.replace(invars=[ref, *fence.outvars, *rest])]


def _cublas_alone() -> bool:
    """True if a flag has XLA leave all products on GPUs to cuBLAS, none to Triton."""
    name, flags = "--xla_gpu_enable_triton_gemm=", os.environ.get("XLA_FLAGS", "")
    values = [x.removeprefix(name) for x in flags.split() if x.startswith(name)]
    return values[-1:] in (["false"], ["0"], ["False"])


def _alone(operands: Any) -> Any:
    """Copies of operands, behind a fence, over which XLA merges no products."""
    return jax.lax.optimization_barrier(operands)


def _kept_apart(
    at: core.JaxprEqn, xs: Sequence[Any], sliced: bool = False
) -> core.JaxprEqn:
    """An equation whose results are `xs`: a fence on GPUs, and nothing elsewhere.

    With the dimension that was `sliced`, or XLA does not add to the slice in place.
    """
    new = at.replace(primitive=_apart(), params={"sliced": sliced}, invars=list(xs))
    outvars = [core.Var(x.aval) for x in xs]
    return new.replace(outvars=outvars, effects=core.no_effects)


@functools.cache
def _apart() -> core.Primitive:
    """A primitive: JAX would trace, and lower, a conditional for each fence."""
    new = core.Primitive(primitives.APART)
    new.multiple_results = True

    def on_gpus(*xs: jax.Array, sliced: bool) -> list[jax.Array]:
        if sliced:
            return [x[0] for x in _alone([x[None] for x in xs])]
        return _alone(list(xs))

    def same(*xs: Any, sliced: bool) -> list[Any]:
        return list(xs)

    new.def_impl(same)
    new.def_abstract_eval(same)
    mlir.register_lowering(new, lambda _, *xs, sliced: list(xs))
    lowered = mlir.lower_fun(on_gpus, multiple_results=True)
    mlir.register_lowering(new, lowered, platform="cuda")
    ad.primitive_jvps[new] = lambda xs, dots, **params: (new.bind(*xs, **params), dots)
    batching.primitive_batchers[new] = lambda xs, dims, **params: (
        new.bind(*xs, **params),
        dims,
    )
    return new


def _is_low(x: Any) -> bool:
    """True if a variable is floating, of 16 bits or fewer."""
    dtype: Any = getattr(x.aval, "dtype", _WIDE)
    return jnp.issubdtype(dtype, np.floating) and dtype.itemsize <= 2


def _widened(x: Any) -> core.Var:
    """A new variable for `x` before it is rounded."""
    return core.Var(x.aval.update(dtype=_WIDE))


# == Backward passes ===================================================================
# The gradient of a program, in which equal equations are differentiated once.
#
# Each layer of a model has the equations of the layer before, and JAX applies the rule
# of a primitive to every equation, which takes most of the time of a trace. Here JAX
# differentiates each kind of equation once, all kinds in one trace, and the equations
# there and back are copied for its equals. The result is the program of `jax.vjp`:
# cotangents are added in the same order.

Pull = Callable[[jax.Array], list[jax.Array]]


def with_pullback(
    program: Program, params: Sequence[Any], rest: Sequence[Any], known: "Known"
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
