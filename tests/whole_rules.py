"""For each primitive with a rule, functions of rows whose programs have it.

A case takes `h`, rows of numbers; `w`, a square matrix that is whole; and `ids`, an
integer for each row. It returns an array, or several. The examples of the table of
primitives are such cases; here are those of rules that are code.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from whole_programs import doubled

from ga_optax import rowwise
from ga_optax._passes import ir
from ga_optax._passes.primitives import TABLE

D = 6


def unit(h):
    """Numbers in (0, 1)."""
    return 0.02 + 0.96 * jax.nn.sigmoid(h)


def complexes(h):
    return lax.complex(h, jnp.sin(h))


def matrices(h):
    """A positive definite matrix for each row."""
    return h[..., :3, None] * h[..., None, :3] + 3 * jnp.eye(3, dtype=h.dtype)


def keys(ids):
    """A key for each row."""
    data = jnp.stack([ids, ids * 7], -1).astype(jnp.uint32)
    return jax.random.wrap_key_data(data, impl="threefry2x32")


def placed(h):
    """The same numbers, of which is said where they lie."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(AxisType.Auto,))
    place = NamedSharding(mesh, PartitionSpec("data"))
    return lax.with_sharding_constraint(h, place)


@rowwise
def of_rows(h):
    """Whose rows are promised not to need each other."""
    return jnp.tanh(h) * jnp.sum(h, -1, keepdims=True), h[..., 0] > 0


def derived(h, w):
    """The gradient of a promised function, inside of the function at hand."""

    def total(h, w):
        return jnp.sum(rowwise(lambda h: jnp.tanh(h @ w))(h) ** 3)

    return jax.grad(total, (0, 1))(h, w)


def bound(name):
    """A function that is one primitive."""
    return getattr(lax, f"{name}_p").bind


def pooled(h, start, by):
    return lax.reduce_window(h, start, by, (1, 2), (1, 2), "VALID")


def largest(h):
    return pooled(h, -jnp.inf, lax.max)


def pivots(ids):
    return jnp.stack([ids % 3, ids % 2 + 1], -1)


def solved(matrices, side):
    return lax.linalg.triangular_solve(matrices, side, left_side=True, lower=True)


def example(code):
    """The function of rows that a row of the table of primitives has for the tests."""
    return lambda h, w, ids: eval(code, globals() | {"h": h, "w": w, "ids": ids})


EXAMPLES = {name: example(row.example) for name, row in TABLE.items() if row.example}


# -- Along rows ------------------------------------------------------------------------


def at_ties(h):
    return h + lax.stop_gradient(1 + jnp.minimum(jnp.round(h), 0) - h)


def of_a_vmap(over):
    return lambda h, w, ids: jax.vmap(lambda x: x * over(x, "rows"), axis_name="rows")(
        h
    )


