"""`MultiSteps` on many devices: micro-steps that do not communicate, one reduction."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import DROPS, SKIPS, array, mesh_of, off, put, refusals, says
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

WIDTH, ROWS, K = 16, 64, 4
MESH = mesh_of(8)
ADAM, SGD = optax.adam(1e-2), optax.sgd(0.1)
GRADIENT = 4 * (WIDTH * WIDTH + WIDTH)  # bytes


def loss(params, batch):
    h = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.sum(jnp.square(h) * batch["mask"]) / jnp.sum(batch["mask"])


LENGTHS = np.random.default_rng(0).integers(1, WIDTH + 1, size=(2 * K, ROWS, 1))
MASK = jnp.asarray(np.arange(WIDTH) < LENGTHS, jnp.float32)
BATCHES = {"x": array(2 * K, ROWS, WIDTH), "mask": MASK}
PARAMS = {"w": array(WIDTH, WIDTH) / 4, "b": jnp.zeros(WIDTH)}


def part(i, batches=BATCHES):
    return jax.tree.map(lambda x: x[i], batches)


def local_grads(params, batch):
    """The value and the gradient of the rows of one device, not reduced."""
    own = jax.lax.pcast(params, ("data",), to="varying")
    return jax.value_and_grad(loss, allow_int=True)(own, batch)


def tokens(batch):
    return jnp.sum(batch["mask"])


def across(k=K, opt=ADAM, **options):
    return ga.MultiSteps(opt, k, data_axis="data", **options)


def mapped(fun, tx, *more):
    """`fun(params, state, ...)` on all devices, each with its part of the state."""
    specs = (P(), getattr(tx, "state_specs", P()))
    return jax.shard_map(fun, mesh=MESH, in_specs=(*specs, *more), out_specs=specs)


def make_step(tx, *, weighted=True, **options):
    """One micro-step, over the rows of one device."""

    def step(params, state, batch):
        _, grads = local_grads(params, batch)
        weight = tokens(batch) if weighted else None
        return ga.apply_gradients(tx, grads, state, params, weight=weight, **options)

    return jax.jit(mapped(step, tx, P("data")))


def init(tx, params=PARAMS):
    with jax.set_mesh(MESH):
        return tx.init(params)


def run(tx, batches=BATCHES, steps=2 * K, step=None, **options):
    step, params, state = step or make_step(tx, **options), PARAMS, init(tx)
    for i in range(steps):
        params, state = step(params, state, part(i, batches))
    return params, state


def alone(*windows):
    """The windows as whole batches, on one device, by Optax alone."""
    params, state = PARAMS, ADAM.init(PARAMS)
    for rows in windows:
        whole = jax.tree.map(lambda x, r=rows: jnp.concatenate(x[r]), BATCHES)
        updates, state = ADAM.update(jax.grad(loss)(params, whole), state, params)
        params = optax.apply_updates(params, updates)
    return params


FIRST, SECOND = slice(0, K), slice(K, 2 * K)


def assert_close(got, want):
    """Adam's first steps are sign-like: a bound on the mean's rounding, times 1e-2."""
    assert off(got, want) < 1e-5


def updated(tx, chained):
    """A micro-step by `update`, perhaps of a chain, and `optax.apply_updates`."""
    whole = optax.chain(tx, optax.identity()) if chained else tx

    def step(params, state, batch):
        _, grads = local_grads(params, batch)
        held = (state, optax.EmptyState()) if chained else state
        updates, held = whole.update(grads, held, params, weight=tokens(batch))
        return optax.apply_updates(params, updates), held[0] if chained else held

    return jax.jit(mapped(step, tx, P("data")))


@pytest.mark.parametrize("way", ["apply_gradients", "update", "chain"])
def test_a_run_equals_the_whole_batches_on_one_device(way):
    tx = across()
    step = None if way == "apply_gradients" else updated(tx, way == "chain")
    got, state = run(tx, step=step)
    assert_close(got, alone(FIRST, SECOND))
    assert int(ga.stats(state).steps) == 2
    assert bool(ga.has_updated(state))
    if step is None:  # the twin: token counts differ, between devices too
        with pytest.raises(AssertionError):
            assert_close(run(tx, weighted=False)[0], alone(FIRST, SECOND))


@pytest.mark.quick
@pytest.mark.parametrize("emit", [True, False, None])
def test_the_step_reduces_the_gradient_once_and_no_other_communicates(emit):
    tx = across()
    compiled = make_step(tx, emit=emit).lower(PARAMS, init(tx), part(0)).compile()
    due = [] if emit is False else [("all-reduce", GRADIENT + 4, emit is None)]  # Σ w
    found = ga.audit(compiled, MESH).collectives
    assert [(c.kind, c.num_bytes, c.conditional) for c in found] == due


def test_the_state_holds_a_part_for_each_device():
    _, state = run(across(), steps=1)
    total = state.total["w"]
    assert total.shape == (8, WIDTH, WIDTH)
    assert total.sharding.shard_shape(total.shape)[0] == 1
    assert float(ga.stats(state).weight) == float(jnp.sum(BATCHES["mask"][0]))
    for i in range(8):
        rows = jax.tree.map(lambda x, i=i: x[8 * i : 8 * i + 8], part(0))
        due = tokens(rows) * jax.grad(loss)(PARAMS, rows)["w"]
        np.testing.assert_allclose(total[i], due, rtol=0, atol=1e-4)
    with pytest.raises(AttributeError, match="one for each device"):
        _ = state.acc_grads  # Optax has none of this


def test_a_window_that_is_closed_early_is_merged():
    tx = across()
    closed = run(tx, steps=K + 2)
    flush = jax.jit(mapped(lambda p, s: ga.flush(tx, s, p), tx))
    for _ in range(2):  # the second time it is empty
        closed = flush(*closed)
        assert int(ga.stats(closed[1]).steps) == 2
        assert_close(closed[0], alone(FIRST, slice(K, K + 2)))


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("options", "counts", "kept"),
    [(SKIPS, (1, 0, 1, K - 1), np.array([0, 2, 3, 4])), (DROPS, (0, 1, 1, 0), SECOND)],
    ids=["step", "window"],
)
def test_a_nan_on_one_device_is_skipped_on_all(options, counts, kept):
    poisoned = dict(BATCHES, x=BATCHES["x"].at[1, 0, 0].set(jnp.nan))
    got, state = run(across(**options), poisoned)
    stats = ga.stats(state)
    assert counts == (
        *(int(stats.skipped_micro_steps), int(stats.skipped_windows)),
        *(int(stats.steps), int(stats.fill)),
    )
    assert_close(got, alone(kept))


KINDS = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])


@KINDS
def test_the_accumulator_is_sharded_as_the_parameters_from_init_on(kind):
    mesh, tx = mesh_of(8, kind=kind), ga.MultiSteps(ADAM, K)
    ones = params = put({"w": jnp.ones((WIDTH, WIDTH))}, mesh, P("data", None))
    with jax.set_mesh(mesh):
        state = (tx.init if kind == AxisType.Auto else jax.jit(tx.init))(params)
    step = jax.jit(functools.partial(ga.apply_gradients, tx))
    compiled = step.lower(ones, state, params).compile()
    assert ga.audit(compiled).collectives == ()
    for _ in range(K):
        assert state.total["w"].sharding.shard_shape((WIDTH, WIDTH)) == (2, WIDTH)
        params, state = step(ones, state, params)
    assert int(ga.stats(state).steps) == 1
    np.testing.assert_allclose(params["w"], 0.99, rtol=1e-5)


@pytest.mark.grid(1, 6)
@KINDS
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_window_with_what_is_not_finite_in_one_shard_is_dropped(kind, bad):
    """The maximum over CPUs leaves out a NaN of one of them."""
    mesh, tx = mesh_of(kind=kind), ga.MultiSteps(optax.sgd(1.0), 2, **DROPS)
    ones = jnp.ones((8, 4))
    good, spoilt = put((ones, ones.at[0, 0].set(bad)), mesh, P("data", None))
    with jax.set_mesh(mesh):
        params, state = good, tx.init(good)
        step = jax.jit(functools.partial(ga.apply_gradients, tx))
        for g, due in ((good, 1), (spoilt, 1), (good, 1), (good, 0)):
            params, state = step(g, state, params)
            np.testing.assert_array_equal(params, due)
        assert int(ga.stats(state).skipped_windows) == 1


@pytest.mark.grid(1, 6)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize("dtypes", [("f4", "f4"), ("bfloat16", "f4")])
@pytest.mark.parametrize("known", ["context", "arrays"])
def test_updates_are_sharded_as_explicit_axes_say(known, dtypes, weight, k):
    mesh, specs = mesh_of(kind=AxisType.Explicit), {"w": P("data", None), "b": P(None)}
    params = {"w": jnp.ones((8, 4), dtypes[0]), "b": jnp.ones(3, dtypes[0])}
    params = put(params, mesh, specs)
    tx = ga.MultiSteps(optax.sgd(1.0), k, accumulator_dtype=dtypes[1])
    with jax.set_mesh(mesh) if known == "context" else contextlib.nullcontext():
        state, update = tx.init(params), functools.partial(tx.update, weight=weight)
        for call in (update, jax.jit(update)):
            for _ in range(k):
                updates, state = call(params, state, params)
            for name, x in updates.items():
                assert jax.typeof(x).sharding.spec == specs[name]
                np.testing.assert_array_equal(np.asarray(x, np.float32), -1)


def by(tx, of=local_grads, specs=None, local=PARAMS, **options):
    """Traces a step with the gradients of `of`; options are of the value and rows."""

    def step(params, held, batch):
        value, grads = of(params, batch)
        more = {name: x(value, batch) for name, x in options.items()}
        return ga.apply_gradients(tx, grads, held, params, **more)

    own = specs or (P(), tx.state_specs)
    fun = jax.shard_map(step, mesh=MESH, in_specs=(*own, P("data")), out_specs=own)
    jax.eval_shape(fun, PARAMS, init(tx, local), part(0))


def gathered(params, batch):
    """Gradients of shards vary as well, but the sums would mix different shards."""

    def whole(params):
        w = jax.lax.all_gather(params["w"], "data", axis=0, tiled=True)
        return loss(params | {"w": w}, batch)

    own = params | {"b": jax.lax.pcast(params["b"], ("data",), to="varying")}
    return jax.value_and_grad(whole)(own)


def sharded(tx):
    specs = {"w": P("data"), "b": P()}, tx.state_specs
    by(tx, gathered, specs, PARAMS | {"w": PARAMS["w"][: WIDTH // 8]})


def outside(tx):
    with jax.set_mesh(MESH):
        ga.apply_gradients(tx, PARAMS, tx.init(PARAMS), PARAMS)


PLATEAU = optax.chain(SGD, optax.contrib.reduce_on_plateau(patience=1))
ERRORS = """
by(across(opt=SGD), jax.value_and_grad(loss)) -> V leaf ['b'] | reduced already
by(across(opt=SGD), specs=(P(), P())) -> V Pass state_specs in in_specs
outside(across(opt=SGD)) -> V inside a jax.shard_map | state_specs
sharded(across(opt=SGD)) -> V leaf ['w'] differs | mix shards
by(across(opt=PLATEAU), value=lambda v, _: v) -> V ['value'] differs | pmean
by(across(opt=SGD), emit=lambda _, b: b["x"][0, 0] > 0) -> V ['emit'] differs
across(opt=SGD).init(PARAMS) -> V there is no mesh
"""


@pytest.mark.parametrize(("code", "error", "said"), refusals(ERRORS))
def test_what_would_sum_something_else_is_refused(code, error, said):
    says(lambda: eval(code), error, said)


def test_what_the_messages_advise_works():
    by(across(opt=PLATEAU), value=lambda v, _: jax.lax.pmean(v, "data"))
    on_mesh = put({"w": jnp.ones(2)}, MESH, P())
    assert across().init(on_mesh).total["w"].shape == (8, 2)
    plain = ga.MultiSteps(SGD, K)  # without a data_axis the specs are whole
    assert set(plain.state_specs) == {P()}
    step = jax.jit(mapped(lambda p, s: ga.apply_gradients(plain, p, s, p), plain))
    assert int(step(PARAMS, plain.init(PARAMS))[1].mini_step) == 1
