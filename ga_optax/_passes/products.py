"""Gradients that are added by the very products that compute them.

The gradient of a matrix is a product. A kernel can add it to the accumulator while it
computes it (cuBLAS's `beta = 1`, in the slice of the layer if the model scans), if
nothing stands between product and addition. Two things do:

In a bfloat16 model the sums of a product run in float32 on every machine; they are
rounded to bfloat16, cast to float32 and added. Here the cast's own sum comes out in
float32, which leaves out one rounding.

On GPUs XLA merges products that share an operand, such as those of query, key and value
if they are small; then kernels have to cut the result into pieces and add these. Here
they stay apart.

Triton's products cannot add to the slice of a layer where it lies: XLA copies the slice
out, adds to it in the product's kernel, and copies the sum back. Behind a fence, the
product is added by a kernel of its own, in place: one slice of memory less, and four
reads and writes in place of six. A product of cuBLAS takes two, and must not be fenced.
XLA's flag says which of them writes products; a device's choice comes too late for the
addition (docs/accelerators.md). Where the compiler distributes a program there is no
fence: it would keep a reduction over devices inside the loop.

Only sums that go nowhere but into an accumulator are changed: the program of a
micro-step is followed from its accumulators back to the products.
"""

import collections
import os
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._passes import ir, known
from ga_optax._passes.facts import Facts
from ga_optax._passes.ir import Program
from ga_optax._passes.notes import left_alone

# In which products of matrices of low precision are summed.
_WIDE = np.dtype(np.float32)
_ALGORITHMS = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)
_CALLS = (*ir.THROUGH, "cond")
# What a gradient passes between its cast and the accumulator.
_SENT = ("reduce_scatter", "psum", "psum_invariant", "pvary")
# The layers of a scan that is unrolled are put together, or taken apart.
_LAYERS = ("concatenate", "stack", "unstack", "split", "slice")
_ADDED = ("add", "add_any", "select_n", "custom_jvp_call")
_PASSED = (*known.MOVES, *_SENT, *_LAYERS, *_ADDED)


def added_inside(program: Program, facts: Facts) -> Program:
    """A loop, the first results of which are sums of gradients, added by products."""
    body = _Body(program.jaxpr)
    _follow(body, dict(enumerate(facts.sliced)), (), facts)
    return program._replace(jaxpr=body.program())


def _follow(
    body: "_Body", results: Mapping[int, bool], refs: Iterable[int], facts: Facts
) -> dict[int, bool]:
    """Has what some results sum up, or references, added by products.

    Returns which arguments are summed up, and of each, as of `results`, whether it can
    be added in slices.
    """
    jaxpr = body.jaxpr
    ends = ((jaxpr.outvars[i], sliced) for i, sliced in results.items())
    sums = {x: sliced for x, sliced in ends if ir.is_variable(x)}
    held = {jaxpr.invars[i] for i in refs}
    for n in reversed(range(len(jaxpr.eqns))):
        equation = body.equation(n)
        name = equation.primitive.name
        ins: list[Any] = equation.invars
        outs = {i: sums[x] for i, x in enumerate(equation.outvars) if x in sums}
        sliced = all(outs.values())
        into = [i for i, x in enumerate(ins) if ir.is_among(x, held)]
        if ir.kind(equation) in _CALLS and (outs or into):
            for inner in body.inside(n):
                rest = len(ins) - len(inner.jaxpr.invars)  # a conditional's predicate
                summed = _follow(inner, outs, [i - rest for i in into], facts)
                more = ((ins[i + rest], its) for i, its in summed.items())
                sums.update((x, its) for x, its in more if ir.is_variable(x))
        elif name in (known.ADD_TO, known.WRITE) and into:
            sums[ins[1]] = True
            if facts.local and name == known.ADD_TO and _is_product(jaxpr, ins[1]):
                body.replace(n, *_added_after(equation))
        elif name == known.READ_OUT and outs:
            held.add(ins[0])
        elif name == known.CAST and outs:
            if not (facts.rounds_once and equation.params["new_dtype"] == _WIDE):
                continue
            x = body.wide(ins[0], sliced)
            if x is not None:
                body.replace(n, equation.replace(invars=[x]))
            elif _is_low(ins[0]):
                left_alone(equation, body.why_low(ins[0]))
        elif name == known.PRODUCT and outs:
            body.products[n] = equation.outvars[0]
        elif name in _PASSED and outs and len(outs) == len(equation.outvars):
            sums.update(dict.fromkeys(ir.variables(ins), sliced))
    return {i: sums[x] for i, x in enumerate(jaxpr.invars) if x in sums}


