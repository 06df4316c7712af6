"""Of the whole batch: `value_and_grad`, `microbatch`, `batch_dependencies`.

    value_and_grad(fun, k)(params, batch)  =  jax.value_and_grad(fun)(params, batch)

Each checks its arguments and goes through the stations of `engine`.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend import core

from .._checks import check_callable, explains_keywords, named_leaves
from .._devices.meshes import DataAxis
from .._devices.record import DoesNotFitError
from .._partition.held import Note
from .._passes import jaxprs
from .._passes.equation import Divided
from .._passes.places import short_line
from .._text import ruled, wrap
from .._window import report
from . import batches, engine, undivided
from .call import Call, as_returned, returning_pair, warns_outside_jit
from .options import Options

# == `value_and_grad` ==================================================================


@explains_keywords
def value_and_grad(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    holomorphic: bool = False,
    allow_int: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    residual_bytes: int | None = None,
    accumulator_dtype: Any = jnp.float32,
    optimize: bool = True,
) -> Callable[..., tuple[Any, optax.Updates]]:
    """`jax.value_and_grad` over micro-batches: a big batch in a small one's memory.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, batch):
    ...     error = (batch["x"] * w - batch["y"]) ** 2
    ...     return jnp.sum(error * batch["mask"]) / jnp.sum(batch["mask"])
    >>> mask = jnp.array([1, 1, 1, 0])
    >>> batch = {"x": jnp.arange(4.0), "y": jnp.ones(4), "mask": mask}
    >>> step = jax.jit(ga.value_and_grad(loss, num_microbatches=2))
    >>> value, grad = step(jnp.float32(2.0), batch)
    >>> print(value, grad)
    3.6666667 4.6666665
    >>> print(*jax.value_and_grad(loss)(jnp.float32(2.0), batch))
    3.6666667 4.6666665

    Value, gradients and aux are those of `jax.value_and_grad(fun)`, for any loss:
    `fun` is traced once, at all rows, and its program is partitioned over micro-batches
    as compilers partition programs over devices. Call it under `jax.jit`: outside,
    every call compiles afresh.

    **Cost.** If rows do not need one another, as in a mean, one loop: one forward and
    one backward pass, the activations of one micro-batch, one gradient tree. Otherwise
    also the values that rows exchange, more of the activations, and two, at most three,
    forward passes; `batch_dependencies` shows the lines. Code that cannot be read is
    computed whole. Compile time does not grow with the number of micro-batches. Pages:
    "Any loss", "Memory", and "Devices" for `data_axis`.

    **Exactness.** To rounding. Sums over micro-batches are taken in
    `accumulator_dtype`, and gradients of bfloat16 models are rounded there alone. The
    same bits each time that one program runs; for the same bits in every grouping of
    micro-batches see `accumulate`. Page: "Rounding and bits".

    Args:
      fun: a function like that of `jax.value_and_grad`, of any loss.
      num_microbatches: how many, static. It must divide the rows where these meet, or
        lie on several devices; elsewhere the last micro-batch has the rest.
      microbatch_size: in its place, how many rows (of each device) one of them has.
      argnums: the positional arguments to differentiate with respect to.
      has_aux: True if `fun` returns `(loss, aux)`. aux comes back as for all rows.
      holomorphic: True if `fun` is holomorphic: loss and parameters are complex.
      allow_int: True if parameters may hold integers, whose gradients are `float0`.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: along which axis, as in `jax.vmap`: an int, None (whole), or a prefix
        of the batch (of a tuple of several batch arguments, keywords last).
      data_axis: the mesh axis, or a tuple of them, that split the batch over devices,
        or a `DataAxis`. Sums are reduced once, after the loop. Also in `jax.shard_map`.
      residual_bytes: how many bytes of activations a device may keep where rows meet,
        so that less runs again. By default as many as one micro-batch's step takes
        anyway, or 1 MiB; 0 keeps none. `plan` and the log say what is kept.
      accumulator_dtype: see `accumulator.init`. The result has the parameters' dtypes.
      optimize: False leaves out all passes on programs: the plain scan, and each
        gradient added after its backward pass. `ga_optax.config` switches it for all
        calls. Page: "Turn rewriting off".

    Returns: a function with the result of `jax.value_and_grad(fun, argnums, has_aux)`.
    Gradients lie in the memory of the device, also of parameters in that of the host.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced; if
        what `fun` returned does not fit, before anything runs.
    """
    options = Options(**locals()).checked()
    of_pair = returning_pair(options)

    @warns_outside_jit
    @functools.wraps(fun)
    def value_and_grad_fun(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
        call = Call.of(of_pair, args, kwargs, hint=True)
        value, grads = engine.value_and_grad(call, engine.as_one_equation)
        return as_returned(options, value), call.with_zeros(grads)

    return value_and_grad_fun


# == `microbatch` ======================================================================


@explains_keywords
def microbatch(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    remat: bool | None = None,
) -> Callable[..., Any]:
    """`fun` and its derivatives, in the memory of a micro-batch, anywhere in a program.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def head(w, h, labels):  # the largest array of a language model
    ...     logits = h @ w
    ...     own = jnp.take_along_axis(logits, labels[:, None], axis=1)[:, 0]
    ...     return jnp.mean(jax.nn.logsumexp(logits, axis=1) - own)
    >>> def loss(params, x, labels):
    ...     h = jnp.tanh(x @ params["in"])
    ...     in_four = ga.microbatch(head, 4, batch_argnums=(1, 2))
    ...     return in_four(params["out"], h, labels)
    >>> params = {"in": jnp.eye(2), "out": jnp.ones((2, 3)).at[0, 0].set(2.0)}
    >>> x, labels = jnp.arange(16.0).reshape(8, 2) / 8, jnp.arange(8) % 3
    >>> value, grads = jax.jit(jax.value_and_grad(loss))(params, x, labels)
    >>> print(value, grads["out"][0])
    1.1605648 [ 0.11849982 -0.09909287 -0.01940693]

    For the logits of a language model, an MLP over a long sequence, attention over
    queries, per-example work in pieces, metrics over a set that does not fit, and a
    gradient function that is written already, `ga.microbatch(jax.value_and_grad(
    loss), 8)`. What has rows need not be a batch: tokens, time steps and channels
    serve as well, with `batch_axes`. For the loss of a training step use
    `value_and_grad(loss, 8)`. Page: "Out of memory in one part".

    **Exactness.** `fun(*args)` to rounding, and so are `jax.grad`, `jax.vjp`,
    `jax.jvp`, `jax.linearize`, derivatives of these, and `jax.vmap`, also with respect
    to what `fun` closes over. Results with rows come back whole, in the order of the
    rows; all others as they are. Gradients are added up in float32, and rounded once.

    **Cost.** `fun` runs forward once. If one real scalar of what it returns is
    differentiated, its gradient comes with the value, so nothing runs twice: the
    matrix products of `fun` undivided. Otherwise `fun` runs forward once more on the
    way back, which has the rows of the cotangent. Where rows meet it is as in
    `value_and_grad`. `jax.jvp` runs a micro-batch and its tangent at a time. Second
    derivatives are those of the gradient as one would write it, divided like any
    function, and may take the memory of several micro-batches.

    Args:
      fun: any function that JAX can trace. It is traced once, for the whole batch.
      num_microbatches: how many micro-batches, static, as for `value_and_grad`. In a
        micro-batch of `value_and_grad` or `microbatch` they are those of its rows, on
        one device: so many, or the most that divide them.
      microbatch_size: in its place, how many rows one of them has.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: as for `value_and_grad`.
      data_axis: as for `value_and_grad`.
      remat: True computes everything again on the way back, and keeps nothing for it;
        False takes the gradient with the value, of one scalar. None: with the value
        where that costs nothing, but not in float16, where a gradient that is not
        scaled yet may vanish.

    Returns:
      A function with `fun`'s signature and result.

    Raises:
      TypeError, ValueError: if an argument does not fit, before `fun` is traced; with
        remat=False, if what is differentiated is not one real scalar.
    """
    check_callable("fun", fun, "of the parameters and the batch", _TODO)
    if not (remat is None or isinstance(remat, bool)):
        raise TypeError(
            f"remat must be True, False or None, but it is {remat!r}. Leave it out: "
            "the gradient comes with the value where that costs nothing."
        )
    options = Options(
        fun,
        num_microbatches,
        microbatch_size=microbatch_size,
        argnums=(),
        batch_argnums=batch_argnums,
        batch_argnames=batch_argnames,
        batch_axes=batch_axes,
        has_aux=True,
        data_axis=data_axis,
        residual_bytes=0 if remat else None,
        accumulator_dtype=jnp.float32,
    ).checked(differentiates=False)

    @functools.wraps(fun)
    def microbatch_fun(*args: Any, **kwargs: Any) -> Any:
        call = Call.of(options, args, kwargs, hint=True)
        return engine.of_call(call, remat, options.microbatch_size)

    return microbatch_fun


_TODO = "Pass what is to run over micro-batches."


# == `batch_dependencies` ==============================================================


@dataclasses.dataclass(frozen=True)
class BatchDependencies:
    """The plan of a call: where rows of the batch meet, the cost, and the loops.

    `str` is a table of the meetings. `details` is the whole plan, level by level, value
    by value.

    Attributes:
      num_microbatches: how many micro-batches there are, on all devices.
      stages: the loops of a device, in the order in which they run. Each has a `name`,
        a text `loop` that says how it runs, the values that it `computes`, those that
        cotangents go back through (`goes_back`), and what it `fills` for later stages.
        A value has the primitive's `name`, its `line`, and what a micro-batch `holds`
        of it: rows along a dimension, all, or a part that is added up; with the dtype
        and shape of the value in the whole batch.
      meetings: what rows need of each other: its `kind` ("sum", "max", "min", or
        "stack" for what each micro-batch has), its `type` in one micro-batch, the
        `line` of the code (beside it the module or function of a package inside),
        the `nbytes` that a device keeps of it, and how often what
        it is computed of runs `forward` and `backward` over all rows.
      kept: what else a window keeps, so that less runs again: activations of the
        micro-batches ("residual"), and what they share ("shared").
      whole: `(name, line, nbytes)` of what is computed whole in each micro-batch, as
        nothing better is known of it: the bytes that it computes, in all iterations of
        a loop, or that it reads of all rows.
      promised: the same of what `rowwise` says that its rows do not need each other.
      forward_passes: how often any part of the loss runs forward, at most. Elementwise
        functions cost little, and are not counted where there is anything else.
      backward_passes: how often any part runs backward.
      peak_bytes: about how many bytes a device needs at a time, beside arguments and
        results: what is stored between the passes, its cotangents, and one
        micro-batch's step. XLA takes 0.6 to 1.3 times that, and up to 4 times for
        products of all pairs of rows. 0 if there is no pass but those of a plain loop.
      more_room: `(residual_bytes, forward, backward)`: with how much room everything
        stays, and how many passes that takes; None if more room changes nothing.
      rows: the bytes of each leaf of the batch that has rows, by name.
      given_whole: those of what goes whole to each micro-batch, beside the parameters.
      pieces: `(name, number, rows)` of each `ga_optax.microbatch` inside: how many
        pieces it makes of the rows of one micro-batch on one device, and how many rows
        each has. One whose rows meet is computed as if it stood there itself.
      undivided: why the call computes all rows at once; "" if it runs micro-batches.
      question: whether another argument is the batch, if much is computed whole; or "".
    """

    num_microbatches: int
    stages: list[report.DescribedLoop]
    meetings: list[report.Stored]
    kept: list[report.Stored]
    whole: list[Note]
    promised: list[Note]
    forward_passes: int
    backward_passes: int
    peak_bytes: int
    more_room: tuple[int, int, int] | None
    rows: dict[str, int]
    given_whole: dict[str, int]
    pieces: list[tuple[str, int, int]]
    undivided: str = ""
    question: str = ""

    @property
    def kept_bytes(self) -> int:
        """The bytes that a device keeps between passes."""
        return sum(x.nbytes for x in (*self.meetings, *self.kept))

    def __str__(self) -> str:
        passes = self._passes
        if self.undivided:
            text = f"All rows run at once, in the memory that this takes: {passes}."
            text = f"{text} {self._layout} That is because {self.undivided}"
            return "\n".join(wrap(f"{text.rstrip('.')}."))
        if not (self.meetings or any(self._notes.values())):
            return "\n".join(wrap(f"No row needs another: {passes}. {self._layout}"))
        rows = list(_rows((*self.meetings, *self.kept)))
        rows += [
            (f"{name}, {how}: {nbytes:,} bytes", "", "", "", short_line(line))
            for how, notes in self._notes.items()
            for name, line, nbytes in dict.fromkeys(notes)
        ]
        lines = ruled([("what meets", *_HEADER, "line"), *rows], left=(0, 4))
        end = self._in_all
        if self.more_room:
            end += " " + report.room_sentence(self.more_room)
        runs = self.forward_passes or self.backward_passes
        end = f"{end} {self._layout}" if runs else self._layout
        texts = _LEGEND, end, *undivided.advice(self.whole)
        below = (line for text in texts for line in wrap(text))
        return "\n".join([*lines, "", *below])

    @property
    def details(self) -> str:
        """The plan in full, to find a wrong number: each loop, with its values."""
        head = str(self) if self.undivided else _HOLDS
        return "\n\n".join([head, *map(str, self.stages), self._in_all])

    @property
    def _passes(self) -> str:
        return (
            f"{_times(self.forward_passes, 'forward pass')} and "
            f"{_times(self.backward_passes, 'backward pass')}"
        )

    @property
    def _in_all(self) -> str:
        room = f", in about {self.peak_bytes:,} bytes" if self.peak_bytes else ""
        return f"In all: {self._passes}{room}."

    @property
    def _notes(self) -> dict[str, list[Note]]:
        return {"computed whole": self.whole, "promised": self.promised}

    @property
    def _layout(self) -> str:
        """The leaves that have rows, and the leaves that go whole, in words."""
        number = f"{len(self.rows)} lea{'f' if len(self.rows) == 1 else 'ves'}"
        text = f"Rows: {number}, {sum(self.rows.values()):,} bytes."
        whole = sorted(self.given_whole.items(), key=lambda x: -x[1])
        if whole:
            names = ", ".join(f"{name} {nbytes:,}" for name, nbytes in whole[:4])
            text += f" Whole: {names}{', ...' if len(whole) > 4 else ''} bytes."
        for name, pieces, rows in self.pieces:
            text += f" Inside, {name} runs in {pieces} pieces of {_times(rows, 'row')}."
        return f"{text}{self.question}"


_HEADER = ("bytes", "forward", "backward")

_LEGEND = (
    "forward, backward: how many times the code before the line runs over all rows. "
    "Elementwise functions cost little, and may run more often."
)

_HOLDS = "\n".join(
    wrap(
        "A micro-batch holds its rows along an axis of a value, all of it, or a part, "
        "of which the sum over micro-batches is the value. Shapes are those of the "
        "whole batch; of a step of the library's own, those of a micro-batch."
    )
)


def _rows(stored: Sequence[report.Stored]) -> Iterator[tuple[str, ...]]:
    """The rows of the table; equal values of several layers share one."""
    groups: dict[tuple[str, str], list[report.Stored]] = {}
    for x in stored:
        groups.setdefault((x.line, x.what), []).append(x)
    for (line, what), group in groups.items():
        runs = max(x.forward for x in group), max(x.backward for x in group)
        yield (
            _of_several(len(group), what),
            f"{sum(x.nbytes for x in group):,}",
            *map(str, runs),
            short_line(line),
        )


def _of_several(number: int, what: str) -> str:
    """Values of several layers that are alike, such as "3 sums of 16 numbers"."""
    if number == 1:
        return what
    rest = what.removeprefix("a sum of ")
    return f"{number} sums of {rest}" if what != rest else f"{number} times {what}"


def _times(number: int, what: str) -> str:
    ending = "es" if what.endswith("s") else "s"
    return f"{number} {what}{'' if number == 1 else ending}"


@explains_keywords
def batch_dependencies(
    fun: Callable[..., Any],
    num_microbatches: int | None = None,
    *,
    microbatch_size: int | None = None,
    argnums: int | Sequence[int] = 0,
    has_aux: bool = False,
    batch_argnums: int | Sequence[int] = 1,
    batch_argnames: str | Sequence[str] = (),
    batch_axes: Any = 0,
    data_axis: str | Sequence[str] | DataAxis | None = None,
    residual_bytes: int | None = None,
) -> Callable[..., BatchDependencies]:
    """Reports the lines where rows of the batch meet, with the passes and the memory.

    >>> import jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.sqrt(jnp.mean((x @ w) ** 2))
    >>> report = ga.batch_dependencies(loss, 2)(jnp.ones(3), jnp.ones((4, 3)))
    >>> print(report.forward_passes, report.backward_passes, report.kept_bytes)
    2 1 8
    >>> [mean] = report.meetings
    >>> print(mean.kind, mean.type.shape, mean.nbytes)
    sum () 4

    `str` of the result is a table of the lines of code where rows meet: the kind of
    meeting, the bytes that a device keeps, and the forward and backward passes over all
    rows of the code that leads to the line. A loss whose rows do not meet takes one
    forward and one backward pass. Nothing is computed or compiled.

    **Exactness.** Bytes and passes are those of `value_and_grad` with the same options,
    from its program.

    Args:
      fun: a loss, as for `value_and_grad`.
      num_microbatches: as there; so are the others.
      microbatch_size: in its place, how many rows one of them has.
      argnums: the positional arguments to differentiate with respect to.
      has_aux: True if `fun` returns `(loss, aux)`.
      batch_argnums: the positional arguments that have rows.
      batch_argnames: the keywords that have rows.
      batch_axes: along which axis.
      data_axis: the mesh axes that split the batch.
      residual_bytes: as for `value_and_grad`.

    Returns:
      A function of `fun`'s arguments, or of their types.

    Raises:
      TypeError, ValueError: as `value_and_grad`; or if it computes all rows at once.
    """
    options = Options(**locals(), accumulator_dtype=jnp.float32).checked()
    options = returning_pair(options)

    @functools.wraps(fun)
    def dependencies(*args: Any, **kwargs: Any) -> BatchDependencies:
        call = Call.of(options, args, kwargs, hint=True, types=True)
        plan, closed = _seen(call)
        notes, why, number, last = ([], []), "", 0, report.WindowReport(0, 1, 0, ())
        if isinstance(plan, undivided.AllRows):
            jaxpr, why = closed.jaxpr, plan.why
            order = report.one_level(jaxpr, jaxpr.invars[: len(call.leaves("argnums"))])
        else:
            (micro_batch, program, operands, _), evaluation = plan
            part, number = micro_batch.part, len(operands.indices)
            jaxpr, notes = part.jaxpr, (part.whole, part.promised)
            given, count = program.jaxpr.invars, len(operands.params)
            smooth = given[: count + operands.rows]
            order = report.one_level(program.jaxpr, smooth, given[count:])
            if evaluation is not None:
                order, last = evaluation.schedule, report.report_of(evaluation.schedule)
        stages = report.described_stages(order, last.stored, number, call.num_of_all)
        if not last.levels:
            last = last._replace(backward=int(bool(stages[-1].goes_back)))
        kept = [x for x in last.stored if x.kind in ("residual", "shared")]
        meetings = [x for x in last.stored if x not in kept]
        passes = last.forward, last.backward, last.peak, last.room
        pieces = list(dict.fromkeys(_pieces(jaxpr)))
        question = call.question if notes[0] else ""
        ends = *_bytes_by_layout(call), pieces, why, question
        return BatchDependencies(
            call.num_of_all, stages, meetings, kept, *notes, *passes, *ends
        )

    return dependencies


def _pieces(jaxpr: core.Jaxpr) -> Iterator[tuple[str, int, int]]:
    """Each `microbatch` in a micro-batch: name, number of pieces, rows of a piece."""
    for e in jaxprs.equations(jaxpr):
        if isinstance(inner := e.params.get("function"), Divided):
            pairs = zip(inner.types, inner.axes, strict=True)
            rows = next(x.shape[d] for x, d in pairs if d is not None)
            yield inner.name, inner.number, rows // inner.number
            yield from _pieces(inner.program.jaxpr)


def _bytes_by_layout(call: Call) -> tuple[dict[str, int], dict[str, int]]:
    """The bytes of leaves with rows, and of leaves that go whole, by name.

    Parameters, and leaves that are no arrays, are left out.
    """
    rows: dict[str, int] = {}
    whole: dict[str, int] = {}
    for (name, x), axis in zip(batches.named_batch(call), call.batch_axes, strict=True):
        (whole if axis is None else rows)[name] = jaxprs.nbytes(x)
    for place in call.without_role:
        for name, x in named_leaves(call.at(place)):
            prefix = "" if x is call.at(place) else f"{name} of "
            whole[prefix + batches.argument(place)] = jaxprs.nbytes(x)
    return rows, {name: n for name, n in whole.items() if n}


def _seen(call: Call) -> tuple[engine.Scheduled | undivided.AllRows, Any]:
    """The plan that a call runs, to the end; of `AllRows` their program, too.

    Nothing is computed. The plan comes also if an option does not fit it.
    """
    arrays = {n: x for n, x in call.leaves().items() if batches.is_array(x)}
    plans: list[engine.Scheduled | undivided.AllRows] = []
    programs: list[Any] = [None]

    def run(values: dict[int, Any]) -> None:
        new = call.with_leaves(values)._replace(sees=plans.append)
        engine.value_and_grad(new, engine.as_one_equation)
        if isinstance(plans[-1], undivided.AllRows):
            programs.append(engine.trace(new.on_device()).closed)

    try:
        jax.eval_shape(run, arrays)
    except DoesNotFitError:
        if not plans:
            raise
    return plans[-1], programs[-1]
