"""What a call says once in a process, in the log `ga_optax` at the level INFO."""

import functools
import logging
from typing import Any

import jax

from ga_optax._devices import meshes
from ga_optax._inside import in_place

_logger = logging.getLogger("ga_optax")


@functools.cache
def what_is_missing() -> None:
    """Says what this version of JAX cannot do."""
    if not in_place.HAS_REFS:
        _logger.info(
            "jax %s cannot add gradients in place: inside a call, a model that scans "
            "over its layers needs a second gradient buffer. Results are the same. "
            "With Python 3.12 install jax 0.11.1 or newer.",
            jax.__version__,
        )


def which_rows(everything: Any) -> None:
    """Says how a program splits the batch if nothing names a mesh."""
    traced = any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves(everything))
    if traced and not meshes.is_named(everything):
        _neighbours()


@functools.cache
def _neighbours() -> None:
    if jax.device_count() > 1:
        _logger.info(
            "This process has %d devices, but neither the context nor an argument "
            "names a mesh: micro-batches are neighbouring rows, as on one device. If "
            "the program is compiled for several of them, the batch is gathered on "
            "each. Call it inside jax.set_mesh(mesh), or pass data_axis=.",
            jax.device_count(),
        )
