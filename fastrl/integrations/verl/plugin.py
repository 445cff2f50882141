"""A plugin for verl: fastrl in every process of a verl run, including the workers.

    VERL_USE_EXTERNAL_MODULES=fastrl.integrations.verl.plugin python -m verl.trainer.main_ppo ...

When verl is imported, it imports the modules in that variable, and this one then replaces verl's
functions. If this module is imported first, it replaces them as soon as verl has been imported.
"""

from __future__ import annotations

import sys

from fastrl.integrations.importing import AfterImport
from fastrl.integrations.replacing import Replaced
from fastrl.integrations.verl import use_fastrl

#: The handle of `use_fastrl`; None as long as verl has not been imported.
replaced: Replaced | None = None


def _after_import(package: str) -> None:
    global replaced
    replaced = use_fastrl()
    _watch.stop()  # last, so that an import which fails here fails again


if "verl" in sys.modules:
    replaced = use_fastrl()
else:
    _watch = AfterImport(["verl"], _after_import)
