"""The README and the pages of docs/: they run, and say what was measured."""

import itertools
import json
import re

import printed
import pytest
from helpers import ROOT

import ga_optax

DOCS = ROOT / "docs"
# What no test environment has, so a program of it is shown and not run.
ELSEWHERE_FRAMEWORKS = re.compile(
    r"^(?:from|import) (?:torch|lightning|keras|maxtext|transformers|accelerate"
    r"|diffrax|numpyro)\b",
    re.M,
)


README = (ROOT / "README.md").read_text("utf-8")
TEXTS = {"README.md": README} | {
    str(path.relative_to(DOCS)): path.read_text("utf-8")
    for path in sorted(DOCS.rglob("*.md"))
    if not path.is_relative_to(DOCS / "_build")
}
PAGES = {name: text for name, text in TEXTS.items() if "```python" in text}


def says_what_it_prints(name, text):
    """Raises where a block does, and names the first line that shows something else."""
    shown, new = (x.splitlines() for x in (text, printed.page(name, text)))
    lines = enumerate(itertools.zip_longest(shown, new), 1)
    assert [f"{name}, line {i}" for i, (a, b) in lines if a != b][:1] == [], new


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.published] * (name != "README.md"))
        for name in PAGES
    ],
)
def test_every_block_of_the_page_runs_and_prints_what_it_says(name):
    says_what_it_prints(name, PAGES[name])


PAGE = "```python\nprint(1)\n```\n\n```text\n1\n```\n"


def test_a_page_that_shows_something_else_is_seen_with_its_line():
    """The twin."""
    says_what_it_prints("page", PAGE)
    for more, said in (
        ("```text\n1\n```\n", "page, line 9"),
        ("```python\nprint(2)\n```\n", "page, line 8: no block shows"),
    ):
        with pytest.raises(AssertionError, match=said):
            says_what_it_prints("page", PAGE + more)


def test_no_block_of_python_escapes():
    """Marked as not run is only what needs another framework."""
    names = {name.removesuffix(".md") for name in PAGES}
    assert {"get_started", "guide", "migrating", "pitfalls"} <= names
    assert {"huggingface", "maintainers", "recipes"} <= names
    for name, text in PAGES.items():
        fences = re.findall(r"^ *```+ *(\{code-block\} *)?(py\w*)", text, re.M)
        run_here = re.findall(r"^```python\n", text, re.M)
        marked = re.findall(
            r"^```\{code-block\} python\n:class: norun\n(.*?)^```$", text, re.M | re.S
        )
        assert len(fences) == len(run_here) + len(marked), name
        assert all(ELSEWHERE_FRAMEWORKS.search(code) for code in marked), name


def test_every_file_that_a_page_names_exists():
    names = re.findall(r"`((?:examples|tests|ga_optax)/[\w/]+\.\w+)`", str(PAGES))
    assert len(names) >= 2
    assert [name for name in names if not (ROOT / name).exists()] == []


def result(name):
    return json.loads((ROOT / f"benchmarks/results/{name}.json").read_text("utf-8"))


# Rows of the table of figures: what, theirs, ours, the command.
TABLE = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in re.split("<!-- .*numbers -->", README)[1].splitlines()
    if line.startswith("|") and " --- " not in line
][1:]


def recorded():
    """The same numbers, theirs and ours, out of the files that the commands wrote."""
    step, rows = result("micro_step"), result("any_loss")
    assert "--optimizers adam" in step["command"]
    ms = {row["side"]: f"{row['ms']:.0f} ms" for row in reversed(step["rows"])}
    megabytes, gradients = (
        next(row for row in result(name)["results"] if row["k"] == 16)[unit]
        for name, unit in (("memory", "mb"), ("collectives", "over_gradient"))
    )
    # Like with like: a loop across calls with a loop, a call with a call.
    inside = "optax.microbatching", "ga_optax"
    assert (rows["rows"], rows["num_microbatches"]) == (2048, 8)
    [contrastive] = [row for row in rows["results"] if row["case"] == "contrastive"]
    trainers = [result("trainers")["results"][i] for i in (3, 5, 7)]
    return [
        [f"{megabytes[way]:.0f} MB" for way in inside],
        [ms["optax.MultiSteps"], ms["ga apply_gradients"]],
        [f"{gradients[way]:.2f}" for way in inside],
        [f"{contrastive['mb'][way]:.0f} MB" for way in ("undivided", "ga_optax")],
        *(
            [f"{row['off']['their accumulation']:.0%}", f"{row['off']['ga_optax']:.5%}"]
            for row in trainers
        ),
    ]


def test_the_numbers_in_the_readme_are_those_of_the_benchmarks():
    rows = [[cell.split(" (")[0] for cell in row[1:3]] for row in TABLE]
    assert rows == recorded()


def test_each_number_in_the_readme_has_its_command():
    for name, _, _, command in TABLE:
        script = re.fullmatch(r"`python (\S+\.py)[^`]*`|the same", command)
        assert script, name
        assert (ROOT / (script[1] or "")).exists()


LAW = "replace `jax.value_and_grad(loss)` by `ga.value_and_grad(loss, 8)`"


@pytest.mark.quick
def test_the_readme_fits_on_two_screens_and_begins_with_the_law():
    assert README.count("\n") <= 110
    first = " ".join(README.split("```")[0].lower().split())
    assert LAW in first
    assert first.count("pip install") == 1
    step = re.search(r"@jax.jit\n.*?\n\n", README, re.S)[0]
    assert len(step.strip().splitlines()) == 5
    assert "ga.value_and_grad(loss, 8)(params, batch)" in step


@pytest.mark.quick
def test_all_is_sorted_and_complete():
    assert ga_optax.__all__ == sorted(ga_optax.__all__)
    for name in ga_optax.__all__:
        assert hasattr(ga_optax, name)
