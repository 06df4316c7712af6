"""examples/flax_programs: both forms are one program, and a wrong one is told."""

import pathlib
import sys

import helpers
import matplotlib.image
import pytest

pytestmark = [
    pytest.mark.published,
    pytest.mark.usefixtures("optax_promotion", "fast_compilation"),
]

FOLDER = pathlib.Path(__file__).parents[1] / "examples" / "flax_programs"
NAMES = ["linen_classifier", "linen_lm", "nnx_classifier", "nnx_lm"]


@pytest.fixture
def compare(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))  # as for a script
    yield helpers.load(FOLDER / "compare.py")
    for name in [*sys.modules]:
        if name.startswith(tuple(NAMES)) or name == "sources":
            del sys.modules[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_forms_differ_in_few_lines_and_are_one_program(
    name, compare, tmp_path, capsys
):
    flags = ["--steps", "8", "--batch-size", "16", "--diff", "--out", str(tmp_path)]
    assert compare.main(["--only", name, *flags]) == 0
    printed = capsys.readouterr().out
    lines = compare.difference(name)
    assert all(line in printed.splitlines() for line in lines)
    assert 4 <= len(lines) <= 16
    assert any("value_and_grad(" in line for line in lines if line[0] == "+")
    assert printed.count("  ok") == 3
    assert matplotlib.image.imread(tmp_path / "flax_programs.png").std() > 0.03


# Other masks, and a mean that counts the padding.
WRONG = {
    "linen_classifier": ("state.step)", "state.step + 1)"),
    "nnx_lm": ("targets != 0", "targets >= 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_another_program_is_told(name, compare, tmp_path, monkeypatch):
    source = (FOLDER / f"{name}_accumulated.py").read_text()
    assert WRONG[name][0] in source
    wrong = tmp_path / f"{name}_wrong.py"
    wrong.write_text(source.replace(*WRONG[name]))
    monkeypatch.syspath_prepend(str(tmp_path))
    row = compare.compare(name, 1, 16, twin=wrong.stem)
    assert row.off_by > 1000 * compare.BOUND
    assert not compare.check({name: row})


def test_sizes_that_do_not_fit_are_refused(compare, capsys):
    with pytest.raises(SystemExit) as exit_:
        compare.main(["--batch-size", "10"])
    assert exit_.value.code == 2
    assert "a multiple of 4" in capsys.readouterr().err
