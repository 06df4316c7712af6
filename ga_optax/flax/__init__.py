"""NNX gradients, train state and NNX optimizer over micro-batches.

`value_and_grad` is `nnx.value_and_grad` over micro-batches: value, gradients, and
changes of modules are those of one call over all rows; `batch_dependencies` shows where
rows meet. `accumulate` computes each micro-batch separately, and hands changes of
modules from one micro-batch to the next. `TrainState` and `Optimizer` take micro-steps
with `ga_optax.apply_gradients`, so that inside a window only the accumulator is
touched. `verify` checks whether micro-batches give the gradient of a module's loss.
`plan` is `ga_optax.plan`, which takes modules, and steps under `nnx.jit`.

This module needs Flax. `import ga_optax` does not import it.
"""

try:
    import flax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ga_optax.flax needs Flax, but it cannot be imported. Install it: "
        'pip install "flax>=0.12.8".'
    ) from error

from .._compiled.plan import plan
from ._modules import accumulate, batch_dependencies, value_and_grad, verify
from ._states import Optimizer, TrainState

__all__ = [
    "Optimizer",
    "TrainState",
    "accumulate",
    "batch_dependencies",
    "plan",
    "value_and_grad",
    "verify",
]
