"""Downloads that continue after an interruption, are checked by md5, and get their name only when whole."""

import hashlib
import http.client
import shutil
import sys
import urllib.error
import urllib.request
from pathlib import Path

from inloop_lab.data.images import DataError

_BLOCK = 1 << 20


def download(url: str, target: Path, md5: str) -> Path:
    """Fetch ``url`` to ``target``; continues an interrupted attempt.

    Raises:
        DataError: If the download fails or has a wrong checksum. A whole file with a wrong checksum is removed; an incomplete one
            stays, to be continued.
    """
    if target.is_file() and _md5(target) == md5:
        return target
    part = target.with_name(target.name + ".part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _fetch(url, part)
    except (urllib.error.URLError, http.client.HTTPException, OSError) as error:
        raise DataError(
            f"{url} could not be downloaded ({error}). Fix: the same command continues the download; or put the "
            f"files into {target.parent} yourself, or name the folder that has them with INLOOP_DATA."
        ) from None
    found = _md5(part)
    if found != md5:
        part.unlink()
        raise DataError(f"{url} has the md5 {found}; it should be {md5}. The download was removed; try again.")
    part.replace(target)
    return target


def _fetch(url: str, part: Path) -> None:
    have = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(request, timeout=60)
    except urllib.error.HTTPError as error:
        if error.code == 416:  # nothing is missing
            return
        raise
    with response:
        if have and response.status != 206:  # the server sends the whole again
            have = 0
        total = have + int(response.headers.get("Content-Length") or 0)
        with part.open("ab" if have else "wb") as file:
            while block := response.read(_BLOCK):
                file.write(block)
                have += len(block)
                _show(url, have, total)
    if have < total:
        raise OSError(f"the connection ended after {have} of {total} bytes")


def _show(url: str, have: int, total: int) -> None:
    if sys.stderr.isatty():
        share = have / total if total else 0.0
        width = max(10, min(40, shutil.get_terminal_size().columns - 50))
        bar = "#" * int(share * width)
        end = "\n" if total and have >= total else ""
        sys.stderr.write(f"\r{url.rpartition('/')[2]} [{bar:<{width}}] {have / 1e6:.0f} of {total / 1e6:.0f} MB{end}")
        sys.stderr.flush()


def _md5(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest() if sys.version_info >= (3, 11) else _md5_by_block(path)


def _md5_by_block(path: Path) -> str:
    digest = hashlib.md5(usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
