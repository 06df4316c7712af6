"""What is said of a use: keywords that there are elsewhere, calls outside of `jit`.

And once in a process, in the log `ga_optax` at the level INFO, what this JAX lacks.
"""

import functools
import inspect
import itertools
import logging
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from ga_optax._loop import in_place

_logger = logging.getLogger("ga_optax")

P = ParamSpec("P")
R = TypeVar("R")

# What other libraries call the rows of a micro-batch, and the keys of random numbers.
_SIZES = (
    "batch_size",
    "chunk_size",
    "micro_batch_size",
    "per_device_batch_size",
    "per_device_train_batch_size",
    "train_micro_batch_size_per_gpu",
)
_RNGS = ("key", "keys", "rng", "rngs", "rng_key", "prng_key", "seed")
_NUMBER = "The number of micro-batches is num_microbatches here"
# What other libraries call it.
_OTHERS: Mapping[str, str] = {
    "every_k_schedule": f"{_NUMBER}; across calls, ga_optax.MultiSteps has a schedule",
    "in_axes": "It is called batch_axes here",
    "weight": "Pass weight_fn=, a function of the batch arguments, to "
    "ga_optax.accumulate",
    "argnums": "What has rows is batch_argnums, and jax.grad differentiates the result",
    "argnames": "What has rows is batch_argnames here",
    "has_aux": "fun may return anything, and jax.value_and_grad takes the result",
    **dict.fromkeys(
        ("holomorphic", "allow_int"),
        "ga_optax.value_and_grad has it, as jax.value_and_grad has",
    ),
    **dict.fromkeys(
        ("static_argnums", "static_argnames"),
        "What is no array goes to fun as it came",
    ),
    **dict.fromkeys(
        ("donate_argnums", "donate_argnames", "in_shardings", "out_shardings"),
        "Pass it to the jax.jit around the step",
    ),
    **dict.fromkeys(
        ("mesh", "param_specs", "grad_specs", "sync", "logical_devices"),
        "Pass data_axis=ga_optax.DataAxis(name, ...), which has it",
    ),
    **dict.fromkeys(
        (
            "k",
            "steps",
            "chunks",
            "num_chunks",
            "n_chunks",
            "num_steps",
            "num_micro_steps",
            "n_microbatches",
            "microbatches",
            "accum",
            "grad_accum",
            "gradient_accumulation",
            "gradient_accumulation_steps",
            "accumulate_grad_batches",
            "grad_accum_steps",
            "accumulation_steps",
            "accum_steps",
            "every_k",
            "n_accum",
            "num_micro_batches",
            "num_minibatches",
        ),
        _NUMBER,
    ),
}
_ITS = "ga_optax.accumulate has it, whose micro-batches are each by themselves"
_KEYS = "fun gets its keys as they are, and draws what the whole batch draws"
# What the functions of the whole batch have no need of.
_OF_WHOLE = {
    **dict.fromkeys(_SIZES, "The rows of a micro-batch are microbatch_size here"),
    **dict.fromkeys(_RNGS, "Pass it to the function that this one returns"),
    "weight_fn": "The gradient is that of the loss as it is written, which divides by "
    f"its own counts; {_ITS}",
    "aux": f"aux comes back as fun returns it for all rows; {_ITS}",
    "rng_argnums": f"{_KEYS}; {_ITS}",
    "rng_argnames": f"{_KEYS}; {_ITS}",
    "carry_argnums": "Return what is new as aux, with has_aux=True, for fun sees all "
    f"rows at once; {_ITS}",
    "num_real_microbatches": f"All rows count; {_ITS}",
    "whole_batch": "The gradient is always that of the whole batch",
    "axis_name": "Leave it out: fun sees all rows, and needs no collectives over "
    "micro-batches",
}
# And those of micro-batches each by itself.
_THAT = "ga_optax.value_and_grad gives the gradient of the whole batch, for any loss"
_BY_NUMBER = "Pass num_microbatches: an accumulator takes any number of them"
_OF_EACH = {
    **dict.fromkeys((*_SIZES, "microbatch_size"), _BY_NUMBER),
    **dict.fromkeys(_RNGS, "rng_argnums and rng_argnames name arguments that are keys"),
    "whole_batch": _THAT,
    "axis_name": _THAT,
    "residual_bytes": f"Rows do not meet in micro-batches each by itself; {_THAT}",
    "accumulator_dtype": "It is the accumulator's: "
    "ga_optax.accumulator.init(params, dtype)",
    "carry_argnums": "What fun changes in NNX objects is carried already",
}
_OF_VERIFY = {
    **_OF_EACH,
    **dict.fromkeys((*_RNGS, "rng_argnums", "rng_argnames"), "Pass a key as rng="),
    **dict.fromkeys(
        ("argnums", "batch_argnums", "batch_argnames", "carry_argnums"),
        "fun takes params and batch alone, so let it close over all else",
    ),
}


def explains_keywords(fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, which says of a keyword that it does not have what there is instead.

    And of arguments that belong to the function that it returns, that they do.
    """
    parameters = inspect.signature(fun).parameters
    own = {"accumulate": _OF_EACH, "verify": _OF_VERIFY}.get(fun.__name__, _OF_WHOLE)
    means = {**_OTHERS, **own}
    names = list(parameters)[1:]

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters and name in means:
                raise TypeError(
                    f"The options of {fun.__name__} must be among {', '.join(names)}, "
                    f"but {name} came. {means[name]}."
                )
        more = args[1:] if names[0] == "num_microbatches" else ()
        if len(more) > 1 or any(map(np.ndim, jax.tree.leaves(more))):
            raise TypeError(
                f"{fun.__name__} must get fun and num_microbatches alone, for it "
                f"returns a function of all else, but {len(args)} arguments came. Call "
                f"it twice: {fun.__name__}(fun, num_microbatches)(params, batch)."
            )
        return fun(*args, **kwargs)

    return call


def warns_outside_jit(run: Callable[..., Any]) -> Callable[..., Any]:
    """`run`, which warns once if it is called outside of `jit` more than once."""
    calls = itertools.count(1)

    @functools.wraps(run)
    def call(*args: Any, **kwargs: Any) -> Any:
        out = run(*args, **kwargs)
        traced = isinstance(jax.tree.leaves(out)[0], jax.core.Tracer)
        compiles = not jax.config.jax_disable_jit  # pyrefly: ignore[missing-attribute]
        if compiles and not traced and next(calls) == 2:
            warnings.warn(
                "What value_and_grad or accumulate returned was called outside of "
                "jax.jit again. Every such call traces the loss and compiles the loop "
                "over micro-batches anew. Put it, or the training step around it, in "
                "jax.jit (or nnx.jit).",
                stacklevel=2,
            )
        return out

    return call


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
