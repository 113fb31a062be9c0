"""Requests to an object store: they can be interrupted, are repeated, and their errors have names.

The library repeats a request that was refused or not answered. It does not repeat one whose answer
breaks off, or whose refusal depends on other writers. That is done here.
"""

from __future__ import annotations

import errno
import re
import threading
import time
from collections.abc import Callable
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
    """Requests by way of the library `obstore`; any thread may make them."""

    def __init__(self, obstore: Any, url: str, retry_s: float) -> None:
        self._base_error: type[Exception] = obstore.exceptions.BaseError
        self._url = url
        self._retry_s = retry_s

    def call(
        self, name: str, doing: str, request: Callable[[], _T], *, repeatable: bool = True
    ) -> _T:
        """Make a request, and repeat it while the server cannot answer.

        Errors of the library become a `TierError`: "cannot", what it is `doing`, and the reason.
        Those of an iterator of blocks are raised as they are.
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
            named = _named(error, f"{self._url}{'/' if name else ''}{name}", doing)
            left_s = until_s - time.monotonic()
            # A single attempt may have taken longer than all of them may.
            is_due = left_s > 0 or (is_first and not _REPEATED.search(str(error)))
            # The library's error may contain secrets, and must not go along with ours.
            del error
            if not (
                repeatable and self._retry_s and is_due and isinstance(named, TierUnavailableError)
            ):
                raise named
            time.sleep(min(pause_s, max(left_s, _FIRST_PAUSE_S)))
            pause_s, is_first = min(2 * pause_s, _LONGEST_PAUSE_S), False


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
"""Found in errors of requests that the library has repeated by itself before it gave up."""

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


_LATER = "repeat this later, and it goes on from where it was"

_ERROR_OF_KIND: Final[dict[str, tuple[type[TierError], int]]] = {
    "bucket": (TierNotFoundError, errno.ENOENT),
    "missing": (TierNotFoundError, errno.ENOENT),
    "expired": (TierAccessError, errno.EACCES),
    "clock": (TierAccessError, errno.EACCES),
    "none": (TierAccessError, errno.EACCES),
    "refused": (TierAccessError, errno.EACCES),
    "region": (TierError, errno.EINVAL),
    "full": (TierError, errno.ENOSPC),
    "conflict": (TierUnavailableError, errno.EAGAIN),
    "foreign": (TierError, errno.EIO),
    "panic": (TierError, errno.EIO),
    "unavailable": (TierUnavailableError, errno.EAGAIN),
}

_REASON_OF_KIND: Final = {
    "bucket": "this bucket does not exist; make it first, or correct the URL",
    "missing": "there is no such object",
    "expired": "the credentials have expired; renew them and repeat this",
    "clock": "this machine's clock differs from the server's; set it",
    "none": "there are no credentials in the environment; set AWS_ACCESS_KEY_ID and "
    "AWS_SECRET_ACCESS_KEY, or those of the service that you use",
    "refused": "the credentials in the environment are wrong, or do not allow this",
    "region": "this bucket is in another region, or at another endpoint; set AWS_REGION or "
    "AWS_ENDPOINT_URL",
    "full": "the tier is full, or its quota is used up; make room there and repeat this",
    "conflict": "others were changing the same object until the attempts were given up; repeat "
    "this later",
    "foreign": "the answer is none of this service: is it the page of a proxy or of a login, or "
    "the wrong endpoint?",
    "panic": "obstore has failed with PanicException; check the variables of the environment, such "
    "as AWS_ENDPOINT_URL, and report this if they are right",
    "unavailable": "the server does not answer, or the connection broke, until the attempts were "
    f"given up; {_LATER}",
}


def is_conflict(error: BaseException) -> bool:
    """Return whether a conditional write was refused because another one was under way."""
    return _KIND_OF_CODE.get(_first(_CODE, str(error))) == "conflict"


def _named(error: BaseException, url: str, doing: str) -> TierError:
    """Return the error to raise for one of the library."""
    text = str(error)
    status, code = _first(_STATUS, text), _first(_CODE, text)
    said = " ".join(part for part in (f"status {status}" if status else "", code) if part)
    heard = f"cannot {doing}: the server answered {said}" if said else f"cannot {doing}"
    if status == "416":
        return TierError(errno.ERANGE, f"{heard}: it is shorter", url)
    kind = _kind(error, text, status, code)
    if kind in _NOT_REACHED.values():
        return TierUnavailableError(errno.EAGAIN, f"{heard}: {kind}", url)
    if kind == "unavailable" and said:
        reason = f"{heard}, or nothing, until the attempts were given up; {_LATER}"
        return TierUnavailableError(errno.EAGAIN, reason, url)
    if kind == "unknown":
        return TierError(errno.EIO, f"{heard} ({type(error).__name__})", url)
    as_error, number = _ERROR_OF_KIND[kind]
    return as_error(number, f"{heard}: {_REASON_OF_KIND[kind]}", url)


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
