"""One law for each function: what it equals, its words, and what comes back."""

import enum
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from corpus import losses
from corpus.losses import LOSSES, N
from helpers import (
    array,
    failing,
    mean_of,
    mesh_of,
    off,
    temporaries,
    undivided,
)
from jax.sharding import NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._calls import rows as calls_rows
from ga_optax._loop.micro_step import HAS_REFS
from ga_optax._passes import jaxprs
from ga_optax._passes.primitives import NEW_REF, PUT

pytestmark = pytest.mark.usefixtures("optax_promotion", "fast_compilation")
EPS, EPS32 = np.finfo(np.float64).eps, np.finfo(np.float32).eps


def assert_close(got, want, n=N, eps=EPS):
    """Sums of `n` terms in another order: each leaf is off by `c·n·eps·max|leaf|`."""
    assert off(got, want) < 200 * n * eps


def in_float64(fun, *args, k=4, make=ga.value_and_grad, **options):
    """What `value_and_grad` gives of `fun`, and what JAX does, in float64."""
    has_aux = options.get("has_aux", False)
    with jax.enable_x64(True):
        args = jax.tree.map(_wide, args)
        want = undivided(fun, has_aux=has_aux)(*args)
        step = make(fun, k, accumulator_dtype=jnp.float64, **options)
        return jax.jit(step)(*args), want


def _wide(x):
    return x.astype("float64") if x.dtype == jnp.float32 else x


SOME = ("masked", "batch_norm", "clip", "hardest")
QUICK = ("masked", "total")


@pytest.mark.grid(3, 16)
@pytest.mark.filterwarnings("ignore:.*computed whole")
@pytest.mark.parametrize(
    ("name", "k"),
    [
        *(pytest.param(x, 4, marks=[pytest.mark.quick] * (x in QUICK)) for x in LOSSES),
        *itertools.product(SOME, [1, 2, 6, N]),
    ],
)
def test_any_loss_has_the_value_gradients_and_aux_of_the_undivided_batch(name, k):
    args = losses.arguments(dtype=np.float32)
    assert_close(*in_float64(LOSSES[name].fun, *args, k=k, has_aux=True))


Color = enum.Enum("Color", "RED")


LEAVES = (3, True, 2.5, np.float64(2), np.arange(2), "text", Color.RED, len)


@pytest.mark.parametrize("leaf", LEAVES, ids=str)
def test_aux_that_is_no_array_of_jax_comes_back_as_it_is(leaf):
    def fun(w, x):
        return jnp.mean((x @ w) ** 2), {"leaf": leaf, "rows": x @ w}

    args = jnp.ones(3), jnp.ones((8, 3))
    due = jax.value_and_grad(fun, has_aux=True)
    step = ga.value_and_grad(fun, 4, has_aux=True)
    assert step(*args)[0][1]["leaf"] is due(*args)[0][1]["leaf"] is leaf
    if isinstance(leaf, int | float | np.generic | np.ndarray):
        want, got = (jax.jit(f)(*args)[0][1]["leaf"] for f in (due, step))
        assert (jax.typeof(got), got.weak_type) == (jax.typeof(want), want.weak_type)
        np.testing.assert_array_equal(got, want)
        return
    # The twin: a loop over micro-batches has to put it together.
    with pytest.raises(TypeError, match=r"\['leaf'\] of the aux"):
        mean_of(fun, 4, has_aux=True)(*args)
    with pytest.raises(TypeError, match="not a valid JAX type"):
        jax.jit(step)(*args)


def noisy(w, b):
    noise = jax.random.normal(b["key"], b["x"].shape)
    return jnp.mean(((b["x"] + noise) @ w) ** 2) * b["scale"]


def of_lengths(w, b):
    own = jnp.mean((b["a"] @ w) ** 2)
    return own + jnp.mean(jnp.abs(b["three"] @ w)) + jnp.mean(b["odd"] @ w)


def of_graphs(w, b):
    messages = (b["nodes"] @ w)[b["from"]]
    return jnp.mean(jax.ops.segment_sum(messages, b["to"], num_segments=16) ** 2)


def of_lists(w, b):
    [[x], [y]] = b
    return jnp.mean((x @ w - y) ** 2)


def with_a_table(w, x, y, table):
    return jnp.mean((x @ w @ table - y) ** 2)


