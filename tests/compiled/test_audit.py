"""`audit` reads every form in which XLA prints a collective."""

import jax
import jax.numpy as jnp
import pytest
from helpers import mean_of, mesh_of, put, squares
from jax.sharding import PartitionSpec as P

import ga_optax as ga


@pytest.fixture(autouse=True)
def scopes_are_those_of_today():
    """A program from the cache has the scopes with which it was compiled first."""
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


HEAD = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={()->f32[]}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}

"""


def entry(*lines, before=""):
    main = "ENTRY %main (p: f32[8,4]) -> f32[] {"
    return HEAD + before + "\n  ".join([main, *lines]) + "\n}\n"


PARAMETER = "%p = f32[8,4]{1,0} parameter(0)"


def only(*lines, mesh=None, before=""):
    """The one collective of a program with these lines."""
    [found] = ga.audit(entry(PARAMETER, *lines, before=before), mesh).collectives
    return found


KINDS = {
    "all-reduce": "replica_groups={{0,1}}, to_apply=%add",
    "all-gather": "replica_groups={{0,1}}, dimensions={0}",
    "reduce-scatter": "replica_groups={{0,1}}, dimensions={0}, to_apply=%add",
    "all-to-all": "replica_groups={{0,1}}, dimensions={0}",
    "collective-permute": "source_target_pairs={{0,1},{1,0}}",
    "collective-broadcast": "replica_groups={{0,1}}",
    "ragged-all-to-all": "replica_groups={{0,1}}",
}
REDUCED = f"all-reduce(%p), {KINDS['all-reduce']}"


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_found_with_its_operand_bytes(kind):
    found = only(f"%c = f32[16,4]{{1,0}} {kind}(%p), {KINDS[kind]}")
    assert (found.kind, found.num_bytes, found.times) == (kind, 128, 1)
    assert found.replica_groups.startswith("{{0,1}")


def computation(name, *lines, takes="q: f32[8,4]", gives="f32[8,4]"):
    return "\n  ".join([f"%{name} ({takes}) -> {gives} {{", *lines]) + "\n}\n\n"


Q = "%q = f32[8,4]{1,0} parameter(0)"
OF_Q = REDUCED.replace("%p", "%q")
R = "%r = f32[8,4]{1,0} parameter(1)"
ASYNC = "((f32[8,4]{1,0}), f32[4,4]{1,0}, u32[])"
RUNS = "calls=%wrapped"
WRAPPED = computation(
    "wrapped", Q, f"ROOT %rs = f32[4,4] reduce-scatter(%q), {KINDS['reduce-scatter']}"
)
OVER_FOUR = "replica_groups=[1,4]<=[4], to_apply=%add"
SLICES = "dynamic_slice_sizes={2,4}"
ZERO = "%zero = u32[] constant(0)"


def sliced(operand):
    lines = (
        f"%all-reduce.9 = f32[8,4] all-reduce(%q), {OVER_FOUR}",
        f"ROOT %s = f32[2,4] dynamic-slice(%{operand}, %zero, %zero), {SLICES}",
    )
    return computation("kept", Q, ZERO, *lines, gives="f32[2,4]")


def sliced_pair(kept):
    lines = [f"%sum = (f32[8,4], f32[8,4]) all-reduce(%q, %r), {OVER_FOUR}"]
    for i in (0, 1):
        lines += [
            f"%g.{i} = f32[8,4] get-tuple-element(%sum), index={i}",
            f"%s.{i} = f32[2,4] dynamic-slice(%g.{i}, %zero, %zero), {SLICES}",
        ]
    lines.append(f"ROOT %t = (f32[2,4], f32[2,4]) tuple(%s.0, {kept})")
    return computation("kept", Q, R, ZERO, *lines, takes="q: f32[8,4], r: f32[8,4]")


KEEPS = "%f = f32[2,4] fusion(%p), kind=kCustom, calls=%kept"
KEEPS_TWO = "%f = (f32[8,4], f32[8,4]) fusion(%p, %p), kind=kCustom, calls=%kept"
TYPED = "%c = f32[8,4] all-reduce(f32[8,4]{1,0} %p), replica_groups={}"
AND_FLAGS = "%c = (f32[8,4]{1,0}, /*index=1*/pred[16]{0}) "
AND_HALF = "%c = (f32[8,4]{1,0}, /*index=1*/bf16[10]{0}) "
GATHERS = "%s = (f32[8,4]{1,0}, f32[16,4]{1,0}) all-gather-start(%p), "
LATER = [
    f"%s = {ASYNC} async-start(%p), {RUNS}",
    f"%u = {ASYNC} async-update(%s), {RUNS}",
    f"%d = f32[4,4]{{1,0}} async-done(%u), {RUNS}",
]
CALLS = "%f = f32[2,4] call(%p), to_apply=%kept"
# The kind, the bytes, the instructions, and computations before them.
FORMS = [
    # Operands with their types beside them, and in a tuple.
    ("all-reduce", 128, [TYPED]),
    (
        *("all-reduce", 128 + 20),
        ["%q = bf16[10]{0} parameter(1)", AND_HALF + REDUCED.replace("%p", "%p, %q")],
    ),
    (
        *("all-reduce", 128 + 16),
        ["%q = pred[16]{0} parameter(1)", AND_FLAGS + REDUCED.replace("%p", "%p, %q")],
    ),
    # Asynchronous: a pair, and a call of what it wraps.
    (
        *("all-gather", 128),
        [GATHERS + KINDS["all-gather"], "%d = f32[16,4]{1,0} all-gather-done(%s)"],
    ),
    ("reduce-scatter", 128, LATER, WRAPPED),
    # An all-reduce whose fusion keeps a slice is a reduce-scatter; one whose slice
    # is of something else, or that another kernel slices, sends all.
    ("reduce-scatter", 128, [KEEPS], sliced("all-reduce.9")),
    ("all-reduce", 128, [KEEPS], sliced("q")),
    ("all-reduce", 128, [CALLS], sliced("all-reduce.9")),
    ("reduce-scatter", 256, [KEEPS_TWO], sliced_pair("%s.1")),
    ("all-reduce", 256, [KEEPS_TWO], sliced_pair("%g.1")),
]


@pytest.mark.parametrize("form", FORMS)
def test_a_collective_counts_once_in_any_form(form):
    kind, size, lines, *before = form
    found = only(*lines, before="".join(before))
    assert (found.kind, found.num_bytes) == (kind, size)


def test_what_a_reduction_applies_to_scalars_does_not_count_as_run():
    before = computation("apply", Q, f"ROOT %r = f32[8,4] {OF_Q}")
    reduce = "%c = f32[] reduce(%p, %z), dimensions={0,1}, to_apply=%apply"
    assert not ga.audit(entry(PARAMETER, reduce, before=before)).collectives
    assert only("%c = f32[8,4]{1,0} call(%p), to_apply=%apply", before=before)


def test_the_parts_of_a_tpus_asynchronous_collective_count_once():
    of, before, fusions = "%q = f32[2,4]{1,0} parameter(0)", "", []
    for name in ("start", "compute", "done", "other"):
        chain = f'frontend_attributes={{chain_id="{int(name == "other")}"}}'
        gather = (
            f"ROOT %{name}.g = f32[8,4] all-gather(%q), dimensions={{0}}, channel_id=4,"
            f" replica_groups=[1,4]<=[4], {chain}"
        )
        before += computation(name, of, gather, takes="q: f32[2,4]")
        fusions.append(f"%f.{name} = f32[8,4] fusion(%q), kind=kCustom, calls=%{name}")
    audit = ga.audit(entry(of, *fusions, before=before))
    assert [c.name for c in audit.collectives] == ["start.g", "other.g"]
    assert audit.total_bytes == 2 * 32


LOOP = """\
%body (t: (s32[], f32[8,4])) -> (s32[], f32[8,4]) {
  %t = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %g = f32[8,4]{1,0} get-tuple-element(%t), index=1
  %r = f32[8,4]{1,0} all-reduce(%g), replica_groups={{0,1}}, to_apply=%add
  ROOT %o = (s32[], f32[8,4]{1,0}) tuple(%i, %r)
}

