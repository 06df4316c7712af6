"""The collectives of a compiled program, as a table with a verdict.

`hlo` reads the program. This module finds the instructions that communicate and the
mesh axes that they communicate over.
"""

import dataclasses
import re

import jax
from jax.sharding import AbstractMesh, Mesh

from ga_optax import _text
from ga_optax._compiled import hlo

# An asynchronous pair counts once, at its start.
_KIND = re.compile(
    r"(all-gather|all-reduce|all-to-all|collective-broadcast|collective-permute|"
    r"ragged-all-to-all|reduce-scatter)(?:-start)?"
)
_REDUCTIONS = ("all-reduce", "reduce-scatter")
# The source of an instruction that an operation made; other sources name an argument.
_OPERATION = re.compile(r"\w+\(.*\)/")
# The scopes in which gradients of a whole window are reduced.
_MERGE = {"merge", "ga_optax.merge"}


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all",
        "collective-permute", "collective-broadcast" or "ragged-all-to-all".
      name: the name of the instruction.
      num_bytes: the bytes of the operands on one device, for each run.
      replica_groups: the groups of devices that communicate, as the program prints
        them.
      axes: the mesh axes of the groups; None without a mesh, or if no axes have these
        groups.
      loops: the loops around the instruction, outermost first, as pairs of the name of
        the `while` instruction and the trip count (None if the program does not say).
      conditional: whether the instruction is in a branch, and may run less often.
      source: the JAX operation of the instruction, as the program prints it.
    """

    kind: str
    name: str
    num_bytes: int
    replica_groups: str
    axes: tuple[str, ...] | None
    loops: tuple[tuple[str, int | None], ...]
    conditional: bool
    source: str

    @property
    def times(self) -> int | None:
        """The largest number of runs in one call; None if unknown."""
        return hlo.times(self.loops)

    @property
    def total_bytes(self) -> int | None:
        """The largest number of bytes in one call; None if unknown."""
        return None if self.times is None else self.times * self.num_bytes


@dataclasses.dataclass(frozen=True)
class Audit:
    """The collectives of a compiled program. `str(audit)` is a table with a verdict.

    Attributes:
      collectives: all collectives, in the order of the program.
    """

    collectives: tuple[Collective, ...]

    @property
    def in_loop(self) -> tuple[Collective, ...]:
        """The collectives in a loop, which run in every iteration."""
        return tuple(c for c in self.collectives if c.loops)

    @property
    def total_bytes(self) -> int | None:
        """The operand bytes of all runs of all collectives, on one device in one call.

        None if a collective is in a loop without a known trip count.
        """
        totals = [c.total_bytes for c in self.collectives]
        return None if None in totals else sum(t for t in totals if t is not None)

    def __str__(self) -> str:
        if not self.collectives:
            return "No collectives: the program does not communicate."
        rows = [("kind", "bytes", "times", "where", "devices", "source")]
        for c in self.collectives:
            loops = [f"loop of {'?' if n is None else n}" for _, n in c.loops]
            where = " > ".join(loops) or "once"
            where += ", in a branch" if c.conditional else ""
            times = "?" if c.times is None else f"{c.times:,}"
            groups = c.replica_groups
            groups = groups if len(groups) <= 48 else groups[:47] + "…"
            devices = groups if c.axes is None else ", ".join(c.axes)
            source = c.source if len(c.source) <= 48 else "…" + c.source[-47:]
            rows.append((c.kind, f"{c.num_bytes:,}", times, where, devices, source))
        table = _text.ruled(rows, left=(0, 3, 4, 5))
        return "\n".join([*table, "", *_text.wrap(self._verdict())])

    def _verdict(self) -> str:
        total, number = self.total_bytes, len(self.collectives)
        amount = "an unknown number of" if total is None else f"{total:,}"
        bytes_ = f"{amount} bytes a call on each device"
        counted = f"{number} collective" + ("s" if number > 1 else "")
        if not self.in_loop:
            advice = self._about_arguments() or self._about_moved_data()
            return f"{counted}, none in a loop: {bytes_}.{advice}"
        largest = max(self.in_loop, key=lambda c: c.num_bytes)
        unknown = largest.times is None
        often = "in every iteration" if unknown else f"{largest.times:,} times a call"
        if largest.conditional:
            often = f"at most {often}, in a branch"
        activations = "activations or parameters of a sharded model"
        advice = (
            "Gradients are reduced outside of loops already (scope merge), so this "
            f"collective is most likely for {activations}."
            if self._merges
            else "If it reduces a gradient, pass data_axis= to value_and_grad, which "
            'reduces once, after the loop, unless sync="each" asks for a reduction in '
            f"every iteration. If it is for {activations}, the model needs it."
        )
        return (
            f"{counted}, {len(self.in_loop)} in a loop: {bytes_}. The largest in a "
            f"loop is {largest.kind} of {largest.num_bytes:,} bytes, {often}. {advice}"
            f"{self._about_arguments()}"
        )

    @property
    def _merges(self) -> bool:
        """True if a collective outside of loops has the scope of `data_axis=`."""
        once = (c.source.split("/") for c in self.collectives if not c.loops)
        return any(not _MERGE.isdisjoint(scopes) for scopes in once)

    def _about_arguments(self) -> str:
        """Names the arguments of the program that every device gathers."""
        gathers = [c for c in self.collectives if c.kind == "all-gather"]
        named = [c for c in gathers if c.source and not _OPERATION.match(c.source)]
        if not named:
            return ""
        names = list(dict.fromkeys(c.source for c in named))
        listed = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        nbytes = sum(c.num_bytes for c in named)
        return (
            f" Every device gathers all of {listed}: {nbytes:,} bytes from each. For "
            "parameters, pass param_specs= to DataAxis; for the batch, data_axis= to "
            "value_and_grad. Other arrays of value_and_grad(data_axis=) stay sharded "
            "if they are arguments of the outermost jitted function, or if "
            "jax.lax.with_sharding_constraint gives their sharding."
        )

    def _about_moved_data(self) -> str:
        others = [c for c in self.collectives if c.kind not in _REDUCTIONS]
        moved = sum(c.num_bytes for c in others)
        if not moved:
            return ""
        fact = (
            f" {moved:,} of them move data between devices without a reduction. A step "
            "with sharded parameters or logical devices needs that."
        )
        if self._merges:
            return fact
        return (
            f"{fact} If the data is the batch, pass data_axis= to value_and_grad, or "
            "every device may compute the whole batch."
        )


def audit(
    compiled: jax.stages.Compiled | str, mesh: Mesh | AbstractMesh | None = None
) -> Audit:
    """Lists the collectives of a compiled step, with their bytes and number of runs.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> step = jax.jit(ga.value_and_grad(loss, num_microbatches=2))
    >>> compiled = step.lower(jnp.ones(3), jnp.ones((8, 3))).compile()
    >>> print(ga.audit(compiled))
    No collectives: the program does not communicate.

    It finds synchronous and asynchronous collectives (counted once, at their start) and
    collectives over tuples of arrays, in loops, branches, calls and fusions, in
    programs for CPUs, GPUs and TPUs. A program for one device has no collectives. A
    trip count that is not constant appears as "?".

    Args:
      compiled: the result of `jax.jit(f).lower(...).compile()`, or the text of an
        optimised HLO module: from `as_text()`, or from a file that XLA dumped.
      mesh: the mesh of the program. With a mesh, the table names mesh axes instead of
        groups of devices.

    Returns:
      An `Audit`. `audit.in_loop` holds the collectives to check first, and `str(audit)`
      is a table.

    Raises:
      TypeError: if `compiled` is not compiled, or `mesh` is no mesh.
      ValueError: if the text is not an HLO module.
    """
    if isinstance(compiled, str):
        text = compiled
    elif isinstance(compiled, jax.stages.Compiled):
        text = compiled.as_text() or ""
    else:
        raise TypeError(
            "audit needs a compiled program, or HLO text, but it got a "
            f"{type(compiled).__name__}. Pass jax.jit(step).lower(*args).compile()."
        )
    if not (mesh is None or isinstance(mesh, (Mesh, AbstractMesh))):
        raise TypeError(
            f"mesh must be a jax.sharding.Mesh, or None, but it is {mesh!r}. Pass the "
            "mesh of the program, for the names of the axes."
        )
    collectives, chains = [], set()
    for placed in hlo.parse(text).walk():
        instruction = placed.instruction
        kind = _KIND.fullmatch(instruction.opcode)
        # On TPUs, the fusions that start, hide and end a collective all contain it.
        chain = instruction.attribute(hlo.CHAIN), placed.loops, placed.conditional
        if kind is None or chain in chains:
            continue
        chains |= {chain} if chain[0] else set()
        size = sum(map(hlo.num_bytes, instruction.operand_types))
        groups = instruction.attribute(hlo.GROUPS)
        context = hlo.axes_of(groups, mesh), placed.loops, placed.conditional
        source = instruction.attribute(hlo.SOURCE)
        if source.endswith(
            "/shard_map"
        ):  # jax 0.10 names the operation, not the argument
            source = hlo.argument(instruction) or source
        source, name = source.replace("\\'", "'"), instruction.name
        opcode = "reduce-scatter" if hlo.is_scattered(placed) else kind[1]
        collectives.append(Collective(opcode, name, size, groups, *context, source))
    return Audit(tuple(collectives))
