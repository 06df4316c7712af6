"""`audit`: the collectives of a compiled program, as a table with a verdict.

    bytes over the network  =  Σ bytes of a collective · runs of the loops around it

The table comes first, then the parser of optimised HLO that it reads.
"""

import dataclasses
import itertools
import math
import re
from collections.abc import Iterator, Sequence

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .. import _text

# == The table of collectives ==========================================================
# The collectives of a compiled program, as a table with a verdict.
#
# The parser below reads the program. Here are the instructions that communicate, and
# the mesh axes that they communicate over.

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
# The scope of a call that reduces in each micro-step: its user knows data_axis=.
_EACH = "sync_each"


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
        return num_runs(self.loops)

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
            groups = c.replica_groups if c.axes is None else ", ".join(c.axes)
            groups = groups if len(groups) <= 48 else groups[:47] + "…"
            source = c.source if len(c.source) <= 48 else "…" + c.source[-47:]
            rows.append((c.kind, f"{c.num_bytes:,}", times, where, groups, source))
        table = _text.ruled(rows, left=(0, 3, 4, 5))
        return "\n".join([*table, "", *_text.wrap(self._verdict())])

    def _verdict(self) -> str:
        total, number = self.total_bytes, len(self.collectives)
        amount = "an unknown number of" if total is None else f"{total:,}"
        counted = f"{number} collective{'s' * (number > 1)}"
        inside = f"{len(self.in_loop) or 'none'} in a loop"
        texts = [f"{counted}, {inside}: {amount} bytes a call on each device."]
        scopes = {x for c in self.collectives for x in c.source.split("/")}
        others = [c for c in self.collectives if c.kind not in _REDUCTIONS]
        if _EACH in scopes:
            texts.append(
                'sync="each" asks for the reductions in every iteration; sync="last" '
                "has one after the loop."
            )
        elif _MERGE.isdisjoint(scopes) and (others or self.in_loop):
            texts.append(
                "If they reduce gradients or move the batch, pass data_axis= to "
                "value_and_grad, which reduces once, after the loop."
            )
        if others or self.in_loop:
            texts.append("A sharded model needs what moves its activations or weights.")
        gathers = [c for c in others if c.kind == "all-gather" and c.source]
        if gathers := [c for c in gathers if not _OPERATION.match(c.source)]:
            names = ", ".join(dict.fromkeys(c.source for c in gathers))
            texts.append(
                f"Every device gathers all of {names}: "
                f"{sum(c.num_bytes for c in gathers):,} bytes from each. For "
                "parameters, pass param_specs= to DataAxis; to keep other arrays "
                "sharded, use jax.lax.with_sharding_constraint."
            )
        return " ".join(texts)


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
    is_program = isinstance(compiled, jax.stages.Compiled)
    text = compiled.as_text() or "" if is_program else compiled
    if not isinstance(text, str):
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
    for placed in parse_hlo(text).walk():
        instruction = placed.instruction
        kind = _KIND.fullmatch(instruction.opcode)
        # On TPUs, the fusions that start, hide and end a collective all contain it.
        chain = instruction.attribute(CHAIN), placed.loops, placed.conditional
        if kind is None or chain in chains:
            continue
        chains |= {chain} if chain[0] else set()
        size = sum(map(num_bytes, instruction.operand_types))
        groups = instruction.attribute(GROUPS)
        context = axes_of(groups, mesh), placed.loops, placed.conditional
        source = instruction.attribute(SOURCE)
        if source.endswith("/shard_map"):  # so says jax 0.10 of arguments
            source = argument_read(instruction) or source
        opcode = "reduce-scatter" if is_scattered(placed) else kind[1]
        what = opcode, instruction.name, size, groups, *context
        collectives.append(Collective(*what, source.replace("\\'", "'")))
    return Audit(tuple(collectives))


# == The parser ========================================================================
# A parser for optimised HLO, the text of the program that XLA runs.
#
# A module consists of computations, and a computation of instructions. An instruction
# may call further computations: the body of a loop, the branches of a conditional, what
# a fusion computes. `Module.walk` follows these calls from the entry, so that each
# instruction comes with the loops around it.

# By name, in the order of the program.
Computation = dict[str, "Instruction"]
# The name of each `while` instruction, outermost first, and its trip count if known.
EnclosingLoops = tuple[tuple[str, int | None], ...]

