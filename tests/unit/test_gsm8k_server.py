"""A chat-completions server on this machine that fails in the ways in which servers fail."""

import datetime
import email.utils
import http.server
import json
import random
import socket
import threading
import time
from collections import Counter
from contextlib import closing

import httpx
import pytest

from yardstick.errors import YardstickError
from yardstick.gsm8k import server as module
from yardstick.gsm8k.generation import LENGTH, NOT_ASKED, STOP, Generation
from yardstick.gsm8k.reply import ReplyError, read_reply
from yardstick.gsm8k.server import Server, retry_after

KEY = "sk-Secret/0123"


def completion(text="fine", finish="stop", tokens=7, **message) -> dict:
    choice = {"index": 0, "message": {"role": "assistant", "content": text} | message, "finish_reason": finish}
    return {"object": "chat.completion", "choices": [choice], "usage": {"completion_tokens": tokens}}


def send(handler, body, status=200, headers=(), length=None):
    """A reply; `length` may claim more bytes than follow."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    handler.send_response(status)
    for name, value in headers:
        handler.send_header(name, value)
    handler.send_header("Content-Length", str(len(data) if length is None else length))
    handler.end_headers()
    handler.wfile.write(data)


def fails(status, body=b"boom", headers=()):
    return lambda handler: send(handler, body, status, headers)


def says(body, **settings):
    return lambda handler: send(handler, body, **settings)


def drops(handler):
    """The connection ends before any header."""
    handler.connection.shutdown(socket.SHUT_RDWR)


def truncates(handler):
    send(handler, json.dumps(completion()).encode()[:40], length=4000)


def closes_without_length(handler):
    """The end of the body is the end of the connection, and comes too early."""
    handler.send_response(200)
    handler.end_headers()
    handler.wfile.write(json.dumps(completion()).encode()[:40])


def sleeps(handler):
    handler.server.released.wait(20)


def trickles_body(handler):
    handler.send_response(200)
    handler.end_headers()
    trickle(handler, b" " * 1000)


def trickles_headers(handler):
    trickle(handler, b"HTTP/1.0 200 OK\r\nX-Long: " + b"x" * 1000)


def trickle(handler, data):
    for byte in data:
        handler.wfile.write(bytes([byte]))
        handler.wfile.flush()
        if handler.server.released.wait(0.05):
            return


def floods(handler):
    handler.send_response(200)
    handler.end_headers()
    for _ in range(100):
        handler.wfile.write(b" " * (1 << 20))
        handler.server.flooded += 1


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.problem = problem = body["messages"][-1]["content"]
        with self.server.lock:
            self.server.requests.append((self.path, dict(self.headers), body, time.monotonic()))
            count = sum(seen["messages"][-1]["content"] == problem for _, _, seen, _ in self.server.requests)
        script = self.server.scripts.get(problem, self.server.default)
        script = script if isinstance(script, list) else [script]
        try:
            script[min(count, len(script)) - 1](self)
        except OSError:  # the client has gone
            self.server.left.set()

    def log_message(self, *_):
        pass


class Fake(http.server.ThreadingHTTPServer):
    """What happens to a problem is a function of its handler, or a list of them: one a request, the last for good."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, scripts=None, default=None):
        super().__init__(("127.0.0.1", 0), Handler)
        self.scripts, self.default = scripts or {}, default or says(completion())
        self.requests, self.lock, self.flooded = [], threading.Lock(), 0
        self.released, self.left = threading.Event(), threading.Event()
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/v1"

    def counts(self) -> Counter:
        return Counter(body["messages"][-1]["content"] for _, _, body, _ in self.requests)

    def close(self):
        self.released.set()
        self.shutdown()
        self.server_close()


@pytest.fixture(scope="module")
def certificates():
    return httpx.create_ssl_context()


@pytest.fixture(autouse=True)
def read_certificates_once(monkeypatch, certificates):
    """They are most of the time of a run of a few answers."""
    monkeypatch.setattr(module.httpx, "create_ssl_context", lambda: certificates)


@pytest.fixture
def serve():
    """Start a fake server, which ends with the test."""
    started = []

    def start(*arguments, **settings) -> Fake:
        started.append(Fake(*arguments, **settings))
        return started[-1]

    yield start
    for fake in started:
        fake.close()


def client(fake, first_pause=0.01, **settings) -> Server:
    url = fake if isinstance(fake, str) else fake.url
    settings = {"base_url": url, "model": "m-7", "concurrency": 3, "retries": 2, "timeout": 5} | settings
    return Server("rival-x", settings, first_pause=first_pause)


