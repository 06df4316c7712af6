"""The README: its program runs as printed, and its numbers are those measured."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

import ga_optax

ROOT = pathlib.Path(__file__).parents[1]


def test_the_program_in_the_readme_runs_as_pasted():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    program, printed = re.findall(r"```(?:python|text)\n(.*?)```", text, re.S)[:2]
    out = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    ).stdout
    assert out == printed


def result(name):
    text = (ROOT / "benchmarks/results" / f"{name}.json").read_text(encoding="utf-8")
    return json.loads(text)


def readme_table(name="numbers"):
    """Rows of a table in the README: of that of numbers ours, Optax's, the command."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(f"<!-- {name} -->(.*)<!-- end of {name} -->", text, re.S)[1]
    table = re.sub(r"^\|.*\n\|( --- \|)+\n", "", table, flags=re.M)  # heads
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    return {name: cells for name, *cells in rows}


def by_way(rows, field):
    """A field of the rows, by way."""
    return {row["way"]: row[field] for row in rows}


def on_accelerators():
    """The rows that lead: exact, of compiled programs."""
    compiled = result("accelerators")
    assert compiled["num_microbatches"] == 8
    passes = by_way(compiled["micro_step"], "over_params_window")
    ours, theirs = passes["ga.MultiSteps"], passes["optax.MultiSteps"]
    rows = [[f"{ours[t]:.1f}", f"{theirs[t]:.1f}"] for t in ("h200", "v5e")]
    for target in ("v5p", "v6e"):
        assert [f"{ours[target]:.1f}", f"{theirs[target]:.1f}"] == rows[1]
    for model, target in (("reference", "h200"), ("dense", "v5e")):
        over = by_way(compiled[f"window_{model}"], "over_alone")
        ways = "ga_optax", "optax.microbatching"
        rows.append([f"{over[way][target]:.2f}" for way in ways])
    gpus = [row for row in compiled["devices_8"] if row["target"] == "h200:8"]
    sent = by_way(gpus, "over_gradient")
    rows.append([f"{sent[w]:.2f}" for w in ("ga_optax, data_axis", "optax.MultiSteps")])
    return rows


def recorded():
    """The same numbers, out of the files that the commands wrote."""
    step, memory, wire = map(result, ("micro_step", "memory", "collectives"))
    assert "--optimizers adam" in step["command"]
    ours, theirs = (
        next(row for row in step["rows"] if row["side"] == side)
        for side in ("ga apply_gradients", "optax.MultiSteps")
    )
    megabytes, gradients = (
        next(row for row in record["results"] if row["k"] == 16)[unit]
        for record, unit in ((memory, "mb"), (wire, "over_gradient"))
    )
    # Like with like: a loop across calls with a loop, a call with a call.
    across, inside = (
        ("ga.MultiSteps", "optax.MultiSteps"),
        ("ga_optax", "optax.microbatching"),
    )
    return [
        [f"{ours['ms']:.0f} ms", f"{theirs['ms']:.0f} ms"],
        [f"{ours['temporaries_mb']:.3f} MB", f"{theirs['temporaries_mb']:.0f} MB"],
        [f"{megabytes[way]:.0f} MB" for way in across],
        [f"{megabytes[way]:.0f} MB" for way in inside],
        [f"{gradients[way]:.2f}" for way in inside],
    ]


def test_the_numbers_in_the_readme_are_those_of_the_benchmarks():
    table = readme_table().values()
    rows = [[cell.split(" (")[0] for cell in row[:2]] for row in table]
    assert rows[:-1] == on_accelerators() + recorded()
    # Not a measurement: a test says it, tests/test_exactness.py.
    assert rows[-1] == ["yes", "no"]


def test_the_numbers_of_a_loss_over_the_whole_batch_are_those_of_the_benchmark():
    record = result("window_axis")
    assert (record["rows"], record["num_microbatches"]) == (2048, 8)
    [row] = [row for row in record["results"] if row["case"] == "contrastive"]
    assert readme_table("whole batch") == {
        "temporaries": [f"{mb:.0f} MB" for mb in row["mb"].values()],
        "time over the undivided batch's": [
            f"{ratio:.2f}" for ratio in row["time_ratio"].values()
        ],
    }


def test_each_number_in_the_readme_has_its_command():
    for name, (_, _, command) in readme_table().items():
        script = re.fullmatch(r"`python (\S+\.py)[^`]*`|the same", command)
        assert script, name
        if script[1]:
            assert (ROOT / script[1]).exists()


@pytest.mark.quick
def test_all_is_sorted_and_complete():
    assert ga_optax.__all__ == sorted(ga_optax.__all__)
    for name in ga_optax.__all__:
        assert hasattr(ga_optax, name)
