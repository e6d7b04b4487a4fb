"""What this machine can do at most: FMA peak of each instruction set, and read bandwidth."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from pathlib import Path

import numpy as np

_SOURCE = Path(__file__).with_name("machine.c")


class Machine:
    """The measuring functions, compiled into a temporary folder; None where nothing compiles."""

    def __init__(self) -> None:
        self._library = None
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "machine.so"
            command = [compiler, "-O3", "-shared", "-fPIC", str(_SOURCE), "-o", str(target)]
            if subprocess.run([*command, "-lpthread"], capture_output=True, check=False).returncode:
                return
            library = ctypes.CDLL(str(target))
        library.fma_peak.restype = library.read_bandwidth.restype = ctypes.c_double
        library.fma_peak.argtypes = [ctypes.c_char_p, ctypes.c_int]
        library.read_bandwidth.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._library = library

    def fma_peak(self, isa: str, threads: int) -> float | None:
        """10^9 additions and multiplications a second, the best of three."""
        if self._library is None:
            return None
        return max(self._library.fma_peak(isa.encode(), threads) for _ in range(3)) or None

    def read_bandwidth(self, size: int, threads: int) -> float | None:
        """GB/s over an array of that many bytes, allocated as NumPy does it; the median of five."""
        if self._library is None:
            return None
        data = np.ones(size // 4, np.float32)
        call = self._library.read_bandwidth
        rates = [call(data.ctypes.data, data.size, threads) for _ in range(5)]
        return float(np.median(rates))
