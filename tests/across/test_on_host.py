"""The optimizer's state in the host's memory; see the contract for every optimizer."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import mesh_of, off, refusals, says
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._across import host

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.skipif(
        jax.__version_info__ < (0, 10, 2), reason="jitted, it leaves arrays on a CPU"
    ),
]

ADAM = optax.adam(0.1)
PARAMS = {"a": np.ones((8, 4), np.float32), "b": np.arange(8.0, dtype=np.float32)}
HOST = jax.memory.Space.Host


def arrays(tree=PARAMS):
    return jax.tree.map(jnp.array, tree)


def grads(i):
    return jax.tree.map(lambda x: jnp.sin(x + i), PARAMS)


def kinds(state):
    """Where the arrays with an axis lie, and where the scalars."""
    leaves = [x for x in jax.tree.leaves(state) if isinstance(x, jax.Array)]
    return [
        {x.sharding.memory_kind for x in leaves if (x.ndim > 0) == i} for i in (1, 0)
    ]


def trained(tx, params=PARAMS, init=None, **options):
    """The parameters and the state after four micro-steps that donate both."""
    params = arrays(params)
    state = (init or tx.init)(params)
    step = jax.jit(
        lambda p, s, g: ga.apply_gradients(tx, g, s, p, **options),
        donate_argnums=(0, 1),
    )
    for i in range(4):
        params, state = step(params, state, grads(i))
    return params, state


def assert_close(got, want, roundings=8):
    """Equal but for some roundings of each leaf's largest number."""
    assert off(got, want) <= roundings * 2.0**-23


def check_same(make, run=trained, **options):
    """`make(on_host)` and `make(no change)` give the same; the state of the first."""
    (got, want) = (run(make(around), **options) for around in (ga.on_host, lambda x: x))
    assert_close(got, want)
    return got[1]


WAYS = {
    "alone": lambda at: at(ADAM),
    "k = 1": lambda at: ga.MultiSteps(at(ADAM), 1),
    "windows": lambda at: ga.MultiSteps(at(ADAM), 2),
    "in a chain": lambda at: ga.MultiSteps(optax.chain(optax.clip(0.5), at(ADAM)), 2),
    "around a chain": lambda at: at(optax.chain(optax.clip_by_global_norm(0.5), ADAM)),
    "around hyperparameters": lambda at: ga.MultiSteps(
        at(optax.inject_hyperparams(optax.adam)(optax.linear_schedule(0.1, 0.0, 4))), 2
    ),
    "in hyperparameters": lambda at: optax.inject_hyperparams(
        lambda learning_rate: at(optax.adam(learning_rate))
    )(learning_rate=0.1),
    "masked": lambda at: ga.MultiSteps(optax.masked(at(ADAM), {"a": 1, "b": 0}), 2),
    "drops": lambda at: ga.MultiSteps(
        at(ADAM), 2, should_drop_window_fn=ga.drop_window_if_not_finite, track_norm=True
    ),
}
STATIC = [{"emit": True}, {"emit": False}, {"emit": True, "weight": 2.0}]


@pytest.mark.parametrize("way", WAYS)
def test_it_is_the_optimizer_wherever_it_stands(way):
    state = check_same(WAYS[way])
    inner = getattr(state, "inner_opt_state", state)
    arrays_of, scalars = kinds(inner)
    assert (arrays_of, scalars) == ({"pinned_host"}, {"device"})


@pytest.mark.quick
@pytest.mark.parametrize("options", STATIC)
def test_a_static_emit_decides_also_if_a_weight_may_prevent_the_step(options):
    state = check_same(WAYS["windows"], **options)
    assert kinds(state.inner_opt_state) == [{"pinned_host"}, {"device"}]
    assert kinds(state.total)[0] == {"device"}


@pytest.mark.quick
def test_a_conditional_decides_and_no_select_brings_both_states_to_the_device():
    def conditionals(opt):
        tx = ga.MultiSteps(opt, 2)
        state = jax.jit(tx.init)(arrays())
        step = functools.partial(ga.apply_gradients, tx, emit=True, weight=2.0)
        program = jax.make_jaxpr(step)(grads(1), state, arrays())
        return [e.primitive.name for e in program.jaxpr.eqns].count("cond")

    assert conditionals(ga.on_host(ADAM)) == 1
    assert conditionals(ADAM) == 0  # the twin: on the device a select is faster


@pytest.mark.quick
def test_init_may_be_jitted_and_updates_may_be_eager():
    tx = ga.on_host(ADAM)
    state = jax.jit(tx.init)(arrays())
    assert kinds(state) == [{"pinned_host"}, {"device"}]
    updates, state = tx.update(grads(1), state, arrays())
    want, old = ADAM.update(grads(1), ADAM.init(arrays()), arrays())
    assert_close((updates, state), (want, old), roundings=0)
    assert kinds(state) == [{"pinned_host"}, {"device"}]
    assert kinds(updates)[0] == {"device"}


