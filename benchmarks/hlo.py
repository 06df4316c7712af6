"""What XLA made of an accumulation, read from the optimised HLO, the program that runs.

An addition to the accumulator can become one of three things. It may be a kernel of its
own, a pass over memory. It may be part of the kernel that multiplies the matrices. Or
it may be the `beta = 1` of a library's matrix product, `total = 1 * total + a @ b`,
which costs next to nothing.
"""

import dataclasses
import math
import re
from collections.abc import Iterable

from ga_optax import _hlo

_GEMM = re.compile(r'custom_call_target="__cublas\$(?:gemm|lt\$matmul)')
# Older versions print the backend's configuration as a string with escaped quotes.
_BETA = re.compile(r'\\?"beta\\?"\s*:\s*([\d.]+(?:[eE][+-]?\d+)?)')
_CONTRACTED = re.compile(r"\blhs_contracting_dims=\{([\d,]*)\}")

Shape = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Adds:
    """What became of the additions, counted as often as they run in a micro-step.

    Attributes:
      separate: kernels that add into a gradient-sized buffer and multiply no matrices.
      separate_elements: the elements that these kernels add. They tell many small
        kernels, layer by layer, from few large ones.
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
    module = _hlo.parse(text)
    counts = dict.fromkeys((f.name for f in dataclasses.fields(Adds)), 0)
    found = k is None
    for placed in module.walk(into_fusions=False):
        loops = placed.loops
        if k is not None:
            if not loops or loops[0][1] != k:
                continue
            found, loops = True, loops[1:]
        inner = module.inside(placed.instruction)
        kind = _kind(placed.instruction, inner, wanted)
        if kind is None:
            continue
        times = _hlo.times(loops)
        if times is None:
            return None
        counts[kind] += times
        if kind == "separate":
            elements = sum(math.prod(_shape(i.type)) for i in _adds(inner, wanted))
            counts["separate_elements"] += times * elements
    return Adds(**counts) if found else None


def _kind(
    instruction: _hlo.Instruction, inner: list[_hlo.Instruction], wanted: set[Shape]
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
    instructions: list[_hlo.Instruction], wanted: set[Shape]
) -> list[_hlo.Instruction]:
    """The additions of arrays that have the shape of a gradient."""
    return [i for i in instructions if i.opcode == "add" and _shape(i.type) in wanted]


def dot_flops(text: str) -> int:
    """Counts the multiplications and additions of all matrix products, on one device.

    Raises:
      ValueError: if a product is in a loop without a known trip count.
    """
    total = 0
    for placed in _hlo.parse(text).walk():
        product = placed.instruction
        if product.opcode != "dot":
            continue
        times = _hlo.times(placed.loops)
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
    found = _hlo.shapes(type_)
    return found[0][1] if found else ()


def _without_ones(dims: Shape) -> Shape:
    return tuple(d for d in dims if d != 1)


def _shape(type_: str) -> Shape:
    """The first shape in a type, without its ones: (2, 3) for `(f32[1,2,3]{2,1,0})`."""
    return _without_ones(_dims(type_))
