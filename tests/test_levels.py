"""Levels cost what they must: passes, bytes and lines of losses with many of them.

A norm over rows is two levels, its mean and its variance. Passes, lines and bytes are
exact; what depends on the size of the program is counted, and not timed.
"""

import collections
import itertools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import products, temporaries

import ga_optax as ga
from ga_optax._passes import ir
from ga_optax._window import levels as reporting
from ga_optax._window import room, run
from ga_optax._window.values import Values

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    # What little room saves is another test's: test_savings.
    pytest.mark.filterwarnings("ignore:.* micro-batches need about"),
]
K, ROWS, WIDTH = 8, 1024, 32


def arguments(layers, rows=ROWS):
    rng = np.random.default_rng(0)

    def array(*shape):
        return jnp.asarray(rng.normal(size=shape) / np.sqrt(shape[0]), jnp.float32)

    params = {"layers": [array(WIDTH, WIDTH) for _ in range(layers)]}
    params["head"] = array(WIDTH, 1)
    return params, {"x": array(rows, WIDTH) * 16, "y": array(rows, 1)}


def norm(h):
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)


def residual(p, b):
    h = b["x"]
    for w in p["layers"]:
        h = h + jnp.tanh(norm(h @ w))
    return jnp.mean((h @ p["head"] - b["y"]) ** 2)


def straight(p, b):
    h = b["x"]
    for w in p["layers"]:
        h = jnp.tanh(norm(h @ w))
    return jnp.mean((h @ p["head"] - b["y"]) ** 2)


def plain(p, b):
    """The same network without a norm: micro-batches of it need no levels."""
    h = b["x"]
    for w in p["layers"]:
        h = h + jnp.tanh(h @ w)
    return jnp.mean((h @ p["head"] - b["y"]) ** 2)


def window(fun, **options):
    return jax.jit(ga.value_and_grad(fun, K, **options))


def found(fun, layers, **options):
    return ga.batch_dependencies(fun, K, **options)(*arguments(layers))


def passes(fun, layers, **options):
    its = found(fun, layers, **options)
    return its.forward_passes, its.backward_passes


def off(fun, args, **options):
    """The largest error, of the largest entry of its leaf."""
    got, want = window(fun, **options)(*args), jax.value_and_grad(fun)(*args)
    pairs = zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    return max(float(jnp.abs(x - y).max() / jnp.abs(y).max()) for x, y in pairs)


# -- Right, whatever stays -------------------------------------------------------------


@pytest.mark.grid(2, 8)
@pytest.mark.parametrize("fun", [residual, straight])
@pytest.mark.parametrize("borders", [None, 0, 3, 8])
def test_gradients_are_those_of_the_whole_batch_whatever_stays(fun, borders):
    args = arguments(7, rows=64)
    limit = None if borders is None else borders * args[1]["x"].nbytes
    assert off(fun, args, residual_bytes=limit) < 2e-5


def test_what_is_filled_again_is_what_was_dropped(monkeypatch):
    """Twin: filled again of other rows, gradients are wrong."""
    fill = run.forward.fill_again

    def of_others(values, level):
        xs = values.xs
        values.xs = [xs[0], *(jnp.roll(x, 1, 0) for x in xs[1:])]
        fill(values, level)
        values.xs = xs

    args = arguments(12, rows=64)
    assert off(residual, args) < 2e-5
    monkeypatch.setattr(run.forward, "fill_again", of_others)
    assert off(residual, args) > 1e-3


# -- Passes and bytes ------------------------------------------------------------------


@pytest.mark.parametrize("fun", [residual, straight])
@pytest.mark.parametrize("layers", [2, 5, 12])
def test_by_default_nothing_runs_more_than_three_times_and_once_back(fun, layers):
    forward, backward = passes(fun, layers)
    assert forward <= 3
    assert backward == 1
    if layers > 2:  # The twin: without room it is a multiple of the levels.
        assert passes(fun, layers, residual_bytes=0) > (2 * layers, layers)


def test_two_levels_a_layer_are_kept_in_what_room_there_is():
    layers = 6
    border = arguments(1)[1]["x"].nbytes
    runs = [passes(straight, layers, residual_bytes=n * border) for n in range(9)]
    # At three borders what is kept after some levels alone is no longer all there is.
    few, segments, everything = [(13, 7), (9, 5)], [(2, 1)] * 3, [(1, 1)] * 2
    assert runs == [(24, 13)] * 2 + few + segments + everything


