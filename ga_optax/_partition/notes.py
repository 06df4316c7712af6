"""The records of a partition: equations computed whole, promises, failures."""

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import jax
from jax.extend import core, source_info_util

from ga_optax._partition.values import Rows
from ga_optax._passes import known, places, read, references


class Note(NamedTuple):
    """An equation that is computed whole, or that the user made a promise of."""

    name: str
    line: str
    nbytes: int  # of what the equation computes, or reads of all rows


class Drawn(NamedTuple):
    """A random draw of which each micro-batch has a separate key."""

    name: str
    line: str
    nbytes: int
    draw: Any  # the shape and the width of the bits of all rows
    rows: Rows


class Failure(NamedTuple):
    """An equation whose rule failed, or does not know this JAX, and the error."""

    equation: core.JaxprEqn
    error: Exception


@dataclasses.dataclass
class Records:
    """The records that all writers of one partition share.

    Attributes:
      notes: equations that are computed whole, and draws.
      promised: equations that are split because the user says so.
      failures: errors of rules, none of which is the user's code's.
      programs: programs that are written once, see `Writer.once`.
    """

    notes: list[Any] = dataclasses.field(default_factory=list)
    promised: list[Note] = dataclasses.field(default_factory=list)
    failures: list[Failure] = dataclasses.field(default_factory=list)
    programs: dict[Any, Any] = dataclasses.field(default_factory=dict)


def note_of(e: core.JaxprEqn, size: int, name: str | None) -> Note:
    """The note of an equation that computes, or reads, `size` numbers."""
    if name is None:
        name = "new_ref" if references.is_group(e) else known.hides(e)
    reads = f"what {read.name_of(e)} reads"
    name = name or (read.name_of(e) if e.outvars else reads)
    around = source_info_util.current_name_stack()
    types = [x.aval.dtype for x in e.outvars or e.invars if hasattr(x.aval, "dtype")]
    widest = max((x.itemsize for x in types), default=0)
    return Note(name, places.place_of(e.source_info, around), size * widest)


_failed: set[str] = set()


def unsaid(failures: Iterable[Failure]) -> Iterator[str]:
    """The warnings of failures, one for each primitive; given if all else worked."""
    for e, error in failures:
        name = e.primitive.name
        if name in _failed:
            continue
        _failed.add(name)
        yield (
            f"The rule of ga_optax for {name} failed with jax {jax.__version__}: "
            f"{type(error).__name__}: {error}. {name} at "
            f"{places.line_of(e.source_info)} is computed whole in each micro-batch "
            "instead: the result is right, but takes more memory. Use a newer ga_optax."
        )
