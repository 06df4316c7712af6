"""On many devices: one reduction a window, and the gradient of the whole batch."""

import collections
import contextlib

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MODES, mean_of, mesh_of, normal, off, put, refusals, says
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga

WIDTH, LAYERS, ROWS = 16, 3, 64
MATRICES = 4 * WIDTH * WIDTH * (1 + LAYERS)
GRADIENT_BYTES = MATRICES + 4 * WIDTH
# The scalars that travel with the gradient: Σ w·loss and Σ w.
SCALARS = 4  # the loss
KINDS, BOTH = [AxisType.Auto, AxisType.Explicit], ("replica", "data")
REDUCTIONS = ("all-reduce", "reduce-scatter")
RESHARDINGS = ("all-to-all", "collective-permute", "all-gather")
WHOLE, ROWS_APART = P(), (P(), P("data"))

SHARDED = {"in": P("data"), "layers": P(None, "data"), "bias": P()}


def make_params():
    return {
        "in": normal(WIDTH, WIDTH, seed=0) / 4,
        "layers": normal(LAYERS, WIDTH, WIDTH, seed=1) / 4,
        "bias": normal(WIDTH, seed=2),
    }


def make_batch(rows=ROWS, width=WIDTH):
    """Of the tokens of a row 1 to `width` count, fewer in the first rows."""
    lengths = 1 + np.arange(rows) * (width - 1) // (rows - 1)
    mask = jnp.asarray(np.arange(width) < lengths[:, None], jnp.float32)
    return {"x": normal(rows, width, seed=3), "mask": mask}


def _layer(h, w):
    return jnp.tanh(h @ w), None


def model(params, batch):
    h = batch["x"] @ params["in"]
    h, _ = jax.lax.scan(jax.checkpoint(_layer), h, params["layers"])
    return h + jnp.broadcast_to(params["bias"], h.shape)


def mean_loss(params, batch):
    return jnp.mean(model(params, batch) ** 2)


def token_loss(params, batch):
    """The mean over the tokens that are not padding."""
    return jnp.sum(model(params, batch) ** 2 * batch["mask"]) / jnp.sum(batch["mask"])


def count(batch):
    return jnp.sum(batch["mask"])


def sent(collectives):
    """The bytes that each kind of collective sends in a call."""
    total = collections.Counter()
    for c in collectives:
        total[c.kind] += c.total_bytes
    return total


def compiled_and_run(fun, mesh, *args):
    with jax.set_mesh(mesh):
        compiled = jax.jit(fun).lower(*args).compile()
        return ga.audit(compiled, mesh), compiled(*args)


def mapped_and_run(fun, mesh, in_specs, out_specs=WHOLE, **options):
    """So inside a shard_map, of the parameters and the batch of all tests."""
    specs = {"in_specs": in_specs, "out_specs": out_specs, **options}
    mapped = jax.shard_map(fun, mesh=mesh, **specs)
    return compiled_and_run(mapped, mesh, make_params(), make_batch())


def assert_close(got, want):
    """By c·n·eps, for sums over the rows in another order."""
    assert off(got, want) < 4 * ROWS * np.finfo(np.float32).eps


def whole_batch(loss=mean_loss):
    return jax.value_and_grad(loss)(make_params(), make_batch())


def window(mesh, k, specs=WHOLE, rows=ROWS, axes="data", loss=mean_loss, **options):
    """The audit of a window, and its result: that of one device."""
    args = make_params(), make_batch(rows)
    fun = ga.value_and_grad(loss, k, **options)
    audit, got = compiled_and_run(fun, mesh, *put(args, mesh, (specs, P(axes))))
    assert_close(got, jax.value_and_grad(loss)(*args))
    return audit, got


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_one_all_reduce_for_any_number_of_micro_batches(kind, optimize, k):
    options = {"data_axis": "data", "optimize": optimize}
    audit, _ = window(mesh_of(8, kind=kind), k, rows=128, **options)
    [one] = audit.collectives  # nothing else, so no row of the batch moved
    assert (one.kind, one.loops, one.axes) == ("all-reduce", (), ("data",))
    assert one.num_bytes == GRADIENT_BYTES + SCALARS


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("optimize", [True, False])
def test_inside_a_shard_map_it_reduces_once(check_vma, optimize):
    fun = ga.value_and_grad(mean_loss, 4, data_axis="data", optimize=optimize)
    audit, got = mapped_and_run(fun, mesh_of(8), ROWS_APART, check_vma=check_vma)
    assert [c.num_bytes for c in audit.collectives] == [GRADIENT_BYTES + SCALARS]
    assert not audit.in_loop
    assert_close(got, whole_batch())


