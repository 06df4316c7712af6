"""What fits: the fewest micro-batches, with few compilations."""

import re
import types

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import ga_optax as ga
from ga_optax._compiled import plan as compiled_plan
from ga_optax._loop import micro_step

CANDIDATES = (1, 2, 4, 8, 16, 32, 64)
NAME = jax.default_backend()


def test_it_predicts_the_program_that_it_names_and_nothing_runs():
    def step(w, x):
        return w - ga.value_and_grad(lambda w, x: jnp.mean(jnp.tanh(x @ w)), 2)(w, x)[1]

    args = jnp.ones((64, 64)), jnp.ones((1024, 64))
    jitted = jax.jit(step, donate_argnums=0)
    options = {"batch_size": 1024, "memory_limit": "1GiB", "candidates": [2]}
    found = ga.plan(lambda k: jitted, *args, **options)
    shapes = jax.eval_shape(lambda *args: args, *args)
    assert ga.plan(lambda k: jitted, *shapes, **options).bytes == found.bytes
    assert found.bytes == helpers.needed(jitted.lower(*args).compile()) > 2**18
    assert not args[0].is_deleted()
    # The twin: one byte less is too little.
    with pytest.raises(ga.NothingFitsError):
        ga.plan(lambda k: jitted, *args, **options | {"memory_limit": found.bytes - 1})


