"""`plan`: the fewest micro-batches with which a step fits into memory.

    bytes(k)  =  temp + argument + output - alias  <=  the limit

The search; bytes in words; compilers of machines that this process does not have.
"""

import contextlib
import dataclasses
import functools
import itertools
import math
import numbers
import os
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from .. import _checks, _text
from .._passes import places

# == The search ========================================================================
# The fewest micro-batches with which a step fits into memory.
#
# XLA decides at compile time which buffers a program needs on one device, and reports
#
#     bytes(k)  =  temp + argument + output - alias
#
# without running anything. More micro-batches have smaller activations, so bytes(k)
# falls with k, and a bisection finds the smallest k that fits. The exception is k = 1,
# which needs no accumulator and may need less memory than k = 2. The search therefore
# tries the smallest candidate first, and bisects the others.


class NothingFitsError(ValueError):
    """No candidate fits. The message says how much memory the smallest one needs."""


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A compiled number of micro-batches. All sizes are bytes on one device.

    Attributes:
      num_microbatches: the number.
      temp: the bytes that XLA allocates besides arguments and results.
      argument: the bytes of the arguments.
      output: the bytes of the results.
      alias: the bytes of results that reuse donated arguments.
      host: the bytes of the host's memory: arguments, results and temporaries. XLA for
        CPUs counts them among the others.
      fits: whether `bytes` is at most the limit.
      error: the error, if the step could not be made or compiled.
      seconds: the time to trace and compile.
      notes: the leaves whose gradients `value_and_grad` adds in place, and the reasons
        for the other leaves.
    """

    num_microbatches: int
    temp: int = 0
    argument: int = 0
    output: int = 0
    alias: int = 0
    host: int = 0
    fits: bool = False
    error: str | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def bytes(self) -> int | None:
        """The sum temp + argument + output - alias; None after an error."""
        if self.error is not None:
            return None
        return self.temp + self.argument + self.output - self.alias


@dataclasses.dataclass(frozen=True)
class Plan:
    """The result of `plan`. `str(plan)` is a table.

    Attributes:
      num_microbatches: the fewest micro-batches that fit.
      batch_size: examples in a batch.
      memory_limit: the bytes of one device.
      candidates: the compiled candidates, by `num_microbatches`.
      untried: the candidates that were not compiled.
    """

    num_microbatches: int
    batch_size: int
    memory_limit: int
    candidates: tuple[Candidate, ...]
    untried: tuple[int, ...]

    @property
    def bytes(self) -> int:
        """The bytes that the step with `num_microbatches` needs on one device."""
        needs = {c.num_microbatches: c.bytes for c in self.candidates}
        return needs[self.num_microbatches] or 0

    @property
    def microbatch_size(self) -> int:
        """Examples in a micro-batch."""
        return self.batch_size // self.num_microbatches

    def __str__(self) -> str:
        verdict = (
            f"num_microbatches={self.num_microbatches} of {self.microbatch_size} "
            f"examples needs {bytes_in_words(self.bytes)} of "
            f"{bytes_in_words(self.memory_limit)}."
        )
        return _page(self.candidates, self.untried, self.batch_size, verdict)


def plan(
    make_step: Callable[[int], Any],
    *args: Any,
    batch_size: int,
    memory_limit: int | float | str | None = None,
    candidates: Sequence[int] | None = None,
    target: str | None = None,
) -> Plan:
    """Finds the fewest micro-batches with which a step fits into memory.

    `plan` compiles the step, and runs nothing. Fewer micro-batches are faster,
    because each further micro-batch makes the matrices smaller.

    >>> import jax, jax.numpy as jnp, ga_optax as ga
    >>> def loss(w, x):
    ...     return jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    >>> def make_step(num_microbatches):
    ...     grad = ga.value_and_grad(loss, num_microbatches)
    ...     return jax.jit(lambda w, x: w - grad(w, x)[1], donate_argnums=0)
    >>> w = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    >>> x = jax.ShapeDtypeStruct((4096, 256), jnp.float32)
    >>> found = ga.plan(make_step, w, x, batch_size=4096, memory_limit="10MiB",
    ...                 candidates=[1, 2, 4, 8, 16])
    >>> found.num_microbatches, found.microbatch_size
    (4, 1024)

    **Cost.** One compilation if the smallest candidate fits, else at most
    1 + ⌈log2(candidates)⌉: 4 for 1, 2, 4, ..., 64. stderr shows the progress.

    **Exactness.** The sizes are those of the compiled program, to the byte. They do not
    include anything else on the device: the next batch, the runtime's memory and
    fragmentation. So leave room on a GPU; 0.9 of its memory is a good limit.
    The search assumes that memory falls with more micro-batches. If memory rises
    between two compiled candidates, the plan says so.

    Args:
      make_step: a function of `num_microbatches` that returns a jitted function of
        `args`. Donate the arguments that you donate in training.
      *args: the arguments of the step: arrays, or `jax.ShapeDtypeStruct`, with
        shardings if there are any; NNX modules too if the step is under `nnx.jit`.
      batch_size: examples in a batch. Each candidate must divide it. An example may be
        several rows of the batch of `value_and_grad` (tokens), or several devices may
        share the examples.
      memory_limit: bytes on one device: a number, or a string such as "16GiB" (GiB =
        2^30 bytes, GB = 10^9). None takes the limit of the target, or of the smallest
        local device; a CPU has no limit.
      candidates: the numbers of micro-batches to choose from. None takes all divisors
        of `batch_size`.
      target: a machine that this process does not have, such as "h100", "h100:8",
        "h100:4x8" (four hosts) or "v5e:2x4"; see {doc}`/memory`. None plans for the
        devices of this process.

    Returns:
      The `Plan`. `str(plan)` also lists the leaves whose gradients are not added in
      place, and the reasons.

    Raises:
      NothingFitsError: if nothing fits: a `ValueError` that says how much memory the
        smallest candidate needs.
      ValueError: if an argument is invalid, or if no candidate compiles.
      TypeError: if an argument has the wrong type.
    """
    todo = (
        "Pass the function that builds your jitted step: "
        "lambda k: jax.jit(ga_optax.value_and_grad(loss, k)), for example."
    )
    _checks.check_callable("make_step", make_step, "of num_microbatches", todo)
    todo = "Pass the number of examples in one step."
    batch_size = _checks.check_int("batch_size", batch_size, todo)
    machine: Any = None if target is None else find_machine(target)
    if memory_limit is None:
        memory_limit = machine.memory_limit if machine else _device_limit()
    limit = parse_bytes(memory_limit)
    choices = _check_candidates(candidates, batch_size)
    on_machine = machine.arguments if machine else contextlib.nullcontext
    with on_machine(args) as args:
        search = _Search(make_step, args, limit)
        answer = search.smallest_that_fits(choices)
    compiled = tuple(search.compiled[k] for k in sorted(search.compiled))
    untried = tuple(k for k in choices if k not in search.compiled)
    if answer is None:
        search.nothing_fits(_page(compiled, untried, batch_size, "Nothing fits."))
    return Plan(answer, batch_size, limit, compiled, untried)


def _is_too_large(candidate: Candidate) -> bool:
    """True if the compiler refused the candidate for its memory, as for TPUs."""
    return "RESOURCE_EXHAUSTED" in (candidate.error or "")


@dataclasses.dataclass
class _Search:
    """Compiles candidates, and remembers their sizes.

    Attributes:
      make_step: a function of the number of micro-batches that returns a step.
      args: the arguments of the step.
      limit: the bytes of one device.
      compiled: the compiled candidates, by the number of micro-batches.
      errors: the errors of the candidates that failed.
    """

    make_step: Callable[[int], Any]
    args: tuple[Any, ...]
    limit: int
    compiled: dict[int, Candidate] = dataclasses.field(default_factory=dict)
    errors: list[Exception] = dataclasses.field(default_factory=list)

    def smallest_that_fits(self, choices: list[int]) -> int | None:
        """The smallest candidate that fits, if memory falls after the first one."""
        answer, rest, at = None, choices, 0
        while rest:
            k = rest[at]
            candidate = self._measured(k)
            if candidate.fits:
                answer, rest = k, rest[:at]
            elif candidate.error and not _is_too_large(candidate):
                rest = rest[:at] + rest[at + 1 :]  # other errors tell nothing of memory
            else:
                rest = rest[at + 1 :]
            at = len(rest) // 2
        return answer

    def nothing_fits(self, page: str) -> NoReturn:
        """Raises the error for a search without an answer."""
        needs = [(c.bytes, k) for k, c in self.compiled.items() if c.bytes is not None]
        if needs:
            need, k = min(needs)
            cause = (
                f"no candidate does: the smallest need is {bytes_in_words(need)} "
                f"({need} bytes), with num_microbatches={k}"
            )
        elif all(map(_is_too_large, self.compiled.values())):
            cause = "the compiler says that no candidate does"
        else:
            k, failed = min(self.compiled.items())
            raise ValueError(
                f"At least one candidate must compile, but all {len(self.compiled)} "
                f"failed; num_microbatches={k} with {f'{failed.error}'.rstrip('.')}. "
                "make_step must return a jitted function of the other arguments. To "
                f"see the error, call make_step({k}).lower(*args)."
            ) from self.errors[0]
        raise NothingFitsError(
            f"The step must fit into {bytes_in_words(self.limit)}, but {cause}. Allow "
            "more micro-batches, donate the arguments that the step replaces, use "
            f"jax.checkpoint, or shard over more devices.\n{page}"
        ) from (None if needs else self.errors[0])

    def _measured(self, k: int) -> Candidate:
        """Compiles a candidate, and prints the progress."""
        say = functools.partial(print, file=sys.stderr, flush=True)
        say(f"plan: num_microbatches={k}: compiling ...", end="")
        start = time.perf_counter()
        with places.recordings() as lines:
            try:
                compiled = self.make_step(k).lower(*self.args).compile()
            except Exception as error:  # from the user's code or the compiler: reported
                self.errors.append(error)
                message = (
                    f"{type(error).__name__}: {str(error).strip() or 'no message'}"
                )
                candidate = Candidate(k, error=message.splitlines()[0])
                outcome = f"failed: {candidate.error}"
            else:
                candidate = _candidate(k, compiled, tuple(lines))
                need = candidate.bytes or 0
                candidate = dataclasses.replace(candidate, fits=need <= self.limit)
                fits = "fits" if candidate.fits else "does not fit"
                outcome = f"{bytes_in_words(need)}, {fits}"
        seconds = time.perf_counter() - start
        say(f" {outcome} ({seconds:.1f} s)")
        self.compiled[k] = dataclasses.replace(candidate, seconds=seconds)
        return self.compiled[k]


def _candidate(k: int, compiled: Any, notes: tuple[str, ...]) -> Candidate:
    """The sizes of a compiled candidate, before the limit is known."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError(
            "The backend must report the memory of compiled programs, but "
            f"{jax.default_backend()!r} reports none. Plan on another backend."
        )
    kinds = "argument", "output", "alias"
    sizes: Any = {x: getattr(analysis, f"{x}_size_in_bytes") for x in kinds}
    sizes |= {"temp": temporaries(analysis), "host": host_bytes(analysis)}
    return Candidate(k, **sizes, notes=notes)


