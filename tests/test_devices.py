"""On many devices: one reduction a window, and the gradient of the whole batch."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import mean_of, nbytes
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._devices import collectives
from ga_optax.testing import assert_trees_bitwise_equal

WIDTH, LAYERS, ROWS = 16, 3, 64
GRADIENT_BYTES = 4 * (WIDTH * WIDTH * (1 + LAYERS) + WIDTH)
# The scalars that travel with the gradient: Σ w·loss and Σ w.
SCALARS = 4  # the loss
KINDS = [AxisType.Auto, AxisType.Explicit]
REDUCTIONS = ("all-reduce", "reduce-scatter")
RESHARDINGS = ("all-to-all", "collective-permute", "all-gather")

SHARDED = {"in": P("data"), "layers": P(None, "data"), "bias": P()}


def normal(seed, *shape, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def make_params(dtype=jnp.float32):
    return {
        "in": normal(0, WIDTH, WIDTH, dtype=dtype) / 4,
        "layers": normal(1, LAYERS, WIDTH, WIDTH, dtype=dtype) / 4,
        "bias": normal(2, WIDTH, dtype=dtype),
    }


def make_batch(dtype=jnp.float32, rows=ROWS):
    return {"x": normal(3, rows, WIDTH, dtype=dtype), "mask": make_mask(rows, dtype)}


def make_mask(rows, dtype):
    """1 to WIDTH of the tokens of a row count, fewer in the first rows."""
    lengths = 1 + np.arange(rows) * (WIDTH - 1) // (rows - 1)
    return jnp.asarray(np.arange(WIDTH) < lengths[:, None], dtype)


def _layer(h, w):
    return jnp.tanh(h @ w), None


def squares(params, batch):
    h = batch["x"] @ params["in"]
    h, _ = jax.lax.scan(jax.checkpoint(_layer), h, params["layers"])
    return jnp.square(h + jnp.broadcast_to(params["bias"], h.shape))


def mean_loss(params, batch):
    return jnp.mean(squares(params, batch))


def token_loss(params, batch):
    """The mean over the tokens that are not padding."""
    return jnp.sum(squares(params, batch) * batch["mask"]) / jnp.sum(batch["mask"])


def count(batch):
    return jnp.sum(batch["mask"])


def make_mesh(kind, shape=(8,), names=("data",)):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names))


def put(tree, mesh, specs):
    return jax.device_put(tree, shardings(mesh, specs))


def shardings(mesh, specs):
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda x: isinstance(x, P),
    )


def compiled_and_run(fun, mesh, *args):
    with jax.set_mesh(mesh):
        compiled = jax.jit(fun).lower(*args).compile()
        return ga.audit(compiled, mesh), compiled(*args)


def bound(dtype, rows=ROWS):
    """c·n·eps, for sums over the rows in another order; the terms are of order 1."""
    return 4 * rows * float(jnp.finfo(dtype).eps)


def assert_close(got, want, dtype=jnp.float32):
    got, want = jax.device_get((got, want))
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        scale = max(1.0, float(np.max(np.abs(b))))
        np.testing.assert_allclose(a, b, rtol=0, atol=bound(dtype) * scale)


def assert_not_close(got, want):
    with pytest.raises(AssertionError):
        assert_close(got, want)


def gradient_reductions(audit):
    """What could hold gradients: larger than the scalars."""
    return [
        c for c in audit.collectives if c.kind in REDUCTIONS and c.num_bytes > SCALARS
    ]


# -- Parameters on every device --------------------------------------------------------


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.parametrize("k", [1, 4, 16])
def test_one_all_reduce_for_any_number_of_micro_batches(kind, optimize, k):
    mesh = make_mesh(kind)
    params, batch = make_params(), make_batch(rows=128)
    fun = ga.value_and_grad(mean_loss, k, data_axis="data", optimize=optimize)
    audit, got = compiled_and_run(
        fun, mesh, put(params, mesh, P()), put(batch, mesh, P("data"))
    )
    [reduction] = audit.collectives  # nothing else, so no row of the batch moved
    assert (reduction.kind, reduction.loops, reduction.axes) == (
        "all-reduce",
        (),
        ("data",),
    )
    assert reduction.num_bytes == GRADIENT_BYTES + SCALARS
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))


@pytest.mark.quick
def test_a_scan_written_by_hand_reduces_in_every_micro_step():
    """The twin: the audit counts what a plain scan communicates."""
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()

    def by_hand(params, batch):
        batch = collectives.split_shards(batch["x"], 4, ("data",), mesh)

        def body(acc, x):
            grads = jax.grad(mean_loss)(params, {"x": x})
            return jax.tree.map(jnp.add, acc, grads), None

        acc, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), batch)
        return jax.tree.map(lambda t: t / jnp.float32(4), acc)

    audit, got = compiled_and_run(
        by_hand, mesh, put(params, mesh, P()), put(batch, mesh, P("data"))
    )
    assert sum(c.total_bytes for c in audit.in_loop) == 4 * GRADIENT_BYTES
    assert "in a loop" in str(audit)
    assert_close(got, jax.grad(mean_loss)(params, batch))


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("optimize", [True, False])
@pytest.mark.quick
def test_inside_a_shard_map_it_reduces_once(check_vma, optimize):
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    fun = ga.value_and_grad(mean_loss, 4, data_axis="data", optimize=optimize)
    mapped = jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    audit, got = compiled_and_run(mapped, mesh, params, batch)
    assert [c.num_bytes for c in audit.collectives] == [GRADIENT_BYTES + SCALARS]
    assert not audit.in_loop
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))


WAYS = {
    "last": {},
    "each": {"sync": "each"},
    "scattered": {"sync": "each", "grad_specs": SHARDED},
    "overlap": {"overlap": True},
    "logical": {"logical_devices": 8},
}


@pytest.mark.grid(2, 5)
@pytest.mark.parametrize("way", WAYS)
def test_a_mean_over_tokens_is_that_of_all_devices(way):
    """Counts differ between devices and micro-batches, and nobody passes weights."""
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    axis = ga.DataAxis("data", mesh=mesh, **WAYS[way])
    got = jax.jit(ga.value_and_grad(token_loss, 4, data_axis=axis))(params, batch)
    want = jax.value_and_grad(token_loss)(params, batch)
    assert_close(got, want)
    # The twin: each micro-batch by itself.
    assert_not_close(mean_of(token_loss, 4, data_axis=axis)(params, batch), want)


def spread_loss(params, batch):
    return jnp.std(squares(params, batch))


@pytest.mark.grid(2, 4)
@pytest.mark.parametrize("way", [way for way in WAYS if way != "last"])
def test_if_rows_meet_an_option_that_cannot_be_had_names_the_line(way):
    mesh = make_mesh(AxisType.Auto)
    args = make_params(), make_batch()
    axis = ga.DataAxis("data", mesh=mesh, **WAYS[way])
    with pytest.raises(ValueError, match=r"test_devices\.py"):
        jax.jit(ga.value_and_grad(spread_loss, 4, data_axis=axis))(*args)
    plain = ga.value_and_grad(spread_loss, 4, data_axis=ga.DataAxis("data", mesh=mesh))
    assert_close(jax.jit(plain)(*args), jax.value_and_grad(spread_loss)(*args))


def test_if_rows_meet_no_loop_communicates():
    """Each level crosses the devices once, after its loop."""

    def contrastive(params, batch):
        z = batch["x"] @ params["in"]
        z = z / jnp.linalg.norm(z, axis=1, keepdims=True)
        return jnp.mean(jax.nn.logsumexp(z @ z.T, 1) - jnp.diagonal(z @ z.T))

    mesh = make_mesh(AxisType.Auto)
    args = put(make_params(), mesh, P()), put(make_batch(), mesh, P("data"))
    fun = ga.value_and_grad(contrastive, 4, data_axis="data")
    audit, got = compiled_and_run(fun, mesh, *args)
    assert audit.collectives
    assert not audit.in_loop
    assert len(audit.collectives) <= 3  # there, back, and gradients
    assert_close(got, jax.value_and_grad(contrastive)(*args))


def test_the_mesh_may_be_an_argument():
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    got = jax.jit(
        ga.value_and_grad(mean_loss, 2, data_axis=ga.DataAxis("data", mesh=mesh))
    )(params, batch)
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind",
    [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.published)],
)
@pytest.mark.parametrize(
    "sync", ["last", pytest.param("each", marks=pytest.mark.published)]
)
def test_the_mesh_may_be_that_of_the_batch(kind, sync):
    mesh = make_mesh(kind)
    params, batch = make_params(), make_batch()
    fun = ga.value_and_grad(mean_loss, 2, data_axis=ga.DataAxis("data", sync=sync))
    placed = put(params, mesh, P()), put(batch, mesh, P("data"))
    want = jax.value_and_grad(mean_loss)(params, batch)
    assert_close(jax.jit(fun)(*placed), want)
    assert_close(fun(*placed), want)


@pytest.mark.grid(2)
@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_the_batch_may_be_split_over_two_axes(first, second):
    if first == AxisType.Auto != second:  # JAX puts the explicit axis of a spec first
        pytest.skip("shard_map itself moves the rows")
    mesh = jax.make_mesh((2, 4), ("replica", "data"), axis_types=(first, second))
    params, batch = make_params(), make_batch()
    axes = ("replica", "data")
    fun = ga.value_and_grad(
        mean_loss, 2, data_axis=ga.DataAxis(axes, param_specs=SHARDED)
    )
    audit, got = compiled_and_run(
        fun, mesh, put(params, mesh, SHARDED), put(batch, mesh, P(axes))
    )
    assert not audit.in_loop
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))
    assert got[1]["layers"].sharding.spec[1] == "data"


# -- Without a data axis ---------------------------------------------------------------

MANY = 4096


def neighbours(params, batch):
    """The twin: a scan by hand over micro-batches of neighbouring rows."""
    parts = jax.tree.map(lambda x: x.reshape(8, -1, *x.shape[1:]), batch)

    def body(acc, part):
        return jax.tree.map(jnp.add, acc, jax.grad(mean_loss)(params, part)), None

    acc, _ = jax.lax.scan(body, jax.tree.map(jnp.zeros_like, params), parts)
    return jax.tree.map(lambda t: t / jnp.float32(8), acc)


def rows_that_move(compiled):
    """Larger than what JAX gathers of a gradient; a device's micro-batch is larger."""
    found = (c for c in ga.audit(compiled).collectives if c.kind in RESHARDINGS)
    return [c for c in found if c.num_bytes > GRADIENT_BYTES]


