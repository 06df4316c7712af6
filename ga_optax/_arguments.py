"""Options and arguments of the fold inside a call: what came, and whether it fits.

Whatever can be said before `fun` is traced raises before. What `fun` returned is
checked when it was traced, and before anything runs.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ga_optax import _devices
from ga_optax._checks import (
    check_gradients,
    check_num_microbatches,
    check_structure,
    leaf_name,
)

# `jax.vjp(...).with_refs` transposes `lax.scan` correctly from jax 0.11.0 on (jax PR
# 38929), and a `custom_vmap` may have references inside it from 0.11.1 on.
HAS_REFS = jax.__version_info__ >= (0, 11, 1)

AUX = ("mean", "sum", "last", "stack")


# -- Options and arguments -------------------------------------------------------------


class Window(NamedTuple):
    """The options of a window."""

    fun: Callable[..., Any]
    num_microbatches: int
    argnums: int | Sequence[int]
    batch_argnums: int | Sequence[int]
    rng_argnums: int | Sequence[int]
    carry_argnums: int | Sequence[int]
    has_aux: bool
    weight_fn: Callable[..., ArrayLike] | None
    aux: Any
    in_place: bool | None
    data_axis: Any  # checked: a tuple of names
    sync: str
    mesh: Any
    param_specs: Any

    def checked(self) -> "Window":
        """The same, in one form; raises where an option does not fit."""
        if not callable(self.fun):
            raise TypeError(
                f"fun must be a function of the parameters and the batch, but it is "
                f"{self.fun!r}. Pass the loss function itself, not its value."
            )
        if self.weight_fn is not None and not callable(self.weight_fn):
            raise TypeError(
                "weight_fn must be a function of the batch arguments, but it is "
                f"{self.weight_fn!r}. Pass for example lambda batch: "
                "batch['mask'].sum(), or None to count every micro-batch as 1."
            )
        if self.in_place and not HAS_REFS:
            raise ValueError(
                "in_place=True needs jax >= 0.11.1, where lax.scan is transposed "
                "correctly with gradient references, but this is jax "
                f"{jax.__version__}. Use None: it works in place where that is right, "
                "with the same bits."
            )
        for mode in jax.tree.leaves(self.aux, is_leaf=lambda x: x is None):
            if not isinstance(mode, str) or mode not in AUX:
                raise ValueError(
                    f"aux must be one of {', '.join(map(repr, AUX))}, or a tree of "
                    f"those that is a prefix of the aux tree, but it holds {mode!r}. "
                    'Use "stack" to see the aux of every micro-batch.'
                )
        if self.sync not in ("last", "each"):
            raise ValueError(
                f'sync must be "last" or "each", but it is {self.sync!r}. Use "last" '
                'unless memory for a whole gradient is missing: then "each".'
            )
        data_axis = _devices.check_data_axis(self.data_axis)
        if not data_axis:
            for name, default in (("sync", "last"), ("mesh", None)):
                if getattr(self, name) != default:
                    raise ValueError(
                        f"{name} says how devices merge along data_axis, but data_axis "
                        "is None. Name the mesh axis that splits the batch, or leave "
                        f"{name} out."
                    )
            if self.param_specs is not None:
                raise ValueError(
                    "param_specs says how parameters are sharded along data_axis, but "
                    "data_axis is None. Name the mesh axis that splits the batch, or "
                    "leave param_specs out."
                )
        window = self._replace(
            data_axis=data_axis,
            num_microbatches=check_num_microbatches(self.num_microbatches),
            argnums=_positions("argnums", self.argnums),
            batch_argnums=_positions("batch_argnums", self.batch_argnums),
            rng_argnums=_positions("rng_argnums", self.rng_argnums),
            carry_argnums=_positions("carry_argnums", self.carry_argnums),
            in_place=HAS_REFS if self.in_place is None else self.in_place,
        )
        for name in ("argnums", "batch_argnums"):
            if getattr(window, name) == ():
                raise ValueError(
                    f"{name} must name at least one positional argument, but it is (). "
                    "Leave it out for the default, "
                    f"{name}={0 if name == 'argnums' else 1}."
                )
        window.roles(None)
        return window

    def roles(self, num_args: int | None) -> dict[str, tuple[int, ...]]:
        """Which positions have which role; raises where one is missing or has two."""
        owner: dict[int, str] = {}
        roles = {}
        for name in ("argnums", "batch_argnums", "rng_argnums", "carry_argnums"):
            positions = []
            for given in _sequence(getattr(self, name)):
                position = given
                if num_args is not None:
                    if not -num_args <= given < num_args:
                        raise ValueError(
                            f"{name} must name positional arguments of the call, but "
                            f"it names number {given}, and {num_args} came. Pass that "
                            f"argument by position, or change {name}."
                        )
                    position = given % num_args
                if position in owner:
                    raise ValueError(
                        f"{name} must not overlap {owner[position]}, but both name "
                        f"argument {position}. Give each argument one role: "
                        "differentiated, split, a key, or carried."
                    )
                owner[position] = name
                positions.append(position)
            roles[name] = tuple(positions)
        return roles


def _positions(name: str, value: Any) -> int | tuple[int, ...]:
    try:
        if isinstance(value, (tuple, list)):
            return tuple(operator.index(i) for i in value)
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an int or a sequence of ints, but it is {value!r}. Number "
            "the positional arguments of fun from 0."
        ) from None


def _sequence(positions: int | tuple[int, ...]) -> tuple[int, ...]:
    return (positions,) if isinstance(positions, int) else positions


class Call(NamedTuple):
    """One call of the returned function: its arguments by role, checked.

    Attributes:
      window: the options.
      args: the positional arguments.
      kwargs: the keyword arguments.
      roles: the positions of each role.
      mesh: the mesh whose data axes split this call's batch; None where there is no
        data axis, and inside a `shard_map` that binds it.
      where: how to merge the gradient of each parameter leaf over the data axes that
        are bound.
    """

    window: Window
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, tuple[int, ...]]
    mesh: Any
    where: Sequence[_devices.Placement] = ()

    @classmethod
    def make(cls, window: Window, args: Any, kwargs: Any) -> "Call":
        call = cls(window, args, kwargs, window.roles(len(args)), None)
        for position in call.roles["argnums"]:
            tree = args[position]
            check_gradients(tree, tree, name=f"argument {position}")
        for position in call.roles["rng_argnums"]:
            _check_keys(position, args[position])
        batch = {position: args[position] for position in call.roles["batch_argnums"]}
        mesh = None
        if window.data_axis:
            mesh = _devices.find_mesh(window.data_axis, window.mesh, batch)
        devices = 1 if mesh is None else _devices.num_devices(window.data_axis, mesh)
        _check_batch(window, devices, batch)
        if not window.data_axis:
            _check_not_split(batch)
        return call._replace(mesh=mesh)

    def role(self, name: str) -> tuple[Any, ...]:
        return tuple(self.args[position] for position in self.roles[name])

    def params(self) -> Any:
        """What to differentiate with respect to, in the structure of the result."""
        params = self.role("argnums")
        return params[0] if isinstance(self.window.argnums, int) else params

    def placed(self, total: Any) -> Any:
        """An accumulator at top level, sharded as `param_specs` says."""
        if self.window.param_specs is None:
            return total
        return _devices.constrain(total, self.window.param_specs, self.mesh)

    @property
    def axes(self) -> tuple[str, ...]:
        """The data axes that are bound: over which this call is one device's part."""
        return self.window.data_axis if self.mesh is None else ()

    def with_args(self, new: dict[int, Any]) -> "Call":
        args = list(self.args)
        for position, arg in new.items():
            args[position] = arg
        return self._replace(args=tuple(args))

    def on_device(self) -> "Call":
        """The same with every argument of a role made this device's own.

        Parameters that the data axes shard come out whole; keys differ by device.
        """
        axes = self.axes
        if not axes:
            return self
        batch = self.role("batch_argnums")
        known = _devices.checks_varying()
        split = frozenset().union(*map(_devices.varying, jax.tree.leaves(batch)))
        same = tuple(name for name in axes if name not in split)
        if known and same:
            raise ValueError(
                f"The batch must differ between the devices along {axes}, but it is "
                f"the same along {same}. Pass it to the shard_map with {axes} in its "
                "in_specs."
            )
        for path, leaf in jax.tree_util.tree_flatten_with_path(
            self.role("carry_argnums")
        )[0]:
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
                raise TypeError(
                    "With a data_axis the carry must hold numbers, which devices can "
                    f"average, but {leaf_name(path)} of the carried arguments is a "
                    "PRNG key. Name it in rng_argnums."
                )
        params, where = self._params_on_device(known)
        new = dict(zip(self.roles["argnums"], params, strict=True))
        device = jax.lax.axis_index(axes)
        for name in ("batch_argnums", "rng_argnums", "carry_argnums"):
            for position in self.roles[name]:
                tree = _devices.vary(self.args[position], axes)
                if name == "rng_argnums":
                    tree = jax.tree.map(lambda k: jax.random.fold_in(k, device), tree)
                new[position] = tree
        return self.with_args(new)._replace(where=where)

    def _params_on_device(self, known: bool) -> tuple[Any, list[_devices.Placement]]:
        window, axes = self.window, self.axes
        params = self.role("argnums")
        paths, structure = jax.tree_util.tree_flatten_with_path(params)
        leaves = [leaf for _, leaf in paths]
        of_params = self.params()
        where = _devices.placements(of_params, window.param_specs, axes, None)
        if window.sync == "each":
            if not known and window.param_specs is None:
                raise ValueError(
                    'sync="each" must know which parameters are sharded over '
                    f"{axes}, but this shard_map has check_vma=False. Pass "
                    "param_specs, or leave check_vma on."
                )
            summed = [
                tuple(n for n in axes if n in place.axes or n in _devices.varying(x))
                for x, place in zip(leaves, where, strict=True)
            ]
            where = [_devices.Placement(summed=names) for names in summed]
            return _devices.vary(params, axes), where
        for (path, x), place in zip(paths, where, strict=True):
            loose = _devices.varying(x) & (set(axes) - set(place.axes))
            if loose:
                raise ValueError(
                    "Parameters must be the same on all devices along the data axis, "
                    "or param_specs must say how they are sharded, but "
                    f"{leaf_name(path)} differs along {tuple(sorted(loose))}. Pass "
                    'their specs as param_specs; or sync="each", where fun itself '
                    "gathers them."
                )
        leaves = _devices.gather(_devices.vary(leaves, axes), where)
        return jax.tree.unflatten(structure, leaves), where


