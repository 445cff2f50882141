import pytest

from tests.integrations.verl.cases import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def theirs(request):
    """A namespace with verl's functions and `config`: our transcription, or the package."""
    return IMPLEMENTATIONS[request.param]