@pytest.mark.exhaustive
def test_no_row_moves_and_the_memory_is_that_of_the_peers():
    """Temporaries and arithmetic are a device's; a gather would multiply both."""
    mesh = make_mesh(AxisType.Auto)
    params = put(make_params(), mesh, P())
    batch = put(make_batch(rows=MANY), mesh, P("data"))
    peer = optax.microbatching.microbatch(
        jax.value_and_grad(mean_loss),
        argnums=1,
        microbatch_size=MANY // 8,
        accumulator=optax.microbatching.AccumulationType.MEAN,
    )
    funs = {
        "ours": ga.value_and_grad(mean_loss, 8),
        "data_axis": ga.value_and_grad(mean_loss, 8, data_axis="data"),
        "optax": peer,
        "undivided": jax.value_and_grad(mean_loss),
        "twin": neighbours,
    }
    programs = {
        name: jax.jit(f).lower(params, batch).compile() for name, f in funs.items()
    }
    temps = {x: p.memory_analysis().temp_size_in_bytes for x, p in programs.items()}
    flops = {x: p.cost_analysis()["flops"] for x, p in programs.items()}
    # A transposed copy of the device's rows, and a gradient to reduce.
    more = nbytes(batch) // 8 + GRADIENT_BYTES
    assert temps["ours"] <= min(temps["data_axis"] + more, 1.05 * temps["optax"])
    assert temps["ours"] < temps["undivided"] < temps["twin"]
    assert flops["ours"] < 1.1 * flops["data_axis"] < flops["twin"] / 4
    assert not rows_that_move(programs["ours"])
    assert rows_that_move(programs["twin"])
    got = programs["ours"](params, batch)
    assert_close(
        got, jax.value_and_grad(mean_loss)(make_params(), make_batch(rows=MANY))
    )


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
@pytest.mark.grid(2)
@pytest.mark.parametrize(
    "way", ["arrays", "explicit", "constraint", "shapes", "jit", "with"]
)
def test_no_row_moves_however_the_mesh_is_known(way):
    names, axes = ("replica", "data", "model"), ("replica", "data")
    kind = AxisType.Explicit if way == "explicit" else AxisType.Auto
    mesh = make_mesh(kind, (2, 2, 2), names)
    place = NamedSharding(mesh, P(axes))
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
    if way == "with":
        params = jax.eval_shape(make_params)
    with mesh if way == "with" else contextlib.nullcontext():
        moved = rows_that_move(jax.jit(fun, **options).lower(params, batch).compile())
    # In its backward pass JAX gathers what was broadcast along explicit axes.
    assert [c for c in moved if way != "explicit" or not c.loops] == []


