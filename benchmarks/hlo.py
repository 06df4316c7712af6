"""What XLA made of an accumulation: read in the optimised HLO, which is what runs.

An addition to the accumulator may be a kernel of its own (a pass over memory), a part
of the kernel that multiplies the matrices, or the `beta = 1` of a matrix product of a
library, `total = 1 * total + a @ b`: then it costs next to nothing.
"""

import dataclasses
import math
import re
from collections.abc import Iterable, Iterator
from typing import Any

from ga_optax import _audit

_GEMM = re.compile(r'custom_call_target="__cublas\$(?:gemm|lt\$matmul)')
# In older programs the backend's configuration is a string with escaped quotes.
_BETA = re.compile(r'\\?"beta\\?"\s*:\s*([\d.]+(?:[eE][+-]?\d+)?)')
_TRIPS = re.compile(r'known_trip_count\\?"?\s*:\s*\{\s*\\?"?n\\?"?\s*:\s*\\?"?(\d+)')
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")


@dataclasses.dataclass(frozen=True)
class Placed:
    """An instruction that runs, and the trip counts of the loops around it."""

    instruction: Any
    computation: Any
    trips: tuple[int | None, ...]


class Program:
    """An optimised HLO module, to be walked."""

    def __init__(self, text: str) -> None:
        """Parses `compiled.as_text()`, or a dump of XLA's."""
        self.computations, entry = _audit._parse(text)
        if entry is None:
            raise ValueError(
                "The text must be an optimised HLO module with an ENTRY computation, "
                f"but it begins with {text[:40]!r}. Pass compiled.as_text()."
            )
        self.entry: str = entry

    def walk(
        self, name: str | None = None, trips: tuple[int | None, ...] = ()
    ) -> Iterator[Placed]:
        """What runs, loops and branches entered, a fusion taken as the one it is."""
        computation = self.computations.get(name or self.entry)
        if computation is None:
            return
        for instruction in computation.instructions:
            yield Placed(instruction, computation, trips)
            if instruction.opcode == "fusion":
                continue
            inside = trips
            if instruction.opcode == "while":
                known = _TRIPS.search(instruction.attributes)
                count = int(known[1]) if known else None
                inside = (*trips, count)
            for other in _audit._called(instruction.attributes):
                yield from self.walk(other, inside)

    def inside(self, instruction: Any) -> list[Any]:
        """The instructions of a fusion, of all that it calls; else the one itself."""
        if instruction.opcode != "fusion":
            return [instruction]
        return [
            within
            for name in _audit._called(instruction.attributes)
            for inner in self.computations[name].instructions
            for within in self.inside(inner)
        ]


def shape(type_: str) -> tuple[int, ...]:
    """The first shape in a type, without its ones: (2, 3) for `(f32[1,2,3]{2,1,0})`."""
    found = _audit._SHAPE.search(type_)
    dims = found[2].split(",") if found and found[2] else []
    return tuple(int(d) for d in dims if d != "1")


@dataclasses.dataclass(frozen=True)
class Adds:
    """What became of the additions, counted as often as they run in a micro-step.

    Attributes:
      separate: kernels that add into a gradient-sized buffer and multiply no matrices.
      separate_elements: the elements that they add, which tells many small ones, layer
        by layer, from few large ones.
      in_gemm: fused kernels that multiply matrices and add.
      beta_one: matrix products of the library that took the accumulator as operand.
      beta_zero: matrix products of the library with a gradient for a result, without.
    """

    separate: int = 0
    separate_elements: int = 0
    in_gemm: int = 0
    beta_one: int = 0
    beta_zero: int = 0


def count_adds(
    text: str, shapes: Iterable[tuple[int, ...]], k: int | None = None
) -> Adds | None:
    """What the additions of a micro-step became.

    Args:
      text: the optimised HLO.
      shapes: those of the gradient's leaves, and of their slices where layers are
        scanned. No activation may have one of them.
      k: the trip count of the loop over micro-batches: what stands outside such loops,
        the optimizer, is not counted. None counts the whole program.

    Returns:
      `Adds`; None where there is no loop of k iterations, or where one inside it does
      not say how often it runs.
    """
    wanted = {tuple(d for d in dims if d != 1) for dims in shapes}
    program = Program(text)
    counts = dict.fromkeys((f.name for f in dataclasses.fields(Adds)), 0)
    found = k is None
    for placed in program.walk():
        trips = placed.trips
        if k is not None:
            if not trips or trips[0] != k:
                continue
            found, trips = True, trips[1:]
        kind = _kind(program, placed.instruction, wanted)
        if kind is None:
            continue
        if None in trips:
            return None
        times = math.prod(t for t in trips if t is not None)
        counts[kind] += times
        if kind == "separate":
            counts["separate_elements"] += times * _added(program, placed, wanted)
    return Adds(**counts) if found else None


def _kind(program: Program, instruction: Any, wanted: set[Any]) -> str | None:
    """Which of the fields of `Adds` an instruction counts for."""
    if instruction.opcode not in ("add", "custom-call", "fusion"):
        return None
    inner = program.inside(instruction)
    # A fusion may slice the operands of one product of the library.
    for gemm in inner:
        if _GEMM.search(gemm.attributes) and shape(gemm.type) in wanted:
            beta = _BETA.search(gemm.attributes)
            operands = sum(1 for _ in _audit._split_operands(gemm.operands))
            takes = beta is not None and float(beta[1]) == 1 and operands >= 3
            return "beta_one" if takes else "beta_zero"
    if not _adds(inner, wanted):
        return None
    return "in_gemm" if any(i.opcode == "dot" for i in inner) else "separate"


def _adds(instructions: list[Any], wanted: set[Any]) -> list[Any]:
    """The additions of arrays that have the shape of a gradient."""
    return [i for i in instructions if i.opcode == "add" and shape(i.type) in wanted]


def _added(program: Program, placed: Placed, wanted: set[Any]) -> int:
    """The elements that a kernel adds."""
    adds = _adds(program.inside(placed.instruction), wanted)
    return sum(math.prod(shape(i.type)) for i in adds)


def dot_flops(text: str) -> int:
    """The multiplications and additions of all matrix products, on one device.

    Raises:
      ValueError: where a loop around one does not say how often it runs.
    """
    program, total = Program(text), 0
    for placed in program.walk():
        for instruction in program.inside(placed.instruction):
            if instruction.opcode != "dot":
                continue
            if None in placed.trips:
                raise ValueError(
                    "Every loop around a matrix product must have a known trip count, "
                    f"but {instruction.name} stands in loops of {placed.trips}. Scan "
                    "over arrays of static length."
                )
            types = _types(program, instruction)
            left = next(_audit._split_operands(instruction.operands)).strip()
            left_type = left if "[" in left else types[left.lstrip("%")]
            dims = _dims(left_type)
            contracted = _CONTRACTED.search(instruction.attributes)
            axes = [int(a) for a in contracted[1].split(",") if a] if contracted else []
            flops = 2 * math.prod(_dims(instruction.type))
            flops *= math.prod(dims[a] for a in axes)
            total += flops * math.prod(t for t in placed.trips if t is not None)
    return total


def _types(program: Program, instruction: Any) -> dict[str, str]:
    """The types in the computation that an instruction stands in."""
    return next(
        c.types
        for c in program.computations.values()
        if any(i is instruction for i in c.instructions)
    )


def _dims(type_: str) -> list[int]:
    found = _audit._SHAPE.search(type_)
    return [int(d) for d in found[2].split(",") if d] if found else []
