"""Compiled loops where their cache is missing, damaged or full; and what imports take that compile nothing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOOPS = """
from spindle.jit import njit

@njit(cache=True)
def total(count):
    result = 0
    for number in range(count):
        result += number
    return result
"""


def python(code: str, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *options, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_a_cache_that_is_cut_off_is_compiled_again_with_one_notice(tmp_path):
    (tmp_path / "loops.py").write_text(LOOPS)
    code = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); from loops import total; print(total(5))"
    cache = {"NUMBA_CACHE_DIR": str(tmp_path / "cache")}
    full = "import resource, signal; signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
    full += "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    done = python(full + code, **cache)
    assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr
    assert done.stderr.startswith("note: compiled code cannot be cached in ")
    assert done.stderr.count("\n") == 1
    done = python(code, **cache)
    assert (done.stdout, done.stderr) == ("10\n", "")
    for ending in ("nbi", "nbc"):
        (file,) = (tmp_path / "cache").glob(f"*/*.{ending}")
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        done = python(code, **cache)
        assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr
        assert "cannot be read" in done.stderr
        assert done.stderr.count("\n") == 1


def test_loops_can_be_imported_where_no_folder_can_be_written():
    done = python(f"{LOOPS}{LOOPS}\nprint(total(5))")  # numba has no folder for code that is in no file
    assert (done.returncode, done.stdout) == (0, "10\n"), done.stderr
    assert done.stderr.startswith("note: compiled code is not cached: cannot cache function 'total': no locator")
    assert done.stderr.count("\n") == 1


def test_a_file_in_the_place_of_the_compilers_cache_does_not_stop_a_script(tmp_path):
    pytest.importorskip("torch")
    import getpass

    (tmp_path / f"torchinductor_{getpass.getuser()}").write_text("")
    code = "import spindle, sys; spindle.Trainer; print('torch._dynamo' in sys.modules); import torch._dynamo"
    environment = {key: value for key, value in os.environ.items() if key != "TORCHINDUCTOR_CACHE_DIR"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr
    assert [file.name for file in tmp_path.iterdir()] == [f"torchinductor_{getpass.getuser()}"]


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import spindle", {"torch", "numpy", "numba", "scipy", "typer", "rich"}),
        ("from spindle.cli.main import run; run(['--help'])", {"torch", "numpy", "numba", "scipy"}),
        ("from spindle.cli.main import run; run(['launch', '--help'])", {"torch", "numpy", "numba", "scipy"}),
    ],
)
def test_a_cold_start_imports_nothing_heavy(code, absent):
    done = python(f"{code}\nimport sys; print(sorted({absent!r} & set(sys.modules)), file=sys.stderr)")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"
