"""Gradients of a bfloat16 model are rounded once, also where rows meet and on a mesh.

All numbers are integers: those of the activations and their cotangents are exact in
bfloat16, gradients are exact in float32, and in bfloat16 they are not. So the gradients
are those of float32, to the last bit, unless something rounds them on their way.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._loop import step

pytestmark = pytest.mark.skipif(
    jax.__version_info__ < (0, 9), reason="data_axis needs jax 0.9"
)
ROWS, WIDTH, GROUPS, K = 512, 8, 16, 4
WIDE, NARROW = jnp.float32, jnp.bfloat16


def network(p, b, dtype):
    """Activations of two layers, and of the first alone, at most 64 and 8."""
    w, v = (x.astype(dtype) for x in (p["w"], p["v"]))
    first = b["x"].astype(dtype) @ w
    return (first @ v).astype(WIDE), first.astype(WIDE)


def total(p, b, dtype):
    """Rows do not meet."""
    return jnp.sum(network(p, b, dtype)[0] * b["slope"])


def sums(p, b, dtype):
    """They meet in sums, the slopes of whose absolute values are 1 or -1."""
    h, first = network(p, b, dtype)
    both = jnp.abs(jnp.sum(h * b["sign"], 0)), jnp.abs(jnp.sum(first * b["sign"], 0))
    return total(p, b, dtype) + sum(map(jnp.sum, both))


def layers(p, b, dtype):
    """The same in a scan."""

    def layer(x, w):
        h = x @ w.astype(dtype)
        return h, jnp.abs(jnp.sum(h.astype(WIDE) * b["sign"], 0))

    h, met = jax.lax.scan(layer, b["x"].astype(dtype), jnp.stack([p["w"], p["v"]]))
    return jnp.sum(h.astype(WIDE) * b["slope"]) + jnp.sum(met)


def pairs(p, b, dtype):
    """All rows are gathered; the slope of a row counts those of its group."""
    _, first = network(p, b, dtype)
    near = (b["group"][:, None] == b["group"][None]).astype(WIDE)
    return jnp.sum(jnp.abs(first[:, None] - first[None]) * near[..., None])


def once(p, b, dtype):
    """What follows from sums over groups of rows is computed once."""
    first = network(p, b, dtype)[1]
    of_group = jax.ops.segment_sum(first, b["group"], GROUPS)
    return jnp.sum(of_group.astype(NARROW).astype(dtype) @ p["v"].astype(dtype))


def masked(p, b, dtype):
    """A mean over some rows, of a number that is a power of two."""
    h = network(p, b, dtype)[0] * b["slope"] * b["mask"]
    return jnp.sum(h) / jnp.sum(b["mask"]) * (ROWS // 2)


LOSSES = {f.__name__: f for f in (total, sums, layers, pairs, once, masked)}


def draw():
    rng = np.random.default_rng(0)

    def one_of(numbers, *shape):
        return jnp.asarray(rng.choice(numbers, shape), WIDE)

    params = {name: one_of([-1, 1], WIDTH, WIDTH) for name in "wv"}
    batch = {
        "x": one_of([0, 1], ROWS, WIDTH),
        "slope": one_of([1, 2, 3], ROWS, WIDTH),
        "sign": one_of([-1, 1], ROWS, WIDTH),
        "mask": jnp.asarray(rng.permutation(ROWS) < ROWS // 2, WIDE)[:, None],
        "group": jnp.asarray(rng.integers(0, GROUPS, ROWS)),
    }
    return params, batch


def gradients(name, mesh=None, **options):
    """Those of micro-batches in bfloat16, and those in float32."""
    fun, (params, batch) = LOSSES[name], draw()
    want = jax.jit(jax.grad(lambda p, b: fun(p, b, WIDE)))(params, batch)
    if mesh is not None:
        options["data_axis"] = ga.DataAxis("data", mesh=mesh)
        batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        params = jax.device_put(params, NamedSharding(mesh, P()))
    step = ga.value_and_grad(lambda p, b: fun(p, b, NARROW), K, **options)
    return jax.device_get((jax.jit(step)(params, batch)[1], want))


def exact(got, want):
    return all(np.array_equal(got[name], want[name]) for name in want)


def meshes(kind):
    kind = getattr(AxisType, kind)
    return jax.make_mesh((2,), ("data",), (kind,), devices=jax.devices()[:2])


@pytest.mark.parametrize("name", LOSSES)
def test_gradients_are_rounded_in_the_accumulator_alone(name, monkeypatch):
    rounded_once(name, monkeypatch)


@pytest.mark.grid(2, 6)
@pytest.mark.parametrize("name", ["total", "sums", "layers"])
@pytest.mark.parametrize("kind", ["Auto", "Explicit"])
def test_so_they_are_on_a_mesh(kind, name, monkeypatch):
    rounded_once(name, monkeypatch, meshes(kind))


def test_without_passes_they_are_rounded_as_by_jax():
    got, want = gradients("sums", optimize=False)
    assert not exact(got, want)
    for x, y in zip(got.values(), want.values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-7 * np.abs(y).max())


def rounded_once(name, monkeypatch, mesh=None):
    got, want = gradients(name, mesh)
    assert exact(got, want)
    # They are not exact in bfloat16.
    assert not exact(jax.tree.map(lambda x: np.asarray(x, NARROW), want), want)
    # The twin: rounded in each micro-batch, and in what is computed once.
    monkeypatch.setattr(step.Step, "low_precision", False)
    got, want = gradients(name, mesh)
    assert not exact(got, want)
    for x, y in zip(got.values(), want.values(), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=2**-7 * np.abs(y).max())
