"""`verify`: checks its arguments, compares, asks for the cause, and reports."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from ga_optax import _checks, accumulator
from ga_optax._calls.accumulate import accumulate
from ga_optax._calls.call import check_parameters
from ga_optax._calls.words import explains_keywords
from ga_optax._verify import diagnosis, gradients
from ga_optax._verify.report import Report


@explains_keywords
def verify(
    fun: Callable[..., Any],
    params: optax.Params,
    batch: Any,
    num_microbatches: int,
    *,
    weight_fn: Callable[..., ArrayLike] | None = None,
    has_aux: bool = False,
    rng: Any = None,
    batch_axes: Any = 0,
) -> Report:
    """Compares the accumulated gradient with the undivided one; names the cause.

    >>> import jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(params, batch):  # a mean over the elements that the mask keeps
    ...     error = (batch["x"] @ params["w"] - batch["y"]) ** 2
    ...     return (error * batch["mask"]).sum() / batch["mask"].sum()
    >>> params = {"w": jnp.array([1.0, 2.0])}
    >>> batch = {
    ...     "x": jnp.array([[1.0, 0], [0, 1], [1, 1], [2, 0], [3, 1], [0, 2]]),
    ...     "y": jnp.array([0.0, 1, 0, 2, 1, 0]),
    ...     "mask": jnp.array([1.0, 1, 1, 0, 0, 1]),
    ... }
    >>> report = ga.verify(loss, params, batch, num_microbatches=3)
    >>> print(report.cause.name, [round(w, 6) for w in report.weights])
    WEIGHTS [0.5, 0.25, 0.25]
    >>> print(report.fix.partition(": Pass ")[2].partition(" to ")[0])
    weight_fn=lambda batch: batch['mask'].sum()
    >>> by_count = lambda batch: batch["mask"].sum()
    >>> ga.verify(loss, params, batch, num_microbatches=3, weight_fn=by_count).ok
    True

    Run `verify` once when you switch accumulation on: outside `jit`, with the loss that
    you train with, real parameters and one real batch. `print(report)` prints a page:
    the cause, the size of the difference, and the line of code that fixes it.

    `verify` is for micro-batches, each by itself: `ga_optax.accumulate`, `MultiSteps`,
    or a loop of your own. `ga_optax.value_and_grad` with the whole batch gives the
    undivided gradient of any loss.

    **Proof.** The program of `fun`, traced once at all rows, is partitioned over
    micro-batches, and shows how the loss depends on rows. If no row meets another, the
    loss is a sum of rows, and only the scale can be wrong (`SCALE`). If rows meet in
    numbers without parameters, such as a count of tokens, the part of each micro-batch
    is its weight (`WEIGHTS`), and the page names the line. If rows meet otherwise, no
    weights can help, and the page names all lines (`CROSS_EXAMPLE`). If the program
    draws random numbers for the whole batch, or weighs rows by position, the cause is
    `RANDOMNESS`. A promise of `ga_optax.rowwise` is believed, unless the loss in parts
    is another number (`PROMISE`). Both gradients are compared in numbers, which confirm
    weights and scales, find inf, NaN and rounding, and decide for code that JAX cannot
    see into. Otherwise the cause is `UNDETERMINED`.

    **Warnings.** The report warns of a loss that does not use its batch, and of counts
    that are equal in this batch, but may differ in the next. A factor that is in both
    gradients does not show: a loss that is divided by k, as PyTorch users write it.

    A constant term, such as an L2 penalty on the parameters, is right beside a mean
    loss, weighted or not, because a weighted mean keeps constants. Beside a *sum* the
    term is wrong: the sum needs the factor k, and the constant must not have the
    factor. The cause is then `SCALE`, and the fix is to return a mean.

    **Exactness.** Gradients, losses and weights are compared in float64, where relative
    differences below 2⁻²⁶ count as rounding. The program of `fun` is traced in its own
    dtypes and evaluated with all floats in float64, so a cast to bfloat16 neither
    rounds nor hides anything, and random draws are those of training. Code that
    computes in a low precision alone (Pallas, callbacks) runs as it is, and the page
    says so. A difference below four units of that precision is then `ROUNDING`, and a
    difference below half of the digits `UNDETERMINED`. What `ga_optax.accumulate`
    computes in the dtypes of training has to be finite; `max_ulp` counts the numbers
    between that and the undivided gradient in these dtypes.

    **Memory.** In float64: three gradient trees, two copies of the parameters and one
    of the batch, for any `num_microbatches`. The undivided batch has to fit, too.

    **Time.** In float64, a gradient of the undivided batch and k of micro-batches, and
    once more for each number that may be the weights, if there is a cause to find. In
    the dtypes of training, both gradients once.

    Args:
      fun: the loss, `fun(params, batch)`, or `fun(params, batch, key)` if `rng` is
        given. The loss is a real floating scalar; with `has_aux`, `fun` returns a pair
        of the loss and an aux, which is not compared. Close over all else.
      params: the parameters, a tree of floating or complex leaves.
      batch: the undivided batch, a tree of arrays whose axis 0 are the rows, all of one
        length (or as `batch_axes` says). Micro-batch i is the rows from `i·B/k` up to
        `(i + 1)·B/k`, on a mesh, too. Leaves may be PRNG keys, one for each row.
      num_microbatches: k; it must divide the number of rows.
      weight_fn: a function of one micro-batch (a tree like `batch`) that returns its
        weight, and takes the aux, too, if `has_aux`; pass the one that you train with.
      has_aux: True if `fun` returns a pair.
      rng: a PRNG key, or a tree of them. As in `ga_optax.accumulate`, micro-batch i
        gets `jax.random.fold_in(rng, i)`; the undivided batch is micro-batch 0 of 1.
      batch_axes: where to split, as for `ga_optax.accumulate`.

    Returns:
      A `Report`. Read its `warnings`, too.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced; if
        what `fun` returns does not fit, before anything runs.
    """

    def pair(*args: Any) -> Any:
        """The loss and the weight; `accumulate` raises if there is no pair."""
        out = aux = fun(*args)
        if has_aux and not (isinstance(out, (tuple, list)) and len(out) == 2):
            return out
        out, *aux = out if has_aux else (out,)
        return out, _checks.check_weight(weight_fn(args[1], *aux) if weight_fn else 1.0)

    _check(fun, params, batch, rng, weight_fn)
    key = () if rng is None else (rng,)
    k = _checks.check_num_microbatches(num_microbatches)
    params, batch = jax.tree.map(_placed, (params, batch))
    options: Any = {"rng_argnums": (2,) * len(key), "batch_axes": batch_axes}
    options["weight_fn"] = lambda batch, weight: weight
    run = jax.jit(accumulate(pair, k, has_aux=True, **options))
    # `accumulate` checks the rest, and what `fun` returns, before anything runs.
    value, acc = run(accumulator.init(params), params, batch, *key)
    axes, x64 = _axes(batch, batch_axes), jnp.result_type(float) == jnp.float64
    problem = gradients.Problem(params, batch, key, pair, k, axes, x64)
    whole = jax.jit(jax.grad(pair, has_aux=True))(*problem.args(None))[0]
    trained = gradients.trained(value, whole, accumulator.mean(acc))
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        return diagnosis.report(problem, trained)


def _check(fun: Any, params: Any, batch: Any, rng: Any, weight_fn: Any) -> None:
    """Checks the arguments as far as `accumulate` does not."""
    _checks.check_callable("fun", fun, "of params and batch", "Pass the loss itself.")
    if weight_fn is not None:
        todo = "Pass None to count every micro-batch as 1."
        _checks.check_callable("weight_fn", weight_fn, "of the micro-batch", todo)
    _checks.check_not_empty("params", params, "Pass the parameters, then the batch.")
    _checks.check_not_empty("batch", batch, "Pass the examples along axis 0 of arrays.")
    check_parameters(0, params)
    _checks.check_gradients(params, params, name="params", expected="params")
    for name, tree in (("params", params), ("batch", batch)):
        _checks.check_no_types(name, tree)
    if rng is not None:
        _checks.check_not_empty("rng", rng, "Pass jax.random.key(0), or leave it out.")


def _axes(batch: Any, batch_axes: Any) -> tuple[int | None, ...]:
    """The axis along which each leaf is split; None for a leaf that stays whole."""
    tree = jax.tree.broadcast(batch_axes, batch, is_leaf=lambda x: x is None)
    leaves, structure = jax.tree.flatten(batch)
    pairs = zip(leaves, structure.flatten_up_to(tree), strict=True)
    return tuple(axis if axis is None else axis % x.ndim for x, axis in pairs)


def _placed(x: ArrayLike) -> jax.Array:
    """An array with the same sharding, of which a slice needs no `out_sharding`."""
    x = jnp.asarray(x)
    sharding = getattr(x, "sharding", None)  # float0 has none
    if isinstance(sharding, NamedSharding):
        mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
        x = jax.device_put(x, sharding.update(mesh=mesh))
    return x
