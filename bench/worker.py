"""One rival in a process of its own: reads a case per line, measures it, answers in JSON.

{"case": NAME}       -> {"line": what runs, "error": largest error of two rows}
{"seconds": S}       -> {"seconds": the median call}
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import numpy as np

from bench.cases import CASES
from bench.rivals import RIVALS, Call


def measure(call: Call, seconds: float) -> float:
    times: list[float] = []
    start = time.perf_counter()
    while time.perf_counter() - start < seconds or len(times) < 3:
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def main() -> None:
    rival, threads = RIVALS[sys.argv[1]], int(sys.argv[2])
    cases = {case.name: case for case in CASES}
    call: Any = None
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if "case" in request:
                case = cases[request["case"]]
                call, what = rival(case, threads)
                output = np.asarray(call())[-1, -1, [0, -1]]
                answer = {"line": what, "error": float(np.abs(output - case.exact()).max())}
            else:
                answer = {"seconds": measure(call, request["seconds"])}
        except Exception as error:
            answer = {"failed": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
