"""Train state, NNX optimizer and NNX gradients: as Flax's own, for windows."""

import functools
import subprocess
import sys

import flax.linen as nn
import flax.struct
import flax.training.train_state
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training import dynamic_scale
from helpers import bits, nbytes
from jax.sharding import PartitionSpec

import ga_optax as ga
from ga_optax.flax import Optimizer, TrainState, accumulate, value_and_grad

pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {"w": jnp.array([1.0, -2.0])}
GRADS = [{"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, -4.0])}]
MEAN = {"w": jnp.array([2.0, -1.0])}
ADAM = optax.adam(0.1)


def create(tx, cls=TrainState, **kwargs):
    return cls.create(apply_fn=None, params=PARAMS, tx=tx, **kwargs)


@pytest.mark.grid(1)
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_step_counts_calls_as_flax_does_and_optimizer_steps_the_updates(jit):
    def apply(state, grads):
        return state.apply_gradients(grads=grads)

    apply = jax.jit(apply) if jit else apply
    state = create(ga.MultiSteps(ADAM, 2))
    flax_state = create(ga.MultiSteps(ADAM, 2), flax.training.train_state.TrainState)
    plain = create(ADAM).apply_gradients(grads=MEAN)
    seen = []
    for grads in GRADS * 2:
        state, flax_state = apply(state, grads), apply(flax_state, grads)
        assert int(state.step) == int(flax_state.step)
        seen.append((state.step, state.optimizer_steps, state.micro_step))
        if len(seen) == 2:
            np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=1e-6)
    np.testing.assert_array_equal(seen, [(1, 0, 1), (2, 1, 0), (3, 1, 1), (4, 2, 0)])


def test_a_key_that_step_is_folded_into_draws_another_mask_in_every_micro_step():
    def masks(count):
        state, drawn = create(ga.MultiSteps(ADAM, 2)), set()
        for _ in range(4):
            key = jax.random.fold_in(jax.random.key(0), count(state))
            drawn.add(jax.random.bernoulli(key, shape=(64,)).tobytes())
            state = state.apply_gradients(grads=GRADS[0])
        return len(drawn)

    assert masks(lambda state: state.step) == 4
    # The twin: the updates stand still inside a window.
    assert masks(lambda state: state.optimizer_steps) == 2


class Scaled(TrainState):
    scale: dynamic_scale.DynamicScale = flax.struct.field(pytree_node=True)


def half_precision_loss(params, x):
    return jnp.mean(jnp.square(params["w"].astype(jnp.float16) * x))


@jax.jit
def scaled_step(state, x):
    """The recipe of Flax's examples: keep the state if a gradient is not finite."""
    compute = state.scale.value_and_grad(half_precision_loss)
    scale, is_finite, _, grads = compute(state.params, x)
    new = state.apply_gradients(grads=grads)
    keep = functools.partial(jax.tree.map, functools.partial(jnp.where, is_finite))
    return new.replace(
        params=keep(new.params, state.params),
        opt_state=keep(new.opt_state, state.opt_state),
        scale=scale,
    )


@pytest.mark.parametrize("bad", [1, 2, 5], ids=["inside", "closing", "closing-later"])
def test_the_recipe_of_dynamic_scale_leaves_out_one_micro_step(bad):
    good = jnp.ones((6, 2), jnp.float16) * jnp.arange(1, 7, dtype=jnp.float16)[:, None]
    batches = [*good[:bad], jnp.full(2, 300, jnp.float16), *good[bad:]]
    start = create(
        ga.MultiSteps(ADAM, 3), Scaled, scale=dynamic_scale.DynamicScale(scale=256.0)
    )
    state, clean = start, start
    for x in batches:
        state = scaled_step(state, x)
    assert (int(state.step), int(state.optimizer_steps)) == (7, 2)
    assert float(state.scale.scale) == 128.0  # so one gradient overflowed
    for x in good:
        clean = scaled_step(clean, x)
    assert (int(clean.step), int(clean.optimizer_steps)) == (6, 2)
    assert bits(state.params) == bits(clean.params)  # a power of two rounds nothing
    assert bits(state.params) != bits(start.params)


@pytest.mark.parametrize("place", ["itself", "chained"])
def test_the_accumulator_of_optax_is_refused(place):
    theirs = optax.MultiSteps(ADAM, 2)
    tx = {
        "itself": theirs,
        "chained": optax.chain(theirs.gradient_transformation(), optax.scale(1.0)),
    }[place]
    with pytest.raises(TypeError, match=r"ga_optax\.MultiSteps"):
        create(tx)
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    with pytest.raises(TypeError, match=r"ga_optax\.MultiSteps"):
        Optimizer(model, tx, wrt=nnx.Param)
    # Flax's own takes it, and one with such a state is refused later.
    state = create(tx, flax.training.train_state.TrainState)
    ours = create(ADAM).replace(tx=tx, opt_state=state.opt_state)
    with pytest.raises(TypeError, match=r"ga_optax\.MultiSteps"):
        ours.apply_gradients(grads=GRADS[0])
    with pytest.raises(TypeError, match=r"ga_optax\.MultiSteps"):
        _ = ours.optimizer_steps


def test_two_accumulators_have_no_one_count_of_steps():
    both = {"a": ga.MultiSteps(ADAM, 2), "b": ga.MultiSteps(ADAM, 3)}
    params = {"a": PARAMS, "b": PARAMS}
    tx = optax.multi_transform(both, {"a": "a", "b": "b"})
    state = TrainState.create(apply_fn=None, params=params, tx=tx)
    state = state.apply_gradients(grads=params)
    assert int(state.step) == 1
    with pytest.raises(ValueError, match="there are 2"):
        _ = state.optimizer_steps


def test_flush_closes_the_window_and_is_no_call():
    state = create(ga.MultiSteps(ADAM, 8))
    for grads in GRADS:
        state = state.apply_gradients(grads=grads)
    assert bits(state.params) == bits(PARAMS)  # the twin: nothing has closed it
    state = state.flush()
    counts = (int(state.step), int(state.optimizer_steps), int(state.micro_step))
    assert counts == (2, 1, 0)
    expected = create(ga.MultiSteps(ADAM, 2))
    for grads in GRADS:
        expected = expected.apply_gradients(grads=grads)
    assert bits(state.params) == bits(expected.params)
    assert bits(state.flush()) == bits(state)  # an empty window
    with pytest.raises(TypeError, match="flush needs tx to be"):
        create(ADAM).flush()


def test_a_train_step_is_traced_once():
    traces = 0

    @jax.jit
    def step(state, grads):
        nonlocal traces
        traces += 1
        return state.apply_gradients(grads=grads)

    state = create(ga.MultiSteps(ADAM, 2))
    for grads in GRADS * 2:
        state = step(state, grads)
    assert traces == 1


def test_without_an_accumulator_it_is_flax_own():
    ours, theirs = create(ADAM), create(ADAM, flax.training.train_state.TrainState)
    for grads in GRADS:
        ours = ours.apply_gradients(grads=grads)
        theirs = theirs.apply_gradients(grads=grads)
    assert int(ours.step) == int(theirs.step) == 2
    assert (int(ours.optimizer_steps), ours.micro_step) == (2, 0)
    np.testing.assert_array_equal(ours.params["w"], theirs.params["w"])


def test_weights_emit_fields_and_extra_arguments_pass_through():
    class WithStats(TrainState):
        batch_stats: dict = flax.struct.field(pytree_node=True)

    seen = []

    def update(updates, state, params=None, *, value=None, **extra):
        del params, extra
        seen.append(value)
        return jax.tree.map(jnp.negative, updates), state

    inner = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    state = create(ga.MultiSteps(inner, 2), WithStats, batch_stats={"mean": 0})
    state = state.apply_gradients(
        grads=GRADS[0], weight=3, emit=False, batch_stats={"mean": 1}
    )
    assert state.batch_stats == {"mean": 1}
    state = state.apply_gradients(grads=GRADS[1], weight=1, emit=True, value=7.0)
    assert seen[-1] == 7.0
    assert (int(state.optimizer_steps), int(state.micro_step)) == (1, 0)
    expected = PARAMS["w"] - (3 * GRADS[0]["w"] + GRADS[1]["w"]) / 4
    np.testing.assert_array_equal(state.params["w"], expected)


def test_a_leaf_that_does_not_fit_is_named():
    with pytest.raises(ValueError, match=r"\['w'\].*\(2,\).*\(3,\)"):
        create(ga.MultiSteps(ADAM, 2)).apply_gradients(grads={"w": jnp.ones(3)})


def test_fp8_scaling_factors_are_overwritten_with_their_gradient():
    overwritten = nn.fp8_ops.OVERWRITE_WITH_GRADIENT
    params = {"params": PARAMS, overwritten: {"scale": jnp.float32(1.0)}}
    state = TrainState.create(
        apply_fn=None, params=params, tx=ga.MultiSteps(optax.sgd(1.0), 2)
    )
    for i, grads in enumerate(GRADS):
        factor = {"scale": jnp.float32(2.0 + i)}
        state = state.apply_gradients(grads={"params": grads, overwritten: factor})
        assert float(state.params[overwritten]["scale"]) == 2.0 + i
    assert bits(state.flush().params) == bits(state.params)
    np.testing.assert_array_equal(state.params["params"]["w"], PARAMS["w"] - MEAN["w"])


def test_a_jitted_donated_train_step_needs_no_temporaries_in_the_window():
    params = {f"layer_{i}": jnp.ones((400, 400)) for i in range(4)}
    total = sum(p.nbytes for p in jax.tree.leaves(params))
    state = TrainState.create(apply_fn=None, params=params, tx=ga.MultiSteps(ADAM, 8))

    def step(state, grads):
        return state.apply_gradients(grads=grads)

    program = jax.jit(step, donate_argnums=0).lower(state, params).compile()
    assert program.memory_analysis().temp_size_in_bytes < 0.01 * total


# -- NNX -------------------------------------------------------------------------------


class Model(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.out = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.out(nnx.relu(self.hidden(x)))


def loss(model, x, y):
    return jnp.mean(jnp.square(model(x)[:, 0] - y))


def batch():
    rng = np.random.default_rng(0)
    return (
        jnp.asarray(rng.normal(size=(8, 3)), jnp.float32),
        jnp.asarray(rng.normal(size=8), jnp.float32),
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "jit",
    [pytest.param(False, marks=pytest.mark.published), True],
    ids=["eager", "jit"],
)
def test_the_nnx_optimizer_accumulates_like_the_undivided_batch(jit):
    x, y = batch()
    big = Model(nnx.Rngs(0))
    nnx.Optimizer(big, ADAM, wrt=nnx.Param).update(big, nnx.grad(loss)(big, x, y))

    model = Model(nnx.Rngs(0))
    optimizer = Optimizer(model, ga.MultiSteps(ADAM, 4), wrt=nnx.Param)

    def train(model, optimizer, x, y):
        optimizer.update(model, nnx.grad(loss)(model, x, y))

    train = nnx.jit(train) if jit else train
    seen = []
    for i in range(4):
        train(model, optimizer, x[2 * i :][:2], y[2 * i :][:2])
        seen.append((optimizer.step[...], optimizer.optimizer_steps))
        assert int(optimizer.micro_step) == (i + 1) % 4
    np.testing.assert_array_equal(seen, [(1, 0), (2, 0), (3, 0), (4, 1)])
    ours, theirs = nnx.state(model, nnx.Param), nnx.state(big, nnx.Param)
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)
    start = jax.tree.leaves(nnx.state(Model(nnx.Rngs(0)), nnx.Param))
    assert any(
        (a != b).any() for a, b in zip(jax.tree.leaves(ours), start, strict=True)
    )


def test_the_nnx_optimizer_takes_weights_and_emit():
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    before = jnp.copy(model.kernel[...])
    optimizer = Optimizer(model, ga.MultiSteps(optax.sgd(1.0), 8), wrt=nnx.Param)
    _, state = nnx.split(model)
    ones = jax.tree.map(jnp.ones_like, state)
    optimizer.update(model, ones, weight=3.0, emit=False)
    np.testing.assert_array_equal(model.kernel[...], before)
    zeros = jax.tree.map(jnp.zeros_like, state)
    optimizer.update(model, zeros, weight=1.0, emit=True)
    np.testing.assert_allclose(model.kernel[...], before - 0.75, rtol=1e-6)
    assert (int(optimizer.step[...]), int(optimizer.optimizer_steps)) == (2, 1)


def test_the_nnx_optimizer_flushes():
    model = nnx.Linear(2, 1, use_bias=False, rngs=nnx.Rngs(0))
    before = jnp.copy(model.kernel[...])
    optimizer = Optimizer(model, ga.MultiSteps(optax.sgd(1.0), 8), wrt=nnx.Param)
    ones = jax.tree.map(jnp.ones_like, nnx.state(model))
    for grads in (ones, jax.tree.map(lambda one: 2 * one, ones)):
        optimizer.update(model, grads)
    np.testing.assert_array_equal(model.kernel[...], before)
    nnx.jit(lambda optimizer, model: optimizer.flush(model))(optimizer, model)
    np.testing.assert_allclose(model.kernel[...], before - 1.5, rtol=1e-6)
    assert (int(optimizer.step[...]), int(optimizer.optimizer_steps)) == (2, 1)


@pytest.mark.slow
def test_the_unmodified_nnx_optimizer_takes_it_as_tx():
    x, y = batch()
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ga.MultiSteps(ADAM, 2), wrt=nnx.Param)
    before = jnp.copy(model.out.kernel[...])
    optimizer.update(model, nnx.grad(loss)(model, x, y))
    np.testing.assert_array_equal(model.out.kernel[...], before)
    optimizer.update(model, nnx.grad(loss)(model, x, y))
    assert (model.out.kernel[...] != before).any()


