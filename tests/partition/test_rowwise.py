"""`ga.rowwise`: what the user says of rows."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpus.rules import affine
from helpers import (
    bits,
    mesh_of,
    normal,
    off,
    refusals,
    ruled,
    says,
    temporaries,
    undivided,
)
from jax.extend import core
from jax.interpreters import mlir
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax import _text, associative_scan

K = 8
pytestmark = pytest.mark.usefixtures("optax_promotion")
FAST = pytest.mark.usefixtures("fast_compilation")
ROWS, TIME, WIDTH, EXPERTS = 32, 16, 32, 4
# Sums over rows in another order, of numbers conditioned no worse than 10.
BOUND = 10 * ROWS * float(np.finfo(np.float32).eps)

# -- Losses with code that cannot be read: `promise` is `ga.rowwise`, or changes nothing


def arguments():
    experts = normal(EXPERTS, WIDTH, WIDTH) / 8
    params = {"router": normal(WIDTH, EXPERTS, seed=1), "experts": experts}
    return params, normal(ROWS, TIME, WIDTH, seed=2)


def as_it_is(fun, in_axes=0, out_axes=0):
    """What promises nothing."""
    del in_axes, out_axes
    return fun


def ends(h):
    """A loss in which rows meet otherwise, too."""
    return jnp.mean(h**2) + jnp.mean(h) ** 2


def mixed(x, scale, w):
    """A function that can be read, but one row with itself."""
    return jnp.tanh(x @ w) * jnp.sum(x, axis=-1, keepdims=True) * scale


def in_layers(p, x, promise):
    @jax.checkpoint
    def layer(h, w):
        return h + promise(lambda h: mixed(h, 0.1, w))(h), None

    return ends(jax.lax.scan(layer, x, p["experts"])[0])


def gradient_inside(p, x, promise):
    def energy(x, w):
        return jnp.sum(promise(lambda x, w: mixed(x, 1.0, w), (0, None))(x, w) ** 2)

    of_rows, of_all = jax.grad(energy, (0, 1))(x, p["experts"][0])
    return ends(of_rows) + 1e-4 * jnp.mean(of_all**2)


def sort_on_the_host(x):
    def run(x):
        return np.sort(np.asarray(x), axis=-1)

    return jax.pure_callback(run, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def callback(p, x, promise):
    h = x @ p["experts"][0]
    return ends(h * promise(sort_on_the_host)(jax.lax.stop_gradient(h)))


def scanned(x, scale):
    return jnp.cumsum(jnp.tanh(x), -1) * scale


opaque_p = core.Primitive("opaque")  # as a library's: nothing is known of it
opaque_p.def_abstract_eval(lambda x, scale: x)
opaque_p.def_impl(jax.jit(scanned))
mlir.register_lowering(opaque_p, mlir.lower_fun(scanned, multiple_results=False))


@jax.custom_vjp
def opaque(x, scale):
    return opaque_p.bind(x, scale)


def _backward(saved, ct):
    """Of each row, and linear, as the derivative would be."""
    ct = ct * opaque_p.bind(*saved)
    return ct, jnp.sum(ct, axis=tuple(range(ct.ndim - 1)))


opaque.defvjp(lambda x, scale: (opaque(x, scale), (x, scale)), _backward)


def custom_call(p, x, promise):
    h = x @ p["experts"][0]
    return ends(promise(opaque, in_axes=(0, None))(h, p["router"][:, 0]))


def clips(p, x, promise):
    """A rule that is not linear has to have the whole cotangent."""
    clipped = ruled(lambda ct: jnp.clip(ct, -0.05, 0.05))
    h = promise(clipped)(x[:, 0] @ p["router"])
    return jnp.mean(h**2) + jnp.mean(h - h.mean(0)) ** 2 + jnp.std(h)


LOSSES = (in_layers, clips, gradient_inside, callback, custom_call)
LOSSES = {f.__name__: f for f in LOSSES}


def of(name, promise=ga.rowwise):
    return functools.partial(LOSSES[name], promise=promise)


@FAST
@pytest.mark.grid(5, 20)
@pytest.mark.filterwarnings("ignore:.*computed whole")
@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_the_undivided_batch(name):
    args = arguments()
    want = jax.jit(jax.value_and_grad(of(name, as_it_is)))(*args)
    for promise in (ga.rowwise, as_it_is):  # without one what is unknown is whole
        got = jax.jit(ga.value_and_grad(of(name, promise), K))(*args)
        assert off(got, want) < BOUND


@pytest.mark.grid(2, 20)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "clips"])
def test_it_takes_the_memory_of_micro_batches_by_themselves(name):
    args, fun = arguments(), of(name, as_it_is)
    each = ga.accumulate(fun, K)

    def plain(params, x):
        return each(ga.accumulator.init(params), params, x)

    own = temporaries(jax.jit(ga.value_and_grad(of(name), K)), *args)
    # Rows meet in a mean of all, which takes a few numbers, and fuses otherwise.
    assert own <= 1.1 * temporaries(jax.jit(plain), *args)
    assert own < 0.3 * temporaries(jax.jit(jax.value_and_grad(fun)), *args)
    found = ga.batch_dependencies(of(name), K)(*args)
    assert (found.whole, bool(found.promised)) == ([], True)
    if name in ("callback", "custom_call"):  # the twin: without a promise
        found = ga.batch_dependencies(fun, K)(*args)
        assert (bool(found.whole), found.promised) == (True, [])


@FAST
@pytest.mark.quick
@pytest.mark.parametrize("axis", [0, 2])
def test_under_vmap_it_is_the_function_itself(axis):
    """With rows along what is left (axis 0), or along what is mapped."""

    def fun(w, x, promise=as_it_is):
        x = jnp.moveaxis(x, 1, axis)
        heads = jax.vmap(promise(lambda h: jnp.tanh(h @ w)), axis, axis)(x)
        return jnp.mean(heads**2)

    args = normal(4, 4), normal(8, 3, 4)
    ours = functools.partial(fun, promise=ga.rowwise)
    step = jax.jit(ga.value_and_grad(ours, 4))
    assert off(step(*args), undivided(fun)(*args)) < BOUND
    found = ga.batch_dependencies(ours, 4)(*args)
    assert (found.whole, found.meetings, found.promised) == ([], [], [])


def test_in_a_microbatch_in_a_loss_the_rows_are_those_of_the_inner_one():
    seen = []

    def layer(x, w):
        def run(x):
            seen.append(len(x))
            return jnp.tanh(x @ w)

        return ga.rowwise(run)(x).sum()

    def loss(w, x):
        return ga.microbatch(layer, 4, batch_argnums=0)(x, w) / x.size

    w, x = jnp.ones((4, 2)), jnp.linspace(0, 1, 64).reshape(16, 4)
    want = jax.value_and_grad(lambda w, x: layer(x, w) / x.size)(w, x)
    for step, rows in ((jax.value_and_grad(loss), 4), (ga.value_and_grad(loss, 2), 2)):
        seen.clear()
        assert off(jax.jit(step)(w, x), want) < BOUND
        assert min(seen) == rows


def function(x, w):
    return mixed(x, 2.0, w)


UNDER = {
    "nothing": lambda f: f,
    "vmap": lambda f: jax.vmap(f, (1, None), 1),
    "checkpoint": lambda f: jax.grad(
        lambda x, w: jax.checkpoint(f)(x, w).sum(), (0, 1)
    ),
    "jvp": lambda f: lambda x, w: jax.jvp(f, (x, w), (jnp.cos(x), jnp.sin(w))),
    "scan": lambda f: lambda x, w: jax.lax.scan(lambda h, _: (f(h, w), h), x, length=3),
    "shard_map": lambda f: jax.shard_map(
        f, mesh=mesh_of(2), in_specs=(P("data"), P()), out_specs=P("data")
    ),
}


@pytest.mark.parametrize("name", UNDER)
def test_outside_it_is_the_function_and_costs_nothing(name):
    args = jnp.linspace(-1, 1, 64).reshape(4, 4, 4), jnp.eye(4) * 0.3
    promised = ga.rowwise(function, in_axes=(0, None))
    want, got = (jax.jit(UNDER[name](f)) for f in (function, promised))
    assert bits(got(*args)) == bits(want(*args))
    both = (f.lower(*args).compile().cost_analysis()["flops"] for f in (want, got))
    assert len(set(both)) == 1


def normalised(h):
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)


def by_row(h):
    return (h - h.mean(1, keepdims=True)) / jnp.sqrt(h.var(1, keepdims=True) + 1e-3)


def broken(w, x):
    h = ga.rowwise(by_row)(x @ w)
    return jnp.mean(ga.rowwise(normalised)(h) ** 2 * jnp.arange(4.0))


FEW = normal(4, 4), normal(16, 4)


@FAST
@pytest.mark.slow
def test_a_broken_promise_is_found_by_numbers_and_named():
    got, want = ga.value_and_grad(broken, 4)(*FEW), jax.value_and_grad(broken)(*FEW)
    assert off(got, want) > 0.1
    report = ga.verify(broken, *FEW, 4)
    assert (report.ok, report.cause) == (False, ga.Cause.PROMISE)
    assert re.search(r"test_rowwise.py:\d+:\d+ \(normalised\)", report.message)
    assert "by_row" not in report.message
    # The twin: one that holds is not accused.
    for end in (jnp.mean, jnp.std):

        def holds(w, x, end=end):
            return end(ga.rowwise(by_row)(x @ w) ** 2 * jnp.arange(4.0))

        found = ga.verify(holds, *FEW, 4)
        assert found.ok == (end is jnp.mean)
        assert found.ok or found.cause is ga.Cause.CROSS_EXAMPLE


ONLY_FOR_ALL = {
    "raised TypeError": lambda h: h.reshape(4, 4, 4).cumsum(1).reshape(16, 4),
    "returned": lambda h: jnp.ones((16, 4)) * h[:1],
}


@pytest.mark.parametrize("why", ONLY_FOR_ALL)
def test_what_does_not_take_fewer_rows_is_computed_whole_and_said(why):
    def loss(w, x):
        return jnp.mean(ga.rowwise(ONLY_FOR_ALL[why])(x @ w) ** 2)

    name = "rowwise of <lambda>"
    said = rf"{name} must .* any number of rows, .* it {why}"
    with pytest.warns(UserWarning, match=said):
        got = jax.jit(ga.value_and_grad(loss, 8))(*FEW)
    assert off(got, jax.value_and_grad(loss)(*FEW)) < BOUND
    with pytest.warns(UserWarning, match="any number of rows"):
        found = ga.batch_dependencies(loss, 8)(*FEW)
    assert ([x.name for x in found.whole], found.promised) == ([name], [])


def test_what_a_gradient_in_the_loss_differentiates_must_be_an_argument():
    def loss(w, x, promise=ga.rowwise):
        def energy(w):
            return jnp.sum(promise(lambda x: jnp.tanh(x @ w))(x) ** 2)

        return jnp.mean(jax.grad(energy)(w) ** 2)

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        got = jax.jit(ga.value_and_grad(loss, 8))(*FEW)
    words = "a jax.grad in the loss differentiates"
    is_said = any(words in str(x.message) for x in said)
    assert is_said or jax.__version_info__ < (0, 12)  # older JAX takes what has ended
    want = jax.value_and_grad(functools.partial(loss, promise=as_it_is))(*FEW)
    assert off(got, want) < BOUND


def test_batch_dependencies_lists_promises_and_ends_with_what_to_do(monkeypatch):
    args, unmarked = arguments(), of("callback", as_it_is)
    said = str(ga.batch_dependencies(of("callback"), K)(*args))
    assert "rowwise of sort_on_the_host, promised: 65,536 bytes" in said
    said = re.sub(r":\d+|\s+", " ", str(ga.batch_dependencies(unmarked, K)(*args)))
    assert said.endswith(
        "Hidden code (callback) is computed whole: wrap sort_on_the_host "
        "(test_rowwise.py ) in ga_optax.rowwise if its rows do not need each other."
    )

    def several(p, x):
        hidden = of("callback", as_it_is), of("custom_call", as_it_is)
        return sum(fun(p, x) for fun in hidden)

    said = " ".join(str(ga.batch_dependencies(several, K)(*args)).split())
    assert re.search(r"\(callback, primitive\) is computed whole: wrap", said)
    _text._said.clear()
    with pytest.warns(UserWarning, match=r"wrap .* in ga_optax.rowwise if its rows"):
        jax.eval_shape(ga.value_and_grad(of("custom_call", as_it_is), K), *arguments())


X = np.ones((4, 3), np.float32)


def promised(fun, *args, in_axes=0, out_axes=0, **kwargs):
    return ga.rowwise(fun, in_axes=in_axes, out_axes=out_axes)(*args, **kwargs)


WRONG = """
ga.rowwise(3) -> T fun must be a function
promised(jnp.sin, X, in_axes=None) -> V must have rows, but in_axes gives none
promised(jnp.sin, x=X) -> T pass them by position
promised(jnp.sin, X, in_axes=(0, 0)) -> V an int, None, or a prefix | (0, 0)
promised(jnp.sin, X, in_axes=2) -> V 2 for leaf [0], of shape (4, 3). Pass
promised(lambda x, _: x, X, "flag") -> V has 0 for leaf [1], of <class 'str'>
promised(jnp.add, X, X, in_axes=(0, 1)) -> V same 4 rows, | 1 for leaf [1]
promised(jnp.sum, X) -> V out_axes | 0 for the only leaf, of shape () | Return rows
promised(jnp.sin, X, out_axes=None) -> V out_axes of rowwise must | it has None
promised(lambda x: {"y": x[1:]}, X) -> V the same 4 rows, | leaf ['y']
"""


@pytest.mark.quick
@pytest.mark.parametrize(("code", "error", "said"), refusals(WRONG))
def test_what_does_not_fit_says_what_was_required_what_came_and_what_to_do(
    code, error, said
):
    says(lambda: eval(code), (TypeError, ValueError), said)


# -- Functions that are associative ----------------------------------------------------


@pytest.mark.slow
@FAST
def test_under_vmap_a_scan_is_that_of_jax():
    def loss(w, x, scan=associative_scan):
        return jnp.mean(jax.vmap(lambda h: scan(affine, (h * w, h))[1])(x) ** 2)

    args = jnp.float32(0.5), normal(2, 2 * K, 3)
    want = jax.value_and_grad(functools.partial(loss, scan=jax.lax.associative_scan))
    assert off(ga.value_and_grad(loss, 2, batch_axes=1)(*args), want(*args)) < BOUND
    with pytest.raises(ValueError, match=r"rows meet at \S*test_rowwise\.py"):
        ga.value_and_grad(loss, 3, batch_axes=1)(*args)


@pytest.mark.quick
@FAST
def test_a_scan_of_what_is_not_associative_is_another():
    def loss(w, x, scan=associative_scan):
        return jnp.mean(scan(jnp.subtract, x[0] * w))

    args = jnp.float32(2), normal(1, 2 * K, 3)
    want = undivided(loss)(*args)
    ours = ga.value_and_grad(loss, 2, batch_axes=1)
    assert off(jax.jit(ours)(*args), want) > 0.1
    # That recursion, which nobody announces, is right, and is no scan of its own.
    plain = functools.partial(loss, scan=jax.lax.associative_scan)
    ours = ga.value_and_grad(plain, 2, batch_axes=1)
    assert off(jax.jit(ours)(*args), want) < BOUND


@FAST
def test_a_recurrence_over_tokens_takes_the_memory_of_a_micro_batch():
    def loss(scan, w, x):
        h = x[0] @ w
        a, b = jax.nn.sigmoid(h)[..., None], h[..., None] * jnp.arange(1.0, 9)
        return jnp.mean(jnp.sin(scan(affine, (a * jnp.ones(8), b))[1]))

    args = normal(WIDTH, WIDTH), normal(1, 8 * K, WIDTH, seed=1)

    def taken(scan, way):
        return temporaries(jax.jit(way(functools.partial(loss, scan))), *args)

    ours = functools.partial(ga.value_and_grad, num_microbatches=K, batch_axes=1)
    whole = taken(associative_scan, jax.value_and_grad)
    assert taken(associative_scan, ours) < whole / 3
    with pytest.warns(UserWarning, match=r"with ga_optax\.associative_scan each micro"):
        # By its recursion alone it is no scan.
        assert taken(jax.lax.associative_scan, ours) > whole / 2


@pytest.mark.quick
def test_a_scan_is_what_it_is_elsewhere():
    def names(scan):
        return [e.primitive.name for e in jax.make_jaxpr(scan)(jnp.ones(5)).jaxpr.eqns]

    plain = jax.lax.associative_scan
    ours, theirs = (functools.partial(x, jnp.add) for x in (associative_scan, plain))
    assert names(ours) == names(theirs)
    loss = ga.value_and_grad(lambda w, x: jnp.sum(associative_scan(3, w * x)), 2)
    with pytest.raises(TypeError, match="fn argument should be callable"):
        loss(1.0, jnp.ones(4))
