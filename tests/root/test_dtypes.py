"""Leaves that are no ordinary numbers, in every public function: right, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import integers, off

import ga_optax as ga
from ga_optax import accumulator, blocks, testing
from ga_optax.testing import assert_trees_bitwise_equal as assert_same_bits

N, K = 8, 4
# Before "mask" among the leaves of a batch, where `verify` meets it first.
LEAVES = {
    "key": jax.random.split(jax.random.key(0), N),
    "float8_e4m3fn": integers(N).astype("float8_e4m3fn"),
    "int4": integers(N).astype("int4"),
    "float0": np.zeros(N, jax.dtypes.float0),
}
W = jnp.float32([0.5, -1, 2])
ROWS = {"x": integers(N, 3, seed=1), "mask": jnp.float32([1, 0, 1, 1, 1, 0, 1, 1])}


def numbers(leaf):
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.vmap(jax.random.uniform)(leaf)
    if leaf.dtype == jax.dtypes.float0:
        return jnp.ones(leaf.shape)
    return leaf.astype(jnp.float32)


def errors(w, batch):
    return (batch["x"] @ w - numbers(batch["leaf"])) ** 2


def mean(w, batch):
    return jnp.mean(errors(w, batch))


def counted(w, batch):
    return jnp.sum(errors(w, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def with_aux(w, batch):
    return mean(w, batch), batch["leaf"]


def is_near(got, want):
    assert off(got, want) < 1e-5  # of sums of 24 terms in float32


def differentiated(b):
    is_near(ga.value_and_grad(counted, K)(W, b), jax.value_and_grad(counted)(W, b))
    (_, aux), _ = ga.value_and_grad(with_aux, K, has_aux=True)(W, b)
    assert_same_bits(aux, b["leaf"])


def as_parameter(b):
    def fun(params, x):
        return jnp.mean((x @ params["w"] - numbers(params["leaf"]).sum()) ** 2)

    args = {"w": W, "leaf": b["leaf"]}, b["x"]
    ours, plain = ga.value_and_grad(fun, K, allow_int=True), jax.value_and_grad
    (value, grads), want = ours(*args), plain(fun, allow_int=True)(*args)
    is_near((value, grads["w"]), (want[0], want[1]["w"]))
    assert grads["leaf"].dtype == want[1]["leaf"].dtype


def divided(b):
    is_near(ga.microbatch(counted, K)(W, b), counted(W, b))
    is_near(jax.grad(ga.microbatch(counted, K))(W, b), jax.grad(counted)(W, b))
    assert_same_bits(ga.microbatch(lambda w, b: b["leaf"], K)(W, b), b["leaf"])


def each_by_itself(aux):
    def check(b):
        step = ga.accumulate(with_aux, K, has_aux=True, aux=aux)
        (value, found), _ = step(accumulator.init(W), W, b)
        is_near(value, mean(W, b))
        assert_same_bits(found.reshape(-1), b["leaf"][-len(found.reshape(-1)) :])

    return check


def meaned(b):
    step = ga.accumulate(lambda w, b: (mean(w, b), b["leaf"][0]), K, has_aux=True)
    step(accumulator.init(W), W, b)


def carried(b):
    def fun(w, carry, batch):
        return mean(w, batch), (carry, jnp.ones([]))

    options = {"carry_argnums": 1, "batch_argnums": 2, "has_aux": True}
    step = ga.accumulate(fun, K, **options)
    (_, (carry, _)), _ = step(accumulator.init(W), W, b["leaf"], b)
    assert_same_bits(carry, b["leaf"])


def verified(b):
    report = ga.verify(counted, W, b, K)
    assert report.cause is ga.Cause.WEIGHTS
    assert "batch['mask'].sum()" in str(report)
    testing.assert_accumulation_equivalent(mean, W, b, K)


def told(b):
    assert "mask" not in ga.batch_dependencies(mean, K)(W, b).details


def planned(b):
    def step(k):
        return jax.jit(ga.value_and_grad(mean, k))

    options = {"batch_size": N, "memory_limit": 2**30, "candidates": [K]}
    assert ga.plan(step, W, b, **options).num_microbatches == K


def of_leaf(b):
    tree = {"leaf": b["leaf"]}
    return blocks.partition(tree, 1), tree


def reported(b):
    partition, tree = of_leaf(b)
    assert (
        blocks.report(partition).rows[0].bytes
        == accumulator.init(tree).total["leaf"].nbytes
    )


def flattened(b):
    partition, tree = of_leaf(b)
    vector, spec = blocks.flatten(partition, tree, "leaf")
    assert_same_bits(blocks.unflatten(partition, vector, spec), b["leaf"])


def normed(b):
    want = jnp.linalg.norm(numbers(b["leaf"]))
    is_near(blocks.norms(*of_leaf(b))[0], want)


def added(b):
    _, tree = of_leaf(b)
    acc = accumulator.add(accumulator.init(tree), tree)
    is_near(accumulator.mean(acc)["leaf"], numbers(b["leaf"]))


def stepped(b):
    _, tree = of_leaf(b)
    tx = ga.MultiSteps(optax.identity(), 2)
    state = tx.init(tree)
    for _ in range(2):
        updates, state = tx.update(tree, state, tree)
    is_near(numbers(updates["leaf"]), numbers(b["leaf"]))


OF_NUMBERS = {"key": "must", "float0": "must"}
CALLS = {
    differentiated: {},
    as_parameter: {"float0": "numerical-valued"},  # by JAX
    divided: {},
    each_by_itself("last"): {},
    each_by_itself("stack"): {},
    meaned: OF_NUMBERS,
    carried: {},
    verified: {},
    told: {},
    planned: {},
    reported: {},
    flattened: {},
    normed: OF_NUMBERS,
    added: OF_NUMBERS | {"int4": "must be floating"},
    stepped: OF_NUMBERS,
}


@pytest.mark.usefixtures("optax_promotion", "fast_compilation")
@pytest.mark.parametrize("leaf", LEAVES)
@pytest.mark.parametrize("check", CALLS)
def test_a_leaf_of_any_dtype_is_right_or_refused(check, leaf):
    batch = ROWS | {"leaf": LEAVES[leaf]}
    if leaf in CALLS[check]:
        with pytest.raises(TypeError, match=CALLS[check][leaf]):
            check(batch)
    else:
        check(batch)
