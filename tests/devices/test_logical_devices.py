"""Logical devices: the same bits on any number of devices that divides them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import bits, mean_of, mesh_of, normal, put
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from test_devices import WHOLE

import ga_optax as ga
from ga_optax import accumulator

L, WIDTH, ROWS = 8, 8, 32


def logical(mesh, name="data", **options):
    return ga.DataAxis(name, mesh=mesh, logical_devices=L, **options)


def ran(fun, mesh, *args, spec=WHOLE, axes="data"):
    """A compiled call of parameters and a batch that lie on a mesh."""
    *whole, batch = args
    return jax.jit(fun)(*put(whole, mesh, spec), put(batch, mesh, P(axes)))


def tree_sum(terms):
    """Neighbours first."""
    while len(terms) > 1:
        terms = [a + b for a, b in zip(terms[::2], terms[1::2], strict=True)]
    return terms[0]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [5, 20_001, 2**15], ids=["small", "odd", "large"])
def test_sums_are_added_in_a_tree_whose_leaves_are_the_logical_devices(size, dtype):
    params, batch = np.zeros(size, np.float32), normal(L, size, seed=4)
    expected = np.float32(tree_sum(list(batch.astype(dtype)))) / L
    for n in (1, 4):
        mesh = mesh_of(n)
        options = {"data_axis": logical(mesh), "accumulator_dtype": dtype}
        fun = mean_of(lambda params, x: jnp.mean(x @ params), 1, **options)
        _, got = ran(fun, mesh, params, batch)
        np.testing.assert_array_equal(got, expected)


@pytest.mark.quick
def test_no_two_logical_devices_have_the_same_key():
    def drawn(w, x, key):
        return jnp.mean(x) * w, jax.random.bits(key)

    mesh = mesh_of(2)
    options = {"rng_argnums": 2, "has_aux": True, "aux": "stack"}
    fun = jax.jit(mean_of(drawn, 1, data_axis=logical(mesh), **options))
    x = put(normal(L, 2), mesh, P("data"))
    (_, found), _ = fun(jnp.float32(1), x, jax.random.key(0))
    assert len({*np.ravel(found).tolist()}) == L


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 4])
def test_extremes_are_those_of_all_logical_devices(n):
    mesh, batch = mesh_of(n), normal(ROWS, WIDTH, seed=8)
    options = {"has_aux": True, "aux": ("max", "min")}
    fun = mean_of(
        lambda w, x: (w * jnp.mean(x), (jnp.max(x, 0), jnp.min(x, 0))),
        2,
        data_axis=logical(mesh),
        **options,
    )
    (_, found), _ = ran(fun, mesh, jnp.float32(1), batch)
    np.testing.assert_array_equal(found, (batch.max(0), batch.min(0)))


@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "spec", [P(), P("a"), P(None, "b"), P(("b", "a")), P("b", "a")], ids=str
)
def test_two_axes_and_sharded_parameters_have_those_bits_too(spec):
    params, batch = np.zeros((8, 8), np.float32), normal(L, 8, 8, seed=5)
    axes, mesh = ("a", "b"), mesh_of(2, 2, names=("a", "b"))

    def loss(params, x):
        return jnp.mean(jnp.sum(x * params[None], (1, 2)))

    fun = mean_of(loss, 1, data_axis=logical(mesh, axes, param_specs=spec))
    _, got = ran(fun, mesh, params, batch, spec=spec, axes=axes)
    assert got.sharding.spec == spec
    np.testing.assert_array_equal(got, tree_sum(list(batch)) / np.float32(L))


def compiled(loss, n, *shape):
    """The bits of a window on n devices, and the program."""
    mesh = mesh_of(n)
    fun = jax.jit(mean_of(loss, 1, data_axis=logical(mesh)))
    batch = normal(L, shape[0], seed=15)
    args = put(normal(*shape, seed=14), mesh, P()), put(batch, mesh, P("data"))
    program = fun.lower(*args).compile()
    return bits(program(*args)), program.as_text()


def twice(params, x):
    return jnp.mean((x @ params @ params) ** 2)


@pytest.mark.slow
def test_a_loop_over_logical_devices_is_not_compiled_as_one_function():
    """XLA does that if the loop holds nothing that such functions do not support."""
    (first, _), (second, text) = (compiled(twice, n, 3, 3) for n in (L, 4))
    assert first == second
    assert "xla_cpu_small_call" not in text


def _never(*args):
    raise AssertionError("nothing is traced")


def test_what_cannot_have_logical_devices_says_so():
    with pytest.raises(TypeError, match="MultiSteps takes their results"):
        ga.MultiSteps(optax.sgd(1.0), 2, data_axis=logical(None))
    add = ga.accumulate(_never, 1, data_axis=logical(None))
    params, rows = normal(WIDTH, seed=0), normal(ROWS, WIDTH, seed=1)
    specs = {"in_specs": (P(), P(), P("data")), "out_specs": P()}
    inside = jax.shard_map(add, mesh=mesh_of(2), **specs)
    with pytest.raises(ValueError, match=r"nor logical_devices.*at top level"):
        inside(accumulator.init(params), params, rows)
    # Nor if explicit axes beside it shard a parameter.
    mesh = mesh_of(2, 2, names=("data", "model"), kind=AxisType.Explicit)
    fun = mean_of(_never, 1, data_axis=logical(mesh))
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="automatic axes beside"):
        ran(fun, mesh, params, rows, spec=P("model"))
