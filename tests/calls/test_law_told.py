"""What `batch_dependencies` and warnings say: where rows meet, and what to do."""

import functools
import os
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from corpus import losses
from corpus.harness import with_rules
from corpus.losses import LOSSES
from helpers import array, failing, mesh_of, off, put
from index import TESTS
from jax.scipy.special import xlogy
from jax.sharding import PartitionSpec

import ga_optax as ga
from ga_optax._calls import engine
from ga_optax._calls import rows as calls_rows
from ga_optax._loop import loop, micro_step
from ga_optax._partition.held import RowsMeet
from ga_optax._passes import places
from ga_optax._window import levels, room
from ga_optax._window import report as window_report

pytestmark = pytest.mark.usefixtures("optax_promotion")
HERE = str(TESTS) + os.sep
K, ROWS = 4, 16
W, X = np.random.default_rng(0).normal(size=(2, ROWS, ROWS)).astype(np.float32)


def found(fun, *args, **options):
    return ga.batch_dependencies(fun, K, **options)(*args)


def lines_of(fun, *args, **options):
    it = found(fun, *args, **options)
    return [x.line for x in (*it.meetings, *it.kept)] + [x for _, x, _ in it.whole]


def line_in(fun, offset):
    return f"{os.path.basename(__file__)}:{fun.__code__.co_firstlineno + offset}"


