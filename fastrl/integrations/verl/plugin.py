"""verl's plug-in seam: fastrl in every process of a verl run, the workers included.

VERL_USE_EXTERNAL_MODULES=fastrl.integrations.verl.plugin python -m verl.trainer.main_ppo ...

verl imports the modules named there as it is imported itself, and this one then replaces its
functions. Imported by anything else, before verl, it does nothing.
"""

import sys

from fastrl.integrations.verl import use_fastrl

replaced = use_fastrl() if "verl" in sys.modules else None
