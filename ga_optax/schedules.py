"""Batch-size ramps, as an `every_k_schedule` of `MultiSteps`.

Large models begin training with a small batch and end with a large one. If the size of
a micro-batch is fixed, that is a ramp of k, the number of micro-steps in a window:

    k(step)  =  batch size of the step / size of a micro-batch

Papers describe ramps over the examples or tokens seen so far, while an optimizer counts
steps. A step that begins after `seen` examples belongs to the last stage whose
threshold is at most `seen`. So stage j + 1 begins at

    first[j+1]  =  first[j] + ceil((threshold[j+1] - seen[j]) / batch[j])
    seen[j+1]   =  seen[j] + (first[j+1] - first[j]) · batch[j]

with nothing seen before step 0. The boundaries are computed in integers when the ramp
is made, so none is off by one; a step only looks up its stage.

Give all sizes in one unit, examples or tokens.

How papers describe their ramps:

* GPT-3 (Brown et al., "Language Models are Few-Shot Learners", 2020, appendix B):
  linearly from 32k tokens to the full batch over the first 4 to 12 billion tokens,
  depending on the size of the model.
* Megatron-LM (`--rampup-batch-size start increment samples`; Narayanan et al.,
  "Efficient Large-Scale Language Model Training on GPU Clusters", 2021): in increments
  that are spread evenly over the first samples. `linear` follows this rule.
* PaLM (Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, section
  5), its largest model: 512 sequences until step 50k, 1024 until step 115k, then 2048.
* Llama 3 (Grattafiori et al., "The Llama 3 Herd of Models", 2024, section 3.4.1), its
  model with 405B parameters: 4M tokens, 8M after 252M tokens, 16M after 2.87T tokens.
* DeepSeek-V3 (DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, section 4.2):
  gradually from 3072 to 15360 over the first 469B tokens.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from ga_optax._checks import check_int, check_step
from ga_optax._text import columns

__all__ = ["Ramp", "linear", "stepwise"]

_MOST = np.iinfo(np.int32).max  # steps and k are int32 in the states of optimizers


@dataclasses.dataclass(frozen=True)
class Ramp:
    """A batch-size ramp: call it with the step to get k. `str` of it is a table.

    `linear` and `stepwise` make it. It is hashable and can be pickled.

    Attributes:
      microbatch_size: the size of a micro-batch.
      first_steps: the step at which each stage begins; the first is 0.
      num_microbatches: k of each stage.
    """

    microbatch_size: int
    first_steps: tuple[int, ...]
    num_microbatches: tuple[int, ...]

    def __call__(self, step: ArrayLike) -> jax.Array:
        """Returns the k of a step's window.

        Args:
          step: the step, an integer scalar, static or traced; steps count from 0.

        Returns:
          k, int32 `[]`.

        Raises:
          TypeError: if `step` is not an integer scalar.
        """
        check_step(step, "Pass a count, or use jax.vmap.")
        later = jnp.asarray(self.first_steps[1:], jnp.int32)
        begun = later <= jnp.asarray(step, jnp.int32)
        ks = jnp.asarray(self.num_microbatches, jnp.int32)
        return ks[jnp.sum(begun, dtype=jnp.int32)]

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """The batch size of each stage."""
        return tuple(k * self.microbatch_size for k in self.num_microbatches)

    def seen(self, step: int) -> int:
        """Returns how many examples (or tokens) came before a step, exactly.

        Args:
          step: the step, a Python int.

        Returns:
          The number of examples (or tokens) in all earlier batches.

        Raises:
          TypeError: if `step` is not an int.
          ValueError: if `step` is negative.
        """
        step = check_int("step", step, "Pass the number of steps so far.", least=0)
        ends = (*self.first_steps[1:], step)
        stages = zip(self.first_steps, ends, self.batch_sizes, strict=True)
        return sum(max(0, min(end, step) - first) * size for first, end, size in stages)

    def __str__(self) -> str:
        seen = map(self.seen, self.first_steps)
        figures = self.first_steps, seen, self.num_microbatches, self.batch_sizes
        rows = [[f"{x:,}" for x in row] for row in zip(*figures, strict=True)]
        return "\n".join(columns([["from step", "seen", "k", "batch size"], *rows]))


def linear(
    start: int,
    end: int,
    duration: int,
    *,
    microbatch_size: int,
    increment: int | None = None,
) -> Ramp:
    """Makes a batch size that grows linearly over the first examples or tokens.

    A step that begins after `seen` examples has the batch size

        start + floor(seen · n / duration) · increment,   n = (end - start) / increment

    until `duration` examples have been seen, and `end` after that. This is the rule of
    Megatron-LM, in integers.

    >>> import optax, ga_optax as ga
    >>> ramp = ga.schedules.linear(64, 256, 1000, microbatch_size=64)
    >>> print(ramp)
    from step   seen  k  batch size
            0      0  1          64
            6    384  2         128
            9    768  3         192
           11  1,152  4         256
    >>> tx = ga.MultiSteps(optax.adam(1e-3), ramp)

    A ramp like that of GPT-3, from 32k to 3.2M tokens over the first 12 billion, in
    micro-batches of 32k, is
    `linear(32_000, 3_200_000, 12 * 10**9, microbatch_size=32_000)`.

    Args:
      start: the batch size at step 0.
      end: the batch size after the ramp.
      duration: how many examples (or tokens) the ramp takes, in the same unit.
      microbatch_size: the size of a micro-batch over all devices, in the same unit.
      increment: by how much the batch size grows at a time, a multiple of
        `microbatch_size`. `None` takes `microbatch_size`, the finest.

    Returns:
      The `Ramp`, a function of the step.

    Raises:
      ValueError: if a size is below 1 or not a multiple of what it must be, or if
        `end` is below `start`.
      TypeError: if an argument is not an int.

    References:
      See the module.
    """
    size = check_int("microbatch_size", microbatch_size, _SIZES)
    start, end = _multiple("start", start, size), _multiple("end", end, size)
    duration = check_int("duration", duration, _SIZES)
    by = size if increment is None else _multiple("increment", increment, size)
    if end < start:
        raise ValueError(
            f"end must not be below start={start}, but it is {end}. Use stepwise."
        )
    n, rest = divmod(end - start, by)
    if rest:
        raise ValueError(
            f"increment must divide end - start = {end - start}, but it is {by}. Use "
            f"microbatch_size={size}, or another multiple of it that does."
        )
    # floor(seen · n / duration) reaches j where seen reaches ceil(j · duration / n).
    thresholds = [-(-j * duration // n) for j in range(1, n + 1)]
    return _ramp([start + j * by for j in range(n + 1)], thresholds, size)


def stepwise(
    batch_sizes: Sequence[int],
    boundaries: Sequence[int],
    *,
    microbatch_size: int,
    boundaries_in_steps: bool = False,
) -> Ramp:
    """Makes a batch size that changes at given boundaries.

    `batch_sizes[j + 1]` holds from the first step that begins after at least
    `boundaries[j]` examples (or tokens). The batch that crosses a boundary is not cut.

    >>> from ga_optax import schedules
    >>> palm = schedules.stepwise(
    ...     [512, 1024, 2048], [50_000, 115_000], microbatch_size=256,
    ...     boundaries_in_steps=True)
    >>> [int(palm(step)) for step in (49_999, 50_000, 114_999, 115_000)]
    [2, 4, 4, 8]
    >>> M = 10**6
    >>> llama3 = schedules.stepwise(
    ...     [4 * M, 8 * M, 16 * M], [252 * M, 2_870_000 * M], microbatch_size=M)
    >>> llama3.first_steps
    (0, 63, 358782)

    Args:
      batch_sizes: the batch size of each stage; it may also decrease.
      boundaries: where each stage but the first begins, strictly increasing: how many
        examples (or tokens) were seen so far.
      microbatch_size: the size of a micro-batch over all devices, in the same unit.
      boundaries_in_steps: whether `boundaries` are steps instead.

    Returns:
      The `Ramp`, a function of the step.

    Raises:
      ValueError: if a batch size is not a multiple of `microbatch_size`, if there is
        not one boundary between each two batch sizes, or if the boundaries do not
        increase.
      TypeError: if a size or a boundary is not an int.

    References:
      See the module.
    """
    size = check_int("microbatch_size", microbatch_size, _SIZES)
    named = enumerate(batch_sizes)
    batches = [_multiple(f"batch_sizes[{j}]", batch, size) for j, batch in named]
    todo, named = "Pass where the next stage begins.", enumerate(boundaries)
    starts = [check_int(f"boundaries[{j}]", start, todo) for j, start in named]
    if not batches or len(starts) != len(batches) - 1:
        raise ValueError(
            "There must be one boundary less than batch sizes, but there are "
            f"{len(batches)} batch sizes and {len(starts)} boundaries. Leave 0 out."
        )
    for j in range(1, len(starts)):
        if starts[j] <= starts[j - 1]:
            raise ValueError(
                f"boundaries must increase, but boundaries[{j}] is {starts[j]}, after "
                f"{starts[j - 1]}. Sort them, and the batch sizes with them."
            )
    if boundaries_in_steps:
        return _in_steps(dict(zip((0, *starts), batches, strict=True)), size)
    return _ramp(batches, starts, size)


def _ramp(batches: list[int], thresholds: list[int], size: int) -> Ramp:
    """The ramp whose stage j + 1 begins when `thresholds[j]` have been seen."""
    stages, first, seen = {0: batches[0]}, 0, 0
    for threshold, batch in zip(thresholds, batches[1:], strict=True):
        steps = max(0, -(-(threshold - seen) // stages[first]))
        seen += steps * stages[first]
        first += steps
        stages[first] = batch  # the only one, if one batch crossed two thresholds
    return _in_steps(stages, size)


def _in_steps(stages: dict[int, int], size: int) -> Ramp:
    """The ramp with these batch sizes, each from its first step on."""
    last = max(stages)
    if last > _MOST:
        raise ValueError(
            "Every stage must begin at a step below 2^31, but the last begins at step "
            f"{last}. Leave it out, as it is never reached, or check the units."
        )
    return Ramp(size, tuple(stages), tuple(batch // size for batch in stages.values()))


# -- Checks ----------------------------------------------------------------------------

_SIZES = "Pass a number of examples, or of tokens, in the same unit for all."


def _multiple(name: str, value: Any, size: int) -> int:
    whole = check_int(name, value, _SIZES)
    if whole % size:
        below = whole // size * size
        near = f"{below} or {below + size}" if below else size
        raise ValueError(
            f"{name} must be a multiple of microbatch_size={size}, but it is {whole}. "
            f"Use {near}."
        )
    if whole // size > _MOST:
        raise ValueError(
            f"{name} must be at most 2^31 - 1 micro-batches of {size}, but it is "
            f"{whole}. Use a larger microbatch_size."
        )
    return whole
