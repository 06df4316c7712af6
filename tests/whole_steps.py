"""More steps on `h`, of [n, d], and on what else the batch has: `step(h, w, b)`.

`b["ids"]` are integers, `b["mask"]` booleans and `b["y"]` numbers, one row each.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

N, D = 12, 6


# -- Products --------------------------------------------------------------------------


def pairs_softmax(h, w, b):
    scores = jax.nn.softmax((h @ h.T / D).ravel()).reshape(len(h), len(h))
    return h + len(h) * scores @ h


def bilinear(h, w, b):
    return h + 0.1 * jnp.einsum("nd,de,ne->n", h, w, h)[:, None]


def correlation(h, w, b):
    z = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1)
    return h @ (z.T @ z / len(h))


def heads(h, w, b):
    q, k, v = (jnp.tanh(h @ w * s).reshape(-1, 2, 3) for s in (1.0, 0.5, -0.7))
    scores = jnp.einsum("nhd,mhd->hnm", q, k)
    scores = jnp.where(jnp.tril(jnp.ones(scores.shape[1:], bool)), scores, -1e9)
    return jnp.einsum("hnm,mhd->nhd", jax.nn.softmax(scores), v).reshape(h.shape)


def contrast(h, w, b):
    z = h / jnp.sqrt((h**2).sum(1, keepdims=True) + 0.1)
    same = (b["ids"][:, None] == b["ids"][None]) & ~jnp.eye(len(h), dtype=bool)
    log = jax.nn.log_softmax(z @ z.T, 1)
    each = jnp.where(same, log, 0).sum(1) / jnp.maximum(same.sum(1), 1)
    return h - each[:, None]


def memory(h, w, b):
    bank = jnp.concatenate([jnp.tanh(h), w])
    return jax.nn.softmax(h @ bank.T) @ bank


def mmd(h, w, b):
    def kernel(x, y):
        return jnp.exp(-((x[:, None] - y[None]) ** 2).sum(-1) / D).mean()

    return h * (1 + kernel(h, h) + kernel(b["y"], b["y"]) - 2 * kernel(h, b["y"]))


def sinkhorn(h, w, b):
    cost = ((h[:, None] - b["y"][None]) ** 2).sum(-1) / D

    def turn(fg, _):
        f, g = fg
        f = -jax.nn.logsumexp(g[None] - cost, 1)
        return (f, -jax.nn.logsumexp(f[:, None] - cost, 0)), None

    (f, g), _ = jax.lax.scan(turn, (h[:, 0] * 0, h[:, 0] * 0), length=3)
    plan = jnp.exp(f[:, None] + g[None] - cost)
    return h + (plan * cost).sum() * 0.1 + plan @ b["y"]


# -- Reductions ------------------------------------------------------------------------


def where_mean(h, w, b):
    keep = b["mask"][:, None] & (h > -1)
    return h - jnp.where(keep, h, 0).sum(0) / (keep.sum(0) + 1)


def reduced(h, w, b):
    def larger(x, y):
        return jnp.where(x > y, x, y)

    x = jax.lax.stop_gradient(h)
    return h - 0.1 * jax.lax.reduce(x, jnp.asarray(-9.0, h.dtype), larger, (0,))


def spread(h, w, b):
    return h / (0.5 + h.std() + jnp.abs(h).max() - h.min())


def histogram(h, w, b):
    counts, _ = jnp.histogram(jax.lax.stop_gradient(h[:, 0]), 4, (-2, 2))
    return h * (1 + counts.max() / len(h))


# -- Reshapes and concatenations -------------------------------------------------------


def flattened(h, w, b):
    flat = h.reshape(-1)
    return jnp.tanh(flat - flat.mean()).reshape(h.shape)


def swapped(h, w, b):
    return h.reshape(2, -1, D).swapaxes(0, 1).reshape(h.shape) + 0.1 * h


def blocks(h, w, b):
    x = h.reshape(-1, 3, D)
    return (x - 0.5 * x.mean(1, keepdims=True)).reshape(h.shape)


def blocks_first(h, w, b):
    x = h.reshape(3, -1, D)
    return (x - 0.5 * x.mean(0)).reshape(h.shape)


def of_features(h, w, b):
    x = h.reshape(-1, 2, 3).transpose(1, 0, 2).reshape(-1, 3)
    x = jnp.tanh(x - x.mean(0))
    return x.reshape(2, -1, 3).transpose(1, 0, 2).reshape(h.shape)


def transposed(h, w, b):
    return h + 0.3 * h.T.reshape(h.shape)


def with_mean(h, w, b):
    x = jnp.concatenate([h, jnp.broadcast_to(h.mean(0), h.shape)], 1)
    return x[:, ::2] + x[:, 1::2]


def padded(h, w, b):
    x = jnp.concatenate([h, w[:2], h])
    return x[: len(h)] * 0.5 + x[-len(h) :] + x[len(h)]


def interleaved(h, w, b):
    x = jnp.stack([h, jnp.sin(h)], 1).reshape(-1, D)
    return x[::2] - x[1::2] + x.mean(0)


# -- Selections ------------------------------------------------------------------------


def nonzero(h, w, b):
    at = jnp.nonzero(h[:, 0] > 0, size=len(h), fill_value=0)[0]
    return h + 0.1 * h[at]


def groups(h, w, b):
    best = jnp.full((3, D), -5.0, h.dtype).at[b["ids"]].max(h)
    return h - 0.2 * best[b["ids"]]


def group_products(h, w, b):
    x = 1 + 0.1 * jnp.tanh(jax.lax.stop_gradient(h))  # JAX has no derivative of it
    found = jnp.ones((3, D), h.dtype).at[b["ids"]].multiply(x)
    return h * found[b["ids"]]


def group_softmax(h, w, b):
    top = jax.ops.segment_max(h, b["ids"], 3)
    e = jnp.exp(h - jnp.where(jnp.isfinite(top), top, 0)[b["ids"]])
    return h + e / jax.ops.segment_sum(e, b["ids"], 3)[b["ids"]]


def embedding(h, w, b):
    table = jnp.tanh(w @ h.T @ h / len(h))
    return h + table[b["ids"]]


def column(h, w, b):
    return h.at[:, 1].set(h.mean(1)).at[:, 2].multiply(0.5)


def one_hot(h, w, b):
    chosen = jax.nn.one_hot(h.argmax(0), len(h), dtype=h.dtype) @ h
    return h + 0.1 * chosen.sum(0)


def ranks(h, w, b):
    order = jnp.argsort(jnp.argsort(h[:, 0])) / len(h)
    return h * (1 + order.astype(h.dtype))[:, None]


def searched(h, w, b):
    edges = jnp.sort(jax.lax.stop_gradient(h[:, 1]))
    return h + jnp.searchsorted(edges, h[:, :1]).astype(h.dtype) / len(h)


def window(h, w, b):
    x = jax.lax.dynamic_slice(h, (b["ids"].sum() % 5, 0), (3, D))
    return jax.lax.dynamic_update_slice(h, x * 0.5, (2, 0))


def own_entry(h, w, b):
    log = jax.nn.log_softmax(h)
    return h + log[jnp.arange(len(h)), b["ids"]][:, None]


def hardest(h, w, b):
    far = ((h[:, None] - h[None]) ** 2).sum(-1)
    same = b["ids"][:, None] == b["ids"][None]
    worst = jnp.where(same, far, 0).max(1) - jnp.where(same, 99.0, far).min(1)
    return h + jax.nn.relu(worst + 1)[:, None] * 0.1


# -- Integers and booleans -------------------------------------------------------------


def counted(h, w, b):
    counts = jnp.bincount(b["ids"], length=3)
    return h / (1 + counts[b["ids"]])[:, None]


def places(h, w, b):
    mine = jax.nn.one_hot(b["ids"], 3, dtype=jnp.int32)
    place = (jnp.cumsum(mine, 0) * mine).sum(1) - 1
    return jnp.where((place < 3)[:, None], h, 0.2 * h)


def masked(h, w, b):
    keep = b["mask"] & (b["ids"] != 1)
    fraction = keep.sum() / jnp.maximum(b["mask"].sum(), 1)
    return jnp.where(keep[:, None], h * fraction, h)


def bits(h, w, b):
    odd = jnp.bitwise_xor.reduce(b["ids"]) & 1
    some = b["mask"].any() & ~b["mask"].all()
    return h * jnp.where(some, 1.5, 1.0) + odd


def sorted_ids(h, w, b):
    order = jnp.argsort(b["ids"], stable=True)
    return (h[order] - h[order].mean(0))[jnp.argsort(order)]


# -- Loops and branches ----------------------------------------------------------------


def reverse(h, w, b):
    def body(c, x):
        c = 0.5 * c + x
        return c, jnp.tanh(c)

    return jax.lax.scan(body, jnp.zeros_like(h[0]), h, reverse=True)[1]


def recurrence(h, w, b):
    def combine(x, y):
        return x[0] * y[0], y[0] * x[1] + y[1]

    return jax.lax.associative_scan(combine, (jax.nn.sigmoid(h), h))[1]


def over_features(h, w, b):
    def body(c, x):
        c = jnp.tanh(c + x - 0.1 * x.mean())
        return c, c

    return jax.lax.scan(body, jnp.zeros_like(h[:, 0]), h.T, unroll=2)[1].T


def over_pairs(h, w, b):
    def body(c, x):
        return c + x.sum(0), x - 0.5 * x[::-1]

    total, x = jax.lax.scan(body, jnp.zeros_like(h[0]), h.reshape(-1, 2, D))
    return x.reshape(h.shape) + 0.1 * total


def checkpointed_layers(h, w, b):
    @jax.checkpoint
    def body(h, w):
        h = jnp.tanh(h @ w)
        return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1), h.max()

    h, tops = jax.lax.scan(body, h, jnp.stack([w, w.T]))
    return h + tops.sum() * 0.1


def growing(h, w, b):
    def body(h, w):
        z, total = h
        z = jnp.tanh(z @ w)
        return (z, total + z.sum(0)), total.mean()

    (h, total), means = jax.lax.scan(body, (h, h.mean(0)), jnp.stack([w, w]))
    return h + total * 0.01 + means.sum()


def until(h, w, b):
    def body(c):
        return c[0] * 1.5, c[1] + 1

    x = jax.lax.stop_gradient(h)
    x, turns = jax.lax.while_loop(lambda c: (c[1] < 4) & (c[0].max() < 4), body, (x, 0))
    return h + 0.01 * x + turns


def until_same(h, w, b):
    x = jax.lax.while_loop(
        lambda c: c[1] < 3, lambda c: (jnp.sin(c[0]), c[1] + 1), (b["y"], 0)
    )[0]
    return h + x


def switch(h, w, b):
    branches = [jnp.sin, jnp.tanh, lambda h: h - h.mean(0)]
    return jax.lax.switch(b["ids"].max(), branches, h)


def each_cond(h, w, b):
    def one(x, flag):
        return jax.lax.cond(flag, jnp.sin, lambda x: x * 0.5, x)

    return jax.vmap(one)(h, b["mask"])


def cond_in_scan(h, w, b):
    def body(h, i):
        return jax.lax.cond(i % 2 == 0, jnp.tanh, lambda h: h @ w, h), h[0, 0]

    h, firsts = jax.lax.scan(body, h, jnp.arange(3))
    return h + firsts.sum() * 0.1


def mapped(h, w, b):
    return jax.lax.map(lambda x: jnp.tanh(x[0] @ w) * x[1], (h, b["ids"]), batch_size=4)


# -- Rules -----------------------------------------------------------------------------


@jax.custom_jvp
def standardise(h):
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 0.1)


@standardise.defjvp
def _(primals, tangents):
    [h], [t] = primals, tangents
    return standardise(h), (t - t.mean(0)) / jnp.sqrt(h.var(0) + 0.2)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def reversed_gradient(h, scale):
    return h * 1.5


reversed_gradient.defvjp(
    lambda h, scale: (h * 1.5, h.shape), lambda scale, _, ct: (-scale * ct,)
)


@jax.custom_vjp
def looked_up(table, ids):
    return table[ids]


looked_up.defvjp(
    lambda table, ids: (table[ids], (ids, table)),
    lambda saved, ct: (jnp.zeros_like(saved[1]).at[saved[0]].add(2 * ct), None),
)


@jax.custom_vjp
def two_results(h, w):
    return jnp.tanh(h @ w), h.sum(0)


def _two_forward(h, w):
    out = jnp.tanh(h @ w)
    return (out, h.sum(0)), (h, w, out)


def _two_backward(saved, cts):
    h, w, out = saved
    ct = cts[0] * (1 - out**2)
    return ct @ w.T + 0.5 * cts[1], h.T @ ct


two_results.defvjp(_two_forward, _two_backward)


@jax.custom_vjp
def quantised_back(h):
    return jnp.sin(h)


quantised_back.defvjp(
    lambda h: (jnp.sin(h), h), lambda h, ct: (jnp.round(ct * 64) / 64 * jnp.cos(h),)
)


def rule_in_scan(h, w, b):
    def body(h, w):
        return reversed_gradient(jnp.tanh(h @ w), 0.5), None

    return jax.lax.scan(body, h, jnp.stack([w, w]))[0]


def rule_of_each(h, w, b):
    return jax.vmap(lambda x: two_results(x[None], w)[0][0])(h)


def two(h, w, b):
    out, total = two_results(h, w)
    return out + 0.1 * total


# -- Checkpoints -----------------------------------------------------------------------

POLICIES = jax.checkpoint_policies


def named(h, w):
    x = jax.ad_checkpoint.checkpoint_name(jnp.tanh(h @ w), "kept")
    return jnp.sin(x) - x.mean(0)


def checkpointed(fun, **options):
    @functools.partial(jax.checkpoint, **options)
    def run(h, w):
        return fun(h, w)

    return lambda h, w, b: run(h, w)


def nested(h, w):
    return jax.checkpoint(lambda h: named(jnp.sin(h), w), prevent_cse=False)(h)


# -- Derivatives inside ----------------------------------------------------------------


def penalty(h, w, b):
    return h + 0.1 * jax.grad(lambda h: jnp.tanh(h @ w).sum())(h)


def inner_gradient(h, w, b):
    def energy(h):
        return jax.nn.logsumexp(h @ h.T / D)

    return h - 0.5 * jax.grad(energy)(h)


def adapted(h, w, b):
    def loss(w):
        return ((h @ w - b["y"]) ** 2).mean()

    return jnp.tanh(h @ (w - 0.1 * jax.grad(loss)(w)))


def curvature(h, w, b):
    return jax.jvp(lambda h: jnp.tanh(h @ w) - h.mean(0), (h,), (b["y"],))[1] + h


# -- Linear algebra and transforms -----------------------------------------------------


def whitened(h, w, b):
    z = h - h.mean(0)
    factor = jnp.linalg.cholesky(z.T @ z / len(h) + jnp.eye(D))
    return jax.scipy.linalg.solve_triangular(factor, z.T, lower=True).T


def volume(h, w, b):
    return h + 0.1 * jnp.linalg.slogdet(h.T @ h + jnp.eye(D))[1]


def energies(h, w, b):
    scale = jnp.diag(jnp.arange(D, dtype=h.dtype))  # well apart
    return h + 0.1 * jnp.linalg.eigvalsh(h.T @ h / len(h) + 9 * scale)


def ridge(h, w, b):
    return h @ jnp.linalg.solve(h.T @ h + 3 * jnp.eye(D), h.T @ b["y"])


def implicit(h, w, b):
    gram = h.T @ h / len(h)
    return h + jax.scipy.sparse.linalg.cg(lambda v: gram @ v + 3 * v, h.mean(0))[0]


def each_inverse(h, w, b):
    matrices = jax.vmap(lambda x: jnp.outer(x, x) + 2 * jnp.eye(D))(h)
    return jnp.einsum("nij,nj->ni", jnp.linalg.inv(matrices), h)


def spectrum(h, w, b):
    return h + 0.1 * jnp.abs(jnp.fft.fft(h, axis=1)) ** 2 / D


def spectrum_rows(h, w, b):
    decay = jnp.exp(-jnp.arange(len(h)))[:, None]
    return jnp.real(jnp.fft.ifft(jnp.fft.fft(h, axis=0) * decay, axis=0)) + h


def smoothed(h, w, b):
    kernel = jnp.array([0.25, 0.5, 0.25], h.dtype)
    return jax.vmap(lambda c: jnp.convolve(c, kernel, "same"), 1, 1)(h)


def complexes(h, w, b):
    z = jax.lax.complex(h, h - h.mean(0))
    return jnp.real(z * jnp.conj(z)) / (1 + jnp.imag(z**2).mean() ** 2)


# -- Random numbers --------------------------------------------------------------------


def sampled(h, w, b):
    at = jax.random.categorical(jax.random.key(5), h, axis=1)
    return h + 0.3 * jax.nn.one_hot(at, D, dtype=h.dtype)


def gumbel(h, w, b):
    return jax.nn.softmax(h + jax.random.gumbel(jax.random.key(6), h.shape, h.dtype))


def negatives(h, w, b):
    at = jax.random.choice(jax.random.key(7), len(h), (len(h), 2))
    return h - 0.1 * h[at].sum(1)


def own_keys(h, w, b):
    keys = jax.vmap(lambda i: jax.random.fold_in(jax.random.key(8), i))(b["ids"])
    return h + jax.vmap(lambda key: jax.random.normal(key, (D,), h.dtype))(keys)


def mixup(h, w, b):
    key, other = jax.random.split(jax.random.key(9))
    share = jax.random.beta(key, 2.0, 2.0, dtype=h.dtype)
    return share * h + (1 - share) * h[jax.random.permutation(other, len(h))]


def noisy_pairs(h, w, b):
    noise = jax.random.normal(jax.random.key(10), (len(h), len(h)), h.dtype)
    return jax.nn.softmax(h @ h.T + noise) @ h


# -- Unknown ---------------------------------------------------------------------------


def called_back(h, w, b):
    x = jax.lax.stop_gradient(h)
    kind = jax.ShapeDtypeStruct(h.shape, h.dtype)
    found = jax.pure_callback(lambda x: np.sort(np.asarray(x), 0), kind, x)
    return h + 0.1 * found


MORE_STEPS = {
    f.__name__: f
    for f in (
        *(pairs_softmax, bilinear, correlation, heads, contrast, memory, mmd),
        *(sinkhorn, where_mean, reduced, spread, histogram, flattened, swapped),
        *(blocks, blocks_first, of_features, transposed, with_mean, padded),
        *(interleaved, nonzero, groups, group_products, group_softmax, embedding),
        *(column, one_hot, ranks, searched, window, own_entry, hardest, counted),
        *(places, masked, bits, sorted_ids, reverse, recurrence, over_features),
        *(over_pairs, checkpointed_layers, growing, until, until_same, switch),
        *(each_cond, cond_in_scan, mapped, rule_in_scan, rule_of_each, two),
        *(penalty, inner_gradient, adapted, curvature, whitened, volume, energies),
        *(ridge, implicit, each_inverse, spectrum, spectrum_rows, smoothed),
        *(complexes, sampled, gumbel, negatives, own_keys, mixup, noisy_pairs),
        called_back,
    )
} | {
    "standardise": lambda h, w, b: standardise(h),
    "reversed_gradient": lambda h, w, b: reversed_gradient(h, 0.3),
    "looked_up": lambda h, w, b: h + looked_up(w, b["ids"]),
    "looked_up_rows": lambda h, w, b: h + looked_up(h, b["ids"]),
    "quantised_back": lambda h, w, b: quantised_back(h),
    "everything_saved": checkpointed(named, policy=POLICIES.everything_saveable),
    "nothing_saved": checkpointed(named, policy=POLICIES.nothing_saveable),
    "no_batch_dots": checkpointed(
        named, policy=POLICIES.dots_with_no_batch_dims_saveable
    ),
    "names_saved": checkpointed(
        named, policy=POLICIES.save_only_these_names("kept"), prevent_cse=False
    ),
    "nested_checkpoint": checkpointed(nested),
    "checkpointed_rule": checkpointed(lambda h, w: two_results(h, w)[0]),
}
