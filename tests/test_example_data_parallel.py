"""The example on many devices: one all-reduce, one device's run, the same bits again.

It starts processes that compile a small transformer: ten to twenty seconds a test.
"""

import os
import pathlib
import re
import subprocess
import sys

import pytest

pytestmark = pytest.mark.published

for package in ("flax", "matplotlib", "orbax.checkpoint", "tqdm"):
    pytest.importorskip(package)

EXAMPLE = pathlib.Path(__file__).parents[1] / "examples" / "data_parallel.py"


def run(tmp_path, *arguments):
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, ["", *sys.path])),
        "TMPDIR": str(tmp_path),
    }
    return subprocess.run(
        [sys.executable, EXAMPLE, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        timeout=240,
        check=False,
    )


def differences(text):
    """How far the losses and the parameters are from those of one device."""
    found = re.search(r"largest ([\d.e+-]+), parameters by ([\d.e+-]+) of", text)
    return float(found[1]), float(found[2])


def test_by_default_eight_devices_reduce_once_and_it_is_the_run_on_one(tmp_path):
    done = run(tmp_path, "--steps", "4")
    assert done.returncode == 0, done.stderr[-2000:]
    assert "8 devices, processes: 1" in done.stdout
    sizes = re.findall(r"^all-reduce +([\d,]+) +1 +once +data", done.stdout, re.M)
    # Beside the gradient, there are the number of tokens and the loss.
    assert sum(int(size.replace(",", "")) > 8 for size in sizes) == 1
    assert re.search(rf"^{len(sizes)} collectives?, none in a loop", done.stdout, re.M)
    assert "tokens a second" in done.stdout
    # Losses of about 6, summed over 64 lines in another order; four steps of AdamW.
    loss, params = differences(done.stdout)
    assert loss < 64 * 2.0**-23 * 6
    assert params < 1e-5


def test_two_processes_one_killed_end_in_the_same_bits(tmp_path):
    arguments = "--devices", "2", "--processes", "2", "--kill", "--steps", "8"
    done = run(tmp_path, *arguments)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 devices, processes: 2" in done.stdout
    assert "restored after window 4 of 8" in done.stdout
    assert re.search(r"Same bits: (\w+) and \1", done.stdout)
    assert "Gloo" not in done.stdout


@pytest.mark.parametrize(
    "arguments",
    [("--devices", "3", "--processes", "2"), ("--steps", "0")],
)
def test_what_cannot_be_shared_out_is_refused(tmp_path, arguments):
    done = run(tmp_path, *arguments)
    assert done.returncode == 2
    assert "processes share the devices" in done.stderr


def test_too_many_micro_batches_are_refused(tmp_path):
    done = run(tmp_path, "--devices", "8", "--num-microbatches", "5")
    assert done.returncode == 1
    assert "must divide a window of 64 lines" in done.stderr