def problems(*texts):
    return [[{"role": "user", "content": text}] for text in texts]


def ask(server, *texts) -> dict[int, Generation]:
    pairs = list(server.answer(problems(*texts), 50, []))
    assert len(pairs) == len(texts)
    return dict(pairs)


def test_answers_come_back_to_their_problem_in_any_order(serve):
    delays = random.Random(0)

    def echo(handler):
        time.sleep(delays.random() / 20)
        send(handler, completion(f"answer to {handler.problem}", tokens=len(handler.problem)))

    texts = [f"p{i}" for i in range(37)]
    pairs = list(client(serve(default=echo), concurrency=6).answer(problems(*texts), 50, []))
    assert [index for index, _ in pairs] != list(range(37))
    assert dict(pairs) == {i: Generation(f"answer to p{i}", STOP, len(f"p{i}")) for i in range(37)}


def test_requests_go_out_at_once_as_many_as_asked_for(serve):
    barrier = threading.Barrier(4)  # broken, and the answer with it, unless four are there together

    def together(handler):
        barrier.wait(3)
        send(handler, completion())

    answers = ask(client(serve(default=together), concurrency=4, retries=0), *"abcdefgh")
    assert all(answer.text == "fine" for answer in answers.values())


def test_what_is_sent(serve, monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY + "\n")
    fake = serve()
    conversation = [
        {"role": "system", "content": "Think."},
        {"role": "user", "content": "2 + 3 = ?"},
        {"role": "assistant", "content": "5"},
        {"role": "user", "content": "Ünd 7?"},
    ]
    with_key = client(fake.url + "/", api_key_variable="SOME_KEY")
    assert dict(with_key.answer([conversation], 321, ["Question:", "\n\n"])) == {0: Generation("fine", STOP, 7)}
    path, headers, body, _ = fake.requests[0]
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == f"Bearer {KEY}"
    assert headers["Content-Type"] == "application/json"
    assert body == {
        "model": "m-7",
        "messages": conversation,
        "temperature": 0,
        "seed": 0,
        "max_tokens": 321,
        "stop": ["Question:", "\n\n"],
        "stream": False,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    ask(client(fake, thinking_switch=False), "a")
    _, headers, body, _ = fake.requests[1]
    assert "Authorization" not in headers
    assert set(body) == {"model", "messages", "temperature", "seed", "max_tokens", "stream"}
    with pytest.raises(YardstickError, match="rival-x: 5 stop strings, .* at most 4"):
        list(client(fake).answer([conversation], 9, list("abcde")))
    assert list(client(fake).answer([], 9, [])) == [] and len(fake.requests) == 2


@pytest.mark.parametrize(
    "fault",
    [
        fails(500),
        fails(503, b""),
        fails(408),
        fails(409),
        fails(425),
        drops,
        truncates,
        closes_without_length,
        says(b""),
        says(b"<html><body>Bad gateway</body></html>"),
        says(b'{"choices": [{"message": '),
        says(b"[" * 100_000),
        says([]),
        says({"choices": []}),
        says({"error": {"message": "engine is dead"}}),
        says({"choices": [{"message": None, "finish_reason": "stop"}]}),
        says(completion(text=None)),
        says(completion(text=[{"type": "text", "text": "4"}])),
        says(completion(finish=None)),
        says(completion(finish="error")),
        says(completion(finish="abort")),
        says({"choices": [{"message": {"content": "no end"}}]}),
    ],
)
def test_a_fault_that_passes_costs_nothing(serve, fault):
    fake = serve({"a": [fault, fault, says(completion("after all"))], "b": fault})
    answers = ask(client(fake), "a", "b", "c")
    assert answers[0] == Generation("after all", STOP, 7)
    assert answers[1].text == "" and answers[1].finish_reason == NOT_ASKED and answers[1].tokens is None
    assert answers[1].fault.endswith("(try 3)") and len(answers[1].fault) < 250
    assert answers[2].text == "fine"
    assert fake.counts() == {"a": 3, "b": 3, "c": 1}


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (fails(400, json.dumps({"error": {"message": "too\nlong"}}).encode()), "HTTP 400: too long"),
        (fails(404, b'{"object": "error", "message": "no such model"}'), "HTTP 404: no such model"),
        (fails(422, b'{"detail": [{"loc": 1}]}'), 'HTTP 422: {"detail": [{"loc": 1}]}'),
        (fails(418, b"\xff" * 30_000), "HTTP 418: " + "\ufffd" * 200 + " ..."),
        (fails(301, b"", [("Location", "/elsewhere")]), "HTTP 301"),
        (says(completion(finish="content_filter")), 'finish_reason is "content_filter"'),
        (says(completion(text=None, finish="tool_calls")), 'finish_reason is "tool_calls"'),
        (says(completion(text="", reasoning_content="5")), "the server counts all of the answer as reasoning"),
        (says(completion(text=None, reasoning="5")), "the server counts all of the answer as reasoning"),
    ],
)
def test_what_another_try_would_not_change_is_not_asked_again(serve, fault, reason):
    fake = serve({"b": fault})
    answers = ask(client(fake), "a", "b", "c", "d")
    assert answers[1] == Generation("", NOT_ASKED, fault=reason)
    assert [answers[i].finish_reason for i in (0, 2, 3)] == [STOP] * 3
    assert fake.counts() == {"a": 1, "b": 1, "c": 1, "d": 1}


