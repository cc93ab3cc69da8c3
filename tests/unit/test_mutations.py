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


def test_the_list_has_sixty_names() -> None:
    assert len({mutation.name for mutation in mutations()}) == 60


def test_a_text_that_occurs_no_more_is_named() -> None:
    mutation = Mutation("a", "none", "errors.py", "x = 1", "x = 2", ())
    with pytest.raises(ValueError, match=r"a: expected its text once in errors.py, found it 0 times"):
        mutation.apply("y = 1")
