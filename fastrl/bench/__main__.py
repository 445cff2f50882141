"""`python -m fastrl.bench`: the command `fastrl bench`."""

import sys

from fastrl.bench.command_line import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
