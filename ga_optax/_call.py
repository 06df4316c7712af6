"""One call of the fold inside a call: its arguments by role, checked and placed."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ga_optax import _collectives, _mesh
from ga_optax._checks import check_gradients, divisors, named_leaves
from ga_optax._mesh import Axes, Placement
from ga_optax._options import Options

# Flax's name of what is to be overwritten with its gradient: `flax.linen.fp8_ops`.
_REPLACED = "_overwrite_with_gradient"


class Call(NamedTuple):
    """One call of the returned function: its arguments by role.

    Attributes:
      options: the options.
      args: the positional arguments.
      kwargs: the keyword arguments.
      roles: the positions of each role.
      mesh: the mesh whose data axes split this call's batch; None if there is no data
        axis, and inside a `shard_map` that binds it.
      specs: how the data axes shard the parameters: `DataAxis.param_specs`, or what
        was found.
      where: how to merge the gradient of each parameter leaf over the data axes that
        are bound.
    """

    options: Options
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    roles: dict[str, tuple[int, ...]]
    mesh: Any = None
    specs: Any = None
    where: Sequence[Placement] = ()

    @classmethod
    def make(cls, options: Options, args: Any, kwargs: Any) -> "Call":
        """Checks the arguments; raises before `fun` is traced."""
        call = cls(options, args, kwargs, options.roles(len(args)))
        for i in call.roles["argnums"]:
            check_gradients(args[i], args[i], name=f"argument {i}")
        for i in call.roles["rng_argnums"]:
            _check_keys(i, args[i])
        with_role = {i for positions in call.roles.values() for i in positions}
        rest = [x for i, x in enumerate(args) if i not in with_role]
        _check_no_keys((rest, kwargs))
        if options.data_axis is not None:
            batch = call.role("batch_argnums")
            mesh = _mesh.find_mesh(options.axes, options.data_axis.mesh, batch)
            call = call._replace(mesh=mesh, specs=options.data_axis.param_specs)
        _check_batch(call)
        return call

    def role(self, name: str) -> tuple[Any, ...]:
        """The arguments with a role."""
        return tuple(self.args[i] for i in self.roles[name])

    @property
    def params(self) -> Any:
        """What to differentiate with respect to, in the structure of the result."""
        params = self.role("argnums")
        return params[0] if isinstance(self.options.argnums, int) else params

    @property
    def replaced(self) -> list[bool]:
        """Which leaves get their new value for a gradient, such as fp8 scales."""
        return [_REPLACED in name for name, _ in named_leaves(self.params)]

    @property
    def axes(self) -> Axes:
        """The data axes that are bound: over which this call is one device's part."""
        return self.options.axes if self.mesh is None else ()

    def placed(self, total: Any) -> Any:
        """An accumulator at top level, sharded as `specs` says."""
        if self.mesh is None or self.specs is None:
            return total
        return _collectives.constrain(total, self.specs, self.mesh)

    def with_args(self, new: dict[int, Any]) -> "Call":
        """The same call with other arguments at some positions."""
        return self._replace(args=tuple(new.get(i, x) for i, x in enumerate(self.args)))

    def on_device(self) -> "Call":
        """The same with every argument of a role made this device's own.

        Parameters that the data axes shard come out whole; keys differ by device.
        """
        axes = self.axes
        if not axes:
            return self
        known = _mesh.checks_varying()
        batch = jax.tree.leaves(self.role("batch_argnums"))
        split = frozenset().union(*map(_mesh.varying, batch))
        same = tuple(name for name in axes if name not in split)
        if known and same:
            raise ValueError(
                f"The batch must differ between the devices along {axes}, but it is "
                f"the same along {same}. Name {axes} in the in_specs of the shard_map."
            )
        for name, leaf in named_leaves(self.role("carry_argnums")):
            if jnp.issubdtype(jnp.result_type(leaf), jax.dtypes.prng_key):
                raise TypeError(
                    "With a data_axis the carry must hold numbers to average, but "
                    f"{name} of it is a PRNG key. Name it in rng_argnums."
                )
        params, where = self._params_on_device(known)
        new = dict(zip(self.roles["argnums"], params, strict=True))
        device = jax.lax.axis_index(axes)
        for role in ("batch_argnums", "rng_argnums", "carry_argnums"):
            for i in self.roles[role]:
                new[i] = _collectives.vary(self.args[i], axes)
                if role == "rng_argnums":
                    new[i] = jax.tree.map(
                        lambda k: jax.random.fold_in(k, device), new[i]
                    )
        return self.with_args(new)._replace(where=where)

    def _params_on_device(self, known: bool) -> tuple[Any, list[Placement]]:
        axes, params = self.axes, self.role("argnums")
        where = _mesh.placements(self.params, self.specs, axes, None)
        if self.options.each and not known and self.specs is None:
            raise ValueError(
                f'sync="each" must know which parameters are sharded over {axes}, but '
                "this shard_map has check_vma=False. Pass DataAxis(param_specs=), or "
                "leave check_vma on."
            )
        for i, (name, x) in enumerate(named_leaves(params)):
            sharded, varying = where[i].axes, _mesh.varying(x)
            loose = tuple(n for n in axes if n in varying and n not in sharded)
            if self.options.each:
                summed = tuple(n for n in axes if n in varying or n in sharded)
                where[i] = Placement(summed=summed)
            elif loose:
                raise ValueError(
                    "Parameters must be the same on all devices along the data axis, "
                    f"or param_specs must say how they are sharded, but {name} differs "
                    f"along {loose}. Pass DataAxis(param_specs=); or "
                    'sync="each", if fun itself gathers them.'
                )
        leaves, structure = jax.tree.flatten(_collectives.vary(params, axes))
        return jax.tree.unflatten(structure, _collectives.gather(leaves, where)), where


