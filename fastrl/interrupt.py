"""Ctrl-C while the modules of a command load: it ends at once, without a traceback.

``python -m fastrl.train.grpo`` imports this package, and torch, before any of its own code runs.
`fastrl.train.command_line.main` puts Python's handler back.
"""

import os
import signal
import sys

_program = sys.orig_argv[1:3]
if (_program[:1] == ["-m"] and _program[-1].startswith("fastrl.train.")) or os.path.basename(
    sys.argv[0]
) == "fastrl":
    signal.signal(signal.SIGINT, signal.SIG_DFL)
