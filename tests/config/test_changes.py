"""What differs between two runs, as the command line takes it."""

from __future__ import annotations

from muon_offload_cli.config.changes import changes
from muon_offload_cli.config.schema import Config, Engine


def test_each_change_is_a_word_that_can_be_pasted() -> None:
    before, after = Config(recipe="a"), Config(recipe="a")
    after.offload.engine = Engine.host
    after.offload.directory = ["/nvme0/x", "/nvme1/x"]
    after.model.hf_tokenizer = False
    before.model.vocab_size = 7
    assert sorted(change.override for change in changes(before, after)) == [
        "model.hf_tokenizer=false",
        "model.vocab_size=null",
        "offload.directory=[/nvme0/x,/nvme1/x]",
        "offload.engine=host",
    ]
