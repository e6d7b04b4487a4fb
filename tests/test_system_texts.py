"""G9: whatever files of /proc and /sys hold, the import goes on, and limits in them are found."""

import os
from pathlib import Path

import pytest

from qkv_ext._core import _config, _threads

TWO = b"200000 100000\n"  #: two CPUs, as cpu.max says it
MANY = b"9" * 5000  #: more digits than int() takes
QUOTA, PERIOD = "cpu.cfs_quota_us", "cpu.cfs_period_us"


def threads(root, files):
    """The default on a machine of 8 CPUs whose files hold these bytes, None for a folder."""
    for name, data in files.items():
        path = root / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir() if data is None else path.write_bytes(data)
    return _threads.default_threads({}, root, 8)[0]


LINES = {
    "blank": b"\n0::/g\n\n",
    "no colon": b"what\n0\n0::/g\n",
    "one colon": b"cpu:\n:\n0:\n0::/g",
    "not UTF-8": b"7:\xff\xfe:/\xff\n0::/g\n",
    "NUL": b"1:cpu:/a\0b\n\0\n0::/g\n",
    "other line ends": b"1:cpu:/a\x0bb\x0c\x85\xe2\x80\xa8\r\n0::/g\n",
    "long": b"1:cpu:/" + b"a/" * 10_000 + b"\n" + b"1:cpu:/" + b"a" * 10_000 + b"\n0::/g\n",
    "many digits": MANY + b":cpu:/\n0::/g\n",
}


@pytest.mark.parametrize("data", LINES.values(), ids=LINES)
def test_odd_lines_are_passed_over(data, tmp_path):
    assert threads(tmp_path, {"proc/self/cgroup": data, "sys/fs/cgroup/g/cpu.max": TWO}) == 2


NUMBERS = [b"", b"\n", b"max", b"-1 100000", b"0 100000", b"100000 0", b"100000 -1", b"1e999 1",
           b"100000 1e-9", b"nan 1", b"inf 1", b"1_0 10", b"100000", MANY, MANY + b" 1",
           b"1 " + b"0" * 5000, b"\xff\xfe", b"\xc2\xb2 1", b"\0 1", None]  # fmt: skip


@pytest.mark.parametrize("data", NUMBERS)
def test_odd_numbers_are_no_limit(data, tmp_path):
    files = {"proc/self/cgroup": b"0::/\n3:cpu:/\n", "sys/fs/cgroup/cpu.max": data,
             f"sys/fs/cgroup/cpu/{QUOTA}": data, f"sys/fs/cgroup/cpu/{PERIOD}": b"-1"}  # fmt: skip
    assert threads(tmp_path, files) == 8


@pytest.mark.parametrize("name", ["proc/self/cgroup", "proc/self/mountinfo", "sys/fs/cgroup"])
@pytest.mark.parametrize("error", [PermissionError, IsADirectoryError, ValueError])
def test_files_that_cannot_be_read(error, name, tmp_path, monkeypatch):
    read_bytes = Path.read_bytes

    def refuse(path):
        if name in str(path):
            raise error("no")
        return read_bytes(path)

    monkeypatch.setattr(Path, "read_bytes", refuse)
    files = {"proc/self/cgroup": b"0::/\n", "sys/fs/cgroup/cpu.max": TWO}
    assert threads(tmp_path, files) == (2 if name.endswith("mountinfo") else 8)


FOUND = {
    "v1, cpu,cpuacct": ({"proc/self/cgroup": b"4:cpu,cpuacct:/a\n"}, "sys/fs/cgroup/cpu,cpuacct/a"),
    "v1, cpuacct,cpu": ({"proc/self/cgroup": b"4:cpuacct,cpu:/\n"}, "sys/fs/cgroup/cpuacct,cpu"),
    "v1, a parent's": ({"proc/self/cgroup": b"4:cpu:/a/b\n", "sys/fs/cgroup/cpu/a/b/x": b""},
                       "sys/fs/cgroup/cpu/a"),
    "v2, unified": ({"proc/self/cgroup": b"0::/a\n"}, "sys/fs/cgroup/unified/a"),
    "v2, outside of this namespace": ({"proc/self/cgroup": b"0::/../a\n"}, "sys/fs/cgroup"),
    "v2, a name of any bytes": ({"proc/self/cgroup": b"0::/\xff:\xc3\xa9\n"},
                                b"sys/fs/cgroup/\xff:\xc3\xa9"),
    "v1, elsewhere": ({"proc/self/cgroup": b"4:cpu:/a\n", "proc/self/mountinfo":
                       b"\n1 2\n3 4 0:5 / /mnt/c rw shared:1 - cgroup cgroup rw,cpuacct,cpu\n"},
                      "mnt/c/a"),
    "v2, elsewhere": ({"proc/self/cgroup": b"0::/a\n", "proc/self/mountinfo":
                       b"\xff - cgroup2\n3 4 0:5 / /mnt/c rw - cgroup2 none rw\n"}, "mnt/c/a"),
}  # fmt: skip


