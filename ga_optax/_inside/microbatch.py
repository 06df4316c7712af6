"""The fold inside a call: a window of micro-batches in one `jax.lax.scan`.

    value, grads  =  Σ wᵢ·(value, grad)(fun)(micro-batch i)  /  Σ wᵢ

Sum first, divide once, so that any grouping of the same micro-batches into calls gives
the same bits.

The way of a batch: the public function checks its arguments (`options`, `call`); at
top level with a data axis it enters a `shard_map`; `fun` is traced once, for any number
of micro-batches (`program`); the `loop` evaluates that program; the sums of devices are
reduced (`over_devices`); the sum is divided (`fold`).

**Membership.** Which rows are in which micro-batch is said in `_devices.membership`. On
one device they are neighbours: a batch that was drawn with `ga_optax.data`'s
`window_indices` and flattened is split along that function's own rows, and the calls of
`accumulate` over the halves of a batch continue one another.
"""

import functools
import itertools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike

from ga_optax import accumulator
from ga_optax._checks import check_gradients
from ga_optax._devices.data_axis import DataAxis
from ga_optax._inside import merges
from ga_optax._inside.call import Call
from ga_optax._inside.fold import fold, mean, over_mesh
from ga_optax._inside.options import AXIS_OF_ROWS, FromAux, Options
from ga_optax._inside.program import trace
from ga_optax._inside.results import Value, put_together
from ga_optax._inside.sizes import by_size, size_of
from ga_optax.accumulator import Accumulator


def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    carry_argnums: int | Sequence[int] = (),
    batch_argnames: str | Sequence[str] = (),
    rng_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    has_aux: bool = False,
    weight_fn: Callable[..., ArrayLike] | FromAux | None = None,
    aux: Any = "auto",
    accumulator_dtype: DTypeLike | None = jnp.float32,
    optimize: bool = True,
    whole_batch: bool = False,
    axis_name: str | None = None,
    residual_bytes: int | None = None,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    num_real_microbatches: ArrayLike | None = None,
) -> Callable[..., tuple[Any, optax.Updates]]:
    """`jax.value_and_grad` over micro-batches: a big batch in a small one's memory.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, batch):
    ...     return jnp.mean((batch["x"] * w - batch["y"]) ** 2)
    >>> batch = {"x": jnp.arange(4.0), "y": jnp.ones(4)}
    >>> step = jax.jit(ga.value_and_grad(loss, num_microbatches=2))
    >>> value, grad = step(jnp.float32(2.0), batch)
    >>> print(value, grad)
    9.0 11.0

    Micro-batches are neighbouring rows; on a mesh without `data_axis`, every k-th row.
    Value and gradients are `Σ wᵢ·xᵢ / Σ wᵢ` over them. If the loss is a mean over a
    varying number of things, such as tokens that are not padding, return that number
    from `weight_fn`. Call it under `jax.jit`: outside, every call compiles afresh.

    **Cost.** The activations of one micro-batch and one gradient tree; one read and
    write of that tree a micro-batch. Compile time does not grow with the number of
    micro-batches. Pages: "Memory", and "Devices" for `data_axis`.

    **Exactness.** Sums are divided once, so integer-valued gradients are those of the
    undivided batch, bit for bit; others are off by `n·eps·Σ|terms|` at most. On one
    backend the bits are those of `accumulate` over the same micro-batches, in any
    grouping; those of a single micro-batch are `jax.value_and_grad`'s, whose program it
    is. A micro-batch of weight 0 changes no gradient, loss or mean, whatever it
    holds. Gradients of bfloat16 models are rounded in the accumulator alone, unlike
    those of `jax.grad`. With `optimize=False` the sums are float32 too, and weight 0
    changes nothing; but two programs, such as two groupings, agree to rounding only:
    the bits are the same each time that one program runs. Page: "Exactness".

    Args:
      fun: a function like that of `jax.value_and_grad`. Its loss is a mean over the
        examples of a micro-batch, or over what `weight_fn` counts.
      num_microbatches: how many, static; it must divide the rows (of each device).
      microbatch_size: in its place, how many rows (of each device) one of them has.
      argnums: the positional arguments to differentiate with respect to.
      batch_argnums: those to split. What no option names goes to each micro-batch
        whole, as it came; it raises if it is a key, or as long as the batch.
      rng_argnums: PRNG keys, or trees of them. Micro-batch i sees `fold_in(key, i)`.
      carry_argnums: those that thread through the micro-batches, such as batch
        statistics. `fun` and the result return their new values after the loss: `(loss,
        carry)`, or `(loss, (carry, aux))`.
      batch_argnames: keywords to split.
      rng_argnames: keywords that are keys.
      batch_axes: where to split, as in `jax.vmap`: an axis, None (whole), or a prefix
        of the batch (of a tuple of several batch arguments, keywords last).
      has_aux: whether `fun` returns `(loss, aux)`.
      weight_fn: a function of a micro-batch's batch arguments that returns its weight,
        a non-negative scalar, or a `FromAux`. A negative one gives NaN.
      aux: "mean" (weighted), "sum", "max", "min", "last", "stack", "concat", a function
        of two leaves such as `jnp.logaddexp`, or a prefix of the aux with those. "auto"
        gives what the undivided batch would, by the kind of leaf.
      accumulator_dtype: see `accumulator.init`. The result has the parameters' dtypes.
      optimize: False runs the plain scan that one would write by hand: the program of
        `fun` as it is, and each gradient added after its backward pass. See
        **Exactness**; `ga_optax.config` switches it for all calls.
      whole_batch: whether value, gradients and aux are those of `jax.value_and_grad`,
        whatever the loss: rows may need one another.
      axis_name: collectives over this axis see the whole window. Page: "Any loss".
      residual_bytes: how many bytes of activations a device may keep between those
        collectives, so that no layer runs for each of them again: then every part of
        `fun` runs forward twice and backward once at most. By default as many as one
        micro-batch's step takes anyway; 0 keeps none. `plan` and the log say what is
        kept. What `checkpoint_name(x, axis_name)` marks is kept always.
      data_axis: the mesh axis, or a tuple of them, that split the batch over devices,
        or a `DataAxis`. Sums are reduced once, after the loop. Also in `jax.shard_map`.
      num_real_microbatches: how many micro-batches count, the first ones; static or
        traced. The others are not run, and count neither in the mean nor in the aux
        ("stack" and "concat" have zeros there): for a batch padded to a fixed size.

    Returns: a function with the result of `jax.value_and_grad(fun, argnums, has_aux)`.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced; if
        what `fun` returned does not fit, before anything runs.
    """
    given = locals()
    if (size := size_of(given)) is not None:
        return by_size(value_and_grad, given, size)
    if given.pop("whole_batch"):
        from ga_optax._inside import whole_batch as partitioned  # which few need

        return warns_outside_jit(partitioned.value_and_grad(of_options, given))
    return warns_outside_jit(of_options(Options(**given).checked()))