REDUCTIONS = {
    "reduce_sum": lambda h, w, ids: h.sum(0),
    "reduce_max": [
        lambda h, w, ids: h.max(0),
        lambda h, w, ids: h.max(),
        lambda h, w, ids: (ids.max(), (ids > 1).max()),
        lambda h, w, ids: h * lax.stop_gradient(h).max(0),
        lambda h, w, ids: at_ties(h).max(0),
    ],
    "reduce_min": [
        lambda h, w, ids: h.min(0),
        lambda h, w, ids: (ids.min(), (ids < 9).min()),
        lambda h, w, ids: at_ties(-h).min(0),
    ],
    "reduce_prod": lambda h, w, ids: h.prod(0),
    "reduce_and": [
        lambda h, w, ids: (h > -1).all(0),
        lambda h, w, ids: jnp.bitwise_and.reduce(ids | 8),
    ],
    "reduce_or": [
        lambda h, w, ids: (h > 1.5).any(0),
        lambda h, w, ids: jnp.bitwise_or.reduce(ids),
    ],
    "reduce_xor": lambda h, w, ids: jnp.bitwise_xor.reduce(ids * 3),
    "argmax": lambda h, w, ids: h.argmax(0),
    "argmin": lambda h, w, ids: h.argmin(0),
    "psum": of_a_vmap(lax.psum),
    "pmax": lambda h, w, ids: of_a_vmap(lax.pmax)(lax.stop_gradient(h), w, ids),
    "pmin": lambda h, w, ids: of_a_vmap(lax.pmin)(lax.stop_gradient(h), w, ids),
    "cumsum": [
        lambda h, w, ids: jnp.cumsum(h, 0),
        lambda h, w, ids: lax.cumsum(h, 0, reverse=True),
    ],
    "cumprod": [
        lambda h, w, ids: jnp.cumprod(h, 0),
        lambda h, w, ids: lax.cumprod(h, 0, reverse=True),
    ],
    "cummax": lambda h, w, ids: lax.cummax(lax.stop_gradient(h), 0),
    "cummin": lambda h, w, ids: lax.cummin(lax.stop_gradient(h), 0),
    "cumlogsumexp": lambda h, w, ids: lax.cumlogsumexp(h, 0),
    "sort": [
        lambda h, w, ids: jnp.sort(h, 0),
        lambda h, w, ids: lax.sort((h % 0.5, jnp.sin(h)), num_keys=1),
    ],
    "reduce_window_sum": lambda h, w, ids: lax.reduce_window(
        h, 0.0, lax.add, (2, 1), (1, 1), "SAME"
    ),
    "sub": lambda h, w, ids: h[:, None] - h[None],
    "optimization_barrier": lambda h, w, ids: lax.optimization_barrier((h, ids)),
}


# -- Where numbers are -----------------------------------------------------------------

SHAPES = {
    "reshape": [
        lambda h, w, ids: h.reshape(-1, 2, 3),
        lambda h, w, ids: h.reshape(-1),
        lambda h, w, ids: h.reshape(2, 3, -1, order="F"),
        lambda h, w, ids: (
            h * lax.reshape(jnp.arange(h.size).reshape(D, -1), h.shape, (1, 0))
        ),
        lambda h, w, ids: h.reshape(D, -1),
    ],
    "concatenate": [
        lambda h, w, ids: jnp.concatenate([h, jnp.sin(h)]),
        lambda h, w, ids: jnp.concatenate([h, w]),
    ],
    "unstack": lambda h, w, ids: [x * 2 for x in jnp.unstack(h)],
    "split": lambda h, w, ids: jnp.split(h, [2, 5]),
    "slice": [
        lambda h, w, ids: h[2:],
        lambda h, w, ids: h[::2, 1:],
        lambda h, w, ids: (h[1], ids[1]),
        lambda h, w, ids: (h[1:-1], h[:2]),
    ],
    "rev": [lambda h, w, ids: h[::-1], lambda h, w, ids: h[:, ::-1]],
    "pad": [
        lambda h, w, ids: jnp.pad(h, ((1, 2), (0, 0)), constant_values=0.3),
        lambda h, w, ids: lax.pad(h, 0.5, ((-1, 1, 1), (0, 1, 0))),
    ],
    "tile": [lambda h, w, ids: jnp.tile(h, (2, 1)), lambda h, w, ids: jnp.tile(h, 2)],
    "dynamic_slice": [
        lambda h, w, ids: lax.dynamic_index_in_dim(h, ids[3], 0),
        lambda h, w, ids: lax.dynamic_slice_in_dim(h, ids[3], 2, 0),
    ],
    "dynamic_update_slice": [
        lambda h, w, ids: lax.dynamic_update_slice_in_dim(h, h[:, :2] ** 2, ids[3], 1),
        lambda h, w, ids: lax.dynamic_update_slice_in_dim(h, w[:2], ids[3], 0),
    ],
}


# -- Products --------------------------------------------------------------------------


def convolved(x, kernel, groups=1, **how):
    how |= {"feature_group_count": groups}
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", **how)


def kernels(h):
    """Four filters of six channels for each row."""
    return h[:, None, :, None] * jnp.sin(jnp.arange(12.0)).reshape(4, 1, 3)


