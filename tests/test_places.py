"""What CONTRIBUTING.md says is all of a new option, instruction set, storage type or function.

Each is added to a copy of the tree, by edits of the places named there and of no other, and works.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TREE = Path(__file__).resolve().parents[1]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (TREE / "setup.py").is_file(), reason="no setup.py here"),
]

#: file: pairs of a text that is there once, and of what comes behind it
OPTION = {
    "qkv_ext/_core/_options.py": [
        ('"""Scores become softcap · tanh(score / softcap)."""\n',
         '    bonus: float | None\n    """Is added to each score."""\n'),
        ("    softcap: Any = None\n", "    bonus: Any = None\n"),
    ],
    "qkv_ext/attention.py": [
        ("    softcap: float | np.floating[Any] | None = None,\n",
         "    bonus: float | None = None,\n"),
        ("tanh(score / softcap), before ALiBi and the mask.\n",
         "    bonus : float, optional\n        Is added to each score.\n"),
        ("        mask, causal, align, scale, window, softcap, ", "bonus, "),
    ],
    "qkv_ext/_core/_problem.py": [
        ("    softcap: float = 0.0  # 0 is off\n", "    bonus: float = 0.0\n"),
    ],
    "qkv_ext/_core/_rules.py": [
        ("    return Rules(left=left, right=right, softcap=cap, ", "bonus=given.bonus or 0.0, "),
    ],
    "qkv_ext/_core/_numpy.py": [
        ("        scores = cap * np.tanh(scores / cap)\n",
         "    if rules.bonus:\n        scores = scores + scores.dtype.type(rules.bonus)\n"),
    ],
    "qkv_ext/_core/_kernels.pxd": [
        ("        QKV_SOFTCAP\n", "        QKV_BONUS\n"),
        ("        float softcap\n", "        float bonus\n"),
    ],
    "src/kernels/kernels.h": [
        ("    QKV_BLOCKS = 32,\n", "    QKV_BONUS = 64,\n"),
        ("softcap tanh(score / softcap) */\n", "    float bonus;            /* is added */\n"),
    ],
    "src/kernels/softmax.h": [
        ("            x = v_mul(cap, v_tanh(v_div(x, cap)));\n        }\n",
         "        if (modifiers & QKV_BONUS) x = v_add(x, v_set1(row->bonus));\n"),
    ],
    "src/attention.pyx": [
        ("    LANES, PANEL, ", "QKV_BONUS, "),
        ("    int left, right, softcap, ", "bonus, "),
        ("        call.rules.row.modifiers |= QKV_SOFTCAP\n",
         "    if rules[RULE.bonus]:\n        call.rules.row.bonus = rules[RULE.bonus]\n"
         "        call.rules.row.modifiers |= QKV_BONUS\n"),
    ],
    "tests/cases.py": [('    "softcap": (None, 0.7, 20),\n', '    "bonus": (None, 0.5),\n')],
    "tests/oracle.py": [
        ("scale=None, window=None,\n", "              bonus=None,\n"),
        ("np.tanh(scores / dtype(softcap))\n",
         "    scores = scores if bonus is None else scores + dtype(bonus)\n"),
    ],
    "tests/public_calls.py": [('    "softcap": "real", ', '"bonus": "real", ')],
    "tests/test_signatures.py": [("softcap=None!, ", "bonus=None!, ")],
}  # fmt: skip
INSTRUCTION_SET = {"src/kernels/isa.def": [("ISA(scalar, 1)\n", "ISA(plain, 1)\n")]}
STORAGE = {
    "src/kernels/storage.def": [
        ('STORAGE(INT8, "int8", 8, 1, v_from_int8, )\n',
         'STORAGE(BRIEF, "brief", 16, 0, v_from_half, v_to_half)\n'
         'STORAGE(EIGHT, "eight", 8, 1, v_from_int8, )\n'),
    ],
    "qkv_ext/_core/_storage.py": [
        ('    "int8": Storage(np.dtype(np.int8), True, _int8, _wide),\n',
         '    "brief": Storage(np.dtype(np.float16), False, _float16, _wide),\n'
         '    "eight": Storage(np.dtype(np.int8), True, _int8, _wide),\n'),
    ],
}  # fmt: skip
DOUBLE = '''
def double(x: Any) -> Array:
    """Twice the numbers of an array.

    Parameters
    ----------
    x : array
        Numbers.

    Returns
    -------
    array
        Twice as large.

    Raises
    ------
    TypeError
        No array.

    Examples
    --------
    >>> import numpy as np, qkv_ext
    >>> qkv_ext.double(np.float32([1.5]))
    array([3.], dtype=float32)
    """
    return 2 * _arrays.operand(x, "x", 1)
'''
FUNCTION = {
    "qkv_ext/linear.py": [
        ("from qkv_ext._core import _backends, _check\n", "from qkv_ext._core import _arrays\n"),
        ("Array = NDArray[Any]\n", DOUBLE),
        ("__all__ = [", '"double", '),
    ],
    "qkv_ext/__init__.py": [
        ("from qkv_ext.linear import ", "double, "),
        ('    "cross_attention",\n', '    "double",\n'),
    ],
    "tests/public_calls.py": [
        ("CALLS = {  # the call, its arguments, and the kinds of those that are to be odd\n",
         '    "double": (qkv_ext.double, {"x": W}, {"x": "array"}),\n'),
    ],
    "tests/test_docs.py": [('PLAIN = ("alibi_slopes", "backends", ', '"double", ')],
    "tests/test_signatures.py": [
        ('    "pack_weight": "w, dtype=None!",\n', '    "double": "x",\n'),
    ],
}  # fmt: skip


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The tree with one more of each, built."""
    pytest.importorskip("Cython")
    folder = tmp_path_factory.mktemp("tree")
    left = shutil.ignore_patterns("*.so", "*.pyd", "__pycache__", ".*")
    for name in ("qkv_ext", "src", "tests"):
        shutil.copytree(TREE / name, folder / name, ignore=left)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copyfile(TREE / name, folder / name)
    for edits in (OPTION, INSTRUCTION_SET, STORAGE, FUNCTION):
        for name, pairs in edits.items():
            text = (folder / name).read_text("utf-8")
            for before, behind in pairs:
                assert text.count(before) == 1, f"{before!r} in {name}"
                text = text.replace(before, before + behind)
            (folder / name).write_text(text, "utf-8")
    scalar = (folder / "src/kernels/scalar.c").read_text("utf-8")
    scalar = scalar.replace('QKV_NAME "scalar"', 'QKV_NAME "plain"')
    (folder / "src/kernels/plain.c").write_text(scalar.replace("qkv_scalar", "qkv_plain"), "utf-8")
    run(folder, "setup.py", "-q", "build_ext", "--inplace", CFLAGS="-O1", QKV_EXT_REQUIRE_C="1")
    return folder


