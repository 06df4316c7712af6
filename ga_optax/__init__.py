"""Gradient accumulation for JAX and Optax: exact, fast, one gradient buffer.

Accumulate across calls, in a host loop or inside `optax.chain`:
    `MultiSteps`, `apply_gradients`, `flush`, `has_updated`, `stats`, `from_optax`,
    `drop_window_if_not_finite`.
The arithmetic of all of them: `accumulator`.
Flax: `ga_optax.flax` (imported by name; it needs the extra `flax`).
"""

from ga_optax import accumulator
from ga_optax._multi_steps import (
    MultiSteps,
    MultiStepsState,
    Stats,
    apply_gradients,
    drop_window_if_not_finite,
    flush,
    from_optax,
    has_updated,
    stats,
)

__all__ = [
    "MultiSteps",
    "MultiStepsState",
    "Stats",
    "accumulator",
    "apply_gradients",
    "drop_window_if_not_finite",
    "flush",
    "from_optax",
    "has_updated",
    "stats",
]
