"""`verify` against losses whose right answer is known, one small model each."""

import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import leaves_of, mean_of, mesh_of, of_benchmarks, put
from helpers import normal as draw
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax import Cause, testing

[verify_rates] = of_benchmarks("verify_rates")

# The programs are small, and compile far longer than they run.
pytestmark = pytest.mark.usefixtures("fast_compilation")

K = 4
KEY = jax.random.key(0)
PARAMS = {"w": draw(5, seed=1), "b": draw(seed=2)}
BATCH = {"x": draw(16, 5, seed=3), "y": draw(16, seed=4)}


def token_batch(counts, length=8, seed=5):
    """One row a micro-batch or more, so that micro-batch i keeps counts[i] tokens."""
    rows = 4 * len(counts)
    mask = np.zeros((len(counts), 4 * length), np.float32)
    for row, count in zip(mask, counts, strict=True):
        row[np.random.default_rng(count).permutation(4 * length)[:count]] = 1
    return {
        "x": draw(rows, length, 5, seed=seed),
        "y": draw(rows, length, seed=seed + 1),
        "mask": jnp.asarray(mask.reshape(rows, length)),
    }


def counted(*counts):
    """The options of a case with so many tokens in its micro-batches."""
    return {"batch": token_batch(counts), "k": len(counts), "weights": counts}


class Case(NamedTuple):
    """A loss and its answer.

    Attributes:
      said: parts of the page, with " | " between.
      weights: of the micro-batches, in proportion.
      right: whether it is the same gradient with the `weight_fn` that the page names,
        or with this one.
    """

    loss: Any
    said: str = ""
    params: Any = PARAMS
    batch: Any = BATCH
    k: int = K
    options: Any = {}  # noqa: RUF012
    weights: Any = None
    right: Any = None


# -- Losses ----------------------------------------------------------------------------


def errors(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]


def mean_loss(params, batch):
    return jnp.mean(errors(params, batch) ** 2)


def sum_loss(params, batch):
    return jnp.sum(errors(params, batch) ** 2)


def token_loss(params, batch):
    """A mean over the tokens that the mask keeps; 0 where it keeps none."""
    squares = errors(params, batch) ** 2
    return jnp.sum(squares * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)


def unguarded(params, batch):
    """NaN where the mask keeps none."""
    squares = errors(params, batch) ** 2
    return jnp.sum(squares * batch["mask"]) / jnp.sum(batch["mask"])


def count_tokens(batch):
    return batch["mask"].sum()


def masked(params, batch):
    """With a mask of any dtype."""
    return token_loss(params, batch | {"mask": batch["mask"].astype("float32")})


def hidden_mask(params, batch):
    """Of a network in bfloat16, as training has it; the mask is not in the batch."""
    x, w, v = (y.astype("bfloat16") for y in (batch["x"], params["w"], params["v"]))
    out = jnp.einsum("...i,i->...", jnp.tanh(x @ w), v).astype("float32")
    mask = HIDDEN[batch["id"]]
    return jnp.sum((out - batch["y"]) ** 2 * mask) / jnp.maximum(jnp.sum(mask), 1.0)


def exponential(params, batch):
    weight = jnp.exp(batch["y"])
    return jnp.sum(weight * errors(params, batch) ** 2) / jnp.sum(weight)


def normalised(params, batch):
    """Batch normalisation in training mode, with its new statistics as aux."""
    h = batch["x"] @ params["w"]
    mean, var = jnp.mean(h, axis=0), jnp.var(h, axis=0)
    h = (h - mean[None]) / jnp.sqrt(var + 1e-5)[None] * params["scale"][None]
    loss = jnp.mean((jnp.tanh(h) @ params["v"] - batch["y"]) ** 2)
    return loss, {"mean": mean, "var": var}


def contrastive(params, batch):
    h = batch["x"] @ params["w"]
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(h[:, :2] @ h[:, 1:].T)))


def root(params, batch):
    """Its weights depend on the parameters, so no count of the batch can give them."""
    return jnp.sqrt(mean_loss(params, batch))


def differences(params, batch, keep=lambda h: h):
    h = keep(jnp.tanh(errors(params, batch)))
    return jnp.mean((h[1:] - h[:-1]) ** 2)


def dropout(params, batch, key=KEY):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return jnp.mean((jnp.where(keep, batch["x"], 0) @ params["w"] - batch["y"]) ** 2)


RANDOM = np.random.default_rng(0)


def not_of_jax(params, batch):
    return mean_loss(params, batch) * float(RANDOM.uniform(0.5, 1.0))


