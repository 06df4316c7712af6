"""`verify`: checks its arguments, compares, asks for the cause, and reports."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.typing import ArrayLike

from ga_optax import _checks
from ga_optax._devices import membership, meshes
from ga_optax._inside.call import check_parameters
from ga_optax._inside.microbatch import value_and_grad
from ga_optax._inside.options import FromAux, check_weight_fn
from ga_optax._verify.report import Report


def verify(
    fun: Callable[..., Any],
    params: optax.Params,
    batch: Any,
    num_microbatches: int,
    *,
    weight_fn: Callable[..., ArrayLike] | FromAux | None = None,
    has_aux: bool = False,
    rng: Any = None,
    axis_name: str | None = None,
    batch_axes: Any = 0,
    whole_batch: bool = False,
) -> Report:
    """Does accumulation give the undivided batch's gradient? If not, why not?

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
    >>> print(report.fix.partition(" to ")[0])
    Pass weight_fn=lambda batch: batch['mask'].sum()
    >>> by_count = lambda batch: batch["mask"].sum()
    >>> ga.verify(loss, params, batch, num_microbatches=3, weight_fn=by_count).ok
    True

    Run it once when you switch accumulation on: outside `jit`, with the loss that you
    train with, real parameters and one real batch. `print(report)` prints a page that
    says what is wrong, how large the difference is, and which line of code fixes it.

    `verify` compares `fun` over the batch with `fun` over its parts. Errors common to
    both make no difference. The most usual one is a loss that is divided by k, as
    PyTorch users write it, although accumulation divides. If the program of the loss
    ends with that division, or if the loss does not use its batch at all, the report
    has a warning; a factor elsewhere goes undetected.

    A constant term, such as an L2 penalty on the parameters, is right beside a mean
    loss, weighted or not, because a weighted mean keeps it. Beside a *sum* it is wrong:
    the sum needs the factor k, and the constant must not have it. The cause is then
    `SCALE`, and the fix is to return a mean.

    **Exactness.** `EQUAL` and `max_ulp` compare what `jax.jit` of `jax.value_and_grad`
    and of `ga_optax.value_and_grad` return in the parameters' own dtypes. The diagnosis
    uses float64, and relative differences below 2⁻²⁶ count as rounding. Fitted weights
    are right to 1e-3 and mostly to 1e-10, also for micro-batches without gradient.
    The program of `fun` is traced in its own dtypes and evaluated with all floats in
    float64, so a cast to bfloat16 neither rounds nor hides anything, and random draws
    are those of training. `verify` names a cause only if the numbers rule out the
    others; otherwise the cause is `UNDETERMINED`. If `fun` calls code that is bound to
    a low precision (Pallas, callbacks), `verify` measures that code's rounding and says
    so on the page: what rounding may explain is `ROUNDING` or `UNDETERMINED`.

    **Memory.** In float64: three gradient trees, two copies of the parameters and one
    of the batch, for any `num_microbatches`, and max(4096, 8·k) numbers for each
    micro-batch. The undivided batch has to fit, too.

    **Time.** Two gradients of the undivided batch and k of micro-batches in float64,
    and the same once in the parameters' dtype; about five times that if there is a
    cause to find. With `axis_name`, the gradient of a micro-batch takes the time and
    memory of that of the window. If stderr is a terminal, it shows the progress.

    Args:
      fun: the loss, `fun(params, batch)`, or `fun(params, batch, key)` if `rng` is
        given. It returns a real floating scalar; with `has_aux`, a pair of that and
        anything else, which is not compared. Close over what is not split.
      params: the parameters, a tree of floating or complex leaves.
      batch: the undivided batch, a tree of arrays whose axis 0 are the rows, all of one
        length (or as `batch_axes` says). Micro-batch i is the rows from `i·B/k` up to
        `(i + 1)·B/k`, on a mesh, too. Leaves may be PRNG keys, one for each row.
      num_microbatches: k; it must divide the number of rows.
      weight_fn: a function of one micro-batch (a tree like `batch`) that returns its
        weight, or a `FromAux`; pass the one that you train with.
      has_aux: whether `fun` returns a pair.
      rng: a PRNG key, or a tree of them. As in `ga_optax.value_and_grad`, micro-batch i
        gets `jax.random.fold_in(rng, i)`; the undivided batch is micro-batch 0 of 1.
      axis_name: the axis over which `fun` communicates, as for
        `ga_optax.value_and_grad`. The undivided batch is then a window of one
        micro-batch, so this asks whether the loss is the same for every k.
      batch_axes: where to split, as for `ga_optax.value_and_grad`.
      whole_batch: as for `ga_optax.value_and_grad`. `fun` then gets `rng` itself.

    Returns:
      A `Report`. Read its `warnings`, too.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced; if
        what `fun` returns does not fit, before anything runs.
    """
    from ga_optax._verify.problem import Problem  # 5 ms of import, which few need

    k = _checks.check_num_microbatches(num_microbatches)
    _check(fun, params, batch, rng)
    loss = _without_aux(fun) if has_aux else fun
    key = () if rng is None else (rng,)
    if isinstance(weight_fn, FromAux):
        check_weight_fn(weight_fn, has_aux)
        weight_fn = _of_batch(weight_fn, fun, params, key)
    options: Any = {
        "rng_argnums": () if whole_batch else (2,) * len(key),
        "batch_axes": batch_axes,
        "weight_fn": weight_fn,
        "axis_name": axis_name,
        "whole_batch": whole_batch,
    }
    folded = value_and_grad(loss, k, **options)
    params, batch = jax.tree.map(_placed, (params, batch))
    # `value_and_grad` checks the rest, and what `fun` returns, before anything runs.
    jax.eval_shape(folded, params, batch, *key)
    axes = _axes(batch, batch_axes)
    asked = Problem(
        fun=loss,
        params=params,
        batch=batch,
        key=key,
        k=k,
        weight_fn=weight_fn,
        accumulated=folded if whole_batch else _of_neighbours(folded, k, axes),
        x64=bool(jnp.result_type(float) == jnp.float64),
        axes=axes,
        axis_name=axis_name,
        whole_batch=whole_batch,
        plain=value_and_grad(loss, k, optimize=False, **options),
    )
    return _answer(asked)


def _answer(problem: Any) -> Report:
    """Compares, and says what was found."""
    from ga_optax._verify import comparison, native, program, summary
    from ga_optax._verify.loss import Loss, NotFiniteError, Progress

    if problem.axis_name is not None and program.depends_on_device_count(problem):
        return summary.by_devices(problem)
    with jax.enable_x64(True), Progress() as progress:
        evaluator = Loss(problem, progress)
        try:
            return summary.compared(native.Native(comparison.Comparison(evaluator)))
        except NotFiniteError as error:
            return summary.nothing_compared(error, evaluator)


def _check(fun: Any, params: Any, batch: Any, rng: Any) -> None:
    """Checks what `value_and_grad` does not, or says in other words."""
    _checks.check_callable("fun", fun, "of params and batch", "Pass the loss itself.")
    _checks.check_not_empty("params", params, "Pass the parameters, then the batch.")
    check_parameters(0, params)
    _checks.check_gradients(params, params, name="params", expected="params")
    _checks.check_not_empty("batch", batch, "Pass the examples along axis 0 of arrays.")
    if rng is not None:
        _checks.check_not_empty("rng", rng, "Pass jax.random.key(0), or leave it out.")


def _without_aux(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The loss alone; the aux may be anything."""

    def loss(*args: Any) -> Any:
        out = fun(*args)
        if not isinstance(out, (tuple, list)) or len(out) != 2:
            raise TypeError(
                "fun must return a pair (loss, aux) with has_aux=True, but it returned "
                f"{jax.tree.structure(out)}. Return a pair, or leave has_aux out."
            )
        return out[0]

    return loss