OTHERS = {"argument": 60, "output": 40, "alias": 30}
FALLING = {k: 6400 // k for k in CANDIDATES}


def memory_of(temp):
    """What XLA says of a program with these temporaries."""
    sizes = OTHERS | {"temp": temp}
    return types.SimpleNamespace(**{f"{x}_size_in_bytes": n for x, n in sizes.items()})


def step_of(memory):
    compiled = types.SimpleNamespace(memory_analysis=lambda: memory)
    lowered = types.SimpleNamespace(compile=lambda: compiled)
    return types.SimpleNamespace(lower=lambda *args: lowered)


def plan_of(limit, changes=(), seen=None, **options):
    """A plan for steps with temporaries that fall with k, but for the changes."""
    sizes = FALLING | dict(changes)

    def make(k):
        if seen is not None:
            seen.append(k)
        if isinstance(sizes[k], Exception):
            raise sizes[k]
        return step_of(memory_of(sizes[k]))

    given = {"batch_size": 64, "candidates": CANDIDATES, "memory_limit": limit}
    return ga.plan(make, **given | options)


@pytest.mark.quick
def test_the_host_has_a_column_if_a_program_uses_its_memory():
    memory = memory_of(400)
    for name, n in {"argument": 50, "output": 30, "temp": 7, "alias": 20}.items():
        setattr(memory, f"host_{name}_size_in_bytes", n)
    options = {"batch_size": 8, "candidates": [2], "memory_limit": 2000}
    found = ga.plan(lambda k: step_of(memory), **options)
    assert (found.candidates[0].host, found.bytes) == (67, 470)  # 50 + 30 + 7 - 20
    head, row = map(str.split, str(found).splitlines()[:2])
    assert (head[-2:], row[-5:]) == (["needs", "host"], ["470", "B", "67", "B", "fits"])
    assert "host" not in str(plan_of(2000))


@pytest.mark.parametrize("limit", range(170, 6600, 422))
@pytest.mark.parametrize("size", [64, 72])
def test_the_search_finds_the_fewest_that_fit(limit, size):
    """Of all divisors of the batch size."""
    seen, sizes = [], {k: 6400 // k for k in range(1, size + 1) if size % k == 0}
    found = plan_of(limit, sizes, seen, batch_size=size, candidates=None)
    assert found.num_microbatches == min(k for k in sizes if sizes[k] + 70 <= limit)
    assert len(seen) == len(set(seen)) <= 5  # 1 + ceil(log2(12))
    assert sorted([*seen, *found.untried]) == [*sizes]
    assert "Memory rises" not in str(found)


OUT_OF_MEMORY = RuntimeError("RESOURCE_EXHAUSTED: ran out of memory in hbm")
FAILS = ValueError("8 does not divide by 3 devices\nsecond line")


@pytest.mark.parametrize(
    ("limit", "changes", "answer", "said"),
    [
        (200, {1: 100}, 1, ""),  # no accumulator, so it may need less than two
        (950, {1: 900}, 8, ""),  # where it does not fit, that is no news
        (2100, {2: 5000, 4: 1800, 16: 1900}, 4, "Memory rises from 4 to 16 micro-"),
        (2100, {16: 3500, 32: 900, 64: 1000}, 32, "Memory rises from 32 to 64 micro-"),
        (500, {8: FAILS}, 16, "num_microbatches=8 failed: ValueError: 8 does not"),
        (10_000, dict.fromkeys((1, 2, 4, 8), OUT_OF_MEMORY), 16, "too large"),
    ],
)
def test_what_is_odd_about_a_need_is_said(limit, changes, answer, said, capsys):
    found = plan_of(limit, changes)
    assert found.num_microbatches == answer
    assert said in str(found)
    assert str(found).count("Memory rises") == said.count("Memory rises")
    failed = {c.num_microbatches for c in found.candidates if c.error}
    assert failed <= {k for k, x in changes.items() if isinstance(x, Exception)}
    assert (8 in failed) == isinstance(changes.get(8), Exception)
    out, err = capsys.readouterr()  # the progress
    told = re.findall(r"plan: num_microbatches=(\d+): compiling \.\.\. .*\n", err)
    assert sorted(map(int, told)) == sorted(
        c.num_microbatches for c in found.candidates
    )
    assert out == ""


def test_a_limit_is_bytes_or_a_string_with_a_unit():
    given = [np.int64(7), 0.9 * 1000, "1.5MiB", "16GB", ".5KiB", "1024"]
    due = [7, 900, 3 * 2**19, 16 * 10**9, 512, 1024]
    assert list(map(compiled_plan.parse_bytes, given)) == due


def test_what_no_candidate_can_do_is_an_error_with_its_cause():
    error = KeyError("image")
    with pytest.raises(ValueError, match=r"all 7 .* with KeyError: 'image'") as info:
        plan_of(100, dict.fromkeys(CANDIDATES, error))
    assert info.value.__cause__ is error
    least = r"smallest need is 170 B \(170 bytes\), with num_microbatches=64"
    with pytest.raises(ga.NothingFitsError, match=least):
        plan_of(100)
    no_room = RuntimeError("RESOURCE_EXHAUSTED: 48.03G exceeds available HBM (15.75G)")
    with pytest.raises(ga.NothingFitsError, match=r"(?s)compiler says .*Nothing fits"):
        plan_of(100, dict.fromkeys(CANDIDATES, no_room))
    with pytest.raises(ValueError, match=rf"must report the memory .*'{NAME}' reports"):
        ga.plan(lambda k: step_of(None), batch_size=1, memory_limit=1)


def test_the_limit_is_that_of_the_smallest_device(monkeypatch):
    devices = [
        types.SimpleNamespace(memory_stats=lambda size=size: {"bytes_limit": size})
        for size in (2000, 900)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    found = plan_of(None)
    assert (found.memory_limit, found.num_microbatches) == (900, 8)


def test_the_total_is_taken_where_it_is_reported():
    """On TPUs the parts are more than what libtpu reserves."""
    memory = memory_of(900)
    assert compiled_plan.temporaries(memory) == 900
    # It is 0 of a GPU's program that comes from a cache.
    for total, due in ((800, 800 - 60 - 10), (0, 900)):
        memory.total_allocation_bytes = total
        assert compiled_plan.temporaries(memory) == due


def test_the_page_names_the_leaves_that_are_added_in_place_and_why_others_are_not():
    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(params, x):
        return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"])

    args = {"layers": jnp.ones((3, 4, 4)), "head": jnp.ones((4, 2))}, jnp.ones((8, 4))
    options = {"batch_size": 8, "candidates": [2], "memory_limit": "1GiB"}
    plan = ga.plan(lambda k: jax.jit(ga.value_and_grad(loss, k)), *args, **options)
    why = "no scan runs over the parameter itself: XLA reuses the buffer"
    due = ["added in place: leaf ['layers']"]
    due += [f"not added in place ({why}): leaf ['head']"]
    if not micro_step.HAS_REFS:
        why = f"jax {jax.__version__} is older than 0.11.1"
        due = [f"not added in place ({why}): leaf ['head'], leaf ['layers']"]
    page = " ".join(str(plan).split())
    assert sorted(plan.candidates[0].notes) == [f"Gradients {x}." for x in due]
    assert [page.count(note) for note in plan.candidates[0].notes] == [1] * len(due)


def test_a_note_of_several_candidates_is_said_once():
    def candidate(k, *notes):
        return compiled_plan.Candidate(k, notes=notes)

    some = candidate(1), candidate(2, "of both"), candidate(4, "of both", "of one")
    page = str(compiled_plan.Plan(2, 8, 2**30, some, ())).splitlines()
    assert page[-2:] == ["of both", "of one"]


# Their compilers are not among the packages of these tests, so the devices of this
# process stand in for those of a target.
MESH = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,))


@pytest.fixture
def machine(monkeypatch):
    """What was asked for, and devices of this process for it."""
    asked = []

    def get_topology_desc(*args, **kwargs):
        asked.append((args, kwargs))
        name = kwargs.get("topology") or args[0]
        number = 8 if name in ("v5e:2x4", "1x1x8", "1x2x4") else 1
        return types.SimpleNamespace(devices=jax.devices()[:number])

    def make_mesh(topology, sizes, names):
        return jax.make_mesh(sizes, names, devices=topology.devices)

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    monkeypatch.setattr(topologies, "make_mesh", make_mesh)
    return asked


def make_step(num_microbatches):
    grad = ga.value_and_grad(helpers.squares, num_microbatches)
    return jax.jit(lambda w, x: w - grad(w, x)[1])


def planned(target, mesh=None, make=make_step, **options):
    """A plan for a target, of arguments without a mesh or with one."""
    args = [
        jax.ShapeDtypeStruct(
            (rows, 16), jnp.float32, sharding=mesh and NamedSharding(mesh, spec)
        )
        for rows, spec in ((16, P()), (64, P("data")))
    ]
    return ga.plan(make, *args, batch_size=64, target=target, **options)


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("v5e", 15.75 * 2**30),
        ("H100", 0.75 * 84929347584),
        ("V6e", 31.24 * 2**30),
    ],
)
def test_the_limit_is_what_programs_may_use_of_the_target(machine, name, limit):
    plan = planned(name)
    assert (plan.memory_limit, plan.num_microbatches) == (int(limit), 1)
    assert planned(name, memory_limit="1GiB").memory_limit == 2**30


