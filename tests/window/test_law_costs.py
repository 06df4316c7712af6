"""What any loss costs: passes, counted in the program, and bytes that XLA takes."""

import contextlib
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from corpus import losses, scans
from corpus.losses import LOSSES, D, E, N, hidden
from helpers import (
    apart,
    array,
    mean_of,
    mesh_of,
    of_benchmarks,
    products,
    put,
    temporaries,
)
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._partition import reductions, rules
from ga_optax._passes import alive, jaxprs
from ga_optax._window import room, run

pytestmark = [
    pytest.mark.usefixtures("optax_promotion"),
    pytest.mark.filterwarnings("ignore:.*computed whole"),
    pytest.mark.filterwarnings("ignore:.*the undivided batch takes less"),
]


compare, real = of_benchmarks("compare", "real")
CASES = dict(compare.cases())
LOW = jnp.bfloat16


def passes(found):
    return found.forward_passes, found.backward_passes


def said(fun, k, args, **options):
    return passes(ga.batch_dependencies(fun, k, **options)(*args))


def of_inputs(fun, *args):
    """How many products of rows with `p["in"]` there are, and to its gradient."""
    found = np.zeros(2, int)
    text = jax.jit(fun).lower(*args).as_text()
    for types in re.findall(r"stablehlo\.dot_general.*: \((.*)\n", text):
        shapes = re.findall(r"tensor<([\dx]*)x\w+>", types)
        *given, out = (math.prod(map(int, shape.split("x"))) for shape in shapes)
        # That of one row is of a sum of rows.
        found += [out > E and D * E in given, out == D * E]
    return found


# Of several products, one may run more often than another.
SEVERAL = "clip simclr vicreg sinkhorn gradient_penalty experts routed tokens"
ONE_PRODUCT = [name for name in LOSSES if name not in SEVERAL.split()]


@pytest.mark.parametrize("name", LOSSES)
def test_passes_are_those_of_the_table(name):
    args = losses.arguments(dtype=np.float32)
    assert said(LOSSES[name].value, 3, args) == LOSSES[name].passes


@pytest.mark.grid(20, 60)
@pytest.mark.parametrize("limit", [None, 0, 2000])
@pytest.mark.parametrize("name", ONE_PRODUCT)
def test_passes_are_those_that_are_counted_in_the_program(name, limit):
    fun, args = LOSSES[name].value, losses.arguments(dtype=np.float32)
    step = ga.value_and_grad(fun, 3, residual_bytes=limit)
    ran = of_inputs(step, *args) / of_inputs(jax.grad(fun), *args)
    assert tuple(ran) == said(fun, 3, args, residual_bytes=limit)


@pytest.mark.grid(6, 20)
@pytest.mark.parametrize("name", LOSSES)
def test_the_memory_is_the_tables_share_of_that_of_the_undivided_batch(name):
    pairs_of_all = ("experts", "sinkhorn", "hard_triplet", "routed")
    n = 256 if name in pairs_of_all else 1024
    loss, args = LOSSES[name], losses.arguments(n, np.float32, 64)
    ours = temporaries(jax.jit(ga.value_and_grad(loss.value, 8)), *args)
    undivided = temporaries(jax.jit(jax.value_and_grad(loss.value)), *args)
    # There XLA has less for the undivided batch of one of them.
    older = 1.1 if jax.__version_info__ < (0, 11) else 1
    assert 0 < ours <= older * loss.share * undivided


# Of rows that need most of each other micro-batches take as much as the undivided
# batch, or more: then that runs. Below `LITTLE` bytes none is asked for.
PAIRS = "clip simclr hard_triplet sinkhorn survival"  # their rows squared take long


@pytest.mark.grid(3, 10)
@pytest.mark.parametrize("name", [x for x in CASES if x not in PAIRS.split()])
def test_no_loss_takes_more_than_the_undivided_batch(name):
    loss, *args = dict(compare.cases(1024))[name]
    ours = temporaries(jax.jit(ga.value_and_grad(loss, 8)), *args)
    undivided = temporaries(jax.jit(jax.value_and_grad(loss)), *args)
    assert 0 < ours <= max(undivided, room.LITTLE)


