"""What a chat-completions server replied, read with suspicion."""

import json

from yardstick.gsm8k.generation import LENGTH, STOP, Generation

MAX_REPLY_BYTES = 16 << 20

# vLLM and llama.cpp say stop and length; the others are of Text Generation Inference and of gateways
FINISH_REASONS = {
    "stop": STOP,
    "eos": STOP,
    "eos_token": STOP,
    "stop_sequence": STOP,
    "end_turn": STOP,
    "length": LENGTH,
    "max_tokens": LENGTH,
}
# what greedy decoding would do again
DECIDED = ("content_filter", "tool_calls", "function_call")


class ReplyError(Exception):
    """A reply that is no answer; `again` says whether another try could give one."""

    def __init__(self, reason: str, again: bool = True):
        super().__init__(reason)
        self.again = again


def read_reply(data: bytes) -> Generation:
    """The first choice of a chat completion.

    No text with "length" is a model that thought until its tokens were used up: an empty answer. No text with "stop"
    while a reasoning parser of the server took some is a fault: what the model wrote is not where it can be scored.

    Raises:
        ReplyError: the reply is not a chat completion whose end and text are known.
    """
    reply = _parse(data)
    choices = reply.get("choices") if isinstance(reply, dict) else None
    choice = choices[0] if isinstance(choices, list) and choices else None
    message = choice.get("message") if isinstance(choice, dict) else None
    if not isinstance(message, dict):
        stated = error_message(data) if isinstance(reply, dict) and reply.get("error") else ""
        raise ReplyError(f"a reply without an answer{': ' if stated else ''}{stated}")
    reason = choice.get("finish_reason")
    finish = FINISH_REASONS.get(reason) if isinstance(reason, str) else None
    if finish is None:
        raise ReplyError(f"finish_reason is {json.dumps(reason)[:100]}", again=reason not in DECIDED)
    text = message.get("content")
    if not text and finish == STOP and (message.get("reasoning_content") or message.get("reasoning")):
        raise ReplyError("the server counts all of the answer as reasoning", again=False)
    if text is None and finish == LENGTH:
        text = ""
    if not isinstance(text, str):
        raise ReplyError("the content of the answer is not text")
    usage = reply.get("usage")
    tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
    # half a surrogate pair is valid JSON, and no text that could be written to a file
    text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return Generation(text, finish, tokens if type(tokens) is int and tokens >= 0 else None)


def error_message(data: bytes) -> str:
    """What the body of an error says: OpenAI's `error.message` or its likes, or else the body as it is."""
    try:
        reply = _parse(data)
    except ReplyError:
        reply = None
    if isinstance(reply, dict):
        error = reply.get("error", reply)
        if isinstance(error, str):
            return error
        for key in ("message", "detail"):
            if isinstance(error, dict) and isinstance(error.get(key), str):
                return error[key]
    return data[:10_000].decode("utf-8", "replace")


def _parse(data: bytes):
    if not data.strip():
        raise ReplyError("an empty reply")
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ReplyError("a reply that is not JSON") from None
