"""Which rows are in which micro-batch, where nothing names the mesh of a program."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import mean_of, squares
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._devices import membership, meshes

pytestmark = pytest.mark.usefixtures("fast_compilation")

K, ROWS, WIDTH, DEVICES = 4, 64, 16, 8


def rows_of_each(w, x):
    """A loss, and the numbers of its rows."""
    return squares(w, x), x[:, 0]


def mesh_of_all():
    return jax.make_mesh((DEVICES,), ("data",), axis_types=(AxisType.Auto,))


def on_mesh(step, mesh):
    specs = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    return jax.jit(step, in_shardings=specs)


def program(step):
    """Compiled for shapes that have no sharding."""
    shapes = (WIDTH, WIDTH), (ROWS, WIDTH)
    args = (jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes)
    return jax.jit(step).lower(*args).compile()


def numbered():
    x = jnp.broadcast_to(jnp.arange(ROWS, dtype=jnp.float32)[:, None], (ROWS, WIDTH))
    return jnp.zeros((WIDTH, WIDTH)), np.asarray(x)


def test_one_traced_program_has_neighbours_on_one_device_and_strides_on_eight():
    step = mean_of(rows_of_each, K, has_aux=True, aux="stack")
    rows = np.arange(ROWS, dtype=np.float32)
    (_, found), _ = jax.jit(step)(*numbered())
    np.testing.assert_array_equal(found, rows.reshape(K, -1))
    mesh = mesh_of_all()
    (_, found), _ = on_mesh(step, mesh)(*numbered())
    np.testing.assert_array_equal(found, rows.reshape(-1, K).T)
    # The mesh may be named by the results alone.
    (_, found), _ = jax.jit(step, out_shardings=NamedSharding(mesh, P()))(*numbered())
    np.testing.assert_array_equal(found, rows.reshape(-1, K).T)


def test_the_log_names_nothing_and_one_device_has_the_program_it_had(monkeypatch):
    """The operation of its own leaves nothing in the compiled program."""
    step = ga.value_and_grad(squares, K)
    mine = program(step)
    monkeypatch.setattr(meshes, "is_open", lambda tree: False)
    plain = program(ga.value_and_grad(squares, K))
    for what in ("flops", "bytes accessed"):
        assert mine.cost_analysis()[what] == plain.cost_analysis()[what]


def own_operations(step):
    text = str(jax.make_jaxpr(step)(jnp.eye(WIDTH), jnp.ones((ROWS, WIDTH))))
    return text.count("ga_optax_split")


def test_the_switch_leaves_the_operation_out():
    assert own_operations(mean_of(squares, K)) == 1
    assert not own_operations(mean_of(squares, K, optimize=False))


def test_a_jax_without_registrations_splits_into_neighbours_and_says_so(monkeypatch):
    from jax.interpreters import mlir

    monkeypatch.delattr(mlir, "register_lowering")
    cached = membership.can_wait, membership._operations
    for one in cached:
        one.cache_clear()
    try:
        with pytest.warns(UserWarning, match="neighbouring rows.*set_mesh"):
            assert not own_operations(mean_of(squares, K))
    finally:
        for one in cached:
            one.cache_clear()
