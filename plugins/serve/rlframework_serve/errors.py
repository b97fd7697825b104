"""Errors that a client of the endpoint gets, in OpenAI's form."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """A request was rejected with the HTTP status `status`; the text says what was given and what is allowed."""

    def __init__(self, message: str, *, status: int = 400, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.code = status, code

    def body(self) -> dict[str, Any]:
        """Return the error as OpenAI's API does."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        return {"error": {"message": str(self), "type": kind, "param": None, "code": self.code}}


def unauthorized() -> ApiError:
    """Return the error of a token that belongs to no open session. It says nothing else."""
    return ApiError("invalid bearer token", status=401, code="invalid_api_key")
