"""What fits: few compilations, and the answer of brute force."""

import functools
import types

import helpers
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import ga_optax as ga
from ga_optax._compiled import plan
from ga_optax._loop import in_place

CANDIDATES = (1, 2, 4, 8, 16, 32, 64)


# -- A character model's step, small ---------------------------------------------------

WIDTH, LENGTH, VOCABULARY, LAYERS, BATCH = 64, 32, 96, 2, 64


def init():
    draw = np.random.default_rng(0).normal
    shapes = {
        "embed": (VOCABULARY, WIDTH),
        "qkv": (LAYERS, WIDTH, 3 * WIDTH),
        "out": (LAYERS, WIDTH, WIDTH),
        "up": (LAYERS, WIDTH, 4 * WIDTH),
        "down": (LAYERS, 4 * WIDTH, WIDTH),
        "head": (WIDTH, VOCABULARY),
    }
    return {
        name: jnp.asarray(draw(size=shape) * 0.05, jnp.float32)
        for name, shape in shapes.items()
    }


def loss(params, text):
    """Next-character cross-entropy of a transformer; `text` is [rows, LENGTH + 1]."""
    inputs, targets = text[:, :-1], text[:, 1:]
    mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))[None]

    def layer(x, p):
        q, k, v = jnp.split(x @ p["qkv"], 3, axis=-1)
        scores = jnp.einsum("btd,bsd->bts", q, k) / WIDTH**0.5
        weights = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
        x = x + jnp.einsum("bts,bsd->btd", weights, v) @ p["out"]
        return x + jax.nn.gelu(x @ p["up"]) @ p["down"], None

    layers = {name: params[name] for name in ("qkv", "out", "up", "down")}
    x = jax.lax.scan(layer, params["embed"][inputs], layers)[0]
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


OPTIMIZER = optax.sgd(0.1, momentum=0.9)


def make_step(num_microbatches):
    grad = ga.value_and_grad(loss, num_microbatches)

    def step(params, state, text):
        value, grads = grad(params, text)
        updates, state = OPTIMIZER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return jax.jit(step, donate_argnums=(0, 1))


def inputs():
    params = jax.eval_shape(init)
    text = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    return params, jax.eval_shape(OPTIMIZER.init, params), text


@functools.cache
def compiled(k):
    return make_step(k).lower(*inputs()).compile()


def make_cached_step(k):
    """`make_step`, but every candidate is compiled once for all tests: about 1 s."""
    lowered = types.SimpleNamespace(compile=lambda: compiled(k))
    return types.SimpleNamespace(lower=lambda *args: lowered)


def need(k):
    """The bytes of a candidate."""
    return helpers.needed(compiled(k))


@functools.cache
def needs():
    """Brute force: the bytes of every candidate."""
    return {k: need(k) for k in CANDIDATES}


def brute_force(limit):
    return min(k for k, size in needs().items() if size <= limit)


@pytest.mark.published  # one of the longest
def test_the_answer_is_that_of_brute_force_with_at_most_four_compilations():
    for k in (1, 2, 8, 64):  # in one test, so that one process compiles them
        check_against_brute_force(k)


def check_against_brute_force(k):
    limit = needs()[k]
    made = []

    def counted(num_microbatches):
        made.append(num_microbatches)
        return make_cached_step(num_microbatches)

    plan = ga.plan(
        counted,
        *inputs(),
        batch_size=BATCH,
        memory_limit=limit,
        candidates=CANDIDATES,
    )
    assert plan.num_microbatches == brute_force(limit)
    assert len(made) == len(set(made)) <= 4
    assert plan.bytes == needs()[plan.num_microbatches] <= limit
    assert {c.num_microbatches: c.bytes for c in plan.candidates} == {
        c: needs()[c] for c in made
    }
    assert plan.microbatch_size == BATCH // plan.num_microbatches
    assert sorted([*made, *plan.untried]) == list(CANDIDATES)
    # The twin: one byte less, and the answer is another one (or none).
    if k != min(needs(), key=lambda k: needs()[k]):
        less = ga.plan(
            make_cached_step,
            *inputs(),
            batch_size=BATCH,
            memory_limit=limit - 1,
            candidates=CANDIDATES,
        )
        assert less.num_microbatches == brute_force(limit - 1) > k


@pytest.mark.published  # one of the longest
def test_where_nothing_fits_the_error_names_the_smallest_need():
    least = min(needs().values())
    where = min(k for k in needs() if needs()[k] == least)
    words = rf"\({least} bytes\), with num_micro"
    with pytest.raises(ga.NothingFitsError, match=words) as info:
        ga.plan(
            make_cached_step,
            *inputs(),
            batch_size=BATCH,
            memory_limit=least - 1,
            candidates=CANDIDATES,
        )
    assert f"num_microbatches={where}" in str(info.value)
    assert "too large" in str(info.value)