%condition (t: (s32[], f32[8,4])) -> pred[] {
  %t = (s32[], f32[8,4]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] constant(5)
  ROOT %c = pred[] compare(%i, %n), direction=LT
}

"""


def trips(n):
    return f', backend_config={{"known_trip_count":{{"n":"{n}"}}}}'


WHILE = "%w = (s32[], f32[8,4]{1,0}) while(%t), condition=%condition, body=%body"
ESCAPED = r', backend_config="{\"known_trip_count\":{\"n\":\"7\"}}"'


@pytest.mark.parametrize("config", [trips(7), ESCAPED])
def test_a_loop_says_how_often(config):
    found = only(WHILE + config, before=LOOP)
    assert (found.loops, found.total_bytes) == ((("w", 7),), 7 * 128)


def test_a_loop_of_unknown_length_is_said_to_be_so():
    audit = ga.audit(entry(PARAMETER, WHILE, before=LOOP))
    assert (audit.in_loop[0].loops, audit.total_bytes) == ((("w", None),), None)
    for words in ("loop of ?", "an unknown number of bytes"):
        assert words in str(audit)


# What the compilers of TPUs write: no trip count, copies between memories.
COUNTED = LOOP.replace(
    "  ROOT %o = (s32[], f32[8,4]{1,0}) tuple(%i, %r)",
    """\
  %by = s32[]{:T(128)} constant(2)
  %next = s32[]{:T(128)} add(%i, %by)
  %moved = s32[]{:T(128)S(6)} copy(%next)
  ROOT %o = (s32[], f32[8,4]{1,0}) tuple(%moved, %r)""",
)
COUNTER = (
    "%first = s32[]{:T(128)} constant(1)",
    "%copy.1 = s32[]{:T(128)} copy(%first)",
    "%t = (s32[]{:T(128)}, f32[8,4]{1,0}) tuple(%copy.1, %p)",
)


def test_a_counter_says_how_often():
    def times(before, counter=COUNTER):
        return only(*counter, WHILE, before=before).times

    assert times(COUNTED) == 2  # 1, 3
    assert times(COUNTED.replace("constant(5)", "constant(6)")) == 3  # 1, 3, 5
    assert times(COUNTED.replace("constant(5)", "constant(1)")) == 0
    for known, unknown in (
        ("constant(5)", "parameter(1)"),
        ("constant(2)", "parameter(1)"),
        ("constant(2)", "constant(0)"),
        ("direction=LT", "direction=NE"),
        ("add(%i, %by)", "multiply(%i, %by)"),
        ("%next = s32[]{:T(128)} add(%i", "%next = s32[]{:T(128)} add(%by"),
    ):
        assert times(COUNTED.replace(known, unknown)) is None, unknown
    assert times(COUNTED, (COUNTER[0], COUNTER[2])) is None  # no such operand


def test_loops_in_loops_multiply():
    lines = Q, "%t = (s32[], f32[8,4]{1,0}) tuple(%q)", WHILE + trips(5)
    outer = computation("outer_body", *lines)
    never = computation("never", "ROOT %b = pred[] constant(false)", gives="pred[]")
    line = "%v = f32[8,4] while(%p), condition=%never, body=%outer_body" + trips(3)
    found = only(line, before=LOOP + outer + never)
    assert found.loops == (("v", 3), ("w", 5))
    assert found.total_bytes == 15 * 128


@pytest.mark.parametrize(
    "branches",
    ["branch_computations={%no, %yes}", "true_computation=%yes, false_computation=%no"],
)
def test_a_branch_is_marked(branches):
    yes = computation("yes", Q, f"ROOT %r = f32[8,4] {OF_Q}")
    no = computation("no", f"ROOT {Q}")
    line = f"%c = f32[8,4]{{1,0}} conditional(%b, %p, %p), {branches}"
    audit = ga.audit(entry(PARAMETER, line, before=yes + no))
    assert [c.conditional for c in audit.collectives] == [True]
    assert "in a branch" in str(audit)
    loop = computation("turn", Q, f"ROOT %n = {line.partition(' = ')[2]}")
    line = "%v = f32[8,4] while(%p), condition=%no, body=%turn" + trips(3)
    audit = ga.audit(entry(PARAMETER, line, before=yes + no + loop))
    assert "loop of 3, in a branch" in str(audit)


def test_data_that_moves_is_said_to_move():
    assert "does not communicate" in str(ga.audit(entry(PARAMETER)))
    moved = f"%a = f32[8,4] all-to-all(%p), {KINDS['all-to-all']}"
    merge = f'%r = f32[8,4] {REDUCED}, metadata={{op_name="jit(f)/merge/psum"}}'
    said = [
        " ".join(str(ga.audit(entry(PARAMETER, *x))).split())
        for x in ([merge], [moved, merge], [moved])
    ]
    words = "moves its activations", "pass data_axis= to value_and_grad"
    found = [[word in text for word in words] for text in said]
    assert found == [[False, False], [True, False], [True, True]]


@pytest.mark.cpu
@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,2,4,6},{1,3,5,7}}", ("data",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("[4,2]<=[8]", ("model",)),
        ("[2,4]<=[4,2]T(1,0)", ("data",)),
        ("[1,8]<=[8]", ("data", "model")),
        ("mesh['data'=4,'model'=2] {'data'}", ("data",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("model",)),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", ("data", "model")),
        ("mesh['all'=8] {'all':(2)2}", None),  # a part of an axis
        ("{}", ("data", "model")),
        ("{{0,3},{1,2},{4,7},{5,6}}", None),
    ],
)
def test_a_mesh_gives_the_groups_their_names(groups, axes):
    mesh = jax.make_mesh((4, 2), ("data", "model"))
    line = f"%c = f32[8,4] all-reduce(%p), replica_groups={groups}, to_apply=%add"
    assert only(line, mesh=mesh).axes == axes
    assert only(line).axes is None
    assert only(line).replica_groups == groups


@pytest.mark.parametrize("inside", [False, True])
def test_a_compiled_program_is_read_as_it_runs(inside):
    mesh = mesh_of(8)

    def step(x):
        def body(acc, _):
            return jnp.tanh(acc + (jax.lax.psum(acc, "data") if inside else x)), None

        acc = jax.lax.scan(body, x, length=6)[0]
        return acc if inside else jax.lax.psum(acc, "data")

    specs = {"in_specs": P("data"), "out_specs": P("data") if inside else P()}
    mapped = jax.shard_map(step, mesh=mesh, check_vma=False, **specs)
    audit = ga.audit(jax.jit(mapped).lower(jnp.ones((8, 100))).compile(), mesh)
    assert [c.axes for c in audit.in_loop] == [("data",)] * inside
    assert audit.total_bytes == (6 if inside else 1) * 400
    # What stands in a loop is what to worry about.
    due = ["loop of 6", "data_axis="]
    due = due if inside else ["1 collective, none in a loop: 400 bytes"]
    assert [part for part in due if part not in str(audit)] == []


def test_an_argument_that_every_device_gathers_is_named():
    """What is no parameter, and comes to the call from a function inside."""
    mesh = mesh_of(8)
    place = jax.sharding.NamedSharding(mesh, P(None, "data"))
    fun = lambda w, x, base: squares(w, x @ base["w"])  # noqa: E731
    step = ga.value_and_grad(fun, 4, data_axis=ga.DataAxis("data", mesh=mesh))
    args = jnp.ones((128, 8)), jnp.ones((32, 128)), {"w": jnp.ones((128, 128))}
    args = put(args, mesh, (P(), P("data"), P(None, "data")))

    def page(run):
        compiled = jax.jit(run).lower(*args).compile()
        return " ".join(str(ga.audit(compiled, mesh)).split())

    told = "Every device gathers all of base['w']: 8,192 bytes from each."
    assert told in page(lambda w, x, base: jax.jit(step)(w, x, base))
    # The twin does what the page says.
    constrain = lambda base: jax.lax.with_sharding_constraint(base, place)  # noqa: E731
    assert "gathers all of" not in page(
        jax.jit(lambda w, x, base: step(w, x, constrain(base)))
    )


@pytest.mark.quick
@pytest.mark.parametrize("make", [ga.value_and_grad, mean_of])
def test_who_passes_a_data_axis_is_not_told_to(make):
    mesh = mesh_of(2)
    args = put((jnp.ones((8, 8)), jnp.ones((16, 8))), mesh, (P(), P("data")))

    def page(**options):
        step = jax.jit(make(squares, 4, **options))
        return " ".join(str(ga.audit(step.lower(*args).compile(), mesh)).split())

    axis = {"mesh": mesh, "sync": "each"}
    for more in ({}, {"grad_specs": P("data")}, {"param_specs": P("data")}):
        told = page(data_axis=ga.DataAxis("data", **axis, **more))
        assert 'sync="each" asks for the reductions in every iteration' in told
        assert "data_axis=" not in told
    assert "pass data_axis=" in page()  # the twin
