"""Attributes that are replaced for a while."""

from __future__ import annotations

from contextlib import suppress

import pytest

from rlframework.models.loading import replacing


class Library:
    option = 1

    def method(self) -> str:
        return "own"


def test_attributes_are_restored_also_after_an_error():
    library = Library()
    with suppress(ZeroDivisionError), replacing(Library, option=2), replacing(library, method=lambda: "other"):
        assert (library.option, library.method()) == (2, "other")
        raise ZeroDivisionError
    assert (library.option, library.method(), vars(library)) == (1, "own", {})


def test_an_attribute_that_the_library_no_longer_has_is_an_error():
    with pytest.raises(AttributeError, match="renamed"), replacing(Library, option=2, renamed=3):
        pass
    assert Library.option == 1