@pytest.mark.grid(1)
@pytest.mark.parametrize("jit", [jax.jit, lambda fun: fun])
@pytest.mark.parametrize("kind", KINDS)
def test_micro_batches_are_strided_on_several_devices_alone(kind, jit):
    rows = jnp.arange(32, dtype=jnp.float32)

    def members(x):
        def loss(w, x):
            return w * jnp.mean(x), x

        fun = mean_of(loss, 4, has_aux=True, aux="stack")
        return np.asarray(jit(fun)(jnp.float32(1.0), x)[0][1])

    eight = put(rows, make_mesh(kind), P("data"))
    np.testing.assert_array_equal(members(eight), rows.reshape(8, 4).T)
    one = jax.make_mesh((1,), ("data",), axis_types=(kind,), devices=jax.devices()[:1])
    alone = members(put(rows, one, P("data")))
    explicit = kind == AxisType.Explicit  # the number of devices does not matter there
    assert np.array_equal(alone, members(eight)) == explicit
    np.testing.assert_array_equal(members(rows), rows.reshape(4, 8))


def test_inside_a_shard_map_rows_are_neighbours():
    """There one device holds them, whatever lies around."""
    mesh = make_mesh(AxisType.Auto)

    def loss(w, x):
        return w * jnp.mean(x), x

    fun = mean_of(loss, 2, has_aux=True, aux="stack")
    mapped = jax.shard_map(
        lambda x: fun(jnp.float32(1.0), x)[0][1],
        mesh=mesh,
        in_specs=P("data"),
        out_specs=P("data"),
    )
    rows = jnp.arange(32, dtype=jnp.float32)
    np.testing.assert_array_equal(jax.jit(mapped)(rows), rows.reshape(16, 2))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "kind",
    [AxisType.Auto, pytest.param(AxisType.Explicit, marks=pytest.mark.published)],
)
def test_weights_carry_keys_and_aux_without_a_data_axis(kind):
    mesh = make_mesh(kind)
    params, batch = make_params(), make_batch()

    def loss(params, batch, key, steps):
        aux = {"key": jax.random.uniform(key), "row": batch["x"][:, 0]}
        return token_loss(params, batch), (steps + 1, aux)

    fun = mean_of(
        loss,
        4,
        rng_argnums=2,
        carry_argnums=3,
        has_aux=True,
        weight_fn=lambda batch, aux: count(batch),
        aux="stack",
    )
    args = put(params, mesh, P()), put(batch, mesh, P("data"))
    (value, (steps, aux)), grads = jax.jit(fun)(*args, jax.random.key(0), jnp.int32(0))
    assert int(steps) == 4
    assert len(set(np.asarray(aux["key"]).tolist())) == 4
    assert_close(jax.device_get(aux["row"]).T.ravel(), batch["x"][:, 0])
    want = jax.value_and_grad(token_loss)(params, batch)
    assert_close((value, grads), want)
    acc = ga.accumulator.init(args[0])
    _, acc = jax.jit(ga.accumulate(token_loss, 4, weight_fn=count))(acc, *args)
    assert_close(ga.accumulator.mean(acc), want[1])
    unequal = jax.jit(mean_of(token_loss, 4))(*args)
    assert_not_close(unequal, want)


def test_explicit_axes_say_which_numbers_of_micro_batches_fit():
    mesh = make_mesh(AxisType.Explicit)
    batch = put(make_batch(), mesh, P("data"))
    with pytest.raises(
        ValueError, match=r"of each of the 8 devices, 8 examples.* 2, 4"
    ):
        jax.jit(ga.value_and_grad(mean_loss, 16))(make_params(), batch)


# -- Other axes ------------------------------------------------------------------------


@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", [True, False])
def test_a_model_axis_stays_with_the_compiler(optimize):
    mesh = make_mesh(AxisType.Auto, (4, 2), ("data", "model"))
    params, batch = make_params(), make_batch()
    specs = {"in": P(None, "model"), "layers": P(None, "model"), "bias": P()}
    fun = ga.value_and_grad(mean_loss, 4, data_axis="data", optimize=optimize)
    audit, got = compiled_and_run(
        fun, mesh, put(params, mesh, specs), put(batch, mesh, P("data"))
    )
    over_data = [c for c in audit.collectives if "data" in c.axes]
    # Each device holds half of the matrices; one all-reduce, of its half.
    assert all(not c.loops and c.kind == "all-reduce" for c in over_data)
    half = GRADIENT_BYTES // 2
    assert half < sum(c.num_bytes for c in over_data) <= half + 4 * WIDTH // 2 + SCALARS
    assert any(c.axes == ("model",) for c in audit.in_loop)  # the model's own
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))


def test_a_model_axis_may_be_explicit():
    mesh = make_mesh(AxisType.Explicit, (4, 2), ("data", "model"))
    params, batch = make_params(), make_batch()

    def loss(params, batch):
        h = jnp.matmul(batch["x"], params["in"])  # [rows, width@model]
        h = jnp.matmul(h, params["out"], out_sharding=P())
        return jnp.mean(jnp.square(h))

    params = {"in": params["in"], "out": params["layers"][0]}
    placed = put(params, mesh, {"in": P(None, "model"), "out": P("model", None)})
    want = jax.value_and_grad(
        lambda p, b: jnp.mean(jnp.square(b["x"] @ p["in"] @ p["out"]))
    )(params, batch)
    fun = ga.value_and_grad(loss, 4, data_axis="data")
    audit, got = compiled_and_run(fun, mesh, placed, put(batch, mesh, P("data")))
    assert [c for c in audit.in_loop if "data" in c.axes] == []
    assert_close(got, want)


