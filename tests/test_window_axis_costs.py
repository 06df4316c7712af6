"""What a named axis of micro-batches costs: passes that run, and memory."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import temporaries
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import ga_optax as ga

ROWS, K = "rows", 4
runs = collections.Counter()


def counted(name, x):
    """`x`; counts how often it is computed, and `back` how often its gradient is."""

    def count(what, x):
        def add(x):
            runs[what] += 1
            return np.asarray(x)

        return jax.pure_callback(add, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def identity(x):
        return count(name, x)

    identity.defvjp(
        lambda x: (count(name, x), None), lambda _, ct: (count(f"back {name}", ct),)
    )
    return identity(x)


def encode(p, x, name="F"):
    return jnp.tanh(counted(name, x @ p))


def plain(p, x):
    return jnp.mean(encode(p, x) ** 2)


def tokens(p, x):
    count = lax.psum(jnp.sum(x[:, 0] > 0), ROWS).astype(float)
    return lax.axis_size(ROWS) * jnp.sum(encode(p, x)) / count


def whole_tokens(p, x):
    count = lax.psum(jnp.sum(x[:, 0] > 0), ROWS).astype(float)
    return lax.psum(jnp.sum(encode(p, x)), ROWS) / jnp.maximum(count, 1.0)


def whole_tokens_and_metric(p, x):
    z = encode(p, x)
    right = lax.pmean(jnp.mean((z > 0).astype(float)), ROWS)
    return lax.pmean(jnp.mean(z), ROWS) + jnp.sum(p**2), (right, jnp.max(z))


def metric_alone(p, x):
    z = encode(p, x)
    right = lax.pmean(jnp.mean((z > 0).astype(float)), ROWS)
    return jnp.mean(z), (right, jnp.max(z))


def root(p, x):
    return jnp.sqrt(lax.pmean(plain(p, x), ROWS))


def contrastive(p, x):
    z = encode(p, x)
    a, b = z[: len(z) // 2], z[len(z) // 2 :]
    logits = a @ lax.all_gather(b, ROWS, tiled=True).T  # a is not gathered
    own = jnp.arange(len(a)) + lax.axis_index(ROWS) * len(a)
    loss = jax.nn.log_softmax(logits)[jnp.arange(len(a)), own]
    return -jnp.mean(loss) / (1.0 + lax.pmean(jnp.mean(jnp.square(logits)), ROWS))


def statistics(p, x, mark=lambda h: h):
    h = mark(encode(p, x, "first"))
    h = mark(encode(p, h - lax.pmean(jnp.mean(h, 0), ROWS)[None], "second"))
    return jnp.mean((h - lax.pmean(jnp.mean(h, 0), ROWS)[None]) ** 4)


def marked_statistics(p, x):
    return statistics(p, x, lambda h: checkpoint_name(h, ROWS))


@pytest.mark.parametrize(
    ("fun", "passes"),
    [
        (plain, {"F": 1, "back F": 1}),
        (tokens, {"F": 1, "back F": 1}),
        (whole_tokens, {"F": 1, "back F": 1}),
        (whole_tokens_and_metric, {"F": 1, "back F": 1}),
        (metric_alone, {"F": 1, "back F": 1}),
        (root, {"F": 2, "back F": 1}),
        (contrastive, {"F": 2, "back F": 1}),
        # Two levels, without marks: there; there again, with the loss; and back.
        (statistics, {"first": 5, "back first": 3, "second": 3, "back second": 2}),
        (
            marked_statistics,
            {"first": 2, "back first": 1, "second": 2, "back second": 1},
        ),
    ],
)
def test_passes_that_run(fun, passes):
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=(6, 6)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(16, 6)), jnp.float32)
    has_aux = fun in (metric_alone, whole_tokens_and_metric)
    runs.clear()
    step = ga.value_and_grad(fun, K, axis_name=ROWS, has_aux=has_aux)
    jax.block_until_ready(jax.jit(step)(p, x))
    jax.effects_barrier()
    assert runs == {name: K * times for name, times in passes.items()}


@pytest.mark.parametrize("end", [lambda a, b: a, lambda a, b: b, lambda a, b: a * b])
def test_what_prints_prints_once_for_each_micro_batch(end):
    seen = collections.Counter()

    def fun(p, x):
        z = jnp.mean(encode(p, x))
        jax.debug.callback(lambda _: seen.update(["before"]), z)
        mean = lax.pmean(z, ROWS)
        jax.debug.callback(lambda _: seen.update(["after"]), mean)
        return end(z, mean)

    p, x = jnp.ones((6, 6)), jnp.ones((16, 6))
    jax.jit(ga.value_and_grad(fun, K, axis_name=ROWS))(p, x)
    jax.effects_barrier()
    assert seen == {"before": K, "after": K}


# -- Memory ----------------------------------------------------------------------------

LAYERS, WIDTH, ROWS_OF_WINDOW = 4, 256, 4096


def towers(p, x):
    def encode(layers, x):
        for w in layers:
            x = x + jnp.tanh(x @ w)
        return x

    z, t = (encode(p[i], x[:, i]) for i in range(2))
    everyone = lax.all_gather(t, ROWS, tiled=True)
    # Few logits, so that activations are what counts.
    logits = z @ everyone[:: len(everyone) // 64].T
    return jnp.mean(jax.nn.logsumexp(logits, axis=1)) - jnp.mean(jnp.sum(z * t, 1))


def test_a_window_takes_one_micro_batch_and_what_is_gathered():
    def array(*shape):
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    p = array(2, LAYERS, WIDTH, WIDTH)

    def alone(p, x):
        return jax.vmap(jax.value_and_grad(towers), (None, 0), axis_name=ROWS)(
            p, x[None]
        )

    def taken(fun, rows):
        return temporaries(jax.jit(fun), p, array(rows, 2, WIDTH))

    k = 8
    one = taken(alone, ROWS_OF_WINDOW // k)
    window = taken(ga.value_and_grad(towers, k, axis_name=ROWS), ROWS_OF_WINDOW)
    # z and t stand for themselves, and each has a cotangent.
    gathered = 4 * ROWS_OF_WINDOW * WIDTH * 4
    assert window <= 1.15 * one + gathered
    assert taken(ga.value_and_grad(towers, 1, axis_name=ROWS), ROWS_OF_WINDOW) > 2 * (
        window - gathered
    )


def test_a_plan_finds_the_window_that_fits():
    """Memory falls to that of what the collectives carry, and stays there."""
    params = jax.ShapeDtypeStruct((2, 1, 64, 64), jnp.float32)
    rows = jax.ShapeDtypeStruct((1024, 2, 64), jnp.float32)

    def plan(ks, limit):
        return ga.plan(
            lambda k: jax.jit(ga.value_and_grad(towers, k, axis_name=ROWS)),
            *(params, rows),
            batch_size=len(rows),
            memory_limit=limit,
            candidates=ks,
        )

    [one], [four], [most] = (plan([k], "1GiB").candidates for k in (1, 4, 32))
    carried = 4 * rows.size // 2 * 4  # as in the test above
    assert one.temp - carried > 2 * (four.temp - carried) > 0
    assert four.temp > most.temp > carried
    assert plan([1, 4], four.bytes).num_microbatches == 4