W, X = array(6, 4), array(16, 6)
LAID_OUT = {  # a loss, what it takes, and the bytes of its leaves: of rows, and others
    "scalars and keys": (
        noisy,
        [{"x": X, "scale": jnp.float32(2), "key": jax.random.key(0)}],
        {"leaf ['x']": 384},
        {"leaf ['scale']": 4, "leaf ['key']": 8},
    ),
    "leaves of other lengths": (
        of_lengths,
        [{"a": X, "three": array(48, 6), "odd": array(7, 6)}],
        {"leaf ['a']": 384, "leaf ['three']": 1152},
        {"leaf ['odd']": 168},
    ),
    "nodes and edges": (
        of_graphs,
        [{"nodes": X, "from": jnp.arange(40) * 7 % 16, "to": jnp.arange(40) % 16}],
        {"leaf ['nodes']": 384, "leaf ['from']": 160, "leaf ['to']": 160},
        {},
    ),
    "lists of lists": (
        of_lists,
        [[[X], [array(16, 4)]]],
        {"leaf [0][0]": 384, "leaf [1][0]": 256},
        {},
    ),
    "arguments without a role": (
        with_a_table,
        [X, array(16, 3), array(4, 3)],
        {"the only leaf of argument 1": 384, "the only leaf of argument 2": 192},
        {"argument 3": 48},
    ),
}


@pytest.mark.parametrize("case", LAID_OUT)
def test_leaves_without_rows_go_whole_by_themselves(case):
    loss, args, rows, whole = LAID_OUT[case]
    got, want = (
        jax.jit(make)(W, *args)
        for make in (ga.value_and_grad(loss, 4), jax.value_and_grad(loss))
    )
    assert_close(got, want, eps=EPS32)
    found = ga.batch_dependencies(loss, 4)(W, *args)
    assert (found.rows, found.given_whole) == (rows, whole)


def test_a_position_counts_the_arguments_that_came_by_position():
    def fun(w, x, scale=2.0, *more, power=1):
        return (x @ w * scale) ** power

    w, x = jnp.arange(3.0), jnp.arange(24.0).reshape(8, 3)
    run = jax.jit(ga.microbatch(fun, 4, batch_argnums=-1))
    np.testing.assert_array_equal(run(w, x, power=2), fun(w, x, power=2))
    with pytest.raises(ValueError, match="Pass batch_argnames='x'"):  # the twin
        run(w, x=x)


def test_what_the_partitioner_cannot_do_is_computed_of_all_rows_and_said(monkeypatch):
    """In `microbatch`; test_law_told has what of a loss."""

    def squares(fun):
        return lambda *args: (fun(*args) ** 2).sum()

    fun, argnums = (lambda w, x: jnp.sin(x @ w)), (0, 1)
    want = jax.grad(squares(fun), argnums)(W, X)
    broken = failing(KeyError("a parameter that jax renamed"))
    monkeypatch.setattr(calls_rows, "partition", broken)
    with pytest.warns(UserWarning, match="all rows at once"):
        got = jax.grad(squares(ga.microbatch(fun, 4)), argnums)(W, X)
    assert off(got, want) == 0


# -- Parameters in the host's memory ---------------------------------------------------


def to_device(x):
    return jax.device_put(x, jax.memory.Space.Device)


def by_layer(w, x, move=to_device):
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ move(w)), None))
    return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)


def in_python(w, x, move=to_device):
    for i in range(len(w)):
        x = jnp.tanh(x @ move(w[i]))
    return jnp.mean(x**2)


def normed(w, x, move=to_device):
    def layer(h, w):
        h = h @ move(w)
        return h / (1 + h.std(0)), None

    return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)


MATRICES, INPUTS = array(3, 8, 8), array(16, 8)


HOST = {"memory_kind": "pinned_host"}


def in_host_memory():
    return jax.device_put(MATRICES, SingleDeviceSharding(jax.devices()[0], **HOST))


@pytest.mark.cpu
@pytest.mark.grid(4, 9)
@pytest.mark.parametrize("fun", [by_layer, in_python, normed])
@pytest.mark.parametrize("way", ["plain", "no passes", "mesh", "each", "microbatch"])
def test_parameters_may_lie_in_the_memory_of_the_host(fun, way):
    options = {"optimize": False} if way == "no passes" else {}
    w, x, make = in_host_memory(), INPUTS, ga.value_and_grad
    if way in ("mesh", "each"):
        mesh, spec = mesh_of(), P(None, "data")
        sync = "each" if way == "each" and fun is not normed else "last"
        axis = ga.DataAxis("data", mesh=mesh, param_specs=spec, sync=sync)
        w = jax.device_put(MATRICES, NamedSharding(mesh, spec, **HOST))
        x = jax.device_put(INPUTS, NamedSharding(mesh, P("data")))
        options = {"data_axis": axis}
    elif way == "microbatch":
        make = lambda fun, k: jax.value_and_grad(ga.microbatch(fun, k))  # noqa: E731
    value, grads = jax.jit(make(fun, 2, **options))(w, x)
    # The gradients of a window lie where they were summed; those of JAX where w lies.
    kind = "pinned_host" if way == "microbatch" else "device"
    assert grads.sharding.memory_kind == kind
    want = jax.value_and_grad(lambda w, x: fun(w, x, lambda w: w))(MATRICES, INPUTS)
    assert_close((value, jax.device_get(grads)), jax.device_get(want), 16, EPS32)


