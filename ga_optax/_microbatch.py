"""The fold inside a call: a window of micro-batches in one `jax.lax.scan`.

    value, grads  =  Σ wᵢ·(value, grad)(fun)(micro-batch i)  /  Σ wᵢ

Sum first, divide once, so that any grouping of the same micro-batches into calls
gives the same bits. `fun` is traced once, for any number of micro-batches; the loop
body evaluates the program that came of it.

**Membership.** Micro-batch i is a block of neighbouring rows: of B rows in k
micro-batches, the rows from `i·B/k` up to `(i + 1)·B/k`. A batch that was drawn with
`ga_optax.data.window_indices` and flattened is split along that function's own rows,
and the calls of `accumulate` over the halves of a batch continue one another.

**In place.** Where a model scans over a parameter (its stacked layers), the backward
pass adds the gradient to the accumulator slice by slice, through a reference, so that
no second gradient tree exists; `_arrival` says for which parameters. For the others XLA
reuses the buffers by itself. A loop with references can be neither batched nor
differentiated, so it has the rules of the loop without them (`_with_plain_rules`).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap
from jax.extend import core
from jax.sharding import AbstractMesh, Mesh, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from ga_optax import _devices, accumulator
from ga_optax._arguments import AUX, Call, Window, aux_modes, returned
from ga_optax._checks import check_dtype, check_gradients, check_weight
from ga_optax.accumulator import Accumulator

__all__ = ["accumulate", "value_and_grad"]


def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    carry_argnums: int | Sequence[int] = (),
    has_aux: bool = False,
    weight_fn: Callable[..., ArrayLike] | None = None,
    aux: Any = "mean",
    accumulator_dtype: DTypeLike | None = jnp.float32,
    in_place: bool | None = None,
    data_axis: str | Sequence[str] | None = None,
    sync: str = "last",
    mesh: Mesh | AbstractMesh | None = None,
    param_specs: Any = None,
) -> Callable[..., tuple[Any, optax.Updates]]:
    """`jax.value_and_grad` over micro-batches: a big batch in a small one's memory.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(params, batch):
    ...     return jnp.mean((batch["x"] @ params["w"] - batch["y"]) ** 2)
    >>> params = {"w": jnp.array([1.0, 2.0])}
    >>> x = jnp.array([[1.0, 0], [0, 1], [1, 1], [2, 0]])
    >>> batch = {"x": x, "y": jnp.zeros(4)}
    >>> step = jax.jit(ga.value_and_grad(loss, num_microbatches=2))
    >>> value, grads = step(params, batch)
    >>> print(value, grads["w"])
    4.5 [4.  2.5]

    The batch is split along axis 0 into `num_microbatches` blocks of neighbouring rows,
    and one `jax.lax.scan` runs forward and backward pass over them. With `wᵢ` for the
    weight of micro-batch i, value and gradients are `Σ wᵢ·xᵢ / Σ wᵢ`. Where the loss is
    a mean over a varying number of things (tokens that are not padding), return that
    number from `weight_fn`, or every micro-batch counts the same, however little it
    holds.

    Call it under `jax.jit`: outside, every call compiles its loop afresh.

    **Memory.** The activations of one micro-batch, and one gradient tree. In place, no
    second tree for the layers of a model that scans over them; elsewhere XLA may hold a
    part of the micro-batch's own gradient beside it.

    **Time.** One forward and one backward pass a micro-batch, one read and write of the
    gradient tree to add it up, and one for the division. One trace of `fun`, and a
    compile time that does not grow with `num_microbatches`.

    **Exactness.** Unweighted terms are added without a multiplication and divided once:
    with integer-valued terms the result is the undivided batch's bit for bit, otherwise
    the sums are off by at most `n·eps·Σ|terms|`. The bits are the same in place and
    not, and on one backend the same as those of `accumulate` over these micro-batches
    in any grouping. A micro-batch of weight 0 changes no gradient, whatever it holds,
    NaN included; where all weights are 0, so are value and gradients.

    The weight of a micro-batch goes into its backward pass as the cotangent of the
    loss. Where that could do more than scale the gradients (a `jax.custom_vjp` in
    `fun`, float16 in it, a loss in less than float32), weights multiply the finished
    gradients, and weighted sums are not formed in place. The compiler may then fuse the
    product with the sum, and another grouping may differ in the last bit.

    `jax.grad` through it works, and so does `jax.vmap` (an ensemble); the plain sum
    runs then, and reverse mode keeps the residuals of every micro-batch, so there is no
    saving of memory in it. Forward mode (`jax.jvp`, for a Hessian-vector product) works
    with `in_place=False`; with references JAX raises.

    **Devices.** With `data_axis`, the batch is split over that axis of a mesh, every
    device accumulates its own rows, and the sums of gradients, weights, value and aux
    meet once, after the loop: the mean is over all micro-batches of all devices,
    however their weights differ. What crosses the network does not depend on
    `num_microbatches`, and no row of the batch moves. It works inside `jax.shard_map`
    over the axis, where arguments are the device's own, and at top level, where the
    mesh comes from `jax.set_mesh`, `mesh` or the batch; other axes of it stay with the
    compiler. In both `fun` sees the rows of one device, and may use the axis by name,
    for a collective of its own, but for one: it must not reduce its loss. (That is
    found where `shard_map` checks what varies, and not with `check_vma=False`.)
    Processes that disagree on `num_microbatches` do not hang: the mean is then over all
    micro-batches there are, the same on each but for the rounding of its division.
    Where a micro-step communicates, with "each" or by `fun` itself, one of them waits,
    until the backend's time-out (`--xla_cpu_collective_timeout_seconds` of XLA's flags
    on CPUs).

    With G for the bytes of the accumulator, P for those of the parameters, n devices
    and k micro-batches, a window costs on each device:

    ========================  ============================  ==========================
    parameters, `sync`        operands on the network       memory for whole trees
    ========================  ============================  ==========================
    on all devices, "last"    all-reduce G                  G, and G for its result
                                                            where it is not in place
    sharded, "last"           all-gather P/n,               P + G
                              reduce-scatter G
    sharded, "each"           k times: gather P/n at each   (P + G) / n, and one layer
                              use, reduce G                 at a time of a scanned
                                                            model
    ========================  ============================  ==========================

    (The all-reduce of CPUs is not in place.) With "each" the compiler decides what it
    gathers and how it reduces: on CPUs by an all-reduce, of which each device keeps its
    part. `audit` reads it off the program.

    Args:
      fun: a function of the arguments below, as for `jax.value_and_grad`; it returns a
        real floating scalar, or with `has_aux` a pair of that and anything else made
        of arrays. Its loss is to be a mean over the examples of a micro-batch, or over
        what `weight_fn` counts.
      num_microbatches: into how many micro-batches to split, static; it must divide the
        batch axis.
      argnums: which positional arguments to differentiate with respect to; floating or
        complex leaves. As in `jax.value_and_grad`, an int gives one tree of gradients,
        a sequence a tuple of them.
      batch_argnums: which positional arguments to split along axis 0, all leaves of all
        of them with one length. Every other argument, and every keyword argument, goes
        to each micro-batch whole and untraced, as it came.
      rng_argnums: positional arguments that are PRNG keys, or trees of them (such as
        Flax's `rngs`). Micro-batch i sees `jax.random.fold_in(key, i)`, for one
        micro-batch too.
      carry_argnums: positional arguments that thread through the micro-batches in
        order, such as BatchNorm's statistics. `fun` then returns their new values where
        Flax code has them, first after the loss: `(loss, carry)`, or with `has_aux`
        `(loss, (carry, aux))`; `carry` is one new argument for an int, and a tuple of
        them for a sequence. The result holds the last carry in the same place.
        Micro-batches of weight 0 thread as well.
      has_aux: whether `fun` returns a pair `(loss, aux)`.
      weight_fn: a function of the batch arguments (of one micro-batch, in the order of
        `batch_argnums`) that returns its weight, a non-negative scalar: the number of
        examples or tokens that the loss of the micro-batch is a mean over.
      aux: how to put the aux of the micro-batches together: "mean", weighted like the
        value; "sum", unweighted; "last"; "stack", along a new axis 0 of length
        `num_microbatches`; or a tree of those that is a prefix of the aux tree. The
        mean of integers is float32, the sum of booleans int32.
      accumulator_dtype: the dtype in which gradients are summed, as in
        `accumulator.init`; the result has the dtypes of the parameters, rounded once.
        Use `accumulate` and `accumulator.mean` to keep the accumulator's dtype.
      in_place: None works in place wherever that is right, on jax >= 0.11.1: not where
        `fun` prints, calls back or communicates. False never does. True is None that
        raises on an older jax.
      data_axis: the mesh axis, or axes, that split axis 0 of the batch; None where the
        batch is on one device. It needs jax >= 0.9. `num_microbatches` counts those of
        one device. Keys differ between devices: they have the device's index along the
        axis folded in first. Carried statistics are averaged over devices at the end
        (whole numbers: the largest). Aux: "last" is that of the last device, "stack" is
        `[devices · num_microbatches, ...]`, and the device's own inside `shard_map`.
      sync: "last" merges once, after the loop. "each" lets every micro-step merge,
        where parameters are sharded over `data_axis` and there is no memory for whole
        ones: the program is then that of one device on micro-batches of all of them
        (keys and aux, too), which the compiler distributes; inside `shard_map` `fun`
        itself has to gather them, and a weight of 0 does not keep a NaN out.
      mesh: the mesh of `data_axis` at top level; None for that of `jax.set_mesh`, or
        else the one that the batch lies on.
      param_specs: how the arguments at `argnums` are sharded over `data_axis` (FSDP,
        ZeRO): a tree of `PartitionSpec` that is a prefix of them, such as
        `jax.tree.map(lambda p: p.sharding.spec, params)`. Gradients come back sharded
        so. None reads it off explicit axis types, and off arrays outside of `jit`;
        under `jit` on automatic axes nothing tells, and gradients are reduced whole.

    Returns:
      A function of `fun`'s arguments that returns what `jax.value_and_grad(fun,
      has_aux=...)` returns: `(value, grads)`, or `((value, aux), grads)`.

    Raises:
      TypeError, ValueError: here, or from the returned function before `fun` is traced,
        where an argument does not fit; after it was traced, and before anything runs,
        where what `fun` returned does not.
    """
    window = Window(
        fun,
        num_microbatches,
        argnums,
        batch_argnums,
        rng_argnums,
        carry_argnums,
        has_aux,
        weight_fn,
        aux,
        in_place,
        data_axis,
        sync,
        mesh,
        param_specs,
    ).checked()
    dtype = check_dtype(accumulator_dtype)

    def mean_of_window(call: Call) -> tuple[Any, optax.Updates]:
        params = call.params()
        call = call.on_device()
        program = _trace(call)
        start = accumulator.init(call.params(), dtype)
        if call.mesh is not None:
            start = start._replace(total=call.placed(start.total))
        value, acc = _fold(call, program, start, merges=True)
        with jax.named_scope("mean"):
            stacked = [arrival == "slices" for arrival in program.arrivals]
            mean = _mean(call, acc, stacked)
            grads = jax.tree.map(
                lambda g, p: g.astype(jnp.result_type(p)), mean, params
            )
        return value, grads

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, optax.Updates]:
        call = Call.make(window, args, kwargs)
        if call.mesh is None or window.sync == "each":
            return mean_of_window(call)
        return _over_mesh(call, mean_of_window)

    return value_and_grad_fun


def accumulate(
    fun: Callable[..., Any],
    num_microbatches: int = 1,
    *,
    argnums: int | Sequence[int] = 0,
    batch_argnums: int | Sequence[int] = 1,
    rng_argnums: int | Sequence[int] = (),
    carry_argnums: int | Sequence[int] = (),
    has_aux: bool = False,
    weight_fn: Callable[..., ArrayLike] | None = None,
    aux: Any = "mean",
    in_place: bool | None = None,
    data_axis: str | Sequence[str] | None = None,
    sync: str = "last",
    mesh: Mesh | AbstractMesh | None = None,
    param_specs: Any = None,
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

    For a window that does not come as one batch: from a loader that yields a
    micro-batch at a time, or of a length that is not known in advance. Donate the
    accumulator, and it is updated where it lies.

    **Exactness.** As for `value_and_grad`; and any grouping of the same micro-batches
    into calls gives the same bits: eight calls of one, two calls of four, one call of
    eight, and `value_and_grad` over all eight. What an empty accumulator holds
    (`count == 0`) goes into nothing.

    **Keys.** The micro-batches of a call see `fold_in(key, acc.count + i)`. Pass the
    same key all through the window: k calls of one micro-batch and one call of k draw
    the same.

    `jax.grad` and `jax.vmap` through it work, memory and time are as for
    `value_and_grad`, and a call reads and writes the accumulator once more.

    Args:
      fun: as for `value_and_grad`.
      num_microbatches: how many micro-batches are in one call, static.
      argnums: as for `value_and_grad`. It counts the arguments of `fun`, not those of
        the returned function; so do the three below.
      batch_argnums: as for `value_and_grad`.
      rng_argnums: as for `value_and_grad`, but for the number folded in, see above.
      carry_argnums: as for `value_and_grad`. Pass what came back on to the next call.
      has_aux: as for `value_and_grad`.
      weight_fn: as for `value_and_grad`.
      aux: as for `value_and_grad`.
      in_place: as for `value_and_grad`.
      data_axis: as for `value_and_grad`. Inside `jax.shard_map` nothing is merged:
        accumulator and value are the device's own, and `merge_across` at the end of
        the window communicates once. At top level each call merges once.
      sync: as for `value_and_grad`, at top level; "last" inside `shard_map`.
      mesh: as for `value_and_grad`.
      param_specs: as for `value_and_grad`, at top level, and `acc.total` is sharded so.

    Returns:
      A function `(acc, *args, **kwargs) -> (value, acc)`. Make the first `acc` with
      `accumulator.init` from the argument at `argnums`, or from a tuple of them where
      `argnums` is one; its dtype is the one to sum in. `value` is `fun`'s value, or
      `(value, aux)`, over the micro-batches of that call alone.

    Raises:
      TypeError, ValueError: as for `value_and_grad`, and where the accumulator does not
        match the parameters.
    """
    window = Window(
        fun,
        num_microbatches,
        argnums,
        batch_argnums,
        rng_argnums,
        carry_argnums,
        has_aux,
        weight_fn,
        aux,
        in_place,
        data_axis,
        sync,
        mesh,
        param_specs,
    ).checked()

    def accumulate_fun(
        acc: Accumulator, *args: Any, **kwargs: Any
    ) -> tuple[Any, Accumulator]:
        if not isinstance(acc, Accumulator):
            raise TypeError(
                "The first argument must be the accumulator to continue, but it is of "
                f"type {type(acc).__name__}. Start with accumulator.init(params)."
            )
        call = Call.make(window, args, kwargs)
        if call.axes and (window.sync, window.param_specs) != ("last", None):
            raise ValueError(
                'Inside shard_map accumulate must have sync="last" and no param_specs, '
                f"but it has sync={window.sync!r} and param_specs="
                f"{window.param_specs!r}. Gather the parameters once before the "
                "window, or use value_and_grad."
            )
        check_gradients(
            acc.total, call.params(), name="the parameters", expected="acc.total"
        )
        if call.mesh is None or window.sync == "each":
            call = call.on_device()
            return _fold(call, _trace(call), acc, merges=False)

        def merged(call: Call, acc: Accumulator) -> tuple[Any, Accumulator]:
            call = call.on_device()
            devices = _devices.num_devices(window.data_axis, None)
            start = accumulator.init(call.params(), None)
            total = jax.tree.map(lambda z, t: z.astype(t.dtype), start.total, acc.total)
            # Every device counts its own micro-batches, for their keys.
            start = start._replace(total=total, count=acc.count // devices)
            value, new = _fold(call, _trace(call), start, merges=True)
            count = jnp.full_like(acc.count, window.num_microbatches * devices)
            return value, accumulator.merge(acc, new._replace(count=count))

        return _over_mesh(call, merged, acc)

    return accumulate_fun


def _mean(call: Call, acc: Accumulator, stacked: Sequence[bool]) -> optax.Updates:
    """`accumulator.mean`, with the stacked leaves divided where they lie.

    A quotient as a whole would be a second buffer; in a loop over the slices XLA writes
    to the one that it reads. Where it is a product with a power of two, which is as
    exact, XLA makes it a part of what reads the other leaves, such as an optimizer.
    """
    k = call.window.num_microbatches
    if call.axes:
        k *= _devices.num_devices(call.axes, None)
    power_of_two = call.window.weight_fn is None and k & (k - 1) == 0

    def whole(total: jax.Array) -> jax.Array:
        if power_of_two and k > 1 and not jnp.iscomplexobj(total):
            factor = 1 / acc.weight if call.axes else 1 / k
            return total * jnp.asarray(factor, total.dtype)
        return accumulator.average(total, acc.weight)

    def by_slice(total: jax.Array) -> jax.Array:
        def step(i: jax.Array, total: jax.Array) -> jax.Array:
            return total.at[i].set(accumulator.average(total[i], acc.weight))

        return jax.lax.fori_loop(0, total.shape[0], step, total)

    leaves, structure = jax.tree.flatten(acc.total)
    means = [
        by_slice(total) if here else whole(total)
        for total, here in zip(leaves, stacked, strict=True)
    ]
    return jax.tree.unflatten(structure, means)


# -- The program of one micro-batch ----------------------------------------------------


class _Program(NamedTuple):
    """What `fun` does to one micro-batch, traced once.

    Attributes:
      jaxpr: of the flat arguments `(params, batch, keys, carry)` to the flat results
        `(loss, weight, carry, aux)`; no weight without a `weight_fn`.
      consts: the values of its constants: tracers, where `fun` closes over some.
      batch: the leaves of the batch, split into micro-batches.
      loss: the shape and dtype of the loss.
      carry: the tree of the carry, of shapes and dtypes.
      aux: the tree of the aux, of shapes and dtypes.
      modes: how to put each leaf of `aux` together.
      weighted: whether there is a weight.
      varying: the mesh axes over which every sum differs between devices: those of
        the data, and of the weight.
      multiplies: whether the weight multiplies the gradients, and not the cotangent.
      arrivals: how the gradient of each leaf of the parameters arrives, see `_arrival`.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    batch: list[jax.Array]
    loss: Any
    carry: Any
    aux: Any
    modes: list[str]
    weighted: bool
    varying: tuple[str, ...]
    multiplies: bool
    arrivals: list[str | None]


def _trace(call: Call) -> _Program:
    window = call.window
    positions = [i for group in call.roles.values() for i in group]

    def micro_batch(*roles: tuple[Any, ...]) -> tuple[Any, ...]:
        _, batch, _, carry = roles
        weight = None
        if window.weight_fn is not None:
            weight = check_weight(window.weight_fn(*batch))
        new = dict(zip(positions, itertools.chain(*roles), strict=True))
        out = window.fun(*call.with_args(new).args, **call.kwargs)
        return returned(window, out, carry, weight)

    params, batch, keys, carry = (call.role(name) for name in call.roles)
    with jax.named_scope("split"):
        batch = jax.tree.map(lambda x: _split(call, x), batch)
    first = jax.tree.map(lambda x: x[0], batch)
    closed, shapes = jax.make_jaxpr(micro_batch, return_shape=True)(
        params, first, keys, carry
    )
    # The types of the results say over which devices they vary; their shapes do not.
    avals = [variable.aval for variable in closed.jaxpr.outvars]
    loss, weight, carry, aux = jax.tree.unflatten(jax.tree.structure(shapes), avals)
    _check_not_reduced(call, loss)
    weighted = window.weight_fn is not None
    return _Program(
        closed.jaxpr,
        closed.consts,
        jax.tree.leaves(batch),
        loss,
        carry,
        aux,
        aux_modes(window.aux, aux),
        weighted,
        tuple(sorted({*call.axes, *(_devices.varying(weight) if weighted else ())})),
        weighted and not (jnp.finfo(loss.dtype).bits >= 32 and _scales(closed.jaxpr)),
        [
            _arrival(closed.jaxpr, variable)
            for variable in closed.jaxpr.invars[: len(jax.tree.leaves(params))]
        ],
    )


def _check_not_reduced(call: Call, loss: Any) -> None:
    reduced = [name for name in call.axes if name not in _devices.varying(loss)]
    if reduced and _devices.checks_varying():
        raise ValueError(
            "fun must return the loss of one device's micro-batch, but its loss is the "
            f"same on all devices along {reduced[0]!r}: it is reduced already. Take "
            f"the psum or pmean over it out of fun: value, gradients and aux "
            "are reduced once, at the end of the window."
        )


def _split(call: Call, x: ArrayLike) -> jax.Array:
    """`[batch, ...]` as `[num_microbatches, micro-batch, ...]`."""
    k = call.window.num_microbatches
    if call.mesh is not None:
        return _devices.split_shards(x, k, call.window.data_axis, call.mesh)
    shape = jnp.shape(x)
    return jnp.reshape(jnp.asarray(x), (k, shape[0] // k, *shape[1:]))


# -- What the program allows -----------------------------------------------------------


def _inner(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """The programs inside an equation: loop bodies, branches, jitted functions."""
    for parameter in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
    ):
        if hasattr(parameter, "eqns"):
            yield getattr(parameter, "jaxpr", parameter)


def _scales(jaxpr: core.Jaxpr) -> bool:
    """Whether scaling the loss's cotangent does no more than scale the gradients.

    A `jax.custom_vjp` may clip or quantise what comes back through it, and the small
    exponents of float16 and float8 overflow at weights that count tokens.
    """

    def is_wide(variable: Any) -> bool:
        dtype = getattr(variable.aval, "dtype", np.dtype(np.int32))
        return not jnp.issubdtype(dtype, jnp.floating) or (
            jnp.finfo(dtype).maxexp >= jnp.finfo(jnp.float32).maxexp
        )

    return all(
        "custom_vjp" not in equation.primitive.name
        and all(map(is_wide, equation.outvars))
        and all(map(_scales, _inner(equation)))
        for equation in jaxpr.eqns
    )


def _arrival(jaxpr: core.Jaxpr, variable: Any, way: str = "whole") -> str | None:
    """How a parameter's gradient comes out of the backward pass.

    "slices": slice by slice, from a scan that runs over the parameter, and each slice
    is used once, where its gradient is a sum over two terms or more. Added up in place
    that saves memory, and it has the bits of the plain sum: two uses would be two
    additions, `(total + a) + b`; and a bare product may become one fused multiply-add
    with the addition, which rounds once and not twice.

    "whole": likewise, but in one piece, which exists before it can be added.

    None: anything else.
    """
    uses = [
        (equation, i)
        for equation in jaxpr.eqns
        for i, operand in enumerate(equation.invars)
        if operand is variable
    ]
    if len(uses) != 1 or any(out is variable for out in jaxpr.outvars):
        return None
    [(equation, i)] = uses
    name, size = equation.primitive.name, math.prod(variable.aval.shape)
    outvars: list[Any] = equation.outvars
    if name in ("jit", "pjit", "remat2", "checkpoint", "scan"):
        [inner] = _inner(equation)
        inside: Any = inner.invars[i]
        sliced = inside.aval.ndim < variable.aval.ndim
        if name == "scan" and not sliced:
            return None  # used in every iteration
        return _arrival(inner, inside, "slices" if sliced else way)
    if name == "dot_general":
        other: Any = equation.invars[1 - i]
        shape = other.aval.shape
        axes = [
            axis
            for pair in equation.params["dimension_numbers"]
            for axis in pair[1 - i]
        ]
        return (
            way if math.prod(shape) > math.prod(shape[axis] for axis in axes) else None
        )
    if (
        name in ("add", "sub", "mul", "broadcast_in_dim")
        and outvars[0].aval.size > size
    ):
        return way
    if name in ("broadcast_in_dim", "convert_element_type", "reshape", "transpose"):
        # The gradient comes back through these as it is.
        return _arrival(jaxpr, outvars[0], way)
    return None


# -- The loop --------------------------------------------------------------------------


class _Operands(NamedTuple):
    """The arrays of a call, flat by role; the batch split."""

    consts: Sequence[Any]
    params: list[jax.Array]
    batch: list[jax.Array]
    keys: list[jax.Array]
    carry: list[jax.Array]
    total: list[jax.Array]
    weight: jax.Array
    count: jax.Array


class _State(NamedTuple):
    """What one micro-batch hands to the next, flat."""

    total: list[jax.Array]
    weight: jax.Array
    count: jax.Array
    carry: list[jax.Array]
    means: Accumulator  # of the loss and of the aux leaves to average
    sums: list[jax.Array]
    last: list[jax.Array]


def _fold(
    call: Call, program: _Program, acc: Accumulator, *, merges: bool
) -> tuple[Any, Accumulator]:
    """Adds the micro-batches of a call to `acc`; `merges` over the bound data axes."""
    window = call.window
    params, _, keys, carry = (jax.tree.leaves(call.role(n)) for n in call.roles)
    total, structure = jax.tree.flatten(acc.total)
    operands = _Operands(
        program.consts,
        [jnp.asarray(x) for x in params],
        program.batch,
        keys,
        [_strong(x) for x in carry],
        _devices.vary(total, call.axes),
        acc.weight,
        acc.count,
    )

    # A weight that multiplies a gradient needs that gradient by itself, and a reference
    # the type of the cotangent, in which narrow ones would round too often. Custom
    # rules do not go with effects, such as printing or a collective.
    allowed = window.in_place and not program.multiplies and not program.jaxpr.effects
    in_place = [
        allowed
        and arrival == "slices"
        and t.dtype == p.dtype
        and _devices.same_mesh(t, p)
        and jnp.finfo(t.dtype).bits >= 32
        for arrival, t, p in zip(program.arrivals, total, operands.params, strict=True)
    ]
    sums_already = any(place.summed for place in call.where)
    if sums_already and program.multiplies:
        raise ValueError(
            'sync="each" must scale the loss by the weight, since the backward pass '
            "sums over devices, but fun has a jax.custom_vjp, float16 or a narrow loss "
            'in it, where that could do more than scale. Use sync="last", or return '
            "the loss in float32."
        )
    loop = functools.partial(_loop, program, window.num_microbatches, sums_already)
    run = functools.partial(loop, [False] * len(total))
    if any(in_place):
        run = _with_plain_rules(functools.partial(loop, in_place), run)
    state, stacked = run(operands)
    if merges and call.axes:
        with jax.named_scope("merge"):
            state = _merge(state, call)
    loss, aux = _results(program, state, stacked)

    beyond = []
    if window.carry_argnums != ():
        carry = jax.tree.unflatten(jax.tree.structure(program.carry), state.carry)
        beyond.append(carry[0] if isinstance(window.carry_argnums, int) else carry)
    if window.has_aux:
        beyond.append(jax.tree.unflatten(jax.tree.structure(program.aux), aux))
    if len(beyond) == 2:
        beyond = [tuple(beyond)]
    value = (loss, *beyond) if beyond else loss
    total = jax.tree.unflatten(structure, state.total)
    return value, Accumulator(total, state.weight, state.count)


def _merge(state: "_State", call: Call) -> "_State":
    """The state of all devices: one communication, but for what is sharded."""
    axes = call.axes
    # Σ w is reduced without weights, too: were the processes of a run to disagree on
    # the number of micro-batches, they would still all divide by the same number.
    small, structure = jax.tree.flatten((state.means.total, state.sums, state.weight))
    out = _devices.reduce(
        state.total + _devices.vary(small, axes),
        [*call.where, *(_devices.Placement() for _ in small)],
        axes,
    )
    total = out[: len(state.total)]
    means, sums, weight = jax.tree.unflatten(structure, out[len(total) :])

    def shared(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jnp.inexact):
            return jax.lax.pmean(x, axes)
        return jax.lax.pmax(x, axes)

    is_last = jax.lax.axis_index(axes) == _devices.num_devices(axes, None) - 1

    def last(x: jax.Array) -> jax.Array:
        count = x.astype(_sum_dtype(x.dtype))
        here = jnp.where(is_last, count, jnp.zeros_like(count))
        return jax.lax.psum(here, axes).astype(x.dtype)

    return state._replace(
        total=total,
        weight=weight,
        means=Accumulator(means, weight, state.means.count),
        sums=sums,
        carry=[shared(x) for x in state.carry],
        last=[last(x) for x in _devices.vary(state.last, axes)],
    )


def _results(
    program: _Program, state: "_State", stacked: list[jax.Array]
) -> tuple[jax.Array, list[jax.Array]]:
    """The loss and the leaves of the aux, of all micro-batches."""
    leaves = jax.tree.leaves(program.aux)
    means: Any = accumulator.mean(state.means)
    loss, averaged = means
    by_mode = dict(
        zip(AUX, map(iter, (averaged, state.sums, state.last, stacked)), strict=True)
    )
    aux = [next(by_mode[mode]) for mode in program.modes]
    aux = [
        x.astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else x
        for x, leaf in zip(aux, leaves, strict=True)
    ]
    return loss.astype(program.loss.dtype), aux


def _over_mesh(call: Call, run: Callable[..., Any], *acc: Accumulator) -> Any:
    """`run(call, *acc)` in a `shard_map` over the data axes."""
    window, mesh = call.window, call.mesh
    axes = window.data_axis
    split, whole = _devices.split_spec(axes), PartitionSpec()
    params = call.params()
    places = _devices.placements(params, window.param_specs, axes, mesh)
    specs = jax.tree.unflatten(jax.tree.structure(params), [p.spec for p in places])

    with_role = {i: call.args[i] for group in call.roles.values() for i in group}
    in_specs: dict[int, Any] = dict.fromkeys(with_role, whole)
    in_specs |= dict.fromkeys(call.roles["batch_argnums"], split)
    of_params = (specs,) if isinstance(window.argnums, int) else specs
    in_specs |= dict(zip(call.roles["argnums"], of_params, strict=True))
    _devices.check_scatter(params, places, axes, mesh)
    # What has no role goes to `fun` as it came, but for traced and distributed arrays,
    # which have to be operands.
    rest, structure = jax.tree.flatten(
        (call.with_args(dict.fromkeys(with_role)).args, call.kwargs)
    )
    operands = {i: x for i, x in enumerate(rest) if _devices.is_operand(x)}

    def local(
        with_role: dict[int, Any], operands: dict[int, Any], *acc: Accumulator
    ) -> Any:
        leaves = [operands.get(i, x) for i, x in enumerate(rest)]
        args, kwargs = jax.tree.unflatten(structure, leaves)
        inner = call._replace(
            window=window._replace(param_specs=specs),
            args=args,
            kwargs=kwargs,
            mesh=None,
        )
        return run(inner.with_args(with_role), *acc)

    # Every other part of the value is the same on all devices.
    aux = jax.tree.map(lambda mode: split if mode == "stack" else whole, window.aux)
    value: Any = whole
    if window.has_aux:
        value = (whole, aux if window.carry_argnums == () else (whole, aux))
    result: Any = specs
    if acc:
        of_acc: dict[str, Any] = {"total": specs, "weight": whole, "count": whole}
        result = Accumulator(**of_acc)
    return _devices.over_mesh(
        local,
        mesh,
        axes,
        (with_role, operands, *acc),
        (in_specs, whole, *(result for _ in acc)),
        (value, result),
    )


def _with_plain_rules(
    run: Callable[[_Operands], Any], plain: Callable[[_Operands], Any]
) -> Callable[[_Operands], Any]:
    """`run`, which is batched and differentiated as if it were `plain`.

    A `jax.custom_jvp`, which would serve forward mode too, may not hold references.
    """
    batched = custom_vmap(run)

    @batched.def_vmap
    def rule(axis_size: int, in_batched: list[Any], operands: _Operands) -> Any:
        axes = jax.tree.map(lambda is_batched: 0 if is_batched else None, in_batched)
        out = jax.vmap(plain, in_axes=axes, axis_size=axis_size)(operands)
        return out, jax.tree.map(lambda _: True, out)

    differentiated = jax.custom_vjp(lambda operands: batched(operands))
    differentiated.defvjp(
        lambda operands: jax.vjp(plain, operands),
        lambda pullback, cotangents: pullback(cotangents),
    )
    return differentiated


def _loop(
    program: _Program,
    num_microbatches: int,
    sums_already: bool,
    in_place: Sequence[bool],
    operands: _Operands,
) -> tuple[_State, list[jax.Array]]:
    """Runs the micro-batches; returns the last state, and the aux of "stack"."""
    empty = operands.count == 0

    def select(leaves: list[Any], mode: str) -> list[Any]:
        return [x for x, its in zip(leaves, program.modes, strict=True) if its == mode]

    def differ(tree: Any, like: Any) -> Any:
        """Marks sums as varying over devices as `like` does, one of their terms."""

        def mark(x: jax.Array, term: Any) -> jax.Array:
            return _devices.vary(x, (*program.varying, *_devices.varying(term)))

        return jax.tree.map(mark, tree, like)

    def micro_step(state: _State, batch: list[jax.Array]) -> tuple[_State, list[Any]]:
        keys = [jax.random.fold_in(key, state.count) for key in operands.keys]

        def evaluate(*params: jax.Array) -> tuple[jax.Array, list[Any]]:
            args = *params, *batch, *keys, *state.carry
            loss, *rest = jax.core.eval_jaxpr(program.jaxpr, operands.consts, *args)
            return loss, [jnp.asarray(x) for x in rest]  # an aux may be a plain number

        with jax.named_scope("compute"):
            loss, pullback, rest = jax.vjp(evaluate, *operands.params, has_aux=True)
        weight = None
        if program.weighted:
            weight, *rest = rest
            weight = weight.astype(state.weight.dtype)
        carry, aux = rest[: len(state.carry)], rest[len(state.carry) :]
        total = _add_gradient(
            program,
            operands.params,
            state,
            pullback,
            loss,
            weight,
            sums_already,
            in_place,
        )
        with jax.named_scope("accumulate"):
            averaged = [_inexact(x) for x in select(aux, "mean")]
            one = jnp.ones_like(state.weight)
            return _State(
                total,
                differ(state.weight + (one if weight is None else weight), one),
                accumulator.increment(state.count),
                [
                    _devices.vary(_strong(x), tuple(_devices.varying(old)))
                    for x, old in zip(carry, state.carry, strict=True)
                ],
                of_means(accumulator.add(state.means, (loss, averaged), weight)),
                [
                    differ(s + x.astype(s.dtype), x)
                    for s, x in zip(state.sums, select(aux, "sum"), strict=True)
                ],
                [_strong(x) for x in select(aux, "last")],
            ), select(aux, "stack")

    leaves = jax.tree.leaves(program.aux)
    averaged = [_inexact(x) for x in _blank(select(leaves, "mean"))]
    terms = _blank(program.loss), averaged

    def of_means(means: Accumulator) -> Accumulator:
        return means._replace(
            total=differ(means.total, terms), weight=differ(means.weight, empty)
        )

    start = _State(
        [jnp.where(empty, jnp.zeros_like(t), t) for t in operands.total],
        differ(
            jnp.where(empty, jnp.zeros_like(operands.weight), operands.weight), empty
        ),
        operands.count,
        operands.carry,
        of_means(accumulator.init(terms)),
        [
            differ(jnp.zeros(x.shape, _sum_dtype(x.dtype)), x)
            for x in select(leaves, "sum")
        ],
        _blank(select(leaves, "last")),
    )
    return jax.lax.scan(micro_step, start, operands.batch, length=num_microbatches)


def _add_gradient(
    program: _Program,
    params: list[jax.Array],
    state: _State,
    pullback: Any,
    loss: jax.Array,
    weight: jax.Array | None,
    sums_already: bool,
    in_place: Sequence[bool],
) -> list[jax.Array]:
    """`state.total` plus the weighted gradient of one micro-batch."""
    # The backward pass is linear in the cotangent: with the weight for it, weighted
    # gradients come out, and nothing has to be multiplied, in place or not.
    scaled = weight is not None and not program.multiplies
    cotangent = weight.astype(loss.dtype) if scaled else jnp.ones_like(loss)
    cotangent = _devices.vary(cotangent, tuple(_devices.varying(loss)))
    # Where the backward pass sums over devices, they all have to run it, and no one of
    # them may leave out what came of it.
    selects = scaled and not sums_already
    refs = {i: jax.new_ref(t) for i, t in enumerate(state.total) if in_place[i]}
    by_hand = [i for i in range(len(in_place)) if i not in refs]

    def backward() -> list[jax.Array]:
        with jax.named_scope("compute"):
            if not refs:
                return list(pullback(cotangent))
            grads = pullback.with_refs(
                *(refs.get(i, jax.ad.GradValue()) for i in range(len(in_place)))
            )(cotangent)
            return [grads[i] for i in by_hand]

    if refs and selects:
        # What went into a reference cannot be selected away, and NaN · 0 is NaN.
        zeros = _blank([params[i] for i in by_hand])
        grads = jax.lax.cond(weight == 0, lambda: zeros, backward)
    else:
        grads = backward()

    with jax.named_scope("accumulate"):
        # A bare product is to be rounded, then added, in every program: see _arrival.
        grads = [
            g if program.arrivals[i] else jax.lax.optimization_barrier(g)
            for i, g in zip(by_hand, grads, strict=True)
        ]
        before = [state.total[i] for i in by_hand]
        acc = Accumulator(before, state.weight, state.count)
        after: Any = accumulator.add(
            acc, grads, weight if program.multiplies else None
        ).total
        if selects:
            after = [
                jnp.where(weight == 0, *pair)
                for pair in zip(before, after, strict=True)
            ]
    total = {i: jax.ref.freeze(ref) for i, ref in refs.items()}
    total |= dict(zip(by_hand, after, strict=True))
    return [total[i] for i in range(len(in_place))]


def _blank(tree: Any) -> Any:
    """Zeros of the types in `tree`: placed, and varying over devices, as they say."""

    def zeros(x: Any) -> jax.Array:
        aval = jax.typeof(x) if isinstance(x, jax.Array) else x
        return _devices.vary(_devices.zeros(aval), tuple(_devices.varying(aval)))

    return jax.tree.map(zeros, tree)


def _strong(x: ArrayLike) -> jax.Array:
    """`x` without a weak type, which the carry of a loop has to keep."""
    x = jnp.asarray(x)
    return jax.lax.convert_element_type(x, x.dtype) if x.weak_type else x


def _inexact(x: jax.Array) -> jax.Array:
    return x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32)


def _sum_dtype(dtype: np.dtype) -> np.dtype:
    """Where the aux of "sum" adds up: counts as counts, and never below float32."""
    if jnp.issubdtype(dtype, jnp.inexact):
        return accumulator.accumulator_dtype(np.zeros([], dtype), np.dtype(np.float32))
    return np.dtype(np.int32) if dtype == jnp.bool_ else dtype
