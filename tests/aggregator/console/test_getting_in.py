"""Logging in: who may, how often, for how long; and who only says that he may."""

from __future__ import annotations

import json
import os
import stat
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from aggregator.console.gate import network_of
from aggregator.console.sessions import (
    IDLE_SECONDS,
    LONGEST_SECONDS,
    LoginLimits,
    TriedTooOften,
)
from aggregator.console.users import ConsoleUser, ConsoleUsers, Role, hashed
from aggregator.errors import AggregatorError
from aggregator.home import AggregatorHome
from aggregator.task.file import ConsoleSettings
from tests.fakes.consoles import ORIGIN, PASSWORD, InProcess
from tests.fakes.homes import command
from tests.fakes.waiting import PATIENCE_SECONDS, wait_until


def test_who_is_not_logged_in_sees_the_form_alone(console: InProcess) -> None:
    nobody = console.browser()
    for path in ("/", "/now", "/now?task=air"):
        answer = nobody.get(path)
        assert answer.status_code == 303 and answer.headers["location"].startswith("/login?to=%2F")
    for path in ("/events?page=now", "/alive"):
        assert nobody.get(path).status_code == 401
    assert nobody.get("/login").status_code == 200
    assert nobody.get("/nowhere").status_code == 404


def test_whoever_knows_a_password_gets_a_cookie_that_scripts_and_other_sites_do_not(
    console: InProcess,
) -> None:
    anna = console.browser()
    answer = anna.log_in("anna")
    assert answer.status_code == 303 and answer.headers["location"] == "/now"
    cookie = answer.headers["set-cookie"]
    assert "HttpOnly" in cookie and "SameSite=strict" in cookie and "Path=/" in cookie
    assert "anna, operator" in anna.get("/now").text
    assert anna.get("/login").status_code == 303


@pytest.mark.parametrize("password", ["", "correct horse batter", PASSWORD + " ", "x" * 5000])
@pytest.mark.parametrize("name", ["anna", "nobody", "", "anna\0", "ANNA"])
def test_a_wrong_password_and_an_unknown_name_are_told_the_same(
    console: InProcess, name: str, password: str
) -> None:
    answer = console.browser().log_in(name, password)
    assert answer.status_code == 403 and "No user has this name" in answer.text
    assert "set-cookie" not in answer.headers


def test_an_unknown_name_costs_as_much_as_a_known_one(console: InProcess) -> None:
    """One hash of the same parameters is computed, whoever asks."""
    console.browser().log_in("anna", "wrong")
    known = [*console.passwords.verified]
    console.browser().log_in("nobody", "wrong")
    unknown = console.passwords.verified[len(known) :]
    assert len(known) == len(unknown) == 1
    assert (
        known[0].rpartition("$")[0].rpartition("$")[0]
        == (unknown[0].rpartition("$")[0].rpartition("$")[0])
    )


def test_guessing_is_slowed_down_by_name_and_by_address_and_told_how_long(
    console: InProcess,
) -> None:
    guesser = console.browser("192.0.2.7")
    for _ in range(4):
        assert guesser.log_in("anna", "wrong").status_code == 403
    answer = guesser.log_in("anna", PASSWORD)  # not even the right one
    assert answer.status_code == 429 and answer.headers["retry-after"] == "1"
    assert "Try again in 1 s" in answer.text
    assert len(console.passwords.verified) == 4
    # From elsewhere the name waits, too, and from there all names do.
    assert console.browser("192.0.2.8").log_in("anna").status_code == 429
    assert guesser.log_in("vic").status_code == 429
    assert console.browser("192.0.2.8").log_in("vic").status_code == 303
    waited = []
    for _ in range(12):
        console.now_seconds += (seconds := _wait(console, guesser.log_in("anna", "wrong")))
        waited.append(seconds)
        assert guesser.log_in("anna", "wrong").status_code == 403
    assert waited == sorted(waited) and waited[-1] == 900
    console.now_seconds += 60
    assert console.browser("192.0.2.8").log_in("anna").status_code == 303, "nobody is locked out"


def _wait(console: InProcess, answer: object) -> float:
    return float(answer.headers["retry-after"])  # type: ignore[attr-defined]


def test_who_knows_one_password_does_not_guess_others_faster() -> None:
    limits = LoginLimits(lambda: 0.0)
    tried = 0
    with pytest.raises(TriedTooOften):
        for tried in range(50):
            limits.attempt(f"other-{tried}", "192.0.2.7")
            limits.attempt("own", "192.0.2.7")
            limits.succeeded("own", "192.0.2.7")
    assert tried < 5


