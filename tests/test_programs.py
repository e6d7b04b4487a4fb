"""Every program of the project: any encoding, one line for a bad value, quiet ends (G8)."""

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import qkv_ext
from qkv_ext._core import _config, _program

CLONE = Path(__file__).resolve().parents[1]
DEMO = ["-m", "qkv_ext"]
BENCH = ["-m", "bench"]
ARTICLE, GENERATE, SEARCH = (
    [str(CLONE / "examples" / f"{name}.py")] for name in ("article", "generate", "semantic_search")
)
PROGRAMS = {"demo": DEMO, "bench": BENCH, "article": ARTICLE, "generate": GENERATE,
            "search": SEARCH}  # fmt: skip
ENCODINGS = ("ascii", "cp1252", "cp437", "cp932", "ascii:strict", "latin-1:surrogateescape")
#: A walk that takes no time, as a program: what comes before is run in the same interpreter.
QUICK = """
from qkv_ext import __main__, _demo
from qkv_ext._core import _program
_demo.CASES, _demo.SECONDS = _demo.CASES[:1], 0
_program.run(__main__.main)
"""


@pytest.fixture
def started(tmp_path):
    """Start Python with arguments, with the package under test and the clone beside it."""
    running = []

    def start(*arguments, **environment):
        if "bench" in arguments and not (CLONE / "bench").is_dir():
            pytest.skip("the bench lies in the clone only")
        kept = {k: x for k, x in os.environ.items() if not k.startswith(("QKV_EXT_", "PYTHON"))}
        path = os.pathsep.join(map(str, dict.fromkeys([ROOT, CLONE])))
        running.append(
            subprocess.Popen(
                [sys.executable, "-P", *arguments],
                env={**kept, "PYTHONPATH": path, **environment},
                cwd=tmp_path,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
            )
        )
        return running[-1]

    yield start
    for process in running:
        with process:
            process.kill()


def ended(process):
    """Its status, output and errors."""
    output, errors = process.communicate(timeout=300)
    return process.returncode, output, errors.decode("ascii", "backslashreplace")


# ---- encodings ----------------------------------------------------------------------------------


@pytest.mark.slow
def test_in_an_encoding_without_the_letters(started):
    """G8, as it was filed (seddonym/import-linter#313)."""
    status, output, errors = ended(started(*DEMO, PYTHONIOENCODING="cp1252"))
    assert (status, errors) == (0, "")
    assert b"softmax(Q K^T / sqrt d_k) V" in output


@pytest.mark.parametrize("encoding", [*ENCODINGS, "utf-8", "utf-16", "cp1252:replace"])
def test_in_any_encoding(encoding, started):
    """G8: everything is said, and a user's own choice of what to do is left alone."""
    status, output, errors = ended(started("-c", QUICK, PYTHONIOENCODING=encoding))
    assert (status, errors) == (0, "")
    name, _, handler = encoding.partition(":")
    formula = "softmax(Q Kᵀ / √d_k) V"
    if handler == "replace":
        said = formula.encode(name, handler).decode(name)
    else:
        said = _config.printable(formula, io.TextIOWrapper(io.BytesIO(), encoding=name))
        assert "?" not in said
    assert said in output.decode(name)


@pytest.mark.parametrize("encoding", ["ascii", "cp932"])
@pytest.mark.parametrize("name", PROGRAMS)
def test_help_in_any_encoding(name, encoding, started):
    """G8; and help needs none of the packages that the program does."""
    blocked = "import sys; sys.modules |= dict.fromkeys({'safetensors', 'tokenizers', 'tqdm', "
    blocked += "'glassllm', 'rich', 'matplotlib', 'threadpoolctl'}); import runpy; "
    *kind, what = PROGRAMS[name]
    run = f"runpy.run_{'module' if kind else 'path'}({what!r}, run_name='__main__')"
    code = f"{blocked} sys.argv = ['x', '--help']; {run}"
    status, output, errors = ended(started("-c", code, what, PYTHONIOENCODING=encoding))
    assert (status, errors) == (0, "")
    assert name == "article" or b"--help" in output


class Plain(io.StringIO):
    encoding = "no such encoding"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp932", "utf-8"])