def temporaries(analysis: Any) -> int:
    """The bytes that XLA reserves besides arguments and results.

    On TPUs `temp_size_in_bytes` is about a fifth too large. libtpu checks the total,
    which newer versions of jax report, against a device's memory. The total is 0 for a
    GPU's program that was read from JAX's compilation cache.
    """
    total = getattr(analysis, "total_allocation_bytes", None)
    if not total:
        return int(analysis.temp_size_in_bytes)
    results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
    return int(total - analysis.argument_size_in_bytes - results)


def host_bytes(analysis: Any) -> int:
    """The bytes of the host's memory that a program needs."""
    kinds = "argument", "output", "temp", "alias"
    sizes = [getattr(analysis, f"host_{x}_size_in_bytes", 0) for x in kinds]
    return int(sum(sizes) - 2 * sizes[-1])


# -- Text ------------------------------------------------------------------------------


def _page(
    candidates: Sequence[Candidate], untried: Sequence[int], rows: int, verdict: str
) -> str:
    head = ["micro-batches", "examples", "temp", "argument", "output", "alias", "needs"]
    has_host = any(c.host for c in candidates)
    table: list[tuple[str, ...]] = [(*head, *["host"] * has_host, "")]
    for c in candidates:
        sizes = (c.temp, c.argument, c.output, c.alias, c.bytes, *[c.host] * has_host)
        cells = ("-" if c.error else bytes_in_words(size or 0) for size in sizes)
        failed = c.error and not _is_too_large(c)
        fits = "failed" if failed else "fits" if c.fits else "too large"
        k = c.num_microbatches
        table.append((f"{k}", f"{rows // k}", *cells, fits))
    lines = []
    if untried:
        numbers = ", ".join(map(str, untried))
        lines.append(f"Not compiled, as the search did not need them: {numbers}.")
    for c in candidates:
        if c.error is not None:
            lines.append(f"num_microbatches={c.num_microbatches} failed: {c.error}")
    # The smallest candidate, which the search tries first, may need less memory.
    sized = [c for c in candidates[1:] if not c.error]
    for few, many in itertools.pairwise(sized):
        if (many.bytes or 0) > (few.bytes or 0):
            lines.append(
                f"Memory rises from {few.num_microbatches} to {many.num_microbatches} "
                "micro-batches, but the search assumes that memory falls. To be sure, "
                "pass the candidates that were not compiled one at a time."
            )
    notes = (note for c in candidates if c.num_microbatches > 1 for note in c.notes)
    lines += dict.fromkeys(notes)
    return "\n".join(
        [*_text.columns(table), verdict, *itertools.chain(*map(_text.wrap, lines))]
    )


