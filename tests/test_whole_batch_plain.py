"""A loss whose rows do not meet takes the loop of micro-batches by themselves.

Its passes, its temporaries, and how many of its products are added in float32; on one
device, and on meshes. Micro-batches hold neighbours, unless that does not matter.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import whole_harness
from helpers import bits, products
from helpers import mean_of as by_themselves
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._loop import step

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.skipif(jax.__version_info__ < (0, 9), reason="data_axis needs jax 0.9"),
]
WIDTH, LAYERS, CLASSES, ROWS, K = 64, 3, 8, 128, 4
NARROW = jnp.bfloat16


def of_rows(h, p, b):
    """The loss of each row."""
    logits = (h @ p["head"].astype(NARROW)).astype(jnp.float32)
    own = jnp.take_along_axis(jax.nn.log_softmax(logits), b["label"][:, None], 1)
    return -own[:, 0]


def scanned(p, b, layer=lambda h, w: jnp.tanh(h @ w)):
    def step(h, w):
        return layer(h, w.astype(NARROW)), None

    return of_rows(jax.lax.scan(step, b["x"], p["layers"])[0], p, b).mean()


def unrolled(p, b):
    h = b["x"]
    for w in p["layers"]:
        h = jnp.tanh(h @ w.astype(NARROW))
    return of_rows(h, p, b).mean()


def rematerialised(p, b):
    return scanned(p, b, jax.checkpoint(lambda h, w: jnp.tanh(h @ w)))


def relu(p, b):
    return scanned(p, b, lambda h, w: jax.nn.relu(h @ w))


def dropout(p, b, key):
    def layer(h, w):
        keep = jax.random.bernoulli(key, 0.9, h.shape)
        return jnp.where(keep, jnp.tanh(h @ w), 0)

    return scanned(p, b, layer)


def masked(p, b):
    h, _ = jax.lax.scan(
        lambda h, w: (jnp.tanh(h @ w.astype(NARROW)), None), b["x"], p["layers"]
    )
    return (of_rows(h, p, b) * b["mask"]).sum() / b["mask"].sum()


MEANS = {f.__name__: f for f in (scanned, unrolled, rematerialised, relu, dropout)}
LOSSES = MEANS | {"masked": masked}


def draw():
    rng = np.random.default_rng(0)
    params = {
        "layers": rng.normal(size=(LAYERS, WIDTH, WIDTH)) / WIDTH**0.5,
        "head": rng.normal(size=(WIDTH, CLASSES)),
    }
    batch = {
        "x": jnp.asarray(rng.normal(size=(ROWS, WIDTH)), NARROW),
        "label": jnp.asarray(rng.integers(0, CLASSES, ROWS)),
        "mask": jnp.asarray(rng.integers(0, 2, ROWS), jnp.float32),
    }
    return jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params), batch


class Runs:
    """A loss of all rows, and of micro-batches by themselves, and its arguments."""

    def __init__(self, name, kind):
        fun, (params, batch) = LOSSES[name], draw()
        options = {}
        if kind is not None:
            mesh = mesh_of(getattr(AxisType, kind))
            options["data_axis"] = ga.DataAxis("data", mesh=mesh)
            params = jax.device_put(params, NamedSharding(mesh, P()))
            batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
        more = {"weight_fn": lambda b: b["mask"].sum()} if fun is masked else {}
        self.args = params, batch
        if fun is dropout:  # each micro-batch draws
            self.args, more = (*self.args, jax.random.key(0)), {"rng_argnums": 2}
        self.whole = ga.value_and_grad(fun, K, **options)
        self.plain = by_themselves(fun, K, **options, **more)

    def products(self):
        return products(self.whole, *self.args), products(self.plain, *self.args)

    def compiled(self):
        runs = self.whole, self.plain
        return [jax.jit(run).lower(*self.args).compile() for run in runs]


def mesh_of(kind, devices=4):
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices]
    )


def as_before(monkeypatch):
    """The gradients of each micro-batch are rounded."""
    monkeypatch.setattr(step.Step, "low_precision", False)


@pytest.mark.grid(6, 18)
@pytest.mark.parametrize("kind", [None, "Auto", "Explicit"])
@pytest.mark.parametrize("name", LOSSES)
def test_a_mean_takes_the_passes_and_the_temporaries_of_the_plain_loop(
    name, kind, monkeypatch
):
    runs = Runs(name, kind)
    whole_products, plain = runs.products()
    assert whole_products == plain
    assert plain[1] > 0  # some are added in float32
    compiled = whole, plain = runs.compiled()
    needs = [c.memory_analysis().temp_size_in_bytes for c in compiled]
    # On a mesh XLA holds one copy of the layers, which it does not if it adds to a sum.
    more = 0 if kind is None else LAYERS * WIDTH * WIDTH * 4
    assert 0 < needs[0] <= 1.01 * needs[1] + more
    if name in MEANS and kind is not None:
        mesh = mesh_of(getattr(AxisType, kind))
        for audit in [ga.audit(c, mesh) for c in compiled]:
            assert len(audit.collectives) == 1
            assert not audit.in_loop
    if name in MEANS and name != "dropout":
        assert bits(whole(*runs.args)) == bits(plain(*runs.args))
    # The twin.
    as_before(monkeypatch)
    assert runs.products()[0][1] < whole_products[1]


# -- What a micro-batch reads of the axis ----------------------------------------------


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, ct: (2 * ct,))


def drawn(h):
    return jax.random.uniform(jax.random.key(0), h.shape, h.dtype)


def looped(h):
    return jax.lax.fori_loop(0, 3, lambda i, x: jnp.tanh(x), h)


READS = {
    "relu": (jax.nn.relu, False, False),
    "gelu": (jax.nn.gelu, False, False),
    "rule": (doubled, False, False),
    "softmax": (jax.nn.softmax, False, False),
    "checkpoint": (jax.checkpoint(jnp.tanh), False, False),
    "loop": (looped, False, False),
    "branch": (lambda h: jax.lax.cond(True, jnp.tanh, jnp.sin, h), False, False),
    "checkpoint of a rule": (jax.checkpoint(jax.nn.relu), False, False),
    "dropout": (lambda h: h * drawn(h), False, True),
    "checkpoint of dropout": (jax.checkpoint(lambda h: h * drawn(h)), False, True),
    "norm": (lambda h: h - h.mean(0), True, False),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", READS)
def test_what_nobody_reads_is_neither_a_meeting_nor_the_index(name):
    fun, meets, reads = READS[name]
    _, part = whole_harness.partitioned(
        lambda h, w, ids: [fun(jnp.float32(h) @ jnp.float32(w)).mean()],
        whole_harness.arguments(),
    )
    assert (part.meets, part.reads_index) == (meets, reads)


# -- Which rows are in a micro-batch ---------------------------------------------------


def in_pairs(w, x):
    """Neighbouring rows need each other."""
    h = (x @ w).reshape(-1, 2)
    return (h[:, 0] * h[:, 1]).mean(), {"pairs": h}


def by_row(w, x):
    h = x @ w
    return (h**2).mean(), {"rows": h, "twice": jnp.concatenate([h, -h])}


def with_noise(w, x):
    h = x @ w + drawn(x[:, 0])
    return (h**3).mean(), {"rows": h}


W, X = jnp.arange(1.0, 4.0), jnp.sin(jnp.arange(96.0)).reshape(32, 3)


def close(got, want):
    bound = 100 * 32 * np.finfo(np.float32).eps
    return all(
        x.shape == y.shape and np.abs(np.asarray(x) - np.asarray(y)).max() < bound
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    )


@pytest.mark.parametrize("fun", [in_pairs, by_row, with_noise])
@pytest.mark.parametrize("how", ["argument", "shardings", "context", "axis", "region"])
def test_rows_keep_their_order_wherever_the_batch_lies(fun, how):
    mesh = mesh_of(AxisType.Auto)
    whole, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
    want = jax.value_and_grad(fun, has_aux=True)(W, X)
    placed = jax.device_put(W, whole), jax.device_put(X, split)
    options = {"has_aux": True}
    step = ga.value_and_grad(fun, 4, **options)
    if how == "argument":
        got = jax.jit(step)(*placed)
    elif how == "shardings":  # Nothing names the mesh before the program is compiled.
        got = jax.jit(step, in_shardings=(whole, split))(W, X)
        if fun is in_pairs:  # The twin: every k-th row makes other pairs.
            plain = by_themselves(fun, 4, has_aux=True, aux="last")
            other = jax.jit(plain, in_shardings=(whole, split))(W, X)
            assert not close(other[0][0], want[0][0])
    elif how == "context":
        with jax.set_mesh(mesh):
            compiled = jax.jit(step).lower(*placed).compile()
            got = compiled(*placed)
        kinds = {c.kind for c in ga.audit(compiled, mesh).collectives}
        # Without a need for neighbours, no row of the batch moves; those of an aux may.
        if fun is not by_row:
            assert (kinds <= {"all-reduce"}) == (fun is with_noise)
    elif how == "axis":
        axis = ga.DataAxis("data", mesh=mesh)
        got = jax.jit(ga.value_and_grad(fun, 4, data_axis=axis, **options))(*placed)
    else:
        step = ga.value_and_grad(fun, 4, data_axis="data", **options)
        of_aux = dict.fromkeys(want[0][1], P("data"))
        of_aux |= {"twice": P()} if fun is by_row else {}  # It has no part of that.
        run = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P(), P("data")),
            out_specs=((P(), of_aux), P()),
            check_vma=False,
        )
        got = jax.jit(run)(*placed)
    assert close(got, want)