def recurrent(params, batch):
    """Over [time, batch, size]."""

    def step(h, x):
        h = jnp.tanh(h @ params["w"] + x)
        return h, h

    x = batch["x"]
    _, hidden = jax.lax.scan(step, jnp.zeros_like(x[0]), x)
    return jnp.mean((hidden @ params["v"]) ** 2)


def by_position(params, batch):
    rows = jnp.arange(len(batch["y"]), dtype=batch["y"].dtype)
    return jnp.mean(rows * errors(params, batch) ** 2) / jnp.mean(batch["w"])


@jax.custom_jvp
def foreign_tanh(x):
    """Code for float32 that JAX cannot see into."""
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@foreign_tanh.defjvp
def foreign_tanh_jvp(primals, tangents):
    y = foreign_tanh(*primals)
    return y, tangents[0] * (1 - y**2)


def foreign(params, batch):
    return (foreign_tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2


def narrow(params, batch):
    """Every kind of equation of a row, in bfloat16."""

    def cast(x):
        return x.astype(jnp.bfloat16)

    @jax.custom_vjp
    def ruled(x):
        return jnp.sin(cast(x))

    ruled.defvjp(lambda x: (ruled(x), x), lambda x, g: (g * jnp.cos(cast(x)),))

    @jax.checkpoint
    def layer(h, _):
        return jnp.tanh(cast(h) @ cast(params["m"])), None

    def of_row(x):
        h = jax.lax.scan(layer, cast(x), None, 2)[0]
        h = jax.lax.cond(h[0] > -9, lambda h: 2 * h, lambda h: h, ruled(h))
        h = jax.lax.fori_loop(0, 3, lambda i, h: h * cast(h), jnp.sort(h))
        return jnp.sum(jnp.abs(jnp.fft.fft(h.astype(jnp.float32))))

    return jnp.mean(jax.vmap(of_row)(batch["x"]))


# -- The table -------------------------------------------------------------------------

COUNTS = 10, 21, 20, 29
COUNTED = counted(*COUNTS)
TOKENS = COUNTED["batch"]
HIDDEN = TOKENS["mask"]
MASK = {"options": {"weight_fn": count_tokens}}
KEYED = {"options": {"rng": KEY}}
TIME = {"params": {"w": draw(3, 3), "v": draw(3)}}
TIMES = {"x": draw(8, 6, 3)}
LONG = token_batch([289, 301, 311, 0], length=100)

# The cases of each cause, by name.
CASES = {}
CASES[Cause.ROUNDING] = {
    "few digits": Case(
        lambda p, b: jnp.mean(b["x"] @ p),  # terms of 1e8 cancel in each micro-batch
        "In float64 the gradients differ",
        params=jnp.ones(3),
        batch={"x": jnp.tile(jnp.array([[1e8], [1], [-1e8], [1]]), (4, 3))},
    ),
    "leaves without rows": Case(
        lambda p, b: mean_loss(p, b) * b["scale"] * b["table"].sum(),
        batch=BATCH
        | {"scale": 2.0, "table": draw(12, 5), "key": jax.random.PRNGKey(0)},
    ),
    "another value": Case(
        lambda p, b: mean_loss(p, b) + jax.lax.stop_gradient(jnp.var(b["y"])),
    ),
    "aux of any kind": Case(
        lambda p, b: (mean_loss(p, b), {"name": "no array", "key": KEY}),
        options={"has_aux": True},
    ),
    "right weights": Case(token_loss, batch=token_batch([10, 0, 20, 29]), **MASK),
    "weights that round": Case(
        token_loss, batch=TOKENS | {"mask": TOKENS["mask"] * 0.1}, **MASK
    ),
    "foreign code": Case(lambda p, b: foreign(p, b).mean()),
    "bfloat16": Case(narrow, params={"m": draw(5, 5).astype(jnp.bfloat16)}),
}

CASES[Cause.EQUAL] = {
    "zero": Case(
        lambda p, b: jnp.mean(jnp.maximum(b["x"] @ p["w"] - 1e3, 0.0)),
        "run verify again",
    ),
    "one micro-batch": Case(mean_loss, k=1),
}

CASES[Cause.SCALE] = {
    "a sum": Case(
        sum_loss, "4 times too small | jnp.mean | use_grad_mean=False", weights=[1] * 4
    ),
    "a sum beside weights": Case(
        lambda p, b: jnp.sum(errors(p, b) ** 2 * b["mask"]),
        "as 10 : 21 : 20 : 29, but must count as 1 : 1 : 1 : 1 | the mean over what",
        batch=TOKENS,
        **MASK,
    ),
    "a penalty": Case(
        lambda p, b: sum_loss(p, b) + 0.1 * jnp.sum(p["w"] ** 2),
        "a term that is no sum | plus the penalty as it is",
    ),
    "foreign code": Case(
        lambda p, b: foreign(p, b).sum(), "calls code that computes in float32"
    ),
}

SUM = "lambda batch: batch['mask'].sum()"
AT_LINE = f"{SUM} | test_verify.py:"
CASES[Cause.WEIGHTS] = {
    "tokens": Case(token_loss, AT_LINE, right=True, **COUNTED),
    "a shifted mask": Case(
        lambda p, b: masked(p, jax.tree.map(lambda x: x[:, 1:], b)),
        "lambda batch: batch['mask'][:, 1:].sum()",
        batch={**TOKENS, "mask": HIDDEN > 0},
        right=True,
    ),
    "a mask in bfloat16": Case(
        masked,  # which counts one by one no further than 256
        "lambda batch: batch['mask'].sum(dtype='float32')",
        batch={**LONG, "mask": LONG["mask"].astype(jnp.bfloat16)},
        weights=[289, 301, 311, 0],
        right=True,
    ),
    "hidden from the batch": Case(
        hidden_mask,
        "must count as 10 : 21 : 20 : 29, or a multiple | Pass a weight_fn to",
        batch={"x": TOKENS["x"], "y": TOKENS["y"], "id": jnp.arange(16)},
        params={"w": draw(5, 32) / 2, "v": draw(32) / 6},
        weights=COUNTS,
    ),
    "fractions": Case(
        exponential,
        "a weight_fn to ga_optax.accumulate that returns that number",
        weights=np.exp(BATCH["y"]).reshape(K, -1).sum(1),
        right=lambda batch: jnp.exp(batch["y"]).sum(),
    ),
    "beside a mean": Case(
        mean_loss,
        "each by itself: Leave weight_fn out",
        weights=[1] * K,
        options={"weight_fn": lambda batch: jnp.exp(batch["y"]).sum()},
    ),
    "foreign code": Case(
        lambda p, b: (
            jnp.where(b["mask"], foreign(p, b), 0).sum() / b["mask"].sum().astype("f4")
        ),
        f"{SUM} | effects as small as the rounding of float32",
        batch=BATCH | {"mask": jnp.arange(16) % 7 < 3},
        right=True,
    ),
}

CASES[Cause.CROSS_EXAMPLE] = {
    "statistics": Case(
        normalised,
        "where rows meet: test_verify.py: | a sum over rows | No weight_fn can fix it"
        " | What to do Call ga_optax.value_and_grad(loss, 4)",
        params={"w": draw(5, 6), "scale": draw(6, seed=1), "v": draw(6, seed=2)},
        options={"has_aux": True},
    ),
    "contrastive": Case(contrastive, "all rows", {"w": draw(5, 3)}),
    "root": Case(root, "train on the mean itself | a sum over rows"),
    "a small term": Case(lambda p, b: mean_loss(p, b) + 1e-5 * jnp.std(errors(p, b))),
    "neighbours": Case(differences, "into one row"),
    "two denominators": Case(
        lambda p, b: (
            token_loss(p, b) + jnp.sum(errors(p, b) * b["live"]) / jnp.sum(b["live"])
        ),
        "batch['mask'].sum() (10 : 21 : 20 : 29 in the micro-batches) and "
        "batch['live'].sum() (10 : 26 : 42 : 58 | Where: test_verify.py: | accumulate "
        "each term into an accumulator of its own, with its denominator",
        batch={**TOKENS, "live": jnp.arange(1.0, 17)[:, None]},
    ),
    "a denominator beside a mean": Case(
        lambda p, b: token_loss(p, b) + jnp.mean(errors(p, b)),
        "batch['mask'].sum() (10 : 21 : 20 : 29 in the micro-batches) and the number "
        "of rows, or by none.",
        batch=TOKENS,
    ),
    "no right axis": Case(
        lambda p, b: jnp.sqrt(recurrent(p, b)),
        "[batch, time, ...]",
        batch=TIMES,
        **TIME,
    ),
    "in bfloat16": Case(
        lambda p, b: narrow(p, b) + 1e-4 * jnp.std(b["x"] @ p["m"].astype(jnp.float32)),
        params={"m": draw(5, 5).astype(jnp.bfloat16)},
    ),
    "foreign code": Case(
        lambda p, b: jnp.std(foreign(p, b)), "ga_optax.rowwise around code"
    ),
}

CASES[Cause.UNDETERMINED] = {
    "foreign code, a small term": Case(
        lambda p, b: foreign(p, b).mean() + 1e-5 * jnp.std(b["x"] @ p["w"]),
        "as small as the rounding of float32 cannot be seen | plain JAX",
    ),
}

CASES[Cause.RANDOMNESS] = {
    "dropout": Case(dropout, "Dropout | jax.random.split(key, batch_size)", **KEYED),
    "a factor of each": Case(
        lambda p, b, key: mean_loss(p, b) * jax.random.uniform(key),
        "micro-batches draw others",
        **KEYED,
    ),
    "a key that is closed over": Case(dropout, "for the whole batch at once"),
    "not of JAX": Case(not_of_jax, "new ones each time it is traced"),
    "by position": Case(
        by_position, "by their position", batch=BATCH | {"w": jnp.ones(16)}
    ),
    "neighbours and dropout": Case(
        lambda p, b: differences(
            p, b, lambda h: jnp.where(jax.random.bernoulli(KEY, 0.5, h.shape), h, 0)
        ),
        "second cause may be hidden",
    ),
}

CASES[Cause.AXIS] = {
    "along time": Case(recurrent, "batch_axes=1", batch=TIMES, **TIME),
}

CASES[Cause.NOT_FINITE] = {
    "NaN": Case(
        mean_loss,
        "micro-batch 2 (rows 8 to 11), leaf ['b'] | nan | debug_nans",
        batch=BATCH | {"x": BATCH["x"].at[9, 2].set(jnp.nan)},
    ),
    "no token": Case(
        unguarded,
        "micro-batch 1 (rows 4 to 7) | 0 / 0 | jnp.maximum(count, 1)",
        batch=token_batch([5, 0, 3, 9]),
        right=count_tokens,  # which leaves it out, whatever it holds
    ),
    "NaN behind one of weight 0": Case(
        unguarded,
        "micro-batch 2 (rows 8 to 11)",
        batch=token_batch([0, 5, 3, 9]) | {"x": TOKENS["x"].at[9].set(jnp.inf)},
        **MASK,
    ),
    "an overflow": Case(
        lambda p, b: jnp.mean((b["x"].astype(p.dtype) @ p) ** 2) * 1000,
        "too large for the dtype",
        params=draw(5).astype(jnp.float16) * 100,
    ),
}


def ask(case, **options):
    given = case.params, case.batch, case.k
    return ga.verify(case.loss, *given, **case.options, **options)


def assert_weights(report, counts):
    assert report.weights is not None
    got, due = (np.asarray(x) / np.sum(x) for x in (report.weights, counts))
    np.testing.assert_allclose(got, due, rtol=1e-3, atol=1e-9)


@pytest.mark.grid(6, 99)
@pytest.mark.parametrize(
    ("cause", "name"), [(cause, name) for cause in CASES for name in CASES[cause]]
)
def test_the_page_names_the_cause_and_what_to_do(cause, name):
    case = CASES[cause][name]
    report = ask(case)
    page = " ".join(str(report).split())
    if cause is Cause.ROUNDING:
        assert report.ok, report
        assert report.relative < 1e-14 or "In float32" in report.extent
    else:
        assert report.cause is cause, report
    assert report.ok == (report.cause in (Cause.EQUAL, Cause.ROUNDING))
    assert max(map(len, str(report).split("\n"))) <= 100
    parts = [*case.said.split(" | "), report.cause.name, report.cause.value, report.fix]
    assert [part for part in parts if part not in page] == []
    verdict = "the same" if report.ok else "NOT the same"
    assert page.startswith(f"Micro-batches, each by itself: {verdict} gradient")
    if case.weights is not None:
        assert_weights(report, case.weights)
    if case.right is not None:  # the function that the page says to pass
        code = r"weight_fn=(lambda batch: .*) to ga_optax.accumulate"
        right = case.right is True and eval(re.search(code, report.fix)[1])
        assert ask(case, weight_fn=right or case.right).ok


@pytest.mark.slow
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(
    ("dtype", "kind", "number"),
    [
        ("bfloat16", "right", 0),
        ("float32", "right", 13),  # dropout, with a key for each example
        pytest.param("bfloat16", "wrong", 13, marks=pytest.mark.published),
        pytest.param("float64", "wrong", 24, marks=pytest.mark.published),
    ],
)
def test_right_losses_are_ok_and_wrong_ones_have_their_cause(dtype, kind, number):
    """Of those whose rates the page on exactness has."""
    case, report = verify_rates.ask(dtype, kind, number)
    assert verify_rates.outcome(case, report) == "right", f"{case.name}\n{report}"
    # The twin: another cause is no right answer.
    other = case._replace(causes=set(Cause) - case.causes - {report.cause})
    assert verify_rates.outcome(other, report) != "right"


# -- Right as it is --------------------------------------------------------------------


@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [4, 16])
def test_a_mean_loss_is_equal_up_to_rounding(k):
    report = ga.verify(mean_loss, PARAMS | {"unused": draw(3)}, BATCH, k)
    assert report.cause is (Cause.ROUNDING if report.relative else Cause.EQUAL)
    assert report.weights is None
    assert [*report.leaves] == ["leaf ['b']", "leaf ['unused']", "leaf ['w']"]
    unused = report.leaves["leaf ['unused']"]
    assert (unused.shape, unused.dtype) == ((3,), "float32")
    assert (unused.relative, unused.max_ulp) == (0, 0)


