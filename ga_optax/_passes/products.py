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
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._passes import interpret, primitives, read, rewrite
from ga_optax._passes.facts import Facts
from ga_optax._passes.log import left_alone
from ga_optax._passes.read import Program

# In which products of matrices of low precision are summed.
_WIDE = np.dtype(np.float32)
_ALGORITHMS = (jax.lax.DotAlgorithm, jax.lax.DotAlgorithmPreset)
_INLINED = (*read.THROUGH, "cond")


def added_inside(program: Program, facts: Facts) -> Program:
    """A loop, the first results of which are sums of gradients, added by products."""
    body = _Body(program.jaxpr, facts, {})
    jaxpr, _ = body.added(dict(enumerate(facts.sliced)), [], ())
    return program._replace(jaxpr=jaxpr)


class _Body:
    """A program, which is followed back from its results."""

    def __init__(self, jaxpr: core.Jaxpr, facts: Facts, kinds: dict[Any, Any]) -> None:
        self.jaxpr, self.facts = jaxpr, facts
        self.kinds = kinds  # calls of products, by what those alike have in common
        self.sums: dict[Any, bool] = {}  # and whether each can be added in slices
        self.held: set[Any] = set()  # references
        self.wide: dict[Any, core.Var] = {}  # in place of what is not to be rounded
        self.products: dict[int, core.Var] = {}  # of gradients: where, and the result

    def added(
        self, sums: dict[int, bool], wide: list[int], refs: Iterable[int]
    ) -> tuple[core.Jaxpr, dict[int, bool]]:
        """The program, in which products add to some results, or to references.

        Args:
          sums: those results, and whether each can be added in slices.
          wide: those of them that are to come before they are rounded.
          refs: the references among the arguments.

        Returns: the program, and which arguments are summed up, as `sums`.
        """
        eqns, invars, outvars = self.jaxpr.eqns, self.jaxpr.invars, self.jaxpr.outvars
        ends = ((outvars[i], sliced) for i, sliced in sums.items())
        self.sums.update((x, sliced) for x, sliced in ends if read.is_variable(x))
        self.held.update(invars[i] for i in refs)
        self.wide.update((outvars[i], _widened(outvars[i])) for i in wide)
        new = {n: self._changed(n, eqns[n]) for n in reversed(range(len(eqns)))}
        self._replace_products(new)
        places = dict(zip(map(id, eqns), range(len(eqns)), strict=True))
        jaxpr = rewrite.changed(self.jaxpr, lambda e: new[places[id(e)]])
        if wide:
            jaxpr = jaxpr.replace(outvars=rewrite.rename(outvars, self.wide))
        return jaxpr, {i: self.sums[x] for i, x in enumerate(invars) if x in self.sums}

    def _changed(self, n: int, equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        """What is in the place of the n-th equation; those that read it are done."""
        name, row = equation.primitive.name, primitives.entry_of(equation)
        ins: list[Any] = equation.invars
        outs = [x for x in equation.outvars if x in self.sums]
        wide = [x for x in equation.outvars if x in self.wide]
        into = [i for i, x in enumerate(ins) if read.is_among(x, self.held)]
        sliced = all(self.sums[x] for x in outs)
        if read.kind(equation) in _INLINED and (outs or wide or into):
            return [self._call(equation, into)]
        if name in (primitives.PRODUCT, primitives.CONVOLUTION) and wide:
            self.products[n] = self.wide[wide[0]]
        elif wide:
            return self._unrounded(equation, sliced)
        elif name in (primitives.ADD_TO, primitives.WRITE) and into:
            self.sums[ins[1]] = True
            adds = self.facts.local and name == primitives.ADD_TO
            if adds and _is_product(self.jaxpr, ins[1]):
                return _added_after(equation)
        elif name == primitives.READ_OUT and outs:
            self.held.add(ins[0])
        elif name == primitives.CAST and outs:
            if self.facts.rounds_once and equation.params["new_dtype"] == _WIDE:
                return [self._cast(equation, sliced)]
        elif name == primitives.PRODUCT and outs:
            self.products[n] = outs[0]
        elif row.is_passed and outs and len(outs) == len(equation.outvars):
            self.sums.update(dict.fromkeys(read.variables(ins), sliced))
        return [equation]

    def _call(self, equation: core.JaxprEqn, into: list[int]) -> core.JaxprEqn:
        """A call, the programs inside of which are changed."""
        ins, pairs = equation.invars, list(enumerate(equation.outvars))
        sums = {i: self.sums[x] for i, x in pairs if x in self.sums}
        wide = [i for i, x in pairs if x in self.wide]

        def change(inner: core.Jaxpr) -> core.Jaxpr:
            rest = len(ins) - len(inner.invars)  # a conditional's predicate
            body = _Body(inner, self.facts, self.kinds)
            new, summed = body.added(sums, wide, [i - rest for i in into])
            more = ((ins[i + rest], its) for i, its in summed.items())
            self.sums.update((x, its) for x, its in more if read.is_variable(x))
            return new

        new = rewrite.with_inner(equation, change)
        if wide:
            new = new.replace(outvars=rewrite.rename(equation.outvars, self.wide))
        return new

    def _cast(self, cast: core.JaxprEqn, sliced: bool) -> core.JaxprEqn:
        """A cast of a sum, of what comes before that is rounded, if it can."""
        [x] = cast.invars
        if _can_be_wide(self.jaxpr, x, sliced):
            self.sums[x], self.wide[x] = sliced, _widened(x)
            return cast.replace(invars=[self.wide[x]])
        if _is_low(x):
            made = read.made_by(self.jaxpr, x)
            why = "a sum in low precision is read by more than its accumulator"
            if made is not None and read.num_readers(self.jaxpr, x) == 1:
                why = f"a sum comes out of {made.primitive.name} in low precision"
            left_alone(cast, why)
        return cast

    def _unrounded(self, equation: core.JaxprEqn, sliced: bool) -> list[core.JaxprEqn]:
        """An equation whose result is wide, and casts of what it reads."""
        [out] = equation.outvars
        name, params, casts = equation.primitive.name, equation.params, []
        moves = primitives.entry_of(equation).moves
        ins: list[Any] = list(equation.invars)
        for i, x in enumerate(ins):
            if (i and moves) or (i == 1 and name == primitives.SCATTER):
                continue  # it says where
            ins[i] = _widened(x)
            if name != primitives.SCATTER and _can_be_wide(self.jaxpr, x, sliced):
                self.sums[x], self.wide[x] = sliced, ins[i]
            else:
                casts += interpret.traced(
                    lambda y: y.astype(_WIDE), [x], ins[i], equation
                )
        if name == primitives.SCATTER:
            number = jax.ShapeDtypeStruct((), _WIDE)
            adds = interpret.program_of(jax.lax.add, number, number).jaxpr
            params = params | {"update_jaxpr": adds}
        ends = {"invars": ins, "outvars": [self.wide[out]]}
        return [*casts, equation.replace(params=params, **ends)]

    def _replace_products(self, new: dict[int, list[core.JaxprEqn]]) -> None:
        """Some of them are wider now, and some have to stay apart."""
        reads = {
            n: {id(_before(self.jaxpr, x)) for x in new[n][-1].invars}
            for n in self.products
        }
        number = collections.Counter(x for both in reads.values() for x in both)
        for n, result in self.products.items():
            [equation] = new[n]
            casts = result not in equation.outvars
            shares = any(number[x] > 1 for x in reads[n])
            fences = shares and equation.primitive.name == primitives.PRODUCT
            if casts or fences:
                new[n] = [self._product(equation, result, casts, fences)]

    def _product(
        self, equation: core.JaxprEqn, result: core.Var, casts: bool, fences: bool
    ) -> core.JaxprEqn:
        """A product with another result, or kept apart: one function of all alike."""
        ins, key = equation.invars, read.key_of(equation, lambda x: x.aval)
        kind = key, casts, fences
        if kind not in self.kinds:
            product = jax.jit(_product(equation, casts, fences))
            [self.kinds[kind]] = interpret.traced(product, ins, result, equation)
        ends = {"invars": ins, "outvars": [result]}
        return self.kinds[kind].replace(source_info=equation.source_info, **ends)


def _can_be_wide(jaxpr: core.Jaxpr, x: Any, sliced: bool) -> bool:
    """Whether a sum of products can come before it is rounded, and is read once.

    `sliced` says whether it may be a stack.
    """
    made = read.made_by(jaxpr, x)
    if made is None or not _is_low(x) or read.num_readers(jaxpr, x) != 1:
        return False
    name, ins = made.primitive.name, made.invars
    if name in (primitives.PRODUCT, primitives.CONVOLUTION):
        return not isinstance(made.params["precision"], _ALGORITHMS)  # it names a dtype
    if primitives.entry_of(made).moves:
        return _can_be_wide(jaxpr, ins[0], sliced)
    if name == primitives.SUM_OF_TWO:
        return any(_can_be_wide(jaxpr, y, sliced) for y in ins)
    if read.kind(made) in read.THROUGH:
        [inner] = read.inner_programs(made)
        own: Any = inner.outvars[made.outvars.index(x)]
        is_sum = own.aval.ndim == x.aval.ndim  # over the iterations of a scan
        # All layers would be twice as large.
        stays = read.kind(made) == "scan" and (is_sum or not sliced)
        return not stays and _can_be_wide(inner, own, sliced)
    return name in (primitives.SUM, primitives.SCATTER)


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


def _before(jaxpr: core.Jaxpr, x: Any, cast: str = "") -> Any:
    """A value before it was moved, or before equations of the name `cast`."""
    made = read.made_by(jaxpr, x)
    while made and (primitives.entry_of(made).moves or made.primitive.name == cast):
        x = made.invars[0]
        made = read.made_by(jaxpr, x)
    return x


def _is_product(jaxpr: core.Jaxpr, x: Any) -> bool:
    """Whether a value is a product of matrices, which may have been moved or cast."""
    x = _before(jaxpr, x, primitives.CAST)
    made = read.made_by(jaxpr, x)
    if made is not None and read.is_inline(made):
        [inner] = read.inner_programs(made)
        return _is_product(inner, inner.outvars[made.outvars.index(x)])
    return made is not None and made.primitive.name == primitives.PRODUCT


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
    return [*interpret.traced(after, [x], new, equation), into]


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


def _widened(x: Any) -> core.Var:
    """A variable for `x` before it is rounded."""
    return core.Var(x.aval.update(dtype=_WIDE))