@pytest.mark.exhaustive
def test_arrays_do_as_well_as_shapes_and_nothing_runs():
    params = init()
    arrays = (params, OPTIMIZER.init(params), jnp.zeros((BATCH, LENGTH + 1), jnp.int32))
    plan = ga.plan(
        make_step, *arrays, batch_size=BATCH, memory_limit="1GiB", candidates=[4]
    )
    assert plan.bytes == need(4)
    assert not any(x.is_deleted() for x in jax.tree.leaves(arrays))  # not donated


def test_progress_goes_to_stderr_and_names_every_candidate(capsys):
    ga.plan(made_of(FALLING), batch_size=64, memory_limit=500)
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert [line.split(":")[1] for line in lines] == [
        f" num_microbatches={k}" for k in (1, 16, 4, 8)
    ]
    assert "compiling ... 6.32 KiB, does not fit (0.0 s)" in lines[0]
    assert "compiling ... 470 B, fits (0.0 s)" in lines[1]


def test_a_plan_is_a_table():
    plan = ga.plan(
        made_of(FALLING), batch_size=64, memory_limit=2000, candidates=CANDIDATES
    )
    lines = [line.split() for line in str(plan).splitlines()]
    assert lines[0][:3] == ["micro-batches", "examples", "temp"]
    assert [line[0] for line in lines[1:5]] == ["1", "2", "4", "16"]
    assert " ".join(lines[3]) == "4 16 1.56 KiB 70 B 40 B 40 B 1.63 KiB fits"
    assert "num_microbatches=4 of 16 examples needs 1.63 KiB of 1.95 KiB." in str(plan)
    assert "Not compiled, as the search did not need them: 8, 32, 64." in str(plan)


def test_notes_on_the_candidates_are_printed_once_under_the_table():
    note = "leaf ['embed'] does not accumulate in place. " * 3
    candidates = [ga.Candidate(k, temp=10, fits=True, notes=(note,)) for k in (1, 2)]
    page = str(ga.Plan(1, 4, 20, tuple(candidates), ()))
    assert page.count("['embed']") == 3  # all of one note
    assert max(map(len, page.splitlines())) <= 88


# -- The search, over steps of any need ------------------------------------------------


def made_of(sizes, seen=None):
    """`make_step` for a step whose compiled program needs `sizes[k]`."""

    def make(k):
        if seen is not None:
            seen.append(k)
        size = sizes[k]
        if isinstance(size, Exception):
            raise size
        memory = types.SimpleNamespace(
            temp_size_in_bytes=size,
            argument_size_in_bytes=70,
            output_size_in_bytes=40,
            alias_size_in_bytes=40,
        )
        compiled = types.SimpleNamespace(memory_analysis=lambda: memory)
        lowered = types.SimpleNamespace(compile=lambda: compiled)
        return types.SimpleNamespace(lower=lambda *args: lowered)

    return make


