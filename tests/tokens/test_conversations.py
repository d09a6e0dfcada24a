"""Lines of fine-tuning data become examples, and examples tokens of which the loss counts the response."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.config.schema import DataConfig, DataSource
from muon_offload_cli.errors import Problem, UserError
from muon_offload_cli.tokens.conversations import MAX_PROBLEMS, Example, Message, parse_example
from muon_offload_cli.tokens.encoding import ByteEncoder, FolderEncoder, Span, make_encoder
from muon_offload_cli.tokens.text_corpus import find_corpus

END = 256
PAIR = Example(messages=(Message("user", "2+2="), Message("assistant", "4")), plain=True)
CHAT = Example(
    messages=(
        Message("system", "s"),
        Message("user", "a"),
        Message("assistant", "b"),
        Message("user", "c"),
        Message("assistant", "d"),
    ),
    plain=False,
)


def parsed(record: object) -> Example | Problem:
    return parse_example(json.dumps(record).encode(), "a.jsonl line 7")


def test_both_forms_are_read_and_other_fields_are_not_looked_at() -> None:
    assert parsed({"prompt": "2+2=", "response": "4", "id": 3}) == PAIR
    messages = [message._asdict() for message in CHAT.messages]
    assert parsed({"messages": messages, "prompt": 1, "source": "x"}) == CHAT


@pytest.mark.parametrize(
    ("record", "what"),
    [
        ({"prompt": "a"}, "has no response"),
        ({"response": "a"}, "has no prompt"),
        ({"prompt": "a", "response": " \n"}, "has an empty response"),
        ({"prompt": "a", "response": None}, "has a response that is null, not a string"),
        ({"prompt": 3, "response": "a"}, "has a prompt that is a number, not a string"),
        ({"text": "a"}, "has neither messages nor prompt and response; it has: text"),
        ({}, "it has: none"),
        ([], "is empty; one JSON object a line is expected"),
        ({"messages": []}, "has messages that are empty, not a list"),
        ({"messages": {"role": "user"}}, "has messages that are an object, not a list"),
        ({"messages": ["hi"]}, "message 1 is a string, not an object"),
        ({"messages": [{"role": "user"}]}, "message 1 has no content"),
        ({"messages": [{"content": "x"}]}, "message 1 has no role"),
        (
            {"messages": [{"role": "user", "content": "x"}, {"role": "bot", "content": "y"}]},
            "message 2 has the role 'bot', which is none of system, user, assistant, tool",
        ),
        ({"messages": [{"role": "assistant", "content": None}]}, "message 1 has a content that is null"),
        ({"messages": [{"role": "assistant", "content": [{"text": "x"}]}]}, "content that is a list"),
        ({"messages": [{"role": "assistant", "content": ""}]}, "message 1 is an empty response"),
        ({"messages": [{"role": "user", "content": "x"}]}, "has no message of the assistant"),
    ],
)
def test_a_bad_line_is_told_with_its_place(record: object, what: str) -> None:
    problem = parsed(record)
    assert isinstance(problem, Problem)
    assert problem.what.startswith("data.paths: a.jsonl line 7 ")
    assert what in problem.what
    assert problem.fix
    assert problem.keys == ("data.paths",)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["prompt", "response", "messages", "role", "content"]) | st.text(max_size=3),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_any_json_is_an_example_or_a_problem(record: object) -> None:
    found = parsed(record)
    assert isinstance(found, Problem) or any(message.role == "assistant" for message in found.messages)


def chat_file(path: Path, *lines: str) -> DataConfig:
    path.write_text("\n".join(lines) + "\n")
    return DataConfig(source=DataSource.chat, paths=[str(path)])


def test_all_bad_lines_in_the_part_that_is_looked_at_are_told_and_none_beyond_it(tmp_path: Path) -> None:
    data = chat_file(tmp_path / "a.jsonl", '{"prompt": "p", "response": "r"}', "{", "", "[]", "{}")
    corpus = find_corpus(data)
    told = [problem.what for problem in corpus.look(10**6)]
    assert [what.split(" ")[3] for what in told] == ["2", "4", "5"]
    assert str(tmp_path / "a.jsonl") in told[0]
    assert "is not JSON" in told[0]
    assert corpus.look(20) == []
    assert len(find_corpus(chat_file(tmp_path / "b.jsonl", *["x"] * 50)).look(10**6)) == MAX_PROBLEMS + 1
    with pytest.raises(UserError, match="line 2 is not JSON"):
        list(corpus.examples())


@pytest.mark.parametrize(
    ("line", "what", "fix"),
    [
        (b'{"prompt": "a", }\n', "is not JSON: Expecting property name enclosed in double quotes", "write"),
        (b'{"prompt": "a"\n', "is not JSON: Expecting ',' delimiter at character 16.", "write"),
        (b'{"prompt": "a\tb"}', "is not JSON: Invalid control character at character 14.", "write"),
        (b"true", "is true or false; one JSON object a line is expected.", "write"),
        (b'{"id": ' + b"9" * 5000 + b"}", "holds a number of more than 4300 digits.", "write"),
        (b"[" * 200_000, "is nested too deeply.", "write"),
        ('{"prompt": "é"}'.encode("latin-1"), "is not UTF-8 text.", "save the file as UTF-8"),
        ('{"prompt": "e"}'.encode("utf-16"), "is not UTF-8 text.", "save the file as UTF-8"),
        ('{"prompt": "e"}'.encode("utf-16-le"), "is not UTF-8 text.", "save the file as UTF-8"),
    ],
)
def test_a_line_that_is_no_json_is_told_in_words_about_the_line(line: bytes, what: str, fix: str) -> None:
    problem = parse_example(line, "a.jsonl line 2")
    assert isinstance(problem, Problem)
    assert problem.what.startswith(f"data.paths: a.jsonl line 2 {what}")
    assert problem.what.count("line 2") == 1
    assert problem.fix.startswith(fix)


def test_a_file_that_begins_with_a_byte_order_mark_of_utf_8_is_read() -> None:
    assert parse_example('{"prompt": "2+2=", "response": "4"}'.encode("utf-8-sig"), "a") == PAIR


def test_blank_lines_alone_are_told_before_anything_starts(tmp_path: Path) -> None:
    blank = chat_file(tmp_path / "a.jsonl", "", "  ")
    assert [problem.what for problem in find_corpus(blank).look(10**6)] == [
        f"data.paths: no example in {tmp_path / 'a.jsonl'}."
    ]
    assert find_corpus(blank).look(1) == []
    blank.paths.append(*chat_file(tmp_path / "b.jsonl", '{"prompt": "p", "response": "r"}').paths)
    assert find_corpus(blank).look(10**6) == []


def test_bytes_of_a_pair_stand_as_they_are_and_an_end_of_the_response_counts() -> None:
    assert ByteEncoder().encode(PAIR) == [Span([*b"2+2="], False), Span([*b"4", END], True)]
    empty = Example(messages=(Message("user", ""), Message("assistant", "4")), plain=True)
    assert ByteEncoder().encode(empty) == [Span([*b"4", END], True)]


def test_in_a_chat_of_bytes_only_the_assistant_s_words_count() -> None:
    assert ByteEncoder().encode(CHAT) == [
        Span([*b"system: s\nuser: a\nassistant: "], False),
        Span([*b"b", END], True),
        Span([*b"user: c\nassistant: "], False),
        Span([*b"d", END], True),
    ]


class LetterTokenizer:
    """What the encoder needs of a `transformers` tokenizer: a token a letter, and a template of marks."""

    eos_token_id = 999
    chat_template: str | None = "marks"

    def __init__(self, *, forgets: bool = False) -> None:
        self.forgets = forgets

    def __len__(self) -> int:
        return 1000

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [1] * add_special_tokens + [ord(letter) for letter in text]

    def apply_chat_template(
        self, messages: list[dict[str, Any]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        turns = [f"<{message['role'][0]}>{message['content']}|" for message in messages]
        if self.forgets:
            turns[:-2] = ["..." for _ in turns[:-2]]
        return "".join(turns) + "<a>" * add_generation_prompt


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def test_the_folder_s_tokenizer_begins_a_prompt_and_its_end_of_text_ends_a_response() -> None:
    encoder = FolderEncoder(LetterTokenizer(), "id")
    assert encoder.encode(PAIR) == [Span([1, *letters("2+2=")], False), Span([ord("4"), 999], True)]


def test_the_folder_s_template_marks_roles_and_what_it_writes_for_a_response_counts() -> None:
    assert FolderEncoder(LetterTokenizer(), "id").encode(CHAT) == [
        Span(letters("<s>s|<u>a|<a>"), False),
        Span(letters("b|"), True),
        Span(letters("<u>c|<a>"), False),
        Span(letters("d|"), True),
    ]


def test_a_template_that_rewrites_earlier_turns_is_refused_with_the_message() -> None:
    with pytest.raises(ValueError, match="message 3 is written differently"):
        FolderEncoder(LetterTokenizer(forgets=True), "id").encode(CHAT)


def test_a_tokenizer_without_a_template_or_an_end_of_text_is_refused() -> None:
    tokenizer = LetterTokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        FolderEncoder(tokenizer, "id").encode(CHAT)
    tokenizer.eos_token_id = None  # type: ignore[assignment]
    with pytest.raises(UserError, match="eos_token"):
        FolderEncoder(tokenizer, "id")


def test_a_folder_without_a_tokenizer_or_without_the_package_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        make_encoder(tmp_path)
    assert str(tmp_path) in caught.value.problems[0].what
    assert caught.value.problems[0].fix
