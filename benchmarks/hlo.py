"""Reads an accumulation from the optimised HLO, the program that runs.

`traffic` counts the bytes that the kernels of a program read and write, `count_adds`
the kinds of additions, and `dot_flops` the arithmetic of matrix products.

XLA compiles an addition to the accumulator in one of three ways: as a separate kernel,
a pass over memory; as part of the kernel that multiplies the matrices; or as the
`beta = 1` of a library's matrix product, `total = 1 * total + a @ b`, which costs next
to nothing.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterable

from ga_optax._compiled import audit

_GEMM = re.compile(r'custom_call_target="__cublas\$(?:gemm|lt\$matmul)')
# Older versions print the backend's configuration as a string with escaped quotes.
_BETA = re.compile(r'\\?"beta\\?"\s*:\s*([\d.]+(?:[eE][+-]?\d+)?)')
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Adds:
    """The kinds of additions, with the number of runs in a micro-step.

    Attributes:
      separate: kernels that add into a gradient-sized buffer and multiply no matrices.
      separate_elements: the elements that these kernels add: many small kernels, layer
        by layer, differ in this number from few large kernels.
      in_gemm: fused kernels that multiply matrices and add.
      beta_one: a library's matrix products that take the accumulator as an operand.
      beta_zero: a library's matrix products that only compute a gradient.
    """

    separate: int = 0
    separate_elements: int = 0
    in_gemm: int = 0
    beta_one: int = 0
    beta_zero: int = 0


def count_adds(text: str, shapes: Iterable[Shape], k: int | None = None) -> Adds | None:
    """Counts what the additions of a micro-step became.

    Args:
      text: the optimised HLO.
      shapes: the shapes of the gradient's leaves, and of their slices if layers are
        scanned. No activation may have one of these shapes.
      k: the trip count of the loop over micro-batches. What is outside such loops, the
        optimizer, does not count. None counts the whole program.

    Returns:
      `Adds`, or None if there is no loop of k iterations, or if a loop inside it has no
      known trip count.
    """
    wanted = {_without_ones(dims) for dims in shapes}
    module = audit.parse_hlo(text)
    counts = dict.fromkeys((f.name for f in dataclasses.fields(Adds)), 0)
    is_inside = k is None
    for placed in module.walk():
        if placed.fused:  # a part of one kernel
            continue
        loops = placed.loops
        if k is not None:
            if not loops or loops[0][1] != k:
                continue
            is_inside, loops = True, loops[1:]
        inner = _inside(module, placed.instruction)
        kind = _kind(placed.instruction, inner, wanted)
        if kind is None:
            continue
        times = audit.num_runs(loops)
        if times is None:
            return None
        counts[kind] += times
        if kind == "separate":
            elements = sum(math.prod(_shape(i.type)) for i in _adds(inner, wanted))
            counts["separate_elements"] += times * elements
    return Adds(**counts) if is_inside else None


def _kind(
    instruction: audit.Instruction, inner: list[audit.Instruction], wanted: set[Shape]
) -> str | None:
    """The field of `Adds` that an instruction counts for."""
    if instruction.opcode not in ("add", "custom-call", "fusion"):
        return None
    # A fusion may slice the operands of one of the library's products.
    for gemm in inner:
        if _GEMM.search(gemm.attributes) and _shape(gemm.type) in wanted:
            beta = _BETA.search(gemm.attributes)
            takes = beta is not None and float(beta[1]) == 1 and len(gemm.operands) >= 3
            return "beta_one" if takes else "beta_zero"
    if not _adds(inner, wanted):
        return None
    return "in_gemm" if any(i.opcode == "dot" for i in inner) else "separate"


def _adds(
    instructions: list[audit.Instruction], wanted: set[Shape]
) -> list[audit.Instruction]:
    """The additions of arrays that have the shape of a gradient."""
    return [i for i in instructions if i.opcode == "add" and _shape(i.type) in wanted]


# -- Traffic ---------------------------------------------------------------------------

# What reads and writes nothing: names, and the ends of transfers that are under way.
_FREE = {"after-all", "bitcast", "constant", "get-tuple-element", "parameter", "tuple"}
_JOINED = 'custom_call_target="ConcatBitcast"'  # slices that were fetched, as one array
# An array whose layout names another memory than the device's, S(0): the fast memory of
# a TPU's core, or that of the host.
_ELSEWHERE = re.compile(r"\w+\[[0-9,]*\]\{[^}]*S\([1-9]\d*\)\}")


@dataclasses.dataclass(frozen=True)
class Traffic:
    """The traffic between the kernels of a program and a device's memory.

    Attributes:
      num_bytes: the bytes of all operands and results; an operand counts once a kernel.
      kernels: the number of kernels that read or write more than a kilobyte. A fetch to
        fast memory is no kernel.
      copied: the bytes that are only copied within the device's memory.
      branches: the number of conditionals that run.
    """

    num_bytes: int = 0
    kernels: int = 0
    copied: int = 0
    branches: int = 0


def _sum(traffics: Iterable[Traffic], times: int = 1) -> Traffic:
    columns = zip(*map(dataclasses.astuple, (Traffic(), *traffics)), strict=True)
    return Traffic(*(times * sum(column) for column in columns))


def traffic(text: str, pick: Callable[..., Traffic] = max) -> Traffic:
    """Counts what a program reads and writes.

    A kernel counts as if it read and wrote its arrays whole, so the bytes are right for
    programs that slice none, such as a micro-step whose gradients are given.

    Args:
      text: the optimised HLO.
      pick: `max` takes the branch of a conditional that has the most traffic, and `min`
        the one with the least.

    Raises:
      ValueError: if a loop has no known trip count.
    """
    module = audit.parse_hlo(text)

    def of(name: str) -> Traffic:
        return _sum(map(one, module.computations.get(name, {}).values()))

    def one(instruction: audit.Instruction) -> Traffic:
        opcode = instruction.opcode
        if opcode == "conditional":
            branch = pick(map(of, instruction.called), key=lambda t: t.num_bytes)
            return _sum([branch, Traffic(branches=1)])
        if opcode not in ("call", "while"):
            return _of_kernel(instruction, _inside(module, instruction))
        trips = module.trips(instruction) if opcode == "while" else 1
        if trips is None:
            raise ValueError(f"The loop {instruction.name} has no known trip count.")
        return _sum(map(of, instruction.called), trips)

    return of(module.entry)


def _inside(
    module: audit.Module, instruction: audit.Instruction
) -> list[audit.Instruction]:
    """The instructions of a fusion; `[instruction]` for any other instruction."""
    if instruction.opcode != "fusion":
        return [instruction]
    walks = map(module.walk, instruction.called)
    return [placed.instruction for walk in walks for placed in walk]


def _of_kernel(kernel: audit.Instruction, inner: list[audit.Instruction]) -> Traffic:
    free = kernel.opcode in _FREE or kernel.opcode.endswith("-done")
    if free or _JOINED in kernel.attributes:
        return Traffic()
    if kernel.opcode in ("copy-start", "slice-start"):
        # The type holds what is read, what is written, and a number of four bytes.
        source = kernel.operand_types[0]
        size = audit.num_bytes(kernel.type) - audit.num_bytes(source) - 4
        ends = [_resident(source), _resident(kernel.type) - _resident(source)]
        return Traffic(size * sum(map(bool, ends)), copied=size if all(ends) else 0)
    operands = dict(zip(kernel.operands, kernel.operand_types, strict=True))
    moved = sum(map(_resident, (*operands.values(), kernel.type)))
    copies = all(i.opcode in _FREE or i.opcode == "copy" for i in inner)
    return Traffic(moved, moved > 1024, _resident(kernel.type) if copies else 0)


def _resident(type_: str) -> int:
    """The bytes of the arrays in a type that lie in the device's memory."""
    return audit.num_bytes(_ELSEWHERE.sub("", type_))