@pytest.mark.slow
def test_the_nnx_optimizer_without_an_accumulator_counts_every_call():
    x, y = batch()
    model = Model(nnx.Rngs(0))
    optimizer = Optimizer(model, ADAM, wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(model, nnx.grad(loss)(model, x, y))
    assert int(optimizer.step[...]) == int(optimizer.optimizer_steps) == 2
    assert optimizer.micro_step == 0


# -- Gradients of modules --------------------------------------------------------------


class Noisy(nnx.Module):
    """Batch statistics, random streams, and something that counts."""

    def __init__(self, rngs):
        self.hidden = nnx.Linear(3, 16, rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.LoRALinear(16, 1, lora_rank=2, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros([], jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        hidden = self.dropout(nnx.relu(self.norm(self.hidden(x))))
        return self.out(hidden), hidden


def noisy_loss(model, x, y):
    out, hidden = model(x)
    return jnp.mean(jnp.square(out[:, 0] - y)), (hidden == 0)


def by_hand(model, x, y, k, **options):
    """One micro-batch after another."""
    total, losses, masks = None, [], []
    compute = nnx.value_and_grad(noisy_loss, has_aux=True, **options)
    for part in zip(jnp.split(x, k), jnp.split(y, k), strict=True):
        (value, mask), grads = compute(model, *part)
        losses.append(value)
        masks.append(mask)
        total = grads if total is None else jax.tree.map(jnp.add, total, grads)
    grads = jax.tree.map(lambda g: g / k, total)
    return (jnp.mean(jnp.stack(losses)), jnp.stack(masks)), grads


def assert_close(ours, theirs):
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(*map(jax.tree.leaves, (ours, theirs)), strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = map(jax.random.key_data, (a, b))
        # `by_hand` computes the same terms outside of a loop: a few roundings apart.
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


LORA = nnx.DiffState(0, nnx.LoRAParam)


@pytest.mark.exhaustive
@pytest.mark.filterwarnings("ignore:What value_and_grad or accumulate returned")
@pytest.mark.parametrize(
    ("argnums", "jit"),
    [
        (0, True),
        pytest.param(LORA, True, marks=pytest.mark.published),
        pytest.param(LORA, False, marks=pytest.mark.published),
    ],
    ids=["all", "lora", "lora-eager"],
)
def test_a_module_is_as_after_one_micro_batch_after_another(argnums, jit):
    x, y = batch()
    ours, theirs, start = (Noisy(nnx.Rngs(0)) for _ in range(3))
    compute = value_and_grad(
        noisy_loss, 4, argnums=argnums, batch_argnums=(1, -1), has_aux=True, aux="stack"
    )
    compute = nnx.jit(compute) if jit else compute
    for _ in range(2):  # the second window goes on where the first one ended
        (value, masks), grads = compute(ours, x, y)
        (expected, their_masks), their_grads = by_hand(theirs, x, y, 4, argnums=argnums)
        assert_close(grads, their_grads)
        np.testing.assert_allclose(value, expected, rtol=1e-5)
        np.testing.assert_array_equal(masks, their_masks)
        assert_close(nnx.state(ours), nnx.state(theirs))
    assert int(ours.calls[...]) == 8
    # The twin: statistics and streams that stay where they were give other numbers.
    assert (ours.norm.mean[...] != start.norm.mean[...]).all()
    assert (by_hand(start, x, y, 4)[0][1] != masks).any()
    kinds = {type(v) for _, v in nnx.to_flat_state(grads)}
    assert kinds == ({nnx.LoRAParam} if argnums else {nnx.Param, nnx.LoRAParam})


def as_one_window(sizes):
    """Gradient, masks and module after calls of so many micro-batches of two rows."""
    x, y = batch()
    model, masks, at = Noisy(nnx.Rngs(0)), [], 0
    acc = ga.accumulator.init(nnx.state(model, nnx.Param))
    for size in sizes:
        add = accumulate(
            noisy_loss, size, batch_argnums=(1, 2), has_aux=True, aux="stack"
        )
        rows = slice(at, at + 2 * size)
        (_, mask), acc = nnx.jit(add)(acc, model, x[rows], y[rows])
        masks, at = [*masks, *mask], at + 2 * size
    assert int(acc.count) == sum(sizes)
    return ga.accumulator.mean(acc), masks, nnx.state(model)


@pytest.mark.slow
def test_any_grouping_of_micro_batches_leaves_the_same_bits_in_a_module():
    x, y = batch()
    model = Noisy(nnx.Rngs(0))
    compute = value_and_grad(
        noisy_loss, 4, batch_argnums=(1, 2), has_aux=True, aux="stack"
    )
    (_, masks), grads = nnx.jit(compute)(model, x[:8], y[:8])
    expected = bits((grads, list(masks), keys_as_numbers(nnx.state(model))))
    for sizes in [(4,), (1, 3), (2, 1, 1)]:
        grads, masks, state = as_one_window(sizes)
        assert bits((grads, masks, keys_as_numbers(state))) == expected
    # The twin: another micro-batch is another gradient.
    grads, masks, state = as_one_window((1, 2))
    assert bits((grads, masks, keys_as_numbers(state))) != expected


def keys_as_numbers(state):
    def numbers(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(numbers, state)


def test_an_accumulated_gradient_of_a_module_goes_into_its_optimizer():
    x, y = batch()
    model, expected = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ADAM, wrt=nnx.Param)
    add = nnx.jit(accumulate(loss, batch_argnums=(1, 2)), donate_argnums=0)
    acc = ga.accumulator.init(nnx.state(model, nnx.Param))
    for part in zip(jnp.split(x, 4), jnp.split(y, 4), strict=True):
        _, acc = add(acc, model, *part)
    optimizer.update(model, ga.accumulator.mean(acc))
    grads = nnx.grad(loss)(expected, x, y)
    nnx.Optimizer(expected, ADAM, wrt=nnx.Param).update(expected, grads)
    assert_close(nnx.state(model), nnx.state(expected))


def test_an_accumulator_of_another_module_is_refused():
    other = ga.accumulator.init(nnx.state(nnx.Linear(5, 1, rngs=nnx.Rngs(0))))
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"kernel.*must have shape"):
        accumulate(mean_loss)(other, model, batch()[0])
    with pytest.raises(TypeError, match="carry_argnums must be left out"):
        accumulate(mean_loss, carry_argnums=2)


@pytest.mark.slow
def test_what_fun_leaves_alone_keeps_its_array():
    x, y = batch()
    model = Noisy(nnx.Rngs(0))
    kernel = model.hidden.kernel.get_value()
    value_and_grad(
        noisy_loss,
        2,
        argnums=LORA,
        batch_argnums=(1, 2),
        has_aux=True,
        aux="last",
    )(model, x, y)
    assert model.hidden.kernel.get_value() is kernel


@pytest.mark.exhaustive
def test_several_objects_also_as_keywords_weights_and_plain_arguments():
    x, y = batch()

    def weighted_loss(model, x, y, scale, *, rngs, metric):
        noise = jax.random.normal(rngs.noise(), y.shape)
        value = scale * jnp.mean(jnp.square(model(x)[:, 0] - y + noise))
        metric.update(values=value)
        return value

    def objects():
        return (
            nnx.Linear(3, 1, rngs=nnx.Rngs(0)),
            nnx.Rngs(noise=1),
            nnx.metrics.Average(),
        )

    scale = jnp.float32(0.5)
    model, rngs, metric = objects()
    compute = value_and_grad(
        weighted_loss,
        2,
        argnums=(0, -1),
        batch_argnums=(1, 2),
        weight_fn=lambda x, y: jnp.sum(jnp.abs(y)),
        optimize=False,
    )
    value, (grads, of_scale) = compute(model, x, y, scale, rngs=rngs, metric=metric)

    model, other_rngs, other_metric = objects()
    by_position = nnx.value_and_grad(  # NNX takes none by keyword
        lambda *args: weighted_loss(*args[:4], rngs=args[4], metric=args[5]),
        argnums=(0, 3),
    )
    terms = [
        by_position(model, x, y, scale, other_rngs, other_metric)
        for x, y in zip(jnp.split(x, 2), jnp.split(y, 2), strict=True)
    ]
    weights = [jnp.sum(jnp.abs(y)) for y in jnp.split(y, 2)]
    expected = jax.tree.map(
        lambda a, b: (weights[0] * a + weights[1] * b) / sum(weights), *terms
    )
    assert_close((value, (grads, of_scale)), expected)
    assert int(rngs.noise.count[...]) == 2
    np.testing.assert_allclose(metric.compute(), other_metric.compute(), rtol=1e-6)


@pytest.mark.exhaustive
@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="data_axis needs jax 0.9")
def test_devices_draw_other_masks_and_send_no_frozen_parameters():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    x, y = (jnp.concatenate([a[:2]] * 8) for a in batch())  # nothing else differs
    place = jax.sharding.NamedSharding(mesh, PartitionSpec("data"))
    x, y = jax.device_put((x, y), place)

    def run(model, argnums):
        compute = value_and_grad(
            noisy_loss,
            2,
            argnums=argnums,
            batch_argnums=(1, 2),
            has_aux=True,
            aux="stack",
            data_axis="data",
        )
        with jax.set_mesh(mesh):
            program = nnx.jit(compute).lower(model, x, y).compile()
            (_, masks), grads = program(model, x, y)
        drawn = {mask.tobytes() for mask in np.asarray(masks).reshape(8, 2, 16)}
        sent = sum(found.num_bytes for found in ga.audit(program.as_text()).collectives)
        return len(drawn), sent, nbytes(grads)

    model = Noisy(nnx.Rngs(0))
    drawn, sent, of_grads = run(model, LORA)
    assert drawn == 8
    assert int(model.calls[...]) == int(model.dropout.rngs.count[...]) == 2
    # Beside the gradients: the mean and the variance, 16 floats each, and some scalars.
    assert sent <= of_grads + 128 + 32
    # The twins: the others are twice as large, and without dropout all is the same.
    model.dropout.deterministic = True
    drawn, sent, _ = run(model, 0)
    assert sent > of_grads + 256
    assert drawn == 1


def adds(model, x):
    model.x = nnx.Intermediate(jnp.mean(x))
    return jnp.mean(model(x))


def switches(model, x):
    out = model(x)
    model.use_bias = not model.use_bias
    return jnp.mean(out)


def assigns(model, x):
    model.kernel[...] *= 2
    return jnp.mean(model(x))


def mean_loss(model, x):
    return jnp.mean(model(x))


@pytest.mark.parametrize(
    ("fun", "options", "error", "message"),
    [
        (mean_loss, {"carry_argnums": 2}, TypeError, "carry_argnums must be left out"),
        (
            mean_loss,
            {"argnums": LORA},
            ValueError,
            "selects",
        ),
        (mean_loss, {"has_aux": True}, TypeError, "fun must return"),
        (adds, {}, ValueError, r"\['x'\].*nnx.pop"),
        (switches, {}, ValueError, "model.train"),
        (assigns, {}, ValueError, "must not assign"),
        (mean_loss, {"num_microbatches": 3}, ValueError, "must divide"),
        (mean_loss, {"batch_argnums": (1, 2)}, ValueError, "number 2, and 2 came"),
        (mean_loss, {"batch_argnum": 1}, TypeError, "batch_argnum"),
    ],
)
def test_what_does_not_fit_is_said(fun, options, error, message):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    with pytest.raises(error, match=message):
        value_and_grad(fun, **{"num_microbatches": 2, **options})(model, batch()[0])


def imported(packages):
    """Which of flax and chex a process has loaded that imports these packages."""
    program = f"import sys, {packages}; print(*({{'flax', 'chex'}} & set(sys.modules)))"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.exhaustive
def test_importing_the_package_imports_neither_flax_nor_chex():
    # Optax itself imported chex before 0.2.7.
    assert imported("ga_optax") == imported("optax")


@pytest.mark.slow
def test_the_package_imports_flax_when_it_is_first_asked_for():
    ask = "sys.modules['ga_optax'].flax.TrainState"
    program = f"import sys, ga_optax; {ask}; print('flax' in sys.modules)"
    missing = f"import sys; sys.modules['flax'] = None; import ga_optax; {ask}"
    found, failed = (
        subprocess.run(
            [sys.executable, "-c", text], capture_output=True, text=True, check=False
        )
        for text in (program, missing)
    )
    assert found.stdout == "True\n", found.stderr
    last = failed.stderr.splitlines()[-1]
    assert last.startswith("ImportError: ga_optax.flax needs Flax"), failed.stderr
    assert last.endswith('pip install "ga-optax[flax]".')
    assert "flax" not in ga.__all__  # a star import must not need it


# -- fp8 -------------------------------------------------------------------------------

REPLACED = nn.fp8_ops.OVERWRITE_WITH_GRADIENT


class Fp8(nn.Module):
    op: type = nn.fp8_ops.Fp8DirectDotGeneralOp

    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dot_general_cls=self.op)(x)


def fp8(op=Fp8.op, of_output=lambda y: jnp.mean(jnp.square(y))):
    """A model with fp8 scales, as the second step finds them, its loss and a batch."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32) * 10
    model = Fp8(op)
    params = dict(model.init(jax.random.key(0), x))

    def loss(params, x):
        return of_output(model.apply(params, x))

    grads = jax.jit(jax.grad(loss))(params, x)
    return {**params, REPLACED: grads[REPLACED]}, loss, x


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("weight_fn", [None, lambda x: jnp.sum(x > 0)])
@pytest.mark.parametrize("data_axis", [None, "data"])
def test_fp8_scales_of_a_window_are_the_largest_of_its_micro_batches(
    data_axis, weight_fn
):
    params, loss, x = fp8()
    devices = 1 if data_axis is None else 2
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"data_axis": data_axis, "weight_fn": weight_fn}
    with jax.set_mesh(mesh):
        step = jax.jit(ga.value_and_grad(loss, 4 // devices, **options))
        got = jax.device_get(step(params, x)[1])
    grad = jax.jit(jax.grad(loss))
    parts = [grad(params, x[i : i + 4])[REPLACED] for i in range(0, 16, 4)]
    expected = jax.tree.map(lambda *leaves: np.max(leaves, 0), *parts)
    jax.tree.map(np.testing.assert_array_equal, got[REPLACED], expected)
    # Inputs and kernels have the scales of the undivided batch.
    whole = grad(params, x)[REPLACED]
    [(scales, due)] = zip(*map(find_scales, (got[REPLACED], whole)), strict=True)
    for name in ("input_scale", "input_amax_history", "kernel_amax_history"):
        np.testing.assert_array_equal(scales[name], due[name])
    # The twin: the mean is another number.
    mean = np.mean([find_scales(p)[0]["input_amax_history"][0] for p in parts])
    assert mean < 0.95 * scales["input_amax_history"][0]


def find_scales(tree):
    """The dicts of scales in a collection."""
    if "input_scale" in tree:
        return [tree]
    return [scales for node in tree.values() for scales in find_scales(node)]


def spread_of(y):
    return jnp.mean(jnp.square(y - y.mean(0)))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The Fp8DotGeneralOp", "ignore:With whole_batch")
@pytest.mark.filterwarnings("ignore:The function dot_general_with_precision")
@pytest.mark.parametrize("name", ["Fp8DirectDotGeneralOp", "Fp8DotGeneralOp"])
@pytest.mark.parametrize("data_axis", [None, "data"])
def test_fp8_scales_with_the_whole_batch_are_those_of_it(data_axis, name):
    params, loss, x = fp8(getattr(nn.fp8_ops, name), spread_of)
    devices = 1 if data_axis is None else 2
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    options = {"data_axis": data_axis, "whole_batch": True}
    with jax.set_mesh(mesh):
        step = jax.jit(ga.value_and_grad(loss, 4 // devices, **options))
        value, got = jax.device_get(step(params, x))
    want, due = jax.jit(jax.value_and_grad(loss))(params, x)
    np.testing.assert_allclose(value, want, rtol=1e-6)
    # A cotangent is a sum of 16 rows at most, and a gradient one of as many: 16 eps.
    tolerance = 16 * np.finfo(np.float32).eps
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance)
    jax.tree.map(close, got[REPLACED], due[REPLACED])
    for x, y in zip(*map(jax.tree.leaves, (got["params"], due["params"])), strict=True):
        np.testing.assert_allclose(x, y, atol=tolerance * np.abs(y).max(), rtol=0)
    # The twin: a micro-batch by itself has larger cotangents, and its own statistics.
    alone = jax.jit(ga.value_and_grad(loss, 4))(params, x)[1]
    [(scales, own)] = zip(
        *map(find_scales, (due[REPLACED], alone[REPLACED])), strict=True
    )
    name = "output_grad_amax_history"
    assert scales[name].max() < 0.5 * own[name].max()


@pytest.mark.slow
def test_a_window_without_weight_keeps_the_fp8_scales():
    params, loss, x = fp8()
    nothing = ga.value_and_grad(loss, 4, weight_fn=lambda x: 0.0)
    got = jax.jit(nothing)(params, x)[1]
    assert bits(got[REPLACED]) == bits(params[REPLACED])
    assert not any(jnp.any(x) for x in jax.tree.leaves(got["params"]))


def test_what_cannot_keep_the_largest_fp8_scale_says_so():
    params, loss, x = fp8()
    acc = ga.accumulator.init(params)
    with pytest.raises(ValueError, match=r"accumulate must.*input_amax_history.*value"):
        ga.accumulate(loss)(acc, params, x)


def test_gradients_of_modules_outside_of_jit_warn_once():
    model = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    step = value_and_grad(lambda model, x: jnp.mean(model(x) ** 2), 2)
    step(model, jnp.ones((4, 2)))
    with pytest.warns(UserWarning, match=r"outside of jax\.jit again"):
        step(model, jnp.ones((4, 2)))
    step(model, jnp.ones((4, 2)))