def closed_over(params, _):
    return mean_loss(params, BATCH)


@pytest.mark.parametrize(
    ("loss", "k", "warning"),
    [
        (closed_over, K, "does not use its batch | 4 times the time"),
        (jax.checkpoint(closed_over), K, "does not use its batch"),
        (closed_over, 1, ""),
        (lambda p, b: closed_over(p, b) * jnp.mean(b["y"]), K, ""),
    ],
)
def test_a_loss_that_closes_over_its_data_is_warned_of(loss, k, warning):
    report = ga.verify(loss, PARAMS, BATCH, k)
    said = " ".join(report.warnings)
    assert bool(said) == bool(warning)
    assert [part for part in warning.split(" | ") if part not in said] == []
    assert said in " ".join(str(report).split())


def test_equal_counts_are_right_in_this_batch_and_warned_of():
    given = PARAMS, token_batch([9, 9, 9, 9]), K
    [warning] = ga.verify(token_loss, *given).warnings
    assert re.search(r"weight_fn .*test_verify\.py:", warning, re.S)
    with pytest.warns(UserWarning, match="weight_fn"):
        testing.assert_accumulation_equivalent(token_loss, *given)
    # The twins: with weights, and with a loss that reads no count.
    for loss, options in ((token_loss, {"weight_fn": count_tokens}), (mean_loss, {})):
        assert not ga.verify(loss, *given, **options).warnings
        testing.assert_accumulation_equivalent(loss, *given, **options)


