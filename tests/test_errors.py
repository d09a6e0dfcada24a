"""What is offered for pasting comes through a shell and the grammar of overrides as it was meant."""

from __future__ import annotations

import os
import shlex
import subprocess

from hypothesis import given, settings
from hypothesis import strategies as st

from muon_offload_cli.config.overrides import sort_overrides
from muon_offload_cli.errors import command, override, visible

# Two things no path is named by on purpose: a reference to another key, and spaces at its ends. What cannot
# be printed is quoted for bash alone, which takes longer to ask.
TEXTS = st.text(st.characters(exclude_categories=["C"]), min_size=1).filter(
    lambda text: "${" not in text and text.isprintable()
)


@given(TEXTS)
def test_a_text_is_the_same_after_shell_and_grammar(text: str) -> None:
    path = f"/x{text}x"
    (word,) = shlex.split(override("offload.directory", path))
    assert sort_overrides([word], {}).values == {"offload.directory": path}


@given(st.lists(TEXTS.map(lambda text: f"/{text}x"), min_size=1, max_size=3))
def test_a_list_is_the_same_after_shell_and_grammar(paths: list[str]) -> None:
    (word,) = shlex.split(override("data.paths", paths))
    assert sort_overrides([word], {}).values == {"data.paths": paths}


@settings(max_examples=20)
@given(st.lists(st.binary(min_size=1).filter(lambda text: 0 not in text), min_size=1, max_size=20))
def test_bytes_that_are_no_text_are_the_same_after_bash_and_are_printed_as_ascii(names: list[bytes]) -> None:
    texts = [os.fsdecode(name) for name in names]
    pasted = command(*(text for text in texts if not text.isprintable()))
    assert pasted.isascii() and pasted.isprintable()
    written = f"printf '%s\\0' {command(*texts)}"
    done = subprocess.run(["bash", "-c", written], stdout=subprocess.PIPE, check=True)
    assert done.stdout.split(b"\0")[:-1] == names


def test_the_fix_for_a_folder_that_is_no_text_can_be_pasted() -> None:
    name = os.fsdecode(b"/x \xff'\\\n")
    fix = override("offload.directory", name)
    assert fix == r"""$'offload.directory="/x \xff\'\\\x0a"'"""
    done = subprocess.run(["bash", "-c", f"printf %s {fix}"], stdout=subprocess.PIPE, check=True)
    assert sort_overrides([os.fsdecode(done.stdout)], {}).values == {"offload.directory": name}
    assert visible(name) == r"/x \xff'\\n"


def test_plain_words_stay_as_they_are() -> None:
    assert override("offload.directory", "/mnt/nvme0/a") == "offload.directory=/mnt/nvme0/a"
    assert override("offload.directory", ["/a", "/b"]) == "offload.directory=[/a,/b]"
    assert command("mkdir", "-p", "/a b") == "mkdir -p '/a b'"
