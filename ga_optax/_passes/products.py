"""Gradients that are added by the very products that compute them.

The gradient of a matrix is a product. A kernel can add the product to the accumulator
while it computes (cuBLAS's `beta = 1`, in the slice of the layer if the model scans),
if nothing stands between product and addition. Two things do:

In a bfloat16 model the sums of a product run in float32 on every machine; they are
rounded to bfloat16, cast to float32 and added. Here the product comes out in float32,
*wide*, which leaves out one rounding.

On GPUs XLA merges products that share an operand, such as those of query, key and value
if they are small; then kernels have to cut the result into pieces and add these. Here
a fence keeps the products apart.

Triton's products cannot add to the slice of a layer in place: XLA copies the slice out,
adds to the copy in the product's kernel, and copies the sum back. Behind a fence, a
kernel of its own adds the product in place: one slice of memory less, and four reads
and writes in place of six. A product of cuBLAS takes two, and must not be fenced. XLA's
flag says which of them writes products; a device's choice comes too late for the
addition (docs/accelerators.md). Where the compiler distributes a program there is no
fence: it would keep a reduction over devices inside the loop.

Only sums that go nowhere but into an accumulator are changed: the program of a
micro-step is followed from its accumulators back to the products.
"""

import collections
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._passes import interpret, primitives, read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.read import Program

_WIDE = np.dtype(np.float32)  # in which machines sum products of low precision
_ALGORITHMS = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)
_INLINED = (*read.THROUGH, "cond")


