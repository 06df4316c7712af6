"""A `jax.shard_map` inside of a loss: devices have parts of rows, or their own rows."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import error, mesh_of, normal
from jax.sharding import PartitionSpec as P

import ga_optax as ga

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
]
N, D, H, K = 32, 8, 12, 4
BOUND = 1e-5  # float32, sums of at most a thousand terms
MESH = mesh_of(2, 2, names=("data", "model"))
WHOLE, ROWS, WEIGHTS = P(), P("data"), (P(None, "model"), P("model"))


def arguments(n=N, width=D, hidden=H):
    up, down = normal(width, hidden), normal(hidden, width)
    return {"up": up / width**0.5, "down": down / hidden**0.5}, normal(n, width)


def over(in_specs, out_specs=WHOLE, **options):
    """A function of devices of the mesh."""
    specs = {"mesh": MESH, "in_specs": in_specs, "out_specs": out_specs, **options}
    return lambda f: jax.shard_map(f, **specs)


def product(x, up, down):
    return jax.lax.psum(jnp.tanh(x @ up) @ down, "model")


def of_weights(p, x, **options):
    """Every device has all rows, and a part of the weights."""
    run = over((WHOLE, *WEIGHTS), **options)(product)
    return (run(x, p["up"], p["down"]) ** 2).mean()


def of_rows(p, x):
    """And rows of its own."""
    h = over((ROWS, *WEIGHTS), ROWS)(product)(x, p["up"], p["down"])
    return (h * jnp.linspace(0, 1, len(x))[:, None]).mean()


def dropped(p, x):
    """A key that all have draws the same for all."""

    @over((WHOLE, WHOLE, *WEIGHTS))
    def run(x, key, up, down):
        h = product(x, up, down)
        return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h, 0)

    return (run(x, jax.random.key(0), p["up"], p["down"]) ** 2).mean()


def of_columns(p, x):
    """Rows are the second axis; parts of their numbers are elsewhere."""
    run = over((P("model", "data"), P("model")), P(None, "data"))(
        lambda x, up: jnp.tanh(jax.lax.psum(up.T @ x, "model"))
    )
    return ((p["down"].T @ run(x.T, p["up"])) ** 2).mean()


def of_a_sum(p, x):
    """What comes back is summed over rows and devices."""
    run = over((ROWS, WHOLE))(
        lambda x, up: jax.lax.psum((jnp.tanh(x @ up) ** 2).sum(0), "data")
    )
    return jnp.tanh(run(x, p["up"]) / len(x)) @ p["down"].sum(1)


def of_places(p, x):
    """The place of a row among those of a device."""
    run = over((ROWS, WHOLE), ROWS)(
        lambda x, up: jnp.tanh(x @ up) * jnp.arange(len(x), dtype=x.dtype)[:, None]
    )
    return (run(x, p["up"]) @ p["down"]).mean()


def in_groups(p, x):
    """Rows and weights in one sum, over groups of one device each."""

    @over((ROWS, WHOLE), ROWS, check_vma=False)
    def run(x, up):
        groups = {"axis_index_groups": [[0], [1]]}
        h, up = jax.lax.psum((jnp.tanh(x @ up), up), "model", **groups)
        return h * up.sum()

    return (run(x, p["up"]) @ p["down"]).mean()


def meets(p, x):
    run = over((ROWS,), ROWS)(lambda h: h - jax.lax.pmean(h.mean(0), "data"))
    return ((run(jnp.tanh(x @ p["up"])) @ p["down"]) ** 2).mean()


# Only one axis of the mesh is the function's, and nothing keeps track.
unchecked = functools.partial(of_weights, axis_names={"model"}, check_vma=False)
LOSSES = [of_weights, of_rows, of_columns, of_a_sum, unchecked, dropped, of_places]
LOSSES += [in_groups]


# Of micro-batches whose rows lie on all devices.
EACH = {"data_axis": ga.DataAxis("data", mesh=MESH, sync="each")}


@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("fun", [*LOSSES, meets])
def test_value_and_gradients_are_those_of_the_whole_batch(fun):
    """Only where rows meet inside it is computed whole."""
    assert error(fun, K, *arguments()) < BOUND
    options = {} if fun is meets else EACH
    found = ga.batch_dependencies(fun, K, **options)(*arguments())
    assert ("shard_map" in {note.name for note in found.whole}) == (fun is meets)


def test_rows_of_a_device_are_its_own():
    assert error(of_places, K, *arguments(), **EACH) < BOUND


# -- Over other axes than the data axis ------------------------------------------------


def ring(q):
    """Devices pass their keys on, as in ring attention."""
    out, k = 0 * q, q
    for _ in range(2):
        out += jnp.tanh(jnp.einsum("rtd,rsd->rts", q, k)) @ k
        k = jax.lax.ppermute(k, "model", [(0, 1), (1, 0)])
    return out


def exchanged(q):
    """Parts of the time become parts of the width, and come back."""
    q = jax.lax.all_to_all(q, "model", 2, 1, tiled=True)
    q = jnp.tanh(jnp.cumsum(q, 1))
    return jax.lax.all_to_all(q, "model", 1, 2, tiled=True)


def gathered(q):
    k = jax.lax.all_gather(q, "model", axis=1, tiled=True)
    each = jnp.tanh(jax.lax.all_gather(q, "model", axis=2)).sum((1, 2))
    h = jnp.tanh(k * jnp.sum(q, 1, keepdims=True))
    return each[:, None] + jax.lax.psum_scatter(
        h, "model", scatter_dimension=1, tiled=True
    )


def less_mean(q):
    """In which rows meet."""
    return q - q.mean(0)


def of_times(body, **options):
    """Devices have parts of the time of all rows."""
    where = P(None, "model")

    def fun(w, x):
        run = jax.shard_map(body, in_specs=where, out_specs=where, **options)
        h = run(jnp.tanh(x @ w)) * jnp.linspace(0, 1, len(x))[:, None, None]
        return jnp.mean(h**2)

    return fun


TIMES = normal(4, 4), normal(N, 6, 4)
OPTIONS = [{"mesh": MESH}, {}, {"axis_names": {"model"}}]
FOREIGN = [
    of_times(body, **options)
    for body in (ring, exchanged, gathered)
    for options in OPTIONS
]
FOREIGN += [of_times(exchanged, mesh=MESH, axis_names={"model"})]


@pytest.mark.usefixtures("fast_compilation")
@pytest.mark.parametrize("fun", FOREIGN)
def test_regions_over_other_axes_have_the_rows_of_one_device(fun):
    """The data axis is ours there, whether the mesh of the region names it or not."""
    with jax.set_mesh(MESH):
        assert error(fun, 2, *TIMES, data_axis="data") < BOUND
        assert ga.batch_dependencies(fun, 2, data_axis="data")(*TIMES).whole == []


OF_ANOTHER_MESH = [
    (ga.value_and_grad, of_times(less_mean, mesh=MESH)),
    (ga.accumulate, of_times(ring, mesh=MESH)),
]


@pytest.mark.parametrize(("make", "fun"), OF_ANOTHER_MESH)
def test_a_region_that_stays_in_another_mesh_is_refused(make, fun):
    """XLA does not compile it, or aborts."""
    w, x = TIMES
    step = make(fun, 2, data_axis="data")
    acc = [ga.accumulator.init(w)] if make is ga.accumulate else []
    with jax.set_mesh(MESH), pytest.raises(ValueError, match="must not be over 'data'"):
        jax.eval_shape(step, *acc, w, x)


@pytest.mark.usefixtures("fast_compilation")
def test_accumulate_takes_regions_in_the_mesh_of_the_context():
    w, x = TIMES
    fun = of_times(ring)
    step = jax.jit(ga.accumulate(fun, 2, data_axis="data"))
    with jax.set_mesh(MESH):
        parts = x.reshape(4, -1, 6, 4)
        want = sum(jax.grad(fun)(w, part) for part in parts) / 4
        _, acc = step(ga.accumulator.init(w), w, x)
        assert jnp.abs(ga.accumulator.mean(acc) - want).max() < BOUND
        around = jax.shard_map(
            lambda *args: ga.value_and_grad(fun, 2, data_axis="data")(*args)[0],
            in_specs=(P(), ROWS),
            out_specs=P(),
            axis_names={"data"},
        )
        with pytest.raises(ValueError, match="check_vma=False"):
            jax.eval_shape(around, w, x)
