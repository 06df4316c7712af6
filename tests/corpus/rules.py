"""For each primitive with a rule, functions of rows whose programs have it."""

import jax
import jax.numpy as jnp
from corpus.steps import doubled
from helpers import on_cpus, with_rule
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ga_optax as ga  # noqa: F401, in the texts below
from ga_optax import rowwise
from ga_optax._passes import jaxprs
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
        return jnp.sum(rowwise(lambda h, w: jnp.tanh(h @ w), (0, None))(h, w) ** 3)

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


def example(case):
    """The function of `(h, w, ids)` that a case is the code of."""
    if callable(case):
        return case
    code = compile(case, case, "eval")
    return lambda h, w, ids: eval(code, globals() | {"h": h, "w": w, "ids": ids})


EXAMPLES = {name: example(row.example) for name, row in TABLE.items() if row.example}


# -- Along rows ------------------------------------------------------------------------


def at_ties(h):
    return h + lax.stop_gradient(1 + jnp.minimum(jnp.round(h), 0) - h)


def of_a_vmap(over, h):
    return jax.vmap(lambda x: x * over(x, "rows"), axis_name="rows")(h)


REDUCTIONS = {
    "reduce_sum": "h.sum(0)",
    "reduce_max": [
        "(ids.max(), (ids > 1).max())",
        "h * lax.stop_gradient(h).max(0)",
        "at_ties(h).max(0)",
    ],
    "reduce_min": ["(ids.min(), (ids < 9).min())", "at_ties(-h).min(0)"],
    "reduce_prod": "h.prod(0)",
    "reduce_and": ["(h > -1).all(0)", "jnp.bitwise_and.reduce(ids | 8)"],
    "reduce_or": ["(h > 1.5).any(0)", "jnp.bitwise_or.reduce(ids)"],
    "reduce_xor": "jnp.bitwise_xor.reduce(ids * 3)",
    "argmax": "h.argmax(0)",
    "argmin": "h.argmin(0)",
    "psum": [
        "of_a_vmap(lax.psum, h)",
        "jax.vmap(lambda x: lax.psum(x, 'i'), axis_name='i', out_axes=None)(h.T)",
    ],
    "pmax": "of_a_vmap(lax.pmax, lax.stop_gradient(h))",
    "pmin": "of_a_vmap(lax.pmin, lax.stop_gradient(h))",
    "cumsum": ["jnp.cumsum(h, 0)", "lax.cumsum(h, 0, reverse=True)"],
    "sort": ["jnp.sort(h, 0)", "lax.sort((h % 0.5, jnp.sin(h)), num_keys=1)"],
    "reduce_window_sum": 'lax.reduce_window(h, 0.0, lax.add, (2, 1), (1, 1), "SAME")',
    "sub": "h[:, None] - h[None]",
    "optimization_barrier": "lax.optimization_barrier((h, ids))",
}


# -- Where numbers are -----------------------------------------------------------------

SHAPES = {
    "reshape": [
        "h.reshape(-1, 2, 3)",
        'h.reshape(2, 3, -1, order="F")',
        "h * lax.reshape(jnp.arange(h.size).reshape(D, -1), h.shape, (1, 0))",
    ],
    "concatenate": ["jnp.concatenate([h, jnp.sin(h)])", "jnp.concatenate([h, w])"],
    "unstack": "[x * 2 for x in jnp.unstack(h)]",
    "split": "jnp.split(h, [2, 5])",
    "slice": ["h[::2, 1:]", "(h[1], ids[1])", "(h[1:-1], h[:2])"],
    "rev": ["h[::-1]", "h[:, ::-1]"],
    "pad": [
        "jnp.pad(h, ((1, 2), (0, 0)), constant_values=0.3)",
        "lax.pad(h, 0.5, ((-1, 1, 1), (0, 1, 0)))",
        "lax.pad(h > 0, False, ((1, -1, 0), (-2, 2, 0)))",
    ],
    "tile": ["jnp.tile(h, (2, 1))", "jnp.tile(h, 2)"],
    "dynamic_slice": [
        "lax.dynamic_index_in_dim(h, ids[3], 0)",
        "lax.dynamic_slice_in_dim(h, ids[3], 2, 0)",
    ],
    "dynamic_update_slice": [
        "lax.dynamic_update_slice_in_dim(h, h[:, :2] ** 2, ids[3], 1)",
        "lax.dynamic_update_slice_in_dim(h, w[:2], ids[3], 0)",
    ],
}


