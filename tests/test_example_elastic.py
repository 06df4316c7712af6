"""examples/elastic.py: killed, and resumed on other devices, a run keeps its bits."""

import os
import pathlib
import re
import subprocess
import sys

import helpers
import numpy as np
import pytest

pytestmark = pytest.mark.published

pytest.importorskip("orbax.checkpoint")

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "elastic.py"


# Five starts, of up to two processes each, which compile a program for their devices.
def test_a_run_that_is_killed_and_moved_loses_no_window_and_no_bit(tmp_path):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path])),
        "TMPDIR": str(tmp_path),
    }
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--kills", "4"],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert re.search(r"^4 kills, [1-4] of them inside a window$", done.stdout, re.M)
    assert re.search(r"^windows lost: 0 of \d+$", done.stdout, re.M)
    assert re.search(r"^bits that differ: 0 of [\d,]{6,}$", done.stdout, re.M)
    places = re.search(r"how often: \{(.*)\}", done.stdout)
    assert len(places[1].split(",")) > 1


def test_bits_are_counted():
    elastic = helpers.load(EXAMPLE)
    a = np.float32([1, 2])
    assert elastic.different_bits(a, a) == 0
    assert elastic.different_bits(a, np.float32([1, -2])) == 1
    assert elastic.different_bits(a, a + np.float32([0, 2.0**-22])) == 1