def test_attempts_at_once_count_before_they_have_failed() -> None:
    limits = LoginLimits(lambda: 0.0)
    for _ in range(4):
        limits.attempt("anna", "192.0.2.7")
    with pytest.raises(TriedTooOften, match="try again in 1 s"):
        limits.attempt("anna", "192.0.2.7")


def test_what_is_known_of_attempts_is_bounded() -> None:
    limits = LoginLimits(lambda: 0.0)
    for number in range(6000):
        limits.attempt(f"n{number}" + "x" * 1000, f"192.0.{number % 256}.{number // 256}")
    assert len(limits._known) <= 4096 and max(len(name) for _, name in limits._known) <= 64


def test_a_session_is_new_with_each_login_whatever_cookie_was_brought(console: InProcess) -> None:
    """Session fixation: what somebody has planted is worth nothing."""
    victim = console.browser()
    victim.client.cookies.set("tessera", "planted" * 9)
    first = victim.log_in("anna").cookies["tessera"]
    assert first != "planted" * 9 and len(first) == 64
    attacker = console.browser()
    attacker.client.cookies.set("tessera", "planted" * 9)
    assert attacker.get("/now").status_code == 303
    second = victim.log_in("anna").cookies["tessera"]
    attacker.client.cookies.set("tessera", first)
    assert second != first and attacker.get("/now").status_code == 303, "the old one has ended"


def test_a_session_ends_idle_and_in_any_case(console: InProcess) -> None:
    anna = console.logged_in("anna")
    console.now_seconds += IDLE_SECONDS - 1
    assert anna.get("/now").status_code == 200
    console.now_seconds += IDLE_SECONDS
    assert anna.get("/now").status_code == 303
    anna = console.logged_in("anna")
    for _ in range(int(LONGEST_SECONDS / (IDLE_SECONDS - 1))):
        console.now_seconds += IDLE_SECONDS - 1
        assert anna.get("/now").status_code == 200
    console.now_seconds += IDLE_SECONDS - 1
    assert anna.get("/now").status_code == 303


def test_a_session_ends_by_logging_out_on_this_browser_alone(console: InProcess) -> None:
    anna, elsewhere = console.logged_in("anna"), console.logged_in("anna")
    stolen = console.browser()
    stolen.client.cookies = anna.client.cookies.__class__(anna.client.cookies)
    assert anna.post("/logout").status_code == 303
    assert stolen.get("/now").status_code == 303
    assert elsewhere.get("/now").status_code == 200


def test_another_password_and_a_removed_user_end_sessions_and_another_role_holds_at_once(
    console: InProcess, tmp_path: Path
) -> None:
    anna, vic = console.logged_in("anna"), console.logged_in("vic")
    file = tmp_path / "password"
    file.write_text("another long one\nsecond line\n")
    home = console.home
    assert command(home, "console", "user", "role", "vic", "--role", "operator") == 0
    assert "vic, operator" in vic.get("/now").text
    assert command(home, "console", "user", "password", "vic", "--password-file", str(file)) == 0
    assert vic.get("/now").status_code == 303
    assert console.browser().log_in("vic").status_code == 403
    assert console.browser().log_in("vic", "another long one").status_code == 303
    assert anna.get("/now").status_code == 200
    assert command(home, "console", "user", "remove", "anna") == 0
    assert anna.get("/now").status_code == 303


def test_only_hashes_are_kept(console: InProcess) -> None:
    token = console.logged_in("anna").client.cookies["tessera"]
    assert token not in repr(vars(console.console.sessions))
    said = console.home.console_file.read_text()
    assert PASSWORD not in said and "$argon2id$" in said
    assert stat.S_IMODE(console.home.console_file.stat().st_mode) == 0o600
    assert hashed(PASSWORD).startswith("$argon2id$v=19$m=65536,t=3,p=4$")


def test_users_are_added_listed_and_removed_by_the_command(
    console_home: AggregatorHome, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "password"
    file.write_text("a long password\n")
    for arguments, said in (
        (("add", "max", "--password-file", str(file)), "max may log in, as a viewer"),
        (("add", "eve", "--role", "operator", "--no-password"), "eve may log in, as an operator"),
        (("list",), "eve: operator, by a reverse proxy alone"),
        (("remove", "max"), "max cannot log in any more"),
    ):
        assert command(console_home, "console", "user", *arguments) == 0
        assert said in capsys.readouterr().out
    (tmp_path / "short").write_text("short\n")
    for arguments, said in (
        (("add", "anna", "--password-file", str(file)), "there is a user anna already"),
        (("add", "a b", "--no-password"), "is no user's name"),
        (("add", "max"), "name a --password-file"),
        (("add", "max", "--password-file", str(tmp_path / "short")), "10 to 1024 characters"),
        (("add", "max", "--password-file", str(tmp_path / "none")), "cannot be read"),
        (("password", "max", "--password-file", str(file)), "no user 'max'; there is anna"),
        (("role", "max"), "needs --role"),
        (("remove", "max"), "no user 'max'"),
        (("remove",), "all but list a NAME"),
        ((), "console user needs one of"),
    ):
        assert command(console_home, "console", "user", *arguments) == 1
        assert said in capsys.readouterr().err
    lines = console_home.audit_file.read_text().splitlines()
    assert [json.loads(each)["action"] for each in lines] == [
        "add console user",
        "add console user",
        "remove console user",
    ]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"version": 2, "users": []}', "\0" * 99])