@pytest.mark.parametrize("slow", [sleeps, trickles_body, trickles_headers])
def test_the_time_of_a_request_is_bounded_however_it_is_spent(serve, slow):
    fake = serve({"a": [slow, says(completion("in time"))], "b": slow})
    started = time.monotonic()
    answers = ask(client(fake, timeout=0.3, retries=1), "a", "b", "c")
    assert 0.6 <= time.monotonic() - started < 2
    assert answers[0].text == "in time" and answers[2].text == "fine"
    assert answers[1] == Generation("", NOT_ASKED, fault="no whole answer within 0.3 s (try 2)")
    assert fake.counts() == {"a": 2, "b": 2, "c": 1}


def test_a_reply_without_end_does_not_fill_the_memory(serve):
    fake = serve({"b": floods})
    answers = ask(client(fake), "a", "b", "c")
    assert answers[1] == Generation("", NOT_ASKED, fault="a reply of more than 16 MB")
    assert fake.left.wait(5) and fake.flooded < 40 and fake.counts()["b"] == 1


def test_a_server_that_is_busy_is_given_the_time_it_asks_for(serve, monkeypatch):
    busy = fails(429, b"busy", [("Retry-After", "1")])
    fake = serve({"a": [busy, says(completion("later"))]})
    assert ask(client(fake), "a", "b")[0].text == "later"
    first, second = (when for _, _, body, when in fake.requests if body["messages"][-1]["content"] == "a")
    assert 1 <= second - first < 2
    monkeypatch.setattr(module, "MAX_PAUSE_SECONDS", 0.2)
    fake = serve({"a": [fails(503, b"", [("Retry-After", "86400")]), says(completion("later"))]})
    started = time.monotonic()
    assert ask(client(fake), "a", "b")[0].text == "later"
    assert 0.2 <= time.monotonic() - started < 2


def test_retry_after():
    soon = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=30)
    assert 28 < retry_after(email.utils.format_datetime(soon, usegmt=True)) <= 30
    assert retry_after("Wed, 21 Oct 2015 07:28:00 GMT") == 0
    assert retry_after("7") == 7 and retry_after("7000") == 60
    assert [retry_after(value) for value in (None, "", "soon", "-3", "1.5e9", "\u00b2")] == [0] * 6


def test_pauses_double_up_to_a_minute(serve):
    pauses = []

    class Stopped(threading.Event):
        def wait(self, timeout=None):
            pauses.append(timeout)
            return False

    fake = serve({"a": fails(500)})
    answering = client(fake, retries=8, first_pause=1.0)
    with answering._requests() as requests:
        requests._stopped = Stopped()
        assert requests.ask(answering.body(problems("a")[0], 9, [])).reason == "HTTP 500: boom (try 9)"
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]