@pytest.mark.cpu
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_each_device_has_its_part_and_nothing_is_sent(kind):
    mesh = mesh_of(4, kind=kind)
    layout = {"a": NamedSharding(mesh, P("data")), "b": NamedSharding(mesh, P("data"))}
    tx = ga.MultiSteps(ga.on_host(ADAM), 2)
    with jax.set_mesh(mesh):
        params = jax.device_put(arrays(), layout)
        state = tx.init(params)
        step = jax.jit(lambda p, s, g: ga.apply_gradients(tx, g, s, p))
        assert ga.audit(step.lower(params, state, params).compile()).collectives == ()
        for i in range(4):
            params, state = step(params, state, jax.device_put(grads(i), layout))
    mu = state.inner_opt_state[0].mu["a"].sharding
    assert mu.is_equivalent_to(layout["a"].with_memory_kind("pinned_host"), 2)
    assert_close((params, state), trained(ga.MultiSteps(ADAM, 2)))


@pytest.mark.cpu
def test_it_works_in_a_region_with_a_data_axis():
    mesh, last = mesh_of(4), {}
    for name, opt in (("host", ga.on_host(ADAM)), ("device", ADAM)):
        tx = ga.MultiSteps(opt, 2, data_axis="data")

        def step(p, s, g, tx=tx):
            g = jax.tree.map(lambda x: jax.lax.pcast(x, "data", to="varying"), g)
            return ga.apply_gradients(tx, g, s, p)

        specs = P(), tx.state_specs
        run = jax.jit(
            jax.shard_map(step, mesh=mesh, in_specs=(*specs, P()), out_specs=specs)
        )
        with jax.set_mesh(mesh):
            params, state = arrays(), tx.init(arrays())
        for i in range(4):
            params, state = run(params, state, grads(i))
        last[name] = params, state
    assert_close(*last.values())
    assert kinds(last["host"][1].inner_opt_state)[0] == {"pinned_host"}


def test_orbax_restores_it_to_where_it_lay(tmp_path):
    tx = ga.MultiSteps(ga.on_host(ADAM), 3)
    params, state = trained(tx)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", tx.init(arrays()))
    assert kinds(restored.inner_opt_state) == [{"pinned_host"}, {"device"}]
    # The arrays lie there, and their types do not say so.
    with pytest.raises(ValueError, match=r"pass jax.device_put\(leaf, jax.memory"):
        ga.flush(tx, restored, params)
    on_host = lambda x: x.sharding.memory_kind == "pinned_host"  # noqa: E731
    restored = jax.tree.map(
        lambda x: jax.device_put(x, HOST) if on_host(x) else x, restored
    )
    both = [
        jax.jit(lambda s: ga.apply_gradients(tx, grads(5), s, params))(s)
        for s in (state, restored)
    ]
    assert_close(*both, roundings=0)


@pytest.mark.quick
def test_a_state_that_lies_elsewhere_is_refused_before_tracing():
    seen = []
    opt = optax.GradientTransformation(ADAM.init, lambda *_: seen.append(1))
    for state in (ADAM.init(arrays()), jax.device_get(ADAM.init(arrays()))):
        with pytest.raises(ValueError, match=r"must lie in the host's.*mu\['a'\] does"):
            ga.on_host(opt).update(grads(1), state, arrays())
    assert seen == []


TWICE = ga.on_host(ga.on_host(ADAM))
ERRORS = """
ga.on_host(optax.adam) -> T must be an optax.Gradient
ga.on_host(ga.MultiSteps(ADAM, 2)).init(arrays()) -> V at the top is that of a ga_o
ga.on_host(optax.chain(ga.MultiSteps(ADAM, 2))).init(arrays())
  -> V its state at [0] | Put it inside
TWICE.update(grads(1), TWICE.init(arrays()), arrays()) -> V Use on_host once
"""


@pytest.mark.quick
@pytest.mark.parametrize(("code", "error", "said"), refusals(ERRORS))
def test_what_it_cannot_hold_is_refused(code, error, said):
    says(lambda: eval(code), error, said)


# -- One group after another -----------------------------------------------------------


def num_groups(opt):
    """The arrays that meet, group by group, in the order in which they are moved."""
    seen, tx = [], ga.on_host(opt)
    groups = host._groups

    def noted(jaxpr):
        found = groups(jaxpr)
        seen.append(found)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "_groups", noted)
        params = arrays()
        jaxpr = jax.make_jaxpr(tx.update)(params, tx.init(params), params)
    fences = str(jaxpr).count("optimization_barrier")
    return len(seen[0]) - 1, fences


@pytest.mark.quick
def test_moments_of_one_parameter_move_after_those_of_another():
    assert num_groups(ADAM) == (2, 1)
    assert num_groups(optax.chain(optax.clip_by_global_norm(1.0), ADAM)) == (2, 1)


def test_what_meets_moves_together():
    normed = optax.GradientTransformation(
        ADAM.init, lambda g, s, p: (g, optax.tree.scale(optax.tree.norm(s[0].mu), s))
    )
    assert num_groups(normed)[0] == 1