# -- Checks ----------------------------------------------------------------------------


def _check_keys(position: int, tree: Any) -> None:
    for name, leaf in named_leaves(tree):
        shape, dtype = jnp.shape(leaf), jnp.result_type(leaf)
        typed = jnp.issubdtype(dtype, jax.dtypes.prng_key) and shape == ()
        raw = dtype == jnp.uint32 and len(shape) == 1
        if not (typed or raw):
            raise ValueError(
                f"rng_argnums must name PRNG keys, or trees of them, but {name} of "
                f"argument {position} has shape {shape} and dtype {dtype.name}. Pass "
                "one key; every micro-batch derives its own."
            )


def _check_no_keys(rest: Any) -> None:
    """Raises if an argument without a role is a PRNG key: every mask would be one."""
    for name, leaf in named_leaves(rest):
        is_array = isinstance(leaf, jax.Array)
        if is_array and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            raise ValueError(
                "A PRNG key must differ between micro-batches, but "
                f"{name} of the arguments goes to each as it is. Pass it by position, "
                "and name that in rng_argnums."
            )


def _check_batch(call: Call) -> None:
    positions, axes = call.roles["batch_argnums"], call.options.axes
    leaves = []
    for i in positions:
        for name, x in named_leaves(call.args[i]):
            alone = len(positions) == 1 and x is not call.args[i]
            leaves.append((name if alone else f"{name} of argument {i}", x))
    for name, x in leaves:
        split = _mesh.as_entry(_mesh.explicit_axes(x, 0))
        if jnp.ndim(x) == 0:
            raise ValueError(
                f"Every leaf of the batch must have a batch axis, but {name} is a "
                "scalar. Pass it in an argument that batch_argnums does not name."
            )
        if split and not axes:
            raise ValueError(
                f"A batch split over explicit mesh axes needs data_axis, but {name} is "
                f"split over {split!r} and data_axis is None. Pass data_axis={split!r}."
            )
    if not leaves:
        raise ValueError(
            "batch_argnums must name arguments that hold arrays, but "
            f"{' and '.join(f'argument {i} holds none' for i in positions)}. Change it."
        )
    (first, shape), *others = [(name, jnp.shape(x)) for name, x in leaves]
    came, rows = f"{first} has shape {shape}", shape[0]
    for name, other in others:
        if other[0] != rows:
            raise ValueError(
                "All leaves of the batch must have one length along axis 0, but "
                f"{came} and {name} has shape {other}. Put the examples on axis 0."
            )
    if rows == 0:
        raise ValueError(
            f"The batch must hold at least one example, but {came}. Skip the call."
        )
    devices = 1 if call.mesh is None else _mesh.num_devices(axes, call.mesh)
    part, rest = divmod(rows, devices)
    if rest:
        raise ValueError(
            f"The {devices} devices along data_axis={axes} must divide the batch axis, "
            f"but {came}. Use a batch of {rows - rest or devices} or "
            f"{rows - rest + devices} examples."
        )
    k = call.options.num_microbatches
    if part % k:
        what = "the batch axis"
        if devices > 1:
            what = f"the batch of each of the {devices} devices, {part} examples"
        nearest = sorted(divisors(part), key=lambda d: abs(d - k))[:8]
        use = " or ".join(", ".join(map(str, sorted(nearest))).rsplit(", ", 1))
        raise ValueError(
            f"num_microbatches={k} must divide {what}, but {came}. Use {use}."
        )