def run(folder, *arguments, **environment):
    own = ("QKV_EXT_", "PYTEST_")  # what is said to this run
    kept = {name: x for name, x in os.environ.items() if not name.startswith(own)}
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**kept, "PYTHONPATH": str(folder), **environment},
        cwd=folder,
        capture_output=True,
        encoding="utf-8",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.strip()


def suite(folder, *arguments):
    """Tests of the copy, which must be of it."""
    said = run(folder, "-P", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments)
    assert " passed" in said
    assert "skipped" not in said


def test_option(copy):
    """Every row that has it is within the error rule, on every backend, and trace shows it."""
    suite(copy, "tests/test_attention.py", "-k", "bonus or every_two_options")
    code = """
import numpy as np, qkv_ext
x = np.eye(3, dtype="f4")
one, other = (qkv_ext.trace(x, x, x, bonus=bonus) for bonus in (None, 0.5))
assert (other["masked"] - one["masked"] == 0.5).all()
assert qkv_ext.self_attention(x, x, x, x, bonus=0.5).shape == (3, 3)
"""
    run(copy, "-c", code)
    suite(copy, "tests/test_signatures.py", "tests/test_docs.py", "tests/test_errors.py",
          "tests/test_foreign_arrays.py")  # fmt: skip


def test_instruction_set(copy):
    code = """
import numpy as np, qkv_ext
assert qkv_ext.backends()[:3] == ("numpy", "scalar", "plain")
x = np.random.default_rng(0).standard_normal((2, 300, 40), "f4")
one, other = (qkv_ext.scaled_dot_product_attention(x, x, x, causal=True, backend=name)
              for name in ("scalar", "plain"))
assert one.tobytes() == other.tobytes()
"""
    run(copy, "-c", code)
    suite(copy, "tests/test_backends.py", "tests/test_bits.py", "-k", "names or plain")


def test_storage_type(copy):
    """Each has the bits of the type that it is another name for."""
    code = """
import numpy as np, qkv_ext
k, v = np.random.default_rng(0).standard_normal((2, 2, 2, 700, 40), "f4")
for name, twin in (("brief", "float16"), ("eight", "int8")):
    caches = [qkv_ext.KVCache(2, 2, 40, dtype=kind) for kind in (name, twin)]
    for cache in caches:
        cache.append(k[:, :, :601], v[:, :, :601])
        cache.append(k[:, :, 601:], v[:, :, 601:])
    for backend in qkv_ext.backends():
        for rows in (1, 70):
            one, other = (cache.attend(k[:, :, :rows], backend=backend) for cache in caches)
            assert one.tobytes() == other.tobytes(), (name, backend, rows)
    assert caches[0].keys(1).tobytes() == caches[1].keys(1).tobytes()
"""
    run(copy, "-c", code)
    suite(copy, "tests/test_cache_storage.py", "-k", "same_types")


def test_public_function(copy):
    """It is documented, called with odd arguments, and drawn by the fuzzer."""
    suite(copy, "tests/test_signatures.py", "tests/test_docs.py")
    suite(copy, "tests/test_foreign_arrays.py", "-k", "double")