PRODUCTS = {
    "dot_general": [
        lambda h, w, ids: w @ h.T,
        lambda h, w, ids: h.T @ jnp.sin(h),
        lambda h, w, ids: h @ jnp.sin(h).T,
        lambda h, w, ids: jnp.einsum("nd,nd->n", h, jnp.sin(h)),
        lambda h, w, ids: (h @ h.T).sum(0),
        lambda h, w, ids: h.T @ jnp.arange(len(h), dtype=h.dtype),
    ],
    "conv_general_dilated": [
        lambda h, w, ids: convolved(h[:, None], w[:2, None, :3]),
        lambda h, w, ids: jax.grad(
            lambda kernel: jnp.sin(convolved(h[:, None], kernel)).sum()
        )(w[:2, None, :3]),
        lambda h, w, ids: convolved(w[None], h[:, :, None] * jnp.ones(3, h.dtype)),
        # A kernel for each row, alone and in two groups; and its gradient.
        lambda h, w, ids: jax.vmap(lambda x: convolved(w[None], x))(kernels(h)),
        lambda h, w, ids: jax.vmap(lambda x: convolved(w[None], x, 2))(
            kernels(h)[:, :, :3]
        ),
        lambda h, w, ids: jax.vmap(
            jax.grad(lambda k, x: jnp.sin(convolved(x[None, None], k)).sum()), (None, 0)
        )(w[:2, None, :3], h),
        lambda h, w, ids: jax.vmap(
            jax.grad(lambda k, x: jnp.sin(convolved(x, k, 2)).sum()), (None, 0)
        )(w[:4, None, :3], h.reshape(len(h), 1, 2, 3)),
        lambda h, w, ids: jax.grad(
            lambda k: jnp.sin(convolved(h.reshape(-1, 2, 3), k, 2)).sum()
        )(w[:4, None, :3]),
        lambda h, w, ids: jax.vmap(
            lambda x: convolved(x, w[:4, :1, None], batch_group_count=2)
        )(h.reshape(-1, 2, 1, 3)),
    ],
    "triangular_solve": lambda h, w, ids: solved(matrices(w)[0], h[:, :3].T),
    "fft": lambda h, w, ids: jnp.fft.fft(h, axis=0),
}


# -- Selections ------------------------------------------------------------------------


def counts(h):
    return jnp.arange(h.shape[0])


def twice(ids):
    """Two integers for each row, one after the other."""
    return jnp.stack([ids, 3 * ids % 5], 1).reshape(-1)


INDEXING = {
    "gather": [
        lambda h, w, ids: h[counts(h), ids],
        lambda h, w, ids: h[jnp.repeat(counts(h), 2), twice(ids)],
        lambda h, w, ids: w[ids],
        lambda h, w, ids: h[jnp.array([5, 0, -1])],
        lambda h, w, ids: h[:, jnp.array([2, 0])],
        lambda h, w, ids: h[ids],
        lambda h, w, ids: jnp.take_along_axis(h, ids[:, None], 1),
        lambda h, w, ids: (h @ h.T)[counts(h), counts(h)[::-1]],
        lambda h, w, ids: jnp.diagonal(h @ h.T),
        lambda h, w, ids: h.at[jnp.array([3, 99])].get(mode="fill", fill_value=0.5),
        lambda h, w, ids: h.at[jnp.array([3, 99])].get(mode="clip"),
    ],
    "scatter": [
        lambda h, w, ids: h.at[counts(h), ids].set(0.5),
        lambda h, w, ids: jnp.zeros_like(w[0], shape=h.shape).at[counts(h), ids].set(1),
        lambda h, w, ids: h.at[counts(h)[:, None], jnp.stack([ids, ids + 1], 1)].set(7),
        lambda h, w, ids: h.at[jnp.repeat(counts(h), 2), twice(ids)].set(h[0, 0]),
        lambda h, w, ids: h.at[:, 1].set(h[:, 0] ** 2),
        lambda h, w, ids: h.at[2].set(7.0),
        lambda h, w, ids: h.at[jnp.array([1, -1])].set(w[:2]),
        lambda h, w, ids: jnp.put_along_axis(h, ids[:, None], 9.0, 1, inplace=False),
    ],
    "scatter-add": [
        lambda h, w, ids: jax.ops.segment_sum(h, ids, 4),
        lambda h, w, ids: w.at[ids].add(h),
        lambda h, w, ids: w.at[jnp.array([0, 2])].add(h[:2] * h[2:4]),
        lambda h, w, ids: h.at[counts(h), ids].add(h[:, 0]),
        lambda h, w, ids: h.at[jnp.repeat(counts(h), 2), twice(ids)].add(
            jnp.repeat(h[:, 0], 2)
        ),
        lambda h, w, ids: jax.grad(lambda h: (h[ids] ** 2).sum())(h),
        lambda h, w, ids: jnp.bincount(ids, length=4),
    ],
    "scatter-sub": [
        lambda h, w, ids: w.at[ids].subtract(h),
        lambda h, w, ids: h.at[counts(h), ids].subtract(h[:, 0]),
        lambda h, w, ids: h.at[:, 1].subtract(w[0, 0]),
    ],
    "scatter-mul": [
        lambda h, w, ids: h.at[counts(h), ids].multiply(0.5, unique_indices=True)
    ],
    "scatter-max": [
        lambda h, w, ids: h.at[counts(h), ids].max(0.5 * h[:, 0]),
        lambda h, w, ids: jax.ops.segment_max(h, ids, 4),
    ],
    "scatter-min": [lambda h, w, ids: h.at[counts(h), ids].min(0.5 * h[:, 0])],
}


