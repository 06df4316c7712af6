"""What a call says once in the log, at the level INFO."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._inside import in_place, said_once

pytestmark = pytest.mark.usefixtures("fast_compilation")

K, ROWS, WIDTH = 4, 64, 16


def loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


@pytest.fixture
def said(caplog):
    """A function that returns what was said since it was called last."""
    forget()
    caplog.set_level("INFO", "ga_optax")

    def records():
        found = [record.getMessage() for record in caplog.records]
        caplog.clear()
        return found

    yield records
    forget()


def forget():
    said_once.what_is_missing.cache_clear()
    said_once._neighbours.cache_clear()


def run(**options):
    ga.value_and_grad(loss, K, **options)(jnp.eye(WIDTH), jnp.ones((ROWS, WIDTH)))


@pytest.mark.quick
@pytest.mark.parametrize("has_refs", [True, False])
def test_an_old_jax_says_once_what_it_cannot_do(has_refs, said, monkeypatch):
    monkeypatch.setattr(in_place, "HAS_REFS", has_refs)
    run()
    found = said()
    assert len(found) == (not has_refs)
    assert all(jax.__version__ in one and "in place" in one for one in found)
    run()
    assert said() == []


@pytest.mark.quick
def test_whoever_leaves_all_passes_out_is_told_nothing(said, monkeypatch):
    monkeypatch.setattr(in_place, "HAS_REFS", False)
    run(optimize=False)
    assert said() == []


def mesh_of_four():
    return jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))


def flops(mesh, context, **options):
    """Of one device, by a program that is compiled for shapes without a sharding."""
    shapes = (WIDTH, WIDTH), (ROWS, WIDTH)
    step = jax.jit(
        ga.value_and_grad(loss, K, **options),
        in_shardings=(NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))),
    )
    with context:
        lowered = step.lower(*(jax.ShapeDtypeStruct(x, jnp.float32) for x in shapes))
    return lowered.compile().cost_analysis()["flops"]


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
def test_a_context_names_the_mesh_of_shapes_that_have_no_sharding(said):
    mesh = mesh_of_four()
    axis = ga.DataAxis("data", mesh=mesh)
    best = flops(mesh, contextlib.nullcontext(), data_axis=axis)
    assert flops(mesh, mesh) < 1.1 * best
    assert flops(mesh, jax.set_mesh(mesh)) < 1.1 * best
    assert not [one for one in said() if "mesh" in one]
    # The twin: nothing names it, so that every device computes all.
    assert flops(mesh, contextlib.nullcontext()) > 3 * best
    [found] = [one for one in said() if "mesh" in one]
    assert "neighbouring rows" in found
    flops(mesh, contextlib.nullcontext())
    assert said() == []


def test_inside_a_shard_map_the_mesh_is_known(said):
    mapped = jax.shard_map(
        ga.value_and_grad(loss, K),
        mesh=mesh_of_four(),
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    jax.jit(mapped)(jnp.eye(WIDTH), jnp.ones((ROWS, WIDTH)))
    assert not [one for one in said() if "mesh" in one]
