"""The result of `verify`: a `Report`, and the page that it prints."""

import dataclasses
import enum
import math

from ga_optax._text import columns, wrap


class Cause(enum.Enum):
    """The cause of a difference between the accumulated and the undivided gradient.

    The value is the diagnosis. `EQUAL` and `ROUNDING` are no difference to mend.
    """

    EQUAL = "The two gradients are equal, number for number."
    ROUNDING = "The two gradients differ only by rounding, as sums in another order do."
    SCALE = "The loss is not a mean over its batch: it depends on the batch size."
    WEIGHTS = "The micro-batches' gradients are right, but their weights are wrong."
    AXIS = "The batch is split along the wrong axis: its examples lie along another."
    CROSS_EXAMPLE = "The rows of a batch depend on each other in this loss."
    PROMISE = "A promise of ga_optax.rowwise does not hold: its rows need each other."
    RANDOMNESS = "The loss depends on random numbers, or on the order of its examples."
    NOT_FINITE = "A loss or a gradient is not finite: it contains an inf or a NaN."
    UNDETERMINED = "Neither the program of the loss nor its numbers tell what is wrong."


MOST = 5  # leaves in a page
# The causes with which accumulation gives the undivided batch's gradient.
SAME = (Cause.EQUAL, Cause.ROUNDING)


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """The comparison of one leaf of the gradient.

    Attributes:
      name: its path in the parameters.
      shape: its shape.
      dtype: its dtype, in which `max_ulp` counts.
      max_ulp: how many representable numbers lie between the two gradients, at most
        over the elements. It is large near a zero, too, where it means little, and if
        the gradients differ by more than rounding.
      max_abs: the largest absolute difference of the two gradients in that dtype.
      relative: ‖G - M‖ / ‖G‖ of the leaf in float64, G undivided and M accumulated.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    max_ulp: int
    max_abs: float
    relative: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The result of `verify`; `print` shows it as a page.

    Attributes:
      ok: True if accumulation gives the gradient of the undivided batch, that is, if
        the cause is `EQUAL` or `ROUNDING`.
      cause: the cause of the difference.
      message: the diagnosis, the size of the difference, and the fix: one paragraph.
      weights: the weights that reproduce the undivided batch, Σ wᵢ·gᵢ = G, if the cause
        is `WEIGHTS` or `SCALE`; their ratios are the counts. Otherwise None.
      max_ulp: the largest of the leaves; None if the cause is `NOT_FINITE`.
      relative: ‖G - M‖ / ‖G‖ over all leaves, in float64; 0 if both are zero.
      leaves: a `LeafReport` for each leaf, in the order of the tree.
      worst: the five of them that differ most, the worst first.
      fix: the line of code that fixes the difference, or other advice.
      warnings: mistakes that may be in both gradients, in sentences; () for most
        losses.
      dtype: the lowest floating precision that the loss had in the diagnosis.
      losses: the loss of the undivided batch, and the accumulated loss.
      num_microbatches: k.
      batch_size: the number of rows of the undivided batch.
      diagnosis: the cause and the detail, in sentences.
      extent: the size of the difference, in sentences.
    """

    ok: bool
    cause: Cause
    message: str
    weights: tuple[float, ...] | None
    max_ulp: int | None = None
    relative: float = math.nan
    leaves: tuple[LeafReport, ...] = ()
    worst: tuple[LeafReport, ...] = ()
    fix: str
    warnings: tuple[str, ...] = ()
    dtype: str
    losses: tuple[float, float]
    num_microbatches: int
    batch_size: int
    diagnosis: tuple[str, ...]
    extent: tuple[str, ...]

    def __str__(self) -> str:
        k, rows = self.num_microbatches, self.batch_size
        verdict = "the same gradient" if self.ok else "NOT the same gradient"
        if math.isnan(self.relative):
            verdict = "cannot be compared"
        parts = f"{k} micro-batch{'es' * (k > 1)} of {rows // k} rows"
        compared = f"Compared: one batch of {rows} rows, and the same rows as {parts}."
        head = f"Micro-batches, each by itself: {verdict} ({self.cause.name})"
        lines = [head, "", *wrap(compared)]
        for title, paragraphs in {
            "What was found" if self.ok else "What is wrong": self.diagnosis,
            "How large it is": self.extent,
            "What to do": (self.fix,),
            "Warning": self.warnings,
        }.items():
            lines += ["", title] if paragraphs else []
            lines += [line for text in paragraphs for line in wrap(f"  {text}")]
        if len(self.leaves) > MOST:
            lines += ["", *_table(self.worst, ulps=self.ok)]
            lines += [f"{len(self.leaves)} leaves: print(report.table()) shows all."]
        elif self.leaves:
            lines += ["", self.table()]
        return "\n".join(lines)

    def table(self) -> str:
        """The table of all leaves; the page has the five that differ most."""
        return "\n".join(_table(self.leaves, ulps=self.ok))


def _table(leaves: tuple[LeafReport, ...], ulps: bool) -> list[str]:
    """A row for each leaf, and a legend; ULPs only if the difference is rounding."""
    rows = [["leaf", "shape", "dtype", "ULPs", "difference", "relative"]]
    for leaf in leaves:
        figures = f"{leaf.max_ulp} {leaf.max_abs:.1e} {leaf.relative:.1e}".split()
        name = leaf.name.removeprefix("leaf ")
        rows.append([name, str(leaf.shape), leaf.dtype, *figures])
    legend = (
        "difference: how far apart the two gradients are at most, as training computes "
        "them. relative: the norm of the difference over that of the undivided "
        "gradient, in float64 if the loss allows it."
    )
    if ulps:
        legend = f"ULPs: how many numbers of the dtype lie between them. {legend}"
    else:
        rows = [[*row[:3], *row[4:]] for row in rows]
    return [*columns(rows, left=(0, 1, 2)), "", *wrap(legend)]