@pytest.mark.quick
def test_the_undivided_batch_runs_where_micro_batches_take_more():
    """Each stores what the scan carries, and has a cotangent of all that at a time."""
    how = scans.How(8, remat=True)
    loss, (p, x) = (
        scans.loss_of(scans.with_rule, how),
        scans.arguments(8, 96, np.float32),
    )
    many = jnp.tile(x, (128, 1))
    says = "the undivided batch takes less"
    with pytest.warns(UserWarning, match=says):
        ours = compare.operations(ga.value_and_grad(loss, 8), p, many)
    assert ours == compare.operations(jax.value_and_grad(loss), p, many)
    found = ga.batch_dependencies(loss, 8)(p, many)
    assert says in " ".join(str(found).split()) in " ".join(found.details.split())
    assert [x.loop for x in found.stages] == ["once, all rows, forward and backward"]
    # The twin: a little is worth no pass.
    few = ga.batch_dependencies(loss, 8)(p, x)
    assert few.undivided == ""
    assert len(few.stages) > 2


def test_plans_with_less_room_are_tried_before_all_rows_run(monkeypatch):
    """The one with the fewest passes that takes less than the undivided batch runs."""
    args = of_layers(4, rows=2**12)
    passes_of = lambda: said(residual, OVER, args)  # noqa: E731
    default, least = passes_of(), said(residual, OVER, args, residual_bytes=0)
    counts = iter([100, 200, 90])  # the undivided batch, the default, less room
    monkeypatch.setattr(run, "_CLEAR", 10**9)
    monkeypatch.setattr(run.alive, "most_alive", lambda _: next(counts))
    assert default < passes_of() <= least


COUNTED = "vicreg", "attention", "layers", "batch_norm", "hardest", "routed_layers"


@pytest.mark.cpu
@pytest.mark.grid(2, 6)
@pytest.mark.parametrize("name", COUNTED)
def test_bytes_are_counted_as_the_compiler_has_them(name, monkeypatch):
    """Both ways by one ruler, of the program that runs."""
    monkeypatch.setattr(run, "_takes_less", lambda *_: True)
    loss, *args = dict(compare.cases(1024))[name]
    for step in (jax.value_and_grad(loss), ga.value_and_grad(loss, 8)):
        closed = jax.make_jaxpr(lambda *args, step=step: step(*args))(*args)
        found = alive.most_alive(jaxprs.live(closed.jaxpr))
        assert 0.7 <= found / temporaries(jax.jit(step), *args) <= 1.4


# The share of the undivided batch's bytes and products, at most.
REAL = {
    "experts by index, over slots": (0.52, 1.25),
    "1 packed sequence of 1024": (0.2, 1.1),
}


@pytest.mark.cpu
@pytest.mark.slow
@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("name", REAL)
def test_models_whose_rows_meet_take_a_share_of_the_undivided_batch(name, low):
    loss, params, batch, how = dict(real.cases(is_low=low))[name]
    ours, undivided = ga.value_and_grad(loss, 8, **how), jax.value_and_grad(loss)
    nbytes, products = REAL[name]
    assert ga.batch_dependencies(loss, 8, **how)(params, batch).undivided == ""
    taken = [temporaries(jax.jit(x), params, batch) for x in (ours, undivided)]
    assert 0 < taken[0] <= nbytes * taken[1]
    of_all, _ = compare.operations(undivided, params, batch)
    assert compare.operations(ours, params, batch)[0] <= products * of_all


def test_scores_that_wait_for_a_mask_are_no_residual():
    """Segments are counted in the checkpoint, and so rows meet before the mask."""
    name = "1 packed sequence of 256"
    loss, params, batch, how = dict(real.cases(16, 64))[name]
    found = ga.batch_dependencies(loss, 8, **how, residual_bytes=10**9)
    scores = 4 * 32 * 256  # of a micro-batch, in four heads
    assert 0 < max(x.type.size for x in found(params, batch).kept) < scores


def hard_negatives(p, b, mask="a mask", joined=True):
    """Queries over all items, beside negatives of their own; hits are left out."""
    n = len(b["query"])
    query, items = (jnp.tanh(b[x] @ p) for x in ("query", "items"))
    both, own = jnp.concatenate([items[:, 0], items[:, 1]]), jnp.arange(n)
    is_hit = jnp.tile(b["id"], 2) == b["id"][:, None]
    if mask == "a mask":
        is_hit &= ~jnp.eye(n, 2 * n, dtype=bool)
    else:
        is_hit = is_hit.at[own, own].set(False)
    logits = jnp.where(is_hit, -jnp.inf, query @ both.T)
    if joined:
        hard = jnp.einsum("nd,nhd->nh", query, items[:, 2:])
        logits = jnp.concatenate([logits, hard], 1)
    return -jax.nn.log_softmax(logits)[own, own].mean()


