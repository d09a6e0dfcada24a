"""Examples as Megatron's samples: one example each, and a loss that counts responses alone.

Megatron's own `SFTDataset` (megatron/training/datasets/sft_dataset.py) is not used: it needs the packages
`datasets` and `transformers`, leaves prompts out of the loss for two built-in templates only, drops the end
of a response where padding is that same token, and packs examples in a form that only Transformer Engine's
attention keeps apart.

One example a sample is what keeps examples apart for every kind of layer: attention without that form, and
linear attention, which carries a state, would let one example see another. Padding lies behind the
example, where nothing causal looks.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split

from muon_offload_cli.tokens.indexed_pair import read_spans

PADDING = 0
"""Token behind an example: any of the vocabulary, since neither the loss nor an earlier token sees it."""


class ResponseDataset(MegatronDataset):  # type: ignore[misc]
    """The examples of a pair with modes (`tokens.preparation`), shuffled anew for each epoch.

    Samples have the keys of `GPTDataset`'s and a padding mask, each as long as a sequence.
    """

    def __init__(
        self,
        dataset: IndexedDataset,
        dataset_path: str | None,
        indices: npt.NDArray[np.int64],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ) -> None:
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self._bounds = dataset.document_indices
        self._order: tuple[int, npt.NDArray[np.int64]] = (-1, np.empty(0, dtype=np.int64))
        # An example whose prompt fills the sequence would teach nothing.
        firsts = read_spans(Path(str(dataset_path))).first_counted()
        self._teaching = indices[firsts[indices] <= config.sequence_length]

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: IndexedDataset) -> int:
        """Return the number of examples."""
        return len(low_level_dataset.document_indices) - 1

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> IndexedDataset:
        """Open the pair."""
        return IndexedDataset(dataset_path, multimodal=True, mmap=config.mmap_bin_files)

    def __len__(self) -> int:
        return len(self._teaching) if self.num_samples is None else self.num_samples

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """Return a sample; the order follows from seed and index alone, so that a run resumes in it."""
        epoch, place = divmod(int(index), len(self._teaching))
        if self._order[0] != epoch:
            shuffle = np.random.default_rng([self.config.random_seed, epoch])
            self._order = epoch, shuffle.permutation(self._teaching)
        sample = self._sample(int(self._order[1][place]))
        return {name: torch.from_numpy(values) for name, values in sample.items()}

    def _sample(self, document: int) -> dict[str, npt.NDArray[Any]]:
        first, last = self._bounds[document], self._bounds[document + 1]
        spans, modes = self.dataset[int(first) : int(last)]
        tokens = np.concatenate(spans)
        counted = np.repeat(np.asarray(modes), [len(span) for span in spans])
        return make_sample(tokens, counted, self.config.sequence_length)


def make_sample(
    tokens: npt.NDArray[Any], counted: npt.NDArray[Any], sequence_length: int
) -> dict[str, npt.NDArray[Any]]:
    """Lay an example out for training: each token is the label of the one before it.

    Args:
        tokens: The example, of any length; what is beyond ``sequence_length + 1`` is cut off.
        counted: 1 for each token that the loss counts.
        sequence_length: Tokens of a sample.

    Returns:
        ``tokens``, ``labels``, ``loss_mask``, ``position_ids`` and ``padding_mask``, each of
        `sequence_length`. The loss mask is the label's: the last token of a prompt counts, since it predicts
        the first of the response. The padding mask is true behind the example.
    """
    tokens, counted = tokens[: sequence_length + 1], counted[: sequence_length + 1]
    used = len(tokens) - 1
    sample: dict[str, npt.NDArray[Any]] = {
        "tokens": np.full(sequence_length, PADDING, dtype=np.int64),
        "labels": np.full(sequence_length, PADDING, dtype=np.int64),
        "loss_mask": np.zeros(sequence_length, dtype=np.float32),
        "position_ids": np.arange(sequence_length, dtype=np.int64),
        "padding_mask": np.arange(sequence_length) >= used,
    }
    sample["tokens"][:used] = tokens[:-1]
    sample["labels"][:used] = tokens[1:]
    sample["loss_mask"][:used] = counted[1:]
    return sample