def test_if_rows_meet_no_loop_communicates():
    """Each level crosses the devices once, after its loop."""

    def contrastive(params, batch):
        z = batch["x"] @ params["in"]
        z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
        return jnp.mean(jax.nn.logsumexp(z @ z.T, 1) - jnp.diagonal(z @ z.T))

    audit, _ = window(mesh_of(8), 4, loss=contrastive, data_axis="data")
    assert not audit.in_loop
    assert 0 < len(audit.collectives) <= 3  # there, back, and gradients


@pytest.mark.grid(2)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_the_batch_may_be_split_over_two_axes(first, second):
    if first == AxisType.Auto != second:  # JAX puts the explicit axis of a spec first
        pytest.skip("shard_map itself moves the rows")
    mesh = jax.make_mesh((2, 4), BOTH, axis_types=(first, second))
    data_axis = ga.DataAxis(BOTH, param_specs=SHARDED)
    audit, got = window(mesh, 2, SHARDED, axes=BOTH, data_axis=data_axis)
    assert not audit.in_loop
    assert got[1]["layers"].sharding.spec[1] == "data"


MANY = 4096


def rows_that_move(compiled):
    """Larger than what JAX gathers of a gradient; a device's micro-batch is larger."""
    found = (c for c in ga.audit(compiled).collectives if c.kind in RESHARDINGS)
    return [c for c in found if c.num_bytes > GRADIENT_BYTES]


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "way", ["arrays", "explicit", "constraint", "shapes", "jit", "with", "set_mesh"]
)
def test_no_row_moves_however_the_mesh_is_known(way):
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = mesh_of(2, 2, 2, names=(*BOTH, "model"), kind=kind)
    place = NamedSharding(mesh, P(BOTH))
    params, batch = make_params(), make_batch(rows=MANY)
    fun, options = ga.value_and_grad(mean_loss, 4), {}
    if way in ("arrays", "explicit"):
        params, batch = put(params, mesh, P()), jax.device_put(batch, place)
    elif way == "constraint":
        mean = fun

        def fun(params, batch):
            return mean(params, jax.lax.with_sharding_constraint(batch, place))

    elif way == "shapes":  # for a machine that is not here
        batch = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), batch
        )
    else:  # nothing but the parameters names the mesh, or not even they
        params, batch = put(params, mesh, P()), jax.device_get(batch)
        options = {"in_shardings": (NamedSharding(mesh, P()), place)}
    if way in ("with", "set_mesh"):
        params = jax.eval_shape(make_params)
    contexts = {"with": lambda: mesh, "set_mesh": lambda: jax.set_mesh(mesh)}
    with contexts.get(way, contextlib.nullcontext)():
        moved = rows_that_move(jax.jit(fun, **options).lower(params, batch).compile())
    # In its backward pass JAX gathers what was broadcast along explicit axes.
    assert [c for c in moved if way != "explicit" or not c.loops] == []


@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", [True, False])
def test_a_model_axis_stays_with_the_compiler(optimize):
    mesh = mesh_of(4, 2, names=("data", "model"))
    specs = {"in": P(None, "model"), "layers": P(None, "model"), "bias": P()}
    audit, _ = window(mesh, 4, specs, data_axis="data", optimize=optimize)
    over_data = [c for c in audit.collectives if "data" in c.axes]
    # Each device holds half of the matrices; one all-reduce, of its half.
    assert all(not c.loops and c.kind == "all-reduce" for c in over_data)
    half = GRADIENT_BYTES // 2
    assert half < sum(c.num_bytes for c in over_data) <= half + 4 * WIDTH // 2 + SCALARS
    assert any(c.axes == ("model",) for c in audit.in_loop)  # the model's own


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4, 16])
def test_sharded_parameters_cost_one_gather_and_one_reduce_scatter(kind, k):
    specs = SHARDED if kind == AxisType.Auto else None  # explicit types say it
    axis = ga.DataAxis("data", param_specs=specs)
    audit, got = window(mesh_of(8, kind=kind), k, SHARDED, rows=128, data_axis=axis)
    assert not audit.in_loop
    assert sent(audit.collectives) == {
        "all-gather": MATRICES // 8,
        "reduce-scatter": MATRICES,
        "all-reduce": 4 * WIDTH + SCALARS,
    }
    assert got[1]["layers"].addressable_shards[0].data.shape[1] == WIDTH // 8


