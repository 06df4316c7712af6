"""Does it communicate more than it must: the collectives of a compiled program.

Reads the optimised HLO, which is the program that runs. A computation is walked from
the entry, so that each collective is found where it stands: in which loops, how often
those run, and whether a condition stands before it.
"""

import dataclasses
import math
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

__all__ = ["Audit", "Collective", "audit"]

_KINDS = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_REDUCTIONS = ("all-reduce", "reduce-scatter")

# Opaque values take no bytes: they order what happens.
_BITS = {"pred": 8, "token": 0, "opaque": 0}

_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
# The left-hand side of an instruction, up to where its type begins.
_NAME = re.compile(r"^\s*(?:ROOT\s+)?%?([\w.\-]+)\s*=\s*")
_CALLED = re.compile(
    r"\b(?:calls|to_apply|body|condition|true_computation|false_computation)="
    r"%?([\w.\-]+)|\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
)


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective instruction of a compiled program.

    Attributes:
      kind: "all-reduce", "reduce-scatter", "all-gather", "all-to-all",
        "collective-permute", "collective-broadcast" or "ragged-all-to-all".
      name: the name of the instruction.
      num_bytes: the bytes of its operands on one device, each time it runs.
      replica_groups: which devices take part together, as printed in the program.
      axes: the mesh axes it goes over, where a mesh was given and they are known.
      loops: the loops it stands in, outermost first: pairs of the name of the `while`
        instruction and its trip count, None where the program does not say.
      conditional: whether it stands in a branch, so that it may run less often.
      source: the JAX operation it came from, as printed in the program.
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
        """How often it runs in one call, at most; None where that is not known."""
        trips = [trips for _, trips in self.loops]
        return None if None in trips else math.prod(t for t in trips if t is not None)

    @property
    def total_bytes(self) -> int | None:
        """The bytes of all its runs in one call, at most."""
        return None if self.times is None else self.times * self.num_bytes


@dataclasses.dataclass(frozen=True)
class Audit:
    """Every collective of a compiled program; `str` of it is a table with a verdict.

    Attributes:
      collectives: all of them, in the order of the program.
    """

    collectives: tuple[Collective, ...]

    @property
    def in_loop(self) -> tuple[Collective, ...]:
        """Those in a loop, which run in every iteration: what to worry about."""
        return tuple(c for c in self.collectives if c.loops)

    @property
    def total_bytes(self) -> int | None:
        """The operand bytes of all runs of all of them, on one device in one call.

        None where a loop does not say how often it runs.
        """
        totals = [c.total_bytes for c in self.collectives]
        return None if None in totals else sum(t for t in totals if t is not None)

    def __str__(self) -> str:
        if not self.collectives:
            return "No collectives: the program does not communicate."
        rows = [("kind", "bytes", "times", "where", "devices", "source")]
        for c in self.collectives:
            where = " > ".join(
                f"loop of {'?' if trips is None else trips}" for _, trips in c.loops
            )
            where = where or "once"
            if c.conditional:
                where += ", in a branch"
            devices = c.replica_groups
            if c.axes is not None:
                devices = ", ".join(c.axes)
            times = "?" if c.times is None else f"{c.times:,}"
            source = c.source if len(c.source) <= 48 else "…" + c.source[-47:]
            rows.append((c.kind, f"{c.num_bytes:,}", times, where, devices, source))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        right = (False, True, True, False, False, False)
        lines = [
            "  ".join(
                cell.rjust(width) if is_right else cell.ljust(width)
                for cell, width, is_right in zip(row, widths, right, strict=True)
            ).rstrip()
            for row in rows
        ]
        lines.insert(1, "  ".join("-" * width for width in widths))
        return "\n".join([*lines, "", textwrap.fill(self._verdict(), 80)])

    def _verdict(self) -> str:
        total = self.total_bytes
        amount = "an unknown number of" if total is None else f"{total:,}"
        bytes_ = f"{amount} bytes a call on each device"
        number = len(self.collectives)
        some = "1 collective" if number == 1 else f"{number} collectives"
        if not self.in_loop:
            verdict = f"{some}, none in a loop: {bytes_}."
            moved = [c for c in self.collectives if c.kind not in _REDUCTIONS]
            if moved:
                size = sum(c.num_bytes for c in moved)
                verdict += (
                    f" {size:,} of them move data that devices hold. That is due where "
                    "parameters are sharded. Where it is the batch, pass data_axis= to "
                    "value_and_grad, or every device may compute all of it."
                )
            return verdict
        largest = max(self.in_loop, key=lambda c: c.num_bytes)
        often = (
            "in every iteration"
            if largest.times is None
            else f"{largest.times:,} times a call"
        )
        if largest.conditional:
            often = "where its branch is taken, at most " + often
        return (
            f"{some}, {len(self.in_loop)} in a loop: {bytes_}. The largest in a loop "
            f"is {largest.kind} of {largest.num_bytes:,} bytes, {often}. Where that is "
            "a gradient, pass data_axis= to value_and_grad: it is then reduced once, "
            "after the loop. What a sharded model needs for its activations, or its "
            "parameters, belongs there."
        )