@pytest.mark.skipif(os.name == "nt", reason="names that Windows does not take")
@pytest.mark.parametrize(("files", "group"), FOUND.values(), ids=FOUND)
def test_where_limits_are_found(files, group, tmp_path):
    group, limits = os.fsdecode(group), {"cpu.max": TWO}
    if b"cpu" in files["proc/self/cgroup"]:
        limits = {QUOTA: b"200000\n", PERIOD: b"100000\n"}
    assert threads(tmp_path, {**files, **{f"{group}/{x}": y for x, y in limits.items()}}) == 2


@pytest.mark.skipif(os.name == "nt", reason="names that Windows does not take")
def test_where_limits_do_not_lie(tmp_path):
    """A path that leads out of what is mounted, and a mount of other controllers."""
    mounts = b"3 4 0:5 / /mnt/c rw - cgroup cgroup rw,memory,cpuset\n"
    files = {"proc/self/cgroup": b"0::/../a\n4:cpu:/\n", "proc/self/mountinfo": mounts,
             "sys/fs/a/cpu.max": TWO, f"mnt/c/{QUOTA}": b"1", f"mnt/c/{PERIOD}": b"1"}  # fmt: skip
    assert threads(tmp_path, files) == 8


@pytest.mark.skipif(os.name == "nt", reason="names that Windows does not take")
@pytest.mark.parametrize("locale", ["C", "C.UTF-8"])
def test_any_bytes_in_any_locale(locale, python, tmp_path):
    """LC_ALL=C, and Python's own ways out of it closed."""
    files = {"proc/self/cgroup": b"1:x:/\xff\n0::/\xc3\xa9\xff\n",
             b"sys/fs/cgroup/\xc3\xa9\xff/cpu.max": TWO}  # fmt: skip
    assert threads(tmp_path, files) == 2
    code = f"""
import pathlib
from qkv_ext._core import _config, _threads
print(_threads.default_threads({{}}, pathlib.Path({str(tmp_path)!r}), 8)[0])
cpuinfo = pathlib.Path({str(tmp_path)!r}, "cpuinfo")
cpuinfo.write_bytes(b"model name\\t: name\\xff\\n")
_config.Path = lambda _: cpuinfo
_config.show_config()
"""
    said = python(code, LC_ALL=locale, PYTHONUTF8="0", PYTHONCOERCECLOCALE="0").splitlines()
    assert said[0] == "2"
    assert r"name\xff" in said[2]


@pytest.mark.parametrize(
    ("data", "expected"),
    [(b"model name\t: x y\n", "x y"), (b"\nmodel name\nmodel name : \nmodel name: \xff\n", "\\xff"),
     (b"model names: x\n\xff\xfe:\0\n", None), (None, None)],
)  # fmt: skip
def test_name_of_the_cpu(data, expected, tmp_path, monkeypatch):
    path = tmp_path / "cpuinfo"
    path.mkdir() if data is None else path.write_bytes(data)
    monkeypatch.setattr(_config, "Path", lambda _: path)
    monkeypatch.setattr(_config.platform, "processor", lambda: "")
    assert _config._cpu_name() == (expected or _config.platform.machine())


def test_affinity_that_cannot_be_asked_for(monkeypatch):
    def refuse(_):
        raise PermissionError

    monkeypatch.setattr(os, "sched_getaffinity", refuse, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert _threads.default_threads({}, Path("/no such folder"))[0] == 7


@pytest.mark.parametrize("name", ["OMP_NUM_THREADS", "QKV_EXT_NUM_THREADS"])
def test_numbers_of_thousands_of_digits(name, python):
    """A positive integer like any other; what is none is said in few words."""
    for digits, expected in (("9" * 5000, _threads.MAX_THREADS), ("0" * 5000 + "2", 2)):
        code = "from qkv_ext._core import _threads; print(_threads.DEFAULT, _threads.SOURCE)"
        assert python(code, **{name: digits}) == f"{expected} {name}"
    wrong = {name: "9" * 5000 + "x"}
    if name == "OMP_NUM_THREADS":
        assert name not in python(code, **wrong)
    else:
        error = python(code, ok=False, **wrong).splitlines()[-1]
        assert error.startswith(f"ValueError: {name} is '9999")
        assert error.endswith("; expected a positive integer")
        assert len(error) < 120
