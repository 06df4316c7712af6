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
    """Rows of the table of figures: what, theirs, ours, the command."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    table = re.search("<!-- numbers -->(.*)<!-- end of numbers -->", text, re.S)[1]
    table = re.sub(r"^\|.*\n\|( --- \|)+\n", "", table, flags=re.M)  # the head
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    return {name: cells for name, *cells in rows}


def recorded():
    """The same numbers, theirs and ours, out of the files that the commands wrote."""
    step, memory, wire, rows = map(
        result, ("micro_step", "memory", "collectives", "any_loss")
    )
    assert "--optimizers adam" in step["command"]
    theirs, ours = (
        next(row for row in step["rows"] if row["side"] == side)
        for side in ("optax.MultiSteps", "ga apply_gradients")
    )
    megabytes, gradients = (
        next(row for row in record["results"] if row["k"] == 16)[unit]
        for record, unit in ((memory, "mb"), (wire, "over_gradient"))
    )
    # Like with like: a loop across calls with a loop, a call with a call.
    inside = "optax.microbatching", "ga_optax"
    assert (rows["rows"], rows["num_microbatches"]) == (2048, 8)
    [contrastive] = [row for row in rows["results"] if row["case"] == "contrastive"]
    return [
        [f"{megabytes[way]:.0f} MB" for way in inside],
        [f"{theirs['ms']:.0f} ms", f"{ours['ms']:.0f} ms"],
        [f"{gradients[way]:.2f}" for way in inside],
        [f"{contrastive['mb'][way]:.0f} MB" for way in ("undivided", "ga_optax")],
    ]


def test_the_numbers_in_the_readme_are_those_of_the_benchmarks():
    rows = [
        [cell.split(" (")[0] for cell in row[:2]] for row in readme_table().values()
    ]
    assert rows == recorded()


LAW = "replace `jax.value_and_grad(loss)` by `ga.value_and_grad(loss, 8)`"
BEGIN = ("index", "guide", "any_loss", "migrating", "recipes", "pitfalls", "switch")


@pytest.mark.quick
def test_the_readme_fits_on_two_screens_and_begins_with_the_law():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 110
    first = " ".join(text.split("```")[0].lower().split())
    assert LAW in first
    assert first.count("pip install") == 1
    step = re.search(r"@jax.jit\n.*?\n\n", text, re.S)[0]
    assert len(step.strip().splitlines()) == 5
    assert "ga.value_and_grad(loss, 8)(params, batch)" in step


@pytest.mark.quick
@pytest.mark.parametrize("name", BEGIN)
def test_the_page_begins_with_the_law(name):
    text = (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")
    beginning = " ".join(text.split("```")[0].split())
    assert "jax.value_and_grad(loss)" in beginning
    assert re.search(r"ga\.value_and_grad\(loss, [48]\)", beginning)
    assert "the same gradient" in beginning


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
