"""Passes on sums and on equal equations.

    total + float32(bfloat16(xᵀ·g))  ->  total + xᵀ·g

Products that add to a sum; tables of constants, computed before the loop; equal
equations, differentiated once, or computed once.
"""

import collections
import functools
import os
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core, source_info_util

from . import about, jaxprs, primitives
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
        sliced = all(x.sliced for x in sums)
        is_wide = any(x.wide for x in sums)
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
        adds = (
            self.facts.devices.is_local and equation.primitive.name == primitives.ADD_TO
        )
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
            outvars = self._widest(e.outvars)
            casts = outvars != e.outvars
            shares = any(number[x] > 1 for x in operands[id(e)])
            fences = shares and e.primitive.name == primitives.PRODUCT
            if casts or fences:
                key = jaxprs.key_of(e, lambda x: x.aval), casts, fences
                if key not in self.calls:
                    product = jax.jit(_product(e, casts, fences))
                    [call] = jaxprs.traced(product, e.invars, outvars[0], e)
                    self.calls[key] = call
                ends = {"invars": e.invars, "outvars": outvars}
                source = e.source_info
                new[id(e)] = [self.calls[key].replace(source_info=source, **ends)]
        return new


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

    def fenced(x: jax.Array) -> jax.Array:
        # With the dimension that was sliced, or XLA does not add to the slice in place.
        return _alone(x[None])[0]

    def product(x: jax.Array) -> jax.Array:
        return jax.lax.platform_dependent(x, cuda=fenced, default=lambda x: x)

    new = core.Var(x.aval)
    addition = equation.replace(invars=[ref, new, *rest])
    return [*jaxprs.traced(product, [x], new, equation), addition]


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


# == Constants =========================================================================
# Tables that a loss computes of constants alone, such as those of rotary positions.
#
# XLA hoists such a table out of a loop of several micro-batches. In a call of one
# micro-batch, XLA fuses the table with its readers, and rounds in other places. So the
# library computes the table before the loop in both.
#
# The pass hoists floating-point tables that are rounded. Numbers that are only moved or
# compared, such as a mask, have the same bits anywhere, and are cheaper to compute
# again. XLA computes scalars and arrays of equal numbers itself, when it compiles. The
# pass looks into `jax.jit` and `jax.checkpoint`. Out of loops inside the loss XLA
# hoists tables by itself, whatever is around the loops.

# A value that depends on arguments; of constants alone: equal numbers, different
# numbers, a table.
_OTHER, _EQUAL, _COUNTED, _TABLE = range(-1, 3)
# The parameters of a jitted function that have an entry for each argument.
_ONE_EACH = ("in_shardings", "in_layouts", "donated_invars")


def constants_hoisted(program: Program, facts: Facts) -> Program:
    """The program with its tables among its constants."""
    jaxpr, consts = program
    split = _split(jaxpr, set())
    if not split.tables:
        return program
    values = jaxprs.bind(jaxpr, split.hoisted, [], list(split.tables), [])
    consts = [*consts, *map(jax.lax.optimization_barrier, values)]
    variables = [*jaxpr.constvars, *split.tables.values()]
    # In jax 0.12 a program without its constants has them among its arguments.
    return Program(
        jaxprs.closing_over(split.rest, variables, consts, jaxpr.invars), consts
    )


class _Split(NamedTuple):
    """A program in two.

    Attributes:
      hoisted: equations of constants alone, which compute the tables.
      tables: the variables of the tables, and those that the rest reads instead.
      rest: the program without the hoisted equations.
    """

    hoisted: list[core.JaxprEqn]
    tables: dict[Any, core.Var]
    rest: core.Jaxpr


def _split(jaxpr: core.Jaxpr, given: set[Any]) -> _Split:
    """Takes the tables out of a program; `given` are arguments that are tables."""
    grade = dict.fromkeys(given, _TABLE)  # of what depends on constants alone
    hoisted: list[core.JaxprEqn] = []
    tables: dict[Any, core.Var] = {}
    rest: list[core.JaxprEqn] = []

    def reads(x: Any) -> Any:
        """The variable that has the value of `x` in the rest of the program."""
        is_table = jaxprs.is_variable(x) and grade.get(x) == _TABLE and x not in given
        return tables.setdefault(x, core.Var(x.aval)) if is_table else x

    for equation in jaxpr.eqns:
        ins, more = jaxprs.variables(equation.invars), []
        grades = [grade.get(x, _OTHER) for x in ins]
        highest = _OTHER if _OTHER in grades else max([_counts(equation), *grades])
        if highest != _OTHER and about.is_known(equation):
            hoisted.append(equation)
            highest += highest == _COUNTED and _rounds(equation)
            for x in equation.outvars:
                grade[x] = highest if jaxprs.is_inexact(x) else min(highest, _COUNTED)
            rest.append(equation)  # the rest may read results that are no tables
            continue
        if _takes_more(equation):
            given_tables = {x for x in ins if grade.get(x) == _TABLE}
            equation, lifted, more = _lifted(equation, given_tables)
            hoisted += lifted
            grade |= dict.fromkeys(more, _TABLE)
        elif highest >= _COUNTED:
            name = equation.primitive.name
            left_alone(equation, f"a table is made by {name}, which is not known")
        rest.append(
            equation.replace(invars=list(map(reads, [*equation.invars, *more])))
        )
    outvars = list(map(reads, jaxpr.outvars))
    if not tables:
        return _Split([], {}, jaxpr)
    new = jaxpr.replace(eqns=rest, outvars=outvars)
    rest, _ = jaxprs.needed_for(
        new, outvars, runs=lambda e: grade.keys().isdisjoint(e.outvars)
    )
    hoisted, _ = jaxprs.needed_for(jaxpr.replace(eqns=hoisted), tables)
    return _Split(hoisted, tables, new.replace(eqns=rest))