_SHAPE = re.compile(r"\b([a-z][a-z0-9]*)\[([0-9,<=]*)\]")
_HEAD = re.compile(r"\s*(ENTRY\s+)?%?([\w.\-]+)\s*(?:\(.*\)\s*->.*)?\{\s*$")
# No type has a word in small letters before a parenthesis.
_LINE = re.compile(r"\s*(ROOT\s+)?%?([\w.\-]+)\s*=\s*(.*?)\s([a-z][\w\-]*)\(")
_INDEX = re.compile(r"\bindex=(\d+)")
_COMMENT = re.compile(r"/\*.*?\*/")  # counts the elements of a tuple
_CALLED = re.compile(
    r"\b(calls|to_apply|body|condition|\w+_computations?)=(%?[\w.\-]+|\{[^}]*\})"
)
# The JAX operation of an instruction.
SOURCE = re.compile(r'op_name="([^"]*)"')
# The asynchronous collective of a TPU to which an instruction belongs.
CHAIN = re.compile(r'chain_id="(\d+)"')
# How often the body of a `while` runs. Older versions print the backend's configuration
# as a string with escaped quotes.
TRIPS = re.compile(r'known_trip_count\\?"?\s*:\s*\{\s*\\?"?n\\?"?\s*:\s*\\?"?(\d+)')
# The groups of devices that communicate, as printed.
GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=("
    r"\{(?:\{[^}]*\},?)*\}"  # {{0,1},{2,3}}
    r"|\[[\d,]*\]<=\[[\d,]*\](?:T\([\d,]*\))?"  # [2,2]<=[4], [2,2]<=[2,2]T(1,0)
    r"|mesh\[[^\]]*\]\s*\{[^}]*\})"  # mesh['data'=4] {'data'}
)


# -- The program -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class Instruction:
    """One line of a computation: `name = type opcode(arguments), attributes`.

    Attributes:
      name: the name, unique in the module.
      type: the type of the result, as printed; see `shapes` and `num_bytes`.
      opcode: the operation, such as "add", "while" or "all-reduce-start".
      operands: the operands as printed: names, with their types in older versions of
        XLA, or the value of a constant.
      attributes: the text after the parentheses.
      is_root: whether the result is the result of the computation.
      computation: the computation that contains the instruction.
    """

    name: str
    type: str
    opcode: str
    operands: list[str]
    attributes: str
    is_root: bool
    computation: Computation = dataclasses.field(repr=False)

    @property
    def operand_types(self) -> list[str]:
        """The type of each operand."""
        found = ((x, self.computation.get(_name(x))) for x in self.operands)
        return [x if y is None or _SHAPE.search(x) else y.type for x, y in found]

    def operand(self, i: int) -> "Instruction":
        """The instruction that computes operand i, behind copies; raises KeyError."""
        source = self.computation[_name(self.operands[i])]
        return source.operand(0) if source.opcode == "copy" else source

    @property
    def called(self) -> list[str]:
        """The names of the computations that run when the instruction runs.

        The function that a reduction applies to pairs of scalars is not included. The
        instruction that starts an asynchronous computation calls the computation.
        """
        if self.opcode.endswith(("-update", "-done")):
            return []
        names = []
        for attribute, one_or_more in _CALLED.findall(self.attributes):
            if attribute != "to_apply" or self.opcode in ("call", "call-start"):
                names += re.findall(r"[\w.\-]+", one_or_more)
        return names

    def attribute(self, pattern: re.Pattern[str]) -> str:
        """The group of `SOURCE`, `GROUPS` or `TRIPS` in the text; "" without match."""
        match = pattern.search(self.attributes)
        return match[1] if match else ""


@dataclasses.dataclass(frozen=True)
class Placed:
    """An instruction, and its place in the program.

    Attributes:
      instruction: the instruction.
      loops: the loops around the instruction.
      conditional: whether the instruction is in a branch, and may run less often.
      fused: whether the instruction is in a fusion.
    """

    instruction: Instruction
    loops: EnclosingLoops
    conditional: bool
    fused: bool


