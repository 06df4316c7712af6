"""Checks of arguments. Every check raises before anything is traced.

An error has three parts: the requirement, the argument (value, shape, leaf path), and
what to do.
"""

import contextlib
import difflib
import functools
import inspect
import math
import numbers
import operator
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

P = ParamSpec("P")
R = TypeVar("R")

# -- Keywords --------------------------------------------------------------------------


# Options that differ between micro-batches.
_OF_ACCUMULATE = (
    *("weight_fn", "aux", "rng_argnums", "rng_argnames", "carry_argnums"),
    "num_real_microbatches",
)


def explains_keywords(fun: Callable[P, R]) -> Callable[P, R]:
    """`fun`, with errors for unknown keywords that list the known, and the nearest.

    And for arrays, which belong to the function that `fun` returns. A `__new__` has the
    name of its class in messages.
    """
    parameters = inspect.signature(fun).parameters
    name = fun.__qualname__.removesuffix(".__new__")
    options = list(parameters)[1:]

    @functools.wraps(fun)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for keyword in kwargs:
            if keyword not in parameters:
                meant = difflib.get_close_matches(keyword, options, 1)
                todo = f"Is it {meant[0]}?" if meant else "Leave it out."
                todo = "accumulate has it." if keyword in _OF_ACCUMULATE else todo
                raise TypeError(
                    f"The options of {name} must be among {', '.join(options)}, but "
                    f"{keyword} was passed. {todo} The page docs/migrating.md has what "
                    "the options of other libraries become."
                )
        more = args[1:] if options[0] == "num_microbatches" else ()
        if len(more) > 1 or any(map(np.ndim, jax.tree.leaves(more))):
            raise TypeError(
                f"{name} must get fun and num_microbatches alone, for it returns a "
                f"function of all else, but {len(args)} arguments came. Call it twice: "
                f"{name}(fun, num_microbatches)(params, batch)."
            )
        return fun(*args, **kwargs)

    return call


# -- Numbers and functions -------------------------------------------------------------


def is_int(value: Any) -> bool:
    """True for an integer that is no bool."""
    return isinstance(value, numbers.Integral) and not isinstance(
        value, (bool, np.bool_)
    )


def brief(value: Any) -> str:
    """A value on one line: the `repr`, or only the type if the `repr` is long."""
    text = repr(value)
    if len(text) <= 80 and "\n" not in text:
        return text
    if hasattr(value, "shape"):
        return f"an array of shape {np.shape(value)}"
    return f"an object of type {type(value).__name__}"


def check_type(name: str, value: Any, kind: type, todo: str) -> None:
    """Raises unless `value` is of type `kind`."""
    if not isinstance(value, kind):
        raise TypeError(
            f"{name} must be of type {kind.__name__}, but it is {brief(value)}. {todo}"
        )


