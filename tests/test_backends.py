"""Which backends there are, which one serves, and what the environment says about both."""

import io
import os
import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from copies import ALONE, CAUGHT, SERVED, USE, bare_copy
from tolerance import assert_same_bits

import qkv_ext
from qkv_ext._core import _backends, _config, _threads
from qkv_ext._core._build import MODULES

sdpa = qkv_ext.scaled_dot_product_attention
NAMES = qkv_ext.backends()
COMPILED = NAMES[1:]
needs_compiled = pytest.mark.skipif(not COMPILED, reason="nothing is compiled here")
ORDER = ("numpy", *_backends.COMPILED_IN)  #: of isa.def, slowest first


def test_names():
    assert NAMES[0] == "numpy"
    assert [name for name in ORDER if name in NAMES] == list(NAMES)
    assert isinstance(NAMES, tuple)


def test_the_default_is_the_best(python):
    code = """
import numpy as np, qkv_ext
q = np.random.default_rng(0).standard_normal((2, 4, 40, 16), "f4")
one = qkv_ext.scaled_dot_product_attention(q, q, q)
for name in qkv_ext.backends():
    other = qkv_ext.scaled_dot_product_attention(q, q, q, backend=name)
    print(name, one.tobytes() == other.tobytes())
"""
    last = python(code).splitlines()[-1]
    assert last == f"{NAMES[-1]} True"
    if COMPILED:
        lines = python(code, QKV_EXT_BACKEND="numpy").splitlines()
        assert lines[0] == "numpy True"
        assert f"{NAMES[-1]} False" in lines


@pytest.mark.parametrize("name", NAMES)
def test_environment_names_a_backend(name, python):
    code = "import qkv_ext; qkv_ext.show_config(); print(qkv_ext.backends())"
    *config, names = python(code, QKV_EXT_BACKEND=name).splitlines()
    assert f"default     {name} (QKV_EXT_BACKEND asks for it)" in config
    assert names == str(NAMES)


@pytest.mark.parametrize(
    "name", ["cuda", "AVX2", "numpy ", "neon" if "neon" not in NAMES else "avx2"]
)
def test_environment_names_no_backend(name, python):
    """Asked for and not runnable raises, at import."""
    error = python("import qkv_ext", ok=False, QKV_EXT_BACKEND=name).splitlines()[-1]
    expected = f"ValueError: QKV_EXT_BACKEND is {name!r}; runnable on this machine: "
    assert error.startswith(expected + ", ".join(NAMES))


def test_empty_variables_are_none(python):
    names = {"QKV_EXT_BACKEND": "", "QKV_EXT_NUM_THREADS": "", "QKV_EXT_REQUIRE_C": ""}
    assert python("import qkv_ext; print(qkv_ext.backends())", **names) == str(NAMES)


@pytest.mark.parametrize("value", ["0", "-1", "two", "1.5", "²", "+"])
def test_bad_number_of_threads(value, python):
    if not value.isascii() and sys.getfilesystemencoding() != "utf-8":
        pytest.skip("no such environment in this locale")
    error = python("import qkv_ext", ok=False, QKV_EXT_NUM_THREADS=value).splitlines()[-1]
    assert error == f"ValueError: QKV_EXT_NUM_THREADS is {value!r}; expected a positive integer"


@pytest.mark.parametrize(("value", "ok"), [("1", bool(COMPILED)), ("0", True), ("yes", False)])
def test_require_c(value, ok, python):
    """CTranslate2's users lost a feature silently (E9): 1 forbids the fallback."""
    said = python("import qkv_ext", ok=ok, QKV_EXT_REQUIRE_C=value)
    if value == "yes":
        assert said.endswith("ValueError: QKV_EXT_REQUIRE_C is 'yes'; expected 1, 0 or nothing")
    elif not ok:
        assert "ImportError" in said
        assert "QKV_EXT_REQUIRE_C=1 forbids the fallback" in said


def test_show_config():
    """E9: what was compiled, what can run here, what does run, and why."""
    file = io.StringIO()
    qkv_ext.show_config(file=file)
    config = dict(line.split(maxsplit=1) for line in file.getvalue().splitlines())
    assert list(config) == ["qkv_ext", "machine", "compiled", "backends", "default", "threads"]
    assert config["qkv_ext"].startswith(f"{qkv_ext.__version__}, Python {sys.version.split()[0]}")
    assert config["backends"].startswith(", ".join(NAMES))
    assert config["compiled"].startswith(", ".join(COMPILED) if COMPILED else "nothing: ")
    assert config["default"].split()[0] in NAMES
    assert config["threads"].startswith(f"at most {_threads.DEFAULT} (")
    assert "NumPy's BLAS" in config["threads"]


