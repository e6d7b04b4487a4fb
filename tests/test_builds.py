"""What was compiled with what: builds that do not go together, archives, flags, register tiles."""

import compileall
import modulefinder
import platform
import py_compile
import re
import runpy
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest
from copies import ALONE, CAUGHT, SERVED, USE, bare_copy, whole_copy

import qkv_ext
from qkv_ext._core import _build
from qkv_ext._core._build import MODULES

BUILT = sorted(Path(_build.__file__).parent.glob("_*.so"))
needs_modules = pytest.mark.skipif(not BUILT, reason="nothing is compiled here")
TREE = Path(__file__).resolve().parents[1]
needs_tree = pytest.mark.skipif(not (TREE / "setup.py").is_file(), reason="no setup.py here")
AS_HERE = f"{qkv_ext.backends()} 12.0"

# ---- G5: modules and Python files of one build --------------------------------------------------


def module_file(folder, name):
    (file,) = (folder / "qkv_ext" / "_core").glob(f"{name}.*.so")
    return file


def of_another_build(folder, name):
    """Give a compiled module the id of other sources, as long as its own."""
    if sys.platform == "darwin":
        pytest.skip("a module that was changed has no valid signature")
    file = module_file(folder, name)
    data, count = re.subn(
        rb"s[0-9a-f]{16}(?=_p[0-9a-f]{16}\0)", b"s" + b"0" * 16, file.read_bytes()
    )
    assert count == 1
    file.write_bytes(data)


def without_text(file):
    """Leave the bytecode of a Python file alone."""
    py_compile.compile(file, file.with_suffix(".pyc"), doraise=True)
    file.unlink()


def assert_numpy_serves(python, folder, said):
    """One warning that says so, and an error where that is forbidden."""
    warning, count, served, *_ = python(ALONE + CAUGHT + USE, path=folder).splitlines()
    assert (served, count) == (SERVED, "1")
    assert re.match(rf"RuntimeWarning qkv_ext\._core\.{said}", warning), warning
    assert "pip install --force-reinstall" in warning
    error = python(ALONE + USE, path=folder, ok=False, QKV_EXT_REQUIRE_C="1")
    assert re.search(rf"ImportError: qkv_ext\._core\.{said}", error), error


@needs_modules
@pytest.mark.parametrize("name", MODULES)
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
    for file in (folder / "qkv_ext").rglob("*.py"):
        file.write_bytes(file.read_bytes().replace(b"\r\n", b"\n").replace(b"\n", b"\r\n"))
    with (folder / "qkv_ext" / "tracing.py").open("a") as file:
        file.write("NEWER = True\n")
    assert python(USE, path=folder).startswith(AS_HERE)


@needs_modules
def test_without_the_text_of_the_python_files(python, tmp_path):
    """An application that ships bytecode alone: what is not there is not compared."""
    folder = whole_copy(tmp_path)
    assert compileall.compile_dir(folder, quiet=1, legacy=True)
    for file in (folder / "qkv_ext").rglob("*.py"):
        file.unlink()
    assert python(USE, path=folder).startswith(AS_HERE)
    of_another_build(folder, "_softmax")
    assert_numpy_serves(python, folder, "_softmax does not load: it is of another build than ")


@needs_modules
@pytest.mark.parametrize(
    ("module", "edit", "said"),
    [
        ("_core._problem", "Q_START, ITEM = ITEM, Q_START", "ITEM is 0 .*compiled and 1 in"),
        ("_core._problem", "COLUMNS += 1", "COLUMNS is 7 .*compiled and 8 in"),
        ("_core._problem", "V_ADDRESS = K_ADDRESS", "V_ADDRESS is 1 .*compiled and 0 in"),
        ("_core._problem", "SLACK = 32", "SLACK is 64 .*compiled and 32 in"),
        ("_core._packed", "PANEL = 32", "PANEL is 64 .*compiled and 32 in"),
    ],
)
def test_constants_that_are_spelt_twice(module, edit, said, python, tmp_path):
    """An edit of what Python and the compiled modules both count on, in one of them alone."""
    folder = whole_copy(tmp_path)
    with (folder / "qkv_ext" / f"{module.replace('.', '/')}.py").open("a") as file:
        file.write(f"\n{edit}\n")
    without_text(folder / "qkv_ext" / "_core" / "_storage.py")  # or the ids would tell
    assert_numpy_serves(python, folder, f"_attention does not load: {said} qkv_ext.{module};")