def test_a_server_that_refuses_everything_is_an_error_at_once(serve, monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    repeats = json.dumps({"error": {"message": "x" * 190 + f" wrong key {KEY} here"}}).encode()
    fake = serve(default=fails(401, repeats))
    with pytest.raises(YardstickError) as error:
        ask(client(fake, api_key_variable="SOME_KEY"), *[f"p{i}" for i in range(50)])
    line = str(error.value)
    assert line.startswith(f"rival-x: {fake.url} gave no answer to 8 problems in a row, at last: HTTP 401: xxx")
    assert "set api_key_variable" in line and "\n" not in line
    assert "Secret" not in line and "sk-" not in line
    assert len(fake.requests) < 16


def test_a_server_that_does_not_know_the_thinking_switch(serve):
    fake = serve(default=fails(400, b'{"detail": "extra field chat_template_kwargs"}'))
    with pytest.raises(YardstickError, match="HTTP 400: extra field .* set thinking_switch: false$"):
        ask(client(fake), "a", "b")  # fewer than the concurrency
    assert fake.counts() == {"a": 1, "b": 1}
    with pytest.raises(YardstickError) as error:
        ask(client(fake, thinking_switch=False), "a")
    assert "thinking_switch" not in str(error.value)


def test_nobody_listens():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        started = time.monotonic()
        with pytest.raises(YardstickError, match=f"rival-x: {url} .* no connection .*refused.*; start the server"):
            ask(client(url), *"abcdefgh")
    assert time.monotonic() - started < 2


def test_faults_are_held_back_until_another_problem_is_answered(serve, monkeypatch):
    monkeypatch.setattr(module, "LOST_AT_FIRST", 3)

    def waits(handler):
        handler.server.go.wait(5)
        send(handler, completion())

    fake = serve({"a": fails(400), "b": fails(400), "y": waits})
    fake.go = threading.Event()
    with pytest.raises(YardstickError, match="no answer to 3 problems in a row"):
        next(client(fake, concurrency=3).answer(problems("a", "b", "y", "a"), 9, []))
    started = time.monotonic()
    threading.Timer(0.3, fake.go.set).start()
    pairs = client(fake, concurrency=3).answer(problems("a", "b", "y"), 9, [])
    assert next(pairs)[1].finish_reason == NOT_ASKED and time.monotonic() - started > 0.29
    assert next(pairs)[1].finish_reason == NOT_ASKED
    assert list(pairs) == [(2, Generation("fine", STOP, 7))]


def test_one_problem_that_cannot_be_asked_is_no_lost_server(serve):
    fake = serve({"bad": fails(400)}, default=says(completion()))
    found = dict(client(fake, concurrency=1).answer(problems("bad", "a", "b"), 9, []))
    assert [found[i].finish_reason for i in range(3)] == [NOT_ASKED, STOP, STOP]
    # a resumed run, whose other problems have been answered
    found = dict(client(fake).answer(problems("bad"), 9, [], answered=True))
    assert found[0].finish_reason == NOT_ASKED and "HTTP 400" in found[0].fault
    with pytest.raises(YardstickError, match="no answer to 1 problems in a row"):
        list(client(fake).answer(problems("bad"), 9, []))


def test_a_server_that_is_lost_on_the_way_is_an_error(serve, monkeypatch):
    monkeypatch.setattr(module, "LOST_AFTER", 5)
    fake = serve({"a": says(completion())}, default=drops)
    answers = []
    with pytest.raises(YardstickError, match="no answer to 5 problems in a row, at last: the connection broke"):
        for pair in client(fake, concurrency=1, retries=0).answer(problems("a", "b", "a", *"cdefghijk"), 9, []):
            answers.append(pair)
    assert [(index, generation.finish_reason) for index, generation in answers] == [
        (0, STOP),
        (1, NOT_ASKED),
        (2, STOP),
    ]
    assert fake.counts()["i"] == 0 and fake.counts()["g"] == 1


@pytest.mark.parametrize("waits", ["for a reply", "to ask again"])
def test_a_closed_iterator_stops_at_once(serve, waits):
    fake = serve({"a": says(completion())}, default=sleeps if waits == "for a reply" else fails(500))
    threads = set(threading.enumerate())
    with closing(client(fake, timeout=60, first_pause=60).answer(problems(*"abcdefghijkl"), 9, [])) as pairs:
        assert next(pairs)[0] == 0
        time.sleep(0.1)
        started = time.monotonic()
    assert time.monotonic() - started < 1
    assert len(fake.requests) <= 5
    names = [thread.name for thread in set(threading.enumerate()) - threads if "Pool" in thread.name]
    assert names == []


def test_the_proxy_of_the_environment_is_not_for_this_machine(serve, monkeypatch):
    proxy, fake = serve(default=says(completion("from the proxy"))), serve()
    for variable in ("http_proxy", "all_proxy"):
        monkeypatch.setenv(variable, proxy.url[: -len("/v1")])
        monkeypatch.delenv("no_proxy", raising=False)
        monkeypatch.delenv("NO_PROXY", raising=False)
    assert ask(client(fake), "a")[0].text == "fine"
    assert ask(client("http://elsewhere.invalid:1/v1"), "a")[0].text == "from the proxy"
    assert proxy.requests[0][0] == "http://elsewhere.invalid:1/v1/chat/completions"
    assert all(map(module.is_loopback, ("localhost", "127.8.0.1", "::1", "0.0.0.0")))
    assert not any(map(module.is_loopback, ("10.0.0.1", "localhost.org", "gpu")))
    monkeypatch.setenv("all_proxy", "gopher://somewhere")
    with pytest.raises(YardstickError, match="rival-x: the proxies .* cannot be used .*gopher"):
        ask(client("http://elsewhere.invalid:1/v1"), "a")


@pytest.mark.parametrize(
    ("url", "fault"),
    [
        ("localhost:8000/v1", "must begin with http:// or https:// and a host"),
        ("ftp://host/v1", "must begin with http"),
        ("http://", "must begin with http"),
        ("", "must begin with http"),
        ("http://host:port/v1", "is not a URL .*port"),
        ("http://host:99999/v1", "port 99999"),
        ("http://me:hunter2@host/v1", "must not hold a user or password"),
        ("http://host/v1?key=hunter2", "without [?] and #"),
        ("http://host/v1/chat/completions/", "must end before /chat/completions"),
    ],
)
def test_a_url_that_cannot_be_asked(url, fault):
    with pytest.raises(YardstickError, match=f"^rival-x: base_url .*{fault}") as error:
        client(url)
    assert "hunter2" not in str(error.value)


def test_a_key_that_is_not_there_or_cannot_be_sent(monkeypatch):
    monkeypatch.delenv("SOME_KEY", raising=False)
    with pytest.raises(YardstickError, match="rival-x: the environment variable SOME_KEY holds no API key"):
        client("http://host", api_key_variable="SOME_KEY")
    for key in ("hunter2 2", "hunter2\nX: y", "hunter2\u00e9"):
        monkeypatch.setenv("SOME_KEY", key)
        with pytest.raises(YardstickError, match="SOME_KEY") as error:
            client("http://host", api_key_variable="SOME_KEY")
        assert "hunter2" not in str(error.value)


def test_the_key_is_in_no_fault(serve, monkeypatch):
    monkeypatch.setenv("SOME_KEY", KEY)
    echo = {"error": {"message": f"{'y' * 190}{KEY}"}}  # cut in the middle of the key, were it cut first
    fake = serve({"b": fails(400, json.dumps(echo).encode()), "c": says({"error": f"Bearer {KEY}"})})
    answers = ask(client(fake, retries=0, api_key_variable="SOME_KEY"), "a", "b", "c")
    assert answers[1].fault == "HTTP 400: " + "y" * 190 + "***"
    assert answers[2].fault == "a reply without an answer: Bearer ***"


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (completion(finish="length"), Generation("fine", LENGTH, 7)),
        (completion(None, "length", 50, reasoning_content="hm"), Generation("", LENGTH, 50)),
        (completion("", "length", 50, reasoning="hm"), Generation("", LENGTH, 50)),
        (completion(""), Generation("", STOP, 7)),
        (completion("5", reasoning_content="2 + 3"), Generation("5", STOP, 7)),
        (completion(finish="eos"), Generation("fine", STOP, 7)),
        (completion(finish="eos_token"), Generation("fine", STOP, 7)),
        (completion(finish="stop_sequence"), Generation("fine", STOP, 7)),
        (completion(tokens=True), Generation("fine", STOP)),
        (completion(tokens=-1), Generation("fine", STOP)),
        (completion(tokens=7.0), Generation("fine", STOP)),
        (completion(tokens=0), Generation("fine", STOP, 0)),
        (completion() | {"usage": None}, Generation("fine", STOP)),
        (completion("\U0001f600 \ud83d \ufeff\n"), Generation("\U0001f600 \ufffd \ufeff\n", STOP, 7)),
    ],
)
def test_replies(reply, expected):
    assert read_reply(json.dumps(reply).encode()) == expected


@pytest.mark.parametrize("finish", ["", "STOP", 1, ["stop"], {"a": 1}])
def test_an_end_that_is_not_known(finish):
    with pytest.raises(ReplyError, match="finish_reason is"):
        read_reply(json.dumps(completion(finish=finish)).encode())
