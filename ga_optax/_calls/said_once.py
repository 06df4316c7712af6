"""What a call says once in a process, in the log `ga_optax` at the level INFO."""

import functools
import logging

import jax

from ga_optax._loop import in_place

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