# -- The device and candidates ---------------------------------------------------------


def _device_limit() -> int:
    """The memory of the smallest local device."""
    devices = jax.local_devices()
    limits: list[Any] = [
        (device.memory_stats() or {}).get("bytes_limit") for device in devices
    ]
    if None in limits:
        raise ValueError(
            "memory_limit must be given if a device does not report its memory, and "
            f"{devices[limits.index(None)]} does not. Pass a limit such as "
            '"16GiB".'
        )
    return int(min(limits))


def _check_candidates(candidates: Sequence[int] | None, batch_size: int) -> list[int]:
    """The candidates in ascending order, or raises."""
    divisors = _checks.divisors(batch_size)
    if candidates is None:
        return divisors
    todo = f"Choose from {', '.join(map(str, divisors))}."
    if not isinstance(candidates, Iterable):
        raise TypeError(
            "candidates must be a sequence of ints, but it is "
            f"{_checks.brief(candidates)}. {todo}"
        )
    chosen = {_checks.check_int("each candidate", k, todo) for k in candidates}
    if not chosen:
        raise ValueError(f"candidates must not be empty, but they are. {todo}")
    for k in sorted(chosen - set(divisors)):
        raise ValueError(
            f"candidates must divide batch_size={batch_size}, but {k} does not. {todo}"
        )
    return sorted(chosen)