def warned(call):
    """What a call warns of."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        call()
    return [str(x.message) for x in told]


def test_passes_that_cost_little_are_no_warning():
    def fun(p, x):
        h = x * p
        for _ in range(8):
            h = jnp.sin(h - h.mean(0) * jnp.cos(h).max(0))
        return jnp.mean(h**2)

    def told(d):
        step = jax.jit(ga.value_and_grad(fun, 4))
        return warned(lambda: step.trace(jnp.ones(d), jnp.ones((64, d))))

    assert told(8) == []
    assert "should run forward more than 3 times" in told(1 << 14)[0]  # the twin


def graph(p, b):
    senders = b.get("senders", jnp.arange(64) % 16)
    sent = b["weights"][:, 0] * b["x"][senders]
    h = jnp.zeros(16).at[senders].add(sent) * b["mask"] * b["species"] * p
    return jnp.mean(h**2)


@pytest.mark.quick
def test_a_table_that_is_taken_for_the_rows_is_warned_of_once():
    def fun(p, b):
        out = b["table"][b["tokens"]].mean() * p
        return out + b.get("y", jnp.zeros(1)).mean()

    table = jnp.ones((1000, 4))
    batch = {"tokens": jnp.zeros((8, 3), int), "y": jnp.ones(8), "table": table}

    def told(*names, **options):
        options = options or {"num_microbatches": 4}
        part = {name: batch[name] for name in names}
        return warned(lambda: ga.value_and_grad(fun, **options)(1.0, part))

    [text] = told("tokens", "table")
    assert "here 1,000 (leaf ['table'] has shape (1000, 4))" in text
    assert "more leaves have 8 rows. If that leaf is a table, give it None in" in text
    assert told("tokens", "table") == []
    # Edges of a graph are the rows of most bytes, and have indices of nodes.
    edges = {"senders": jnp.zeros(64, int), "weights": jnp.ones((64, 4))}
    nodes = {name: jnp.ones(16) for name in ("x", "mask", "species")}
    step = ga.value_and_grad(graph, 4)
    assert warned(lambda: step(1.0, edges | nodes)) == []
    del edges["senders"]  # the twin: a table
    assert "more leaves have 16 rows" in warned(lambda: step(1.0, edges | nodes))[0]
    # The twins: what is said, a batch that is larger, and a number of classes.
    axes = {"tokens": 0, "y": 0, "table": None}
    assert told(*axes, num_microbatches=4, batch_axes=axes) == []
    batch |= {"table": table[:2]}
    assert told("tokens", "table", "y") == []
    batch |= {"tokens": jnp.zeros(32, int), "table": table[:8, 0]}
    assert told("tokens", "table") == []


PARAMS = {"layers": array(8, 16, 16, scale=0.2), "head": array(16, 4)}
BATCH = {"x": array(64, 16), "y": jnp.arange(64) % 4}
KEYS = {"a": jax.random.key(0), "b": jax.random.key(1)}
LORA = {"a": array(8, 16, 2, scale=0.1), "b": array(8, 2, 16, scale=0.1)}


def model(params, batch, layer=lambda h, w: (jnp.tanh(h @ w), None)):
    h, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    each = -jax.nn.log_softmax(h @ params["head"])
    return jnp.mean(jnp.take_along_axis(each, batch["y"][:, None], 1))


def adapted(lora, base, batch):
    more = jnp.einsum("lir,lrj->lij", lora["a"], lora["b"])
    return model(base | {"layers": base["layers"] + more}, batch)


def towards(params, other, batch):
    pairs = zip(*map(jax.tree.leaves, (params, other)), strict=True)
    return model(params, batch) + sum(jnp.mean((x - y) ** 2) for x, y in pairs)


def with_state(params, state, batch):
    return towards(params, state[0].mu, batch)


def noisy(params, keys, batch):
    [key, *_] = jax.tree.leaves(keys)
    noise = jax.random.normal(key, batch["x"].shape)
    return model(params, batch | {"x": batch["x"] + noise})


BETWEEN = {
    "frozen model": (adapted, LORA, PARAMS),
    "teacher": (towards, PARAMS, PARAMS),
    "state of an optimizer": (with_state, PARAMS, optax.adam(0.1).init(PARAMS)),
    "key": (noisy, PARAMS, KEYS["a"]),
    "keys": (noisy, PARAMS, KEYS),
    "raw key": (noisy, PARAMS, jax.random.PRNGKey(0)),
    "raw keys": (noisy, PARAMS, jax.tree.map(jax.random.key_data, KEYS)),
}


def said_of(make, fun, params, *rest, k):
    """All that a call says: errors, warnings and reports, and what it returns."""
    acc = [ga.accumulator.init(params)] * (make is ga.accumulate)
    out = []

    def call():
        try:
            run = make(fun, k)
            run = run if make is ga.batch_dependencies else jax.jit(run)
            out.append(run(*acc, params, *rest))
        except Exception as error:
            out.append(error)

    texts = [*warned(call), *map(str, out)]
    return " ".join(" ".join(texts).split()), out[0]


@pytest.mark.parametrize("k", [2, 4, 8])
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.parametrize(
    "make", [ga.value_and_grad, ga.microbatch, ga.accumulate, ga.batch_dependencies]
)
def test_what_comes_between_parameters_and_batch_is_not_taken_for_it(make, name, k):
    """Nothing is said if the call says which argument is the batch: the twin."""
    fun, params, other = BETWEEN[name]
    text, out = said_of(make, fun, params, other, BATCH, k=k)
    assert "argument 2 has 64 in all: is that the batch? Pass batch_argnums=2." in text
    if make is ga.value_and_grad and not isinstance(out, Exception):
        assert off(out, jax.value_and_grad(fun)(params, other, BATCH)) < 1e-5
    options = {"batch_argnums": 2}
    if make is ga.accumulate and "key" in name:
        options["rng_argnums"] = 1
    partly = functools.partial(make, **options)
    acc = [ga.accumulator.init(params)] * (make is ga.accumulate)
    assert warned(lambda: partly(fun, k)(*acc, params, other, BATCH)) == []


def of_list(w, rows):
    return w * sum(jnp.sum(x) for row in rows for x in jax.tree.leaves(row))


@pytest.mark.parametrize("row", [{"x": X[0], "y": X[0, :3]}, (X[0], 1.0), {"x": 1.0}])
@pytest.mark.parametrize(
    "make", [ga.value_and_grad, ga.microbatch, ga.batch_dependencies]
)
def test_rows_in_a_list_are_warned_of_and_views_of_a_batch_are_not(make, row):
    rows, words = [row] * 16, "a list of 16 trees that are alike: are these the rows?"
    text, _ = said_of(make, of_list, jnp.float32(1), rows, k=4)
    assert words in text
    assert "Stack them: jax.tree.map(lambda *rows: jnp.stack(rows), *batch)." in text
    if len(row) > 1:  # else nothing has rows, which is an error
        said = warned(lambda: ga.verify(of_list, jnp.float32(1), rows[:8], 4))
        assert "a list of 8 trees that are alike" in " ".join(said)
    views = [{"x": X, "y": X[:, 0]}] * 5
    assert warned(lambda: ga.verify(of_list, jnp.float32(1), views, 4)) == []
    text, out = said_of(ga.value_and_grad, of_list, jnp.float32(1), views, k=4)
    assert "alike" not in text
    assert off(out, jax.value_and_grad(of_list)(jnp.float32(1), views)) < 1e-5


def with_table(params, batch, more):
    """All that is not the batch goes whole, whatever it is."""
    h = jnp.tanh(batch["x"] @ params["layers"][0]) * jnp.mean(batch["table"])
    rest = sum(map(jnp.sum, jax.tree.leaves(more)))
    return jnp.mean((h @ params["head"]) ** 2) * rest.astype(jnp.float32)


RIGHT = {
    "weights of classes": jnp.ones(10),
    "positions": jnp.arange(128),
    "a table": jnp.ones((5000, 4)),
    "frozen layers": {"w": jnp.ones((12, 4, 4)), "b": jnp.ones((12, 4))},
}


@pytest.mark.parametrize("name", RIGHT)
def test_nothing_is_asked_where_the_batch_is_right_and_a_table_is_in_it(name):
    batch = {"x": jnp.ones((64, 16)), "table": jnp.ones((7, 3))}
    args = PARAMS, batch, RIGHT[name]
    assert warned(lambda: jax.jit(ga.value_and_grad(with_table, 4))(*args)) == []
    assert "is that" not in str(ga.batch_dependencies(with_table, 4)(*args))


def test_no_line_of_a_loss_is_empty_or_of_a_package():
    args = losses.arguments(dtype=np.float32)
    every = (lines_of(loss.fun, *args, has_aux=True) for loss in LOSSES.values())
    lines = [line for some in every for line in some]
    assert lines
    assert [line for line in lines if not line.startswith(HERE)] == []


def test_arguments_are_those_of_the_step_or_their_types():
    def fun(p, x, key, train, scale=1.0):
        keep = jax.random.bernoulli(key, 0.5, x.shape) if train else 1.0
        return jnp.sqrt((jnp.tanh((x * keep) @ p) ** 2).mean()) * scale

    p, x, key = jnp.ones((8, 8)), jnp.ones((ROWS, 8)), jax.random.key(0)
    types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (p, x, key))
    it = found(fun, p, x, key, True)
    assert str(found(fun, *types, True)) == str(it)
    assert it.forward_passes == 2
    x = put(x, mesh_of(2), PartitionSpec("data"))
    it = found(fun, p, x, key, False, data_axis="data")
    of_x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)
    assert it.num_microbatches == 2 * K
    assert str(found(fun, types[0], of_x, key, False, data_axis="data")) == str(it)


BIG = jnp.zeros((512, 32)), {"in": jnp.ones((32, 256)), "mid": jnp.ones((256, 256))}


def sorted_rows(p, x):
    return (jnp.tanh(jnp.sort(jnp.tanh(x @ p["in"]), 0) @ p["mid"]) ** 2).mean()


def by_rows(p, x):
    return (jnp.tanh(jnp.tanh(x @ p["in"]) @ p["mid"]) ** 2).mean()


def shuffled(p, x):
    return by_rows(p, x[jax.random.permutation(jax.random.key(0), len(x))])


def printed(p, x):
    h = jnp.tanh(x @ p["in"])
    jax.debug.print("{}", h)
    return (h**2).mean()


def queued(p, x):
    h = jnp.tanh(x @ p["in"])
    old = jax.lax.stop_gradient(jnp.concatenate([h, h]))
    new = jax.lax.dynamic_update_slice(old, h, (0, 0))
    return jax.nn.logsumexp(h @ new.T)


# What keeps a loss from saving memory: a line of a function, from its first.
LITTLE = {sorted_rows: (sorted_rows, 1), printed: (printed, 2), queued: (queued, 3)}
LITTLE |= {by_rows: None, shuffled: None}  # the twins
TODO = {printed: "give it fewer numbers", queued: "jnp.concatenate"}


@pytest.mark.parametrize("rows", [16, 512])
@pytest.mark.parametrize("fun", LITTLE)
def test_more_of_all_rows_than_of_its_own_is_said_once_with_its_line(fun, rows):
    def told():
        step = ga.value_and_grad(fun, 8)
        return warned(lambda: jax.eval_shape(step, BIG[1], BIG[0][:rows]))

    first = told()
    assert len(first) == (LITTLE[fun] is not None)
    for said in first:
        assert f"{line_in(*LITTLE[fun])}:" in said
        assert "computed whole" in said
        assert TODO.get(fun, "write it for one row, under jax.vmap") in said
        assert not told() or "undivided batch takes less" in said


@pytest.mark.quick
def test_a_line_is_the_users_and_names_the_function_of_a_package(monkeypatch):
    def loss(w, x):
        return optax.tree.norm(x @ w)

    [line, *_] = lines_of(loss, W, X)
    assert line_in(loss, 1) in line
    assert re.search(r", in \w*norm$", line)
    # In a program of packages alone, it is the innermost of these.
    monkeypatch.setattr(places, "_INSTALLED", [os.sep])
    [line, *_] = lines_of(loss, W, X)
    assert f"{os.sep}optax{os.sep}" in line
    monkeypatch.setattr(places, "source_info_util", None)  # as if JAX had none
    assert "without lines" in lines_of(loss, W, X)[0]


def shares_much(w, x):
    """What all rows share takes more than the rows."""
    shared = w
    for _ in range(8):
        shared = jnp.tanh(shared @ w)
    return jnp.mean(jnp.tanh(x @ shared) ** 2)


@pytest.mark.quick
def test_the_way_back_through_what_is_shared_is_not_of_all_rows():
    once = jax.grad(ga.microbatch(shares_much, 4))
    twice = jax.grad(lambda w, x: jnp.sum(jnp.sin(once(w, x))))
    for gradient in (once, twice):
        args = jnp.ones((64, 64)), jnp.ones((16, 64))
        assert warned(lambda: jax.jit(gradient).lower(*args)) == []  # noqa: B023


@pytest.mark.quick
def test_its_bytes_are_those_of_the_programs():
    def ordered(w, x):
        return jnp.sum(jnp.sort(x * w, 0))

    args = jnp.ones(4), jnp.ones((16, 4))
    [said] = warned(lambda: jax.eval_shape(ga.value_and_grad(ordered, 8), *args))
    # All rows come together, are sorted, added up, and shared out; of its own it has
    # their product with the weights.
    whole, own = 256 + 256 + 4 + 4, 2 * 4 * 4
    assert f"computes {whole} bytes for all rows, and {own} for its own" in said
    [line] = ga.batch_dependencies(ordered, 8)(*args).whole
    assert (line.name, line.nbytes) == ("sort", 256)

    def in_a_scan(w, x):  # of all three iterations
        return jax.lax.scan(lambda c, w: (c + ordered(w, x), None), 0.0, w)[0]

    [line] = ga.batch_dependencies(in_a_scan, 8)(jnp.ones((3, 4)), args[1]).whole
    assert (line.name, line.nbytes) == ("sort", 3 * 256)


def centred(p, b):
    """Layers in a scan whose rows minus their mean are read at the end."""

    def layer(h, w):
        h = jnp.tanh(h @ w)
        return h, h - h.mean(0)

    return jnp.mean(jax.lax.scan(layer, b, p)[1] ** 2)


@pytest.mark.parametrize("rows", [pytest.param(16, marks=pytest.mark.quick), 1024])
def test_who_runs_more_often_than_room_would_cost_is_warned_once(
    rows, caplog, monkeypatch
):
    caplog.set_level("INFO", "ga_optax")
    monkeypatch.setattr(room, "LITTLE", 0)  # else so few rows are all kept
    monkeypatch.setattr(window_report, "LITTLE", 0)  # else nothing is said of so little
    args = jnp.ones((12, 32, 32)) / 32, jnp.ones((rows, 32))
    step = lambda: jax.eval_shape(ga.value_and_grad(centred, 8), *args)  # noqa: E731
    told = [sum("With residual_bytes=" in x for x in warned(step)) for _ in range(2)]
    assert told == [1, 0]
    assert "With residual_bytes=" in caplog.text
    it = ga.batch_dependencies(centred, 8)(*args)
    nbytes, forward, backward = it.more_room
    more = ga.batch_dependencies(centred, 8, residual_bytes=nbytes)(*args)
    assert (more.forward_passes, more.backward_passes) == (forward, backward)
    assert more.more_room is None
    assert f"With residual_bytes={nbytes:_}: {forward} and" in " ".join(str(it).split())


@pytest.mark.quick
@pytest.mark.parametrize(
    ("has_refs", "optimize"), [(True, True), (False, True), (False, False)]
)
def test_an_old_jax_says_once_in_the_log_what_it_cannot_do(
    has_refs, optimize, caplog, monkeypatch
):
    monkeypatch.setattr(micro_step, "HAS_REFS", has_refs)
    caplog.set_level("INFO", "ga_optax")
    for _ in range(2):
        ga.value_and_grad(by_rows, K, optimize=optimize)(BIG[1], BIG[0][:8])
    found = [record.getMessage() for record in caplog.records]
    assert len(found) == (optimize and not has_refs)
    assert all(jax.__version__ in one and "in place" in one for one in found)


@jax.custom_jvp
def halved(x):
    return x / 2


halved.defjvp(lambda xs, dots: (xs[0] / 2, dots[0] / 2))


def cumulated(w, x):
    return jnp.mean(jnp.cumsum(jnp.tanh(halved(x @ w)), axis=1) ** 2)


def failures(key, error):
    """What is said of the value, which is right, if one rule raises an error."""

    def run():
        got, due = (make(cumulated)(W, X) for make in (of_rows, jax.value_and_grad))
        assert off(got, due) < 200 * ROWS * np.finfo(np.float32).eps

    of_rows = lambda fun: ga.value_and_grad(fun, K)  # noqa: E731
    with with_rules(lambda name, plain: failing(error) if name == key else plain):
        return [text for text in warned(run) if "all rows at once" in text]


def test_a_rule_that_fails_is_said_and_the_value_is_right():
    [said] = failures("cumsum", TypeError("cumsum got an axis more"))
    assert f"with jax {jax.__version__}" in said
    assert "TypeError: cumsum got an axis more" in said
    [said] = failures("custom_jvp_call", KeyError("jvp_jaxpr_fun"))
    assert "KeyError: 'jvp_jaxpr_fun'" in said
    # The twins: rows meet where they cannot, or nothing is broken.
    assert failures("tanh", RowsMeet()) == failures("nothing", None) == []


# -- Errors of the user's code ---------------------------------------------------------


def called(loss, name, k=K):
    """The functions of the library, with a loss."""
    acc = ga.accumulator.init(W)
    step = lambda k: jax.jit(ga.value_and_grad(loss, k))  # noqa: E731
    return {
        "value_and_grad": lambda: ga.value_and_grad(loss, k)(W, X),
        "jit": lambda: step(k)(W, X),
        "optimize=False": lambda: ga.value_and_grad(loss, k, optimize=False)(W, X),
        "microbatch": lambda: jax.grad(ga.microbatch(loss, k))(W, X),
        "accumulate": lambda: ga.accumulate(loss, k)(acc, W, X),
        "batch_dependencies": lambda: ga.batch_dependencies(loss, k)(W, X),
        "verify": lambda: ga.verify(loss, W, X, k),
        "plan": lambda: ga.plan(
            step, W, X, batch_size=ROWS, memory_limit=1, candidates=[k]
        ),
    }[name]


CALLS = "value_and_grad jit optimize=False microbatch accumulate batch_dependencies"
CALLS = [*CALLS.split(), "verify", "plan"]


def kernel(error, rule):
    """A function with a rule of the user's that raises."""

    def raises(*args):
        raise error

    if rule == "jvp":
        fun = jax.custom_jvp(jnp.tanh)
        fun.defjvp(raises)
    else:
        fun = jax.custom_vjp(jnp.tanh)
        saves = lambda x: (jnp.tanh(x), x)  # noqa: E731
        fun.defvjp(*(raises, saves) if rule == "fwd" else (saves, raises))
    return fun


