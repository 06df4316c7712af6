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
from collections.abc import Callable, Collection, Iterable, Mapping
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
    body = _Body(program.jaxpr, facts, {})
    body.follow(dict(enumerate(facts.sliced)), ())
    return program._replace(jaxpr=body.program())


class _Body:
    """A program, some equations of which are replaced."""

    def __init__(self, jaxpr: core.Jaxpr, facts: Facts, kinds: dict[Any, Any]) -> None:
        self.jaxpr, self.facts = jaxpr, facts
        self._kinds = kinds  # calls of products, by what those alike have in common
        self.products: dict[int, core.Var] = {}  # of gradients: where, and the result
        self._new = [[e] for e in jaxpr.eqns]  # what is in the place of each
        self._outvars = list(jaxpr.outvars)
        self._inside: dict[int, list[_Body]] = {}

    def follow(
        self, results: Mapping[int, bool], refs: Iterable[int]
    ) -> dict[int, bool]:
        """Has what some results sum up, or references, added by products.

        Returns which arguments are summed up, and of each, as of `results`, whether it
        can be added in slices.
        """
        jaxpr, facts = self.jaxpr, self.facts
        ends = ((jaxpr.outvars[i], sliced) for i, sliced in results.items())
        sums = {x: sliced for x, sliced in ends if ir.is_variable(x)}
        held = {jaxpr.invars[i] for i in refs}
        for n in reversed(range(len(jaxpr.eqns))):
            equation = self.equation(n)
            name = equation.primitive.name
            ins: list[Any] = equation.invars
            outs = {i: sums[x] for i, x in enumerate(equation.outvars) if x in sums}
            sliced = all(outs.values())
            into = [i for i, x in enumerate(ins) if ir.is_among(x, held)]
            if ir.kind(equation) in _CALLS and (outs or into):
                for inner in self.inside(n):
                    rest = len(ins) - len(inner.jaxpr.invars)  # a predicate
                    summed = inner.follow(outs, [i - rest for i in into])
                    more = ((ins[i + rest], its) for i, its in summed.items())
                    sums.update((x, its) for x, its in more if ir.is_variable(x))
            elif name in (known.ADD_TO, known.WRITE) and into:
                sums[ins[1]] = True
                if facts.local and name == known.ADD_TO and _is_product(jaxpr, ins[1]):
                    self._new[n] = _added_after(equation)
            elif name == known.READ_OUT and outs:
                held.add(ins[0])
            elif name == known.CAST and outs:
                if facts.rounds_once and equation.params["new_dtype"] == _WIDE:
                    self._cast_earlier(n, sliced)
            elif name == known.PRODUCT and outs:
                self.products[n] = equation.outvars[0]
            elif name in _PASSED and outs and len(outs) == len(equation.outvars):
                sums.update(dict.fromkeys(ir.variables(ins), sliced))
        return {i: sums[x] for i, x in enumerate(jaxpr.invars) if x in sums}

    def equation(self, n: int) -> core.JaxprEqn:
        """The n-th equation as it is now."""
        return self._new[n][-1]

    def inside(self, n: int) -> list["_Body"]:
        """The programs inside the n-th equation."""
        if n not in self._inside:
            programs = ir.inner_programs(self.jaxpr.eqns[n])
            shared = self.facts, self._kinds
            self._inside[n] = [_Body(program, *shared) for program in programs]
        return self._inside[n]

    def program(self) -> core.Jaxpr:
        """The program as it is now; itself if nothing is replaced."""
        for n, bodies in self._inside.items():
            new = {id(body.jaxpr): body.program() for body in bodies}
            self._new[n][-1] = ir.with_inner(
                self.equation(n), lambda p, new=new: new[id(p)]
            )
        self._replace_products()
        new = dict(zip(map(id, self.jaxpr.eqns), self._new, strict=True))
        changed = ir.changed(self.jaxpr, lambda e: new[id(e)])
        same = changed is self.jaxpr
        return changed if same else changed.replace(outvars=self._outvars)

    def _replace_products(self) -> None:
        """Some of them are wider now, and some have to stay apart."""
        now = {n: self.equation(n) for n in self.products}
        read = {
            n: {id(_before(self.jaxpr, x, known.MOVES)) for x in e.invars}
            for n, e in now.items()
        }
        number = collections.Counter(x for both in read.values() for x in both)
        for n, e in now.items():
            result = self.products[n]
            casts = result not in e.outvars
            shares = any(number[x] > 1 for x in read[n])
            fences = shares and e.primitive.name == known.PRODUCT
            if casts or fences:
                self._new[n][-1] = self._product(e, result, casts, fences)

    def _product(
        self, equation: core.JaxprEqn, result: core.Var, casts: bool, fences: bool
    ) -> core.JaxprEqn:
        """A product with another result, or kept apart: one function of all alike."""
        ins, key = equation.invars, ir.key_of(equation, lambda x: x.aval)
        kind = key, casts, fences
        if kind not in self._kinds:
            product = jax.jit(_product(equation, casts, fences))
            [self._kinds[kind]] = ir.traced(product, ins, result, equation)
        ends = {"invars": ins, "outvars": [result]}
        return self._kinds[kind].replace(source_info=equation.source_info, **ends)

    def _cast_earlier(self, n: int, sliced: bool) -> None:
        """Replaces a cast of a sum by one that comes before it is rounded."""
        cast = self.equation(n)
        [x] = cast.invars
        wide = self.wide(x, sliced)
        if wide is not None:
            self._new[n][-1] = cast.replace(invars=[wide])
        elif _is_low(x):
            made = ir.made_by(self.jaxpr, x)
            why = "a sum in low precision is read by more than its accumulator"
            if made is not None and ir.num_readers(self.jaxpr, x) == 1:
                why = f"a sum comes out of {made.primitive.name} in low precision"
            left_alone(cast, why)

    def wide(self, x: Any, sliced: bool) -> Any:
        """The sum `x` before it was rounded; None if it is none, or is read twice.

        `sliced` says whether it may be a stack.
        """
        made = ir.made_by(self.jaxpr, x)
        if made is None or not _is_low(x) or ir.num_readers(self.jaxpr, x) != 1:
            return None
        n, wide = ir.place_of(self.jaxpr, made), core.Var(_in_float32(x.aval))
        equation, casts = self.equation(n), []
        name, ins, params = equation.primitive.name, equation.invars, equation.params

        def cast(y: Any) -> Any:
            new = core.Var(_in_float32(y.aval))
            casts.extend(ir.traced(lambda y: y.astype(_WIDE), [y], new, equation))
            return new

        if name in (known.PRODUCT, known.CONVOLUTION):
            if isinstance(params["precision"], _ALGORITHMS):
                return None  # it names the dtype
            self.products[n] = wide
            return wide
        if name in known.MOVES:
            new = [self.wide(ins[0], sliced), *ins[1:]]
        elif name == known.SUM_OF_TWO:
            new = [self.wide(y, sliced) for y in ins]
            if new != [None, None]:
                new = [part or cast(y) for part, y in zip(new, ins, strict=True)]
        elif name == known.SUM:
            new = [self.wide(ins[0], sliced) or cast(ins[0])]
        elif name == known.SCATTER:
            table, rows, updates = ins
            new = [cast(table), rows, cast(updates)]
            number = jax.ShapeDtypeStruct((), _WIDE)
            adds = ir.program_of(jax.lax.add, number, number).jaxpr
            params = params | {"update_jaxpr": adds}
        elif ir.kind(equation) in ir.THROUGH and self._widens_inside(n, x, sliced):
            new = list(ins)
        else:
            return None
        if None in new:
            return None
        outs = [wide if y is x else y for y in equation.outvars]
        changed = equation.replace(invars=new, outvars=outs, params=params)
        self._new[n][-1:] = [*casts, changed]
        return wide

    def _widens_inside(self, n: int, x: Any, sliced: bool) -> bool:
        """Whether the program inside an equation can return `x` wide; then it does."""
        equation = self.equation(n)
        [i] = [i for i, y in enumerate(equation.outvars) if y is x]
        [inner] = self.inside(n)
        own: Any = inner.jaxpr.outvars[i]
        # All layers would be twice as large.
        is_sum = own.aval.ndim == x.aval.ndim  # over the iterations of a scan
        if ir.kind(equation) == "scan" and (is_sum or not sliced):
            return False
        new = inner.wide(own, sliced)
        if new is not None:
            inner._outvars[i] = new
        return new is not None


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


def _before(jaxpr: core.Jaxpr, x: Any, names: Collection[str]) -> Any:
    """What a value was before equations of these names."""
    made = ir.made_by(jaxpr, x)
    while made is not None and made.primitive.name in names:
        x = made.invars[0]
        made = ir.made_by(jaxpr, x)
    return x


def _is_product(jaxpr: core.Jaxpr, x: Any) -> bool:
    """Whether a value is a product of matrices, which may have been moved or cast."""
    x = _before(jaxpr, x, (known.CAST, *known.MOVES))
    made = ir.made_by(jaxpr, x)
    if made is not None and ir.is_inline(made):
        [inner] = ir.inner_programs(made)
        return _is_product(inner, inner.outvars[made.outvars.index(x)])
    return made is not None and made.primitive.name == known.PRODUCT


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
    return [*ir.traced(after, [x], new, equation), into]


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


def _in_float32(aval: Any) -> Any:
    return aval.update(dtype=_WIDE)
