"""`python -m fastrl`: the command `fastrl`; without arguments, its `doctor`."""

import sys

from fastrl.console import main

if __name__ == "__main__":
    main(sys.argv[1:] or ["doctor"])
