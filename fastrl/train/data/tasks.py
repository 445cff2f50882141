"""The tasks that need no download, by their names in the settings."""

from fastrl.train.data import arithmetic, long_addition
from fastrl.train.data.task_files import Split

SPLITS: dict[str, Split] = {"arithmetic": arithmetic.split, "long_addition": long_addition.split}