@pytest.mark.cpu
def test_the_name_says_what_the_compiler_is_asked_for(machine):
    for name in ("v5e", "v5p", "v5p:4x4x8", "h200:8", "h200:2x4"):
        planned(name, MESH if "h200" in name else None, candidates=[1])
    tpu, v5p, torus, gpu, hosts = machine
    assert (tpu, v5p) == ((("v5e:1x1", "tpu"), {}), (("v5p:1x1x1", "tpu"), {}))
    assert torus == (("v5p:4x4x8", "tpu"), {"wrap": (True, True, True)})
    assert (gpu[1]["topology"], hosts[1]["topology"]) == ("1x1x8", "1x2x4")
    assert "NVIDIA H200" in gpu[1]["target_config"]
    assert "device_memory_size: 151397597184" in gpu[1]["target_config"]


@pytest.mark.cpu
def test_arguments_keep_their_specs_over_the_devices_of_the_target(machine):
    seen = []

    def make_sharded_step(num_microbatches):
        grad = ga.value_and_grad(helpers.squares, num_microbatches, data_axis="data")

        def step(w, x):
            seen.append(jax.sharding.get_abstract_mesh().shape_tuple)
            return w - grad(w, x)[1]

        return jax.jit(step)

    [one] = planned("v5e:2x4", MESH, make_sharded_step, candidates=[2]).candidates
    assert seen == [(("data", 8),)]
    assert one.argument == (16 * 16 + 64 * 16 // 8) * 4  # an eighth of the rows
    # The twin: on one device all rows are there.
    [one] = planned("v5e", candidates=[2]).candidates
    assert one.argument == (16 * 16 + 64 * 16) * 4


@pytest.mark.cpu
@pytest.mark.quick
@pytest.mark.parametrize("sharded", [True, False])
def test_arguments_on_the_host_stay_there_or_it_is_an_error(machine, sharded):
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    there = NamedSharding(mesh, P("data"), memory_kind="pinned_host")
    alone = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    if not sharded:
        there = alone.with_memory_kind("pinned_host")
    x, seen = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=there), []

    def make(k):
        return jax.jit(lambda x: seen.append(jax.typeof(x)) or x)

    options = {"batch_size": 8, "candidates": [1]}
    ga.plan(make, x, target="v5e", **options)
    assert [x.memory_space for x in seen] == [jax.memory.Space.Host]
    without = types.SimpleNamespace(addressable_memories=list)
    target = compiled_plan.Target(types.SimpleNamespace(devices=[without]), 0)
    with pytest.raises(ValueError, match="if the target is a GPU, but one lies on the"):
        target._in_host_memory(alone)


ERRORS = """
planned("h100:8") -> V one mesh of the 8 devices | have none | AbstractMesh
planned("h100", MESH) -> V one mesh of the 1 devices | {'data': 8}
"""
for _name in ("mac", "h100:2x", "H100:1x2x4", "v5e-4", "", 8):
    ERRORS += f"planned({_name!r}) -> V target must be one of a100, | but it is\n"


@pytest.mark.cpu
@pytest.mark.usefixtures("machine")
@pytest.mark.parametrize(("code", "error", "said"), helpers.refusals(ERRORS))
def test_an_unknown_target_and_arguments_that_do_not_lie_on_it_raise(code, error, said):
    helpers.says(lambda: eval(code), error, said)


@pytest.mark.parametrize(
    ("name", "package"), [("h100", "cuda12-local"), ("v5e", "tpu")]
)
def test_a_compiler_that_is_not_there_is_named_with_its_package(
    name, package, monkeypatch
):
    def get_topology_desc(*args, **kwargs):
        raise RuntimeError("no plugin")

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    helpers.says(
        lambda: planned(name), ValueError, f'no plugin. | pip install "jax[{package}]"'
    )
