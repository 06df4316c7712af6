"""What fits: the fewest micro-batches with which a step fits into memory.

XLA decides at compile time which buffers a program needs, and says so:

    bytes(k)  =  temp + argument + output - alias

for one device, without running anything. More micro-batches mean smaller activations,
so bytes(k) falls with k, and a bisection finds the smallest k that fits. There is one
exception to that: a single micro-batch needs no accumulator, and may need less memory
than two. So the smallest candidate is tried first, and the bisection goes over the
others.
"""

import dataclasses
import itertools
import math
import numbers
import re
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import numpy as np

__all__ = ["Candidate", "Plan", "plan"]


class NothingFitsError(ValueError):
    """No candidate fits; the message is a page with the smallest need."""


class Step(Protocol):
    """A jitted function: what `make_step` returns."""

    def lower(self, *args: Any) -> Any:
        """As `jax.jit(f).lower`."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One candidate that was compiled; all sizes are bytes on one device.

    Attributes:
      num_microbatches: k.
      temp: what XLA allocates besides arguments and results.
      argument: the arguments.
      output: the results.
      alias: the part of the results that lies in donated arguments.
      fits: whether `bytes` is at most the limit.
      error: why there are no sizes, where making or compiling the step failed.
      seconds: how long it took to trace and compile.
    """

    num_microbatches: int
    temp: int = 0
    argument: int = 0
    output: int = 0
    alias: int = 0
    fits: bool = False
    error: str | None = None
    seconds: float = 0.0

    @property
    def bytes(self) -> int | None:
        """The sum temp + argument + output - alias, or `None` where it failed."""
        if self.error is not None:
            return None
        return self.temp + self.argument + self.output - self.alias


@dataclasses.dataclass(frozen=True)
class Plan:
    """What `plan` found; `str` of it is a table.

    Attributes:
      num_microbatches: the answer: the fewest micro-batches that fit.
      batch_size: examples in a batch.
      memory_limit: bytes that there are, on one device.
      candidates: every candidate that was compiled, by `num_microbatches`.
      untried: the candidates that did not have to be compiled.
    """

    num_microbatches: int
    batch_size: int
    memory_limit: int
    candidates: tuple[Candidate, ...]
    untried: tuple[int, ...]

    @property
    def chosen(self) -> Candidate:
        """The candidate of the answer."""
        return next(
            c for c in self.candidates if c.num_microbatches == self.num_microbatches
        )

    @property
    def bytes(self) -> int:
        """What the answer needs, on one device."""
        needed = self.chosen.bytes
        assert needed is not None
        return needed

    @property
    def microbatch_size(self) -> int:
        """Examples in a micro-batch of the answer."""
        return self.batch_size // self.num_microbatches

    @property
    def failed(self) -> tuple[Candidate, ...]:
        """The candidates that could not be made or compiled."""
        return tuple(c for c in self.candidates if c.error is not None)

    @property
    def rising(self) -> tuple[tuple[int, int], ...]:
        """Pairs (k, larger k) of which the second needs more memory than the first.

        Of two next to each other in `candidates`. A pair that begins with the smallest
        candidate of all is left out: a single micro-batch has no accumulator, and the
        search allows for that.
        """
        return _rising(self.candidates, self.untried)

    def __str__(self) -> str:
        return _page(
            self.candidates,
            self.batch_size,
            f"num_microbatches={self.num_microbatches} of {self.microbatch_size} "
            f"examples needs {format_bytes(self.bytes)} of "
            f"{format_bytes(self.memory_limit)}.",
            _notes(self.candidates, self.untried),
        )