def test_compiled_in_and_not_runnable(monkeypatch, tmp_path):
    """An instruction set of this build that the CPU does not have; a CPU that has no name."""
    monkeypatch.setattr(_backends, "COMPILED_IN", (*_backends.COMPILED_IN, "vsx"))
    monkeypatch.setattr(_config, "Path", lambda _: tmp_path / "no such file")
    file = io.StringIO()
    qkv_ext.show_config(file=file)
    missing = ", ".join(name for name in _backends.COMPILED_IN if name not in NAMES)
    assert missing.endswith("vsx")  # after AVX-512 on a CPU that has no more than AVX2
    said = f"{', '.join(NAMES)} (not on this CPU or operating system: {missing})"
    assert said in file.getvalue()
    assert platform.machine() in file.getvalue()
    with pytest.raises(ValueError, match=r"vsx is compiled in, but this CPU or operating system"):
        qkv_ext.softmax(np.ones(3, np.float32), backend="vsx")


@pytest.mark.parametrize(
    ("compiled_in", "said"), [(("scalar", "avx2"), True), (("scalar", "avx2", "avx512"), False),
                              (("scalar", "neon"), False)]
)  # fmt: skip
def test_show_config_says_what_a_build_leaves_out(compiled_in, said, monkeypatch):
    """MSVC builds hold no AVX-512: that it is missing is the compiler's doing, not the CPU's."""
    monkeypatch.setattr(_backends, "COMPILED_IN", compiled_in)
    file = io.StringIO()
    qkv_ext.show_config(file=file)
    assert ("without avx512: MSVC" in file.getvalue()) is said


FLOAT64 = """
import warnings, numpy as np, qkv_ext
x = np.ones((3, 4))
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    for _ in range(2):
        for result in (
            qkv_ext.scaled_dot_product_attention(x, x, x{0}),
            qkv_ext.matmul(x, x.T{0}),
            qkv_ext.linear_projection(x, x.T{0}),
            qkv_ext.softmax(x{0}),
        ):
            assert result.dtype == np.float64
print(len(caught))
for one in caught:
    print(one.category.__name__, one.filename, one.message)
"""


@needs_compiled
def test_float64_by_default_warns_once(python):
    """The call is right; a warning says, once and where, that NumPy computes it."""
    count, warning = python(FLOAT64.format("")).splitlines()
    assert count == "1"
    expected = "PerformanceWarning <string> float64 is computed by the NumPy backend"
    assert warning.startswith(expected)


def test_float64_by_name_does_not_warn(python):
    assert python(FLOAT64.format(", backend='numpy'")) == "0"
    assert python(FLOAT64.format(""), QKV_EXT_BACKEND="numpy") == "0"


# ---- F2: threads --------------------------------------------------------------------------------


def root_of(tmp_path, files):
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return tmp_path


V1 = "sys/fs/cgroup/cpu"
QUOTAS = {
    "none": ({}, 8),
    "v2": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 100000\n"}, 1),
    "v2, rounded up": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"},
        2,
    ),
    "v2, a tenth": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "10000 100000\n"}, 1),
    "v2, no limit": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, 8),
    "v2, more than there are": (
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "6400000 100000\n"},
        8,
    ),
    "v2, own group": (
        {"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/cpu.max": "300000 100000\n"},
        3,
    ),
    "v2, a parent's": (
        {
            "proc/self/cgroup": "0::/a/b\n",
            "sys/fs/cgroup/a/b/cpu.max": "max 100000\n",
            "sys/fs/cgroup/a/cpu.max": "200000 100000\n",
        },
        2,
    ),
    "v1": (
        {
            "proc/self/cgroup": "5:cpuset:/x\n4:cpu,cpuacct:/docker/x\n",
            f"{V1}/docker/x/cpu.cfs_quota_us": "400000\n",
            f"{V1}/docker/x/cpu.cfs_period_us": "100000\n",
        },
        4,
    ),
    "v1, inside a container": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/docker/x\n",
            f"{V1}/cpu.cfs_quota_us": "250000\n",
            f"{V1}/cpu.cfs_period_us": "100000\n",
        },
        3,
    ),
    "v1, no limit": (
        {
            "proc/self/cgroup": "4:cpu,cpuacct:/\n",
            f"{V1}/cpu.cfs_quota_us": "-1\n",
            f"{V1}/cpu.cfs_period_us": "100000\n",
        },
        8,
    ),
    "nonsense": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "what 0\n"}, 8),
    "zero": ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "100000 0\n"}, 8),
}


@pytest.mark.parametrize(("files", "expected"), QUOTAS.values(), ids=QUOTAS)
def test_quota_of_the_control_group(files, expected, tmp_path):
    """F2 (OpenMathLib/OpenBLAS#6059, microsoft/onnxruntime#8313)."""
    threads, _ = _threads.default_threads({}, root_of(tmp_path, files), 8)
    assert threads == expected


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"QKV_EXT_NUM_THREADS": "3"}, (3, "QKV_EXT_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "5"}, (5, "OMP_NUM_THREADS")),
        ({"QKV_EXT_NUM_THREADS": "3", "OMP_NUM_THREADS": "5"}, (3, "QKV_EXT_NUM_THREADS")),
        ({"QKV_EXT_NUM_THREADS": " ", "OMP_NUM_THREADS": "5"}, (5, "OMP_NUM_THREADS")),
        ({"OMP_NUM_THREADS": "4,2"}, (4, "OMP_NUM_THREADS")),  # OpenMP: a number for each level
        ({"OMP_NUM_THREADS": "many"}, (1, "the control group's CPU quota")),  # its own business
        ({"OMP_NUM_THREADS": "0"}, (1, "the control group's CPU quota")),
        ({"QKV_EXT_NUM_THREADS": "100000"}, (_threads.MAX_THREADS, "QKV_EXT_NUM_THREADS")),
    ],
)
def test_variables_win_over_the_quota(environment, expected, tmp_path):
    """F2: whoever says a number gets it, above the quota too."""
    root = root_of(tmp_path, QUOTAS["v2"][0])
    assert _threads.default_threads(environment, root, 8) == expected


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no affinity here")
def test_affinity(python):
    """F2: taskset -c 0."""
    code = """
import os
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
from qkv_ext._core import _backends, _threads
print(_threads.DEFAULT)
"""
    assert python(code) == "1"