def added_inside(program: Program, facts: Facts) -> Program:
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
            if read.is_variable(x := outvars[i]):
                self.sums[x] = _Sum(sliced, wide and _widened(x))
        self.refs.update(invars[i] for i in refs)
        new = {id(e): self._replacement(e) for e in reversed(eqns)}
        new |= self._new_products()
        jaxpr = rewrite.changed(self.jaxpr, lambda e: new[id(e)])
        if (widest := self._widest(outvars)) != outvars:
            jaxpr = jaxpr.replace(outvars=widest)
        return jaxpr, {i: self.sums[x] for i, x in enumerate(invars) if x in self.sums}

    def _widest(self, xs: list[Any]) -> list[Any]:
        """Variables, with the wide ones in place of those that have one."""
        return [
            self.sums[x].wide or x if read.is_among(x, self.sums) else x for x in xs
        ]

    def _widen(self, x: Any, sliced: bool) -> core.Var | None:
        """The wide variable of a new sum, or None if the sum must be rounded."""
        if not _can_be_wide(self.jaxpr, x, sliced):
            return None
        self.sums[x] = _Sum(sliced, _widened(x))
        return self.sums[x].wide

    def _replacement(self, equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        """The equations in place of one whose readers are replaced already."""
        name, entry = equation.primitive.name, primitives.entry_of(equation)
        ins: list[Any] = equation.invars
        sums = [self.sums[x] for x in equation.outvars if x in self.sums]
        refs = [i for i, x in enumerate(ins) if read.is_among(x, self.refs)]
        sliced = all(x.sliced for x in sums)
        is_wide = any(x.wide for x in sums)
        if not sums and not refs:
            return [equation]
        if read.kind(equation) in _INLINED:
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
            self.sums.update(dict.fromkeys(read.variables(ins), _Sum(sliced)))
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
            self.sums.update((x, s) for x, s in args if read.is_variable(x))
            return new

        new, outvars = rewrite.with_inner(equation, change), equation.outvars
        widest = self._widest(outvars)
        return new if widest == outvars else new.replace(outvars=widest)

    def _added(self, equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        """An addition to a reference, or a write: what it adds is a sum."""
        x = equation.invars[1]
        self.sums[x] = _Sum(True)
        adds = self.facts.local and equation.primitive.name == primitives.ADD_TO
        return _fenced(equation) if adds and _is_product(self.jaxpr, x) else [equation]

    def _cast(self, cast: core.JaxprEqn, sliced: bool) -> core.JaxprEqn:
        """A cast of a sum, which reads the sum before it is rounded, if it can."""
        [x] = cast.invars
        if (wide := self._widen(x, sliced)) is not None:
            return cast.replace(invars=[wide])
        if _is_low(x):
            maker = read.made_by(self.jaxpr, x)
            why = "a sum in low precision is read by more than its accumulator"
            if maker is not None and read.num_readers(self.jaxpr, x) == 1:
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
                casts += interpret.traced(
                    lambda y: y.astype(_WIDE), [x], wide, equation
                )
            ins[i] = wide
        if scatters:
            number = jax.ShapeDtypeStruct((), _WIDE)
            adds = interpret.program_of(jax.lax.add, number, number).jaxpr
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
            outvars = self._widest(e.outvars)
            casts = outvars != e.outvars
            shares = any(number[x] > 1 for x in operands[id(e)])
            fences = shares and e.primitive.name == primitives.PRODUCT
            if casts or fences:
                key = read.key_of(e, lambda x: x.aval), casts, fences
                if key not in self.calls:
                    product = jax.jit(_product(e, casts, fences))
                    [call] = interpret.traced(product, e.invars, outvars[0], e)
                    self.calls[key] = call
                ends = {"invars": e.invars, "outvars": outvars}
                source = e.source_info
                new[id(e)] = [self.calls[key].replace(source_info=source, **ends)]
        return new


def _can_be_wide(jaxpr: core.Jaxpr, x: Any, sliced: bool) -> bool:
    """True if a value is a sum that can come before it is rounded, and is read once.

    If `sliced`, the value may be a stack of such sums.
    """
    maker = read.made_by(jaxpr, x)
    if maker is None or not _is_low(x) or read.num_readers(jaxpr, x) != 1:
        return False
    name, ins = maker.primitive.name, maker.invars
    if name in (primitives.PRODUCT, primitives.CONVOLUTION):
        return not isinstance(maker.params["precision"], _ALGORITHMS)  # with a dtype
    if primitives.entry_of(maker).moves:
        return _can_be_wide(jaxpr, ins[0], sliced)
    if name == primitives.SUM_OF_TWO:
        return any(_can_be_wide(jaxpr, y, sliced) for y in ins)
    if read.kind(maker) in read.THROUGH:
        [inner] = read.inner_programs(maker)
        result: Any = inner.outvars[maker.outvars.index(x)]
        is_sum = result.aval.ndim == x.aval.ndim  # over the iterations of a scan
        # A wide stack of all layers would be twice as large.
        stays = read.kind(maker) == "scan" and (is_sum or not sliced)
        return not stays and _can_be_wide(inner, result, sliced)
    return name in (primitives.SUM, primitives.SCATTER)


def _product(
    equation: core.JaxprEqn, casts: bool, fences: bool
) -> Callable[..., jax.Array]:
    """A product of matrices or images; `fences` keeps XLA from merging the product.

    If the result is wide (`casts`), the operands are cast on CPUs. XLA would do the
    same, but forgets some casts if the result is transposed, and then cannot run the
    program (jaxlib 0.10 to 0.12). Each product casts its own operands: a shared cast
    would be kept, in float32, for as long as the last product reads the operand.
    """
    params = equation.params
    if casts:
        params = params | {"preferred_element_type": _WIDE}

    def direct(*operands: jax.Array) -> jax.Array:
        return equation.primitive.bind(*operands, **params)

    def cast(*operands: jax.Array) -> jax.Array:
        return direct(*(x.astype(_WIDE) for x in _alone(operands)))

    def fenced(*operands: jax.Array) -> jax.Array:
        return direct(*_alone(operands))

    def product(*operands: jax.Array) -> jax.Array:
        platforms = {"cpu": cast} if casts else {}
        platforms |= {"cuda": fenced} if fences else {}
        return jax.lax.platform_dependent(*operands, **platforms, default=direct)

    return product


def _before(jaxpr: core.Jaxpr, x: Any, cast: str = "") -> Any:
    """A value before it was moved, or before equations of the name `cast`."""
    maker = read.made_by(jaxpr, x)
    while maker and (primitives.entry_of(maker).moves or maker.primitive.name == cast):
        x = maker.invars[0]
        maker = read.made_by(jaxpr, x)
    return x


def _is_product(jaxpr: core.Jaxpr, x: Any) -> bool:
    """True if a value is a product of matrices, which may have been moved or cast."""
    x = _before(jaxpr, x, primitives.CAST)
    maker = read.made_by(jaxpr, x)
    if maker is not None and read.is_inline(maker):
        [inner] = read.inner_programs(maker)
        return _is_product(inner, inner.outvars[maker.outvars.index(x)])
    return maker is not None and maker.primitive.name == primitives.PRODUCT


def _fenced(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
    """The addition of a product to a slice, fenced on GPUs if Triton is used there."""
    if _cublas_alone():
        return [equation]
    ref, x, *rest = equation.invars

    def fenced(x: jax.Array) -> jax.Array:
        # With the dimension that was sliced, or XLA does not add to the slice in place.
        return _alone(x[None])[0]

    def product(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cuda=fenced, default=lambda x: x)

    new = core.Var(x.aval)
    addition = equation.replace(invars=[ref, new, *rest])
    return [*interpret.traced(product, [x], new, equation), addition]


def _cublas_alone() -> bool:
    """True if a flag has XLA leave all products on GPUs to cuBLAS, none to Triton."""
    name, flags = "--xla_gpu_enable_triton_gemm=", os.environ.get("XLA_FLAGS", "")
    values = [x.removeprefix(name) for x in flags.split() if x.startswith(name)]
    return values[-1:] in (["false"], ["0"], ["False"])


def _alone(operands: Any) -> Any:
    """Copies of operands, behind a fence, over which XLA merges no products."""
    return jax.lax.optimization_barrier(operands)


def _is_low(x: Any) -> bool:
    """True if a variable is floating, of 16 bits or fewer."""
    dtype: Any = getattr(x.aval, "dtype", _WIDE)
    return jnp.issubdtype(dtype, np.floating) and dtype.itemsize <= 2


def _widened(x: Any) -> core.Var:
    """A new variable for `x` before it is rounded."""
    return core.Var(x.aval.update(dtype=_WIDE))