# -- Random numbers --------------------------------------------------------------------

RANDOMS = {
    "random_bits": [lambda h, w, ids: jax.vmap(jax.random.bits)(keys(ids))],
    "random_wrap": [lambda h, w, ids: jax.random.key_data(keys(ids))],
    "random_unwrap": [lambda h, w, ids: jax.random.key_data(keys(ids))],
    "random_seed": [
        lambda h, w, ids: jax.random.key_data(jax.vmap(jax.random.key)(ids))
    ],
    "random_split": [
        lambda h, w, ids: jax.random.key_data(jax.vmap(jax.random.split)(keys(ids)))
    ],
    "random_fold_in": [
        lambda h, w, ids: jax.random.key_data(
            jax.vmap(jax.random.fold_in)(keys(ids), ids * 3)
        ),
        lambda h, w, ids: jax.random.key_data(
            jax.vmap(lambda i: jax.random.fold_in(jax.random.key(0), i))(ids)
        ),
    ],
}


# -- Programs inside -------------------------------------------------------------------


def numbered(h):
    """Rows, each divided by its number."""
    return h / (1 + counts(h)[:, None])


@jax.custom_jvp
def straight(h):
    return jnp.round(h * 4) / 4 + numbered(h)


@straight.defjvp
def _(primals, tangents):
    return straight(*primals), 0.5 * tangents[0]


@jax.custom_vjp
def clipped(h):
    return jnp.sin(h)


clipped.defvjp(lambda h: (jnp.sin(h), h), lambda h, ct: (jnp.clip(ct, -0.2, 0.2) * h,))


ranked = jax.custom_vjp(numbered)
ranked.defvjp(lambda h: (numbered(h), None), lambda _, ct: (numbered(ct),))


def layers(h, w, ids):
    def body(c, w):
        h, total = c
        h = jnp.tanh(h @ w) + h.mean(0)
        return (h, total + h.sum(0)), h

    return lax.scan(body, (h, w[0]), jnp.stack([w, w.T]))


def halved(x):
    """A row, halved until it is small, and how often that was."""
    return lax.while_loop(
        lambda c: jnp.abs(c[0]).max() > 0.3, lambda c: (c[0] * 0.5, c[1] + 1), (x, 0)
    )


def over_rows(h, w, ids):
    return lax.scan(lambda c, x: (c + x * x, jnp.tanh(x @ w)), w[0], h)


def chunks(h, w, ids):
    """A sum over chunks of rows, each of which is computed again for its gradient."""

    def body(total, x):
        return total + jnp.tanh(x @ w).sum(), jnp.sin(x)

    return lax.scan(jax.checkpoint(body), 0.0, h[:, None])


def carried(h, w, ids):
    return lax.scan(lambda c, x: (0.5 * c + x, c), w[0], h)


