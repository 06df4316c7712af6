"""What keeps the sum of a window between two calls: one device, or each of many.

`MultiSteps` folds in the same way in both. `OneDevice` documents the interface that
both classes have; a new kind of storage is one more class.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec

from ga_optax import accumulator
from ga_optax._across.choices import Predicate, both, select
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives, meshes
from ga_optax.accumulator import Accumulator

T = TypeVar("T")
Choose = Callable[[Predicate, Callable[[], T], Callable[[], T]], T]


class When(NamedTuple):
    """When a window closes, and how the program chooses.

    Attributes:
      closes: whether this call closes it.
      weighs: whether it weighs something: without weight there is no step.
      choose: `choices.branch` or `choices.pick`.
    """

    closes: Predicate
    weighs: Callable[["Buffer"], Predicate]
    choose: Choose[Any]


class Buffer(NamedTuple):
    """What a state holds of a window; `values` is `(gradients, extra arguments)`.

    They are sums while the window is open. In the micro-step that closes the window
    on one device they are what the inner optimizer sees, means, in the place of sums.
    """

    values: Any
    weight: jax.Array
    count: jax.Array


def _mean(buffer: Buffer, use_grad_mean: bool) -> Buffer:
    """What the inner optimizer sees: of extra arguments always the mean."""
    divide = functools.partial(accumulator.divide, weight=buffer.weight)
    grads, args = buffer.values
    grads = jax.tree.map(divide, grads) if use_grad_mean else grads
    return buffer._replace(values=(grads, jax.tree.map(divide, args)))


@dataclasses.dataclass(frozen=True)
class OneDevice:
    """The state holds the accumulator, and the last addition divides it.

    Attributes:
      use_grad_mean: whether the inner optimizer sees the mean, or the sum.
    """

    use_grad_mean: bool
    reuses: ClassVar[bool] = True  # whether updates may take over the sum's buffer

    @property
    def spec(self) -> PartitionSpec:
        """How the sum and its weight cross a `jax.shard_map`."""
        return PartitionSpec()

    def start(self, acc: Accumulator) -> Accumulator:
        """An empty accumulator as the state holds it."""
        return acc

    def load(self, acc: Accumulator) -> Accumulator:
        """This device's accumulator, out of what the state holds."""
        return acc

    def store(self, buffer: Buffer) -> Buffer:
        """The reverse of `load`."""
        return buffer

    def check(self, grads: Any, params: Any, extra_args: Any) -> None:
        """Raises if gradients are reduced already, or the rest differs by device."""

    def agree(self, decision: T) -> T:
        """A decision for all devices: if one of them says yes, all do."""
        return decision

    def of_all(self, grads: optax.Updates) -> optax.Updates:
        """Gradients with the types that the inner optimizer will see."""
        return grads

    def finish(self, acc: Accumulator, closes: Predicate) -> Buffer:
        """The sum; if the window closes what the inner optimizer sees.

        Dividing here is part of the pass that adds the gradient. In the branch of the
        conditional it would be a pass of its own, over a second buffer. And it comes
        last: XLA computes a division once, and anything cheaper that follows it again
        for each reader, out of a sum that it has to copy for that.
        """
        buffer = Buffer(*acc)
        divides = self.use_grad_mean or buffer.values[1]
        if not divides or closes is False:
            return buffer
        return select(closes, _mean(buffer, self.use_grad_mean), buffer)

    def fence(self, buffer: Buffer) -> Buffer:
        """Keeps the last addition out of the inner optimizer.

        Fused into it, the optimizer would read the old sum after the new one has
        overwritten it, so XLA would copy the old sum first.
        """
        return jax.lax.optimization_barrier(buffer)

    def close(
        self,
        buffer: Buffer,
        when: When,
        run: Callable[[Buffer], T],
        stay: Callable[[], T],
    ) -> T:
        """`run` on the window if it closes and `weighs` something, else `stay`."""
        steps = both(when.closes, when.weighs(buffer))
        return when.choose(steps, lambda: run(buffer), stay)