FALLING = {k: 6400 // k for k in CANDIDATES}


@pytest.mark.parametrize("limit", range(170, 6600, 211))
def test_the_search_finds_the_fewest_that_fit(limit):
    seen = []
    plan = ga.plan(
        made_of(FALLING, seen), batch_size=64, memory_limit=limit, candidates=CANDIDATES
    )
    fits = [k for k in CANDIDATES if FALLING[k] + 70 <= limit]
    assert plan.num_microbatches == fits[0]
    assert len(seen) <= 4
    assert "Memory rises" not in str(plan)


def test_one_micro_batch_that_needs_less_than_two_is_found_with_one_compilation():
    seen = []
    sizes = FALLING | {1: 100}
    plan = ga.plan(
        made_of(sizes, seen), batch_size=64, memory_limit=200, candidates=CANDIDATES
    )
    assert plan.num_microbatches == 1
    assert seen == [1]
    # Where it does not fit and others do, its smaller need is no news.
    plan = ga.plan(
        made_of(FALLING | {1: 900}),
        batch_size=64,
        memory_limit=950,
        candidates=CANDIDATES,
    )
    assert plan.num_microbatches == 8
    assert "Memory rises" not in str(plan)


def test_all_divisors_are_candidates_by_default():
    seen = []
    sizes = {k: 7200 // k for k in range(1, 73)}
    plan = ga.plan(made_of(sizes, seen), batch_size=72, memory_limit=1000)
    assert sorted([*seen, *plan.untried]) == [1, 2, 3, 4, 6, 8, 9, 12, 18, 24, 36, 72]
    assert plan.num_microbatches == 8
    assert len(seen) <= 5  # 1 + ceil(log2(12))


@pytest.mark.parametrize(
    ("sizes", "answer", "rising"),
    [
        ({2: 5000, 4: 1800, 16: 1900}, 4, (4, 16)),
        ({16: 3500, 32: 900, 64: 1000}, 32, (32, 64)),
    ],
)
def test_memory_that_rises_is_reported(sizes, answer, rising):
    plan = ga.plan(
        made_of(FALLING | sizes),
        batch_size=64,
        memory_limit=2100,
        candidates=CANDIDATES,
    )
    assert plan.num_microbatches == answer
    few, many = rising
    assert str(plan).count("Memory rises") == 1
    assert f"Memory rises from {few} to {many} micro-batches" in str(plan)


def test_a_candidate_that_fails_is_reported_and_the_search_goes_on(capsys):
    sizes = FALLING | {8: ValueError("8 does not divide by 3 devices\nsecond line")}
    plan = ga.plan(
        made_of(sizes), batch_size=64, memory_limit=500, candidates=CANDIDATES
    )
    assert plan.num_microbatches == 16
    assert [c.num_microbatches for c in plan.candidates if c.error] == [8]
    assert "num_microbatches=8 failed: ValueError: 8 does not divide by 3" in str(plan)
    assert "failed: ValueError: 8 does not divide" in capsys.readouterr().err


def test_a_compiler_that_runs_out_of_memory_means_too_large():
    too_large = RuntimeError("RESOURCE_EXHAUSTED: ran out of memory in hbm")
    seen = []
    plan = ga.plan(
        made_of(FALLING | dict.fromkeys((1, 2, 4, 8), too_large), seen),
        batch_size=64,
        memory_limit=10_000,
        candidates=CANDIDATES,
    )
    assert plan.num_microbatches == 16
    assert seen == [1, 16, 4, 8]


def test_where_every_candidate_fails_the_first_failure_is_the_cause():
    error = KeyError("image")
    with pytest.raises(ValueError, match=r"all 3 .* with KeyError: 'image'") as info:
        ga.plan(
            made_of(dict.fromkeys((1, 2, 4), error)), batch_size=4, memory_limit=100
        )
    assert info.value.__cause__ is error


def test_nothing_fits_and_failures_are_told_together():
    sizes = FALLING | {64: OSError("no disk")}
    with pytest.raises(ValueError, match=r"smallest need is 270 B") as info:
        ga.plan(made_of(sizes), batch_size=64, memory_limit=99, candidates=CANDIDATES)
    assert "num_microbatches=64 failed: OSError: no disk" in str(info.value)


# -- The limit -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (12345, 12345),
        (np.int64(7), 7),
        (0.9 * 1000, 900),
        ("16GiB", 16 * 2**30),
        ("16 gib", 16 * 2**30),
        ("16GB", 16 * 10**9),
        ("1.5MiB", 3 * 2**19),
        (".5KiB", 512),
        ("80B", 80),
        ("1024", 1024),
        ("2TiB", 2**41),
    ],
)
def test_a_limit_is_bytes_or_a_string_with_a_unit(given, size):
    assert plan.parse_bytes(given) == size


@pytest.mark.parametrize(
    ("given", "error", "words"),
    [
        ("16G", ValueError, r"but it is '16G'. Pass bytes"),
        ("GiB", ValueError, r"it is 'GiB'"),
        ("-1GiB", ValueError, r"it is '-1GiB'"),
        ("", ValueError, r"it is ''"),
        (0, ValueError, r"at least one byte, but it is 0"),
        (-5, ValueError, r"it is -5"),
        (float("nan"), ValueError, r"it is nan"),
        (float("inf"), ValueError, r"it is inf"),
        (True, TypeError, r"it is True of type bool"),
        ([1], TypeError, r"of type list"),
    ],
)
def test_a_limit_that_is_none_raises(given, error, words):
    with pytest.raises(error, match=words):
        ga.plan(made_of(FALLING), batch_size=64, memory_limit=given)


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (3 * 2**29, "1.50 GiB")],
)
def test_sizes_are_printed_in_binary_units(size, text):
    assert plan.format_bytes(size) == text


def test_the_limit_must_be_given_where_the_device_tells_none():
    with pytest.raises(ValueError, match=r"memory_limit must be given .*\"16GiB\""):
        ga.plan(made_of(FALLING), batch_size=64)


def test_the_limit_is_that_of_the_smallest_device(monkeypatch):
    devices = [
        types.SimpleNamespace(memory_stats=lambda size=size: {"bytes_limit": size})
        for size in (2000, 900)
    ]
    monkeypatch.setattr(jax, "local_devices", lambda: devices)
    plan = ga.plan(made_of(FALLING), batch_size=64)
    assert plan.memory_limit == 900
    assert plan.num_microbatches == 8