# -- Products --------------------------------------------------------------------------


def convolved(x, kernel, groups=1, **how):
    how |= {"feature_group_count": groups}
    return lax.conv_general_dilated(x, kernel, (1,), "SAME", **how)


def sines_of(kernel, x, groups=1):
    return jnp.sin(convolved(x, kernel, groups)).sum()


def in_groups(kernel, x):
    return jax.grad(sines_of)(kernel, x, 2)


def of_two_batches(kernel, x):
    return convolved(x, kernel, batch_group_count=2)


def by_row(fun, kernel, x):
    return jax.vmap(fun, (None, 0))(kernel, x)


def kernels(h):
    """Four filters of six channels for each row."""
    return h[:, None, :, None] * jnp.sin(jnp.arange(12.0)).reshape(4, 1, 3)


PRODUCTS = {
    "dot_general": [
        "w @ h.T",
        "h.T @ jnp.sin(h)",
        "(h @ h.T).sum(0)",
        "h.T @ jnp.arange(len(h), dtype=h.dtype)",
    ],
    "conv_general_dilated": [
        "jax.grad(sines_of)(w[:2, None, :3], h[:, None])",
        "convolved(w[None], h[:, :, None] * jnp.ones(3, h.dtype))",
        # A kernel for each row, in two groups; and its gradient.
        "jax.vmap(lambda x: convolved(w[None], x, 2))(kernels(h)[:, :, :3])",
        "by_row(in_groups, w[:4, None, :3], h.reshape(len(h), 1, 2, 3))",
        "by_row(of_two_batches, w[:4, :1, None], h.reshape(-1, 2, 1, 3))",
    ],
    "triangular_solve": "solved(matrices(w)[0], h[:, :3].T)",
    "fft": "jnp.fft.fft(h, axis=0)",
}


# -- Selections ------------------------------------------------------------------------


def counts(h):
    return jnp.arange(h.shape[0])


def columns(h):
    """As many rows as columns, with the rows of `h` along axis 1."""
    return (h @ jnp.sin(jnp.arange(h.size)).reshape(h.T.shape)).T


def twice(ids):
    """Two integers for each row, one after the other."""
    return jnp.stack([ids, 3 * ids % 5], 1).reshape(-1)


# Several rows write one place. Which one stays JAX leaves open; on CPUs it is the last.
LAST = [
    "w.at[ids].set(h)",
    "jnp.zeros((3, D)).at[ids].set(h, mode='drop')",
    "jnp.zeros((3, D)).at[ids].set(h, mode='clip')",
    "w.at[ids - 2].set(h)",
    "w.at[1, ids].set(h[:, 0])",
    "w.at[jnp.stack([ids, ids + 1], 1)].set(jnp.stack([h, 2 * h], 1))",
    "jnp.full(D, 3).at[ids].set(counts(h))",
    "jnp.zeros(D, bool).at[ids].set(h[:, 0] > 0)",
]

