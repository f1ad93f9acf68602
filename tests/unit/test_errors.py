"""The error family: its tree, its documentation, and that every error survives pickling."""

from __future__ import annotations

import copy
import inspect
import pickle
import re

import pytest

from distckpt import errors
from distckpt.errors import (
    CheckpointError,
    CommitError,
    ConfigError,
    IntegrityError,
    MissingRanks,
    StagingError,
    WorkerDied,
    WriteError,
)

PARENTS: dict[type[Exception], tuple[type[Exception], ...]] = {
    CheckpointError: (Exception,),
    ConfigError: (CheckpointError, ValueError),
    StagingError: (CheckpointError,),
    WriteError: (CheckpointError,),
    WorkerDied: (WriteError,),
    CommitError: (CheckpointError,),
    MissingRanks: (CommitError,),
    IntegrityError: (CheckpointError,),
    errors.DistckptWarning: (UserWarning,),
}
FAMILY: list[type[CheckpointError]] = [kind for kind in PARENTS if issubclass(kind, CheckpointError)]


def attributes(kind: type[CheckpointError]) -> list[str]:
    return [name for name in inspect.signature(kind).parameters if name != "message"]


def test_tree_is_complete() -> None:
    found = {value for value in vars(errors).values() if isinstance(value, type)}
    assert found == set(PARENTS)
    assert {kind: kind.__bases__ for kind in found} == PARENTS
    assert sorted(errors.__all__) == sorted(kind.__name__ for kind in found)


@pytest.mark.parametrize("kind", FAMILY)
def test_never_an_operating_system_error(kind: type[CheckpointError]) -> None:
    assert not issubclass(kind, (OSError, TimeoutError))


@pytest.mark.parametrize("kind", PARENTS)
def test_docstring_names_class_and_attributes(kind: type[Exception]) -> None:
    assert errors.__doc__ is not None
    line = re.search(rf"^ +{kind.__name__}\b(.*)$", errors.__doc__, re.MULTILINE)
    assert line, f"{kind.__name__} is missing from the tree in errors.py"
    own = set(attributes(kind)) - set(attributes(kind.__bases__[0])) if kind in FAMILY[1:] else set()
    for name in own:
        assert name in line[1]


@pytest.mark.parametrize("kind", FAMILY)
def test_attributes_are_keyword_only_with_default_none(kind: type[CheckpointError]) -> None:
    parameters = inspect.signature(kind).parameters
    assert parameters["message"].default == ""
    for name in attributes(kind):
        assert parameters[name].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[name].default is None
        assert getattr(kind(), name) is None


@pytest.mark.parametrize("protocol", range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("kind", FAMILY)
def test_pickle_keeps_message_and_attributes(kind: type[CheckpointError], protocol: int) -> None:
    values = {name: number for number, name in enumerate(attributes(kind), start=7)}
    error = kind("disk full", **values)
    for found in (pickle.loads(pickle.dumps(error, protocol)), copy.copy(error), copy.deepcopy(error)):
        assert type(found) is kind
        assert str(found) == "disk full"
        assert {name: getattr(found, name) for name in values} == values


def test_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="no such"):
        raise ConfigError("no such setting")
