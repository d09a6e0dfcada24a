"""Fine-tuning data: one example a jsonl line, either a prompt and its response or a list of chat messages.

``{"prompt": "...", "response": "..."}`` is text as it stands; ``{"messages": [{"role": "user", "content":
"..."}, ...]}`` is a chat, which gets its roles' marks from the encoder. A line with both is a chat. Other
fields are not looked at.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

from muon_offload_cli.errors import Level, Problem, UserError

MAX_PROBLEMS = 10
"""Bad lines told for one file."""

RESPONDER = "assistant"
ROLES = ("system", "user", RESPONDER, "tool")


class Message(NamedTuple):
    """One turn of a chat."""

    role: str
    content: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """What a model learns to answer.

    Attributes:
        messages: Turns in order; at least one is the assistant's, and those are what the loss counts.
        plain: Two messages, a prompt and a response, to be taken as they stand, without marks of roles.
    """

    messages: tuple[Message, ...]
    plain: bool


def read_lines[T](
    stream: BinaryIO,
    path: Path,
    parse: Callable[[bytes, str], T | Problem],
    *,
    limit_bytes: int | None = None,
) -> Iterator[tuple[int, T]]:
    """Yield the number and the content of each line that is not blank.

    Args:
        stream: The file.
        path: Its name, for problems.
        parse: Turns a line and the text "PATH line N" into its content or a problem.
        limit_bytes: Stop after that many bytes; None: read all.

    Raises:
        UserError: After the last line, with every bad line, `MAX_PROBLEMS` at most.
    """
    problems: list[Problem] = []
    seen = 0
    for number, line in enumerate(stream, start=1):
        seen += len(line)
        if line.strip():
            content = parse(line, f"{path} line {number}")
            if isinstance(content, Problem):
                problems.append(content)
                if len(problems) == MAX_PROBLEMS:
                    what = f"data.paths: {path} was not read beyond line {number}: more lines may be wrong."
                    problems.append(Problem(what=what, keys=("data.paths",), level=Level.NOTE))
                    break
            else:
                yield number, content
        if limit_bytes is not None and seen >= limit_bytes:
            break
    if problems:
        raise UserError(problems=problems)


def json_object(line: bytes, where: str, fix: str) -> dict[str, object] | Problem:
    """Return the JSON object of a line, or what is wrong with it."""
    try:
        if b"\0" in line:  # UTF-16 and UTF-32, which need not be wrong as UTF-8
            raise UnicodeError
        record = json.loads(line.decode("utf-8-sig", "surrogatepass"))
    except UnicodeError:
        what, fix = "is not UTF-8 text", "save the file as UTF-8, as iconv does"
    except json.JSONDecodeError as error:
        # A line has no lines: the number that counts is the character's.
        what = f"is not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}"
    except ValueError:
        what = f"holds a number of more than {sys.get_int_max_str_digits()} digits"
    except RecursionError:
        what = "is nested too deeply"
    else:
        if isinstance(record, dict):
            return record
        what = f"is {kind_of(record)}; one JSON object a line is expected"
    return Problem(what=f"data.paths: {where} {what}.", fix=fix, keys=("data.paths",))


_FORMS = '{"prompt": "...", "response": "..."} or {"messages": [{"role": "user", "content": "..."}, ...]}'


def parse_example(line: bytes, where: str) -> Example | Problem:
    """Return the example of a line, or what is wrong with it."""
    record = json_object(line, where, f"write the line as {_FORMS}")
    if isinstance(record, Problem):
        return record
    if "messages" in record:
        found = _chat(record["messages"])
    elif "prompt" in record or "response" in record:
        found = _pair(record)
    else:
        found = f"has neither messages nor prompt and response; it has: {', '.join(record) or 'none'}"
    if isinstance(found, str):
        fix = f"correct the line: {_FORMS}"
        return Problem(what=f"data.paths: {where} {found}.", fix=fix, keys=("data.paths",))
    return found


def _pair(record: dict[str, object]) -> Example | str:
    texts = []
    for name in ("prompt", "response"):
        if name not in record:
            return f"has no {name}"
        text = record[name]
        if not isinstance(text, str):
            return f"has a {name} that is {kind_of(text)}, not a string"
        texts.append(text)
    if not texts[1].strip():
        return "has an empty response: nothing could be learnt from it"
    return Example(messages=(Message("user", texts[0]), Message(RESPONDER, texts[1])), plain=True)


def _chat(found: object) -> Example | str:
    if not isinstance(found, list) or not found:
        return f"has messages that are {kind_of(found)}, not a list of messages"
    messages = []
    for number, message in enumerate(found, start=1):
        parsed = _message(message)
        if isinstance(parsed, str):
            return f"message {number} {parsed}"
        messages.append(parsed)
    if not any(message.role == RESPONDER for message in messages):
        return f"has no message of the {RESPONDER}: nothing could be learnt from it"
    return Example(messages=tuple(messages), plain=False)


def _message(found: object) -> Message | str:
    if not isinstance(found, dict):
        return f"is {kind_of(found)}, not an object with role and content"
    for name in ("role", "content"):
        if name not in found:
            return f"has no {name}"
        if not isinstance(found[name], str):
            return f"has a {name} that is {kind_of(found[name])}, not a string"
    role, content = found["role"], found["content"]
    if role not in ROLES:
        return f"has the role {role[:40]!r}, which is none of {', '.join(ROLES)}"
    if role == RESPONDER and not content.strip():
        return f"is an empty response of the {RESPONDER}"
    return Message(role, content)


def kind_of(value: object) -> str:
    """Name the kind of a JSON value, in JSON's words."""
    if value is None:
        return "null"
    if value in ([], {}):
        return "empty"
    if isinstance(value, bool):
        return "true or false"
    return {"dict": "an object", "list": "a list", "str": "a string"}.get(type(value).__name__, "a number")