@pytest.mark.parametrize("fun", [residual, straight])
def test_segments_take_a_few_borders_and_not_one_of_each_layer(fun, monkeypatch):
    layers = 20
    args = arguments(layers)
    border = args[1]["x"].nbytes * (2 if fun is residual else 1)  # what goes on
    taken = temporaries(window(fun), *args)
    of_step = temporaries(jax.jit(ga.value_and_grad(plain, K)), *args)
    assert taken < of_step + 2 * np.sqrt(layers) * border
    everything = temporaries(window(fun, residual_bytes=10**9), *args)
    assert taken < everything / 1.5
    # The twin: nothing is dropped.
    monkeypatch.setattr(room, "_segments", lambda lives, end, most: ())
    assert temporaries(window(fun), *args) == everything


def test_what_is_filled_again_waits_for_what_comes_later(monkeypatch):
    args = arguments(12)
    taken = temporaries(window(residual), *args)
    # The twin: XLA fills it while later cotangents are still there.
    monkeypatch.setattr(Values, "after_all", lambda values, stack: stack)
    assert temporaries(window(residual), *args) > 1.25 * taken


def test_arrays_that_nobody_reads_any_more_are_written_over(monkeypatch):
    made = []
    room_of = Values.room

    def counted(values, like):
        before = values.made
        stack = room_of(values, like)
        made.append(stack.nbytes * (values.made - before))
        return stack

    monkeypatch.setattr(Values, "room", counted)
    args = arguments(12)
    taken = temporaries(window(residual), *args)
    assert sum(made) < taken
    # The twin: each buffer, and each cotangent, is an array of its own.
    made.clear()
    none = property(lambda values: [], lambda *_: None)
    monkeypatch.setattr(Values, "rooms", none, raising=False)
    jax.eval_shape(ga.value_and_grad(residual, K), *args)
    assert sum(made) > 2 * taken


def conv(x, w):
    layout = "NHWC", "HWIO", "NHWC"
    return jax.lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=layout)


def images(p, b):
    """A residual network with two norms over rows and pixels in each block."""

    def normed(h):
        return (h - h.mean((0, 1, 2))) * jax.lax.rsqrt(h.var((0, 1, 2)) + 1e-5)

    h = jax.nn.relu(normed(conv(b["x"], p["stem"])))
    for one, two in p["blocks"]:
        inner = jax.nn.relu(normed(conv(h, one)))
        h = jax.nn.relu(h + normed(conv(inner, two)))
    return jnp.mean((h.mean((1, 2)) @ p["head"] - b["y"]) ** 2)


def of_images(blocks=5, rows=64, side=8, width=16):
    rng = np.random.default_rng(0)

    def array(*shape):
        scale = np.sqrt(np.prod(shape[:-1]))
        return jnp.asarray(rng.normal(size=shape) / scale, jnp.float32)

    block = [(array(3, 3, width, width),) * 2 for _ in range(blocks)]
    params = {"stem": array(3, 3, 3, width), "blocks": block, "head": array(width, 1)}
    return params, {"x": array(rows, side, side, 3) * 9, "y": array(rows, 1)}


@pytest.mark.parametrize(
    ("fun", "args"),
    [
        (residual, arguments(10)),
        (straight, arguments(10)),
        pytest.param(images, of_images(), marks=pytest.mark.slow),
    ],
    ids=["residual", "straight", "images"],
)
def test_the_peak_that_is_said_is_what_the_compiler_says(fun, args):
    for limit in (None, 10**9):
        options = {"residual_bytes": limit}
        said = ga.batch_dependencies(fun, K, **options)(*args).peak_bytes
        taken = temporaries(window(fun, **options), *args)
        assert abs(said - taken) < 0.15 * taken
    # The twin: what is kept, all in all, is another number by default.
    assert ga.batch_dependencies(fun, K)(*args).kept_bytes > 1.15 * temporaries(
        window(fun), *args
    )


def operations(fun, *args):
    """The multiplications of products and convolutions, as often as they run."""

    def count(jaxpr):
        total = 0.0
        for e in jaxpr.eqns:
            inside = max(map(count, ir.inner_programs(e)), default=0.0)
            is_product = e.primitive.name in ("dot_general", "conv_general_dilated")
            total += e.params.get("length", 1) * inside
            total += _cost(e) if is_product else 0.0
        return total

    return count(jax.make_jaxpr(lambda *args: fun(*args))(*args).jaxpr)


def _cost(e):
    shapes = [x.aval.shape for x in (*e.invars, *e.outvars)]
    sizes = [float(np.prod(shape)) for shape in shapes]
    if e.primitive.name == "dot_general":
        (contracted, _), _ = e.params["dimension_numbers"]
        return sizes[2] * np.prod([shapes[0][i] for i in contracted])
    features = e.params["dimension_numbers"].rhs_spec[0]
    return sizes[2] * sizes[1] / shapes[1][features]


