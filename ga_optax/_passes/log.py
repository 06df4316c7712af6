"""Sentences about the program of a window, for the log and for who records them."""

import contextlib
import contextvars
import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from jax.extend import core

from ga_optax._passes import places

Item = TypeVar("Item")
_MAX_PLACES = 4  # in one sentence

_logger = logging.getLogger("ga_optax")
_notes: contextvars.ContextVar[list[str]] = contextvars.ContextVar("_notes")
_unchanged: contextvars.ContextVar[list[tuple[str, str]]]
_unchanged = contextvars.ContextVar("_unchanged")


def write(sentence: str, level: int = logging.DEBUG) -> None:
    """Logs a sentence about the program of a window, and hands it to `recorded`."""
    _logger.log(level, "%s", sentence)
    notes = _notes.get([])
    if sentence not in notes:
        notes.append(sentence)


@contextlib.contextmanager
def listed(variable: contextvars.ContextVar[list[Item]]) -> Iterator[list[Item]]:
    """A new list, which the variable holds inside of the context."""
    items: list[Item] = []
    token = variable.set(items)
    try:
        yield items
    finally:
        variable.reset(token)


def recorded() -> contextlib.AbstractContextManager[list[str]]:
    """The list of all sentences that are logged inside of the context, each once."""
    return listed(_notes)


_batches: contextvars.ContextVar[list[int]] = contextvars.ContextVar("_batches")


def batches() -> contextlib.AbstractContextManager[list[int]]:
    """The list of the rows of each batch whose gradient is traced in the context."""
    return listed(_batches)


def batch(rows: Any) -> None:
    """Adds a number of rows to `batches`, unless `jax.export` leaves it open."""
    if isinstance(rows, int):
        _batches.get([]).append(rows)


def left_alone(equation: core.JaxprEqn, why: str) -> None:
    """Notes that the current pass does not change an equation, and why."""
    _unchanged.get([]).append((why, places.line_of(equation.source_info)))


@contextlib.contextmanager
def of_pass(name: str) -> Iterator[None]:
    """Logs the equations that a pass leaves alone, by reason and with their lines."""
    with listed(_unchanged) as pairs:
        yield
    for why, lines in grouped(pairs):
        write(f"The pass {name!r} leaves alone {lines} ({why}).")


def grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Each reason, and a text that names the first places with this reason."""
    groups: dict[str, dict[str, None]] = {}
    for why, place in pairs:
        groups.setdefault(why, {})[place] = None
    return [(why, _some(list(places))) for why, places in groups.items()]


def _some(places: list[str]) -> str:
    rest = len(places) - _MAX_PLACES
    return ", ".join(places[:_MAX_PLACES]) + (f" and {rest} more" if rest > 0 else "")
