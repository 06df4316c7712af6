"""`verify` against losses whose right answer is known, one small model each."""

import gc
import importlib
import pathlib
import re
import sys

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import ga_optax as ga
from ga_optax import testing
from ga_optax._verify import Cause
from ga_optax._verify.counts import proportions
from ga_optax._verify.gradients import ulps
from ga_optax._verify.loss import Progress
from ga_optax._verify.wide import Wide

BENCHMARKS = str(pathlib.Path(__file__).parents[1] / "benchmarks")
sys.path.insert(0, BENCHMARKS)
verify_rates = importlib.import_module("verify_rates")
sys.path.remove(BENCHMARKS)

# The programs are small, and compile far longer than they run.
pytestmark = pytest.mark.usefixtures("fast_compilation")

K = 4
MORE = pytest.mark.published


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def linear_params(seed=1):
    return {"w": draw(5, seed=seed), "b": draw(seed=seed + 1)}


def linear_batch(rows=16):
    return {"x": draw(rows, 5, seed=3), "y": draw(rows, seed=4)}


def errors(params, batch):
    return jnp.tanh(batch["x"] @ params["w"] + params["b"]) - batch["y"]


def mean_loss(params, batch):
    return jnp.mean(errors(params, batch) ** 2)


def sum_loss(params, batch):
    return jnp.sum(errors(params, batch) ** 2)


def penalty(params):
    return 0.1 * jnp.sum(params["w"] ** 2)


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


def token_loss(params, batch):
    """A mean over the tokens that the mask keeps; 0 where it keeps none."""
    squares = errors(params, batch) ** 2
    return jnp.sum(squares * batch["mask"]) / jnp.maximum(jnp.sum(batch["mask"]), 1.0)


def count_tokens(batch):
    return batch["mask"].sum()


def assert_cause(report, cause):
    assert report.cause is cause, f"\n{report}"
    assert report.ok == (cause in (Cause.EQUAL, Cause.ROUNDING))
    page = str(report)
    assert cause.name in page
    assert max(map(len, page.split("\n"))) <= 100
    # The page says everything that the message says.
    flat = " ".join(page.split())
    assert report.fix in flat
    assert cause.value in flat
    assert cause.value in report.message
    assert report.fix in report.message


@pytest.mark.slow
def test_ulps_are_shown_of_rounding_alone():
    """Between wrong gradients lie billions of numbers, which says nothing."""
    report = ga.verify(mean_loss, linear_params(), linear_batch(), K)
    assert "ULPs" in str(report)
    report = ga.verify(sum_loss, linear_params(), linear_batch(), K)
    assert report.max_ulp > 1_000_000
    assert "ULPs" not in str(report)
    assert str(report.max_ulp) not in str(report)


def assert_weights(report, counts, rtol=1e-3):
    expected = np.asarray(counts) / np.sum(counts)
    assert report.weights is not None
    np.testing.assert_allclose(
        np.asarray(report.weights) / np.sum(report.weights),
        expected,
        rtol=rtol,
        atol=1e-9,
    )


def code_of(report):
    """The function that the page says to pass, as it stands there."""
    code = re.search(r"weight_fn=(lambda batch: .*) to ga_optax", report.fix)
    assert code, report.fix
    return code.group(1)


def fixed(report):
    return eval(code_of(report))


# -- Right as it is --------------------------------------------------------------------


@pytest.mark.grid(2)
@pytest.mark.parametrize("k", [1, 2, 4, 16])
def test_a_mean_loss_is_equal_up_to_rounding(k):
    report = ga.verify(mean_loss, linear_params(), linear_batch(), k)
    assert report.ok
    assert report.relative < 1e-14
    assert report.weights is None
    assert report.dtype == "float64"
    assert report.max_ulp is not None
    assert report.max_ulp < 64
    assert report.cause is (Cause.ROUNDING if report.max_ulp else Cause.EQUAL)
    assert [leaf.name for leaf in report.leaves] == ["leaf ['b']", "leaf ['w']"]
    assert_cause(report, report.cause)


def test_one_micro_batch_is_equal_to_the_bit():
    report = ga.verify(mean_loss, linear_params(), linear_batch(), 1)
    assert_cause(report, Cause.EQUAL)
    assert report.max_ulp == 0


def test_one_micro_batch_with_a_key_is_the_undivided_batch():
    assert ga.verify(dropout_loss, {"w": draw(5)}, linear_batch(), 1, rng=KEY).ok


def test_integer_terms_are_equal_to_the_bit():
    batch = {"x": jnp.arange(32.0).reshape(16, 2)}
    report = ga.verify(
        lambda p, b: jnp.mean(b["x"] @ p), jnp.ones(2, jnp.float32), batch, 8
    )
    assert_cause(report, Cause.EQUAL)


@pytest.mark.slow
def test_a_loss_divided_by_k_is_equal_and_the_page_warns_of_the_division():
    """As PyTorch users write it: both gradients have the factor."""
    args = linear_params(), linear_batch(), K

    def divided(params, batch):
        return mean_loss(params, batch) / K

    for loss in (divided, jax.jit(divided)):
        report = ga.verify(loss, *args)
        assert report.ok
        assert "divides it by 4" in report.warnings[0]
        assert report.warnings[0] in " ".join(str(report).split())
    # Elsewhere the factor is not seen, and the page says that it could not be.
    report = ga.verify(lambda p, b: jnp.mean(errors(p, b) ** 2 / K), *args)
    assert report.ok
    assert not report.warnings
    assert "division of the loss by the number of micro-batches" in str(report)


@pytest.mark.grid(1, 4)
@pytest.mark.parametrize(
    "loss",
    [
        mean_loss,
        lambda p, b: mean_loss(p, b) / 3,
        lambda p, b: 0.5 * mean_loss(p, b) / 2 + penalty(p),
        lambda p, b: jnp.sum(errors(p, b) ** 2) / 4,  # 4 rows of a micro-batch, or k
    ],
)
def test_another_division_is_no_reason_to_warn(loss):
    assert not ga.verify(loss, linear_params(), linear_batch(), K).warnings


@pytest.mark.slow
def test_half_of_a_square_with_two_micro_batches_is_no_reason_to_warn():
    halved = lambda p, b: mean_loss(p, b) / 2  # noqa: E731
    assert not ga.verify(halved, linear_params(), linear_batch(), 2).warnings


@pytest.mark.slow
def test_a_loss_that_closes_over_the_data_is_equal_and_the_page_warns_of_it():
    params, batch = linear_params(), linear_batch()

    def closed(params, _):
        return mean_loss(params, batch)

    for loss in (closed, jax.jit(closed), jax.checkpoint(closed)):
        report = ga.verify(loss, params, batch, K)
        assert report.ok
        [warning] = report.warnings
        assert "does not use its batch" in warning
        assert "4 times the time" in warning
        assert "shape (16, 5)" in warning or loss is not closed
    # The twins: a leaf of the batch is enough, and so is one micro-batch.
    part = lambda p, b: closed(p, b) * jnp.mean(b["y"])  # noqa: E731
    assert not ga.verify(part, params, batch, K).warnings
    assert not ga.verify(closed, params, batch, 1).warnings


def test_what_the_report_warns_of_is_a_warning_of_the_assertion():
    args = linear_params(), linear_batch(), K
    with pytest.warns(UserWarning, match="divides it by 4"):
        testing.assert_accumulation_equivalent(lambda p, b: mean_loss(p, b) / K, *args)


def test_a_penalty_on_the_parameters_beside_a_mean_is_right():
    def loss(params, batch):
        return mean_loss(params, batch) + penalty(params)

    assert ga.verify(loss, linear_params(), linear_batch(), K).ok


