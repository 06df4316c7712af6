"""The law with every option of `DataAxis`, wherever the batch lies.

Where rows do not meet, or in numbers alone such as counts, every option is there, as in
a loop of micro-batches each by itself. Where they meet, the error names the line.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.skipif(jax.__version_info__ < (0, 10), reason="all kinds of axes"),
]
ROWS, WIDTH, K = 32, 8, 2
SPECS = {"layers": P(None, "data"), "head": P("data")}


def arguments():
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    params = {"layers": 0.3 * array(3, WIDTH, WIDTH), "head": array(WIDTH, 4)}
    mask = jnp.asarray(rng.integers(0, 2, ROWS), jnp.float32)
    return params, {"x": array(ROWS, WIDTH), "y": array(ROWS, 4), "mask": mask}


def model(p, x):
    h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, p["layers"])
    return h @ p["head"]


def mean(p, b):
    return jnp.mean((model(p, b["x"]) - b["y"]) ** 2)


def masked(p, b):
    of_rows = jnp.mean((model(p, b["x"]) - b["y"]) ** 2, 1)
    return jnp.sum(of_rows * b["mask"]) / b["mask"].sum()


def relu(p, b):
    return jnp.mean(jax.nn.relu(model(p, b["x"]) - b["y"]))


def dropout(p, b):
    h = model(p, b["x"])
    return jnp.mean(h**2 * jax.random.bernoulli(jax.random.key(1), 0.5, h.shape))


def reversed_rows(p, b):
    weights = jnp.linspace(0.0, 1.0, ROWS)
    return jnp.mean(model(p, b["x"])[::-1] ** 2 * weights[:, None])


def norm(p, b):
    h = model(p, b["x"])
    return jnp.mean(((h - h.mean(0)) / (h.std(0) + 0.1) - b["y"]) ** 2)


APART = (mean, masked, relu, dropout)
AXES = {
    "last": "data",
    "none": None,
    "each": ga.DataAxis("data", sync="each"),
    "each, sharded": ga.DataAxis("data", sync="each", param_specs=SPECS),
    "sharded": ga.DataAxis("data", param_specs=SPECS),
    "scattered at the end": ga.DataAxis("data", grad_specs=SPECS),
    "scattered": ga.DataAxis("data", sync="each", grad_specs=SPECS),
    "overlap": ga.DataAxis("data", overlap=True),
    "as 4": ga.DataAxis("data", logical_devices=4),
    "as 8": ga.DataAxis("data", logical_devices=8),
}
NEEDS_NO_MEETING = ("each", "each, sharded", "scattered", "overlap", "as 4", "as 8")


def mesh_of(kind):
    return jax.make_mesh((4,), ("data",), axis_types=(kind,))


def at_top_level(loss, name, kind, k=K):
    params, batch = arguments()
    mesh = mesh_of(kind)
    sharded = "sharded" in name
    specs = SPECS if sharded else dict.fromkeys(SPECS, P())
    params = {
        x: jax.device_put(params[x], NamedSharding(mesh, specs[x])) for x in SPECS
    }
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        return jax.jit(ga.value_and_grad(loss, k, data_axis=AXES[name]))(params, batch)


def in_region(loss, name, check_vma, kind=AxisType.Auto):
    params, batch = arguments()
    step = jax.shard_map(
        ga.value_and_grad(loss, K, data_axis=AXES[name]),
        mesh=mesh_of(kind),
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.jit(step)(params, batch)


def distance(got, loss):
    want = jax.jit(jax.value_and_grad(loss))(*arguments())
    assert jax.tree.structure(got) == jax.tree.structure(want)
    errors = [
        np.abs(np.asarray(x) - np.asarray(y)).max() / np.abs(y).max()
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    return max(errors)


@pytest.mark.grid(6, 24)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("loss", APART)
@pytest.mark.parametrize("name", AXES)
def test_where_rows_do_not_meet_every_option_is_there(name, loss, kind):
    explicit_rows = kind == AxisType.Explicit and name in (
        "none",
        "each",
        "each, sharded",
    )
    if loss is relu and explicit_rows:
        # JAX refuses a selection between rows of explicit type and a number there.
        with pytest.warns(UserWarning, match="all rows at once"):
            got = at_top_level(loss, name, kind)
    else:
        got = at_top_level(loss, name, kind)
    assert distance(got, loss) < 1e-5
    # The twin: half of the rows.
    half = jax.value_and_grad(loss)(*arguments())[0] * 0.5, got[1]
    assert distance(half, loss) > 1e-2


@pytest.mark.grid(3, 12)
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("loss", APART)
@pytest.mark.parametrize("name", ["last", "overlap", "as 8"])
def test_so_it_is_in_a_region_of_the_users(name, loss, check_vma):
    assert distance(in_region(loss, name, check_vma), loss) < 1e-5


@pytest.mark.parametrize("loss", [norm, reversed_rows])
@pytest.mark.parametrize("name", ["last", "sharded", "scattered at the end"])
def test_where_they_meet_those_are_there_that_merge_at_the_end(name, loss):
    assert distance(at_top_level(loss, name, AxisType.Auto), loss) < 1e-5


@pytest.mark.parametrize("name", NEEDS_NO_MEETING)
def test_where_they_meet_the_error_names_the_line(name):
    line = norm.__code__.co_firstlineno + 2
    with pytest.raises(ValueError, match=f"test_law_devices.py:{line}") as error:
        at_top_level(norm, name, AxisType.Auto)
    assert 'data_axis must have sync="last"' in str(error.value)
    assert "batch_dependencies" in str(error.value)


@pytest.mark.parametrize("sync", ["last", "each"])
def test_specs_that_do_not_fit_are_refused_and_nothing_is_computed(sync):
    params, batch = arguments()
    axis = ga.DataAxis("data", mesh=mesh_of(AxisType.Auto), sync=sync)
    step = ga.value_and_grad(mean, K, data_axis=axis)
    assert distance(step(params, batch), mean) < 1e-5  # The twin: without specs.
    for specs, said in (
        ("data", "PartitionSpec"),
        (P(None, None, None, "data"), "fit"),
    ):
        wrong = dataclasses.replace(axis, param_specs=specs)
        step = ga.value_and_grad(mean, K, data_axis=wrong)
        with pytest.raises((TypeError, ValueError), match=said):
            step(params, batch)


def test_in_a_region_that_checks_and_where_they_meet_the_error_names_the_line():
    line = norm.__code__.co_firstlineno + 2
    with pytest.raises(ValueError, match=f"test_law_devices.py:{line}") as error:
        in_region(norm, "last", check_vma=True)
    assert "check_vma=False" in str(error.value)
    assert distance(in_region(norm, "last", check_vma=False), norm) < 1e-5


def test_rows_along_an_explicit_axis_without_data_axis_must_not_meet():
    with pytest.raises(ValueError, match="data_axis='data'"):
        at_top_level(norm, "none", AxisType.Explicit)


@pytest.mark.parametrize("name", ["none", "last", "each", "scattered at the end"])
def test_a_window_communicates_as_often_as_its_option_says(name):
    params, batch = arguments()
    mesh = mesh_of(AxisType.Auto)
    params = jax.device_put(params, NamedSharding(mesh, P()))
    batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
    with jax.set_mesh(mesh):
        step = jax.jit(ga.value_and_grad(mean, 4, data_axis=AXES[name]))
        audit = ga.audit(step.lower(params, batch).compile(), mesh)
    assert bool(audit.in_loop) == (name in ("none", "each"))
    kinds = {x.kind for x in audit.collectives}
    assert ("reduce-scatter" in kinds) == (name == "scattered at the end")


@pytest.mark.parametrize("loss", [mean, norm])
def test_a_program_that_names_no_mesh_runs_on_one_device_and_on_several(loss):
    params, batch = arguments()
    mesh = mesh_of(AxisType.Auto)
    step = jax.jit(ga.value_and_grad(loss, 4))
    assert distance(step(params, batch), loss) < 1e-5
    where = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    placed = jax.jit(ga.value_and_grad(loss, 4), in_shardings=where)
    assert distance(placed(params, batch), loss) < 1e-5


def test_a_mean_that_names_no_mesh_moves_no_rows():
    params, batch = arguments()
    where = (NamedSharding(mesh_of(AxisType.Auto), spec) for spec in (P(), P("data")))
    where = tuple(where)

    def kinds(loss):
        step = jax.jit(ga.value_and_grad(loss, 4), in_shardings=where)
        compiled = step.lower(params, batch).compile()
        return {x.kind for x in ga.audit(compiled).collectives}

    assert kinds(mean) == {"all-reduce"}
    # The twin: neighbours are part of what this loss says.
    assert kinds(reversed_rows) - {"all-reduce"}


def test_a_single_row_is_that_row_wherever_the_batch_lies():
    # At place 3 of micro-batch 1 if they hold neighbours; of 2 if every third row.
    def loss(w, x):
        return jnp.mean(x * w) + w * x[11], x[11]

    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    where = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    args = jnp.float32(2), jnp.arange(24, dtype=jnp.float32)
    step = ga.value_and_grad(loss, 3, has_aux=True)
    got = jax.jit(step, in_shardings=where)(*args)
    want = jax.value_and_grad(loss, has_aux=True)(*args)
    assert jax.tree.map(float, got) == jax.tree.map(float, want)
