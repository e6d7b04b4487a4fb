"""``python -m bench``, from the clone: see --help."""

from importlib import import_module

from qkv_ext._core._program import run

if __name__ == "__main__":  # not in the workers, which import this file again
    run(lambda: import_module("bench.command").main())