# == Bytes in words ====================================================================

_PREFIXES = "KMGTP"

_SIZE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*(?:(?:([kmgtp])(i?))?b)?\s*", re.IGNORECASE)


def bytes_in_words(size: int) -> str:
    """The size in the largest binary unit that is not larger than the size."""
    power = max(0, min((abs(size).bit_length() - 1) // 10, len(_PREFIXES)))
    if power == 0:
        return f"{size} B"
    return f"{size / 1024**power:.2f} {_PREFIXES[power - 1]}iB"


def parse_bytes(size: int | float | str) -> int:
    """Whole bytes, from a number or a string such as "16GiB"; or raises."""
    todo = 'Pass bytes, or a string such as "16GiB" (2^30 bytes) or "16GB" (10^9).'
    if isinstance(size, (bool, np.bool_)) or not isinstance(size, (numbers.Real, str)):
        raise TypeError(
            f"memory_limit must be a number of bytes or a string, but it is {size!r} "
            f"of type {type(size).__name__}. {todo}"
        )
    value: Any = size
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        number, prefix, binary = match.groups() if match else ("nan", None, None)
        power = 1 + _PREFIXES.index(prefix.upper()) if prefix else 0
        value = float(number) * (1024 if binary else 1000) ** power
    if not 1 <= value < math.inf:
        raise ValueError(
            "memory_limit must be a number, with one of the units B, KB, KiB, ..., PB, "
            "PiB or none, and it must be finite and at least one byte, but it is "
            f"{size!r}. {todo}"
        )
    return int(value)


# == Machines ==========================================================================
# Compilers of XLA for machines that this process does not have.
#
# `jax.experimental.topologies` describes the devices of a machine. A program can be
# compiled for them and its memory read, but nothing runs. The compilers for TPUs and
# for NVIDIA GPUs are separate packages, which extras of jax install.

# GiB of a device that a program may use, from the error of libtpu 0.0.50 for a larger
# program.
_TPUS = {"v5e": 15.75, "v5p": 95.73, "v6e": 31.24, "tpu7x": 94.74}

# The compiler's description of a GPU, from NVIDIA's data sheets and, of a B200, from
# OpenXLA's (xla/backends/gpu/target_config/specs/b200.txtpb): full name, compute
# capability, multiprocessors, lanes of each, clock (GHz), L2 cache (MiB), bandwidth and
# memory (bytes), and shared memory of a multiprocessor (KiB).
_GPUS: dict[str, tuple[Any, ...]] = {
    "a100": ("A100-SXM4-80GB", 8, 108, 64, 1.41, 40, 2.04e12, 85100068864, 164),
    "h100": ("H100 80GB HBM3", 9, 132, 128, 1.98, 50, 3.35e12, 84929347584, 228),
    "h200": ("H200", 9, 132, 128, 1.98, 50, 4.8e12, 151397597184, 228),
    "b200": ("B200", 10, 148, 128, 1.965, 126.5, 7.67e12, 191514411008, 228),
}

_GPU = """
gpu_device_info {{
  cuda_compute_capability {{ major: {1} }} core_count: {2} fpus_per_core: {3}
  clock_rate_ghz: {4} l2_cache_size: {l2} memory_bandwidth: {bandwidth}
  device_memory_size: {7} shared_memory_per_core: {shared}
  shared_memory_per_block: 49152 shared_memory_per_block_optin: {optin}
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 7 }}
runtime_version {{ major: 12 minor: 8 }}
device_description_str: "NVIDIA {0}"
"""

# The share of a GPU's memory that JAX reserves by default.
_SHARE = 0.75


@dataclasses.dataclass(frozen=True)
class Target:
    """A machine to compile for, and the bytes for programs on each device."""

    topology: Any
    memory_limit: int

    @contextlib.contextmanager
    def arguments(self, args: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
        """The shapes of `args` on the target; the context sets the target's mesh.

        A leaf with a `NamedSharding` keeps its spec and the names of its mesh, over the
        devices of the target. Every other leaf is replicated.
        """
        number = len(self.topology.devices)
        shardings = filter(None, map(_named_sharding, jax.tree.leaves(args)))
        meshes = {sharding.mesh.shape_tuple: sharding.mesh for sharding in shardings}
        sizes = [mesh.size for mesh in meshes.values()]
        if (sizes or [1]) != [number]:
            shapes = " and ".join(str(dict(shape)) for shape in meshes)
            raise ValueError(
                f"The arguments must have shardings over one mesh of the {number} "
                f"devices of the target, but they have {shapes or 'none'}. Name a "
                "target of that size, or pass jax.ShapeDtypeStruct with shardings over "
                f"jax.sharding.AbstractMesh(({number},), ('data',)), for example."
            )
        replicated: Any = SingleDeviceSharding(self.topology.devices[0])
        context: Any = contextlib.nullcontext()
        for mesh in meshes.values():
            grid = topologies.make_mesh(self.topology, mesh.axis_sizes, mesh.axis_names)
            grid = Mesh(grid.devices, mesh.axis_names, axis_types=mesh.axis_types)
            replicated, context = (
                NamedSharding(grid, PartitionSpec()),
                jax.set_mesh(grid),
            )

        def on_target(x: Any, shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            known = _named_sharding(x)
            new = NamedSharding(replicated.mesh, known.spec) if known else replicated
            if getattr(getattr(x, "sharding", None), "memory_kind", None) == _HOST:
                new = self._in_host_memory(new)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=new)

        with context:
            yield jax.tree.map(on_target, args, jax.eval_shape(lambda *x: x, *args))

    def _in_host_memory(self, sharding: Any) -> NamedSharding:
        """The sharding, for arguments that lie on the host."""
        device = self.topology.devices[0]
        if _HOST not in [memory.kind for memory in device.addressable_memories()]:
            raise ValueError(
                "Arguments must lie on the device if the target is a GPU, but one lies "
                "on the host: without a GPU, JAX knows no memory of its host. Plan on "
                'the GPU itself, or for a TPU, such as "v5p".'
            )
        if not isinstance(sharding, NamedSharding):  # JAX reads the memory of no other
            sharding = NamedSharding(Mesh([device], ("device",)), PartitionSpec())
        return sharding.with_memory_kind(_HOST)


_HOST = "pinned_host"


def _named_sharding(x: Any) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def find_machine(name: str) -> Target:
    """The target with a name such as "h100", "H100:8x8", "v5e" or "v5e:2x4"."""
    parts = name.lower().partition(":") if isinstance(name, str) else ("", "", "")
    kind, _, shape = parts
    fits = r"(\d+(x\d+)*)?" if kind in _TPUS else r"(\d+(x\d+)?)?"
    if kind not in {*_TPUS, *_GPUS} or not re.fullmatch(fits, shape):
        raise ValueError(
            f"target must be one of {', '.join([*_GPUS, *_TPUS])}, but it is {name!r}. "
            'Add the number of GPUs, as in "h100:8", of hosts and of the GPUs of one, '
            'as in "h100:4x8", or the topology, as in "v5e:2x4".'
        )
    package = "jax[tpu]" if kind in _TPUS else "jax[cuda12-local]"
    try:
        if kind in _TPUS:
            # Without these, libtpu asks a server of Google's cloud, for minutes.
            os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
            os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
            os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
            shape = shape or ("1x1" if kind in ("v5e", "v6e") else "1x1x1")
            # Cubes of whole racks are tori.
            sizes = [int(n) for n in shape.split("x")]
            torus = len(sizes) == 3 and all(n % 4 == 0 for n in sizes)
            wrap = {"wrap": (True,) * 3} if torus else {}
            topology = topologies.get_topology_desc(f"{kind}:{shape}", "tpu", **wrap)
            return Target(topology, int(_TPUS[kind] * 2**30))
        gpu = _GPUS[kind]
        config = _GPU.format(
            *gpu,
            l2=int(gpu[5] * 2**20),
            bandwidth=int(gpu[6]),
            shared=gpu[8] * 2**10,
            optin=(gpu[8] - 1) * 2**10,
        )
        hosts = shape if "x" in shape else f"1x{shape or 1}"
        topology = topologies.get_topology_desc(
            platform="cuda", target_config=config, topology=f"1x{hosts}"
        )
        return Target(topology, math.floor(gpu[7] * _SHARE))
    except Exception as error:
        raise ValueError(
            f"target={name!r} needs XLA's compiler for that machine, which did not "
            f'start: {error}. Install it with `pip install "{package}"`; if it is '
            "installed, check the topology."
        ) from None
