"""What this machine is, and what it can do at most: its FMA peaks, and its read bandwidth."""

from __future__ import annotations

import ctypes
import platform
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from qkv_ext._core._config import config

_SOURCE = Path(__file__).with_name("machine.c")
BIG = 256 * 1024 * 1024  #: bytes that no cache here holds


class Limits:
    """The measuring functions, compiled into a temporary folder; None where nothing compiles."""

    def __init__(self) -> None:
        self._library = None
        self._data = np.ones(0, np.float32)
        compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
        if compiler is None:
            return
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder) / "machine.so"
            command = [compiler, "-O3", "-shared", "-fPIC", str(_SOURCE), "-o", str(target)]
            if subprocess.run([*command, "-lpthread"], capture_output=True, check=False).returncode:
                return
            try:
                library = ctypes.CDLL(str(target))
            except OSError:  # a temporary folder that nothing may run from
                return
        library.fma_peak.restype = library.read_bandwidth.restype = ctypes.c_double
        library.fma_peak.argtypes = [ctypes.c_char_p, ctypes.c_int]
        library.read_bandwidth.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self._library = library

    def of(self, bound: str | None, isa: str, read: float, threads: int) -> float | None:
        """What a case bound by that can reach, in its unit."""
        if bound is None:
            return None
        if bound == "fma":
            return self.fma_peak(isa, threads)
        return self.read_bandwidth(int(read), threads)

    def fma_peak(self, isa: str, threads: int) -> float | None:
        """10^9 additions and multiplications a second, the best of three."""
        if self._library is None:
            return None
        return max(self._library.fma_peak(isa.encode(), threads) for _ in range(3)) or None

    def read_bandwidth(self, size: int, threads: int) -> float | None:
        """GB/s of a sum over an array of that many bytes that NumPy allocated; median of five."""
        if self._library is None:
            return None
        if self._data.nbytes != size // 4 * 4:  # kept from round to round
            self._data = np.ones(size // 4, np.float32)
        call = self._library.read_bandwidth
        rates = [call(self._data.ctypes.data, self._data.size, threads) for _ in range(5)]
        return float(np.median(rates))


def cache_bytes(level: int = 3) -> int | None:
    """The size of the largest cache of that level, as Linux tells it; None where it does not."""
    sizes = []
    for index in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        try:
            if int((index / "level").read_text()) == level:
                text = (index / "size").read_text().strip()
                sizes.append(int(text.rstrip("KMG")) * 1024 ** "BKMG".index(text[-1]))
        except (OSError, ValueError, IndexError):
            continue
    return max(sizes, default=None)


def describe(limits: Limits, isas: tuple[str, ...], threads: int) -> dict[str, Any]:
    """Name, caches and limits, measured now."""
    peaks = {isa: limits.fma_peak(isa, threads) for isa in isas if isa != "numpy"}
    return {
        "cpu": config()["cpu"],
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "l3": cache_bytes(),
        "fma_peak": peaks,
        "read_bandwidth": limits.read_bandwidth(BIG, threads),
    }