INDEXING = {
    "gather": [
        "h[jnp.repeat(counts(h), 2), twice(ids)]",
        "w[ids]",
        "h[jnp.array([5, 0, -1])]",
        "h[:, jnp.array([2, 0])]",
        "h[ids]",
        "jnp.take_along_axis(h, ids[:, None], 1)",
        "(h @ h.T)[counts(h), counts(h)[::-1]]",
        "jnp.diagonal(h @ h.T)",
        'h.at[jnp.array([3, 99])].get(mode="fill", fill_value=0.5)',
        'h.at[jnp.array([3, 99])].get(mode="clip")',
    ],
    "scatter": [
        "h.at[counts(h), ids].set(0.5)",
        "jnp.zeros_like(w[0], shape=h.shape).at[counts(h), ids].set(1)",
        "h.at[counts(h)[:, None], jnp.stack([ids, ids + 1], 1)].set(7)",
        "h.at[jnp.repeat(counts(h), 2), twice(ids)].set(h[0, 0])",
        "jax.vmap(lambda x, i: x.at[i].set(7.0))(columns(h), counts(h))",
        "h.at[:, 1].set(h[:, 0] ** 2)",
        "h.at[2].set(7.0)",
        "h.at[jnp.array([1, -1])].set(w[:2])",
        "jnp.put_along_axis(h, ids[:, None], 9.0, 1, inplace=False)",
        "jnp.zeros((D, len(h), D)).at[ids, counts(h)].set(h, unique_indices=True)",
        "jnp.ones((D, len(h), D)).at[ids, counts(h)].set(h, unique_indices=True)",
        *(LAST if on_cpus() else []),
    ],
    "scatter-add": [
        "w.at[ids].add(h)",
        "w.at[jnp.array([0, 2])].add(h[:2] * h[2:4])",
        "h.at[counts(h), ids].add(h[:, 0])",
        "h.at[jnp.repeat(counts(h), 2), twice(ids)].add(jnp.repeat(h[:, 0], 2))",
        "jax.grad(lambda h: (h[ids] ** 2).sum())(h)",
        "jnp.bincount(ids, length=4)",
    ],
    "scatter-sub": [
        "w.at[ids].subtract(h)",
        "h.at[counts(h), ids].subtract(h[:, 0])",
        "h.at[:, 1].subtract(w[0, 0])",
        "jnp.full(D, 3).at[ids].subtract(2)",
    ],
    "scatter-mul": "h.at[counts(h), ids].multiply(0.5, unique_indices=True)",
    "scatter-max": [
        "h.at[counts(h), ids].max(0.5 * h[:, 0])",
        "jax.ops.segment_max(h, ids, 4)",
    ],
    "scatter-min": "h.at[counts(h), ids].min(0.5 * h[:, 0])",
}


# -- Random numbers --------------------------------------------------------------------


def folded(key, numbers):
    """A key and a number, or one for each row of numbers."""
    return jax.vmap(jax.random.fold_in, (0 if key.ndim else None, 0))(key, numbers)


