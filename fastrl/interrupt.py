"""Ctrl-C while a command loads its modules: the command ends at once, without a traceback.

``python -m fastrl.train.grpo`` imports this package, and torch, before any of its own code runs.
`fastrl.train.command_line.main` puts Python's handler back.
"""

import os
import signal
import sys

_options = sys.orig_argv[1:]
_module = _options[_options.index("-m") + 1] if "-m" in _options[:-1] else ""
_command = os.path.basename(sys.argv[0])
if (
    _module in ("fastrl", "fastrl.bench")
    or _module.startswith("fastrl.train.")
    or _command == "fastrl"
):
    signal.signal(signal.SIGINT, signal.SIG_DFL)