@dataclasses.dataclass(frozen=True)
class ManyDevices:
    """Every device holds its own sum; the step all-reduces and divides them.

    Attributes:
      use_grad_mean: whether the inner optimizer sees the mean, or the sum.
      axes: the data axes, bound by a `jax.shard_map`.
    """

    use_grad_mean: bool
    axes: tuple[str, ...]
    reuses: ClassVar[bool] = False

    @property
    def spec(self) -> PartitionSpec:
        return meshes.split_spec(self.axes)

    def start(self, acc: Accumulator) -> Accumulator:
        """A part for each device, along a new leading axis."""

        def zeros(acc: Accumulator) -> Accumulator:
            parts = jax.tree.map(lambda x: jnp.zeros_like(x)[None], acc)
            return collectives.vary(parts, self.axes)

        mesh = meshes.find_mesh(self.axes, None, acc.total)
        if mesh is None:
            return zeros(acc)
        specs = (PartitionSpec(),), self.spec
        return collectives.over_mesh(zeros, mesh, self.axes, specs)(acc)

    def load(self, acc: Accumulator) -> Accumulator:
        if meshes.find_mesh(self.axes, None) is not None:
            raise ValueError(
                f"With data_axis={self.axes} this must be called inside a "
                "jax.shard_map over that axis, with state_specs for the state, but it "
                "is called outside. Wrap the training step; or leave data_axis out "
                "if the compiler splits the batch."
            )
        for name, leaf in named_leaves((acc.total, acc.weight)):
            if jnp.shape(leaf)[:1] != (1,):
                raise ValueError(
                    "Inside the shard_map the state must hold this device's part of "
                    f"the accumulator, [1, ...], but {name} has shape "
                    f"{jnp.shape(leaf)}. Pass state_specs as its in_specs."
                )
        total, weight = jax.tree.map(lambda x: x[0], (acc.total, acc.weight))
        return Accumulator(total, weight, acc.count)

    def store(self, buffer: Buffer) -> Buffer:
        parts = jax.tree.map(lambda x: x[None], (buffer.values, buffer.weight))
        values, weight = collectives.vary(parts, self.axes)
        return Buffer(values, weight, buffer.count)

    def check(self, grads: Any, params: Any, extra_args: Any) -> None:
        if not meshes.checks_varying():
            return
        axes = set(self.axes)
        for name, leaf in named_leaves(grads):
            reduced = sorted(axes - meshes.varying(leaf))
            if reduced:
                raise ValueError(
                    f"With a data_axis, grads must be those of one device, but {name} "
                    f"is the same along {reduced}: it is reduced already. To fix it, "
                    f"{meshes.OWN_COPY}"
                )
        for what, tree, todo in (
            ("extra arguments", extra_args, "Reduce them, with jax.lax.pmean."),
            ("params", params, "The sums would mix its shards: pass whole ones."),
        ):
            for name, leaf in named_leaves(tree):
                own = sorted(axes & meshes.varying(leaf))
                if own:
                    raise ValueError(
                        f"With a data_axis, {what} must be the same on all devices, "
                        f"but {name} differs along {own}. {todo}"
                    )

    def agree(self, decision: T) -> T:
        return jax.tree.map(
            lambda x: jax.lax.pmax(x, self.axes),
            collectives.vary(decision, self.axes),
        )

    def of_all(self, grads: optax.Updates) -> optax.Updates:
        """They vary over devices here, and do not there."""
        return jax.tree.map(
            lambda g: jax.ShapeDtypeStruct(g.shape, jnp.result_type(g)), grads
        )

    def finish(self, acc: Accumulator, closes: Predicate) -> Buffer:
        del closes  # `close` merges first, and divides then
        return Buffer(*acc)

    def fence(self, buffer: Buffer) -> Buffer:
        return buffer

    def close(
        self,
        buffer: Buffer,
        when: When,
        run: Callable[[Buffer], T],
        stay: Callable[[], T],
    ) -> T:
        def merged() -> T:
            # Only the sum over all devices says whether there is any weight.
            with jax.named_scope("ga_optax.merge"):
                grads, args = buffer.values
                mine = buffer._replace(
                    values=(grads, collectives.vary(args, self.axes))
                )
                whole = collectives.merge_across(Accumulator(*mine), self.axes)
            whole = _mean(Buffer(*whole), self.use_grad_mean)
            return when.choose(when.weighs(whole), lambda: run(whole), stay)

        return when.choose(when.closes, merged, stay)