RANDOMS = {
    "random_bits": "jax.vmap(jax.random.bits)(keys(ids))",
    "random_wrap": "jax.random.key_data(keys(ids))",
    "random_unwrap": "jax.random.key_data(keys(ids))",
    "random_seed": "jax.random.key_data(jax.vmap(jax.random.key)(ids))",
    "random_split": "jax.random.key_data(jax.vmap(jax.random.split)(keys(ids)))",
    "random_fold_in": [
        "jax.random.key_data(folded(keys(ids), ids * 3))",
        "jax.random.key_data(folded(jax.random.key(0), ids))",
        "jax.random.key_data(jax.vmap(lambda k: folded(k, ids[:3]))(keys(ids)))",
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


def over(d):
    """Solves for `x * d`; and returns what belongs to each row, to all, and to none."""
    return lambda _, b: (b / d, (b.sum(-1), b.sum(), d))


clipped = with_rule(jnp.sin, lambda h, ct: (jnp.clip(ct, -0.2, 0.2) * h[0],))
ranked = with_rule(numbered, lambda _, ct: (numbered(ct),))


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


def settled(x):
    """A fixed point of a row: carries start as constants, the test reads these."""

    def step(c):
        new = 0.5 * jnp.cos(c[0] + x)
        return new, jnp.abs(new - c[0]).max()

    start = jnp.zeros(x.shape), jnp.asarray(1.0)
    return lax.while_loop(lambda c: c[1] > 1e-3, step, start)[0]


def over_rows(h, w, ids):
    return lax.scan(lambda c, x: (c + x * x, jnp.tanh(x @ w)), w[0], h)


def chunks(h, w, ids):
    """A sum over chunks of rows, each of which is computed again for its gradient."""

    def body(total, x):
        return total + jnp.tanh(x @ w).sum(), jnp.sin(x)

    return lax.scan(jax.checkpoint(body), 0.0, h[:, None])


def affine(x, y):
    """Of functions a·x + b, as pairs of a and b, the second after the first."""
    return x[0] * y[0], y[0] * x[1] + y[1]


def carried(h, w, ids):
    return lax.scan(lambda c, x: (0.5 * c + x, c), w[0], h)


NESTED = {
    "checkpoint": [jax.checkpoint(lambda h, w, ids: jnp.sin(h @ w) - h.sum(0))],
    "scan": [layers, over_rows, carried, chunks],
    "while": [
        lambda h, w, ids: lax.while_loop(
            lambda c: c[1] < 3, lambda c: (numbered(c[0]), c[1] + 1), (h, 0)
        ),
        "jax.vmap(halved)(h)",
        "jax.vmap(halved, 1)(h)",
        "jax.vmap(settled)(h)",
        "jax.vmap(jax.vmap(settled))(h[:, None] * jnp.arange(3.0)[:, None])",
        lambda h, w, ids: lax.while_loop(
            lambda c: c[1] < 3, lambda c: (c[0] + h, c[1] + 1), (jnp.zeros(h.shape), 0)
        ),
        lambda h, w, ids: jax.vmap(
            lambda i: lax.fori_loop(0, i, lambda j, c: c + j, 1)
        )(ids),
        lambda h, w, ids: jax.vmap(
            lambda x, n: lax.while_loop(
                lambda c: c[1] < n, lambda c: (c[0] / 2, c[1] + 1), (x, 0)
            )[0]
        )(h, jnp.arange(len(h)) % 5),
    ],
    "cond": [
        "jnp.diagonal(h @ h.T)",
        "lax.cond(ids[0] > 1, jnp.tanh, numbered, h)",
        "lax.cond(w[0, 0] > 0, jnp.sum, lambda h: w[0, 0], h)",
        "lax.cond(w[0, 0] > 0, lambda h: w[0, 0], jnp.sum, h)",
    ],
    "custom_linear_solve": [
        lambda h, w, ids: lax.custom_linear_solve(
            lambda x: x * (1 + counts(x)[:, None]), h, lambda _, b: numbered(b)
        ),
        lambda h, w, ids: lax.custom_linear_solve(
            lambda x: x * w[0], h, over(w[0]), over(w[0]), has_aux=True
        ),
        "jnp.linalg.solve(matrices(h), h[..., :3, None])",
        "jnp.linalg.solve(matrices(h), w[:3, :1])",
    ],
    "call_hi_primitive": "jnp.searchsorted(jnp.linspace(-1, 1, 5), h)",
    "custom_jvp_call": [
        "straight(h)",
        "jnp.logaddexp(h[:, None, 0], h[None, :, 1])",
        "jax.scipy.special.zeta(3, 2 + h**2)",
    ],
    "rowwise": ["of_rows(h)", "derived(h, w)"],
    "associative_scan": [
        "ga.associative_scan(affine, (unit(h), h @ w), reverse=True)",
        "ga.associative_scan(jnp.matmul, matrices(h) / 4)",
        "ga.associative_scan(lambda x, y: x + y + ids[0] * x * y, h[:, 1:] / 9)",
        "ga.associative_scan(jnp.maximum, h, axis=1)",
    ],
    "custom_vjp_call": [lambda h, w, ids: doubled(h, w[0]), "clipped(h)", "ranked(h)"],
}


# -- Sums that wait --------------------------------------------------------------------


def partial(h):
    """A sum over rows that is not reduced yet."""
    return h.T @ jnp.sin(h)


def exact_sum(h):
    """A sum in float32 that nothing rounds."""
    h = jnp.round(2 * h).astype(jnp.float32)
    return h.T @ h


def of_sums(case):
    fun = example(case)
    return lambda h, w, ids: fun(partial(h), w, ids)


OF_SUMS = {  # of `h`, which is such a sum
    name: row.example
    for name, row in TABLE.items()
    if row.sums == slice(None) and row.example
} | {
    "add": "h + w",
    "add_any": "jax.grad(lambda q: ((q + q * w) * h).sum())(w)",
    "sub": "w - h",
    "concatenate": "jnp.concatenate([h, w])",
    "reshape": "h.reshape(-1)",
    "slice": "h[1:3]",
    "rev": "h[::-1]",
    "stack": "jnp.stack([h, w])",
    "psum": "jax.vmap(lambda x: lax.psum(x, 'i'), axis_name='i', out_axes=None)(h)",
    "pad": "jnp.pad(h, 1, constant_values=0.3)",
    "tile": "jnp.tile(h, 2)",
    "optimization_barrier": "lax.optimization_barrier(h)",
    "dynamic_slice": "lax.dynamic_slice_in_dim(h, 2, 2)",
    "gather": "h[jnp.array([0, 3])]",
    "dynamic_update_slice": "lax.dynamic_update_slice_in_dim(h, w[:2], 1, 0)",
    "scatter-sub": "h.at[jnp.array([0, 0])].subtract(w[:2])",
    "scatter-add": "h.at[jnp.array([0, 0])].add(w[:2])",
    "mul": "h * w",
    "div": "h / (3 + w)",
    "dot_general": "h @ w",
    "conv_general_dilated": "convolved(h[None], w[None, :, :3])",
    "triangular_solve": "solved(w + 5 * jnp.eye(D), h)",
    "select_n": "jnp.where(w > 0, h, w)",
}
LINEAR = {name: of_sums(case) for name, case in OF_SUMS.items()} | {
    "real": example("jnp.real(partial(complexes(h)))"),
    "imag": example("jnp.imag(partial(complexes(h)))"),
    "convert_element_type": example("exact_sum(h).astype(h.dtype)"),
}


# -- What comes from no row ------------------------------------------------------------


def pairs(keys):
    return jax.vmap(jax.random.split)(keys)


def bits_of(keys):
    return jax.vmap(jax.random.bits)(keys)[:, None]


CUT = {  # by the primitive whose rows are computed from those of its operands
    "iota": "h * counts(h)[:, None]",
    "exp": "h * jnp.exp(-counts(h).astype(h.dtype))[:, None]",
    "eq": "h.T @ jnp.eye(len(h), dtype=h.dtype)",
    "broadcast_in_dim": "h * jnp.broadcast_to(counts(h)[:, None], h.shape)",
    "reshape": "h * jnp.arange(h.size).reshape(h.shape)",
    "transpose": "h * lax.broadcasted_iota(int, h.T.shape, 1).T",
    "squeeze": "h * lax.squeeze(lax.broadcasted_iota(int, (1, *h.shape), 1), (0,))",
    "concatenate": lambda h, w, ids: (
        h[:, :2] * jnp.concatenate([counts(h)[:, None], counts(h)[:, None] * 2], 1)
    ),
    "random_bits": "h * jax.random.bits(jax.random.key(1), h.shape)",
    "jit": "h * jax.random.normal(jax.random.key(1), h.shape, h.dtype)",
    "random_split": "h[:, :2] * jax.vmap(bits_of)(pairs(keys(counts(h))))[..., 0]",
    "random_fold_in": "h * bits_of(folded(keys(counts(h)), counts(h)))",
}


def merged(*groups):
    found = {}
    for name, cases in (item for group in groups for item in group.items()):
        cases = cases if isinstance(cases, list) else [cases]
        found[name] = found.get(name, []) + list(map(example, cases))
    return found


CUT = {name: example(case) for name, case in CUT.items()}
CASES = merged(EXAMPLES, REDUCTIONS, SHAPES, PRODUCTS, INDEXING, RANDOMS, NESTED)


_SEARCHED = jax.make_jaxpr(lambda x: jnp.searchsorted(jnp.arange(3.0), x))(1.0).jaxpr
# What jax 0.10 does not have.
_IS_HERE = {
    "log2": hasattr(lax, "log2_p"),
    "one_minus_square": hasattr(lax, "one_minus_square_p"),
    "polynomial": hasattr(lax, "polynomial_p"),
    "call_hi_primitive": any(
        e.primitive.name == "call_hi_primitive" for e in jaxprs.equations(_SEARCHED)
    ),
}
NEW = [name for name, is_here in _IS_HERE.items() if not is_here]
