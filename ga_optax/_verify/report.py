"""The result of `verify`: a `Report`, and the page that it prints."""

import dataclasses
import enum

from ga_optax._text import ruled, wrap


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


@dataclasses.dataclass(frozen=True)
class LeafReport:
    """The comparison of a leaf of the gradient.

    Attributes:
      shape: the shape.
      dtype: the dtype.
      max_ulp: how many numbers of the dtype lie between the two gradients at most, as
        training computes them; many near zero, or if the cause is no rounding.
      relative: ‖G - M‖ of the leaf over ‖G‖ of all leaves, in float64.
    """

    shape: tuple[int, ...]
    dtype: str
    max_ulp: int
    relative: float


@dataclasses.dataclass(frozen=True)
class Report:
    """The result of `verify`; `print` shows it as a page.

    With G, the gradient of the undivided batch, and M, the accumulated one:

    Attributes:
      cause: the cause of the difference.
      detail: what the loss shows of the cause, with the lines of your code; or "".
      extent: the size of the difference, both losses, and the precision in which they
        are compared: float64, unless the loss calls code for other dtypes.
      fix: the line of code that fixes the difference, or other advice.
      warnings: mistakes that may be in both gradients; () for most losses.
      weights: the weights that reproduce the undivided batch, Σ wᵢ·gᵢ = G, if the cause
        is `WEIGHTS` or `SCALE`; their ratios are the counts. Otherwise None.
      relative: ‖G - M‖ / ‖G‖ over all leaves; 0 if both are zero.
      leaves: by name of a leaf, a `LeafReport`.
    """

    cause: Cause
    detail: str
    extent: str
    fix: str
    warnings: tuple[str, ...]
    weights: tuple[float, ...] | None
    relative: float
    leaves: dict[str, LeafReport]

    @property
    def max_ulp(self) -> int:
        """The largest `max_ulp` of the leaves."""
        return max(x.max_ulp for x in self.leaves.values())

    @property
    def ok(self) -> bool:
        """True if accumulation gives the gradient of the undivided batch."""
        return self.cause in (Cause.EQUAL, Cause.ROUNDING)

    @property
    def message(self) -> str:
        """The diagnosis, the size of the difference, and the fix: one paragraph."""
        texts = self.cause.value, self.detail, self.extent, self.fix
        return " ".join(filter(None, texts))

    def table(self) -> str:
        """A table with a line for each leaf."""
        rows = [["leaf", "shape", "dtype", "ULPs", "relative"]]
        for name, x in self.leaves.items():
            figures = str(x.max_ulp), f"{x.relative:.1e}"
            rows.append([name.removeprefix("leaf "), str(x.shape), x.dtype, *figures])
        return "\n".join(ruled(rows, left=(0, 1, 2)))

    def __str__(self) -> str:
        verdict = "the same gradient" if self.ok else "NOT the same gradient"
        lines = [f"Micro-batches, each by itself: {verdict} ({self.cause.name})"]
        for title, texts in {
            "What was found": (self.cause.value, self.detail),
            "How large it is": (self.extent,),
            "What to do": (self.fix,),
            "Warning": self.warnings,
        }.items():
            lines += ["", title] if texts else []
            lines += [line for x in filter(None, texts) for line in wrap(f"  {x}")]
        return "\n".join(lines)