def test_show_config_into_any_file(encoding, tmp_path, monkeypatch):
    """G8: a file of the caller's, whatever a CPU is called; what it holds is all there."""
    cpu = "naïve 龍芯 CPU\udcff"
    monkeypatch.setattr(_config, "_cpu_name", lambda: cpu)
    with open(tmp_path / "config.txt", "w", encoding=encoding) as file:
        qkv_ext.show_config(file=file)
        assert file.errors == "strict"  # it is the caller's
    text = (tmp_path / "config.txt").read_text(encoding)
    spelled = cpu.encode(encoding, "backslashreplace").decode(encoding)
    assert f"machine     {spelled}, " in text
    for memory in (io.StringIO(), Plain()):
        qkv_ext.show_config(file=memory)
        assert f"machine     {cpu}, " in memory.getvalue()


def test_for_machines_in_ascii(started):
    status, output, errors = ended(
        started("-c", "import sys; sys.argv.append('--json')" + QUICK, PYTHONIOENCODING="ascii")
    )
    assert (status, errors) == (0, "")
    assert json.loads(output)["config"]["backends"][0] == "numpy"


# ---- ends ---------------------------------------------------------------------------------------

TALKING = {"demo": ["-c", QUICK], "bench": [*BENCH, "--help"], "article": ARTICLE,
           "generate": [*GENERATE, "--help"], "search": [*SEARCH, "--help"]}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("lines", [0, 1])
@pytest.mark.parametrize("name", TALKING)
def test_nobody_reads_on(name, lines, unbuffered, started):
    """| head -1 and | true: no traceback, no "Exception ignored", the status that a shell knows."""
    process = started(*TALKING[name], PYTHONUNBUFFERED=unbuffered)
    for _ in range(lines):
        assert process.stdout.readline().strip()
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait() in (0, _program.NO_READER)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no device that is always full")
def test_no_room_for_the_output(started):
    code = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 1)" + QUICK
    status, _, errors = ended(started("-c", code))
    assert status == 1
    assert errors.startswith("-c: [Errno 28]")
    assert errors.count("\n") == 1


@pytest.mark.skipif(os.name == "nt", reason="no signals like these here")
@pytest.mark.parametrize("program", [DEMO, [*BENCH, "--rivals", "NumPy", "--set", "softmax"]])
def test_interrupted(program, started):
    """^C, after the first line: the status of SIGINT, and nothing else is said."""
    process = started("-c", "import signal, sys, runpy; sys.argv = ['x', *sys.argv[3:]]; "
                      "signal.signal(signal.SIGINT, signal.default_int_handler); "
                      f"runpy.run_module({program[1]!r}, run_name='__main__')", *program,
                      PYTHONUNBUFFERED="1")  # fmt: skip
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert errors == b""
    assert process.returncode == _program.INTERRUPTED


# ---- bad values ---------------------------------------------------------------------------------

BAD = {
    "demo": ["--nonsense", "extra"],
    "bench": ["--threads=0", "--threads=-1", "--threads=1e99", "--threads=" + "9" * 5000,
              "--rounds=0", "--rounds=1.5", "--seconds=0", "--seconds=nan", "--seconds=inf",
              "--set=nonsense", "--cases=no such case", "--rivals=mkl", "--json=/no/such/folder/x",
              "--json=.", "--markdown=.", "--from=/no/such/file", "--against=.",
              "--from=empty", "--from=binary", "--from=null", "--against=list",
              "--nonsense"],
    "generate": ["--tokens=0", "--tokens=-1", "--tokens=" + "9" * 50, "--temperature=0",
                 "--temperature=nan", "--temperature=-inf", "--temperature=1e-50", "--seed=-1",
                 "--seed=x", "--continuations=0", "--continuations=9999999999", "--threads=0",
                 "--threads=two", "--lang=de", "--dtype=int4", "--nonsense", ""],
    "search": ["--top=0", "--top=-1", "--threads=0", "--threads=-2", "--model=/no/such/folder",
               "--model=empty", "--model=.", "--corpus=/no/such/folder", "--corpus=empty",
               "--nonsense", "", " "],
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values],
    ids=lambda x: x[:30] or "nothing",
)  # fmt: skip
def test_bad_value(name, value, started, tmp_path):
    """One line on stderr, no traceback, status 1 or 2, at once."""
    for file, holds in {"empty": b"", "binary": b"\xff\xfe\0", "null": b"null",
                        "list": b"[1, {}]"}.items():  # fmt: skip
        (tmp_path / file).write_bytes(holds)
    status, output, errors = ended(started(*PROGRAMS[name], value))
    assert status in (1, 2), errors
    assert output == b""
    assert errors.count("\n") == 1, errors
    assert len(errors) < 600
    assert "Traceback" not in errors
