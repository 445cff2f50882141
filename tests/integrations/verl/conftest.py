"""The fixture `theirs`: a namespace with verl's functions and `config`, ours or the package's."""

from tests.integrations.compared import each
from tests.integrations.verl.cases import IMPLEMENTATIONS

theirs = each(IMPLEMENTATIONS)