@pytest.mark.cpu
@pytest.mark.parametrize("mask", ["a mask", "updates"])
@pytest.mark.parametrize("joined", [False, True])
def test_pairs_are_split_by_rows_where_other_rows_of_them_are_wanted(
    mask, joined, monkeypatch
):
    """Of a product of rows with more rows, fewer are gathered if columns split it."""
    fun = functools.partial(hard_negatives, mask=mask, joined=joined)
    n, k, mesh = 512, 4, mesh_of(8)
    batch = {
        "query": array(n, 8),
        "items": array(n, 4, 8, seed=1),
        "id": jnp.arange(n) % 7,
    }
    p = array(8, 8, seed=2)
    args = put((p, batch), mesh, (P(), P("data")))
    step = ga.value_and_grad(fun, k, data_axis=ga.DataAxis("data", mesh=mesh))
    ours = temporaries(jax.jit(step), *args)
    on_one = temporaries(jax.jit(ga.value_and_grad(fun, 8 * k)), p, batch)
    assert ours <= on_one + 1024  # and a collective's copies of a few numbers
    # Each number has at most 1,028 terms, whose errors are half a rounding each.
    assert apart(step, jax.value_and_grad(fun), *args) < 1e-4
    # The twin: all pairs are gathered; where all rows at once take less, they run.
    monkeypatch.setattr(reductions, "turned_to", lambda *_: None)
    turned = rules.RULES._replace(turned=lambda *_: None)
    monkeypatch.setattr(rules, "RULES", turned)
    step = ga.value_and_grad(fun, k, data_axis=ga.DataAxis("data", mesh=mesh))
    says = "the undivided batch takes less"
    with pytest.warns(UserWarning, match=says) if joined else contextlib.nullcontext():
        assert temporaries(jax.jit(step), *args) > 2 * ours


def causal(w, x):
    @jax.checkpoint
    def layer(h):
        sees = jnp.tri(len(h), dtype=bool)
        scores = jnp.where(sees, jnp.tanh(h @ w) @ jnp.sin(h @ w).T, -jnp.inf)
        return h + jax.nn.softmax(scores) @ h

    return jnp.mean(layer(layer(x)) ** 2)


def running(w, x):
    """What it adds up is larger than that of which it is computed."""

    @jax.checkpoint
    def layer(h):
        each = jnp.einsum("ti,tj->tij", h @ w, h)
        return h + jnp.einsum("tij,tj->ti", jnp.cumsum(each, 0), h)

    return jnp.mean(layer(layer(x)) ** 2)


@pytest.mark.parametrize(("fun", "shape"), [(causal, (16, 128)), (running, (16, 8, 8))])
def test_what_grows_in_a_checkpoint_is_computed_again_and_not_kept(fun, shape):
    args = array(8, 8, scale=0.1), array(128, 8, scale=0.1)
    found = ga.batch_dependencies(fun, 8, residual_bytes=10**9)(*args)
    assert shape not in [x.type.shape for x in found.kept]
    # 128 rows of terms of size 1 in float32, in two layers.
    step = ga.value_and_grad(fun, 8)
    assert apart(step, jax.value_and_grad(fun), *args) < 1e-4


def one_view(p, b):
    z = losses.unit(hidden(p, b["x"]))
    return jax.nn.logsumexp(5 * z @ z.T, axis=1).mean()


def mask(p, b):
    h = hidden(p, b["x"])[:, None] + jnp.zeros((N, 1))
    return (jnp.einsum("st,btd->bsd", jnp.tril(jnp.ones((N, N))), h) ** 2).mean()


def of(name):
    return LOSSES[name].value