class _Body:
    """The equations of a program, some of them replaced."""

    def __init__(self, jaxpr: core.Jaxpr, kinds: dict[Any, Any] | None = None) -> None:
        self.jaxpr = jaxpr
        # Calls of products, by what those that are alike have in common.
        self._kinds: dict[Any, core.JaxprEqn] = {} if kinds is None else kinds
        self.products: dict[int, core.Var] = {}  # of gradients: where, and the result
        self._outvars = list(jaxpr.outvars)
        self._inside: dict[int, list[_Body]] = {}
        self._new: dict[int, list[core.JaxprEqn]] = {}

    def equation(self, n: int) -> core.JaxprEqn:
        """The n-th equation as it is now."""
        return self._now(n)[-1]

    def _now(self, n: int) -> list[core.JaxprEqn]:
        return self._new.get(n, [self.jaxpr.eqns[n]])

    def replace(self, n: int, *equations: core.JaxprEqn) -> None:
        """Replaces it; what was put before it stays."""
        if equations != (self.equation(n),):
            self._new[n] = [*self._now(n)[:-1], *equations]

    def inside(self, n: int) -> list["_Body"]:
        """The programs inside the n-th equation."""
        if n not in self._inside:
            programs = ir.inner_programs(self.jaxpr.eqns[n])
            self._inside[n] = [_Body(program, self._kinds) for program in programs]
        return self._inside[n]

    def program(self) -> core.Jaxpr:
        """The program as it is now; itself if nothing is replaced."""
        for n, bodies in self._inside.items():
            new = {id(body.jaxpr): body.program() for body in bodies}
            self.replace(
                n, ir.with_inner(self.equation(n), lambda p, new=new: new[id(p)])
            )
        self._replace_products()
        if not self._new:
            return self.jaxpr
        eqns = [e for n in range(len(self.jaxpr.eqns)) for e in self._now(n)]
        return self.jaxpr.replace(eqns=eqns, outvars=self._outvars)

    def _replace_products(self) -> None:
        """Some of them are wider now, and some have to stay apart."""
        equations = {n: self.equation(n) for n in self.products}
        read = {n: set(map(self._origin, e.invars)) for n, e in equations.items()}
        number = collections.Counter(x for both in read.values() for x in both)
        for n, result in self.products.items():
            shares = any(number[x] > 1 for x in read[n])
            fences = shares and equations[n].primitive.name == known.PRODUCT
            if fences or result not in equations[n].outvars:
                self.replace(n, self._product(equations[n], result, fences))

    def _product(
        self, equation: core.JaxprEqn, result: core.Var, fences: bool
    ) -> core.JaxprEqn:
        """A product with another result, or kept apart: one function of all alike."""
        casts, ins = result not in equation.outvars, equation.invars
        kind = ir.key_of(equation, lambda x: x.aval), casts, fences
        if kind[0] is None or kind not in self._kinds:
            product = jax.jit(_product(equation, casts, fences))
            [self._kinds[kind]] = ir.traced(product, ins, result)
        ends = {"invars": ins, "outvars": [result]}
        return self._kinds[kind].replace(source_info=equation.source_info, **ends)

    def _origin(self, x: Any) -> Any:
        """What an operand was before it was moved."""
        made = ir.made_by(self.jaxpr, x)
        if made is None or made.primitive.name not in known.MOVES:
            return id(x)
        return self._origin(made.invars[0])

    def why_low(self, x: Any) -> str:
        """Why a sum is rounded before it is added."""
        made = ir.made_by(self.jaxpr, x)
        if made is None or ir.num_readers(self.jaxpr, x) != 1:
            return "a sum in low precision is read by more than its accumulator"
        return f"a sum comes out of {made.primitive.name} in low precision"

    def wide(self, x: Any, sliced: bool) -> Any:
        """The sum `x` before it was rounded; None if it is none, or is read twice.

        `sliced` says whether it may be a stack.
        """
        made = ir.made_by(self.jaxpr, x)
        if made is None or not _is_low(x) or ir.num_readers(self.jaxpr, x) != 1:
            return None
        n, wide = ir.place_of(self.jaxpr, made), _widened(x)
        equation = self.equation(n)
        if equation.primitive.name in (known.PRODUCT, known.CONVOLUTION):
            if isinstance(equation.params["precision"], _ALGORITHMS):
                return None  # it names the dtype
            self.products[n] = wide
            return wide
        casts: list[core.JaxprEqn] = []
        ins = self._operands(n, x, sliced, casts)
        if ins is None:
            return None
        outs = [wide if y is x else y for y in equation.outvars]
        params = equation.params
        if equation.primitive.name == known.SCATTER:
            adds = ir.retyped(params["update_jaxpr"], _in_float32)
            params = params | {"update_jaxpr": adds}
        new = equation.replace(invars=ins, outvars=outs, params=params)
        self.replace(n, *casts, new)
        return wide

    def _operands(
        self, n: int, x: Any, sliced: bool, casts: list[core.JaxprEqn]
    ) -> list[Any] | None:
        """What the n-th equation must read for `x` to be wide; None if it cannot be.

        Casts that this takes are appended to `casts`.
        """
        equation = self.equation(n)
        name, ins = equation.primitive.name, equation.invars

        def cast(y: Any) -> Any:
            new = _widened(y)
            how = {"new_dtype": _WIDE, "weak_type": False, "sharding": None}
            ends = {"invars": [y], "outvars": [new], "effects": core.no_effects}
            primitive = jax.lax.convert_element_type_p
            casts.append(equation.replace(primitive=primitive, params=how, **ends))
            return new

        if name in known.MOVES:
            source = self.wide(ins[0], sliced)
            return None if source is None else [source, *ins[1:]]
        if name == known.SUM_OF_TWO:
            parts = [self.wide(y, sliced) for y in ins]
            if parts == [None, None]:
                return None
            return [new or cast(y) for new, y in zip(parts, ins, strict=True)]
        if name == known.SUM:
            return [self.wide(ins[0], sliced) or cast(ins[0])]
        if name == known.SCATTER:
            table, rows, updates = ins
            return [cast(table), rows, cast(updates)]
        if ir.kind(equation) in ir.THROUGH:
            return list(ins) if self._widens_inside(n, x, sliced) else None
        return None

    def _widens_inside(self, n: int, x: Any, sliced: bool) -> bool:
        """Whether the program inside an equation can return `x` wide; then it does."""
        equation = self.equation(n)
        [i] = [i for i, y in enumerate(equation.outvars) if y is x]
        [inner] = self.inside(n)
        own: Any = inner.jaxpr.outvars[i]
        if ir.kind(equation) == "scan":
            is_sum = own.aval.ndim == x.aval.ndim  # over its iterations
            if is_sum or not sliced:  # all layers would be twice as large
                return False
        new = inner.wide(own, sliced)
        if new is None:
            return False
        inner._outvars[i] = new
        return True


