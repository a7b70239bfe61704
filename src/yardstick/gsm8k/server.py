"""Answers of a model behind an OpenAI-compatible chat-completions server (vLLM, llama.cpp's llama-server, others).

The server renders the chat template. Decoding is asked to be greedy (temperature 0); penalties are the server's own:
vLLM takes them from the model's generation_config.json unless it is started with `--generation-config vllm`.

A server may fail in any way. What is not a whole, well-formed answer is asked again, and in the end given back as
not asked with its reason, never as a text that could be scored.
"""

import datetime
import email.utils
import ipaddress
import os
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress

import httpx

from yardstick.errors import YardstickError
from yardstick.gsm8k.generation import NOT_ASKED, Generation
from yardstick.gsm8k.reply import MAX_REPLY_BYTES, ReplyError, error_message, read_reply

MAX_STOPS = 4  # of OpenAI's interface
CONNECT_SECONDS = 10.0
MAX_PAUSE_SECONDS = 60.0
LOST_AFTER = 32  # problems without an answer, in a row, and a server that has answered counts as lost
LOST_AT_FIRST = 8  # so many where it has not answered any
ASK_AGAIN = {408, 409, 425, 429}  # and 5xx


class Server:
    """A model named `model` behind `base_url`; `name` is the candidate's.

    Settings:
        base_url: what comes before /chat/completions, as http://127.0.0.1:8000/v1.
        model: what the server calls its model.
        concurrency: requests at a time (8).
        retries: how often a request that failed is sent again (4), after 1, 2, 4, ... seconds, at most 60.
        timeout: seconds that one request may take from its start to the last byte of the answer (120).
        api_key_variable: environment variable that holds the API key (none). The key is sent as a bearer token and
            kept out of all messages.
        thinking_switch: send `chat_template_kwargs: {"enable_thinking": false}` (true). vLLM and llama.cpp pass it
            to the chat template, most of which ignore it; false is for a server that refuses unknown fields, whose
            model then must not think by default.

    The proxies that the environment names are used, but not for a server on this machine. Redirects are faults.

    Args:
        first_pause: seconds before the first retry.

    Raises:
        YardstickError: the URL is not one that can be asked, or the variable holds no key.
    """

    def __init__(self, name: str, settings: dict, first_pause: float = 1.0):
        self.name = name
        self.base_url = settings["base_url"].strip().rstrip("/")
        self.host = check_url(name, self.base_url)
        self.model = settings["model"]
        self.concurrency = settings.get("concurrency", 8)
        self.retries = settings.get("retries", 4)
        self.timeout = float(settings.get("timeout", 120))
        self.thinking_switch = settings.get("thinking_switch", True)
        self.first_pause = first_pause
        self._key = read_key(name, settings.get("api_key_variable"))

    def answer(
        self, conversations: list[list[dict]], max_new_tokens: int, stops: list[str], answered: bool = False
    ) -> Iterator[tuple[int, Generation]]:
        """Pairs of index and answer, in the order in which they are finished.

        A problem that fails is held back until another one is answered: where none is, the server is at fault and
        not the problem. An iterator that is closed early cuts the requests on their way.

        Args:
            conversations: messages with `role` and `content`, one list for each problem.
            stops: at most four strings that end an answer.
            answered: whether the server has answered other problems of the run before.

        Raises:
            YardstickError: the first eight problems (or `concurrency`, or all where they are fewer) came to nothing, or
                once it has answered 32 (or `concurrency`) in a row; or there are more stops than the interface allows.
        """
        if len(stops) > MAX_STOPS:
            raise YardstickError(f"{self.name}: {len(stops)} stop strings, a server takes at most {MAX_STOPS}")
        held = []
        with self._requests() as requests, ThreadPoolExecutor(self.concurrency) as pool:
            try:
                futures = {
                    pool.submit(requests.ask, self.body(messages, max_new_tokens, stops)): index
                    for index, messages in enumerate(conversations)
                }
                for future in as_completed(futures):
                    index, result = futures[future], future.result()
                    if isinstance(result, Generation):
                        yield from held
                        answered, held = True, []
                        yield index, result
                        continue
                    held.append((index, Generation("", NOT_ASKED, fault=result.reason)))
                    most = max(LOST_AFTER if answered else LOST_AT_FIRST, self.concurrency)
                    if len(held) >= (most if answered else min(most, len(futures))):
                        raise YardstickError(
                            f"{self.name}: {self.base_url} gave no answer to {len(held)} problems in a row, at last: "
                            f"{result.reason}; {result.advice}"
                        )
                yield from held
            finally:
                requests.stop()
                pool.shutdown(cancel_futures=True)

    def body(self, messages: list[dict], max_new_tokens: int, stops: list[str]) -> dict:
        """What is posted for one conversation."""
        body = {
            "model": self.model,
            "messages": messages,
            "temperature": 0,
            "seed": 0,
            "max_tokens": max_new_tokens,
            "stream": False,
        }
        if stops:
            body["stop"] = list(stops)
        if self.thinking_switch:
            body["chat_template_kwargs"] = {"enable_thinking": False}
        return body

    @contextmanager
    def _requests(self) -> Iterator["_Requests"]:
        # the raw bytes are counted: a compressed reply could unfold to any size
        headers = {"Accept-Encoding": "identity", "Connection": "close"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        try:
            client = httpx.Client(
                headers=headers,
                timeout=httpx.Timeout(self.timeout, connect=min(CONNECT_SECONDS, self.timeout)),
                # each request has a connection of its own, which can be cut without harm to another
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
                trust_env=not is_loopback(self.host),  # proxies
                verify=httpx.create_ssl_context(),  # with SSL_CERT_FILE, also on this machine
            )
        except (ImportError, OSError, ValueError, httpx.InvalidURL) as error:
            fault = self._clean(str(error))
            raise YardstickError(
                f"{self.name}: the proxies or certificates that the environment names cannot be used ({fault}); "
                "correct or unset these variables"
            ) from None
        with client:
            yield _Requests(self, client)

    def _clean(self, text: str) -> str:
        """One short line without the key, which servers like to repeat."""
        if self._key:  # before the text is cut, which could leave a part of the key
            text = text.replace(self._key, "***")
        text = " ".join("".join(c if c.isprintable() else " " for c in text).split())
        return text if len(text) <= 200 else text[:200] + " ..."


class _RequestError(Exception):
    """Why a request gave no answer, what the user can do, and whether and when (seconds) to ask again."""

    def __init__(self, reason: str, advice: str, again: bool = True, pause: float = 0.0):
        super().__init__(reason)
        self.reason, self.advice, self.again, self.pause = reason, advice, again, pause


class _Connection:
    """The socket of one request, shut down when its time is over or nobody waits for it any more.

    The timeouts of httpx hold for one read: a server that sends a byte a second, of its headers or of its body,
    would never exceed them.
    """

    def __init__(self):
        self.is_cut = False
        self._socket = None

    def trace(self, event: str, info: dict) -> None:
        """What httpx calls at each step of a request."""
        if event.endswith((".connect_tcp.complete", ".start_tls.complete")):
            self._socket = info["return_value"].get_extra_info("socket")
            if self.is_cut:
                self.cut()

    def cut(self) -> None:
        self.is_cut = True
        if self._socket is not None:
            with suppress(OSError):  # it is closed already
                # SSLSocket has a method of its own, which another thread must not call during a read
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)