def by_draw(params, batch):
    h = model(params, batch)
    draw = jax.random.bernoulli(jax.random.key(1), 0.5, h.shape)
    return jnp.mean(jnp.where(draw, h, 0) ** 2)


def over_replicas(collectives):
    """Those that sum over the replicas of shards."""
    return [c for c in collectives if "replica" in (c.axes or ())]


@pytest.mark.parametrize("loss", [mean_loss, token_loss])
@pytest.mark.parametrize("axes", [BOTH, BOTH[::-1]])
def test_replicas_of_shards_are_summed_once_a_window(loss, axes):
    mesh = mesh_of(2, 2, names=BOTH)
    data_axis = ga.DataAxis(axes, param_specs=SHARDED, sync="each")
    options = {"axes": axes, "loss": loss, "data_axis": data_axis}
    audit, _ = window(mesh, 4, SHARDED, **options)
    sums = over_replicas(audit.collectives)
    assert {c.kind for c in sums} == {"all-reduce"}
    assert not over_replicas(audit.in_loop)
    assert {c.kind for c in audit.in_loop} >= {"all-gather", "all-reduce"}
    # A shard of the matrices, the whole bias, the loss; of tokens, their number, and
    # the loss once more, which is infinite if the number is 0.
    scalars = SCALARS + 8 * (loss is token_loss)
    assert sent(sums)["all-reduce"] == MATRICES // 2 + 4 * WIDTH + scalars


def test_replicas_are_summed_in_each_micro_step_if_the_place_of_a_row_matters():
    mesh = mesh_of(2, 2, names=BOTH)
    data_axis = ga.DataAxis(BOTH, param_specs=SHARDED, sync="each")
    audit, _ = window(mesh, 4, SHARDED, axes=BOTH, loss=by_draw, data_axis=data_axis)
    assert over_replicas(audit.in_loop)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sync_each_reduces_in_every_micro_step(kind):
    specs = SHARDED if kind == AxisType.Auto else None
    axis = ga.DataAxis("data", param_specs=specs, sync="each")
    audit, _ = window(mesh_of(8, kind=kind), 4, SHARDED, data_axis=axis)
    found = sent(audit.in_loop)
    assert {*found} <= {"all-gather", *REDUCTIONS}
    assert 4 * MATRICES <= sum(found[kind] for kind in REDUCTIONS) <= 5 * MATRICES
    # Every micro-step gathers each layer, and once more for its backward pass.
    assert found["all-gather"] <= 2 * 4 * MATRICES // 8


