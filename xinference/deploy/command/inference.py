"""``chat`` and ``generate``: talking to a model, with the time and the cache hits of each answer."""

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import click

from xinference.client.completions import delta_text
from xinference.client.sync_client import Client
from xinference.deploy.finite import Finite
from xinference.deploy.output import print_json, printable, seconds_text
from xinference.deploy.session import Invocation, server_options
from xinference.deploy.uid import uid_argument

Json = dict[str, Any]
Command = TypeVar("Command", bound=Callable[..., Any])


def sampling_options(command: Command) -> Command:
    """Adds what both commands pass on to the model."""
    command = click.option("--max-tokens", type=click.IntRange(min=1), default=512, show_default=True, help="Longest answer.")(command)
    command = click.option("--temperature", type=Finite(min=0), help="0 always takes the likeliest token.")(command)
    command = click.option("--replica", "replica_uid", metavar="UID", help="Ask this replica.")(command)
    return click.option("--stream/--no-stream", default=True, help="Print while the answer is made.  [default: --stream]")(command)


@dataclass
class Answer:
    """What a stream adds up to."""

    text: str = ""
    usage: Json = field(default_factory=dict)
    first_token_seconds: float | None = None
    total_seconds: float = 0.0

    def summary(self) -> str:
        """Time to first token, length, and how much of the prompt was found in a cache."""
        cached = (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        parts = [f"first token after {seconds_text(self.first_token_seconds or self.total_seconds)}"]
        parts.append(f"{self.usage.get('completion_tokens', '?')} tokens in {seconds_text(self.total_seconds)}")
        parts.append(f"{'?' if cached is None else cached} of {self.usage.get('prompt_tokens', '?')} prompt tokens cached")
        return ", ".join(parts)


def read_stream(chunks: Iterator[Json], show: bool) -> Answer:
    """Print a stream as it comes and add it up."""
    answer, started = Answer(), time.monotonic()
    for chunk in chunks:
        text = printable(delta_text(chunk))
        if text and answer.first_token_seconds is None:
            answer.first_token_seconds = time.monotonic() - started
        answer.text += text
        answer.usage = chunk.get("usage") or answer.usage
        if show:
            click.echo(text, nl=False)
    answer.total_seconds = time.monotonic() - started
    if show:
        click.echo()
    return answer


@click.command("generate", short_help="Continue a text.")
@uid_argument
@click.option("-p", "--prompt", help="The text.  [default: read from stdin]")
@sampling_options
@server_options
def generate(invocation: Invocation, model_uid: str, prompt: str | None, stream: bool, **options: Any) -> None:
    """Continue a text, given with --prompt or on stdin."""
    text = prompt if prompt is not None else sys.stdin.read()
    with Client(invocation.endpoint, invocation.api_key) as client:
        if invocation.as_json:
            print_json(client.generate(model_uid, text, **options))
        elif stream:
            _summarise(read_stream(client.stream_generate(model_uid, text, **options), show=True))
        else:
            click.echo(printable(client.generate(model_uid, text, **options)["choices"][0]["text"]))


@click.command("chat", short_help="Chat with a model.")
@uid_argument
@click.option("-p", "--prompt", help="One message; without it, a conversation, or one message from stdin if that is no terminal.")
@click.option("--system", help="System message.")
@sampling_options
@server_options
def chat(invocation: Invocation, model_uid: str, prompt: str | None, system: str | None, stream: bool, **options: Any) -> None:
    """Chat with a model. In a conversation, Ctrl-C ends an answer; an empty line or Ctrl-D ends the conversation."""
    messages: list[Json] = [{"role": "system", "content": system}] if system else []
    with Client(invocation.endpoint, invocation.api_key) as client:
        if prompt is None and sys.stdin.isatty() and not invocation.as_json:
            client.model(model_uid)  # an unknown model is said before the first question, not after it
            _converse(client, model_uid, messages, options)
            return
        text = prompt if prompt is not None else sys.stdin.read().strip()
        messages.append({"role": "user", "content": text})
        if invocation.as_json:
            print_json(client.chat(model_uid, messages, **options))
        elif stream:
            _summarise(read_stream(client.stream_chat(model_uid, messages, **options), show=True))
        else:
            click.echo(printable(client.chat(model_uid, messages, **options)["choices"][0]["message"]["content"] or ""))


def _converse(client: Client, model_uid: str, messages: list[Json], options: Json) -> None:
    while True:
        try:
            text = input("> ").strip()
        except EOFError:
            return
        if not text:
            return
        messages.append({"role": "user", "content": text})
        chunks = client.stream_chat(model_uid, messages, **options)
        try:
            answer = read_stream(chunks, show=True)
        except KeyboardInterrupt:
            # Ends this answer, which the engine then stops computing, and not the conversation.
            chunks.close()
            messages.pop()
            click.echo()
            continue
        _summarise(answer)
        messages.append({"role": "assistant", "content": answer.text})


def _summarise(answer: Answer) -> None:
    click.secho(answer.summary(), dim=True, err=True)
