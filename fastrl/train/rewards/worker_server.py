"""What the server of the worker processes imports before it forks them; nothing else imports it."""

import warnings

import fastrl.train.rewards.workers  # noqa: F401 -- so that no worker has to

# As multiprocessing does, each worker runs the module of the program once more. That is imported
# here already, so that it takes no time, and Python warns of it.
warnings.filterwarnings("ignore", r".*found in sys\.modules", RuntimeWarning)
