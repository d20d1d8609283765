"""The page of `shoal watch --web`: what it answers, and to whom."""

import http.client
import io
import json
import re
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from shoal.report.live import web as watch_web
from shoal.report.live.follow import Follower
from shoal.report.live.pace import Pace
from shoal.report.live.state import LiveState
from shoal.report.live.web import WatchServer
from tests.report.live_runs import Growing
from tests.support.waiting import wait_until


@pytest.fixture
def growing(tmp_path: Path) -> Growing:
    run = Growing(tmp_path, name="gpt <b>&'\"")
    run.start()
    run.steps(1, 6)
    return run


@pytest.fixture
def server(growing: Growing) -> Iterator[WatchServer]:
    with WatchServer(growing.folder) as made:
        thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield made
        made.shutdown()
        thread.join(timeout=20)
        assert not thread.is_alive()


class Answer:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status, self.headers, self.body = response.status, response.headers, response.read()


def ask(server: WatchServer, path: str, *, token: str | None = None, host: str | None = None, **kind: str) -> Answer:
    """Send one request; with the right token and name unless others are given."""
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    given = server.token if token is None else token
    try:
        connection.putrequest(kind.get("method", "GET"), f"{path}?token={given}" if given else path, skip_host=True)
        connection.putheader("Host", host if host is not None else f"127.0.0.1:{server.server_port}")
        connection.endheaders()
        return Answer(connection.getresponse())
    finally:
        connection.close()


def test_it_listens_on_loopback_only_and_its_address_has_a_new_token(server: WatchServer, growing: Growing) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"
    address = urlsplit(server.address)
    assert (address.hostname, address.port) == ("127.0.0.1", server.server_port)
    assert parse_qs(address.query)["token"] == [server.token]
    assert len(server.token) >= 32
    with WatchServer(growing.folder) as other:
        assert (other.token != server.token, other.server_port != server.server_port) == (True, True)


@pytest.mark.parametrize("path", ["/", "/state", "/watch.js", "/plotly.js", "/nowhere"])
@pytest.mark.parametrize("token", ["", "wrong", "%00", "%c3%a9", "%ed%b2%80"])
def test_without_the_token_nothing_is_answered(server: WatchServer, path: str, token: str) -> None:
    answer = ask(server, path, token=token)
    assert answer.status == 403
    assert len(answer.body) < 100


def test_a_part_of_the_token_or_the_token_twice_is_not_the_token(server: WatchServer) -> None:
    for token in (server.token[:-1], server.token + "x", f"{server.token}&token={server.token}"):
        assert ask(server, "/state", token=token).status == 403


@pytest.mark.parametrize(
    "host",
    ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.", "", "127.0.0.1:x", "[::1]:80", "0"],
)
def test_whoever_calls_it_by_another_name_gets_nothing(server: WatchServer, host: str) -> None:
    assert ask(server, "/state", host=host).status == 403


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost:8000", "LOCALHOST", "127.0.0.1:1"])
def test_this_machines_own_names_will_do_with_any_port_as_of_a_tunnel(server: WatchServer, host: str) -> None:
    assert ask(server, "/state", host=host).status == 200


def test_two_hosts_or_none_are_refused(server: WatchServer) -> None:
    for lines in ("", "Host: 127.0.0.1\r\nHost: evil.example\r\n"):
        with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
            connection.sendall(f"GET /state?token={server.token} HTTP/1.1\r\n{lines}\r\n".encode())
            assert b" 403 " in connection.recv(100)


@pytest.mark.parametrize("target", ["http://[", "http://]x/state?token=", "https://[::1/"])
def test_what_is_no_address_is_refused_and_nothing_is_printed(
    server: WatchServer, target: str, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_connection(("127.0.0.1", server.server_port), timeout=20) as connection:
        connection.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode())
        assert b" 400 " in connection.recv(100)
    assert ask(server, "/state").status == 200
    assert capfd.readouterr().err == ""


def connected(server: WatchServer) -> socket.socket:
    """Return a connection that has asked for nothing yet."""
    return socket.create_connection(("127.0.0.1", server.server_port), timeout=20)


def test_more_connections_than_it_answers_at_once_are_told_to_come_again(server: WatchServer) -> None:
    with ExitStack() as held:
        for _ in range(watch_web._MOST_AT_ONCE):
            held.enter_context(connected(server))
        with connected(server) as beyond:
            assert beyond.recv(100).startswith(b"HTTP/1.0 503 ")
            assert beyond.recv(100) == b""
    wait_until(lambda: server.connections == 0)
    assert ask(server, "/state").status == 200


