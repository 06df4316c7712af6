"""The faults of `mutations.py`, which takes long to run, are still there to be made."""

import pytest
from mutations import MUTATIONS, ROOT, files


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_a_mutation_still_changes_the_package(mutation):
    text = (ROOT / "ga_optax" / mutation.file).read_text(encoding="utf-8")
    assert text.count(mutation.old) == 1
    assert mutation.new != mutation.old
    assert len(files(mutation)) == len(mutation.tests)
