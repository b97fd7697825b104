"""Images of rows at addresses on the network, which are read only with `environment.images.allow_addresses`."""

from __future__ import annotations

import time
import urllib.request
from http.client import HTTPException
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit

from rlframework.base.errors import ImageError
from rlframework.base.secrets import hide_in_text

TIMEOUT = 20.0
"""Seconds that an attempt to read an address may take."""

MAX_BYTES = 64 * 2**20
"""Most bytes of an image at an address."""

_ATTEMPTS = 2
_PIECE = 1 << 16


class ImageAddresses:
    """Reads images at http and https addresses, each once: what was read, or why it was not, is kept in memory.

    Redirections are followed to such addresses only. Whether an address is of a private network is not checked.
    """

    def __init__(self) -> None:
        self._known: dict[str, bytes | str] = {}

    def read(self, address: str, where: str) -> bytes:
        """Return what is at `address`, in any format. Raises an `ImageError` that begins with `where` if that fails."""
        if address not in self._known:
            self._known[address] = _read(address)
        found = self._known[address]
        if isinstance(found, str):
            raise ImageError(f"{where}: the image cannot be read: {found}")
        return found


def _read(address: str) -> bytes | str:
    """Return what is at `address`, or why it cannot be read. What may pass, such as a timeout, is tried again once."""
    why = ""
    for _ in range(_ATTEMPTS):
        try:
            return _attempt(address)
        except HTTPError as error:
            with error:
                why = f"the server answers {error.code} {error.reason}"
            if error.code < 500 and error.code != 429:
                break
        except (OSError, HTTPException, ValueError) as error:
            why = str(error.reason if isinstance(error, URLError) else error) or type(error).__name__
            if isinstance(error, (_TooLarge, ValueError)):
                break
    return hide_in_text(why)


def _attempt(address: str) -> bytes:
    if "@" in urlsplit(address).netloc:  # `urllib` would take the password for a port, and print it
        raise ValueError("addresses with a user name or password are not supported")
    opener, deadline = urllib.request.OpenerDirector(), time.monotonic() + TIMEOUT
    for handler in _HANDLERS:  # those of files and FTP are left out, so that no redirection leads there
        opener.add_handler(handler())
    request = urllib.request.Request(address, headers={"User-Agent": "rlframework", "Accept": "image/*"})
    pieces, size = list[bytes](), 0
    with opener.open(request, timeout=TIMEOUT) as response:
        while piece := response.read1(_PIECE):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BYTES:
                raise _TooLarge(f"it has more than {MAX_BYTES:,} bytes")
            if time.monotonic() > deadline:
                raise TimeoutError(f"it takes more than {TIMEOUT:g} s")
        if response.length:
            raise OSError(f"the connection ended {response.length:,} bytes before the end")
    return b"".join(pieces)


class _TooLarge(OSError):
    """More bytes than allowed."""


_HANDLERS = (
    urllib.request.ProxyHandler,
    urllib.request.UnknownHandler,
    urllib.request.HTTPHandler,
    urllib.request.HTTPSHandler,
    urllib.request.HTTPDefaultErrorHandler,
    urllib.request.HTTPRedirectHandler,
    urllib.request.HTTPErrorProcessor,
)
