"""The README: its program runs as printed, and its numbers are those measured."""

import contextlib
import io
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
        result, ("micro_step", "memory", "collectives", "window_axis")
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
    whole = "ga_optax, whole_batch=True"
    [contrastive] = [row for row in rows["results"] if row["case"] == "contrastive"]
    return [
        [f"{megabytes[way]:.0f} MB" for way in inside],
        [f"{theirs['ms']:.0f} ms", f"{ours['ms']:.0f} ms"],
        [f"{gradients[way]:.2f}" for way in inside],
        [f"{contrastive['mb'][way]:.0f} MB" for way in ("undivided", whole)],
    ]


def test_the_numbers_in_the_readme_are_those_of_the_benchmarks():
    rows = [
        [cell.split(" (")[0] for cell in row[:2]] for row in readme_table().values()
    ]
    assert rows == recorded()


@pytest.mark.slow
@pytest.mark.usefixtures("optax_promotion")
def test_the_readme_fits_on_a_few_screens_and_shows_what_verify_says():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") < 130
    program = "".join(re.findall(r"```python\n(.*?)```", text, re.S))
    names = {}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(program, names)
    said = " ".join(str(names["report"]).split())
    [excerpt] = re.findall(r"among others:\n\n((?:    .*\n)+)", text)
    sentences = re.findall(r"\S.*?[.](?:\s|$)", " ".join(excerpt.split()) + " ")
    assert len(sentences) >= 3
    for sentence in sentences:
        assert sentence.strip().rstrip(".") in said


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
