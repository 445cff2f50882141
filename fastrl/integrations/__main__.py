"""`python -m fastrl.integrations` prints the table of what the drop-ins support."""

import sys

from fastrl.integrations.support import table

if __name__ == "__main__":
    sys.stdout.write(table())
