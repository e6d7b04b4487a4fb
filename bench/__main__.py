"""``python -m bench``, from the clone: see --help."""

import sys

if __name__ == "__main__":  # not in the workers, which import this file again
    from bench.command import main

    sys.exit(main())