def audit(
    compiled: jax.stages.Compiled | str, mesh: Mesh | AbstractMesh | None = None
) -> Audit:
    """Lists the collectives of a compiled step: what crosses the network, how often.

    >>> import jax, jax.numpy as jnp
    >>> import ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.mean((x @ w) ** 2)
    >>> step = jax.jit(ga.value_and_grad(loss, num_microbatches=2))
    >>> compiled = step.lower(jnp.ones(3), jnp.ones((8, 3))).compile()
    >>> print(ga.audit(compiled))
    No collectives: the program does not communicate.

    Synchronous instructions, asynchronous pairs (counted once, at their start) and
    those over a tuple of arrays are found, in loops, branches and calls. A program that
    runs on one device has none.

    Args:
      compiled: what `jax.jit(f).lower(...).compile()` returned; or the text of an
        optimised HLO module, as its `as_text()` or a dump of XLA's prints it.
      mesh: the mesh that the program runs on. With it the table names mesh axes where
        it otherwise prints groups of devices.

    Returns:
      An `Audit`: `in_loop` is what to worry about, `str` of it a table.

    Raises:
      TypeError: where `compiled` is not compiled.
      ValueError: where the text is no HLO module.
    """
    if isinstance(compiled, str):
        text = compiled
    elif isinstance(compiled, jax.stages.Compiled):
        text = compiled.as_text()
    else:
        raise TypeError(
            "audit needs a compiled program, or its HLO text, but it got a "
            f"{type(compiled).__name__}. Pass jax.jit(step).lower(*args).compile()."
        )
    computations, entry = _parse(text or "")
    if entry is None:
        raise ValueError(
            "The text must be an optimised HLO module with an ENTRY computation, but "
            f"it begins with {(text or '')[:40]!r}. Pass compiled.as_text(), or a file "
            "that --xla_dump_to wrote, *after_optimizations.txt."
        )
    return Audit(tuple(_walk(computations, entry, (), False, mesh)))


# -- Reading HLO -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Instruction:
    name: str
    type: str
    opcode: str
    operands: str
    attributes: str


@dataclasses.dataclass
class _Computation:
    instructions: list[_Instruction]
    types: dict[str, str]


def _parse(text: str) -> tuple[dict[str, _Computation], str | None]:
    """Takes the module apart into computations, by name; and the name of the entry."""
    computations: dict[str, _Computation] = {}
    current, entry = None, None
    for line in text.splitlines():
        if current is None or not line.startswith((" ", "\t")):
            head = re.match(
                r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$", line
            )
            if head and not line.startswith("HloModule"):
                current = computations[head[2]] = _Computation([], {})
                if head[1]:
                    entry = head[2]
                continue
        if line.strip().startswith("}"):
            current = None
        elif current is not None:
            instruction = _instruction(line)
            if instruction is not None:
                current.instructions.append(instruction)
                current.types[instruction.name] = instruction.type
    return computations, entry


def _instruction(line: str) -> _Instruction | None:
    match = _NAME.match(line)
    if match is None:
        return None
    rest = line[match.end() :]
    # A type is a shape, or a tuple in parentheses; comments in it count its elements.
    rest = re.sub(r"/\*.*?\*/", "", rest)
    end = _closing(rest) if rest.startswith("(") else 0
    call = re.compile(r"\s*([a-z][\w\-]*)\(").search(rest, end)
    if call is None:
        return None
    stop = _closing(rest, call.end() - 1)
    return _Instruction(
        match[1],
        rest[: call.start()],
        call[1],
        rest[call.end() : stop - 1],
        rest[stop:],
    )


