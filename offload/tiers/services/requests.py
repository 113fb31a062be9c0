"""Requests to an object store: they can be interrupted, are repeated, and their errors have names.

The library repeats a request that was refused or not answered. It does not repeat one whose answer
breaks off, or whose refusal depends on other writers. That is done here.

New memory for every request costs more processor time than the transfer itself: the kernel hands it
out page by page, each filled with zeros.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import re
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from gds.waiting import Pending, start
from offload.errors import (
    OffloadError,
    TierAccessError,
    TierError,
    TierNotFoundError,
    TierUnavailableError,
)

_T = TypeVar("_T")

_FIRST_PAUSE_S = 0.1
_LONGEST_PAUSE_S = 15.0


class Requests:
    """Requests by way of the library `obstore`; any thread may make them.

    Args:
        obstore: The library.
        url: URL of the tier, for messages.
        retry_s: Seconds for which a request that failed is tried again.
    """

    def __init__(self, obstore: Any, url: str, retry_s: float) -> None:
        self._base_error: type[Exception] = obstore.exceptions.BaseError
        self._url = url
        self._retry_s = retry_s

    def call(
        self, name: str, doing: str, request: Callable[[], _T], *, repeatable: bool = True
    ) -> _T:
        """Make a request, and repeat it while the server cannot answer.

        Args:
            name: Name of the object, or of a folder of objects.
            doing: What the request does, in words that follow "cannot".
            request: Function that calls the library.
            repeatable: Whether the function may be called again.

        Raises:
            TierError: The request has failed. Errors of an iterator of blocks are raised as they
                are.
        """
        until_s, pause_s, is_first = time.monotonic() + self._retry_s, _FIRST_PAUSE_S, True
        while True:
            error: BaseException
            try:
                return interruptible(request)
            except OffloadError:  # of an iterator of blocks
                raise
            except OSError as caught:
                if not isinstance(caught, FileNotFoundError) or caught.filename is not None:
                    raise  # of an iterator of blocks, as well
                error = caught
            except self._base_error as caught:
                error = caught
            except BaseException as caught:
                if not is_panic(caught):
                    raise
                error = caught
            named = self.named(error, name, doing)
            left_s = until_s - time.monotonic()
            # A single attempt may have taken longer than all of them may.
            is_due = left_s > 0 or (is_first and not was_repeated(error))
            # The library's error may contain secrets, and must not go along with ours.
            del error
            if not (
                repeatable and self._retry_s and is_due and isinstance(named, TierUnavailableError)
            ):
                raise named
            time.sleep(min(pause_s, max(left_s, _FIRST_PAUSE_S)))
            pause_s, is_first = min(2 * pause_s, _LONGEST_PAUSE_S), False

    def named(self, error: BaseException, name: str, doing: str) -> TierError:
        """Return the error to raise for one of the library."""
        return named_error(error, f"{self._url}{'/' if name else ''}{name}", doing)


def interruptible(request: Callable[[], _T]) -> _T:
    """Call a function that may wait for long, so that an interrupt ends the waiting.

    Only the main thread is interrupted, and not while the library waits. So for the main thread
    another thread calls the function. It is left behind if the main thread is interrupted.
    """
    if threading.current_thread() is not threading.main_thread():
        return request()
    outcome: Pending[_T] = Pending()

    def run() -> None:
        """Call the function, and pass its outcome on."""
        try:
            value = request()
        except BaseException as error:  # noqa: BLE001  (raised by the waiting thread)
            outcome.set_exception(error)
        else:
            outcome.set_result(value)

    start(threading.Thread(target=run, name="offload tier request", daemon=True))
    return outcome.result()


def is_panic(error: BaseException) -> bool:
    """Return whether an error is a panic of the library, which is no `Exception`."""
    return type(error).__name__ == "PanicException"


class ReusedMemory:
    """Memory of requests that have ended, for the next ones; any thread may use it.

    At most as many blocks exist as are in use at a time. They are freed with this object.
    """

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []

    def take(self, nbytes: int) -> memoryview:
        """Return memory of some content.

        It is used again when the result, and everything that was made from it, is gone.

        Args:
            nbytes: Size in bytes, at least 1.
        """
        block = self._free.pop() if self._free else None
        if block is None or len(block) < nbytes:
            block = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
            with suppress(OSError):  # a kernel without huge pages
                block.madvise(mmap.MADV_HUGEPAGE)
        # A memoryview keeps what it was made from, and so do its slices.
        lent = (ctypes.c_ubyte * nbytes).from_buffer(block)
        weakref.finalize(lent, self._free.append, block).atexit = False
        return memoryview(lent).cast("B")


_STATUS = re.compile(r"status code: ([0-9]{3})")
_CODE = re.compile(r"<Code>([A-Za-z]{3,60})</Code>")

_NO_CREDENTIALS: Final = re.compile(
    r"169\.254\.169\.254|latest/api/token|latest/meta-data|instance metadata|metadata\.google|"
    r"InstanceCredential|imds",
    re.IGNORECASE,
)
"""Found in errors of clients that have no credentials and look for those of a cloud machine."""

_UNANSWERED: Final = re.compile(r"HTTP error|error sending request|[Tt]imed? ?out|[Cc]onnect|decod")
"""Found in errors of requests that got no answer, or one that broke off."""

_NOT_REACHED: Final = {
    "dns error|failed to lookup address": "the name of the server is not known here: check the "
    "endpoint, and this machine's network",
    "ConnectionRefused": "nothing answers at the address and port of the server: check the "
    "endpoint, and whether the server runs",
    "InvalidContentType|InvalidMessage|InvalidProtocol": "the server does not speak TLS there: "
    "check whether the endpoint begins with http:// instead of https://",
    "[Cc]ertificate|UnknownIssuer": "the server's certificate is not accepted: check the "
    "endpoint, or name its authority in ..._PROXY_CA_CERTIFICATE",
}
"""Why a server was not reached, by what is found in errors of the library."""

_NO_ANSWER_OF_A_SERVICE = re.compile(r"NotPartial|MissingEtag|InvalidListResponse")
"""Found in errors about answers that another program than the service has given."""

_REPEATED = re.compile(r"after [1-9][0-9]* retries")

_FULL_CODE = re.compile(r"Quota|StorageFull|InsufficientStorage|InsufficientCapacity")

_KIND_OF_CODE: Final = {
    "NoSuchBucket": "bucket",
    "PermanentRedirect": "region",
    "TemporaryRedirect": "region",
    "AuthorizationHeaderMalformed": "region",
    "ConditionalRequestConflict": "conflict",
    "OperationAborted": "conflict",
    "ContainerNotFound": "bucket",
    "ExpiredToken": "expired",
    "ExpiredTokenException": "expired",
    "TokenRefreshRequired": "expired",
    "RequestTimeTooSkewed": "clock",
    "InvalidAccessKeyId": "refused",
    "SignatureDoesNotMatch": "refused",
    "InvalidToken": "refused",
    "AccessDenied": "refused",
    "SlowDown": "unavailable",
    "ServiceUnavailable": "unavailable",
    "InternalError": "unavailable",
    "RequestTimeout": "unavailable",
}

_KIND_OF_STATUS: Final = {
    401: "refused",
    403: "refused",
    404: "missing",
    409: "conflict",
    429: "unavailable",
    507: "full",
}

_KIND_OF_CLASS: Final = {
    "FileNotFoundError": "missing",
    "NotFoundError": "missing",
    "PermissionDeniedError": "refused",
    "UnauthenticatedError": "refused",
}


def was_repeated(error: BaseException) -> bool:
    """Return whether the library has repeated the request by itself before it gave up."""
    return _REPEATED.search(str(error)) is not None


def is_conflict(error: BaseException) -> bool:
    """Return whether a conditional write was refused because another one was under way."""
    return _KIND_OF_CODE.get(_first(_CODE, str(error))) == "conflict"


def named_error(error: BaseException, url: str, doing: str) -> TierError:
    """Return the error to raise for one of the library."""
    text = str(error)
    status = _first(_STATUS, text)
    code = _first(_CODE, text)
    said = " ".join(part for part in (f"status {status}" if status else "", code) if part)
    heard = f"cannot {doing}: the server answered {said}" if said else f"cannot {doing}"
    kind = _kind(error, text, status, code)
    if status == "416":
        return TierError(errno.ERANGE, f"{heard}: it is shorter", url)
    if kind == "bucket":
        return TierNotFoundError(
            errno.ENOENT,
            f"{heard}: this bucket does not exist; make it first, or correct the URL",
            url,
        )
    if kind == "missing":
        return TierNotFoundError(errno.ENOENT, f"{heard}: there is no such object", url)
    if kind == "expired":
        return TierAccessError(
            errno.EACCES, f"{heard}: the credentials have expired; renew them and repeat this", url
        )
    if kind == "clock":
        return TierAccessError(
            errno.EACCES, f"{heard}: this machine's clock differs from the server's; set it", url
        )
    if kind == "none":
        return TierAccessError(
            errno.EACCES,
            f"{heard}: there are no credentials in the environment; set AWS_ACCESS_KEY_ID and "
            "AWS_SECRET_ACCESS_KEY, or those of the service that you use",
            url,
        )
    if kind == "refused":
        return TierAccessError(
            errno.EACCES,
            f"{heard}: the credentials in the environment are wrong, or do not allow this",
            url,
        )
    if kind == "region":
        return TierError(
            errno.EINVAL,
            f"{heard}: this bucket is in another region, or at another endpoint; set AWS_REGION "
            "or AWS_ENDPOINT_URL",
            url,
        )
    if kind == "full":
        return TierError(
            errno.ENOSPC,
            f"{heard}: the tier is full, or its quota is used up; make room there and repeat this",
            url,
        )
    if kind == "conflict":
        return TierUnavailableError(
            errno.EAGAIN,
            f"{heard}: others were changing the same object until the attempts were given up; "
            "repeat this later",
            url,
        )
    if kind == "foreign":
        return TierError(
            errno.EIO,
            f"{heard}: the answer is none of this service: is it the page of a proxy or of a "
            "login, or the wrong endpoint?",
            url,
        )
    if kind == "panic":
        return TierError(
            errno.EIO,
            f"{heard}: obstore has failed with {type(error).__name__}; check the variables of the "
            "environment, such as AWS_ENDPOINT_URL, and report this if they are right",
            url,
        )
    if kind in _NOT_REACHED.values():
        return TierUnavailableError(errno.EAGAIN, f"{heard}: {kind}", url)
    if kind == "unavailable":
        return TierUnavailableError(
            errno.EAGAIN,
            f"{heard}, or nothing, until the attempts were given up; repeat this later, and it "
            "goes on from where it was"
            if said
            else f"{heard}: the server does not answer, or the connection broke, until the "
            "attempts were given up; repeat this later, and it goes on from where it was",
            url,
        )
    return TierError(errno.EIO, f"{heard} ({type(error).__name__})", url)


def _kind(error: BaseException, text: str, status: str, code: str) -> str:
    if not isinstance(error, Exception):
        return "panic"
    if code in _KIND_OF_CODE:
        return _KIND_OF_CODE[code]
    if _FULL_CODE.search(code):
        return "full"
    if "redirect without LOCATION" in text:
        return "region"
    if _NO_ANSWER_OF_A_SERVICE.search(text):
        return "foreign"
    if _NO_CREDENTIALS.search(text.partition("<")[0]):  # a body may have anything in its numbers
        return "none"
    number = int(status or 0)
    if number in _KIND_OF_STATUS:
        return _KIND_OF_STATUS[number]
    if number >= 500:
        return "unavailable"
    named = _KIND_OF_CLASS.get(type(error).__name__)
    if named is not None:
        return named
    if number or not _UNANSWERED.search(text):
        return "unknown"
    found = (reason for key, reason in _NOT_REACHED.items() if re.search(key, text))
    return next(found, "unavailable")


def _first(pattern: re.Pattern[str], text: str) -> str:
    match = pattern.search(text)
    return match[1] if match else ""
