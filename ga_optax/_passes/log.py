"""What is said of the program of a window: in the log, and to who records it."""

import contextlib
import contextvars
import logging
from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

from jax.extend import core

from ga_optax._passes import places

Item = TypeVar("Item")
_MOST = 4  # places that one sentence names

_logger = logging.getLogger("ga_optax")
_notes: contextvars.ContextVar[list[str]] = contextvars.ContextVar("_notes")
_alone: contextvars.ContextVar[list[tuple[str, str]]] = contextvars.ContextVar("_alone")


def info(sentence: str) -> None:
    """Logs a sentence about the program of a window, and hands it to `recorded`."""
    _logger.debug("%s", sentence)
    notes = _notes.get([])
    if sentence not in notes:
        notes.append(sentence)


@contextlib.contextmanager
def listed(variable: contextvars.ContextVar[list[Item]]) -> Iterator[list[Item]]:
    """A new list, which the variable holds inside."""
    found: list[Item] = []
    token = variable.set(found)
    try:
        yield found
    finally:
        variable.reset(token)


def recorded() -> contextlib.AbstractContextManager[list[str]]:
    """The sentences of every `note` inside, each once."""
    return listed(_notes)


_batches: contextvars.ContextVar[list[int]] = contextvars.ContextVar("_batches")


def batches() -> contextlib.AbstractContextManager[list[int]]:
    """How many rows every batch has of which a gradient is traced inside."""
    return listed(_batches)


def batch(rows: Any) -> None:
    """Hands a number of rows to `batches`, unless `jax.export` leaves it open."""
    if isinstance(rows, int):
        _batches.get([]).append(rows)


def left_alone(equation: core.JaxprEqn, why: str) -> None:
    """Says that the pass at hand does not change an equation, and why."""
    _alone.get([]).append((why, places.line_of(equation.source_info)))


@contextlib.contextmanager
def of_pass(name: str) -> Iterator[None]:
    """Notes what is left alone inside, by reason and with lines of the user's code."""
    with listed(_alone) as pairs:
        yield
    for why, lines in grouped(pairs):
        info(f"The pass {name!r} leaves alone {lines} ({why}).")


def grouped(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, str]]:
    """Of reasons and places: each reason, and the first of its places in words."""
    groups: dict[str, dict[str, None]] = {}
    for why, place in pairs:
        groups.setdefault(why, {})[place] = None
    return [(why, _some(list(places))) for why, places in groups.items()]


def _some(places: list[str]) -> str:
    more = f" and {len(places) - _MOST} more" if len(places) > _MOST else ""
    return ", ".join(places[:_MOST]) + more