def _closing(text: str, start: int = 0) -> int:
    """The position after the parenthesis that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i + 1
    return len(text)


def _num_bytes(type_: str) -> int:
    """The bytes of all arrays in a type: `(f32[2,3]{1,0}, pred[])` has 25."""
    bits = 0
    for dtype, dims in _SHAPE.findall(type_):
        width = _BITS.get(dtype)
        if width is None:
            digits = re.search(r"\d+", dtype)
            width = int(digits[0]) if digits else 0
        sizes = [int(re.sub(r"\D", "", d) or 1) for d in dims.split(",") if d]
        bits += width * math.prod(sizes)
    return -(-bits // 8)


def _operand_bytes(computation: _Computation, instruction: _Instruction) -> int:
    total = 0
    for operand in _split_operands(instruction.operands):
        # Older XLA prints the type before each operand, newer its name alone.
        if _SHAPE.search(operand):
            total += _num_bytes(operand)
        else:
            name = operand.strip().split(" ")[-1].lstrip("%")
            total += _num_bytes(computation.types.get(name, ""))
    return total


def _split_operands(operands: str) -> Iterator[str]:
    depth, start = 0, 0
    for i, character in enumerate(operands):
        depth += (character in "({[") - (character in ")}]")
        if character == "," and depth == 0:
            yield operands[start:i]
            start = i + 1
    if operands[start:].strip():
        yield operands[start:]


def _walk(
    computations: dict[str, _Computation],
    name: str,
    loops: tuple[tuple[str, int | None], ...],
    conditional: bool,
    mesh: Any,
) -> Iterator[Collective]:
    """The collectives of a computation and of what it calls, in order."""
    computation = computations.get(name)
    if computation is None:
        return
    for instruction in computation.instructions:
        kind = instruction.opcode.removesuffix("-start")
        if kind in _KINDS:
            groups = _groups(instruction.attributes)
            source = re.search(r'op_name="([^"]*)"', instruction.attributes)
            yield Collective(
                kind,
                instruction.name,
                _operand_bytes(computation, instruction),
                groups,
                None if mesh is None else _axes(groups, mesh),
                loops,
                conditional,
                source[1] if source else "",
            )
        inside, branches = loops, conditional or instruction.opcode == "conditional"
        called = _called(instruction.attributes)
        if instruction.opcode == "while":
            trips = _trip_count(instruction.attributes)
            inside = (*loops, (instruction.name, trips))
        elif kind in _KINDS or instruction.opcode in ("async-update", "async-done"):
            called = []  # how to add two numbers; what async-start has called
        for other in called:
            yield from _walk(computations, other, inside, branches, mesh)


def _called(attributes: str) -> list[str]:
    names = []
    for one, several in _CALLED.findall(attributes):
        names += [one] if one else re.findall(r"[\w.\-]+", several)
    return names


def _trip_count(attributes: str) -> int | None:
    """How often a loop runs, where XLA says it."""
    known = re.search(r'known_trip_count"?\s*:\s*\{\s*"?n"?\s*:\s*"?(\d+)', attributes)
    return int(known[1]) if known else None


# -- Which devices ---------------------------------------------------------------------


def _groups(attributes: str) -> str:
    """`replica_groups` or `source_target_pairs`, as it is printed."""
    match = re.search(
        r"(?:replica_groups|source_target_pairs)=("
        r"\{(?:\{[^}]*\},?)*\}"  # {{0,1},{2,3}}
        r"|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?"  # [2,2]<=[4], [2,2]<=[2,2]T(1,0)
        r"|mesh\[[^\]]*\]\s*\{[^}]*\})",  # mesh['data'=4] {'data'}
        attributes,
    )
    return match[1] if match else ""


def _members(groups: str) -> list[list[int]] | None:
    """The devices of each group, from any of the three ways in which XLA prints them.

    None where it is not known; an empty list where all devices are one group.
    """
    if groups in ("", "{}"):
        return []
    if groups.startswith("{"):
        return [
            [int(n) for n in group.split(",") if n.strip()]
            for group in re.findall(r"\{([^{}]*)\}", groups)
        ]
    if groups.startswith("mesh"):
        named = re.findall(r"'([^']*)'\s*=\s*(\d+)", groups)
        sizes = [int(n) for _, n in named]
        over = re.findall(r"'([^']*)'", groups[groups.index("]") :])
        names = [name for name, _ in named]
        if not set(over) <= set(names):
            return None
        return _along(np.arange(math.prod(sizes)).reshape(sizes), names, over)
    iota = re.fullmatch(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?", groups)
    if iota is None:
        return None
    shape, dims, order = iota.groups()
    shape, dims = ([int(n) for n in text.split(",")] for text in (shape, dims))
    ids = np.arange(math.prod(dims)).reshape(dims)
    if order:
        ids = ids.transpose([int(n) for n in order.split(",")])
    return ids.reshape(shape).tolist()


def _along(ids: np.ndarray, names: list[str], over: list[str]) -> list[list[int]]:
    kept = [i for i, name in enumerate(names) if name not in over]
    moved = [i for i, name in enumerate(names) if name in over]
    size = math.prod(ids.shape[i] for i in moved)
    return ids.transpose(kept + moved).reshape(-1, size).tolist()


def _axes(groups: str, mesh: Any) -> tuple[str, ...] | None:
    """The mesh axes whose groups of devices these are."""
    members = _members(groups)
    if members is None:
        return None
    names = list(mesh.axis_names)
    sizes = [mesh.shape[name] for name in names]
    ids = np.arange(math.prod(sizes)).reshape(sizes)
    wide = [name for name in names if mesh.shape[name] > 1]
    if not members:
        return tuple(wide)
    found = {frozenset(group) for group in members}
    for mask in range(1 << len(wide)):
        over = [name for i, name in enumerate(wide) if mask >> i & 1]
        if {frozenset(group) for group in _along(ids, names, over)} == found:
            return tuple(over)
    return None