# -- Sharded parameters ----------------------------------------------------------------


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 4, 16])
def test_sharded_parameters_cost_one_gather_and_one_reduce_scatter(kind, k):
    mesh = make_mesh(kind)
    params, batch = make_params(), make_batch(rows=128)
    specs = SHARDED if kind == AxisType.Auto else None  # explicit types say it
    fun = ga.value_and_grad(
        mean_loss, k, data_axis=ga.DataAxis("data", param_specs=specs)
    )
    audit, got = compiled_and_run(
        fun, mesh, put(params, mesh, SHARDED), put(batch, mesh, P("data"))
    )
    assert not audit.in_loop
    matrices = GRADIENT_BYTES - 4 * WIDTH
    by_kind = {
        kind: sum(c.total_bytes for c in audit.collectives if c.kind == kind)
        for kind in ("all-gather", "reduce-scatter", "all-reduce")
    }
    assert by_kind == {
        "all-gather": matrices // 8,
        "reduce-scatter": matrices,
        "all-reduce": 4 * WIDTH + SCALARS,
    }
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))
    assert (
        got[1]["layers"].sharding.shard_shape((LAYERS, WIDTH, WIDTH))[1] == WIDTH // 8
    )


@pytest.mark.grid(1)
@pytest.mark.parametrize("kind", KINDS)
def test_sync_each_reduces_in_every_micro_step(kind):
    mesh = make_mesh(kind)
    params, batch = make_params(), make_batch()
    specs = SHARDED if kind == AxisType.Auto else None
    axis = ga.DataAxis("data", param_specs=specs, sync="each")
    fun = ga.value_and_grad(mean_loss, 4, data_axis=axis)
    audit, got = compiled_and_run(
        fun, mesh, put(params, mesh, SHARDED), put(batch, mesh, P("data"))
    )
    matrices = GRADIENT_BYTES - 4 * WIDTH
    reduced = [c for c in audit.in_loop if c.kind in REDUCTIONS]
    assert 4 * matrices <= sum(c.total_bytes for c in reduced) <= 5 * matrices
    gathered = [c for c in audit.in_loop if c.kind == "all-gather"]
    # Every micro-step gathers each layer, and once more for its backward pass.
    assert sum(c.total_bytes for c in gathered) <= 2 * 4 * matrices // 8
    assert not any(c.kind in ("all-to-all", "collective-permute") for c in gathered)
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))


@pytest.mark.exhaustive
def test_memory_with_sync_each_falls_with_the_number_of_devices():
    """The docstring's table: (P + G) / n, where "last" holds P + G on every device."""
    width, layers, k = 256, 8, 4

    def loss(params, x):
        h, _ = jax.lax.scan(jax.checkpoint(_layer), x, params)
        return jnp.mean(jnp.square(h))

    size = 4 * layers * width * width
    need = {}
    for devices in (2, 8):
        mesh = jax.make_mesh(
            (devices,),
            ("data",),
            axis_types=(AxisType.Auto,),
            devices=jax.devices()[:devices],
        )
        spec = P(None, "data")
        params = put(normal(0, layers, width, width) / 16, mesh, spec)
        x = put(normal(1, 4 * k * devices, width), mesh, P("data"))
        for sync in ("last", "each"):
            fun = ga.value_and_grad(
                loss,
                k,
                data_axis=ga.DataAxis("data", mesh=mesh, param_specs=spec, sync=sync),
            )
            memory = jax.jit(fun).lower(params, x).compile().memory_analysis()
            need[devices, sync] = (
                memory.temp_size_in_bytes
                + memory.argument_size_in_bytes
                + memory.output_size_in_bytes
                - memory.alias_size_in_bytes
            )
    layer = size // layers
    for devices in (2, 8):
        assert need[devices, "last"] > 2 * size
        # Parameters, accumulator and result are shards; a few layers are whole.
        assert need[devices, "each"] < 4 * size / devices + 6 * layer
    assert need[8, "each"] < need[2, "each"] / 2


def test_inside_a_shard_map_param_specs_gather_and_scatter_once():
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    fun = ga.value_and_grad(
        mean_loss, 4, data_axis=ga.DataAxis("data", param_specs=SHARDED)
    )
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(SHARDED, P("data")), out_specs=(P(), SHARDED)
    )
    audit, got = compiled_and_run(mapped, mesh, params, batch)
    assert not audit.in_loop
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))


def test_inside_a_shard_map_fun_may_gather_in_every_micro_step():
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()

    def layer(h, w):
        return _layer(h, jax.lax.all_gather(w, "data", axis=0, tiled=True))

    def gathered(params, batch):
        whole = jax.lax.all_gather(params["in"], "data", axis=0, tiled=True)
        h = batch["x"] @ whole
        h, _ = jax.lax.scan(jax.checkpoint(layer), h, params["layers"])
        return jnp.mean(jnp.square(h + jnp.broadcast_to(params["bias"], h.shape)))

    axis = ga.DataAxis("data", sync="each")
    fun = ga.value_and_grad(gathered, 4, data_axis=axis)
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(SHARDED, P("data")), out_specs=(P(), SHARDED)
    )
    audit, got = compiled_and_run(mapped, mesh, params, batch)
    scattered = [c for c in audit.collectives if c.kind == "reduce-scatter"]
    assert all(c.loops for c in scattered)
    matrices = GRADIENT_BYTES - 4 * WIDTH
    assert sum(c.total_bytes for c in scattered) == 4 * matrices
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))


# -- Numbers ---------------------------------------------------------------------------


def weighted(fun, k, **options):
    return mean_of(fun, k, weight_fn=count, **options)


@pytest.mark.grid(2)
@pytest.mark.parametrize("make", [ga.value_and_grad, weighted])
@pytest.mark.parametrize("sync", ["last", "each"])
@pytest.mark.parametrize("k", [1, 4])
def test_in_float64_it_is_the_gradient_of_the_whole_batch(sync, k, make):
    with jax.enable_x64(True):
        mesh = make_mesh(AxisType.Auto)
        params, batch = make_params(jnp.float64), make_batch(jnp.float64)
        want = jax.value_and_grad(token_loss)(params, batch)
        fun = make(token_loss, k, data_axis=ga.DataAxis("data", sync=sync))
        _, got = compiled_and_run(
            fun, mesh, put(params, mesh, P()), put(batch, mesh, P("data"))
        )
        for a, b in zip(
            *map(jax.tree.leaves, jax.device_get((got, want))), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)


def test_without_weights_the_mean_of_means_is_another_gradient():
    """The twin: counts differ between devices, and that must be seen."""
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    want = jax.value_and_grad(token_loss)(params, batch)
    fun = mean_of(token_loss, 4, data_axis=ga.DataAxis("data", mesh=mesh))
    assert_not_close(jax.jit(fun)(params, batch), want)


