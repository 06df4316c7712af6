"""`microbatch_size=`: the number of micro-batches follows from the rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import bits

import ga_optax as ga
import ga_optax.flax

pytestmark = pytest.mark.usefixtures("fast_compilation")

ROWS, WIDTH = 16, 3
DRAW = np.random.default_rng(0)
W = jnp.asarray(DRAW.normal(size=WIDTH), jnp.float32)
X = jnp.asarray(DRAW.normal(size=(ROWS, WIDTH)), jnp.float32)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def seen(**options):
    """How many rows `fun` was given, and the bits of the result."""
    shapes = []

    def fun(w, x):
        shapes.append(len(x))
        return loss(w, x)

    return bits(jax.jit(ga.value_and_grad(fun, **options))(W, X)), shapes[0]


@pytest.mark.quick
@pytest.mark.parametrize("size", [1, 4, 16])
def test_a_size_is_the_number_that_it_makes_of_the_rows(size):
    got, rows = seen(microbatch_size=size)
    assert rows == size
    assert got == seen(num_microbatches=ROWS // size)[0]
    other = 2 if size != 2 else 4
    assert size == 16 or got != seen(num_microbatches=other)[0]  # the twin


@pytest.mark.quick
@pytest.mark.parametrize("size", [2, 4])
def test_one_function_takes_batches_of_several_lengths(size):
    step = jax.jit(ga.value_and_grad(loss, microbatch_size=size))
    for rows in (4, 8, 16):
        due = jax.jit(ga.value_and_grad(loss, rows // size))(W, X[:rows])
        assert bits(step(W, X[:rows])) == bits(due)


@pytest.mark.parametrize("options", [{}, {"whole_batch": True}], ids=["", "whole"])
def test_with_a_data_axis_it_counts_rows_of_one_device(options):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    axis = ga.DataAxis("data", mesh=mesh)

    def run(**given):
        step = ga.value_and_grad(loss, data_axis=axis, **given, **options)
        return bits(jax.jit(step)(W, X))

    assert run(microbatch_size=2) == run(num_microbatches=4)
    assert run(microbatch_size=2) != run(num_microbatches=2)  # the twin
    with pytest.raises(ValueError, match=r"each of the 2 devices, 8 examples.*8"):
        run(microbatch_size=3)


def test_accumulate_microbatch_and_modules_take_it():
    acc = ga.accumulator.init(W)
    whole, parts = ga.accumulate(loss, microbatch_size=4), ga.accumulate(loss, 4)
    assert bits(jax.jit(whole)(acc, W, X)) == bits(jax.jit(parts)(acc, W, X))
    one = jax.jit(ga.accumulate(loss))(acc, W, X)[1]
    assert int(one.count) == 1  # by default

    def of_rows(w, x):
        return x @ w, jnp.std(x @ w)

    got = jax.jit(ga.microbatch(of_rows, microbatch_size=4))(W, X)
    assert bits(got) == bits(jax.jit(ga.microbatch(of_rows, 4))(W, X))

    def root(w, x):
        return jnp.sqrt(loss(w, x))

    found = ga.batch_dependencies(root, microbatch_size=4, residual_bytes=0)(W, X)
    assert str(found) == str(ga.batch_dependencies(root, 4, residual_bytes=0)(W, X))
    assert found.num_microbatches == 4

    model = nnx.Linear(WIDTH, 1, rngs=nnx.Rngs(0))

    def of_model(model, x):
        return jnp.mean(model(x) ** 2)

    results = []
    for given in ({"microbatch_size": 4}, {"num_microbatches": 4}):
        step = nnx.jit(ga_optax.flax.value_and_grad(of_model, **given))
        results.append(bits(nnx.as_pure(step(model, X))))
    assert results[0] == results[1]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({}, TypeError, "num_microbatches and microbatch_size.*neither"),
        ({"num_microbatches": 2, "microbatch_size": 8}, TypeError, "both came"),
        ({"microbatch_size": 0}, ValueError, "microbatch_size must be at least 1"),
        ({"microbatch_size": 2.0}, TypeError, "microbatch_size must be an int"),
        ({"microbatch_size": 5}, ValueError, "5 must divide.*16, 3.*Use 1, 2, 4, 8 or"),
        ({"microbatch_size": 4, "argnums": "w"}, TypeError, "argnums must be an int"),
    ],
)
def test_what_does_not_fit_is_said(options, error, message):
    with pytest.raises(error, match=message):
        ga.value_and_grad(loss, **options)(W, X)


@pytest.mark.quick
def test_how_many_are_real_may_be_said_beside_a_size():
    number = {"num_real_microbatches": 3}
    got = jax.jit(ga.value_and_grad(loss, microbatch_size=4, **number))(W, X)
    due = jax.jit(ga.value_and_grad(loss, 4, **number))(W, X)
    assert bits(got) == bits(due)