NESTED = {
    "checkpoint": [jax.checkpoint(lambda h, w, ids: jnp.sin(h @ w) - h.sum(0))],
    "scan": [layers, over_rows, carried, chunks],
    "while": [
        lambda h, w, ids: lax.while_loop(
            lambda c: c[1] < 3, lambda c: (numbered(c[0]), c[1] + 1), (h, 0)
        ),
        lambda h, w, ids: jax.vmap(halved)(h),
        lambda h, w, ids: jax.vmap(halved, 1)(h),
        lambda h, w, ids: jax.vmap(
            lambda i: lax.fori_loop(0, i, lambda j, c: c + j, 1)
        )(ids),
    ],
    "cond": [
        lambda h, w, ids: jnp.diagonal(h @ h.T),
        lambda h, w, ids: lax.cond(ids[0] > 1, jnp.tanh, numbered, h),
        lambda h, w, ids: lax.cond(ids[0] > 1, jnp.tanh, lambda h: h @ w, h),
        lambda h, w, ids: lax.cond(w[0, 0] > 0, jnp.sum, lambda h: w[0, 0], h),
        lambda h, w, ids: lax.cond(w[0, 0] > 0, lambda h: w[0, 0], jnp.sum, h),
    ],
    "custom_linear_solve": [
        lambda h, w, ids: lax.custom_linear_solve(
            lambda x: x * (1 + counts(x)[:, None]), h, lambda _, b: numbered(b)
        ),
        lambda h, w, ids: jnp.linalg.solve(matrices(h), h[..., :3, None]),
    ],
    "call_hi_primitive": [
        lambda h, w, ids: jnp.searchsorted(jnp.linspace(-1, 1, 5), h)
    ],
    "custom_jvp_call": [
        lambda h, w, ids: straight(h),
        lambda h, w, ids: jnp.logaddexp(h[:, None, 0], h[None, :, 1]),
    ],
    "rowwise": [lambda h, w, ids: of_rows(h), lambda h, w, ids: derived(h, w)],
    "custom_vjp_call": [
        lambda h, w, ids: doubled(h, w[0]),
        lambda h, w, ids: clipped(h),
        lambda h, w, ids: ranked(h),
    ],
}


# -- Sums that wait --------------------------------------------------------------------


def partial(h):
    """A sum over rows that is not reduced yet."""
    return h.T @ jnp.sin(h)


def exact_sum(h):
    """A sum in float32 that nothing rounds."""
    h = jnp.round(2 * h).astype(jnp.float32)
    return h.T @ h


def of_sums(f):
    return lambda h, w, ids: f(partial(h), w, ids)


LINEAR = (
    {
        name: of_sums(example(row.example))
        for name, row in TABLE.items()
        if row.sums == slice(None) and row.example
    }
    | {
        name: of_sums(f)
        for name, f in {
            "add": lambda p, w, ids: p + w,
            "add_any": lambda p, w, ids: jax.grad(lambda q: ((q + q * w) * p).sum())(w),
            "sub": lambda p, w, ids: w - p,
            "concatenate": lambda p, w, ids: jnp.concatenate([p, w]),
            "reshape": lambda p, w, ids: p.reshape(-1),
            "slice": lambda p, w, ids: p[1:3],
            "rev": lambda p, w, ids: p[::-1],
            "stack": lambda p, w, ids: jnp.stack([p, w]),
            "psum": lambda p, w, ids: jax.vmap(
                lambda x: lax.psum(x, "i"), axis_name="i", out_axes=None
            )(p),
            "pad": lambda p, w, ids: jnp.pad(p, 1, constant_values=0.3),
            "tile": lambda p, w, ids: jnp.tile(p, 2),
            "optimization_barrier": lambda p, w, ids: lax.optimization_barrier(p),
            "dynamic_slice": lambda p, w, ids: lax.dynamic_slice_in_dim(p, 2, 2),
            "gather": lambda p, w, ids: p[jnp.array([0, 3])],
            "dynamic_update_slice": lambda p, w, ids: lax.dynamic_update_slice_in_dim(
                p, w[:2], 1, 0
            ),
            "scatter-sub": lambda p, w, ids: p.at[jnp.array([0, 0])].subtract(w[:2]),
            "scatter-add": lambda p, w, ids: p.at[jnp.array([0, 0])].add(w[:2]),
            "mul": lambda p, w, ids: p * w,
            "div": lambda p, w, ids: p / (3 + w),
            "dot_general": lambda p, w, ids: p @ w,
            "conv_general_dilated": lambda p, w, ids: convolved(
                p[None], w[None, :, :3]
            ),
            "triangular_solve": lambda p, w, ids: solved(w + 5 * jnp.eye(D), p),
            "select_n": lambda p, w, ids: jnp.where(w > 0, p, w),
        }.items()
    }
    | {
        "real": lambda h, w, ids: jnp.real(partial(complexes(h))),
        "imag": lambda h, w, ids: jnp.imag(partial(complexes(h))),
        "convert_element_type": lambda h, w, ids: exact_sum(h).astype(h.dtype),
    }
)


