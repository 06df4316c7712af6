"""Train state and NNX optimizer: Flax's own, with steps counted as steps."""

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

import ga_optax as ga
from ga_optax.flax import Optimizer, TrainState

pytestmark = pytest.mark.usefixtures("optax_promotion")

PARAMS = {"w": jnp.array([1.0, -2.0])}
GRADS = [{"w": jnp.array([1.0, 2.0])}, {"w": jnp.array([3.0, -4.0])}]
MEAN = {"w": jnp.array([2.0, -1.0])}
ADAM = optax.adam(0.1)


def create(tx, cls=TrainState, **kwargs):
    return cls.create(apply_fn=None, params=PARAMS, tx=tx, **kwargs)


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_step_counts_steps_and_micro_step_the_position_in_the_window(jit):
    def apply(state, grads):
        return state.apply_gradients(grads=grads)

    apply = jax.jit(apply) if jit else apply
    state = create(ga.MultiSteps(ADAM, 2))
    plain = create(ADAM).apply_gradients(grads=MEAN)
    seen = []
    for grads in GRADS * 2:
        state = apply(state, grads)
        seen.append((int(state.step), int(state.micro_step)))
        if seen[-1] == (1, 0):
            np.testing.assert_allclose(state.params["w"], plain.params["w"], rtol=1e-6)
    assert seen == [(0, 1), (1, 0), (1, 1), (2, 0)]
    # The twin: Flax's own train state counts micro-steps.
    flax_state = create(ga.MultiSteps(ADAM, 2), flax.training.train_state.TrainState)
    assert int(flax_state.apply_gradients(grads=GRADS[0]).step) == 1


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
    assert ours.micro_step == 0
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
    assert (int(state.step), int(state.micro_step)) == (1, 0)
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


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
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
        seen.append((int(optimizer.step[...]), int(optimizer.micro_step)))
    assert seen == [(0, 1), (0, 2), (0, 3), (1, 0)]
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
    assert int(optimizer.step[...]) == 1


def test_the_unmodified_nnx_optimizer_takes_it_as_tx():
    x, y = batch()
    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, ga.MultiSteps(ADAM, 2), wrt=nnx.Param)
    before = jnp.copy(model.out.kernel[...])
    optimizer.update(model, nnx.grad(loss)(model, x, y))
    np.testing.assert_array_equal(model.out.kernel[...], before)
    optimizer.update(model, nnx.grad(loss)(model, x, y))
    assert (model.out.kernel[...] != before).any()


def test_the_nnx_optimizer_without_an_accumulator_counts_every_call():
    x, y = batch()
    model = Model(nnx.Rngs(0))
    optimizer = Optimizer(model, ADAM, wrt=nnx.Param)
    for _ in range(2):
        optimizer.update(model, nnx.grad(loss)(model, x, y))
    assert int(optimizer.step[...]) == 2
    assert optimizer.micro_step == 0


def imported(packages):
    """Which of flax and chex a process has loaded that imports these packages."""
    program = f"import sys, {packages}; print(*({{'flax', 'chex'}} & set(sys.modules)))"
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    ).stdout.split()


def test_importing_the_package_imports_neither_flax_nor_chex():
    # Optax itself imported chex before 0.2.7.
    assert imported("ga_optax") == imported("optax")


# -- fp8 -------------------------------------------------------------------------------

REPLACED = nn.fp8_ops.OVERWRITE_WITH_GRADIENT


class Fp8(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(8, dot_general_cls=nn.fp8_ops.Fp8DirectDotGeneralOp)(x)


def fp8():
    """A model with fp8 scales, as the second step finds them, its loss and a batch."""
    x = jnp.asarray(np.random.default_rng(0).normal(size=(16, 8)), jnp.float32) * 10
    model = Fp8()
    params = dict(model.init(jax.random.key(0), x))

    def loss(params, x):
        return jnp.mean(jnp.square(model.apply(params, x)))

    grads = jax.jit(jax.grad(loss))(params, x)
    return {**params, REPLACED: grads[REPLACED]}, loss, x


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


def test_what_cannot_keep_the_largest_fp8_scale_says_so():
    params, loss, x = fp8()
    acc = ga.accumulator.init(params)
    with pytest.raises(ValueError, match=r"accumulate must.*input_amax_history.*value"):
        ga.accumulate(loss)(acc, params, x)
