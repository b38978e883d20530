"""The arguments that all functions of jobs share, and those that open Parquet files, as a caller meets them."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from ags_fast import jobs, parquet
from ags_fast.jobs import Reach
from ags_fast.parquet.reading import Accepting, Opening, Reading

FUNCTIONS = [name for name in jobs.__all__ if inspect.isfunction(getattr(jobs, name))]
OWN_KMS = ("destroy_versions", "sweep")  # the KMS is positional, or optional


def positional(function: Any) -> list[str]:
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_signature_names_them(name: str) -> None:
    parameters = inspect.signature(getattr(jobs, name)).parameters
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())
    expected = Reach.__annotations__ if name != "destroy_versions" else ("key_store", "storage_options")
    assert parameters.keys() >= set(expected)
    for each in expected:
        assert parameters[each].kind is inspect.Parameter.KEYWORD_ONLY
        assert parameters[each].default is (
            inspect.Parameter.empty if name == "destroy_versions" and each == "kms" else None
        )


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_error_names_the_function_that_was_called(name: str) -> None:
    function = getattr(jobs, name)
    given: dict[str, Any] = dict.fromkeys(positional(function), "x")
    if name not in OWN_KMS:
        with pytest.raises(ValueError, match=r"^kms is not given, and .* has no profile 'default'"):
            function(**given)
        given["kms"] = {}
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'pins'"):
        function(**given, pins="1")


def test_help_says_where_they_are_described() -> None:
    assert "see `Reach`" in inspect.getdoc(jobs.compact)  # type: ignore[operator]
    assert Reach.__doc__ is not None
    assert all(f"{name}: " in Reach.__doc__ for name in Reach.__annotations__)


@pytest.mark.parametrize("name", ["decrypt_file", "reencrypt_file", "verify", "open_plain", "filesystem"])
def test_parquet_files_are_opened_by_the_same_arguments(name: str) -> None:
    function, shared = getattr(parquet, name), Accepting if name == "filesystem" else Opening
    parameters = inspect.signature(function).parameters
    assert all(each.kind is not each.VAR_KEYWORD for each in parameters.values())
    defaults = {each: getattr(Reading(), each) or None for each in shared.__annotations__}
    assert {each: parameters[each].default or None for each in defaults} == defaults
    assert f"see `{shared.__name__}`" in (inspect.getdoc(function) or "")
    with pytest.raises(TypeError, match=rf"^{name}\(\) got an unexpected keyword argument 'exact'"):
        function(**dict.fromkeys(positional(function)), exact=True)
    assert all(f"{each}: " in f"{Accepting.__doc__}{Opening.__doc__}" for each in defaults)
