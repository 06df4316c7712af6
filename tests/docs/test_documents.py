"""The README and the pages of docs/: they run, and say what was measured."""

import collections
import itertools
import json
import os
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
    """Only what needs another framework is not run: its fence says `py`."""
    names = {name.removesuffix(".md") for name in PAGES}
    assert {"get_started", "maintainers", "migrating", "pitfalls"} <= names
    assert {"recipes/language", "recipes/science", "rowwise"} <= names
    for name, text in PAGES.items():
        fences = re.findall(r"^ *```+ *(?:\{code-block\} *)?py\w*", text, re.M)
        run_here = re.findall(r"^```python\n", text, re.M)
        marked = re.findall(r"^```py\n(.*?)^```$", text, re.M | re.S)
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
    assert README.count("\n") <= 117
    first = " ".join(README.split("```")[0].lower().split())
    assert LAW in first
    assert first.count("pip install") == 1
    code = re.search(r"```python\n(.*?)```", README, re.S)[1]
    assert "\nvalue_and_grad = ga.value_and_grad(loss, 8)\n" in code
    assert max(map(len, code.splitlines())) <= 53  # as many as fit on a phone


@pytest.mark.quick
def test_the_pages_are_few_and_short():
    """What `wc -w docs/*.md docs/*/*.md` counts; tables of results are not typed."""
    pages = [text for name, text in TEXTS.items() if name != "README.md"]
    assert len(pages) <= 22
    assert sum(len(text.split()) for text in pages) <= 25_000


def headings(texts):
    """The titles of pages and of sections."""
    return [
        re.sub("`", "", title)
        for text in texts
        for title in re.findall(
            r"^#+ (.*)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M
        )
    ]


@pytest.mark.quick
def test_no_two_pages_or_sections_have_one_name():
    titles = headings(text for name, text in TEXTS.items() if name != "README.md")
    assert len(titles) > 100
    assert [x for x, n in collections.Counter(titles).items() if n > 1] == []


def test_a_second_section_of_a_name_is_seen():
    """The twin."""
    assert headings(["# A\n```\n# no\n```\n## `B`\n", "## B\n"]) == ["A", "B", "B"]


def slug(title):
    """The anchor that viewers of Markdown give to a heading; the site has it, too."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def dead_links(texts):
    """`[(page, link)]` of the links to pages or headings that are not there."""
    anchors = {name: {"", *map(slug, headings([text]))} for name, text in texts.items()}
    dead = []
    for name, text in texts.items():
        for path, anchor in re.findall(r"\]\(([^():]*\.md|)(#[^()]+)?\)", text):
            page = os.path.normpath(f"{name}/../{path}") if path else name
            if anchor[1:] not in anchors.get(page, ()):
                dead.append((name, path + anchor))
    return dead


def test_links_lead_to_headings_where_no_site_is_built():
    texts = {path.name: path.read_text("utf-8") for path in ROOT.glob("*.md")}
    texts |= {f"docs/{x}": text for x, text in TEXTS.items() if x != "README.md"}
    assert sum(text.count(".md#") for text in texts.values()) > 30
    assert dead_links(texts) == []


def test_a_dead_link_is_seen():
    """The twin."""
    page = "# A\n## On `b.c`\n[x](#on-bc) [x](#on-b-c) [x](d.md) [x](../a.md#a)"
    dead = [("a.md", "#on-b-c"), ("a.md", "d.md"), ("a.md", "../a.md#a")]
    assert dead_links({"a.md": page}) == dead


@pytest.mark.quick
def test_all_is_sorted_and_complete():
    assert ga_optax.__all__ == sorted(ga_optax.__all__)
    for name in ga_optax.__all__:
        assert hasattr(ga_optax, name)
