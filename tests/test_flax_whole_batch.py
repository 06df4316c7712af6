"""Modules with `whole_batch=True`: all is as after one `nnx.value_and_grad`."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ga_optax as ga
import ga_optax.flax

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")

K, ROWS = 4, 16
EPS = np.finfo(np.float64).eps
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(ROWS, 3)) + np.arange(ROWS)[:, None]
Y = DRAW.normal(size=ROWS)
LORA = nnx.DiffState(0, nnx.LoRAParam)


def in_float64(module):
    def wide(x):
        return x.astype(jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x

    nnx.update(module, jax.tree.map(wide, nnx.state(module)))
    return module


class Model(nnx.Module):
    """Batch statistics as long as the batch, masks, and something that counts."""

    def __init__(self):
        rngs = nnx.Rngs(0, dropout=1)
        self.first = nnx.Linear(3, ROWS, rngs=rngs)
        self.norm = nnx.BatchNorm(ROWS, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.LoRALinear(ROWS, 4, lora_rank=2, rngs=rngs)
        self.again = nnx.BatchNorm(4, momentum=0.9, rngs=rngs)
        self.calls = nnx.Variable(jnp.zeros([], jnp.int32))
        in_float64(self)

    def __call__(self, x):
        self.calls[...] += 1
        hidden = self.dropout(jnp.tanh(self.norm(self.first(x))))
        return self.again(self.second(hidden)), hidden == 0


def loss(model, x, y):
    out, mask = model(x)
    error = jnp.square(out[:, 0] ** 3 - y)
    return jnp.sqrt(jnp.mean(error)), {"mask": mask, "out": out, "mean": out.mean(0)}


def as_numbers(tree):
    def numbers(x):
        is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return jax.random.key_data(x) if is_key else x

    return jax.tree.map(numbers, nnx.as_pure(tree))


def distance(ours, theirs):
    """How far two trees are apart, in `n·eps` of the largest number; integers equal."""
    ours, theirs = as_numbers(ours), as_numbers(theirs)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    pairs = list(zip(*map(jax.tree.leaves, (ours, theirs)), strict=True))
    assert pairs
    found = [0.0]
    for a, b in pairs:
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if not jnp.issubdtype(b.dtype, jnp.inexact):
            found.append(0.0 if (a == b).all() else np.inf)
        else:
            found.append(float(jnp.max(jnp.abs(a - b))))
    size = max(float(jnp.max(jnp.abs(b))) for _, b in pairs if b.dtype == jnp.float64)
    return max(found) / (ROWS * EPS * size)


# Sums of at most `n` terms in another order, about twenty after one another.
CLOSE = 20


def run(compute, windows=1, x=X, y=Y):
    """Results of windows one after another, and the variables after each."""
    model, found = Model(), []
    compute = nnx.jit(compute)
    for _ in range(windows):
        found.append((compute(model, x, y), nnx.state(model)))
    return jax.tree.map(jnp.asarray, found)


def of_window(fun=loss, **options):
    given = {"batch_argnums": (1, 2), "has_aux": True, "accumulator_dtype": None}
    return ga_optax.flax.value_and_grad(fun, K, **(given | options))


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("argnums", [0, LORA], ids=["all", "lora"])
def test_value_gradients_aux_and_variables_are_those_of_one_call(argnums):
    with jax.enable_x64(True):
        due = run(nnx.value_and_grad(loss, argnums=argnums, has_aux=True), 2)
        ours = run(of_window(whole_batch=True, argnums=argnums), 2)
        for window, of_due in zip(ours, due, strict=True):
            (value, grads), state = window
            (their_value, their_grads), their_state = of_due
            assert distance(value, their_value) < CLOSE
            assert distance(grads, their_grads) < CLOSE
            assert distance(state, their_state) < CLOSE
        assert int(ours[1][1]["calls"][...]) == 2
        kinds = {type(v) for _, v in nnx.to_flat_state(ours[0][0][1])}
        assert kinds == {type(v) for _, v in nnx.to_flat_state(due[0][0][1])}


def test_where_rows_of_a_module_meet_is_what_the_step_does():
    given = {"batch_argnums": (1, 2), "has_aux": True}
    with jax.enable_x64(True):
        model = Model()
        before = as_numbers(nnx.state(model))
        found = ga_optax.flax.batch_dependencies(loss, K, **given)(model, X, Y)
        after = as_numbers(nnx.state(model))
        assert all(map(jnp.array_equal, *map(jax.tree.leaves, (before, after))))
        nothing = {"argnums": nnx.DiffState(0, nnx.Cache), **given}
        with pytest.raises(ValueError, match="What argnums selects of argument 0"):
            ga_optax.flax.batch_dependencies(loss, K, **nothing)(model, X, Y)
    # Two layers, each with the mean of what comes and that of its squares.
    sizes = [x.type.size for x in found.meetings if x.kind == "sum"]
    assert sorted(size for size in sizes if size > 1) == [4, 4, ROWS, ROWS]
    line = loss.__code__.co_firstlineno + 3
    assert f"test_flax_whole_batch.py:{line}:" in str(found)


def test_without_the_option_gradients_statistics_and_masks_are_others():
    """The twin."""
    with jax.enable_x64(True):
        [(((_, aux), grads), state)] = run(nnx.value_and_grad(loss, has_aux=True))
        [(((_, other_aux), other_grads), other_state)] = run(of_window())
        assert distance(other_grads, grads) > 1e6 * CLOSE
        statistics = nnx.filter_state(state, nnx.BatchStat)
        others = nnx.filter_state(other_state, nnx.BatchStat)
        assert distance(others, statistics) > 1e6 * CLOSE
        assert (other_aux["mask"] != aux["mask"]).any()
        assert int(other_state["calls"][...]) == K


@pytest.mark.slow
def test_activations_kept_between_collectives_change_no_number():
    def dots(compute):
        graph, state = nnx.split(Model())

        def plain(state, x, y):
            return as_numbers(compute(nnx.merge(graph, state), x, y))

        return str(jax.make_jaxpr(plain)(state, X, Y)).count("dot_general")

    with jax.enable_x64(True):
        due = run(nnx.value_and_grad(loss, has_aux=True))
        none, all_ = (of_window(whole_batch=True, residual_bytes=n) for n in (0, 10**9))
        assert distance(run(none), due) < CLOSE
        assert distance(run(all_), due) < CLOSE
        assert dots(all_) < dots(none)


@pytest.mark.slow
@pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="data_axis needs jax 0.9")
def test_over_devices_statistics_and_masks_are_those_of_one_call_too():
    kinds = (AxisType.Auto, AxisType.Explicit)
    with jax.enable_x64(True):
        # What the first window leaves in the module lies on the mesh in the second.
        due = run(nnx.value_and_grad(loss, has_aux=True), 2)
        for kind in kinds:
            mesh = jax.make_mesh((2,), ("data",), axis_types=(kind,))
            split = NamedSharding(mesh, PartitionSpec("data"))
            x, y = jax.device_put((X, Y), split)
            axis = ga.DataAxis("data", mesh=mesh)
            ours = run(of_window(whole_batch=True, data_axis=axis), 2, x=x, y=y)
            assert distance(ours, due) < CLOSE


@pytest.mark.slow
def test_random_streams_and_metrics_may_be_arguments_too():
    def noisy(model, x, y, *, rngs, metric):
        noise = jax.random.normal(rngs.noise(), y.shape)
        out = model(x)[:, 0] - y + noise
        metric.update(values=out)
        return jnp.std(out)

    def objects():
        layer, metric = nnx.Linear(3, 1, rngs=nnx.Rngs(0)), nnx.metrics.Average()
        return in_float64(layer), nnx.Rngs(noise=1), in_float64(metric)

    with jax.enable_x64(True):
        model, rngs, metric = objects()
        compute = of_window(noisy, whole_batch=True, has_aux=False)
        ours = compute(model, X, Y, rngs=rngs, metric=metric)
        model, other_rngs, other_metric = objects()
        due = nnx.value_and_grad(
            lambda m, x, y, rngs, metric: noisy(m, x, y, rngs=rngs, metric=metric)
        )(model, X, Y, other_rngs, other_metric)
        assert distance(ours, due) < CLOSE
        assert int(rngs.noise.count[...]) == int(other_rngs.noise.count[...]) == 1
        assert int(metric.count[...]) == ROWS
        assert distance(metric.compute(), other_metric.compute()) < CLOSE


@pytest.mark.slow
def test_what_fun_leaves_alone_keeps_its_array():
    with jax.enable_x64(True):
        model = Model()
        model.eval()  # but it counts its calls
        mean, calls = model.norm.mean.get_value(), model.calls.get_value()
        of_window(whole_batch=True)(model, X, Y)
        assert model.norm.mean.get_value() is mean
        assert model.calls.get_value() is not calls


# -- Linen -----------------------------------------------------------------------------


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for width in (5, 4):
            x = nn.Dense(width, param_dtype=jnp.float64)(x)
            x = nn.BatchNorm(False, momentum=0.5, param_dtype=jnp.float64)(x)
            x = nn.Dropout(0.5, deterministic=False)(jnp.tanh(x))
        return x


@pytest.mark.slow
def test_collections_that_linen_changes_come_back_as_aux():
    def fun(params, x, stats, key):
        y, new = Linen().apply(
            {"params": params, "batch_stats": stats},
            x,
            mutable=["batch_stats"],
            rngs={"dropout": key},
        )
        return jnp.mean(y**3), new["batch_stats"]

    with jax.enable_x64(True):
        key = jax.random.key(0)
        variables = Linen().init({"params": key, "dropout": key}, X)
        args = variables["params"], jnp.asarray(X), variables["batch_stats"], key
        due = jax.jit(jax.value_and_grad(fun, has_aux=True))(*args)
        options = {"has_aux": True, "accumulator_dtype": None}
        step = ga.value_and_grad(fun, K, whole_batch=True, **options)
        assert distance(jax.jit(step)(*args), due) < CLOSE
        # The twin: statistics and masks of each micro-batch.
        step = ga.value_and_grad(fun, K, rng_argnums=3, **options)
        assert distance(jax.jit(step)(*args), due) > 1e6 * CLOSE


# -- Errors ----------------------------------------------------------------------------


def adds(model, x, y):
    model.x = nnx.Intermediate(jnp.mean(x))
    return jnp.mean(model(x))


def assigns(model, x, y):
    model.kernel[...] *= 2
    return jnp.mean(model(x))


def mean_loss(model, x, y):
    return jnp.mean(model(x))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("fun", "options", "error", "message"),
    [
        (mean_loss, {"weight_fn": len}, ValueError, "whole_batch=True weight_fn must"),
        (mean_loss, {"aux": "mean"}, ValueError, "whole_batch=True aux must be left"),
        (mean_loss, {"axis_name": "rows"}, ValueError, "True axis_name must be left"),
        (mean_loss, {"rng_argnums": 2}, ValueError, "True rng_argnums must be left"),
        (mean_loss, {"carry_argnums": 2}, TypeError, "carry_argnums must be left out"),
        (mean_loss, {"has_aux": True}, TypeError, "fun must return"),
        (adds, {}, ValueError, r"\['x'\].*nnx.pop"),
        (assigns, {}, ValueError, "must not assign"),
        (mean_loss, {"num_microbatches": 3}, ValueError, "must divide"),
    ],
    ids=["weights", "aux", "axis", "key", "carry", "pair", "adds", "assigns", "k"],
)
def test_what_has_no_place_or_does_not_fit_is_said(fun, options, error, message):
    model = nnx.Linear(3, 1, rngs=nnx.Rngs(0))
    given = {"num_microbatches": K, "whole_batch": True} | options
    with pytest.raises(error, match=message):
        ga_optax.flax.value_and_grad(fun, **given)(
            model, jnp.asarray(X), jnp.asarray(Y)
        )


@pytest.mark.quick
def test_accumulate_has_no_whole_batch():
    with pytest.raises(TypeError, match="whole_batch"):
        ga_optax.flax.accumulate(mean_loss, K, whole_batch=True)