def _lifted(
    equation: core.JaxprEqn, tables: set[Any]
) -> tuple[core.JaxprEqn, list[core.JaxprEqn], list[Any]]:
    """An equation without the tables of the program inside it.

    Returns: the equation, which takes the tables as more arguments; the equations that
    compute the tables, for the program around; and the variables of the tables there.
    """
    [inner] = jaxprs.inner_programs(equation)
    pairs = list(zip(inner.invars, equation.invars, strict=True))
    split = _split(inner, {v for v, x in pairs if jaxprs.is_among(x, tables)})
    if not split.tables:
        return equation, [], []
    names = dict[Any, Any](pairs)
    names |= {x: core.Var(x.aval) for e in split.hoisted for x in e.outvars}
    rest = split.rest.replace(invars=[*inner.invars, *split.tables.values()])
    equation = jaxprs.with_inner(equation, lambda _: rest)
    params, more = equation.params, len(split.tables)
    longer = {k: (*params[k], *params[k][:1] * more) for k in _ONE_EACH if k in params}
    equation = equation.replace(params=params | longer)
    return (
        equation,
        jaxprs.renamed(split.hoisted, names),
        jaxprs.rename(split.tables, names),
    )


def _takes_more(equation: core.JaxprEqn) -> bool:
    """True if an equation can get more arguments: all have the same parameters."""
    params = [equation.params.get(key, ()) for key in _ONE_EACH]
    alike = all(x == entries[0] for entries in params for x in entries)
    return jaxprs.is_inline(equation) and alike


def _counts(equation: core.JaxprEqn) -> bool:
    """True if an equation makes different numbers. XLA folds arrays of equal ones."""
    return any(e.primitive.name == "iota" for e in jaxprs.within(equation))


def _rounds(equation: core.JaxprEqn) -> bool:
    """True if an equation rounds floating-point numbers, and does not only move."""
    return any(
        not jaxprs.inner_programs(e)
        and not primitives.entry_of(e).is_exact
        and any(map(jaxprs.is_inexact, e.outvars))
        for e in jaxprs.within(equation)
    )


# == Repeats ===========================================================================
# Equations that repeat, which JAX then differentiates once.
#
# Each layer of a model has the equations of the layer before, and JAX applies the rule
# of a primitive to every equation. A jitted function it differentiates once, and keeps
# the result. So equal equations become calls of one jitted function, which JAX inlines:
# the program of the gradient is the same, and is traced in less time.

_FEW = 3  # equal equations: a function takes as long as the rules of two


def repeats_called(program: Program, facts: Facts) -> Program:
    """The program with calls in place of equations that repeat."""
    jaxpr = program.jaxpr
    keys = {id(e): _key(e) for e in jaxpr.eqns}
    number = collections.Counter(keys.values())
    calls: dict[Any, core.JaxprEqn | None] = {}

    def change(equation: core.JaxprEqn) -> list[core.JaxprEqn]:
        key = keys[id(equation)]
        if key is None or number[key] < _FEW:
            return [equation]
        if isinstance(key, str):
            left_alone(equation, key)
            return [equation]
        if key not in calls:
            calls[key] = _as_call(jaxpr, equation)
        if (call := calls[key]) is None:
            left_alone(equation, "a function would give results of other types")
            return [equation]
        how = {"primitive": call.primitive, "params": call.params}
        return [equation.replace(invars=jaxprs.variables(equation.invars), **how)]

    return program._replace(jaxpr=jaxprs.changed(jaxpr, change))


def _key(equation: core.JaxprEqn) -> Any:
    """A value that equal equations share; a sentence for an equation that must stay.

    None for a call, and for an equation without operands: these cost no rule.
    """
    operands, name = jaxprs.variables(equation.invars), equation.primitive.name
    if not operands or jaxprs.kind(equation) == "call":
        return None
    if not about.is_built_in(equation):
        return f"{name} is not known"
    if len(set(operands)) < len(operands):
        # A function would add up the cotangents of the value in another order.
        return f"{name} reads a value twice"
    return jaxprs.key_of(equation, lambda x: x.aval)


