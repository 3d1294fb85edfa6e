"""The way to a broker: where it is, and how to prove who we are to it."""

from __future__ import annotations

import json
import os
import re
import ssl
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

_PORTS = {"mqtt": 1883, "mqtts": 8883, "ws": 80, "wss": 443}
_EXAMPLE = (
    "expected mqtt://host, mqtts://host:8883, mqtts://user:password@host:8883, ws://host:9001/mqtt "
    "or wss://host/mqtt"
)
_USUAL_PATH = "/mqtt"
# Of what stands in the first lines of an HTTP request: no space and no line's end.
_VISIBLE = re.compile(r"[!-~]+")
_MOST_PREFIX_BYTES = 64
_MOST_PASSWORD_BYTES = 65_535
_TLS_FILES = ("ca_file", "certificate_file", "key_file")
WAY_PARTS = ("user", "password_file", *_TLS_FILES, "client_id_prefix")
"""What :meth:`BrokerWay.changed` takes beside a URL, and commands take as options."""


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

    @property
    def address(self) -> str:
        """The whole address, without user and password."""
        return f"{self.scheme}://{self.authority}{self.path or ''}"

    @property
    def text(self) -> str:
        """What :func:`parse_broker_url` reads as this."""
        if self.user is None:
            return self.address
        login = quote(self.user, safe="")
        if self.password is not None:
            login += f":{quote(self.password, safe='')}"
        return self.address.replace("://", f"://{login}@", 1)

    @property
    def has_query(self) -> bool:
        """Whether a WebSocket's path has one, which may be a password."""
        return "?" in (self.path or "")

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


def printed_url(text: str) -> str:
    """``text`` as a log may have it, whether :func:`parse_broker_url` can read it or not."""
    try:
        return str(parse_broker_url(text))
    except ValueError:
        return "no broker URL"


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
        for name in _TLS_FILES:
            given = getattr(self, name)
            if given is not None:
                object.__setattr__(self, name, Path(given).expanduser())
        if self.key_file is not None and self.certificate_file is None:
            raise ValueError("key_file is given without certificate_file; give both or neither")

    def context(self) -> ssl.SSLContext:
        """A client context that verifies the chain and the host's name, TLS 1.2 or later.

        Raises ValueError when a file is missing or is not the PEM it should be. A key with a
        passphrase is none that can be used: nobody is there to be asked.
        """
        try:
            for file in (self.ca_file, self.certificate_file, self.key_file):
                if file is not None:
                    _require_file(Path(file))
            context = ssl.create_default_context(
                cafile=None if self.ca_file is None else str(self.ca_file)
            )
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.certificate_file is not None:
                context.load_cert_chain(self.certificate_file, self.key_file, password="")
        except (OSError, ssl.SSLError) as error:
            given = [str(f) for f in (self.ca_file, self.certificate_file, self.key_file) if f]
            raise ValueError(f"cannot use the TLS files {', '.join(given)}: {error}") from error
        return context


def _require_file(path: Path) -> None:
    """Raises OSError for a folder, and for a pipe: it would be read once, and waited for then."""
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is {'a folder' if path.is_dir() else 'no file'}")