# -- Arithmetic ------------------------------------------------------------------------


def dot_flops(text: str) -> int:
    """Counts the multiplications and additions of all matrix products, on one device.

    Raises:
      ValueError: if a product is in a loop without a known trip count.
    """
    total = 0
    for placed in audit.parse_hlo(text).walk():
        product = placed.instruction
        if product.opcode != "dot":
            continue
        times = audit.num_runs(placed.loops)
        if times is None:
            raise ValueError(
                "Every loop around a matrix product must have a known trip count, "
                f"but {product.name} is in the loops {placed.loops}. Scan over arrays "
                "of static length."
            )
        left = _dims(product.operand_types[0])
        contracted = _CONTRACTED.search(product.attributes)
        axes = [int(a) for a in contracted[1].split(",") if a] if contracted else []
        flops = 2 * math.prod(_dims(product.type)) * math.prod(left[a] for a in axes)
        total += times * flops
    return total


def _dims(type_: str) -> Shape:
    """The first shape in a type."""
    all_shapes = audit.shapes(type_)
    return all_shapes[0][1] if all_shapes else ()


def _without_ones(dims: Shape) -> Shape:
    return tuple(d for d in dims if d != 1)


def _shape(type_: str) -> Shape:
    """The first shape in a type, without its ones: (2, 3) for `(f32[1,2,3]{2,1,0})`."""
    return _without_ones(_dims(type_))
