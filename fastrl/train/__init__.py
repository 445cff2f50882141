"""Training loops on the public functions: `fastrl.train.grpo` and `fastrl.train.ppo`.

Both read from top to bottom. Only they need the ``train`` extra.
"""

from importlib.util import find_spec

for _package in ("transformers", "tokenizers", "tqdm", "filelock", "tyro", "matplotlib", "jinja2"):
    if find_spec(_package) is None:
        raise ModuleNotFoundError(
            f"fastrl.train needs {_package}; install it with: pip install 'fastrl-kernels[train]'",
            name=_package,
        )
