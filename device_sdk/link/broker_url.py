"""Where the broker is and how to prove who we are to it."""

from __future__ import annotations

import os
import re
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from urllib.parse import unquote, urlsplit

_PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_EXAMPLE = (
    "expected mqtt://host, mqtts://host:8883, mqtts://user:password@host:8883, ws://host:9001/mqtt "
    "or wss://host/mqtt"
)
_USUAL_PATH = "/mqtt"
# Of what stands in the first lines of an HTTP request: no space and no line's end.
_VISIBLE = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class BrokerUrl:
    """A parsed broker address. ``repr`` leaves the password out, and a path, which may hold one.

    ``path``: of a WebSocket, with its query; None for MQTT on the bare connection.
    """

    host: str
    port: int
    tls: bool
    user: str | None = None
    password: str | None = field(default=None, repr=False)
    path: str | None = field(default=None, repr=False)

    @property
    def scheme(self) -> str:
        """``mqtt``, ``mqtts``, ``ws`` or ``wss``."""
        return ("mqtt" if self.path is None else "ws") + ("s" if self.tls else "")

    @property
    def authority(self) -> str:
        """``host:port``, an IPv6 address in brackets."""
        return authority(self.host, self.port)

    def at(self, host: str, port: int | None) -> BrokerUrl:
        """The same way to another broker; ``port``: None for the same."""
        return replace(self, host=host, port=self.port if port is None else port)

    def __str__(self) -> str:
        """The address without user, password and query, fit for a log."""
        return f"{self.scheme}://{self.authority}{(self.path or '').partition('?')[0]}"


def authority(host: str, port: int) -> str:
    """``host:port``, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def parse_broker_url(text: str) -> BrokerUrl:
    """Parse ``mqtt://`` (port 1883), ``mqtts://`` (TLS, port 8883), ``ws://`` (WebSocket, port 80)
    or ``wss://`` (with TLS, port 443); a WebSocket's path is ``/mqtt`` where none is given.

    User and password are percent-decoded; an IPv6 address stands in brackets. Raises ValueError,
    which never quotes the text: it may hold a password.
    """
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError(f"the broker URL cannot be parsed; {_EXAMPLE}") from None
    if parts.scheme not in _PORTS:
        raise ValueError(f"a broker URL starts with mqtt://, mqtts://, ws:// or wss://; {_EXAMPLE}")
    if not parts.hostname:
        raise ValueError(f"the broker URL names no host; {_EXAMPLE}")
    if port == 0:
        raise ValueError(f"port 0 is not a port; {_EXAMPLE}")
    path = None
    if parts.scheme in ("ws", "wss"):
        path = (parts.path or _USUAL_PATH) + (f"?{parts.query}" if parts.query else "")
        if parts.fragment or not _VISIBLE.fullmatch(path):
            raise ValueError(
                "a WebSocket's path is of visible ASCII characters, others as %XX, and has no "
                f"#fragment; {_EXAMPLE}"
            )
        if not _VISIBLE.fullmatch(parts.hostname):
            raise ValueError(
                f"a WebSocket's host is of visible ASCII characters, others as xn--...; {_EXAMPLE}"
            )
    elif parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"a broker URL ends after host and port, but for ws:// and wss://; {_EXAMPLE}"
        )
    if parts.password is not None and not parts.username:
        raise ValueError(f"the broker URL has a password but no user; {_EXAMPLE}")
    return BrokerUrl(
        host=parts.hostname,
        port=_PORTS[parts.scheme] if port is None else port,
        tls=parts.scheme in ("mqtts", "wss"),
        user=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password is not None else None,
        path=path,
    )


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files for TLS. Without ``ca_file`` the system's authorities are trusted.

    Paths may be strings and may begin with ``~``; they are kept as paths. Raises ValueError when a
    key is given without a certificate.
    """

    ca_file: str | os.PathLike[str] | None = None
    certificate_file: str | os.PathLike[str] | None = None
    key_file: str | os.PathLike[str] | None = None
    """Private key of the client certificate; None when it stands in ``certificate_file``."""

    def __post_init__(self) -> None:
        for name in ("ca_file", "certificate_file", "key_file"):
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, Path(given).expanduser())
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("key_file is given without certificate_file; give both or neither")

    def context(self) -> ssl.SSLContext:
        """A client context that verifies the chain and the host's name, TLS 1.2 or later.

        Raises ValueError when a file is missing or is not the PEM it should be.
        """
        try:
            context = ssl.create_default_context(
                cafile=None if self.ca_file is None else str(self.ca_file)
            )
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file)
        except (OSError, ssl.SSLError) as error:
            given = [str(f) for f in (self.ca_file, self.certificate_file, self.key_file) if f]
            raise ValueError(f"cannot use the TLS files {', '.join(given)}: {error}") from error
        return context