def test_a_damaged_file_of_users_lets_nobody_in_and_is_told(
    console: InProcess, content: str
) -> None:
    anna = console.logged_in("anna")
    console.home.console_file.write_text(content)
    for answer in (anna.get("/now"), anna.get("/login"), console.browser().log_in("anna")):
        assert answer.status_code == 400 and "cannot be read" in answer.text
    with pytest.raises(AggregatorError, match="put a copy back"):
        ConsoleUsers(console.home.console_file).all()


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
        ("fe80::1%eth0", "fe80::"),
        ("", ""),
        ("a name", "a name"),
    ],
)
def test_who_has_an_address_has_its_network(address: str, network: str) -> None:
    assert network_of(address) == network


def test_a_network_of_many_addresses_guesses_no_more_often(console: InProcess) -> None:
    guesses = [
        console.browser(f"2001:db8::{number}").log_in(f"nobody{number}").status_code
        for number in range(6)
    ]
    assert guesses == [403] * 4 + [429] * 2
    assert console.logged_in("anna")


@pytest.mark.parametrize("kind", ["pipe", "folder", "huge"])
def test_what_is_no_file_of_users_holds_nobody_up_and_tells_strangers_no_path(
    console: InProcess, kind: str
) -> None:
    anna, path = console.logged_in("anna"), console.home.console_file
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 33)
    stranger = console.browser()
    for answer in (anna.get("/now"), stranger.get("/login"), stranger.log_in("anna")):
        assert answer.status_code == 400 and f"{path.name} cannot be read" in answer.text
        assert str(path.parent) not in answer.text


def test_with_nobody_to_log_in_the_page_says_how_to_add_somebody(console: InProcess) -> None:
    console.home.console_file.unlink()
    assert "console user add NAME" in console.browser().get("/login").text
    assert console.browser().log_in("anna").status_code == 403


@pytest.mark.parametrize(
    "to", ["https://evil.example/", "//evil.example", "/\\evil.example", "evil", "", "/a\r\nX: y"]
)
def test_a_login_leads_to_no_other_site(console: InProcess, to: str) -> None:
    answer = console.browser().log_in("anna", to=to)
    assert answer.status_code == 303 and answer.headers["location"] == "/"
    assert "x" not in answer.headers


# Behind a reverse proxy.

PROXIED = ConsoleSettings(
    "127.0.0.1:8443", trusted_proxy="192.0.2.0/28", proxy_user_header="X-Remote-User"
)
PROXY, STRANGER = "192.0.2.1", "192.0.2.99"


@pytest.fixture
def proxied(console_home: AggregatorHome) -> InProcess:
    ConsoleUsers(console_home.console_file).add(ConsoleUser("eve", Role.OPERATOR, None))
    return InProcess(console_home, PROXIED)


def test_a_proxys_word_is_believed(proxied: InProcess) -> None:
    proxy = proxied.browser(PROXY)
    assert "eve, operator" in proxy.get("/now", **{"X-Remote-User": "eve"}).text
    assert "vic, viewer" in proxy.get("/now", **{"x-remote-user": "vic"}).text
    assert proxy.get("/now").status_code == 303
    proxied.close()


@pytest.mark.parametrize("told", ["nobody", "", "eve,vic", "EVE"])
def test_somebody_whom_the_file_does_not_know_is_refused(proxied: InProcess, told: str) -> None:
    answer = proxied.browser(PROXY).get("/now", **{"X-Remote-User": told})
    assert answer.status_code == 403 and "is no user of this console" in answer.text
    proxied.close()


def test_two_names_are_none(proxied: InProcess) -> None:
    both = [("X-Remote-User", "vic"), ("X-Remote-User", "eve")]
    answer = proxied.browser(PROXY).send("GET", "/now", headers=both)
    assert answer.status_code == 403
    proxied.close()


