"""Every test that asks for a backend runs on each one that this machine can run.

QKV_EXT_BACKEND restricts the run to one; QKV_EXT_REQUIRE_C=1 forbids a run without compiled ones.
"""

import os
import platform
import subprocess
import sys
import threading
import zlib
from pathlib import Path

import numpy as np
import pytest

import qkv_ext

ASKED_FOR = os.environ.get("QKV_EXT_BACKEND")
BACKENDS = (ASKED_FOR,) if ASKED_FOR else qkv_ext.backends()
LARGE = 1 << 20  #: scores of a head
ROOT = Path(qkv_ext.__file__).resolve().parents[1]  #: where the package under test lies


def pytest_addoption(parser):
    said = "only the tests whose calls name no backend: for QKV_EXT_BACKEND, what it changes"
    parser.addoption("--unnamed", action="store_true", help=said)


def is_slow(item):
    """On other backends than the fastest what is large, starts processes or many threads; and the
    oracle against NumPy on what is large, which is told by smaller ones."""
    parameters = getattr(getattr(item, "callspec", None), "params", {})
    name = parameters.get("backend", parameters.get("compiled"))
    if item.get_closest_marker("slow_beside_fastest"):
        return name != BACKENDS[-1]
    case = parameters.get("case")
    large = hasattr(case, "q") and case.q[-2] * case.k[-2] >= LARGE
    return large and name != BACKENDS[-1]


def pytest_collection_modifyitems(config, items):
    for item in items:
        if is_slow(item):
            item.add_marker("slow")
    if config.getoption("unnamed"):
        named = [item for item in items if {"backend", "compiled"} & set(item.fixturenames)]
        config.hook.pytest_deselected(items=named)
        items[:] = [item for item in items if item not in set(named)]


def pytest_configure(config):
    """On Arm, OpenBLAS may leave floating-point flags behind that its numbers do not explain."""
    if platform.machine() in ("aarch64", "arm64"):
        config.addinivalue_line("filterwarnings", "ignore:.*in matmul:RuntimeWarning")


def pytest_report_header(config):
    return f"qkv_ext: {', '.join(BACKENDS)} of {ROOT / 'qkv_ext'}"  # D10: which ones ran


def pytest_sessionstart(session):
    if os.environ.get("QKV_EXT_REQUIRE_C") == "1":
        assert qkv_ext.backends() != ("numpy",), "QKV_EXT_REQUIRE_C=1, and nothing is compiled"


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request):
    """The name of each backend in turn."""
    return request.param


@pytest.fixture(scope="module", params=[name for name in BACKENDS if name != "numpy"])
def compiled(request):
    """The name of each compiled backend in turn."""
    return request.param


class Generators(threading.local):
    """A random generator for each thread, all with the same numbers: for pytest-run-parallel."""

    def __init__(self, seed):
        self.generator = np.random.default_rng(seed)

    def __getattr__(self, name):
        return getattr(self.generator, name)


@pytest.fixture
def rng(request):
    """Random numbers that are the same in every run, in every thread and on every backend."""
    return Generators(zlib.crc32(request.node.originalname.encode()))


@pytest.fixture
def python(tmp_path):
    """Run code in a fresh interpreter, warnings being errors: python(code, path=, **environment).

    Gives back what it printed; a failure shows what it wrote to stderr.
    """
    kept = {name: x for name, x in os.environ.items() if not name.startswith(("QKV_EXT_", "OMP_"))}

    def run(code, *, path=ROOT, ok=True, **environment):
        done = subprocess.run(
            [sys.executable, "-P", "-W", "error", "-c", code],
            env={**kept, "PYTHONPATH": str(path), **environment},
            cwd=tmp_path,
            capture_output=True,
            encoding="utf-8",
        )
        assert (done.returncode == 0) is ok, done.stdout + done.stderr
        return done.stdout.strip() if ok else done.stderr.strip()

    return run
