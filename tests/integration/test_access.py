"""Who is let in over HTTP, with what, and until when: sign-in codes, sessions, tokens, and their secrets."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.cookies import SimpleCookie
from typing import Any

import pytest
from sqlalchemy import update

from ficc.controller.store import access, schema
from ficc.controller.store.database import Transaction
from ficc.domain.access import SCOPES
from support import rows
from support.http import Answer, Http, caller_with, http_of, known, projects_of, with_rows
from support.installation import Installation

SESSION_SECONDS = 12 * 3600
PREFIX_CHARACTERS = 12
PUBLIC_ORIGIN = "https://ficc.example.org"
SECRETS: list[str] = []
"""Every secret that this module came by; the last tests look for them where none belongs."""


@pytest.fixture(scope="module")
def controller_settings() -> dict[str, str]:
    return {"FICC_LOG_LEVEL": "debug"}  # secrets are looked for in every line there can be


class Browser:
    """A window of a browser: it keeps the cookie, and sends what its page knows."""

    def __init__(self, origin: str, secure: bool = False, through: str | None = None) -> None:
        self.origin = origin
        self.http = Http(through or origin)
        self.cookie_name = "__Host-ficc_session" if secure else "ficc_session"
        self.cookie: str | None = None
        self.csrf: str | None = None
        self.session: Any = None

    def __call__(self, method: str, path: str, json: Any = None, **headers: str | None) -> Answer:
        """Header names with _ for -; None leaves one out."""
        sent: dict[str, str | None] = {"host": self.origin.split("//")[1]}
        if method != "GET":
            sent |= {"origin": self.origin, "x-csrf-token": self.csrf}
        if self.cookie is not None:
            sent["cookie"] = f"{self.cookie_name}={self.cookie}"
        sent |= {name.replace("_", "-"): value for name, value in headers.items()}
        return self.http(method, path, json, headers={k: v for k, v in sent.items() if v is not None})

    def sign_in(self, code: str, **headers: str | None) -> Answer:
        answer = self("POST", "/session", {"code": code}, **headers)
        if answer.status == 200:
            cookie = SimpleCookie(answer.headers["set-cookie"])[self.cookie_name]
            self.cookie, self.session = cookie.value, answer.json
            self.csrf = self.session["csrf"]
            SECRETS.extend((cookie.value, str(self.csrf)))
        return answer


def new_code(api: Http) -> str:
    code = str(api("POST", "/session/codes").ok(201)["code"])
    SECRETS.append(code)
    return code


def new_token(api: Http, scopes: Sequence[str] = SCOPES, **members: Any) -> Any:
    document = {"label": "of a test", "scopes": list(scopes), **members}
    token = api("POST", "/tokens", document).ok(201)
    SECRETS.append(token["token"])
    return token


@pytest.fixture
def browser(made: Installation, api: Http) -> Browser:
    """Signed in."""
    window = Browser(made.origin)
    window.sign_in(new_code(api)).ok()
    return window


def change(made: Installation, work: Callable[[Transaction], Any]) -> None:
    """Change rows as another controller would: it is in force within two seconds."""

    def changed(tx: Transaction) -> None:
        work(tx)
        access.raise_version(tx)

    with_rows(made, changed)


def until_refused(made: Installation, call: Callable[[], Answer]) -> None:
    made.until(lambda: call().status == 401, "the credential is refused")


# Signing in.


def test_a_code_signs_in_once(made: Installation, api: Http) -> None:
    answer = api("POST", "/session/codes").ok(201)
    code = answer["code"]
    SECRETS.append(code)
    assert answer["url"] == f"{made.origin}/#code={code}"
    first, second = Browser(made.origin), Browser(made.origin)
    session = first.sign_in(code).ok()
    mine = api("GET", "/session").ok()
    assert {k: session[k] for k in ("principal", "project", "scopes")} == {
        k: mine[k] for k in ("principal", "project", "scopes")
    }
    assert set(session["scopes"]) == set(SCOPES)
    refused = second.sign_in(code)
    assert (refused.status, refused.code) == (401, "unauthenticated")
    assert "set-cookie" not in refused.headers
    assert first("GET", "/session").ok() == session
    for wrong in (code[:-1], code + "x", "x" * 256):
        assert second.sign_in(wrong).code == "unauthenticated"


def test_many_at_once_with_one_code_are_one_session(made: Installation, api: Http) -> None:
    code = new_code(api)
    with ThreadPoolExecutor(6) as threads:
        answers = list(threads.map(lambda _: Browser(made.origin).sign_in(code).status, range(6)))
    assert sorted(answers) == [200] + [401] * 5


def test_a_code_that_is_too_old_signs_nobody_in(made: Installation, api: Http) -> None:
    code = new_code(api)
    past = update(schema.sign_in_codes).values(expires_at=time.time() - 1)
    with_rows(made, lambda tx: tx.execute(past))
    assert Browser(made.origin).sign_in(code).code == "unauthenticated"


def test_the_cookie_is_for_this_site_and_out_of_reach_of_scripts(made: Installation, api: Http) -> None:
    answer = Browser(made.origin).sign_in(new_code(api))
    cookie = SimpleCookie(answer.headers["set-cookie"])["ficc_session"]
    SECRETS.append(cookie.value)
    assert (cookie["httponly"], cookie["samesite"], cookie["path"]) == (True, "strict", "/")
    assert (cookie["secure"], cookie["domain"]) == ("", "")
    assert int(cookie["max-age"]) == SESSION_SECONDS
    assert cookie.value not in answer.body.decode()


def test_behind_a_proxy_with_tls_the_cookie_is_bound_to_it(controllers: Callable[..., Installation]) -> None:
    made = controllers("proxied", FICC_SERVER_PUBLIC_ORIGIN=PUBLIC_ORIGIN)
    api = http_of(made)
    answer = api("POST", "/session/codes", headers={"host": "ficc.example.org"}).ok(201)
    assert answer["url"].startswith(f"{PUBLIC_ORIGIN}/#code=")
    window = Browser(PUBLIC_ORIGIN, secure=True, through=made.origin)
    signed_in = window.sign_in(answer["code"])
    cookie = SimpleCookie(signed_in.headers["set-cookie"])["__Host-ficc_session"]
    assert (cookie["secure"], cookie["path"], cookie["domain"]) == (True, "/", "")
    assert (cookie["httponly"], cookie["samesite"]) == (True, "strict")
    window("POST", "/session/codes").ok(201)
    assert window("POST", "/session/codes", origin="http://ficc.example.org").code == "csrf_failed"
    assert window("GET", "/session", host="ficc.example.org.evil.example").code == "csrf_failed"
    window.cookie_name = "ficc_session"  # a cookie that any subdomain could have set
    assert window("GET", "/session").code == "unauthenticated"


# What a browser must bring along.


def test_a_session_reads_with_its_cookie_and_changes_things_with_its_token_too(browser: Browser) -> None:
    assert browser("GET", "/models", x_csrf_token=None).ok()
    assert browser("POST", "/session/codes").ok(201)
    for wrong in (None, "", "0" * 64, str(browser.csrf).upper(), "é"):
        sent = None if wrong is None else wrong.encode().decode("latin-1")
        answer = browser("POST", "/session/codes", x_csrf_token=sent)
        assert (answer.status, answer.code) == (403, "csrf_failed")


def test_the_token_of_another_session_is_none(made: Installation, api: Http, browser: Browser) -> None:
    other = Browser(made.origin)
    other.sign_in(new_code(api)).ok()
    assert browser("DELETE", "/session", x_csrf_token=other.csrf).code == "csrf_failed"
    assert other("GET", "/session").ok()
    assert browser("GET", "/session").ok()


def test_a_page_of_another_origin_changes_nothing(made: Installation, api: Http, browser: Browser) -> None:
    port = made.port
    for origin in (
        None,
        "null",
        "",
        "http://evil.example",
        f"https://127.0.0.1:{port}",
        "http://127.0.0.1:1",
    ):
        assert browser("POST", "/session/codes", origin=origin).code == "csrf_failed", origin
        assert Browser(made.origin).sign_in(new_code(api), origin=origin).code == "csrf_failed", origin


def test_a_name_that_is_not_ours_serves_no_session(made: Installation, api: Http, browser: Browser) -> None:
    """DNS rebinding: the attacker's name points here, and the page's origin fits it."""
    port = made.port
    for name in ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example", "2130706433", "[::2]"):
        host = f"{name}:{port}"
        for method, path in (("GET", "/session"), ("POST", "/session/codes")):
            answer = browser(method, path, host=host, origin=f"http://{host}")
            assert answer.code == "csrf_failed", name
        code = new_code(api)
        assert Browser(made.origin).sign_in(code, host=host, origin=f"http://{host}").code == "csrf_failed"
        assert Browser(made.origin).sign_in(code).ok()  # it was not used up
    for name in ("localhost", "LOCALHOST", "127.0.0.1", "[::1]"):
        host = f"{name}:{port}"
        browser("POST", "/session/codes", host=host, origin=f"http://{host}").ok(201)
    assert api("GET", "/models", headers={"host": "anything.example"}).ok()  # a token needs no such guard


def test_a_window_that_is_out_of_date_does_nothing(made: Installation, api: Http, browser: Browser) -> None:
    session = browser.session
    mine = {"x_ficc_project": session["project"]["id"], "x_ficc_session": session["session_id"]}
    assert browser("GET", "/session", **mine).ok()
    later = Browser(made.origin)
    later.sign_in(new_code(api)).ok()
    for method, path in (("GET", "/models"), ("POST", "/session/codes")):
        answer = later(method, path, **mine)
        assert (answer.status, answer.code) == (409, "session_changed")
        answer = browser(method, path, x_ficc_project="0" * 26)
        assert (answer.status, answer.code) == (409, "project_changed")


def test_a_bearer_token_is_taken_before_a_cookie_and_a_session_is_no_token(
    made: Installation, browser: Browser
) -> None:
    assert browser("GET", "/session", authorization="Bearer ficc_unknown").code == "unauthenticated"
    assert Http(made.origin, browser.cookie)("GET", "/session").code == "unauthenticated"
    browser.cookie = made.token
    assert browser("GET", "/session").code == "unauthenticated"


# The end of a session.


def test_who_signs_out_is_out_at_once(browser: Browser) -> None:
    answer = browser("DELETE", "/session")
    assert answer.ok() == {"removed": True}
    cookie = SimpleCookie(answer.headers["set-cookie"])["ficc_session"]
    assert (cookie.value, cookie["max-age"]) == ("", "0")
    for method, path in (("GET", "/session"), ("POST", "/session/codes"), ("DELETE", "/session")):
        assert browser(method, path).code == "unauthenticated"


def test_a_session_ends_by_itself(made: Installation, browser: Browser) -> None:
    table = schema.sessions
    mine = update(table).where(table.c.id == browser.session["session_id"])
    change(made, lambda tx: tx.execute(mine.values(expires_at=time.time() + 1)))
    until_refused(made, lambda: browser("GET", "/session"))


def test_a_session_says_who_it_is(made: Installation, api: Http, browser: Browser) -> None:
    session = browser("GET", "/session").ok()
    assert session["principal"]["name"] == "owner"
    assert session["project"]["name"] == "default"
    assert session["csrf"] == browser.csrf
    assert session["expires_at"].endswith("Z")
    of_token = api("GET", "/session").ok()
    assert (of_token["csrf"], of_token["expires_at"]) == (None, None)
    assert [project["id"] for project in api("GET", "/projects").ok()["items"]] == [session["project"]["id"]]


# Tokens.


def test_a_token_does_what_it_was_granted_and_nothing_else(made: Installation, api: Http) -> None:
    token = new_token(api, ["models:read"])
    reader = http_of(made, token["token"])
    assert reader("GET", "/models").ok()
    answer = reader("POST", "/models", rows.manifest_of(b"x"))
    assert (answer.status, answer.code, answer.param) == (403, "denied", "models:manage")
    assert reader("GET", "/session").ok()["scopes"] == ["models:read"]


def test_a_token_is_shown_once_and_known_by_its_beginning(api: Http) -> None:
    token = new_token(api, ["models:read", "models:read"], label="for the build")
    secret = token["token"]
    assert secret.startswith("ficc_")
    assert len(secret) >= 43 + 5  # 256 bits
    listed = next(t for t in api("GET", "/tokens", limit="200").ok()["items"] if t["id"] == token["id"])
    assert listed["prefix"] == secret[:PREFIX_CHARACTERS]
    assert (listed["label"], listed["scopes"]) == ("for the build", ["models:read"])
    assert (listed["expires_at"], listed["service_id"], listed["last_used_at"]) == (None, None, None)
    assert secret[PREFIX_CHARACTERS:] not in api("GET", "/tokens", limit="200").body.decode()


def test_nobody_grants_what_they_do_not_have(made: Installation, api: Http) -> None:
    keeper = http_of(made, new_token(api, ["tokens:manage", "models:read"])["token"])
    answer = keeper("POST", "/tokens", {"label": "more", "scopes": ["models:read", "models:manage"]})
    assert (answer.code, answer.param) == ("denied", "models:manage")
    new_token(keeper, ["models:read"])
    answer = keeper("POST", "/session/codes")  # a session would have every scope of its subject
    assert answer.code == "denied"
    assert answer.param in set(SCOPES) - {"tokens:manage", "models:read"}
    new_code(http_of(made, new_token(api)["token"]))


def test_a_token_has_known_scopes_a_readable_label_and_a_bounded_life(api: Http) -> None:
    for members, param in (
        ({"scopes": ["models:write"]}, "scopes"),
        ({"scopes": []}, "scopes"),
        ({"scopes": ["models:read"] * 65}, "scopes"),
        ({"label": ""}, "label"),
        ({"label": "a\nb"}, "label"),
        ({"label": "a\0b"}, "label"),
        ({"label": "x" * 257}, "label"),
        ({"lifetime_seconds": 59}, "lifetime_seconds"),
        ({"lifetime_seconds": 10 * 365 * 86_400 + 1}, "lifetime_seconds"),
        ({"lifetime_seconds": 60.0}, "lifetime_seconds"),
    ):
        answer = api("POST", "/tokens", {"label": "t", "scopes": ["models:read"], **members})
        assert (answer.code, answer.param) == ("invalid_request", param), members
    began = time.time()
    token = new_token(api, ["models:read"], lifetime_seconds=60)
    expires = time.strptime(token["expires_at"].split(".")[0], "%Y-%m-%dT%H:%M:%S")
    assert abs(time.mktime(expires) - time.timezone - (began + 60)) < 30


def test_a_token_ends_by_itself(made: Installation, api: Http) -> None:
    token = new_token(api, ["models:read"], lifetime_seconds=60)
    reader, table = http_of(made, token["token"]), schema.tokens
    assert reader("GET", "/models").ok()
    soon = update(table).where(table.c.id == token["id"]).values(expires_at=time.time() + 1)
    change(made, lambda tx: tx.execute(soon))
    until_refused(made, lambda: reader("GET", "/models"))


def test_a_revoked_token_is_refused_from_then_on(made: Installation, api: Http) -> None:
    for _ in range(3):
        token = new_token(api, ["models:read"])
        reader = http_of(made, token["token"])
        assert reader("GET", "/models").ok()
        assert api("DELETE", f"/tokens/{token['id']}").ok() == {"removed": True}
        assert reader("GET", "/models").code == "unauthenticated"
        assert api("DELETE", f"/tokens/{token['id']}").code == "not_found"
        assert token["id"] not in api("GET", "/tokens", limit="200").body.decode()


def test_a_token_may_revoke_itself(made: Installation, api: Http) -> None:
    reader = http_of(made, new_token(api, ["models:read"])["token"])
    assert reader("DELETE", "/session").ok()
    assert reader("GET", "/session").code == "unauthenticated"


def test_revoking_holds_while_others_are_changed(made: Installation, api: Http) -> None:
    """An older snapshot of who may do what never comes back."""
    lapses: list[str] = []

    def make_and_revoke(number: int) -> None:
        for _ in range(5):
            token = new_token(api, ["models:read"])
            reader = http_of(made, token["token"])
            assert reader("GET", "/session").ok()
            api("DELETE", f"/tokens/{token['id']}").ok()
            lapses.extend("again" for _ in range(4) if reader("GET", "/session").status != 401)

    threads = [threading.Thread(target=make_and_revoke, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not lapses


def test_tokens_are_listed_page_by_page_for_their_project_only(made: Installation, api: Http) -> None:
    other = projects_of(made, "other")["other"]
    foreign = [new_token(other, ["models:read"])["id"] for _ in range(3)]
    mine = [new_token(api, ["models:read"])["id"] for _ in range(3)]
    first = api("GET", "/tokens", limit="2").ok()
    assert [token["id"] for token in first["items"]] == mine[:0:-1]
    rest = api("GET", "/tokens", limit="200", after=first["next"]).ok()
    assert rest["items"][0]["id"] == mine[0]
    assert not {token["id"] for token in rest["items"]} & set(foreign)
    assert api("DELETE", f"/tokens/{foreign[0]}").code == "not_found"
    assert other("GET", "/tokens").ok()["items"][0]["id"] == foreign[-1]


# What a subject may.


def test_a_token_loses_what_its_subject_loses(made: Installation, api: Http) -> None:
    def member(tx: Transaction) -> tuple[str, str, str]:
        project_id = rows.project(tx, "shrinking")
        identity_id = rows.member(tx, project_id, "shrinking")
        return project_id, identity_id, rows.token(tx, project_id, identity_id, ["models:read", "audit:read"])

    project_id, identity_id, secret = with_rows(made, member)
    SECRETS.append(secret)
    caller = known(made, secret)
    assert caller("GET", "/models").ok()
    remaining = ["audit:read", "tokens:manage"]
    with_rows(made, lambda tx: access.set_membership(tx, project_id, identity_id, remaining))
    made.until(lambda: caller("GET", "/models").status == 403, "the scope is lost")
    assert caller("GET", "/session").ok()["scopes"] == ["audit:read"]
    with_rows(made, lambda tx: access.set_membership(tx, project_id, identity_id, SCOPES))
    made.until(lambda: caller("GET", "/models").status == 200, "the scope is back")
    table = schema.identities
    off = update(table).where(table.c.id == identity_id).values(disabled_at=time.time())
    change(made, lambda tx: tx.execute(off))
    until_refused(made, lambda: caller("GET", "/session"))


def test_a_service_token_opens_no_door_here(made: Installation, api: Http) -> None:
    caller = caller_with(made, "inference:invoke", service_id=rows.NODE_ID)
    SECRETS.append(str(caller.token))
    for method, path in (
        ("GET", "/session"),
        ("DELETE", "/session"),
        ("GET", "/projects"),
        ("GET", "/tokens"),
    ):
        assert caller(method, path).code == "denied"
    assert caller("POST", "/session/codes").code == "denied"
    assert caller("GET", "/health").ok()
    wide = caller_with(made, *SCOPES, service_id=rows.NODE_ID)  # whatever it was granted
    SECRETS.append(str(wide.token))
    assert wide("POST", "/tokens", {"label": "t", "scopes": ["models:read"]}).code == "denied"


def test_when_a_token_was_last_used_is_shown_and_moves_rarely(made: Installation, api: Http) -> None:
    token = new_token(api, ["models:read"])
    reader = http_of(made, token["token"])

    def last_used() -> Any:
        items = api("GET", "/tokens", limit="200").ok()["items"]
        return next(t["last_used_at"] for t in items if t["id"] == token["id"])

    assert last_used() is None
    reader("GET", "/models").ok()
    first = made.until(last_used, "the use is recorded")
    deadline = time.monotonic() + 4.5
    while time.monotonic() < deadline:
        reader("GET", "/models").ok()
        time.sleep(0.1)
    assert last_used() == first


# Where secrets are not (G29). These come last.


def canary(made: Installation, api: Http) -> Iterator[str]:
    """Secrets sent in every place and through every way a request can fail."""
    secret = "ficc_canary" + "q" * 32
    bearer = Http(made.origin, secret)
    bearer("GET", "/models")
    bearer("POST", "/models", {"wrong": secret})
    for header in (f"Basic {secret}", secret, f"Bearer {secret} {secret}", f"Bearer  {secret}"):
        Http(made.origin)("GET", "/models", headers={"authorization": header})
    Http(made.origin)("GET", "/session", headers={"cookie": f"ficc_session={secret}; other={secret}"})
    Browser(made.origin).sign_in(secret)
    Browser(made.origin).sign_in(secret, origin="http://evil.example")
    window = Browser(made.origin)
    window.cookie, window.csrf = secret, secret
    window("POST", "/session/codes")
    api("GET", "/models", token=secret)
    api("GET", f"/models/{secret}")
    api("GET", f"/{secret}")
    api("POST", "/models", {**rows.manifest_of(b"x"), "licence": secret + "\n"})
    api("POST", "/models", body=f'{{"{secret}": "{secret}"', headers={"content-type": "application/json"})
    api("POST", "/tokens", {"label": "x", "scopes": [secret]})
    api("POST", "/session", body=secret, headers={"content-type": secret})
    api("DELETE", f"/tokens/{secret}")
    yield secret
    yield made.token


def test_no_secret_is_in_the_database_the_logs_or_any_other_file(made: Installation, api: Http) -> None:
    looked_for = {*canary(made, api), *SECRETS}
    made.kill("controller", 15)
    made.start("controller")
    looked_at = 0
    for path in sorted(made.directory.rglob("*")):
        if path.is_file() and path.name != "owner-token":
            looked_at += 1
            data = path.read_bytes()
            found = [secret for secret in looked_for if secret.encode() in data or _end(secret) in data]
            assert not found, f"{path.relative_to(made.directory)} holds {found}"
    assert looked_at >= 3
    assert b"controller serves at" in made.logs["controller"].read_bytes()


def _end(secret: str) -> bytes:
    """What nobody is shown of a secret, also not to recognise it by."""
    return secret[PREFIX_CHARACTERS:].encode()


def test_the_owners_token_is_for_the_owner_alone(made: Installation) -> None:
    file = made.directory / "controller" / "owner-token"
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o077 == 0
    assert (made.directory / "controller" / "ficc.sqlite").stat().st_mode & 0o077 == 0