def test_the_header_of_anybody_else_is_refused(proxied: InProcess, console: InProcess) -> None:
    stranger = proxied.browser(STRANGER)
    for path in ("/now", "/login", "/events?page=now", "/alive", "/"):
        answer = stranger.get(path, **{"X-Remote-User": "eve"})
        assert answer.status_code == 403 and "Only the reverse proxy" in answer.text
    assert stranger.log_in("anna").status_code == 303  # with a password, as everybody
    # Where no proxy is named, the header is one as any other.
    assert console.browser().get("/now", **{"X-Remote-User": "anna"}).status_code == 303
    proxied.close()


def test_a_user_without_a_password_has_none_to_guess(proxied: InProcess) -> None:
    for password in ("", "None", PASSWORD, "nobody has this one"):
        assert proxied.browser(STRANGER).log_in("eve", password).status_code == 403
    proxied.close()


def test_forms_of_whom_the_proxy_lets_in_need_their_token_too(proxied: InProcess) -> None:
    proxy = proxied.browser(PROXY)
    head = {"X-Remote-User": "eve", "Origin": ORIGIN}
    assert proxy.send("POST", "/logout", headers=head).status_code == 403
    vics = proxy.get("/now", **{"X-Remote-User": "vic"}).text
    token = vics.partition('name="form_token" value="')[2].partition('"')[0]
    sent = proxy.send("POST", "/logout", headers=head, data={"form_token": token})
    assert len(token) == 64 and sent.status_code == 403
    proxied.close()


def test_the_proxy_tells_who_guesses(proxied: InProcess) -> None:
    """By the address nearest to it, which is the last one: the others are the guesser's own."""
    proxy = proxied.browser(PROXY)

    def guess(chain: str, name: str) -> int:
        head = {"Origin": ORIGIN, "X-Forwarded-For": chain}
        given = {"name": name, "password": "wrong"}
        return proxy.send("POST", "/login", headers=head, data=given).status_code

    assert [guess(f"10.0.0.{n}, 198.51.100.9", f"n{n}") for n in range(5)] == [403] * 4 + [429]
    assert guess("198.51.100.10", "n9") == 403
    # A stranger's word about where he comes from counts nothing.
    stranger = proxied.browser(STRANGER)
    found = [
        stranger.send(
            "POST",
            "/login",
            headers={"Origin": ORIGIN, "X-Forwarded-For": f"10.1.0.{n}"},
            data={"name": f"m{n}", "password": "wrong"},
        ).status_code
        for n in range(5)
    ]
    assert found == [403] * 4 + [429]
    proxied.close()


def test_the_cookie_is_secure_where_the_browser_asks_by_https(proxied: InProcess) -> None:
    head = {"Origin": ORIGIN.replace("http", "https"), "X-Forwarded-Proto": "https"}
    answer = proxied.browser(PROXY).send(
        "POST", "/login", headers=head, data={"name": "anna", "password": PASSWORD, "to": "/"}
    )
    assert answer.headers["set-cookie"].startswith("__Host-tessera=")
    assert "; Secure" in answer.headers["set-cookie"]
    assert "Domain" not in answer.headers["set-cookie"]
    proxied.close()


def test_a_role_is_changed_without_the_hash(console_home: AggregatorHome) -> None:
    users = ConsoleUsers(console_home.console_file)
    before = users.find("vic")
    assert before is not None
    users.change("vic", lambda user: replace(user, role=Role.OPERATOR))
    assert users.find("vic") == replace(before, role=Role.OPERATOR)


def test_few_hashes_are_computed_at_once_and_pages_are_shown_meanwhile(
    console: InProcess,
) -> None:
    """Each takes 64 MiB: many at once would take the machine."""
    at_once, most, go_on = 0, 0, threading.Event()
    lock = threading.Lock()
    check = console.passwords.__call__

    def slow(user: ConsoleUser | None, password: str) -> bool:
        nonlocal at_once, most
        with lock:
            at_once += 1
            most = max(most, at_once)
        go_on.wait(PATIENCE_SECONDS)
        with lock:
            at_once -= 1
        return check(user, password)

    anna = console.logged_in("anna")
    console.console.passwords = slow  # type: ignore[assignment]
    with ThreadPoolExecutor(20) as pool:
        browsers = [console.browser(f"198.51.100.{number}") for number in range(20)]
        tries = [
            pool.submit(browser.log_in, f"name-{number}", "wrong")
            for number, browser in enumerate(browsers)
        ]
        wait_until(lambda: sum(each.done() for each in tries) == 10)
        assert anna.get("/now").status_code == 200
        go_on.set()
        found = sorted(each.result().status_code for each in tries)
    assert most == 2 and found == [403] * 10 + [503] * 10