# -- Bad input -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"batch_size": 0}, ValueError, r"batch_size must be at least 1, but it is 0"),
        ({"batch_size": 6.0}, TypeError, r"batch_size must be an int, but it is 6\.0"),
        ({"batch_size": True}, TypeError, r"it is True"),
        ({"candidates": []}, ValueError, r"candidates must not be empty"),
        ({"candidates": [1, 3]}, ValueError, r"but 3 does not. Choose from 1, 2, 4, 8"),
        (
            {"candidates": [0]},
            ValueError,
            r"each candidate must be at least 1.* it is 0",
        ),
        (
            {"candidates": ["4"]},
            TypeError,
            r"must be an int, but it is '4' of type str",
        ),
        ({"make_step": 3}, TypeError, r"make_step must be a function .*it is 3"),
        ({"make_step": lambda k: len}, TypeError, r"no `lower`. Return jax.jit"),
    ],
)
def test_an_argument_without_a_meaning_raises(arguments, error, words):
    arguments = {"batch_size": 64, "memory_limit": 10**6} | arguments
    make = arguments.pop("make_step", made_of(FALLING))
    with pytest.raises(error, match=words):
        ga.plan(make, **arguments)


def test_the_total_is_taken_where_it_is_reported():
    """On TPUs the parts are more than what libtpu reserves."""
    sizes = {"argument": 70, "output": 40, "alias": 30, "temp": 900}
    memory = {f"{kind}_size_in_bytes": size for kind, size in sizes.items()}
    assert plan.temporaries(types.SimpleNamespace(**memory)) == 900
    memory["total_allocation_bytes"] = 800
    assert plan.temporaries(types.SimpleNamespace(**memory)) == 800 - 70 - 10


def test_a_backend_that_reports_no_memory_raises():
    compiled = types.SimpleNamespace(memory_analysis=lambda: None)
    lowered = types.SimpleNamespace(compile=lambda: compiled)
    step = types.SimpleNamespace(lower=lambda: lowered)
    with pytest.raises(
        ValueError, match=r"must report the memory .*'cpu' reports none"
    ):
        ga.plan(lambda k: step, batch_size=1, memory_limit=1)


# -- Which gradients are added in place ------------------------------------------------


def notes_of(num_microbatches, **options):
    """The notes of a model that scans over its layers, and its page has each once."""

    def layer(x, w):
        return jnp.tanh(x @ w), None

    def loss(params, x):
        return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] @ params["head"])

    def make_step(k):
        return jax.jit(ga.value_and_grad(loss, k, **options))

    params = {"layers": jnp.ones((3, 4, 4)), "head": jnp.ones((4, 2))}
    arrays, limit = (params, jnp.ones((8, 4))), {"memory_limit": "1GiB"}
    plan = ga.plan(
        make_step, *arrays, batch_size=8, candidates=[num_microbatches], **limit
    )
    [candidate] = plan.candidates
    page = " ".join(str(plan).split())
    assert all(page.count(note) == 1 for note in candidate.notes)
    return sorted(candidate.notes)


@pytest.mark.skipif(in_place.HAS_REFS, reason="this jax adds in place")
def test_an_old_jax_is_why_no_gradient_is_added_in_place():
    [note] = notes_of(2)
    why = f"jax {jax.__version__} is older than 0.11.1"
    leaves = "leaf ['head'], leaf ['layers']"
    assert note == f"Gradients not added in place ({why}): {leaves}."


@pytest.mark.skipif(not in_place.HAS_REFS, reason="this jax adds nothing in place")
def test_the_page_names_the_leaves_that_are_added_in_place_and_why_others_are_not():
    layers, head = notes_of(2)
    assert layers == "Gradients added in place: leaf ['layers']."
    why = "no scan runs over it as it is: XLA reuses its gradient's buffer"
    assert head == f"Gradients not added in place ({why}): leaf ['head']."


def test_of_one_micro_batch_nothing_is_said_for_it_is_the_undivided_program():
    assert notes_of(1) == []


def test_one_micro_batch_of_several_calls_is_added_to_what_came(caplog):
    """The twin: it has something to add to, so the switch is the reason."""
    w, x = jnp.ones(4), jnp.ones((2, 4))
    step = ga.accumulate(lambda w, x: jnp.mean(x @ w), optimize=False)
    with caplog.at_level("DEBUG", "ga_optax"):
        jax.jit(step)(ga.accumulator.init(w), w, x)
    [note] = caplog.messages
    assert note.startswith("Gradients not added in place (optimize=False)")


def test_optimize_false_is_why_no_gradient_is_added_in_place():
    [note] = notes_of(2, optimize=False)
    leaves = "leaf ['head'], leaf ['layers']"
    assert note == f"Gradients not added in place (optimize=False): {leaves}."
