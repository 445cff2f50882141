from tests.ops.gloo_ranks import on_ranks  # noqa: F401
