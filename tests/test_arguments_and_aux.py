"""Arguments by keyword, reducers for aux, padded windows, symbolic batches."""

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import ga_optax as ga
from ga_optax._passes import ir
from ga_optax.testing import assert_trees_bitwise_equal

K, ROWS, WIDTH = 4, 8, 6


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


W, X = normal(0, WIDTH, WIDTH) * 0.3, normal(1, ROWS, WIDTH)


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


# -- Bits with arguments without a role ------------------------------------------------


def frozen(p, x, z):
    return jnp.mean(jnp.tanh(x @ (jax.nn.softmax(z) + p)) ** 2)


def normalised(p, x, z):
    scale = jax.lax.rsqrt(jnp.mean(z * z, -1, keepdims=True) + 1e-5)
    return jnp.mean(jnp.tanh(x @ (z * scale * 0.1 + p)) ** 2)


def in_a_table(p, x, z):
    return jnp.mean(jnp.sin(x @ p * jnp.cos(jnp.exp(z[:1]))) ** 2)


def in_calls(fun, calls, closes_over, z):
    def run(acc, p, x, z):
        if closes_over:
            return ga.accumulate(lambda p, x: fun(p, x, z), K // calls)(acc, p, x)
        return ga.accumulate(fun, K // calls)(acc, p, x, z)

    acc, step = ga.accumulator.init(W), jax.jit(run)
    for part in np.split(X, calls):
        _, acc = step(acc, W, part, z)
    return acc.total


@pytest.mark.grid(1, 6)
@pytest.mark.parametrize("closes_over", [False, True])
@pytest.mark.parametrize("fun", [frozen, normalised, in_a_table])
def test_groupings_agree_if_something_is_computed_of_an_argument_without_a_role(
    fun, closes_over
):
    z = normal(2, WIDTH, WIDTH)
    results = [in_calls(fun, calls, closes_over, z) for calls in (1, 2, 4)]
    assert_trees_bitwise_equal(results[1], results[0])
    assert_trees_bitwise_equal(results[2], results[0])


def test_without_the_fence_around_them_some_grouping_has_other_bits(monkeypatch):
    """The twin: parameters, batch and carry are held, and nothing else."""
    helpers.without_fence_of_consts(monkeypatch)
    differ = []
    for seed in range(2, 8):
        z = normal(seed, WIDTH, WIDTH)
        one, four = (in_calls(frozen, calls, False, z) for calls in (1, 4))
        differ.append(not np.array_equal(one, four))
    assert any(differ)


# -- One micro-batch is the plain program ----------------------------------------------


def deep(params, x):
    def layer(h, w):
        return h + jnp.tanh(h @ w), None

    h, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    return jnp.mean((h @ params["out"]).astype(jnp.float32) ** 2)


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_one_micro_batch_takes_the_temporaries_of_value_and_grad(dtype):
    layers, out = (8, 128, 128), (128, 512)
    params = {"layers": layers, "out": out}
    params = {name: jax.ShapeDtypeStruct(x, dtype) for name, x in params.items()}
    x = jax.ShapeDtypeStruct((64, 128), dtype)
    plain = helpers.temporaries(jax.jit(jax.value_and_grad(deep)), params, x)
    ours = helpers.temporaries(jax.jit(ga.value_and_grad(deep, 1)), params, x)
    assert plain > 1e5  # tiny programs report 0
    assert ours <= plain
    # The twin: the accumulator of several calls is one more tree.
    acc = jax.eval_shape(ga.accumulator.init, params)
    more = helpers.temporaries(jax.jit(ga.accumulate(deep, 1)), acc, params, x)
    assert more != plain


def test_one_micro_batch_has_the_bits_of_value_and_grad():
    got = jax.jit(ga.value_and_grad(loss, 1))(W, X)
    assert_trees_bitwise_equal(got, jax.jit(jax.value_and_grad(loss))(W, X))


@pytest.mark.slow
@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("optimize", [True, False])
def test_in_their_own_dtype_bfloat16_gradients_take_no_more_than_a_plain_scan(optimize):
    params = {"layers": (8, 128, 128), "out": (128, 512)}
    params = {n: jax.ShapeDtypeStruct(x, jnp.bfloat16) for n, x in params.items()}
    x = jax.ShapeDtypeStruct((64, 128), jnp.bfloat16)

    def plain(params, x):
        def step(carry, part):
            value, grads = jax.value_and_grad(deep)(params, part)
            grads = jax.tree.map(jnp.add, carry[1], grads)
            return (carry[0] + value, grads), None

        start = jnp.zeros([]), jax.tree.map(jnp.zeros_like, params)
        (value, grads), _ = jax.lax.scan(step, start, x.reshape(K, -1, 128))
        return value / K, jax.tree.map(lambda g: g / K, grads)

    def ours(dtype):
        how = {"accumulator_dtype": dtype, "optimize": optimize}
        return helpers.temporaries(
            jax.jit(ga.value_and_grad(deep, K, **how)), params, x
        )

    theirs = helpers.temporaries(jax.jit(plain), params, x)
    assert ours(None) <= 1.01 * theirs
    assert ours(jnp.float32) > ours(None)  # the twin


# -- Arguments -------------------------------------------------------------------------


@pytest.mark.quick
def test_what_has_a_position_may_come_by_keyword():
    step = jax.jit(ga.value_and_grad(loss, K))
    expected = step(W, X)
    assert_trees_bitwise_equal(step(W, x=X), expected)
    assert_trees_bitwise_equal(step(x=X, w=W), expected)
    named = ga.value_and_grad(loss, K, batch_argnums=(), batch_argnames="x")
    assert_trees_bitwise_equal(jax.jit(named)(W, X), expected)


@pytest.mark.quick
def test_a_role_by_keyword_may_come_by_position():
    def fun(w, x, key):
        return loss(w, x + jax.random.normal(key, x.shape))

    key = jax.random.key(0)
    by_number = jax.jit(ga.value_and_grad(fun, K, rng_argnums=2))
    by_name = jax.jit(ga.value_and_grad(fun, K, rng_argnames="key"))
    expected = by_number(W, X, key)
    assert_trees_bitwise_equal(by_name(W, X, key), expected)
    assert_trees_bitwise_equal(by_number(W, X, key=key), expected)
    # The twin: another key.
    assert np.any(by_name(W, X, jax.random.key(1))[1] != expected[1])


@pytest.mark.quick
def test_an_argument_that_did_not_come_raises_still():
    with pytest.raises(ValueError, match="must name positional arguments"):
        ga.value_and_grad(lambda w, *rest: loss(w, *rest), K)(W, y=X)


@pytest.mark.quick
@pytest.mark.parametrize("axes", [(0,), [0], 0])
def test_axes_of_one_batch_argument_may_be_a_sequence_of_one(axes):
    expected = jax.jit(ga.value_and_grad(loss, K))(W, X)
    got = jax.jit(ga.value_and_grad(loss, K, batch_axes=axes))(W, X)
    assert_trees_bitwise_equal(got, expected)

    def of_tuple(w, batch):
        return loss(w, batch[0])

    got = jax.jit(ga.value_and_grad(of_tuple, K, batch_axes=axes))(W, (X,))
    assert_trees_bitwise_equal(got, expected)


# -- Reducers of aux -------------------------------------------------------------------


def with_aux(w, x):
    sums = {"sum": jnp.sum(x), "max": jnp.max(x), "min": jnp.min(x)}
    return loss(w, x), {**sums, "own": jnp.exp(x[0, 0]), "rows": jnp.sum(x, 1)}


MODES = {"sum": "sum", "max": "max", "min": "min", "rows": "concat"}


@pytest.mark.parametrize("weight_fn", [None, lambda x: 1.0 + x[0, 0] ** 2])
def test_aux_is_reduced_by_max_min_or_a_function_of_two(weight_fn):
    step = ga.value_and_grad(
        with_aux,
        K,
        has_aux=True,
        weight_fn=weight_fn,
        aux={**MODES, "own": lambda a, b: 2 * a + b},
    )
    (_, aux), _ = jax.jit(step)(W, X)
    assert float(aux["max"]) == X.max()
    assert float(aux["min"]) == X.min()
    due = None
    for part in np.split(X, K):  # in their order: it is not commutative
        term = float(np.exp(part[0, 0]))
        due = term if due is None else 2 * due + term
    assert abs(float(aux["own"]) - due) <= 16 * np.finfo(np.float32).eps * due
    assert aux["rows"].shape == (ROWS,)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("dtype", "due"),
    [(jnp.bfloat16, jnp.bfloat16), (jnp.float32, jnp.float32), (jnp.int8, jnp.int32)],
)
def test_a_sum_keeps_a_floating_dtype_and_is_added_up_in_float32(dtype, due):
    def fun(w, x):
        return loss(w, x), jnp.ones([], dtype)

    rows = np.ones((1024, WIDTH), np.float32)
    step = ga.value_and_grad(fun, 1024, has_aux=True, aux="sum")
    (_, total), _ = jax.jit(step)(W, rows)
    assert total.dtype == due
    assert float(total) == 1024  # bfloat16 alone would stop at 256


@pytest.mark.quick
def test_a_reducer_that_does_not_fit_raises():
    def run(mode):
        return ga.value_and_grad(with_aux, K, has_aux=True, aux=mode)(W, X)

    with pytest.raises(TypeError, match="must return a leaf like the two"):
        run({**MODES, "own": lambda a, b: jnp.stack([a, b])})
    with pytest.raises(ValueError, match="must not add up different examples"):
        run({**MODES, "own": "sum", "rows": jnp.maximum})
    with pytest.raises(ValueError, match="a function of two"):
        run("largest")


# -- Windows that are not full ---------------------------------------------------------


@pytest.mark.slow
@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("weight_fn", [None, lambda x: 1.0 + x[0, 0] ** 2])
def test_only_the_real_micro_batches_count(weight_fn, optimize):
    """Whatever the others hold; one program for any number of them."""
    layers = np.stack([W, W.T])

    def fun(layers, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, layers)
        return jnp.mean(h**2), {"rows": jnp.sum(x), "last": x[0, 0]}

    how = {"weight_fn": weight_fn, "has_aux": True, "optimize": optimize}
    how["aux"] = {"rows": "sum", "last": "last"}
    traces = []

    @jax.jit
    def step(number, layers, x):
        traces.append(number)
        return ga.value_and_grad(fun, K, num_real_microbatches=number, **how)(layers, x)

    for real in range(1, K + 1):
        x = X.copy()
        x[2 * real :] = np.nan
        (value, aux), grads = step(np.int32(real), layers, x)
        part = ga.value_and_grad(fun, real, **how)
        (due, aux_due), grads_due = jax.jit(part)(layers, X[: 2 * real])
        bound = 64 * np.finfo(np.float32).eps
        assert abs(value - due) <= bound * abs(due)
        assert np.max(np.abs(grads - grads_due)) <= bound * np.max(np.abs(grads_due))
        assert abs(aux["rows"] - aux_due["rows"]) <= bound * np.sum(np.abs(X))
        assert float(aux["last"]) == float(aux_due["last"])
    assert len(traces) == 1
    (value, aux), grads = step(np.int32(0), layers, np.full_like(X, np.nan))
    assert float(value) == float(aux["rows"]) == float(jnp.sum(jnp.abs(grads))) == 0


def test_a_padded_call_goes_on_with_an_accumulator():
    def add(number, acc, x):
        step = ga.accumulate(loss, K, num_real_microbatches=number)
        return step(acc, W, x)[1]

    acc = jax.jit(add)(np.int32(3), ga.accumulator.init(W), X)
    assert int(acc.count) == float(acc.weight) == 3
    other = jax.jit(ga.accumulate(loss, 3))(ga.accumulator.init(W), W, X[:6])[1]
    assert_trees_bitwise_equal(acc, other)


def test_with_a_padded_window_the_gradient_can_be_differentiated():
    def slope(number, w):
        step = ga.value_and_grad(loss, K, num_real_microbatches=number)
        return jnp.sum(step(w, X)[1] ** 2)

    got = jax.jit(jax.grad(slope, 1))(np.int32(3), W)
    due = jax.grad(lambda w: jnp.sum(jax.grad(loss)(w, X[:6]) ** 2))(W)
    assert np.max(np.abs(got - due)) <= 1e3 * np.finfo(np.float32).eps * np.max(due)


@pytest.mark.quick
def test_a_number_that_does_not_fit_raises():
    for wrong, error in ((5, ValueError), (-1, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match="num_real_microbatches must be"):
            ga.value_and_grad(loss, K, num_real_microbatches=wrong)
    with pytest.raises(ValueError, match="must come without axis_name='rows'"):
        ga.value_and_grad(loss, K, num_real_microbatches=2, axis_name="rows")


# -- Export ----------------------------------------------------------------------------


def test_it_can_be_exported_for_any_batch_that_divides():
    def exported(size, **options):
        [n] = jax.export.symbolic_shape(size)
        step = jax.jit(ga.value_and_grad(loss, K, **options))
        w, x = (jax.ShapeDtypeStruct(s, jnp.float32) for s in (W.shape, (n, WIDTH)))
        return jax.export.export(step)(w, x)

    for options in ({}, {"optimize": False}):
        step = exported("4*b", **options)
        expected = jax.jit(ga.value_and_grad(loss, K))(W, X)
        value, grads = step.call(W, X)
        bound = 8 * np.finfo(np.float32).eps
        assert abs(value - expected[0]) <= bound * value
        assert np.max(np.abs(grads - expected[1])) <= bound
    with pytest.raises(ValueError, match=r'jax.export.symbolic_shape\("4\*b"\)'):
        exported("b")


def in_turn(w, x):
    def body(state, row):
        return jnp.tanh(state + row @ w), state.sum()

    state, sums = jax.lax.scan(body, jnp.zeros(W.shape[1]), x)
    return state.sum() + sums.mean()


@pytest.mark.filterwarnings("ignore:With whole_batch=True scan")
@pytest.mark.parametrize("wrap", [ga.value_and_grad, ga.microbatch])
def test_a_scan_over_rows_can_be_exported_with_open_sizes(wrap, monkeypatch):
    """It is computed whole, and whether that is much is no number."""
    is_loss = wrap is ga.value_and_grad
    options = {"whole_batch": True} if is_loss else {}

    def exported():
        step = jax.jit(wrap(in_turn, K, **options))
        return jax.export.export(step)(W, x)

    x = jax.ShapeDtypeStruct(
        (*jax.export.symbolic_shape("4*b"), X.shape[1]), jnp.float32
    )
    got = exported().call(W, X)
    due = jax.jit(jax.value_and_grad(in_turn) if is_loss else in_turn)(W, X)
    for a, b in zip(*map(jax.tree.leaves, (got, due)), strict=True):
        assert np.max(np.abs(a - b)) <= 1e-6 * np.max(np.abs(b))
    # The twin.
    monkeypatch.setattr(ir, "times", lambda e: e.params.get("length", 1))
    with pytest.raises(Exception, match="Symbolic dimension"):
        exported()


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("sizes", [("4*b", None), (None, "d")], ids=["rows", "columns"])
def test_rows_that_meet_can_be_exported_with_open_sizes(sizes):
    def contrastive(w, x):
        z = jnp.tanh(x @ w)
        own = jnp.arange(x.shape[0])
        return -jax.nn.log_softmax(z @ z.T)[own, own].mean() + z.std(0).sum()

    named = [jax.export.symbolic_shape(size)[0] if size else None for size in sizes]
    rows, columns = named[0] or len(X), named[1] or WIDTH
    types = (columns, W.shape[1]), (rows, columns)
    step = jax.jit(ga.value_and_grad(contrastive, K, whole_batch=True))
    exported = jax.export.export(step)(
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in types)
    )
    value, grads = exported.call(W, X)
    expected = jax.jit(jax.value_and_grad(contrastive))(W, X)
    assert abs(value - expected[0]) <= 1e-6 * abs(expected[0])
    assert np.max(np.abs(grads - expected[1])) <= 1e-6 * np.max(np.abs(expected[1]))
