"""One call: its arguments by role, checked before anything is traced.

    fun(*args, **kwargs)  =  fun of parameters, batch, keys, carry and others

`Call.of` checks; then what `fun` returns, taken apart and put together.
"""

import collections
import dataclasses
import functools
import itertools
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from .. import _checks, config
from .._devices import collectives
from .._devices.record import Devices
from .._loop import micro_step
from .._passes.equation import Divided
from .._text import is_first, listed, warn, warn_once
from . import batches
from .options import ROLES, Argument, Options

# == The call ==========================================================================

_OF_INTEGERS = (
    "Pass it as another argument, or allow_int=True, which ga_optax.value_and_grad has."
)


class Call(NamedTuple):
    """One call of the returned function: its arguments by role.

    Attributes:
      options: the options.
      args: the positional arguments.
      kwargs: the keyword arguments.
      roles: the positions and keywords of each role.
      batch_axes: along which axis each leaf of the batch arguments is split; None if
        it goes to each micro-batch whole, as it came.
      devices: the devices.
      held: the parameters as this device holds them, before they are gathered; () if
        they are not.
      rows: how many leaves of the batch are differentiated, too: the first of them.
      sums: True if gradients come in the dtypes of their sums.
      sees: gets the plan that runs, for a report; equations carry what a micro-batch
        holds of each result then. None for a call that runs.
      rest: how many rows one more micro-batch has, the last and smaller one; or 0.
      asked: the option that says how the batch is divided, and its value as it came.
      question: whether another argument is the batch, see `_question_on_batch`; or "".
    """

    options: Options
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, tuple[Argument, ...]]
    batch_axes: Sequence[int | None] = ()
    devices: Devices = Devices()
    held: Sequence[Any] = ()
    rows: int = 0
    sums: bool = False
    sees: Callable[[Any], None] | None = None
    rest: int = 0
    asked: tuple[str, int] = ("num_microbatches", 1)
    question: str = ""

    @classmethod
    def of(
        cls,
        options: Options,
        args: Any,
        kwargs: Any,
        hint: bool = False,
        types: bool = False,
    ) -> "Call":
        """Checks the arguments; raises before `fun` is traced.

        If `batch_argnums` is a `hint`, leaves that cannot be split go whole, and an
        argument without a role that has the rows of the batch is split as well. With
        `types`, for a report, arguments may be types.
        """
        optimize = options.optimize and config.optimize
        if optimize and not micro_step.HAS_REFS and is_first("references"):
            _logger.info(
                "jax %s cannot add gradients in place: inside a call, a model that "
                "scans over its layers needs a second gradient buffer. Results are the "
                "same. With Python 3.12 install jax 0.11.1 or newer.",
                jax.__version__,
            )
        options = options._replace(optimize=optimize)
        roles = options.roles(len(args), kwargs)
        call = cls(options, args, kwargs, roles, asked=options.asked)
        for i in itertools.chain(*roles.values()) if not types else ():
            _checks.check_no_types(batches.argument(i), call.at(i))
        for i in call.roles["argnums"]:
            check_parameters(i, call.at(i))
            _checks.check_arrays(batches.argument(i), call.at(i))
            for name, x in _checks.named_leaves(call.at(i)):
                _check_dtype(options, f"{name} of {batches.argument(i)}", x)
        if not jax.tree_util.all_leaves([dtypes := options.accumulator_dtype]):
            _checks.parts_of_prefix("accumulator_dtype", dtypes, call.params)
        for i in call.roles["carry_argnums"]:
            _checks.check_arrays(batches.argument(i), call.at(i), "Carry arrays alone.")
        call = call._replace(question=_question_on_batch(call, hint))
        call = call._replace(batch_axes=batches.axes_of(call, hint))
        devices = Devices.of(options.data_axis, call.params, call.batch)
        call = batches.checked_split(call._replace(devices=devices), hint)
        if call.num_of_device > 1:
            devices = devices.for_arrays((args, kwargs), optimize)
        return call._replace(devices=devices)

    def at(self, place: Argument) -> Any:
        """The argument at a position, or that of a keyword."""
        return self.kwargs[place] if isinstance(place, str) else self.args[place]

    def role(self, name: str) -> tuple[Any, ...]:
        """The arguments with a role."""
        return tuple(self.at(i) for i in self.roles[name])

    @property
    def without_role(self) -> list[Argument]:
        """The positions and keywords of the arguments that have no role."""
        with_role = {*itertools.chain(*self.roles.values())}
        return [i for i in (*range(len(self.args)), *self.kwargs) if i not in with_role]

    def leaves(self, role: str | None = None) -> dict[int, Any]:
        """The leaves of the arguments with a role, or of all, by their numbers.

        Leaves of the batch without an axis, and parameters without a gradient, are
        left out.
        """
        count, of_argument = itertools.count(), {}
        for i in (*range(len(self.args)), *self.kwargs):
            leaves = jax.tree.leaves(self.at(i))
            of_argument[i] = [(n, x) for x, n in zip(leaves, count, strict=False)]
        chosen: Iterable[Any] = of_argument if role is None else self.roles[role]
        pairs = [pair for i in chosen for pair in of_argument[i]]
        if role == "argnums":
            return {n: x for n, x in pairs if self._has_gradient(x)}
        if role != "batch_argnums":
            return dict(pairs)
        split = zip(pairs, self.batch_axes, strict=True)
        return dict(pair for pair, axis in split if axis is not None)

    @property
    def others(self) -> dict[int, Any]:
        """The leaves without a role that have to be operands of a region of a mesh.

        All else without a role, such as numbers and flags, goes to `fun` as it is.
        """
        known = {n for role in self.roles for n in self.leaves(role)}
        leaves = self.leaves().items()
        return {n: x for n, x in leaves if n not in known and collectives.is_operand(x)}

    @property
    def batch(self) -> list[Any]:
        """The leaves of the batch that are split."""
        return list(self.leaves("batch_argnums").values())

    @property
    def split_axes(self) -> list[int]:
        """The axes of `batch`."""
        return [axis for axis in self.batch_axes if axis is not None]

    @property
    def params(self) -> Any:
        """The arguments to differentiate, in the structure of the gradients.

        None stands for a leaf that has no gradient.
        """
        has, params = self._has_gradient, self._all_params
        return jax.tree.map(lambda x: x if has(x) else None, params)

    @property
    def _all_params(self) -> Any:
        params = self.role("argnums")
        return params[0] if isinstance(self.options.argnums, int) else params

    def _has_gradient(self, x: Any) -> bool:
        return not (self.options.allow_int and _is_integer(x))

    def with_zeros(self, grads: Any) -> Any:
        """Gradients, with zeros of `float0` for leaves of integers."""

        def gradient(x: Any, g: Any) -> Any:
            if self._has_gradient(x):
                return g
            return np.zeros(jnp.shape(x), jax.dtypes.float0)

        return jax.tree.map(gradient, self._all_params, grads)

    @property
    def num_of_device(self) -> int:
        """The number of micro-batches of a device, or of its logical devices."""
        return self.options.num_microbatches * (self.devices.logical or 1)

    @property
    def num_of_all(self) -> int:
        """The number of micro-batches of all devices together."""
        devices = self.devices
        return self.num_of_device * (1 if devices.by_compiler else devices.number)

    @property
    def is_undivided(self) -> bool:
        """True if one micro-batch has all rows."""
        return self.num_of_all == 1 and not self.rest

    def in_pieces(self, rows: int, k: int) -> "Call":
        """The call with so many rows in k micro-batches, or in fewer.

        All have as many rows, as few as k allows; the last has the rest.
        """
        full, rest = divmod(rows, -(-rows // k))
        options = self.options._replace(num_microbatches=full)
        return self._replace(options=options, rest=rest)

    def of_last(self) -> "Call":
        """The call of the last micro-batch, if it is smaller, by itself."""
        new = {}
        pairs = zip(self.leaves("batch_argnums").items(), self.split_axes, strict=True)
        for (number, x), axis in pairs:
            n = jnp.shape(x)[axis]
            new[number] = jax.lax.slice_in_dim(x, n - self.rest, n, axis=axis)
        one = self.with_leaves(new)
        return one._replace(options=self.options._replace(num_microbatches=1), rest=0)

    def devices_of_loop(self) -> Devices:
        """The devices, with what a loop has to know of the parameters."""
        names = [name for name, _ in _checks.named_leaves(self.params)]
        # Logical devices have the same bits with parameters that lie whole.
        own = self.held and not self.devices.logical
        gathered = [bool(place.dims) for place in self.devices.params if own]
        return self.devices._replace(names=names, gathered_once=gathered)

    def params_of(self, program: core.Jaxpr) -> list[jax.Array]:
        """The parameters, in the dtypes that a program takes.

        Those of lower precision are cast, and gathered once more: nobody reads the
        others then.
        """
        params = list(map(jnp.asarray, jax.tree.leaves(self.params)))
        for i, x in enumerate(params):
            aval: Any = program.invars[i].aval
            if aval.dtype != x.dtype:
                low, place = self.held[i].astype(aval.dtype), self.devices.params[i]
                [params[i]] = collectives.gather([low], [place])
        return params

    def split(self, membership: collectives.Membership) -> list[jax.Array]:
        """The batch as `[number of parts, ...]`, micro-batches along axis 0."""
        with jax.named_scope("split"):
            pairs, k = zip(self.batch, self.split_axes, strict=True), self.num_of_device
            if self.rest:
                end = -self.rest
                pairs = [(jax.lax.slice_in_dim(x, 0, end, axis=d), d) for x, d in pairs]
            return [self.devices.split(x, k, axis, membership) for x, axis in pairs]

    def with_leaves(self, new: Mapping[int, Any]) -> "Call":
        """The same call with other leaves in place of some, by their numbers.

        All else goes to `fun` as it came.
        """
        count = itertools.count()

        def renewed(tree: Any) -> Any:
            leaves, structure = jax.tree.flatten(tree)
            pairs = [(n, x) for x, n in zip(leaves, count, strict=False)]
            if not any(n in new for n, _ in pairs):
                return tree
            return structure.unflatten(new.get(n, x) for n, x in pairs)

        args = tuple(map(renewed, self.args))
        kwargs = {i: renewed(x) for i, x in self.kwargs.items()}
        return self._replace(args=args, kwargs=kwargs, held=())

    def on_device(self) -> "Call":
        """The same call, with the arguments of every role as this device has them.

        Parameters that the data axes shard come out whole; keys differ by device.
        """
        axes, devices = self.devices.bound, self.devices
        if not axes:
            return self
        new = {role: collectives.vary(self.leaves(role), axes) for role in self.roles}
        held = list(new["argnums"].values())
        params = collectives.gather(held, devices.params)
        new["argnums"] = dict(zip(new["argnums"], params, strict=True))
        if not devices.logical:
            device = jax.lax.axis_index(axes)
            keys = new["rng_argnums"].items()
            new["rng_argnums"] = {n: jax.random.fold_in(k, device) for n, k in keys}
        call = self.with_leaves(dict(collections.ChainMap(*new.values())))
        return call._replace(held=held)


def call_of(
    like: Call,
    fun: Callable[..., Any],
    divided: Divided,
    xs: Sequence[Any],
    wrt: Sequence[int] = (),
) -> Call:
    """A call like another, of a function of arrays, each of which is an argument."""
    split = [i for i, axis in enumerate(divided.axes) if axis is not None]
    moved = [i for i in split if i in wrt]
    params = tuple(i for i in wrt if i not in moved)
    batch = (*moved, *(i for i in split if i not in moved))
    roles: dict[str, tuple[Argument, ...]] = dict.fromkeys(ROLES, ())
    roles |= {"argnums": params, "batch_argnums": batch}
    options = like.options._replace(
        fun=fun, num_microbatches=divided.number, argnums=params, batch_argnums=batch
    )
    devices, number = like.devices, divided.number
    if devices.axes:
        devices = devices.with_params(tuple(xs[i] for i in params))
    call = Call(
        options,
        tuple(xs),
        {},
        roles=roles,
        batch_axes=[divided.axes[i] for i in batch],
        devices=devices.for_arrays(xs, options.optimize),
        rows=len(moved),
        sums=True,
        asked=like.asked,
        question=like.question,
    )
    pairs = zip(call.batch, call.split_axes, strict=True)
    lengths = [jnp.shape(x)[axis] for x, axis in pairs]
    # If one is not even, all have the rows of the batch, see `batches`.
    uneven = [n for n in lengths if isinstance(n, int) and n % number]
    return call.in_pieces(uneven[0], number) if uneven and not devices.axes else call


# -- The argument that is the batch ----------------------------------------------------


def _question_on_batch(call: Call, hint: bool) -> str:
    """A question on what may be the batch, or its rows, if the batch looks odd.

    Another argument may be the batch if it has as many rows in all of its leaves, as
    many as there are micro-batches or more, and the batch has leaves of other lengths.
    Warns if the question is asked in any case, and nothing would raise.
    """
    number, others = call.options.num_microbatches, call.without_role
    trees = call.role("batch_argnums")
    lengths = {(*np.shape(x), 0)[0] for x in jax.tree.leaves(trees)}
    # A size that `jax.export` leaves open is no int.
    is_right = all(not isinstance(n, int) or n >= number for n in lengths)
    params = () if is_right and len(lengths) == 1 else call.roles["argnums"]
    each = {i: _lengths(call.at(i)) for i in call.roles["batch_argnums"]}
    of_batch = set(itertools.chain(*each.values()))
    # One length may be right, unless it is shorter.
    least = max(number, 2, *(of_batch if len(of_batch) == 1 else ()))
    # A batch comes last. The variables of a Flax module are no argument of the user's.
    for i in (*reversed(others), *params):
        some = _lengths(call.at(i)) if i != "nnx_variables" else []
        if len(some) == 1 and some[0] >= least and of_batch.isdisjoint(some):
            came = " and ".join(
                f"{batches.argument(j)} has leaves of length {listed(n) or 'none'}"
                for j, n in each.items()
            )
            option = "batch_argnames" if isinstance(i, str) else "batch_argnums"
            todo = f"Pass {option}={i!r}."
            if i in params:
                todo = f"Then swap the arguments, or name that one in {option}."
            question = (
                f" But {came}, {batches.argument(i)} has {some[0]:,} in all: is that "
                f"the batch? {todo}"
            )
            _warn_of_copies(call, question)
            return question
    if len(each) > 1 or not isinstance(call.options.batch_axes, int):
        return ""
    [tree], asked = trees, call.options.asked
    rows = _checks.of_list(tree, number)
    if rows and hint and asked != ("num_microbatches", 1):
        warn_once(
            f"What is split should be arrays with an axis of rows.{rows} What comes "
            "out is right anyway, but saves nothing."
        )
    return rows


def _lengths(tree: Any) -> list[int]:
    """The lengths of the leaves along axis 0; scalars and keys have none."""
    shapes = [np.shape(x) for x in jax.tree.leaves(tree) if not _checks.is_raw_key(x)]
    return sorted({x[0] for x in shapes if x and isinstance(x[0], int)})


def _warn_of_copies(call: Call, question: str) -> None:
    """Warns if what is split holds keys alone, or leaves like those of the parameters.

    Such as the state of an optimizer, or a frozen model: if the batch is known then.
    """
    if call.options.asked == ("num_microbatches", 1):
        return

    def shapes(tree: Any) -> collections.Counter[Any]:
        leaves = [
            x for x in jax.tree.leaves(tree) if np.ndim(x) and not _checks.is_raw_key(x)
        ]
        return collections.Counter(map(np.shape, leaves))

    trees = call.role("batch_argnums")
    batch, has_rows = shapes(trees), any(map(np.ndim, jax.tree.leaves(trees)))
    others = [shapes(call.at(i)) for i in (*call.roles["argnums"], *call.without_role)]
    copied = [x for x in others if len({shape[0] for shape in x}) > 1 and x <= batch]
    if copied or (has_rows and not batch):
        what = "leaves like those of the parameters" if batch else "PRNG keys alone"
        warn_once(
            f"What is split should be the batch, but it has {what}.{question} "
            "What comes out is right anyway, but saves nothing."
        )


def _is_integer(x: Any) -> bool:
    """True if an array or a number has no gradient: integers, flags and keys."""
    return not jnp.issubdtype(jax.typeof(x).dtype, jnp.inexact)


def _check_dtype(options: Options, name: str, x: Any) -> None:
    """Raises unless a parameter has a dtype that the options ask for."""
    if options.allow_int and _is_integer(x):
        return
    dtype = jax.dtypes.result_type(x)
    if options.holomorphic and not jnp.issubdtype(dtype, jnp.complexfloating):
        raise TypeError(
            f"With holomorphic=True parameters must be complex, but {name} has dtype "
            f"{dtype}. Make it complex, or leave holomorphic out."
        )
    _checks.check_inexact(name, x, _OF_INTEGERS)


def check_parameters(place: Argument, tree: Any) -> None:
    """Raises if parameters of a Flax module come with other state of it."""
    # Flax is no requirement: who has not imported it has no module of it either.
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return
    nodes = _checks.nodes_of(nnx.Variable, tree)
    others = [(path, x) for path, x in nodes.items() if not isinstance(x, nnx.Param)]
    if 0 < len(others) < len(nodes):
        path, node = others[0]
        raise TypeError(
            f"What is differentiated must be parameters alone, but leaf {path} of "
            f"{batches.argument(place)} is of type {type(node).__name__}, and fun "
            "could not update it. Use the functions of ga_optax.flax, which take "
            "modules; or graph, params, rest = nnx.split(model, nnx.Param, ...), and "
            "nnx.merge(graph, params, rest, copy=True) in fun."
        )


# == Results of fun ====================================================================


def put_together(options: Options, value: tuple[Any, Any, Any]) -> Any:
    """Loss, carry (a tuple) and aux in the form in which `fun` returns them."""
    loss, carry, aux = value
    rest = [aux] if options.has_aux else []
    if options.carries:
        rest = [carry[0] if isinstance(options.carry_argnums, int) else carry, *rest]
    if not rest:
        return loss
    return loss, rest[0] if len(rest) == 1 else tuple(rest)


def taken_apart(
    options: Options, out: Any, any_aux: bool = False
) -> tuple[Any, Any, Any]:
    """The reverse of `put_together`: loss, carry and aux, checked.

    With `any_aux` its leaves may be anything, for they come back as they are.
    """
    carries, has_aux = options.carries, options.has_aux
    loss, carry, aux = out, (), ()
    form = _FORMS[carries, has_aux]
    if carries and has_aux:
        loss, rest = _pair(out, form)
        carry, aux = _pair(rest, form)
    elif carries:
        loss, carry = _pair(out, form)
    elif has_aux:
        loss, aux = _pair(out, form)
    if not any_aux:
        _checks.check_arrays("the aux that fun returns", aux, NO_ARRAY)
    check_number(loss, form)
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != ():
        raise ValueError(
            f"The loss must be a scalar, but it has shape {shape}. Return its mean."
        )
    is_complex = jnp.issubdtype(dtype, jnp.complexfloating)
    if options.holomorphic and not is_complex:
        raise TypeError(
            "The loss must be complex with holomorphic=True, but it has dtype "
            f"{dtype}. Return a complex loss, or leave holomorphic out."
        )
    if not (options.holomorphic or jnp.issubdtype(dtype, jnp.floating)):
        raise TypeError(
            f"The loss must be real and floating, but it has dtype {dtype}. Cast it to "
            "float32, or return its real part, or pass holomorphic=True, which "
            "ga_optax.value_and_grad has."
        )
    return loss, (carry,) if isinstance(options.carry_argnums, int) else carry, aux


NO_ARRAY = "Leave it out, or return a number in its place."  # of what `fun` returns

# What `fun` returns, by whether there are a carry and an aux.
_FORMS = {
    (False, False): "the loss",
    (False, True): "(loss, aux) with has_aux=True",
    (True, False): "(loss, carry) with carry_argnums",
    (True, True): "(loss, (carry, aux)) with carry_argnums and has_aux=True",
}


def check_number(loss: Any, form: str = "the loss") -> None:
    """Raises unless a loss, returned in this form, is an array or a number."""
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise TypeError(
            f"fun must return {form}, but its loss is {_checks.brief(loss)}. Return a "
            "number there. Pass has_aux=True if fun returns (loss, aux)."
        )


def _pair(out: Any, form: str) -> tuple[Any, Any]:
    if isinstance(out, (tuple, list)) and len(out) == 2:
        return out[0], out[1]
    raise TypeError(
        f"fun must return {form}, but it returned {_checks.brief(out)}. Return such a "
        "pair, or leave out the option."
    )


def check_carry(old: Any, new: Any) -> None:
    """Raises unless a carry has the tree, shapes and dtypes that it came with."""
    todo = "Return each carried argument with the tree, shapes and dtypes it came with."
    texts = {"name": "the carry", "expected": "its arguments", "todo": todo}
    _checks.check_leaves(old, new, **texts)
    _checks.check_dtypes(old, new, **texts)


# -- Of any aux ------------------------------------------------------------------------


def returning_pair(options: Options) -> Options:
    """The options of a function that returns `(loss, aux)`, a real loss and any aux.

    A leaf of the aux that is no array comes back as it is, as in `jax.value_and_grad`.
    A holomorphic loss has the gradient of its real part, so it comes with the aux.
    """

    @functools.wraps(options.fun)
    def fun(*args: Any, **kwargs: Any) -> Any:
        out = options.fun(*args, **kwargs)
        loss, _, aux = taken_apart(options, out, any_aux=True)
        aux = jax.tree.map(lambda x: x if isinstance(x, jax.Array) else _Static(x), aux)
        if options.holomorphic:
            return loss.real, (loss, aux)
        return loss, aux

    return options._replace(fun=fun, has_aux=True)


def as_returned(options: Options, value: tuple[Any, Any]) -> Any:
    """The result of `fun`, from such a pair; the options are those of `fun`."""
    loss, aux = value[1] if options.holomorphic else value
    if not options.has_aux:
        return loss
    is_static = lambda x: isinstance(x, _Static)  # noqa: E731
    return loss, jax.tree.map(
        lambda x: x.value if is_static(x) else x, aux, is_leaf=is_static
    )


@jax.tree_util.register_static
@dataclasses.dataclass(eq=False)
class _Static:
    """A node without leaves that holds what is no array of JAX's: a number, a text."""

    value: Any


# == Calls outside of jit, and an old JAX ==============================================
# What this JAX lacks is said once in a process, in the log `ga_optax`, at level INFO.

_logger = logging.getLogger("ga_optax")


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
