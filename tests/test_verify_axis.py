"""`verify` of losses over a named axis, along other axes, and what fixes the others."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from window_losses import ROWS, arrays, contrastive, encode, errors

import ga_optax as ga
from ga_optax import testing
from ga_optax._verify import Cause
from ga_optax._verify.dependencies import dependencies
from ga_optax._verify.problem import Problem

pytestmark = pytest.mark.usefixtures("fast_compilation")

K = 4


def narrow(tree):
    """In float32; arrays that the generator of `window_losses` makes."""
    return jax.tree.map(lambda x: x if x.dtype == bool else x.astype("float32"), tree)


ARGS = narrow(arrays(rows=8))


def verify(fun, **options):
    return ga.verify(fun, *ARGS, K, axis_name=ROWS, **options)


@pytest.mark.exhaustive
def test_a_loss_that_is_the_same_for_every_k_is_right():
    report = verify(contrastive)
    assert report.cause is Cause.ROUNDING, report
    assert report.dtype == "float64"
    assert report.relative < 1e-14
    testing.assert_accumulation_equivalent(contrastive, *ARGS, K, axis_name=ROWS)


@pytest.mark.exhaustive
def test_in_bfloat16_with_a_key_for_each_row_it_is_right_too():
    def fun(p, b):
        half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (p, {"x": b["x"]}))
        z = encode(*half)
        keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.5, (5,)))(b["key"])
        z = jnp.where(keep, z, jnp.zeros_like(z))
        mean = lax.pmean(jnp.mean(z, 0), ROWS)[None]
        return jnp.mean((z - mean).astype(jnp.float32) ** 4)

    params, batch = ARGS
    batch = {"x": batch["x"], "key": jax.random.split(jax.random.key(0), 8)}
    report = ga.verify(fun, params, batch, K, axis_name=ROWS)
    assert report.ok, report


# -- What goes wrong -------------------------------------------------------------------


def with_local_statistics(p, b):
    h = b["x"] @ p["w"]
    h = h - jnp.mean(h, 0)[None]  # no pmean
    return jnp.mean(h**3 / (1 + lax.pmean(jnp.mean(h**2), ROWS)))


def with_local_labels(p, b):
    z = encode(p, b)
    logits = z @ lax.all_gather(b["y"] + z, ROWS, tiled=True).T
    own = jnp.arange(len(z))  # no axis_index
    return -jnp.mean(jax.nn.log_softmax(logits)[own, own])


def kept(p, b):
    return jnp.where(b["mask"], errors(p, b), 0.0)


def without_the_size(p, b):
    count = lax.psum(jnp.sum(b["mask"]), ROWS).astype("float32")
    return jnp.sum(kept(p, b)) / count  # not times axis_size


def with_a_local_count(p, b):
    mean = lax.pmean(jnp.mean(encode(p, b), 0), ROWS)
    far = jnp.sum(jnp.where(b["mask"], errors(p, b) * jnp.sum(mean**2), 0.0))
    return far / jnp.sum(b["mask"]).astype("float32")


def with_dropout(p, b, key):
    z = encode(p, b)
    z = z * jax.random.bernoulli(key, 0.5, z.shape).astype(z.dtype)
    return jnp.mean((z - lax.pmean(jnp.mean(z, 0), ROWS)[None]) ** 4)


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("fun", "cause", "words"),
    [
        (with_local_statistics, Cause.CROSS_EXAMPLE, "pmean(..., 'rows')"),
        (with_local_labels, Cause.CROSS_EXAMPLE, "axis_index('rows')"),
        (without_the_size, Cause.SCALE, "jax.lax.axis_size('rows')"),
        (with_a_local_count, Cause.WEIGHTS, "weight_fn=lambda batch: batch['mask']."),
        (with_dropout, Cause.RANDOMNESS, "switch the randomness off"),
    ],
)
def test_a_collective_that_is_missing_has_the_cause_of_what_it_does(fun, cause, words):
    rng = {"rng": jax.random.key(0)} if fun is with_dropout else {}
    report = verify(fun, **rng)
    assert report.cause is cause, report
    assert words in report.fix
    assert "MultiSteps" not in report.fix  # it sees no window


def psum_of_a_mean(p, b):
    return lax.psum(jnp.mean(errors(p, b)), ROWS)


def psum_of_means(p, b):
    h = b["x"] @ p["w"]
    return jnp.mean((h - lax.psum(jnp.mean(h, 0), ROWS)[None]) ** 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fun", "cause"),
    [(psum_of_a_mean, Cause.SCALE), (psum_of_means, Cause.CROSS_EXAMPLE)],
)
def test_a_sum_over_the_axis_of_a_mean_needs_pmean(fun, cause):
    report = verify(fun)
    assert report.cause is cause, report
    assert "jax.lax.pmean(..., 'rows')" in report.fix
    assert "jnp.mean(...)" not in report.fix  # it has that already
    assert "maximum" not in report.fix

    def fixed(p, b):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(lax, "psum", lax.pmean)
            return fun(p, b)

    assert verify(fixed).ok


def around_the_devices(number):
    """A loss that passes rows on, once for each device that `number` counts."""

    def loss(p, b):
        own = other = encode(p, b)
        size, total = lax.axis_size(ROWS), jnp.float32(0)
        ring = [(i, (i + 1) % size) for i in range(size)]
        for _ in range(number()):
            total += jnp.mean(jnp.tanh(own @ other.T))
            other = lax.ppermute(other, ROWS, ring)
        return total / jnp.float32(number())

    return loss


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("wrapped", [lambda fun: fun, jax.jit])
def test_a_loss_that_loops_over_the_devices_is_found(wrapped):
    fun = wrapped(around_the_devices(lambda: jax.device_count()))
    report = verify(fun)
    assert report.cause is Cause.UNDETERMINED, report
    assert not report.ok
    assert str(report).startswith("Cannot be compared")
    assert "jax.lax.axis_size('rows') instead of jax.device_count()" in report.fix
    assert report.leaves == ()
    # The twins: with the size of the axis it is right, and who only reads is not meant.
    assert verify(wrapped(around_the_devices(lambda: lax.axis_size(ROWS)))).ok

    def only_logs(p, b):
        print(jax.device_count())
        return contrastive(p, b)

    assert verify(wrapped(only_logs)).ok


def test_the_devices_are_those_of_jax_again_afterwards():
    before = jax.device_count
    verify(around_the_devices(lambda: jax.device_count()))
    assert jax.device_count is before


@pytest.mark.exhaustive
def test_the_fixes_are_right():
    def with_the_size(p, b):
        return without_the_size(p, b) * lax.axis_size(ROWS)

    assert verify(with_the_size).ok
    assert verify(with_a_local_count, weight_fn=lambda b: b["mask"].sum()).ok

    def with_count(p, b):
        own = jnp.sum(b["mask"])
        return with_a_local_count(p, b), {"own": own, "all": lax.psum(own, ROWS)}

    from_aux = ga.FromAux(lambda counts: counts["own"])
    assert verify(with_count, has_aux=True, weight_fn=from_aux).ok


# -- Which collective fixes a loss without any -----------------------------------------


def statistics(p, b):
    h = b["x"] @ p["w"]
    return jnp.mean(jnp.tanh((h - jnp.mean(h, 0)[None]) / jnp.std(h, 0)[None]) ** 3)


def negatives(p, b):
    z = encode(p, b)
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(z @ b["y"].T)))


def in_a_scan(p, b):
    def layer(h, _):
        return jnp.tanh(h - jnp.mean(h, 0)[None]), None

    return jnp.sum(jax.lax.scan(layer, b["x"] @ p["w"], length=2)[0])


def apart(p, b):
    """Attention, normalisation and a maximum of an example by itself, and a norm."""
    h = jnp.stack([b["x"] @ (p["w"] / jnp.linalg.norm(p["w"]))] * 3, 1)
    h = jax.nn.softmax(h @ h.swapaxes(1, 2)) @ (h - jnp.mean(h, 2, keepdims=True))
    flat = jnp.max(h, 2).reshape(-1) / jnp.sum(b["mask"]).astype(h.dtype)
    return jnp.sqrt(jnp.mean(flat**2))


@pytest.mark.parametrize(
    ("fun", "kinds"),
    [
        (statistics, ["psum"]),
        (jax.checkpoint(negatives), ["all_gather"]),
        (in_a_scan, ["psum"]),
        (apart, ["psum"]),
        (lambda p, b: jnp.mean(errors(p, b)), []),
    ],
)
def test_the_program_shows_the_lines_where_rows_depend_on_each_other(fun, kinds):
    params, batch = ARGS
    problem = Problem(
        fun=fun,
        params=params,
        batch=batch,
        key=(),
        k=K,
        weight_fn=None,
        accumulated=fun,
        x64=False,
        axes=[0] * len(batch),
        axis_name=None,
        whole_batch=False,
        plain=fun,
    )
    found = dependencies(problem)
    assert {kind for kind, _ in found} >= set(kinds)
    of = getattr(fun, "__wrapped__", fun).__code__
    lines = {int(line.split(":")[1]) for _, line in found if line}
    assert all(of.co_firstlineno <= n < of.co_firstlineno + 8 for n in lines)
    assert bool(lines) == bool(kinds)


# -- Along other axes ------------------------------------------------------------------


def over_time(params, batch):
    """Over [time, batch, ...], with a mask of [time, batch] and weights of steps."""
    h = jnp.tanh(jnp.cumsum(batch["x"], 0) @ params)
    squares = batch["step"][:, None] * h**2 * batch["mask"]
    return jnp.sum(squares) / jnp.sum(batch["mask"])


@pytest.mark.exhaustive
def test_a_batch_is_split_where_batch_axes_says():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(8, 4, 3)), jnp.float32)
    mask = (jnp.arange(8)[:, None] < jnp.arange(4)[None] + 4).astype("float32")
    batch = {"x": x, "mask": mask, "step": jnp.linspace(1.0, 2.0, 8)}
    args = over_time, jnp.ones(3), batch, 2
    axes = {"x": 1, "mask": -1, "step": None}
    report = ga.verify(*args, batch_axes=axes)
    assert report.cause is Cause.WEIGHTS, report
    assert "weight_fn=lambda batch: batch['mask'].sum()" in report.fix
    options = {"batch_axes": axes, "weight_fn": lambda batch: batch["mask"].sum()}
    assert ga.verify(*args, **options).ok
    # The twin: split along time, it names the axes.
    report = ga.verify(*args, batch_axes=0)
    assert report.cause is Cause.AXIS, report
    assert "batch_axes={'mask': 1, 'step': None, 'x': 1}" in report.fix


@pytest.mark.slow
def test_the_other_axis_is_named_if_the_second_is_the_wrong_one():
    x = jnp.asarray(np.random.default_rng(0).normal(size=(4, 8, 3)), jnp.float32)

    def loss(params, x):
        return jnp.mean(jnp.tanh(jnp.cumsum(x, 1) @ params) ** 2)

    report = ga.verify(loss, jnp.ones(3), x, 2, batch_axes=1)
    assert report.cause is Cause.AXIS, report
    assert "batch_axes=0" in report.fix
    assert ga.verify(loss, jnp.ones(3), x, 2, batch_axes=0).ok