def _check_keys(position: int, tree: Any) -> None:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
        raw = dtype == jnp.uint32 and len(shape) == 1
        if not (typed or raw):
            raise ValueError(
                "rng_argnums must name PRNG keys, or trees of them, but "
                f"{leaf_name(path)} of argument {position} has shape {shape} and dtype "
                f"{dtype.name}. Pass one key, from jax.random.key(seed) for example; "
                "every micro-batch derives its own."
            )


def _check_batch(window: Window, devices: int, batch: dict[int, Any]) -> None:
    num_microbatches, first = window.num_microbatches, None
    for position, tree in batch.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            shape = jnp.shape(leaf)
            name = leaf_name(path)
            if len(batch) > 1 or not path:
                name = f"{name} of argument {position}"
            if not shape:
                raise ValueError(
                    f"Every leaf of the batch must have a batch axis, but {name} is a "
                    "scalar. Pass it in an argument that batch_argnums does not name, "
                    "or by keyword: those go to every micro-batch whole."
                )
            if first is None:
                first = name, shape
            elif shape[0] != first[1][0]:
                raise ValueError(
                    "All leaves of the batch must have one length along axis 0, but "
                    f"{first[0]} has shape {first[1]} and {name} has shape {shape}. "
                    "Put the examples on axis 0 of each, or pass what is not per "
                    "example in another argument."
                )
    if first is None:
        raise ValueError(
            "batch_argnums must name arguments that hold arrays, but argument"
            f"{'s' * (len(batch) > 1)} {', '.join(map(str, batch))} "
            f"hold{'s' * (len(batch) == 1)} none. Pass the batch there, or change "
            "batch_argnums."
        )
    name, shape = first
    if shape[0] == 0:
        raise ValueError(
            f"The batch must hold at least one example, but {name} has shape {shape}. "
            "Skip the call where there is no data."
        )
    if shape[0] % devices:
        raise ValueError(
            f"The {devices} devices along data_axis={window.data_axis} must divide the "
            f"batch axis, but {name} has shape {shape}. Use a batch of "
            f"{shape[0] - shape[0] % devices or devices} or "
            f"{shape[0] + devices - shape[0] % devices} examples."
        )
    if devices > 1 and shape[0] // devices % num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} must divide the batch of each of the "
            f"{devices} devices, {shape[0] // devices} examples, but {name} has shape "
            f"{shape}. Use {_divisors(shape[0] // devices, num_microbatches)}."
        )
    if shape[0] % num_microbatches:
        raise ValueError(
            f"num_microbatches={num_microbatches} must divide the batch axis, but "
            f"{name} has shape {shape}. Use {_divisors(shape[0], num_microbatches)}."
        )


