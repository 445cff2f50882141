from tests.ops.tensor_cores import *  # noqa: F403