@pytest.mark.parametrize(
    ("shape", "spec", "rows", "is_looked_up"),
    [
        ({"data": 8}, P(None, "data"), 32, True),
        ({"data": 8}, P(None, "data"), 384, True),  # less than eight tables
        ({"data": 8}, P(None, "data"), 4096, False),  # more than the table
        ({"data": 4, "model": 2}, P("model", "data"), 32, True),
        # XLA sums the whole gradient of a table with columns on two axes.
        ({"data": 4, "model": 2}, P(None, ("data", "model")), 32, False),
    ],
)
def test_sync_each_sends_what_a_table_is_read_for_or_the_table(
    shape, spec, rows, is_looked_up
):
    """An embedding, each of whose columns lies on one device."""
    mesh, words, width = mesh_of(*shape.values(), names=tuple(shape)), 64, 32
    table = jax.random.normal(jax.random.key(0), (words, width))
    ids = jax.random.randint(jax.random.key(1), (rows,), 0, words)

    def loss(table, ids):
        return jnp.mean(jnp.sin(table[ids]) ** 2)

    expected = jax.value_and_grad(loss)(table, ids)
    axis = ga.DataAxis("data", mesh=mesh, param_specs=spec, sync="each")
    args = put((table, ids), mesh, (spec, P("data")))
    step = jax.jit(ga.value_and_grad(loss, 2, data_axis=axis)).lower(*args).compile()
    chex.assert_trees_all_close(step(*args), expected, rtol=1e-5, atol=1e-8)
    moved, k = sent(ga.audit(step, mesh).in_loop), 2
    found, whole = rows // k // 8 * width * 4, words * width * 4
    if len(shape) == 2:
        assert sum(moved.values()) < k * (whole // 4 if is_looked_up else whole)
    elif is_looked_up:  # what is found goes to its rows, and comes back
        assert moved["all-to-all"] == k * 2 * found < k * whole
        assert moved["all-reduce"] < k * 8
    else:  # the table is gathered, and its gradient reduced
        assert found > whole
        assert moved["all-gather"] == k * whole // 8
        assert sum(moved[kind] for kind in REDUCTIONS) >= k * whole


def _low(x):
    return x.astype(jnp.bfloat16)


def _thrice(step, start, xs=None):
    length = 3 if xs is None else None
    return jax.lax.scan(lambda h, x: (step(h, x), None), start, xs, length=length)[0]


def _twice(x, w):
    return x @ w @ w


READERS = {  # of a parameter, with the dtype of the parameter on the network
    "in a function": (lambda w, x: jax.jit(lambda w: x @ _low(w))(w), "bf16"),
    "again": (lambda w, x: jax.checkpoint(lambda w: x @ _low(w))(w), "bf16"),
    "twice": (lambda w, x: _twice(x, _low(w)), "bf16"),
    "by layer": (lambda w, x: _thrice(lambda h, w: h * _low(w)[None], x, w), "bf16"),
    # Several casts: their gradients are added up in float32.
    "by two casts": (lambda w, x: x @ _low(w) @ _low(w), "f32"),
    "in each layer": (lambda w, x: _thrice(lambda h, _: h @ _low(w), x), "f32"),
    "as it is, too": (lambda w, x: x @ _low(w) + _low(jnp.sum(w)), "f32"),
    "in 8 bits": (lambda w, x: x @ _low(w.astype(jnp.float8_e5m2)), "f32"),
}


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("make", [ga.value_and_grad, mean_of])
def test_parameters_that_are_only_cast_are_gathered_in_fewer_bits(reader, make):
    """With the values of the plain call, which gathers in float32."""
    use, dtype = READERS[reader]

    def loss(w, x):
        return jnp.mean(use(w, x.astype(jnp.bfloat16)).astype(jnp.float32) ** 2)

    mesh = mesh_of(4)
    axis = ga.DataAxis("data", mesh=mesh, param_specs=P(None, "data"))
    w, x = normal(8, 8) / 4, normal(64, 8, seed=1)
    args = put(w, mesh, P(None, "data")), put(x, mesh, P("data"))
    step, plain = (
        jax.jit(make(loss, 2, data_axis=axis, optimize=o)) for o in (True, False)
    )
    lines = step.lower(*args).as_text().splitlines()
    [line] = [line for line in lines if "stablehlo.all_gather" in line]
    assert f"8x8x{dtype}>" in line
    (value, grad), (expected, of_plain) = step(*args), plain(*args)
    chex.assert_trees_all_close(value, expected, rtol=1e-2)
    assert grad.dtype == w.dtype
    assert np.max(np.abs(grad - of_plain)) <= 2e-2 * np.max(np.abs(of_plain))


def test_aux_keys_and_the_carry_are_put_together_over_all_devices():
    """Micro-batches of two rows; those of a device come one after the other."""
    x = jnp.arange(32, dtype=jnp.float32)

    def loss(w, x, key, stats):
        new = {"mean": (stats["mean"] + jnp.mean(x)) / 2, "count": stats["count"] + 1}
        new["most"] = jnp.maximum(stats["most"], x[0].astype(jnp.int32))
        aux = dict.fromkeys(MODES, x[0]) | {"rows": x.size, "high": x[0] > 5}
        aux["peak"] = x[0] > 29
        keys = {"last": key, "stack": key, "drawn": jax.random.uniform(key)}
        return w * jnp.mean(x), (new, (aux, keys))

    modes = {mode: mode for mode in MODES} | {"rows": "sum", "high": "stack"}
    modes["peak"] = "max"
    keys = {"last": "last", "stack": "stack", "drawn": "stack"}
    options = {"has_aux": True, "rng_argnums": 2, "carry_argnums": 3}
    fun = mean_of(loss, 2, aux=(modes, keys), data_axis="data", **options)
    stats = {"mean": jnp.float32(0.0), "count": jnp.int32(0), "most": jnp.int32(0)}
    args = jnp.float32(2.0), x, jax.random.key(0), stats
    mesh = mesh_of(8)
    audit, ((value, (new, (aux, keys))), _) = compiled_and_run(fun, mesh, *args)
    assert not audit.in_loop
    assert (float(value), int(aux["rows"]), bool(aux["peak"])) == (31.0, 32, True)
    np.testing.assert_array_equal(aux["high"], np.arange(0, 32, 2) > 5)
    for mode, of_mode in MODES.items():
        np.testing.assert_array_equal(aux[mode], of_mode(x[::2], None))
    drawn = jax.vmap(jax.random.bits)(keys["stack"])
    assert len(set(np.asarray(keys["drawn"]).tolist())) == 16
    assert jax.random.bits(keys["last"]) == drawn[-1] != drawn[-2]
    # Averaged over devices once.
    devices = x.reshape(8, 2, 2).mean(-1)
    want = ((0 + devices[:, 0]) / 2 + devices[:, 1]) / 2
    np.testing.assert_allclose(new["mean"], want.mean(), rtol=1e-6)
    assert (int(new["count"]), int(new["most"])) == (2, 30)


def test_accumulate_stays_on_the_device_until_the_merge():
    add = ga.accumulate(token_loss, 2, weight_fn=count, data_axis="data")

    def window(params, batch):
        acc = ga.accumulator.init(params)
        for i in range(2):
            rows = slice(i * 4, (i + 1) * 4)
            _, acc = add(acc, params, jax.tree.map(lambda x, r=rows: x[r], batch))
        merged = ga.merge_across(acc, "data")
        return ga.accumulator.mean(merged), merged.count

    audit, (grads, number) = mapped_and_run(window, mesh_of(8), ROWS_APART)
    assert [c.num_bytes for c in audit.collectives] == [GRADIENT_BYTES + 4]
    assert not audit.in_loop
    assert int(number) == 4  # micro-steps, which all devices do at the same time
    assert_close(grads, whole_batch(token_loss)[1])


def test_at_top_level_calls_count_micro_steps_and_go_on_counting():
    axis = ga.DataAxis("data", mesh=mesh_of(8))
    add = jax.jit(ga.accumulate(lambda w, x: w * jnp.mean(x), 2, data_axis=axis))
    w, x = jnp.float32(2), jnp.arange(32.0)
    _, acc = add(ga.accumulator.init(w), w, x)
    _, acc = add(acc, w, x)
    assert (int(acc.count), float(acc.weight)) == (4, 4 * 8)
    assert float(ga.accumulator.mean(acc)) == 15.5


@pytest.mark.quick
def test_what_empty_accumulators_of_devices_hold_is_not_merged():
    def merged(x, count):
        acc = ga.accumulator.init(x[0])._replace(total=x[0], count=count)
        return ga.merge_across(acc, "data").total

    specs = {"in_specs": (P("data"), P()), "out_specs": P(), "check_vma": False}
    run = jax.jit(jax.shard_map(merged, mesh=mesh_of(2), **specs))
    assert not np.any(run(jnp.full((2, 3), jnp.nan), jnp.int32(0)))
    np.testing.assert_array_equal(run(jnp.ones((2, 3)), jnp.int32(1)), 2)  # the twin


def test_fun_may_use_the_axis_for_a_collective_of_its_own():
    """Such as batch statistics over all devices, with the gradient through them."""

    def loss(w, x, mean=lambda h: jax.lax.pmean(jnp.mean(h), "data")):
        h = x * w
        return jnp.mean((h - mean(h)) ** 2)

    args = jnp.float32(2.0), jnp.arange(16, dtype=jnp.float32) / 16
    fun = mean_of(loss, 1, data_axis=ga.DataAxis("data", mesh=mesh_of(8)))
    want = jax.value_and_grad(lambda w, x: loss(w, x, jnp.mean))(*args)
    assert_close(jax.jit(fun)(*args), want)


def inside(fun, in_specs=ROWS_APART, out_specs=WHOLE, axes=("data",), **options):
    """A call inside a shard_map."""
    mesh = mesh_of(2, 4, names=BOTH)
    mapped_and_run(fun, mesh, in_specs, out_specs, axis_names=set(axes), **options)


def gradient(name="data", loss=mean_loss, **options):
    return ga.value_and_grad(loss, 2, data_axis=ga.DataAxis(name, **options))


def summed_already(params, batch):
    """Without data_axis: JAX sums over the devices."""
    _, acc = ga.accumulate(mean_loss, 2)(ga.accumulator.init(params), params, batch)
    return ga.accumulator.mean(ga.merge_across(acc, "data"))


def added(params, batch):
    add = ga.accumulate(mean_loss, data_axis=ga.DataAxis("data", param_specs=SHARDED))
    return add(ga.accumulator.init(params), params, batch)[1].total


def reduced_already(params, batch):
    return jax.lax.pmean(mean_loss(params, batch), "data")


def outside():
    with jax.set_mesh(mesh_of(8)):
        ga.merge_across(ga.accumulator.init(make_params()), "data")


def reduced_at_top_level():
    axis = ga.DataAxis("data", mesh=mesh_of(8))
    mean_of(reduced_already, 2, data_axis=axis)(make_params(), make_batch())


def beside_an_explicit_axis():
    kinds = (AxisType.Auto, AxisType.Explicit)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds)
    fun = gradient(mesh=mesh, param_specs=SHARDED)
    jax.jit(fun)(make_params(), make_batch())