@pytest.mark.parametrize("rule", ["bwd", "fwd", "jvp"])
@pytest.mark.parametrize("name", CALLS)
def test_an_error_of_a_rule_of_the_users_comes_out_as_it_is(name, rule):
    error, runs = ValueError("head_dim must be 128"), []
    fun = kernel(error, rule)

    def loss(w, x):
        runs.append(x.shape)
        h = fun(x @ w)
        return jnp.mean((h - h.mean(0)) ** 2)

    def call():
        with pytest.raises(ValueError, match="head_dim must be 128") as raised:
            called(loss, name)()
        if name != "plan":  # it tries other numbers, and says what each of them raised
            assert raised.value is error

    assert warned(call) == []
    assert len(runs) == 1


@pytest.mark.quick
def test_a_rule_of_the_users_that_jax_does_not_call_may_raise():
    fun = kernel(NotImplementedError("no gradient"), "bwd")

    def loss(w, x):
        h = x @ w
        stopped = jax.lax.stop_gradient(fun(h)).sum() + fun(w).sum() * 0
        return jnp.mean(h**2) + jax.lax.stop_gradient(stopped), fun(h - h.mean(0))

    def call():
        got = jax.jit(ga.value_and_grad(loss, K, has_aux=True))(W, X)
        due = jax.value_and_grad(loss, has_aux=True)(W, X)
        assert off(got, due) < 200 * ROWS * np.finfo(np.float32).eps

    assert [text for text in warned(call) if "computes" not in text] == []
    with pytest.raises(NotImplementedError, match="no gradient"):  # the twin
        ga.value_and_grad(lambda w, x: fun(x @ w).sum(), K)(W, X)


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("name", [x for x in CALLS if x != "plan"])
def test_a_nan_is_found_once_and_all_rows_do_not_run(name, meets):
    runs = []

    def loss(w, x):
        runs.append(x.shape)
        h = x @ w
        return jnp.mean(jnp.log(h - h.mean(0) if meets else h))

    def count(call):
        del runs[:]
        with pytest.raises(FloatingPointError):
            call()
        return len(runs)

    def call():
        found = called(loss, name)
        if name == "batch_dependencies":  # computes nothing
            assert found().undivided == ""
        elif name == "verify":
            count(found)
        else:  # JAX runs a jitted function once more, to find the line
            own = jax.value_and_grad(loss)
            due = count(lambda: (jax.jit(own) if name == "jit" else own)(W, X))
            assert count(found) == due

    with jax.debug_nans(True):
        assert warned(call) == []


