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


def readme_table():
    """Rows of the README's tables of numbers: ours, Optax's, and the command."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search(r"<!-- numbers -->(.*)<!-- end of numbers -->", text, re.S)[1]
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|") and not line.startswith(("| |", "| ---"))
    ]


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
    peer = "optax.MultiSteps"
    return [
        [f"{ours['over_floor']:.2f}", f"{theirs['over_floor']:.1f}"],
        [f"{ours['temporaries_mb']:.3f} MB", f"{theirs['temporaries_mb']:.0f} MB"],
        [f"{megabytes['ga_optax']:.0f} MB", f"{megabytes[peer]:.0f} MB"],
        [f"{gradients['ga_optax']:.2f}", f"{gradients[peer]:.2f}"],
    ]


def test_the_numbers_in_the_readme_are_those_of_the_benchmarks():
    rows = [[cell.split(" (")[0] for cell in row[1:3]] for row in readme_table()]
    assert rows[:-1] == on_accelerators() + recorded()
    # Not a measurement: a test says it, tests/test_exactness.py.
    assert rows[-1] == ["yes", "no"]


def test_each_number_in_the_readme_has_its_command():
    for name, _, _, command in readme_table():
        script = re.fullmatch(r"`python (\S+\.py)[^`]*`|the same", command)
        assert script, name
        if script[1]:
            assert (ROOT / script[1]).exists()


@pytest.mark.quick
def test_all_is_sorted_and_complete():
    assert ga_optax.__all__ == sorted(ga_optax.__all__)
    for name in ga_optax.__all__:
        assert hasattr(ga_optax, name)
