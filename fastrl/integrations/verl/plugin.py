"""A plugin for verl: fastrl in every process of a verl run, including the workers.

VERL_USE_EXTERNAL_MODULES=fastrl.integrations.verl.plugin python -m verl.trainer.main_ppo ...

verl imports the modules in that variable when it is itself imported, and this one then replaces
verl's functions. If it is imported before verl, it does nothing.
"""

import sys

from fastrl.integrations.verl import use_fastrl

replaced = use_fastrl() if "verl" in sys.modules else None
