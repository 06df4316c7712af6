"""What a named axis of micro-batches costs: passes that run, and memory."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import nbytes, temporaries
from jax import lax
from jax.ad_checkpoint import checkpoint_name

import ga_optax as ga
from ga_optax._inside.axis.report import recorded
from ga_optax._passes.ir import inner_programs

ROWS, K = "rows", 4
runs = collections.Counter()


def counted(name, x):
    """`x`; counts how often it is computed, and `back` how often its gradient is."""

    def count(what, x):
        def add(x):
            runs[what] += 1
            return np.asarray(x)

        return jax.pure_callback(add, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    @jax.custom_vjp
    def identity(x):
        return count(name, x)

    identity.defvjp(
        lambda x: (count(name, x), None), lambda _, ct: (count(f"back {name}", ct),)
    )
    return identity(x)


def encode(p, x, name="F"):
    return jnp.tanh(counted(name, x @ p))


def plain(p, x):
    return jnp.mean(encode(p, x) ** 2)


def tokens(p, x):
    count = lax.psum(jnp.sum(x[:, 0] > 0), ROWS).astype(float)
    return lax.axis_size(ROWS) * jnp.sum(encode(p, x)) / count


def whole_tokens(p, x):
    count = lax.psum(jnp.sum(x[:, 0] > 0), ROWS).astype(float)
    return lax.psum(jnp.sum(encode(p, x)), ROWS) / jnp.maximum(count, 1.0)


def whole_tokens_and_metric(p, x):
    z = encode(p, x)
    right = lax.pmean(jnp.mean((z > 0).astype(float)), ROWS)
    return lax.pmean(jnp.mean(z), ROWS) + jnp.sum(p**2), (right, jnp.max(z))


def metric_alone(p, x):
    z = encode(p, x)
    right = lax.pmean(jnp.mean((z > 0).astype(float)), ROWS)
    return jnp.mean(z), (right, jnp.max(z))


def root(p, x):
    return jnp.sqrt(lax.pmean(plain(p, x), ROWS))


def contrastive(p, x):
    z = encode(p, x)
    a, b = z[: len(z) // 2], z[len(z) // 2 :]
    logits = a @ lax.all_gather(b, ROWS, tiled=True).T  # a is not gathered
    own = jnp.arange(len(a)) + lax.axis_index(ROWS) * len(a)
    loss = jax.nn.log_softmax(logits)[jnp.arange(len(a)), own]
    return -jnp.mean(loss) / (1.0 + lax.pmean(jnp.mean(jnp.square(logits)), ROWS))


def one_way(p, x):
    a, b = encode(p, x, "query"), encode(p.T, x, "gathered")
    logits = a @ lax.all_gather(b, ROWS, tiled=True).T
    return jnp.mean(jax.nn.logsumexp(logits, axis=1)) - jnp.mean(jnp.sum(a * b, 1))


def balanced(p, x):
    z = encode(p, x)
    gates = jax.nn.softmax(z)
    chosen = jax.nn.one_hot(jnp.argmax(gates, 1), gates.shape[1])
    share = lax.pmean(jnp.mean(chosen, 0), ROWS)
    return jnp.mean(z**2) + jnp.sum(share * jnp.mean(gates, 0))


def statistics(p, x, mark=lambda h: h):
    h = mark(encode(p, x, "first"))
    h = mark(encode(p, h - lax.pmean(jnp.mean(h, 0), ROWS)[None], "second"))
    return jnp.mean((h - lax.pmean(jnp.mean(h, 0), ROWS)[None]) ** 4)


def marked_statistics(p, x):
    return statistics(p, x, lambda h: checkpoint_name(h, ROWS))


@pytest.mark.grid(3)
@pytest.mark.parametrize(
    ("fun", "passes"),
    [
        (plain, {"F": 1, "back F": 1}),
        (tokens, {"F": 1, "back F": 1}),
        (whole_tokens, {"F": 1, "back F": 1}),
        (whole_tokens_and_metric, {"F": 1, "back F": 1}),
        (metric_alone, {"F": 1, "back F": 1}),
        (root, {"F": 2, "back F": 1}),
        (contrastive, {"F": 2, "back F": 1}),
        (balanced, {"F": 2, "back F": 1}),
        (one_way, {"query": 1, "back query": 1, "gathered": 2, "back gathered": 1}),
        (statistics, {"first": 2, "back first": 1, "second": 2, "back second": 1}),
        (
            marked_statistics,
            {"first": 2, "back first": 1, "second": 2, "back second": 1},
        ),
    ],
)
def test_passes_that_run(fun, passes):
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=(64, 64)) / 8, jnp.float32)
    x = jnp.asarray(rng.normal(size=(16, 64)), jnp.float32)
    has_aux = fun in (metric_alone, whole_tokens_and_metric)
    runs.clear()
    step = ga.value_and_grad(fun, K, axis_name=ROWS, has_aux=has_aux)
    jax.block_until_ready(jax.jit(step)(p, x))
    jax.effects_barrier()
    assert runs == {name: K * times for name, times in passes.items()}


# -- What is kept, and what is shared --------------------------------------------------


def deep(p, x, levels=6):
    h = x
    for i in range(levels):
        h = h + encode(p, h - lax.pmean(jnp.mean(h, 0), ROWS)[None], f"F{i}")
    return jnp.mean(h**4)


def reports(fun, *args, **options):
    with recorded() as found:
        step = ga.value_and_grad(fun, K, axis_name=ROWS, **options)
        closed = jax.make_jaxpr(step)(*args)
    [report] = found
    return report, closed.jaxpr


def bytes_kept(report):
    return sum(x.nbytes for x in report.stored if x.kind == "kept")


def test_a_deep_network_runs_three_times_forward_or_twice_and_once_backward():
    p, x = jnp.ones((64, 64)), jnp.ones((16, 64))
    report, _ = reports(deep, p, x)
    assert (report.forward, report.backward) == (3, 1)  # a segment is filled again
    report, _ = reports(deep, p, x, residual_bytes=10**9)
    assert (report.forward, report.backward) == (2, 1)
    # The sum of all layers so far, and not each of them, after every level but the
    # first, which reads the batch.
    assert bytes_kept(report) == 5 * nbytes(x)
    assert "encode" not in str(report)
    assert "deep" in str(report)


@pytest.mark.slow
def test_as_much_is_kept_as_the_option_allows():
    p, x = jnp.ones((64, 64)), jnp.ones((16, 64))
    most, previous = [], None
    for limit in (0, 2, 3, 4, 6):
        report, _ = reports(deep, p, x, residual_bytes=limit * nbytes(x))
        assert report.kept <= limit * nbytes(x)
        assert (report.kept > 0) == (bytes_kept(report) > 0)
        assert previous is None or report.forward <= previous.forward
        most.append(report.forward)
        previous = report
    assert most[0] > most[2] > most[4] == 2


@pytest.mark.parametrize("bad", [-1, 1.5, True])
def test_the_option_is_a_number_of_bytes(bad):
    with pytest.raises(ValueError, match="residual_bytes must be a number of bytes"):
        ga.value_and_grad(deep, K, axis_name=ROWS, residual_bytes=bad)
    with pytest.raises(ValueError, match="must come with axis_name or whole_batch"):
        ga.value_and_grad(plain, K, residual_bytes=1)


def test_a_mark_is_kept_whatever_the_limit_is():
    p, x = jnp.ones((64, 64)), jnp.ones((16, 64))
    report, _ = reports(marked_statistics, p, x, residual_bytes=0)
    assert bytes_kept(report) == 2 * nbytes(x)
    assert bytes_kept(reports(statistics, p, x, residual_bytes=0)[0]) == 0


def whitened(p, x):
    z = encode(p, x)
    everyone = lax.all_gather(z, ROWS, tiled=True)
    factor = jnp.linalg.cholesky(everyone.T @ everyone + jnp.eye(z.shape[1]))
    return jnp.mean((z @ factor) ** 2) + jnp.sum(jnp.log(jnp.diagonal(factor)))


def times(jaxpr, name):
    """How often a primitive runs."""
    found = 0
    for e in jaxpr.eqns:
        inside = sum(times(inner, name) for inner in inner_programs(e))
        length = e.params["length"] if e.primitive.name == "scan" else 1
        found += (e.primitive.name == name) + length * inside
    return found


def test_what_all_micro_batches_share_is_computed_once():
    rng = np.random.default_rng(0)
    p = jnp.asarray(rng.normal(size=(8, 8)), jnp.float32)
    x = jnp.asarray(rng.normal(size=(16, 8)), jnp.float32)
    report, jaxpr = reports(whitened, p, x)
    assert [s.kind for s in report.stored].count("once") >= 1
    # Once there, and once more where it is differentiated, in whatever many
    # micro-batches. The twin: what has rows runs in each of them.
    assert times(jaxpr, "cholesky") == 2
    assert times(jaxpr, "pure_callback") == 3 * K


def of_sums(z, x):
    q = jax.nn.sigmoid(jnp.sum(z, 1))
    both = jnp.sum(jnp.where(x[:, 0] > 0, q, 0.0))
    both, all_q = lax.psum((both, jnp.sum(q)), ROWS)
    return 1.0 - 2.0 * both / all_q


def dice(p, x):
    return of_sums(x @ p, x)


def dice_of_two_layers(p, x):
    return of_sums(jnp.tanh(x @ p) @ p.T, x)


@pytest.mark.parametrize(("fun", "products"), [(dice, 3), (dice_of_two_layers, 7)])
def test_a_ratio_of_sums_runs_forward_twice_and_keeps_nothing(fun, products):
    p, x = jnp.ones((64, 64)) / 64, jnp.ones((16, 64))
    step = ga.value_and_grad(fun, K, axis_name=ROWS)
    # All forward, twice, and those to the gradients.
    assert jax.jit(step).lower(p, x).as_text().count("dot_general") == products
    report, _ = reports(fun, p, x)
    assert (report.forward, report.backward, bytes_kept(report)) == (2, 1, 0)


@pytest.mark.parametrize("end", [lambda a, b: a, lambda a, b: b, lambda a, b: a * b])
def test_what_prints_prints_once_for_each_micro_batch(end):
    seen = collections.Counter()

    def fun(p, x):
        z = jnp.mean(encode(p, x))
        jax.debug.callback(lambda _: seen.update(["before"]), z)
        mean = lax.pmean(z, ROWS)
        jax.debug.callback(lambda _: seen.update(["after"]), mean)
        return end(z, mean)

    p, x = jnp.ones((6, 6)), jnp.ones((16, 6))
    jax.jit(ga.value_and_grad(fun, K, axis_name=ROWS))(p, x)
    jax.effects_barrier()
    assert seen == {"before": K, "after": K}


# -- Memory ----------------------------------------------------------------------------

IN, OUT, ROWS_OF_WINDOW, PARTS = 16, 1024, 512, 8


def towers(p, x):
    return jnp.tanh(x @ p[0]), jnp.tanh(jnp.cos(x) @ p[1])


def matched(z, t, everyone):
    logits = jax.nn.logsumexp(z @ everyone.T, axis=1)
    return jnp.mean(logits) - jnp.mean(jnp.sum(z * t, 1))


def in_one_direction(p, x, gather):
    z, t = towers(p, x)
    return matched(z, t, gather(t))


def in_both(p, x, gather):
    z, t = towers(p, x)
    return matched(z, t, gather(t)) + matched(t, z, gather(z))


def with_a_mark(p, x, gather):
    z, t = towers(p, x)
    if gather is everyone:
        z = checkpoint_name(z, ROWS)
    return matched(z, t, gather(t))


def everyone(x):
    return lax.all_gather(x, ROWS, tiled=True)


def array(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


P, GATHERED = array(2, IN, OUT), array(ROWS_OF_WINDOW, OUT)


def of_the_window(fun, k):
    """The temporaries of a window in `k` micro-batches."""
    step = ga.value_and_grad(lambda p, x: fun(p, x, everyone), k, axis_name=ROWS)
    return temporaries(jax.jit(step), P, array(ROWS_OF_WINDOW, IN))


def of_one(fun, operands):
    """Those of a micro-batch's step that is given all that the window gathers."""

    def step(total, p, x, *gathered):
        def loss(p, *gathered):
            in_turn = iter(gathered)
            return fun(p, x, lambda _: next(in_turn))

        grads = jax.grad(loss, range(1 + operands))(p, *gathered)
        return jax.tree.map(jnp.add, total, grads)

    given = [GATHERED] * operands
    x = array(ROWS_OF_WINDOW // PARTS, IN)
    return temporaries(jax.jit(step, donate_argnums=0), (P, *given), P, x, *given)


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    ("fun", "operands", "fits"),
    [(in_one_direction, 1, True), (in_both, 2, True), (with_a_mark, 1, False)],
)
def test_a_window_takes_one_micro_batch_and_what_it_gathers(fun, operands, fits):
    # Each operand is there twice: its values, and their cotangents, which add up while
    # the values are read.
    bound = 1.15 * of_one(fun, operands) + 2 * operands * nbytes(GATHERED)
    assert (of_the_window(fun, PARTS) <= bound) == fits


@pytest.mark.exhaustive
def test_a_plan_finds_the_window_that_fits():
    """Memory falls to that of what the collectives carry, and stays there."""

    def plan(ks, limit):
        return ga.plan(
            lambda k: jax.jit(
                ga.value_and_grad(
                    lambda p, x: in_both(p, x, everyone), k, axis_name=ROWS
                )
            ),
            *(P, array(ROWS_OF_WINDOW, IN)),
            batch_size=ROWS_OF_WINDOW,
            memory_limit=limit,
            candidates=ks,
        )

    [one], [four], [most] = (plan([k], "1GiB").candidates for k in (1, 4, 32))
    carried = 4 * nbytes(GATHERED)  # two operands, and their cotangents
    assert one.temp - four.temp > four.temp - most.temp > 0
    assert most.temp > carried
    assert plan([1, 4], four.bytes).num_microbatches == 4
