"""The resolved config of a run is written and read as it is, and nothing else is read as one."""

from __future__ import annotations

from pathlib import Path

import pytest

from muon_offload_cli.config.compose import compose
from muon_offload_cli.config.yaml_files import load_config, save_config
from muon_offload_cli.errors import UserError


def test_the_resolved_config_survives_writing_and_reading(tmp_path: Path) -> None:
    config = compose(
        "tiny", ["data=text", 'data.paths=["/ü"]', "megatron.args.a-b=[1,x]", "offload=host"]
    ).config
    save_config(config, tmp_path / "resolved.yaml")
    assert load_config(tmp_path / "resolved.yaml") == config
    assert [path.name for path in tmp_path.iterdir()] == ["resolved.yaml"]


@pytest.mark.parametrize("text", ["trian: {steps: 3}\n", "train: {steps: many}\n", "[]\n", "recipe: x\n"])
def test_a_resolved_config_of_another_shape_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "resolved.yaml").write_text(text)
    with pytest.raises(UserError):
        load_config(tmp_path / "resolved.yaml")