def plan(
    make_step: Callable[[int], Step],
    *args: Any,
    batch_size: int,
    memory_limit: int | float | str | None = None,
    candidates: Sequence[int] | None = None,
) -> Plan:
    """Finds the fewest micro-batches with which a step fits into memory.

    Compiles, and runs nothing. Fewest is fastest: every further micro-batch makes the
    matrices smaller.

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

    **Cost.** One compilation where the smallest candidate fits, else
    1 + ⌈log2(candidates)⌉ at the most: 4 for 1, 2, 4, ..., 64. Every compilation is
    reported on stderr.

    **Exactness.** The sizes are those of the compiled program, to the byte. Not in
    them: what else lies on the device, such as the batch that is loaded meanwhile, the
    runtime's own memory and fragmentation. So leave room on a GPU: 0.9 of its memory.
    That fewer micro-batches do not fit is taken from those that were compiled, as
    memory falls with more micro-batches. Where it was seen not to, the plan says so.

    Args:
      make_step: `num_microbatches -> ` a jitted function of `args`. Donate in it what
        you donate in training.
      *args: its arguments: arrays, or `jax.ShapeDtypeStruct`, with shardings where
        there are any.
      batch_size: examples in a batch. Every candidate has to divide it.
      memory_limit: bytes on one device: a number, or a string such as "16GiB" (GiB =
        2^30 bytes, GB = 10^9). `None` takes the device's own limit, the smallest of
        them where there are several; a CPU has none.
      candidates: the numbers of micro-batches to choose from. `None` takes all
        divisors of `batch_size`.

    Returns:
      The `Plan`.

    Raises:
      ValueError: where nothing fits (the message says how much the smallest needs),
        where an argument has no meaning, or where no candidate could be compiled.
      TypeError: where an argument, or what `make_step` returns, has the wrong type.
    """
    batch_size = _check_batch_size(batch_size)
    limit = parse_bytes(_device_limit() if memory_limit is None else memory_limit)
    todo = _check_candidates(candidates, batch_size)
    if not callable(make_step):
        raise TypeError(
            "make_step must be a function num_microbatches -> jitted function, but it "
            f"is {make_step!r}. Pass the function that builds your step."
        )

    tried: dict[int, Candidate] = {}
    causes: list[Exception] = []

    def fits(k: int) -> bool | None:
        """Whether k fits; `None` where it could not be tried."""
        print(f"plan: num_microbatches={k}: compiling ...", end="", file=sys.stderr)
        sys.stderr.flush()
        candidate, cause = _try(make_step, args, k, limit)
        tried[k] = candidate
        if cause is not None:
            causes.append(cause)
        print(f" {_outcome(candidate)} ({candidate.seconds:.1f} s)", file=sys.stderr)
        too_large = candidate.error is not None and _out_of_memory(candidate.error)
        return candidate.fits if candidate.error is None or too_large else None

    answer = _smallest_that_fits(todo, fits)
    seen = tuple(tried[k] for k in sorted(tried))
    untried = tuple(k for k in todo if k not in tried)
    if answer is None:
        if all(c.error is not None for c in seen):
            raise ValueError(
                f"At least one candidate must compile, but all {len(seen)} that were "
                f"tried failed; num_microbatches={seen[0].num_microbatches} with "
                f"{seen[0].error}. Call make_step yourself, and its lower(*args)."
            ) from causes[0]
        need, k = min(
            (c.bytes, c.num_microbatches) for c in seen if c.bytes is not None
        )
        raise NothingFitsError(
            f"The step must fit into {format_bytes(limit)}, but no candidate does: the "
            f"smallest need is {format_bytes(need)} ({need} bytes), with "
            f"num_microbatches={k}. Allow more micro-batches, donate the arguments "
            "that the step replaces, use jax.checkpoint, or shard over more devices.\n"
            + _page(seen, batch_size, "Nothing fits.", _notes(seen, untried))
        )
    return Plan(answer, batch_size, limit, seen, untried)


def _smallest_that_fits(
    todo: list[int], fits: Callable[[int], bool | None]
) -> int | None:
    """The smallest that fits; after the first one, the need is taken to fall."""
    answer, rest = None, list(todo)
    if fits(rest[0]):
        return rest[0]
    rest = rest[1:]
    while rest:
        middle = len(rest) // 2
        answered = fits(rest[middle])
        if answered is None:  # says nothing about the others
            del rest[middle]
        elif answered:
            answer, rest = rest[middle], rest[:middle]
        else:
            rest = rest[middle + 1 :]
    return answer


def _try(
    make_step: Callable[[int], Step], args: tuple[Any, ...], k: int, limit: int
) -> tuple[Candidate, Exception | None]:
    """Compiles one candidate, and reads what it needs."""
    start = time.perf_counter()
    try:
        step = make_step(k)
        lower = getattr(step, "lower", None)
        compiled = None if lower is None else lower(*args).compile()
    except Exception as error:  # of the user's code or of the compiler: reported
        message = f"{type(error).__name__}: {str(error).strip() or 'no message'}"
        seconds = time.perf_counter() - start
        return Candidate(k, error=message.splitlines()[0], seconds=seconds), error
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
    sized = Candidate(
        k,
        temp=int(analysis.temp_size_in_bytes),
        argument=int(analysis.argument_size_in_bytes),
        output=int(analysis.output_size_in_bytes),
        alias=int(analysis.alias_size_in_bytes),
        seconds=time.perf_counter() - start,
    )
    return dataclasses.replace(sized, fits=(sized.bytes or 0) <= limit), None


def _out_of_memory(error: str) -> bool:
    """Whether the compiler itself found that the program is too large, as on TPU."""
    return "RESOURCE_EXHAUSTED" in error


# -- Words for a reader ----------------------------------------------------------------


def _outcome(candidate: Candidate) -> str:
    if candidate.bytes is None:
        return f"failed: {candidate.error}"
    fits = "fits" if candidate.fits else "does not fit"
    return f"{format_bytes(candidate.bytes)}, {fits}"


def _page(
    candidates: Sequence[Candidate], batch_size: int, verdict: str, notes: list[str]
) -> str:
    head = ("micro-batches", "examples", "temp", "argument", "output", "alias", "needs")
    table: list[tuple[str, ...]] = [(*head, "")]
    for c in candidates:
        sizes = (c.temp, c.argument, c.output, c.alias, c.bytes)
        cells = tuple("-" if c.error else format_bytes(size or 0) for size in sizes)
        fits = "failed" if c.error else "fits" if c.fits else "too large"
        k = c.num_microbatches
        table.append((f"{k}", f"{batch_size // k}", *cells, fits))
    widths = [max(len(line[i]) for line in table) for i in range(len(table[0]))]
    lines = [
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in table
    ]
    return "\n".join(line.rstrip() for line in [*lines, verdict, *notes])


