"""What a model is asked: conversations, and the text that the model's own chat template makes of them."""

import json
from pathlib import Path

from yardstick.errors import YardstickError
from yardstick.gsm8k.problems import Problem
from yardstick.models.folder import end_ids, load_tokenizer

# how the answer is asked for, by its form (see answers.py), and how a worked solution ends with it
INSTRUCTIONS = {
    "hash": ("Work it out step by step. End with a line that holds #### and the final number.", "\n#### {}"),
    "boxed": ("Work it out step by step. Put the final number in \\boxed{}.", "\nThe answer is \\boxed{{{}}}."),
    "last": ("Work it out step by step. End with the final number.", "\nThe answer is {}."),
}
QUESTION = "\nQuestion:"  # what a model without a chat template goes on with when it has answered


def conversation(problem: Problem, examples: list[Problem], form: str) -> list[dict[str, str]]:
    """Messages that ask `problem`, after worked examples as turns of the same conversation."""
    instruction, ending = INSTRUCTIONS[form]
    messages = []
    for example in examples:
        messages.append({"role": "user", "content": f"{example.question}\n{instruction}"})
        messages.append({"role": "assistant", "content": example.steps + ending.format(example.answer)})
    return [*messages, {"role": "user", "content": f"{problem.question}\n{instruction}"}]


class Renderer:
    """Prompts of one model: rendered text and ids, and what ends an answer.

    The chat template is asked not to let the model think (`enable_thinking` false), which templates without that
    switch ignore. A model without a template gets the bare questions and answers, and stops at the next question.
    """

    def __init__(self, folder: Path) -> None:
        """
        Raises:
            YardstickError: the tokenizer or a config is damaged, or nothing says which id ends a text.
        """
        from transformers import PreTrainedTokenizerFast

        self.folder, self.tokenizer = Path(folder), load_tokenizer(folder)
        try:
            self._templates = PreTrainedTokenizerFast.from_pretrained(folder)
        except Exception as error:  # transformers raises many kinds
            reason = " ".join(str(error).split())[:160]
            raise YardstickError(f"{folder}: the tokenizer's settings cannot be read ({reason})") from None
        self.has_template = bool(self._templates.chat_template)
        self.stop_ids = end_ids(self.folder)
        self.stops = [] if self.has_template else [QUESTION]

    def render(self, messages: list[dict[str, str]]) -> str:
        """The prompt as text.

        Raises:
            YardstickError: the template refuses the conversation.
        """
        if not self.has_template:
            labels = {"user": "Question", "assistant": "Answer"}
            return "\n\n".join(f"{labels[m['role']]}: {m['content']}" for m in messages) + "\n\nAnswer:"
        try:
            return self._templates.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, enable_thinking=False
            )
        except Exception as error:  # jinja2 and templates of all kinds
            reason = " ".join(str(error).split())[:160]
            raise YardstickError(f"{self.folder}: the chat template cannot be rendered ({reason})") from None

    def encode(self, prompt: str) -> list[int]:
        """Ids of a rendered prompt. A template writes the special tokens; to a bare text the tokenizer adds them."""
        return self.tokenizer.encode(prompt, add_special_tokens=not self.has_template).ids

    def decode(self, ids: list[int]) -> str:
        """Text of generated ids, without special tokens."""
        return self.tokenizer.decode(ids, skip_special_tokens=True)


def as_text(messages: list[dict[str, str]]) -> str:
    """The prompt that is kept where a server renders the template itself: the messages as JSON."""
    return json.dumps(messages, ensure_ascii=False)