# -- What comes from no row ------------------------------------------------------------


# By the primitive whose rows are computed from those of its operands.
def split(h):
    return jax.random.split(jax.random.key(1), len(h))


CUT = {
    "iota": lambda h, w, ids: h * counts(h)[:, None],
    "exp": lambda h, w, ids: h * jnp.exp(-counts(h).astype(h.dtype))[:, None],
    "eq": lambda h, w, ids: h.T @ jnp.eye(len(h), dtype=h.dtype),
    "broadcast_in_dim": lambda h, w, ids: (
        h * jnp.broadcast_to(counts(h)[:, None], h.shape)
    ),
    "reshape": lambda h, w, ids: h * jnp.arange(h.size).reshape(h.shape),
    "transpose": lambda h, w, ids: h * lax.broadcasted_iota(int, h.T.shape, 1).T,
    "squeeze": lambda h, w, ids: (
        h * lax.squeeze(lax.broadcasted_iota(int, (1, *h.shape), 1), (0,))
    ),
    "concatenate": lambda h, w, ids: (
        h[:, :2] * jnp.concatenate([counts(h)[:, None], counts(h)[:, None] * 2], 1)
    ),
    "random_bits": lambda h, w, ids: h * jax.random.bits(jax.random.key(1), h.shape),
    "jit": lambda h, w, ids: h * jax.random.normal(jax.random.key(1), h.shape, h.dtype),
    "random_split": lambda h, w, ids: h * jax.vmap(jax.random.bits)(split(h))[:, None],
    "random_fold_in": lambda h, w, ids: (
        h
        * jax.vmap(lambda key, i: jax.random.bits(jax.random.fold_in(key, i)))(
            split(h), jnp.arange(len(h))
        )[:, None]
    ),
    "dot_general": lambda h, w, ids: (h @ jnp.sin(h).T).sum(0),
    "reduce_sum": lambda h, w, ids: ((h[:, None] - h[None]) ** 2).sum(2).max(0),
    "reduce_max": lambda h, w, ids: jnp.abs(h[:, None] - h[None]).max(2).sum(0),
    "reduce_min": lambda h, w, ids: jnp.abs(h[:, None] + h[None]).min(2).sum(0),
}


def cases(group):
    return {k: f if isinstance(f, list) else [f] for k, f in group.items()}


def merged(*groups):
    found = {}
    for group in map(cases, groups):
        for name, functions in group.items():
            found[name] = found.get(name, []) + functions
    return found


CASES = merged(EXAMPLES, REDUCTIONS, SHAPES, PRODUCTS, INDEXING, RANDOMS, NESTED)


def _searched():
    return jax.make_jaxpr(lambda x: jnp.searchsorted(jnp.arange(3.0), x))(1.0).jaxpr


# What older versions of JAX do not have.
_IS_HERE = {
    "log2": hasattr(lax, "log2_p"),
    "one_minus_square": hasattr(lax, "one_minus_square_p"),
    "polynomial": hasattr(lax, "polynomial_p"),
    "call_hi_primitive": "call_hi_primitive"
    in [e.primitive.name for e in ir.equations(_searched())],
}
NEW = [name for name, is_here in _IS_HERE.items() if not is_here]