def _rising(
    candidates: Sequence[Candidate], untried: Sequence[int]
) -> tuple[tuple[int, int], ...]:
    smallest = min([c.num_microbatches for c in candidates] + [*untried])
    sized = [(c.num_microbatches, c.bytes) for c in candidates if c.bytes is not None]
    return tuple(
        (few, many)
        for (few, small), (many, large) in itertools.pairwise(sized)
        if few != smallest and large > small
    )


def _notes(candidates: Sequence[Candidate], untried: Sequence[int]) -> list[str]:
    notes = []
    if untried:
        listed = ", ".join(map(str, untried))
        notes.append(f"Not compiled, as the search did not need them: {listed}.")
    for c in candidates:
        if c.error is not None:
            notes.append(f"num_microbatches={c.num_microbatches} failed: {c.error}")
    for few, many in _rising(candidates, untried):
        notes.append(
            f"Memory rises from {few} to {many} micro-batches, which the search takes "
            "not to happen: candidates that were not compiled may fit. Pass them, one "
            "at a time, to be sure."
        )
    return notes


_UNITS = {"B": 1} | {
    f"{prefix}{kind}": base ** (power + 1)
    for power, prefix in enumerate("KMGTP")
    for kind, base in (("B", 1000), ("iB", 1024))
}


def format_bytes(size: int) -> str:
    """The size in the largest binary unit of which it is at least one."""
    power = max(0, min((abs(size).bit_length() - 1) // 10, 5))
    if power == 0:
        return f"{size} B"
    return f"{size / 1024**power:.2f} {'KMGTP'[power - 1]}iB"


def parse_bytes(size: int | float | str) -> int:
    """Whole bytes of a number, or of a string such as "16GiB"; raises elsewhere."""
    todo = 'Pass bytes, or a string such as "16GiB" (2^30 bytes) or "16GB" (10^9).'
    if isinstance(size, (bool, np.bool_)) or not isinstance(size, (numbers.Real, str)):
        raise TypeError(
            f"memory_limit must be a number of bytes or a string, but it is {size!r} "
            f"of type {type(size).__name__}. {todo}"
        )
    if isinstance(size, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([A-Za-z]*)\s*", size)
        units = {unit.lower(): factor for unit, factor in _UNITS.items()} | {"": 1}
        if match is None or match[2].lower() not in units:
            raise ValueError(
                "memory_limit must be a number, with one of the units "
                f"{', '.join(_UNITS)} or none, but it is {size!r}. {todo}"
            )
        value = float(match[1]) * units[match[2].lower()]
    else:
        value = float(size) if not isinstance(size, numbers.Integral) else int(size)
    if not value >= 1 or math.isinf(value):
        raise ValueError(
            f"memory_limit must be finite and at least one byte, but it is {size!r}. "
            f"{todo}"
        )
    return int(value)


# -- Checks ----------------------------------------------------------------------------


def _device_limit() -> int:
    """The memory of the smallest local device."""
    limits = []
    for device in jax.local_devices():
        stats = device.memory_stats()
        if not stats or "bytes_limit" not in stats:
            raise ValueError(
                "memory_limit must be given where the device does not tell its memory, "
                f'and {device} does not. Pass it, as "16GiB" for example.'
            )
        limits.append(int(stats["bytes_limit"]))
    return min(limits)


def _is_int(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(
        value, (bool, np.bool_)
    )


def _check_batch_size(batch_size: Any) -> int:
    todo = "Pass how many examples one step sees."
    if not _is_int(batch_size):
        raise TypeError(
            f"batch_size must be an int, but it is {batch_size!r} of type "
            f"{type(batch_size).__name__}. {todo}"
        )
    if batch_size < 1:
        raise ValueError(
            f"batch_size must be at least 1, but it is {batch_size}. {todo}"
        )
    return int(batch_size)


def _check_candidates(candidates: Sequence[int] | None, batch_size: int) -> list[int]:
    """The candidates, from few micro-batches to many."""
    divisors = sorted(
        {
            d
            for low in range(1, math.isqrt(batch_size) + 1)
            if batch_size % low == 0
            for d in (low, batch_size // low)
        }
    )
    if candidates is None:
        return divisors
    todo = f"Choose from {', '.join(map(str, divisors))}."
    listed = list(candidates)
    if not listed:
        raise ValueError(f"candidates must not be empty, but they are. {todo}")
    for k in listed:
        if not _is_int(k):
            raise TypeError(
                f"candidates must be ints, but one is {k!r} of type "
                f"{type(k).__name__}. {todo}"
            )
        if k < 1 or batch_size % k:
            raise ValueError(
                f"candidates must divide batch_size={batch_size}, but {k} does not. "
                f"{todo}"
            )
    return sorted({int(k) for k in listed})