@pytest.mark.slow
def test_an_embedding_with_repeated_ids_is_right():
    def loss(params, batch):
        return jnp.mean((params["table"][batch["ids"]] @ params["w"]) ** 2)

    ids = jnp.asarray([0, 0, 1, 1, 1, 2, 0, 3], jnp.int32)
    params = {"table": draw(6, 3), "w": draw(3, seed=1)}
    report = ga.verify(loss, params, {"ids": ids}, K)
    assert report.ok, report


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("inside", [False, True])
def test_bfloat16_is_rounding_or_equal(inside):
    """Parameters in bfloat16, and a loss that casts to bfloat16 inside as well."""

    def loss(params, batch):
        dtype = jnp.bfloat16 if inside else params["w"].dtype
        h = jnp.tanh(batch["x"].astype(dtype) @ params["w"].astype(dtype))
        return jnp.mean((h @ params["v"].astype(dtype)).astype(jnp.float32) ** 2)

    params = {"w": draw(5, 8).astype(jnp.bfloat16), "v": draw(8).astype(jnp.bfloat16)}
    report = ga.verify(loss, params, {"x": draw(32, 5)}, K)
    assert_cause(report, Cause.ROUNDING if report.max_ulp else Cause.EQUAL)
    assert {leaf.dtype for leaf in report.leaves} == {"bfloat16"}
    assert report.dtype == "float64"
    assert report.relative < 1e-14
    # The twin: an effect that is smaller than the rounding of bfloat16.
    report = ga.verify(
        lambda p, b: loss(p, b) + 1e-4 * jnp.std(b["x"] @ p["w"].astype(jnp.float32)),
        params,
        {"x": draw(32, 5)},
        K,
    )
    assert_cause(report, Cause.CROSS_EXAMPLE)


def every_kind_of_equation(cast):
    """A loss that casts its floats in each place that a program can have."""

    def kernel(x):
        return jnp.sin(cast(x))

    kernel = jax.custom_vjp(kernel)
    kernel.defvjp(
        lambda x: (jnp.sin(cast(x)), cast(x)),
        lambda x, g: ((g * jnp.cos(x)).astype(jnp.float32),),
    )

    @jax.checkpoint
    def layer(h, w):
        return jnp.tanh(cast(h) @ cast(w)).astype(jnp.float32), ()

    def loss(params, x, key):
        h, _ = jax.lax.scan(layer, x, params)
        keep = jax.random.bernoulli(key, 0.7, h.shape)  # bits of float32 are set
        h = kernel(jnp.where(keep, h, 0))
        h = jax.lax.cond(h[0, 0] > -9, lambda h: 2 * cast(h), cast, h)
        h = jax.lax.fori_loop(0, 3, lambda i, h: h * cast(h), h)
        h = jax.lax.dot(h, h.T, precision="highest").astype(jnp.float32)
        h = jax.jit(lambda h: jax.nn.logsumexp(cast(h), axis=1))(jnp.sort(h))
        return jnp.mean(jnp.abs(jnp.fft.fft(h.astype(jnp.float32))))

    return jax.value_and_grad(loss)


@pytest.mark.published  # one of the longest
def test_a_program_in_float64_knows_no_cast():
    """Its casts to bfloat16 are none, but what it draws is what training draws."""
    args = draw(2, 4, 4), draw(6, 4, seed=1), jax.random.key(0)
    narrow = every_kind_of_equation(lambda x: x.astype(jnp.bfloat16))
    plain = every_kind_of_equation(lambda x: x.astype(jnp.float32))
    with jax.enable_x64(True):
        program = Wide(narrow, x64=False)
        actual, expected = (
            jax.jit(program)(*args),
            jax.jit(Wide(plain, x64=False))(*args),
        )
    assert not program.low
    trees = map(jax.tree.leaves, (actual, expected, plain(*args)))
    for x, y, z in zip(*trees, strict=True):
        assert x.dtype == np.float64
        np.testing.assert_allclose(x, y, rtol=1e-12)
        np.testing.assert_allclose(x, z, rtol=1e-3)  # in float32
    # The twin: as training computes it, bfloat16 shows.
    apart = jax.tree.map(lambda x, y: abs(x - y).max(), narrow(*args), plain(*args))
    assert max(jax.tree.leaves(apart)) > 1e-3