def test_integers_have_the_bits_of_the_whole_batch():
    mesh = make_mesh(AxisType.Auto)
    x = jnp.asarray(np.random.default_rng(0).integers(-8, 8, (ROWS, 4)), jnp.float32)

    def loss(w, x):  # the mean over a power of two: exact
        return jnp.mean(x @ w)

    w = jnp.arange(4, dtype=jnp.float32)
    fun = ga.value_and_grad(loss, 4, data_axis=ga.DataAxis("data", mesh=mesh))
    got, want = jax.jit(fun)(w, x), jax.value_and_grad(loss)(w, x)
    assert_trees_bitwise_equal(jax.device_get(got), jax.device_get(want))


def test_the_bits_repeat():
    mesh = make_mesh(AxisType.Auto)
    fun = jax.jit(
        ga.value_and_grad(mean_loss, 4, data_axis=ga.DataAxis("data", mesh=mesh))
    )
    first, second = (jax.device_get(fun(make_params(), make_batch())) for _ in range(2))
    assert_trees_bitwise_equal(first, second)


@pytest.mark.grid(1)
@pytest.mark.parametrize("optimize", [True, False])
def test_a_device_of_weight_zero_adds_nothing_not_even_nan(optimize):
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    rows = ROWS // 8
    poisoned = {
        "x": batch["x"].at[:rows].set(jnp.nan),
        "mask": batch["mask"].at[:rows].set(0.0),
    }
    axis = ga.DataAxis("data", mesh=mesh)
    fun = weighted(token_loss, 4, data_axis=axis, optimize=optimize)
    rest = jax.tree.map(lambda x: x[rows:], poisoned)
    assert_close(
        jax.jit(fun)(params, poisoned), jax.value_and_grad(token_loss)(params, rest)
    )


# -- Aux, carry, keys ------------------------------------------------------------------


def test_aux_is_put_together_over_all_devices():
    mesh = make_mesh(AxisType.Auto)
    x = jnp.arange(32, dtype=jnp.float32)

    def loss(w, x):
        aux = {"mean": jnp.mean(x), "sum": x.size, "last": x[0], "stack": x[0] > 5}
        return w * jnp.mean(x), aux

    modes = {name: name for name in ("mean", "sum", "last", "stack")}
    fun = mean_of(
        loss, 2, has_aux=True, aux=modes, data_axis=ga.DataAxis("data", mesh=mesh)
    )
    (value, aux), _ = jax.jit(fun)(jnp.float32(2.0), x)
    assert float(value) == 31.0
    assert float(aux["mean"]) == 15.5
    assert int(aux["sum"]) == 32
    assert float(aux["last"]) == 30.0  # micro-batches of two rows; the last begins so
    np.testing.assert_array_equal(aux["stack"], np.arange(0, 32, 2) > 5)


@pytest.mark.grid(1)
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_the_last_key_is_that_of_the_last_device(make):
    mesh = make_mesh(AxisType.Auto)

    def loss(w, x, key):
        return w * jnp.mean(x), {"last": key, "all": key}

    fun = mean_of(
        loss,
        2,
        has_aux=True,
        aux={"last": "last", "all": "stack"},
        rng_argnums=2,
        data_axis=ga.DataAxis("data", mesh=mesh),
    )
    (_, keys), _ = jax.jit(fun)(jnp.float32(1.0), jnp.ones(16), make(0))
    drawn = {
        name: jax.device_get(
            jax.vmap(jax.random.bits)(key) if name == "all" else jax.random.bits(key)
        )
        for name, key in keys.items()
    }
    assert drawn["last"] == drawn["all"][-1] != drawn["all"][-2]


def test_a_tree_of_aux_may_be_stacked_as_a_whole():
    mesh = make_mesh(AxisType.Auto)

    def loss(w, x):
        return w * jnp.mean(x), {"a": jnp.max(x), "b": (x, jnp.int32(1))}

    fun = mean_of(
        loss, 2, has_aux=True, aux="stack", data_axis=ga.DataAxis("data", mesh=mesh)
    )
    (_, aux), _ = jax.jit(fun)(jnp.float32(2.0), jnp.arange(32, dtype=jnp.float32))
    assert aux["a"].shape == (16,)
    assert aux["b"][0].shape == (16, 2)
    np.testing.assert_array_equal(aux["b"][0].ravel(), np.arange(32))


def test_the_carry_is_averaged_over_devices_once():
    mesh = make_mesh(AxisType.Auto)
    x = jnp.arange(32, dtype=jnp.float32)

    def loss(w, x, stats):
        new = {"mean": (stats["mean"] + jnp.mean(x)) / 2, "count": stats["count"] + 1}
        return w * jnp.mean(x), (new, ())

    fun = mean_of(loss, 2, has_aux=True, carry_argnums=2, data_axis="data")
    stats = {"mean": jnp.float32(0.0), "count": jnp.int32(0)}
    audit, got = compiled_and_run(fun, mesh, jnp.float32(1.0), x, stats)
    (_, (new, _)), _ = got
    assert not audit.in_loop
    assert int(new["count"]) == 2
    devices = x.reshape(8, 2, 2).mean(-1)
    want = ((0 + devices[:, 0]) / 2 + devices[:, 1]) / 2
    np.testing.assert_allclose(new["mean"], want.mean(), rtol=1e-6)


def test_devices_and_micro_batches_draw_different_keys_reproducibly():
    mesh = make_mesh(AxisType.Auto)

    def loss(w, x, key):
        return w * jnp.mean(x), jax.random.uniform(key)

    fun = mean_of(
        loss,
        2,
        has_aux=True,
        aux="stack",
        rng_argnums=2,
        data_axis=ga.DataAxis("data", mesh=mesh),
    )
    args = jnp.float32(1.0), jnp.ones(16), jax.random.key(0)
    (_, first), _ = jax.jit(fun)(*args)
    (_, second), _ = jax.jit(fun)(*args)
    assert len(set(np.asarray(first).tolist())) == 16
    np.testing.assert_array_equal(first, second)


# -- accumulate ------------------------------------------------------------------------