def _product(
    equation: core.JaxprEqn, casts: bool, fences: bool
) -> Callable[..., jax.Array]:
    """A product of matrices or images; `fences` keeps it apart.

    If it comes out wider (`casts`), its operands are cast on CPUs. XLA would do the
    same, but forgets some of them if the result is transposed, and then cannot run the
    program (jaxlib 0.10 to 0.12). Each product casts its own: casts that several shared
    would be kept as long as the last of them needs one, in float32.
    """
    params = equation.params
    if casts:
        params = params | {"preferred_element_type": _WIDE}

    def direct(*operands: jax.Array) -> jax.Array:
        return equation.primitive.bind(*operands, **params)

    def cast(*operands: jax.Array) -> jax.Array:
        return direct(*(x.astype(_WIDE) for x in _alone(operands)))

    def apart(*operands: jax.Array) -> jax.Array:
        return direct(*_alone(operands))

    def product(*operands: jax.Array) -> jax.Array:
        ways = {"cpu": cast} if casts else {}
        ways |= {"cuda": apart} if fences else {}
        return jax.lax.platform_dependent(*operands, **ways, default=direct)

    return product


def _is_product(jaxpr: core.Jaxpr, x: Any) -> bool:
    """Whether a value is a product of matrices, which may have been moved or cast."""
    made = ir.made_by(jaxpr, x)
    if made is None:
        return False
    if ir.is_inline(made):
        [inner] = ir.inner_programs(made)
        return _is_product(inner, inner.outvars[made.outvars.index(x)])
    if made.primitive.name in (known.CAST, *known.MOVES):
        return _is_product(jaxpr, made.invars[0])
    return made.primitive.name == known.PRODUCT


def _added_after(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
    """A product added to a slice; on GPUs by a kernel of its own, if it is Triton's."""
    if _cublas_alone():
        return [equation]
    ref, x, *rest = equation.invars

    def fenced(x: jax.Array) -> jax.Array:
        # With the dimension that was sliced, or XLA does not add to the slice in place.
        return _alone(x[None])[0]

    def after(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cuda=fenced, default=lambda x: x)

    new = core.Var(x.aval)
    into = equation.replace(invars=[ref, new, *rest])
    return [*ir.traced(after, [x], new), into]


def _cublas_alone() -> bool:
    """Whether XLA has no product written by Triton on GPUs; by default it has all."""
    name, flags = "--xla_gpu_enable_triton_gemm=", os.environ.get("XLA_FLAGS", "")
    said = [x.removeprefix(name) for x in flags.split() if x.startswith(name)]
    return said[-1:] in (["false"], ["0"], ["False"])


def _alone(operands: Any) -> Any:
    """Operands that XLA shares, or merges products over, with no other equation."""
    return jax.lax.optimization_barrier(operands)


def _is_low(x: Any) -> bool:
    """Whether it is floating, of 16 bits or fewer."""
    dtype: Any = getattr(x.aval, "dtype", _WIDE)
    return jnp.issubdtype(dtype, np.floating) and dtype.itemsize <= 2


def _widened(x: Any) -> Any:
    return core.Var(_in_float32(x.aval))


def _in_float32(aval: Any) -> Any:
    return aval.update(dtype=_WIDE)
