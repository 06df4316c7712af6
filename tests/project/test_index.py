"""The index has all files, which say what they are, and no two have one name."""

import pathlib
from collections import Counter

from index import TESTS, index, main, quick


def test_the_index_has_every_file_with_what_it_says(capsys):
    rows = index()
    assert all(rows.values()), "a file without a docstring"
    own = "project/test_index.py"
    assert rows[own] == __doc__.split("\n")[0]
    main(["index", "no two"])
    assert capsys.readouterr().out.split()[0] == own


def test_quick_tests_are_functions_of_their_files():
    for name in quick():
        path, _, test = name.partition("::")
        text = (TESTS / path).read_text(encoding="utf-8")
        assert f"\ndef {test.partition('[')[0]}(" in text, name


def test_folders_are_those_of_the_package_and_names_are_unique():
    folders = {path.name.strip("_") for path in (TESTS.parent / "ga_optax").iterdir()}
    more = {"accelerators", "corpus", "docs", "project", "root", "typing"}
    files = [pathlib.PurePath(path) for path in index()]
    assert {path.parts[0] for path in files if len(path.parts) > 1} <= folders | more
    # Also because pytest imports them by their names alone.
    names = Counter(path.name for path in files if path.name != "conftest.py")
    assert [name for name, number in names.items() if number > 1] == []
