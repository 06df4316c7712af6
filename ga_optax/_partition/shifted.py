"""Sums over rows of values whose shift is known later, as in a softmax over rows.

    Σ f · exp(a - g)  =  Σₖ exp(hₖ - g) · Fₖ · Σ f / Fₖ · exp(a - hₖ)
    Σ f · (a - g)     =  Σₖ Fₖ · (Σ f / Fₖ · (a - hₖ) + (hₖ - g) · Σ f / Fₖ)

The shift g is the maximum of all rows, or larger. Each micro-batch k shifts by its
own maximum hₖ, in the pass that finds g, and keeps the sum and the maximum of each
column. So no pass computes rows once more for the sum. Flash attention does so with
blocks of keys (Dao, Fu, Ermon, Rudra, Ré, 2022), Inf-CL with rows of a contrastive
loss (Cheng et al., 2024).

Both hold for any h and F, which are constant. They lose no digits, for exp(x) has an
error of about |x| ULPs, and |a - hₖ| + |hₖ - g| = |a - g|. Where g is less than hₖ,
rows could vanish beside a row that f leaves out: such a g comes first.

The factors f are numbers of any size. Where hₖ is far below g, they are summed before
they meet an exp that makes them small, and their gradients meet it first. So Fₖ is
the largest term, or factor, of the micro-batch, if that is more than 1.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .._passes import jaxprs
from .._passes.primitives import CAST
from . import held
from .factors import along_factor, ways_to_split
from .held import Rows, Value
from .writer import Writer

Step = tuple[core.JaxprEqn, list[Value], int]  # the operand that is the way


class Shifted(NamedTuple):
    """A value that is linear in `of` less all `shifts`, or in `exp` of the difference.

    The shift that is subtracted first is at least the maximum of all rows of `of`.

    Attributes:
      exp: the equation of the exponential; None if there is none.
      of: the value with rows that is shifted.
      shifts: what is subtracted: values of all rows, known later than `of`.
      masks: what keeps numbers on the way, and which of two choices keeps them.
      steps: the equations on the way, of which one at most is a product.
      varies: the axes along which the shifts vary.
    """

    exp: core.JaxprEqn | None
    of: Value
    shifts: list[Value]
    masks: list[tuple[Value, int]]
    steps: list[Step]
    varies: set[int]


def shifted(v: Value) -> Shifted | None:
    """A value as `Shifted`, by shifts that are the same for all rows."""
    return next(filter(None, (_along(path, v) for path in _paths_to_shift(v))), None)


def _along(path: list[Step], v: Value) -> Shifted | None:
    """The value at the end of a path as `Shifted`; None if it is none."""
    exp, of, shifts = None, v, list[Value]()
    if path:
        (first, vs, i), *others = path
        of = vs[i]
        exp, path = (first, others) if first.primitive.name == "exp" else (None, path)
    while (pair := _late_shift(of)) is not None:
        of, shift = pair
        shifts.append(shift)
    varies = {d for x in shifts for d in held.unmoved(x)[1].values()}
    beside = [u for _, vs, i in path for j, u in enumerate(vs) if j != i]
    is_known = not of.params or all(u.level <= of.level for u in beside)
    is_real = jnp.issubdtype(of.aval.dtype, jnp.floating)
    if of.shape != v.shape or v.dim in varies or not (is_known and is_real):
        return None
    names = [e.primitive.name for e, *_ in path]
    # Without exp it is a log_softmax, less a maximum and the logarithm of a sum.
    if (exp is None) != (len(shifts) > 1) or names.count("mul") > 1:
        return None
    masks = [(vs[0], i) for e, vs, i in path if e.primitive.name == "select_n"]
    found = Shifted(exp, of, shifts, masks, path, varies)
    return found if _is_bound(shifts[-1], found) else None


def _is_bound(v: Value, found: Shifted, places: dict[int, int] | None = None) -> bool:
    """True if a shift is, for certain, at least the maximum of what it shifts.

    If that maximum is not finite, the shift may be any number. `places` has, for each
    axis of `v`, the axis of the shifted value.
    """
    v, axes = held.unmoved(v)
    if places is not None:
        axes = {d: places[at] for d, at in axes.items() if at in places}
    if v.made is None:
        return False
    e, vs, _ = v.made
    name = e.primitive.name
    if name == "select_n" and (test := held.unmoved(vs[0])[0].made) is not None:
        is_test = test[0].primitive.name == "is_finite" and test[1][0] is vs[-1]
        return is_test and _is_bound(vs[-1], found, axes)
    if name == "max" or _widens(e):
        return any(_is_bound(u, found, axes) for u in vs)
    if name != "reduce_max" or not is_along(e, vs[0], axes):
        return False
    (of, masks), (base, others) = _unmasked(vs[0]), _unmasked(found.of)
    known = [(held.unmoved(mask), side) for mask, side in (*others, *found.masks)]
    return of is base and all(
        (held.unmoved(mask), side) in known for mask, side in masks
    )


def is_along(e: core.JaxprEqn, of: Value, axes: dict[int, int]) -> bool:
    """True if the axes of an extremum are those that they were in its operand."""
    kept = [d for d in range(len(of.shape)) if d not in e.params["axes"]]
    return all(axes.get(i) == d for i, d in enumerate(kept) if of.shape[d] != 1)


def _unmasked(v: Value) -> tuple[Value, list[tuple[Value, int]]]:
    """The value before some numbers became -inf, and the masks of what is kept."""
    masks: list[tuple[Value, int]] = []
    while v.made is not None:
        e, vs, _ = v.made
        sides = range(1, len(vs)) if e.primitive.name == "select_n" else ()
        kept = [i for i in sides if held.known_number(vs[3 - i]) == -np.inf]
        if not kept and not _widens(e):
            break
        masks += [(vs[0], i) for i in kept]
        v = vs[sum(kept)]
    return v, masks


def _widens(e: core.JaxprEqn) -> bool:
    """True for a cast of real numbers that rounds nothing."""
    if e.primitive.name != CAST:
        return False
    types: list[Any] = [x.aval for x in (*e.invars, *e.outvars)]
    are_real = all(jnp.issubdtype(x.dtype, jnp.floating) for x in types)
    return are_real and np.can_cast(types[0].dtype, types[1].dtype)


def _paths_to_shift(v: Value, most: int = 4) -> Iterator[list[Step]]:
    """The steps from a shifted value to a value that is linear in it, or in its `exp`.

    The nearest to the shifted value, which may be `exp`, comes first.
    """
    if _late_shift(v) is not None:
        yield []
    elif v.made is not None and most:
        e, vs, _ = v.made
        if e.primitive.name == "exp" and _late_shift(vs[0]) is not None:
            yield [(e, vs, 0)]
        for i in _linear_in(e, vs):
            for path in _paths_to_shift(vs[i], most - 1):
                yield [*path, (e, vs, i)]


def _linear_in(e: core.JaxprEqn, vs: Sequence[Value]) -> Sequence[int]:
    """The operands, of the shape of the result, in each of which `e` is linear."""
    name, [aval] = e.primitive.name, held.types_of(e)[:1]
    same = [v.shape == aval.shape for v in vs]
    if name == "mul":
        return [i for i in (0, 1) if same[i]]
    if name == "neg" or _widens(e):
        return [0]
    if name == "select_n" and all(same) and len(vs) == 3:
        return [i for i in (1, 2) if held.known_number(vs[3 - i]) == 0]
    return []


def _late_shift(v: Value) -> tuple[Value, Value] | None:
    """The operands of a difference, if the second is of all rows, and known later."""
    if v.made is None or v.made[0].primitive.name != "sub":
        return None
    of, shift = v.made[1]
    # Levels are counted from the parameters, and any function may have none.
    is_late = shift.level > of.level or not of.params
    return (of, shift) if is_late and held.is_of_rows(shift) else None


def sum_of_shifted(w: Writer, e: core.JaxprEqn, v: Value) -> Any:
    """The part of a micro-batch in such a sum; None if it is another sum."""
    rows, axes = v.rows, e.params["axes"]
    found = shifted(v) if v.dim in axes else None
    if found is None:
        return None
    gone = tuple(d for d in axes if d not in found.varies)
    rest = tuple(d - sum(x < d for x in gone) for d in axes if d not in gone)
    whole = x = w.part(found.of, rows)
    kept = None
    for mask, side in found.masks:
        keeps = w.part(mask, rows) == (side == 2)
        x = jnp.where(keeps, x, jnp.full_like(x, -jnp.inf))
        kept = keeps if kept is None else kept & keeps
    most = jax.lax.stop_gradient(jnp.max(x, gone, keepdims=True))
    own = jnp.where(jnp.isfinite(most), most, jnp.zeros_like(most))
    terms = whole - own if found.exp is None else w.run(found.exp, [x - own])
    factors = jnp.ones_like(terms) if found.exp is None else terms
    size = _largest(w, found, rows, factors, gone)

    def total(terms: Any) -> Any:
        """The sum of the terms after all steps."""
        return w.run(e, [_stepped(w, found, rows, terms, size)], axes=gone)

    part = total(terms)
    is_none = (most == -jnp.inf) & (found.exp is not None)
    late = jnp.where(is_none, most, own).astype(part.dtype)
    for shift in found.shifts:
        once = w.whole(shift)
        for d in gone if once.shape else ():
            once = jax.lax.slice_in_dim(once, 0, 1, axis=d)
        late = late - once.astype(part.dtype)
    # Where all are -inf, a term is exp(-inf - g): 0, or NaN if g is -inf as well. But
    # what a mask takes out is 0.
    if kept is not None:
        is_out = ~kept.any(gone, keepdims=True)
        late = jnp.where(is_out, jnp.zeros_like(late), late)
    scale = size.astype(part.dtype)
    if found.exp is None:
        part += total(jnp.ones_like(terms)) * jnp.squeeze(late, gone)
    else:
        scale *= jnp.exp(late)
    part *= jnp.squeeze(scale, gone)
    return w.run(e, [part], axes=rest) if rest else part


def _stepped(w: Writer, found: Shifted, rows: Rows, terms: Any, size: Any) -> Any:
    """The terms after all steps, of which the product is by a factor over `size`."""
    for step, vs, i in found.steps:
        given = jaxprs.put(vs, [i], [vs[i].with_layout(terms, rows)])
        if step.primitive.name == "mul":
            factor = vs[1 - i]
            x = w.part(factor, rows) if factor.shape else factor.x
            x = jnp.broadcast_to(x / size.astype(x.dtype), terms.shape)
            given = jaxprs.put(given, [1 - i], [vs[i].with_layout(x, rows)])
        way = next(way for way in ways_to_split(step) if way.outs == (rows.dim,))
        [terms] = along_factor(w, step, given, rows, way)
    return terms


def _largest(
    w: Writer, found: Shifted, rows: Rows, terms: Any, gone: tuple[int, ...]
) -> Any:
    """A power of two near the largest term after all steps, and 1 at least."""
    products = [vs[1 - i] for e, vs, i in found.steps if e.primitive.name == "mul"]
    if not products:
        return jnp.ones([1] * terms.ndim, terms.dtype)
    dtype = products[0].aval.dtype
    terms = _stepped(w, found, rows, terms, jnp.ones([], dtype))
    most = jnp.max(jnp.abs(jax.lax.stop_gradient(terms)), gone, keepdims=True)
    info = jnp.finfo(dtype)
    most = jnp.where((most > 1) & (most < jnp.inf), most, jnp.ones_like(most))
    # Not more: 1 over it would be subnormal, which is 0 on CPUs.
    most = jnp.minimum(most.astype(dtype), 1 / float(info.tiny))
    return jax.lax.reduce_precision(most, info.nexp, 0)