def test_accumulate_stays_on_the_device_until_the_merge():
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    add = ga.accumulate(token_loss, 2, weight_fn=count, data_axis="data")

    def window(params, batch):
        acc = ga.accumulator.init(params)
        for i in range(2):
            rows = slice(i * 4, (i + 1) * 4)
            _, acc = add(acc, params, jax.tree.map(lambda x, r=rows: x[r], batch))
        merged = ga.merge_across(acc, "data")
        return ga.accumulator.mean(merged), merged.count

    mapped = jax.shard_map(window, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    audit, (grads, number) = compiled_and_run(mapped, mesh, params, batch)
    assert [c.num_bytes for c in audit.collectives] == [GRADIENT_BYTES + 4]
    assert not audit.in_loop
    assert int(number) == 4  # micro-steps, which all devices do at the same time
    assert_close(grads, jax.grad(token_loss)(params, batch))


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("sync", ["last", "each"])
def test_accumulate_at_top_level_merges_once_a_call(sharded, sync):
    mesh = make_mesh(AxisType.Auto)
    specs = SHARDED if sharded else P()
    params, batch = make_params(), make_batch()
    step = jax.jit(
        ga.accumulate(
            token_loss,
            2,
            weight_fn=count,
            data_axis=ga.DataAxis(
                "data", mesh=mesh, param_specs=SHARDED if sharded else None, sync=sync
            ),
        ),
        donate_argnums=0,
    )
    placed = put(params, mesh, specs)
    acc = ga.accumulator.init(placed)
    for i in range(2):
        half = jax.tree.map(lambda x, i=i: x[i * 32 : (i + 1) * 32], batch)
        half = put(half, mesh, P("data"))
        audit = ga.audit(step.lower(acc, placed, half).compile(), mesh)
        if sync == "last":
            assert not audit.in_loop
        _, acc = step(acc, placed, half)
    assert int(acc.count) == 4
    assert_close(ga.accumulator.mean(acc), jax.grad(token_loss)(params, batch))
    if sharded:
        shape = acc.total["layers"].sharding.shard_shape((LAYERS, WIDTH, WIDTH))
        assert shape == (LAYERS, WIDTH // 8, WIDTH)


def test_what_an_empty_accumulator_holds_does_not_matter_across_devices():
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    add = ga.accumulate(mean_loss, 2, data_axis=ga.DataAxis("data", mesh=mesh))
    empty = ga.accumulator.init(params)
    stale = empty._replace(total=jax.tree.map(lambda x: x + jnp.nan, empty.total))
    _, acc = jax.jit(add)(stale, params, batch)
    assert_close(ga.accumulator.mean(acc), jax.grad(mean_loss)(params, batch))


# -- Composition -----------------------------------------------------------------------


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    "optimize", [True, pytest.param(False, marks=pytest.mark.published)]
)
def test_it_can_be_differentiated_and_batched(optimize):
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    fun = ga.value_and_grad(
        mean_loss, 2, data_axis=ga.DataAxis("data", mesh=mesh), optimize=optimize
    )

    def norm(one):
        def of(params, batch):
            value, grads = one(params, batch)
            return value + sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))

        return of

    want = jax.grad(norm(jax.value_and_grad(mean_loss)))(params, batch)
    assert_close(jax.jit(jax.grad(norm(fun)))(params, batch), want)

    pair = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), params)
    value, grads = jax.jit(jax.vmap(fun, in_axes=(0, None)))(pair, batch)
    for i in range(2):
        one = jax.tree.map(lambda p, i=i: p[i], (params, pair))[1]
        want = jax.value_and_grad(mean_loss)(one, batch)
        assert_close((value[i], jax.tree.map(lambda g, i=i: g[i], grads)), want)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("optax_promotion")
def test_a_whole_training_step_scans_over_windows():
    mesh = make_mesh(AxisType.Auto)
    params, batch = make_params(), make_batch()
    tx = optax.adam(1e-2)
    fun = ga.value_and_grad(mean_loss, 2, data_axis=ga.DataAxis("data", mesh=mesh))

    def train(grad, params):
        def step(carry, _):
            params, state = carry
            value, grads = grad(params, batch)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), value

        return jax.lax.scan(step, (params, tx.init(params)), length=3)[1]

    got = jax.jit(lambda p: train(fun, p))(params)
    want = train(jax.value_and_grad(mean_loss), params)
    assert_close(got, want)


def test_other_arguments_pass_through_traced_or_not():
    mesh = make_mesh(AxisType.Auto)

    def loss(w, x, scale, *, power, shift):
        assert isinstance(power, int)
        return jnp.mean((x * w * scale + shift) ** power)

    fun = ga.value_and_grad(loss, 2, data_axis=ga.DataAxis("data", mesh=mesh))
    args = jnp.float32(2.0), jnp.arange(16, dtype=jnp.float32), jnp.float32(3.0)
    want = jax.value_and_grad(loss)(*args, power=2, shift=jnp.float32(1.0))
    got = jax.jit(lambda *a: fun(*a, power=2, shift=jnp.float32(1.0)))(*args)
    assert_close(got, want)


def test_fun_may_use_the_axis_for_a_collective_of_its_own():
    """Such as batch statistics over all devices, with the gradient through them."""
    mesh = make_mesh(AxisType.Auto)

    def loss(w, x, axis=None):
        h = x * w
        mean = jnp.mean(h)
        if axis:
            mean = jax.lax.pmean(mean, axis)
        return jnp.mean((h - mean) ** 2)

    x = jnp.arange(16, dtype=jnp.float32) / 16
    fun = mean_of(
        lambda w, x: loss(w, x, "data"), 1, data_axis=ga.DataAxis("data", mesh=mesh)
    )
    got = jax.jit(fun)(jnp.float32(2.0), x)
    assert_close(got, jax.value_and_grad(loss)(jnp.float32(2.0), x))


# -- Errors ----------------------------------------------------------------------------


def call(params, batch, k=4, mesh=None, **options):
    axis = ga.DataAxis(**({"name": "data", "mesh": mesh} | options))
    return ga.value_and_grad(mean_loss, k, data_axis=axis)(params, batch)


