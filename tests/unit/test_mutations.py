"""The list of changes by which the tests are measured fits the package: a room that is rebuilt brings its own along."""

from __future__ import annotations

from pathlib import Path

import pytest

import airflow_provider_jetstream
from tools.mutations.__main__ import Mutation, mutations

_PACKAGE = Path(airflow_provider_jetstream.__file__).parent


@pytest.mark.parametrize("mutation", mutations(), ids=lambda mutation: mutation.name)
def test_a_mutation_changes_the_package(mutation: Mutation) -> None:
    changed = mutation.apply((_PACKAGE / mutation.file).read_text())
    compile(changed, mutation.file, "exec")
    assert mutation.tests
    assert [test for test in mutation.tests if not (_PACKAGE.parent / test).exists()] == []