def two_matrices(w, x, move=to_device):
    """One move for a tree, behind `jax.checkpoint` in a scan."""

    @jax.checkpoint
    def layer(h, pair):
        up, down = move(pair)
        return h + jnp.tanh(h @ up) @ down, None

    return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)


@pytest.mark.cpu
@pytest.mark.quick
@pytest.mark.skipif(not HAS_REFS, reason="nothing is added in place")
@pytest.mark.parametrize("fun", [by_layer, two_matrices])
def test_their_gradients_are_added_in_place_on_the_device(fun):
    w = in_host_memory()
    w, plain = (w, MATRICES) if fun is by_layer else ((w, w), (MATRICES, MATRICES))
    step = ga.value_and_grad(fun, 4)
    jaxpr = jax.make_jaxpr(step)(w, INPUTS)
    moves = [e for e in jaxprs.equations(jaxpr.jaxpr) if e.primitive.name == PUT]
    assert {x for e in moves for x in e.params["devices"]} == {jax.memory.Space.Device}
    refs = [e for e in jaxprs.equations(jaxpr.jaxpr) if e.primitive.name == NEW_REF]
    assert len(refs) == len(jax.tree.leaves(w))
    want = jax.value_and_grad(lambda w, x: fun(w, x, lambda w: w))(plain, INPUTS)
    got = jax.jit(step)(w, INPUTS)
    assert_close(jax.device_get(got), jax.device_get(want), 16, EPS32)


@pytest.mark.cpu
@pytest.mark.quick
def test_their_sums_lie_on_the_device_or_it_is_an_error():
    w = in_host_memory()
    acc = ga.accumulator.init(w)
    _, acc = jax.jit(ga.accumulate(by_layer, 2))(acc, w, INPUTS)
    assert acc.total.sharding.memory_kind == "device"
    want = jax.grad(lambda w, x: by_layer(w, x, lambda w: w))(MATRICES, INPUTS)
    assert_close(ga.accumulator.mean(acc), want, 16, EPS32)

    grads = jax.grad(by_layer)(w, INPUTS)  # in the host's memory
    tx = ga.MultiSteps(optax.sgd(1.0), 2)
    host_acc = acc._replace(total=grads)
    for wrong in (
        lambda: ga.accumulate(by_layer, 2)(host_acc, w, INPUTS),
        lambda: ga.accumulator.add(acc, grads),
        lambda: tx.update(grads, tx.init(MATRICES), MATRICES),
        lambda: ga.apply_gradients(tx, want, tx.init(MATRICES), w),
    ):
        with pytest.raises(ValueError, match="must lie in the memory of the device"):
            wrong()


# -- Any number of rows ----------------------------------------------------------------

APART = ["total", "classes", "dropout", "checkpointed"]  # in these rows do not meet


def noisy_rows(p, b):
    """Draws, places of rows, a table, and results with rows along other axes."""
    key, h = jax.random.key(3), losses.hidden(p, b["x"])
    shape = h.shape
    h = h + jax.random.normal(key, shape, h.dtype) + jnp.arange(shape[0])[:, None]
    h = h * jax.random.normal(key, shape[1:], h.dtype)
    each = jax.lax.map(lambda row: jnp.cumsum(jnp.tanh(row)), h)
    return each.sum() + p["s"], {"columns": each.T, "ids": 2 * b["c"], "sum": h.sum()}


@pytest.mark.quick
def test_the_last_micro_batch_has_the_rest_of_the_rows():
    args = losses.arguments(15, np.float32)
    assert_close(*in_float64(noisy_rows, *args, has_aux=True), n=15)
    sizes = []

    def size(p, b):
        sizes.append(jnp.shape(b["x"])[0])
        return (losses.hidden(p, b["x"]) ** 2).mean()

    step = ga.value_and_grad(size, microbatch_size=4)
    text = str(jax.make_jaxpr(step)(*args))
    assert sizes == [15]  # it is traced once
    lengths = {n for n in range(1, 16) if f"f32[{n},{losses.D}]" in text}
    assert {4, 3} <= lengths
    assert not lengths & {5, 6, 7, 8}