@pytest.mark.parametrize(
    ("options", "rows", "message"),
    [
        ({"name": "rows"}, 64, "must be an axis of the mesh.*'data'.*splits"),
        ({"name": 3}, 64, "must be the name of a mesh axis.*it is 3"),
        ({"name": ("data", "data")}, 64, "different names"),
        ({}, 60, r"8 devices .*must divide.*\(60, 16\).*56 or 64"),
        ({"k": 3}, 64, r"num_microbatches=3 must divide .* 8 examples.*1, 2, 4 or 8"),
        ({"sync": "never"}, 64, 'sync must be "last" or "each"'),
        ({"param_specs": {"in": "data"}}, 64, "PartitionSpec"),
        ({"param_specs": {"in": P()}}, 64, "prefix of the parameters' tree"),
        ({"param_specs": P(None, None, None, "data")}, 64, "must fit the parameters"),
        ({"param_specs": P("data")}, 64, r"leaf \['layers'\].*\(3, 16, 16\)"),
    ],
)
def test_a_bad_argument_says_what_to_do(options, rows, message):
    mesh = make_mesh(AxisType.Auto)
    with pytest.raises((TypeError, ValueError), match=f"(?s){message}"):
        call(make_params(), make_batch(rows=rows), mesh=mesh, **options)


@pytest.mark.filterwarnings("ignore:.with mesh:DeprecationWarning")
def test_a_with_block_names_the_mesh_too():
    mesh = make_mesh(AxisType.Auto)
    fun = jax.jit(ga.value_and_grad(mean_loss, 2, data_axis="data"))
    params, batch = make_params(), make_batch()
    with mesh:
        program = fun.lower(params, batch).compile()
    assert len(gradient_reductions(ga.audit(program))) == 1
    with pytest.raises(ValueError, match="there is none"):  # the twin: after the block
        ga.value_and_grad(mean_loss, 2, data_axis="data")(params, batch)


def test_a_data_axis_needs_a_mesh():
    with pytest.raises(ValueError, match=r"there is none\. Call inside jax\.set_mesh"):
        call(make_params(), make_batch())


def test_a_jax_that_is_too_old_says_so(monkeypatch):
    monkeypatch.delattr(jax.lax, "pcast")
    with pytest.raises(ValueError, match=r"data_axis needs jax >= 0\.9"):
        ga.value_and_grad(mean_loss, 2, data_axis="data")


def test_a_data_axis_has_a_name():
    with pytest.raises(TypeError, match=r"must name a mesh axis.*data_axis=None"):
        ga.DataAxis(None, sync="each")


def test_a_data_axis_checks_itself_before_anything_is_traced():
    for bad in ({"sync": "never"}, {"name": ("data", "data")}, {"name": 3}):
        with pytest.raises((TypeError, ValueError), match="must be"):
            ga.DataAxis(**({"name": "data"} | bad))
    assert ga.DataAxis("data").axes == ("data",)


@pytest.mark.parametrize("inside", [False, True])
def test_a_loss_that_is_reduced_already_is_found(inside):
    make = ga.value_and_grad if inside else mean_of
    mesh = make_mesh(AxisType.Auto)

    def loss(params, batch):
        return jax.lax.pmean(mean_loss(params, batch), "data")

    fun = make(loss, 2, data_axis=ga.DataAxis("data", mesh=mesh))
    if inside:
        fun = jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match="it is reduced already"):
        fun(make_params(), make_batch())


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_shards_over_the_data_axis_says_what_to_do(kind):
    mesh = make_mesh(kind, (4, 2), ("data", "model"))
    params, batch = make_params(), make_batch()
    placed = put(params, mesh, P()), put(batch, mesh, P("data"))
    auto = kind == AxisType.Auto
    shard = jax.lax.with_sharding_constraint if auto else jax.reshard

    def step(spec, **options):
        def loss(params, batch):
            return mean_loss(params, {"x": shard(batch["x"], spec)})

        return jax.jit(ga.value_and_grad(loss, 4, **options))

    both, model = P("data", "model"), P(None, "model")
    whole_mesh = [NamedSharding(mesh, both), NamedSharding(mesh, model)] if auto else []
    want = jax.value_and_grad(mean_loss)(params, batch)
    with jax.set_mesh(mesh):
        with pytest.raises(ValueError, match=r"must not shard.* 'data'.*JAX says"):
            step(both, data_axis="data")(*placed)
        for spec in (model, *whole_mesh):
            assert_close(step(spec, data_axis="data")(*placed), want)
        assert_close(step(both)(*placed), want)
        each = ga.DataAxis("data", sync="each")
        assert_close(step(both, data_axis=each)(*placed), want)


def test_a_batch_that_all_devices_share_is_found():
    mesh = make_mesh(AxisType.Auto)
    fun = ga.value_and_grad(mean_loss, 2, data_axis="data")
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=(P(), P()), out_specs=P())
    with pytest.raises(ValueError, match="must differ between the devices"):
        jax.jit(mapped)(make_params(), make_batch())


def test_parameters_that_differ_between_devices_need_specs():
    mesh = make_mesh(AxisType.Auto)
    fun = ga.value_and_grad(mean_loss, 2, data_axis="data")
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(SHARDED, P("data")), out_specs=(P(), SHARDED)
    )
    with pytest.raises(ValueError, match=r"leaf \[0\]\['in'\] differs along"):
        jax.jit(mapped)(make_params(), make_batch())


def test_some_axes_bound_and_some_not_is_an_error():
    mesh = make_mesh(AxisType.Auto, (2, 4), ("replica", "data"))
    fun = ga.value_and_grad(mean_loss, 2, data_axis=("replica", "data"))
    mapped = jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=(P(), P("data")),
        out_specs=P(),
        axis_names={"data"},
    )
    with pytest.raises(ValueError, match="all bound or all unbound"):
        jax.jit(mapped)(make_params(), make_batch())


def test_merge_across_needs_the_axis_to_be_bound():
    acc = ga.accumulator.init(make_params())
    mesh = make_mesh(AxisType.Auto)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="this is outside"):
        ga.merge_across(acc, "data")


def test_accumulate_inside_a_shard_map_takes_whole_parameters():
    mesh = make_mesh(AxisType.Auto)
    add = ga.accumulate(mean_loss, data_axis=ga.DataAxis("data", param_specs=SHARDED))

    def window(params, batch):
        return add(ga.accumulator.init(params), params, batch)[1].total

    mapped = jax.shard_map(
        window, mesh=mesh, in_specs=(SHARDED, P("data")), out_specs=SHARDED
    )
    with pytest.raises(ValueError, match="gather the parameters once"):
        jax.jit(mapped)(make_params(), make_batch())


def test_sync_each_without_checks_must_be_told_what_is_sharded():
    mesh = make_mesh(AxisType.Auto)
    fun = ga.value_and_grad(mean_loss, 2, data_axis=ga.DataAxis("data", sync="each"))
    mapped = jax.shard_map(
        fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=P(), check_vma=False
    )
    with pytest.raises(
        ValueError, match=r"Pass DataAxis\(param_specs=\), or leave check_vma"
    ):
        jax.jit(mapped)(make_params(), make_batch())


