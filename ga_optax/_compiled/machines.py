"""Compilers of XLA for machines that this process does not have.

`jax.experimental.topologies` describes the devices of a machine. A program can be
compiled for them and its memory read, but nothing runs. The compilers for TPUs and for
NVIDIA GPUs are separate packages, which extras of jax install.
"""

import contextlib
import dataclasses
import math
import os
import re
from collections.abc import Iterator
from typing import Any

import jax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

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
        if len(meshes) > 1 or any(m.size != number for m in meshes.values()):
            shapes = " and ".join(str(dict(shape)) for shape in meshes)
            raise ValueError(
                f"The arguments must have one mesh of the {number} devices of the "
                f"target, but they have {shapes}. Name a target of that size."
            )
        if not meshes and number > 1:
            raise ValueError(
                f"The arguments must have shardings over the {number} devices of the "
                "target, but no argument has one. Pass jax.ShapeDtypeStruct with those"
                f" over jax.sharding.AbstractMesh(({number},), ('data',)), for example."
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
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=new)

        with context:
            yield jax.tree.map(on_target, args, jax.eval_shape(lambda *x: x, *args))


def _named_sharding(x: Any) -> NamedSharding | None:
    sharding = getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def find(name: str) -> Target:
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
