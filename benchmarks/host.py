"""Device and host bytes of what lies in the host's memory, from a GPU's compiler.

    python benchmarks/host.py --json benchmarks/results/host.json

state       a step of the reference model with Adam, whose state lies on the device, or
            on the host (`ga_optax.on_host`): 8 micro-batches in one call, and one
            micro-step of a `MultiSteps`
parameters  the gradient of a model of 16 scanned layers in 8 micro-batches, whose
            parameters lie on the device, or on the host
residuals   the same of a model of two products a layer, whose layers keep nothing, or
            keep their input on the host

The benchmark needs no device, only the compilers: `make accelerators` installs them.
Nothing runs, so nothing is timed.
"""

import functools
from collections.abc import Iterator
from typing import Any

import accelerators
import jax
import jax.numpy as jnp
import optax
import peers
import record
import reference_model
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._compiled import plan

K = 8
HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
OFFLOAD = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["h"],
    offload_src="device",
    offload_dst="pinned_host",
)
Case = tuple[str, str, Any, tuple[Any, ...]]  # with the step and its arguments


def of_state(config: reference_model.Config) -> Iterator[Case]:
    """Steps whose state lies on the device, then on the host."""
    loss = functools.partial(reference_model.loss, config)
    params = jax.eval_shape(lambda: reference_model.init(config))

    for place, opt in (("device", optax.adam(1e-3)), ("host", on_host())):
        step = peers.step_of(ga.value_and_grad(loss, K), opt)
        state = params, types_of(opt.init, params)
        yield "8 micro-batches, Adam", place, step, (state, tokens(config, K))
        tx = ga.MultiSteps(opt, K)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def micro_step(params: Any, state: Any, x: Any, tx: Any = tx) -> Any:
            value, grads = jax.value_and_grad(loss)(params, x)
            return *ga.apply_gradients(tx, grads, state, params), value

        args = params, types_of(tx.init, params), tokens(config, 1)
        yield "a micro-step of MultiSteps, Adam", place, micro_step, args


def on_host() -> Any:
    """Adam whose state lies on the host."""
    return ga.on_host(optax.adam(1e-3))


def tokens(config: reference_model.Config, k: int) -> jax.ShapeDtypeStruct:
    """The tokens of some micro-batches."""
    return accelerators.shape((k * config.rows, config.length + 1), jnp.int32)


def of_layers(width: int, rows: int) -> Iterator[Case]:
    """Gradients of parameters on the host, and with residuals there."""

    def loss(move: Any, policy: Any, w: Any, x: Any) -> Any:
        @functools.partial(jax.checkpoint, policy=policy)
        def layer(h: Any, w: Any) -> Any:
            h, w = checkpoint_name(h, "h"), move(w)
            return h + jnp.tanh(jnp.tanh(h @ w) @ w.T), None

        return jnp.mean(jax.lax.scan(layer, x, w)[0] ** 2)

    def moved(x: Any) -> Any:
        return jax.device_put(x, DEVICE)

    w = accelerators.shape((16, width, width))
    x = accelerators.shape((rows, width))
    there = jax.core.ShapedArray(w.shape, w.dtype, memory_space=HOST)
    for what, place, params, move, policy in (
        ("parameters of 16 layers", "device", w, lambda w: w, None),
        ("parameters of 16 layers", "host", there, moved, None),
        ("residuals of 16 layers", "host", w, lambda w: w, OFFLOAD),
    ):
        grad = ga.value_and_grad(functools.partial(loss, move, policy), K)

        def step(w: Any, x: Any, grad: Any = grad) -> Any:
            # A program that moves nothing to the host is lowered without any move,
            # unless an argument's sharding has the memory of the host.
            return grad(w, x), jax.device_put(x[0], HOST)

        yield what, place, jax.jit(step), (params, x)


def types_of(fun: Any, *args: Any) -> Any:
    """The types of the results of a function, which say where they lie."""
    structure = jax.tree.structure(jax.eval_shape(fun, *args))
    return jax.tree.unflatten(structure, jax.make_jaxpr(fun)(*args).out_avals)


def compiled(target: str, step: Any, args: Any) -> Any:
    """The program for a GPU. Its arguments lie where their types say.

    Without a GPU JAX knows no memory of its host, so no sharding has it. The lowered
    program does.
    """
    from jax._src.lib.mlir import ir

    mesh = Mesh(accelerators.find(target).topology.devices, ("data",))

    def placed(x: Any) -> Any:
        there = NamedSharding(mesh, P())
        new: Any = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there)
        is_there = getattr(x, "memory_space", None) == HOST
        return jax.typeof(new).update(memory_space=HOST) if is_there else new

    traced = step.trace(*jax.tree.map(placed, args))
    lowered = traced.lower()
    module = lowered.compiler_ir()
    kept = sorted(lowered._lowering.compile_args["kept_var_idx"])
    with module.context:
        functions = [x for x in module.body.operations if "arg_attrs" in x.attributes]
        main = functions[0]  # the others are functions that it calls
        attributes = []
        given = ir.ArrayAttr(main.attributes["arg_attrs"])
        for i, attrs in zip(kept, given, strict=True):
            of = {x.name: x.attr for x in ir.DictAttr(attrs)}
            if traced.jaxpr.in_avals[i].memory_space == HOST:
                of["mhlo.memory_kind"] = ir.StringAttr.get("pinned_host")
            attributes.append(ir.DictAttr.get(of))
        main.attributes["arg_attrs"] = ir.ArrayAttr.get(attributes)
    return lowered.compile()


def measure(target: str, cases: Iterator[Case]) -> Iterator[dict[str, Any]]:
    """The bytes of each case, on the device and on the host."""
    for what, place, step, args in cases:
        m = compiled(target, step, args).memory_analysis()
        device = plan.temporaries(m) + m.argument_size_in_bytes
        device += m.output_size_in_bytes - m.alias_size_in_bytes
        yield {
            "what": what,
            "on the": place,
            "device_mb": round(device / 1e6, 1),
            "host_mb": round(plan.host_bytes(m) / 1e6, 1),
        }


def main() -> None:
    """Prints the table, and writes the JSON if asked to."""
    parser = record.make_parser(__doc__)
    args = parser.parse_args()
    accelerators.without_devices(parser)
    config = reference_model.TINY if args.quick else reference_model.Config()
    width, rows = (64, 256) if args.quick else (512, 16384)
    rows_of = [*measure("h200", of_state(config))]
    rows_of += measure("h200", of_layers(width, rows))
    record.print_table([*rows_of[0]], [[*map(str, row.values())] for row in rows_of])
    content = {"device": "compiled for an H200 without a device", "rows": rows_of}
    record.write(args.json, content, accelerators.versions())


if __name__ == "__main__":
    main()