def check_int(name: str, value: Any, todo: str) -> int:
    """Returns `value` as an int of at least 1, or raises."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:  # also for a traced integer
        raise TypeError(
            f"{name} must be an int, but it is {brief(value)} of type "
            f"{type(value).__name__}. {todo}"
        ) from None
    if number < 1:
        raise ValueError(f"{name} must be at least 1, but it is {number}. {todo}")
    return number


def check_integer(name: str, value: Any, todo: str) -> None:
    """Raises unless `value` is an integer scalar, which may be traced."""
    try:
        dtype = jax.dtypes.result_type(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer scalar, but it is {brief(value)}. {todo}"
        ) from None
    if (shape := jnp.shape(value)) != () or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"{name} must be an integer scalar, but it has shape {shape} and dtype "
            f"{dtype.name}. {todo}"
        )


def divisors(n: int) -> list[int]:
    """All divisors of `n`, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*small, *(n // d for d in small)})


def one_of(choices: Sequence[object]) -> str:
    """The choices in words: "1, 2 or 4"."""
    return " or ".join(", ".join(map(str, choices)).rsplit(", ", 1))


def uneven(rows: int, k: int) -> str:
    """The advice to drop or to add rows if k does not divide those of a batch."""
    drop = f"Or drop {rows % k} of the rows, or" if rows > k else "Or"
    return (
        f"{drop} add {-rows % k}, which a mask leaves out of the loss: "
        "jnp.where(mask, loss_of_rows, 0).sum() / mask.sum()."
    )


def of_list(batch: Any, k: int) -> str:
    """A question on a list of rows, each a tree, in place of a tree of arrays."""
    if not (isinstance(batch, (list, tuple)) and len(batch) >= max(k, 3)):
        return ""
    leaves, *others = (jax.tree.flatten(x) for x in batch)
    shapes = [list(map(np.shape, x)) for x, _ in (leaves, *others)]
    alike = all(x[1] == leaves[1] for x in others) and shapes[1:] == shapes[:-1]
    # Views of one batch have rows, as many in all of their leaves.
    rows = {(*x, 0)[0] for x in shapes[0]}
    are_views = len(rows) == 1 and all(not isinstance(n, int) or n >= k for n in rows)
    if jax.tree_util.all_leaves(batch) or not alike or are_views:
        return ""
    return (
        f" But the batch is a {type(batch).__name__} of {len(batch)} trees that are "
        "alike: are these the rows? Stack them: jax.tree.map(lambda *rows: "
        "jnp.stack(rows), *batch)."
    )


def or_else(question: str, todo: str) -> str:
    """A question, if there is one, and how the advice on its other answer begins."""
    return f"{question} If not, {todo.lower()}" if question else f" {todo}"


def check_num_microbatches(value: Any) -> int:
    """Returns the number of micro-batches as an int, or raises."""
    todo = "Pass an int that is known before tracing; 1 is the undivided batch."
    return check_int("num_microbatches", value, todo)


def check_callable(name: str, value: Any, signature: str, todo: str) -> None:
    """Raises unless `value` is a function; the message shows the `signature`."""
    if not callable(value):
        raise TypeError(
            f"{name} must be a function {signature}, but it is {brief(value)}. {todo}"
        )


# -- Trees -----------------------------------------------------------------------------


def leaf_name(path: tuple[Any, ...]) -> str:
    """The name of the leaf at a key path, for messages."""
    return f"leaf {jax.tree_util.keystr(path)}" if path else "the only leaf"


def named_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Pairs of a name and a leaf, for all leaves of a tree."""
    return [(leaf_name(path), x) for path, x in jax.tree.leaves_with_path(tree)]


_ARRAYS_ALONE = "Pass a tree of arrays alone, without this leaf."
_OF_EQUINOX = (
    "Pass arrays alone: eqx.partition(model, eqx.is_inexact_array) splits an Equinox "
    "module, and eqx.combine joins it, in fun for example. Or write "
    "eqx.filter_value_and_grad(ga_optax.microbatch(fun, k)), which takes modules."
)


def check_arrays(name: str, tree: Any, todo: str = "") -> None:
    """Raises unless JAX can compute with every leaf of `tree`."""
    for leaf, x in named_leaves(tree):
        try:
            isinstance(x, jax.ShapeDtypeStruct) or jax.typeof(x)
        except TypeError:
            leaf_of = f"{leaf} of {name}" if x is not tree else name
            dtype = f" and dtype {x.dtype}" if hasattr(x, "dtype") else ""
            # Modules of Equinox have functions as leaves, such as activations.
            todo = todo or (_OF_EQUINOX if callable(x) else _ARRAYS_ALONE)
            raise TypeError(
                f"{leaf_of} must be an array or a number, but it is of type "
                f"{type(x).__name__}{dtype}. {todo}"
            ) from None


def check_no_types(name: str, tree: Any) -> None:
    """Raises if a leaf of `tree` is a `jax.ShapeDtypeStruct`, which has no numbers."""
    for leaf, x in named_leaves(tree):
        if isinstance(x, jax.ShapeDtypeStruct):
            raise TypeError(
                f"{name} must hold numbers, but {leaf} is a type, {x}. Pass arrays; "
                "ga_optax.batch_dependencies and jax.eval_shape take types."
            )


_OF_PARAMS = "Pass the gradient with respect to the parameters of the state."


def check_structure(
    reference: Any, tree: Any, *, name: str, expected: str, todo: str = _OF_PARAMS
) -> None:
    """Raises unless `tree` has the structure of `reference`; names the leaf.

    Args:
      reference: the tree with the required structure.
      tree: the tree to check.
      name: the name of `tree` in the message.
      expected: the name of `reference` in the message.
      todo: the advice in the message.
    """
    required, actual = map(jax.tree.structure, (reference, tree))
    if actual == required:
        return
    names, leaves = ([leaf for leaf, _ in named_leaves(t)] for t in (reference, tree))
    differences = [f"{leaf} is missing" for leaf in names if leaf not in leaves]
    differences += [f"{x} is not in {expected}" for x in leaves if x not in names]
    if not differences:
        differences = [f"the containers differ: {required} required, {actual} received"]
    more = f", and {len(differences) - 1} more differ" if len(differences) > 1 else ""
    raise ValueError(
        f"{name} must have the tree structure of {expected}, but {differences[0]}"
        f"{more}. {todo}"
    )


def check_not_empty(name: str, tree: Any, todo: str) -> None:
    """Raises unless `tree` holds an array."""
    if not jax.tree.leaves(tree):
        raise ValueError(
            f"{name} must hold at least one array, but this {type(tree).__name__} has "
            f"no array. {todo}"
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
      tree: the tree to check.
      name: the name of `tree` in the message.
      expected: the name of `reference` in the message.
      todo: the advice in the message.
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
    """Raises unless the leaves of `tree` have the dtypes of `reference`."""
    pairs = zip(named_leaves(reference), jax.tree.leaves(tree), strict=True)
    for (leaf, x), y in pairs:
        required, actual = jnp.result_type(x), jnp.result_type(y)
        if required != actual:
            raise ValueError(
                f"{leaf} of {name} must have dtype {required.name}, as in {expected}, "
                f"but it has dtype {actual.name}. {todo}"
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
      grads: the tree to check.
      name: the name of `grads` in the message.
      expected: the name of `reference` in the message.
      integers: whether gradients of integer leaves may be integers.
    """
    todo, structure = _OF_PARAMS, jax.tree.structure
    is_pair = isinstance(grads, (tuple, list)) and len(grads) == 2
    if is_pair and structure(grads[1]) == structure(reference) != structure(grads):
        todo = "That is the pair which value_and_grad returns: pass the second of it."
    check_arrays(name, grads)
    check_arrays(expected, reference)
    check_leaves(reference, grads, name=name, expected=expected, todo=todo)
    pairs = zip(named_leaves(reference), jax.tree.leaves(grads), strict=True)
    for (leaf, param), grad in pairs:
        dtype = jax.dtypes.result_type(grad)
        both = is_integer(dtype) and is_integer(jax.dtypes.result_type(param))
        if not (integers and both):
            check_inexact(f"{leaf} of {name}", grad, _OF_INTEGERS)
        is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
        if is_complex and not jnp.iscomplexobj(param):
            raise TypeError(
                f"{leaf} of {name} must be real, as in {expected}, but it is complex "
                f"({dtype.name}). Take the real part, or make the parameter complex."
            )


def check_numbers(tree: Any, name: str, todo: str) -> None:
    """Raises unless all leaves of a tree are numbers, or bool."""
    for leaf, x in named_leaves(tree):
        dtype = jax.dtypes.result_type(x)
        if not (is_real(dtype) or jnp.issubdtype(dtype, jnp.complexfloating)):
            raise TypeError(
                f"{leaf} of {name} must be numbers, but it has dtype {dtype}. {todo}"
            )


def is_on_host(x: Any) -> bool:
    """True if an array lies in the host's memory, by its type."""
    return jax.typeof(x).memory_space == jax.memory.Space.Host


def check_on_device(name: str, tree: Any) -> None:
    """Raises if a leaf lies in the host's memory, where JAX adds nothing up."""
    for leaf, x in named_leaves(tree):
        if is_on_host(x):
            raise ValueError(
                f"{name} must lie in the memory of the device, but {leaf} lies in that "
                "of the host. Pass jax.device_put(leaf, jax.memory.Space.Device)."
            )


def is_integer(dtype: np.dtype) -> bool:
    """True for integer dtypes and bool."""
    return jnp.issubdtype(dtype, jnp.integer) or dtype == jnp.bool_


def is_real(dtype: Any) -> bool:
    """True for the dtypes of real numbers, and bool: not for keys, nor for float0."""
    return jnp.issubdtype(dtype, jnp.floating) or is_integer(dtype)


def nodes_of(kind: type, tree: Any) -> dict[str, Any]:
    """Every node of a type in a tree, by path."""
    pairs = jax.tree.leaves_with_path(tree, lambda node: isinstance(node, kind))
    return {jax.tree_util.keystr(path): x for path, x in pairs if isinstance(x, kind)}


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
    """Returns `weight` as an array, with True as 1 and False as 0; or raises."""
    if isinstance(weight, bool) or getattr(weight, "dtype", None) == jnp.bool_:
        weight = jnp.asarray(weight, jnp.int32)
    todo = (
        "Pass the number of examples (or tokens) in the micro-batch, such as the sum "
        "of a mask, or None for 1."
    )
    number = check_number("weight", weight, todo)
    if not isinstance(weight, jax.core.Tracer):
        value = float(jax.device_get(weight))
        if not value >= 0 or math.isinf(value):
            raise ValueError(
                f"weight must be finite and not negative, but it is {value}. {todo}"
            )
    return number


def is_none(x: Any) -> bool:
    """True for None: a leaf of a tree of options."""
    return x is None


def check_dtype(dtype: Any) -> Any:
    """Returns a dtype, or a tree of them, as JAX has it; raises if one is not floating.

    None, for the dtypes of the parameters, stays None.
    """
    return jax.tree.map(_floating, dtype, is_leaf=is_none)


def _floating(dtype: DTypeLike | None) -> np.dtype | None:
    if dtype is None:
        return None
    canonical: Any = dtype
    # Raised for an object that is no dtype, and for the dtype of keys.
    with contextlib.suppress(TypeError, ValueError):
        canonical = jax.dtypes.canonicalize_dtype(dtype)
    is_dtype = isinstance(canonical, np.dtype)
    if not (is_dtype and jnp.issubdtype(canonical, jnp.floating)):
        raise TypeError(
            "The accumulator dtype must be a floating dtype, but it is "
            f"{getattr(canonical, 'name', repr(canonical))}. Use float32, or bfloat16 "
            "to save memory; complex leaves get the complex counterpart."
        )
    return canonical


def parts_of_prefix(name: str, prefix: Any, tree: Any) -> list[tuple[Any, Any]]:
    """Pairs of a leaf of `prefix`, which may be None, and its part of `tree`."""
    leaves, structure = jax.tree.flatten(prefix, is_none)
    try:
        parts = structure.flatten_up_to(tree)
    except (TypeError, ValueError):
        raise ValueError(
            f"{name} must be one for all leaves, or a prefix of the parameters' tree, "
            f"but it is {structure}, and the parameters are "
            f"{jax.tree.structure(tree)}. Take the containers of the parameters, down "
            "to where one value holds for all that is below."
        ) from None
    return list(zip(leaves, parts, strict=True))


def is_raw_key(leaf: Any) -> bool:
    """True for a leaf with the type of keys of `jax.random.PRNGKey`."""
    return np.shape(leaf) in ((2,), (4,)) and jnp.result_type(leaf) == jnp.uint32


def is_single(tree: Any) -> bool:
    """True for a sequence of length one, of axes or of arguments."""
    return isinstance(tree, (tuple, list)) and len(tree) == 1
