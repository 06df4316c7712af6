"""Storage of a window's sum between two calls, on one device or on each of many.

On one device the state holds the accumulator, and the last addition divides the sum.
With data axes every device holds a sum, and the step all-reduces and divides the sums.
"""

import dataclasses
import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from ga_optax import accumulator
from ga_optax._across.choices import Predicate, select
from ga_optax._checks import named_leaves
from ga_optax._devices import collectives, meshes
from ga_optax.accumulator import Accumulator

T = TypeVar("T")
WindowSum = Any  # an `Accumulator` of the pair `(gradients, extra arguments)`


@dataclasses.dataclass(frozen=True)
class Storage:
    """Converts between a state's fields and a window's sum.

    The total of a window is the pair `(gradients, extra arguments)`: sums while the
    window is open. On one device the micro-step that closes the window replaces the
    sums by the means for the inner optimizer.

    Attributes:
      use_grad_mean: whether the inner optimizer sees the mean, or the sum.
      axes: the data axes, bound by a `jax.shard_map`; `()` on one device.
    """

    use_grad_mean: bool
    axes: tuple[str, ...]

    @property
    def spec(self) -> PartitionSpec:
        """The `PartitionSpec` of the sum and the weight, for `jax.shard_map`."""
        return meshes.split_spec(self.axes) if self.axes else PartitionSpec()

    def start(self, acc: WindowSum) -> WindowSum:
        """An empty accumulator for the state: one part for each device."""
        if not self.axes:
            return acc

        def zeros(acc: WindowSum) -> WindowSum:
            parts = jax.tree.map(lambda x: jnp.zeros_like(x)[None], acc)
            return collectives.vary(parts, self.axes)

        mesh = meshes.find_mesh(self.axes, None, acc.total)
        if mesh is None:
            return zeros(acc)
        specs = (PartitionSpec(),), self.spec
        return collectives.over_mesh(zeros, mesh, self.axes, specs)(acc)

    def load(self, acc: WindowSum) -> WindowSum:
        """This device's accumulator, from the state's fields."""
        if not self.axes:
            return acc
        if meshes.find_mesh(self.axes, None) is not None:
            raise ValueError(
                f"With data_axis={self.axes} a MultiSteps must be called inside a "
                "jax.shard_map over that axis, with state_specs for the state, but "
                "this call is outside. Wrap the training step; or leave data_axis out "
                "if the compiler splits the batch."
            )
        for name, leaf in named_leaves((acc.total, acc.weight)):
            if jnp.shape(leaf)[:1] != (1,):
                raise ValueError(
                    "Inside the shard_map the state must hold this device's part of "
                    f"the accumulator, [1, ...], but {name} has shape "
                    f"{jnp.shape(leaf)}. Pass state_specs in in_specs."
                )
        total, weight = jax.tree.map(lambda x: x[0], (acc.total, acc.weight))
        return Accumulator(total, weight, acc.count)

    def store(self, acc: WindowSum) -> WindowSum:
        """The inverse of `load`."""
        if not self.axes:
            return acc
        parts = jax.tree.map(lambda x: x[None], (acc.total, acc.weight))
        total, weight = collectives.vary(parts, self.axes)
        return Accumulator(total, weight, acc.count)

    def check(self, grads: Any, params: Any, extra_args: Any) -> None:
        """Raises if gradients are reduced already, or other arguments vary."""
        if not self.axes or not meshes.checks_varying():
            return
        axes = set(self.axes)
        for name, leaf in named_leaves(grads):
            reduced = sorted(axes - meshes.varying(leaf))
            if reduced:
                raise ValueError(
                    "With a data_axis, grads must be the gradients of one device, but "
                    f"{name} is the same along {reduced}: it is reduced already. To "
                    f"fix this, {meshes.OWN_COPY}"
                )
        for arguments, tree, todo in (
            ("extra arguments", extra_args, "Reduce them, with jax.lax.pmean."),
            ("params", params, "The sums would mix shards: pass whole parameters."),
        ):
            for name, leaf in named_leaves(tree):
                differing = sorted(axes & meshes.varying(leaf))
                if differing:
                    raise ValueError(
                        f"With a data_axis, {arguments} must be the same on all "
                        f"devices, but {name} differs along {differing}. {todo}"
                    )

    def agree(self, decision: T) -> T:
        """A decision for all devices: yes if any device decides yes."""
        if not self.axes:
            return decision
        return jax.lax.pmax(collectives.vary(decision, self.axes), self.axes)

    def merged_types(self, tree: Any) -> Any:
        """The types of a tree after the merge: they do not vary over devices."""
        if not self.axes:
            return tree
        kind = jax.ShapeDtypeStruct
        return jax.tree.map(lambda x: kind(x.shape, jnp.result_type(x)), tree)

    def finish(self, acc: WindowSum, closes: Predicate) -> WindowSum:
        """Replaces the sum by the mean if the window closes on one device.

        This division is part of the pass that adds the gradient. In the branch of the
        conditional the division would be another pass, over a second buffer. The
        division comes last, because XLA computes a division once, but repeats a
        cheaper operation for each reader, from a sum that it then has to copy.
        """
        divides = self.use_grad_mean or acc.total[1]
        if self.axes or not divides or closes is False:
            return acc  # over devices the sums are merged before they are divided
        return select(closes, self._mean(acc), acc)

    def fence(self, acc: WindowSum) -> WindowSum:
        """Keeps XLA from fusing the last addition into the inner optimizer.

        Fused into it, the optimizer would read the old sum after the new one has
        overwritten it, so XLA would copy the old sum first.
        """
        return acc if self.axes else jax.lax.optimization_barrier(acc)

    def merged(self, acc: WindowSum) -> WindowSum:
        """The mean (or the sum) over all devices, for the inner optimizer."""
        with jax.named_scope("ga_optax.merge"):
            grads, args = acc.total
            total = grads, collectives.vary(args, self.axes)
            whole = collectives.merge_across(acc._replace(total=total), self.axes)
        return self._mean(whole)

    def _mean(self, acc: WindowSum) -> WindowSum:
        """The mean (or the sum) of gradients, and the mean of extra arguments."""
        divide = functools.partial(accumulator.divide, weight=acc.weight)
        grads, args = acc.total
        grads = jax.tree.map(divide, grads) if self.use_grad_mean else grads
        return acc._replace(total=(grads, jax.tree.map(divide, args)))
