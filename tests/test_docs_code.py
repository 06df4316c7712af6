"""Every block of Python in README.md and docs/ runs, and prints what the page says.

The blocks of a page are one program, and run in their order. What they print stands in
the block of text that follows, and nowhere else. (docs/exactness.md is a program that
tests/test_exactness.py runs in the same way, in a process of its own.)
"""

import contextlib
import io
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).parents[1]
DOCS = ROOT / "docs"
ELSEWHERE = {"exactness.md"}
# What no test environment has, so a program of it is shown and not run.
ELSEWHERE_FRAMEWORKS = re.compile(
    r"^(?:from|import) (?:torch|lightning|keras|maxtext|transformers|accelerate)\b",
    re.M,
)

pytestmark = [pytest.mark.published, pytest.mark.usefixtures("optax_promotion")]


def pages():
    """The pages with Python in them, by name."""
    found = {"README.md": ROOT / "README.md"}
    for path in sorted(DOCS.rglob("*.md")):
        if not path.is_relative_to(DOCS / "_build"):
            found[str(path.relative_to(DOCS))] = path
    return {
        name: path.read_text("utf-8")
        for name, path in found.items()
        if name not in ELSEWHERE and "```python" in path.read_text("utf-8")
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
@pytest.mark.parametrize("name", PAGES)
def test_every_block_of_the_page_runs_and_prints_what_it_says(name):
    run(name, PAGES[name])


def test_a_page_that_raises_or_prints_something_else_fails():
    good = "```python\nprint(1)\n```\n\n```text\n1\n```\n"
    run("good", good)
    for broken in (
        good.replace("text\n1", "text\n2"),
        good.replace("print(1)", "raise AssertionError"),
        good.split("```text")[0],
        good + "```python\nprint(3)\n```\n",
    ):
        with pytest.raises(AssertionError):
            run("broken", broken)


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


def test_a_recipe_is_at_most_twenty_lines_and_ends_with_its_check():
    _, *recipes = [code for language, _, code in blocks(PAGES["recipes.md"])]
    assert len(recipes) == 10
    for code in recipes:
        lines = [line for line in code.splitlines() if line.strip()]
        assert len(lines) <= 20
        assert lines[-1].startswith("assert "), lines[0]
