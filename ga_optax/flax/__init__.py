"""Train state, NNX optimizer and NNX gradients: Flax's own, for windows.

`TrainState` and `Optimizer` take micro-steps with `ga_optax.apply_gradients`, so that
inside a window only the accumulator is touched. `value_and_grad` and `accumulate` take
modules; what the loss changes in them goes from one micro-batch to the next, and back
into the modules. `verify` compares the gradients of a loss of a module, and
`batch_dependencies` shows where its rows meet. `plan` is `ga_optax.plan`, which takes
modules, and steps under `nnx.jit`, as they are.

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
from ga_optax.flax._modules import accumulate, batch_dependencies, value_and_grad
from ga_optax.flax._questions import verify
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
