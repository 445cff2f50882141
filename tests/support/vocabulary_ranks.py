from tests.ops.vocabulary_ranks import *  # noqa: F403