class _Requests:
    """The requests of one run over the problems; `ask` is called by several threads."""

    def __init__(self, server: Server, client: httpx.Client):
        self.server = server
        self.client = client
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._open: set[_Connection] = set()

    def ask(self, body: dict) -> Generation | _RequestError:
        """The answer, or why the last of all tries failed."""
        server = self.server
        for attempt in range(server.retries + 1):
            try:
                return self._post(body)
            except _RequestError as error:
                fault = error
            pause = min(MAX_PAUSE_SECONDS, max(fault.pause, server.first_pause * 2**attempt))
            if not fault.again or attempt == server.retries or self._stopped.wait(pause):
                break
        if attempt:
            fault.reason += f" (try {attempt + 1})"
        return fault

    def stop(self) -> None:
        """Let every call of `ask` come back at once."""
        self._stopped.set()
        with self._lock:
            connections = list(self._open)
        for connection in connections:
            connection.cut()

    def _post(self, body: dict) -> Generation:
        server, connection = self.server, _Connection()
        late = _RequestError(
            f"no whole answer within {server.timeout:g} s",
            "look at the server's log, raise timeout or lower concurrency",
        )
        timer = threading.Timer(server.timeout, connection.cut)
        timer.daemon = True
        with self._lock:
            self._open.add(connection)
        try:
            timer.start()
            if self._stopped.is_set():
                raise late
            with self.client.stream(
                "POST", f"{server.base_url}/chat/completions", json=body, extensions={"trace": connection.trace}
            ) as response:
                data = read_bounded(response)
            # a cut looks like the end of a body that came without its length
            if connection.is_cut:
                raise late
            if not response.is_success:
                raise self._refusal(response, data)
            return read_reply(data)
        except ReplyError as fault:
            reason = server._clean(str(fault))
            raise _RequestError(reason, "look at the server's log and its settings", fault.again) from None
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            reason = f"no connection ({server._clean(str(error) or type(error).__name__)})"
            raise _RequestError(reason, "start the server or correct base_url") from None
        except httpx.HTTPError as error:
            if connection.is_cut or isinstance(error, httpx.TimeoutException):
                raise late from None
            reason = f"the connection broke ({server._clean(str(error) or type(error).__name__)})"
            raise _RequestError(reason, "look at the server's log") from None
        finally:
            timer.cancel()
            with self._lock:
                self._open.discard(connection)

    def _refusal(self, response: httpx.Response, data: bytes) -> _RequestError:
        """What a status other than 2xx says."""
        status = response.status_code
        advice = "look at the server's log"
        if status in (400, 422) and self.server.thinking_switch:
            advice = "if the server refuses chat_template_kwargs, set thinking_switch: false"
        elif status in (401, 403):
            advice = "set api_key_variable to the name of an environment variable that holds a key of this server"
        elif status == 404 or response.is_redirect:
            advice = "correct base_url (most end in /v1) or model"
        elif status == 429:
            advice = "lower concurrency"
        message = self.server._clean(error_message(data))
        return _RequestError(
            f"HTTP {status}" + (f": {message}" if message else ""),
            advice,
            again=status in ASK_AGAIN or status >= 500,
            pause=retry_after(response.headers.get("Retry-After")),
        )


