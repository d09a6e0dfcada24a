"""What is offered for pasting comes through a shell and the grammar of overrides as it was meant."""

from __future__ import annotations

import shlex

from hypothesis import given
from hypothesis import strategies as st

from muon_offload_cli.config.overrides import sort_overrides
from muon_offload_cli.errors import command, override

# Two things no path is named by on purpose: a reference to another key, and spaces at its ends.
TEXTS = st.text(st.characters(exclude_categories=["C"]), min_size=1).filter(lambda text: "${" not in text)


@given(TEXTS)
def test_a_text_is_the_same_after_shell_and_grammar(text: str) -> None:
    path = f"/x{text}x"
    (word,) = shlex.split(override("offload.directory", path))
    assert sort_overrides([word], {}).values == {"offload.directory": path}


@given(st.lists(TEXTS.map(lambda text: f"/{text}x"), min_size=1, max_size=3))
def test_a_list_is_the_same_after_shell_and_grammar(paths: list[str]) -> None:
    (word,) = shlex.split(override("data.paths", paths))
    assert sort_overrides([word], {}).values == {"data.paths": paths}


def test_plain_words_stay_as_they_are() -> None:
    assert override("offload.directory", "/mnt/nvme0/a") == "offload.directory=/mnt/nvme0/a"
    assert override("offload.directory", ["/a", "/b"]) == "offload.directory=[/a,/b]"
    assert command("mkdir", "-p", "/a b") == "mkdir -p '/a b'"
