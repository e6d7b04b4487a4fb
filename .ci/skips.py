"""A plugin for every pytest of .ci/run: a skip or expected failure that is not listed fails it."""

import os
import re

STEP = os.environ.get("QKV_CI_STEP", "")
#: Steps whose environment may have the extra `test` and no more; those before torch is installed.
ONLY_TEST = r"plain|slow|defaults|smaller_cpu|no_compiler|fast_math|wheel"
NO_TORCH = rf"{ONLY_TEST}|conformance"
#: (step, file of tests, reason), each a pattern for the whole of it
EXPECTED = [
    (r".*", r"test_threads\.py", r"this Python has a GIL"),
    (r".*", r"test_onnx\.py", r"float64 is the NumPy backend's"),
    # packages that come with a later step
    (ONLY_TEST, r"test_onnx\.py", r"could not import 'onnx'.*"),
    (ONLY_TEST, r"test_generate\.py", r"could not import 'glassllm'.*"),
    (ONLY_TEST, r"test_bench\.py", r"could not import 'matplotlib'.*"),
    (ONLY_TEST, r"test_semantic_search\.py", r"could not import 'safetensors'.*"),
    (ONLY_TEST, r"test_torch\.py", r"could not import 'torch'.*"),
    (NO_TORCH, r"test_state_dict(_models)?\.py", r"could not import 'torch'.*"),
    (NO_TORCH, r"test_rope_scaling\.py", r"could not import 'transformers'.*"),
    (NO_TORCH, r"test_semantic_search\.py", r"the model is not installed"),
    (r"wheel", r"test_process\.py", r"no setup\.py here"),  # away from the tree
    (r"no_compiler", r".*", r"nothing is compiled here|asks why nothing is compiled"),
]
seen: dict[tuple[str, str], int] = {}


def expected(name: str, reason: str) -> bool:
    return any(
        all(map(re.fullmatch, patterns, (STEP, name, reason.partition("\n")[0])))
        for patterns in EXPECTED
    )


def note(report):
    if report.skipped:  # xfail too, whose reason is kept elsewhere
        reason = getattr(report, "wasxfail", None)
        reason = report.longrepr[2].removeprefix("Skipped: ") if reason is None else reason
        name = report.nodeid.partition("::")[0].rpartition("/")[2]
        if not expected(name, reason):
            seen[name, reason] = seen.get((name, reason), 0) + 1


pytest_runtest_logreport = pytest_collectreport = note


def pytest_sessionfinish(session):
    if seen and session.exitstatus == 0:
        session.exitstatus = 1


def pytest_terminal_summary(terminalreporter):
    for (name, reason), count in seen.items():
        text = f"unexpected skip in the step {STEP!r}: {count} of {name}: {reason}"
        terminalreporter.write_line(text, red=True)
