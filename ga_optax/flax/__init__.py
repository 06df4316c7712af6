"""NNX gradients, train state and NNX optimizer: Flax's own, over micro-batches.

`value_and_grad` is `nnx.value_and_grad` over micro-batches: value, gradients, and what
the loss changes in modules are those of one call over all rows; `batch_dependencies`
shows where rows meet. `accumulate` adds micro-batches each by itself; what the loss
changes goes from one to the next. `TrainState` and `Optimizer` take micro-steps with
`ga_optax.apply_gradients`, so that inside a window only the accumulator is touched.
`verify` asks whether micro-batches give the gradient of a loss of a module. `plan` is
`ga_optax.plan`, which takes modules, and steps under `nnx.jit`, as they are.

It needs the extra `flax`. `ga_optax.flax` imports it when it is first used.
"""

try:
    import flax  # noqa: F401
except ImportError as error:
    raise ImportError(
        "ga_optax.flax needs Flax, but it cannot be imported. Install it: "
        'pip install "ga-optax[flax]".'
    ) from error

from ga_optax._compiled.plan import plan
from ga_optax.flax._modules import (
    accumulate,
    batch_dependencies,
    value_and_grad,
    verify,
)
from ga_optax.flax._states import Optimizer, TrainState

__all__ = [
    "Optimizer",
    "TrainState",
    "accumulate",
    "batch_dependencies",
    "plan",
    "value_and_grad",
    "verify",
]
