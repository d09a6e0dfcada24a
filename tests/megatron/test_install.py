"""`muon_offload_cli.install` in a program of the user's own, with optimizers that Megatron builds."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import muon_offload_cli
from muon_offload_cli.errors import UserError
from muon_offload_cli.offload.plan import Tier
from muon_offload_cli.units import GIB
from tests.fakes.drive import directory_on_a_drive
from tests.megatron.small_actor import STATE_BYTES, Actor, build, files_held, one_rank

MATRIX_BYTES = STATE_BYTES // 3
ONE_MATRIX_MB = MATRIX_BYTES / 2**20


@pytest.fixture(scope="module", autouse=True)
def world() -> Iterator[None]:
    with one_rank():
        yield


@pytest.fixture(autouse=True)
def without_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return directory_on_a_drive(tmp_path) / "state"


def install(folder: Path, **more: Any) -> Any:
    return muon_offload_cli.install(directory=folder, chunk_mb=ONE_MATRIX_MB, **more)


def held_by(actor: Actor, tier: Tier) -> int:
    (child,) = actor.optimizer.chained_optimizers
    return int(child.offloader.stored_bytes(tier))


def matrices(actor: Actor, tier: Tier) -> int:
    return held_by(actor, tier) // MATRIX_BYTES


def test_policy_and_critic_train_as_without_it_each_from_a_file_of_its_own(folder: Path) -> None:
    resident = [build(seed) for seed in (1, 2)]
    with install(folder) as installation:
        actors = [build(seed) for seed in (1, 2)]
        stores = [optimizer.offloader.stores[Tier.DISK] for optimizer in installation.optimizers]
        assert [store.size for store in stores] == [STATE_BYTES] * 2
        assert stores[0].fd != stores[1].fd
        for turn in (0, 1, 1, 0, 1, 0):
            actors[turn].step()
            resident[turn].step()
        assert [optimizer.offloader.sweeps for optimizer in installation.optimizers] == [3, 3]
        for ours, theirs in zip(actors, resident, strict=True):
            assert all(map(torch.equal, ours.weights, theirs.weights))


def test_optimizers_of_one_process_share_its_host_memory_and_return_it(folder: Path) -> None:
    with install(folder, host_memory_gb=4 * MATRIX_BYTES / GIB):
        policy, critic, third = build(), build(), build()
        assert [matrices(actor, Tier.HOST) for actor in (policy, critic, third)] == [3, 1, 0]
        assert [matrices(actor, Tier.DISK) for actor in (policy, critic, third)] == [0, 2, 3]
        del policy
        gc.collect()
        fourth = build()
        assert matrices(fourth, Tier.HOST) == 3
        fourth.step()


def test_closing_leaves_no_bytes_and_no_threads_while_the_models_live_on(folder: Path) -> None:
    threads = threading.active_count()
    installation = install(folder, host_memory_gb=MATRIX_BYTES / GIB)
    policy = build()
    policy.step()
    assert files_held(folder)
    installation.close()
    assert files_held(folder) == []
    assert threading.active_count() == threads
    assert installation.optimizers == []
    assert all(parameter.main_param.isnan().all() for parameter in policy.model.parameters())
    installation.close()


def test_dropping_an_optimizer_leaves_no_bytes_of_it_while_its_model_lives_on(folder: Path) -> None:
    with install(folder) as installation:
        policy, critic = build(1), build(2)
        model = policy.model
        policy.step()
        del policy
        gc.collect()
        (left,) = installation.optimizers
        assert left is critic.optimizer.chained_optimizers[0]
        critic.step()
        assert files_held(folder)
        del critic, left
        gc.collect()
        assert files_held(folder) == []
        assert all(parameter.main_param.isnan().all() for parameter in model.parameters())


def test_the_same_arguments_again_change_nothing(folder: Path) -> None:
    with install(folder) as first:
        assert install(folder) is first
        build().step()
        assert install(folder) is first


def test_other_arguments_are_refused_until_the_first_installation_is_closed(folder: Path) -> None:
    told = r"engine=host, and disk is in use; windows=3, and 2 is .*; directory=none, and /.*/state is in use"
    with install(folder, windows=2), pytest.raises(UserError, match=told):
        muon_offload_cli.install(engine="host", chunk_mb=ONE_MATRIX_MB)
    told = r"chunk_mb=0, and [0-9.]+ is in use; host_memory_gb=2 a rank, and 0 a rank is in use\."
    with install(folder), pytest.raises(UserError, match=told):
        muon_offload_cli.install(directory=folder, chunk_mb=0, host_memory_gb=2)
    with muon_offload_cli.install(engine="host") as second:
        assert held_by(build(), Tier.HOST) == STATE_BYTES
        assert second.settings.engine == "host"


@pytest.mark.parametrize(("local", "share"), [(None, 64), ("1", 64), ("4", 16)])
def test_the_host_memory_is_a_nodes_and_shared_by_its_ranks(
    folder: Path, monkeypatch: pytest.MonkeyPatch, local: str | None, share: int
) -> None:
    if local is not None:
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local)
    with install(folder, host_memory_gb=64) as installation:
        assert installation.settings.host_bytes == share * GIB
    with install(folder, host_memory_gb=64, ranks_per_node=8) as installation:
        assert installation.settings.host_bytes == 8 * GIB


def test_a_broken_local_world_size_is_told_with_what_to_pass_instead(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "four")
    with pytest.raises(UserError, match="ranks_per_node"):
        install(folder)


def test_faults_of_several_arguments_are_told_at_once_as_sentences(folder: Path) -> None:
    with pytest.raises(UserError) as refused:
        install(folder, windows=2.5, host_memory_gb="auto")
    assert str(refused.value) == (
        "install(host_memory_gb='auto'): want 0 or more GiB. "
        "install(windows=2.5): want a whole number of 1 or more."
    )
