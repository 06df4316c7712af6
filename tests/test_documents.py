"""The README and the pages of docs/: they run, and say what was measured.

The blocks of Python of a page are one program, and run in their order. What they print
stands in the block of text that follows, and nowhere else.
"""

import contextlib
import io
import json
import pathlib
import re

import pytest

import ga_optax

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
# What no test environment has, so a program of it is shown and not run.
ELSEWHERE_FRAMEWORKS = re.compile(
    r"^(?:from|import) (?:torch|lightning|keras|maxtext|transformers|accelerate)\b",
    re.M,
)


def pages():
    """The pages with Python in them, by name."""
    found = {"README.md": ROOT / "README.md"}
    for path in sorted(DOCS.rglob("*.md")):
        if not path.is_relative_to(DOCS / "_build"):
            found[str(path.relative_to(DOCS))] = path
    return {
        name: path.read_text("utf-8")
        for name, path in found.items()
        if "```python" in path.read_text("utf-8")
    }


PAGES = pages()


def blocks(text):
    """`[(language, line, code)]` of the fenced blocks of Python and of output."""
    pattern = re.compile(r"^```(python|text)\n(.*?)^```$", re.M | re.S)
    return [
        (match[1], text.count("\n", 0, match.start()) + 2, match[2])
        for match in pattern.finditer(text)
    ]


def run(name, text):
    """Runs a page; raises where a block does, or where it prints something else."""
    namespace = {"__name__": "__main__"}
    printed, waiting = io.StringIO(), ""
    for language, line, code in blocks(text):
        if language == "python":
            # So many lines before it that an error names the line of the page.
            program = compile("\n" * (line - 1) + code, name, "exec")
            with contextlib.redirect_stdout(printed):
                exec(program, namespace)
            waiting = printed.getvalue()
        else:
            assert waiting == code, f"{name}, line {line}, says something else"
            printed, waiting = io.StringIO(), ""
    assert waiting == "", f"{name} prints at its end what is not on the page"


# The slowest page calls `verify` and L-BFGS several times, which take long to compile.
@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.published] * (name != "README.md"))
        for name in PAGES
    ],
)
def test_every_block_of_the_page_runs_and_prints_what_it_says(name):
    run(name, PAGES[name])


def test_no_block_of_python_escapes():
    """Marked as not run is only what needs another framework."""
    assert {"get_started.md", "guide.md", "migrating.md", "pitfalls.md"} <= set(PAGES)
    assert {"huggingface.md", "recipes.md", "switch.md"} <= set(PAGES)
    for name, text in PAGES.items():
        fences = re.findall(r"^ *```+ *(\{code-block\} *)?(py\w*)", text, re.M)
        run_here = [language for language, *_ in blocks(text) if language == "python"]
        marked = re.findall(
            r"^```\{code-block\} python\n:class: norun\n(.*?)^```$", text, re.M | re.S
        )
        assert len(fences) == len(run_here) + len(marked), name
        assert all(ELSEWHERE_FRAMEWORKS.search(code) for code in marked), name


def test_every_file_that_a_page_names_exists():
    pattern = re.compile(r"`((?:examples|tests|ga_optax)/[\w/]+\.\w+)`")
    names = {name for text in PAGES.values() for name in pattern.findall(text)}
    assert len(names) >= 2
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_a_recipe_is_at_most_twenty_lines_and_ends_with_its_check():
    _, *recipes = [code for language, _, code in blocks(PAGES["recipes.md"])]
    assert len(recipes) == 10
    for code in recipes:
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= 20
        assert lines[-1].startswith("assert "), lines[0]


# -- The README ------------------------------------------------------------------------


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
        *(of_trainer(result("trainers")["results"][i]) for i in TRAINERS),
    ]


TRAINERS = 3, 5, 7  # the rows of three trainers


def of_trainer(row):
    theirs, ours = "their accumulation", "ga_optax"
    off, mb = row["off"], row["megabytes"]
    return [
        f"{off[theirs]:.0%}, {mb[theirs]:.0f} MB",
        f"{off[ours]:.0e}, {mb[ours]:.0f} MB",
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