def of_options(options: Options) -> Callable[..., tuple[Any, optax.Updates]]:
    """`value_and_grad` with options that are checked."""

    def window(call: Call) -> tuple[Value, optax.Updates]:
        params = call.params
        call = call.on_device()
        program = trace(call)
        value, acc = fold(call, program, None, merges=True)
        return value, mean(call, program, acc, params)

    @functools.wraps(options.fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, optax.Updates]:
        call = Call.make(options, args, kwargs).alone()
        inside = call.mesh is None or options.each
        if options.each:
            merges.check_sums(call.params, 'sync="each"', 'Use sync="last"')
        if options.axis_name not in (None, AXIS_OF_ROWS):
            merges.check_sums(call.params, "axis_name", "Leave it out")
        value, grads = window(call) if inside else over_mesh(call, window)
        return put_together(options, value), grads

    return value_and_grad_fun


def accumulate(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    carry_argnums: int | Sequence[int] = (),
    batch_argnames: str | Sequence[str] = (),
    rng_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    has_aux: bool = False,
    weight_fn: Callable[..., ArrayLike] | FromAux | None = None,
    aux: Any = "auto",
    optimize: bool = True,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    num_real_microbatches: ArrayLike | None = None,
) -> Callable[..., tuple[Any, Accumulator]]:
    """Adds the gradients of some micro-batches to an accumulator, and goes on later.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.mean((x * w) ** 2)
    >>> step = jax.jit(ga.accumulate(loss), donate_argnums=0)
    >>> w = jnp.float32(2.0)
    >>> acc = ga.accumulator.init(w)
    >>> for x in jnp.array([[1.0, 1.0], [1.0, 3.0]]):
    ...     value, acc = step(acc, w, x)
    >>> print(value, ga.accumulator.mean(acc))
    20.0 12.0

    For a window that does not come as one batch: from a loader that yields one
    micro-batch at a time, or of a length that is not known in advance. Donate the
    accumulator, and it is updated where it lies.

    **Exactness.** Any grouping of the same micro-batches into calls gives the same
    bits: eight calls of one, two calls of four, one call of eight, and `value_and_grad`
    over all eight. What an empty accumulator holds (`count == 0`) is never read.

    **Keys.** The micro-batches of a call see `fold_in(key, acc.count + i)`. Pass the
    same key all through the window: k calls of one micro-batch and one call of k draw
    the same.

    Args:
      fun: as for `value_and_grad`.
      num_microbatches: how many micro-batches are in one call, static; 1 by default.
      microbatch_size: in its place, as for `value_and_grad`.
      argnums: as for `value_and_grad`. It counts the arguments of `fun`, not those of
        the returned function. So do the others.
      batch_argnums: as for `value_and_grad`.
      rng_argnums: as for `value_and_grad`, except for the number folded in, see above.
      carry_argnums: as for `value_and_grad`. Pass what came back on to the next call.
      batch_argnames: as for `value_and_grad`.
      rng_argnames: as for `value_and_grad`.
      batch_axes: as for `value_and_grad`.
      has_aux: as for `value_and_grad`.
      weight_fn: as for `value_and_grad`.
      aux: as for `value_and_grad`.
      optimize: as for `value_and_grad`.
      data_axis: as for `value_and_grad`. At top level each call merges once. Inside
        `jax.shard_map` nothing is merged: accumulator and value are the device's own,
        and `merge_across` at the end of the window communicates once. There it takes
        names alone.
      num_real_microbatches: as for `value_and_grad`.

    Returns:
      A function `(acc, *args, **kwargs) -> (value, acc)`. Make the first `acc` with
      `accumulator.init` from the argument at `argnums` (from a tuple of them if
      `argnums` is one); its dtype is the one to sum in. `value` is `fun`'s value, or
      `(value, aux)`, over the micro-batches of that call alone.

    Raises:
      TypeError, ValueError: as for `value_and_grad`, and if the accumulator does not
        match the parameters.
    """
    given = locals()
    if (size := size_of(given, default=1)) is not None:
        return by_size(accumulate, given, size, first=1)
    options = Options(
        **given, accumulator_dtype=None, axis_name=None, residual_bytes=None
    ).checked()

    @warns_outside_jit
    def accumulate_fun(acc: Accumulator, *args: Any, **kwargs: Any) -> Any:
        call = Call.make(options, args, kwargs)
        _check_continues(call, acc)
        if call.mesh is None or options.each:
            call = call.on_device()
            value, acc = fold(call, trace(call), acc, merges=False)
        else:
            value, acc = over_mesh(call, merged_into, acc)
        return put_together(options, value), acc

    def merged_into(call: Call, acc: Accumulator) -> tuple[Value, Accumulator]:
        """Folds from zeros on every device, and adds what they merged to `acc`."""
        call = call.on_device()
        start = accumulator.init(call.params, None)
        total = jax.tree.map(lambda z, t: z.astype(t.dtype), start.total, acc.total)
        total = call.placed(total)
        start = start._replace(total=total, count=acc.count)  # for the keys
        value, new = fold(call, trace(call), start, merges=True)
        real = call.options.num_real_microbatches
        count = call.options.num_microbatches if real is None else real
        count = jnp.full_like(acc.count, count)
        return value, accumulator.merge(acc, new._replace(count=count))

    return accumulate_fun