@jax.custom_jvp
def foreign_tanh(x):
    """Code for float32 that JAX cannot see into."""
    return jax.pure_callback(np.tanh, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


@foreign_tanh.defjvp
def foreign_tanh_jvp(primals, tangents):
    y = foreign_tanh(*primals)
    return y, tangents[0] * (1 - y**2)


def foreign_squares(params, batch):
    return (foreign_tanh(batch["x"] @ params["w"]) - batch["y"]) ** 2


@pytest.mark.exhaustive
def test_code_that_is_bound_to_a_dtype_leaves_small_effects_undetermined():
    args = {"w": draw(5)}, linear_batch(), K
    report = ga.verify(lambda p, b: foreign_squares(p, b).mean(), *args)
    assert report.ok, report
    report = ga.verify(lambda p, b: foreign_squares(p, b).sum(), *args)
    assert_cause(report, Cause.SCALE)
    assert report.dtype == "float32"
    assert "calls code that computes in float32" in str(report)

    def loss(params, batch):
        return foreign_squares(params, batch).mean() + 1e-5 * jnp.std(
            batch["x"] @ params["w"]
        )

    report = ga.verify(loss, *args)
    assert_cause(report, Cause.UNDETERMINED)
    assert "may be the rounding of float32" in report.message


@pytest.mark.slow
def test_of_code_that_jax_cannot_see_into_numbers_decide_alone():
    batch = {**linear_batch(), "mask": jnp.arange(16) % 7 < 3}

    def kept(params, batch):
        return jnp.where(batch["mask"], foreign_squares(params, batch), 0)

    def masked(params, batch):
        return kept(params, batch).sum() / batch["mask"].sum().astype("float32")

    report = ga.verify(masked, {"w": draw(5)}, batch, K)
    assert_cause(report, Cause.WEIGHTS)
    assert code_of(report) == "lambda batch: batch['mask'].sum()"
    assert "Nothing is known of pure_callback" in report.message
    assert ga.verify(masked, {"w": draw(5)}, batch, K, weight_fn=fixed(report)).ok
    # The twins: rows that need each other, and a loss without such code.
    report = ga.verify(lambda p, b: jnp.std(kept(p, b)), {"w": draw(5)}, batch, K)
    assert_cause(report, Cause.CROSS_EXAMPLE)
    assert "by the numbers of this batch alone" in report.message
    report = ga.verify(sum_loss, linear_params(), linear_batch(), K)
    assert "by the numbers" not in report.message


@pytest.mark.exhaustive
def test_a_program_that_cannot_be_evaluated_in_float64_is_compared_as_it_is(
    monkeypatch,
):
    def refuse(self, equation, ins, outs):
        raise TypeError("a kernel for float32 alone")

    monkeypatch.setattr(Wide, "_written", refuse)
    report = ga.verify(sum_loss, linear_params(), linear_batch(), K)
    assert_cause(report, Cause.SCALE)
    assert "a kernel for float32 alone" in str(report)
    assert ga.verify(mean_loss, linear_params(), linear_batch(), K).ok


@pytest.mark.exhaustive
def test_complex_parameters_compare_by_their_parts():
    def loss(params, batch):
        return jnp.mean(jnp.abs(batch["x"].astype(params.dtype) @ params) ** 2)

    params = jax.lax.complex(draw(5), draw(5, seed=1))
    assert ga.verify(loss, params, {"x": draw(16, 5)}, K).ok

    def total(params, batch):
        return loss(params, batch) * len(batch["x"])

    report = ga.verify(total, params, {"x": draw(16, 5)}, K)
    assert_cause(report, Cause.SCALE)


def test_a_gradient_with_few_digits_is_rounding_and_says_so():
    """Terms of 1e8 cancel in each micro-batch, and leave no digit of float32 right."""
    x = np.tile([1e8, 1.0, -1e8, 1.0], 4)[:, None] * np.ones(3)
    batch = {"x": jnp.asarray(x, jnp.float32)}
    report = ga.verify(lambda p, b: jnp.mean(b["x"] @ p), jnp.ones(3), batch, K)
    assert_cause(report, Cause.ROUNDING)
    assert "more than half of the digits of float32" in str(report)
    assert "wider dtype" in report.fix


def test_a_gradient_of_zero_is_equal_and_says_that_this_shows_nothing():
    def loss(params, batch):
        return jnp.mean(jnp.maximum(batch["x"] @ params["w"] - 1e3, 0.0))

    report = ga.verify(loss, {"w": draw(5)}, linear_batch(), K)
    assert_cause(report, Cause.EQUAL)
    assert "exactly zero" in report.message


@pytest.mark.slow
def test_a_leaf_that_gets_no_gradient_is_no_difference():
    params = {**linear_params(), "unused": draw(3)}
    report = ga.verify(mean_loss, params, linear_batch(), K)
    assert report.ok
    assert {leaf.name: leaf.relative for leaf in report.leaves}["leaf ['unused']"] == 0


@pytest.mark.slow
def test_a_bias_before_a_softmax_whose_gradient_is_rounding_is_no_difference():
    """The gradient of a logit that is added to all classes is 0 but for rounding."""

    def loss(params, batch):
        logits = batch["x"] @ params["w"] + params["all"]
        return -jnp.mean(jax.nn.log_softmax(logits)[:, 0])

    params = {"w": draw(5, 3), "all": jnp.ones(())}
    assert ga.verify(loss, params, linear_batch(), K).ok


# -- Scale -----------------------------------------------------------------------------


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("k", [2, 4, 16])
def test_a_sum_loss_is_too_small_by_the_number_of_micro_batches(k):
    report = ga.verify(sum_loss, linear_params(), linear_batch(), k)
    assert_cause(report, Cause.SCALE)
    assert f"{k} times too small" in report.message
    assert "jnp.mean" in report.fix
    np.testing.assert_allclose(report.weights, np.ones(k), rtol=1e-9)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("optax_promotion")
def test_both_ways_to_fix_a_sum_are_right():
    params, batch = linear_params(), linear_batch()
    fix = ga.verify(sum_loss, params, batch, K).fix
    assert "ga_optax.MultiSteps(..., use_grad_mean=False)" in fix
    tx = ga.MultiSteps(optax.sgd(1.0), K, use_grad_mean=False)
    summed, state = params, tx.init(params)
    for part in np.arange(16).reshape(K, -1):
        grads = jax.grad(sum_loss)(params, jax.tree.map(lambda x: x[part], batch))  # noqa: B023
        summed, state = ga.apply_gradients(tx, grads, state, summed)
    expected = jax.grad(sum_loss)(params, batch)
    for a, b, g in zip(*map(jax.tree.leaves, (summed, params, expected)), strict=True):
        # A sum of 16 terms in another order, and the update.
        np.testing.assert_allclose(b - a, g, atol=32 * 2**-24 * np.abs(g).sum() * 16)
    assert ga.verify(mean_loss, params, batch, K).ok


@pytest.mark.slow
def test_a_sum_beside_a_weight_fn_says_that_it_asks_for_equal_weights():
    def loss(params, batch):
        return jnp.sum(errors(params, batch) ** 2 * batch["mask"])

    batch = token_batch([10, 21, 20, 29])
    report = ga.verify(loss, linear_params(), batch, K, weight_fn=count_tokens)
    assert_cause(report, Cause.SCALE)
    assert "weighs the micro-batches as 10 : 21 : 20 : 29" in report.message
    assert "make the loss a mean over what weight_fn counts" in report.fix


def test_a_mean_that_is_divided_by_k_once_too_often_is_a_scale():
    """The loss of a part is divided by the number of parts, that of the whole by 1."""

    def loss(params, batch):
        return mean_loss(params, batch) / (16 // len(batch["y"]))

    report = ga.verify(loss, linear_params(), linear_batch(), K)
    assert_cause(report, Cause.SCALE)
    assert "nor by the number of micro-batches" in report.fix
    assert report.relative == pytest.approx(0.75)


def test_a_mean_that_is_divided_by_the_batch_size_again_is_a_scale():
    def loss(params, batch):
        return mean_loss(params, batch) / len(batch["y"])

    report = ga.verify(loss, linear_params(), linear_batch(), K)
    assert_cause(report, Cause.SCALE)
    assert "4 times too large" in report.message
    assert "do not divide it by the batch size again" in report.fix


@pytest.mark.slow
def test_another_factor_of_the_batch_size_is_a_scale():
    def loss(params, batch):
        return mean_loss(params, batch) * len(batch["y"]) ** 0.5

    report = ga.verify(loss, linear_params(), linear_batch(), K)
    assert_cause(report, Cause.SCALE)
    assert "2 times the mean" in report.message


@pytest.mark.slow
def test_a_sum_over_identical_micro_batches_is_a_scale():
    one = linear_batch(4)
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x]), one)
    assert_cause(ga.verify(sum_loss, linear_params(), batch, 2), Cause.SCALE)


@pytest.mark.grid(1, 2)
@pytest.mark.parametrize("k", [2, 4])
def test_a_penalty_beside_a_sum_is_a_scale_that_no_factor_fixes(k):
    def loss(params, batch):
        return sum_loss(params, batch) + penalty(params)

    report = ga.verify(loss, linear_params(), linear_batch(), k)
    assert_cause(report, Cause.SCALE)
    assert "penalty" in report.message
    assert "plus the penalty as it is" in report.fix
    assert report.weights is None


# -- Weights ---------------------------------------------------------------------------


