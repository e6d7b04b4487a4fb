"""What was compiled with what: builds that do not go together, and one id for one tree."""

import compileall
import re
import shutil
from pathlib import Path

import pytest
from copies import ALONE, CAUGHT, SERVED, USE, bare_copy, whole_copy

import qkv_ext
from qkv_ext import _build

COMPILED = ("_kernels", "_matmul", "_softmax", "_attention")
BUILT = sorted(Path(qkv_ext.__file__).parent.glob("_*.so"))
needs_modules = pytest.mark.skipif(not BUILT, reason="nothing is compiled here")
TREE = Path(__file__).resolve().parents[1]
needs_tree = pytest.mark.skipif(not (TREE / "setup.py").is_file(), reason="no setup.py here")
AS_HERE = f"{qkv_ext.backends()} 12.0"

# ---- G5: modules and Python files of one build --------------------------------------------------


def module_file(folder, name):
    (file,) = (folder / "qkv_ext").glob(f"{name}.*.so")
    return file


def of_another_build(folder, name):
    """Give a compiled module the id of other sources, as long as its own."""
    file = module_file(folder, name)
    data, count = re.subn(
        rb"s[0-9a-f]{16}(?=_p[0-9a-f]{16}\0)", b"s" + b"0" * 16, file.read_bytes()
    )
    assert count == 1
    file.write_bytes(data)


def assert_numpy_serves(python, folder, said):
    """One warning that says so, and an error where that is forbidden."""
    warning, count, served, *_ = python(ALONE + CAUGHT + USE, path=folder).splitlines()
    assert (served, count) == (SERVED, "1")
    assert re.match(f"RuntimeWarning qkv_ext.{said}", warning), warning
    assert "pip install --force-reinstall" in warning
    error = python(ALONE + USE, path=folder, ok=False, QKV_EXT_REQUIRE_C="1")
    assert re.search(f"ImportError: qkv_ext.{said}", error), error


@needs_modules
@pytest.mark.parametrize("name", COMPILED)
def test_modules_of_two_builds(name, python, tmp_path):
    """G5 (pypa/setuptools#3510): an upgrade in place of which one module failed to compile."""
    folder = whole_copy(tmp_path)
    assert python(USE, path=folder).startswith(AS_HERE)
    of_another_build(folder, name)
    first = "_matmul" if name == "_kernels" else name
    assert_numpy_serves(python, folder, f"{first} does not load: it is of another build than ")


@needs_modules
@pytest.mark.parametrize("name", _build.CONTRACT)
def test_python_files_newer_than_the_modules(name, python, tmp_path):
    """G5: an editable installation after git pull."""
    folder = whole_copy(tmp_path)
    with (folder / "qkv_ext" / name).open("a") as file:
        file.write("\nNEWER = True\n")
    assert_numpy_serves(python, folder, "_kernels does not load: it was built for other Python")


@needs_modules
def test_changes_that_need_no_build(python, tmp_path):
    """Newlines are git's, and a file that says nothing of what the modules are given is free."""
    folder = whole_copy(tmp_path)
    for file in (folder / "qkv_ext").glob("*.py"):
        file.write_bytes(file.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    with (folder / "qkv_ext" / "tracing.py").open("a") as file:
        file.write("NEWER = True\n")
    assert python(USE, path=folder).startswith(AS_HERE)


@needs_modules
def test_without_the_text_of_the_python_files(python, tmp_path):
    """An application that ships bytecode alone: what is not there is not compared."""
    folder = whole_copy(tmp_path)
    assert compileall.compile_dir(folder, quiet=1, legacy=True)
    for file in (folder / "qkv_ext").glob("*.py"):
        file.unlink()
    assert python(USE, path=folder).startswith(AS_HERE)
    of_another_build(folder, "_softmax")
    assert_numpy_serves(python, folder, "_softmax does not load: it is of another build than ")


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({}, "_attention does not load: it has no build id"),
        ({"_matmul": "BUILD = 's_p'"}, "_matmul does not load: it is of another build than "),
        (
            {"_matmul": "raise TypeError('C function qkv_ext._kernels.table has wrong signature')"},
            "_matmul does not load: C function .*wrong signature",  # Cython's own check
        ),
        (
            {"_softmax": "raise ImportError('_kernels does not export expected C function')"},
            "_softmax does not load: _kernels does not export expected C function",
        ),
    ],
)
def test_modules_of_old_builds(modules, said, python, tmp_path):
    """G5: from before there were ids, or with functions that another build does not have."""
    folder = bare_copy(tmp_path, **dict.fromkeys(COMPILED, "") | modules)
    assert_numpy_serves(python, folder, said)


def test_bug_of_type_error_is_not_swallowed(python, tmp_path):
    folder = bare_copy(tmp_path, **dict.fromkeys(COMPILED, "") | {"_matmul": "len(3)"})
    assert "TypeError: object of type 'int'" in python(ALONE + USE, path=folder, ok=False)


@needs_tree
def test_one_id_for_one_tree(tmp_path):
    """Neither the place, nor times or newlines, nor what a build leaves behind changes the id."""
    kept = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    for name in ("qkv_ext", "src"):
        shutil.copytree(TREE / name, tmp_path / name, ignore=kept, copy_function=shutil.copyfile)
    shutil.copyfile(TREE / "setup.py", tmp_path / "setup.py")
    for name in ("attention.c", ".#plan.pxi", "matmul.html"):
        (tmp_path / "src" / name).write_text("made by a tool\n")
    (tmp_path / "setup.py").write_bytes((TREE / "setup.py").read_bytes().replace(b"\n", b"\r\n"))
    build = _build.of_tree(TREE)
    assert _build.of_tree(tmp_path) == build
    for name in ("src/plan.pxi", "src/kernels/pool.h", "src/kernels/avx2.c", "qkv_ext/_rules.py"):
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        assert _build.of_tree(tmp_path) != build
        shutil.copyfile(TREE / name, tmp_path / name)
    assert _build.of_tree(tmp_path) == build