# -- What would be wrong in quiet ------------------------------------------------------


def test_an_accumulator_that_is_summed_already_is_not_merged_again():
    mesh = make_mesh(AxisType.Auto)

    def window(params, batch):  # without data_axis: JAX sums over the devices
        _, acc = ga.accumulate(mean_loss, 2)(ga.accumulator.init(params), params, batch)
        return ga.accumulator.mean(ga.merge_across(acc, "data"))

    mapped = jax.shard_map(window, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match="summed over them already"):
        jax.jit(mapped)(make_params(), make_batch())


@pytest.mark.grid(1)
@pytest.mark.parametrize("check_vma", [True, False])
def test_shards_that_fun_gathers_are_summed_over_their_copies_too(check_vma):
    """Sharded over "data", copied over "replica" (HSDP), gathered by `fun` itself."""
    mesh = make_mesh(AxisType.Auto, (2, 4), ("replica", "data"))
    axes = ("replica", "data")
    params, batch = make_params(), make_batch()

    def gathered(params, batch):
        whole = {
            "in": jax.lax.all_gather(params["in"], "data", axis=0, tiled=True),
            "layers": jax.lax.all_gather(params["layers"], "data", axis=1, tiled=True),
            "bias": params["bias"],
        }
        return mean_loss(whole, batch)

    axis = ga.DataAxis(axes, param_specs=SHARDED, sync="each")
    fun = ga.value_and_grad(gathered, 2, data_axis=axis)
    mapped = jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=(SHARDED, P(axes)),
        out_specs=(P(), SHARDED),
        check_vma=check_vma,
    )
    got = jax.jit(mapped)(params, batch)
    assert_close(got, jax.value_and_grad(mean_loss)(params, batch))


def test_a_batch_that_one_of_the_axes_does_not_split_is_found():
    mesh = make_mesh(AxisType.Auto, (2, 4), ("replica", "data"))
    fun = ga.value_and_grad(mean_loss, 2, data_axis=("replica", "data"))
    mapped = jax.shard_map(fun, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    with pytest.raises(ValueError, match=r"the same along \('replica',\)"):
        jax.jit(mapped)(make_params(), make_batch())


def test_an_aux_may_vary_over_another_axis_where_the_loss_does_not():
    mesh = make_mesh(AxisType.Auto, (4, 2), ("data", "model"))
    x = normal(0, 16, 8)

    def loss(w, x):
        h = x @ w
        return jax.lax.psum(jnp.mean(jnp.square(h)), "model"), jnp.mean(h, axis=0)

    w = normal(1, 8, 6)
    fun = ga.value_and_grad(loss, 2, data_axis="data", has_aux=True)
    mapped = jax.shard_map(
        fun,
        mesh=mesh,
        in_specs=(P(None, "model"), P("data")),
        out_specs=((P(), P("model")), P(None, "model")),
    )
    (value, aux), grads = jax.jit(mapped)(w, x)

    def whole(w, x):  # each half of the columns has a mean of its own
        h = x @ w
        return 2 * jnp.mean(jnp.square(h)), jnp.mean(h, axis=0)

    assert_close(((value, aux), grads), jax.value_and_grad(whole, has_aux=True)(w, x))


@pytest.mark.exhaustive
def test_a_shard_map_over_another_axis_may_stand_around_it():
    mesh = make_mesh(AxisType.Auto, (4, 2), ("data", "ensemble"))
    batch = make_batch()
    pair = jax.tree.map(lambda p: jnp.stack([p, 2 * p]), make_params())
    fun = ga.value_and_grad(mean_loss, 2, data_axis=ga.DataAxis("data", mesh=mesh))

    def member(params, batch):
        one = jax.tree.map(lambda p: p[0], params)
        return jax.tree.map(lambda x: x[None], fun(one, batch))

    mapped = jax.shard_map(
        member,
        mesh=mesh,
        in_specs=(P("ensemble"), P()),
        out_specs=P("ensemble"),
        axis_names={"ensemble"},
    )
    value, grads = jax.jit(mapped)(pair, batch)
    for i in range(2):
        one = jax.tree.map(lambda p, i=i: p[i], pair)
        got = value[i], jax.tree.map(lambda g, i=i: g[i], grads)
        assert_close(got, jax.value_and_grad(mean_loss)(one, batch))


def test_sharded_parameters_beside_an_explicit_axis_say_what_jax_cannot_do():
    mesh = jax.make_mesh(
        (4, 2), ("data", "model"), axis_types=(AxisType.Auto, AxisType.Explicit)
    )
    fun = ga.value_and_grad(
        mean_loss, 2, data_axis=ga.DataAxis("data", mesh=mesh, param_specs=SHARDED)
    )
    with pytest.raises(ValueError, match=r'leaf \[\'in\'\] is sharded.*sync="each"'):
        jax.jit(fun)(make_params(), make_batch())


def test_a_key_cannot_be_carried_across_devices():
    mesh = make_mesh(AxisType.Auto)

    def loss(w, x, key):
        return w * jnp.mean(x), jax.random.fold_in(key, 1)

    fun = mean_of(loss, 2, carry_argnums=2, data_axis=ga.DataAxis("data", mesh=mesh))
    with pytest.raises(TypeError, match="Name it in rng_argnums"):
        jax.jit(fun)(jnp.float32(1.0), jnp.ones(16), jax.random.key(0))


@pytest.mark.parametrize("sync", ["each", "last"])
def test_a_key_in_the_carry_threads_unless_the_carry_is_averaged(sync):
    def fun(w, x, key):
        key, own = jax.random.split(key)
        return jnp.mean((x * w + jax.random.normal(own, x.shape)) ** 2), key

    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    axis = ga.DataAxis("data", mesh=mesh, sync=sync)
    step = jax.jit(mean_of(fun, 2, carry_argnums=2, data_axis=axis))
    key = jax.random.key(0)
    if sync == "last":
        with pytest.raises(TypeError, match=r"is a PRNG key\. Name it in rng_argnums"):
            step(1.0, jnp.ones(32), key)
        return
    (_, after), _ = step(1.0, jnp.ones(32), key)
    expected = jax.random.split(jax.random.split(key)[0])[0]
    assert jnp.all(jax.random.key_data(after) == jax.random.key_data(expected))