@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "counts",
    [
        [10, 21, 20, 29],
        [10, 0, 20, 29],
        [0, 0, 0, 3],
        [32, 1],
        [5, 0],
        [7, 7, 7, 8, 0, 1, 32, 2],
    ],
)
def test_a_mean_over_tokens_shows_its_counts_and_the_weight_fn_to_pass(counts):
    batch = token_batch(counts)
    report = ga.verify(token_loss, linear_params(), batch, len(counts))
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, counts, rtol=1e-8)
    assert sum(report.weights) == pytest.approx(1)
    divisor = np.gcd.reduce(counts)
    shown = " : ".join(str(c // divisor) for c in counts)
    assert shown in " ".join(str(report).split())
    assert code_of(report) == "lambda batch: batch['mask'].sum()"
    again = ga.verify(
        token_loss, linear_params(), batch, len(counts), weight_fn=fixed(report)
    )
    assert again.ok, again


@pytest.mark.exhaustive
def test_the_fix_is_found_in_labels_and_shifted_masks_too():
    counts = [10, 21, 20, 29]
    batch = token_batch(counts)
    keep = batch.pop("mask") > 0
    labels = {**batch, "labels": jnp.where(keep, 7, -100)}

    def ignoring(params, batch):
        mask = (batch["labels"] != -100).astype(batch["x"].dtype)
        return token_loss(params, {**batch, "mask": mask})

    report = ga.verify(ignoring, linear_params(), labels, K)
    assert_cause(report, Cause.WEIGHTS)
    assert fixed(report)(labels) == 80

    def shifted(params, batch):
        part = {"x": batch["x"][:, 1:], "y": batch["y"][:, 1:]}
        mask = batch["mask"][:, 1:].astype(batch["x"].dtype)
        return token_loss(params, {**part, "mask": mask})

    report = ga.verify(shifted, linear_params(), {**batch, "mask": keep}, K)
    assert code_of(report) == "lambda batch: batch['mask'][:, 1:].sum()"


def half_a_float_loss(dtype):
    """A token loss whose network computes in a narrow dtype, as training does."""

    def loss(params, batch):
        x, w, v = (y.astype(dtype) for y in (batch["x"], params["w"], params["v"]))
        out = jnp.einsum("...i,i->...", jnp.tanh(x @ w), v)
        squares = (out.astype(jnp.float32) - batch["y"].astype(jnp.float32)) ** 2
        mask = batch["mask"].astype(jnp.float32)
        return jnp.sum(squares * mask) / jnp.maximum(jnp.sum(mask), 1.0)

    return loss, {"w": draw(5, 32) / 2, "v": draw(32) / 6}


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("counts", "dtype"),
    [([20, 21, 20, 19], jnp.bfloat16), ([10, 0, 3, 29], jnp.float16)],
)
def test_the_fix_is_found_where_the_loss_computes_in_half_a_float(counts, dtype):
    loss, params = half_a_float_loss(dtype)
    batch = token_batch(counts)
    report = ga.verify(loss, params, batch, K)
    assert_cause(report, Cause.WEIGHTS)
    assert code_of(report) == "lambda batch: batch['mask'].sum()"
    assert_weights(report, counts)
    assert " : ".join(map(str, counts)) in report.message
    assert ga.verify(loss, params, batch, K, weight_fn=fixed(report)).ok


@pytest.mark.slow
def test_counts_that_are_not_in_the_batch_are_fitted_through_casts():
    counts = [10, 21, 20, 29]
    loss, params = half_a_float_loss(jnp.bfloat16)
    batch = token_batch(counts)
    keep = batch.pop("mask")
    batch["id"] = jnp.arange(16)

    def hidden(params, batch):
        return loss(params, {**batch, "mask": keep[batch["id"]]})

    report = ga.verify(hidden, params, batch, K)
    assert_cause(report, Cause.WEIGHTS)
    assert "that returns the number your loss divides by" in report.fix
    assert_weights(report, counts, rtol=1e-6)
    assert "must count as 10 : 21 : 20 : 29 or a multiple" in report.message


def test_proportions_are_whole_numbers_where_they_can_be():
    assert proportions(np.array([0.125, 0.26, 0.25, 0.365])) == "25 : 52 : 50 : 73"
    assert proportions(np.array([1, np.pi]) / (1 + np.pi)) == "1 : 3.14159"


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_fractional_weights_that_training_rounds_are_right(dtype):
    """weight_fn adds them up in float32, and the loss in a dtype of its own."""

    def loss(params, batch):
        weight = jnp.exp(3 * batch["y"]).astype(dtype)
        squares = (errors(params, batch) ** 2).astype(dtype)
        return jnp.sum(weight * squares) / jnp.sum(weight)

    def weigh(batch):
        return jnp.exp(3 * batch["y"]).sum()

    args = loss, linear_params(), linear_batch(), K
    assert ga.verify(*args, weight_fn=weigh).ok
    # The twin: weights that are off by a thousandth, and none.

    def off(batch):
        return jnp.where(batch["y"][0] > 0, 1.001, 1.0) * weigh(batch)

    assert_cause(ga.verify(*args, weight_fn=off), Cause.WEIGHTS)
    assert_cause(ga.verify(*args), Cause.WEIGHTS)


@pytest.mark.slow
def test_right_weights_beside_another_division_are_not_asked_for_again():
    def loss(params, batch):
        return token_loss(params, batch) / (16 // len(batch["y"]))

    batch = token_batch([10, 21, 20, 29])
    report = ga.verify(loss, linear_params(), batch, K, weight_fn=count_tokens)
    assert_cause(report, Cause.SCALE)
    assert "The weights are right" in report.message
    assert "weight_fn=" not in report.fix
    assert sum(report.weights) == pytest.approx(K)


@pytest.mark.slow
def test_a_count_that_is_not_in_the_batch_is_still_shown():
    def loss(params, batch):
        weight = jnp.exp(batch["y"])
        return jnp.sum(weight * errors(params, batch) ** 2) / jnp.sum(weight)

    batch = linear_batch()
    report = ga.verify(loss, linear_params(), batch, K)
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, np.exp(batch["y"]).reshape(K, -1).sum(1), rtol=1e-6)
    assert "returns the number your loss divides by" in report.fix


@pytest.mark.exhaustive
def test_a_mask_in_half_a_float_is_summed_in_float32():
    """bfloat16 counts one by one no further than 256."""
    counts = [289, 301, 311, 0]
    batch = token_batch(counts, length=100)
    batch["mask"] = batch["mask"].astype(jnp.bfloat16)

    def loss(params, batch):
        mask = batch["mask"].astype(batch["x"].dtype)
        return token_loss(params, {**batch, "mask": mask})

    report = ga.verify(loss, linear_params(), batch, K)
    assert_cause(report, Cause.WEIGHTS)
    assert code_of(report) == "lambda batch: batch['mask'].sum(dtype='float32')"
    again = ga.verify(loss, linear_params(), batch, K, weight_fn=fixed(report))
    assert again.ok, again
    # The twin: a sum in bfloat16 is another weight.
    rounded = ga.verify(loss, linear_params(), batch, K, weight_fn=count_tokens)
    assert_cause(rounded, Cause.WEIGHTS)


def test_the_right_weight_fn_of_a_mean_over_tokens_is_right():
    batch = token_batch([10, 0, 20, 29])
    report = ga.verify(token_loss, linear_params(), batch, K, weight_fn=count_tokens)
    assert_cause(report, report.cause)
    assert report.ok


def test_a_weight_fn_that_counts_the_wrong_thing_is_shown_the_right_counts():
    counts = [10, 21, 20, 29]
    report = ga.verify(
        token_loss,
        linear_params(),
        token_batch(counts),
        K,
        weight_fn=lambda batch: (1 - batch["mask"]).sum(),
    )
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, counts, rtol=1e-8)
    assert "10 : 21 : 20 : 29" in report.message


def test_a_weight_fn_beside_a_plain_mean_is_to_be_left_out():
    report = ga.verify(
        mean_loss,
        linear_params(),
        linear_batch(),
        K,
        weight_fn=lambda batch: jnp.exp(batch["y"]).sum(),
    )
    assert_cause(report, Cause.WEIGHTS)
    assert report.fix.startswith("Leave weight_fn out.")
    np.testing.assert_allclose(report.weights, np.full(K, 1 / K), rtol=1e-9)


@pytest.mark.exhaustive
def test_a_penalty_beside_a_mean_over_tokens_needs_the_same_weights():
    def loss(params, batch):
        return token_loss(params, batch) + penalty(params)

    counts = [10, 0, 20, 29]
    batch = token_batch(counts)
    report = ga.verify(loss, linear_params(), batch, K)
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, counts)
    assert ga.verify(loss, linear_params(), batch, K, weight_fn=fixed(report)).ok


def test_a_mean_over_tokens_that_is_divided_by_k_as_well_says_both():
    def loss(params, batch):
        return token_loss(params, batch) / (16 // len(batch["y"]))

    counts = [10, 21, 20, 29]
    report = ga.verify(loss, linear_params(), token_batch(counts), K)
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, counts, rtol=1e-6)
    assert sum(report.weights) == pytest.approx(K)
    assert "factor of 4" in report.message