def counted(p, b):
    """What the loss is not differentiated through: counts, and an aux of activations.

    One count needs another.
    """
    h, x = losses.hidden(p, b["x"]), b["x"]
    mask = x[:, 0] > -0.5
    weights = jnp.exp(b["x"][:, 1] - b["x"][:, 1].max()) * mask
    centred = weights - weights.sum() / mask.sum()
    loss = (jnp.square(h).mean(1) * weights).sum() / jnp.abs(centred).sum()
    loss *= jnp.prod(1 + x / 9) + (x > 1).any() + 2 * (x > -3).all() + x[:, 1].argmax()
    loss += (jnp.cumsum(mask) * h[:, 0]).mean()
    of_all = {"max": h.max(0), "std": h.std(), "on": (h > 0.5).any(0)}
    return loss, of_all | {"tokens": mask.sum(), "rows": h * mask[:, None]}


FUNCTIONS = {name: LOSSES[name].fun for name in APART}
FUNCTIONS |= {"noisy": noisy_rows, "counted": counted}


@pytest.mark.grid(2, 20)
@pytest.mark.parametrize("k", [2, 4, 5, 8, 12])
@pytest.mark.parametrize("n", [13, 15, 16, 22])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_any_number_of_rows_gives_the_gradient_of_all(name, n, k):
    fun, args = FUNCTIONS[name], losses.arguments(n, np.float32)
    got, want = in_float64(fun, *args, k=k, has_aux=True)
    assert_close(got, want, n=n)


def test_the_error_of_rows_that_meet_names_the_line_of_what_joins_them():
    def joined(w, x):
        return jnp.mean(jnp.concatenate([x @ w, jnp.sin(x)]))

    line = joined.__code__.co_firstlineno + 1
    with pytest.raises(ValueError, match=f"rows meet at .*test_law.py:{line}:"):
        ga.value_and_grad(joined, microbatch_size=4)(array(3, 3), array(15, 3))
    step = ga.value_and_grad(joined, microbatch_size=5)  # the twin: they are even
    both = array(3, 3), array(15, 3)
    assert_close(step(*both), jax.value_and_grad(joined)(*both), n=15, eps=EPS32)


@pytest.mark.quick
def test_any_number_of_rows_may_be_added_up_in_bfloat16():
    w, x = jnp.ones(3, jnp.bfloat16), jnp.ones((7, 3), jnp.bfloat16)
    step = ga.value_and_grad(lambda w, x: (x @ w).sum() / x[:, 0].sum(), 3)
    value, grad = step(w, x)
    assert (value, grad.tolist(), grad.dtype) == (3, [1.0] * 3, jnp.bfloat16)


def test_derivatives_of_any_number_of_rows_are_those_of_all():
    """Of a function with respect to rows as well, twice, forwards and in a batch."""
    w, x = array(3, 3), array(15, 3)

    def fun(w, x):
        h = jnp.tanh(x @ w)
        return h**2, h.sum(0)

    def total(of):
        return lambda w, x: sum(jnp.sin(y).sum() for y in of(w, x))

    of = total(fun)
    for way in (
        lambda f: jax.grad(f, (0, 1)),
        lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
        lambda f: jax.grad(lambda w, x: (jax.grad(f)(w, x) ** 2).sum()),
        lambda f: lambda w, x: jax.vmap(f, (None, 0))(w, jnp.stack([x, -x])),
    ):
        ours = way(total(ga.microbatch(fun, 4)))
        assert_close(jax.jit(ours)(w, x), jax.jit(way(of))(w, x), n=15, eps=EPS32)

    def loss(w, x):
        return jnp.sin(fun(w, x)[0]).sum()

    def twice(step):
        return jax.jit(jax.grad(lambda w: (step(w, x)[1] ** 2).sum()))

    got, want = twice(ga.value_and_grad(loss, 4))(w), twice(jax.value_and_grad(loss))(w)
    assert_close(got, want, n=15, eps=EPS32)


def test_the_rest_of_the_rows_takes_the_memory_of_a_micro_batch():
    """And one copy of the batch; the sum of the gradients is one."""
    width = 128
    p = array(12, width, width, scale=width**-0.5)

    def loss(p, x):
        for w in p:
            x = jnp.tanh(x @ w)
        return (x**2).mean()

    def taken(n, k):
        args = p, array(n, width)
        return temporaries(jax.jit(ga.value_and_grad(loss, k)), *args)

    copy, more = 1023 * width * 4, 0 if HAS_REFS else p.nbytes  # by hand, one more sum
    assert taken(1023, 8) < taken(1024, 8) + 1.1 * copy + more
    # The twin: two micro-batches take twice as much.
    assert taken(1023, 4) > taken(1024, 8) + 2 * copy
