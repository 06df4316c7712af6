"""Gradient accumulation for JAX and Optax: exact, fast, one gradient buffer.

In one call, over the whole batch: `value_and_grad` is JAX's, for any loss, in the
    memory of a micro-batch and of what rows need of one another; `microbatch` does the
    same for any function. Where rows depend on one another, and the cost:
    `batch_dependencies`. To promise that rows of opaque code are independent:
    `rowwise`. A scan along the rows: `associative_scan`.
Separate micro-batches, some in a call: `accumulate`.
Accumulation across calls, in a host loop or inside `optax.chain`:
    `MultiSteps`, `apply_gradients`, `flush`, `has_updated`, `stats`, `from_optax`,
    `drop_window_if_not_finite`. The optimizer's state in the host's memory: `on_host`.
One merge across devices a window: `data_axis=` in all of these, `merge_across`. The
    collectives of a compiled step: `audit`.
A tree as blocks, and accumulation one block at a time: `blocks`.
The fewest micro-batches that fit into memory: `plan`.
Comparison with the gradient of the undivided batch, with the cause: `verify`.
The arithmetic of all functions: `accumulator`. The examples of a window: `data`.
Options for all calls: `config`.
Flax: `flax` (needs the extra `flax`, and is imported when first used).
"""

import importlib
from typing import TYPE_CHECKING, Any

from . import accumulator, blocks, config, data
from ._across.choices import drop_window_if_not_finite
from ._across.host import on_host
from ._across.multi_steps import MultiSteps, apply_gradients, flush
from ._across.state import (
    MultiStepsState,
    Stats,
    from_optax,
    grad_norm,
    has_updated,
    stats,
)
from ._calls.functions import (
    BatchDependencies,
    batch_dependencies,
    microbatch,
    value_and_grad,
)
from ._calls.separate import accumulate
from ._compiled.audit import Audit, Collective, audit
from ._compiled.plan import Candidate, NothingFitsError, Plan, plan
from ._devices.collectives import merge_across
from ._devices.meshes import DataAxis
from ._passes.associative_scan import associative_scan
from ._passes.rowwise import rowwise
from ._verify.diagnosis import Cause, LeafReport, Report, verify

if TYPE_CHECKING:
    from . import flax as flax  # a star import must not need it

__version__ = "0.1.0"  # that of pyproject.toml

__all__ = [
    "Audit",
    "BatchDependencies",
    "Candidate",
    "Cause",
    "Collective",
    "DataAxis",
    "LeafReport",
    "MultiSteps",
    "MultiStepsState",
    "NothingFitsError",
    "Plan",
    "Report",
    "Stats",
    "accumulate",
    "accumulator",
    "apply_gradients",
    "associative_scan",
    "audit",
    "batch_dependencies",
    "blocks",
    "config",
    "data",
    "drop_window_if_not_finite",
    "flush",
    "from_optax",
    "grad_norm",
    "has_updated",
    "merge_across",
    "microbatch",
    "on_host",
    "plan",
    "rowwise",
    "stats",
    "value_and_grad",
    "verify",
]


if not TYPE_CHECKING:  # for type checkers, a module with this function has any name

    def __getattr__(name: str) -> Any:
        if name != "flax":  # which needs an extra
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return importlib.import_module(".flax", __name__)


def __dir__() -> list[str]:
    return __all__