def test_two_identical_micro_batches_do_not_confuse_the_fit():
    batch = token_batch([10, 21, 20, 29])
    same = jax.tree.map(lambda x: jnp.concatenate([x[:4], x[:4], x[8:]]), batch)
    report = ga.verify(token_loss, linear_params(), same, K)
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, [10, 10, 20, 29])


@pytest.mark.exhaustive
def test_weights_that_show_in_no_gradient_are_those_of_the_program():
    """Tokens whose loss is flat count in the mean all the same."""
    counts = [10, 21, 5, 4, 8]
    batch = token_batch(counts)
    batch["live"] = jnp.zeros(20).at[:8].set(1)

    def loss(params, batch):
        squares = errors(params, batch) ** 2 * batch["live"][:, None]
        total = jnp.sum(squares * batch["mask"])
        return total / jnp.maximum(jnp.sum(batch["mask"]), 1.0)

    report = ga.verify(loss, linear_params(), batch, 5)
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, counts, rtol=1e-12)
    assert ga.verify(loss, linear_params(), batch, 5, weight_fn=count_tokens).ok


@pytest.mark.slow
def test_identical_micro_batches_are_no_cause_to_complain():
    batch = jax.tree.map(lambda x: jnp.concatenate([x, x]), token_batch([9]))
    assert ga.verify(token_loss, linear_params(), batch, 2).ok


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [4, 8])
def test_fewer_parameters_than_micro_batches_still_show_the_counts(k):
    """One equation at the parameters, and k unknown weights."""
    counts = [3, 9, 0, 14, 2, 7, 1, 11][:k]
    batch = token_batch(counts)

    def loss(w, batch):
        return token_loss({"w": w * jnp.ones(5, w.dtype), "b": 0 * w}, batch)

    report = ga.verify(loss, jnp.float32(0.3), batch, k)
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, counts)


@pytest.mark.slow
def test_one_linear_parameter_and_two_micro_batches_leave_nothing_open():
    """Weights, a factor and normalised statistics all explain one number."""

    def loss(w, batch):
        return jnp.sum(w * batch["y"] * batch["mask"]) / jnp.sum(batch["mask"])

    report = ga.verify(loss, jnp.float32(1.0), token_batch([3, 20]), 2)
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, [3, 20], rtol=1e-12)

    # The twin: as many numbers, and rows that do need each other.
    def normalised(w, batch):
        return jnp.sum(w * batch["y"]) / jnp.std(w * batch["y"] + batch["mask"][:, :1])

    report = ga.verify(normalised, jnp.float32(1.0), token_batch([3, 20]), 2)
    assert_cause(report, Cause.CROSS_EXAMPLE)


# -- Examples that see each other ------------------------------------------------------


def normalised_loss(params, batch):
    """Batch normalisation in training mode, with its new statistics as aux."""
    h = batch["x"] @ params["w"]
    mean, var = jnp.mean(h, axis=0), jnp.var(h, axis=0)
    h = (h - mean[None]) / jnp.sqrt(var + 1e-5)[None] * params["scale"][None]
    loss = jnp.mean((jnp.tanh(h) @ params["v"] - batch["y"]) ** 2)
    return loss, {"mean": mean, "var": var}


def asked_of_rows(report, fun):
    """What rows need of each other by the page, on the lines of `fun`."""
    assert "ga_optax.value_and_grad(loss" in report.fix
    code = fun.__code__
    [where] = re.findall(r"Where: (.*)\.$", report.diagnosis[1])
    found = set()
    for entry in where.split("; "):
        pattern = r"test_verify\.py:(\d+):\d+ \(.*\): (.*)"
        line, of = re.fullmatch(pattern, entry).groups()
        assert code.co_firstlineno <= int(line) < code.co_firstlineno + 12, entry
        found |= set(of.split(" and "))
    return found


NORMALISED = {"w": draw(5, 6), "scale": draw(6, seed=1), "v": draw(6, seed=2)}


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [2, 4])
def test_batch_normalisation_is_a_cross_example_term(k):
    report = ga.verify(normalised_loss, NORMALISED, linear_batch(), k, has_aux=True)
    assert_cause(report, Cause.CROSS_EXAMPLE)
    assert "No weight_fn can fix it" in report.fix
    assert asked_of_rows(report, normalised_loss) == {"a sum over rows"}
    assert report.weights is None
    assert report.relative > 1e-2


@pytest.mark.slow
def test_a_contrastive_loss_is_a_cross_example_term():
    def info_nce(params, batch):
        a, b = batch["a"] @ params["w"], batch["b"] @ params["w"]
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(a @ b.T)))

    batch = {"a": draw(16, 5), "b": draw(16, 5, seed=1)}
    report = ga.verify(info_nce, {"w": draw(5, 3)}, batch, K)
    assert_cause(report, Cause.CROSS_EXAMPLE)
    assert asked_of_rows(report, info_nce) == {"all rows"}


@pytest.mark.exhaustive
def test_a_contrastive_loss_of_neighbouring_rows_is_a_cross_example_term():
    """Rows 2i and 2i + 1 are a pair: an order that parts them is another loss."""

    def loss(params, batch):
        h = batch["x"] @ params["w"]
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(h[::2] @ h[1::2].T)))

    report = ga.verify(loss, {"w": draw(5, 3)}, linear_batch(), K)
    assert_cause(report, Cause.CROSS_EXAMPLE)


@pytest.mark.exhaustive
def test_the_load_balancing_of_experts_is_a_cross_example_term():
    def loss(params, batch):
        gates = jax.nn.softmax(batch["x"] @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, axis=1), 3, dtype=gates.dtype)
        out = jnp.einsum("bi,eio,be->bo", batch["x"], params["experts"], gates * chosen)
        balance = 3 * jnp.sum(jnp.mean(gates, axis=0) * jnp.mean(chosen, axis=0))
        return jnp.mean(out**2) + 0.01 * balance

    params = {"router": draw(5, 3), "experts": draw(3, 5, 2, seed=1)}
    report = ga.verify(loss, params, linear_batch(32), K)
    assert_cause(report, Cause.CROSS_EXAMPLE)
    assert asked_of_rows(report, loss) == {"a sum over rows"}


@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [2, 4, 16])
def test_a_maximum_over_the_batch_is_no_weight_of_1(k):
    """The weights 0 : 1 : 0 : 0 reproduce it, at other parameters nearby as well."""

    def loss(params, batch):
        return jnp.max(errors(params, batch) ** 2)

    report = ga.verify(loss, linear_params(), linear_batch(), k)
    assert_cause(report, Cause.CROSS_EXAMPLE)
    assert asked_of_rows(report, loss) == {"all rows"}


@pytest.mark.grid(1)
@pytest.mark.parametrize("k", [2, 4])
@pytest.mark.parametrize("of_mean", [jnp.sqrt, jnp.log])
def test_a_root_or_a_logarithm_of_a_mean_is_a_cross_example_term(of_mean, k):
    """Its weights depend on the parameters, so no count of the batch can give them."""

    def loss(params, batch):
        return of_mean(mean_loss(params, batch))

    report = ga.verify(loss, linear_params(), linear_batch(), k)
    assert_cause(report, Cause.CROSS_EXAMPLE)
    assert asked_of_rows(report, loss) == {"a sum over rows"}
    assert "train on the mean itself" in report.fix


