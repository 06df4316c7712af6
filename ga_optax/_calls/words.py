"""Messages about a use: keywords of other libraries, and calls outside of `jit`.

And once in a process, in the log `ga_optax` at the level INFO, what this JAX lacks.
"""

import functools
import inspect
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

import jax
import numpy as np

from ga_optax._loop import in_place
from ga_optax._text import warn

_logger = logging.getLogger("ga_optax")

P = ParamSpec("P")
R = TypeVar("R")


def _table(*rows: tuple[str, str]) -> dict[str, str]:
    """The advice on each keyword, from rows of keywords and an advice."""
    return {name: text for names, text in rows for name in names.split()}


_SIZES = "batch_size chunk_size micro_batch_size per_device_batch_size"
_KEYS = "key keys rng rngs seed"
_NUMBERS = (
    "k steps every_k chunks n_chunks num_chunks n_accum n_microbatches accum_steps "
    "accumulation_steps gradient_accumulation_steps accumulate_grad_batches"
)
_OTHERS = _table(
    (_NUMBERS, "The number of micro-batches is num_microbatches here"),
    (
        "every_k_schedule",
        "Pass num_microbatches; across calls, ga_optax.MultiSteps has a schedule",
    ),
    ("in_axes", "The name is batch_axes here"),
    (
        "argnums",
        "batch_argnums names the arguments with rows. Pass argnums to jax.grad",
    ),
    ("has_aux", "fun may return anything. Pass has_aux to jax.value_and_grad"),
    ("holomorphic allow_int", "ga_optax.value_and_grad has it"),
    (
        "static_argnums static_argnames",
        "Arguments that are no arrays go to fun as they are",
    ),
    ("donate_argnums donate_argnames", "Pass it to the jax.jit around the step"),
    (
        "mesh param_specs grad_specs sync logical_devices",
        "Pass data_axis=ga_optax.DataAxis(name, ...), which has it",
    ),
)
# Keywords that the functions of the whole batch have no need of.
_OF_WHOLE = _table(
    (_SIZES, "The rows of a micro-batch are microbatch_size here"),
    (_KEYS, "Pass it to the function that this one returns"),
    (
        "weight_fn aux rng_argnums rng_argnames carry_argnums num_real_microbatches",
        "fun sees all rows. For micro-batches by themselves ga_optax.accumulate has it",
    ),
    ("whole_batch", "The gradient is always that of the whole batch"),
    ("axis_name", "Leave it out: fun sees all rows, and needs no collectives"),
)
# Keywords that micro-batches, each by itself, have no need of.
_OF_EACH = _table(
    (
        f"{_SIZES} microbatch_size",
        "Pass num_microbatches: an accumulator takes any number of them",
    ),
    (_KEYS, "rng_argnums and rng_argnames name arguments that are keys"),
    (
        "whole_batch axis_name residual_bytes",
        "ga_optax.value_and_grad gives the gradient of the whole batch, for any loss",
    ),
    ("accumulator_dtype", "Pass it to ga_optax.accumulator.init(params, dtype)"),
    ("carry_argnums", "What fun changes in NNX objects is carried already"),
)
_OF_VERIFY = _OF_EACH | _table(
    (f"{_KEYS} rng_argnums rng_argnames", "Pass a key as rng="),
    (
        "argnums batch_argnums batch_argnames carry_argnums",
        "fun takes params and batch alone, so let it close over all else",
    ),
)
_TABLES: Mapping[str, dict[str, str]] = {"accumulate": _OF_EACH, "verify": _OF_VERIFY}


def explains_keywords(fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, with errors for keywords of other libraries that name ours.

    And for arguments that belong to the function that it returns.
    """
    parameters = inspect.signature(fun).parameters
    means = _OTHERS | _TABLES.get(fun.__name__, _OF_WHOLE)
    names = list(parameters)[1:]

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name in kwargs:
            if name not in parameters and name in means:
                raise TypeError(
                    f"The options of {fun.__name__} must be among {', '.join(names)}, "
                    f"but {name} was passed. {means[name]}."
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
            warn(
                "A function that value_and_grad or accumulate returned was called "
                "outside of jax.jit again. Each such call traces the loss and compiles "
                "the loop over micro-batches anew. Put the function, or the training "
                "step around it, in jax.jit (or nnx.jit)."
            )
        return out

    return call


@functools.cache
def log_what_is_missing() -> None:
    """Logs what this version of JAX cannot do."""
    if not in_place.HAS_REFS:
        _logger.info(
            "jax %s cannot add gradients in place: inside a call, a model that scans "
            "over its layers needs a second gradient buffer. Results are the same. "
            "With Python 3.12 install jax 0.11.1 or newer.",
            jax.__version__,
        )