def _of_batch(
    weight_fn: FromAux, fun: Callable[..., Any], params: Any, key: tuple[Any, ...]
) -> Callable[[Any], ArrayLike]:
    """The weight of a micro-batch as a function of it."""
    return lambda batch: weight_fn.fun(fun(params, batch, *key)[1])


def _axes(batch: Any, batch_axes: Any) -> list[int | None]:
    """Along which axis each leaf is split; None if it is not."""
    tree = jax.tree.broadcast(batch_axes, batch, is_leaf=lambda x: x is None)
    leaves, structure = jax.tree.flatten(batch)
    pairs = zip(leaves, structure.flatten_up_to(tree), strict=True)
    return [axis if axis is None else axis % x.ndim for x, axis in pairs]


def _of_neighbours(
    folded: Callable[..., Any], k: int, axes: Sequence[int | None]
) -> Callable[..., Any]:
    """`folded` over micro-batches of neighbouring rows, on several devices, too."""

    def in_place(x: jax.Array, axis: int | None) -> jax.Array:
        if axis is None:
            return x
        parts = membership.split(x, k, axis, strided=False)
        return membership.join(parts, axis, strided=True)

    def accumulated(params: Any, batch: Any, *key: Any) -> Any:
        if meshes.is_distributed((params, batch, key)):
            leaves, structure = jax.tree.flatten(batch)
            batch = structure.unflatten(map(in_place, leaves, axes))
        return folded(params, batch, *key)

    return accumulated


def _placed(x: ArrayLike) -> jax.Array:
    """As an array, where it lies; its rows can be picked without an `out_sharding`."""
    x = jnp.asarray(x)
    old = x.sharding
    if not isinstance(old, NamedSharding) or not isinstance(old.mesh, Mesh):
        return x
    mesh = Mesh(old.mesh.devices, old.mesh.axis_names)  # of automatic axes
    new = NamedSharding(mesh, old.spec, memory_kind=old.memory_kind)
    return jax.device_put(x, new)