@pytest.mark.exhaustive
def test_a_small_cross_example_term_is_not_taken_for_rounding():
    def loss(params, batch):
        return mean_loss(params, batch) + 1e-5 * jnp.std(errors(params, batch))

    report = ga.verify(loss, linear_params(), linear_batch(), K)
    assert_cause(report, Cause.CROSS_EXAMPLE)
    assert report.relative < 1e-4


@pytest.mark.exhaustive
@pytest.mark.parametrize("k", [4, 8])
def test_a_cross_example_term_of_one_parameter_is_not_taken_for_weights(k):
    """With k weights for one equation, some weights always fit at the parameters."""

    def loss(w, batch):
        h = w * batch["y"]
        return jnp.mean(h**2) / (1 + jnp.var(batch["y"])) + jnp.std(jnp.sin(h))

    report = ga.verify(loss, jnp.float32(0.7), linear_batch(), k)
    assert_cause(report, Cause.CROSS_EXAMPLE)


@pytest.mark.exhaustive
def test_a_term_on_a_leaf_with_a_tiny_gradient_is_not_hidden_by_the_others():
    def loss(params, batch):
        h = batch["x"] @ params["w"]
        return mean_loss(params, batch) + 1e-9 * jnp.std(h * params["tiny"])

    params = {**linear_params(), "tiny": jnp.ones(())}
    report = ga.verify(loss, params, linear_batch(), K)
    assert_cause(report, Cause.CROSS_EXAMPLE)


# -- Randomness ------------------------------------------------------------------------

KEY = jax.random.key(0)


def dropout_loss(params, batch, key):
    keep = jax.random.bernoulli(key, 0.5, batch["x"].shape)
    return jnp.mean((jnp.where(keep, batch["x"], 0) @ params["w"] - batch["y"]) ** 2)


def test_dropout_with_one_key_for_the_batch_is_randomness():
    report = ga.verify(dropout_loss, {"w": draw(5)}, linear_batch(), K, rng=KEY)
    assert_cause(report, Cause.RANDOMNESS)
    assert "dropout" in report.message
    assert "jax.random.split(key, batch_size)" in report.fix


@pytest.mark.exhaustive
def test_dropout_with_a_key_that_is_closed_over_is_randomness():
    def loss(params, batch):
        return dropout_loss(params, batch, KEY)

    report = ga.verify(loss, {"w": draw(5)}, linear_batch(), K)
    assert_cause(report, Cause.RANDOMNESS)
    assert "for the whole batch at once" in report.message


@pytest.mark.exhaustive
def test_dropout_with_a_key_for_each_example_is_right():
    def loss(params, batch):
        def of_one(x, y, key):
            keep = jax.random.bernoulli(key, 0.5, x.shape)
            return (jnp.where(keep, x, 0) @ params["w"] - y) ** 2

        return jnp.mean(jax.vmap(of_one)(batch["x"], batch["y"], batch["key"]))

    batch = {**linear_batch(), "key": jax.random.split(KEY, 16)}
    report = ga.verify(loss, {"w": draw(5)}, batch, K)
    assert report.ok, report


@pytest.mark.exhaustive
def test_one_random_number_for_the_whole_batch_is_randomness():
    """The order of the examples does not show it; another key does."""

    def loss(params, batch, key):
        return mean_loss(params, batch) * jax.random.uniform(key)

    report = ga.verify(loss, linear_params(), linear_batch(), K, rng=KEY)
    assert_cause(report, Cause.RANDOMNESS)


@pytest.mark.exhaustive
def test_random_numbers_that_are_not_jaxs_are_randomness():
    random = np.random.default_rng(0)

    def loss(params, batch):
        return mean_loss(params, batch) * float(random.uniform(0.5, 1.0))

    report = ga.verify(loss, linear_params(), linear_batch(), K)
    assert_cause(report, Cause.RANDOMNESS)
    assert "Traced a second time" in report.message


@pytest.mark.exhaustive
def test_random_numbers_that_are_not_jaxs_show_with_one_micro_batch_too():
    """One program serves both sides of the diagnosis, but training traces anew."""
    random = np.random.default_rng(0)

    def loss(params, batch):
        return mean_loss(params, batch) * float(random.uniform(0.5, 1.0))

    report = ga.verify(loss, linear_params(), linear_batch(), 1)
    assert_cause(report, Cause.RANDOMNESS)
    assert "As training computes them, they differ by" in report.message


@pytest.mark.exhaustive
def test_weights_by_position_are_randomness():
    def loss(params, batch):
        rows = jnp.arange(len(batch["y"]), dtype=batch["y"].dtype)
        return jnp.mean(rows * errors(params, batch) ** 2)

    report = ga.verify(loss, linear_params(), linear_batch(), K)
    assert_cause(report, Cause.RANDOMNESS)
    # Whatever else it is divided by, as long as every order of the rows has the same.
    report = ga.verify(
        lambda p, b: loss(p, b) / jnp.sum(b["y"] ** 2),
        linear_params(),
        {**linear_batch(), "y": jnp.ones(16)},
        K,
    )
    assert_cause(report, Cause.RANDOMNESS)


def differences(h):
    return h[1:] - h[:-1]


