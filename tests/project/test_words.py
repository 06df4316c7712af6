"""The glossary of the inside: one word, one thing; and how docstrings begin."""

import ast
import re

import pytest
from test_layout import ROOT, modules

# First words of docstrings that do not say what the thing is or does.
RIDDLES = ["Whether", "What", "Those", "Its", "That", "Where", "How", "Which", "If"]


def glossary():
    """The rows of the table in DESIGN.md: `{word: home}`."""
    page = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    [table] = re.findall(r"\| word \| lives in \| meaning \|\n(?:\|.*\n)+", page)
    rows = [[x.strip() for x in row.split("|")[1:4]] for row in table.splitlines()[2:]]
    return {word: re.findall(r"`([\w./]+)`", home) for word, home, _ in rows}


def singular(name):
    """A name in lower case, without underscores before it and a plural's s."""
    name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower().strip("_")
    return name if name.endswith("ss") else name.removesuffix("s")


def definitions():
    """`[(name, module)]` of the modules, and of what these define at their top."""
    found = []
    for module, text in modules().items():
        found += [(part, module) for part in module.split(".")[-1:]]
        for node in ast.parse(text).body:
            match node:
                case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                    found.append((name, module))
                case ast.Assign(targets=[ast.Name(id=name)]):
                    found.append((name, module))
    return found


def strangers(words, names):
    """`[(word, name, module)]` of names that are a word and stand elsewhere."""
    return [
        (word, name, module)
        for name, module in names
        if (word := singular(name)) in words
        and not any(f".{module}.".startswith(f".{home}.") for home in words[word])
    ]


@pytest.mark.quick
def test_a_word_of_the_glossary_names_one_thing():
    words = {singular(w.replace(" ", "_")): homes for w, homes in glossary().items()}
    assert 20 <= len(words) <= 35
    known = "".join(f"{name}." for name in modules())
    homes = {home for of_word in words.values() for home in of_word}
    assert [home for home in homes if f"{home}." not in known] == []
    assert strangers(words, definitions()) == []


def test_a_second_thing_of_a_name_is_seen():
    """The twin."""
    words = {"level": ["_window.schedule"]}
    names = [("Level", "_window.schedule"), ("LEVELS", "_loop.loop")]
    assert strangers(words, names) == [("level", "LEVELS", "_loop.loop")]


def riddles(text):
    """The first lines of docstrings that begin with a word of `RIDDLES`."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            first = (ast.get_docstring(node) or " ").splitlines()[0]
            if first.split(" ")[0] in RIDDLES:
                yield first


def test_docstrings_say_what_a_thing_is_or_does():
    assert {
        name: found for name, text in modules().items() if (found := [*riddles(text)])
    } == {}


def test_a_docstring_in_a_riddle_is_seen():
    """The twin."""
    assert [*riddles('def f():\n    """Whether it is."""')] == ["Whether it is."]