def _as_call(jaxpr: core.Jaxpr, equation: core.JaxprEqn) -> core.JaxprEqn | None:
    """A call, which JAX inlines, of a jitted function that is the equation.

    None if the results of the function have other types, as those of a sharding
    constraint in a region may.
    """
    operands, results = jaxprs.variables(equation.invars), equation.outvars
    # Inlined, the equation has the name and the line of each call.
    bare = equation.replace(source_info=source_info_util.new_source_info())

    def called(*values: Any) -> list[Any]:
        return jaxprs.bind(jaxpr, [bare], operands, results, values)

    program = jaxprs.program_of(jax.jit(called), *(x.aval for x in operands))
    [call] = program.jaxpr.eqns
    if [x.aval for x in call.outvars] != [x.aval for x in results]:
        return None
    inline = call.params["inline"]
    early = getattr(type(inline), "JAX_EARLY", True)  # an enumeration since jax 0.11
    return call.replace(params=call.params | {"inline": early})


# == Duplicates ========================================================================
# A program that computes nothing twice.
#
# XLA merges equal operations early in a program for several devices, and late in a
# program for a single device. A division by a value that is used twice, for instance,
# stays a division in the first program, and becomes a product with the reciprocal in
# the second. A program without equal operations is compiled alike for both.


def duplicates_merged(program: Program, facts: Facts) -> Program:
    """A program without inner `jit`s, where equal equations are one, also in loops."""
    return program._replace(jaxpr=_merged(program.jaxpr))


def _merged(jaxpr: core.Jaxpr) -> core.Jaxpr:
    equations: list[core.JaxprEqn] = []
    results: dict[Any, list[core.Var]] = {}  # by what equal equations have in common
    merge_inner = functools.cache(_merged)  # a program that is run twice stays one

    def append(key: Any, avals: Any, equation: core.JaxprEqn) -> list[core.Var]:
        """The results of an equation, or of an equal one that is there already."""
        if key is None or key not in results:
            results[key] = list(map(core.Var, avals))
            equations.append(equation.replace(outvars=results[key]))
        return results[key]

    def broadcast(x: Any, like: Any, at: core.JaxprEqn) -> Any:
        """`x` in the shape of a result: otherwise every reader would broadcast `x`."""
        if isinstance(x, core.Literal) or x.aval.shape == like.shape:
            return x
        place = like.sharding if any(like.sharding.spec) else None
        aval = x.aval.update(shape=like.shape, sharding=like.sharding)

        def broadcasted(y: jax.Array) -> jax.Array:
            dims = range(y.ndim)
            return jax.lax.broadcast_in_dim(y, like.shape, dims, out_sharding=place)

        [new] = jaxprs.traced(broadcasted, [x], core.Var(aval), at)
        return append((x, like.shape), [aval], new)[0]

    def visit(jaxpr: core.Jaxpr, names: dict[Any, Any]) -> list[Any]:
        """Appends the equations; `names` maps old variables to new ones."""
        for old in jaxpr.eqns:
            equation = old.replace(invars=jaxprs.rename(old.invars, names))
            if primitives.entry_of(equation).broadcasts and len(equation.invars) > 1:
                aval = old.outvars[0].aval
                invars = [broadcast(x, aval, old) for x in equation.invars]
                equation = equation.replace(invars=invars)
            if _is_inlined(equation):
                [inner] = jaxprs.inner_programs(equation)
                pairs = zip(inner.invars, equation.invars, strict=True)
                outvars = visit(inner, dict(pairs))
            else:
                if jaxprs.kind(equation) not in (None, "call"):
                    equation = jaxprs.with_inner(equation, merge_inner)
                avals = [v.aval for v in equation.outvars]
                outvars = append(_key_of_equation(equation), avals, equation)
            names.update(zip(old.outvars, outvars, strict=True))
        return jaxprs.rename(jaxpr.outvars, names)

    outvars = visit(jaxpr, {})
    return jaxpr.replace(eqns=equations, outvars=outvars)


def _is_inlined(equation: core.JaxprEqn) -> bool:
    """True for a `jit` without shardings or constants, which only names a program."""
    if jaxprs.kind(equation) != "call":
        return False
    [inner] = jaxprs.inner(equation)
    places = [equation.params.get(k, ()) for k in ("in_shardings", "out_shardings")]
    is_placed = any(type(x).__name__ != "UnspecifiedValue" for p in places for x in p)
    if is_placed or inner.consts:
        left_alone(equation, "a jitted function with shardings or constants")
    return not (is_placed or inner.consts)


def _key_of_equation(equation: core.JaxprEqn) -> Any:
    """A key that equal equations share; None for an equation that has no equal."""
    variables = *equation.invars, *equation.outvars
    if any(map(jaxprs.is_reference, variables)):
        return None
    if equation.effects or equation.primitive.name == "rng_uniform":
        if jaxprs.kind(equation) is None:  # equations inside are logged by themselves
            left_alone(equation, f"{equation.primitive.name} does more than compute")
        return None
    return jaxprs.key_of(equation, lambda x: x)