def test_a_residual_network_multiplies_little_more_than_undivided():
    args = of_images(blocks=9, rows=32)
    whole = operations(jax.value_and_grad(images), *args)
    step = ga.value_and_grad(images, K)
    assert ga.batch_dependencies(images, K)(*args).forward_passes <= 3
    assert operations(step, *args) < 1.7 * whole
    # The twin: if nothing is kept, each level runs all before it.
    none = ga.value_and_grad(images, K, residual_bytes=0)
    assert operations(none, *args) > 4 * whole


# -- The size of programs --------------------------------------------------------------


def lines(fun, args, **options):
    step = ga.value_and_grad(fun, K, **options)
    return len(jax.jit(step).lower(*args).as_text().splitlines())


def test_layers_that_are_alike_are_functions_that_are_called(monkeypatch):
    args = arguments(20, rows=64)
    ours, others = lines(residual, args), lines(residual, args)
    assert ours < 2 * others
    # The twin: each level is traced by itself.
    monkeypatch.setattr(ir, "form", lambda jaxpr: object())
    assert lines(residual, args) > 2 * ours


def test_planning_grows_as_the_program_does(monkeypatch):
    visited = collections.Counter()

    def counting(name):
        original = getattr(ir, name)

        def counted(*args, **kwargs):
            out = original(*args, **kwargs)
            visited[name] += len(out[0]) if name == "needed" else 1
            return out

        monkeypatch.setattr(ir, name, counted)

    counting("needed")  # the equations that are found, in all queries
    counting("uses")
    seen = []
    for layers in (10, 20, 40):
        visited.clear()
        args = arguments(layers, rows=64)
        jax.eval_shape(ga.value_and_grad(residual, K), *args)
        seen.append(dict(visited))
    for name in seen[0]:
        for few, many in itertools.pairwise(seen):
            assert many[name] < 2.3 * few[name], (name, seen)


# -- What is said ----------------------------------------------------------------------


def test_what_more_room_would_buy_is_said_and_is_true():
    its = found(residual, 8)
    nbytes, forward, backward = its.more_room
    said = f"With residual_bytes={nbytes:_}: {forward} and {backward}."
    assert said in " ".join(str(its).split())
    more = found(residual, 8, residual_bytes=nbytes)
    assert (more.forward_passes, more.backward_passes) == (forward, backward)
    assert more.more_room is None
    less = found(residual, 8, residual_bytes=nbytes - 1)  # the twin
    assert less.more_room == its.more_room


def centred(p, b):
    """Layers in a scan whose rows minus their mean are read at the end."""

    def layer(h, w):
        h = jnp.tanh(h @ w)
        return h, h - h.mean(0)

    _, each = jax.lax.scan(layer, b["x"], p["stack"])
    return jnp.mean(each**2)


def test_who_runs_more_often_than_segments_would_is_warned_once(monkeypatch):
    monkeypatch.setattr(reporting, "FEW_BYTES", 0)
    reporting._warn.cache_clear()
    x = arguments(1)[1]["x"]
    args = {"stack": jnp.ones((12, WIDTH, WIDTH)) / WIDTH}, {"x": x}
    step = ga.value_and_grad(centred, K)
    with pytest.warns(UserWarning, match="With residual_bytes=") as raised:
        jax.eval_shape(step, *args)
    assert len(raised) == 1
    nbytes = ga.batch_dependencies(centred, K)(*args).more_room[0]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(lambda *args: step(*args), *args)  # traced again: said once
        options = {"residual_bytes": nbytes}
        jax.eval_shape(ga.value_and_grad(centred, K, **options), *args)
        few = arguments(3, rows=64)
        jax.eval_shape(ga.value_and_grad(residual, K), *few)


def test_products_are_counted():
    """`operations` sees a product that runs in a loop as often as that does."""
    args = arguments(2)
    assert products(ga.value_and_grad(plain, K), *args)[0] % K == 0
    once = operations(jax.value_and_grad(plain), *args)
    assert operations(ga.value_and_grad(plain, K), *args) == once


@pytest.mark.parametrize("limit", [None, 0, 10**9])
def test_what_prints_does_not_compute_again_what_is_kept(limit):
    """It would be computed of the batch then, and have no cotangent."""

    def printing(p, b):
        def layer(h, w):
            h = norm(h @ w)
            jax.debug.callback(lambda x: None, h.sum())
            return jnp.tanh(h)

        h = b["x"]
        for w in p["layers"]:
            h = jax.checkpoint(layer)(h, w)
        return jnp.mean((h @ p["head"] - b["y"]) ** 2)

    args = arguments(4, rows=64)
    assert off(printing, args, residual_bytes=limit) < 2e-5