def test_a_connection_that_takes_too_long_over_its_request_is_ended(
    server: WatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_web._Handler, "timeout", None)  # as where a byte comes just before each would be over
    with connected(server) as slow:
        slow.sendall(b"GET /sta")
        monkeypatch.setattr(watch_web, "_CLIENT_S", -1.0)  # its time is over
        assert slow.recv(100) == b""


@pytest.mark.parametrize(("look_s", "looks"), [(0.0, 200), (0.01, 50), (10.0, 20)])
def test_reading_for_the_page_takes_at_most_a_200th_of_a_core(
    growing: Growing, monkeypatch: pytest.MonkeyPatch, look_s: float, looks: int
) -> None:
    now, spent, looked = [0.0], [0.0], [0]
    look = Follower.look

    def costly_look(self: Follower) -> LiveState:
        looked[0] += 1
        spent[0] += look_s
        return look(self)

    monkeypatch.setattr("time.monotonic", lambda: now[0])
    monkeypatch.setattr("time.thread_time", lambda: spent[0])
    monkeypatch.setattr(Follower, "look", costly_look)
    with WatchServer(growing.folder) as server:
        _, read = server.contents["/state"]
        for _ in range(1000):  # 100 seconds
            now[0] += 0.1
            assert read()
    assert looked[0] == pytest.approx(looks, rel=0.2)


@pytest.mark.parametrize(
    "path",
    ["/../run.toml", "/..%2frun.toml", "//etc/passwd", "/etc/passwd", "/./", "/state/", "/state/../", "/watch.html"],
)
def test_no_path_leads_to_a_file(server: WatchServer, path: str) -> None:
    assert ask(server, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS"])
def test_there_is_only_get(server: WatchServer, method: str) -> None:
    assert ask(server, "/state", method=method).status == 501


def test_the_page_has_no_word_of_the_run_and_loads_only_from_here(server: WatchServer) -> None:
    answer = ask(server, "/")
    page = answer.body.decode()
    assert answer.headers["Content-Type"] == "text/html; charset=utf-8"
    assert "gpt" not in page, "what the run is called comes as JSON, and is put in as text"
    assert re.findall(r'src="([^"?]+)', page) == ["plotly.js", "watch.js"]
    assert "http" not in page
    assert "$" not in page.replace("$" + "{", "")


def test_each_answer_forbids_what_the_page_does_not_need(server: WatchServer) -> None:
    for path in ("/", "/state", "/nowhere"):
        headers = ask(server, path).headers
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "frame-ancestors 'none'" in policy
        assert headers["Referrer-Policy"] == "no-referrer"
        assert headers["X-Content-Type-Options"] == "nosniff"
        assert headers["Cache-Control"] == "no-store"
        assert "Access-Control-Allow-Origin" not in headers


def test_plotly_is_the_file_of_the_report(server: WatchServer) -> None:
    from shoal.report.page.write import plotly_source

    answer = ask(server, "/plotly.js")
    assert answer.body == plotly_source() != b""
    assert answer.headers["Content-Type"].startswith("text/javascript")


def test_the_state_follows_the_run(server: WatchServer, growing: Growing, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Pace, "is_due", True)
    state = json.loads(ask(server, "/state").body)
    assert (state["run"], state["step"], state["is_over"]) == ("gpt <b>&'\"", 6, False)
    growing.steps(7, 9)
    assert json.loads(ask(server, "/state").body)["step"] == 9
    growing.folder.write_result("done")
    assert json.loads(ask(server, "/state").body)["status"] == "done"


def test_many_who_ask_read_the_run_once(server: WatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.monotonic", lambda: 0.0)  # a clock that stands still
    looks = []
    look = Follower.look

    def noted(self: Follower) -> LiveState:
        looks.append(1)
        return look(self)

    monkeypatch.setattr(Follower, "look", noted)
    threads = [threading.Thread(target=ask, args=(server, "/state")) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert len(looks) == 1


def test_a_failure_is_a_500_and_is_printed_where_the_watch_was_started(
    server: WatchServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(Follower, "look", fail)
    monkeypatch.setattr(sys, "stderr", printed := io.StringIO())
    assert ask(server, "/state").status == 500
    wait_until(lambda: "RuntimeError: planted" in printed.getvalue())
    assert server.token not in printed.getvalue()
