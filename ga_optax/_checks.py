"""What arguments must be. Every check raises before anything is traced.

An error says three things: what was required, what came (value, shape, leaf path), and
what to do.
"""

import contextlib
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

# -- Numbers and functions -------------------------------------------------------------


def is_int(value: Any) -> bool:
    """Whether `value` is an integer; a bool is none."""
    return isinstance(value, numbers.Integral) and not isinstance(
        value, (bool, np.bool_)
    )


def brief(value: Any) -> str:
    """A value on one line: its `repr`, or only its type if that is long."""
    text = repr(value)
    if len(text) <= 80 and "\n" not in text:
        return text
    if hasattr(value, "shape"):
        return f"an array of shape {np.shape(value)}"
    return f"an object of type {type(value).__name__}"


def check_type(name: str, value: Any, kind: type, todo: str) -> None:
    """Raises unless `value` is of a type of ours."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be of type {kind.__name__}, but it is {brief(value)}. {todo}"
        )


def check_int(name: str, value: Any, todo: str, *, least: int = 1) -> int:
    """Returns `value` as an int of at least `least`, or raises."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:  # a traced integer, too
        raise TypeError(
            f"{name} must be an int, but it is {brief(value)} of type "
            f"{type(value).__name__}. {todo}"
        ) from None
    if number < least:
        required = "not be negative" if least == 0 else f"be at least {least}"
        raise ValueError(f"{name} must {required}, but it is {number}. {todo}")
    return number


def check_step(step: Any, todo: str) -> Any:
    """Returns `step`, an integer scalar that may be traced, or raises."""
    try:
        dtype = jax.dtypes.result_type(step)
    except TypeError:
        raise TypeError(
            f"step must be an integer scalar, but it is {brief(step)}. {todo}"
        ) from None
    if (shape := jnp.shape(step)) != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"step must be an integer scalar, but it has shape {shape} and dtype "
            f"{dtype.name}. {todo}"
        )
    return step


