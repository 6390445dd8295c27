"""The config.json of a model on the hub: in the cache that Hugging Face's programs fill, or from the hub's server.

``HF_HUB_CACHE``, ``HF_HOME``, ``HF_ENDPOINT``, ``HF_HUB_OFFLINE`` and ``HF_TOKEN`` mean what they mean to
huggingface_hub.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rooftop.core.errors import RooftopError
from rooftop.core.files import parse_json, read_text

if TYPE_CHECKING:
    from http.client import HTTPResponse

    from rooftop.models.hub.names import Repository

_ENDPOINT = "https://huggingface.co"
#: Seconds to wait for an answer, and for all of it.
_TIMEOUT_S, _ALL_S = 4.0, 10.0
_MOST_BYTES = 2**24
_CHUNK = 2**16
_OFF = ("", "0", "false", "no", "off")


def cached_config(repository: Repository) -> Path | None:
    """The path of the repository's config.json in the local cache: of its revision, or else of the newest snapshot."""
    folder = _cache() / f"models--{repository.id.replace('/', '--')}"
    reference = folder / "refs" / repository.revision
    try:
        commit = read_text(reference).strip() if reference.is_file() else repository.revision
        if "/" not in commit and (path := folder / "snapshots" / commit / "config.json").is_file():
            return path
        if repository.revision != "main":
            return None
        snapshots = [path for path in folder.glob("snapshots/*/config.json") if path.is_file()]
        return max(snapshots, key=lambda path: path.parent.stat().st_mtime, default=None)
    except (OSError, ValueError):
        return None


def endpoint() -> str:
    """The hub's address. Raises RooftopError if ``HF_ENDPOINT`` is none."""
    address = os.environ.get("HF_ENDPOINT", "").rstrip("/") or _ENDPOINT
    if not address.startswith(("http://", "https://")):
        raise RooftopError("HF_ENDPOINT", address, "an address, such as https://huggingface.co")
    return address


def config_address(repository: Repository) -> str:
    """The address of the repository's config.json. Raises RooftopError for an ``HF_ENDPOINT`` that is none."""
    return f"{endpoint()}/{repository.id}/resolve/{repository.revision}/config.json"


def fetch_config(repository: Repository, otherwise: str) -> Any:
    """The parsed config.json of a repository, from the hub.

    Raises RooftopError, saying what else is accepted (``otherwise``), if the hub does not answer or does not have it.
    """
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError
    from urllib.request import Request, urlopen

    address = config_address(repository)
    if os.environ.get("HF_HUB_OFFLINE", "").lower() not in _OFF:
        raise _refused(repository, f"not in {_cache()}, and HF_HUB_OFFLINE is set", otherwise)
    request = Request(address, headers={"User-Agent": "rooftop"})
    if token := os.environ.get("HF_TOKEN"):
        # Not sent on to where the hub redirects.
        request.add_unredirected_header("Authorization", f"Bearer {token}")
    try:
        with urlopen(request, timeout=_TIMEOUT_S) as response:
            return parse_json(_content(response))
    except HTTPError as error:
        error.close()
        if error.code in (401, 403):
            reason = f"{endpoint()} shows it to those with access alone ({error.code}): set HF_TOKEN, or mend the name"
        else:
            reason = f"{endpoint()} has no config.json of it ({error.code})"
        raise _refused(repository, reason, otherwise) from None
    except (URLError, TimeoutError, ConnectionError, HTTPException, OSError) as error:
        cause = getattr(error, "reason", error)
        words = getattr(cause, "strerror", None) or str(cause) or type(cause).__name__
        raise _refused(repository, f"{endpoint()} did not answer ({words})", otherwise) from None
    except (ValueError, RecursionError) as error:
        raise _refused(repository, f"{address} is no JSON ({error})", otherwise) from None


def _content(response: HTTPResponse) -> bytes:
    """All of an answer. Raises TimeoutError for one that takes too long, and ValueError for one that is too long."""
    end, content = time.monotonic() + _ALL_S, b""
    while chunk := response.read1(_CHUNK):
        content += chunk
        if time.monotonic() > end:
            raise TimeoutError(f"not all of it in {_ALL_S:g} s")
        if len(content) > _MOST_BYTES:
            raise ValueError(f"more than {_MOST_BYTES:,} bytes")
    return content


def _refused(repository: Repository, reason: str, otherwise: str) -> RooftopError:
    return RooftopError("model", repository.id, f"{otherwise}; {reason}")


def _cache() -> Path:
    if cache := os.environ.get("HF_HUB_CACHE"):
        return Path(cache).expanduser()
    if home := os.environ.get("HF_HOME"):
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "huggingface" / "hub"