@pytest.mark.slow
@pytest.mark.grid(1)
@pytest.mark.parametrize(
    "of_rows",
    [differences, jnp.cumsum, lambda h: h[: len(h) // 2] * h[len(h) // 2 :]],
    ids=["differences", "sums", "pairs"],
)
def test_rows_that_depend_on_their_neighbours_are_no_randomness(of_rows):
    def loss(params, batch):
        return jnp.mean(of_rows(jnp.tanh(errors(params, batch))) ** 2)

    report = ga.verify(loss, linear_params(), linear_batch(), K)
    assert_cause(report, Cause.CROSS_EXAMPLE)
    assert "into one row of the batch" in report.fix

    # The twin: with dropout from one key, randomness is a cause, maybe the only one.
    def dropped(params, batch):
        h = jnp.tanh(errors(params, batch))
        keep = jax.random.bernoulli(jax.random.key(1), 0.5, h.shape)
        return jnp.mean(of_rows(jnp.where(keep, h, 0)) ** 2)

    report = ga.verify(dropped, linear_params(), linear_batch(), K)
    assert_cause(report, Cause.RANDOMNESS)
    assert "second cause may be hidden" in report.fix


# -- The wrong axis --------------------------------------------------------------------


def recurrent_loss(params, batch):
    """Over [time, batch, size], with a mask over [time, batch]."""

    def step(h, x):
        h = jnp.tanh(h @ params["w"] + x)
        return h, h

    x = batch["x"]
    _, hidden = jax.lax.scan(step, jnp.zeros_like(x[0]), x)
    weights = batch.get("mask", jnp.ones_like(x[..., 0]))
    return jnp.sum(weights * (hidden @ params["v"]) ** 2) / jnp.sum(weights)


def swapped(params, batch):
    return recurrent_loss(params, jax.tree.map(lambda x: x.swapaxes(0, 1), batch))


@pytest.mark.exhaustive
@pytest.mark.parametrize("masked", [pytest.param(False, marks=MORE), True])
def test_a_batch_that_is_split_along_time_is_split_along_the_wrong_axis(masked):
    params = {"w": draw(3, 3), "v": draw(3)}
    batch = {"x": draw(8, 6, 3)}
    if masked:
        lengths = jnp.arange(6) + 3
        mask = (jnp.arange(8)[:, None] < lengths[None]).astype(jnp.float32)
        batch["mask"] = mask
    report = ga.verify(recurrent_loss, params, batch, K)
    assert_cause(report, Cause.AXIS)
    assert "batch_axes=1" in report.fix
    assert ("weights are wrong" in report.fix) == masked
    # As the page says: the examples first, and the loss swaps them back.
    batch = jax.tree.map(lambda x: x.swapaxes(0, 1), batch)
    weight_fn = count_tokens if masked else None
    assert ga.verify(swapped, params, batch, 3, weight_fn=weight_fn).ok


@pytest.mark.exhaustive
def test_a_loss_over_time_whose_examples_interact_too_has_no_right_axis():
    def loss(params, batch):
        return jnp.sqrt(recurrent_loss(params, batch))

    params = {"w": draw(3, 3), "v": draw(3)}
    report = ga.verify(loss, params, {"x": draw(8, 6, 3)}, K)
    assert_cause(report, Cause.CROSS_EXAMPLE)
    assert "[batch, time, ...]" in report.fix


# -- Not finite ------------------------------------------------------------------------


def test_a_nan_in_one_micro_batch_is_named_with_its_rows_and_leaf():
    batch = linear_batch()
    batch["x"] = batch["x"].at[9, 2].set(jnp.nan)
    report = ga.verify(mean_loss, linear_params(), batch, K)
    assert_cause(report, Cause.NOT_FINITE)
    assert "micro-batch 2 (rows 8 to 11), leaf ['b']" in report.message
    assert "nan" in report.message
    assert report.max_ulp is None
    assert "debug_nans" in report.fix


def test_a_mean_over_no_token_names_the_empty_micro_batch():
    def loss(params, batch):
        squares = errors(params, batch) ** 2
        return jnp.sum(squares * batch["mask"]) / jnp.sum(batch["mask"])

    batch = token_batch([5, 0, 3, 9])
    report = ga.verify(loss, linear_params(), batch, K)
    assert_cause(report, Cause.NOT_FINITE)
    assert "micro-batch 1 (rows 4 to 7)" in report.message
    assert "0 / 0" in report.message
    assert "jnp.maximum(count, 1)" in report.fix
    # A micro-batch of weight 0 is left out, whatever it holds.
    assert ga.verify(loss, linear_params(), batch, K, weight_fn=count_tokens).ok


def test_a_nan_of_weight_0_is_not_taken_for_that_of_another_micro_batch():
    def loss(params, batch):
        squares = errors(params, batch) ** 2
        return jnp.sum(squares * batch["mask"]) / jnp.sum(batch["mask"])

    batch = token_batch([0, 5, 3, 9])
    batch["x"] = batch["x"].at[9].set(jnp.inf)
    report = ga.verify(loss, linear_params(), batch, K, weight_fn=count_tokens)
    assert_cause(report, Cause.NOT_FINITE)
    assert "micro-batch 2 (rows 8 to 11)" in report.message
    # The twin: without the weights the empty one is the first.
    report = ga.verify(loss, linear_params(), batch, K)
    assert "micro-batch 0 (rows 0 to 3)" in report.message


def test_an_overflow_of_float16_alone_is_named_as_such():
    def loss(params, batch):
        return jnp.mean((batch["x"].astype(params.dtype) @ params) ** 2) * 1000

    params = draw(5).astype(jnp.float16) * 100
    report = ga.verify(loss, params, linear_batch(), K)
    assert_cause(report, Cause.NOT_FINITE)
    assert "too large for the dtype" in report.message


# -- The report ------------------------------------------------------------------------


def test_the_native_gradients_are_those_of_accumulate():
    """`max_ulp` is a distance between what training computes, twice counted here."""
    params, batch = linear_params(), linear_batch()
    report = ga.verify(mean_loss, params, batch, K)
    whole = jax.jit(jax.grad(mean_loss))(params, batch)
    step = jax.jit(ga.accumulate(mean_loss, K))
    parts = ga.accumulator.mean(step(ga.accumulator.init(params), params, batch)[1])
    for leaf, a, b in zip(
        report.leaves, jax.tree.leaves(whole), jax.tree.leaves(parts), strict=True
    ):
        steps = np.asarray(a), np.asarray(b)
        between = np.max(np.abs(steps[0] - steps[1]) / np.spacing(np.abs(steps[0])))
        assert leaf.max_ulp == pytest.approx(between, rel=0.5)
        assert leaf.max_abs == np.max(np.abs(steps[0] - steps[1]))


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        pytest.param([8, 8, 8, 8], AxisType.Auto, marks=MORE),
        ([10, 0, 20, 29], AxisType.Explicit),
    ],
)
def test_sharded_parameters_and_batches_are_compared_where_they_are(counts, kind):
    assert jax.device_count() == 8
    mesh = jax.make_mesh((8,), ("data",), axis_types=(kind,))
    batch = token_batch(counts)
    params = {"w": draw(5, seed=1), "b": draw(seed=2), "table": draw(16, seed=3)}

    def loss(params, batch):
        return token_loss(params, batch) * (1 + jnp.mean(params["table"] ** 2))

    expected = ga.verify(loss, params, batch, K)
    split = NamedSharding(mesh, PartitionSpec("data"))
    params["table"] = jax.device_put(params["table"], split)
    report = ga.verify(loss, params, jax.device_put(batch, split), K)
    assert_cause(report, Cause.ROUNDING if counts[0] == 8 else Cause.WEIGHTS)
    assert report.cause is expected.cause
    if not report.ok:
        assert_weights(report, counts)


def test_the_report_is_frozen_and_compares_the_losses():
    report = ga.verify(sum_loss, linear_params(), linear_batch(), K)
    with pytest.raises(AttributeError):
        report.ok = True
    undivided, accumulated = report.losses
    assert undivided == pytest.approx(float(sum_loss(linear_params(), linear_batch())))
    assert accumulated == pytest.approx(undivided / K)


@pytest.mark.slow
def test_a_loss_value_that_differs_without_a_gradient_is_noted():
    def loss(params, batch):
        return mean_loss(params, batch) + jax.lax.stop_gradient(jnp.var(batch["y"]))

    report = ga.verify(loss, linear_params(), linear_batch(), K)
    assert report.ok
    assert "The gradients agree, but the loss does not" in str(report)


def test_ulps_count_the_numbers_in_between():
    one = np.float32(1.0)
    a = np.array([1.0, 1.0, 0.0, -0.0, 1e-45, np.inf, -1.0], np.float32)
    b = np.array(
        [1.0, np.nextafter(one, 2), -0.0, 0.0, -1e-45, np.finfo(np.float32).max, 1.0],
        np.float32,
    )
    expected = [0, 1, 0, 0, 2, 1, 2 * 0x3F800000]
    assert ulps(a, b).tolist() == expected
    half = jnp.asarray([1.0, 256.0], jnp.bfloat16)
    assert ulps(np.asarray(half), np.asarray(half * 2)).tolist() == [
        128,
        128,
    ]


def test_ulps_of_two_dtypes_are_refused():
    with pytest.raises(ValueError, match="one dtype"):
        ulps(np.zeros(2, np.float32), np.zeros(2, np.float64))


