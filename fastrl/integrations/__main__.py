"""`python -m fastrl.integrations` prints the table of the options that the drop-ins support."""

import sys

from fastrl.integrations.support import table

if __name__ == "__main__":
    sys.stdout.write(table())