@dataclasses.dataclass(frozen=True)
class Module:
    """A program.

    Attributes:
      computations: all computations, by name.
      entry: the name of the computation that runs first.
    """

    computations: dict[str, Computation]
    entry: str

    def walk(
        self,
        name: str | None = None,
        loops: EnclosingLoops = (),
        conditional: bool = False,
        fused: bool = False,
    ) -> Iterator[Placed]:
        """All instructions that run, in order, through loops, branches and calls.

        Args:
          name: the first computation; None is the entry.
          loops: the loops around the computation.
          conditional: whether the computation is in a branch.
          fused: whether the computation is in a fusion.
        """
        for instruction in self.computations.get(name or self.entry, {}).values():
            yield Placed(instruction, loops, conditional, fused)
            opcode, inside = instruction.opcode, loops
            if opcode == "while":
                inside = (*loops, (instruction.name, self.trips(instruction)))
            kind = conditional or opcode == "conditional", fused or opcode == "fusion"
            for called in instruction.called:
                yield from self.walk(called, inside, *kind)

    def trips(self, loop: Instruction) -> int | None:
        """The trip count of a `while`; None if unknown.

        The programs of TPUs do not print trip counts. There, a counter goes from one
        constant to another in constant steps.
        """
        if printed := loop.attribute(TRIPS):
            return int(printed)
        called = {kind: _name(name) for kind, name in _CALLED.findall(loop.attributes)}
        try:
            test, body = (
                root(self.computations[called[kind]]) for kind in ("condition", "body")
            )
            index = test.operand(0).attribute(_INDEX)
            i = int(index)
            start, step = loop.operand(0).operand(i), body.operand(i)
            counts = step.opcode == "add" and step.operand(0).attribute(_INDEX) == index
            ends = start, step.operand(1), test.operand(1)
            first, by, stop = (int(end.operands[0]) for end in ends)
        except (KeyError, ValueError, IndexError):
            return None
        upwards = test.opcode == "compare" and "direction=LT" in test.attributes
        constant = all(end.opcode == "constant" for end in ends)
        known = counts and upwards and constant and by > 0
        return max(0, -(-(stop - first) // by)) if known else None


def argument_read(instruction: Instruction) -> str:
    """The name of the program's argument that an instruction reads, or ""."""
    if instruction.opcode == "parameter":
        return instruction.attribute(SOURCE)
    name = _name(instruction.operands[0]) if len(instruction.operands) == 1 else ""
    source = instruction.computation.get(name)
    return argument_read(source) if source else ""


def root(computation: Computation) -> Instruction:
    """The instruction that computes the result of a computation."""
    return max(computation.values(), key=lambda instruction: instruction.is_root)


def num_runs(loops: EnclosingLoops) -> int | None:
    """The number of runs of an instruction in these loops; None if unknown."""
    trips = [trip for _, trip in loops]
    return None if None in trips else math.prod(t for t in trips if t is not None)


def is_scattered(placed: Placed) -> bool:
    """True for an all-reduce in a TPU's fusion that reads only slices of the sum."""
    reduction = placed.instruction
    if reduction.opcode != "all-reduce" or not placed.fused:
        return False
    sums, readers = {reduction.name}, set()
    for x in reduction.computation.values():
        if sums.isdisjoint(map(_name, x.operands)):
            continue
        if x.opcode == "get-tuple-element":
            sums.add(x.name)
        else:
            readers.add(x.opcode)
    return readers == {"dynamic-slice"}


# -- Types and devices -----------------------------------------------------------------


def shapes(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """The dtype and shape of every array in a type.

    `(f32[2,3]{1,0}, pred[])` has `("f32", (2, 3))` and `("pred", ())`. A bounded
    dynamic dimension, `<=8`, counts as its bound.
    """
    return [
        (dtype, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d))
        for dtype, dims in _SHAPE.findall(type_)
    ]


def num_bytes(type_: str) -> int:
    """The bytes of all arrays in a type: `(f32[2,3]{1,0}, pred[])` has 25."""
    bits = 0
    for dtype, dims in shapes(type_):
        # Every name says how many bits, except for "pred", "token" and "opaque".
        digits = re.search(r"\d+", "pred8" if dtype == "pred" else dtype)
        bits += int(digits[0]) * math.prod(dims) if digits else 0
    return -(-bits // 8)


def group_members(groups: str) -> list[list[int]] | None:
    """The devices of each group, from any of the three forms that XLA prints.

    `[]` if all devices are one group; None if the form is unknown, or has a part of an
    axis, as in `mesh['a'=8] {'a':(2)4}`.
    """
    if groups in ("", "{}"):
        return []
    if groups.startswith("{"):
        return [_ints(group) for group in re.findall(r"\{([^{}]*)\}", groups)]
    if mesh := re.fullmatch(r"mesh\[(.*)\]\s*\{(('[^']*',?)*)\}", groups):
        sizes = re.findall(r"'([^']*)'\s*=\s*(\d+)", mesh[1])
        axes = re.findall(r"'([^']*)'", mesh[2])
        return groups_over({name: int(size) for name, size in sizes}, axes)
    iota = re.fullmatch(r"\[([\d,]*)\]<=\[([\d,]*)\](?:T\(([\d,]*)\))?", groups)
    if iota is None:
        return None
    shape, dims = _ints(iota[1]), _ints(iota[2])
    ids = np.arange(math.prod(dims)).reshape(dims)
    if iota[3]:
        ids = ids.transpose(_ints(iota[3]))
    return ids.reshape(shape).tolist()


def groups_over(sizes: dict[str, int], axes: Sequence[str]) -> list[list[int]]:
    """The groups of devices along axes of a mesh, whose sizes are outermost first."""
    shape, names = list(sizes.values()), list(sizes)
    last = [names.index(name) for name in axes]
    devices = np.arange(math.prod(shape)).reshape(shape)
    devices = np.moveaxis(devices, last, range(-len(last), 0))
    return devices.reshape(-1, math.prod(shape[i] for i in last)).tolist()


def axes_of(groups: str, mesh: Mesh | AbstractMesh | None) -> tuple[str, ...] | None:
    """The mesh axes whose devices form these groups; None if unknown."""
    members = group_members(groups)
    if members is None or mesh is None:
        return None
    sizes = {name: mesh.shape[name] for name in mesh.axis_names}
    wide = [name for name, size in sizes.items() if size > 1]
    if not members:
        return tuple(wide)
    target = set(map(frozenset, members))
    for number in range(len(wide) + 1):
        for axes in itertools.combinations(wide, number):
            if set(map(frozenset, groups_over(sizes, axes))) == target:
                return axes
    return None


# -- The parser ------------------------------------------------------------------------


def parse_hlo(text: str) -> Module:
    """Parses `compiled.as_text()`, or a file that XLA dumped.

    Raises:
      ValueError: if the text is not an HLO module with an entry.
    """
    computations: dict[str, Computation] = {}
    current: Computation = {}
    entry = None
    for line in text.splitlines():
        if head := _HEAD.match(line):
            current = computations[head[2]] = {}
            entry = head[2] if head[1] else entry
        elif instruction := _instruction(_COMMENT.sub("", line), current):
            current[instruction.name] = instruction
    if entry is None:
        raise ValueError(
            "The text must be an optimised HLO module with an ENTRY computation, but "
            f"it begins with {text[:40]!r}. Pass compiled.as_text(), or a file "
            "*after_optimizations.txt that --xla_dump_to wrote."
        )
    return Module(computations, entry)


def _instruction(line: str, computation: Computation) -> Instruction | None:
    call = _LINE.match(line)
    if call is None:
        return None
    is_root, name, type_, opcode = call.groups()
    operands, stop = _parts(line, call.end() - 1)
    what = name, type_, opcode, operands, line[stop:], bool(is_root)
    return Instruction(*what, computation)


def _name(operand: str) -> str:
    """The name in an operand, without the type that may precede the name."""
    return operand.split(" ")[-1].lstrip("%")


def _parts(text: str, start: int) -> tuple[list[str], int]:
    """The comma-separated parts of the parenthesis at `start`, and the end's index."""
    parts, depth, begin = [], 0, start + 1
    for i in range(start, len(text)):
        depth += (text[i] in "({[") - (text[i] in ")}]")
        if depth == 0 or (depth == 1 and text[i] == ","):
            parts.append(text[begin:i].strip())
            begin = i + 1
        if depth == 0:
            break
    return list(filter(None, parts)), begin


def _ints(text: str) -> list[int]:
    return [int(n) for n in text.split(",") if n.strip()]
