"""What fits: the fewest micro-batches with which a step fits into memory.

XLA decides at compile time which buffers a program needs on one device, and reports

    bytes(k)  =  temp + argument + output - alias

without running anything. More micro-batches have smaller activations, so bytes(k) falls
with k, and a bisection finds the smallest k that fits. There is one exception. A single
micro-batch needs no accumulator, so it may need less memory than two. The search
therefore tries the smallest candidate first, and bisects the others.
"""

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
import numbers
import re
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn

import jax
import numpy as np

from ga_optax import _checks, _text
from ga_optax._compiled import machines
from ga_optax._passes import notes


class NothingFitsError(ValueError):
    """No candidate fits. The message says how much memory the smallest need is."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A number of micro-batches that was compiled. All sizes are bytes on one device.

    Attributes:
      num_microbatches: the number.
      temp: what XLA allocates besides arguments and results.
      argument: the arguments.
      output: the results.
      alias: the part of the results that reuses donated arguments.
      fits: whether `bytes` is at most the limit.
      error: why there are no sizes, if making or compiling the step failed.
      seconds: how long it took to trace and compile.
      notes: for which leaves `value_and_grad` adds the gradients in place, and why not
        for the others.
    """

    num_microbatches: int
    temp: int = 0
    argument: int = 0
    output: int = 0
    alias: int = 0
    fits: bool = False
    error: str | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int | None:
        """The sum temp + argument + output - alias, or None if it failed."""
        if self.error is not None:
            return None
        return self.temp + self.argument + self.output - self.alias


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found. `str(plan)` is a table.

    Attributes:
      num_microbatches: the answer, the fewest micro-batches that fit.
      batch_size: examples in a batch.
      memory_limit: the bytes that one device has.
      candidates: the candidates that were compiled, by `num_microbatches`.
      untried: the candidates that did not have to be compiled.
    """

    num_microbatches: int
    batch_size: int
    memory_limit: int
    candidates: tuple[Candidate, ...]
    untried: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """What the answer needs, on one device."""
        needs = {c.num_microbatches: c.bytes for c in self.candidates}
        return needs[self.num_microbatches] or 0

    @property
    def microbatch_size(self) -> int:
        """Examples in a micro-batch of the answer."""
        return self.batch_size // self.num_microbatches

    def __str__(self) -> str:
        verdict = (
            f"num_microbatches={self.num_microbatches} of {self.microbatch_size} "
            f"examples needs {format_bytes(self.bytes)} of "
            f"{format_bytes(self.memory_limit)}."
        )
        return _page(self.candidates, self.untried, self.batch_size, verdict)


def plan(
    make_step: Callable[[int], Any],
    *args: Any,
    batch_size: int,
    memory_limit: int | float | str | None = None,
    candidates: Sequence[int] | None = None,
    target: str | None = None,
) -> Plan:
    """Finds the fewest micro-batches with which a step fits into memory.

    It compiles the step, and runs nothing. The fewest micro-batches are the fastest,
    because each further one makes the matrices smaller.

    >>> import jax, jax.numpy as jnp, ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    >>> def make_step(num_microbatches):
    ...     grad = ga.value_and_grad(loss, num_microbatches)
    ...     return jax.jit(lambda w, x: w - grad(w, x)[1], donate_argnums=0)
    >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    >>> found = ga.plan(make_step, w, x, batch_size=4096, memory_limit="10MiB",
    ...                 candidates=[1, 2, 4, 8, 16])
    >>> found.num_microbatches, found.microbatch_size
    (4, 1024)

    **Cost.** One compilation if the smallest candidate fits, else at most
    1 + ⌈log2(candidates)⌉: 4 for 1, 2, 4, ..., 64. stderr shows the progress.

    **Exactness.** The sizes are those of the compiled program, to the byte. They do not
    include what else is on the device: the next batch, the runtime's own memory and
    fragmentation. So leave room on a GPU; 0.9 of its memory is a good limit.
    The search assumes that memory falls with more micro-batches. If it saw memory
    rise, the plan says so.

    Args:
      make_step: a function of `num_microbatches` that returns a jitted function of
        `args`. Donate the arguments that you donate in training.
      *args: the arguments of the step: arrays, or `jax.ShapeDtypeStruct`, with their
        shardings if they have any; NNX modules too if the step is under `nnx.jit`.
      batch_size: examples in a batch. Each candidate must divide it. An example may be
        several rows of what `value_and_grad` gets (tokens), or devices may share them.
      memory_limit: bytes on one device: a number, or a string such as "16GiB" (GiB =
        2^30 bytes, GB = 10^9). None takes the limit of the target, or of the smallest
        local device, which a CPU does not have.
      candidates: the numbers of micro-batches to choose from. None takes all divisors
        of `batch_size`.
      target: a machine that is not here, such as "h100", "h100:8" or "v5e:2x4"; see
        {doc}`/memory`. None plans for the devices of this process.

    Returns:
      The `Plan`. Its page also says for which leaves the gradients are not added in
      place, and why.

    Raises:
      NothingFitsError: if nothing fits. It is a `ValueError`, and says how much memory
        the smallest need is.
      ValueError: if an argument is invalid, or if no candidate compiles.
      TypeError: if an argument, or what `make_step` returns, has the wrong type.
    """
    _check_make_step(make_step)
    todo = "Pass how many examples one step sees."
    batch_size = _checks.check_int("batch_size", batch_size, todo)
    machine: Any = None if target is None else machines.find(target)
    if memory_limit is None:
        memory_limit = machine.memory_limit if machine else _device_limit()
    limit = parse_bytes(memory_limit)
    choices = _check_candidates(candidates, batch_size)
    place = machine.arguments if machine else contextlib.nullcontext
    with place(args) as args:
        search = _Search(make_step, args, limit, batch_size)
        answer = search.smallest_that_fits(choices)
    seen = tuple(search.tried[k] for k in sorted(search.tried))
    untried = tuple(k for k in choices if k not in search.tried)
    if answer is None:
        search.nothing_fits(_page(seen, untried, batch_size, "Nothing fits."))
    return Plan(answer, batch_size, limit, seen, untried)


class _BatchSizeError(ValueError):
    """The step has another batch than the caller says."""


def _check_make_step(make_step: Any) -> None:
    """Raises unless it can be called with a number of micro-batches alone."""
    what = "of num_microbatches that returns a jitted function"
    example = "lambda k: jax.jit(ga_optax.value_and_grad(loss, k)), for example."
    todo = f"Pass the function that builds your step: {example}"
    _checks.check_callable("make_step", make_step, what, todo)
    if hasattr(make_step, "lower"):
        raise TypeError(
            f"make_step must be a function {what}, but it is a jitted one. {todo}"
        )
    with contextlib.suppress(ValueError):  # of a built-in function
        signature = inspect.signature(make_step)
        try:
            signature.bind(1)
        except TypeError:
            raise TypeError(
                f"make_step must take num_microbatches alone, but it takes {signature}."
                f" {todo}"
            ) from None


def _is_too_large(candidate: Candidate) -> bool:
    """Whether the compiler itself found that it does not fit, as that of TPUs does."""
    return "RESOURCE_EXHAUSTED" in (candidate.error or "")


class _Search:
    """Compiles candidates, and remembers what they need.

    Attributes:
      tried: what was found, by the number of micro-batches.
    """

    def __init__(
        self,
        make_step: Callable[[int], Any],
        args: tuple[Any, ...],
        limit: int,
        batch_size: int,
    ) -> None:
        self.tried: dict[int, Candidate] = {}
        self._make_step, self._args = make_step, args
        self._limit, self._batch_size = limit, batch_size
        self._causes: list[Exception] = []

    def smallest_that_fits(self, todo: list[int]) -> int | None:
        """The smallest candidate that fits, if the need falls after the first one."""
        answer, rest, at = None, todo, 0
        while rest:
            k = rest[at]
            found = self._measured(k)
            if found.fits:
                answer, rest = k, rest[:at]
            elif found.error and not _is_too_large(found):
                rest = rest[:at] + rest[at + 1 :]  # which says nothing about memory
            else:
                rest = rest[at + 1 :]
            at = len(rest) // 2
        return answer

    def nothing_fits(self, page: str) -> NoReturn:
        """Raises, because there is no answer."""
        needs = [(c.bytes, k) for k, c in self.tried.items() if c.bytes is not None]
        if needs:
            need, k = min(needs)
            said = (
                f"no candidate does: the smallest need is {format_bytes(need)} "
                f"({need} bytes), with num_microbatches={k}"
            )
        elif all(map(_is_too_large, self.tried.values())):
            said = "the compiler says of every candidate that it does not"
        else:
            k = min(self.tried)
            raise ValueError(
                f"At least one candidate must compile, but all {len(self.tried)} that "
                f"were tried failed; num_microbatches={k} with "
                f"{(self.tried[k].error or '').rstrip('.')}. "
                "Call make_step yourself, and its lower(*args)."
            ) from self._causes[0]
        raise NothingFitsError(
            f"The step must fit into {format_bytes(self._limit)}, but {said}. Allow "
            "more micro-batches, donate the arguments that the step replaces, use "
            f"jax.checkpoint, or shard over more devices.\n{page}"
        ) from (None if needs else self._causes[0])

    def _compiled(self, k: int) -> tuple[Any, Any, list[str]]:
        """The step of a candidate, compiled if it can be, and what is said of it."""
        with notes.recorded() as lines, notes.batches() as batches:
            try:
                step = self._make_step(k)
                lower = getattr(step, "lower", None)
                lowered = None if lower is None else lower(*self._args)
            finally:
                pairs = [sorted((self._batch_size, rows)) for rows in batches]
                if batches and all(many % few for few, many in pairs):
                    raise _BatchSizeError(
                        "batch_size must be how many rows the step's batch has, but it "
                        f"is {self._batch_size}, and value_and_grad got a batch of "
                        f"{batches[0]}. Pass that number, or other arguments."
                    )
            return step, None if lowered is None else lowered.compile(), lines

    def _measured(self, k: int) -> Candidate:
        """Compiles a candidate, and says what it needs."""
        say = functools.partial(print, file=sys.stderr, flush=True)
        say(f"plan: num_microbatches={k}: compiling ...", end="")
        start = time.perf_counter()
        try:
            step, compiled, lines = self._compiled(k)
        except _BatchSizeError as error:
            raise ValueError(str(error)) from None
        except Exception as error:  # of the user's code or of the compiler: reported
            self._causes.append(error)
            message = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
            found = Candidate(k, error=message.splitlines()[0])
            outcome = f"failed: {found.error}"
        else:
            analysis = _analysed(k, step, compiled)
            kinds = "argument", "output", "alias"
            sizes: Any = {x: getattr(analysis, f"{x}_size_in_bytes") for x in kinds}
            found = Candidate(k, temporaries(analysis), **sizes, notes=tuple(lines))
            fits = (found.bytes or 0) <= self._limit
            found = dataclasses.replace(found, fits=fits)
            size = format_bytes(found.bytes or 0)
            outcome = f"{size}, {'fits' if fits else 'does not fit'}"
        seconds = time.perf_counter() - start
        say(f" {outcome} ({seconds:.1f} s)")
        self.tried[k] = dataclasses.replace(found, seconds=seconds)
        return self.tried[k]


def _analysed(k: int, step: Any, compiled: Any) -> Any:
    """What XLA says of the memory of a compiled step; raises if it says nothing."""
    if compiled is None:
        raise TypeError(
            "make_step must return a jitted function, but for num_microbatches="
            f"{k} it returned a {type(step).__name__}, which has no `lower`. Return "
            "jax.jit(step)."
        )
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError(
            "The backend must report the memory of compiled programs, but "
            f"{jax.default_backend()!r} reports none. Plan on another backend."
        )
    return analysis


def temporaries(analysis: Any) -> int:
    """The bytes that XLA reserves besides arguments and results.

    On TPUs `temp_size_in_bytes` is a fifth or so more than that. The total, which newer
    versions of jax report, is what libtpu checks against a device's memory. It is 0 for
    a program of a GPU that was read from JAX's compilation cache.
    """
    total = getattr(analysis, "total_allocation_bytes", None)
    if not total:
        return int(analysis.temp_size_in_bytes)
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(total - analysis.argument_size_in_bytes - results)


# -- Text ------------------------------------------------------------------------------


def _page(
    candidates: Sequence[Candidate], untried: Sequence[int], rows: int, verdict: str
) -> str:
    head = "micro-batches", "examples", "temp", "argument", "output", "alias", "needs"
    table: list[tuple[str, ...]] = [(*head, "")]
    for c in candidates:
        sizes = (c.temp, c.argument, c.output, c.alias, c.bytes)
        cells = ("-" if c.error else format_bytes(size or 0) for size in sizes)
        failed = c.error and not _is_too_large(c)
        fits = "failed" if failed else "fits" if c.fits else "too large"
        k = c.num_microbatches
        table.append((f"{k}", f"{rows // k}", *cells, fits))
    lines = []
    if untried:
        those = ", ".join(map(str, untried))
        lines.append(f"Not compiled, as the search did not need them: {those}.")
    for c in candidates:
        if c.error is not None:
            lines.append(f"num_microbatches={c.num_microbatches} failed: {c.error}")
    # The search allows for less memory with the smallest candidate, which it tries
    # first.
    sized = [(c.num_microbatches, c.bytes) for c in candidates[1:] if not c.error]
    for (few, small), (many, large) in itertools.pairwise(sized):
        if (large or 0) > (small or 0):
            lines.append(
                f"Memory rises from {few} to {many} micro-batches, but the search "
                "assumes that it falls. A candidate that was not compiled may fit. To "
                "be sure, pass the others one at a time."
            )
    # Most programs have the same notes: each is printed once.
    lines += dict.fromkeys(note for c in candidates for note in c.notes)
    return "\n".join(
        [*_text.columns(table), verdict, *itertools.chain(*map(_text.wrap, lines))]
    )


# -- Bytes and candidates --------------------------------------------------------------

_PREFIXES = "KMGTP"
_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(?:(?:([kmgtp])(i?))?b)?\s*", re.IGNORECASE)


def format_bytes(size: int) -> str:
    """The size in the largest binary unit of which it is at least one."""
    power = max(0, min((abs(size).bit_length() - 1) // 10, len(_PREFIXES)))
    if power == 0:
        return f"{size} B"
    return f"{size / 1024**power:.2f} {_PREFIXES[power - 1]}iB"


def parse_bytes(size: int | float | str) -> int:
    """Whole bytes, from a number or a string such as "16GiB"; otherwise it raises."""
    todo = 'Pass bytes, or a string such as "16GiB" (2^30 bytes) or "16GB" (10^9).'
    if isinstance(size, (bool, np.bool_)) or not isinstance(size, (numbers.Real, str)):
        raise TypeError(
            f"memory_limit must be a number of bytes or a string, but it is {size!r} "
            f"of type {type(size).__name__}. {todo}"
        )
    value: Any = size
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        number, prefix, binary = match.groups() if match else ("nan", None, None)
        power = 1 + _PREFIXES.index(prefix.upper()) if prefix else 0
        value = float(number) * (1024 if binary else 1000) ** power
    if not 1 <= value < math.inf:
        raise ValueError(
            "memory_limit must be a number, with one of the units B, KB, KiB, ..., PB, "
            "PiB or none, and it must be finite and at least one byte, but it is "
            f"{size!r}. {todo}"
        )
    return int(value)


def _device_limit() -> int:
    """The memory of the smallest local device."""
    devices = jax.local_devices()
    limits: list[Any] = [
        (device.memory_stats() or {}).get("bytes_limit") for device in devices
    ]
    if None in limits:
        raise ValueError(
            "memory_limit must be given if a device does not report its memory, and "
            f'{devices[limits.index(None)]} does not. Pass it, as "16GiB" for example.'
        )
    return int(min(limits))


def _check_candidates(candidates: Sequence[int] | None, batch_size: int) -> list[int]:
    """The candidates, from few micro-batches to many."""
    divisors = _checks.divisors(batch_size)
    if candidates is None:
        return divisors
    todo = f"Choose from {', '.join(map(str, divisors))}."
    if not isinstance(candidates, Iterable):
        raise TypeError(
            "candidates must be a sequence of ints, but it is "
            f"{_checks.brief(candidates)}. {todo}"
        )
    chosen = {_checks.check_int("each candidate", k, todo) for k in candidates}
    if not chosen:
        raise ValueError(f"candidates must not be empty, but they are. {todo}")
    for k in sorted(chosen - set(divisors)):
        raise ValueError(
            f"candidates must divide batch_size={batch_size}, but {k} does not. {todo}"
        )
    return sorted(chosen)