def test_cpus_without_affinity(monkeypatch):
    """Where the system has no affinity to ask for, all CPUs there are."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    for there, expected in ((7, 7), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda there=there: there)
        assert _threads.default_threads({}, Path("/no such folder"))[0] == expected


@pytest.mark.parametrize("threads", [np.int64(2), np.uint8(1), 10**9])
def test_threads_may_be_any_integer(threads, rng):
    x = rng.standard_normal((2, 4, 40, 16), np.float32)
    assert_same_bits(sdpa(x, x, x, threads=threads), sdpa(x, x, x))


# ---- F6: modules that are not there, or do not load ---------------------------------------------


def test_installed_without_a_compiler_is_silent(python, tmp_path):
    """F6a (biopython/biopython#657): NumPy serves, and show_config() says why."""
    said = python(ALONE + USE, path=bare_copy(tmp_path))
    assert said.startswith(SERVED)
    assert "compiled    nothing: qkv_ext._core._kernels was not built" in said
    error = python(ALONE + USE, path=tmp_path / "copy", ok=False, QKV_EXT_REQUIRE_C="1")
    assert "ImportError: qkv_ext._core._kernels was not built" in error
    error = python(ALONE + USE, path=tmp_path / "copy", ok=False, QKV_EXT_BACKEND="scalar")
    assert "ValueError: QKV_EXT_BACKEND is 'scalar'; runnable on this machine: numpy" in error


def test_unbuilt_clone_warns(python, tmp_path):
    """No compiled module and no installed distribution: one warning, that says what to do."""
    folder = bare_copy(tmp_path)
    hidden = """
import importlib.metadata as m
def distribution(name):
    raise m.PackageNotFoundError(name)
m.distribution = m.version = distribution
"""
    code = ALONE + hidden + CAUGHT + USE
    warning, count, served, *_ = python(code, path=folder).splitlines()
    assert served == SERVED
    assert count == "1"
    assert warning.startswith("RuntimeWarning ")
    assert "unbuilt clone" in warning
    assert "pip install -e ." in warning


FAULTS = {
    "OSError": "raise OSError('libc.musl.so.1: cannot open shared object file')",
    "ImportError": "raise ImportError('undefined symbol: PyWhat')",
    "another module": "import no_such_module_at_all",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("module", ["_kernels", "_attention"])
def test_module_that_does_not_load_warns_once(module, fault, python, tmp_path):
    """F6b (googleapis/google-cloud-python#15667): NumPy serves everything; the cause is told."""
    modules = dict.fromkeys(MODULES, "")
    folder = bare_copy(tmp_path, **modules | {module: FAULTS[fault]})
    warning, count, served, *_ = python(ALONE + CAUGHT + USE, path=folder).splitlines()
    assert served == SERVED
    assert count == "1"
    cause = FAULTS[fault].partition("'")[2].rstrip("')") or "No module named 'no_such"
    assert warning.startswith(f"RuntimeWarning qkv_ext._core.{module} does not load: {cause}")
    error = python(ALONE + USE, path=folder, ok=False, QKV_EXT_REQUIRE_C="1")
    assert f"ImportError: qkv_ext._core.{module} does not load" in error


@pytest.mark.parametrize("name", MODULES)
def test_one_missing_module_is_all_of_them(name, python, tmp_path):
    modules = dict.fromkeys(MODULES, "")
    del modules[name]
    said = python(ALONE + USE, path=bare_copy(tmp_path, **modules))
    assert said.startswith(SERVED)
    assert f"nothing: qkv_ext._core.{name} was not built" in said


def test_bug_in_a_module_is_not_swallowed(python, tmp_path):
    """F6c (sandialabs/pyGSTi#541): anything but ImportError and OSError propagates."""
    folder = bare_copy(tmp_path, _kernels="def f(): pass\nundefined_name\n")
    error = python(ALONE + USE, path=folder, ok=False)
    assert error.endswith("NameError: name 'undefined_name' is not defined")


@pytest.mark.parametrize("name", NAMES)
def test_backend_is_chosen_per_call(name, rng):
    """No call changes what the next one takes."""
    q = rng.standard_normal((3, 5, 8), np.float32)
    before = sdpa(q, q, q)
    sdpa(q, q, q, backend=name)
    assert_same_bits(sdpa(q, q, q), before)