def read_bounded(response: httpx.Response) -> bytes:
    """The body of a streamed response.

    Raises:
        ReplyError: it is longer than 16 MB.
    """
    data = bytearray()
    for piece in response.iter_raw():
        data += piece
        if len(data) > MAX_REPLY_BYTES:
            raise ReplyError(f"a reply of more than {MAX_REPLY_BYTES >> 20} MB", again=False)
    return bytes(data)


def retry_after(value: str | None) -> float:
    """Seconds, at most 60, that a Retry-After header (RFC 9110, section 10.2.3) asks for; 0 where it is unclear."""
    if not value:
        return 0.0
    if value.strip().isascii() and value.strip().isdigit():
        return min(float(value), MAX_PAUSE_SECONDS)
    try:
        date = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    if date.tzinfo is None:
        date = date.replace(tzinfo=datetime.UTC)
    seconds = (date - datetime.datetime.now(datetime.UTC)).total_seconds()
    return min(max(seconds, 0.0), MAX_PAUSE_SECONDS)


def check_url(name: str, base_url: str) -> str:
    """The host of a base URL.

    Raises:
        YardstickError: it is no URL of http or https, or holds what does not belong in it.
    """
    if "@" in base_url:  # not shown: it may hold a password
        raise YardstickError(f"{name}: base_url must not hold a user or password; use api_key_variable")
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL as error:
        raise YardstickError(f"{name}: base_url is not a URL ({error})") from None
    if url.query or url.fragment:
        raise YardstickError(f"{name}: base_url must end with its path, without ? and #")
    if url.scheme not in ("http", "https") or not url.host:
        raise YardstickError(f"{name}: base_url must begin with http:// or https:// and a host (got {base_url})")
    if url.port is not None and not 0 < url.port < 65536:
        raise YardstickError(f"{name}: base_url names the port {url.port}, which cannot be")
    if url.path.endswith("/chat/completions"):
        raise YardstickError(f"{name}: base_url must end before /chat/completions (got {base_url})")
    return url.host


def is_loopback(host: str) -> bool:
    """Whether a host is this machine by its name alone; no name is looked up."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")
    return address.is_loopback or address.is_unspecified


def read_key(name: str, variable: str | None) -> str | None:
    """The API key that an environment variable holds; None where no variable is named.

    Raises:
        YardstickError: the variable is not set or empty, or what it holds cannot be sent.
    """
    if variable is None:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise YardstickError(f"{name}: the environment variable {variable} holds no API key; set it")
    # a header that cannot be sent would be shown in the error
    if not key.isascii() or not key.isprintable() or " " in key:
        raise YardstickError(f"{name}: the environment variable {variable} holds what cannot be an API key")
    return key