def divisors(n: int) -> list[int]:
    """All divisors of `n`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def one_of(choices: Sequence[object]) -> str:
    """What to choose from, in words: "1, 2 or 4"."""
    return " or ".join(", ".join(map(str, choices)).rsplit(", ", 1))


def check_num_microbatches(value: Any) -> int:
    """Returns the number of micro-batches as an int, or raises."""
    todo = "Pass an int that is known before tracing; 1 is the undivided batch."
    return check_int("num_microbatches", value, todo)


def check_callable(name: str, value: Any, what: str, todo: str) -> None:
    """Raises unless `value` is a function; `what` says of what."""
    if not callable(value):
        raise TypeError(
            f"{name} must be a function {what}, but it is {brief(value)}. {todo}"
        )


# -- Trees -----------------------------------------------------------------------------


def leaf_name(path: tuple[Any, ...]) -> str:
    """How error messages name the leaf at a key path."""
    return f"leaf {jax.tree_util.keystr(path)}" if path else "the only leaf"


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """The leaves of a tree, each with its name."""
    return [(leaf_name(path), x) for path, x in jax.tree.leaves_with_path(tree)]


_ARRAYS_ALONE = "Pass a tree of arrays alone, and keep this elsewhere."
_OF_EQUINOX = (
    "Pass arrays alone: eqx.partition(model, eqx.is_inexact_array) splits an Equinox "
    "module, and eqx.combine joins it, in fun for example."
)


def check_arrays(name: str, tree: Any, todo: str = "") -> None:
    """Raises unless JAX can compute with every leaf of `tree`."""
    for leaf, x in named_leaves(tree):
        try:
            isinstance(x, jax.ShapeDtypeStruct) or jax.typeof(x)
        except TypeError:
            which = f"{leaf} of {name}" if x is not tree else name
            dtype = f" and dtype {x.dtype}" if hasattr(x, "dtype") else ""
            # Modules of Equinox have functions for leaves, such as activations.
            todo = todo or (_OF_EQUINOX if callable(x) else _ARRAYS_ALONE)
            raise TypeError(
                f"{which} must be an array or a number, but it is of type "
                f"{type(x).__name__}{dtype}. {todo}"
            ) from None


_OF_PARAMS = "Pass the gradient with respect to the parameters of the state."


def check_structure(
    reference: Any, tree: Any, *, name: str, expected: str, todo: str = _OF_PARAMS
) -> None:
    """Raises unless `tree` has the structure of `reference`; names the leaf.

    Args:
      reference: the tree with the required structure.
      tree: the tree that came.
      name: what the message calls `tree`.
      expected: what the message calls `reference`.
      todo: what the message says to do.
    """
    structure, received = map(jax.tree.structure, (reference, tree))
    if received == structure:
        return
    want, got = ([leaf for leaf, _ in named_leaves(t)] for t in (reference, tree))
    missing = [f"{leaf} is missing" for leaf in want if leaf not in got]
    extra = [f"{leaf} is not in {expected}" for leaf in got if leaf not in want]
    wrong = missing + extra
    if not wrong:
        wrong = [f"the containers differ: {structure} required, {received} received"]
    more = f", and {len(wrong) - 1} more differ" if len(wrong) > 1 else ""
    raise ValueError(
        f"{name} must have the tree structure of {expected}, but {wrong[0]}{more}. "
        f"{todo}"
    )


def check_not_empty(name: str, tree: Any, todo: str) -> None:
    """Raises unless `tree` holds an array."""
    if not jax.tree.leaves(tree):
        raise ValueError(
            f"{name} must hold at least one array, but it has none: it is of type "
            f"{type(tree).__name__}. {todo}"
        )


def check_leaves(
    reference: Any,
    tree: Any,
    *,
    name: str,
    expected: str,
    todo: str = _OF_PARAMS,
) -> None:
    """Raises unless `tree` has the structure and shapes of `reference`.

    Args:
      reference: the tree with the required leaves.
      tree: the tree that came.
      name: what the message calls `tree`.
      expected: what the message calls `reference`.
      todo: what the message says to do.
    """
    check_structure(reference, tree, name=name, expected=expected, todo=todo)
    pairs = zip(jax.tree.leaves(reference), jax.tree.leaves(tree), strict=True)
    for i, shapes in enumerate(tuple(map(jnp.shape, pair)) for pair in pairs):
        if shapes[0] != shapes[1]:
            raise ValueError(
                f"{named_leaves(reference)[i][0]} of {name} must have shape "
                f"{shapes[0]}, as in {expected}, but it has shape {shapes[1]}. {todo}"
            )


def check_dtypes(
    reference: Any, tree: Any, *, name: str, expected: str, todo: str
) -> None:
    """Raises unless the leaves of `tree` have the dtypes of those of `reference`."""
    pairs = zip(named_leaves(reference), jax.tree.leaves(tree), strict=True)
    for (leaf, want), got in pairs:
        due, dtype = jnp.result_type(want), jnp.result_type(got)
        if due != dtype:
            raise ValueError(
                f"{leaf} of {name} must have dtype {due.name}, as in {expected}, but "
                f"it has dtype {dtype.name}. {todo}"
            )


_OF_INTEGERS = (
    "Differentiate with respect to floating parameters, and pass zeros as the gradient "
    "of an integer one: jnp.zeros_like(parameter)."
)


def check_inexact(name: str, x: Any, todo: str) -> None:
    """Raises unless an array or a number is floating or complex."""
    dtype = jax.dtypes.result_type(x)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise TypeError(
            f"{name} must be floating or complex, but it has dtype {dtype}. {todo}"
        )


def check_gradients(
    reference: Any,
    grads: Any,
    *,
    name: str = "grads",
    expected: str = "the parameters",
    integers: bool = False,
) -> None:
    """Raises unless `grads` has the structure, shapes and kinds of `reference`.

    Args:
      reference: the tree with the required leaves.
      grads: the tree that came.
      name: what the message calls `grads`.
      expected: what the message calls `reference`.
      integers: whether gradients of integer leaves may be integers.
    """
    check_arrays(name, grads)
    check_arrays(expected, reference)
    check_leaves(reference, grads, name=name, expected=expected)
    pairs = zip(named_leaves(reference), jax.tree.leaves(grads), strict=True)
    for (leaf, want), got in pairs:
        which = f"{leaf} of {name}"
        dtype = jax.dtypes.result_type(got)
        whole = is_integer(dtype) and is_integer(jax.dtypes.result_type(want))
        if not (integers and whole):
            check_inexact(which, got, _OF_INTEGERS)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        if is_complex and not jnp.iscomplexobj(want):
            raise TypeError(
                f"{which} is complex ({dtype.name}), but {expected} hold a real leaf "
                "there. Take the real part, or make the parameter complex."
            )


def is_integer(dtype: np.dtype) -> bool:
    """Whether a dtype is one of integers or bool."""
    return jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_


def nodes_of(kind: type, tree: Any) -> dict[str, Any]:
    """Every node of a type in a tree, by its path."""
    pairs = jax.tree.leaves_with_path(tree, lambda node: isinstance(node, kind))
    found = ((path, node) for path, node in pairs if isinstance(node, kind))
    return {jax.tree_util.keystr(path): node for path, node in found}


def is_key(x: Any) -> bool:
    """True for one PRNG key, typed or raw."""
    if not isinstance(x, (jax.Array, np.ndarray, jax.ShapeDtypeStruct)):
        return False
    raw = x.dtype == jnp.uint32 and len(x.shape) == 1
    return raw or (jnp.issubdtype(x.dtype, jax.dtypes.prng_key) and x.shape == ())


# -- Weights and dtypes ----------------------------------------------------------------


def check_number(name: str, value: Any, todo: str) -> jax.Array:
    """Returns a real scalar, static or traced, as an array, or raises."""
    if isinstance(value, (bool, np.bool_)) or not isinstance(
        value, (numbers.Real, np.ndarray, jax.Array)
    ):
        raise TypeError(
            f"{name} must be a real number, but it is {value!r} of type "
            f"{type(value).__name__}. {todo}"
        )
    number = jnp.asarray(value)
    shape, dtype = number.shape, number.dtype
    if shape != ():
        raise ValueError(f"{name} must be a scalar, but it has shape {shape}. {todo}")
    if not (jnp.issubdtype(dtype, jnp.integer) or jnp.issubdtype(dtype, jnp.floating)):
        raise TypeError(
            f"{name} must be a real number, but it has dtype {dtype.name}. {todo}"
        )
    return number


def check_weight(weight: ArrayLike) -> jax.Array:
    """Returns `weight` as an array; raises if it is known not to be a weight.

    True counts 1, and False 0.
    """
    if isinstance(weight, bool) or getattr(weight, "dtype", None) == jnp.bool_:
        weight = jnp.asarray(weight, jnp.int32)
    todo = (
        "Pass how many examples (or tokens) the micro-batch holds, such as the sum of "
        "a mask, or None for 1."
    )
    number = check_number("weight", weight, todo)
    if not isinstance(weight, jax.core.Tracer):
        value = float(jax.device_get(weight))
        if not value >= 0 or math.isinf(value):
            raise ValueError(
                f"weight must be finite and not negative, but it is {value}. {todo}"
            )
    return number


def check_dtype(dtype: DTypeLike | None) -> np.dtype | None:
    """Returns `dtype` as JAX will use it; raises if it cannot hold gradients."""
    if dtype is None:
        return None
    known: Any = dtype
    with contextlib.suppress(TypeError):  # of what is no dtype
        known = jax.dtypes.canonicalize_dtype(dtype)
    if not (isinstance(known, np.dtype) and jnp.issubdtype(known, jnp.floating)):
        raise TypeError(
            "The accumulator dtype must be a floating dtype, but it is "
            f"{getattr(known, 'name', repr(known))}. Use float32, or bfloat16 to save "
            "memory; complex leaves take the complex counterpart by themselves."
        )
    return known
