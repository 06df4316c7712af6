"""Random numbers of XLA's own generator, of which each micro-batch draws its part.

`rbg` and `unsafe_rbg` leave the drawing to XLA, which does it as the platform can:

    CPUs       Philox, and half of the state counts blocks of four words: a part begins
               at its own count, and has the bits of the whole
    GPUs       Philox, written out as arithmetic: of all rows XLA computes those that
               are read, so all are drawn, and cut
    elsewhere  nothing is known: a micro-batch draws from a key of its own, which is
               another draw of the same distribution

A draw that is also read whole, or by other rows, must be one: it is cut from the whole.

The platform is known when a program is lowered, and no sooner: it chooses then.
"""

import collections
import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend import core

from ga_optax._partition.notes import Drawn, Note
from ga_optax._partition.values import Rows, Value, local_shape, own, types_of
from ga_optax._partition.writer import Writer
from ga_optax._passes import ir

_BLOCK = 128  # bits that Philox draws at once
_NAME = "ga_optax_part_of_a_draw"
_FAR = 2**31  # folded into a key: far from the small numbers that users fold in

Draw = tuple[tuple[int, ...], int]  # the shape and the width of what is drawn at once


@dataclasses.dataclass
class Draws:
    """Which draws of a program micro-batches may make, each by itself.

    Attributes:
      whole: those that they may not, as not all readers would read the same.
      read: those that they do, and by which rows; None in a rule of the user's.
    """

    whole: set[Draw]
    read: set[tuple[Draw, Rows | None]] = dataclasses.field(default_factory=set)

    def divided(self, jaxpr: core.Jaxpr) -> set[Draw]:
        """Those of which not all in a program of micro-batches read the same."""
        ways = collections.Counter(draw for draw, _ in self.read)
        several = {draw for draw, number in ways.items() if number > 1}
        return (several | (_of(jaxpr) & ways.keys())) - self.whole


def draws(jaxpr: core.Jaxpr, are_whole: bool) -> Draws:
    """Those of the program of all rows; none of them may, if they `are_whole`."""
    return Draws(_of(jaxpr) if are_whole else set())


def _of(jaxpr: core.Jaxpr) -> set[Draw]:
    """What a program draws by XLA's generator, but for parts that are drawn here."""
    found = set()
    for e in jaxpr.eqns:
        if e.primitive.name == "random_bits" and "rbg" in str(e.invars[0].aval):
            found.add(_draw(e))
        for program in ir.inner_programs(e):
            if _NAME not in str(program.debug_info.func_src_info):
                found |= _of(program)
    return found


def _draw(e: core.JaxprEqn) -> Draw:
    return types_of(e)[0].shape, e.params["bit_width"]


def part(w: Writer, e: core.JaxprEqn, v: Value, rows: Rows) -> Any:
    """The rows of bits that XLA draws; None if nothing better is known than to cut."""
    shape, width = draw = _draw(e)
    known = all(isinstance(n, int) for n in shape) and math.prod(shape) < 2**32
    if "rbg" not in str(v.aval) or not known:
        return None
    w.records.draws.read.add((draw, None if w.scope.in_rule else rows))
    is_own = draw not in w.records.draws.whole and not w.scope.in_rule
    if is_own or not _has_parts(jax.default_backend()):
        w.note(e, math.prod(shape), kind=Drawn if is_own else Note)
    # For several keys, as by `jax.vmap`, XLA draws all from the first.
    key = jax.random.key_data(w.whole(v)).reshape(-1, 4)[0]
    impl = str(jax.random.key_impl(v.x))
    cut = _Cut(shape, width, impl, rows, w.axis.size)
    return cut.drawn(is_own)(key, w.index)


class _Cut(NamedTuple):
    """An array of bits of which each micro-batch has rows, drawn from a key's data."""

    shape: tuple[int, ...]
    width: int
    impl: str
    rows: Rows
    parts: int

    def drawn(self, is_own: bool) -> Any:
        """A function of a key and an index; `is_own` if it may draw what it likes."""
        others = self.from_own_key if is_own else self.of_whole
        of_cpu = self.from_own_count if _has_parts("cpu") else others

        def draw(key: Any, index: Any) -> Any:
            known = {"cpu": of_cpu, "cuda": self.of_whole, "rocm": self.of_whole}
            return jax.lax.platform_dependent(key, index, **known, default=others)

        def batched(size: int, are_batched: Any, *given: Any) -> Any:
            del size  # XLA draws for all keys from one: so that must be all rows
            axes = [0 if its else None for its in are_batched]
            return jax.vmap(self.of_whole, axes)(*given), True

        draw.__name__ = draw.__qualname__ = _NAME
        drawn = jax.custom_batching.custom_vmap(draw)
        drawn.def_vmap(batched)
        return drawn

    def of_whole(self, key: Any, index: Any) -> Any:
        return own(self._bits(key, self.shape), self.rows, index, self.parts)

    def from_own_key(self, key: Any, index: Any) -> Any:
        far = index.astype(jnp.uint32) + np.uint32(_FAR)
        new = jax.random.fold_in(jax.random.wrap_key_data(key, impl=self.impl), far)
        return self._bits(jax.random.key_data(new), self._here)

    def from_own_count(self, key: Any, index: Any) -> Any:
        """Of neighbours in memory, the bits from the count of their block on."""
        d, block = self.rows.dim, _BLOCK // max(self.width, 32)
        runs = math.prod(self.shape[:d]) * self.rows.segments
        length = math.prod(self._here) // max(runs, 1)
        spare = 0 if length % block == 0 else block  # runs begin in a block
        number = -(-length // block) * block + spare

        def run(i: Any) -> Any:
            at = (i * np.uint32(self.parts) + first) * np.uint32(length)
            bits = self._bits(_advanced(key, at // np.uint32(block)), (number,))
            start = at % np.uint32(block)
            return jax.lax.dynamic_slice_in_dim(bits, start, length)

        first = index.astype(jnp.uint32)
        if runs == 1:
            return run(np.uint32(0)).reshape(self._here)
        return jax.lax.map(run, jnp.arange(runs, dtype=jnp.uint32)).reshape(self._here)

    @property
    def _here(self) -> tuple[int, ...]:
        return local_shape(self.shape, self.rows, self.parts)

    def _bits(self, key: Any, shape: tuple[int, ...]) -> Any:
        key = jax.random.wrap_key_data(key, impl=self.impl)
        return jax.random.bits(key, shape, f"uint{self.width}")


def _advanced(key: Any, blocks: Any) -> Any:
    """The state after so many blocks: two words count them, the lower one first."""
    low = key[2] + blocks
    carried = (low < blocks).astype(jnp.uint32)
    return jnp.stack([key[0], key[1], low, key[3] + carried])


@functools.cache
def _has_parts(platform: str) -> bool:
    """Whether it draws rows alone with the bits of all; a CPU is asked for it, once."""
    if platform != "cpu":
        return platform == "gpu"
    with jax.ensure_compile_time_eval(), jax.default_device(jax.devices("cpu")[0]):
        state = jnp.asarray([1, 2, 2**32 - 1, 3], jnp.uint32)
        keys = [state, _advanced(state, jnp.uint32(1))]
        whole, rest = (
            jax.random.bits(jax.random.wrap_key_data(x, impl="rbg"), (8,), "uint32")
            for x in keys
        )
        return np.array_equal(whole[4:], rest[:4])
