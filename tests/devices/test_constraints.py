"""Models that say where they lie on the whole mesh, with a `data_axis`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import apart, mesh_of, off, put
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

K, ROWS, WIDTH = 2, 16, 4
EPS = np.finfo(np.float64).eps
DRAW = np.random.default_rng(0)
PARAMS = {name: DRAW.normal(size=(WIDTH, WIDTH)) for name in "ab"}
X = DRAW.normal(size=(ROWS, WIDTH))
BOTH = mesh_of(2, 2, names=("data", "model"))

# With jax 0.12, jnp.asarray of float64 may be float64 after `enable_x64` has ended.
NARROW = jax.tree.map(np.float32, (PARAMS, X))

SPECS = [P(), P("data"), P("data", "model"), P(("data", "model")), P(None, "model")]
SPECS = [*SPECS, P(P.UNCONSTRAINED, "model")]


def model(params, x, place, where):
    """Two layers; constraints in the program itself, in a scan or in a checkpoint."""

    def layer(h, w):
        return place(jnp.tanh(place(h) @ w)), None

    if where == "scan":
        return jax.lax.scan(layer, x, jnp.stack([params["a"], params["b"]]))[0]
    layer = {"checkpoint": jax.checkpoint, "jit": jax.jit}.get(where, lambda f: f)(
        layer
    )
    return layer(layer(x, params["a"])[0], params["b"])[0]


def loss_of(place, where="plain"):
    return lambda params, x: jnp.mean(model(params, x, place, where) ** 2)


def constrain(mesh, spec):
    at = NamedSharding(mesh, spec)
    return lambda x: jax.lax.with_sharding_constraint(x, at)


@pytest.mark.grid(1, 6)
@pytest.mark.parametrize("where", ["plain", "scan", "checkpoint", "jit"])
@pytest.mark.parametrize("spec", SPECS, ids=str)
@pytest.mark.usefixtures("float64")
def test_a_constraint_over_the_whole_mesh_changes_nothing(spec, where):
    loss, axis = loss_of(constrain(BOTH, spec), where), ga.DataAxis("data", mesh=BOTH)
    step = ga.value_and_grad(loss, K, data_axis=axis)
    plain = jax.value_and_grad(loss_of(lambda x: x))
    args = put((PARAMS, X), BOTH, (P(), P("data")))
    assert apart(step, plain, *args) < 8 * ROWS * WIDTH * EPS


def test_what_it_asks_of_other_axes_stays():
    """The twin: with no constraint the other axis has nothing to do."""

    def flops(place):
        axis = ga.DataAxis("data", mesh=BOTH)
        step = ga.value_and_grad(loss_of(place), K, data_axis=axis)
        program = jax.jit(step).lower(*NARROW).compile()
        return program.cost_analysis()["flops"]

    split = flops(constrain(BOTH, P("data", "model")))
    assert split < 0.8 * flops(lambda x: x)
    assert split < flops(constrain(BOTH, P("data"))) / 1.2


def of_context(spec):
    """How Haliax constrains: over the mesh of the context, by its spec."""
    return lambda x: constrain(jax.sharding.get_abstract_mesh(), spec)(x)


def bare(spec):
    return lambda x: jax.lax.with_sharding_constraint(x, spec)


@pytest.mark.parametrize("how", [of_context, bare])
@pytest.mark.parametrize("spec", [P(), P(None, None), P(None, "model")], ids=str)
def test_a_constraint_over_the_mesh_of_the_context_may_name_other_axes(how, spec):
    step = jax.jit(ga.value_and_grad(loss_of(how(spec)), K, data_axis="data"))
    with jax.set_mesh(BOTH):
        got = step(NARROW[0], jax.device_put(NARROW[1], P("data")))
    due = jax.value_and_grad(loss_of(lambda x: x))(*NARROW)
    assert off(got, due) < 1e-5


@pytest.mark.parametrize("how", [of_context, bare])
def test_the_data_axis_is_refused_there_with_what_to_do(how):
    loss = loss_of(how(P("data", "model")))
    with jax.set_mesh(BOTH):
        batch = jax.device_put(NARROW[1], P("data"))
        with pytest.raises(ValueError, match="out of the axis mapping"):
            jax.jit(ga.value_and_grad(loss, K, data_axis="data"))(NARROW[0], batch)
        each = ga.DataAxis("data", sync="each")  # there the model may
        jax.jit(ga.value_and_grad(loss, K, data_axis=each))(NARROW[0], batch)