@pytest.mark.parametrize("jit", [False, True])
def test_nans_of_scanned_layers_are_checked_as_any_other(jit):
    """Their gradients are added in place, in an equation of the library's own."""

    def loss(layers, x):
        return jnp.mean(jax.lax.scan(lambda h, w: (jnp.log(h @ w), None), x, layers)[0])

    layers, x = jnp.stack([-jnp.eye(W.shape[0])] * 2), jnp.abs(X)
    step = ga.value_and_grad(loss, 4)
    step = jax.jit(step) if jit else step
    assert jnp.isnan(step(layers, x)[0])  # the twin: nobody asked
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="in scan"):
        step(layers, x)


# -- Calls that are not divided --------------------------------------------------------

STATIONS = {
    "partition": (calls_rows, "partition"),
    "schedule": (engine, "plan_window"),
    "run": (engine, "run_window"),
    "the loop": (levels, "arrival"),
    "loop": (loop, "choose_additions"),
}


@pytest.mark.quick
@pytest.mark.parametrize("name", STATIONS)
def test_a_report_foresees_that_all_rows_run_at_once(name, monkeypatch):
    def loss(w, x):
        h = x @ w
        return jnp.mean((h if name == "loop" else h - jnp.tanh(h).mean(0)) ** 2)

    assert found(loss, W, X).undivided == ""  # the twin
    monkeypatch.setattr(*STATIONS[name], failing(KeyError("a parameter")))
    it = found(loss, W, X)
    [said] = warned(lambda: jax.jit(ga.value_and_grad(loss, K))(W, X))
    assert "all rows at once" in said
    assert it.undivided in said
    at = r" \(\w+\.py:\d+\)\."  # where in the library
    assert re.search(f"cannot divide the program: KeyError: 'a parameter'{at}", said)
    [stage] = it.stages
    assert stage.loop == "once, all rows, forward and backward"
    assert {x.holds.split(" of ")[0] for x in stage.computes} == {"all"}
    assert (it.forward_passes, it.backward_passes, it.meetings) == (1, 1, [])
    for text in str(it), it.details:
        assert text.startswith("All rows run at once, in the memory that this takes: 1")