# -- The report ------------------------------------------------------------------------


@pytest.mark.slow
def test_sharded_parameters_and_batches_are_compared_where_they_are():
    mesh = mesh_of(8, kind=AxisType.Explicit)
    params = PARAMS | {"table": put(draw(16, seed=3), mesh, P("data"))}

    def loss(params, batch):
        return token_loss(params, batch) * (1 + jnp.mean(params["table"] ** 2))

    report = ga.verify(loss, params, put(TOKENS, mesh, P("data")), K)
    assert report.cause is Cause.WEIGHTS
    assert_weights(report, COUNTS)


def test_ulps_are_between_what_training_computes():
    report = ga.verify(mean_loss, PARAMS, BATCH, K)
    whole = jax.jit(jax.grad(mean_loss))(PARAMS, BATCH)
    parts = jax.jit(mean_of(mean_loss, K))(PARAMS, BATCH)[1]
    lines = report.table().split("\n")[2:]
    leaves = [*report.leaves.values()]
    for leaf, line, a, b in leaves_of(leaves, lines, whole, parts):
        between = np.max(np.abs(a - b) / np.spacing(np.abs(a)))
        assert leaf.max_ulp == pytest.approx(between, rel=0.5)
        assert line.split()[-2] == str(leaf.max_ulp)
    assert report.max_ulp == max(x.max_ulp for x in leaves) > 0


def test_the_size_of_the_difference_is_that_of_the_gradients():
    """The twin: the same in float64 by hand, with the weights in use."""
    with jax.enable_x64(True):
        params, batch = jax.tree.map(lambda x: x.astype("float64"), (PARAMS, TOKENS))
        value, whole = jax.value_and_grad(token_loss)(params, batch)
        mean, grads = mean_of(token_loss, K)(params, batch)
        norms = [jnp.linalg.norm(x) for x in jax.tree.leaves(whole)]
        off = [jnp.linalg.norm(a - b) for a, b in leaves_of(whole, grads)]
    report = ga.verify(token_loss, PARAMS, TOKENS, K)
    [losses] = re.findall(r"Loss: (\S+) undivided, (\S+) accumulated", report.extent)
    np.testing.assert_allclose(list(map(float, losses)), (value, mean), rtol=1e-5)
    expected = np.array(off) / np.linalg.norm(norms)
    shares = [leaf.relative for leaf in report.leaves.values()]
    np.testing.assert_allclose(shares, expected, rtol=1e-6)
    assert report.relative == pytest.approx(np.linalg.norm(expected), rel=1e-6)
