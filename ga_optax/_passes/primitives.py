"""The table of primitives: one row a primitive, with all that is known of it.

    product: "b k, k c -> b c"      b and c split the equation, k leaves sums

First the notation in which a row says how dimensions split, then the table.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.extend import core
from jax.extend.core import primitives as of_jax

# == The notation of dimensions ========================================================
# The notation of the dimensions of primitives.
#
# Each dimension has a *factor*, or None: it is always whole. A part of a call along a
# factor needs the same part of the operands with this factor, and all of the others.
# The parts of a result without the factor are added up. For `x @ w` the dimensions are
# `[["b", "t", "c"], ["c", "d"]], [["b", "t", "d"]]`: b, t and d are kept, c is summed.
#
#     "..."        dimension d of all operands and results is one factor
#     "... _ _"    as well, but the last two dimensions are whole
#
# Where dimensions depend on parameters, a function of the equation returns them.

Axes = tuple[int | None, ...]
Shape = tuple[Any, ...]
Dims = tuple[Sequence[Sequence[Any]], Sequence[Sequence[Any]]]


class Factor(NamedTuple):
    """A factor, along which a call splits.

    Attributes:
      ins: the dimension of each operand that splits; None for a whole operand.
      outs: the dimension of each result that splits; None for a sum over parts.
    """

    ins: Axes
    outs: Axes


@functools.lru_cache(1024)  # a model has many layers of the same shapes
def parse(dims: str, ins: tuple[Shape, ...], outs: tuple[Shape, ...]) -> list[Factor]:
    """The factors that a text means, of operands and results of such shapes."""
    largest = max((*outs, *ins), key=len)  # operands may be broadcast
    kept = len(largest) - dims.count("_")

    def names(shape: Shape) -> list[int | None]:
        pairs = enumerate(zip(shape, largest, strict=False))
        return [d if d < kept and n == most else None for d, (n, most) in pairs]

    return factors_of_dims((list(map(names, ins)), list(map(names, outs))))


def factors_of_dims(dims: Dims) -> list[Factor]:
    """The factors, in the order in which their names first come."""
    factors = dict.fromkeys([x for side in dims for names in side for x in names])
    factors.pop(None, None)
    return [
        Factor(
            *[
                tuple([list(of).index(x) if x in of else None for of in side])
                for side in dims
            ]
        )
        for x in factors
    ]


class Split(NamedTuple):
    """A way to split a call, as the call itself or the user gives it.

    Attributes:
      factor: the factor along which the call may be split.
      fun: computes parts of the results from parts of the operands, along the factor.
      name: the name of the user's function, if the user promises the factor; else "".
    """

    factor: Factor
    fun: Callable[..., list[Any]]
    name: str = ""

    def of_some(self, fun: Callable[..., Any], ins: Any, outs: Any) -> "Split":
        """The split of another function, with some of the operands and results.

        `ins` and `outs` are their numbers among `[*operands, *results]`.
        """
        dims = *self.factor.ins, *self.factor.outs
        factor = Factor(*(tuple(dims[i] for i in side) for side in (ins, outs)))
        return self._replace(fun=fun, factor=factor)


# == The table =========================================================================
# The table of primitives: one row a primitive.
#
# A row has all facts about a primitive. `_partition.factors` splits equations by the
# dimensions, in the notation above; the tests run the example; and the passes and the
# window ask the other columns. Where dimensions are not enough, as for control flow and
# gathers, `_partition.rules` names a rule. A primitive without a row is unknown:
# no pass touches it, and its backward pass may do anything.


class Entry(NamedTuple):
    """The row of a primitive.

    Attributes:
      dims: the factors of operands and results, or a function that returns them for an
        equation; None if `_partition.rules` names a rule.
      example: a call for the tests, of `h`, which has rows; `w`, a matrix without rows;
        and `ids`, an integer for each row.
      sums: the operands in all of which together the primitive is linear.
      each: the operands in each of which it is linear while the others are fixed.
      shape: the parameter that is the shape of the result, or of the slice.
      kind: "" for a pure function of arrays; one of `PROGRAM_KINDS` if the primitive
        runs programs; "open" for others that can be read; or the kind of code into
        which JAX cannot see, in a word for people.
      is_open: True if some rows of the result need the same rows of operands alone.
      is_dear: True if computing the result costs more than reading it.
      is_exact: True if the primitive rounds nothing but a cast.
      is_passed: True if gradients pass through between a cast and their sum.
      moves: True if numbers move, one to one or one to many, as in the transpose.
      shifts: True if numbers move along axes that keep their meaning.
      broadcasts: True if operands are broadcast, and so their gradients are sums.
    """

    dims: str | Callable[[core.JaxprEqn], str | Dims] | None = None
    example: str = ""
    sums: slice | tuple[int, ...] = ()
    each: tuple[int, ...] = ()
    shape: str = ""
    kind: str = ""
    is_open: bool = False
    is_dear: bool = False
    is_exact: bool = False
    is_passed: bool = False
    moves: bool = False
    shifts: bool = False
    broadcasts: bool = False

    def linear_in(self, number: int) -> Sequence[int]:
        """The operands, of `number`, in which together the primitive is linear."""
        return range(number)[self.sums] if isinstance(self.sums, slice) else self.sums


def entry_of(e: core.JaxprEqn) -> Entry:
    """The row of the primitive of an equation."""
    return TABLE.get(e.primitive.name, UNKNOWN)


def is_linear(e: core.JaxprEqn) -> bool:
    """True if an equation is linear in all operands: no gradient needs a residual."""
    return len(entry_of(e).linear_in(len(e.invars))) == len(e.invars)


def needs_other(e: core.JaxprEqn) -> bool:
    """True for a product or a quotient, whose gradients need the other operand."""
    return 0 in entry_of(e).each


def is_dear(e: core.JaxprEqn) -> bool:
    """True if computing the results costs more than reading them.

    An outer product, which contracts nothing, is a product of numbers.
    """
    is_outer = e.primitive.name == PRODUCT and not any(e.params["dimension_numbers"][0])
    return entry_of(e).is_dear and not is_outer


def factors_of(row: Entry, e: core.JaxprEqn) -> list[Factor]:
    """The factors of an equation."""
    dims = row.dims(e) if callable(row.dims) else row.dims
    if dims is None:
        return []
    if not isinstance(dims, str):
        return factors_of_dims(dims)
    return parse(dims, *(tuple(map(_shape, x)) for x in (e.invars, e.outvars)))


# -- Dimensions that depend on parameters ----------------------------------------------


def _shape(x: Any) -> Shape:
    return x.aval.shape


def _rank(e: core.JaxprEqn, i: int = 0) -> int:
    return len(_shape(e.invars[i]))


def _along(key: str) -> Callable[[core.JaxprEqn], Dims]:
    """Dimensions of a primitive that needs some axes whole, which `key` names."""

    def dims(e: core.JaxprEqn) -> Dims:
        axes = [d % _rank(e) for d in jax.tree.leaves(e.params.get(key, -1))]
        names = [None if d in axes else d for d in range(_rank(e))]
        return [names] * len(e.invars), [names] * len(e.outvars)

    return dims


def _gone(key: str) -> Callable[[core.JaxprEqn], Dims]:
    """Dimensions of a primitive that takes some dimensions away, which `key` names."""

    def dims(e: core.JaxprEqn) -> Dims:
        gone = [d % _rank(e) for d in e.params[key]]  # summed, or of size 1
        return [range(_rank(e))], [[d for d in range(_rank(e)) if d not in gone]]

    return dims


def _over_axes(e: core.JaxprEqn) -> Dims:
    """Dimensions of a collective, of which axes of `jax.vmap` are numbers."""
    ins = [range(_rank(e, i)) for i in range(len(e.invars))]
    return ins, [[d for d in dims if d not in e.params["axes"]] for dims in ins]


def _turned(e: core.JaxprEqn) -> Dims:
    return [range(_rank(e))], [e.params["permutation"]]


def _bitcast(e: core.JaxprEqn) -> str:
    return "..." if _shape(e.invars[0]) == _shape(e.outvars[0]) else "... _"


def _fourier(e: core.JaxprEqn) -> str:
    return "... " + "_ " * len(e.params["fft_lengths"])


def _padded(e: core.JaxprEqn) -> Dims:
    names = [None if any(x) else d for d, x in enumerate(e.params["padding_config"])]
    return [names, []], [names]


def _exchanged(e: core.JaxprEqn) -> Dims:
    """Devices of a region exchange parts along some dimensions, and no others."""
    names = ("all_gather_dimension", "scatter_dimension", "split_axis", "concat_axis")
    along = [e.params[name] for name in names if name in e.params]
    before, after = [[*range(len(_shape(x)))] for x in (*e.invars, *e.outvars)]
    if len(before) < len(after):  # a new dimension has the devices
        return [before], [[*before[: along[0]], None, *before[along[0] :]]]
    dims = [None if d in along else d for d in before]
    return [dims], [dims if len(before) == len(after) else [None] * len(after)]


def _broadcast(e: core.JaxprEqn) -> Dims:
    shape, where = e.params["shape"], e.params["broadcast_dimensions"]
    pairs = zip(_shape(e.invars[0]), where, strict=True)
    names = [d if n == shape[d] else None for n, d in pairs]
    return [names, *([] for _ in e.invars[1:])], [range(len(shape))]


def _stacked(e: core.JaxprEqn) -> Dims:
    names, axis = list(range(_rank(e))), e.params["axis"]
    return [names] * len(e.invars), [[*names[:axis], None, *names[axis:]]]


def _unstacked(e: core.JaxprEqn) -> Dims:
    [names], _ = _along("axis")(e)
    return [names], [[d for d in names if d is not None]] * len(e.outvars)


def is_threefry(aval: Any) -> bool:
    """True for keys of `threefry2x32`, which draws for each key by itself.

    Under `jax.vmap` other generators draw for all rows from the first key.
    """
    return str(aval).startswith("key<fry>")


def _of_keys(e: core.JaxprEqn) -> str:
    """Dimensions of keys, which may be broadcast, before those of what is drawn."""
    drawn = len(_shape(e.outvars[0]))
    if is_threefry(e.invars[0].aval):
        drawn -= max(_rank(e, i) for i in range(len(e.invars)))
    return "..." + " _" * drawn


def _of_windows(e: core.JaxprEqn) -> Dims:
    """Windows of size 1 keep a dimension."""
    p, rank = e.params, _rank(e)
    ones, none = (1,) * rank, ((0, 0),) * rank
    sizes = zip(
        p["window_dimensions"],
        p.get("window_strides") or ones,
        p.get("base_dilation") or ones,
        p.get("padding") or none,
        strict=True,
    )
    one = 1, 1, 1, 0, 0
    names = [d if (*x[:3], *x[3]) == one else None for d, x in enumerate(sizes)]
    ins = [names if _shape(x) else [] for x in e.invars]
    return ins, [names] * len(e.outvars)


def _of_slice(e: core.JaxprEqn) -> Dims:
    """A slice keeps the dimensions that it does not cut."""
    is_update = e.primitive.name == "dynamic_update_slice"
    cut = _shape(e.invars[1] if is_update else e.outvars[0])
    pairs = zip(_shape(e.invars[0]), cut, strict=True)
    names = [d if n == size else None for d, (n, size) in enumerate(pairs)]
    ins = [names] * (1 + is_update)
    return [*ins, *([] for _ in e.invars[len(ins) :])], [names]


def _indexed(e: core.JaxprEqn) -> Dims:
    """Dimensions of a gather, and of a scatter, which is the reverse.

    Factors are the dimensions of the indices, batch dimensions, and dimensions of the
    operand that no index chooses.
    """
    gathers = e.primitive.name == "gather"
    part = _shape(e.outvars[0] if gathers else e.invars[2])
    window, gone, chosen, batched, batch = e.params["dimension_numbers"]
    whole, indices = _shape(e.invars[0]), [*range(_rank(e, 1) - 1), None]
    rest = iter(indices)
    of_part: list[Any] = [None if d in window else next(rest) for d in range(len(part))]
    of_whole: list[Any] = [None] * len(whole)
    for d, i in zip(batched, batch, strict=True):
        of_whole[d] = int(i)  # of NumPy, under `jax.vmap`
    kept = [d for d in range(len(whole)) if d not in (*gone, *batched)]
    for d, at in zip(kept, window, strict=True):
        if d not in chosen and whole[d] == part[at]:
            of_whole[d] = of_part[at] = ("window", d)
    if gathers:
        return [of_whole, indices], [of_part]
    return [of_whole, indices, of_part], [of_whole]


def places_of_updates(e: core.JaxprEqn) -> list[Factor]:
    """The dimensions of a scatter that indices choose: rows of it get their updates.

    Indices and updates are whole there. An index that is clipped may leave its row.
    """
    if not e.primitive.name.startswith("scatter"):
        return []
    numbers: Any = e.params["dimension_numbers"]
    if e.params["mode"] == jax.lax.GatherScatterMode.CLIP:
        return []
    gone = numbers.inserted_window_dims
    chosen = [d for d in numbers.scatter_dims_to_operand_dims if d in gone]
    return [Factor((d, None, None), (d,)) for d in chosen]


def _product(e: core.JaxprEqn) -> Dims:
    contracted, batched = e.params["dimension_numbers"]
    names: Any = [[(side, d) for d in range(_rank(e, side))] for side in (0, 1)]
    for side in (0, 1):
        for i, d in enumerate(contracted[side]):
            names[side][d] = "sum", i
        for i, d in enumerate(batched[side]):
            names[side][d] = "batch", i
    batch = [("batch", i) for i in range(len(batched[0]))]
    free = [x for side in (0, 1) for x in names[side] if x[0] == side]
    return names, [[*batch, *free]]


def _solved(e: core.JaxprEqn) -> Dims:
    """Each row is a system, or a right side."""
    batch, sides = list(range(_rank(e) - 2)), [None, "side"]
    names = [*batch, *(sides if e.params["left_side"] else sides[::-1])]
    return [[*batch, None, None], names], [names]


# -- The table -------------------------------------------------------------------------

TABLE: dict[str, Entry] = {}
UNKNOWN = Entry(kind="primitive", is_dear=True)
PROGRAM_KINDS = ("call", "checkpoint", "scan", "while", "cond")
CAST = "convert_element_type"
PRODUCT, CONVOLUTION = "dot_general", "conv_general_dilated"
SUM, SUM_OF_TWO, SCATTER = "reduce_sum", "add_any", "scatter-add"
CONSTRAINT = "sharding_constraint"
ADD_TO, WRITE, READ_OUT, NEW_REF = "addupdate", "swap", "freeze", "new_ref"
PUT = "device_put"
# Primitives of ours: `rowwise`, a window, gathered parts, and a call inside a loss.
ROWWISE, WINDOW, GATHER_PARTS = "rowwise", "ga_optax_window", "ga_optax_gather"
GRADIENTS, APART, SCAN = "ga_optax_value_and_grad", "ga_optax_apart", "associative_scan"
INSERTED = "ga_optax_inserted"

Columns = dict[str, Any]
OPEN: Columns = {"is_open": True}
DEAR: Columns = {"is_dear": True}
EXACT: Columns = {"is_exact": True}
PASSED: Columns = {"is_passed": True}
BROADCASTS: Columns = {"broadcasts": True}
LINEAR: Columns = {"sums": slice(None)}
COPIES: Columns = LINEAR | EXACT
MOVES: Columns = COPIES | PASSED | {"moves": True}
SHIFTS: Columns = COPIES | {"shifts": True}
_SHAPE: Columns = {"shape": "shape"}
_PICKS: Columns = EXACT | {"sums": (0,), "shape": "slice_sizes"}
_CHOOSES: Columns = EXACT | PASSED | {"sums": slice(1, None)}
_PUTS: Columns = EXACT | {"sums": (0, 1)}


def _in(*sums: int) -> Columns:
    """Columns of a primitive that is linear in some operands together."""
    return {"sums": sums}


def _each(*each: int) -> Columns:
    """Columns of a primitive that is linear in each of some operands."""
    return {"each": each}


def _entry(names: str, dims: Any = None, example: str = "", *columns: Columns) -> None:
    """Adds rows of primitives. In the example, `{}` is the name of each."""
    for name in names.split():
        row = Entry(dims, example.replace("{}", name), is_open=dims == "...")
        for values in columns:
            row = row._replace(**values)
        TABLE[name] = row


# Number by number.
_entry("abs acos asin asinh atan atanh bessel_i0e bessel_i1e", "...", "lax.{}(unit(h))")
_entry(
    "cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1", "...", "lax.{}(unit(h))"
)
_entry("lgamma log log1p logistic rsqrt sin sinh sqrt", "...", "lax.{}(unit(h))")
_entry("square tan tanh", "...", "lax.{}(unit(h))")
_entry("acosh ceil floor round", "...", "lax.{}(1 + 9 * unit(h))")
_entry("sign", "...", "lax.sign(h)")
_entry("neg stop_gradient", "...", "lax.{}(h)", LINEAR)
_entry("conj", "...", "lax.conj(complexes(h))")
_entry("imag real", "...", "lax.{}(complexes(h))", LINEAR)
_entry("integer_pow", "...", "lax.integer_pow(h, 3)")
_entry("log2", "...", "bound('log2')(unit(h), accuracy=None)")
_entry("one_minus_square", "...", "bound('one_minus_square')(h)")
_entry("polynomial", "...", "jnp.polyval(jnp.arange(4.0), h)")
_entry("reduce_precision", "...", "lax.reduce_precision(h, 8, 7)")
_entry("is_finite", "...", "lax.is_finite(1 / lax.max(h, 0.0))")
_entry("clz not population_count", "...", "bound('{}')(ids)")
_entry("add", "...", "unit(h) + unit(-h) ** 2", LINEAR, BROADCASTS, PASSED)
_entry("sub", "...", "unit(h) - unit(-h) ** 2", LINEAR, BROADCASTS)
_entry(
    SUM_OF_TWO, "...", "jax.grad(lambda h: (h * jnp.sin(h)).sum())(h)", LINEAR, PASSED
)
_entry("mul", "...", "h * unit(h)", _each(0, 1), BROADCASTS)
_entry("div", "...", "h / unit(h)", _each(0), BROADCASTS)
_entry("max min pow", "...", "lax.{}(unit(h), unit(-h) ** 2)", BROADCASTS)
_entry("atan2 ge gt le lt nextafter rem", "...", "lax.{}(unit(h), unit(-h) ** 2)")
_entry("le_to lt_to", "...", "bound('{}')(h, h[..., ::-1])")
_entry("and eq ne or xor", "...", "bound('{}')(ids, ids % 2)")
_entry("shift_left shift_right_arithmetic", "...", "lax.{}(ids, ids % 2)")
_entry("shift_right_logical", "...", "lax.{}(ids, ids % 2)")
_entry("mulhi", "...", "lax.mulhi(ids * 10**9, 7 + ids)")
_entry("complex", "...", "lax.complex(h, unit(h))")
_entry("clamp", "...", "lax.clamp(-0.1, h, 0.2)")
_entry("select_n", "...", "jnp.where(h > 0, jnp.sin(h), h)", _CHOOSES)
_entry("igamma igamma_grad_a igammac", "...", "lax.{}(unit(h), unit(-h) ** 2)", DEAR)
_entry("polygamma", "...", "lax.polygamma(1.0 + 0 * h, unit(h))", DEAR)
_entry("regularized_incomplete_beta", "...", "lax.betainc(*[unit(h)] * 3)", DEAR)
_entry("zeta", "...", "lax.zeta(2 + unit(h), unit(-h))", DEAR)
_entry(CAST, "...", "ids.astype(h.dtype)", EXACT, _in(0))
_entry("bitcast_convert_type", _bitcast, "lax.{}(ids, jnp.uint32)", OPEN)
_entry("copy", "...", "jnp.copy(h)", COPIES)
_entry("name", "...", "jax.ad_checkpoint.checkpoint_name(h, 'kept')", COPIES)
_entry(CONSTRAINT, "...", "placed(h)", LINEAR)
_entry("pvary", "...", "", LINEAR, PASSED)  # these, and exchanges, on several devices
_entry("reshard", "...")

# Moves of numbers.
_entry("transpose", _turned, "h.T", OPEN, MOVES)
_entry("squeeze", _gone("dimensions"), "lax.{}(h[None, :, None], (0, 2))", OPEN, MOVES)
_entry("broadcast_in_dim", _broadcast, "h[:, None]", OPEN, MOVES, BROADCASTS, _SHAPE)
_entry("reshape", None, "", MOVES)
_entry(
    "concatenate", _along("dimension"), "jnp.hstack([h, h**2])", OPEN, SHIFTS, PASSED
)
_entry("stack", _stacked, "jnp.stack([h, h * h]), jnp.stack([h, h], 1)", COPIES, PASSED)
_entry("unstack", _unstacked, "jnp.unstack(h, axis=1)", COPIES, PASSED)
_entry("split", _along("axis"), "jnp.split(h, 2, 1)", SHIFTS, PASSED)
_entry("slice", _of_slice, "h[:, 1:]", SHIFTS, PASSED, {"shape": "limit_indices"})
_entry("rev", _along("dimensions"), "h[:, ::-1]", SHIFTS)
_entry("pad", _padded, "jnp.pad(h, ((0, 0), (1, 2)))", SHIFTS)
_entry("dynamic_slice", _of_slice, "lax.{}_in_dim(h, ids[3], 2, 1)", _PICKS)
_entry("gather", _indexed, "", _PICKS)
_entry("dynamic_update_slice", _of_slice, "lax.{}_in_dim(h, -h, ids[3], 1)", _PUTS)
_entry("scatter", _indexed, "", EXACT)
_entry("scatter-mul scatter-max scatter-min", _indexed)
_entry("scatter-add scatter-sub", _indexed, "", _in(0, 2))
_entry("iota", None, "", EXACT)
_entry(f"optimization_barrier {APART} tile", None, "", LINEAR)
_entry("psum psum_invariant", _over_axes, "", LINEAR, PASSED)
_entry("pmax pmin", _over_axes)
_entry("reduce_scatter", _exchanged, "", LINEAR, PASSED)
_entry("random_wrap random_unwrap", "... _", "", OPEN)
_entry("random_seed", "...")
_entry("random_fold_in", _of_keys, "", OPEN)
_entry("random_split", _of_keys)

# Along axes.
_entry("reduce_sum", _gone("axes"), "h.sum(1)", LINEAR)
_entry("reduce_max", _gone("axes"), "h.max(1)")
_entry("reduce_min", _gone("axes"), "h.min(1)")
_entry("reduce_prod", _gone("axes"), "h.prod(1)")
_entry("reduce_and", _gone("axes"), "(h > -1).all(1)")
_entry("reduce_or", _gone("axes"), "(h > 1.5).any(1)")
_entry("reduce_xor", _gone("axes"), "lax.reduce_xor(jnp.stack([ids, ids * 3]), (0,))")
_entry("argmax argmin", _gone("axes"), "jnp.{}(h, 1)")
_entry("cumsum", _along("axis"), "jnp.cumsum(h, 1)", LINEAR)
_entry("cumlogsumexp cumprod", _along("axis"), "lax.{}(h, 1)")
_entry("cummax cummin", _along("axis"), "lax.{}(lax.stop_gradient(h), 1)")
_entry("sort", _along("dimension"), "jnp.sort(h, 1)", DEAR)
_entry("top_k", _along("axis"), "lax.top_k(h, 2)", DEAR)
_entry("approx_top_k", _along("reduction_dimension"), "lax.approx_max_k(h, 2)", DEAR)
_entry("reduce_window_sum", _of_windows, "pooled(h, 0.0, lax.add)", DEAR)
_entry("reduce_window_max", _of_windows, "pooled(h, -jnp.inf, lax.max)", DEAR)
_entry("reduce_window_min", _of_windows, "pooled(h, jnp.inf, lax.min)", DEAR)
_entry(
    "select_and_gather_add", _of_windows, "jax.jvp(largest, (h,), (jnp.sin(h),))", DEAR
)
_entry(
    "select_and_scatter_add", _of_windows, "jax.vjp(largest, h)[1](largest(h))", DEAR
)

# Products, and functions of the last axes alone.
_entry("dot_general", _product, "h @ w", DEAR, _each(0, 1))
_entry("conv_general_dilated", None, "", DEAR, _each(0, 1))
_entry(
    "triangular_solve", _solved, "solved(matrices(h), h[:, :3, None])", DEAR, _each(1)
)
_entry("cholesky", "... _ _", "jnp.linalg.cholesky(matrices(h))", DEAR)
_entry("eig", "... _ _", "jnp.linalg.eigvals(matrices(h))", DEAR)
_entry("eigh", "... _ _", "jnp.linalg.eigvalsh(matrices(h))", DEAR)
_entry("geqrf", "... _ _", "jnp.linalg.qr(matrices(h), mode='raw')", DEAR)
_entry("householder_product", "... _ _", "lax.linalg.{}(matrices(h), h[:, :3])", DEAR)
_entry("lu schur", "... _ _", "lax.linalg.{}(matrices(h))", DEAR)
_entry("lu_pivots_to_permutation", "... _", "lax.linalg.{}(pivots(ids), 3)", DEAR)
_entry("qr", "... _ _", "lax.linalg.qr(matrices(h), full_matrices=False)", DEAR)
_entry("svd", "... _ _", "jnp.linalg.svd(matrices(h), compute_uv=False)", DEAR)
_entry("tridiagonal_solve", "... _ _", "lax.linalg.{}(h, 5 + h, h, h[..., None])", DEAR)
_entry("fft", _fourier, "jnp.fft.fft(h)", DEAR)

# Collectives, random numbers and others, without dimensions here.
_entry("all_gather all_to_all", _exchanged, "", LINEAR)
_entry("ppermute", "...", "", LINEAR)
_entry("all_gather_invariant all_gather_reduced axis_index")
_entry("pbroadcast after_all empty2 eq_to random_clone reduce")
_entry("ragged_all_to_all random_bits random_gamma rng_bit_generator", None, "", DEAR)
_entry("threefry2x32 hessenberg tridiagonal reduce_window", None, "", DEAR)
_entry(f"select_and_scatter {GATHER_PARTS}", None, "", DEAR)

# Primitives that run programs, that are no functions of arrays, or cannot be read.
_KINDS = {
    **{name: name for name in ("scan", "while", "cond")},
    "checkpoint": "remat2",
    "call": "jit closed_call call",
    "open": "custom_vjp_call custom_linear_solve call_hi_primitive shard_map empty get "
    f"{ADD_TO} {WRITE} {READ_OUT} {NEW_REF} {ROWWISE} {WINDOW} {GRADIENTS} "
    f"{SCAN}",
    "kernel": "pallas_call dot_product_attention_fwd_wrapper "  # the second of cuDNN
    "dot_product_attention_bwd_wrapper",
    "callback": "pure_callback io_callback",
    "custom call": "ffi_call custom_partitioning",
    "ragged product": "ragged_dot_general",
}
for _kind, _names in _KINDS.items():
    _entry(_names, None, "", DEAR, {"kind": _kind})
_entry("custom_jvp_call", None, "", DEAR, PASSED, {"kind": "open"})

# The kinds of primitives that run programs.
KINDS = {x: row.kind for x, row in TABLE.items() if row.kind in PROGRAM_KINDS}
# Primitives that JAX can read, programs inside included: there is no code of another
# kind that may do more than compute.
SEEN = {x for x, row in TABLE.items() if row.kind in ("", "open", *PROGRAM_KINDS)}


def check_names() -> None:
    """Raises if this JAX has another name for a primitive that passes look for."""
    loops = of_jax.scan_p, of_jax.jit_p, of_jax.remat_p
    others = of_jax.dot_general_p, of_jax.convert_element_type_p, of_jax.swap_p
    if other := {x.name for x in (*loops, *others)} - TABLE.keys():
        raise LookupError(f"there are primitives of other names: {other}")