@pytest.mark.exhaustive
@pytest.mark.parametrize("dtype", [pytest.param("float64", marks=MORE), "float32"])
def test_memory_does_not_grow_with_the_number_of_micro_batches(monkeypatch, dtype):
    """At most three float64 gradient trees, and two copies of the parameters."""
    size = 40_000
    peak = {}

    def live():
        return sum(x.nbytes for x in jax.live_arrays() if x.size >= size // 2)

    def tick(self):
        peak[k] = max(peak.get(k, 0), live() - base)

    def loss(params, batch):
        w = params["w"].reshape(5, -1)
        if dtype == "float32":
            w, batch = jax.tree.map(lambda x: x.astype(jnp.float32), (w, batch))
        return jnp.sum(jnp.tanh(batch["x"] @ w) * w[:1])

    monkeypatch.setattr(Progress, "tick", tick)
    params, batch = {"w": draw(size)}, {"x": draw(16, 5)}
    for k in (2, 16):
        gc.collect()
        base = live()
        report = ga.verify(loss, params, batch, k)
        assert report.cause is Cause.SCALE
    assert peak[2] == peak[16]
    assert 8 * size < peak[16] <= (3 + 2) * 8 * size


@pytest.mark.exhaustive
def test_a_large_model_is_fitted_through_a_sketch():
    """More parameters than a sketch has places, most of them without gradient."""
    counts = [10, 0, 20, 29]
    params = {**linear_params(), "table": draw(20_000, 5)}

    def loss(params, batch):
        x = batch["x"] + params["table"][batch["ids"]]
        return token_loss(params, {**batch, "x": x})

    batch = token_batch(counts)
    rng = np.random.default_rng(0)
    batch["ids"] = jnp.asarray(rng.integers(0, 20_000, (16, 8)), jnp.int32)
    report = ga.verify(loss, params, batch, K)
    assert_cause(report, Cause.WEIGHTS)
    assert_weights(report, counts, rtol=1e-6)


def test_progress_is_shown_to_a_terminal_alone(monkeypatch, capsys):
    progress = Progress()
    progress.start -= 10
    with progress:
        progress.tick()
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    with progress:
        progress.tick()
        assert "2 gradients" in capsys.readouterr().err
    assert capsys.readouterr().err.strip(" \r") == ""


# -- Bad input -------------------------------------------------------------------------


def never(params, batch):
    raise AssertionError("fun must not be traced")


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"num_microbatches": 3}, ValueError, "must divide the batch axis"),
        ({"num_microbatches": 0}, ValueError, "at least 1"),
        ({"num_microbatches": 2.0}, TypeError, "must be an int"),
        (
            {"params": {}},
            ValueError,
            "params must .*, but it has none: it is of type dict",
        ),
        ({"params": {"n": jnp.arange(3)}}, TypeError, r"leaf \['n'\] of params"),
        ({"batch": ()}, ValueError, "batch must hold at least one array"),
        ({"batch": {"x": 1.0}}, ValueError, r"\['x'\] is a scalar. Give it None"),
        (
            {"batch": {"x": jnp.ones(4), "y": jnp.ones(6)}},
            ValueError,
            r"\['y'\] has shape \(6,\)",
        ),
        ({"batch": jnp.ones((0, 2))}, ValueError, "at least one example"),
        ({"weight_fn": 3}, TypeError, "weight_fn must be a function"),
        ({"rng": ()}, ValueError, "rng must hold at least one array"),
        ({"rng": jnp.ones(3)}, ValueError, "PRNG key"),
        ({"fun": 3}, TypeError, "fun must be a function"),
    ],
)
def test_bad_input_raises_before_fun_is_traced(change, error, words):
    arguments = {
        "fun": never,
        "params": linear_params(),
        "batch": linear_batch(),
        "num_microbatches": 4,
        **change,
    }
    with pytest.raises(error, match=words):
        ga.verify(**arguments)


@pytest.mark.parametrize(
    ("fun", "words"),
    [
        (errors, "must be a scalar"),
        (lambda p, b: (mean_loss(p, b), 1), "has_aux=True"),
        (lambda p, b: jnp.int32(1), "real and floating"),
    ],
)
def test_what_fun_returns_is_checked(fun, words):
    with pytest.raises((TypeError, ValueError), match=words):
        ga.verify(fun, linear_params(), linear_batch(), K)


def test_a_loss_without_the_aux_that_was_promised_is_named():
    with pytest.raises(TypeError, match=r"pair \(loss, aux\) with has_aux=True"):
        ga.verify(mean_loss, linear_params(), linear_batch(), K, has_aux=True)


def test_aux_may_be_anything():
    def loss(params, batch):
        return mean_loss(params, batch), {"name": "no array", "key": KEY}

    assert ga.verify(loss, linear_params(), linear_batch(), K, has_aux=True).ok


@pytest.mark.parametrize(
    "weight_fn", [lambda batch: batch["y"], lambda batch: -1.0, lambda batch: "two"]
)
def test_what_weight_fn_returns_is_checked(weight_fn):
    with pytest.raises((TypeError, ValueError), match="weight must be"):
        ga.verify(mean_loss, linear_params(), linear_batch(), K, weight_fn=weight_fn)


# -- Random losses ---------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("optax_promotion", "fast_compilation")
@pytest.mark.parametrize(
    ("dtype", "kind", "number"),
    [
        ("bfloat16", "right", 0),
        pytest.param("bfloat16", "right", 11, marks=MORE),  # fractional weights
        pytest.param("bfloat16", "wrong", 7, marks=MORE),  # no weights
        pytest.param("bfloat16", "wrong", 13, marks=MORE),  # batch statistics
        pytest.param("float32", "right", 9, marks=MORE),
        pytest.param("float64", "wrong", 24, marks=MORE),  # one key for the batch
    ],
)
def test_right_losses_are_ok_and_wrong_ones_have_their_cause(dtype, kind, number):
    """Six of those whose rates the page on exactness has."""
    case, report = verify_rates.ask(dtype, kind, number)
    assert verify_rates.outcome(case, report) == "right", f"{case.name}\n{report}"
    # The twin: another cause is no right answer.
    other = case._replace(causes=set(Cause) - case.causes - {report.cause})
    assert verify_rates.outcome(other, report) != "right"


# -- Laws ------------------------------------------------------------------------------


# A case compiles half a dozen programs, which takes about a second.
CASES = max(1, hypothesis.settings.default.max_examples // 10)

counts_of_tokens = st.lists(st.integers(0, 32), min_size=2, max_size=6).filter(any)


@pytest.mark.exhaustive
@hypothesis.given(counts=counts_of_tokens, seed=st.integers(0, 1000))
@hypothesis.settings(max_examples=CASES)
def test_law_the_fitted_weights_are_the_counts(counts, seed):
    batch = token_batch(counts, seed=seed)
    report = ga.verify(token_loss, linear_params(seed), batch, len(counts))
    if len(set(counts)) == 1:
        assert report.ok
    else:
        assert report.cause is Cause.WEIGHTS, report
        assert_weights(report, counts)


@pytest.mark.exhaustive
@hypothesis.given(order=st.permutations(range(4)))
@hypothesis.settings(max_examples=CASES)
def test_law_the_weights_move_with_their_micro_batches(order):
    counts = [10, 0, 20, 29]
    batch = jax.tree.map(
        lambda x: jnp.concatenate([x[4 * i : 4 * i + 4] for i in order]),
        token_batch(counts),
    )
    report = ga.verify(token_loss, linear_params(), batch, 4)
    assert_weights(report, [counts[i] for i in order])


@pytest.mark.exhaustive
@hypothesis.given(
    seed=st.integers(0, 2**31 - 1),
    k=st.sampled_from([1, 2, 3, 4, 6, 12]),
    power=st.floats(0.5, 3),
    dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    scale=st.sampled_from([1e-3, 1.0, 10.0]),
)
@hypothesis.settings(max_examples=CASES)
def test_law_a_mean_of_anything_is_ok(seed, k, power, dtype, scale):
    def loss(params, batch):
        x = batch["x"].astype(params["w"].dtype)
        return jnp.mean(jnp.logaddexp(x @ params["w"], params["b"]) ** power)

    params = jax.tree.map(
        lambda x: (scale * x).astype(dtype), {"w": draw(5, seed=seed), "b": draw()}
    )
    report = ga.verify(loss, params, {"x": draw(12, 5, seed=seed)}, k)
    assert report.ok, report
