"""Compilers of accelerators on a machine that has none: nothing runs, all can be read.

`libtpu` and the CUDA plugin of JAX compile for devices that are only described. Of a
compiled program the bytes, the kernels and the conditionals are exact; times are not to
be had. Import this before JAX starts a backend.
"""

import functools
import os
import re
from collections.abc import Callable
from typing import Any

# libtpu must not look for the machine that it would run on, nor lock it. The plugin for
# GPUs must not look for a driver; and there is no GPU on which it could time kernels.
os.environ |= {
    "TPU_SKIP_MDS_QUERY": "1",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",
    "XLA_FLAGS": "--xla_gpu_autotune_level=0 " + os.environ.get("XLA_FLAGS", ""),
}

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

jax.config.update("jax_platforms", "cpu")  # where arrays lie

# What NVIDIA's data sheet and `deviceQuery` say of one H200 (SXM).
H200 = """
gpu_device_info {
  cuda_compute_capability { major: 9 feature_extension: ACCELERATED_FEATURES }
  name: "NVIDIA H200" device_vendor: "NVIDIA Corporation" device_address_bits: 64
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  device_memory_size: 151397597184 memory_bandwidth: 4800000000000
  l2_cache_size: 52428800 pcie_bandwidth: 34359738368
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
  shared_memory_per_core: 233472 shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  driver_version: "13.0.0" runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0" dnn_version: "9.10.0"
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
"""
TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
TARGETS = ("h200", *TOPOLOGIES)


@functools.cache
def device(target: str) -> Any:
    """The first device of a target."""
    if target == "h200":
        options = {"target_config": H200, "topology": "1x1x1"}
        found = topologies.get_topology_desc(platform="cuda", **options)
    else:
        found = topologies.get_topology_desc(TOPOLOGIES[target], "tpu")
    return found.devices[0]


def compiled(
    target: str,
    fun: Callable[..., Any],
    *args: Any,
    donate_argnums: Any = (),
    **options: Any,
) -> jax.stages.Compiled:
    """`fun`, jitted and compiled for a target; only shapes of `args` are read.

    Options are XLA's, as in `XLA_FLAGS`.
    """
    sharding = SingleDeviceSharding(device(target))
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), args
    )
    lowered = jax.jit(fun, donate_argnums=donate_argnums).lower(*shapes)
    return lowered.compile(compiler_options=options)


def computations(program: jax.stages.Compiled) -> dict[str, list[str]]:
    """The instructions of each computation, by its name; the entry's is "ENTRY"."""
    found: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in program.as_text().splitlines():
        opens = re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)
        if opens and not line.startswith(" "):
            lines = found["ENTRY" if opens[1] else opens[2]] = []
        elif " = " in line:
            lines.append(line)
    return found


def temporaries(program: jax.stages.Compiled) -> int:
    """The bytes of its temporaries."""
    memory = program.memory_analysis()
    assert memory is not None
    return memory.temp_size_in_bytes
