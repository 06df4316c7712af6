"""Which argument is what: its position or keyword, its axis, and how it is split."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpus import losses
from helpers import (
    bits,
    integers,
    leaves_of,
    mean_of,
    mesh_of,
    normal,
    off,
    squares,
    temporaries,
)
from hypothesis import given, settings
from hypothesis import strategies as st

import ga_optax as ga
import ga_optax.flax

pytestmark = pytest.mark.usefixtures("fast_compilation")

K, ROWS, WIDTH = 4, 16, 3
W, X, Y = normal(WIDTH), normal(ROWS, WIDTH, seed=1), normal(ROWS, seed=2)
MATRIX = normal(WIDTH, WIDTH, seed=3) * 0.3
EPS = np.finfo(np.float32).eps


@pytest.mark.parametrize("make", [ga.value_and_grad, mean_of])
def test_what_has_no_axis_goes_whole_and_as_it_came(make):
    table = jnp.arange(float(ROWS))  # as long as the batch

    def fun(w, batch, shared, *, extra):
        assert batch["train"] is True
        assert batch["name"] == "a name"
        assert batch["labels"] == ["a", "b"]
        assert shared is table
        assert extra["whole"].shape == (ROWS,)
        rows = extra["split"] * batch["scale"] * shared.sum() + extra["whole"].sum()
        return jnp.mean(batch["x"] @ w + rows)

    batch = {"x": X, "scale": 0.5, "train": True, "name": "a name", "none": None}
    batch |= {"labels": ["a", "b"]}
    axes = dict.fromkeys(batch) | {"x": 0, "none": 0}
    extra = {"split": Y, "whole": Y}
    step = make(
        fun,
        K,
        batch_argnums=(1, 2),
        batch_argnames="extra",
        batch_axes=[axes, None, {"split": 0, "whole": None}],
    )
    # Not under jit: there the arguments come traced.
    value, grads = step(W, batch, table, extra=extra)
    due = jax.value_and_grad(fun)(W, batch, table, extra=extra)
    assert off((value, grads), due) < 2 * ROWS * WIDTH * EPS  # of sums of 2·16·3 terms
    other = fun(W, batch, table, extra=extra | {"whole": Y + 1})  # the twin
    assert off(value, other) > 2 * ROWS * WIDTH * EPS


def test_argnums_batch_argnums_and_keywords_are_those_of_jax():
    def fun(inputs, w, flag, b, targets, *, scale, power=1):
        assert flag == "yes"
        prediction = inputs @ w["w"] + b
        return scale * jnp.mean((prediction - targets) ** power)

    # Integers and halves, means over powers of two: exact.
    args = (integers(8, WIDTH), {"w": integers(WIDTH)}, "yes", np.float32(0.5))
    args = (*args, integers(8))
    options = {"scale": jnp.float32(3.0), "power": 2}
    for argnums in (1, (1, 3), (3, 1), (-2,), [1]):
        expected = jax.value_and_grad(fun, argnums)(*args, **options)
        for make in (ga.value_and_grad, mean_of):
            step = make(fun, 4, argnums=argnums, batch_argnums=(0, -1))
            got = step(*args, **options)
            assert jax.tree.structure(got) == jax.tree.structure(expected)
            assert bits(got) == bits(expected)


@pytest.mark.quick
def test_a_role_by_keyword_may_come_by_position():
    def fun(w, x, key):
        return squares(w, x + jax.random.normal(key, x.shape))

    key = jax.random.key(0)
    by_number = jax.jit(mean_of(fun, K, rng_argnums=2))
    by_name = jax.jit(mean_of(fun, K, rng_argnames="key"))
    expected = by_number(W, X, key)
    assert bits(by_name(W, X, key)) == bits(expected)
    assert bits(by_number(W, X, key=key)) == bits(expected)
    # The twin: another key.
    assert np.any(by_name(W, X, jax.random.key(1))[1] != expected[1])


@st.composite
def calls(draw):
    """Which arguments come by position, and how `batch_axes` names their axes."""
    by_position = draw(st.integers(0, 4))
    x_axis = draw(st.sampled_from([0, 1, -1, -2]))
    y_axis = draw(st.sampled_from([0, 1, -1, -2]))
    forms: list = [(x_axis, {"y": y_axis}), [x_axis, {"y": y_axis}], (x_axis, y_axis)]
    if x_axis == y_axis:
        forms.append(x_axis)
    by_name = draw(st.booleans())
    return by_position, x_axis, y_axis, draw(st.sampled_from(forms)), by_name


@settings(max_examples=max(1, settings().max_examples // 5))
@given(calls())
def test_arguments_may_come_in_any_form(drawn):
    by_position, x_axis, y_axis, axes, by_name = drawn
    w, x, y = normal(4, 4), normal(8, 4), normal(8, 4, seed=1)

    def fun(w, x, rest, scale):
        x, y = jnp.moveaxis(x, x_axis, 0), jnp.moveaxis(rest["y"], y_axis, 0)
        return jnp.mean((x @ w * scale - y) ** 2)

    batch = jnp.moveaxis(x, 0, x_axis), {"y": jnp.moveaxis(y, 0, y_axis)}
    values = dict(zip(inspect.signature(fun).parameters, (w, *batch, 2.0), strict=True))
    args = list(values.values())[:by_position]
    kwargs = dict(list(values.items())[by_position:])
    how = {"batch_argnums": (1, 2)}
    if by_name:
        how = {"batch_argnums": 1, "batch_argnames": "rest"}
    due = jax.value_and_grad(fun)(w, *batch, 2.0)
    step, acc = ga.accumulate(fun, K, batch_axes=axes, **how), ga.accumulator.init(w)
    value, acc = step(acc, *args, **kwargs)
    assert off((value, ga.accumulator.mean(acc)), due) <= 64 * EPS
    step = ga.value_and_grad(fun, K, batch_axes=axes, **how)
    assert off(step(*args, **kwargs), due) <= 64 * EPS


def complex_loss(w, x):
    """Rows meet in it."""
    return jnp.sqrt(jnp.mean((x.astype(w.dtype) @ w) ** 2) * (1 + 2j))


@pytest.mark.quick
@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("has_aux", [False, True])
def test_holomorphic_is_that_of_jax(k, has_aux):
    def fun(w, x):
        return (
            (complex_loss(w, x), {"a": x[:, 0] * 2}) if has_aux else complex_loss(w, x)
        )

    how = {"has_aux": has_aux, "holomorphic": True}
    with jax.enable_x64(True):
        w, x = np.asarray(W, complex) * (1 + 0.5j), np.asarray(X, np.float64)
        got = jax.jit(ga.value_and_grad(fun, k, **how))(w, x)
        due = jax.value_and_grad(fun, **how)(w, x)
        assert off(got, due) <= 64 * np.finfo(np.float64).eps
        assert off(got[1], np.conj(due[1])) > 1e-3  # the twin


@pytest.mark.quick
@pytest.mark.parametrize("k", [1, K])
@pytest.mark.parametrize("argnums", [0, (2, 0), (2,)])
def test_with_allow_int_what_has_no_gradient_has_that_of_jax(k, argnums):
    keys = jax.random.split(jax.random.key(0), ROWS)
    params = {"w": W, "n": jnp.arange(WIDTH), "none": None, "flag": True, "keys": keys}

    def fun(params, x, more):
        assert params["flag"] is True  # what is no array comes as it is
        noise = jax.random.normal(params["keys"][0], (WIDTH,)) * more["s"]
        return jnp.mean(
            (x @ (params["w"] * params["n"].astype(x.dtype) + noise)) ** more["power"]
        )

    args, how = (params, X, {"power": 2, "s": W[0]}), {"allow_int": True}
    got = ga.value_and_grad(fun, k, argnums=argnums, **how)(*args)
    due = jax.value_and_grad(fun, argnums=argnums, **how)(*args)
    assert jax.tree.structure(got) == jax.tree.structure(due)
    for a, b in leaves_of(got, due):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if b.dtype != jax.dtypes.float0:
            assert off(a, b) <= 64 * EPS


SMALL = {
    "raw key": jax.random.PRNGKey(3),
    "raw key of rbg": jax.random.key_data(jax.random.key(3, impl="rbg")),
    "key": jax.random.key(3),
    "class weights": normal(10, seed=3),
    "channel mean": normal(WIDTH, seed=3),
    "bias": normal(1, WIDTH, seed=3),
}


def with_small(w, batch):
    """A loss of rows and of something that sorts before them."""
    small, x = batch["a"], batch["x"]
    if small.dtype == jnp.uint32:
        small = jax.random.wrap_key_data(small, impl="rbg" if len(small) > 2 else None)
    if jnp.issubdtype(small.dtype, jax.dtypes.prng_key):
        x = jnp.where(jax.random.bernoulli(small, 0.5, x.shape), x, 0.0)
    else:
        x = x + jnp.ravel(small)[None, :WIDTH]
    return jnp.mean((x @ w) ** 2)


@pytest.mark.quick
@pytest.mark.parametrize("name", SMALL)
def test_the_rows_of_a_batch_are_those_of_most_of_its_bytes(name):
    """Whatever leaf comes first, and however the number of micro-batches is given."""
    batch = {"a": SMALL[name], "x": X}
    due = jax.value_and_grad(with_small)(W, batch)
    for how in ({"num_microbatches": 2 * K}, {"microbatch_size": 2}):
        step = jax.jit(ga.value_and_grad(with_small, **how))
        assert off(step(W, batch), due) <= 64 * EPS
        found = ga.batch_dependencies(with_small, **how)(W, batch)
        assert found.num_microbatches == 2 * K
        assert list(found.rows) == ["leaf ['x']"]
        assert list(found.given_whole) == ["leaf ['a']"]


def test_with_two_micro_batches_a_raw_key_goes_whole():
    batch = {"a": SMALL["raw key"], "x": X}
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    for arrays in (batch, types):
        found = ga.batch_dependencies(with_small, 2)(W, arrays)
        assert list(found.given_whole) == ["leaf ['a']"]
    # As long as the batch, it may be labels: then it has rows.
    found = ga.batch_dependencies(with_small, 2)(W, batch | {"x": X[:2]})
    assert not found.given_whole


@pytest.mark.quick
@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize("make", [ga.value_and_grad, ga.microbatch])
def test_a_size_is_the_number_that_it_makes_of_the_rows(make, size):
    for rows in (8, 16):

        def program(*number, **given):
            step = make(squares, *number, **given)
            return str(jax.make_jaxpr(step)(W, X[:rows]))  # noqa: B023

        assert program(microbatch_size=size) == program(rows // size)
        assert program(microbatch_size=size) != program(rows)  # the twin


def root(w, x):
    return jnp.sqrt(squares(w, x))


@pytest.mark.parametrize("fun", [squares, root])
def test_with_a_data_axis_it_counts_rows_of_one_device(fun):
    axis = ga.DataAxis("data", mesh=mesh_of(2))

    def run(**given):
        step = ga.value_and_grad(fun, data_axis=axis, **given)
        return bits(jax.jit(step)(W, X))

    assert run(microbatch_size=2) == run(num_microbatches=4)
    assert run(microbatch_size=2) != run(num_microbatches=2)  # the twin
    with pytest.raises(ValueError, match=r"each of the 2 devices, 8 examples.*8"):
        run(microbatch_size=3)


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_micro_batch_has_the_bits_and_temporaries_of_value_and_grad(dtype):
    fun, args = losses.LOSSES["checkpointed"].value, losses.arguments(1024, dtype, 64)
    ours, plain = jax.jit(ga.value_and_grad(fun, 1)), jax.jit(jax.value_and_grad(fun))
    assert temporaries(plain, *args) > 1e5  # tiny programs report 0
    assert temporaries(ours, *args) <= temporaries(plain, *args)
    # The twin: the accumulator of several calls is one more tree.
    more = jax.jit(ga.accumulate(fun, 1)), ga.accumulator.init(args[0])
    assert temporaries(*more, *args) != temporaries(plain, *args)
    assert bits(ours(*args)) == bits(plain(*args))


def in_turn(w, x):
    def body(state, row):
        return jnp.tanh(state + row @ w), state.sum()

    state, sums = jax.lax.scan(body, jnp.zeros(MATRIX.shape[1]), x)
    return state.sum() + sums.mean()


def contrastive(w, x):
    z = jnp.tanh(x @ w)
    own = jnp.arange(x.shape[0])
    return -jax.nn.log_softmax(z @ z.T)[own, own].mean() + z.std(0).sum()


def of_microbatch(fun, k):
    return jax.value_and_grad(ga.microbatch(fun, k))


def exported(fun, rows, columns=None, make=ga.value_and_grad, **options):
    """Of a step with open sizes."""
    named = [jax.export.symbolic_shape(n)[0] if n else None for n in (rows, columns)]
    rows, columns = named[0] or len(X), named[1] or WIDTH
    shapes = (columns, MATRIX.shape[1]), (rows, columns)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return jax.export.export(jax.jit(make(fun, K, **options)))(*args).call(MATRIX, X)


@pytest.mark.filterwarnings("ignore:scan at .* is computed whole")
@pytest.mark.filterwarnings("ignore:.* the undivided batch takes less")  # by 2 %
@pytest.mark.grid(3, 5)
@pytest.mark.parametrize(
    ("fun", "rows", "columns", "options"),
    [
        (squares, "4*b", None, {}),
        (squares, "4*b", None, {"optimize": False}),
        (contrastive, "4*b", None, {}),
        (contrastive, None, "d", {}),
        (in_turn, "4*b", None, {}),  # whole, and whether that is much is no number
        (in_turn, "4*b", None, {"make": ga.microbatch}),
        (contrastive, "4*b", None, {"make": of_microbatch}),
    ],
)
def test_it_can_be_exported_with_open_sizes(fun, rows, columns, options):
    got = exported(fun, rows, columns, **options)
    plain = fun if options.get("make") is ga.microbatch else jax.value_and_grad(fun)
    assert off(got, jax.jit(plain)(MATRIX, X)) <= 1e-6
    for a, b in leaves_of(got, jax.jit(plain)(MATRIX, X[: ROWS // 2])):  # the twin
        assert off(a, b) > 1e-6


def test_an_open_size_that_k_may_not_divide_says_what_to_do():
    with pytest.raises(ValueError, match=r'jax.export.symbolic_shape\("4\*b"\)'):
        exported(squares, "b")