@pytest.mark.parametrize(
    ("modules", "said"),
    [
        ({}, "_step does not load: it has no build id"),
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
    folder = bare_copy(tmp_path, **dict.fromkeys(MODULES, "") | modules)
    assert_numpy_serves(python, folder, said)


def test_bug_of_type_error_is_not_swallowed(python, tmp_path):
    folder = bare_copy(tmp_path, **dict.fromkeys(MODULES, "") | {"_matmul": "len(3)"})
    assert "TypeError: object of type 'int'" in python(ALONE + USE, path=folder, ok=False)


@needs_tree
def test_one_id_for_one_tree(tmp_path):
    """Neither the place, nor times or newlines, nor what a build leaves behind changes the id."""
    kept = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    for name in ("qkv_ext", "src"):
        shutil.copytree(TREE / name, tmp_path / name, ignore=kept, copy_function=shutil.copyfile)
    shutil.copyfile(TREE / "setup.py", tmp_path / "setup.py")
    for name in ("attention.c", ".#plan.pxd", "matmul.html"):
        (tmp_path / "src" / name).write_text("made by a tool\n")
    (tmp_path / "setup.py").write_bytes((TREE / "setup.py").read_bytes().replace(b"\n", b"\r\n"))
    build = _build.of_tree(TREE)
    assert _build.of_tree(tmp_path) == build
    for name in (
        "setup.py",
        "qkv_ext/_core/_kernels.pxd",
        "src/kernels/pool.h",
        "qkv_ext/_core/_rules.py",
    ):
        with (tmp_path / name).open("a") as file:
            file.write("\n")
        assert _build.of_tree(tmp_path) != build
        shutil.copyfile(TREE / name, tmp_path / name)
    assert _build.of_tree(tmp_path) == build


@needs_tree
@pytest.mark.parametrize(
    ("file", "stale"),
    [
        ("src/kernels/avx2.c", {"_kernels"}),
        ("src/kernels/product.h", {"_kernels"}),
        ("src/plan.pxd", {"_attention"}),
        ("src/merge.pyx", {"_merge"}),
        ("src/contract.pxd", {"_append", "_attention"}),
        ("src/kernels/kernels.h", set(MODULES)),
        ("src/kernels/storage.def", set(MODULES)),
        ("qkv_ext/_core/_problem.py", set(MODULES)),
    ],
)
def test_an_edit_makes_stale_what_sees_it(file, stale, tmp_path):
    """The id of a module, which setup.py compiles it anew by, and by what depends on what."""

    def ids():
        return {name: _build.of_module(tmp_path, name)[0] for name in MODULES}

    kept = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__")
    for name in ("qkv_ext", "src"):
        shutil.copytree(TREE / name, tmp_path / name, ignore=kept, copy_function=shutil.copyfile)
    before = ids()
    with (tmp_path / file).open("a") as text:
        text.write("\n")
    after = ids()
    assert {name for name in MODULES if after[name] != before[name]} == stale


# ---- G6: fast floating point --------------------------------------------------------------------


@pytest.fixture
def strict(monkeypatch):
    """strict() of setup.py, without setuptools and without building anything."""
    for name in ("setuptools", "setuptools.command", "setuptools.command.build_ext"):
        module = types.ModuleType(name)
        module.Extension = module.setup = lambda *_, **__: None
        module.build_ext = object
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.chdir(TREE)
    return runpy.run_path("setup.py")["strict"]


FAST = """-ffast-math -funsafe-math-optimizations -ffinite-math-only -fassociative-math
    -freciprocal-math -fno-signed-zeros -fno-honor-nans -fno-honor-infinities -fapprox-func
    -fsingle-precision-constant -fcx-limited-range -fdenormal-fp-math=preserve-sign
    -fdenormal-fp-math-f32=positive-zero -ffp-model=fast -ffp-model=aggressive -fp-model=fast=2
    -mdaz-ftz -mrecip -mrecip=all -mlow-precision-div -mfpmath=387 -mfpmath=both -ftz -fast
    -fastsse -no-prec-div -Mflushz /fp:fast -fp:fast /fp:contract /Qftz /Qfast_transcendentals
    /clang:-ffast-math /usr/lib/gcc/crtfastmath.o"""
FINE = """gcc -O2 -g -Wall -march=native -mfma -mfpmath=sse -fno-math-errno -fno-trapping-math
    -ffp-contract=off -fno-fast-math -fsigned-zeros -ffp-model=precise -fp-model=strict /fp:precise
    -fstack-protector-strong -fsanitize=address -flto -ffunction-sections -Wl,-z,now -L/fast -lfast
    -I/usr/include/-ffast-math fast.c -DFAST -ffloat-store -fomit-frame-pointer"""


@needs_tree
def test_fast_math_is_left_out(strict):
    """G6 (Cantera/cantera#1155): of compile and link commands, and it is said."""
    dropped = set()
    assert strict(["cc", *FAST.split(), "-shared"], dropped) == ["cc", "-shared"]
    assert dropped == set(FAST.split())
    dropped = set()
    assert strict(FINE.split(), dropped) == FINE.split()
    assert not dropped
    assert strict(["cc", "-Ofast", "-g"], dropped) == ["cc", "-O3", "-g"]
    assert dropped == {"-Ofast"}


def compiler_says(tmp_path, *flags, **texts):
    """What the C compiler says of src/kernels/scalar.c, texts in it being replaced; "" is good."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler here")
    source = (TREE / "src" / "kernels" / "scalar.c").read_text()
    for name, value in texts.items():
        source, count = re.subn(rf"#define {name} .*", f"#define {name} {value}", source)
        assert count == 1
    (tmp_path / "kernel.c").write_text(source)
    command = [compiler, "-std=gnu11", "-fsyntax-only", f"-I{TREE / 'src' / 'kernels'}", *flags]
    done = subprocess.run([*command, "kernel.c"], cwd=tmp_path, capture_output=True, text=True)
    assert bool(done.returncode) is ("error" in done.stderr), done.stderr
    return done.stderr


@needs_tree
@pytest.mark.parametrize("flag", ["-Ofast", "-ffast-math", "-ffinite-math-only"])
def test_fast_math_that_arrives_is_an_error(flag, tmp_path):
    """G6: what a wrapper of the compiler adds."""
    assert compiler_says(tmp_path, "-O2") == ""
    assert "masks and NaN would be wrong" in compiler_says(tmp_path, flag)


@needs_modules
@pytest.mark.skipif(
    sys.platform != "linux" or platform.machine() != "x86_64", reason="reads x86's control words"
)
def test_import_leaves_the_control_words(python):
    """G6: GCC before 13 links what flushes subnormals to zero into modules of -ffast-math."""
    code = """
import ctypes, numpy
def control():  # of x87, and of SSE without its sticky flags
    state = ctypes.create_string_buffer(32)
    ctypes.CDLL(None).fegetenv(state)
    return state.raw[:2], int.from_bytes(state.raw[28:], "little") & 0xffc0
before = control()
import qkv_ext
assert control() == before
"""
    python(code)


# ---- G7: archives, frozen applications, and tiles that product.h has not -------------------------


def zipped(folder):
    return Path(shutil.make_archive(folder, "zip", folder))


def test_import_from_an_archive(python, tmp_path):
    """G7: NumPy serves, and the reason is the archive."""
    archive = zipped(bare_copy(tmp_path))
    said = python(ALONE + USE, path=archive)
    assert said.startswith(SERVED)
    assert f"qkv_ext is imported from the zip archive {archive}" in said
    error = python(ALONE + USE, path=archive, ok=False, QKV_EXT_REQUIRE_C="1")
    assert "ImportError: qkv_ext._core._kernels cannot be loaded" in error


@needs_modules
def test_modules_in_an_archive(python, tmp_path):
    """G7: they are there and do not load, which is told once."""
    warning, count, served, *_ = python(
        ALONE + CAUGHT + USE, path=zipped(whole_copy(tmp_path))
    ).splitlines()
    assert (served, count) == (SERVED, "1")
    assert warning.startswith("RuntimeWarning qkv_ext._core._kernels cannot be loaded: ")


def test_frozen_application_without_the_modules(python, tmp_path):
    """G7 (pyinstaller/pyinstaller#1674): no compiler is blamed."""
    said = python(ALONE + "sys.frozen = True\n" + USE, path=bare_copy(tmp_path))
    assert said.startswith(SERVED)
    assert (
        "nothing: qkv_ext._core._kernels is not in this frozen application: it was not coll" in said
    )


def test_freezers_find_the_modules(tmp_path):
    """G7 (numpy/numpy#14141): by the import statements that they can read."""
    folder = bare_copy(tmp_path, **dict.fromkeys(MODULES, ""))
    (tmp_path / "program.py").write_text("import qkv_ext\n")
    finder = modulefinder.ModuleFinder([str(folder)], excludes=["numpy", "ml_dtypes"])
    finder.run_script(str(tmp_path / "program.py"))
    assert {f"qkv_ext._core.{name}" for name in MODULES} <= set(finder.modules)


@needs_tree
@pytest.mark.parametrize(
    ("texts", "said"),
    [
        ({"ROWS": 8}, "tiles of 1 to 6 rows"),
        ({"ROWS": 5}, "tiles of 1 to 6 rows"),
        ({"VECS": 3}, "tiles of 2 or 4 vectors"),
        ({"VECS": 1}, "tiles of 2 or 4 vectors"),
        ({"SKINNY_ROWS": 3}, "SKINNY_ROWS"),
        ({"VL": 2}, "vec is VL floats"),
    ],
)
def test_register_tile_that_there_is_not(texts, said, tmp_path):
    """A table of kernels that product.h cannot serve does not compile, instead of crashing."""
    assert said in compiler_says(tmp_path, **texts)
