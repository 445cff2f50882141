"""The package again, where versions of `kernels` before 0.11 look for it."""

import importlib.util
import sys
from pathlib import Path

if "FASTRL_HUB_ID" not in sys.modules:
    _spec = importlib.util.spec_from_file_location(
        "FASTRL_HUB_ID", Path(__file__).parents[1] / "__init__.py"
    )
    sys.modules["FASTRL_HUB_ID"] = importlib.util.module_from_spec(_spec)
    _spec.loader.exec_module(sys.modules["FASTRL_HUB_ID"])
globals().update(vars(sys.modules["FASTRL_HUB_ID"]))
