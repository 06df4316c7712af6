"""`plan(target=)`: machines that are not here.

Their compilers are not among the packages of these tests, so the devices of this
process stand in for those of a target.
"""

import sys
import types

import jax
import jax.numpy as jnp
import pytest
from helpers import squares
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

import ga_optax as ga
from ga_optax.__main__ import main

MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture
def machine(monkeypatch):
    """What was asked for, and devices of this process for it."""
    asked = []

    def get_topology_desc(*args, **kwargs):
        asked.append((args, kwargs))
        name = kwargs.get("topology") or args[0]
        number = 8 if name in ("v5e:2x4", "1x1x8") else 1
        return types.SimpleNamespace(devices=jax.devices()[:number])

    def make_mesh(topology, sizes, names):
        return jax.make_mesh(sizes, names, devices=topology.devices)

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setattr(topologies, "make_mesh", make_mesh)
    return asked


def make_step(num_microbatches):
    grad = ga.value_and_grad(squares, num_microbatches)
    return jax.jit(lambda w, x: w - grad(w, x)[1])


def inputs(mesh=None):
    shapes = ((16, 16), PartitionSpec()), ((64, 16), PartitionSpec("data"))
    return tuple(
        jax.ShapeDtypeStruct(
            shape, jnp.float32, sharding=mesh and NamedSharding(mesh, spec)
        )
        for shape, spec in shapes
    )


@pytest.mark.parametrize(
    ("name", "limit"),
    [("v5e", 15.75 * 2**30), ("h100", 0.75 * 84929347584), ("v6e", 31.24 * 2**30)],
)
def test_the_limit_is_what_programs_may_use_of_the_target(machine, name, limit):
    plan = ga.plan(make_step, *inputs(), batch_size=64, target=name)
    assert plan.memory_limit == int(limit)
    assert plan.num_microbatches == 1
    given = {"batch_size": 64, "target": name, "memory_limit": "1GiB"}
    assert ga.plan(make_step, *inputs(), **given).memory_limit == 2**30


def test_the_name_says_what_the_compiler_is_asked_for(machine):
    for name in ("v5e", "v5p", "v5p:4x4x8", "h200:8"):
        args = inputs() if name != "h200:8" else inputs(MESH)
        ga.plan(make_step, *args, batch_size=64, candidates=[1], target=name)
    tpu, v5p, torus, gpu = machine
    assert (tpu, v5p) == ((("v5e:1x1", "tpu"), {}), (("v5p:1x1x1", "tpu"), {}))
    assert torus == (("v5p:4x4x8", "tpu"), {"wrap": (True, True, True)})
    assert gpu[1]["topology"] == "1x1x8"
    assert "NVIDIA H200" in gpu[1]["target_config"]
    assert "device_memory_size: 151397597184" in gpu[1]["target_config"]


def test_arguments_keep_their_specs_over_the_devices_of_the_target(machine):
    seen = []

    def make_sharded_step(num_microbatches):
        grad = ga.value_and_grad(squares, num_microbatches, data_axis="data")

        def step(w, x):
            seen.append(jax.sharding.get_abstract_mesh().shape_tuple)
            return w - grad(w, x)[1]

        return jax.jit(step)

    options = {"batch_size": 64, "candidates": [2]}
    plan = ga.plan(make_sharded_step, *inputs(MESH), **options, target="v5e:2x4")
    assert seen == [(("data", 8),)]
    [candidate] = plan.candidates
    assert candidate.argument == (16 * 16 + 64 * 16 // 8) * 4  # an eighth of the rows
    # The twin: on one device all rows are there.
    plan = ga.plan(make_step, *inputs(), **options, target="v5e")
    assert plan.candidates[0].argument == (16 * 16 + 64 * 16) * 4


def test_arguments_that_do_not_lie_on_the_target_raise(machine):
    def plan(args, target):
        ga.plan(make_step, *args, batch_size=64, candidates=[1], target=target)

    with pytest.raises(
        ValueError, match=r"how they lie on the 8 devices .*AbstractMesh"
    ):
        plan(inputs(), "h100:8")
    with pytest.raises(ValueError, match=r"one mesh of the 1 devices .*\{'data': 8\}"):
        plan(inputs(MESH), "h100")


@pytest.mark.parametrize("name", ["mac", "h100:2x", "v5e-4", "", 8])
def test_a_target_that_is_not_known_raises(name):
    with pytest.raises(ValueError, match=r"target must be one of a100, .* but it is"):
        ga.plan(make_step, *inputs(), batch_size=64, target=name)


@pytest.mark.parametrize(
    ("name", "extra"), [("v5e", "target-tpu"), ("h100", "target-gpu")]
)
def test_a_missing_compiler_is_named_with_the_line_that_installs_it(
    monkeypatch, name, extra
):
    def missing(*args, **kwargs):
        raise NotImplementedError("topology not implemented")

    monkeypatch.setattr(topologies, "get_topology_desc", missing)
    with pytest.raises(ValueError, match=rf'pip install "ga_optax\[{extra}\]"'):
        ga.plan(make_step, *inputs(), batch_size=64, target=name)


def test_a_compiler_that_refuses_every_candidate_says_that_nothing_fits():
    def lower(*args):
        raise RuntimeError("RESOURCE_EXHAUSTED: 48.03G exceeds available HBM (15.75G)")

    with pytest.raises(ga.NothingFitsError, match=r"(?s)compiler says .*Nothing fits"):
        ga.plan(
            lambda k: types.SimpleNamespace(lower=lower), batch_size=8, memory_limit=1
        )


def test_the_command_line_takes_a_target(machine, capsys, monkeypatch):
    module = types.SimpleNamespace(make_step=make_step, inputs=inputs)
    monkeypatch.setitem(sys.modules, "made_up", module)
    command = ["plan", "made_up:make_step", "made_up:inputs", "--target", "v5e"]
    assert main(command) == 0
    assert "of 15.75 GiB" in capsys.readouterr().out
