"""``python -m qkv_ext``: configuration, a walk through attention, speed and error; see --help."""

from __future__ import annotations

import json

from qkv_ext._core._program import Parser, run


def main() -> None:
    from qkv_ext import _demo

    parser = Parser(prog="python -m qkv_ext", description=_demo.__doc__)
    parser.add_argument("--json", action="store_true", help="print everything as one JSON object")
    if parser.parse_args().json:
        print(json.dumps(_demo.as_data(), indent=1))
    else:
        _demo.show()


if __name__ == "__main__":
    run(main)
