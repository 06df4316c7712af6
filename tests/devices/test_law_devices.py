"""The law with every option of `DataAxis`, wherever the batch lies."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import test_devices as on
from corpus import models
from helpers import array, bits, mean_of, mesh_of, off, put, undivided
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ga_optax as ga

pytestmark = pytest.mark.usefixtures("optax_promotion")
FAST = pytest.mark.usefixtures("fast_compilation")
ROWS, K = 32, 2


def dropout(p, b):
    h = on.model(p, b)
    return jnp.mean(h**2 * jax.random.bernoulli(jax.random.key(1), 0.5, h.shape))


def by_place(p, b):
    """What each row is multiplied with comes from no leaf of the batch."""
    weights = jnp.sin(3.0 * jnp.arange(on.ROWS) + 0.5)
    return jnp.mean(on.model(p, b) ** 2 * weights[:, None])


def picked(p, b):
    """The focal loss: of each row one number, and a function of it."""
    h = jax.nn.log_softmax(on.model(p, b))
    chosen = h[jnp.arange(len(h)), jnp.arange(len(h)) * 5 % h.shape[1]]
    return -jnp.mean((1 - jnp.exp(chosen)) ** 2 * chosen)


def mapped(p, b):
    """A loop over the rows themselves."""
    return jnp.mean(jax.lax.map(lambda h: jnp.vdot(h, jnp.tanh(h)), on.model(p, b)))


def reversed_rows(p, b):
    weights = jnp.linspace(0.0, 1.0, on.ROWS)
    return jnp.mean(on.model(p, b)[::-1] ** 2 * weights[:, None])


def norm(p, b):
    h = on.model(p, b)
    return jnp.mean(((h - h.mean(0)) / (h.std(0) + 0.1) - b["x"]) ** 2)


APART, SPECS = (on.mean_loss, on.token_loss, dropout, by_place), on.SHARDED
AXES = {
    "last": "data",
    "none": None,
    "each": ga.DataAxis("data", sync="each"),
    "each, sharded": ga.DataAxis("data", sync="each", param_specs=SPECS),
    "sharded": ga.DataAxis("data", param_specs=SPECS),
    "scattered at the end": ga.DataAxis("data", grad_specs=SPECS),
    "scattered": ga.DataAxis("data", sync="each", grad_specs=SPECS),
}


def arguments():
    return on.make_params(), on.make_batch()


def at_top_level(loss, name, kind):
    mesh = mesh_of(kind=kind)
    specs = (SPECS if "sharded" in name else P()), P("data")
    args = put(arguments(), mesh, specs)
    with jax.set_mesh(mesh):
        return jax.jit(ga.value_and_grad(loss, K, data_axis=AXES[name]))(*args)


# Sums over the rows in another order.
BOUND = 4 * on.ROWS * np.finfo(np.float32).eps


def distance(got, loss):
    return off(got, undivided(loss)(*arguments()))


@FAST
@pytest.mark.grid(6, 24)
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("loss", APART)
@pytest.mark.parametrize("name", AXES)
def test_where_rows_do_not_meet_every_option_is_there(name, loss, kind):
    assert distance(at_top_level(loss, name, kind), loss) < BOUND


@FAST
@pytest.mark.parametrize("loss", [picked, mapped])
def test_rows_in_segments_of_devices_need_no_rows_of_others(loss):
    assert distance(at_top_level(loss, "each, sharded", AxisType.Auto), loss) < BOUND


@FAST
@pytest.mark.grid(3, 8)
@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("loss", APART)
def test_so_it_is_in_a_region_of_the_users(loss, check_vma):
    specs = {"in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    step = ga.value_and_grad(loss, K, data_axis="data")
    step = jax.jit(jax.shard_map(step, mesh=mesh_of(), **specs))
    assert distance(step(*arguments()), loss) < BOUND


@FAST
@pytest.mark.parametrize("loss", [norm, reversed_rows])
@pytest.mark.parametrize("name", ["last", "sharded", "scattered at the end"])
def test_where_they_meet_those_are_there_that_merge_at_the_end(name, loss):
    assert distance(at_top_level(loss, name, AxisType.Auto), loss) < BOUND


@pytest.mark.quick
def test_the_largest_number_is_that_of_all_devices():
    """In a level that others wait for, and in the last."""

    def loss(p, b):
        h = jnp.tanh(b["x"] @ p["in"] / 9)
        still = jax.lax.stop_gradient(h)  # else the rows that attain it are found
        loss = jnp.mean(h / (2 + still.max() + still.min()))
        ends = jax.lax.stop_gradient(jnp.sin(h / loss))
        return loss, (ends.max(0), ends.min(0))

    mesh = mesh_of()
    axis = ga.DataAxis("data", mesh=mesh)
    step = jax.jit(ga.value_and_grad(loss, K, has_aux=True, data_axis=axis))
    want = jax.jit(jax.value_and_grad(loss, has_aux=True))(*arguments())
    assert off(step(*put(arguments(), mesh, (P(), P("data")))), want) < 1e-4


@pytest.mark.parametrize("name", ["each", "each, sharded", "scattered"])
def test_where_they_meet_the_error_names_the_line(name):
    line = norm.__code__.co_firstlineno + 2
    with pytest.raises(ValueError, match=f"test_law_devices.py:{line}") as error:
        at_top_level(norm, name, AxisType.Auto)
    assert 'data_axis must have sync="last"' in str(error.value)
    assert "batch_dependencies" in str(error.value)


@pytest.mark.grid(0, 3)
@pytest.mark.parametrize("seed", [0, 1, 4])
def test_a_random_model_has_the_same_bits_on_any_number_of_devices(seed):
    k = 1 + seed % 2
    with_aux, *args = models.draw(seed, 8 * k)
    loss = jax.checkpoint(lambda *args: with_aux(*args)[0])

    def ran(mesh):
        axis = ga.DataAxis("data", mesh=mesh, logical_devices=8)
        step = mean_of(loss, k, data_axis=axis)
        return bits(jax.jit(step)(*put(args, mesh, [P(), P("data")])))

    first, *others = (ran(mesh_of(n)) for n in (8, 4, 2, 1))
    assert others == [first] * 3


def test_rows_along_an_explicit_axis_without_data_axis_must_not_meet():
    """Nothing is tried of neighbours first, which fails there with a warning."""
    with pytest.raises(ValueError, match="data_axis='data'"):
        at_top_level(norm, "none", AxisType.Explicit)


def in_pairs(w, x):
    """Neighbouring rows need each other."""
    h = (x @ w).reshape(-1, 2)
    return (h[:, 0] * h[:, 1]).mean(), {"pairs": h}


def by_row(w, x):
    h = x @ w
    return (h**2).mean(), {"rows": h, "twice": jnp.concatenate([h, -h])}


def with_noise(w, x):
    h = x @ w + jax.random.uniform(jax.random.key(0), x.shape[:1])
    return (h**3).mean(), {"rows": h}


def ratio(w, x):
    h = jnp.tanh(x @ w)
    return h.sum() / jnp.abs(h).sum(), {"rows": h}


def one_row(w, x):
    """At place 3 of micro-batch 1 if they hold neighbours."""
    return jnp.mean(x @ w) + x[11] @ w, {"row": x[11]}


W, X = jnp.arange(1.0, 4.0), jnp.sin(jnp.arange(96.0)).reshape(32, 3)


def at(how, fun):
    """A step of four micro-batches, or of four on a device, and its results."""
    mesh = mesh_of()
    axes = {"axis": ga.DataAxis("data", mesh=mesh), "region": "data"}
    step = ga.value_and_grad(fun, 4, has_aux=True, data_axis=axes.get(how))
    placed = put((W, X), mesh, (P(), P("data")))
    if how == "shardings":  # nothing names the mesh before the program is compiled
        return jax.jit(step, in_shardings=tuple(x.sharding for x in placed))(W, X)
    if how == "region":
        of_aux = dict.fromkeys(fun(W, X)[1], P("data"))
        of_aux |= {"twice": P()} if fun is by_row else {}  # it has no part of that
        specs = {"in_specs": (P(), P("data")), "out_specs": ((P(), of_aux), P())}
        step = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    with jax.set_mesh(mesh) if how == "context" else contextlib.nullcontext():
        return jax.jit(step)(*placed)


def close(got, want):
    return off(got, want) < 100 * 32 * np.finfo(np.float32).eps


@FAST
@pytest.mark.parametrize("fun", [in_pairs, by_row, with_noise, ratio, one_row])
@pytest.mark.parametrize("how", ["argument", "shardings", "context", "axis", "region"])
def test_rows_keep_their_order_wherever_the_batch_lies(fun, how):
    if (fun, how) == (one_row, "region"):
        pytest.skip("there a row of all has no place of its own among the results")
    want = undivided(fun, has_aux=True)(W, X)
    assert close(at(how, fun), want)
    if (fun, how) == (ratio, "argument"):  # the twin: the mean of micro-batches' own
        own = mean_of(fun, 4, has_aux=True, aux="last")(W, X)
        assert not close(own[0][0], want[0][0])


@pytest.mark.parametrize("data_axis", ["data", None])
def test_in_a_region_that_checks_sums_of_rows_that_meet_are_refused(data_axis):
    mesh, specs = mesh_of(), {"in_specs": (P(), P("data")), "out_specs": P()}
    step = ga.value_and_grad(lambda w, x: ratio(w, x)[0], 2, data_axis=data_axis)

    def of_parts(check_vma):
        run = lambda w, x: jax.lax.pmean(step(w, x), "data")  # noqa: E731
        shared = jax.shard_map(run, mesh=mesh, check_vma=check_vma, **specs)
        return jax.jit(shared)(W, X)[0]

    with pytest.raises(ValueError, match="must have check_vma=False") as error:
        of_parts(True)
    line = f"test_law_devices.py:{ratio.__code__.co_firstlineno + 2}"
    assert data_axis is None or line in str(error.value)
    parts = [X] if data_axis else X.reshape(4, -1, 3)
    due = sum(ratio(W, part)[0] for part in parts) / len(parts)
    assert abs(of_parts(False) - due) < 1e-5


LAYERS, HIDDEN = 8, 128


def adapted(p, x, base):
    """Layers that are frozen, each with an adapter: LoRA."""

    def layer(h, w):
        w, a, b = w
        return jnp.tanh(h @ w + h @ a @ b), None

    return jnp.mean(jax.lax.scan(layer, x, (base, p["a"], p["b"]))[0] ** 2)


def in_python(p, x, base):
    for i in range(LAYERS):
        x = jnp.tanh(x @ base[i] + x @ p["a"][i] @ p["b"][i])
    return jnp.mean(x**2)


def centred(p, x, base):
    x = x - jnp.tanh(x @ base[0]).mean(0)
    return adapted(p, x, base)


def in_a_function(fun, k, **axis):
    """Arguments of a jitted function inside say nothing; a constraint does."""
    step = ga.value_and_grad(fun, k, **axis)
    place = jax.sharding.NamedSharding(axis["data_axis"].mesh, P(None, "data"))
    constrained = lambda x: jax.lax.with_sharding_constraint(x, place)  # noqa: E731
    return jax.jit(lambda p, x, base: step(p, x, constrained(base)))


def closed_over(fun, k, **axis):
    return lambda p, x, base: ga.value_and_grad(
        lambda p, x: fun(p, x, base), k, **axis
    )(p, x)


def of_gradient(fun, k, **axis):
    return ga.microbatch(jax.value_and_grad(fun), k, **axis)


def of_adapters(fun, base, k=K, make=ga.value_and_grad, kind=AxisType.Auto):
    """A step whose base lies so: what it returns, what is right, its program."""
    mesh = mesh_of(kind=kind)
    p = {"a": array(LAYERS, HIDDEN, 2) / 8, "b": array(LAYERS, 2, HIDDEN) / 8}
    args = p, array(ROWS, HIDDEN), array(LAYERS, HIDDEN, HIDDEN, scale=0.1)
    step = jax.jit(make(fun, k, data_axis=ga.DataAxis("data", mesh=mesh)))
    args = put(args, mesh, (P(), P("data"), base))
    compiled = step.lower(*args).compile()
    want = jax.jit(jax.value_and_grad(fun))(*jax.device_get(args))
    return compiled(*args), want, compiled, ga.audit(compiled, mesh).collectives


@pytest.mark.grid(3, 8)
@pytest.mark.parametrize(
    "options",
    [
        {"make": ga.value_and_grad},
        {"kind": AxisType.Explicit},
        {"make": mean_of},
        {"make": of_gradient},
        {"make": in_a_function},
        {"make": closed_over},
        {"base": P(None, None, "data")},
        {"base": P("data")},
        {"fun": in_python},
        {"fun": centred},
    ],
    ids=lambda its: next(f"{k} {getattr(x, '__name__', x)}" for k, x in its.items()),
)
def test_a_frozen_argument_stays_sharded_and_is_gathered_layer_by_layer(options):
    options = {"fun": adapted, "base": P(None, "data")} | options
    got, want, compiled, found = of_adapters(**options)
    assert close(got, want)
    nbytes = 4 * LAYERS * HIDDEN**2
    merges = [c for c in found if c.kind == "all-reduce"]
    gathers = [c for c in found if c.kind == "all-gather"]
    most = max(c.num_bytes for c in gathers)
    assert most == nbytes / LAYERS / 4  # of one layer, a device's part
    unrolls = options["fun"] is in_python
    if not unrolls or jax.__version_info__ >= (0, 11):  # 0.10 gathers for both passes
        moved = options["base"] != P(None, "data") and nbytes / 4
        assert compiled.memory_analysis().temp_size_in_bytes < nbytes / 2 + moved
    if options["fun"] is not centred:
        assert [bool(c.loops) for c in merges] == [False]
        most, least = 2 * K * nbytes / 4, (2 - unrolls) * K * nbytes / 4
        assert least <= sum(c.total_bytes for c in gathers) <= most


def test_a_frozen_argument_on_every_device_is_not_gathered():
    got, want, _, found = of_adapters(adapted, P())
    assert close(got, want)
    assert [(c.kind, bool(c.loops)) for c in found] == [("all-reduce", False)]


def looked_up(table):
    """A loss that closes over a table, and takes rows of it in every layer."""

    def fun(w, b):
        def layer(h, w):
            return jnp.tanh(h @ w) + table[b["id"]] * jax.jit(lambda i: table[i, 0])(1)

        h = jax.lax.scan(lambda h, w: (jax.checkpoint(layer)(h, w), None), b["x"], w)[0]
        return jnp.mean(h**2) + jnp.mean(table[:2]) * jnp.mean(w**2)

    return fun


@FAST
@pytest.mark.grid(2, 6)
@pytest.mark.parametrize("where", [P(), P("data"), P(None, "data")], ids=str)
@pytest.mark.parametrize("rows", [8, 4096])  # of which the second stay sharded
def test_a_loss_may_close_over_a_table_that_lies_on_the_mesh(where, rows):
    mesh = mesh_of()
    w, x, table = array(2, 8, 8), array(16, 8), array(rows, 8)
    args = w, {"x": x, "id": jnp.arange(16) * 3 % rows}
    want = jax.jit(jax.value_and_grad(looked_up(table)))(*args)
    fun = looked_up(put(table, mesh, where))
    step = jax.jit(ga.value_and_grad(fun, 2, data_axis=ga.DataAxis("data", mesh=mesh)))
    args = put(args, mesh, (P(), P("data")))
    for context in contextlib.nullcontext(), jax.set_mesh(mesh):
        with context:
            assert close(step(*args), want)
            found = ga.audit(step.lower(*args).compile(), mesh)
    # Of the sharded tables the first is whole: the program has it as a constant.
    assert any(c.loops for c in found.collectives) == (rows > 8 and where != P())


@pytest.mark.parametrize("make", [ga.value_and_grad, mean_of])
@pytest.mark.parametrize("of", [lambda b: 0, lambda b: b["id"]])
def test_who_closes_over_an_array_of_the_mesh_is_told_what_to_do(of, make):
    mesh = mesh_of(kind=AxisType.Explicit)
    w, table = put((jnp.eye(3), jnp.ones((7, 3))), mesh, P())
    batch = {"x": jnp.ones((16, 3)), "id": jnp.zeros(16, int)}
    fun = lambda w, b: jnp.std(b["x"] @ w * table[of(b)])  # noqa: E731
    step = make(fun, 2, data_axis=ga.DataAxis("data", mesh=mesh))
    told = ValueError, NotImplementedError, UserWarning  # the last if it goes on
    with pytest.raises(told) as raised:
        step(w, put(batch, mesh, P("data")))
    said = [str(raised.value), *getattr(raised.value, "__notes__", ())]
    assert any("closes over an array that lies on the mesh" in words for words in said)