def _check_continues(call: Call, acc: Any) -> None:
    """Raises if `accumulate` cannot add the gradients of a call to `acc`."""
    if not isinstance(acc, Accumulator):
        raise TypeError(
            "The first argument must be the accumulator to continue, but it is of "
            f"type {type(acc).__name__}. Start with accumulator.init(params)."
        )
    options = call.options
    other = options.each or options.overlap or call.logical
    if call.axes and (other or call.specs is not None):
        raise ValueError(
            'Inside shard_map accumulate must have sync="last" and neither '
            "param_specs, grad_specs, overlap nor logical_devices, but it has "
            f"{options.data_axis}. Use "
            "value_and_grad, or call accumulate at top level; or gather the "
            "parameters once before the window, and pass a name alone."
        )
    check_gradients(acc.total, call.params, name="the parameters", expected="acc.total")
    merges.check_sums(call.params, "accumulate", "Use value_and_grad")


def warns_outside_jit(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which warns once if it is called outside of `jit` more than once."""
    calls = itertools.count(1)

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        traced = isinstance(jax.tree.leaves(out)[0], jax.core.Tracer)
        compiles = not jax.config.jax_disable_jit  # pyrefly: ignore[missing-attribute]
        if compiles and not traced and next(calls) == 2:
            warnings.warn(
                "What value_and_grad or accumulate returned was called outside of "
                "jax.jit again. Every such call traces the loss and compiles the loop "
                "over micro-batches anew. Put it, or the training step around it, in "
                "jax.jit (or nnx.jit).",
                stacklevel=2,
            )
        return out

    return call