@dataclass(frozen=True, slots=True)
class BrokerWay:
    """How a broker is reached, and as whom.

    It says where things stand, and holds none of them: certificates and the password are read from
    their files at each dial, so whatever renews a file need tell nobody.

    Attributes:
        url: where; with the user and, unless a file has it, the password.
        password_file: holds the password, in one line. It comes before one in the URL.
        tls: with ``mqtts://`` and ``wss://``; the system's authorities when None.
        client_id_prefix: what client ids begin with, where the broker asks for that: up to 64
            visible ASCII characters.

    Raises ValueError for parts that do not go together. Nothing is read before it is asked for.
    """

    url: BrokerUrl
    password_file: Path | None = None
    tls: TlsFiles | None = None
    client_id_prefix: str = ""

    @classmethod
    def parse(
        cls,
        url: str,
        *,
        user: str | None = None,
        password_file: str | os.PathLike[str] | None = None,
        tls: TlsFiles | None = None,
        client_id_prefix: str = "",
    ) -> BrokerWay:
        """From a URL as text, see :func:`parse_broker_url`. Raises ValueError."""
        parsed = parse_broker_url(url)
        if user is not None:
            if parsed.user is not None:
                raise ValueError("the broker URL names a user already: leave the other one out")
            parsed = replace(parsed, user=user)
        path = None if password_file is None else Path(password_file).expanduser().absolute()
        return cls(parsed, path, tls, client_id_prefix)

    def __post_init__(self) -> None:
        url = self.url
        if self.password_file is not None and url.user is None:
            raise ValueError("a password file is given without a user")
        if self.tls is not None and not url.tls:
            raise ValueError(
                f"TLS files are given, but the URL starts with {url.scheme}://; use {url.scheme}s://"
            )
        prefix = self.client_id_prefix
        if prefix and (not _VISIBLE.fullmatch(prefix) or len(prefix) > _MOST_PREFIX_BYTES):
            raise ValueError(
                f"the client id prefix {prefix!r} is none: up to {_MOST_PREFIX_BYTES} visible "
                "ASCII characters"
            )

    def at(self, url: BrokerUrl) -> BrokerWay:
        """The same files and client ids at another broker, over TLS or not as ``url`` says; the
        same user and password, unless it has its own."""
        tls = self.tls if url.tls else None
        if url.user not in (None, self.url.user) or url.password not in (None, self.url.password):
            return replace(self, url=url, password_file=None, tls=tls)
        same = replace(url, user=self.url.user, password=self.url.password)
        return replace(self, url=same, tls=tls)

    def changed(
        self,
        url: str = "",
        *,
        user: str | None = None,
        password_file: str | None = None,
        ca_file: str | None = None,
        certificate_file: str | None = None,
        key_file: str | None = None,
        client_id_prefix: str | None = None,
    ) -> BrokerWay:
        """What is given in the place of what there is; None leaves a part as it is, and an empty
        text takes it away. Paths are as seen from here. Raises ValueError for parts that do not go
        together."""
        way = self.at(parse_broker_url(url)) if url else self
        to = way.url
        if user is not None:
            to = replace(to, user=user or None, password=None)
        if password_file:
            to = replace(to, password=None)
        known, given = way.tls or TlsFiles(), (ca_file, certificate_file, key_file)
        kept = (known.ca_file, known.certificate_file, known.key_file)
        files = [old if new is None else new or None for old, new in zip(kept, given, strict=True)]
        password: str | Path | None = password_file
        if password is None and to.user is not None:
            password = way.password_file
        return BrokerWay.parse(
            to.text,
            password_file=password or None,
            tls=TlsFiles(*files) if any(files) and (to.tls or any(given)) else None,
            client_id_prefix=self.client_id_prefix
            if client_id_prefix is None
            else client_id_prefix,
        )

    @property
    def text(self) -> str:
        """What :meth:`from_text` reads as this, on the same machine: JSON, with a password only
        where the URL has one."""
        tls = self.tls or TlsFiles()
        files = {name: getattr(tls, name) for name in _TLS_FILES}
        files["password_file"] = self.password_file
        paths = {name: str(Path(file).absolute()) for name, file in files.items() if file}
        return json.dumps(
            {"url": self.url.text, "client_id_prefix": self.client_id_prefix, **paths}
        )

    @classmethod
    def from_text(cls, text: str) -> BrokerWay:
        """The inverse of :attr:`text`. Raises ValueError."""
        values: dict[str, Any] = json.loads(text)
        files = {name: values.pop(name) for name in _TLS_FILES if name in values}
        return cls.parse(values.pop("url"), tls=TlsFiles(**files) if files else None, **values)

    def password(self) -> str | None:
        """The one of today. Raises ValueError where its file cannot be read, unless the URL has one
        (as for a worker on another machine, whose coordinator read it)."""
        if self.password_file is None:
            return self.url.password
        try:
            _require_file(self.password_file)
            with self.password_file.open(encoding="utf-8") as file:
                password = file.read(_MOST_PASSWORD_BYTES).strip("\r\n")
            if not password:
                raise OSError("it is empty")
        except (OSError, UnicodeDecodeError) as error:
            if self.url.password is not None:
                return self.url.password
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"the password file {self.password_file}: {why}") from None
        return password

    def context(self) -> ssl.SSLContext | None:
        """With the certificates of today; None where there is no TLS. Raises ValueError."""
        return (self.tls or TlsFiles()).context() if self.url.tls else None

    def read(self) -> BrokerWay:
        """With today's password in the URL, for a machine that may lack its file. Raises ValueError
        where a file cannot be used."""
        self.context()
        return replace(self, url=replace(self.url, password=self.password()))

    def __str__(self) -> str:
        return str(self.url)