SHARDS = SHARDED, P("data")


WRONG = """
inside(gradient(loss=reduced_already)) -> V it is reduced already
reduced_at_top_level() -> V it is reduced already
inside(gradient(), (P(), P())) -> V must differ between the devices
inside(gradient(BOTH), axes=BOTH) -> V the same along ('replica',)
inside(gradient(), SHARDS, (P(), SHARDED)) -> V leaf ['in'] differs along
inside(gradient(BOTH)) -> V all bound or all unbound
inside(added, SHARDS, SHARDED) -> V gather the parameters once
inside(gradient(sync="each"), check_vma=False, axes=BOTH)
  -> V Pass DataAxis(param_specs=), or leave check_vma
inside(summed_already) -> V summed over them already
outside() -> V this call is outside
beside_an_explicit_axis() -> V leaf ['in'] is sharded | sync="each"
"""


@pytest.mark.parametrize(("code", "error", "said"), refusals(WRONG))
def test_what_would_be_wrong_in_quiet_is_refused(code, error, said):
    says(lambda: eval(code), error, said)


@pytest.mark.grid(2, 3)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("sync", ["last", "each"])
def test_shards_inside_a_shard_map_are_summed_over_their_copies_too(sync, check_vma):
    """Sharded over "data", copied over "replica" (HSDP); with "each" `fun` gathers."""

    def gathered(params, batch):
        whole = {
            name: jax.lax.all_gather(params[name], "data", axis=axis, tiled=True)
            for name, axis in (("in", 0), ("layers", 1))
        }
        return mean_loss(params | whole, batch)

    axis = ga.DataAxis(BOTH, param_specs=SHARDED, sync=sync)
    fun = ga.value_and_grad(
        mean_loss if sync == "last" else gathered, 2, data_axis=axis
    )
    specs = (SHARDED, P(BOTH)), (P(), SHARDED)
    mesh = mesh_of(2, 4, names=BOTH)
    audit, got = mapped_and_run(fun, mesh, *specs, check_vma=check_vma)
    scattered = [c for c in audit.collectives if c.kind == "reduce-scatter"]
    assert scattered
    assert all(bool(c.loops) == (sync == "each") for c in scattered)
    assert_close(got, whole_batch())