MEET = {  # a loss, and the shapes of what its rows need of each other
    "a masked mean waits for its count alone": (of("masked"), [()]),
    "counts that parameters change": (of("dice"), [(), (), ()]),
    "of a gram matrix rows are kept once": (one_view, [(N // 3, E)]),
    "of both softmaxes a maximum, a sum of columns": (
        of("clip"),
        [(N,), (N,), (N, 1), (N // 3, E)],
    ),
    "of two views numbers that are picked": (of("simclr"), [(2 * N,), (2 * N // 3, E)]),
    "of experts their input, no hidden layer": (of("routed"), [(1, E), (E, 8, D)]),
    "a mask as large as the batch by chance": (mask, []),
}


@pytest.mark.parametrize("case", MEET)
def test_only_what_must_meets(case):
    fun, shapes = MEET[case]
    found = ga.batch_dependencies(fun, 3)(*losses.arguments(dtype=np.float32))
    assert sorted(x.type.shape for x in found.meetings) == sorted(shapes)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_experts_in_a_checkpoint_that_casts_their_weights_are_computed_once(dtype):
    """No cast weights are kept: what is kept takes no more bytes than in float32."""
    fun = LOSSES["routed_layers"].value
    p, b = losses.arguments(48, np.float32)
    low = jax.tree.map(lambda x: x.astype(dtype) if x.dtype == "float32" else x, b)
    ours, _ = compare.operations(ga.value_and_grad(fun, 8), p, low)
    undivided, _ = compare.operations(jax.value_and_grad(fun), p, low)
    assert 0.5 * undivided < ours <= 1.35 * undivided
    kept, wide = (ga.batch_dependencies(fun, 8)(p, x).kept_bytes for x in (low, b))
    assert kept <= wide


def of_gram(of):
    """Rows that read a matrix, which is computed of a sum over rows."""

    def fun(w, x):
        h = jnp.tanh(x @ w)
        return jnp.mean((x + h @ of(h.T @ h / len(h), w)) ** 2)

    return fun


def of_mean(number):
    """A product with parameters alone behind a sum over rows; else nothing meets."""

    def fun(w, x):
        h = functools.reduce(lambda h, _: jnp.tanh(h @ w), range(number), x)
        return jnp.mean(jnp.mean(h[:, :, None] * x[:, None], 0) @ w)

    return fun


def penalty(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2) + jnp.sum((w @ w.T - jnp.eye(len(w))) ** 2)


def of_power(w, x, root=lambda x: x, wrap=lambda f: f):
    layer = wrap(lambda w, x: jnp.tanh(x @ (w @ w @ w)))
    return root(jnp.mean(layer(w, x) ** 2))


def of_branches(w, x):
    """The branches read a sum over rows."""
    of = [lambda g: g @ w @ w, lambda g: g]
    return jnp.mean((x @ jax.lax.cond(w[0, 0] > 0, *of, x.T @ jnp.tanh(x @ w))) ** 2)


ONCE = {  # products of a sum over rows, or of no rows; and the passes
    "four products": (of_gram(lambda g, w: g @ w @ w @ w @ w), (2, 1)),
    "parameters": (of_mean(1), (2, 1)),
    "less than the rows": (of_mean(48), (1, 1)),  # one loop, which costs less
    "in branches": (of_branches, (2, 1)),
    "where rows meet": (functools.partial(of_power, root=jnp.sqrt), (2, 1)),
    "in a checkpoint": (functools.partial(of_power, wrap=jax.checkpoint), (1, 1)),
    "a power": (of_power, (1, 1)),
    "a penalty": (penalty, (1, 1)),
}


@pytest.mark.parametrize("case", ONCE)
def test_a_product_of_sums_or_of_no_rows_is_computed_once(case):
    fun, due = ONCE[case]
    args = array(32, 32, scale=0.2), array(128, 32)
    ours, undivided = ga.value_and_grad(fun, 8), jax.value_and_grad(fun)
    of_all, _ = compare.operations(undivided, *args)
    assert 0.9 * of_all <= compare.operations(ours, *args)[0] <= 1.4 * of_all
    assert said(fun, 8, args) == due
    # float32, and 128 rows of 32 terms in up to six products.
    assert apart(ours, undivided, *args) < 1e-4


def test_products_without_rows_are_computed_again_if_they_take_more_than_a_step():
    """As in the checkpoint of each layer, which keeps none of them."""

    def merged(layers, x):
        layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ (w @ w)))
        return jnp.mean(functools.reduce(layer, layers, x) ** 2)

    args = [array(256, 256, scale=0.1, seed=i) for i in range(4)], array(16, 256)
    assert ga.batch_dependencies(merged, 8)(*args).kept_bytes == 0


OF_FLOAT32 = ("nested", "decoder")  # constants in their bodies have this dtype
PROMISED = [
    pytest.param(name, low)
    for name in CASES
    for low in (False, True)
    if not low or not any(x in name for x in OF_FLOAT32)
]


@pytest.mark.grid(12, 40)
@pytest.mark.parametrize(("name", "low"), PROMISED)
def test_no_loss_takes_more_than_one_and_a_half_times_its_products(name, low):
    case = CASES[name]
    now = compare.in_dtype(case, LOW) if low else case
    found, (fun, *args) = compare.counted(now), now
    undivided, _ = compare.operations(jax.value_and_grad(fun), *args)
    assert found["products"] <= 1.5 * undivided
    if low:  # no more of anything than in float32, but for a few numbers that are kept
        wide = compare.counted(case) | {"kept": max(512, compare.counted(case)["kept"])}
        assert all(found[figure] <= wide[figure] for figure in found)


MEANS = "mean", "total", "classes", "masked", "checkpointed", "tokens"


@pytest.mark.grid(2, 6)
@pytest.mark.parametrize("name", MEANS)
def test_a_mean_costs_what_micro_batches_by_themselves_cost(name):
    """The same products, and their temporaries."""
    loss, args = LOSSES[name].value, losses.arguments(1024, np.float32, 64)
    plain, ours = mean_of(loss, 4), ga.value_and_grad(loss, 4)
    assert products(ours, *args) == products(plain, *args)
    taken = [temporaries(jax.jit(step), *args) for step in (ours, plain)]
    assert 0 < taken[0] <= 1.01 * taken[1]
    # The twin: where rows meet, the forward pass runs once more.
    root = lambda *args: jnp.sqrt(loss(*args))  # noqa: E731
    met = ga.value_and_grad(root, 4, residual_bytes=0)
    assert products(met, *args) > products(plain, *args)


WIDE, MANY, OVER = 32, 1024, 8


def of_layers(layers, rows=MANY):
    of_layer = functools.partial(array, WIDE, WIDE, scale=WIDE**-0.5)
    params = {"layers": [of_layer(seed=i) for i in range(layers)]}
    params["head"] = array(WIDE, 1, scale=WIDE**-0.5)
    return params, {"x": array(rows, WIDE) * 16, "y": array(rows, 1)}


def norm(h):
    return (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)


def network(p, b, layer):
    h = b["x"]
    for w in p["layers"]:
        h = layer(h, w)
    return jnp.mean((h @ p["head"] - b["y"]) ** 2)


def residual(p, b):
    return network(p, b, lambda h, w: h + jnp.tanh(norm(h @ w)))


def straight(p, b):
    return network(p, b, lambda h, w: jnp.tanh(norm(h @ w)))


def without_norm(p, b):
    """Micro-batches of it need no levels."""
    return network(p, b, lambda h, w: h + jnp.tanh(h @ w))


def window(fun, **options):
    return jax.jit(ga.value_and_grad(fun, OVER, **options))


@pytest.mark.parametrize("fun", [residual, straight])
@pytest.mark.parametrize("layers", [2, 8])
def test_by_default_nothing_runs_more_than_three_times_and_once_back(fun, layers):
    forward, backward = said(fun, OVER, of_layers(layers))
    assert forward <= 3
    assert backward == 1


@pytest.mark.grid(0, 2)
@pytest.mark.parametrize("fun", [residual, straight])
def test_segments_take_a_few_borders_and_not_one_of_each_layer(fun):
    layers = 16
    args = of_layers(layers)
    border = args[1]["x"].nbytes * (2 if fun is residual else 1)  # what goes on
    taken = temporaries(window(fun), *args)
    of_step = temporaries(window(without_norm), *args)
    assert taken < of_step + 2 * np.sqrt(layers) * border
    everything = temporaries(window(fun, residual_bytes=10**9), *args)
    assert taken < everything / 1.5


@pytest.mark.grid(0, 2)
@pytest.mark.parametrize("fun", [residual, straight])
def test_the_peak_that_is_said_is_what_the_compiler_says(fun):
    args = of_layers(10)
    for limit in (None, 10**9):
        options = {"residual_bytes": limit}
        found = ga.batch_dependencies(fun, OVER, **options)(*args)
        taken = temporaries(window(fun, **options), *args)
        assert abs(found.peak_bytes - taken) < 0.15 * taken
    # The twin: what is kept, all in all, is another number by default.
    kept = ga.batch_dependencies(fun, OVER)(*args).kept_bytes
    assert kept > 1.15 * temporaries(window(fun), *args)


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize(
    ("body", "least", "most"), [("running", 0.5, 1.5), ("with_rule", 2.5, 3.9)]
)
def test_a_scan_takes_few_stacks(body, least, most, remat):
    """A stack that waited for a sum to which a loop adds would be one more."""
    how = scans.How(8, remat)
    p, x = scans.arguments(how.length, 96, jnp.float32)
    loss = scans.loss_of(getattr(scans, body), how)
    make = lambda k: jax.jit(ga.value_and_grad(loss, k))  # noqa: E731
    plan = ga.plan(make, p, x, batch_size=4, candidates=[4], memory_limit=2**50)
    stack = how.length * x.nbytes
    assert least * stack < plan.candidates[0].temp < most * stack


@pytest.mark.slow
def test_layers_that_are_alike_are_functions_that_are_called(monkeypatch):
    def lines():
        lowered = window(residual).lower(*of_layers(20, rows=64))
        return len(lowered.as_text().splitlines())

    once = lines()
    # The twin: each level is traced by itself.
    monkeypatch.setattr(jaxprs, "form", lambda jaxpr: object())
    assert lines() > 2 * once
