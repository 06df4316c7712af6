"""What `verify` returns: a `Report`, and the page that it prints."""

import dataclasses
import enum
from collections.abc import Iterator

__all__ = ["Cause", "LeafReport", "Report"]


class Cause(enum.Enum):
    """Why an accumulated gradient differs from the undivided one, or that it does not.

    The value of each is its diagnosis.
    """

    EQUAL = "The two gradients are equal, number for number."
    ROUNDING = (
        "The two gradients differ by rounding alone: the same terms were added in "
        "another order."
    )
    SCALE = (
        "The loss is not a mean over the examples of its batch, so that its size "
        "depends on the size of the batch."
    )
    WEIGHTS = (
        "The micro-batches count in the wrong proportions: the gradient of each is "
        "right, but their mean needs other weights."
    )
    CROSS_EXAMPLE = (
        "The examples of a batch see each other in this loss, so that the loss of a "
        "batch is no combination of the losses of its parts, with any weights."
    )
    RANDOMNESS = (
        "The loss depends on more than its examples: on random numbers, or on the "
        "order or the position of the examples in the batch."
    )
    NOT_FINITE = "A loss or a gradient is not finite: it holds an inf or a NaN."
    UNDETERMINED = (
        "The two gradients differ, and this batch cannot tell why: there are so few "
        "micro-batches or parameters that several causes explain the numbers."
    )


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """How one leaf of the gradient compares.

    Attributes:
      name: its path in the parameters.
      shape: its shape.
      dtype: its dtype, in which `max_ulp` counts.
      max_ulp: how many representable numbers lie between the two gradients, at most
        over the elements. Large next to a zero too, where it means little.
      max_abs: the largest absolute difference of the two gradients in that dtype.
      relative: ‖G - M‖ / ‖G‖ of the leaf in float64, G undivided and M accumulated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    max_ulp: int
    max_abs: float
    relative: float


@dataclasses.dataclass(frozen=True)
class Report:
    """What `verify` found; `print` it to read it.

    Attributes:
      ok: whether accumulation gives the undivided batch's gradient: whether the cause
        is `EQUAL` or `ROUNDING`.
      cause: why it does not.
      message: what is wrong, by how much, on which leaf, and what to do: one paragraph.
      weights: the weights that reproduce the undivided batch, Σ wᵢ·gᵢ = G, where the
        cause is `WEIGHTS` or `SCALE`; their ratios are the counts. Otherwise None.
      max_ulp: the largest of the leaves; None where the cause is `NOT_FINITE`.
      relative: ‖G - M‖ / ‖G‖ over all leaves, in float64; 0 where both are zero.
      leaves: a `LeafReport` for each leaf, in the order of the tree.
      mend: the line of code that mends it, or what to do where no line can.
      dtype: the narrowest floating dtype in which the loss computed for the diagnosis.
      losses: the undivided batch's loss, and the accumulated one.
      num_microbatches: k.
      batch_size: rows of the undivided batch.
      diagnosis: what is wrong, in sentences.
      extent: how large it is, in sentences.
    """

    ok: bool
    cause: Cause
    message: str
    weights: tuple[float, ...] | None
    max_ulp: int | None
    relative: float
    leaves: tuple[LeafReport, ...]
    mend: str
    dtype: str
    losses: tuple[float, float]
    num_microbatches: int
    batch_size: int
    diagnosis: tuple[str, ...]
    extent: tuple[str, ...]

    def __str__(self) -> str:
        k, rows = self.num_microbatches, self.batch_size
        verdict = "The same gradient" if self.ok else "NOT the same gradient"
        if self.cause is Cause.NOT_FINITE:
            verdict = "Cannot be compared"
        lines = [
            f"{verdict}  ({self.cause.name})",
            "",
            (
                f"Compared: the gradient over one batch of {rows} rows, and the "
                "gradient accumulated over the same rows in "
                f"{k} micro-batch{'es' * (k > 1)} of {rows // k}."
            ),
        ]
        for title, paragraphs in (
            ("What was found" if self.ok else "What is wrong", self.diagnosis),
            ("How large it is", self.extent),
            ("What to do", (self.mend,)),
        ):
            lines += ["", title, *(f"  {p}" for p in paragraphs)]
        lines = [part for line in lines for part in _wrap(line)]
        if self.leaves:
            lines += ["", *_table(self.leaves)]
        return "\n".join(lines)


def _table(leaves: tuple[LeafReport, ...]) -> Iterator[str]:
    """A row for each leaf, and what the columns mean."""
    header = ("leaf", "shape", "dtype", "ULPs", "difference", "relative")
    body = [
        (
            leaf.name.removeprefix("leaf "),
            str(leaf.shape),
            leaf.dtype,
            str(leaf.max_ulp),
            f"{leaf.max_abs:.1e}",
            f"{leaf.relative:.1e}",
        )
        for leaf in leaves
    ]
    widths = [max(map(len, column)) for column in zip(header, *body, strict=True)]
    for row in (header, *body):
        left = "  ".join(x.ljust(w) for x, w in zip(row[:3], widths, strict=False))
        right = "  ".join(x.rjust(w) for x, w in zip(row[3:], widths[3:], strict=True))
        yield f"{left}  {right}"
    yield ""
    yield from _wrap(
        "leaf: an array of the parameters. ULPs and difference: how many numbers of "
        "the dtype lie between the two gradients, and how far apart they are, at most, "
        "as training computes them. relative: the norm of the difference over that of "
        "the undivided gradient, in float64 where the loss allows it."
    )


def _wrap(line: str, width: int = 88) -> Iterator[str]:
    """Breaks a line at spaces, and indents what follows as it was."""
    indent = " " * (len(line) - len(line.lstrip()))
    out = ""
    for word in line.split():
        if out and len(indent) + len(out) + 1 + len(word) > width:
            yield indent + out
            out = word
        else:
            out = f"{out} {word}" if out else word
    yield indent + out if out else ""