@pytest.mark.quick
def test_one_micro_batch_is_reported_as_all_rows():
    it = ga.batch_dependencies(cumulated, 1)(W, X)
    assert it.undivided == "there is one micro-batch"
    assert [x.loop for x in it.stages] == ["once, all rows, forward and backward"]


@pytest.mark.quick
def test_what_all_rows_cannot_do_either_is_an_error_without_a_warning():
    def loss(w, x):  # JAX has no derivative of such a loop, with rows or without
        stop = lambda c: jnp.abs(c).sum() > 1  # noqa: E731
        return jax.lax.while_loop(stop, lambda c: c / 2, x @ w).sum()

    def call():
        for run in map(called, [loss] * 3, CALLS[:2] + CALLS[5:6]):
            with pytest.raises(ValueError, match="Reverse-mode differentiation"):
                run()

    assert warned(call) == []


@pytest.mark.quick
def test_a_rule_that_fails_by_itself_raises_as_for_jax_and_only_if_it_is_needed():
    """`xlogy` of integers has a value, and no derivative."""

    def fun(w, x):
        return jnp.mean(xlogy(jnp.int32(x > 0), x**2 + w**2))

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert off(ga.microbatch(fun, K)(W[0], X), fun(W[0], X)) < 1e-6
        report = ga.batch_dependencies(fun, K)
        for call in (jax.value_and_grad(fun), ga.value_and_grad(fun, K), report):
            with pytest.raises(TypeError, match="float0"):
                call(W[0], X)


@pytest.mark.quick
def test_a_scan_of_jax_along_rows_is_named_with_ours():
    def loss(w, x, scan=jax.lax.associative_scan):
        return jnp.mean(scan(lambda a, b: a / 2 + b, jnp.tanh(x @ w)) ** 2)

    args = jnp.ones((8, 8)), jnp.ones((4096, 8))
    [said] = warned(lambda: jax.eval_shape(ga.value_and_grad(loss, 8), *args))
    assert "jax.lax.associative_scan, at " in said
    assert line_in(loss, 1) in said
    assert "with ga_optax.associative_scan each micro-batch scans its own" in said
    ours = functools.partial(loss, scan=ga.associative_scan)
    assert warned(lambda: jax.eval_shape(ga.value_and_grad(ours, 8), *args)) == []