def _check_not_split(batch: dict[int, Any]) -> None:
    """Raises where the type of a leaf says that devices share its rows."""
    for position, tree in batch.items():
        for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
            axes = _devices.explicit_axes(leaf, 0)
            if axes:
                raise ValueError(
                    "A batch split over explicit mesh axes needs data_axis, but "
                    f"{leaf_name(path)} of argument {position} is split over {axes} "
                    "and data_axis is None. Pass data_axis="
                    f"{(axes if len(axes) > 1 else axes[0])!r}: each device then "
                    "splits its own rows, and the gradient is reduced once."
                )


def _divisors(n: int, near: int) -> str:
    """The divisors of n in words: all of them, or the eight nearest to `near`."""
    small = [d for d in range(1, int(n**0.5) + 1) if n % d == 0]
    divisors = sorted({*small, *(n // d for d in small)})
    divisors = sorted(sorted(divisors, key=lambda d: abs(d - near))[:8])
    *most, last = map(str, divisors)
    return f"{', '.join(most)} or {last}" if most else last


# -- What fun returned ----------------------------------------------------------------


def returned(
    window: Window, out: Any, carry: tuple[Any, ...], weight: jax.Array | None
) -> tuple[Any, jax.Array | None, tuple[Any, ...], Any]:
    """Takes what `fun` returned apart and checks it: loss, weight, carry and aux."""
    form = "the loss"
    loss, new, aux = out, (), ()
    if window.carry_argnums != () and window.has_aux:
        form = "(loss, (carry, aux))"
        loss, rest = _unpack(out, form)
        new, aux = _unpack(rest, form)
    elif window.carry_argnums != ():
        form = "(loss, carry)"
        loss, new = _unpack(out, form)
    elif window.has_aux:
        form = "(loss, aux)"
        loss, aux = _unpack(out, form)
    if not isinstance(loss, (jax.Array, np.ndarray, np.generic, int, float, complex)):
        raise TypeError(
            f"fun must return {form}, but its loss is of type {type(loss).__name__}. "
            "Pass has_aux=True where it returns (loss, aux), or return the loss alone."
        )
    shape, dtype = jnp.shape(loss), jnp.result_type(loss)
    if shape != ():
        raise ValueError(
            f"The loss must be a scalar, but it has shape {shape}. Return its mean "
            "over the micro-batch."
        )
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"The loss must be real and floating, but it has dtype {dtype.name}. Cast "
            "it, or return the quantity that is to be minimised."
        )
    if isinstance(window.carry_argnums, int):
        new = (new,)
    _check_carry(carry, new)
    return loss, weight, new, aux


def _unpack(out: Any, form: str) -> tuple[Any, Any]:
    if not isinstance(out, (tuple, list)) or len(out) != 2:
        what = f"of type {type(out).__name__}"
        if isinstance(out, (tuple, list)):
            what = f"a {type(out).__name__} of {len(out)}"
        raise TypeError(
            f"fun must return {form} with these has_aux and carry_argnums, but where a "
            f"pair is due it returned something {what}. Return that, or change the "
            "options."
        )
    return out[0], out[1]


def _check_carry(old: Any, new: Any) -> None:
    todo = "Return each carried argument with the tree, shapes and dtypes it came with."
    check_structure(old, new, name="The carry", expected="its arguments", todo=todo)
    paths = jax.tree_util.tree_flatten_with_path(old)[0]
    for (path, want), got in zip(paths, jax.tree.leaves(new), strict=True):
        came, due = (
            f"shape {jnp.shape(x)} and dtype {jnp.result_type(x).name}"
            for x in (got, want)
        )
        if came != due:
            raise ValueError(
                f"The carry must keep the {due} of {leaf_name(path)}, but fun returned "
                f"{came} there. {todo}"
            )


def aux_modes(option: Any, aux: Any) -> list[str]:
    """How to put each leaf of `aux` together; `option` is a prefix of its tree."""
    modes, structure = jax.tree.flatten(option)
    try:
        parts = structure.flatten_up_to(aux)
    except ValueError as error:
        raise ValueError(
            f"aux must be a tree that is a prefix of the aux tree, but it is {option!r}"
            f" and fun returned an aux of structure {jax.tree.structure(aux)}: "
            f"{error}. Name the same keys, or use one word for all of them."
        ) from None
    result = [
        mode
        for mode, part in zip(modes, parts, strict=True)
        for _ in jax.tree.leaves(part)
    ]
    paths = jax.tree_util.tree_flatten_with_path(aux)[0]
    for (path, leaf), mode in zip(paths, result, strict=True):
        if mode in ("mean", "sum") and not jnp.issubdtype(leaf.dtype, np.number):
            if leaf.dtype == jnp.bool_:
                continue
            raise TypeError(
                f'aux="{mode}" must have numbers to work on, but {leaf_name(path)} of '
                f'the aux has dtype {leaf.dtype.name}. Use "last" or "stack" there.'
            )
    return result
