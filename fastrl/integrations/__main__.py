"""`python -m fastrl.integrations docs/support.md` writes the table of TRL's options into it."""

import sys
from pathlib import Path

from fastrl.integrations.support import updated

if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"the path of the document is needed: {__doc__}")
    document = Path(sys.argv[1])
    document.write_text(updated(document.read_text()))
