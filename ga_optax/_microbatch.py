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
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.custom_batching import custom_vmap
from jax.extend import core
from jax.typing import ArrayLike, DTypeLike

from ga_optax import accumulator
from ga_optax.accumulator import (
    Accumulator,
    check_dtype,
    check_gradients,
    check_structure,
    check_weight,
    leaf_name,
)

__all__ = ["accumulate", "value_and_grad"]

# `jax.vjp(...).with_refs` transposes `lax.scan` correctly from jax 0.11.0 on (jax PR
# 38929), and a `custom_vmap` may have references inside it from 0.11.1 on.
_HAS_REFS = jax.__version_info__ >= (0, 11, 1)

_AUX = ("mean", "sum", "last", "stack")


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

    Returns:
      A function of `fun`'s arguments that returns what `jax.value_and_grad(fun,
      has_aux=...)` returns: `(value, grads)`, or `((value, aux), grads)`.

    Raises:
      TypeError, ValueError: here, or from the returned function before `fun` is traced,
        where an argument does not fit; after it was traced, and before anything runs,
        where what `fun` returned does not.
    """
    window = _Window(
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
    ).checked()
    dtype = check_dtype(accumulator_dtype)

    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, optax.Updates]:
        call = _Call.make(window, args, kwargs)
        params = call.params()
        program = _trace(call)
        value, acc = _fold(call, program, accumulator.init(params, dtype))
        with jax.named_scope("mean"):
            stacked = [arrival == "slices" for arrival in program.arrivals]
            mean = _mean(window, acc, stacked)
            grads = jax.tree.map(
                lambda g, p: g.astype(jnp.result_type(p)), mean, params
            )
        return value, grads

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

    Returns:
      A function `(acc, *args, **kwargs) -> (value, acc)`. Make the first `acc` with
      `accumulator.init` from the argument at `argnums`, or from a tuple of them where
      `argnums` is one; its dtype is the one to sum in. `value` is `fun`'s value, or
      `(value, aux)`, over the micro-batches of that call alone.

    Raises:
      TypeError, ValueError: as for `value_and_grad`, and where the accumulator does not
        match the parameters.
    """
    window = _Window(
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
    ).checked()

    def accumulate_fun(
        acc: Accumulator, *args: Any, **kwargs: Any
    ) -> tuple[Any, Accumulator]:
        if not isinstance(acc, Accumulator):
            raise TypeError(
                "The first argument must be the accumulator to continue, but it is of "
                f"type {type(acc).__name__}. Start with accumulator.init(params)."
            )
        call = _Call.make(window, args, kwargs)
        check_gradients(
            acc.total, call.params(), name="the parameters", expected="acc.total"
        )
        return _fold(call, _trace(call), acc)

    return accumulate_fun


def _mean(
    window: "_Window", acc: Accumulator, stacked: Sequence[bool]
) -> optax.Updates:
    """`accumulator.mean`, with the stacked leaves divided where they lie.

    A quotient as a whole would be a second buffer; in a loop over the slices XLA writes
    to the one that it reads. Where it is a product with a power of two, which is as
    exact, XLA makes it a part of what reads the other leaves, such as an optimizer.
    """
    k = window.num_microbatches
    power_of_two = window.weight_fn is None and k & (k - 1) == 0

    def whole(total: jax.Array) -> jax.Array:
        if power_of_two and k > 1 and not jnp.iscomplexobj(total):
            return total * (1 / k)
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


# -- Options and arguments -------------------------------------------------------------


class _Window(NamedTuple):
    """The options of a window."""

    fun: Callable[..., Any]
    num_microbatches: int
    argnums: int | Sequence[int]
    batch_argnums: int | Sequence[int]
    rng_argnums: int | Sequence[int]
    carry_argnums: int | Sequence[int]
    has_aux: bool
    weight_fn: Callable[..., ArrayLike] | None
    aux: Any
    in_place: bool | None

    def checked(self) -> "_Window":
        """The same, in one form; raises where an option does not fit."""
        if not callable(self.fun):
            raise TypeError(
                f"fun must be a function of the parameters and the batch, but it is "
                f"{self.fun!r}. Pass the loss function itself, not its value."
            )
        if self.weight_fn is not None and not callable(self.weight_fn):
            raise TypeError(
                "weight_fn must be a function of the batch arguments, but it is "
                f"{self.weight_fn!r}. Pass for example lambda batch: "
                "batch['mask'].sum(), or None to count every micro-batch as 1."
            )
        if self.in_place and not _HAS_REFS:
            raise ValueError(
                "in_place=True needs jax >= 0.11.1, where lax.scan is transposed "
                "correctly with gradient references, but this is jax "
                f"{jax.__version__}. Use None: it works in place where that is right, "
                "with the same bits."
            )
        for mode in jax.tree.leaves(self.aux, is_leaf=lambda x: x is None):
            if not isinstance(mode, str) or mode not in _AUX:
                raise ValueError(
                    f"aux must be one of {', '.join(map(repr, _AUX))}, or a tree of "
                    f"those that is a prefix of the aux tree, but it holds {mode!r}. "
                    'Use "stack" to see the aux of every micro-batch.'
                )
        window = self._replace(
            num_microbatches=check_num_microbatches(self.num_microbatches),
            argnums=_positions("argnums", self.argnums),
            batch_argnums=_positions("batch_argnums", self.batch_argnums),
            rng_argnums=_positions("rng_argnums", self.rng_argnums),
            carry_argnums=_positions("carry_argnums", self.carry_argnums),
            in_place=_HAS_REFS if self.in_place is None else self.in_place,
        )
        for name in ("argnums", "batch_argnums"):
            if getattr(window, name) == ():
                raise ValueError(
                    f"{name} must name at least one positional argument, but it is (). "
                    "Leave it out for the default, "
                    f"{name}={0 if name == 'argnums' else 1}."
                )
        window.roles(None)
        return window

    def roles(self, num_args: int | None) -> dict[str, tuple[int, ...]]:
        """Which positions have which role; raises where one is missing or has two."""
        owner: dict[int, str] = {}
        roles = {}
        for name in ("argnums", "batch_argnums", "rng_argnums", "carry_argnums"):
            positions = []
            for given in _sequence(getattr(self, name)):
                position = given
                if num_args is not None:
                    if not -num_args <= given < num_args:
                        raise ValueError(
                            f"{name} must name positional arguments of the call, but "
                            f"it names number {given}, and {num_args} came. Pass that "
                            f"argument by position, or change {name}."
                        )
                    position = given % num_args
                if position in owner:
                    raise ValueError(
                        f"{name} must not overlap {owner[position]}, but both name "
                        f"argument {position}. Give each argument one role: "
                        "differentiated, split, a key, or carried."
                    )
                owner[position] = name
                positions.append(position)
            roles[name] = tuple(positions)
        return roles


def check_num_microbatches(num_microbatches: Any) -> int:
    """Returns the number of micro-batches as an int, or raises."""
    todo = "Use 1 for the undivided batch."
    try:
        if isinstance(num_microbatches, (bool, np.bool_)):
            raise TypeError
        value = operator.index(num_microbatches)
    except TypeError:
        raise TypeError(
            "num_microbatches must be an int that is known when the function is "
            f"made, but it is {num_microbatches!r} of type "
            f"{type(num_microbatches).__name__}. {todo}"
        ) from None
    if value < 1:
        raise ValueError(
            f"num_microbatches must be at least 1, but it is {value}. {todo}"
        )
    return value


def _positions(name: str, value: Any) -> int | tuple[int, ...]:
    try:
        if isinstance(value, (tuple, list)):
            return tuple(operator.index(i) for i in value)
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an int or a sequence of ints, but it is {value!r}. Number "
            "the positional arguments of fun from 0."
        ) from None


def _sequence(positions: int | tuple[int, ...]) -> tuple[int, ...]:
    return (positions,) if isinstance(positions, int) else positions


class _Call(NamedTuple):
    """One call of the returned function: its arguments by role, checked."""

    window: _Window
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, tuple[int, ...]]

    @classmethod
    def make(cls, window: _Window, args: Any, kwargs: Any) -> "_Call":
        call = cls(window, args, kwargs, window.roles(len(args)))
        for position in call.roles["argnums"]:
            tree = args[position]
            check_gradients(tree, tree, name=f"argument {position}")
        for position in call.roles["rng_argnums"]:
            _check_keys(position, args[position])
        _check_batch(
            window.num_microbatches,
            {position: args[position] for position in call.roles["batch_argnums"]},
        )
        return call

    def role(self, name: str) -> tuple[Any, ...]:
        return tuple(self.args[position] for position in self.roles[name])

    def params(self) -> Any:
        """What to differentiate with respect to, in the structure of the result."""
        params = self.role("argnums")
        return params[0] if isinstance(self.window.argnums, int) else params


def _check_keys(position: int, tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
        raw = dtype == jnp.uint32 and len(shape) == 1
        if not (typed or raw):
            raise ValueError(
                "rng_argnums must name PRNG keys, or trees of them, but "
                f"{leaf_name(path)} of argument {position} has shape {shape} and dtype "
                f"{dtype.name}. Pass one key, from jax.random.key(seed) for example; "
                "every micro-batch derives its own."
            )


def _check_batch(num_microbatches: int, batch: dict[int, Any]) -> None:
    first = None
    for position, tree in batch.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            shape = jnp.shape(leaf)
            name = leaf_name(path)
            if len(batch) > 1 or not path:
                name = f"{name} of argument {position}"
            if not shape:
                raise ValueError(
                    f"Every leaf of the batch must have a batch axis, but {name} is a "
                    "scalar. Pass it in an argument that batch_argnums does not name, "
                    "or by keyword: those go to every micro-batch whole."
                )
            if first is None:
                first = name, shape
            elif shape[0] != first[1][0]:
                raise ValueError(
                    "All leaves of the batch must have one length along axis 0, but "
                    f"{first[0]} has shape {first[1]} and {name} has shape {shape}. "
                    "Put the examples on axis 0 of each, or pass what is not per "
                    "example in another argument."
                )
    if first is None:
        raise ValueError(
            "batch_argnums must name arguments that hold arrays, but argument"
            f"{'s' * (len(batch) > 1)} {', '.join(map(str, batch))} "
            f"hold{'s' * (len(batch) == 1)} none. Pass the batch there, or change "
            "batch_argnums."
        )
    name, shape = first
    if shape[0] == 0:
        raise ValueError(
            f"The batch must hold at least one example, but {name} has shape {shape}. "
            "Skip the call where there is no data."
        )
    if shape[0] % num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} must divide the batch axis, but "
            f"{name} has shape {shape}. Use {_divisors(shape[0], num_microbatches)}."
        )


def _divisors(n: int, near: int) -> str:
    """The divisors of n in words: all of them, or the eight nearest to `near`."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    divisors = sorted({*small, *(n // d for d in small)})
    divisors = sorted(sorted(divisors, key=lambda d: abs(d - near))[:8])
    *most, last = map(str, divisors)
    return f"{', '.join(most)} or {last}" if most else last


# -- The program of one micro-batch ----------------------------------------------------


class _Program(NamedTuple):
    """What `fun` does to one micro-batch, traced once.

    Attributes:
      jaxpr: of the flat arguments `(params, batch, keys, carry)` to the flat results
        `(loss, weight, carry, aux)`; no weight without a `weight_fn`.
      consts: the values of its constants: tracers, where `fun` closes over some.
      loss: the shape and dtype of the loss.
      carry: the tree of the carry, of shapes and dtypes.
      aux: the tree of the aux, of shapes and dtypes.
      modes: how to put each leaf of `aux` together.
      weighted: whether there is a weight.
      multiplies: whether the weight multiplies the gradients, and not the cotangent.
      arrivals: how the gradient of each leaf of the parameters arrives, see `_arrival`.
    """

    jaxpr: core.Jaxpr
    consts: Sequence[Any]
    loss: jax.ShapeDtypeStruct
    carry: Any
    aux: Any
    modes: list[str]
    weighted: bool
    multiplies: bool
    arrivals: list[str | None]


def _trace(call: _Call) -> _Program:
    window = call.window
    positions = [i for group in call.roles.values() for i in group]

    def micro_batch(*roles: tuple[Any, ...]) -> tuple[Any, ...]:
        _, batch, _, carry = roles
        weight = None
        if window.weight_fn is not None:
            weight = check_weight(window.weight_fn(*batch))
        args = list(call.args)
        for position, arg in zip(positions, itertools.chain(*roles), strict=True):
            args[position] = arg
        return _returned(window, window.fun(*args, **call.kwargs), carry, weight)

    def slice_of(x: Any) -> jax.ShapeDtypeStruct:
        return jax.eval_shape(lambda y: _split(y, window.num_microbatches)[0], x)

    params, batch, keys, carry = (call.role(name) for name in call.roles)
    closed, (loss, _, carry, aux) = jax.make_jaxpr(micro_batch, return_shape=True)(
        params, jax.tree.map(slice_of, batch), keys, carry
    )
    weighted = window.weight_fn is not None
    return _Program(
        closed.jaxpr,
        closed.consts,
        loss,
        carry,
        aux,
        _modes(window.aux, aux),
        weighted,
        weighted and not (jnp.finfo(loss.dtype).bits >= 32 and _scales(closed.jaxpr)),
        [
            _arrival(closed.jaxpr, variable)
            for variable in closed.jaxpr.invars[: len(jax.tree.leaves(params))]
        ],
    )


def _split(x: ArrayLike, num_microbatches: int) -> jax.Array:
    shape = jnp.shape(x)
    size = shape[0] // num_microbatches
    return jnp.reshape(jnp.asarray(x), (num_microbatches, size, *shape[1:]))


def _returned(
    window: _Window, out: Any, carry: tuple[Any, ...], weight: jax.Array | None
) -> tuple[Any, jax.Array | None, tuple[Any, ...], Any]:
    """Takes what `fun` returned apart and checks it: loss, weight, carry and aux."""
    form = "the loss"
    loss, new, aux = out, (), ()
    if window.carry_argnums != () and window.has_aux:
        form = "(loss, (carry, aux))"
        loss, rest = _unpack(out, form)
        new, aux = _unpack(rest, form)
    elif window.carry_argnums != ():
        form = "(loss, carry)"
        loss, new = _unpack(out, form)
    elif window.has_aux:
        form = "(loss, aux)"
        loss, aux = _unpack(out, form)
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise TypeError(
            f"fun must return {form}, but its loss is of type {type(loss).__name__}. "
            "Pass has_aux=True where it returns (loss, aux), or return the loss alone."
        )
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != ():
        raise ValueError(
            f"The loss must be a scalar, but it has shape {shape}. Return its mean "
            "over the micro-batch."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"The loss must be real and floating, but it has dtype {dtype.name}. Cast "
            "it, or return the quantity that is to be minimised."
        )
    if isinstance(window.carry_argnums, int):
        new = (new,)
    _check_carry(carry, new)
    return loss, weight, new, aux


def _unpack(out: Any, form: str) -> tuple[Any, Any]:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        what = f"of type {type(out).__name__}"
        if isinstance(out, (tuple, list)):
            what = f"a {type(out).__name__} of {len(out)}"
        raise TypeError(
            f"fun must return {form} with these has_aux and carry_argnums, but where a "
            f"pair is due it returned something {what}. Return that, or change the "
            "options."
        )
    return out[0], out[1]


def _check_carry(old: Any, new: Any) -> None:
    todo = "Return each carried argument with the tree, shapes and dtypes it came with."
    check_structure(old, new, name="The carry", expected="its arguments", todo=todo)
    paths = jax.tree_util.tree_flatten_with_path(old)[0]
    for (path, want), got in zip(paths, jax.tree.leaves(new), strict=True):
        came, due = (
            f"shape {jnp.shape(x)} and dtype {jnp.result_type(x).name}"
            for x in (got, want)
        )
        if came != due:
            raise ValueError(
                f"The carry must keep the {due} of {leaf_name(path)}, but fun returned "
                f"{came} there. {todo}"
            )


def _modes(option: Any, aux: Any) -> list[str]:
    """How to put each leaf of `aux` together; `option` is a prefix of its tree."""
    modes, structure = jax.tree.flatten(option)
    try:
        parts = structure.flatten_up_to(aux)
    except ValueError as error:
        raise ValueError(
            f"aux must be a tree that is a prefix of the aux tree, but it is {option!r}"
            f" and fun returned an aux of structure {jax.tree.structure(aux)}: "
            f"{error}. Name the same keys, or use one word for all of them."
        ) from None
    result = [
        mode
        for mode, part in zip(modes, parts, strict=True)
        for _ in jax.tree.leaves(part)
    ]
    paths = jax.tree_util.tree_flatten_with_path(aux)[0]
    for (path, leaf), mode in zip(paths, result, strict=True):
        if mode in ("mean", "sum") and not jnp.issubdtype(leaf.dtype, np.number):
            if leaf.dtype == jnp.bool_:
                continue
            raise TypeError(
                f'aux="{mode}" must have numbers to work on, but {leaf_name(path)} of '
                f'the aux has dtype {leaf.dtype.name}. Use "last" or "stack" there.'
            )
    return result


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


def _fold(call: _Call, program: _Program, acc: Accumulator) -> tuple[Any, Accumulator]:
    """Adds the micro-batches of a call to `acc`."""
    window = call.window
    params, batch, keys, carry = (jax.tree.leaves(call.role(n)) for n in call.roles)
    total, structure = jax.tree.flatten(acc.total)
    with jax.named_scope("split"):
        batch = [_split(x, window.num_microbatches) for x in batch]
    operands = _Operands(
        program.consts,
        [jnp.asarray(x) for x in params],
        batch,
        keys,
        [_strong(x) for x in carry],
        total,
        acc.weight,
        acc.count,
    )

    # A weight that multiplies a gradient needs that gradient by itself, and a reference
    # the dtype of the cotangent, in which narrow ones would round too often. Custom
    # rules do not go with effects, such as printing or a collective.
    allowed = window.in_place and not program.multiplies and not program.jaxpr.effects
    in_place = [
        allowed
        and arrival == "slices"
        and t.dtype == p.dtype
        and jnp.finfo(t.dtype).bits >= 32
        for arrival, t, p in zip(program.arrivals, total, operands.params, strict=True)
    ]
    loop = functools.partial(_loop, program, window.num_microbatches)
    run = functools.partial(loop, [False] * len(total))
    if any(in_place):
        run = _with_plain_rules(functools.partial(loop, in_place), run)
    loss, carry, aux, (total, weight, count) = run(operands)

    beyond = []
    if window.carry_argnums != ():
        carry = jax.tree.unflatten(jax.tree.structure(program.carry), carry)
        beyond.append(carry[0] if isinstance(window.carry_argnums, int) else carry)
    if window.has_aux:
        beyond.append(jax.tree.unflatten(jax.tree.structure(program.aux), aux))
    if len(beyond) == 2:
        beyond = [tuple(beyond)]
    value = (loss, *beyond) if beyond else loss
    return value, Accumulator(jax.tree.unflatten(structure, total), weight, count)


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
    in_place: Sequence[bool],
    operands: _Operands,
) -> tuple[jax.Array, list[jax.Array], list[jax.Array], tuple[Any, ...]]:
    """Runs the micro-batches; returns loss, carry, aux, the accumulator's parts."""
    empty = operands.count == 0

    def select(leaves: list[Any], mode: str) -> list[Any]:
        return [x for x, its in zip(leaves, program.modes, strict=True) if its == mode]

    def micro_step(state: _State, batch: list[jax.Array]) -> tuple[_State, list[Any]]:
        keys = [jax.random.fold_in(key, state.count) for key in operands.keys]

        def evaluate(*params: jax.Array) -> tuple[jax.Array, list[Any]]:
            args = *params, *batch, *keys, *state.carry
            loss, *rest = jax.core.eval_jaxpr(program.jaxpr, operands.consts, *args)
            return loss, rest

        with jax.named_scope("compute"):
            loss, pullback, rest = jax.vjp(evaluate, *operands.params, has_aux=True)
        weight = None
        if program.weighted:
            weight, *rest = rest
            weight = weight.astype(state.weight.dtype)
        carry, aux = rest[: len(state.carry)], rest[len(state.carry) :]
        total = _add_gradient(
            program, operands.params, state, pullback, loss, weight, in_place
        )
        with jax.named_scope("accumulate"):
            averaged = [_inexact(x) for x in select(aux, "mean")]
            one = jnp.ones_like(state.weight)
            return _State(
                total,
                state.weight + (one if weight is None else weight),
                accumulator.increment(state.count),
                [_strong(x) for x in carry],
                accumulator.add(state.means, (loss, averaged), weight),
                [
                    s + x.astype(s.dtype)
                    for s, x in zip(state.sums, select(aux, "sum"), strict=True)
                ],
                [_strong(x) for x in select(aux, "last")],
            ), select(aux, "stack")

    leaves = jax.tree.leaves(program.aux)
    averaged = [jax.eval_shape(_inexact, x) for x in select(leaves, "mean")]
    start = _State(
        [jnp.where(empty, jnp.zeros_like(t), t) for t in operands.total],
        jnp.where(empty, jnp.zeros_like(operands.weight), operands.weight),
        operands.count,
        operands.carry,
        accumulator.init(_blank((program.loss, averaged))),
        [jnp.zeros(x.shape, _sum_dtype(x.dtype)) for x in select(leaves, "sum")],
        _blank(select(leaves, "last")),
    )
    state, stacked = jax.lax.scan(
        micro_step, start, operands.batch, length=num_microbatches
    )
    means: Any = accumulator.mean(state.means)
    loss, averaged = means
    by_mode = dict(
        zip(_AUX, map(iter, (averaged, state.sums, state.last, stacked)), strict=True)
    )
    aux = [next(by_mode[mode]) for mode in program.modes]
    aux = [
        x.astype(leaf.dtype) if jnp.issubdtype(leaf.dtype, jnp.inexact) else x
        for x, leaf in zip(aux, leaves, strict=True)
    ]
    acc = state.total, state.weight, state.count
    return loss.astype(program.loss.dtype), state.carry, aux, acc


def _add_gradient(
    program: _Program,
    params: list[jax.Array],
    state: _State,
    pullback: Any,
    loss: jax.Array,
    weight: jax.Array | None,
    in_place: Sequence[bool],
) -> list[jax.Array]:
    """`state.total` plus the weighted gradient of one micro-batch."""
    # The backward pass is linear in the cotangent: with the weight for it, weighted
    # gradients come out, and nothing has to be multiplied, in place or not.
    scaled = weight is not None and not program.multiplies
    cotangent = weight.astype(loss.dtype) if scaled else jnp.ones_like(loss)
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

    if refs and scaled:
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
        if scaled:
            after = [
                jnp.where(weight == 0, *pair)
                for pair in zip(before, after, strict=True)
            ]
    total = {i: jax.ref.freeze(ref) for i, ref in refs.items()}
    total |= dict(zip(by_hand, after, strict=True))
    return [total[i] for i in range(len(in_place))]


def _blank(tree: Any) -> Any:
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), tree)


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
