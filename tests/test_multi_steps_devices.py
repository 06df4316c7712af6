"""`MultiSteps` on many devices: micro-steps that do not communicate, one reduction."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

WIDTH, ROWS, K = 16, 64, 4
MESH = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))


def loss(params, batch):
    h = jnp.tanh(batch["x"] @ params["w"] + params["b"])
    return jnp.sum(jnp.square(h) * batch["mask"]) / jnp.sum(batch["mask"])


def make(seed=0):
    rng = np.random.default_rng(seed)
    params = {
        "w": jnp.asarray(rng.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32),
        "b": jnp.zeros(WIDTH),
    }
    lengths = rng.integers(1, WIDTH + 1, size=(2 * K, ROWS, 1))
    batches = {
        "x": jnp.asarray(rng.normal(size=(2 * K, ROWS, WIDTH)), jnp.float32),
        "mask": jnp.asarray(np.arange(WIDTH) < lengths, jnp.float32),
    }
    return params, batches


def make_step(tx, *, weighted=True, emit=None):
    """One micro-step, over the rows of one device."""

    def step(params, state, batch):
        own = jax.lax.pcast(params, ("data",), to="varying")
        grads = jax.grad(loss)(own, batch)
        weight = jnp.sum(batch["mask"]) if weighted else None
        return ga.apply_gradients(tx, grads, state, params, weight=weight, emit=emit)

    specs = (P(), tx.state_specs)
    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(*specs, P("data")), out_specs=specs
    )
    return jax.jit(mapped, donate_argnums=(0, 1))


def micro_batch(batches, i):
    return jax.tree.map(lambda x: x[i], batches)


def train_alone(batches, params, *, every=K):
    """The windows as whole batches, on one device, by Optax alone."""
    tx = optax.adam(1e-2)
    state = tx.init(params)
    for start in range(0, 2 * K, every):
        window = jax.tree.map(
            lambda x, s=start: x[s : s + every].reshape(-1, *x.shape[2:]), batches
        )
        updates, state = tx.update(jax.grad(loss)(params, window), state, params)
        params = optax.apply_updates(params, updates)
    return params


def assert_close(got, want):
    """Adam's first steps are sign-like: a bound on the mean's rounding, times 1e-2."""
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=0, atol=1e-5)


def run(tx, params, batches, *, steps=2 * K, **options):
    step = make_step(tx, **options)
    with jax.set_mesh(MESH):
        state = tx.init(params)
    params = jax.tree.map(jnp.copy, params)
    for i in range(steps):
        params, state = step(params, state, micro_batch(batches, i))
    return params, state


def test_a_run_equals_the_whole_batches_on_one_device():
    params, batches = make()
    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")
    got, state = run(tx, params, batches)
    assert_close(got, train_alone(batches, params))
    assert int(ga.stats(state).steps) == 2
    assert bool(ga.has_updated(state))


def test_without_weights_it_is_another_run():
    """The twin: token counts differ between devices and micro-batches."""
    params, batches = make()
    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")
    got, _ = run(tx, params, batches, weighted=False)
    with pytest.raises(AssertionError):
        assert_close(got, train_alone(batches, params))


def collectives(tx, emit):
    params, batches = make()
    with jax.set_mesh(MESH):
        state = tx.init(params)
    lowered = make_step(tx, emit=emit).lower(params, state, micro_batch(batches, 0))
    return ga.audit(lowered.compile(), MESH).collectives


@pytest.mark.quick
def test_a_micro_step_inside_the_window_does_not_communicate():
    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")
    assert collectives(tx, emit=False) == ()


@pytest.mark.parametrize("emit", [True, None])
def test_the_step_reduces_the_gradient_once(emit):
    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")
    [reduction] = collectives(tx, emit)
    assert reduction.kind == "all-reduce"
    assert reduction.num_bytes == 4 * (WIDTH * WIDTH + WIDTH) + 4  # and Σ w
    assert reduction.conditional == (emit is None)


@pytest.mark.quick
def test_reduced_gradients_would_cost_one_reduction_a_micro_step():
    """The twin: the same loop without a data_axis."""
    tx = ga.MultiSteps(optax.adam(1e-2), K)

    def step(params, state, batch):
        grads = jax.grad(loss)(params, batch)
        return ga.apply_gradients(tx, grads, state, params, emit=False)

    params, batches = make()
    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(P(), P(), P("data")), out_specs=P()
    )
    lowered = jax.jit(mapped).lower(params, tx.init(params), micro_batch(batches, 0))
    assert len(ga.audit(lowered.compile()).collectives) == 1


@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [1, 4, 16])
def test_a_whole_window_in_one_program_reduces_once_after_the_loop(k):
    params, batches = make()
    batches = jax.tree.map(lambda x: jnp.concatenate([x, x[::-1]])[:k], batches)
    tx = ga.MultiSteps(optax.adam(1e-2), k, data_axis="data")

    def window(params, batches):
        own = jax.lax.pcast(params, ("data",), to="varying")
        state = tx.init(params)

        def micro_step(state, batch):
            grads, weight = jax.grad(loss)(own, batch), jnp.sum(batch["mask"])
            return ga.apply_gradients(
                tx, grads, state, params, weight=weight, emit=False
            )[1], None

        if k > 1:
            most = jax.tree.map(lambda x: x[:-1], batches)
            state, _ = jax.lax.scan(micro_step, state, most)
        last = jax.tree.map(lambda x: x[-1], batches)
        grads, weight = jax.grad(loss)(own, last), jnp.sum(last["mask"])
        return ga.apply_gradients(tx, grads, state, params, weight=weight, emit=True)[0]

    mapped = jax.shard_map(
        window, mesh=MESH, in_specs=(P(), P(None, "data")), out_specs=P()
    )
    compiled = jax.jit(mapped).lower(params, batches).compile()
    [reduction] = ga.audit(compiled).collectives
    assert reduction.loops == ()
    assert reduction.num_bytes == 4 * (WIDTH * WIDTH + WIDTH) + 4
    whole = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), batches)
    grads = jax.grad(loss)(params, whole)
    updates, _ = optax.adam(1e-2).update(grads, optax.adam(1e-2).init(params), params)
    assert_close(compiled(params, batches), optax.apply_updates(params, updates))


@pytest.mark.exhaustive
def test_the_state_holds_a_part_for_each_device():
    params, batches = make()
    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")
    _, state = run(tx, params, batches, steps=2)
    assert state.total["w"].shape == (8, WIDTH, WIDTH)
    assert state.total["w"].sharding.shard_shape((8, WIDTH, WIDTH))[0] == 1
    total = jnp.sum(batches["mask"][:2])
    assert float(ga.stats(state).weight) == float(total)
    grads = jax.grad(
        lambda p: sum(
            loss(p, jax.tree.map(lambda x, r=r: x[0, r : r + 8], batches))
            * jnp.sum(batches["mask"][0, r : r + 8])
            for r in range(0, ROWS, 8)
        )
    )(params)
    _, after_one = run(tx, params, batches, steps=1)
    sums = jnp.sum(after_one.total["w"], axis=0)
    np.testing.assert_allclose(sums, grads["w"], rtol=0, atol=1e-3)


def test_a_window_that_is_closed_early_is_merged():
    params, batches = make()
    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")
    got, state = run(tx, params, batches, steps=K + 2)
    specs = (P(), tx.state_specs)
    flush = jax.shard_map(
        lambda p, s: ga.flush(tx, s, p), mesh=MESH, in_specs=specs, out_specs=specs
    )
    got, state = jax.jit(flush)(got, state)
    assert int(ga.stats(state).steps) == 2
    tx_alone = optax.adam(1e-2)
    want, alone = params, tx_alone.init(params)
    for rows in (slice(0, K), slice(K, K + 2)):
        window = jax.tree.map(lambda x, r=rows: x[r].reshape(-1, *x.shape[2:]), batches)
        updates, alone = tx_alone.update(jax.grad(loss)(want, window), alone, want)
        want = optax.apply_updates(want, updates)
    assert_close(got, want)
    again, same = jax.jit(flush)(got, state)
    assert_close(again, got)
    assert int(ga.stats(same).steps) == 2


@pytest.mark.exhaustive
def test_update_and_apply_updates_do_the_same():
    params, batches = make()
    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")
    want, _ = run(tx, params, batches)

    def step(params, state, batch):
        own = jax.lax.pcast(params, ("data",), to="varying")
        weight = jnp.sum(batch["mask"])
        grads = jax.grad(loss)(own, batch)
        updates, state = tx.update(grads, state, params, weight=weight)
        return optax.apply_updates(params, updates), state

    specs = (P(), tx.state_specs)
    mapped = jax.jit(
        jax.shard_map(step, mesh=MESH, in_specs=(*specs, P("data")), out_specs=specs)
    )
    with jax.set_mesh(MESH):
        state = tx.init(params)
    for i in range(2 * K):
        params, state = mapped(params, state, micro_batch(batches, i))
    assert_close(params, want)


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "skip",
    [
        {"should_skip_update_fn": optax.skip_not_finite},
        {"should_drop_window_fn": ga.drop_window_if_not_finite},
    ],
    ids=["step", "window"],
)
def test_a_nan_on_one_device_is_skipped_on_all(skip):
    params, batches = make()
    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data", **skip)
    poisoned = dict(batches, x=batches["x"].at[1, 0, 0].set(jnp.nan))
    got, state = run(tx, params, poisoned)
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves(got))
    stats = ga.stats(state)
    if "should_skip_update_fn" in skip:
        assert (int(stats.skipped_micro_steps), int(stats.steps)) == (1, 1)
        assert int(stats.fill) == K - 1
        kept = jax.tree.map(lambda x: jnp.delete(x, 1, axis=0)[:K], batches)
        tx_alone = optax.adam(1e-2)
        window = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), kept)
        grads = jax.grad(loss)(params, window)
        updates, _ = tx_alone.update(grads, tx_alone.init(params), params)
        assert_close(got, optax.apply_updates(params, updates))
    else:
        assert (int(stats.skipped_windows), int(stats.steps)) == (1, 1)
        second = jax.tree.map(lambda x: x[K:], batches)
        tx_alone = optax.adam(1e-2)
        window = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), second)
        grads = jax.grad(loss)(params, window)
        updates, _ = tx_alone.update(grads, tx_alone.init(params), params)
        assert_close(got, optax.apply_updates(params, updates))


def test_a_window_without_weight_is_no_step():
    params, batches = make()
    empty = dict(batches, mask=jnp.zeros_like(batches["mask"]))

    def harmless(params, batch):  # 0 / 0 otherwise, which has weight 0 but is loud
        return loss(params, batch | {"mask": batch["mask"] + 1})

    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")

    def step(params, state, batch):
        own = jax.lax.pcast(params, ("data",), to="varying")
        grads, weight = jax.grad(harmless)(own, batch), jnp.sum(batch["mask"])
        return ga.apply_gradients(tx, grads, state, params, weight=weight)

    specs = (P(), tx.state_specs)
    mapped = jax.jit(
        jax.shard_map(step, mesh=MESH, in_specs=(*specs, P("data")), out_specs=specs)
    )
    with jax.set_mesh(MESH):
        state = tx.init(params)
    new = params
    for i in range(K):
        new, state = mapped(new, state, micro_batch(empty, i))
    assert int(ga.stats(state).skipped_windows) == 1
    for a, b in zip(*map(jax.tree.leaves, (new, params)), strict=True):
        np.testing.assert_array_equal(a, b)


def test_in_a_chain_it_keeps_its_specs():
    params, batches = make()
    tx = ga.MultiSteps(optax.adam(1e-2), K, data_axis="data")
    chain = optax.chain(tx, optax.scale(0.5))

    def step(params, state, batch):
        own = jax.lax.pcast(params, ("data",), to="varying")
        updates, state = chain.update(jax.grad(loss)(own, batch), state, params)
        return optax.apply_updates(params, updates), state

    specs = (P(), (tx.state_specs, P()))
    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(*specs, P("data")), out_specs=specs
    )
    step_of_chain = jax.jit(mapped)
    with jax.set_mesh(MESH):
        state = chain.init(params)
    new = params
    for i in range(K):
        new, state = step_of_chain(new, state, micro_batch(batches, i))
    assert int(ga.stats(state).steps) == 1
    assert float(jnp.max(jnp.abs(new["w"] - params["w"]))) > 1e-3


# -- Under jit alone, sharded ----------------------------------------------------------


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_the_accumulator_is_sharded_as_the_parameters_from_init_on(kind):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    sharding = NamedSharding(mesh, P("data", None))
    params = {"w": jax.device_put(jnp.ones((WIDTH, WIDTH)), sharding)}
    tx = ga.MultiSteps(optax.adam(1e-2), K)
    init = tx.init if kind == AxisType.Auto else jax.jit(tx.init)
    with jax.set_mesh(mesh):
        state = init(params)
    shard = (WIDTH // 8, WIDTH)
    assert state.total["w"].sharding.shard_shape((WIDTH, WIDTH)) == shard

    step = jax.jit(
        lambda g, s, p: ga.apply_gradients(tx, g, s, p), donate_argnums=(1, 2)
    )
    grads = {"w": jax.device_put(jnp.ones((WIDTH, WIDTH)), sharding)}
    compiled = step.lower(grads, state, params).compile()
    assert ga.audit(compiled).collectives == ()
    for _ in range(K):
        params, state = step(grads, state, params)
        assert state.total["w"].sharding.shard_shape((WIDTH, WIDTH)) == shard
    assert int(ga.stats(state).steps) == 1
    np.testing.assert_allclose(params["w"], 0.99, rtol=1e-5)


@pytest.mark.grid(1, 6)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_window_with_what_is_not_finite_in_one_shard_is_dropped(kind, bad):
    """The maximum over CPUs leaves out a NaN of one of them."""
    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    params = jax.device_put(jnp.ones((8, 4)), NamedSharding(mesh, P("data", None)))
    drops = ga.drop_window_if_not_finite
    tx = ga.MultiSteps(optax.sgd(1.0), 2, should_drop_window_fn=drops)
    with jax.set_mesh(mesh):
        state = tx.init(params)
        step = jax.jit(lambda g, s, p: ga.apply_gradients(tx, g, s, p))
        first = jnp.arange(32).reshape(8, 4) == 0
        grads = jnp.where(jax.device_put(first, params.sharding), bad, params)
        for g in (params, grads):
            params, state = step(g, state, params)
        np.testing.assert_array_equal(params, 1)
        assert int(ga.stats(state).skipped_windows) == 1
        for g in (params, params):
            params, state = step(g, state, params)
        np.testing.assert_array_equal(params, 0)


@pytest.mark.grid(1, 6)
@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("weight", [None, 2.0])
@pytest.mark.parametrize("dtypes", [("f4", "f4"), ("bf16", "f4"), ("bf16", "bf16")])
@pytest.mark.parametrize("known", ["context", "arrays"])
def test_updates_are_sharded_as_explicit_axes_say(known, dtypes, weight, k):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))
    of_params, of_sums = ({"f4": jnp.float32, "bf16": jnp.bfloat16}[d] for d in dtypes)
    specs = {"w": P("data", None), "b": P(None)}
    shapes = {"w": (8, 4), "b": (3,)}
    params = {
        name: jax.device_put(jnp.ones(shapes[name], of_params), NamedSharding(mesh, p))
        for name, p in specs.items()
    }
    tx = ga.MultiSteps(optax.sgd(1.0), k, accumulator_dtype=of_sums)
    with jax.set_mesh(mesh) if known == "context" else contextlib.nullcontext():
        state, update = tx.init(params), functools.partial(tx.update, weight=weight)
        for call in (update, jax.jit(update)):
            for _ in range(2 * k):
                updates, state = call(params, state, params)
        for name, x in updates.items():
            assert jax.typeof(x).sharding.spec == specs[name]
            np.testing.assert_array_equal(np.asarray(x, np.float32), -1)


@pytest.mark.slow
def test_extra_arguments_are_averaged_over_devices_and_the_data_may_end_a_window():
    params, batches = make()
    params["n"] = jnp.arange(2)
    tx = ga.MultiSteps(
        optax.sgd(1.0), 2 * K, data_axis="data", mean_argnames=("value",)
    )

    def step(params, state, batch, emit):
        own = jax.lax.pcast(params, ("data",), to="varying")
        value, grads = jax.value_and_grad(loss, allow_int=True)(own, batch)
        grads["n"] = jnp.ones_like(own["n"])
        weight = jnp.sum(batch["mask"])
        return ga.apply_gradients(
            tx, grads, state, params, weight=weight, emit=emit, value=value
        )

    specs = (P(), tx.state_specs)
    of_call = (P("data"), P())
    mapped = jax.jit(
        jax.shard_map(step, mesh=MESH, in_specs=(*specs, *of_call), out_specs=specs)
    )
    with jax.set_mesh(MESH):
        state = tx.init(params)
    moved = params
    for i in range(K):
        emit = jnp.array(i == K - 1)
        moved, state = mapped(moved, state, micro_batch(batches, i), emit)
    assert bool(ga.has_updated(state))
    np.testing.assert_array_equal(moved["n"], params["n"] - 1)
    with pytest.raises(ValueError, match=r"\['emit'\] differs along \['data'\]"):
        jax.eval_shape(
            jax.shard_map(
                lambda *args: step(*args, emit=args[-1]["x"][0, 0] > 0),
                mesh=MESH,
                in_specs=(*specs, P("data")),
                out_specs=specs,
            ),
            *(params, state, micro_batch(batches, 0)),
        )
    window = jax.tree.map(lambda x: x[:K].reshape(-1, *x.shape[2:]), batches)
    with pytest.raises(AttributeError, match="one for each device"):
        _ = state.acc_grads  # Optax has none of this
    sums, weights = state.arg_totals["value"], state.weight
    assert sums.shape == weights.shape == (8,)
    # What the state holds is each device's sum; all of them are the window's.
    whole = jnp.sum(sums) / jnp.sum(window["mask"])
    np.testing.assert_allclose(whole, loss(params, window), rtol=1e-5)


# -- Errors ----------------------------------------------------------------------------


def test_a_gradient_that_is_reduced_already_is_found():
    params, batches = make()
    tx = ga.MultiSteps(optax.sgd(0.1), K, data_axis="data")

    def step(params, state, batch):
        return ga.apply_gradients(tx, jax.grad(loss)(params, batch), state, params)

    specs = (P(), tx.state_specs)
    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(*specs, P("data")), out_specs=specs
    )
    with jax.set_mesh(MESH):
        state = tx.init(params)
    with pytest.raises(ValueError, match=r"leaf \['b'\].*reduced already.*pcast"):
        jax.jit(mapped)(params, state, micro_batch(batches, 0))


def test_outside_of_a_shard_map_it_says_so():
    params, _ = make()
    tx = ga.MultiSteps(optax.sgd(0.1), K, data_axis="data")
    with jax.set_mesh(MESH):
        state = tx.init(params)
        with pytest.raises(ValueError, match=r"inside a jax\.shard_map.*state_specs"):
            ga.apply_gradients(tx, params, state, params)


def test_a_state_that_came_whole_says_so():
    params, batches = make()
    tx = ga.MultiSteps(optax.sgd(0.1), K, data_axis="data")
    with jax.set_mesh(MESH):
        state = tx.init(params)

    def step(params, state, batch):
        own = jax.lax.pcast(params, ("data",), to="varying")
        return ga.apply_gradients(tx, jax.grad(loss)(own, batch), state, params)

    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(P(), P(), P("data")), out_specs=P()
    )
    with pytest.raises(ValueError, match="Pass state_specs as its in_specs"):
        jax.jit(mapped)(params, state, micro_batch(batches, 0))


def test_init_takes_the_mesh_that_the_parameters_lie_on():
    tx = ga.MultiSteps(optax.sgd(0.1), K, data_axis="data")
    params = jax.device_put({"w": jnp.ones(2)}, NamedSharding(MESH, P()))
    assert tx.init(params).total["w"].shape == (8, 2)


def test_init_without_a_mesh_says_so():
    tx = ga.MultiSteps(optax.sgd(0.1), K, data_axis="data")
    with pytest.raises(ValueError, match="there is none"):
        tx.init({"w": jnp.ones(2)})


def test_the_noise_cannot_be_tracked_across_devices():
    with pytest.raises(ValueError, match="track_noise must be False"):
        ga.MultiSteps(optax.sgd(0.1), K, track_noise=True, data_axis="data")


def test_state_specs_without_a_data_axis_are_whole():
    tx = ga.MultiSteps(optax.sgd(0.1), K)
    assert set(tx.state_specs) == {P()}
    params = {"w": jnp.ones(2)}
    step = functools.partial(ga.apply_gradients, tx)
    specs = (P(), tx.state_specs, P())
    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=specs, out_specs=(P(), tx.state_specs)
    )
    _, state = jax.jit(mapped)(params, tx.init(params), params)
    assert int(state.mini_step) == 1


def test_sharded_parameters_inside_the_shard_map_are_refused():
    """Their gradients vary as well, but the sums would mix different shards."""
    params, batches = make()
    specs = {"w": P("data"), "b": P()}
    tx = ga.MultiSteps(optax.sgd(0.1), K, data_axis="data")

    def gathered(params, batch):
        whole = jax.lax.all_gather(params["w"], "data", axis=0, tiled=True)
        return loss({"w": whole, "b": params["b"]}, batch)

    def step(params, state, batch):
        own = params | {"b": jax.lax.pcast(params["b"], ("data",), to="varying")}
        grads = jax.grad(gathered)(own, batch)
        return ga.apply_gradients(tx, grads, state, params)

    mapped = jax.shard_map(
        step,
        mesh=MESH,
        in_specs=(specs, tx.state_specs, P("data")),
        out_specs=(specs, tx.state_specs),
    )
    local = {"w": jnp.zeros((WIDTH // 8, WIDTH)), "b": params["b"]}
    with jax.set_mesh(MESH):
        state = tx.init(local)
    with pytest.raises(ValueError, match=r"leaf \['w'\] differs.*mix its shards"):
        jax.jit(mapped)(params, state, micro_batch(batches, 0))


def test_extra_arguments_must_be_the_same_on_all_devices():
    params, batches = make()
    opt = optax.contrib.reduce_on_plateau(patience=1)
    tx = ga.MultiSteps(optax.chain(optax.sgd(0.1), opt), 1, data_axis="data")

    def step(params, state, batch, reduced):
        own = jax.lax.pcast(params, ("data",), to="varying")
        value, grads = jax.value_and_grad(loss)(own, batch)
        if reduced:
            value = jax.lax.pmean(value, "data")
        return ga.apply_gradients(tx, grads, state, params, value=value)

    specs = (P(), tx.state_specs)
    with jax.set_mesh(MESH):
        state = tx.init(params)
    for reduced in (True, False):
        mapped = jax.shard_map(
            functools.partial(step, reduced=reduced),
            mesh=MESH,
            in_specs=(*specs, P("data")),
            out_specs=specs,
        )
        if reduced:
            _, new = jax.jit(mapped)(params, state, micro_batch(batches, 0))
            assert int(ga.stats(new).steps) == 1
        else:
            with pytest.raises(ValueError, match=r"\['value'\] differs.*pmean"):
                jax.jit(mapped)(params, state, micro_batch(batches, 0))


@pytest.mark.exhaustive
def test_the_weight_of_an_ensemble_is_that_of_each_member():
    tx = ga.MultiSteps(optax.sgd(0.1), K)
    params = jnp.ones((3, 2))
    state = jax.vmap(tx.init)(params)
    step = jax.vmap(lambda p, s: ga.apply_gradients(tx, p, s, p, weight=2.0))
    _, state = step(params, state)
    np.testing.assert_array_equal(ga.stats(state).weight, [2.0, 2.0, 2.0])


def test_a_window_of_one_micro_step_averages_extra_arguments_that_are_the_same():
    tx = ga.MultiSteps(optax.sgd(1.0), 1, data_axis="data", mean_argnames="value")
    params = {"w": jnp.ones(4)}

    def step(params, state, x):
        own = jax.lax.pcast(params, ("data",), to="varying")
        grads = jax.grad(lambda p: jnp.mean(p["w"] * x))(own)
        return ga.apply_gradients(tx, grads, state, params, value=jnp.float32(1))

    specs = (P(), tx.state_specs)
    mapped = jax.shard_map(
        step, mesh=MESH, in_specs=(*specs, P("data")), out_specs=specs
    )
    with jax.set_mesh(MESH):
        state = tx.init(params)
    new, _ = jax.jit(mapped)(params, state, jnp.ones(MESH.size))
    np.testing.assert_allclose(new["w"], 0.75)
